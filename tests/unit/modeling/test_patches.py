# SPDX-License-Identifier: Apache-2.0
"""What stands in for a module's forward while something is looked at."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from compressed_tensors.transform import HadamardTransform, TransformArgs, TransformScheme
from torch import Tensor
from torch.nn import Linear, Parameter, Sequential, functional

from llmcompressor.modeling.patches import (
    RESTS,
    input_rotation_key,
    replace_functional_linear,
    rotations_suspended,
)

WEIGHT = Parameter(torch.eye(4), requires_grad=False)


def rotated(weight: Parameter, *, inverse: bool = False, location: str = "input") -> Linear:
    module = Linear(4, 4)
    args = TransformArgs(targets=["Linear"], location=location, inverse=inverse)
    scheme = TransformScheme(type="random-hadamard", apply=[args])
    module.register_module("v", HadamardTransform(weight, None, scheme, args, Linear))
    return module


def test_modules_are_alike_if_matrix_and_direction_are() -> None:
    other = Parameter(torch.eye(4), requires_grad=False)
    assert input_rotation_key(Linear(4, 4)) == ()
    assert input_rotation_key(rotated(WEIGHT)) == input_rotation_key(rotated(WEIGHT)) != ()
    assert input_rotation_key(rotated(WEIGHT)) != input_rotation_key(rotated(WEIGHT, inverse=True))
    assert input_rotation_key(rotated(WEIGHT)) != input_rotation_key(rotated(other))
    assert input_rotation_key(rotated(WEIGHT, location="output")) == ()


def test_rotations_of_inputs_rest_inside_and_others_do_not() -> None:
    model = Sequential(rotated(WEIGHT), rotated(WEIGHT, location="output"), rotated(WEIGHT))
    transforms = [module.get_submodule("v") for module in model]
    transforms[2].__dict__[RESTS] = True  # at rest before, and behind it
    with rotations_suspended(model):
        assert [bool(one.__dict__.get(RESTS)) for one in transforms] == [True, False, True]
    assert [bool(one.__dict__.get(RESTS)) for one in transforms] == [False, False, True]


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
