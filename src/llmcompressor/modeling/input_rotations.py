# SPDX-License-Identifier: Apache-2.0
"""Rotations in the forward of a module: of what it is given, and of what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compressed_tensors.transform import TransformBase, TransformLocation
from torch import Tensor
from torch.nn import Module

__all__ = ["RESTS", "input_rotations", "product", "resting"]

RESTS = "rotation_rests"
"""Attribute of a rotation: true while it gives back what it is given."""


def input_rotations(module: Module) -> tuple[object, ...]:
    """Equal for modules that make the same of one input; empty where nothing rotates it.

    It does not matter whether the rotations rest, or have no values yet.
    """
    return tuple((id(one.weight), bool(one.args.inverse)) for one in _of_inputs(module.children()))


@contextmanager
def resting(model: Module) -> Iterator[None]:
    """Have the rotations of inputs rest inside: who gets one tensor is seen to get one tensor.

    Those that a library attached do not know of it.
    """
    awake = [one for one in _of_inputs(model.modules()) if not one.__dict__.get(RESTS)]
    for one in awake:
        one.__dict__[RESTS] = True
    try:
        yield
    finally:
        for one in awake:
            one.__dict__[RESTS] = False


def product(linear: Module, given: Tensor) -> Tensor:
    """What a Linear makes of its input, rotations and all; no hook is told of the call."""
    for one in reversed(list(_of_inputs(linear.children()))):  # each stands before the earlier
        given = _turned(one, given)
    made: Tensor = linear.forward(given)
    for one in _at(TransformLocation.OUTPUT, linear.children()):
        made = _turned(one, made)
    return made


def _turned(rotation: TransformBase, values: Tensor) -> Tensor:
    turned: Tensor = values if rotation.__dict__.get(RESTS) else rotation(values)
    return turned


def _of_inputs(modules: Iterator[Module]) -> Iterator[TransformBase]:
    return _at(TransformLocation.INPUT, modules)


def _at(location: TransformLocation, modules: Iterator[Module]) -> Iterator[TransformBase]:
    for one in modules:
        if isinstance(one, TransformBase) and one.args.location == location:
            yield one
