# SPDX-License-Identifier: Apache-2.0
"""Which files of the package hold a value while a job runs, by a profiler hook on every call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import llmcompressor
from llmcompressor.runtime import threads

ROOT = f"{Path(llmcompressor.__file__).parent}/"


@dataclass
class Followed:
    """Files that had a value in a variable, all on the stack at those moments, all of the run."""

    holders: set[str] = field(default_factory=set)
    takes_part: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)


@contextmanager
def follow(is_it: Callable[[Any], bool]) -> Iterator[Followed]:
    """Record the files whose functions have a value in a variable as they begin or end.

    Args:
        is_it: true of the value that is followed.
    """
    found = Followed()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOT):
            return
        found.called.add(_name(frame))
        if any(is_it(value) for value in tuple(frame.f_locals.values())):
            found.holders.add(_name(frame))
            at: FrameType | None = frame
            while at is not None:
                found.takes_part.add(_name(at))
                at = at.f_back

    before = sys.getprofile()
    threads._pool.cache_clear()  # only threads that start now have the hook
    sys.setprofile(look)
    threading.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
        threads._pool.cache_clear()
        found.takes_part = {name for name in found.takes_part if name}


def _name(frame: FrameType) -> str:
    """Path below the package; nothing of a file outside."""
    path = frame.f_code.co_filename
    return path.removeprefix(ROOT) if path.startswith(ROOT) else ""


def is_weight(original: Tensor) -> Callable[[Any], bool]:
    """True of a matrix in the direction of ``original``: it, its rounded values, its codes."""
    flat = original.flatten().double()

    def is_it(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.shape != original.shape or value.is_meta:
            return False
        own = value.detach().flatten().double()
        return bool(torch.nn.functional.cosine_similarity(flat, own, dim=0) > 0.9)

    return is_it


def is_batch(value: Any) -> bool:
    """True of a mapping with token ids."""
    return isinstance(value, Mapping) and "input_ids" in value


def holds_text(text: str) -> Callable[[Any], bool]:
    """True of a string that contains ``text``, and of a mapping or list with such a value."""

    def is_it(value: Any, depth: int = 1) -> bool:
        if isinstance(value, str):
            return text in value
        if not depth or not isinstance(value, dict | list | tuple):
            return False
        inside = value.values() if isinstance(value, dict) else value
        return any(is_it(each, depth - 1) for each in inside)

    return is_it
