# SPDX-License-Identifier: Apache-2.0
"""Other path of what :mod:`llmcompressor.utils` has."""

from llmcompressor.utils.devices import dispatch_for_generation
from llmcompressor.utils.loading import load_context

__all__ = ["dispatch_for_generation", "load_context"]
