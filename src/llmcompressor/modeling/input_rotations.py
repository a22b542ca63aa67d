# SPDX-License-Identifier: Apache-2.0
"""Input and output rotations of modules: transforms of compressed-tensors in a forward."""

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
    """Return a key of a module's input rotations, equal for modules that rotate an input alike.

    Empty where nothing rotates the input. Rotations count even while they are suspended, or have no
    values yet.
    """
    return tuple((id(one.weight), bool(one.args.inverse)) for one in _of_inputs(module.children()))


@contextmanager
def resting(model: Module) -> Iterator[None]:
    """Suspend input rotations in the body, so that modules are seen to share an input.

    Rotations that another library attached are not suspended.
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
    """The output of a Linear, rotations included, computed without calling any hook."""
    for one in reversed(list(_of_inputs(linear.children()))):  # the last one attached runs first
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
