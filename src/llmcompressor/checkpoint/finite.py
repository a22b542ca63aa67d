# SPDX-License-Identifier: Apache-2.0
"""Find NaN and infinity in weights, fast."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from llmcompressor.numerics.finite import is_finite

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
    for name in names:
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False):
            if not is_finite(parameter):
                return f"{name}.{own}" if name else own
    return None
