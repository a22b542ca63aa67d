# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that the tests of this folder read; none is to be written to."""

from __future__ import annotations

from tests.support.verified import compressed, good, llama_folder, mixtral_folder, source

__all__ = ["compressed", "good", "llama_folder", "mixtral_folder", "source"]
