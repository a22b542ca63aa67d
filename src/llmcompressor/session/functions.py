# SPDX-License-Identifier: Apache-2.0
"""The active session, and callbacks that send it the events of a training loop."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmcompressor.core.events import EventType
from llmcompressor.core.state import ModifiedState
from llmcompressor.logger import logger
from llmcompressor.session.session import CompressionSession

if TYPE_CHECKING:
    from torch.nn import Module

_default = CompressionSession()
_opened = threading.local()
"""``sessions``: those that are open in this thread, innermost last."""
_running = threading.RLock()
"""Held by the thread whose run is at work."""
_PATIENCE = 60.0
"""Seconds after which a run that waits for another says what may be wrong."""


@contextmanager
def create_session() -> Iterator[CompressionSession]:
    """A new session, active inside the ``with`` block in this thread.

    The session that was active before is restored afterwards.
    """
    before = _sessions()
    session = CompressionSession()
    _opened.sessions = (*before, session)
    try:
        yield session
    finally:
        _opened.sessions = before


def _sessions() -> tuple[CompressionSession, ...]:
    found: tuple[CompressionSession, ...] = getattr(_opened, "sessions", ())
    return found


def active_session() -> CompressionSession:
    """The innermost session of this thread, else the shared session of the process."""
    return (_default, *_sessions())[-1]


@contextmanager
def run_session() -> Iterator[CompressionSession]:
    """The session created around the ``with`` block, else a new one for the block.

    A session in which another run is active is not used either.
    """
    if _sessions():
        with exclusive_session() as session:
            yield session
    else:
        with _exclusive_run(), create_session() as session:
            yield session


@contextmanager
def exclusive_session() -> Iterator[CompressionSession]:
    """The active session, held for a run alone; a new one if a run holds it already.

    Runs of other threads are waited for: threads may share the process's session, and always share
    torch's settings, which a run changes and restores. A run within a run, started by a modifier,
    gets a session of its own.
    """
    with _exclusive_run():
        session = active_session()
        if not session.taken.acquire(blocking=False):
            with create_session() as own:
                yield own
            return
        try:
            yield session
        finally:
            session.taken.release()


@contextmanager
def _exclusive_run() -> Iterator[None]:
    if not _running.acquire(blocking=False):
        logger.info("Another run of this process is at work: this one waits for its end.")
        if not _running.acquire(timeout=_PATIENCE):
            logger.warning(
                "Still waiting for another run of this process. If that run waits for this one, as "
                "a modifier does that starts a run in a thread and joins it, neither will end: "
                "begin the inner run in the modifier's own thread."
            )
            _running.acquire()
    try:
        yield
    finally:
        _running.release()


def reset_session() -> None:
    """Finalize all active modifiers of the active session and reset it."""
    active_session().reset()


def initialize(*args: Any, **kwargs: Any) -> ModifiedState:
    """Call :meth:`.CompressionSession.initialize` of the active session."""
    return active_session().initialize(*args, **kwargs)


def finalize(**kwargs: Any) -> ModifiedState:
    """Call :meth:`.CompressionSession.finalize` of the active session."""
    return active_session().finalize(**kwargs)


class LifecycleCallbacks:
    """Sends the events of a training loop to the active session.

    The events of one batch are, in this order: ``batch_start``, ``loss_calculated``,
    ``optim_pre_step``, ``optim_post_step``, ``batch_end``. Each takes ``global_step`` from a
    loop that counts its steps itself; without it the session counts them.
    """

    @classmethod
    def event(cls, event_type: EventType, **kwargs: Any) -> ModifiedState:
        """Send any event.

        Args:
            event_type: the kind of event.
            **kwargs: data of the event.

        Returns:
            The model, the optimizer and the loss to go on with.

        Raises:
            InputError: it is ``INITIALIZE`` or ``FINALIZE``, or may not come now.
        """
        return active_session().event(event_type, **kwargs)

    @classmethod
    def batch_start(cls, batch_data: Any = None, **kwargs: Any) -> ModifiedState:
        """Report that a batch begins."""
        return cls.event(EventType.BATCH_START, batch_data=batch_data, **kwargs)

    @classmethod
    def loss_calculated(cls, loss: Any = None, **kwargs: Any) -> ModifiedState:
        """Report the loss of the batch; use the one returned."""
        return cls.event(EventType.LOSS_CALCULATED, loss=loss, **kwargs)

    @classmethod
    def optim_pre_step(cls, **kwargs: Any) -> ModifiedState:
        """Report that the optimizer is about to step."""
        return cls.event(EventType.OPTIM_PRE_STEP, **kwargs)

    @classmethod
    def optim_post_step(cls, **kwargs: Any) -> ModifiedState:
        """Report that the optimizer has stepped."""
        return cls.event(EventType.OPTIM_POST_STEP, **kwargs)

    @classmethod
    def batch_end(cls, **kwargs: Any) -> ModifiedState:
        """Report that the batch is done."""
        return cls.event(EventType.BATCH_END, **kwargs)

    @classmethod
    def calibration_epoch_start(cls, **kwargs: Any) -> ModifiedState:
        """Report that calibration begins."""
        return cls.event(EventType.CALIBRATION_EPOCH_START, **kwargs)

    @classmethod
    def sequential_epoch_end(
        cls, modules: Iterable[Module] | None = None, **kwargs: Any
    ) -> ModifiedState:
        """Report that all batches have run through ``modules``, by default the whole model."""
        if modules is None:
            modules = tuple(active_session().state.model.modules())
        return cls.event(EventType.SEQUENTIAL_EPOCH_END, modules=modules, **kwargs)

    @classmethod
    def calibration_epoch_end(cls, **kwargs: Any) -> ModifiedState:
        """Report that calibration is done."""
        return cls.event(EventType.CALIBRATION_EPOCH_END, **kwargs)

    calibration_start = calibration_epoch_start
    calibration_end = calibration_epoch_end


callbacks = LifecycleCallbacks
