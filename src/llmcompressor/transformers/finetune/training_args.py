# SPDX-License-Identifier: Apache-2.0
"""Old path of :class:`llmcompressor.args.TrainingArguments`."""

from llmcompressor.args.training_arguments import TrainingArguments

__all__ = ["TrainingArguments"]
