# SPDX-License-Identifier: Apache-2.0
"""Loading of calibration and training data: from arguments to batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch.utils.data import DataLoader

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.collate import (
    BatchCheck,
    CheckedCollator,
    CheckedLoader,
    PaddingCollator,
    TruncationCollator,
    check_placeholders_kept,
)
from llmcompressor.datasets.fit import warn_of_misfit
from llmcompressor.datasets.media import placeholder_ids
from llmcompressor.datasets.rows import Stream
from llmcompressor.datasets.samples import Sample, text_tokens
from llmcompressor.datasets.sampling import (
    StreamedSamples,
    own_sample_count,
    own_samples,
    prepare_samples,
)
from llmcompressor.datasets.source import GOOD_CHOICES, Source, is_loader, open_source
from llmcompressor.datasets.tokenize import (
    ModelFacts,
    Preparation,
    pad_id_of,
    padding_side_of,
    tokenizer_of,
)
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.runtime.processes import Processes
from llmcompressor.runtime.registry import resolve
from llmcompressor.runtime.run_record import run_record

_LARGE_BATCH = 16
_PREPARING = (
    *("concatenate_data", "dataset_path", "pad_to_max_length"),
    *("preprocessing_func", "remove_columns", "splits"),
)
"""Arguments that are of no use where data is there and tokenized."""


def load_calibration(
    args: DatasetArguments,
    *,
    processor: Any = None,
    placeholders: frozenset[int] = frozenset(),
    source: Source | None = None,
    processes: Processes | None = None,
    **model: Unpack[ModelFacts],
) -> DataLoader[Any] | None:
    """Load the calibration batches that the arguments describe.

    A user's DataLoader is used unchanged, with its batches checked; one without a length yields
    ``num_calibration_samples`` samples, in whole batches. Rows with ``input_ids`` need no processor
    and are used unchanged, except that they are cut to the model's table of positions. The loader
    yields the same batches each time it is iterated, and in every run with the same data and seed.

    Args:
        args: the user's arguments.
        processor: the tokenizer or processor; not changed.
        placeholders: ids of further placeholder tokens for images, videos and audio, besides
            those of the processor; truncation must not drop any.
        source: result of :func:`~llmcompressor.datasets.source.open_source`, if it was called
            already.
        processes: processes that share their samples: each loads all samples if all have the
            same data, else its part of the number. ``None`` divides the samples among the
            processes of the process group.
        **model: what is known of the model, see
            :class:`~llmcompressor.datasets.tokenize.ModelFacts`.

    Returns:
        Batches with ``input_ids`` and ``attention_mask`` (long ``[batch, tokens]``) and what
        else the processor made, or ``None`` if no data was given.

    Raises:
        DatasetError: the data cannot be used; raised before the first batch.
    """
    vocab_size = model.get("vocab_size")
    positions = model.get("model_max_length") if model.get("in_table") else None
    wanted = args.num_calibration_samples
    if is_loader(args.dataset):
        _warn_without_effect(args)
        check = BatchCheck(vocab_size, positions)
        return CheckedLoader(args.dataset, check, samples=wanted)
    source = source or open_source(args, processor=processor)
    if source is None:
        logger.info("No calibration data was given.")
        return None
    collator = make_collator(args, processor=processor, vocab_size=vocab_size, positions=positions)
    is_stream = isinstance(source.rows, Stream)
    if processes is not None and not isinstance(source.rows, Stream):
        wanted = own_sample_count(source.rows, wanted, processes)
    preparation = Preparation.of(source, args, processor, **model)
    samples = prepare_samples(
        source.rows,
        preparation,
        wanted=wanted,
        shuffle=args.shuffle_calibration_samples,
        seed=args.seed,
        distributed=processes is None,
    )
    is_mix = getattr(source.owner, "is_mix", False)
    warn_of_misfit(text_tokens(samples), preparation, is_mix=is_mix)
    if processes is not None and is_stream:
        samples = own_samples(samples, wanted, processes)
    if (record := run_record()) is not None:
        record.data = f"{source.name}, {len(samples)} samples"
    if isinstance(collator, TruncationCollator):
        placeholders |= placeholder_ids(processor, tokenizer_of(processor))
        check_placeholders_kept(samples, args.batch_size, collator.max_length, placeholders)
    return DataLoader(
        samples,  # type: ignore[arg-type]  # a list works as a map-style data set
        batch_size=args.batch_size,
        collate_fn=collator,
        num_workers=args.dataloader_num_workers,
        # Iterating draws a random number: its own generator leaves the global one unchanged.
        generator=torch.Generator().manual_seed(args.seed),
    )


def load_training(
    args: DatasetArguments,
    *,
    processor: Any = None,
    source: Source | None = None,
    **model: Unpack[ModelFacts],
) -> list[Sample] | StreamedSamples:
    """Load the training samples that the arguments describe, in the order of the data.

    Each has ``labels``: its ``input_ids``, with -100 for the prompt and for padding. All rows
    are prepared, or the first ``max_train_samples``; the trainer shuffles. Samples of a stream
    are prepared lazily. The arguments are those of :func:`load_calibration`.

    Raises:
        DatasetError: the data cannot be used, or there is none.
    """
    source = source or open_source(args, "train", processor=processor)
    if source is None:
        raise DatasetError("Training needs data, and no dataset was given.", GOOD_CHOICES)
    preparation = Preparation.of(source, args, processor, for_training=True, **model)
    if isinstance(source.rows, Stream) and args.max_train_samples is None:
        return StreamedSamples(source.rows, preparation)
    return prepare_samples(
        source.rows, preparation, wanted=args.max_train_samples, shuffle=False, seed=args.seed
    )


def make_collator(
    args: DatasetArguments,
    *,
    processor: Any = None,
    vocab_size: int | None = None,
    positions: int | None = None,
    learns: bool = False,
) -> Callable[[Any], Any]:
    """Make the collator that ``data_collator`` names; a user's function is wrapped in checks.

    Args:
        args: ``data_collator``, ``batch_size`` and ``max_seq_length`` are read.
        processor: provides the padding token and side.
        vocab_size: rows of the model's embedding; a padding token beyond it is not used.
        positions: rows of the model's table of positions.
        learns: for training, where labels are checked.
    """
    if callable(args.data_collator):
        return CheckedCollator(args.data_collator, BatchCheck(vocab_size, positions, learns))
    if args.data_collator == "padding":
        return PaddingCollator(pad_id_of(processor, vocab_size), padding_side_of(processor))
    if args.batch_size > _LARGE_BATCH:
        logger.warning(
            f"With batch_size={args.batch_size}, many samples are cut to the shortest of their "
            "batch; data_collator='padding' keeps all tokens."
        )
    return TruncationCollator(args.max_seq_length)


def _warn_without_effect(args: DatasetArguments) -> None:
    """Warn about arguments that have no effect on a DataLoader."""
    plain = DatasetArguments()
    preparing = sorted({*_PREPARING, "data_collator", "text_column"})
    given = [name for name in preparing if getattr(args, name) != getattr(plain, name)]
    if given:
        logger.warning(
            f"Without effect on a DataLoader, which makes its batches itself: {', '.join(given)}."
        )


# --------------------
# Functions for scripts that prepare calibration batches themselves.


def get_calibration_dataloader(
    dataset_args: DatasetArguments, processor: Any = None
) -> DataLoader[Any] | None:
    """Return the calibration batches of ``oneshot``, without the limits of the model.

    Args:
        dataset_args: the data, its preparation and the number of samples.
        processor: the tokenizer or processor; tokenized data needs none.

    Returns:
        A loader; the given one if the data is a loader; ``None`` without data.

    Raises:
        DatasetError: the data cannot be used.
    """
    if is_loader(dataset_args.dataset):
        given: DataLoader[Any] = dataset_args.dataset
        return given
    return load_calibration(dataset_args, processor=processor)


def get_processed_dataset(dataset_args: DatasetArguments, processor: Any = None) -> Any:
    """Tokenize all of the data.

    Args:
        dataset_args: the data and its preparation.
        processor: the tokenizer or processor.

    Returns:
        A ``datasets.Dataset``; the given one if it is tokenized; ``None`` without data.

    Raises:
        DatasetError: the data cannot be used, or is a ``DataLoader``.
    """
    data = dataset_args.dataset
    if is_loader(data):
        raise DatasetError(
            "The dataset is a DataLoader, which makes batches itself.", "Pass the data set itself."
        )
    names = getattr(data, "column_names", None)
    if isinstance(names, list) and "input_ids" in names:
        return data
    source = open_source(dataset_args, processor=processor)
    if source is None:
        logger.info("No calibration data was given.")
        return None
    preparation = Preparation.of(source, dataset_args, processor)
    samples = prepare_samples(
        source.rows, preparation, wanted=None, shuffle=False, seed=dataset_args.seed
    )
    return resolve("llmcompressor.datasets.hub:dataset_of")(samples)


def format_calibration_data(
    args: DatasetArguments, tokenized_dataset: Any, processor: Any = None
) -> DataLoader[Any]:
    """Make batches of tokenized data.

    Args:
        args: number of samples, order and collator; arguments about the location of data and
            its preparation are ignored.
        tokenized_dataset: rows with ``input_ids``.
        processor: provides the padding token.

    Raises:
        DatasetError: the data cannot be used.
    """
    plain = DatasetArguments()
    unread = (*_PREPARING, "dataset_config_name", "streaming")
    done: dict[str, Any] = {name: getattr(plain, name) for name in unread}
    loader = load_calibration(replace(args, **done, dataset=tokenized_dataset), processor=processor)
    assert loader is not None
    return loader
