# SPDX-License-Identifier: Apache-2.0
"""A checkpoint against its original: bounds of rounding, names that differ, what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.checkpoint_samples import EXPERTS, Sample, dense, made, sparse
from tests.support.thinned import few, thinned
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from llmcompressor import verify
from llmcompressor.errors import CheckpointError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.schemes.presets import PRESETS
from llmcompressor.verification import Severity

FORMATS = [
    "W4A16",
    "W4A16_ASYM",
    "W3A16",
    "W8A16",
    "W8A8",
    "W4A8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4",
    "MXFP4",
    "MXFP8",
    *(name for name in ("MXFP6A16",) if name in PRESETS),
]
UNLIKE = ["W4A16_ASYM", "W3A16", "W8A8", "FP8_BLOCK", "NVFP4", "MXFP4", *FORMATS[11:]]
"""One for each way in which codes, scales and zero points are stored."""
UP = "model.layers.1.mlp.up_proj"
RECIPE = b"quant_stage:\n  quant_modifiers:\n    QuantizationModifier:\n      targets: [Linear]\n"


def bad(checkpoint: Path, reference: Path) -> set[tuple[str, str]]:
    report = verify(checkpoint, reference, tp=1)
    return {(one.rule, one.module) for one in report.findings if one.severity is Severity.ERROR}


def plain(sample_of: Callable[..., Sample], *arguments: object, **more: object) -> Sample:
    """The original of a made sample: the same weights, none of them quantized."""
    found = sample_of(*arguments, only=lambda name: False, **more)
    del found.config["quantization_config"]
    return found


def octets_of(sample: Sample) -> torch.Tensor:
    """The stored codes of one Linear, which can be changed through it."""
    name = f"{UP}.weight_packed" if f"{UP}.weight_packed" in sample.tensors else f"{UP}.weight"
    return sample.tensors[name].view(torch.uint8)


def with_a_row_of(size: float, model: Path, folder: Path) -> Path:
    """A copy of a model in which one row of that Linear has values of about this size."""
    source = Sample.read(model)
    rows = source.tensors[f"{UP}.weight"]
    rows[5] = (rows[5].float() / rows[5].float().std() * size).to(rows.dtype)
    return source.write(folder)


@pytest.mark.parametrize("preset", few(FORMATS, *UNLIKE))
def test_one_wrong_code_is_found(
    preset: str, llama_folder: Path, compressed: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme=preset, ignore=["lm_head"])
    sample = Sample.read(compressed(llama_folder, recipe))
    good = sample.write(tmp_path / "good")
    unserved = {("S21", "group_0")} if preset.startswith("MXFP6") else set()
    assert bad(good, llama_folder) == unserved
    octets = octets_of(sample)
    # the second lowest bit: two steps of the grid, of the first code of the third row
    octets[2, 0] ^= 2
    assert bad(sample.write(tmp_path / "bad"), llama_folder) == {("R3", UP), *unserved}


@pytest.mark.parametrize(
    ("preset", "size"), thinned(["FP8", "NVFP4A16", "FP8_BLOCK"], [1e-30, 1e-12])
)
def test_a_row_that_is_nothing_beside_others_of_its_scale(
    size: float, preset: str, llama_folder: Path, compressed: Callable[..., Path], tmp_path: Path
) -> None:
    original = with_a_row_of(size, llama_folder, tmp_path / "source")
    fields: dict[str, object] = {"scheme": preset}
    if preset == "FP8":
        weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
        fields = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    recipe = QuantizationModifier(ignore=["lm_head"], **fields)
    sample = Sample.read(compressed(original, recipe))
    assert bad(sample.write(tmp_path / "good"), original) == set()
    octets_of(sample)[6] = 0
    assert bad(sample.write(tmp_path / "bad"), original) == {("R3", UP)}


def test_an_original_with_experts_in_one_stack(tmp_path: Path) -> None:
    """Stacks [experts, 2 * inner, hidden], whose quantized experts are stored one by one."""
    shapes = sparse()
    checkpoint = made(shapes, "W8A16", model_type="qwen3_moe", num_experts=EXPERTS)
    checkpoint.files["recipe.yaml"] = RECIPE
    for turned in (False, True):
        source = plain(made, shapes, model_type="qwen3_moe", num_experts=EXPERTS)
        for index in range(2):
            path = f"model.layers.{index}.mlp.experts"
            own = [source.own(f"{path}.{each}.gate_proj")["weight"] for each in range(EXPERTS)]
            up = [source.own(f"{path}.{each}.up_proj")["weight"] for each in range(EXPERTS)]
            down = [source.own(f"{path}.{each}.down_proj")["weight"] for each in range(EXPERTS)]
            source.drop(f"{path}.")
            both = [torch.cat(pair) for pair in zip(own, up, strict=True)]
            stacks = {"gate_up_proj": torch.stack(both), "down_proj": torch.stack(down)}
            for name, stack in stacks.items():
                source.tensors[f"{path}.{name}"] = stack.mT if turned else stack
        reference = source.write(tmp_path / f"source-{turned}")
        assert not bad(checkpoint.write(tmp_path / "good"), reference)
        wrong = checkpoint.copy()
        ours, theirs = ("model.layers.0.mlp.experts." + own for own in ("1.up_proj", "2.up_proj"))
        for own in wrong.own(ours):
            wrong.tensors[f"{ours}.{own}"] = checkpoint.tensors[f"{theirs}.{own}"]
        assert bad(wrong.write(tmp_path / "bad"), reference) == {("R3", ours)}


def test_names_of_other_versions_are_the_same_tensors(tmp_path: Path) -> None:
    source = plain(made, dense())
    renamed = source.copy()
    for name in list(renamed.tensors):
        if name.startswith("model."):
            renamed.tensors[f"model.language_{name}"] = renamed.tensors.pop(name)
    checkpoint = made(dense(), "W8A16").write(tmp_path / "checkpoint")
    assert not bad(checkpoint, renamed.write(tmp_path / "renamed"))


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    source = plain(made, dense(), tie_word_embeddings=True)
    source.drop("lm_head.")
    reference = source.write(tmp_path / "source")
    checkpoint = made(dense(), "W8A16", tie_word_embeddings=True)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"].clone()
    assert not bad(checkpoint.write(tmp_path / "stored"), reference)
    checkpoint.drop("lm_head.")
    assert not bad(checkpoint.write(tmp_path / "left-out"), reference)


def test_an_untied_head_that_is_not_the_embedding_is_an_error(tmp_path: Path) -> None:
    source = plain(made, dense(), tie_word_embeddings=True)
    source.drop("lm_head.")
    checkpoint = made(dense(), "W8A16", tie_word_embeddings=False)
    found = bad(checkpoint.write(tmp_path / "checkpoint"), source.write(tmp_path / "source"))
    assert found == {("R4", "lm_head.weight")}


def test_a_quantized_reference_is_refused(tmp_path: Path) -> None:
    folder = made(dense(), "W4A16").write(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="is quantized itself"):
        verify(folder, folder)


def test_the_error_is_that_of_the_weights(tmp_path: Path) -> None:
    """Relative error and cosine, against a calculation over whole matrices."""
    source = plain(made, dense())
    report = verify(
        made(dense(), "W4A16").write(tmp_path / "checkpoint"), source.write(tmp_path / "source")
    )
    by_module = {one.module: one for one in report.errors}
    weight = source.tensors[f"{UP}.weight"].float()
    groups = weight.reshape(len(weight), -1, 128)
    scale = (groups.abs().amax(-1, keepdim=True) * 2 / 15).bfloat16().float()
    again = ((groups / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)
    expected = float((again - weight).norm() / weight.norm())
    assert by_module[UP].relative == pytest.approx(expected, rel=0.02)
    cosine = torch.nn.functional.cosine_similarity(again.flatten(), weight.flatten(), dim=0)
    assert by_module[UP].cosine == pytest.approx(float(cosine), abs=1e-3)


@pytest.mark.parametrize(
    ("modifiers", "holds", "other"),
    [
        ("LogarithmicEqualizationModifier", set(), {("R3", UP)}),
        ("ModifierOfOthers", set(), {("R3", UP)}),
        ("QuantizationModifier", {("R3", UP)}, {("R3", UP)}),
    ],
)
def test_columns_that_were_scaled_are_not_another_weight(
    modifiers: str, holds: set[object], other: set[object], tmp_path: Path
) -> None:
    """Where that may have been done: the error is large then, and the direction nearly the same."""
    checkpoint, source = made(dense(), "W8A16"), plain(made, dense())
    recipe = f"one_stage:\n  one_modifiers:\n    {modifiers}: {{}}\n"
    checkpoint.files["recipe.yaml"] = recipe.encode()
    folder = checkpoint.write(tmp_path / "checkpoint")
    weight = source.tensors[f"{UP}.weight"]
    source.tensors[f"{UP}.weight"] = weight / torch.linspace(2, 5, weight.shape[1]).to(weight)
    assert bad(folder, source.write(tmp_path / "scaled")) == holds
    source.tensors[f"{UP}.weight"] = torch.randn_like(weight)
    assert bad(folder, source.write(tmp_path / "other")) == other


@pytest.fixture(scope="module")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original with gate, q, k and v in one tensor, and gate and up, which are modules here."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "hrm_text",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_layers_per_stack=1,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=32,
        H_cycles=1,
        L_cycles=1,
        L_bp_cycles=[1],
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("split")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_modules_that_are_one_tensor_in_the_original(
    split_folder: Path, compressed: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    sample = Sample.read(compressed(split_folder, recipe))
    assert not bad(sample.write(tmp_path / "good"), split_folder)
    layer = "model.H_module.layers.0"
    sample.tensors[f"{layer}.self_attn.k_proj.weight"][2, 0] ^= 4
    wrong = bad(sample.write(tmp_path / "wrong"), split_folder)
    assert ("R3", f"{layer}.self_attn.k_proj") in wrong
    assert not {rule for rule, _ in wrong} & {"R1", "R2"}
    for own in ("weight", "weight_scale"):
        del sample.tensors[f"{layer}.mlp.up_proj.{own}"]
    gone = bad(sample.write(tmp_path / "gone"), split_folder)
    assert ("R1", f"{layer}.mlp.gate_up_proj.weight") in gone
    sample.tensors[f"{layer}.self_attn.other_proj.weight"] = torch.zeros(64, 64)
    report = verify(sample.write(tmp_path / "more"), split_folder)
    assert any(one.rule == "R2" and "other_proj" in one.module for one in report.findings)


def test_stacks_of_other_names_in_the_original_are_found(
    compressed: Callable[..., Path], tmp_path: Path
) -> None:
    """Its file has a stack of gate, of up and of down; the class joins two and renames one."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_sliding_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "pad_token_id": 1,
    }
    vision = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    sizes = {"image_size": 32, "patch_size": 16, "intermediate_size": 64}
    config = AutoConfig.for_model(
        "step3p7", text_config=text, vision_config={**vision, **sizes}, image_token_id=10
    )
    source = tmp_path / "source"
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(source)
    recipe = QuantizationModifier(
        targets=[r"re:.*experts\.\d+\..*"], scheme="FP8_DYNAMIC", ignore=["re:.*vision.*"]
    )
    sample = Sample.read(compressed(source, recipe))
    assert not bad(sample.write(tmp_path / "good"), source)
    path = "model.layers.0.mlp.experts"
    for own in ("gate_proj", "up_proj", "down_proj"):
        wrong = sample.copy()
        for tensor in wrong.own(f"{path}.1.{own}"):
            wrong.tensors[f"{path}.1.{own}.{tensor}"] = sample.tensors[f"{path}.2.{own}.{tensor}"]
        found = bad(wrong.write(tmp_path / f"wrong-{own}"), source)
        assert found == {("R3", f"{path}.1.{own}")}
