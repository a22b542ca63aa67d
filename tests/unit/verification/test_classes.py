# SPDX-License-Identifier: Apache-2.0
"""What is said of the class of a checkpoint is what transformers does with it (T4, C5, C6, V7)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.checkpoint_samples import Sample
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from llmcompressor import verify
from llmcompressor.errors import CompressorError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification import Finding

Run = Callable[..., Path]

SIZES: dict[str, Any] = {
    "vocab_size": small.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


def recipe(scheme: str) -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])


def worse_than_notes(folder: Path, *reference: Path, **facts: Any) -> list[Finding]:
    report = verify(folder, *reference, tp=1, **facts)
    return [one for one in report.findings if one.severity != "note"]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(small.probe()).logits
    return found


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_head_has_to_be_ignored(
    scheme: str, is_tied: bool, tmp_path: Path, compressed: Run
) -> None:
    source = saved(LlamaConfig(**SIZES, tie_word_embeddings=is_tied), tmp_path / "source")
    sample = Sample.read(compressed(source, recipe(scheme)))
    assert not worse_than_notes(sample.write(tmp_path / "good"), serve="transformers")
    sample.settings["ignore"] = []
    folder = sample.write(tmp_path / "bad")
    found = worse_than_notes(folder, serve="transformers")
    assert {(one.rule, one.module) for one in found} == {("T4", "lm_head")}
    try:
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except AttributeError as error:
        assert "has no attribute `weight`" in str(error)  # noqa: PT017  # one of two ways to fail
    else:
        assert any(name.startswith("lm_head.weight_") for name in info["missing_keys"])


def test_biases_that_the_class_leaves_out(tmp_path: Path, compressed: Run) -> None:
    config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    source = saved(config, tmp_path / "source")
    good = compressed(source, recipe("W4A16"))
    assert not worse_than_notes(good, source)
    expected = logits(AutoModelForCausalLM.from_pretrained(good))
    for key, last in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.up_proj")):
        sample = Sample.read(good)
        sample.config[key] = False
        folder = sample.write(tmp_path / key)
        for reference in ((), (source,)):
            found = worse_than_notes(folder, *reference)
            modules = {one.module for one in found if one.rule == "C6"}
            assert f"model.layers.1.{last}" in modules
            assert {one.severity for one in found if one.rule == "C6"} == {"error"}
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert {name.rpartition(".")[0] for name in info["unexpected_keys"]} == modules
        assert (logits(loaded) - expected).abs().max() > 0.05


@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])
def test_a_norm_of_zeros_may_mean_one(kind: Any, tmp_path: Path) -> None:
    folder = saved(kind(**SIZES), tmp_path / "source")
    sample = Sample.read(folder)
    for name in sample.tensors:
        if "norm" in name:
            sample.tensors[name].zero_()
    found = worse_than_notes(sample.write(tmp_path / "zeros"))
    is_added = kind is Gemma2Config
    assert {one.rule for one in found} == (set() if is_added else {"V7"})
    zeros = AutoModelForCausalLM.from_pretrained(tmp_path / "zeros", dtype=torch.float32)
    assert bool(logits(zeros).any()) == is_added


def test_zeros_of_the_original_are_meant(tmp_path: Path, compressed: Run) -> None:
    sample = Sample.read(saved(LlamaConfig(**SIZES), tmp_path / "made"))
    sample.tensors["model.norm.weight"].zero_()
    source = sample.write(tmp_path / "source")
    folder = compressed(source, recipe("W4A16"))
    assert {one.rule for one in worse_than_notes(folder)} == {"V7"}
    assert not worse_than_notes(folder, source)


VALUES: list[Any] = [None, True, 0, -1, 4, 33, 1.5, "", "x", "int", "float", "channel", "block"]
VALUES += ["group", "tensor_group", "int-quantized", "float-quantized", "mxfp4-pack-quantized"]
VALUES += [[], [1], [None], {}, {"a": 1}, [0, 0], float("nan"), "torch.uint8"]


def _paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else ()
    for key, value in items:
        yield (*path, key)
        yield from _paths(value, (*path, key))


def _spoilt(config: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = holder = copy.deepcopy(config)
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["W4A16", "NVFP4", "FP8_DYNAMIC", "cache"])
def test_no_setting_ends_the_check(
    preset: str, good: Callable[[str], Sample], source: Path, tmp_path: Path
) -> None:
    """Whatever stands in ``config.json``, there is a report, or an error of the library's own."""
    sample = good(preset)
    folder = sample.write(tmp_path / "model")
    chance = random.Random(preset)
    for path in _paths(sample.config):
        few = 4 if path[0] == "quantization_config" else 1
        for value in chance.sample(VALUES, few):
            spoilt = copy.copy(sample)
            spoilt.config = _spoilt(sample.config, path, value)
            spoilt.write(folder)
            try:
                verify(folder, source, tp=1)
            except CompressorError:
                continue
            except Exception as error:
                raise AssertionError(f"{path}: {value!r}") from error


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["W4A16", "W3A16", "NVFP4", "MXFP4", "FP8", "FP8_BLOCK"])
def test_no_shape_ends_the_check(
    preset: str, good: Callable[[str], Sample], source: Path, tmp_path: Path
) -> None:
    sample = good(preset)
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: tensor.reshape(-1),
        lambda tensor: tensor.reshape(1, *tensor.shape),
        lambda tensor: tensor[:0],
        lambda tensor: tensor[:-1],
        lambda tensor: tensor[..., :1],
        lambda tensor: tensor.reshape(-1)[0],
    ]
    for name in [name for name in sample.tensors if ".0.mlp.up_proj" in name or "norm." in name]:
        for change in changes:
            if not sample.tensors[name].ndim:
                continue
            spoilt = sample.copy()
            spoilt.tensors[name] = change(sample.tensors[name]).clone()
            if spoilt.tensors[name].shape != sample.tensors[name].shape:
                spoilt.write(tmp_path / "model", shards=1)
                assert verify(tmp_path / "model", source, tp=1).findings, (name, change)
