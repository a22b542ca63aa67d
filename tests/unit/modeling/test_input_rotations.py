# SPDX-License-Identifier: Apache-2.0
"""Who makes the same of one input, and that nothing is made of it meanwhile."""

from __future__ import annotations

import torch
from compressed_tensors.transform import HadamardTransform, TransformArgs, TransformScheme
from torch.nn import Linear, Parameter, Sequential

from llmcompressor.modeling.patches import RESTS, input_rotation_key, rotations_suspended

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
