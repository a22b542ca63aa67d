# SPDX-License-Identifier: Apache-2.0
"""Data sets of tasks with solutions; the task is the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcompressor.datasets.generation import TextGenerationDataset
from llmcompressor.datasets.rows import Row

__all__ = ["GSM8K", "CNNDailyMail", "EvolCodeAlpaca", "OpenPlatypus"]

# The wording of the Alpaca prompt: models that were tuned on it know it letter by letter.
_ALPACA = (
    "Below is an instruction that describes a {what}. Write a {result} that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def _solved(prompt: str, solution: str) -> dict[str, str]:
    return {"text": prompt + solution, "prompt": prompt}


class OpenPlatypus(TextGenerationDataset):
    """Questions of science and logic, with Alpaca's prompt."""

    hub_id = "garage-bAInd/Open-Platypus"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """``instruction`` and, where there is one, ``input``; then ``output``."""
        if row.get("input"):
            prompt = _ALPACA_WITH_INPUT.format(instruction=row["instruction"], input=row["input"])
        else:
            prompt = _ALPACA.format(what="task", result="response", instruction=row["instruction"])
        return _solved(prompt, row["output"])


class EvolCodeAlpaca(TextGenerationDataset):
    """Programming tasks, with Alpaca's prompt."""

    hub_id = "theblackcat102/evol-codealpaca-v1"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """``instruction``, then ``output``."""
        prompt = _ALPACA.format(
            what="programming task", result="program", instruction=row["instruction"]
        )
        return _solved(prompt, row["output"])


class GSM8K(TextGenerationDataset):
    """Grade school math word problems."""

    hub_id = "openai/gsm8k"
    config_name = "main"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """``question``, then ``answer``."""
        return _solved(f"Question: {row['question']}\nAnswer:", f" {row['answer']}")


class CNNDailyMail(TextGenerationDataset):
    """News articles with summaries."""

    hub_id = "abisee/cnn_dailymail"
    config_name = "3.0.0"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """``article``, then ``highlights``."""
        return _solved(f"Article:\n{row['article']}\n\n### Summarization:\n", row["highlights"])
