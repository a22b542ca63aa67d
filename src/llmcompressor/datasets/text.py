# SPDX-License-Identifier: Apache-2.0
"""Text of rows: the user's function or a template, then rendering to a column ``text``."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmcompressor.datasets.answers import find_answer
from llmcompressor.datasets.media import collect_media
from llmcompressor.datasets.rows import Row, is_chat
from llmcompressor.datasets.samples import MAIN_INPUTS, errors_naming
from llmcompressor.errors import DatasetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.limits import parse_json, time_limit

# --------------------
# Rendering of conversations with the tokenizer's chat template, or with ChatML.

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Each turn between ``<|im_start|>role`` and ``<|im_end|>``."""

_TEMPLATE_SECONDS = 5.0
"""Longest time for one conversation."""
_CLOCK = "strftime_now"
"""The function by which templates ask transformers for the date."""
_DIRECTIVES = [
    (flag, one) for one in "aAbBcCdDeFgGhHIjklmMpPrRSTuUVwWxXyYzZf" for flag in ("", "-")
]
"""Flag and letter of the directives of ``strftime``."""
_ROLES = {
    "human": "user",
    **dict.fromkeys(("bot", "chatgpt", "gpt", "model"), "assistant"),
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


def _parse_tools(given: Any) -> list[Any] | None:
    """Parse tool definitions: a list, a single one, or either as JSON; ``None`` if invalid.

    >>> _parse_tools('[{"name": "add", "parameters": {"a": null}}]')
    [{'name': 'add', 'parameters': {}}]
    """
    found = given
    if isinstance(given, str):
        try:
            found = parse_json(given) if given.strip() else None
        except ValueError:
            return None
    if found is None or isinstance(found, Mapping):
        found = [] if found is None else [found]
    if not isinstance(found, Sequence) or isinstance(found, str):
        return None
    return [_without_none(tool) for tool in found]


def _without_none(value: Any) -> Any:
    """Drop keys without a value, which tables add for the keys of other rows."""
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def normalize_turns(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalize a conversation to turns with ``role`` and ``content``.

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


_moment: ContextVar[datetime | None] = ContextVar("moment", default=None)


def moment() -> datetime:
    """Return the moment that templates take for the present one.

    It is that of :func:`rendered_at`, or else of ``SOURCE_DATE_EPOCH``, or else the present one.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if (kept := _moment.get()) is not None:
        return kept
    if not epoch:
        return datetime.now().replace(microsecond=0)
    try:
        return datetime.fromtimestamp(int(epoch), UTC).replace(tzinfo=None)
    except (ValueError, OverflowError, OSError):
        raise DatasetError(
            f"The environment variable SOURCE_DATE_EPOCH is {epoch!r}, and no time in seconds.",
            "Set it to seconds since 1970, such as 1700000000, or unset it.",
        ) from None


@contextmanager
def rendered_at(when: datetime) -> Iterator[None]:
    """Let templates take ``when`` for the present moment, as long as the body runs."""
    token = _moment.set(when)
    try:
        yield
    finally:
        _moment.reset(token)


def _dated(template: str, when: datetime) -> str:
    """Return a template whose function for the date tells a moment instead of the present one.

    transformers replaces a function that it is given by a text, so this is a macro. It has a line
    of its own, which is trimmed, so that nothing else of the template changes.
    """
    told = [(f"%{flag}{one}", when.strftime(f"%{flag}{one}")) for flag, one in _DIRECTIVES]
    chain = "".join(f".replace({name!r}, {text!r})" for name, text in told)
    spared = f"wanted.replace('%%', '\\0'){chain}.replace('\\0', '%')"
    return f"{{% macro {_CLOCK}(wanted) %}}{{{{ {spared} }}}}{{% endmacro %}}\n{template}"


class NoTokenizerError(DatasetError):
    """Raised if rows have to be tokenized and there is no tokenizer."""


class ChatRenderer:
    """Renders conversations with the chat template of a processor.

    Args:
        processor: a tokenizer, or a processor that has one; it is not changed.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._moment = moment()
        self._warned = False

    @property
    def end(self) -> str:
        """The token at the end of a text; empty if there is none."""
        inner = getattr(self._processor, "tokenizer", None) or self._processor
        return str(getattr(inner, "eos_token", None) or "")

    @property
    def has_template(self) -> bool:
        """True if the processor has a chat template of its own."""
        inner = getattr(self._processor, "tokenizer", None)
        return any(getattr(one, "chat_template", None) for one in (self._processor, inner))

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        opens: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as text with special tokens.

        Args:
            messages: its turns.
            tools: tool definitions, for templates that render them.
            opens: add what the answer begins with (``add_generation_prompt``).
            variables: further variables of the template.
        """
        owner, template = self._template()
        options: dict[str, Any] = {
            **(variables or {}),
            "tokenize": False,
            "add_generation_prompt": opens,
        }
        names, takes_any = parameters_of(owner.apply_chat_template)
        if tools and (takes_any or "tools" in names):
            options["tools"] = list(tools)
        given: list[Any] = list(messages)
        if template is not None:
            options["chat_template"] = template
            given = [_join_texts(turn) for turn in messages]
        elif _CLOCK in str(own := owner.chat_template) and "chat_template" in names:
            # of several templates the owner knows which one it would take
            own = own if isinstance(own, str) else owner.get_chat_template(tools=tools)
            options["chat_template"] = _dated(own, self._moment)
        try:
            endless = TimeoutError(f"it computes for more than {_TEMPLATE_SECONDS:g} seconds")
            with time_limit(_TEMPLATE_SECONDS, lambda: endless):
                return _render(owner, given, options)
        except Exception as error:  # a template can raise anything
            raise DatasetError(
                f"The chat template refuses a conversation: {str(error) or type(error).__name__}.",
                "Render it in a preprocessing_func.",
            ) from error

    def with_empty_system_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render a conversation, with an empty system turn added if it has none.

        Templates without system turns get the original conversation.
        """
        if messages[0]["role"] != "system":
            try:
                return self([{"role": "system", "content": ""}, *messages])
            except DatasetError:
                pass
        return self(messages)

    def _template(self) -> tuple[Any, str | None]:
        """Return the object that renders, and a template to pass if it has none of its own."""
        if self._processor is None:
            raise NoTokenizerError(
                "The data holds conversations, and there is no tokenizer to render them.",
                "Give the model's tokenizer.",
            )
        inner = getattr(self._processor, "tokenizer", None) or self._processor
        for owner in (self._processor, inner):
            if getattr(owner, "chat_template", None):
                return owner, None
        if not hasattr(inner, "apply_chat_template"):
            raise DatasetError(
                f"A {type(inner).__name__} cannot render conversations.",
                "Render them in a preprocessing_func.",
            )
        if not self._warned:
            logger.warning("The tokenizer has no chat template; ChatML is used.")
            self._warned = True
        return inner, CHATML


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


def _text_of(part: Any) -> str | None:
    """Text of a part of a turn's content; ``None`` if it is not text."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _join_texts(turn: Mapping[str, Any]) -> dict[str, Any]:
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


def _render(owner: Any, messages: list[Any], options: Mapping[str, Any]) -> str:
    """Render messages, with lists of texts joined if the template does not support lists.

    Such a template fails on a list, or renders its Python representation.
    """
    lists = [
        place
        for place, content in enumerate(turn.get("content") for turn in messages)
        if content and isinstance(content, list) and None not in map(_text_of, content)
    ]
    try:
        text = str(owner.apply_chat_template(messages, **options))
    except Exception:
        if not lists:
            raise
    else:
        if not any(str(messages[place]["content"]) in text for place in lists):
            return text
    joined = list(messages)
    for place in lists:
        joined[place] = _join_texts(messages[place])
    return str(owner.apply_chat_template(joined, **options))


# --------------------
# Row preprocessing: the user's function or a template, then rendering to a column ``text``.

_CHATS = ("messages", "conversations")
_PARTS = frozenset({"chosen", "completion", "completions", "prompt", "rejected"})
"""Columns of which none alone is what a model is trained or run on."""


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
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        raise DatasetError(
            f"The file {path} has no function {name!r}.", did_you_mean(name, functions)
        )
    loaded: Callable[..., Any] = functions[name]
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
        self._warnings: set[str] = set()

    def __call__(self, row: Row) -> Row:
        """Return a preprocessed copy of a row.

        Raises:
            DatasetError: without the name of the row, see :func:`errors_naming`.
        """
        given, row = row, self._preprocessed(row)
        if self._never_seen:
            self._never_seen -= given.keys() | row.keys()
            self._columns.update(dict.fromkeys(map(str, [*given, *row])))
        for name in self._remove & row.keys():
            del row[name]
        column = self._find_text(row, given)
        conversation: Any = row.get("text")
        if is_chat(conversation):
            _check_chat(conversation, column)
            with errors_naming(f"Column {column!r}"):
                turns = normalize_turns(conversation)
                row["text"] = self._chat(turns, **self._options(row))
            for name, shown in collect_media(turns).items():
                if row.get(name) is None:
                    row[name] = shown
        return row

    def prompt_of(self, row: Row) -> str:
        """The text of the prompt of a prepared row; empty if it has none."""
        prompt: Any = row.get("prompt")
        if is_chat(prompt):
            with errors_naming("Column 'prompt'"):
                return self._chat(normalize_turns(prompt), opens=True, **self._options(row))
        return prompt if isinstance(prompt, str) else ""

    def _options(self, row: Row) -> dict[str, Any]:
        """What a chat template gets beside the turns of a row."""
        tools, variables = _parse_tools(row.get("tools")), row.get("chat_template_kwargs")
        if tools is None:
            self._warn("A column 'tools' is not used: it is no list of definitions.")
        is_valid = isinstance(variables, Mapping)
        return {"tools": tools, "variables": _without_none(variables) if is_valid else None}

    def _warn(self, message: str) -> None:
        """Warn, once for all rows."""
        if message not in self._warnings:
            logger.warning(message)
        self._warnings.add(message)

    def _find_text(self, row: Row, given: Row) -> str:
        """Move what a row has for text, whatever its form, to ``text``, and return its column."""
        column = self._text_column
        made = row.get("text")
        if column == "text":
            pass
        elif "text" in row and (
            "text" not in given or (isinstance(made, str) and made != given["text"])
        ):
            self._warn(
                f"text_column={column!r} is not used: what prepares the rows makes their text "
                "itself."
            )
        elif column in row:
            row["text"] = row.pop(column)
        elif not self._main_inputs & row.keys():
            raise DatasetError(
                f"has no column {column!r}; it has {_columns(row)}.",
                did_you_mean(column, map(str, row)) or "Give rows that have it.",
            )
        chats = [name for name in _CHATS if name in row] if row.get("text") is None else []
        for name in chats:
            if is_chat(row[name]):
                row["text"] = row.pop(name)
                return name
        if chats and not any(map(row.get, chats)) and not self._main_inputs & row.keys():
            row["text"] = None
        if row.get("text") is None and not self._main_inputs & row.keys():
            return self._join_answer(row) or column
        return column

    def _join_answer(self, row: Row) -> str | None:
        """Make the text of a prompt and its answer, and return the answer's column."""
        found = find_answer(row)
        if found is None:
            return None
        if row.get("label") is False:
            self._warn(
                "Answers whose label is False are used like the others: filter the data if they "
                "should not be."
            )
        row["prompt"] = found.prompt
        if found.is_chat:
            row["text"] = [*found.prompt, *found.answer]
        else:
            row["text"] = found.prompt + found.answer.removesuffix(self._chat.end) + self._chat.end
        return found.column

    def report(self) -> None:
        """Warn about ``remove_columns`` that no row has."""
        for name in sorted(self._never_seen):
            logger.warning(
                f"remove_columns: no row has a column {name!r}. "
                f"{did_you_mean(name, self._columns)}".rstrip()
            )

    def check_columns(self, row: Row, usable: Iterable[str]) -> None:
        """Refuse a row without usable columns; the error lists its columns."""
        if any(row.get(name) is not None for name in usable) or "text" in row:
            return
        refuse_broken_chat(row)
        texts = sorted(
            name
            for name, value in row.items()
            if isinstance(name, str) and (isinstance(value, str) or is_chat(value))
        )
        remedy = "Make text or input_ids of them with a preprocessing_func."
        if _PARTS.intersection(texts) and len(_PARTS & row.keys()) > 1:
            remedy = "Leave out rows without an answer, or make one text of prompt and answers in a"
            remedy += " preprocessing_func."
        elif len(texts) == 1:
            remedy = f"Name the column of the text: text_column={texts[0]!r}."
        elif texts:
            remedy = (
                "Join them to one text in a preprocessing_func. If a single column is the text, "
                f"name it, as in text_column={texts[0]!r}."
            )
        removed = f" without {', '.join(sorted(self._remove))}" if self._remove else ""
        raise DatasetError(
            f"has neither text nor input_ids; it has {_columns(row)}{removed}.", remedy
        )

    def _preprocessed(self, row: Row) -> Row:
        """Apply the user's function to a copy of the row, or the template to the row."""
        try:
            if self._function is None:
                return dict(row) if self._template is None else dict(self._template(row))
            own = copy.deepcopy(row)  # the function may change what it is given
            made = self._function(own)
            if made is not None and not isinstance(made, Mapping):
                raise TypeError(f"it must return a dict of columns, not a {type(made).__name__}")
            # by repr, as tensors have no single truth value
            if made is None and repr(row) == repr(own):
                self._warn(
                    "preprocessing_func returns None, and leaves the row as it is: a return may "
                    "be missing."
                )
            return {**own, **(made or {})}
        except DatasetError:
            raise
        except KeyError as error:
            raise DatasetError(
                f"has no column {error}; it has {_columns(row)}.",
                "Check that this is the data that the preprocessing was written for.",
            ) from error
        except Exception as error:
            remedy = "Check the preprocessing_func."
            if self._function is None:
                remedy = "Check that this is a copy of the data set that was named."
            raise DatasetError(f"cannot be preprocessed: {error!r}.", remedy) from error


def refuse_broken_chat(row: Mapping[str, Any]) -> None:
    """Refuse a row without text whose conversation is invalid.

    Raises:
        DatasetError: names the invalid turn.
    """
    for name in _CHATS:
        if row.get(name) is not None:
            _check_chat(row[name], name)


def _check_chat(value: Any, column: str) -> None:
    fault = find_chat_fault(value)
    if fault is not None:
        plain = f"say text_column={column!r} if it is plain text"
        other = plain if isinstance(value, str) else "make text of it with a preprocessing_func"
        raise DatasetError(
            f"has no conversation in its column {column!r}: {fault}.",
            f"Give a list of turns such as {{'role': 'user', 'content': '...'}}, or {other}.",
        )


def _columns(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "no columns at all"
