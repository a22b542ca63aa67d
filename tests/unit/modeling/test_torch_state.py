# SPDX-License-Identifier: Apache-2.0
"""Suspended code keeps its torch state to itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import greenlet
import pytest
import torch
from tests.support.thinned import thinned

from llmcompressor.modeling.paused_forward import SuspendedState, TorchState

STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad on": torch.enable_grad,
    "grad off": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast, other dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "default device": lambda: torch.device("meta"),
}


@contextlib.contextmanager
def _suspended_inside(state: AbstractContextManager[Any]) -> Iterator[Callable[[], TorchState]]:
    """A coroutine that waits inside ``state``; yields how to look at its state from within."""
    hub = greenlet.getcurrent()

    def body() -> None:
        with state:
            while hub.switch(TorchState.capture()):
                pass

    home = TorchState.capture()
    coroutine = greenlet.greenlet(body)
    coroutine.switch()
    suspended = [SuspendedState(home)]

    def look() -> TorchState:
        own = TorchState.capture()
        suspended[0].restore_own()
        seen = coroutine.switch(True)
        suspended[0] = SuspendedState(own)
        return seen

    yield look
    suspended[0].restore_own()
    coroutine.switch(False)
    assert coroutine.dead


# Inference mode can only be nested: who resumes is in the one that it was in at the start.
@pytest.mark.parametrize(
    ("inner", "outer"), thinned(STATES, [name for name in STATES if name != "inference"])
)
def test_each_side_keeps_its_own_state(inner: str, outer: str) -> None:
    before = TorchState.capture()
    with STATES[inner]():
        expected_inside = TorchState.capture()
    with _suspended_inside(STATES[inner]()) as look:
        assert TorchState.capture() == before
        with STATES[outer]():
            there = TorchState.capture()
            inside = look()
            assert TorchState.capture() == there
        assert inside.function_modes == expected_inside.function_modes or "device" in inner
        assert inside.autocast == expected_inside.autocast
        assert inside.grad == expected_inside.grad
        assert inside.inference == expected_inside.inference
        assert TorchState.capture() == before
    assert TorchState.capture() == before
