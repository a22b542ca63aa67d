# SPDX-License-Identifier: Apache-2.0
"""The arguments of the entrypoints as dataclasses, and the function that fills them.

Importing this package loads neither torch nor transformers: :class:`TrainingArguments`, which
extends transformers' class of that name, is imported on first access (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmcompressor.args.dataset_arguments import DatasetArguments
from llmcompressor.args.model_arguments import ModelArguments, RecipeArguments, RunArguments
from llmcompressor.args.parsing import parse_args, parse_arguments

if TYPE_CHECKING:
    from llmcompressor.args.training_arguments import TrainingArguments

__all__ = [
    "DataTrainingArguments",
    "DatasetArguments",
    "ModelArguments",
    "RecipeArguments",
    "RunArguments",
    "TrainingArguments",
    "parse_args",
    "parse_arguments",
]

DataTrainingArguments = DatasetArguments
"""The name that :class:`DatasetArguments` had in mid-2025 releases."""


def __getattr__(name: str) -> Any:
    if name == "TrainingArguments":
        module = importlib.import_module("llmcompressor.args.training_arguments")
        return module.TrainingArguments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
