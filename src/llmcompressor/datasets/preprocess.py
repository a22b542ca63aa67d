# SPDX-License-Identifier: Apache-2.0
"""Row preprocessing: the user's function or a template, then rendering to a column ``text``."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from llmcompressor.datasets.chat import ChatRenderer, fault_of_chat, is_chat, tools_of, turns
from llmcompressor.datasets.media import media_of
from llmcompressor.datasets.rows import Row
from llmcompressor.datasets.samples import MAIN_INPUTS
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger

__all__ = ["RowPreparer", "load_function", "refuse_broken_chat"]

_CHATS = ("messages", "conversations")


def load_function(given: str | Callable[..., Any]) -> Callable[..., Any]:
    """Load the function that ``"path/file.py:function"`` names; a callable is returned itself.

    Raises:
        DatasetError: the file or the function in it does not exist or fails to load.
    """
    if callable(given):
        return given
    file, _, name = given.rpartition(":")
    path = Path(os.path.expanduser(file))
    if not os.path.isfile(path):
        raise DatasetError(f"There is no file {path}.", "Check preprocessing_func.")
    spec = importlib.util.spec_from_file_location(f"_preprocessing_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DatasetError(f"The file {path} fails to load: {error!r}.", "Correct it.") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value)]
        raise DatasetError(
            f"The file {path} has no function {name!r}.", did_you_mean(name, functions)
        )
    loaded: Callable[..., Any] = function
    return loaded


class RowPreparer:
    """Preprocesses rows for the processor.

    Args:
        function: the user's function from a row to columns that are added to it, or ``None``.
        template: a registered data set's template, which replaces the row; used without a
            function.
        text_column: the column with the text. A column ``text`` from ``function`` or
            ``template`` takes precedence.
        remove_columns: columns to drop.
        chat: renders conversations.
        main_inputs: names of inputs; a row that has one of them is tokenized.
    """

    def __init__(
        self,
        *,
        function: str | Callable[..., Any] | None,
        template: Callable[[Row], Mapping[str, Any]] | None,
        text_column: str,
        remove_columns: Iterable[str] | None,
        chat: ChatRenderer,
        main_inputs: frozenset[str] = MAIN_INPUTS,
    ) -> None:
        self._function = None if function is None else load_function(function)
        self._template = template
        self._text_column = text_column
        self._remove = frozenset(remove_columns or ())
        self._never_seen = set(self._remove)
        self._columns: dict[str, None] = {}
        self._chat = chat
        self._main_inputs = main_inputs
        self._has_warned = self._has_warned_of_none = self._has_warned_of_tools = False

    def __call__(self, row: Row, where: str) -> Row:
        """Return a preprocessed copy of a row."""
        given, row = row, self._preprocessed(row, where)
        if self._never_seen:
            self._never_seen -= given.keys() | row.keys()
            self._columns.update(dict.fromkeys(map(str, [*given, *row])))
        for name in self._remove & row.keys():
            del row[name]
        if self._text_column != "text":
            self._name_text(row, where, is_made=_is_text_made(row, given))
        column = self._text_column
        if "text" not in row:
            chats = [name for name in _CHATS if is_chat(row.get(name))]
            if chats:
                column = chats[0]
                row["text"] = row.pop(column)
            elif _is_silent(row) and not self._main_inputs & row.keys():
                row["text"] = None
        conversation: Any = row.get("text")
        if is_chat(conversation):
            row["text"] = self._rendered(conversation, row.pop("tools", None), column, where)
            for name, shown in media_of(turns(conversation)).items():
                if row.get(name) is None:
                    row[name] = shown
        return row

    def report(self) -> None:
        """Warn about ``remove_columns`` that no row has."""
        for name in sorted(self._never_seen):
            logger.warning(
                f"remove_columns: no row has a column {name!r}. "
                f"{did_you_mean(name, self._columns)}".rstrip()
            )

    def _rendered(self, conversation: Any, tools: Any, column: str, where: str) -> str:
        """Render a conversation as text; errors name the sample."""
        _check_chat(conversation, column, where)
        try:
            found = tools_of(tools)
            if found is None and not self._has_warned_of_tools:
                logger.warning(
                    f"{where}: its column 'tools' is not used: it is no list of definitions."
                )
                self._has_warned_of_tools = True
            return self._chat(turns(conversation), found)
        except DatasetError as error:
            problem = f"{where}, column {column!r}: {error.problem}"
            raise type(error)(problem, error.remedy) from error

    def _name_text(self, row: Row, where: str, *, is_made: bool) -> None:
        """Rename the user's text column to ``text``; tokenized rows need none."""
        if is_made:
            if not self._has_warned:
                logger.warning(
                    f"text_column={self._text_column!r} is not used: what prepares the rows makes "
                    "their text itself."
                )
            self._has_warned = True
        elif self._text_column in row:
            row["text"] = row.pop(self._text_column)
        elif not self._main_inputs & row.keys():
            raise DatasetError(
                f"{where} has no column {self._text_column!r}; it has {_columns(row)}.",
                did_you_mean(self._text_column, map(str, row)) or "Give rows that have it.",
            )

    def check_columns(self, row: Row, usable: Iterable[str], where: str) -> None:
        """Refuse a row without usable columns; the error lists its columns."""
        if any(row.get(name) is not None for name in usable) or "text" in row:
            return
        refuse_broken_chat(row, where)
        texts = sorted(
            name
            for name, value in row.items()
            if isinstance(name, str) and (isinstance(value, str) or is_chat(value))
        )
        remedy = "Make text or input_ids of them with a preprocessing_func."
        if texts:
            named = " or ".join(f"text_column={name!r}" for name in texts[:3])
            remedy = f"Name the column of the text: {named}."
        removed = f" without {', '.join(sorted(self._remove))}" if self._remove else ""
        raise DatasetError(
            f"{where} has neither text nor input_ids; it has {_columns(row)}{removed}.", remedy
        )

    def _preprocessed(self, row: Row, where: str) -> Row:
        try:
            if self._function is not None:
                own = copy.deepcopy(row)  # the function may change what it is given
                made = self._function(own)
                if made is None:
                    self._tell_of_none(row, own)
                return _merged(own, made)
            return dict(row) if self._template is None else dict(self._template(row))
        except DatasetError as error:
            raise DatasetError(f"{where}: {error.problem}", error.remedy) from error
        except KeyError as error:
            raise DatasetError(
                f"{where} has no column {error}; it has {_columns(row)}.",
                "Check that this is the data that the preprocessing was written for.",
            ) from error
        except Exception as error:
            remedy = "Check the preprocessing_func."
            if self._function is None:
                remedy = "Check that this is a copy of the data set that was named."
            raise DatasetError(f"{where} cannot be preprocessed: {error!r}.", remedy) from error

    def _tell_of_none(self, given: Row, left: Row) -> None:
        """Warn about a function that returned None without changing the row."""
        # by repr, as tensors have no single truth value; an image's address may hide the warning
        if self._has_warned_of_none or repr(given) != repr(left):
            return
        self._has_warned_of_none = True
        logger.warning(
            "preprocessing_func returns None, and leaves the row as it is: a return may be missing."
        )


