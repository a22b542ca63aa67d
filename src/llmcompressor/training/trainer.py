# SPDX-License-Identifier: Apache-2.0
"""transformers' ``Trainer`` with a recipe."""

from __future__ import annotations

import transformers

from llmcompressor.training.mixin import SessionManagerMixIn

__all__ = ["Trainer"]


class Trainer(SessionManagerMixIn, transformers.Trainer):
    """``transformers.Trainer`` that applies a recipe while it trains.

    It takes the arguments of both of its bases.
    """
