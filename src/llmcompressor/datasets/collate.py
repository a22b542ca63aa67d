# SPDX-License-Identifier: Apache-2.0
"""Data collators: truncation to the shortest sample, or padding to the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from llmcompressor.datasets.samples import (
    IGNORED_LABEL,
    MAIN_INPUTS,
    SEQUENCES,
    Sample,
    pad,
    token_sequences,
    truncate,
)
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

__all__ = [
    "BatchCheck",
    "CheckedCollator",
    "CheckedLoader",
    "DataCollatorWithTruncation",
    "NamedInputsCollator",
    "PaddingCollator",
    "TruncationCollator",
    "check_placeholders_kept",
    "llava_data_collator",
    "mllama_data_collator",
    "pixtral_data_collator",
    "qwen2_vl_data_collator",
]

_LONGER = "Give a larger max_seq_length (--max-seq-length), or leave it out."
_WHOLE = (
    "Samples are cut to the shortest of their batch: give data_collator='padding' "
    "(--data-collator padding), which keeps all tokens, or batch_size=1."
)


@dataclass(frozen=True)
class TruncationCollator:
    """Truncates every sequence to the shortest of the batch, without padding.

    Attributes:
        max_length: maximum number of tokens.
    """

    max_length: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate samples; token tensors are long ``[batch, tokens]``."""
        batch = _concatenate_others(samples)
        for name, rows in _truncate_all(samples, self.max_length).items():
            batch[name] = _tensor(rows)
        return batch


class DataCollatorWithTruncation:
    """Truncating collator for a script's own ``DataLoader``; other values are stacked.

    Strings are dropped.

    Args:
        max_seq_length: maximum number of tokens.
    """

    def __init__(self, max_seq_length: int | None = None) -> None:
        self.max_seq_length = max_seq_length

    def __call__(
        self, features: Sequence[Mapping[str, Any]], return_tensors: str = "pt"
    ) -> dict[str, Any]:
        """Collate features, which are not changed."""
        from transformers import default_data_collator  # noqa: PLC0415  # not needed by calibration

        rows = [
            {
                name: value.tolist() if name in SEQUENCES and hasattr(value, "tolist") else value
                for name, value in one.items()
            }
            for one in features
        ]
        columns = _truncate_all(rows, self.max_seq_length)
        rows = [
            row | {name: column[number] for name, column in columns.items()}
            for number, row in enumerate(rows)
        ]
        batch: dict[str, Any] = default_data_collator(rows, return_tensors)
        return batch


