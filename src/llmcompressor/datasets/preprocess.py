# SPDX-License-Identifier: Apache-2.0
"""Row preprocessing: the user's function or a template, then rendering to a column ``text``."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcompressor.datasets.rows import Row, is_chat
from llmcompressor.datasets.samples import MAIN_INPUTS
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger

__all__ = [
    "CHATML",
    "ChatRenderer",
    "NoTokenizerError",
    "RowPreparer",
    "check_placeholders",
    "collect_media",
    "errors_naming",
    "find_chat_fault",
    "load_function",
    "normalize_turns",
    "parameters_of",
    "parse_tools",
    "placeholder_ids",
    "refuse_broken_chat",
    "resolve_media",
]


# --------------------
# Rendering of conversations with the tokenizer's chat template, or with ChatML.

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Each turn between ``<|im_start|>role`` and ``<|im_end|>``."""

_ROLES = {
    "bot": "assistant",
    "chatgpt": "assistant",
    "gpt": "assistant",
    "human": "user",
    "model": "assistant",
}

_NO_CONTENT = frozenset({"from", "message", "name", "role", "text"})
"""Keys of a turn that may have no other: what it says stands nowhere, or under a wrong name."""


def find_chat_fault(value: Any) -> str | None:
    """Return the reason why a value is not a valid conversation; ``None`` if it is one.

    A turn needs no ``content`` if it has something else than text, such as tool calls.

    >>> find_chat_fault([{"content": "2 + 2?"}])
    "turn 0 has no 'role', only content"
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return f"it is a {type(value).__name__}, and not a list of turns"
    for place, turn in enumerate(value):
        if not isinstance(turn, Mapping):
            return f"turn {place} is a {type(turn).__name__}, and not a dict"
        if not turn.keys() & {"role", "from"}:
            return f"turn {place} has no 'role', only {', '.join(map(str, turn)) or 'nothing'}"
        if "from" not in turn and not isinstance(turn["role"], str):
            return f"turn {place} has a {type(turn['role']).__name__} for its role"
        said = "value" if "from" in turn else "content"
        if said not in turn and turn.keys() <= _NO_CONTENT:
            return f"turn {place} has no {said!r}, only {', '.join(turn)}"
    return None if is_chat(value) else "no turn has any content"


def parse_tools(given: Any) -> list[Any] | None:
    """Parse tool definitions: a list, a single one, or either as JSON.

    Keys without a value, which tables add for the keys of other rows, are dropped.

    Returns:
        The definitions; an empty list if there are none, ``None`` for an invalid value.

    >>> parse_tools('[{"name": "add", "parameters": {"a": null}}]')
    [{'name': 'add', 'parameters': {}}]
    """
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given) if given.strip() else None
        except ValueError:
            return None
    if found is None:
        return []
    if isinstance(found, Mapping):
        found = [found]
    if not isinstance(found, Sequence) or isinstance(found, str):
        return None
    return [_without_none(tool) for tool in found]


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def normalize_turns(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalize a conversation to turns with ``role`` and ``content``.

    Keys without a value, which tables add for the keys of other turns, are dropped.

    >>> normalize_turns([{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}])
    [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi'}]

    Raises:
        DatasetError: it is not a valid conversation; names the turn.
    """
    fault = find_chat_fault(conversation)
    if fault is not None:
        raise DatasetError(
            f"There is no conversation to render: {fault}.",
            "Give a list of turns such as {'role': 'user', 'content': '...'}.",
        )
    plain = []
    for turn in conversation:
        if "from" in turn:
            role, content = str(turn["from"]), turn.get("value")
            plain.append({"role": _ROLES.get(role, role), "content": content or ""})
        else:
            plain.append({**_without_none(turn), "content": turn.get("content") or ""})
    return plain


@contextmanager
def errors_naming(where: str) -> Iterator[None]:
    """Put the name of a sample before the errors that the body raises."""
    try:
        yield
    except DatasetError as error:
        raise type(error)(f"{where}: {error.problem}", error.remedy) from error


class NoTokenizerError(DatasetError):
    """Raised if rows have to be tokenized and there is no tokenizer."""


