# SPDX-License-Identifier: Apache-2.0
"""The model that is returned can be trained on and saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.modeling import attention, kvcache
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from tests.support import small_models as small
from tests.support.small_models import llama, logits, mixture, probe, token_rows
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.recipe import Recipe
from llmcompressor.transformers.sparsification import modify_save_pretrained

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


INT8 = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}


ROUNDED: dict[str, dict[str, Any]] = {
    "W8A8": {"scheme": "W8A8"},
    "FP8": {"scheme": "FP8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "W4A8": {"scheme": "W4A8"},
    "NVFP4": {"scheme": "NVFP4"},
    "MXFP8": {"scheme": "MXFP8"},
    "asymmetric": {
        "config_groups": {"all": {"targets": ["Linear"], "input_activations": INT8, "weights": FP8}}
    },
    "outputs": {
        "config_groups": {"all": {"targets": ["Linear"], "output_activations": FP8, "weights": FP8}}
    },
    "cache": {"scheme": "W8A8", "kv_cache_scheme": FP8},
    "attention": {
        "config_groups": {"all": {"targets": ["LlamaAttention"], "input_activations": FP8}}
    },
}


GREATEST = {4: 6.0, 8: 448.0}


"""Of the values of a float grid, by bits."""


def compressed(made: Any, name: str) -> Any:
    recipe = QuantizationModifier(
        **{"targets": ["Linear"], "ignore": ["lm_head", "re:.*gate$"]} | ROUNDED[name]
    )
    return oneshot(model=made, recipe=recipe, dataset=token_rows(), num_calibration_samples=8)


def gradients(model: Any) -> dict[str, Tensor]:
    """Of all weights, by name, for a loss of all logits."""
    model.zero_grad()
    weights = {
        name: one for name, one in model.named_parameters() if not name.endswith(("scale", "point"))
    }
    for one in weights.values():
        one.requires_grad_()
    ids = probe()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    missing = [name for name, one in weights.items() if one.grad is None]
    assert all(".experts." in name for name in missing)  # some get no token
    return {name: one.grad.clone() for name, one in weights.items() if one.grad is not None}


class Through(torch.autograd.Function):
    """Rounded values; the gradient of what was rounded, where the grid reaches it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return values

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return given[0] * inside, None, None


@pytest.mark.parametrize("name", ROUNDED)
def test_gradients_pass_straight_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each rounding of compressed-tensors had the gradient of the identity."""
    model = compressed(llama(), name)
    for parameter, value in model.named_parameters():
        if parameter.endswith(("put_scale", "k_scale", "q_scale", "v_scale")):
            value.data *= 2  # nothing is cut off at the end of its grid
    recorded = model(input_ids=probe(), use_cache=False)
    assert recorded.logits.requires_grad
    assert torch.equal(recorded.logits, logits(model))
    found = gradients(model)

    rounded = forward.forward_quantize

    def through(module: Any, value: Tensor, base: str, args: Any) -> Tensor:
        values = rounded(module, value, base, args)
        if base == "weight" or not value.requires_grad:
            return values
        inside = torch.ones_like(value, dtype=torch.bool)
        if args.dynamic and args.group_size:  # scales are rounded, and may be too small
            coarse = getattr(module, f"{base}_global_scale", None)
            scale, _ = compute_dynamic_scales_and_zp(
                value=value, args=args, module=module, global_scale=coarse
            )
            scale = scale.float() if coarse is None else scale.float() / coarse
            ends = GREATEST[args.num_bits] * scale.repeat_interleave(args.group_size, -1)
            inside = value.abs() <= ends
        return Through.apply(value, values, inside)  # type: ignore[no-any-return,no-untyped-call]

    monkeypatch.setattr("llmcompressor.quantization.kv_cache.needs_gradients", lambda *_: False)
    for place in (forward, attention, kvcache):
        monkeypatch.setattr(place, "forward_quantize", through)
    defined = gradients(model)
    for weight, gradient in defined.items():
        assert torch.equal(found[weight], gradient), weight


def test_those_of_experts_pass_too() -> None:
    model = compressed(mixture(), "W8A8")
    recorded = model(input_ids=probe(), use_cache=False)
    assert torch.equal(recorded.logits, logits(model))
    found = gradients(model)
    assert any(".experts." in name and gradient.any() for name, gradient in found.items())


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def fp8(*targets: str) -> QuantizationModifier:
    return QuantizationModifier(targets=list(targets), scheme="FP8_DYNAMIC")


def two_parts() -> Any:
    text = {**SIZES, "model_type": "llama", "vocab_size": small.VOCABULARY}
    tower = {**SIZES, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=tower, image_token_index=5)
    ).bfloat16()


def recipe_of(folder: Path) -> Recipe:
    return Recipe.create_instance((folder / "recipe.yaml").read_text())


def test_the_recipe_of_a_part_is_that_of_the_whole(tmp_path: Path, warned: list[str]) -> None:
    model = two_parts()
    oneshot(model=model.model.language_model, recipe=fp8("re:.*mlp.*"))
    modify_save_pretrained(model)
    model.save_pretrained(tmp_path / "out")
    assert recipe_of(tmp_path / "out").modifiers[0].targets == ["re:.*mlp.*"]
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert report["verification"]["counts"]["error"] == 0
    assert not [line for line in warned if "would not" in line or "not good" in line]


@pytest.mark.parametrize("is_checked", [False, True])
def test_what_a_run_has_left_stays(is_checked: bool, tmp_path: Path) -> None:
    model = small.one_block()
    oneshot(model, fp8("re:.*mlp.*"), verify=is_checked)
    modify_save_pretrained(model)
    model.save_pretrained(tmp_path / "out")
    assert recipe_of(tmp_path / "out").modifiers[0].targets == ["re:.*mlp.*"]
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert ("verification" in report) == is_checked
    modify_save_pretrained(model, recipe="a: 1")
    model.save_pretrained(tmp_path / "other")
    assert (tmp_path / "other" / "recipe.yaml").read_text().endswith("\na: 1")


def test_a_check_that_breaks_off_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[tuple[str, str]]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("odd")

    model = small.one_block()
    oneshot(model=model, recipe=fp8("Linear"))
    monkeypatch.setattr("llmcompressor.entrypoints.verify.verify_files", broken)
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert [text for level, text in log if level == "ERROR" and "could not be checked" in text]
