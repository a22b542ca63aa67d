# SPDX-License-Identifier: Apache-2.0
"""Old paths of public names. Nothing lives here: each name is an alias of the one place it has."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

__all__ = [
    "DataTrainingArguments",
    "SparseAutoModelForCausalLM",
    "TextGenerationDataset",
    "TrainingArguments",
    "apply",
    "oneshot",
    "train",
]

_HOMES = {
    "DataTrainingArguments": "llmcompressor.args:DatasetArguments",
    "SparseAutoModelForCausalLM": "transformers:AutoModelForCausalLM",
    "TextGenerationDataset": "llmcompressor.datasets:TextGenerationDataset",
    "TrainingArguments": "llmcompressor.args:TrainingArguments",
    "apply": "llmcompressor.entrypoints.stages:run_stages",
    "oneshot": "llmcompressor.entrypoints.oneshot:oneshot",
    "train": "llmcompressor.entrypoints.train:train",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
