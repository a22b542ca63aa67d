# SPDX-License-Identifier: Apache-2.0
"""Rows of a prompt and an answer, in the forms that TRL gives its trainers.

================================  ====================  ===============================
columns                           the answer            the prompt
================================  ====================  ===============================
``prompt``, ``completion``        ``completion``        ``prompt``
``prompt``, ``chosen``, ...       ``chosen``            ``prompt``
``chosen``, ``rejected``          the rest of           what ``chosen`` and ``rejected``
                                  ``chosen``            begin with
================================  ====================  ===============================

Both are texts, or both are lists of turns. A prompt of the other kind than ``chosen`` is part of it
already, and what both answers begin with is taken, as in TRL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from llmcompressor.datasets.rows import is_chat
from llmcompressor.errors import DatasetError


class Answer(NamedTuple):
    """A prompt with its answer: two texts, or two lists of turns."""

    column: str
    """The column that the answer is from."""
    prompt: Any
    answer: Any

    @property
    def is_chat(self) -> bool:
        """True for turns, and not texts."""
        return not isinstance(self.answer, str)


def find_answer(row: Mapping[str, Any]) -> Answer | None:
    """Return the prompt and the answer of a row; ``None`` if it has none of these forms.

    >>> find_answer({"prompt": "1 + 1 = ", "completion": "2"})
    Answer(column='completion', prompt='1 + 1 = ', answer='2')
    >>> find_answer({"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"})[1:]
    ('1 + 1 =', ' 2')

    Raises:
        DatasetError: one of the two is a text and the other is not, or it is neither.
    """
    if row.get("prompt") is not None and row.get("completion") is not None:
        found = Answer("completion", row["prompt"], row["completion"])
    elif row.get("chosen") is None:
        return None
    elif _is_text(row.get("prompt"), row["chosen"]) or _are_turns(row.get("prompt"), row["chosen"]):
        found = Answer("chosen", row["prompt"], row["chosen"])
    elif row.get("rejected") is None:
        return None
    else:
        found = _without_shared_part(row["chosen"], row["rejected"])
    if _is_text(found.prompt, found.answer) or _are_turns(found.prompt, found.answer):
        return found
    kinds = " and a ".join(type(one).__name__ for one in found[1:])
    raise DatasetError(
        f"has a {kinds} for its prompt and its {found.column}.",
        "Give two texts, or two lists of turns such as {'role': 'user', 'content': '...'}.",
    )


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _are_turns(*values: Any) -> bool:
    return all(not isinstance(value, str) and (is_chat(value) or value == []) for value in values)


def _without_shared_part(chosen: Any, rejected: Any) -> Answer:
    """What two answers begin with as the prompt, and the rest of the chosen one."""
    if not (_is_text(chosen, rejected) or _are_turns(chosen, rejected)):
        return Answer("chosen", rejected, chosen)
    pairs: Sequence[tuple[Any, Any]] = list(zip(chosen, rejected, strict=False))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1  # most tokenizers join a blank to the word behind it
    return Answer("chosen", chosen[:shared], chosen[shared:])
