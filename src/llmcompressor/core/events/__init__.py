# SPDX-License-Identifier: Apache-2.0
"""What happens during a run, and how far the run has come."""

from llmcompressor.core.events.event import Event, EventType

__all__ = ["Event", "EventType"]
