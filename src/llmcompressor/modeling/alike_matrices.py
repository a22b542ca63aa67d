# SPDX-License-Identifier: Apache-2.0
"""Calibration of expert Linears with the inputs of the same Linears in other experts.

Some experts accept nothing but their own tokens, because their code depends on which expert they
are. They cannot be called with another expert's input, but their Linears can: the experts of one
list have equal structure, so each Linear has a counterpart in every other expert with the same
input features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.modeling.call_order import first_tensor, version_of
from llmcompressor.modeling.listed_experts import ExpertList

__all__ = ["AlikeMatrices", "is_matrix"]


def is_matrix(module: Module) -> bool:
    """Return True if a module multiplies its input by a weight of its own, like a Linear."""
    return hasattr(module, "in_features")


@dataclass
class _Given:
    """An input tensor of an expert's Linears."""

    tensor: Tensor
    version: int
    copy: Tensor
    """As it was then: the expert's own code may write to it."""
    paths: list[str]
    """Which matrices get it, by their names in the expert."""


class AlikeMatrices:
    """The Linears of the experts of some lists.

    Args:
        lists: those whose members are called with their own tokens alone.
    """

    def __init__(self, lists: Iterable[ExpertList]) -> None:
        members = [member for one in lists for member in one.members.values()]
        self._paths = {
            member: {part: path for path, part in member.named_modules() if is_matrix(part)}
            for member in members
        }
        self._heard: dict[Module, list[_Given]] = {}

    def __contains__(self, member: Module) -> bool:
        return member in self._paths

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record the inputs of expert Linears in the body, while :meth:`hearing` is active."""

        def hear(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = first_tensor(args, kwargs)
            for member, heard in self._heard.items():
                path = self._paths[member].get(module)
                if path is not None and given is not None:
                    _note(heard, given, path)

        matrices = {part for paths in self._paths.values() for part in paths}
        handles = [  # before input rotations: the other Linears apply their own
            one.register_forward_pre_hook(hear, prepend=True, with_kwargs=True) for one in matrices
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def hearing(self, member: Module, others: Sequence[Module]) -> Iterator[None]:
        """Record the inputs of ``member``'s Linears, then call those of ``others`` with them."""
        heard = self._heard[member] = []
        try:
            yield
        finally:
            del self._heard[member]
        for other in others:
            for given in heard:
                copy = given.copy.clone()  # or hooks would take it for another expert's input
                for path in given.paths:
                    other.get_submodule(path)(copy)


def _note(heard: list[_Given], tensor: Tensor, path: str) -> None:
    version = version_of(tensor)
    for given in heard:
        if given.tensor is tensor and given.version == version:
            given.paths.append(path)
            return
    heard.append(_Given(tensor, version, tensor.detach().clone(), [path]))
