# SPDX-License-Identifier: Apache-2.0
"""Find NaN and infinity in weights, fast."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from llmcompressor.modeling.flat_pieces import gathered, is_flat
from llmcompressor.numerics.finite import is_finite
from llmcompressor.threads import each_on_one_thread

__all__ = ["first_nonfinite", "is_finite"]


@torch.no_grad()
def first_nonfinite(
    model: torch.nn.Module, module_names: Iterable[str] | None = None
) -> str | None:
    """The name of the first parameter that holds NaN or infinity.

    Args:
        model: the model.
        module_names: look only at these modules' own parameters; all modules if ``None``.

    Returns:
        The parameter's full name, or ``None`` if all are finite.
    """
    names = [name for name, _ in model.named_modules()] if module_names is None else module_names
    every = [
        (f"{name}.{own}" if name else own, parameter)
        for name in names
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False)
    ]
    bad: set[str] = set()

    def look(pair: tuple[str, Tensor]) -> None:
        if not is_finite(pair[1]):
            bad.add(pair[0])

    # side by side: threads that share one would wait for the one that reads ahead
    here = [pair for pair in every if pair[1].device.type == "cpu" and not is_flat(pair[1])]
    each_on_one_thread(look, here)
    for name, parameter in every:
        if is_flat(parameter):
            look((name, gathered(parameter)))
        elif parameter.device.type != "cpu":
            look((name, parameter))
    return next((name for name, _ in every if name in bad), None)
