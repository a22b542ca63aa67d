# SPDX-License-Identifier: Apache-2.0
"""QuIP: incoherence processing (arXiv:2402.04396)."""

from llmcompressor.modifiers.rotation import QuIPModifier

__all__ = ["QuIPModifier"]
