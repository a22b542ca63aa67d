# SPDX-License-Identifier: Apache-2.0
"""Calibration and training data: load, template, tokenize, batch.

::

    arguments ─source─> rows ─sampling─> some rows ─text─> text ─tokenize─> samples
    samples ─collate─> batches

``source`` resolves the data that the arguments name (``files`` and ``hub`` read it), ``sampling``
selects rows of it, ``text`` makes text of each row, whatever its form (``media`` finds its
pictures), ``tokenize`` makes samples of the text and checks them, ``collate`` makes batches.

The names below are imported lazily (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmcompressor.runtime.registry import lazy_exports

if TYPE_CHECKING:
    from llmcompressor.datasets.calibration import (
        format_calibration_data,
        get_calibration_dataloader,
        get_processed_dataset,
        load_calibration,
        load_training,
        make_collator,
    )
    from llmcompressor.datasets.named import TextGenerationDataset
    from llmcompressor.datasets.sampling import get_rank_partition
    from llmcompressor.datasets.source import Source, open_source

__all__ = [
    "Source",
    "TextGenerationDataset",
    "format_calibration_data",
    "get_calibration_dataloader",
    "get_processed_dataset",
    "get_rank_partition",
    "load_calibration",
    "load_training",
    "make_collator",
    "open_source",
]

_HOMES = {
    "Source": ".source",
    "TextGenerationDataset": ".named",
    "format_calibration_data": ".calibration",
    "get_calibration_dataloader": ".calibration",
    "get_processed_dataset": ".calibration",
    "get_rank_partition": ".sampling",
    "load_calibration": ".calibration",
    "load_training": ".calibration",
    "make_collator": ".calibration",
    "open_source": ".source",
}

__getattr__, __dir__ = lazy_exports(globals(), _HOMES)
