# SPDX-License-Identifier: Apache-2.0
"""From compressed-tensors' arguments to grids, partitions and scale formats."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, calculate_range

from llmcompressor.errors import InputError
from llmcompressor.numerics.partition import Partition
from llmcompressor.numerics.scales import ScaleFormat, scales_from_range
from llmcompressor.schemes.bridge import (
    grid_of,
    needs_global_scale,
    partition_of,
    scale_dtype_of,
    scale_format_of,
    zero_dtype_of,
)

NVFP4 = PRESET_SCHEMES["NVFP4"]
WEIGHTS = {name: fields["weights"] for name, fields in PRESET_SCHEMES.items() if fields}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_every_preset_get_the_readers_scales(name):
    args = WEIGHTS[name]
    grid = grid_of(args)
    assert (grid.qmin, grid.qmax) == tuple(end.item() for end in calculate_range(args, "cpu"))
    low, high = partition_of(args).extremes(torch.randn(8, 256))
    global_scale = torch.tensor([100.0]) if needs_global_scale(args) else None
    scale, zero = scales_from_range(
        low,
        high,
        grid,
        scale_format=scale_format_of(args),
        global_scale=global_scale,
        scale_dtype=scale_dtype_of(args),
        zero_dtype=zero_dtype_of(args),
    )
    expected_scale, expected_zero = calculate_qparams(low, high, args, global_scale=global_scale)
    assert torch.equal(scale, expected_scale)
    assert zero.dtype == expected_zero.dtype
    assert torch.equal(zero.float(), expected_zero.float())


@pytest.mark.parametrize(
    ("fields", "partition"),
    [
        ({"strategy": "tensor"}, Partition(0, 0)),
        ({"strategy": "channel"}, Partition(1, 0)),
        ({"group_size": -1}, Partition(1, 0)),
        ({"group_size": 64}, Partition(1, 64)),
        ({"strategy": "tensor_group", "group_size": 16}, Partition(1, 16)),
        ({"strategy": "block", "block_structure": "64x32"}, Partition(64, 32)),
    ],
)
def test_strategies_become_partitions(fields, partition):
    assert partition_of(QuantizationArgs(**fields)) == partition


@pytest.mark.parametrize(
    "fields", [{"strategy": "token", "dynamic": True}, {"strategy": "attn_head"}]
)
def test_strategies_that_are_not_for_weights_are_refused(fields):
    with pytest.raises(InputError, match=fields["strategy"]):
        partition_of(QuantizationArgs(**fields))


def test_scale_formats():
    assert scale_format_of(QuantizationArgs()) is ScaleFormat.PLAIN
    assert scale_format_of(WEIGHTS["NVFP4"]) is ScaleFormat.E4M3
    assert scale_format_of(WEIGHTS["MXFP8"]) is ScaleFormat.E8M0
    wide = QuantizationArgs(scale_dtype=torch.float32)
    assert scale_format_of(wide) is ScaleFormat.PLAIN
    assert scale_dtype_of(wide) is torch.float32
    assert scale_dtype_of(WEIGHTS["NVFP4"]) is None
