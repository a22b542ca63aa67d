# SPDX-License-Identifier: Apache-2.0
"""Compatibility path of DeepSeek V3.2: the class is transformers' own."""

from __future__ import annotations

from llmcompressor.registry import lazy_page

_HOMES = {
    "DeepseekV32ForCausalLM": "transformers:DeepseekV32ForCausalLM",
}

__getattr__, __dir__ = lazy_page(globals(), _HOMES)
