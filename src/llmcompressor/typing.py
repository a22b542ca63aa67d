# SPDX-License-Identifier: Apache-2.0
"""Type aliases for annotations in scripts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from datasets import Dataset, DatasetDict, IterableDataset
from torch.nn import Module
from transformers import (
    BaseImageProcessor,
    FeatureExtractionMixin,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

__all__ = ["DatasetType", "NamedModules", "Processor"]

Processor: TypeAlias = (
    PreTrainedTokenizerBase | BaseImageProcessor | FeatureExtractionMixin | ProcessorMixin
)
"""What makes the inputs of a model: a tokenizer, or a processor."""

DatasetType: TypeAlias = Dataset | DatasetDict | IterableDataset
"""Rows, splits of rows, or a stream of rows."""

NamedModules: TypeAlias = Iterable[tuple[str, Module]]
"""Modules with their names, as ``named_modules()`` gives them."""
