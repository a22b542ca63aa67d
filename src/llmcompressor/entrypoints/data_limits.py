# SPDX-License-Identifier: Apache-2.0
"""Input limits of a model (names, vocabulary, positions) for preparing its data."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn import Module

from llmcompressor.entrypoints.positions import positions_of
from llmcompressor.modeling.embeddings import embeddings
from llmcompressor.modeling.flat_pieces import shape_of
from llmcompressor.modeling.inputs import main_inputs

__all__ = ["data_limits", "placeholders", "vocabulary"]

_PLACEHOLDERS = tuple(
    f"{kind}_token_{number}" for kind in ("image", "video", "audio") for number in ("id", "index")
)


def vocabulary(model: Module) -> int | None:
    """Vocabulary size: number of rows of the input embedding, ``None`` without a weight."""
    weight = getattr(embeddings(model)[0], "weight", None)
    return None if weight is None else shape_of(weight)[0]


def placeholders(model: Module) -> frozenset[int]:
    """Ids of the placeholder tokens for images, videos and audio in the configuration."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return frozenset(number for number in found if isinstance(number, int))


def data_limits(model: Module) -> dict[str, Any]:
    """Arguments of ``load_calibration`` and ``load_training`` that depend on the model.

    Its weights may be on the meta device.
    """
    positions = positions_of(model)
    return {
        "model_input_names": tuple(inspect.signature(model.forward).parameters),
        "main_inputs": main_inputs(model),
        "vocab_size": vocabulary(model),
        "model_max_length": positions.limit,
        "in_table": positions.in_table,
    }
