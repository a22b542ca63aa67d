# SPDX-License-Identifier: Apache-2.0
"""Calibration and training data: load, template, tokenize, batch.

::

    arguments ─source─> rows ─sampling─> some rows ─prepare─> samples ─collate─> batches

``source`` finds out what data is meant, ``sampling`` which rows of it, ``prepare`` makes text
and then tokens of them and checks those.

The names below are imported when they are first asked for (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcompressor.registry import resolve

if TYPE_CHECKING:
    from llmcompressor.datasets.calibration import (
        load_calibration,
        load_training,
        make_collator,
    )
    from llmcompressor.datasets.generation import TextGenerationDataset
    from llmcompressor.datasets.sampling import get_rank_partition
    from llmcompressor.datasets.source import Source, open_source

__all__ = [
    "Source",
    "TextGenerationDataset",
    "get_rank_partition",
    "load_calibration",
    "load_training",
    "make_collator",
    "open_source",
]

_HOME = {
    "Source": "source",
    "TextGenerationDataset": "generation",
    "get_rank_partition": "sampling",
    "load_calibration": "calibration",
    "load_training": "calibration",
    "make_collator": "calibration",
    "open_source": "source",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return resolve(f"{__name__}.{_HOME[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
