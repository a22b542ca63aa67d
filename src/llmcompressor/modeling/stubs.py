# SPDX-License-Identifier: Apache-2.0
"""Forward overrides: forwards of modules that are replaced temporarily."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.nn import Module

__all__ = ["put_back", "stubbed"]

Forward = Callable[..., Any]


def put_back(module: Module, own: Forward | None) -> None:
    """Restore a module's forward.

    Args:
        module: the module whose forward was replaced.
        own: the forward that the object had of its own; ``None`` if it had that of its class.
    """
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = own


@contextlib.contextmanager
def stubbed(
    modules: Iterable[Module], stub: Callable[[Module, Forward], Forward]
) -> Iterator[None]:
    """Override the forwards of modules while the body runs.

    Args:
        modules: the modules to override.
        stub: makes the override, given the module and its own forward.
    """
    own = {module: module.__dict__.get("forward") for module in modules}
    try:
        for module in own:
            forward = module.forward
            module.forward = stub(module, forward)
            # inspect.signature follows it
            module.forward.__wrapped__ = forward  # type: ignore[attr-defined]
        yield
    finally:
        for module, before in own.items():
            put_back(module, before)
