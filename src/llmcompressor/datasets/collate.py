# SPDX-License-Identifier: Apache-2.0
"""Data collators: truncation to the shortest sample, or padding to the longest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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
from llmcompressor.datasets.series import cut_series, pad_series
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger

_LONGER = "Give a larger max_seq_length (--max-seq-length), or leave it out."
_WHOLE = (
    "Samples are cut to the shortest of their batch: give data_collator='padding' "
    "(--data-collator padding), which keeps all tokens, or batch_size=1."
)


@dataclass(frozen=True)
class TruncationCollator:
    """Truncates every sequence to the shortest of the batch and to ``max_length``, if given."""

    max_length: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Collate samples; token tensors are long ``[batch, tokens]``."""
        columns = truncate_batch(samples, self.max_length)
        return _collated(cut_series(samples, self.max_length), columns)


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
        columns = {}
        samples = pad_series(samples, self.side)
        for name in token_sequences(samples):
            length = max(len(sample[name]) for sample in samples)
            columns[name] = [
                pad(sample, name, length, pad_id=self.pad_id, side=self.side) for sample in samples
            ]
        return _collated(samples, columns)


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

        rows = [dict(one) for one in features]
        for row in rows:
            for name in SEQUENCES & row.keys():
                if hasattr(row[name], "tolist"):
                    row[name] = row[name].tolist()
        for name, column in truncate_batch(rows, self.max_seq_length).items():
            for row, tokens in zip(rows, column, strict=True):
                row[name] = tokens
        batch: dict[str, Any] = default_data_collator(rows, return_tensors)
        return batch


def truncate_batch(samples: Sequence[Sample], max_length: int | None) -> dict[str, list[list[int]]]:
    """Truncate the sequences of a batch to the shortest one and to ``max_length``."""
    columns = {}
    for name in token_sequences(samples):
        lengths = [len(sample[name]) for sample in samples]
        length = min(lengths if max_length is None else [*lengths, max_length])
        columns[name] = [truncate(sample, name, length) for sample in samples]
    return columns


def _collated(samples: Sequence[Sample], columns: Mapping[str, list[list[int]]]) -> dict[str, Any]:
    """Make tensors of token sequences; concatenate all other inputs along their leading axis."""
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        if name in SEQUENCES and any(isinstance(value, list) for value in values):
            continue
        if all(isinstance(value, Tensor) for value in values):
            batch[name] = _concatenated(name, values)
        else:
            batch[name] = values[0] if len(values) == 1 else values
    return batch | {name: torch.tensor(rows, dtype=torch.long) for name, rows in columns.items()}


def _concatenated(name: str, values: Sequence[Tensor]) -> Tensor:
    shapes = dict.fromkeys(tuple(value.shape[1:]) for value in values)
    if len(shapes) > 1:
        one, other = list(shapes)[:2]
        raise DatasetError(
            f"Samples of a batch have {name} of shapes {list(one)} and {list(other)}, which do not "
            "fit into one tensor.",
            "Give batch_size=1 (--batch-size 1), or samples of one shape.",
        )
    return torch.cat(list(values))


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
    for number, sample in enumerate(samples if placeholders else ()):
        tokens = sample.get("input_ids")
        if not isinstance(tokens, list) or SEQUENCES.issuperset(sample):
            continue  # it has no other inputs
        first = number - number % batch_size
        batch = samples[first : first + batch_size]
        shortest = min(len(one["input_ids"]) for one in batch if "input_ids" in one)
        asked = len(tokens) if max_length is None else max_length
        for length, remedy in ((asked, _LONGER), (shortest, _WHOLE)):
            kept = truncate(sample, "input_ids", length)
            lost = sum(one in placeholders for one in tokens) - sum(
                one in placeholders for one in kept
            )
            if lost:
                raise DatasetError(
                    f"Cut from {len(tokens)} to {length} tokens, sample {number} would lose {lost} "
                    "of those that stand for its pictures, videos or sounds, and the model gets "
                    "all of these.",
                    remedy,
                )


