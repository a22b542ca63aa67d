# SPDX-License-Identifier: Apache-2.0
"""Single-sample collators with the inputs of multimodal model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmcompressor.errors import DatasetError

__all__ = [
    "NamedInputsCollator",
    "llava_data_collator",
    "mllama_data_collator",
    "pixtral_data_collator",
    "qwen2_vl_data_collator",
]

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
