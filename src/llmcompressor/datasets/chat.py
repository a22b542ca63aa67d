# SPDX-License-Identifier: Apache-2.0
"""Conversations as text, by the tokenizer's own template or, where it has none, ChatML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = ["CHATML", "ChatRenderer", "is_chat", "turns"]

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


def is_chat(value: Any) -> bool:
    """Whether a value is turns with ``role`` and ``content``, or ``from`` and ``value``.

    A turn that calls tools may have no ``content``; one of the turns has some.

    >>> is_chat([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "tool_calls": []}])
    True
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    if not all(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in value):
        return False
    return any(turn.keys() & {"content", "from"} for turn in value)


def turns(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation of either form with ``role`` and ``content``.

    >>> turns([{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}])
    [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi'}]
    """
    plain = []
    for turn in conversation:
        if "from" in turn:
            role, content = str(turn["from"]), turn.get("value")
            plain.append({"role": _ROLES.get(role, role), "content": content or ""})
        else:
            plain.append({**turn, "content": turn.get("content") or ""})
    return plain


class ChatRenderer:
    """Renders conversations with one processor's template.

    Args:
        processor: a tokenizer, or a processor that has one; it is not changed.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._warned = False

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """One conversation as text, special tokens written out."""
        owner, template = self._template()
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": False}
        if template is not None:
            options["chat_template"] = template
        try:
            return str(owner.apply_chat_template(list(messages), **options))
        except Exception as error:  # a template is a program of its own
            raise DatasetError(
                f"The chat template refuses a conversation: {error}.",
                "Render it in a preprocessing_func.",
            ) from error

    def with_empty_system_turn(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """One conversation as text, with an empty system turn where it has none.

        Templates that know no system turn get the conversation as it is.
        """
        if messages[0]["role"] == "system":
            return self(messages)
        try:
            return self([{"role": "system", "content": ""}, *messages])
        except DatasetError:
            return self(messages)

    def _template(self) -> tuple[Any, str | None]:
        """Who renders, and the template to give it, if it has none of its own."""
        if self._processor is None:
            raise DatasetError(
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
