# SPDX-License-Identifier: Apache-2.0
"""Old path of what :mod:`llmcompressor.utils.tensors` has."""

from llmcompressor.utils.tensors import ModuleSparsificationInfo

__all__ = ["ModuleSparsificationInfo"]
