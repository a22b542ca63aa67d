# SPDX-License-Identifier: Apache-2.0
"""A model that is sparse already is trained and stays so."""

from llmcompressor.modifiers.pruning.constant.base import ConstantPruningModifier

__all__ = ["ConstantPruningModifier"]