def refuse_broken_chat(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row without text whose conversation is invalid.

    Raises:
        DatasetError: names the invalid turn.
    """
    for name in _CHATS:
        if row.get(name) is not None:
            _check_chat(row[name], name, where)


def _check_chat(value: Any, column: str, where: str) -> None:
    fault = fault_of_chat(value)
    if fault is not None:
        plain = f"say text_column={column!r} if it is plain text"
        other = plain if isinstance(value, str) else "make text of it with a preprocessing_func"
        raise DatasetError(
            f"{where} has no conversation in its column {column!r}: {fault}.",
            f"Give a list of turns such as {{'role': 'user', 'content': '...'}}, or {other}.",
        )


def _is_silent(row: Row) -> bool:
    """Return True if a row has only empty conversations."""
    chats = [row[name] for name in _CHATS if name in row]
    return bool(chats) and not any(chats)


def _columns(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "no columns at all"


def _is_text_made(row: Row, given: Row) -> bool:
    """Return True if preprocessing created or changed the text of a row."""
    if "text" not in row or "text" not in given:
        return "text" in row
    return isinstance(row["text"], str) and row["text"] != given["text"]


def _merged(row: Row, made: Any) -> Row:
    if made is None:
        return row
    if not isinstance(made, Mapping):
        raise TypeError(f"it must return a dict of columns, not a {type(made).__name__}")
    return {**row, **made}
