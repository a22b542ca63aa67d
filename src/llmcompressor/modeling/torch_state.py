# SPDX-License-Identifier: Apache-2.0
"""Torch's thread-local state, saved and restored at every switch between coroutines.

Coroutines of one thread share what torch keeps per thread: grad mode, inference mode, autocast,
and the stack of function modes (a default device is one). A forward pass that is suspended
inside ``with torch.no_grad():`` would leak it to whoever runs next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

__all__ = ["SuspendedState", "TorchState"]

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TorchState:
    """A snapshot of torch's thread-local modes."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    function_modes: tuple[object, ...]

    @classmethod
    def capture(cls) -> TorchState:
        """Capture the current state."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in _AUTOCAST_DEVICES
            ),
            function_modes=tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
        )

    def apply(self, current: TorchState) -> None:
        """Apply this snapshot, inference mode excepted; cheap when nothing differs."""
        if current.grad != self.grad:
            torch.autograd.grad_mode.set_grad_enabled(self.grad)
        if current.autocast != self.autocast:
            for device, enabled, dtype in self.autocast:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        if any(enabled for _, enabled, _ in (*self.autocast, *current.autocast)):
            # It caches casts of weights, which may change while another coroutine runs.
            torch.clear_autocast_cache()
        if current.function_modes != self.function_modes:
            for _ in current.function_modes:
                _pop_mode()  # type: ignore[no-untyped-call]
            for mode in self.function_modes:
                _push_mode(mode)  # type: ignore[no-untyped-call]


class SuspendedState:
    """The torch state of a coroutine while another one runs.

    Args:
        home: the state to apply in its place.
    """

    def __init__(self, home: TorchState) -> None:
        self._state = TorchState.capture()
        self._guard: torch.inference_mode | None = None
        if self._state.inference != home.inference:
            # The only way to set this mode is a guard that restores, on leaving, what it found.
            self._guard = torch.inference_mode(home.inference)
            self._guard.__enter__()
        home.apply(TorchState.capture())

    def give_back(self) -> None:
        """Restore the coroutine's own state.

        Inference mode can only be nested: it has to be the same now as in ``home``.
        """
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None
        self._state.apply(TorchState.capture())
