# SPDX-License-Identifier: Apache-2.0
"""Models that transformers dequantized as it loaded them: they are written as what they are now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tests.support import small_models as small
from torch import Tensor

from llmcompressor import oneshot, plan
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.errors import CheckpointError, TargetError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import SpinQuantModifier

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
IDS = torch.arange(3, 35)[None]
BLOCK = 32


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A weight as FP8 checkpoints hold it: codes, and one scale for each square."""
    rows, columns = (size // BLOCK for size in weight.shape)
    squares = weight.float().view(rows, BLOCK, columns, BLOCK)
    scales = squares.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes = (squares / scales).to(torch.float8_e4m3fn).view_as(weight)
    return {name: codes, f"{name}_scale_inv": scales.view(rows, columns)}


def in_mxfp4(name: str, stack: Tensor) -> dict[str, Tensor]:
    experts, inputs, outputs = stack.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.full(blocks.shape[:-1], 121, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def quantized(folder: Path, model: Any, settings: dict[str, Any], chosen: Any, codes: Any) -> Path:
    """The folder of a model some of whose tensors are codes."""
    model.bfloat16().save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored(folder).items():
        tensors |= codes(name, tensor) if chosen(name) else {name: tensor}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = hf.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32)
    model = hf.Qwen3MoeForCausalLM(config)
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    return quantized(
        tmp_path / "fp8", model, settings, lambda name: name.endswith("proj.weight"), in_fp8
    )


@pytest.fixture
def mxfp4(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = hf.GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"])
    settings = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    return quantized(
        tmp_path / "mxfp4",
        hf.GptOssForCausalLM(config),
        settings,
        lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
        in_mxfp4,
    )


def loaded(folder: Path) -> Any:
    config = hf.FineGrainedFP8Config if folder.name == "fp8" else hf.Mxfp4Config
    return hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config(dequantize=True)
    )


def recipe(*ignored: str) -> QuantizationModifier:
    return QuantizationModifier(
        targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*mlp.gate$", *ignored]
    )


@torch.no_grad()
def assert_reads_as(model: Any, folder: Path, *, tolerance: float = 0.0) -> None:
    read, told = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not {name: found for name, found in told.items() if found}
    assert (read(IDS).logits - model(IDS).logits).abs().max() <= tolerance


def test_what_stays_dense_is_written_dense(fp8: Path, tmp_path: Path) -> None:
    """Of the embedding, the head and norms transformers' reverse makes codes, too."""
    model = loaded(fp8)
    oneshot(model=model, recipe=recipe())
    model.save_pretrained(tmp_path / "out")
    tensors = stored(tmp_path / "out")
    assert not [name for name in tensors if name.endswith("scale_inv")]
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    # transformers does not round what goes into experts
    assert_reads_as(model, tmp_path / "out", tolerance=0.1)


@pytest.mark.parametrize("source", ["fp8", "mxfp4"])
def test_experts_that_are_ignored(
    source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = loaded(request.getfixturevalue(source))
    oneshot(model=model, recipe=recipe("re:.*experts.*"), output_dir=tmp_path / "out")
    assert not [name for name in stored(tmp_path / "out") if name.endswith("_blocks")]
    assert_reads_as(model, tmp_path / "out")


@pytest.mark.parametrize("source", ["fp8", "mxfp4"])
def test_what_the_refusal_of_the_folder_says_works(
    source: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(source)
    with pytest.raises(CheckpointError, match=f"quantized by {source}") as error:
        oneshot(model=folder, recipe=recipe())
    model = loaded(folder)
    kind = hf.FineGrainedFP8Config if source == "fp8" else hf.Mxfp4Config
    assert f"{kind.__name__}(dequantize=True)" in error.value.remedy
    oneshot(model=model, output_dir=tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert_reads_as(model, tmp_path / "plain")
    oneshot(model=tmp_path / "plain", recipe=recipe(), output_dir=tmp_path / "out")


ATTENTION: dict[str, Any] = {
    "one scheme": {"targets": "re:.*self_attn.*_proj$", "scheme": "FP8_DYNAMIC"},
    "two": {"config_groups": {"W4A16_ASYM": ["re:.*[qkv]_proj"], "FP8_DYNAMIC": ["re:.*o_proj"]}},
}


@pytest.mark.parametrize("before", ATTENTION)
def test_earlier_quantization_stays_beside_that_of_a_second_run(
    before: str, tmp_path: Path, warned: list[str]
) -> None:
    """Whether the second one is given its folder, or the model as transformers loads it."""
    first, second = tmp_path / "first", tmp_path / "second"
    rest = {"targets": "Linear", "scheme": "W8A8", "ignore": ["re:.*attn.*", "lm_head"]}
    small.one_block().save_pretrained(tmp_path / "model")
    oneshot(tmp_path / "model", QuantizationModifier(**ATTENTION[before]), output_dir=first)
    with pytest.raises(TargetError, match="q_proj is quantized already"):
        oneshot(first, QuantizationModifier(**{**rest, "ignore": ["lm_head"]}), output_dir=second)
    assert not second.exists()
    warned.clear()
    model = oneshot(model=first, recipe=QuantizationModifier(**rest), output_dir=second)
    assert any("Quantized already: model.layers.0.self_attn.q_proj" in text for text in warned)
    with loading_compressed():
        packed = hf.AutoModelForCausalLM.from_pretrained(first, dtype="auto")
    oneshot(model=packed, recipe=QuantizationModifier(**rest), output_dir=tmp_path / "packed")
    name = "model.safetensors"
    assert (tmp_path / "packed" / name).read_bytes() == (second / name).read_bytes()
    old, new = stored(first), stored(second)
    kept = [name for name in old if "self_attn" in name]
    assert all(
        torch.equal(old[name].view(torch.uint8), new[name].view(torch.uint8)) for name in kept
    )
    assert new["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    settings = json.loads((second / "config.json").read_text())["quantization_config"]
    formats = {group["format"] for group in settings["config_groups"].values()}
    assert {"float-quantized", "int-quantized"} <= formats
    assert settings["format"] == "mixed-precision"
    with loading_compressed():
        assert_reads_as(model, second)
    with pytest.raises(CheckpointError, match="already quantized"):
        plan(first, QuantizationModifier(**rest), measure=False)


def test_what_is_rotated_at_run_time_is_not_gone_on_with(tmp_path: Path) -> None:
    """However it is given: another scheme beside it would drop what the forward has to do."""
    small.one_block().save_pretrained(tmp_path / "model")
    recipe = [
        SpinQuantModifier(rotations=["R4"]),
        QuantizationModifier(targets="re:.*mlp.*proj", scheme="W8A8"),
    ]
    oneshot(tmp_path / "model", recipe, output_dir=tmp_path / "first", verify=False)
    attention = QuantizationModifier(targets="re:.*self_attn.*_proj$", scheme="W8A8")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype="auto")
    for model in (tmp_path / "first", loaded):
        for output in (tmp_path / "out", None):
            with pytest.raises(CheckpointError, match="transform_config"):
                oneshot(model, attention, output_dir=output)
    assert not (tmp_path / "out").exists()


def test_quantized_experts_become_plain_or_are_refused(tmp_path: Path, warned: list[str]) -> None:
    small.mixture().save_pretrained(tmp_path / "model")
    attention = QuantizationModifier(targets="re:.*self_attn.*_proj$", scheme="W8A8")
    for name, scheme in (("rows", "FP8_DYNAMIC"), ("blocks", "NVFP4A16")):
        experts = QuantizationModifier(targets=["re:.*experts.*"], scheme=scheme)
        oneshot(tmp_path / "model", experts, output_dir=tmp_path / name)
    with pytest.raises(CheckpointError, match=r"does not read it as it was written \(T6\)"):
        oneshot(tmp_path / "blocks", attention, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"\(T6\)"):  # nor without an output
        oneshot(tmp_path / "blocks", attention)
    oneshot(tmp_path / "rows", attention, output_dir=tmp_path / "out")
    assert any("not all codes are kept" in text for text in warned)
