# SPDX-License-Identifier: Apache-2.0
"""Temporarily give a model the structure that a run will leave it in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmcompressor.core.contract import Edits
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State

__all__ = ["StructureChanges", "planned_structure"]

_ABSENT = object()


@contextmanager
def planned_structure(modifiers: Sequence[Modifier], state: State) -> Iterator[None]:
    """Apply the structure changes of ``modifiers`` to the model while the body runs.

    Unchanged parameters are not copied, only the dictionaries that hold them.

    Args:
        modifiers: initialized modifiers.
        state: their state; changed parameters of its model may be on the meta device.
    """
    outline = StructureChanges(state)
    try:
        for modifier in modifiers:
            outline.add(modifier)
        yield
    finally:
        outline.undo()


class StructureChanges:
    """Reversible changes of a model's structure.

    Changes that others make to the model in the meantime are kept on :meth:`undo`.

    Args:
        state: state of the modifiers.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._changed: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def add(self, modifier: Modifier) -> None:
        """Apply the structure changes of an initialized modifier to the model."""
        if Edits.STRUCTURE not in modifier.traits.edits:
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
        """Restore the model, latest change first."""
        while self._changed:
            place, before, after = self._changed.pop()
            restored = {
                key: before[key] if _is_different(key, before, after) else place[key]
                for key in before
                if _is_different(key, before, after) or key in place
            }
            restored |= {key: place[key] for key in place if key not in before | after}
            place.clear()
            place.update(restored)

    def _places(self) -> Iterator[dict[str, Any]]:
        """Dictionaries that hold the state of the model's modules and of its configuration."""
        config = getattr(self._state.model, "config", None)
        parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
        yield from (vars(one) for one in (config, *parts) if one is not None)
        for module in list(self._state.model.modules()):
            yield from (vars(module), module._modules, module._parameters, module._buffers)


def _is_different(key: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.get(key, _ABSENT) is not other.get(key, _ABSENT)


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(_is_different(key, one, other) for key in {*one, *other})
