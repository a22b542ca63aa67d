# SPDX-License-Identifier: Apache-2.0
"""Old path of :class:`llmcompressor.datasets.TextGenerationDataset`."""

from llmcompressor.datasets.generation import TextGenerationDataset

__all__ = ["TextGenerationDataset"]
