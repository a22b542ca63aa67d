# SPDX-License-Identifier: Apache-2.0
"""Compiled models: they do not notice hooks that come or go, nor that a hook changes its ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["compile_anew", "never_traced"]


def compile_anew() -> None:
    """Have whatever ``torch.compile`` has compiled compiled again at its next call.

    A compiled forward holds the hooks that its modules had when it was traced, and torch leaves
    out the guards that would tell of others (``skip_nnmodule_hook_guards``). So whoever puts or
    takes a hook while a model is trained calls this. It costs nothing where nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def never_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a compiled forward is to call it: as Python, between two compiled parts.

    For hooks that keep books. Traced they would be compiled again for each module, because what
    is in the books is different for each, until torch gives them up.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    kept: Callable[..., Any] = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    return kept
