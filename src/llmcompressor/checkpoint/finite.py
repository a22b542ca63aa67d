# SPDX-License-Identifier: Apache-2.0
"""Find NaN and infinity in weights, fast."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["first_nonfinite", "is_finite"]

_CHUNK = 1 << 24


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` (any shape and dtype) holds neither NaN nor infinity.

    A float32 sum is NaN or infinite whenever one of its terms is, so one pass over the data
    without a temporary settles the usual case. Where finite terms overflow the sum, each element
    is looked at.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    if bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
        return True
    return all(bool(torch.isfinite(part).all()) for part in torch.split(tensor.reshape(-1), _CHUNK))


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
