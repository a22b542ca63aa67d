# SPDX-License-Identifier: Apache-2.0
"""Rendering of conversations with the tokenizer's chat template, or with ChatML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmcompressor.datasets.encode import parameters_of
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = [
    "CHATML",
    "ChatRenderer",
    "NoTokenizerError",
    "fault_of_chat",
    "is_chat",
    "tools_of",
    "turns",
]

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


def is_chat(value: Any) -> bool:
    """Return True for a list of turns with ``role`` and ``content``, or ``from`` and ``value``.

    A turn that calls tools may have no ``content``, but at least one turn must have some.

    >>> is_chat([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "tool_calls": []}])
    True
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    if not all(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in value):
        return False
    return any(turn.keys() & {"content", "from"} for turn in value)


def fault_of_chat(value: Any) -> str | None:
    """Return the reason why a value is not a valid conversation; ``None`` if it is one.

    A turn needs no ``content`` if it has something else than text, such as tool calls.

    >>> fault_of_chat([{"content": "2 + 2?"}])
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


def tools_of(given: Any) -> list[Any] | None:
    """Parse tool definitions: a list, a single one, or either as JSON.

    Keys without a value, which tables add for the keys of other rows, are dropped.

    Returns:
        The definitions; an empty list if there are none, ``None`` for an invalid value.

    >>> tools_of('[{"name": "add", "parameters": {"a": null}}]')
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


def turns(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Normalize a conversation to turns with ``role`` and ``content``.

    >>> turns([{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}])
    [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi'}]

    Raises:
        DatasetError: it is not a valid conversation; names the turn.
    """
    fault = fault_of_chat(conversation)
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
            plain.append({**turn, "content": turn.get("content") or ""})
    return plain


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
        given = list(messages) if template is None else [_of_text(turn) for turn in messages]
        try:
            return _rendered(owner, given, options)
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


def _of_text(turn: Mapping[str, Any]) -> dict[str, Any]:
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


def _rendered(owner: Any, messages: list[Any], options: Mapping[str, Any]) -> str:
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
        _of_text(turn) if _is_list_of_texts(turn.get("content")) else turn for turn in messages
    ]
    return str(owner.apply_chat_template(joined, **options))


def _is_list_of_texts(content: Any) -> bool:
    return bool(content) and isinstance(content, list) and None not in map(_text_of, content)
