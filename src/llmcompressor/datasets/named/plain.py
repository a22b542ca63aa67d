# SPDX-License-Identifier: Apache-2.0
"""Data sets whose rows have a column ``text`` that is used as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmcompressor.datasets.generation import TextGenerationDataset
from llmcompressor.datasets.rows import Row

__all__ = ["C4", "WikiText"]


class _Plain(TextGenerationDataset):
    """Only the text of each row."""

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """The text, without what else is known of it."""
        return {"text": row["text"]}


class C4(_Plain):
    """Pages of the web. Only the first of its 1024 files is loaded, which is plenty."""

    hub_id = "allenai/c4"
    data_files: ClassVar[Mapping[str, str]] = {
        "train": "en/c4-train.00000-of-01024.json.gz",
        "validation": "en/c4-validation.00000-of-00008.json.gz",
    }


class WikiText(_Plain):
    """Articles of Wikipedia by line, many of them blank."""

    hub_id = "Salesforce/wikitext"
    config_name = "wikitext-2-raw-v1"