# --------------------
# Validation of batches from a user's DataLoader or collator.


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
        if isinstance(batch, Tensor) and batch.ndim == 2 and not batch.is_floating_point():
            batch = {"input_ids": batch}
        if not isinstance(batch, Mapping):
            raise DatasetError(
                f"{maker} gives batches of type {type(batch).__name__}, so it is not known which "
                "input of the model is which.",
                "Have it give dictionaries, such as {'input_ids': ..., 'attention_mask': ...}.",
            )
        for problem, remedy in self._faults(batch):
            raise DatasetError(f"{what[:1].upper()}{what[1:]} {problem}", remedy)
        return batch

    def _faults(self, batch: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
        """Yield problem and remedy of a batch's faults; each check relies on those before it."""
        ids = batch.get("input_ids")
        if not batch or not all(isinstance(name, str) for name in batch):
            yield (
                f"has inputs of the names {list(batch)}.",
                "Name each as the model does, and give at least input_ids.",
            )
        if ids is None:
            return
        is_whole = isinstance(ids, Tensor) and ids.dtype in (torch.long, torch.int)
        if not is_whole or ids.ndim < 2 or not ids.numel() or ids.is_meta:
            yield (
                f"has a {type(ids).__name__} of {getattr(ids, 'dtype', 'no type')}, shape "
                f"{list(getattr(ids, 'shape', ()))}, for its input_ids.",
                "Give a filled tensor of torch.long, [samples, tokens]; of one sample, "
                "[1, tokens].",
            )
        for name in ("attention_mask", "position_ids", "token_type_ids"):
            value: Any = batch.get(name)
            shape = list(getattr(value, "shape", ()))
            # Some models take masks and positions of more dimensions.
            fits = isinstance(value, Tensor) and (
                ids.ndim > 2 or len(shape) > 2 or shape[-1:] == [*ids.shape][-1:]
            )
            if value is not None and not fits:
                yield (
                    f"has a {type(value).__name__} of shape {shape} for its {name}, and input_ids "
                    f"of shape {list(ids.shape)}.",
                    "Give a tensor for the same tokens.",
                )
        if self.vocab_size is not None:
            yield from self._unknown_tokens(ids, batch.get("labels"), self.vocab_size)
        yield from self._long_samples(ids, batch.get("attention_mask"))

    def _unknown_tokens(self, ids: Tensor, labels: Any, size: int) -> Iterator[tuple[str, str]]:
        """Yield tokens and labels that the model has no embedding for."""
        wrong = (ids < 0) | (ids >= size)
        if bool(wrong.any()):
            yield (
                f"holds the token id {int(ids[wrong][0])} in its sample "
                f"{int(wrong.nonzero()[0, 0])}, and the model's vocabulary ends at {size - 1}.",
                "Tokenize with the model's own tokenizer.",
            )
        by_token = isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point()
        if not (self.learns and by_token):
            return
        wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= size))
        if bool(wrong.any()):
            yield (
                f"holds {int(labels[wrong][0])} in its labels, and the model's vocabulary ends at "
                f"{size - 1}.",
                f"Label a token with its id, or with {IGNORED_LABEL} if it is not to be learned.",
            )

    def _long_samples(self, ids: Tensor, mask: Any) -> Iterator[tuple[str, str]]:
        # Some models count positions by the mask: padding beyond the table is harmless.
        counted = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.isfinite()
        longest = int(counted.sum(dim=-1).max())
        if self.positions is not None and longest > self.positions:
            yield (
                f"has samples of {longest} tokens, and the model has positions for "
                f"{self.positions}.",
                "Cut them before they are put into a batch.",
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
        has_ids, taken, number, batches = False, 0, 0, iter(self._loader)
        while self._most is None or taken < self._most:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise DatasetError(
                    f"The given DataLoader fails on batch {number}: {_reason(error)}.",
                    "Correct its dataset or its collate_fn; iterate over it once to see.",
                ) from error
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
            taken, number = taken + next((len(one) for one in tensors), 1), number + 1
        logger.warning(
            f"{taken} samples were taken of a DataLoader that does not say how many it has: as "
            "many as num_calibration_samples says, in whole batches."
        )

    def __len__(self) -> int:
        return len(self._loader)


def _reason(error: Exception) -> str:
    """Message of an error, without the traceback of a DataLoader worker."""
    text = str(error).strip()
    if text.startswith("Caught ") and "Traceback" in text:
        return text.splitlines()[-1].rstrip(".")
    return f"{type(error).__name__}: {text}".rstrip(".")


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


# --------------------
# Single-sample collators with the inputs of multimodal model families.


@dataclass(frozen=True)
class NamedInputsCollator:
    """Converts some columns of a single sample to tensors, and drops the others.

    Attributes:
        names: the columns.
        bare_pictures: remove the sample axis of images.
    """

    names: tuple[str, ...]
    bare_pictures: bool = False

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
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


_PICTURES = ("input_ids", "attention_mask", "pixel_values")
llava_data_collator = NamedInputsCollator(_PICTURES)
mllama_data_collator = NamedInputsCollator(
    (*_PICTURES, "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask")
)
pixtral_data_collator = NamedInputsCollator(_PICTURES, bare_pictures=True)
qwen2_vl_data_collator = NamedInputsCollator((*_PICTURES, "image_grid_thw"))