class ChatRenderer:
    """Renders conversations with the chat template of a processor.

    Args:
        processor: a tokenizer, or a processor that has one; it is not changed.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._warned = False

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str:
        """Render a conversation as text with special tokens.

        Args:
            messages: its turns.
            tools: tool definitions, for templates that render them.
        """
        owner, template = self._template()
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": False}
        names, takes_any = parameters_of(owner.apply_chat_template)
        if tools and (takes_any or "tools" in names):
            options["tools"] = list(tools)
        if template is not None:
            options["chat_template"] = template
        given = (
            list(messages) if template is None else [_join_text_parts(turn) for turn in messages]
        )
        try:
            return _render(owner, given, options)
        except Exception as error:  # a template can raise anything
            raise DatasetError(
                f"The chat template refuses a conversation: {error}.",
                "Render it in a preprocessing_func.",
            ) from error

    def with_empty_system_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation, with an empty system turn added if it has none.

        Templates without system turns get the original conversation.
        """
        if messages[0]["role"] == "system":
            return self(messages)
        try:
            return self([{"role": "system", "content": ""}, *messages])
        except DatasetError:
            return self(messages)

    def _template(self) -> tuple[Any, str | None]:
        """Return the object that renders, and a template to pass if it has none of its own."""
        if self._processor is None:
            raise NoTokenizerError(
                "The data holds conversations, and there is no tokenizer to render them.",
                "Give the model's tokenizer.",
            )
        inner = getattr(self._processor, "tokenizer", None)
        candidates = [self._processor] if inner is None else [self._processor, inner]
        for owner in candidates:
            if getattr(owner, "chat_template", None):
                return owner, None
        if not hasattr(candidates[-1], "apply_chat_template"):
            raise DatasetError(
                f"A {type(candidates[-1]).__name__} cannot render conversations.",
                "Render them in a preprocessing_func.",
            )
        if not self._warned:
            logger.warning("The tokenizer has no chat template; ChatML is used.")
            self._warned = True
        return candidates[-1], CHATML


