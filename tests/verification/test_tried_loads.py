# SPDX-License-Identifier: Apache-2.0
"""What is found out of the installed transformers by loading a model of one Linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor, compress_module
from compressed_tensors.quantization import (
    QuantizationScheme,
    initialize_module_for_quantization,
)

from llmcompressor.checkpoint.packed_zero_points import packed_zero_points_fit
from llmcompressor.verification import tried_loads

QUESTIONS = (
    tried_loads.refuses_packed_zero_points,
    tried_loads.refuses_other_shapes,
    tried_loads.renamed_keep_their_dtype,
    lambda: tried_loads.small_float_experts_become("float32"),
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_asking_takes_no_random_number_and_says_nothing(
    question: Callable[[], object], capfd: pytest.CaptureFixture[str]
) -> None:
    tried_loads.refuses_packed_zero_points.cache_clear()
    tried_loads.refuses_other_shapes.cache_clear()
    tried_loads.renamed_keep_their_dtype.cache_clear()
    before = torch.get_rng_state()
    first = question()
    assert question() == first
    assert torch.equal(torch.get_rng_state(), before)
    assert "".join(capfd.readouterr()) == ""


def test_where_the_place_fits_nothing_is_refused() -> None:
    tried_loads.refuses_packed_zero_points.cache_clear()
    with packed_zero_points_fit():
        assert not tried_loads.refuses_packed_zero_points()
    tried_loads.refuses_packed_zero_points.cache_clear()


@pytest.mark.parametrize(("bits", "rows"), [(2, 3), (3, 5), (4, 6), (8, 12)])
def test_the_place_of_packed_zero_points(bits: int, rows: int) -> None:
    """That of what is packed: 45 of them, along the rows."""
    weights = {"num_bits": bits, "group_size": 32, "symmetric": False}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    before = vars(PackedQuantizationCompressor)["compress"]
    shapes = []
    for device in ("meta", "cpu"):
        with torch.device(device), packed_zero_points_fit():
            linear = torch.nn.Linear(64, 45, bias=False)
            initialize_module_for_quantization(linear, scheme)
            for name, each in linear.named_parameters():
                each.data.fill_(1 if name == "weight_scale" else 0)
            compress_module(linear)
        shapes.append((linear.weight_zero_point.shape, linear.weight_zero_point.dtype))
    assert shapes == [((rows, 2), torch.int32)] * 2
    assert vars(PackedQuantizationCompressor)["compress"] is before
