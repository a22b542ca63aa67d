# SPDX-License-Identifier: Apache-2.0
"""Forwards that are replaced for a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.nn import Module

__all__ = ["put_back", "stubbed"]

Forward = Callable[..., Any]


def put_back(module: Module, own: Forward | None) -> None:
    """Give a module its forward back.

    Args:
        module: whose was replaced.
        own: that of the object before; ``None`` where it had that of its class.
    """
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = own


@contextlib.contextmanager
def stubbed(
    modules: Iterable[Module], stub: Callable[[Module, Forward], Forward]
) -> Iterator[None]:
    """While the body runs, modules have other forwards.

    Args:
        modules: which.
        stub: makes the other one, told the module and its own forward.
    """
    own = {module: module.__dict__.get("forward") for module in modules}
    try:
        for module in own:
            forward = module.forward
            module.forward = stub(module, forward)
            # inspect.signature looks through
            module.forward.__wrapped__ = forward  # type: ignore[attr-defined]
        yield
    finally:
        for module, before in own.items():
            put_back(module, before)