def parameters_of(processor: Any) -> tuple[frozenset[str], bool]:
    """Return the names of a processor's parameters, and True if it takes ``**kwargs``."""
    if not callable(processor):
        raise DatasetError(
            f"A {type(processor).__name__} cannot tokenize text.",
            "Give the model's tokenizer or processor.",
        )
    parameters = inspect.signature(processor).parameters.values()
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = frozenset(p.name for p in parameters if p.kind not in variable)
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _join_text_parts(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Join the content of a turn to a single text, for templates that support nothing else.

    Raises:
        DatasetError: it has content other than text.
    """
    content = turn.get("content")
    if content is None or isinstance(content, str):
        return dict(turn)
    parts = list(content) if isinstance(content, (list, tuple)) else [content]
    for part in parts:
        if _text_of(part) is None:
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise DatasetError(
                f"A turn holds {f'a part of type {kind!r}' if kind else f'a {type(part).__name__}'}"
                ", and there is no chat template for anything but text.",
                "Give the model's own processor, or make text of it in a preprocessing_func.",
            )
    return {**turn, "content": "\n".join(str(_text_of(part)) for part in parts)}


def _text_of(part: Any) -> str | None:
    """Text of a part of a turn's content; ``None`` if it is not text."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _render(owner: Any, messages: list[Any], options: Mapping[str, Any]) -> str:
    """Render messages, with lists of texts joined if the template does not support lists.

    Such a template fails on a list, or renders its Python representation.
    """
    lists = [turn["content"] for turn in messages if _is_list_of_texts(turn.get("content"))]
    try:
        text = str(owner.apply_chat_template(messages, **options))
    except Exception:
        if not lists:
            raise
    else:
        if not any(str(each) in text for each in lists):
            return text
    joined = [
        _join_text_parts(turn) if _is_list_of_texts(turn.get("content")) else turn
        for turn in messages
    ]
    return str(owner.apply_chat_template(joined, **options))


def _is_list_of_texts(content: Any) -> bool:
    return bool(content) and isinstance(content, list) and None not in map(_text_of, content)


# --------------------
# Images, videos and audio of multimodal rows.
#
# They are in columns of their own, or within a conversation: a part of a turn has a ``type`` and
# holds the medium under one of a few keys. A chat template renders only a placeholder for it.

_COLUMNS = {"image": "images", "video": "videos", "audio": "audio"}
"""Type of a part → the processor's argument."""
_SOURCES = ("url", "path", "base64")
"""Where a part may say what it shows, besides under its own type."""
_OTHER_NAMES = {
    "image": "images",
    "images": "image",
    "video": "videos",
    "videos": "video",
    "audio": "audios",
    "audios": "audio",
}
_PLACEHOLDERS = {
    "image_token": ("image", "images"),
    "boi_token": ("image", "images"),
    "video_token": ("video", "videos"),
    "audio_token": ("audio", "audios"),
}
"""A processor's attribute → the columns one of which its token stands for."""


class _UnreadImage(str):
    """Unread source of an image in a turn: a path, a URL, or base64 data."""

    __slots__ = ()


def collect_media(conversation: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Collect the media of a conversation in order, by the processor's argument names.

    Nothing is read yet, as the row may be for a tokenizer. ``None`` marks a part without a
    medium.
    """
    found: dict[str, list[Any]] = {}
    for turn in conversation:
        content = turn.get("content")
        for part in content if isinstance(content, Sequence) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _COLUMNS:
                found.setdefault(_COLUMNS[kind], []).append(_shown(part, kind))
    return {
        column: shown for column, shown in found.items() if any(one is not None for one in shown)
    }


def _shown(part: Mapping[str, Any], kind: str) -> Any:
    given = (part.get(key) for key in (kind, *_SOURCES))
    shown = next((one for one in given if one is not None), None)
    return _UnreadImage(shown) if kind == "image" and isinstance(shown, str) else shown


def resolve_media(row: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Rename media columns for a processor, and read the images of turns.

    Args:
        row: a prepared row.
        known: the columns that the processor accepts; others are unchanged.

    Raises:
        DatasetError: only some parts of a conversation have media, or an image cannot be read.
    """
    known = frozenset(known)
    made = _rename_media(row, known)
    for column in known & {*_OTHER_NAMES} & made.keys():
        value = made[column]
        if isinstance(value, list) and not value:
            made[column] = None
        elif isinstance(value, list) and any(one is None for one in value):
            missing = sum(one is None for one in value)
            raise DatasetError(
                f"{missing} of {len(value)} parts for {column} in a conversation do not say what "
                "they show.",
                f"Give all of them in the turns, or all in a column {column!r}.",
            )
        elif isinstance(value, list):
            made[column] = [
                _read_image(one) if isinstance(one, _UnreadImage) else one for one in value
            ]
    return _split_audio(made, known)


def _split_audio(row: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Split audio values into arrays and the column ``sampling_rate``.

    The datasets library has both in one value.
    """
    for column in known & {"audio", "audios"} & row.keys():
        value = row[column]
        sounds = [one for one in (value if isinstance(value, list) else [value]) if _is_sound(one)]
        rates = {int(one["sampling_rate"]) for one in sounds}
        if len(rates) > 1:
            raise DatasetError(
                f"its sounds have {' and '.join(map(str, sorted(rates)))} samples a second.",
                "Bring them to one rate: datasets.Audio(sampling_rate=…) does.",
            )
        if sounds and row.get("sampling_rate") is None:
            row["sampling_rate"] = rates.pop()
        if isinstance(value, list):
            row[column] = [one["array"] if _is_sound(one) else one for one in value]
        elif sounds:
            row[column] = value["array"]
    return row


def _is_sound(value: Any) -> bool:
    """Return True for an audio value of the datasets library, decoded or not."""
    if isinstance(value, Mapping):
        return "array" in value and value.get("sampling_rate") is not None
    return hasattr(value, "get_all_samples")


def _read_image(shown: str) -> Any:
    from transformers.image_utils import load_image  # noqa: PLC0415  # rarely needed

    try:
        return load_image(str(shown))
    except Exception as error:  # of the file, its content or the network
        raise DatasetError(
            f"The picture {shown:.80} of a conversation cannot be read: {error!s:.200}.",
            "Check the path, or give the picture itself.",
        ) from error


def _rename_media(row: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Rename media columns to the processor's names, such as ``image`` to ``images``."""
    named = dict(row)
    for name, other in _OTHER_NAMES.items():
        if name not in known and other in known and named.get(other) is None and name in named:
            named[other] = named.pop(name)
    return named


def placeholder_ids(*owners: Any) -> frozenset[int]:
    """Ids of the placeholder tokens for images, videos and audio.

    Args:
        owners: processors or tokenizers that may define them.
    """
    known = (getattr(owner, f"{name}_id", None) for owner in owners for name in _PLACEHOLDERS)
    return frozenset(number for number in known if isinstance(number, int))


def check_placeholders(processor: Any, row: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a text with placeholders for images, videos or audio that are not given.

    The model would run on the bare placeholders.

    Args:
        processor: defines the placeholder tokens.
        row: its inputs.
        known: the columns that it accepts.

    Raises:
        DatasetError: names the placeholder token.
    """
    text, known = row.get("text"), frozenset(known)
    for attribute, columns in _PLACEHOLDERS.items():
        token = getattr(processor, attribute, None)
        if not isinstance(token, str) or not token or not isinstance(text, str):
            continue
        if known.isdisjoint(columns):
            continue  # for instance a tokenizer, for which the token is an ordinary one
        if token in text and all(row.get(column) is None for column in columns):
            raise DatasetError(
                f"the text has {token}, and there is nothing that it stands for.",
                f"Give it in a column {columns[-1]!r} or in the turns of the conversation.",
            )


# --------------------
# Row preprocessing: the user's function or a template, then rendering to a column ``text``.

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
        column = self._find_text(row, given, where)
        conversation: Any = row.get("text")
        if is_chat(conversation):
            row["text"] = self._rendered(conversation, row.pop("tools", None), column, where)
            for name, shown in collect_media(normalize_turns(conversation)).items():
                if row.get(name) is None:
                    row[name] = shown
        return row

    def _find_text(self, row: Row, given: Row, where: str) -> str:
        """Move what a row has for text, whatever its form, to ``text``, and return its column.

        This is the place for further forms of rows, such as a prompt with its completion, or
        with a chosen and a rejected one.
        """
        if self._text_column != "text":
            is_made = "text" in row and (
                "text" not in given
                or (isinstance(row["text"], str) and row["text"] != given["text"])
            )
            self._rename_text_column(row, where, is_made=is_made)
        if row.get("text") is not None:
            return self._text_column
        chats = {name: row[name] for name in _CHATS if name in row}
        for name, value in chats.items():
            if is_chat(value):
                row["text"] = row.pop(name)
                return name
        if chats and not any(chats.values()) and not self._main_inputs & row.keys():
            row["text"] = None
        return self._text_column

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
        with errors_naming(f"{where}, column {column!r}"):
            found = parse_tools(tools)
            if found is None and not self._has_warned_of_tools:
                logger.warning(
                    f"{where}: its column 'tools' is not used: it is no list of definitions."
                )
                self._has_warned_of_tools = True
            return self._chat(normalize_turns(conversation), found)

    def _rename_text_column(self, row: Row, where: str, *, is_made: bool) -> None:
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
            with errors_naming(where):
                if self._function is not None:
                    return self._applied(self._function, row)
                return dict(row) if self._template is None else dict(self._template(row))
        except DatasetError:
            raise
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

    def _applied(self, function: Callable[..., Any], row: Row) -> Row:
        """Call the user's function, and warn once if it returns None and changes nothing."""
        own = copy.deepcopy(row)  # the function may change what it is given
        made = function(own)
        # by repr, as tensors have no single truth value; an image's address may hide the warning
        if made is None and not self._has_warned_of_none and repr(row) == repr(own):
            self._has_warned_of_none = True
            logger.warning(
                "preprocessing_func returns None, and leaves the row as it is: a return may be "
                "missing."
            )
        if made is not None and not isinstance(made, Mapping):
            raise TypeError(f"it must return a dict of columns, not a {type(made).__name__}")
        return {**own, **(made or {})}


def refuse_broken_chat(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row without text whose conversation is invalid.

    Raises:
        DatasetError: names the invalid turn.
    """
    for name in _CHATS:
        if row.get(name) is not None:
            _check_chat(row[name], name, where)


def _check_chat(value: Any, column: str, where: str) -> None:
    fault = find_chat_fault(value)
    if fault is not None:
        plain = f"say text_column={column!r} if it is plain text"
        other = plain if isinstance(value, str) else "make text of it with a preprocessing_func"
        raise DatasetError(
            f"{where} has no conversation in its column {column!r}: {fault}.",
            f"Give a list of turns such as {{'role': 'user', 'content': '...'}}, or {other}.",
        )


def _columns(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "no columns at all"
