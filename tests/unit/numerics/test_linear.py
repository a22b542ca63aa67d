# SPDX-License-Identifier: Apache-2.0
"""16-bit Linears multiplied in float32: the same products, for any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.pairs import pairs
from torch import Tensor
from torch.nn import functional

from llmcompressor.numerics import products
from llmcompressor.numerics.products import wide_linear
from llmcompressor.pipelines import batches as quick
from llmcompressor.pipelines.batches import float32_linears

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that lacks the instructions."""
    monkeypatch.setattr(quick, "is_slow_dtype", lambda dtype: dtype in DTYPES)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that were widened."""
    shapes: list[tuple[int, ...]] = []
    real: Callable[..., Tensor] = quick.wide_linear

    def wide(given: Tensor, *rest: Tensor) -> Tensor:
        shapes.append(tuple(given.shape))
        return real(given, *rest)

    monkeypatch.setattr(quick, "wide_linear", wide)
    return shapes


def operands(dtype: torch.dtype, *shape: int, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape), torch.randn(rows, shape[-1])
    return x.to(dtype), weight.to(dtype), torch.randn(rows).to(dtype)


@pairs(dtype=DTYPES, has_bias=[False, True], shape=[(3, 100, 48), (1, 48), (0, 48), (257, 48)])
def test_it_rounds_the_exact_result_once(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_PIECE_WEIGHTS", 7 * 48)  # several pieces, the last one smaller
    x, weight, bias = operands(dtype, *shape)
    given = bias if has_bias else None
    exact = functional.linear(x.double(), weight.double(), None if given is None else bias.double())
    found = wide_linear(x, weight, given)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    spacing = torch.finfo(dtype).eps * exact.abs().clamp_min(1e-2)
    assert bool(((found.double() - exact).abs() <= 0.51 * spacing).all())


@pytest.mark.parametrize("tokens", [113, 700])
def test_the_number_of_threads_never_changes_it(tokens: int) -> None:
    x, weight, bias = operands(torch.bfloat16, tokens, 96)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(wide_linear(x, weight, bias))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_linears_of_a_model_are_widened_inside_only(
    slow: None, taken: list[tuple[int, ...]]
) -> None:
    x, weight, _ = operands(torch.bfloat16, 2, 64, 48)
    module = torch.nn.Linear(48, 40).bfloat16()
    plain = functional.linear
    with torch.no_grad():
        outside = module(x)
        with float32_linears():
            inside = module(x)
            functional.linear(x[:, :20], weight)  # too few tokens
            functional.linear(x.float(), weight.float())
        assert functional.linear is plain
        module(x)
    assert taken == [(2, 64, 48)]
    assert torch.allclose(inside.float(), outside.float(), rtol=2**-7, atol=1e-2)
