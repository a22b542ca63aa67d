# SPDX-License-Identifier: Apache-2.0
"""Shares of zeros, and tensors in collections."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch

from llmcompressor import oneshot
from llmcompressor.errors import InputError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.pytorch.utils import (
    ModuleSparsificationInfo,
    tensor_sparsity,
    tensors_to_device,
)

ZEROS = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]], [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]])


def test_the_share_of_zeros_is_that_of_all_elements() -> None:
    share = tensor_sparsity(ZEROS)
    assert share.item() == pytest.approx(8 / 12)
    assert share.shape == ()


@pytest.mark.parametrize("dim", [0, 1, -1, [0], [0, 1], [1, 0], (2, 0), [0, 1, 2]])
def test_shares_are_told_apart_by_dimensions(dim: int | list[int]) -> None:
    """Each is that of the slice at its place."""
    found = tensor_sparsity(ZEROS, dim)
    dims = [dim % 3] if isinstance(dim, int) else [one % 3 for one in dim]
    for place in torch.cartesian_prod(*(torch.arange(n) for n in found.shape)).reshape(
        -1, len(dims)
    ):
        cut = [slice(None)] * 3
        for one, index in zip(dims, place.tolist(), strict=True):
            cut[one] = slice(index, index + 1)
        assert found[tuple(place.tolist())] == tensor_sparsity(ZEROS[tuple(cut)])


@pytest.mark.parametrize("dim", [3, -4, [0, 3], [1, 1]])
def test_a_dimension_that_is_not_there_is_refused(dim: int | list[int]) -> None:
    with pytest.raises(InputError, match="has shape"):
        tensor_sparsity(ZEROS, dim)


def test_collections_go_to_a_device_in_their_form() -> None:
    one = torch.ones(2)
    given = OrderedDict(a=one, b=[one, (one, {"c": one})])
    moved = tensors_to_device(given, "meta")
    assert type(moved) is OrderedDict
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert isinstance(moved["b"][1], tuple)
    assert moved["b"][1][1]["c"].is_meta
    assert not one.is_meta
    for bad in (5, "text", None):
        with pytest.raises(InputError, match="neither a tensor"):
            tensors_to_device(bad, "meta")


def test_a_module_says_how_sparse_and_how_quantized_it_is() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 4), "b": torch.nn.Linear(8, 4)})
    torch.nn.init.ones_(model["a"].weight)
    model["a"].weight.data[:2] = 0
    model["b"].requires_grad_(False)
    info = ModuleSparsificationInfo(model)
    assert info.params_total == 36
    assert info.params_sparse == 16 + int((model["a"].bias == 0).sum())
    assert info.params_quantized == 0
    groups = {"g": {"targets": ["a"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups))
    assert ModuleSparsificationInfo(model).params_quantized == 36
    whole = ModuleSparsificationInfo(model, {"w": torch.zeros(4, 10)})
    assert whole.params_sparse_percent == 100
    assert whole.params_quantized_percent == 90
    assert json.loads(str(whole))["params_summary"]["total"] == 40
