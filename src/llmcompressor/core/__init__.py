# SPDX-License-Identifier: Apache-2.0
"""Sessions, their lifecycle, the state that they share, and the events that they send.

Names are imported when they are first used, so that reading an ``Event`` loads neither torch
nor the recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.core.events import Event, EventType
    from llmcompressor.core.state import (
        Data,
        Hardware,
        ModelParameterizedLayer,
        ModifiedState,
        State,
    )

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
    "CompressionLifecycle": "llmcompressor.session.lifecycle:CompressionLifecycle",
    "CompressionSession": "llmcompressor.session.session:CompressionSession",
    "Data": ".state",
    "Event": "llmcompressor.core.events:Event",
    "EventType": "llmcompressor.core.events:EventType",
    "Hardware": ".state",
    "LifecycleCallbacks": "llmcompressor.session.functions:LifecycleCallbacks",
    "ModelParameterizedLayer": "llmcompressor.core.state:ModelParameterizedLayer",
    "ModifiedState": ".state",
    "State": ".state",
    "active_session": "llmcompressor.session.functions:active_session",
    "callbacks": "llmcompressor.session.functions:callbacks",
    "create_session": "llmcompressor.session.functions:create_session",
    "finalize": "llmcompressor.session.functions:finalize",
    "initialize": "llmcompressor.session.functions:initialize",
    "reset_session": "llmcompressor.session.functions:reset_session",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
