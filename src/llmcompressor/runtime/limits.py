# SPDX-License-Identifier: Apache-2.0
"""Bounds for what comes from outside: sizes of values, time of patterns, kinds of files.

A few lines can ask for more than any machine has. A list that holds the one before it twice has
2^40 values after forty lines, a regular expression may try 2^n ways to match n characters, and
reading a pipe waits for whoever writes to it. Each bound lies far above what is ever meant.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmcompressor.errors import CheckpointError, InputError, RecipeError, TargetError

# --------------------
# Values of recipes.

MAX_VALUES = 100_000
"""Most values in one recipe or argument of one."""
MAX_FIELD_VALUES = 1_000_000
"""Most values of a modifier's fields, which need not come from a text."""
MAX_DEPTH = 64
MAX_BITS = 4_096
"""Largest whole number."""
_CHARACTERS = 1_000
"""So many characters of a text count as a value."""
_FLATTER = "Look for a mapping or a list in it that holds itself."


def copy_values(value: Any, what: str = "The recipe", most: int | None = None) -> Any:
    """Return a deep copy of mappings, lists and tuples; other values stay.

    Args:
        value: what is copied.
        what: its name in error messages.
        most: most values in it, ``MAX_VALUES`` by default; one in two places counts twice.

    Raises:
        RecipeError: it is too large, or contains itself.
    """
    return _copied(value, 0, itertools.count(1), what, most or MAX_VALUES)


def _copied(value: Any, depth: int, numbers: Iterator[int], what: str, most: int) -> Any:
    """Copy a value that lies ``depth`` deep; each takes the next of ``numbers``."""
    if depth > MAX_DEPTH:
        raise RecipeError(f"{what} is nested more than {MAX_DEPTH} deep.", _FLATTER)
    size = len(value) // _CHARACTERS if isinstance(value, str) else 0
    if any(next(numbers) > most for _ in range(1 + size)):
        raise RecipeError(f"{what} has more than {most} values.", _FLATTER)
    further = (depth + 1, numbers, what, most)
    if isinstance(value, Mapping):
        return {key: _copied(item, *further) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, *further) for item in value]
    if type(value) is tuple:  # a named tuple is a value of its own
        return tuple([_copied(item, *further) for item in value])
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise RecipeError(
            f"{what} holds a whole number of {value.bit_length()} bits.", "Give a smaller one."
        )
    return value


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON as ``json.loads``, and raise ValueError too for what is nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# --------------------
# Time.


