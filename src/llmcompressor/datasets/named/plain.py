# SPDX-License-Identifier: Apache-2.0
"""Plain text data sets with a column ``text``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmcompressor.datasets.generation import TextGenerationDataset
from llmcompressor.datasets.rows import Row

__all__ = ["C4", "WikiText"]


class _Plain(TextGenerationDataset):
    """Base class that keeps only the text of each row."""

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Return the text without the other columns."""
        return {"text": row["text"]}


class C4(_Plain):
    """Web pages; only the first of 1024 files is loaded."""

    hub_id = "allenai/c4"
    data_files: ClassVar[Mapping[str, str]] = {
        "train": "en/c4-train.00000-of-01024.json.gz",
        "validation": "en/c4-validation.00000-of-00008.json.gz",
    }


class WikiText(_Plain):
    """Wikipedia articles by line, with many blank lines."""

    hub_id = "Salesforce/wikitext"
    config_name = "wikitext-2-raw-v1"
