# SPDX-License-Identifier: Apache-2.0
"""Old path of :class:`llmcompressor.training.SessionManagerMixIn`."""

from llmcompressor.training import SessionManagerMixIn

__all__ = ["SessionManagerMixIn"]
