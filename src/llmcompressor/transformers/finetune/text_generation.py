# SPDX-License-Identifier: Apache-2.0
"""Old path of what :mod:`llmcompressor.transformers` has."""

from llmcompressor.transformers import __all__, __dir__, __getattr__  # noqa: F401
