# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of the hooks mixin."""

from llmcompressor.modeling.hooks import HooksMixin

__all__ = ["HooksMixin"]
