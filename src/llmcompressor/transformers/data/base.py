# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.datasets.generation` has."""

from llmcompressor.datasets.generation import TextGenerationDataset

__all__ = ["TextGenerationDataset"]
