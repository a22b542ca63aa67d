# SPDX-License-Identifier: Apache-2.0
"""Old paths of public names. Nothing lives here: each name is an alias of the one place it has."""

from __future__ import annotations

from typing import Any

from llmcompressor.registry import resolve

__all__ = [
    "DataTrainingArguments",
    "TextGenerationDataset",
    "TrainingArguments",
    "oneshot",
    "train",
]

_HOMES = {
    "DataTrainingArguments": "llmcompressor.args:DatasetArguments",
    "TextGenerationDataset": "llmcompressor.datasets:TextGenerationDataset",
    "TrainingArguments": "llmcompressor.args:TrainingArguments",
    "oneshot": "llmcompressor.entrypoints.oneshot:oneshot",
    "train": "llmcompressor.entrypoints.train:train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(_HOMES[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
