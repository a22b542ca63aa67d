# SPDX-License-Identifier: Apache-2.0
"""Named data sets: their places on the hub, and the templates that make text of their rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.rows import Row
from llmcompressor.datasets.sampling import prepare_samples
from llmcompressor.datasets.source import (
    KIND_NAMES,
    open_source,
    rows_of_object,
    streamed_split,
)
from llmcompressor.datasets.text import ChatRenderer, normalize_turns
from llmcompressor.datasets.tokenize import Preparation
from llmcompressor.errors import ArgumentError, DatasetError, did_you_mean
from llmcompressor.runtime.registry import normalize_name, resolve

_Class = TypeVar("_Class", bound=type)


class TextGenerationDataset:
    """A data set on the hub with a template that turns its rows into inputs of the processor.

    A subclass names the data set and defines the template::

        @TextGenerationDataset.register("my_notes")
        class MyNotes(TextGenerationDataset):
            hub_id = "me/notes"

            def dataset_template(self, row):
                return {"text": row["title"] + row["body"]}

    ``dataset="my_notes"`` then works. Returned columns replace those of the row; ``prompt`` is
    the part of ``text`` that training does not learn.

    Args:
        dataset_args: the user's arguments.
        split: the split to load, or ``None`` for :attr:`default_split`.
        processor: the tokenizer or processor; only needed to prepare rows.
    """

    hub_id: ClassVar[str | None] = None
    """The name on the hub; ``None`` for what ``dataset`` says."""

    config_name: ClassVar[str | None] = None
    """The configuration to load where the user names none."""

    default_split: ClassVar[str | None] = "train"

    data_files: ClassVar[Mapping[str, str] | None] = None
    """Only these files, where the user names no configuration."""

    is_mix: ClassVar[bool] = False
    """Its rows are of several kinds on purpose: nobody is warned that they do not fit."""

    def __init__(
        self, dataset_args: DatasetArguments, split: str | None = None, processor: Any = None
    ) -> None:
        self.dataset_args = dataset_args
        self.split = self.resolve_split(split or self.default_split)
        self.processor = processor
        self.chat = ChatRenderer(processor)

    def resolve_split(self, split: str | None) -> str | None:
        """Return the hub's name of a split."""
        return split

    @property
    def rest(self) -> str | None:
        """Slice that has to be applied to a stream after loading."""
        return streamed_split(self.split)[1] if self.dataset_args.streaming else None

    def load_dataset(self) -> Any:
        """Load the raw rows."""
        args = self.dataset_args
        if self.hub_id is None and (args.dataset_path or not isinstance(args.dataset, str)):
            source = open_source(args)
            if source is None:
                raise DatasetError("No data was named.", "Give dataset or dataset_path.")
            return source.rows
        config, options = args.dataset_config_name, dict(args.raw_kwargs)
        if config is None:
            config = self.config_name
            if self.data_files:
                options.setdefault("data_files", dict(self.data_files))
        return resolve("llmcompressor.datasets.hub:load_hub")(
            self.hub_id or args.dataset,
            config=config,
            split=streamed_split(self.split)[0] if args.streaming else self.split,
            streaming=args.streaming,
            **options,
        )

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Turn a row into inputs of the processor; the base class returns it unchanged."""
        return row

    def __call__(self, add_labels: bool = False) -> Any:
        """Load, template and tokenize all rows.

        Args:
            add_labels: add ``labels``, for training.

        Returns:
            A ``datasets.Dataset``, which a trainer takes.
        """
        preparation = Preparation(
            self.dataset_args,
            self.processor,
            f"The data set {type(self).__name__}",
            self.dataset_template,
            for_training=add_labels,
        )
        rows = rows_of_object(self.load_dataset(), self.rest)
        samples = prepare_samples(rows, preparation, wanted=None, shuffle=False, seed=0)
        return resolve("llmcompressor.datasets.hub:dataset_of")(samples)

    @classmethod
    def register(
        cls, name: str, alias: str | Iterable[str] | None = None
    ) -> Callable[[_Class], _Class]:
        """Return a class decorator that registers a subclass as ``name`` and each ``alias``."""
        aliases = [alias] if isinstance(alias, str) else list(alias or [])

        def decorate(subclass: _Class) -> _Class:
            for each in [name, *aliases]:
                table.register(each, subclass)
            return subclass

        return decorate

    @classmethod
    def load_from_registry(
        cls,
        name: str,
        dataset_args: DatasetArguments | None = None,
        split: str | None = None,
        processor: Any = None,
        *,
        data_args: DatasetArguments | None = None,
    ) -> TextGenerationDataset:
        """Create the data set registered as ``name`` ("json", "csv", "custom": a local one).

        Args:
            name: its registered name.
            dataset_args: the user's arguments.
            split: the split to load.
            processor: the tokenizer or processor.
            data_args: the earlier name of ``dataset_args``.

        Raises:
            ArgumentError: the arguments are given under both names, or not at all.
            DatasetError: there is no data set of that name.
        """
        if (dataset_args is None) == (data_args is None):
            names = "none of their names" if data_args is None else "both their names"
            raise ArgumentError(
                f"The arguments of the data set {name!r} are given under {names}.",
                "Give them as dataset_args.",
            )
        found = table.find(name)
        if found is None and normalize_name(name) in KIND_NAMES:
            found = TextGenerationDataset
        if found is None:
            raise DatasetError(
                f"There is no data set named {name!r}.", did_you_mean(name, table.names())
            )
        made: TextGenerationDataset = found(
            dataset_args=dataset_args or data_args, split=split, processor=processor
        )
        return made

    @classmethod
    def registered_names(cls) -> list[str]:
        """Names that :meth:`load_from_registry` accepts."""
        return table.names()


# --------------------
# Data sets of tasks with solutions; the task is the prompt.

# The wording of the Alpaca prompt: models that were tuned on it know it letter by letter.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class _Solved(TextGenerationDataset):
    """Base class of prompts that are filled with the columns of a row, and solutions."""

    prompt: ClassVar[str]
    solution: ClassVar[str]

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Return the prompt with the solution, and the prompt alone."""
        has_input = self.prompt == _ALPACA and row.get("input")
        prompt = (_ALPACA_WITH_INPUT if has_input else self.prompt).format_map(row)
        return {"text": prompt + self.solution.format_map(row), "prompt": prompt}


class OpenPlatypus(_Solved):
    """Questions of science and logic, with Alpaca's prompt."""

    hub_id = "garage-bAInd/Open-Platypus"
    prompt = _ALPACA
    solution = "{output}"


class EvolCodeAlpaca(_Solved):
    """Programming tasks, with Alpaca's prompt."""

    hub_id = "theblackcat102/evol-codealpaca-v1"
    prompt = _ALPACA.replace("a task", "a programming task").replace("a response", "a program")
    solution = "{output}"


class GSM8K(_Solved):
    """Grade school math word problems."""

    hub_id = "openai/gsm8k"
    config_name = "main"
    prompt = "Question: {question}\nAnswer:"
    solution = " {answer}"


class CNNDailyMail(_Solved):
    """News articles with summaries."""

    hub_id = "abisee/cnn_dailymail"
    config_name = "3.0.0"
    prompt = "Article:\n{article}\n\n### Summarization:\n"
    solution = "{highlights}"


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
