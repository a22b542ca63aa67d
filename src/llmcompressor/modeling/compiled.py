# SPDX-License-Identifier: Apache-2.0
"""Hooks on compiled models, which do not notice hooks that are added or removed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["compile_anew", "never_traced"]


def compile_anew() -> None:
    """Make ``torch.compile`` recompile everything at its next call.

    A compiled forward keeps the hooks that its modules had when it was traced, and torch leaves out
    the guards that would detect others (``skip_nnmodule_hook_guards``). So this is called whenever
    hooks are added or removed during training. It costs nothing where nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def never_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude ``function`` from compilation: compiled forwards call it as plain Python.

    For hooks that collect statistics. Traced, they would be recompiled for each module, because
    their state differs, until torch gives up on compiling them.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    kept: Callable[..., Any] = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    return kept
