# SPDX-License-Identifier: Apache-2.0
"""Data sets of tasks with solutions; the task is the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from llmcompressor.datasets.generation import TextGenerationDataset
from llmcompressor.datasets.preprocess import normalize_turns
from llmcompressor.datasets.rows import Row

__all__ = [
    "C4",
    "GSM8K",
    "CNNDailyMail",
    "EvolCodeAlpaca",
    "Flickr30k",
    "OpenPlatypus",
    "PeoplesSpeech",
    "PerfectBlend",
    "UltraChat",
    "WikiText",
]

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


# --------------------
# Data sets of conversations, rendered by the tokenizer's chat template.


class UltraChat(TextGenerationDataset):
    """Conversations written by two models."""

    hub_id = "HuggingFaceH4/ultrachat_200k"

    def resolve_split(self, split: str | None) -> str | None:
        """Map ``train`` and ``test`` to ``train_sft`` and ``test_sft``."""
        return re.sub(r"\b(train|test)(?=\[|\+|\s|$)", r"\1_sft", split) if split else split

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Render ``messages``, with an empty system turn if there is none."""
        return {"text": self.chat.with_empty_system_turn(normalize_turns(row["messages"]))}


class PerfectBlend(TextGenerationDataset):
    """Conversations from many sources, ``human`` and ``gpt`` by turns."""

    hub_id = "mlabonne/open-perfectblend"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Render ``conversations``, with the roles of chat templates."""
        return {"text": self.chat(normalize_turns(row["conversations"]))}


# --------------------
# Plain text data sets with a column ``text``.


class _Plain(TextGenerationDataset):
    """Base class that keeps only the text of each row."""

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Return the text without the other columns."""
        return {"text": row["text"]}


class C4(_Plain):
    """Web pages; only the first of 1024 files is loaded."""

    hub_id = "allenai/c4"
    data_files: ClassVar[Mapping[str, str]] = {
        "train": "en/c4-train.00000-of-01024.json.gz",
        "validation": "en/c4-validation.00000-of-00008.json.gz",
    }


class WikiText(_Plain):
    """Wikipedia articles by line, with many blank lines."""

    hub_id = "Salesforce/wikitext"
    config_name = "wikitext-2-raw-v1"


# --------------------
# Data sets of images and of speech.


class Flickr30k(TextGenerationDataset):
    """Photographs with several captions each."""

    hub_id = "lmms-lab/flickr30k"
    default_split = "test"  # it has no other

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """A question about the image, answered by all its captions."""
        captions = row["caption"]
        answer = captions if isinstance(captions, str) else " ".join(captions)
        question = [{"type": "image"}, {"type": "text", "text": "What does this image show?"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        return {"text": self.chat(messages), "images": row["image"]}


class PeoplesSpeech(TextGenerationDataset):
    """Recorded speech and its transcript."""

    hub_id = "MLCommons/peoples_speech"
    config_name = "test"
    default_split = "test"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Audio and transcript, with its first letter capitalized."""
        audio = row["audio"]
        return {
            "audio": audio["array"],
            "sampling_rate": int(audio["sampling_rate"]),
            "text": " " + row["text"].capitalize(),
        }
