# SPDX-License-Identifier: Apache-2.0
"""Token ids against the vocabulary, before any model sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from llmcompressor.datasets.samples import IGNORED_LABEL, token_list
from llmcompressor.errors import DatasetError

__all__ = ["CheckedLoader", "check_token_ids"]

_TOKENS = ("input_ids", "decoder_input_ids", "labels")


def check_token_ids(sample: Mapping[str, Any], vocab_size: int | None, where: str) -> None:
    """Raise an error that names the first token id outside ``[0, vocab_size)``.

    Args:
        sample: ``input_ids``, ``decoder_input_ids`` and ``labels`` are read, if they are there.
            A label may also be one that the loss leaves out.
        vocab_size: rows of the model's embedding; ``None`` if that is not known.
        where: which sample this is.

    Raises:
        DatasetError: for the first id that the model has no embedding for.
    """
    if vocab_size is None:
        return
    for name in _TOKENS:
        ids = token_list(sample[name]) if name in sample else None
        if ids and name == "labels":
            ids = [token for token in ids if token != IGNORED_LABEL]
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            continue
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise DatasetError(
            f"{where} holds the token id {wrong} in its {name}, and the model's vocabulary ends at "
            f"{vocab_size - 1}.",
            "Tokenize with the model's own tokenizer.",
        )


class CheckedLoader(DataLoader[Any]):
    """A user's DataLoader as it is, with each batch's token ids checked as it comes.

    Args:
        loader: the user's; it makes the batches, and is not changed.
        vocab_size: rows of the model's embedding; ``None`` if it has none.
        positions: rows of the model's table of positions; ``None`` if it has none.
    """

    def __init__(
        self, loader: DataLoader[Any], vocab_size: int | None, positions: int | None = None
    ) -> None:
        # The loader's own settings (batch_size, dataset, ...) are seen through this object.
        self.__dict__.update(loader.__dict__)
        self._loader, self._vocab_size, self._positions = loader, vocab_size, positions

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The user's batches."""
        for number, batch in enumerate(_told(self._loader)):
            named = _named(batch)
            _check_ids(named, number)
            self._check(named, number)
            self._check_length(named, number)
            yield named

    def __len__(self) -> int:
        return len(self._loader)

    def _check(self, batch: Mapping[str, Any], number: int) -> None:
        ids = batch.get("input_ids")
        if self._vocab_size is None or not isinstance(ids, torch.Tensor):
            return
        if not ids.numel():
            return
        outside = (ids < 0) | (ids >= self._vocab_size)
        if bool(outside.any()):
            row = int(outside.nonzero()[0, 0])
            raise DatasetError(
                f"Sample {row} of batch {number} of the given DataLoader holds the token id "
                f"{int(ids[outside][0])}, and the model's vocabulary ends at "
                f"{self._vocab_size - 1}.",
                "Tokenize with the model's own tokenizer.",
            )

    def _check_length(self, batch: Mapping[str, Any], number: int) -> None:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if self._positions is None or not isinstance(ids, torch.Tensor) or not ids.numel():
            return
        # Some models count positions by the mask: padding beyond the table does them no harm.
        longest = ids.shape[-1]
        if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
            longest = int(mask.sum(dim=-1).max())
        if longest > self._positions:
            raise DatasetError(
                f"Batch {number} of the given DataLoader has samples of {longest} tokens, and the "
                f"model has positions for {self._positions}.",
                "Cut them before they are put into a batch.",
            )


def _told(loader: Iterable[Any]) -> Iterator[Any]:
    """A loader's batches; what it fails on is told with the number of the batch."""
    batches = iter(loader)
    number = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            raise DatasetError(
                f"The given DataLoader fails on batch {number}: {type(error).__name__}: {error}",
                "Correct its dataset or its collate_fn; iterate over it once to see.",
            ) from error
        yield batch
        number += 1


def _check_ids(batch: Mapping[str, Any], number: int) -> None:
    """Refuse token ids that no embedding takes."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        return
    if ids.is_floating_point():
        raise DatasetError(
            f"Batch {number} of the given DataLoader has input_ids of {ids.dtype}.",
            "Token ids are whole numbers: give torch.long.",
        )
    if ids.ndim < 2:  # some models have several ids for each token
        raise DatasetError(
            f"Batch {number} of the given DataLoader has input_ids of shape {list(ids.shape)}.",
            "Give them as [samples, tokens]; of one sample, [1, tokens].",
        )


def _named(batch: Any) -> Mapping[str, Any]:
    """A batch by the names of the model's inputs; a matrix of whole numbers is token ids."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, torch.Tensor) and batch.ndim == 2 and not batch.is_floating_point():
        return {"input_ids": batch}
    raise DatasetError(
        f"The DataLoader's batches are of type {type(batch).__name__}, so it is not known which "
        "input of the model is which.",
        "Have it give dictionaries, such as {'input_ids': ..., 'attention_mask': ...}.",
    )
