# SPDX-License-Identifier: Apache-2.0
"""A weight rounded in memory is, bit for bit, the weight that a reader decodes from the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs
from tests.support.pairs import pairs
from tests.support.presets import USUAL, WITH_WEIGHTS
from tests.support.thinned import few, thinned
from torch import Tensor
from torch.nn import Linear

from llmcompressor.checkpoint.packing import QuantizedModule, compress
from llmcompressor.numerics.partition import fake_quantize_matrix
from llmcompressor.quantization.parameters import (
    WeightParameters,
    observe_weight,
)
from llmcompressor.schemes.bridge import grid_of, partition_of
from llmcompressor.schemes.presets import format_of, preset_scheme

CELLS = [
    {"strategy": "tensor"},
    {"strategy": "channel"},
    {"strategy": "group", "group_size": 32},
    {"strategy": "block", "block_structure": [4, 64]},
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, COLUMNS = 48, 256


def weight(dtype: torch.dtype, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Values of every sign and size, with a row of zeros and one of subnormals."""
    torch.manual_seed(0)
    values_RC = torch.randn(rows, columns) * torch.logspace(-3, 1, rows).unsqueeze(-1)
    values_RC[1], values_RC[2] = 0, 1e-7
    return values_RC.to(dtype)


def tiny_weight(dtype: torch.dtype) -> Tensor:
    """Rows from the smallest number of the dtype on, up to where its scales are normal numbers."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    size_R1 = info.smallest_normal * info.eps * torch.logspace(0, 5, ROWS).unsqueeze(-1)
    return ((torch.rand(ROWS, COLUMNS) * 2 - 1) * size_R1).to(dtype)


MADE = [*((dtype, weight) for dtype in DTYPES), *((dtype, tiny_weight) for dtype in DTYPES[:2])]


def arguments(name: str) -> QuantizationArgs:
    args = preset_scheme(name).weights
    assert args is not None
    return args


def stored(parameters: WeightParameters, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters as a module keeps them."""
    tensors = {"weight_scale": parameters.scale.to(dtype)}
    if not parameters.args.symmetric:
        tensors["weight_zero_point"] = parameters.zero_point
    if parameters.global_scale is not None:
        tensors["weight_global_scale"] = parameters.global_scale
    return tensors


@pytest.mark.parametrize(("dtype", "make", "name"), thinned(MADE, WITH_WEIGHTS))
def test_what_the_file_decodes_to_is_what_is_in_memory(
    name: str, dtype: torch.dtype, make: Callable[[torch.dtype], Tensor]
) -> None:
    weight_RC, scheme = make(dtype), preset_scheme(name)
    parameters = observe_weight(weight_RC, arguments(name))
    rounded_RC = parameters.round(weight_RC)
    assert rounded_RC.dtype is dtype
    scheme = scheme.model_copy(update={"format": format_of(scheme), "input_activations": None})
    module = QuantizedModule("m", Linear(1, 1), scheme)
    packed = compress(module, {"weight": rounded_RC, **stored(parameters, dtype)})
    reader = BaseCompressor.get_value_from_registry(scheme.format)
    decoded_RC = reader.decompress(packed, scheme)["weight"]
    assert torch.equal(decoded_RC.to(dtype), rounded_RC)


@pytest.mark.parametrize("name", few(WITH_WEIGHTS, *USUAL))
def test_rounding_is_what_compressed_tensors_packs_and_unpacks(name: str) -> None:
    weight_RC, scheme = weight(torch.bfloat16), preset_scheme(name)
    parameters = observe_weight(weight_RC, arguments(name))
    packer = BaseCompressor.get_value_from_registry(format_of(scheme))
    own = {"weight": weight_RC, **stored(parameters, torch.bfloat16)}
    decoded_RC = packer.decompress(packer.compress(own, scheme), scheme)["weight"]
    assert torch.equal(parameters.round(weight_RC), decoded_RC)


