# SPDX-License-Identifier: Apache-2.0
"""What is run on the pretended device."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RECIPES", "TRAININGS", "Recipe"]


class Recipe(NamedTuple):
    """Modifiers, one a line.

    Attributes:
        text: of the recipe, below ``modifiers:``.
        takes_data: whether calibration data is given.
        kind: of the model.
    """

    text: str
    takes_data: bool = True
    kind: str = "llama"


def _of(*modifiers: str, takes_data: bool = True, kind: str = "llama") -> Recipe:
    return Recipe("".join(f"  {one}\n" for one in modifiers), takes_data, kind)


_LINEARS = "targets: Linear, ignore: [lm_head]"
_W4A16 = f"QuantizationModifier: {{{_LINEARS}, scheme: W4A16}}"
_ASYMMETRIC = f"QuantizationModifier: {{{_LINEARS}, scheme: W4A16_ASYM}}"
_GPTQ = f"GPTQModifier: {{{_LINEARS}, scheme: W4A16}}"
_SPARSE = "sparsity: 0.5, mask_structure: '2:4', ignore: [lm_head]"

RECIPES = {
    "rtn": _of(_W4A16, takes_data=False),
    "fp8_dynamic": _of(
        f"QuantizationModifier: {{{_LINEARS}, scheme: FP8_DYNAMIC}}", takes_data=False
    ),
    "nvfp4a16": _of(f"QuantizationModifier: {{{_LINEARS}, scheme: NVFP4A16}}", takes_data=False),
    "hqq": _of(f"HQQModifier: {{{_LINEARS}, scheme: W4A16_ASYM}}", takes_data=False),
    "spin": _of("SpinQuantModifier: {rotations: [R1, R2, R4]}", _W4A16, takes_data=False),
    "quip": _of(f"QuIPModifier: {{{_LINEARS}}}", _W4A16, takes_data=False),
    "fp8": _of(f"QuantizationModifier: {{{_LINEARS}, scheme: FP8}}"),
    "nvfp4": _of(f"QuantizationModifier: {{{_LINEARS}, scheme: NVFP4}}"),
    "imatrix": _of(
        "QuantizationModifier: {ignore: [lm_head], config_groups: {group_0: {targets: [Linear], "
        "weights: {num_bits: 4, group_size: 128, strategy: group, observer: imatrix_mse}}}}"
    ),
    "gptq": _of(_GPTQ),
    "gptq_once": _of(f"GPTQModifier: {{{_LINEARS}, scheme: W4A16, asymmetric: false}}"),
    "awq": _of("AWQModifier: {}", _ASYMMETRIC),
    "awq_output": _of("AWQModifier: {loss: output}", _ASYMMETRIC),
    "smooth": _of("SmoothQuantModifier: {}", f"GPTQModifier: {{{_LINEARS}, scheme: W8A8}}"),
    "autoround": _of(f"AutoRoundModifier: {{{_LINEARS}, scheme: W4A16, iters: 3}}"),
    "spin_learned": _of(
        "SpinQuantModifier: {rotations: [R1, R2], learnable: true, learning_steps: 2}", _W4A16
    ),
    "sparsegpt": _of(f"SparseGPTModifier: {{{_SPARSE}}}"),
    "sparsegpt_gptq": _of(f"SparseGPTModifier: {{{_SPARSE}}}", _GPTQ),
    "wanda": _of(f"WandaPruningModifier: {{{_SPARSE}}}"),
    "reap": _of("REAPPruningModifier: {sparsity: 0.25}", kind="moe"),
    "reap_gptq": _of("REAPPruningModifier: {sparsity: 0.25}", _GPTQ, kind="moe"),
}

_MASKED = "start: 0, end: 3, init_sparsity: 0.1, final_sparsity: 0.5, update: 1"
_PROJECTIONS = "targets: ['re:.*_proj.weight']"

TRAININGS = {
    "pruned": f"  MagnitudePruningModifier: {{{_MASKED}, {_PROJECTIONS}}}\n",
    "pruned_held": (
        f"  MagnitudePruningModifier: {{{_MASKED}, {_PROJECTIONS}, mask_structure: '2:4'}}\n"
        f"  ConstantPruningModifier: {{start: 3, {_PROJECTIONS}}}\n"
    ),
    "quantized": f"  QuantizationModifier: {{start: 0, end: 3, {_LINEARS}, scheme: W8A8}}\n",
    "learned_scales": (
        f"  QuantizationModifier: {{start: 0, end: 3, {_LINEARS}, scheme: W4A16, "
        "learned_scales: true}\n"
    ),
    "distilled": "  OutputDistillationModifier: {}\n",
    "distilled_layers": (
        "  OutputDistillationModifier: {targets: ['re:.*layers\\.\\d+$'], "
        "comparison: square_head}\n"
    ),
    "pruned_distilled": (
        f"  MagnitudePruningModifier: {{{_MASKED}, {_PROJECTIONS}}}\n"
        "  OutputDistillationModifier: {}\n"
    ),
}
