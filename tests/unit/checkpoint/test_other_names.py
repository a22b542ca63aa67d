# SPDX-License-Identifier: Apache-2.0
"""Classes that have other names for a checkpoint's modules than the one it was written from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from tests.support import tiny_checkpoints as tiny
from tests.unit.checkpoint.test_parts import assert_reads_as, config_of, logits, qwen

from llmcompressor import model_free_ptq, oneshot, verify
from llmcompressor.checkpoint.generic_model import build_tree, tied_pair
from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.source import TensorHeader, inspect_source
from llmcompressor.modifiers.quantization import QuantizationModifier


def llava(folder: Path) -> Path:
    """A vision-language model whose names in the file are not those of its class."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "model_type": "llama", "vocab_size": 96, "num_key_value_heads": 2}
    sight = {**sizes, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
    config = hf.LlavaConfig(
        text_config={**text, "hidden_size": 32, "intermediate_size": 64},
        vision_config={**sight, "hidden_size": 16, "intermediate_size": 32},
        image_token_index=4,
    )
    hf.LlavaForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    return folder


def assert_nothing_is_torn(folder: Path, model: Any, quantized: set[str]) -> None:
    """By the names of a class, what holds codes is meant and not ignored, and nothing else is."""
    settings = config_of(folder)["quantization_config"]

    def meant(name: str, entries: list[str]) -> bool:
        patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
        return name in entries or any(re.match(one, name) for one in patterns)

    targets = [one for group in settings["config_groups"].values() for one in group["targets"]]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            is_meant = "Linear" in targets or meant(name, targets)
            is_meant = is_meant and not meant(name, settings["ignore"])
            assert is_meant == (name in quantized), name


@pytest.mark.parametrize("targets", [["Linear"], ["names"], [r"re:model\.language_model\..*mlp.*"]])
def test_the_text_class_finds_what_is_plain_and_what_is_not(
    targets: list[str], tmp_path: Path
) -> None:
    source = qwen(tmp_path / "source")
    names = [
        f"model.language_model.layers.{layer}.mlp.{own}"
        for layer in (0, 1)
        for own in ("gate_proj", "up_proj", "down_proj")
    ]
    recipe = QuantizationModifier(
        targets=names if targets == ["names"] else targets,
        scheme="FP8_DYNAMIC",
        ignore=["re:.*lm_head", "re:.*visual.*", "re:.*linear_attn.*", "re:.*self_attn.*"],
    )
    model = oneshot(model=str(source), recipe=recipe, output_dir=tmp_path / "out")
    text = hf.AutoModelForCausalLM.from_pretrained(source)
    own = {name.replace(".language_model", "") for name in names}
    assert_nothing_is_torn(tmp_path / "out", text, own)
    whole = hf.Qwen3_5ForConditionalGeneration.from_pretrained(source)
    assert_nothing_is_torn(tmp_path / "out", whole, {*names})
    for kind in (hf.AutoModelForCausalLM, hf.Qwen3_5ForConditionalGeneration):
        assert_reads_as(tmp_path / "out", kind, logits(model))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A16"])
def test_files_alone_are_quantized_for_the_names_of_their_class(
    scheme: str, tmp_path: Path
) -> None:
    source = llava(tmp_path / "source")
    ignore = ["re:.*lm_head", "re:vision_tower.*", "re:.*multi_modal_projector.*"]
    model_free_ptq(source, tmp_path / "out", scheme=scheme, ignore=ignore)
    kind = hf.LlavaForConditionalGeneration
    model = kind.from_pretrained(source, dtype=torch.bfloat16)
    quantized = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".language_model." in name
    }
    assert_nothing_is_torn(tmp_path / "out", model, quantized)
    read, info = kind.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = model.state_dict()
    for name, tensor in read.state_dict().items():
        if "vision_tower" in name or "projector" in name:
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_in_no_file_is_ignored_by_its_class_s_name(has_bias: bool, tmp_path: Path) -> None:
    """Not all tied heads are called ``lm_head``; one that is not ignored is looked for packed."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    kind: Any = hf.ModernBertDecoderForCausalLM if has_bias else hf.BioGptForCausalLM
    head = "decoder" if has_bias else "output_projection"
    source = tmp_path / "source"
    kind(kind.config_class(**sizes, tie_word_embeddings=True)).bfloat16().save_pretrained(source)
    model_free_ptq(source, tmp_path / "out", scheme="FP8_DYNAMIC")
    assert head in config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert verify(tmp_path / "out").ok
    read, original = (kind.from_pretrained(one, dtype="auto") for one in (tmp_path / "out", source))
    weights = (one.get_submodule(head).weight for one in (read, original))
    assert torch.equal(*weights)
    assert (logits(read) - logits(original)).abs().max() < 0.1

    config = config_of(tmp_path / "out")
    config["quantization_config"]["ignore"].remove(head)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert [
        (one.rule, one.module)
        for one in verify(tmp_path / "out").findings
        if one.severity == "error"
    ] == [("T4", head)]


def test_full_experts_are_read_beside_what_is_packed(tmp_path: Path) -> None:
    """transformers stacks them, and would look for codes of each."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    source = tmp_path / "source"
    model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **heads)).bfloat16()
    model.save_pretrained(source)
    ignore = ["lm_head", "re:.*experts.*"]
    model_free_ptq(source, tmp_path / "out", scheme="W8A16", ignore=ignore)
    assert verify(tmp_path / "out", serve="transformers").ok
    read, info = hf.MixtralForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert (logits(read) - logits(model)).abs().max() < 0.1


