# SPDX-License-Identifier: Apache-2.0
"""Old path of :class:`llmcompressor.args.DatasetArguments`."""

from llmcompressor.args import DatasetArguments, DataTrainingArguments

__all__ = ["DataTrainingArguments", "DatasetArguments"]
