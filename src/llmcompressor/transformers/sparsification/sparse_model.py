# SPDX-License-Identifier: Apache-2.0
"""Old name of ``transformers.AutoModelForCausalLM``, which loads compressed models."""

from transformers import AutoModelForCausalLM as SparseAutoModelForCausalLM

__all__ = ["SparseAutoModelForCausalLM"]
