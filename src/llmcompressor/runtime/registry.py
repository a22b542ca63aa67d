# SPDX-License-Identifier: Apache-2.0
"""Tables from a name to ``"module:attribute"``, imported only when the name is asked for."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

from llmcompressor.errors import InputError, did_you_mean

__all__ = [
    "LazyRegistry",
    "UserOverrides",
    "gc_relaxed",
    "lazy_exports",
    "normalize_name",
    "resolve",
]

V = TypeVar("V")


def normalize_name(name: str) -> str:
    """A name as looked up: case, ``-``, ``_`` and spaces do not matter.

    >>> normalize_name("Open-Platypus") == normalize_name("open_platypus")
    True
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


@contextmanager
def gc_relaxed() -> Iterator[None]:
    """Collect only young garbage inside, while half a million objects come that stay.

    What a first import of torch brings is exempted from collection (``gc.freeze``), which scans it
    again and again otherwise, at the end of the process too: that is a third of the time that a
    short command takes. If torch is there already, the caller's objects may be too, and stay
    collectable.
    """
    first, before = "torch" not in sys.modules, gc.get_threshold()
    if first:
        gc.collect()  # otherwise present garbage would be frozen
    gc.set_threshold(20_000, 10**6, 10**6)
    try:
        yield
    finally:
        gc.set_threshold(*before)
    if first and "torch" in sys.modules:
        gc.freeze()


def resolve(path: str) -> Any:
    """Import ``"package.module:attribute"``."""
    module, _, attribute = path.partition(":")
    with gc_relaxed():
        return getattr(importlib.import_module(module), attribute)


def lazy_exports(
    page: dict[str, Any], homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that only points to names which live elsewhere.

    >>> find, names = lazy_exports({"__name__": "page"}, {"dumps": "json:dumps"})
    >>> find("dumps")([1]), names()
    ('[1]', ['__name__', 'dumps'])

    Args:
        page: its ``globals()``.
        homes: name → ``"module:attribute"``, or ``".module"`` for one of the page's own package
            that has it by that name; imported when the name is asked for.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {page['__name__']!r} has no attribute {name!r}")
        home = homes[name]
        return resolve(f"{page['__name__']}{home}:{name}" if home.startswith(".") else home)

    return find, lambda: sorted({*page, *homes})


class LazyRegistry(Mapping[str, str]):
    """A registry as data: name → ``"module:attribute"``; a miss lists the nearest names.

    >>> table = LazyRegistry("codec", {"json": "json:dumps"})
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
        """Register an object of a third party under ``name``."""
        self._added[normalize_name(name)] = value

    def is_added(self, name: str) -> bool:
        """Return True if the object called ``name`` is one of a third party."""
        return normalize_name(name) in self._added

    def load(self, name: str) -> Any:
        """The object called ``name``, imported now if it was not yet."""
        key = normalize_name(name)
        if key in self._added:
            return self._added[key]
        for known, path in self._entries.items():
            if normalize_name(known) == key:
                return resolve(path)
        raise InputError(
            f"There is no {self.kind} named {name!r}.",
            did_you_mean(name, self.names()),
        )

    def names(self) -> list[str]:
        """All that :meth:`load` knows, what was added included."""
        return [*self._entries, *self._added]

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class UserOverrides(MutableMapping[str, V]):
    """Objects that users add under a name, in addition to known names, which can be read as well.

    To read what is known changes nothing; to add it under its own name adds nothing.

    Args:
        known: by name; made when it is read, so that nobody changes it for others.

    >>> table = UserOverrides({"a": lambda: [1]})
    >>> table["b"] = [*table["a"], 2]
    >>> sorted(table), table["b"], table.added("a"), table.added("b")
    (['a', 'b'], [1, 2], None, [1, 2])
    """

    def __init__(self, known: Mapping[str, Callable[[], V]]) -> None:
        self._known = known
        self._added: dict[str, V] = {}

    def added(self, name: str) -> V | None:
        """The object that a user has added under ``name``."""
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
