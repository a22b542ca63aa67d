# SPDX-License-Identifier: Apache-2.0
"""A model in the structure that a run will leave it in, for as long as one looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmcompressor.core.state import State
from llmcompressor.modifiers.modifier import Modifier

__all__ = ["outlined"]


@contextmanager
def outlined(modifiers: Sequence[Modifier], state: State) -> Iterator[None]:
    """While the body runs, the model is as the modifiers outline it.

    Parameters that are not changed are not copied: only what holds them is.

    Args:
        modifiers: initialized ones.
        state: theirs; its model's changed parameters may be on the meta device.
    """
    changing = [one for one in modifiers if one.changes_structure]
    if not changing:
        yield
        return
    config = getattr(state.model, "config", None)
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    places: list[dict[str, Any]] = [vars(one) for one in (config, *parts) if one is not None]
    for module in state.model.modules():
        places += [vars(module), module._parameters, module._buffers]
    before = [dict(place) for place in places]
    try:
        for modifier in changing:
            modifier.outline(state)
        yield
    finally:
        for place, content in zip(places, before, strict=True):
            place.clear()
            place.update(content)
