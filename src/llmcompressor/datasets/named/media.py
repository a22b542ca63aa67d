# SPDX-License-Identifier: Apache-2.0
"""Data sets of images and of speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcompressor.datasets.generation import TextGenerationDataset
from llmcompressor.datasets.rows import Row

__all__ = ["Flickr30k", "PeoplesSpeech"]


class Flickr30k(TextGenerationDataset):
    """Photographs with several captions each."""

    hub_id = "lmms-lab/flickr30k"
    default_split = "test"  # it has no other

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """A question about the image, answered by all its captions."""
        captions = row["caption"]
        answer = captions if isinstance(captions, str) else " ".join(captions)
        question = [{"type": "image"}, {"type": "text", "text": "What does this image show?"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        return {"text": self.chat(messages), "images": row["image"]}


class PeoplesSpeech(TextGenerationDataset):
    """Recorded speech and its transcript."""

    hub_id = "MLCommons/peoples_speech"
    config_name = "test"
    default_split = "test"

    def dataset_template(self, row: Row) -> Mapping[str, Any]:
        """Audio and transcript, with its first letter capitalized."""
        audio = row["audio"]
        return {
            "audio": audio["array"],
            "sampling_rate": int(audio["sampling_rate"]),
            "text": " " + row["text"].capitalize(),
        }
