# SPDX-License-Identifier: Apache-2.0
"""Registry of named data sets, whose classes are imported lazily."""

from __future__ import annotations

from typing import Any

from llmcompressor.registry import Table, fold

__all__ = ["DATASETS", "find", "names", "register"]

_NAMED = "llmcompressor.datasets.named"

DATASETS = Table(
    "data set",
    {
        "c4": f"{_NAMED}.plain:C4",
        "cnn_dailymail": f"{_NAMED}.tasks:CNNDailyMail",
        "evolcodealpaca": f"{_NAMED}.tasks:EvolCodeAlpaca",
        "flickr30k": f"{_NAMED}.media:Flickr30k",
        "gsm8k": f"{_NAMED}.tasks:GSM8K",
        "open_platypus": f"{_NAMED}.tasks:OpenPlatypus",
        "peoples_speech": f"{_NAMED}.media:PeoplesSpeech",
        "perfectblend": f"{_NAMED}.chats:PerfectBlend",
        "ultrachat_200k": f"{_NAMED}.chats:UltraChat",
        "wikitext": f"{_NAMED}.plain:WikiText",
    },
)

_ALSO = {
    "abisee/cnn_dailymail": "cnn_dailymail",
    "allenai/c4": "c4",
    "flickr": "flickr30k",
    "garage_baind/open_platypus": "open_platypus",
    "huggingfaceh4/ultrachat_200k": "ultrachat_200k",
    "lmms_lab/flickr30k": "flickr30k",
    "mlabonne/open_perfectblend": "perfectblend",
    "mlcommons/peoples_speech": "peoples_speech",
    "open_perfectblend": "perfectblend",
    "openai/gsm8k": "gsm8k",
    "salesforce/wikitext": "wikitext",
    "theblackcat102/evol_codealpaca_v1": "evolcodealpaca",
    "ultrachat": "ultrachat_200k",
}
"""Other names, folded: the data sets' own on the hub among them."""

_registered: dict[str, str] = {}


def register(name: str, cls: Any) -> None:
    """Register a third party's class as ``name``; it takes precedence over a built-in one."""
    DATASETS.add(name, cls)
    _registered[fold(name)] = name


def names() -> list[str]:
    """All names that :func:`find` accepts, without aliases."""
    return sorted({*DATASETS, *_registered.values()})


def find(name: str) -> Any | None:
    """Return the class of a data set by any of its names, or ``None``."""
    folded = fold(name)
    if folded not in _registered:
        folded = _ALSO.get(folded, folded)
        if folded not in DATASETS:
            return None
    return DATASETS.load(folded)
