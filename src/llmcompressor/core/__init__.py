# SPDX-License-Identifier: Apache-2.0
"""Sessions, their lifecycle, the state that they share, and the events that they send.

Names are imported when they are first used, so that reading an ``Event`` loads neither torch
nor the recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.registry import lazy_page

if TYPE_CHECKING:
    from llmcompressor.core.events.event import Event, EventType
    from llmcompressor.core.lifecycle import CompressionLifecycle
    from llmcompressor.core.model_layer import ModelParameterizedLayer
    from llmcompressor.core.session import CompressionSession
    from llmcompressor.core.session_functions import (
        LifecycleCallbacks,
        active_session,
        callbacks,
        create_session,
        finalize,
        initialize,
        reset_session,
    )
    from llmcompressor.core.state import Data, Hardware, ModifiedState, State

__all__ = [
    "CompressionLifecycle",
    "CompressionSession",
    "Data",
    "Event",
    "EventType",
    "Hardware",
    "LifecycleCallbacks",
    "ModelParameterizedLayer",
    "ModifiedState",
    "State",
    "active_session",
    "callbacks",
    "create_session",
    "finalize",
    "initialize",
    "reset_session",
]

_HOMES = {
    "CompressionLifecycle": ".lifecycle",
    "CompressionSession": ".session",
    "Data": ".state",
    "Event": ".events.event",
    "EventType": ".events.event",
    "Hardware": ".state",
    "LifecycleCallbacks": ".session_functions",
    "ModelParameterizedLayer": ".model_layer",
    "ModifiedState": ".state",
    "State": ".state",
    "active_session": ".session_functions",
    "callbacks": ".session_functions",
    "create_session": ".session_functions",
    "finalize": ".session_functions",
    "initialize": ".session_functions",
    "reset_session": ".session_functions",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
