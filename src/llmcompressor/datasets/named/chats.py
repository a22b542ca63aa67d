# SPDX-License-Identifier: Apache-2.0
"""Data sets of conversations, rendered by the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmcompressor.datasets.chat import turns
from llmcompressor.datasets.generation import TextGenerationDataset
from llmcompressor.datasets.rows import Row

__all__ = ["PerfectBlend", "UltraChat"]


class UltraChat(TextGenerationDataset):
    """Conversations written by two models."""

    hub_id = "HuggingFaceH4/ultrachat_200k"

    def resolve_split(self, split: str | None) -> str | None:
        """Map ``train`` and ``test`` to ``train_sft`` and ``test_sft``."""
        return re.sub(r"\b(train|test)(?=\[|\+|\s|$)", r"\1_sft", split) if split else split

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Render ``messages``, with an empty system turn if there is none."""
        return {"text": self.chat.with_empty_system_turn(turns(row["messages"]))}


class PerfectBlend(TextGenerationDataset):
    """Conversations from many sources, ``human`` and ``gpt`` by turns."""

    hub_id = "mlabonne/open-perfectblend"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Render ``conversations``, with the roles of chat templates."""
        return {"text": self.chat(turns(row["conversations"]))}
