# SPDX-License-Identifier: Apache-2.0
"""A weight rounded in memory is, bit for bit, the weight that a reader decodes from the file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs
from tests.support.presets import WITH_WEIGHTS
from torch import Tensor
from torch.nn import Linear

from llmcompressor.checkpoint.packing import QuantizedModule, compress
from llmcompressor.errors import NonFiniteError
from llmcompressor.numerics.partition import fake_quantize_matrix
from llmcompressor.numerics.scales import global_scale_from_amax
from llmcompressor.observers import Observer
from llmcompressor.quantization.parameters import (
    WeightParameters,
    observe_weight,
    uses_only_extremes,
    weight_amax,
)
from llmcompressor.schemes.bridge import grid_of, needs_global_scale, partition_of
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


@pytest.mark.parametrize(("dtype", "make"), MADE)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_the_short_way_finds_what_the_observer_finds(name: str, dtype: torch.dtype) -> None:
    weight_RC, args = weight(dtype), arguments(name)
    args = args.model_copy(update={"observer": "memoryless_minmax"})
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    assert uses_only_extremes(args)
    shared = global_scale_from_amax(weight_amax(weight_RC)) if needs_global_scale(args) else None
    scale, zero_point = observer.observe(weight_RC).qparams(shared, dtype=dtype)
    found = observe_weight(weight_RC, args)
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.zero_point, zero_point)
    weight_RC[3, 3] = torch.inf
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        observe_weight(weight_RC, args)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_rounding_is_what_compressed_tensors_packs_and_unpacks(name: str) -> None:
    weight_RC, scheme = weight(torch.bfloat16), preset_scheme(name)
    parameters = observe_weight(weight_RC, arguments(name))
    packer = BaseCompressor.get_value_from_registry(format_of(scheme))
    own = {"weight": weight_RC, **stored(parameters, torch.bfloat16)}
    decoded_RC = packer.decompress(packer.compress(own, scheme), scheme)["weight"]
    assert torch.equal(parameters.round(weight_RC), decoded_RC)


@pytest.mark.parametrize(("dtype", "make"), MADE)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_what_was_rounded_in_full_precision_is_not_rounded_again(
    name: str, dtype: torch.dtype, make: Callable[[torch.dtype], Tensor]
) -> None:
    """Solvers give values on the grid in float32; storing them must not move a code."""
    parameters = observe_weight(make(dtype), arguments(name))
    once_RC = parameters.round(make(dtype).float())
    twice_RC = parameters.round(once_RC)
    assert torch.equal(once_RC.to(dtype), twice_RC.to(dtype))


@pytest.mark.parametrize("name", WITH_WEIGHTS)
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


@pytest.mark.parametrize("observer", ["memoryless_minmax", "memoryless_mse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("cells", CELLS, ids=str)
@pytest.mark.parametrize("kind", [("int", 4), ("int", 8), ("float", 8)], ids=str)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["MXFP4", "MXFP8"])
def test_powers_of_two_are_found_for_what_is_tiny_in_its_dtype(
    name: str, dtype: torch.dtype
) -> None:
    weight_RC = tiny_weight(dtype)
    scale = observe_weight(weight_RC, arguments(name)).scale
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    exact = observe_weight(weight_RC.double(), arguments(name)).scale
    expected = exact.clamp(min=max(least, 2.0**-127))
    assert torch.equal(scale.double(), expected)


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


def test_ragged_blocks_are_rounded_as_the_reader_pads_them() -> None:
    weight_RC = weight(torch.bfloat16, 200, 304)
    scheme = preset_scheme("FP8_BLOCK")
    parameters = observe_weight(weight_RC, arguments("FP8_BLOCK"))
    assert parameters.scale.shape == (2, 3)
    own = {"weight": weight_RC, **stored(parameters, torch.bfloat16)}
    packer = BaseCompressor.get_value_from_registry(format_of(scheme))
    decoded_RC = packer.decompress(packer.compress(own, scheme), scheme)["weight"]
    assert torch.equal(parameters.round(weight_RC), decoded_RC[:200, :304])


def test_a_shared_global_scale_is_used_instead_of_the_own_one() -> None:
    weight_RC, args = weight(torch.bfloat16), arguments("NVFP4A16")
    own = observe_weight(weight_RC, args)
    assert own.global_scale is not None
    assert torch.equal(own.global_scale, 448 * 6 / weight_amax(weight_RC))
    shared = observe_weight(weight_RC, args, global_scale=own.global_scale / 4)
    assert shared.global_scale is not None
    assert torch.equal(shared.global_scale, own.global_scale / 4)
    assert not torch.equal(shared.scale, own.scale)


def test_the_observer_of_the_arguments_is_used_and_sees_the_importance() -> None:
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


def test_values_that_are_not_finite_are_refused() -> None:
    weight_RC = weight(torch.float32)
    weight_RC[5, 5] = float("nan")
    with pytest.raises(NonFiniteError):
        observe_weight(weight_RC, arguments("W4A16"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_absolute_maximum_counts_both_signs(dtype: torch.dtype) -> None:
    assert weight_amax(torch.tensor([[1.0, -3.0]], dtype=dtype)).tolist() == [3.0]
    assert weight_amax(torch.tensor([[2.0, -1.0]], dtype=dtype)).tolist() == [2.0]
    assert weight_amax(torch.ones(1, 1, dtype=dtype)).dtype is torch.float32


@pytest.mark.parametrize("observer", ["nvfp4_expanded_mse", "fouroversix"])
def test_scales_beyond_the_extremes_find_room_under_the_global_one(observer: str) -> None:
    """In the group with the largest value of all, too: it ends at 4, and its scale at 1.5 times."""
    torch.manual_seed(0)
    weight_RC = torch.randn(64, 256) * 0.02
    weight_RC[:, :16] = torch.tensor([1.0, 0.75] * 8)  # 4 and 3 are values of the grid, 4.5 is not
    args = arguments("NVFP4A16").model_copy(update={"observer": observer})
    parameters = observe_weight(weight_RC, args)
    cut = observe_weight(weight_RC, args, global_scale=global_scale_from_amax(torch.ones(1)))

    def error(found: WeightParameters) -> Tensor:
        scale, grid, partition = found.effective_scale, grid_of(args), partition_of(args)
        rounded_RC = fake_quantize_matrix(weight_RC, scale, None, grid, partition)
        return (rounded_RC - weight_RC)[:, :16].square().mean()

    assert float(cut.scale.max()) == 448
    assert float(parameters.scale.max()) < 448
    assert error(parameters) < 0.25 * error(cut)
    plain = observe_weight(weight_RC, arguments("NVFP4A16"))
    assert float(plain.global_scale) == float(global_scale_from_amax(weight_amax(weight_RC)))
