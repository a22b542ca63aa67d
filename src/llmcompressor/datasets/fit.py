# SPDX-License-Identifier: Apache-2.0
"""Warnings where calibration data obviously does not fit the model; nothing is refused.

Looked at are the samples as the model will see them, and its tokenizer. Data that nothing can be
told of, such as tokens without a tokenizer, is not warned of.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from llmcompressor.datasets.rows import is_a
from llmcompressor.datasets.text import ChatRenderer
from llmcompressor.datasets.tokenize import Preparation, tokenizer_of
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

Tokens: TypeAlias = list[int]

_SHORT, _FEW = 32, 5
"""Tokens of a short sample; of that many samples one may be short."""
_LOOKED_AT, _BEGINNING = 64, 256
"""Samples, and tokens of each, whose script is looked up."""
_ENTRIES = 4096
"""Entries of a vocabulary whose script is looked up."""
_KNOWN, _MANY = 0.005, 6
"""Share of a vocabulary's entries that a script has if the model knows it, and how many of these
are many: DeepSeek's, Qwen's and Mistral's Tekken have 7 and more, GPT-2's has 1, Mistral's first
4."""
_OTHER, _LETTERS = 0.01, 200
"""Share of letters from which on a text has a second script, and letters that tell anything."""

_NAMES: Mapping[str, str] = {
    **{
        name.upper(): name
        for name in (
            *("Arabic", "Armenian", "Bengali", "Cyrillic", "Devanagari", "Ethiopic", "Georgian"),
            *("Greek", "Gujarati", "Gurmukhi", "Hangul", "Hebrew", "Kannada", "Khmer", "Lao"),
            *("Latin", "Malayalam", "Myanmar", "Sinhala", "Tamil", "Telugu", "Thai", "Tibetan"),
        )
    },
    **dict.fromkeys(("CJK", "HIRAGANA", "KATAKANA"), "Chinese and Japanese"),
}
"""First word of a letter's name in Unicode → its script."""


def warn_of_misfit(
    texts: Sequence[Tokens], preparation: Preparation, *, is_mix: bool = False
) -> None:
    """Warn of samples that are short, lack the chat template, or are in one script of many.

    Args:
        texts: token ids of samples as the model will see them, without padding.
        preparation: how they were made, with the tokenizer.
        is_mix: they are of several kinds on purpose; only their length is looked at.
    """
    limit = preparation.max_length
    if limit is None or limit >= _SHORT:
        _warn_of_short(texts, preparation.name)
    tokenizer = tokenizer_of(preparation.processor)
    if not is_mix and texts and is_a(tokenizer, "transformers", "PreTrainedTokenizerBase"):
        _warn_of_raw_text(texts, preparation)
        _warn_of_one_script(texts, tokenizer, preparation.name)


def _warn_of_short(texts: Sequence[Tokens], name: str) -> None:
    short = sum(len(one) < _SHORT for one in texts)
    if len(texts) >= _FEW and short * _FEW >= len(texts):
        logger.warning(
            f"{name}: {short} of {len(texts)} samples have fewer than {_SHORT} tokens, which "
            "tell little of what the model computes. Give longer texts, or join them "
            "(concatenate_data=True with a max_seq_length)."
        )


def _warn_of_raw_text(texts: Sequence[Tokens], preparation: Preparation) -> None:
    marks = template_tokens(preparation.processor)
    if marks and all(marks.isdisjoint(one) for one in texts):
        logger.warning(
            f"{preparation.name}: the tokenizer has a chat template, and none of {len(texts)} "
            "samples has its tokens. A model that answers in conversations is calibrated better "
            "with them: give rows with 'messages', or dataset='default'."
        )


def template_tokens(processor: Any) -> frozenset[int]:
    """Return the special tokens that the chat template puts into every conversation.

    Returns:
        Their ids, without those that plain text gets too; empty if the template has none, or
        refuses a conversation of two turns.
    """
    render = ChatRenderer(processor)
    if not render.has_template:
        return frozenset()
    turns = (("user", "Hello"), ("assistant", "Hello"))
    try:
        text = render([{"role": role, "content": said} for role, said in turns])
    except DatasetError:
        return frozenset()
    tokenizer = tokenizer_of(processor)
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    used = special.intersection(tokenizer(text, add_special_tokens=False)["input_ids"])
    return frozenset(used.difference(tokenizer("Hello")["input_ids"]))


def _warn_of_one_script(texts: Sequence[Tokens], tokenizer: Any, name: str) -> None:
    beginnings = [one[:_BEGINNING] for one in texts[:: -(-len(texts) // _LOOKED_AT)]]
    letters = count_scripts("".join(tokenizer.batch_decode(beginnings, skip_special_tokens=True)))
    total = letters.total()
    if total < _LETTERS or total - max(letters.values()) >= total * _OTHER:
        return
    known = vocabulary_scripts(tokenizer)
    (script, _), *_ = letters.most_common(1)
    if len(known) >= _MANY and script in known:
        logger.warning(
            f"{name}: all text is in one script, {script}, and the tokenizer knows {len(known)} "
            f"({', '.join(sorted(known))}). If the model is to read other languages, calibrate it "
            "with some of them too: add such texts, or give dataset='default'."
        )


def vocabulary_scripts(tokenizer: Any) -> frozenset[str]:
    """Return the scripts that at least 0.5 % of a vocabulary's entries with letters have."""
    size = len(tokenizer)
    entries = [[index] for index in range(0, size, -(-size // _ENTRIES))]
    found: Counter[str] = Counter()
    for text in tokenizer.batch_decode(entries, skip_special_tokens=True):
        found.update(count_scripts(text).keys())
    return frozenset(one for one, count in found.items() if count >= _KNOWN * found.total())


def count_scripts(text: Iterable[str]) -> Counter[str]:
    """Count the letters of a text by script.

    >>> count_scripts("Да, yes.")
    Counter({'Latin': 3, 'Cyrillic': 2})
    """
    found: Counter[str] = Counter()
    for letter, count in Counter(text).items():
        if script := _script_of(letter):
            found[script] += count
    return found


@cache
def _script_of(letter: str) -> str | None:
    is_letter = letter.isalpha()
    return _NAMES.get(unicodedata.name(letter, "").split(" ")[0]) if is_letter else None
