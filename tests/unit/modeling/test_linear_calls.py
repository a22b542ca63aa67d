# SPDX-License-Identifier: Apache-2.0
"""What stands in for torch's product does so in one thread, and goes in whatever order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmcompressor.modeling.patches import replace_functional_linear

GIVEN = torch.ones(1, 2)


def _standing_in(stack: ExitStack, factor: float) -> None:
    def product(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return given * factor

    stack.enter_context(replace_functional_linear(lambda given, weight: len(weight) == 2, product))


def _first(rows: int = 2) -> float:
    return float(functional.linear(GIVEN, torch.ones(rows, 2))[0, 0])


def test_the_innermost_that_fits_is_called() -> None:
    with ExitStack() as stack:
        _standing_in(stack, 3.0)
        with ExitStack() as inner:
            _standing_in(inner, 5.0)
            assert (_first(), _first(rows=1)) == (5.0, 2.0)
        assert _first() == 3.0
    assert _first() == 2.0


@pytest.mark.parametrize("first", [0, 1])
def test_threads_have_their_own_and_leave_in_any_order(first: int) -> None:
    plain = functional.linear
    threads = [ThreadPoolExecutor(1) for _ in range(2)]
    stacks = [ExitStack() for _ in threads]
    for thread, stack, factor in zip(threads, stacks, (3.0, 5.0), strict=True):
        thread.submit(_standing_in, stack, factor).result()
    assert [thread.submit(_first).result() for thread in threads] == [3.0, 5.0]
    assert _first() == 2.0
    threads[first].submit(stacks[first].close).result()
    assert threads[1 - first].submit(_first).result() == (5.0, 3.0)[first]
    threads[1 - first].submit(stacks[1 - first].close).result()
    assert functional.linear is plain
