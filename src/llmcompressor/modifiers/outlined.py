# SPDX-License-Identifier: Apache-2.0
"""A model in the structure that a run will leave it in, for as long as one looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmcompressor.core.state import State
from llmcompressor.modifiers.modifier import Modifier

__all__ = ["Outline", "outlined"]

_ABSENT = object()


@contextmanager
def outlined(modifiers: Sequence[Modifier], state: State) -> Iterator[None]:
    """While the body runs, the model is as the modifiers outline it.

    Parameters that are not changed are not copied: only what holds them is.

    Args:
        modifiers: initialized ones.
        state: theirs; its model's changed parameters may be on the meta device.
    """
    outline = Outline(state)
    try:
        for modifier in modifiers:
            outline.add(modifier)
        yield
    finally:
        outline.undo()


class Outline:
    """Changes of a model's structure that are taken back.

    What others have done to the model meanwhile stays.

    Args:
        state: of the modifiers.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._changed: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def add(self, modifier: Modifier) -> None:
        """Change the model as an initialized modifier outlines it."""
        if not modifier.changes_structure:
            return
        before = [(place, dict(place)) for place in self._places()]
        try:
            modifier.outline(self._state)
        finally:
            self._changed += [
                (place, content, dict(place))
                for place, content in before
                if _differ(place, content)
            ]

    def undo(self) -> None:
        """Leave the model as it was, the latest change first."""
        while self._changed:
            place, before, after = self._changed.pop()
            restored = {
                key: before[key] if _is_other(key, before, after) else place[key]
                for key in before
                if _is_other(key, before, after) or key in place
            }
            restored |= {key: place[key] for key in place if key not in before | after}
            place.clear()
            place.update(restored)

    def _places(self) -> Iterator[dict[str, Any]]:
        """What holds the model's parts: of its modules, and of its configuration."""
        config = getattr(self._state.model, "config", None)
        parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
        yield from (vars(one) for one in (config, *parts) if one is not None)
        for module in list(self._state.model.modules()):
            yield from (vars(module), module._modules, module._parameters, module._buffers)


def _is_other(key: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.get(key, _ABSENT) is not other.get(key, _ABSENT)


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(_is_other(key, one, other) for key in {*one, *other})
