# SPDX-License-Identifier: Apache-2.0
"""Statistics of inputs add up, whatever the batches; what is not finite has a name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmcompressor.errors import NonFiniteError
from llmcompressor.numerics import gram
from llmcompressor.observers.input_statistics import InputStatistics

T, C = 300, 32


def streams(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What a Linear gets in the compressed and in the original model."""
    torch.manual_seed(0)
    original_TC = torch.randn(T, C) @ torch.randn(C, C) / 4
    return (original_TC + 0.1 * torch.randn(T, C)).to(dtype), original_TC.to(dtype)


def counted(*parts: Tensor, references: tuple[Tensor, ...] | None = None) -> InputStatistics:
    statistics = InputStatistics(C, "cpu", twin=references is not None)
    for index, part in enumerate(parts):
        statistics.update(part, None if references is None else references[index])
    return statistics


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_second_moments_of_the_inputs(dtype: torch.dtype) -> None:
    y_TC, _ = streams(dtype)
    statistics = counted(y_TC)
    assert statistics.tokens == T
    assert statistics.gram.dtype is torch.float32
    assert relative(statistics.gram, y_TC.double().T @ y_TC.double()) < 1e-6
    assert torch.equal(statistics.gram, statistics.gram.T)
    assert statistics.cross is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twin_streams_meet_token_by_token(dtype: torch.dtype) -> None:
    y_TC, x_TC = streams(dtype)
    statistics = counted(*torch.split(y_TC, 70), references=torch.split(x_TC, 70))
    exact_CC = y_TC.double().T @ (x_TC - y_TC).double()
    assert statistics.cross is not None
    assert relative(statistics.cross, exact_CC) < (1e-6 if dtype is torch.float32 else 2.0**-8)


def test_a_batch_without_a_reference_asks_for_no_correction() -> None:
    y_TC, x_TC = streams()
    both = InputStatistics(C, "cpu", twin=True)
    both.update(y_TC[:100], x_TC[:100])
    both.update(y_TC[100:])
    some = counted(y_TC[:100], references=(x_TC[:100],))
    assert relative(both.gram, counted(y_TC).gram) < 1e-6
    assert both.cross is not None
    assert some.cross is not None
    assert relative(both.cross, some.cross) < 1e-5


@pytest.mark.parametrize("chunk", [1, 37, 4096])
@pytest.mark.parametrize("batch", [1, 13, T])
def test_the_size_of_batches_and_chunks_does_not_show(
    chunk: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y_TC, x_TC = streams()
    expected = counted(y_TC, references=(x_TC,))
    monkeypatch.setattr(gram.TokenBuffer.__init__, "__defaults__", (1, chunk))
    statistics = counted(*torch.split(y_TC, batch), references=torch.split(x_TC, batch))
    assert statistics.tokens == T
    assert relative(statistics.gram, expected.gram) < 1e-6
    assert statistics.cross is not None
    assert expected.cross is not None
    assert relative(statistics.cross, expected.cross) < 1e-5


def test_halves_merge_to_the_whole() -> None:
    y_TC, x_TC = streams()
    whole = counted(y_TC, references=(x_TC,))
    first = counted(y_TC[:90], references=(x_TC[:90],))
    first.merge(counted(y_TC[90:], references=(x_TC[90:],)))
    assert first.tokens == whole.tokens
    assert relative(first.gram, whole.gram) < 1e-6
    assert first.cross is not None
    assert whole.cross is not None
    assert relative(first.cross, whole.cross) < 1e-5
    assert torch.equal(first.gram, first.gram.T)


def test_an_input_overwritten_later_was_counted_as_it_came() -> None:
    """Some models add to their hidden state in place; small batches wait for others."""
    y_TC, x_TC = streams()
    statistics = InputStatistics(C, "cpu", twin=True)
    for y, x in zip(torch.split(y_TC, 50), torch.split(x_TC, 50), strict=True):
        given = y.clone(), x.clone()
        statistics.update(*given)
        for tensor in given:
            tensor.fill_(7.0)
    expected = counted(y_TC, references=(x_TC,))
    assert relative(statistics.gram, expected.gram) < 1e-6
    assert statistics.cross is not None
    assert expected.cross is not None
    assert relative(statistics.cross, expected.cross) < 1e-5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_are_an_error_that_names_the_module(bad: float) -> None:
    y_TC, _ = streams()
    y_TC[17, 3] = bad
    statistics = InputStatistics(C, "cpu", name="model.layers.3.mlp.up_proj")
    statistics.update(y_TC)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.3\.mlp\.up_proj"):
        _ = statistics.gram  # what waits is multiplied now


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(16,), (5, 8)])
def test_of_few_rows_what_their_outputs_lack_is_counted(
    dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    """The same as from the cross product: (X − Y)Wᵀ, seen from the inputs."""
    y_TC, x_TC = streams(dtype)
    weights = [torch.randn(count, C).to(dtype) for count in rows]
    statistics = InputStatistics(C, "cpu", twin=True, weights=weights)
    for y, x in zip(torch.split(y_TC, 70), torch.split(x_TC, 70), strict=True):
        statistics.update(y, x)
    assert statistics.cross is None
    assert statistics.missing is not None
    difference_TC = (x_TC - y_TC).double()
    exact_CR = y_TC.double().T @ (difference_TC @ torch.cat(weights).double().T)
    assert statistics.missing.dtype is torch.float32
    assert relative(statistics.missing, exact_CR) < (1e-6 if dtype is torch.float32 else 2.0**-8)
    assert relative(statistics.gram, counted(y_TC).gram) < 1e-6


def test_massive_tokens_count_as_twice_the_median() -> None:
    y_TC, x_TC = (functional.normalize(one) for one in streams())
    y_TC[::3] = 0  # no token whose length counts
    y_TC[4], y_TC[10], y_TC[11] = 500 * y_TC[4], 9 * y_TC[10], 7 * y_TC[11]
    weight_T1 = torch.ones(T, 1)
    weight_T1[4], weight_T1[10] = 2 / 500, 2 / 9
    statistics = counted(y_TC, references=(x_TC,))
    weighted_TC = weight_T1 * y_TC
    exact_CC = weighted_TC.double().T @ (weight_T1 * (x_TC - y_TC)).double()
    assert statistics.cross is not None
    assert relative(statistics.gram, weighted_TC.double().T @ weighted_TC.double()) < 1e-6
    assert relative(statistics.cross, exact_CC) < 1e-5