@pytest.mark.parametrize(("dtype", "make", "name"), thinned(MADE, WITH_WEIGHTS))
def test_what_was_rounded_in_full_precision_is_not_rounded_again(
    name: str, dtype: torch.dtype, make: Callable[[torch.dtype], Tensor]
) -> None:
    """Solvers give values on the grid in float32; storing them must not move a code."""
    parameters = observe_weight(make(dtype), arguments(name))
    once_RC = parameters.round(make(dtype).float())
    twice_RC = parameters.round(once_RC)
    assert torch.equal(once_RC.to(dtype), twice_RC.to(dtype))


@pytest.mark.parametrize("name", few(WITH_WEIGHTS, *USUAL))
def test_no_element_is_further_off_than_half_a_step(name: str) -> None:
    weight_RC, args = weight(torch.float32), arguments(name)
    parameters = observe_weight(weight_RC, args)
    exact_RC = fake_quantize_matrix(
        weight_RC.double(),
        parameters.effective_scale.double(),
        None if args.symmetric else parameters.zero_point,
        grid_of(args),
        partition_of(args),
    )
    off_RC = (parameters.round(weight_RC) - weight_RC).abs().double()
    best_RC = (exact_RC - weight_RC).abs()
    # bfloat16 holds what floats of 4 and 6 bits decode to; else only float32 rounds in between
    slack = 2.0**-8 if args.num_bits < 8 and args.type == "float" else 2.0**-20
    assert bool((off_RC <= best_RC + slack * weight_RC.abs() + 1e-9).all())


@pairs(
    observer=["memoryless_minmax", "memoryless_mse"],
    dtype=[torch.float16, torch.bfloat16],
    symmetric=[True, False],
    cells=CELLS,
    kind=[("int", 4), ("int", 8), ("float", 8)],
)
def test_a_weight_that_is_tiny_in_its_dtype_does_not_vanish(
    kind: tuple[str, int], cells: dict[str, Any], symmetric: bool, dtype: torch.dtype, observer: str
) -> None:
    """Nor are the ends of its range cut: no element is off by more than two exact steps."""
    form = {"type": kind[0], "num_bits": kind[1], "symmetric": symmetric}
    args = QuantizationArgs(**form, observer=observer, **cells)
    grid, partition = grid_of(args), partition_of(args)
    weight_RC = tiny_weight(dtype).repeat_interleave(4, dim=0)
    parameters = observe_weight(weight_RC, args)
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert bool((parameters.scale >= least).all())
    low, high = partition.extremes(weight_RC.double())
    span = 2 * torch.maximum(-low, high) if symmetric else high.clamp(min=0) - low.clamp(max=0)
    most = 2 * span * grid.last_step / (grid.qmax - grid.qmin)
    if observer == "memoryless_mse":
        most = most.maximum(span / 8)  # it cuts ends where that is less off in all
    off_RC = (parameters.round(weight_RC).double() - weight_RC.double()).abs()
    assert bool((off_RC <= partition.expand(most, *weight_RC.shape).clamp(min=least)).all())


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8", "NVFP4A16", "MXFP4"])
def test_columns_carry_the_scales_of_every_element(name: str) -> None:
    weight_RC = weight(torch.bfloat16)
    parameters = observe_weight(weight_RC, arguments(name))
    columns = parameters.columns(ROWS, COLUMNS)
    scale_RC = columns.scale_RG[:, columns.group_of_column_C]
    expected_RC = partition_of(parameters.args).expand(parameters.effective_scale, ROWS, COLUMNS)
    assert columns.scale_RG.dtype is torch.float32
    assert torch.equal(scale_RC, expected_RC.float())
    assert (columns.zero_RG is None) == parameters.args.symmetric


def test_the_observer_of_the_arguments_sees_the_importance() -> None:
    args = arguments("W4A16")
    importance_C = torch.ones(COLUMNS)
    importance_C[:64] = 1000.0

    def error(observer: str, weighed_by: Tensor) -> float:
        named = args.model_copy(update={"observer": observer})
        parameters = observe_weight(weight(torch.float32), named, importance_C=importance_C)
        change_RC = parameters.round(weight(torch.float32)) - weight(torch.float32)
        return float((change_RC.square() * weighed_by).sum())

    plain_C = torch.ones(COLUMNS)
    assert error("memoryless_mse", plain_C) < 0.95 * error("memoryless_minmax", plain_C)
    assert error("imatrix_mse", importance_C) < 0.95 * error("memoryless_minmax", importance_C)
