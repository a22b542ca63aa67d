# SPDX-License-Identifier: Apache-2.0
"""Old paths of public names. Nothing lives here: each name is an alias of the one place it has."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

__all__ = [
    "DataTrainingArguments",
    "DatasetArguments",
    "ModelArguments",
    "RecipeArguments",
    "SessionManagerMixIn",
    "SparseAutoModelForCausalLM",
    "TextGenerationDataset",
    "Trainer",
    "TrainingArguments",
    "apply",
    "compress",
    "oneshot",
    "train",
    "wrap_hf_model_class",
]

_HOMES = {
    "DataTrainingArguments": "llmcompressor.args:DatasetArguments",
    "DatasetArguments": "llmcompressor.args:DatasetArguments",
    "ModelArguments": "llmcompressor.args:ModelArguments",
    "RecipeArguments": "llmcompressor.args:RecipeArguments",
    "SessionManagerMixIn": "llmcompressor.training:SessionManagerMixIn",
    "SparseAutoModelForCausalLM": "transformers:AutoModelForCausalLM",
    "TextGenerationDataset": "llmcompressor.datasets:TextGenerationDataset",
    "Trainer": "llmcompressor.training:Trainer",
    "TrainingArguments": "llmcompressor.args:TrainingArguments",
    "apply": "llmcompressor.entrypoints.stages:run_stages",
    "compress": "llmcompressor.entrypoints.stages:run_stages",
    "oneshot": "llmcompressor.entrypoints.oneshot:oneshot",
    "train": "llmcompressor.entrypoints.train:train",
    "wrap_hf_model_class": "llmcompressor.modeling.unneeded:wrap_hf_model_class",
}

_ABSENT = {
    "eval": "llmcompressor.evaluate(model) measures perplexity, train(..., eval_strategy=...) the "
    "loss in a training."
}
"""What an earlier release had, and what does its work now."""

__getattr__, __dir__ = lazy_page(globals(), _HOMES, _ABSENT)
