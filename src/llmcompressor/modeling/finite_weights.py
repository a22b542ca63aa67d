# SPDX-License-Identifier: Apache-2.0
"""Fast detection of NaN and infinity in weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from llmcompressor.modeling.flat_pieces import gathered, is_flat
from llmcompressor.modeling.spread import is_in_parts, local, on_any
from llmcompressor.numerics.finite import is_finite
from llmcompressor.threads import each_on_one_thread

__all__ = ["first_nonfinite", "nonfinite"]


def first_nonfinite(
    model: torch.nn.Module, module_names: Iterable[str] | None = None
) -> str | None:
    """The name of the first parameter that holds NaN or infinity.

    Where parameters are sharded over processes, all of them have to call this, and get the same
    answer.

    Args:
        model: the model.
        module_names: look only at these modules' own parameters; all modules if ``None``.

    Returns:
        The parameter's full name, or ``None`` if all are finite.
    """
    names = [name for name, _ in model.named_modules()] if module_names is None else module_names
    every = {
        f"{name}.{own}" if name else own: parameter
        for name in names
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False)
    }
    return next(iter(nonfinite(every)), None)


@torch.no_grad()
def nonfinite(named: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that hold NaN or infinity, in their order.

    Args:
        named: weights of any shape, dtype and device. Where they are sharded over processes, all
            processes have to pass the same names in the same order, and get the same answer.
    """
    bad: set[str] = set()

    def look(pair: tuple[str, Tensor]) -> None:
        if not is_finite(pair[1]):
            bad.add(pair[0])

    parts = [(name, local(weight)) for name, weight in named.items() if not is_flat(weight)]
    # one tensor per thread: threads that share one would wait for the one that reads ahead
    each_on_one_thread(look, [pair for pair in parts if pair[1].device.type == "cpu"])
    for pair in parts:
        if pair[1].device.type != "cpu":
            look(pair)
    for name, weight in named.items():
        if is_flat(weight):
            look((name, gathered(weight)))
    bad |= _elsewhere(named, bad)
    return [name for name in named if name in bad]


def _elsewhere(named: Mapping[str, Tensor], bad: Collection[str]) -> set[str]:
    """Names that are bad in any process's shard, by one all-reduce per mesh and device type."""
    found: set[str] = set()
    spread: dict[Any, list[str]] = {}
    for name, weight in named.items():
        if is_in_parts(weight):
            mesh = weight.device_mesh  # type: ignore[attr-defined]  # a DTensor
            spread.setdefault((mesh, local(weight).device.type), []).append(name)
    for names in spread.values():
        marked = on_any(torch.tensor([name in bad for name in names]), named[names[0]])
        found.update(name for name, one in zip(names, marked.tolist(), strict=True) if one)
    return found
