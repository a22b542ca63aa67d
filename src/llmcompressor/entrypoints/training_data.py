# SPDX-License-Identifier: Apache-2.0
"""Data of ``train``: the splits for training and evaluation, opened before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import table
from llmcompressor.datasets.calibration import load_training, make_collator
from llmcompressor.datasets.rows import Stream
from llmcompressor.datasets.source import Source, is_loader, open_source
from llmcompressor.datasets.splits import parse_split
from llmcompressor.entrypoints.data_limits import data_limits
from llmcompressor.errors import ArgumentError, DatasetError

__all__ = ["TrainingData", "check_targets"]

_TRAIN = "train"
_IGNORED = -100  # transformers' label of a position without a target
_EVAL_ROLES = ("eval", "validation", "test")
_NOTHING_TO_EVALUATE = "There is nothing to evaluate on: eval_strategy or do_eval is set"


@dataclass(frozen=True)
class _Role:
    """Arguments and source of the training or the evaluation data."""

    args: DatasetArguments
    source: Source | None

    @property
    def is_stream(self) -> bool:
        """True if the number of samples is unknown."""
        rows = None if self.source is None else self.source.rows
        streamed = self.args.streaming if rows is None else isinstance(rows, Stream)
        return streamed and self.args.max_train_samples is None


class TrainingData:
    """Training data, and evaluation data if required.

    Args:
        args: the user's arguments.
        evaluates: whether evaluation data is needed.

    Raises:
        DatasetError: there is no data, or none for evaluation.
    """

    def __init__(self, args: DatasetArguments, *, evaluates: bool) -> None:
        if args.dataset is None and args.dataset_path is None:
            raise DatasetError("Training needs data, and no dataset was given.", "Pass dataset=...")
        if is_loader(args.dataset):
            raise DatasetError(
                "The dataset is a DataLoader, and training makes its own batches.",
                "Pass the data set itself, and the loader's collate_fn as data_collator.",
            )
        self._train = _opened(replace(args, splits=_train_split(args.splits)))
        self._eval: _Role | None = None
        if evaluates:
            split = _eval_split(args.splits)
            _refuse_the_same_data(args, split)
            self._eval = _opened(replace(args, splits=split, max_train_samples=None))

    def check_steps(self, max_steps: int) -> None:
        """Refuse a stream of unknown length without a number of steps.

        Raises:
            ArgumentError: the data is such a stream and ``max_steps`` is not given.
        """
        if self._train.is_stream and max_steps < 1:
            raise ArgumentError(
                "The data set is a stream, whose length is not known, so that the number of "
                "training steps is not known either.",
                "Give max_steps (--max-steps), or max_train_samples to take that many of it.",
            )

    def load(self, model: Module, processor: Any) -> tuple[Any, Any]:
        """Load the training samples and the evaluation samples, which may be ``None``."""
        train = _samples(self._train, model, processor)
        return train, None if self._eval is None else _samples(self._eval, model, processor)

    def collator(self, model: Module, processor: Any, *, given: bool) -> Any:
        """Make the data collator, which pads by default.

        Args:
            model: the model.
            processor: the tokenizer or processor.
            given: whether the user named a collator; the default of calibration, which truncates
                every sample to the shortest, would drop text.
        """
        args = self._train.args if given else replace(self._train.args, data_collator="padding")
        limits = data_limits(model)
        return make_collator(
            args,
            processor=processor,
            vocab_size=limits["vocab_size"],
            positions=limits["model_max_length"] if limits["in_table"] else None,
            learns=True,
        )


def check_targets(samples: Any) -> None:
    """Refuse training samples without any label; a stream is not read.

    Raises:
        DatasetError: all labels are -100, so that there is no loss.
    """
    if not hasattr(samples, "__len__") or not len(samples):
        return
    labels = (one.get("labels") if isinstance(one, Mapping) else None for one in samples)
    if all(one is not None and bool((torch.as_tensor(one) == _IGNORED).all()) for one in labels):
        raise DatasetError(
            "No token of the training data has a label (all are -100), so there is nothing to "
            "learn.",
            "Give labels, or leave them out to have them made of the tokens; where the data has "
            "prompts only, learn from a teacher (OutputDistillationModifier).",
        )


def _train_split(splits: Any) -> Any:
    """Return the training split if ``splits`` is a mapping that has one, else ``splits``."""
    return splits[_TRAIN] if isinstance(splits, Mapping) and _TRAIN in splits else splits


def _eval_split(splits: Any) -> str:
    if splits is None:
        return "validation"
    if isinstance(splits, Mapping):
        found = [splits[role] for role in _EVAL_ROLES if role in splits]
    elif isinstance(splits, str):
        found = []
    else:
        found = [one for one in splits if parse_split(one)[0].name in _EVAL_ROLES]
    if not found:
        raise DatasetError(
            f"{_NOTHING_TO_EVALUATE}, and splits names no split for it.",
            "Name both, as in splits={'train': 'train', 'eval': 'validation'} "
            "(--splits train=train --splits eval=validation).",
        )
    return str(found[0])


def _refuse_the_same_data(args: DatasetArguments, split: str) -> None:
    """Refuse to evaluate on the whole training data, where the data has no splits.

    Every split of such data is all of it, whatever its name. A slice, or ``train``, is accepted.
    """
    parts = parse_split(split)
    if _has_splits(args) or any(not part.whole or part.name == _TRAIN for part in parts):
        return
    raise DatasetError(
        f"{_NOTHING_TO_EVALUATE}, and the data has no split {split!r}.",
        "Give both in dataset, as in dataset={'train': ..., 'validation': ...}, or cut some of it "
        "off, as in splits={'train': 'train[100:]', 'eval': 'train[:100]'} "
        "(--splits 'train=train[100:]' --splits 'eval=train[:100]').",
    )


def _has_splits(args: DatasetArguments) -> bool:
    """Return True if the data is opened by split name, so that missing splits raise on opening."""
    data = args.dataset
    if isinstance(data, Mapping):  # keys are splits or columns
        return bool({_TRAIN, *_EVAL_ROLES} & set(data))
    if data is not None and not isinstance(data, str):
        return False
    # Where save_to_disk wrote several data sets, there is a dataset_dict.json instead.
    place = Path(args.dataset_path or str(data)).expanduser()
    return not (place.is_file() or (place / "state.json").is_file())


def _opened(args: DatasetArguments) -> _Role:
    """Open the raw data; a registered data set is opened later, as it may need the processor."""
    registered = isinstance(args.dataset, str) and table.find(args.dataset) is not None
    return _Role(args, None if registered else open_source(args, "train"))


def _samples(role: _Role, model: Module, processor: Any) -> Any:
    return load_training(role.args, processor=processor, source=role.source, **data_limits(model))
