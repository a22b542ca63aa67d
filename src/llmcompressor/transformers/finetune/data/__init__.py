# SPDX-License-Identifier: Apache-2.0
"""Old path of :mod:`llmcompressor.transformers.data`."""

from llmcompressor.transformers.data import __all__, __dir__, __getattr__  # noqa: F401
