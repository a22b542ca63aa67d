# SPDX-License-Identifier: Apache-2.0
"""Tell whether another process of this machine has ended, which no store or socket says at once."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from llmcompressor.errors import ProcessError

T = TypeVar("T")
_LOOK = 0.5
"""Seconds between two looks at the other processes."""
_NAMESPACE = Path("/proc/self/ns/pid")


def own_place() -> str:
    """Return the place of this process: its machine, namespace, number and beginning."""
    where = str(_NAMESPACE.readlink()) if _NAMESPACE.exists() else ""
    began = psutil.Process().create_time()
    return json.dumps([platform.node(), where, os.getpid(), began])


def is_alive(place: str) -> bool:
    """Return False for a process of this machine that has ended; others count as alive."""
    if not place:
        return True
    node, where, number, began = json.loads(place)
    if [node, where] != json.loads(own_place())[:2]:
        return True
    try:
        found = psutil.Process(number)
        is_same = found.create_time() == began
        return is_same and found.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def ended(rank: int) -> str:
    """Return what the other ranks are told of one that has ended by itself."""
    return f"Process {rank} has ended without a word: it was killed, or has crashed."


def while_alive(function: Callable[[], T], places: Sequence[str]) -> T:
    """Call a function that waits for other processes, and stop waiting if one of them has ended.

    Args:
        function: it runs in a thread, which is left behind where a process has ended.
        places: :func:`own_place` of each rank.

    Raises:
        ProcessError: a process has ended; whatever the function raises.
    """
    found: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function())
        except BaseException as error:
            failed.append(error)

    thread: Any = threading.Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        for rank, place in enumerate(places):
            if thread.is_alive() and not is_alive(place):
                raise ProcessError(ended(rank))
    if failed:
        raise failed[0]
    return found[0]