@dataclass(frozen=True)
class PaddingCollator:
    """Pads every sequence to the longest of the batch; padding is masked.

    Attributes:
        pad_id: the padding token.
        side: "left" or "right".
    """

    pad_id: int = 0
    side: str = "right"

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate samples; token tensors are long ``[batch, tokens]``."""
        batch = _concatenate_others(samples)
        for name in token_sequences(samples):
            length = max(len(sample[name]) for sample in samples)
            batch[name] = _tensor(
                [
                    pad(sample, name, length, pad_id=self.pad_id, side=self.side)
                    for sample in samples
                ]
            )
        return batch


def check_placeholders_kept(
    samples: Sequence[Sample], batch_size: int, max_length: int | None, placeholders: frozenset[int]
) -> None:
    """Refuse samples that would lose placeholders in a :class:`TruncationCollator`.

    The model would still get all images, and fail on more images than placeholders.

    Args:
        samples: in the order of the batches.
        batch_size: samples in a batch.
        max_length: that of the collator.
        placeholders: ids of placeholder tokens for images, videos and audio.

    Raises:
        DatasetError: a sample would lose placeholders.
    """
    if not placeholders:
        return
    for number, sample in enumerate(samples):
        tokens = sample.get("input_ids")
        if not isinstance(tokens, list) or SEQUENCES.issuperset(sample):
            continue  # it has no other inputs
        first = number - number % batch_size
        batch = samples[first : first + batch_size]
        shortest = min(len(one["input_ids"]) for one in batch if "input_ids" in one)
        asked = len(tokens) if max_length is None else max_length
        for length, remedy in ((asked, _LONGER), (shortest, _WHOLE)):
            kept = truncate(sample, "input_ids", length)
            lost = sum(map(placeholders.__contains__, tokens)) - sum(
                map(placeholders.__contains__, kept)
            )
            if lost:
                raise DatasetError(
                    f"Cut from {len(tokens)} to {length} tokens, sample {number} would lose {lost} "
                    "of those that stand for its pictures, videos or sounds, and the model gets "
                    "all of these.",
                    remedy,
                )


def _truncate_all(samples: Sequence[Sample], max_length: int | None) -> dict[str, list[list[int]]]:
    """Truncate the sequences of a batch to the shortest one and to ``max_length``."""
    cut_rows = {}
    for name in token_sequences(samples):
        shortest = min(len(sample[name]) for sample in samples)
        length = shortest if max_length is None else min(shortest, max_length)
        cut_rows[name] = [truncate(sample, name, length) for sample in samples]
    return cut_rows


def _tensor(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)


def _concatenate_others(samples: Sequence[Sample]) -> dict[str, Any]:
    """Concatenate all inputs that are not token sequences along their leading axis."""
    names = dict.fromkeys(
        name
        for sample in samples
        for name, value in sample.items()
        if not (name in SEQUENCES and isinstance(value, list))
    )
    batch: dict[str, Any] = {}
    for name in names:
        values = [sample[name] for sample in samples if name in sample]
        if all(isinstance(value, Tensor) for value in values):
            batch[name] = torch.cat(values)
        else:
            batch[name] = values[0] if len(values) == 1 else values
    return batch


# --------------------
# Validation of batches from a user's DataLoader or collator.

Fault: TypeAlias = tuple[str, str]
"""A problem and its remedy."""


@dataclass(frozen=True)
class BatchCheck:
    """Converts a batch to a mapping by input name, and refuses one that no model could take.

    Attributes:
        vocab_size: rows of the model's embedding; ``None`` if it has none.
        positions: rows of the model's table of positions; ``None`` if it has none.
        learns: check labels too, for training.
    """

    vocab_size: int | None = None
    positions: int | None = None
    learns: bool = False

    def __call__(self, batch: Any, what: str, maker: str) -> Mapping[str, Any]:
        """Check a batch and return it as a mapping.

        Args:
            batch: the batch as it was made; an integer matrix is taken as token ids.
            what: description of the batch, for errors.
            maker: what made the batch, for errors.

        Raises:
            DatasetError: it is no mapping, or its token ids do not fit the model.
        """
        if isinstance(batch, torch.Tensor) and batch.ndim == 2 and not batch.is_floating_point():
            batch = {"input_ids": batch}
        if not isinstance(batch, Mapping):
            raise DatasetError(
                f"{maker} gives batches of type {type(batch).__name__}, so it is not known which "
                "input of the model is which.",
                "Have it give dictionaries, such as {'input_ids': ..., 'attention_mask': ...}.",
            )
        for problem, remedy in self._faults(batch, what):
            raise DatasetError(problem[:1].upper() + problem[1:], remedy)
        return batch

    def _faults(self, batch: Mapping[Any, Any], what: str) -> Iterator[Fault]:
        """Yield what is wrong with a batch; each check relies on those before it."""
        if not batch:
            yield (
                f"{what} is empty: it holds no input of the model.",
                "Have it hold at least input_ids, or what else the model takes.",
            )
        if unnamed := [name for name in batch if not isinstance(name, str)]:
            yield (
                f"{what} has {unnamed[0]!r} for the name of an input.",
                "Name each as the model does, such as input_ids.",
            )
        ids = batch.get("input_ids")
        if ids is not None:
            yield from _faults_of_ids(ids, what)
            for name in ("attention_mask", "position_ids", "token_type_ids"):
                if batch.get(name) is not None:
                    yield from _faults_of_token_input(name, batch[name], ids, what)
            yield from self._faults_of_vocabulary(ids, batch.get("labels"), what)
            yield from self._faults_of_length(ids, batch.get("attention_mask"), what)

    def _faults_of_vocabulary(self, ids: Tensor, labels: Any, what: str) -> Iterator[Fault]:
        if self.vocab_size is None:
            return
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if bool(wrong.any()):
            yield (
                f"Sample {int(wrong.nonzero()[0, 0])} of {what} holds the token id "
                f"{int(ids[wrong][0])}, and the model's vocabulary ends at {self.vocab_size - 1}.",
                "Tokenize with the model's own tokenizer.",
            )
        if not self.learns or not isinstance(labels, Tensor):
            return
        if labels.is_floating_point() or labels.ndim < 2:  # per sample, not per token
            return
        wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= self.vocab_size))
        if bool(wrong.any()):
            yield (
                f"{what} holds {int(labels[wrong][0])} in its labels, and the model's vocabulary "
                f"ends at {self.vocab_size - 1}.",
                f"Label a token with its id, or with {IGNORED_LABEL} if it is not to be learned.",
            )

    def _faults_of_length(self, ids: Tensor, mask: Any, what: str) -> Iterator[Fault]:
        # Some models count positions by the mask: padding beyond the table is harmless.
        longest = ids.shape[-1]
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            longest = int(mask.sum(dim=-1).max())
        if self.positions is not None and longest > self.positions:
            yield (
                f"{what} has samples of {longest} tokens, and the model has positions for "
                f"{self.positions}.",
                "Cut them before they are put into a batch.",
            )


def _faults_of_ids(ids: Any, what: str) -> Iterator[Fault]:
    """Yield faults of token ids that are not a filled integer tensor ``[samples, tokens]``."""
    if not isinstance(ids, Tensor):
        yield (
            f"{what} has a {type(ids).__name__} for its input_ids.",
            "Give a tensor of torch.long, [samples, tokens].",
        )
    if ids.dtype not in (torch.long, torch.int):
        yield (
            f"{what} has input_ids of {ids.dtype}.",
            "Token ids are whole numbers: give torch.long.",
        )
    if ids.is_meta:
        yield (
            f"{what} has input_ids on the meta device, which have no values.",
            "Make them on the CPU.",
        )
    if not ids.numel():
        yield (
            f"{what} has no token: its input_ids are of shape {list(ids.shape)}.",
            "Leave such batches out.",
        )
    if ids.ndim < 2:  # some models have several ids for each token
        yield (
            f"{what} has input_ids of shape {list(ids.shape)}.",
            "Give them as [samples, tokens]; of one sample, [1, tokens].",
        )


def _faults_of_token_input(name: str, value: Any, ids: Tensor, what: str) -> Iterator[Fault]:
    """Yield faults of a mask, positions or token types beside the token ids."""
    if not isinstance(value, Tensor):
        yield (
            f"{what} has a {type(value).__name__} for its {name}.",
            "Give a tensor of the shape of input_ids.",
        )
    # Some models take masks and positions of more dimensions.
    if ids.ndim == 2 and value.ndim <= 2 and value.shape[-1:] != ids.shape[-1:]:
        yield (
            f"{what} has {name} of shape {list(value.shape)}, and input_ids of shape "
            f"{list(ids.shape)}.",
            "Give both for the same tokens.",
        )
    if value.is_floating_point() and bool(value.isnan().any()):
        yield (
            f"{what} has NaN in its {name}.",
            "Give 1 for a token that counts, and 0 for one that does not.",
        )


class CheckedLoader(DataLoader[Any]):
    """Wraps a user's DataLoader and checks each of its batches.

    Args:
        loader: the user's loader; it is not changed.
        check: the check of each batch.
        samples: maximum number of samples from a loader without a length, which may be endless.
    """

    def __init__(
        self, loader: DataLoader[Any], check: BatchCheck, samples: int | None = None
    ) -> None:
        # The loader's own settings (batch_size, dataset, ...) are attributes of this object too.
        self.__dict__.update(loader.__dict__)
        self._loader, self._batch_check = loader, check
        self._most = samples
        with suppress(TypeError):  # raised if its data set is a stream
            self._most = None if len(loader) >= 0 else samples

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the user's batches."""
        has_ids, taken = False, 0
        for number, batch in enumerate(_with_batch_numbers(self._loader)):
            what = f"batch {number} of the given DataLoader"
            checked = self._batch_check(batch, what, "The DataLoader")
            given = {name for name, value in checked.items() if value is not None}
            if has_ids and not given & MAIN_INPUTS:
                raise DatasetError(
                    f"Batch {number} of the given DataLoader has no input_ids, and those before "
                    "it have.",
                    "Give all batches the model's inputs, or leave this one out.",
                )
            has_ids |= "input_ids" in given
            yield checked
            tensors = (one for one in checked.values() if isinstance(one, Tensor) and one.ndim)
            taken += next((len(one) for one in tensors), 1)
            if self._most is not None and taken >= self._most:
                logger.warning(
                    f"{taken} samples were taken of a DataLoader that does not say how many it "
                    "has: as many as num_calibration_samples says, in whole batches."
                )
                return

    def __len__(self) -> int:
        return len(self._loader)


