# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from tests.support import tiny_checkpoints as tiny
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import llmcompressor
from llmcompressor.checkpoint.load import (
    check_unquantized,
    load_model,
    parse_precision,
    untie_embeddings,
)
from llmcompressor.checkpoint.meta_model import build_meta_model
from llmcompressor.checkpoint.quantization_config import existing_quantization
from llmcompressor.checkpoint.save import save_checkpoint
from llmcompressor.checkpoint.side_files import load_processor
from llmcompressor.checkpoint.source import inspect_source, local_directory
from llmcompressor.errors import CheckpointError
from llmcompressor.evaluation.models import load_for_evaluation
from llmcompressor.schemes.presets import preset_scheme
from llmcompressor.utils import load_context

PICO = Path(llmcompressor.__file__).parent / "data" / "pico-stdlib"


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return tiny.save_dense(tiny.llama(), tmp_path / "dense")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )


def whisper() -> PreTrainedModel:
    sizes = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=64, d_model=32, **sizes, **tokens)
    )


def test_evaluation_mode_and_own_dtype(dense: Path) -> None:
    model = load_model(dense)
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert model.dtype is torch.bfloat16


def test_precision(dense: Path) -> None:
    dtypes = {"auto": "auto", "anything": "auto", "half": torch.float16, "full": torch.float32}
    dtypes |= {"torch.float16": torch.float16, "bfloat16": torch.bfloat16}
    assert {name: parse_precision(name) for name in dtypes} == dtypes
    assert load_model(dense, precision="half").dtype is torch.float16
    assert load_model(dense, precision=torch.float32).dtype is torch.float32


def test_the_class_that_the_checkpoint_names(tmp_path: Path) -> None:
    config = tiny.llama().config
    heads = [cls(config) for cls in (LlamaModel, LlamaForSequenceClassification)]
    for number, model in enumerate([t5(), whisper(), *heads]):
        model.save_pretrained(tmp_path / str(number))
        assert type(load_model(tmp_path / str(number))) is type(model)


def test_missing_tensors_are_never_random(dense: Path) -> None:
    file = dense / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj\.weight"):
        load_model(dense)


@pytest.mark.parametrize(
    "read", [load_model, lambda folder: build_meta_model(inspect_source(folder))]
)
def test_tensors_of_other_shapes_are_named(dense: Path, read: Any) -> None:
    edit_config(dense, intermediate_size=64)
    with pytest.raises(
        CheckpointError, match=r"tensor model\.layers\.0\.mlp\.down_proj\.weight .* 5 more have"
    ):
        read(dense)


def test_an_unknown_dtype_is_named(dense: Path) -> None:
    readers: list[Any] = [load_model, lambda folder: build_meta_model(inspect_source(folder))]
    readers.append(lambda folder: load_for_evaluation(folder, trust_remote_code=False))
    for dtype, read in (("auto", readers[0]), ("bf16", readers[1]), ("bf16", readers[2])):
        edit_config(dense, dtype=dtype)
        expected = rf"config\.json of .* says that the dtype is '{dtype}'.* such as bfloat16"
        with pytest.raises(CheckpointError, match=expected):
            read(dense)


def test_unknown_architecture(dense: Path) -> None:
    edit_config(dense, model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(CheckpointError, match="no_such_model"):
        load_model(dense)


def test_untying(tmp_path: Path) -> None:
    folder = tiny.save_dense(tiny.llama(tied=True), tmp_path / "m")
    model = load_model(folder, tie_word_embeddings=False)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is not embedding
    assert torch.equal(head, embedding)
    assert model.config.tie_word_embeddings is False
    head.data.zero_()
    model.tie_weights()
    assert not torch.equal(model.lm_head.weight, embedding)
    assert untie_embeddings(model) is False


def test_already_quantized(tmp_path: Path) -> None:
    model = tiny.quantize_model(tiny.llama(), {"g": preset_scheme("W4A16", ["Linear"])})
    check_unquantized(model)
    save_checkpoint(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already quantized by compressed-tensors"):
        load_model(tmp_path / "out")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match="already quantized by compressed-tensors"):
        check_unquantized(read)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache that holds one model, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "cache"
    repository = cache / "models--some-owner--some-model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(PICO, snapshot)
    return cache


def test_hub_id(hub: Path, tmp_path: Path) -> None:
    model = load_model("some-owner/some-model", cache_dir=hub)
    assert model.config.name_or_path == "some-owner/some-model"
    folder = local_directory("some-owner/some-model", cache_dir=hub)
    assert folder is not None
    save_checkpoint(model, tmp_path / "out", source=folder)
    for name in ("tokenizer.json", "training.json"):
        assert (tmp_path / "out" / name).read_bytes() == (PICO / name).read_bytes()
    loaded = load_processor(None, "some-owner/some-model", cache_dir=hub)
    assert loaded.processor("def")["input_ids"]


class TestProcessor:
    def test_none_is_a_reason_not_an_error(self, dense: Path) -> None:
        loaded = load_processor(None, dense)
        assert loaded.processor is None
        assert str(dense) in loaded.reason
        assert load_processor(None, None).reason

    def test_one_that_was_asked_for_is_an_error(self, dense: Path) -> None:
        with pytest.raises(CheckpointError, match="No tokenizer"):
            load_processor(str(dense), PICO)


PRUNED = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense"}}
"""What earlier releases wrote of a model that is only pruned."""


@pytest.mark.parametrize("settings", [{}, PRUNED, {**PRUNED, "config_groups": {}, "ignore": []}])
def test_a_quantization_config_may_say_nothing(dense: Path, settings: dict[str, Any]) -> None:
    edit_config(dense, quantization_config=settings)
    models = [load_model(dense), build_meta_model(inspect_source(dense)).model]
    with load_context(LlamaForCausalLM):
        models.append(LlamaForCausalLM.from_pretrained(dense))
    for model in models:
        assert not hasattr(model.config, "quantization_config")
        assert model.state_dict().keys() == models[0].state_dict().keys()


@pytest.mark.parametrize(
    "settings",
    [
        {**PRUNED, "sparsity_config": {"format": "sparse-24-bitmask"}},
        {**PRUNED, "format": "marlin-24", "config_groups": {"group_0": {"targets": ["Linear"]}}},
        {**PRUNED, "config_groups": {"group_0": {"format": "marlin-24"}}},
    ],
)
def test_formats_that_are_no_longer_read_are_refused_by_name(
    dense: Path, settings: dict[str, Any]
) -> None:
    edit_config(dense, quantization_config=settings)
    measured = partial(load_for_evaluation, trust_remote_code=False)
    for read in (load_model, partial(load_model, unpacks=True), inspect_source, measured):
        with pytest.raises(CheckpointError, match=r"24.*dropped"):
            read(dense)
    with load_context(LlamaForCausalLM), pytest.raises(CheckpointError, match=r"24.*dropped"):
        LlamaForCausalLM.from_pretrained(dense)
    with pytest.raises(CheckpointError, match=r"24.*dropped"):
        existing_quantization("it", {"quantization_config": settings})
