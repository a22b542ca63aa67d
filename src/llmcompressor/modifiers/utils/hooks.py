# SPDX-License-Identifier: Apache-2.0
"""The hooks of modifiers, under the path that scripts know."""

from llmcompressor.modeling.hooks import HooksMixin

__all__ = ["HooksMixin"]
