# SPDX-License-Identifier: Apache-2.0
"""Paused forward: the model's own forward, suspended at its target modules.

Each batch runs the model in a coroutine (``greenlet``) that can be suspended from any depth. The
forward of every target module is replaced, for a while, by a stub that suspends the coroutine
and hands its call to the scheduler::

    scheduler                         pass for batch 0     pass for batch 1   …
    start every pass            →     embeds … calls L0    embeds … calls L0
    all wait at L0: calibrate and
      compress L0
    run L0 (compressed) per batch →   returns, calls L1    returns, calls L1
    all wait at L1 …

Nothing is traced and nothing is known of the architecture: masks, rotary tables, encoder outputs
and whatever else the model computes between two targets is computed by its own code, once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import greenlet
import torch
from torch.nn import Module
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from llmcompressor.errors import TargetError
from llmcompressor.modeling.call_graph import copy_arguments
from llmcompressor.modeling.patches import restore_forward

# --------------------
# Torch's thread-local state, saved and restored at every switch between coroutines.
#
# Coroutines of one thread share what torch keeps per thread: grad mode, inference mode, autocast,
# and the stack of function modes (a default device is one). A forward pass that is suspended
# inside ``with torch.no_grad():`` would leak it to whoever runs next.

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

    def restore_own(self) -> None:
        """Restore the coroutine's own state.

        Inference mode can only be nested: it has to be the same now as in ``home``.
        """
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None
        self._state.apply(TorchState.capture())


@dataclass(eq=False)
class Pass:
    """A forward pass of one batch, suspended at a target or finished."""

    index: int
    """Which batch this is, in calibration order."""
    run: Callable[[], object]
    """Runs the model on the batch."""
    stream: str = "compressed"
    """Through which weights: ``"compressed"`` or ``"original"``."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The context variables that the pass sees (disabled hooks, for instance)."""
    module: Module | None = None
    """The target it waits at; ``None`` before the start and after the end."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    _coroutine: greenlet.greenlet | None = None
    _suspended: SuspendedState | None = None

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which the pass called the target it waits at."""
        return self.args, self.kwargs

    @property
    def frame(self) -> Any:
        """The innermost frame of the suspended pass, to inspect what it holds."""
        return None if self._coroutine is None else self._coroutine.gr_frame


@dataclass(frozen=True)
class Stop:
    """The passes that wait at one module."""

    module: Module
    name: str
    passes: tuple[Pass, ...]


