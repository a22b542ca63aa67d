# SPDX-License-Identifier: Apache-2.0
"""Events of a run, and its progress in steps and epochs."""

from llmcompressor.core.events.event import Event, EventType

__all__ = ["Event", "EventType"]
