# SPDX-License-Identifier: Apache-2.0
"""Old path of :class:`llmcompressor.training.Trainer`."""

from llmcompressor.training import Trainer

__all__ = ["Trainer"]