class PausedForward:
    """Runs passes of a model from target to target.

    Args:
        targets: module → name, in the order in which they are expected to be called. A call of a
            target suspends its pass as long as the target is pending; :meth:`release` ends
            that.
        passes: the passes to run; :meth:`next_stop` starts those that :meth:`start` did not.

    It is a context manager: leaving it, in whatever way, unwinds every suspended pass and
    restores every forward.
    """

    def __init__(self, targets: Mapping[Module, str], passes: Iterable[Pass]) -> None:
        check_not_nested(targets)
        self._names = dict(targets)
        self._order = {module: position for position, module in enumerate(targets)}
        self._passes = list(passes)
        self._pending = set(targets)
        self._saved: dict[Module, Any] = {}
        self._forwards: dict[Module, Callable[..., Any]] = {}
        self._hub: greenlet.greenlet | None = None
        self._running: dict[greenlet.greenlet, Pass] = {}
        self._tried: Module | None = None
        self.surroundings: Callable[[Pass, Module], AbstractContextManager[object]] | None = None
        """Inside what a pass runs a target that is not pending; asked at each such call."""

    # ------------------------------------------------------------------ context manager

    def __enter__(self) -> PausedForward:
        self._hub = greenlet.getcurrent()
        try:
            for module in self._names:
                self._saved[module] = module.__dict__.get("forward")
                self._forwards[module] = module.forward
                module.forward = self._stub(module, module.forward)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            self._restore()

    def _restore(self) -> None:
        for module, forward in self._saved.items():
            restore_forward(module, forward)
        self._saved.clear()
        self._forwards.clear()

    # ------------------------------------------------------------------ scheduling

    @property
    def pending(self) -> Sequence[str]:
        """Names of the targets that are still to be calibrated, in order."""
        return [self._names[module] for module in self._order if module in self._pending]

    @property
    def pending_modules(self) -> AbstractSet[Module]:
        """The targets that are still to be calibrated."""
        return self._pending

    @property
    def passes(self) -> Sequence[Pass]:
        """All passes, in order."""
        return self._passes

    @property
    def current(self) -> Pass | None:
        """The pass whose code is running now; ``None`` in the scheduler's own code."""
        return self._running.get(greenlet.getcurrent())

    def release(self, module: Module) -> None:
        """Mark ``module`` as done: later calls run it instead of suspending their pass."""
        self._pending.discard(module)

    def restore_forwards(self, modules: Iterable[Module]) -> None:
        """Restore the forwards of targets among ``modules``, which all passes have left."""
        for module in modules:
            if module in self._saved:
                self._pending.discard(module)
                restore_forward(module, self._saved.pop(module))

    def unstarted(self) -> Sequence[Pass]:
        """Passes that have not begun."""
        return [one for one in self._passes if one._coroutine is None and not one.finished]

    def start(self, one: Pass) -> None:
        """Begin ``one``; it runs to its first stop."""

        def run() -> None:
            one.run()  # its output is dropped: it is not used, and can be large

        coroutine = greenlet.greenlet(run, parent=self._hub)
        coroutine.gr_context = one.context
        one._coroutine = coroutine
        self._running[coroutine] = one
        self._switch(one, coroutine.switch)

    def next_stop(self, agreed: Callable[[int], int] = lambda place: place) -> Stop | None:
        """The passes that wait at the earliest target; ``None`` when none waits any more.

        Batches may arrive at different modules (data-dependent routes). The earliest target in the
        given order is served first, so that passes which get there can join those that wait at a
        later one.

        Args:
            agreed: the least place in the order of targets over all ranks, given that of this one.
                No pass of this rank need wait there.
        """
        for one in self.unstarted():
            self.start(one)
        at = [one.module for one in self._passes if one.module is not None]
        targets = list(self._names)
        place = agreed(min(map(self._order.__getitem__, at), default=len(targets)))
        if place == len(targets):
            return None
        module = targets[place]
        waiting = tuple(one for one in self._passes if one.module is module)
        return Stop(module, self._names[module], waiting)

    def execute(self, one: Pass, *, with_hooks: bool = False) -> Any:
        """Run the module that ``one`` waits at with its own forward; the pass stays suspended.

        It runs in the torch state of the pass, but not in its context: outputs that the model
        records in context variables are recorded when the pass itself resumes. Writes to its
        arguments are discarded, as the module will run again.

        Args:
            one: a suspended pass.
            with_hooks: also call the hooks of the module itself.
        """
        assert one.module is not None
        assert one._suspended is not None
        home = TorchState.capture()
        try:
            one._suspended.restore_own()
            if with_hooks:
                self._tried = one.module
                return one.module(*one.args, **one.kwargs)
            args, kwargs = copy_arguments((one.args, one.kwargs))
            return self._forwards[one.module](*args, **kwargs)
        finally:
            self._tried = None
            one._suspended = SuspendedState(home)

    def resume(self, one: Pass, inside: AbstractContextManager[object] | None = None) -> None:
        """Run the module that ``one`` waits at, and continue to the next stop.

        Args:
            one: a suspended pass.
            inside: the context that the module runs in; what follows the module does not.
        """
        assert one._coroutine is not None
        assert one.module is not None
        one.module, one.args, one.kwargs = None, (), {}
        self._switch(one, one._coroutine.switch, inside or contextlib.nullcontext())

    def stop(self) -> None:
        """Unwind every suspended pass; nothing after the last target is computed."""
        self._pending.clear()  # a model that swallows the exit must not wait again
        failure: BaseException | None = None
        for one in self._passes:
            one.module, one.args, one.kwargs = None, (), {}
            try:
                if one._coroutine is not None and not one._coroutine.dead:
                    # GreenletExit: the model's ``finally`` blocks run, and nothing else does.
                    self._switch(one, one._coroutine.throw)
            except BaseException as error:
                failure = failure or error  # the other passes are unwound all the same
            one.finished = True
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------ switching

    def _switch(self, one: Pass, switch: Callable[..., Any], *values: Any) -> None:
        """Run ``one`` until it waits or ends; pass and scheduler keep their own torch state."""
        home = TorchState.capture()
        try:
            if one._suspended is not None:
                one._suspended.restore_own()
            switch(*values)
        finally:
            one._suspended = SuspendedState(home)
            if one._coroutine is not None and one._coroutine.dead:
                self._running.pop(one._coroutine, None)
                one._coroutine, one._suspended, one.finished = None, None, True

    def _stub(self, module: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            one = self.current
            if one is None:
                if module is self._tried:  # its hooks get the arguments of the call itself
                    args, kwargs = copy_arguments((args, kwargs))
                return forward(*args, **kwargs)
            if module in self._pending:
                one.module, one.args, one.kwargs = module, args, kwargs
                assert self._hub is not None
                inside = self._hub.switch()
            elif self.surroundings is not None:
                inside = self.surroundings(one, module)
            else:
                return forward(*args, **kwargs)
            with inside:
                return forward(*args, **kwargs)

        paused.__wrapped__ = forward  # type: ignore[attr-defined]  # inspect.signature looks through
        return paused


def check_not_nested(targets: Mapping[Module, str]) -> None:
    """Raise if one target contains another.

    Raises:
        TargetError: naming both.
    """
    for module, name in targets.items():
        for inner in module.modules():
            if inner is not module and inner in targets:
                raise TargetError(
                    f"The targets {name!r} and {targets[inner]!r} are nested: the second is a "
                    "part of the first.",
                    "Name only one of them.",
                )
