# SPDX-License-Identifier: Apache-2.0
"""Old path of the entrypoints."""

from llmcompressor.entrypoints.oneshot import oneshot
from llmcompressor.entrypoints.stages import run_stages as apply
from llmcompressor.entrypoints.train import train

__all__ = ["apply", "oneshot", "train"]
