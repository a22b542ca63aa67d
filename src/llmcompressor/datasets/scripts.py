# SPDX-License-Identifier: Apache-2.0
"""Functions for scripts that prepare calibration batches themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets.calibration import load_calibration, template_of
from llmcompressor.datasets.prepare import Preparation, prepare_samples
from llmcompressor.datasets.source import is_loader, open_source
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import resolve

__all__ = ["format_calibration_data", "get_calibration_dataloader", "get_processed_dataset"]

_PREPARING = (
    "concatenate_data",
    "dataset_config_name",
    "dataset_path",
    "pad_to_max_length",
    "preprocessing_func",
    "remove_columns",
    "splits",
    "streaming",
)
"""Arguments that are of no use where data is there and tokenized."""


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
    preparation = Preparation(
        args=dataset_args,
        processor=processor,
        name=source.name,
        template=template_of(dataset_args, source, processor, "calibration"),
    )
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
    done = {name: getattr(plain, name) for name in _PREPARING}
    own = replace(args, **{**done, "dataset": tokenized_dataset})
    loader = load_calibration(own, processor=processor)
    assert loader is not None
    return loader
