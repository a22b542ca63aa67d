# SPDX-License-Identifier: Apache-2.0
"""Old path of :class:`llmcompressor.args.ModelArguments`."""

from llmcompressor.args import ModelArguments

__all__ = ["ModelArguments"]