def test_what_is_ignored_by_its_file_name_alone_is_told(
    tmp_path: Path,
) -> None:
    ignore = ["re:.*lm_head", "re:vision_tower.*", "re:.*multi_modal_projector.*"]
    source, folder = llava(tmp_path / "source"), tmp_path / "out"
    model_free_ptq(source, folder, scheme="FP8_DYNAMIC", ignore=ignore)
    assert verify(folder).ok
    own = "model.vision_tower.encoder.layers.0.mlp.fc1"
    config = config_of(folder)
    config["quantization_config"]["ignore"].remove(own)
    (folder / "config.json").write_text(json.dumps(config))
    found = [one for one in verify(folder).findings if one.rule == "T4"]
    assert [(one.module, one.remedy) for one in found] == [
        (own.removeprefix("model."), f"Add {own} to ignore.")
    ]


def test_a_plain_model_has_no_other_names(tmp_path: Path) -> None:
    model = tiny.llama()
    assert NameMap(model).in_loaders == {}
    model.save_pretrained(tmp_path)
    source = inspect_source(tmp_path)
    tree = build_tree(source, source.tensors).model
    assert not any(NameMap(tree).in_loaders.values())


def test_of_classes_that_are_not_known_there_are_no_other_names(tmp_path: Path) -> None:
    folder = llava(tmp_path)
    source = inspect_source(folder)
    tree = build_tree(source, source.tensors).model
    name = "vision_tower.encoder.layers.0.mlp.fc1"
    assert NameMap(tree).in_loaders[name] == (f"model.{name}",)
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"llava"', '"llava_of_tomorrow"'))
    assert NameMap(tree).loaders == ()
    assert NameMap(tree).in_loaders == {}


def test_linears_named_like_an_embedding_are_doubtful(tmp_path: Path) -> None:
    names = ("patch_embedding", "embed_tokens_per_layer", "embedding_projection", "embed_out", "fc")
    save_file(
        {f"a.{name}.weight": torch.ones(4, 4) for name in names}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    source = inspect_source(tmp_path)
    tree = build_tree(source, source.tensors).model
    assert tree.doubtful == ["a.embed_tokens_per_layer", "a.patch_embedding"]


@pytest.mark.parametrize("outside", ["", "language_model."])
def test_an_unstored_tied_head_stands_beside_its_embedding(
    outside: str,
) -> None:
    table = f"{outside}model.embed_tokens"
    headers = {f"{table}.weight": TensorHeader("BF16", (96, 4), Path("model.safetensors"))}
    config = {"tie_word_embeddings": True, "vocab_size": 96}
    assert tied_pair(config, headers) == (f"{outside}lm_head", table)
