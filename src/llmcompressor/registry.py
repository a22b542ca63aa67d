# SPDX-License-Identifier: Apache-2.0
"""Registries from a name to ``"module:attribute"``, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from llmcompressor.collecting import quick_imports
from llmcompressor.errors import InputError, did_you_mean

__all__ = ["Additions", "Table", "fold", "lazy_page", "resolve"]

V = TypeVar("V")


def fold(name: str) -> str:
    """Normalize a name for lookup: case, ``-``, ``_`` and spaces do not matter.

    >>> fold("Open-Platypus") == fold("open_platypus")
    True
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def resolve(path: str) -> Any:
    """Import ``"package.module:attribute"``."""
    module, _, attribute = path.partition(":")
    with quick_imports():
        return getattr(importlib.import_module(module), attribute)


def lazy_page(
    page: dict[str, Any], homes: Mapping[str, str], absent: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module that re-exports names lazily.

    >>> find, names = lazy_page({"__name__": "page"}, {"dumps": "json:dumps"})
    >>> find("dumps")([1]), names()
    ('[1]', ['__name__', 'dumps'])

    Args:
        page: its ``globals()``.
        homes: name → ``"module:attribute"``, or ``".module"`` for a module of the same package with
            that attribute; imported on first access.
        absent: name → the reason why it does not exist here, and the remedy, for the ImportError.
    """

    def find(name: str) -> Any:
        if absent and name in absent:
            raise ImportError(f"There is no {name} in this package: {absent[name]}")
        if name not in homes:
            raise AttributeError(f"module {page['__name__']!r} has no attribute {name!r}")
        home = homes[name]
        return resolve(f"{page['__name__']}{home}:{name}" if home.startswith(".") else home)

    return find, lambda: sorted({*page, *homes})


class Table(Mapping[str, str]):
    """A registry as data: name → ``"module:attribute"``; a miss suggests the nearest names.

    >>> table = Table("codec", {"json": "json:dumps"})
    >>> table.load("JSON")([1])
    '[1]'
    >>> table.load("jsn")
    Traceback (most recent call last):
    llmcompressor.errors.InputError: There is no codec named 'jsn'. Did you mean json?
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)
        self._added: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Register a third-party object under ``name``."""
        self._added[fold(name)] = value

    def is_added(self, name: str) -> bool:
        """Return True if a third-party object is registered under ``name``."""
        return fold(name) in self._added

    def load(self, name: str) -> Any:
        """Return the object registered under ``name``, importing it if necessary."""
        key = fold(name)
        if key in self._added:
            return self._added[key]
        for known, path in self._entries.items():
            if fold(known) == key:
                return resolve(path)
        raise InputError(
            f"There is no {self.kind} named {name!r}.",
            did_you_mean(name, self.names()),
        )

    def names(self) -> list[str]:
        """Return all names that :meth:`load` accepts, including added ones."""
        return [*self._entries, *self._added]

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Additions(MutableMapping[str, V]):
    """A mapping of built-in values by name, which users may extend or override.

    Reading a built-in value changes nothing; setting a built-in value to itself adds nothing.

    Args:
        known: functions that make the built-in values, so that no caller changes them for others.

    >>> table = Additions({"a": lambda: [1]})
    >>> table["b"] = [*table["a"], 2]
    >>> sorted(table), table["b"], table.added("a"), table.added("b")
    (['a', 'b'], [1, 2], None, [1, 2])
    """

    def __init__(self, known: Mapping[str, Callable[[], V]]) -> None:
        self._known = known
        self._added: dict[str, V] = {}

    def added(self, name: str) -> V | None:
        """Return the value that a user set for ``name``, or ``None``."""
        return self._added.get(name)

    def __getitem__(self, name: str) -> V:
        return self._added[name] if name in self._added else self._known[name]()

    def __setitem__(self, name: str, value: V) -> None:
        self._added.pop(name, None)
        if name not in self._known or value != self._known[name]():
            self._added[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._known:
            del self._added[name]
        self._added.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._known, **self._added})

    def __len__(self) -> int:
        return len({**self._known, **self._added})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"