@contextmanager
def time_limit(seconds: float, error: Callable[[], Exception]) -> Iterator[None]:
    """Raise ``error()`` inside once the process has computed for so long.

    Time in which it waits does not count. Python can interrupt its main thread only: in others
    there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise error()

    before = signal.signal(signal.SIGVTALRM, stop)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if before is None else before)


_NO_REPETITION = re.compile(r"\\.|\[\^?\]?[^\]]*\]|\(\?", re.DOTALL)
_REPETITION = re.compile(r"[*+{]")
_MANY = 4
_OPTION = re.compile(r"\?")
_MANY_OPTIONS = 8
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_LONG_NAME = 500
_PATTERN_SECONDS = 1.0
"""Longest time for one name, and for all names that take more than a moment."""
_MOMENT = 0.001


SIMPLER = "Write it without a repetition within another, as in (a+)+, and with fewer of them."


class TimedPattern:
    """A regular expression of Python, with a limit to the time that matching takes.

    Args:
        pattern: its text.

    Attributes:
        pattern: its text.
        slow_on: the first name that took too long; empty if there is none.

    Raises:
        re.error: the text is no regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._expression = re.compile(pattern)
        except (OverflowError, RecursionError) as error:
            raise re.error(str(error)) from error
        self.pattern = pattern
        self.slow_on = ""
        bare = _NO_REPETITION.sub("x", pattern)
        self.may_be_slow = (
            len(_REPETITION.findall(bare)) >= _MANY
            or len(_OPTION.findall(bare)) >= _MANY_OPTIONS
            or _REPEATED_GROUP.search(bare) is not None
        )
        self._left = _PATTERN_SECONDS

    def match(self, name: str) -> bool:
        """Return True if the beginning of a name matches.

        Raises:
            TargetError: it takes too long.
        """
        return self._run(self._expression.match, name)

    def search(self, name: str) -> bool:
        """Return True if a part of a name matches; errors as of :meth:`match`."""
        return self._run(self._expression.search, name)

    def is_slow_on(self, names: Iterable[str]) -> bool:
        """Return True if matching takes too long for one of some names, or did for another."""
        with suppress(TargetError):
            for name in names if self.may_be_slow else ():
                self._run(self._expression.match, name)
        return bool(self.slow_on)

    def _run(self, find: Callable[[str], object], name: str) -> bool:
        if not self.may_be_slow and len(name) < _LONG_NAME:
            return find(name) is not None
        if self.slow_on:
            raise self._error()
        begin = time.thread_time()
        with time_limit(self._left, lambda: self._give_up(name)):
            found = find(name) is not None
        taken = time.thread_time() - begin
        if taken > _MOMENT:
            self._left -= taken
            if self._left <= 0:
                raise self._give_up(name)
        return found

    def _give_up(self, name: str) -> TargetError:
        self.slow_on = name
        return self._error()

    def _error(self) -> TargetError:
        return TargetError(
            f"The pattern 're:{self.pattern:.200}' takes too long to match {self.slow_on[:80]!r}: "
            "there are too many ways to try.",
            SIMPLER,
        )


@lru_cache(maxsize=4096)
def timed_pattern(pattern: str) -> TimedPattern:
    """Return the :class:`TimedPattern` of a text; errors as of that."""
    return TimedPattern(pattern)


# --------------------
# Sizes of models.

_MOST = {
    4096: re.compile(
        r"(?:num|n)_(?:\w+_)?(?:layers?|blocks)|(?:en|de)coder_layers|layers|depth|num_hidden_groups"
    ),
    2**24: re.compile(r"(?:vocab|hidden|intermediate)_size|head_dim|num_\w+_(?:heads|experts)"),
}
"""Most layers, each of which takes time to build, and widest matrices, which take memory."""
_NOT_NEGATIVE = re.compile(
    r"num_(?:hidden_layers|attention_heads)|(?:vocab|hidden|intermediate)_size"
)
"""Sizes that -1 gives no meaning, as it does others ("all" or "none")."""


def impossible_size(config: Mapping[str, Any]) -> str:
    """Return the first size in a ``config.json`` that no model has; empty without one.

    >>> impossible_size({"text_config": {"num_hidden_layers": 10**6}})
    'num_hidden_layers 1000000: no model is so large'
    >>> impossible_size({"vocab_size": -1})
    'vocab_size -1: no model is so small'
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            if found := impossible_size(value):
                return found
        elif type(value) is int:
            if any(value > most and names.fullmatch(str(key)) for most, names in _MOST.items()):
                return f"{key} {value}: no model is so large"
            if value < 0 and _NOT_NEGATIVE.fullmatch(str(key)):
                return f"{key} {value}: no model is so small"
    return ""


# --------------------
# Kinds of files.

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_OF_MODELS = {".jinja", ".json", ".model", ".safetensors", ".txt", ".yaml"}


def check_regular(path: str | os.PathLike[str], kind: type[InputError]) -> None:
    """Raise an error of a kind if a path leads to what is neither a file nor a folder.

    What is read from a pipe or a device may have no end, or never come.
    """
    try:
        found = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
    except (OSError, ValueError):
        return  # whoever opens it says what is wrong
    if found is not None:
        raise kind(f"{os.fspath(path)} is {found}, not a file.", "Write its content to a file.")


def check_model_files(folder: Path) -> None:
    """Raise CheckpointError if a file of a model folder is a pipe, a socket or a device."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _OF_MODELS:
            check_regular(path, CheckpointError)