@dataclass(frozen=True)
class CheckedCollator:
    """Wraps a user's collator and checks its batches.

    A collator that converts a single sample to tensors without adding a batch axis is called
    again with each value as a batch of one.

    Attributes:
        function: the user's collator; this object can be pickled if the collator can.
        check: the check of each batch.
    """

    function: Callable[[Any], Any]
    check: BatchCheck

    def __call__(self, samples: Any) -> Mapping[str, Any]:
        """Return the user's batch, checked."""
        try:
            batch = self.function(samples)
        except DatasetError:
            raise
        except Exception as error:
            keys = f"dicts with {', '.join(map(str, samples[0]))}" if samples else "samples"
            raise DatasetError(
                f"The data_collator fails on a batch of {len(samples)} samples: "
                f"{type(error).__name__}: {error}.",
                f"Correct it; it is given a list of {keys}.",
            ) from error
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor) and ids.ndim == 1 and len(samples) == 1:
            with suppress(Exception):  # the first result is refused below
                batched = {  # arrays remain arrays
                    name: value[None] if isinstance(value, (Tensor, np.ndarray)) else [value]
                    for name, value in samples[0].items()
                }
                batch = self.function([batched])
        return self.check(batch, "a batch of the data_collator", "The data_collator")


def _with_batch_numbers(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches; its errors are raised with the number of the batch."""
    batches = iter(loader)
    number = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            raise DatasetError(
                f"The given DataLoader fails on batch {number}: {_reason(error)}.",
                "Correct its dataset or its collate_fn; iterate over it once to see.",
            ) from error
        yield batch
        number += 1


def _reason(error: Exception) -> str:
    """Message of an error, without the traceback of a DataLoader worker."""
    text = str(error).strip()
    if text.startswith("Caught ") and "Traceback" in text:
        return text.splitlines()[-1].rstrip(".")
    return f"{type(error).__name__}: {text}".rstrip(".")


# --------------------
# Single-sample collators with the inputs of multimodal model families.

_TEXT = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class NamedInputsCollator:
    """Converts some columns of a single sample to tensors, and drops the others.

    Attributes:
        names: the columns.
        bare_pictures: remove the sample axis of images.
    """

    names: tuple[str, ...]
    bare_pictures: bool = False

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate a single sample."""
        if len(samples) != 1:
            raise DatasetError(
                f"The data_collator takes one sample, and a batch has {len(samples)}.",
                "Leave batch_size at 1.",
            )
        if lacking := [name for name in self.names if name not in samples[0]]:
            raise DatasetError(
                f"The data_collator needs {', '.join(lacking)}, and a sample has "
                f"{', '.join(samples[0])}.",
                "Take the collator of the model's own family.",
            )
        batch = {name: torch.as_tensor(samples[0][name]) for name in self.names}
        if self.bare_pictures:
            pixels = batch["pixel_values"]
            batch["pixel_values"] = pixels.reshape(-1, *pixels.shape[-3:])
        return batch


llava_data_collator = NamedInputsCollator((*_TEXT, "pixel_values"))
mllama_data_collator = NamedInputsCollator(
    (*_TEXT, "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
)
pixtral_data_collator = NamedInputsCollator((*_TEXT, "pixel_values"), bare_pictures=True)
qwen2_vl_data_collator = NamedInputsCollator((*_TEXT, "pixel_values", "image_grid_thw"))
