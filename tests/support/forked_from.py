# SPDX-License-Identifier: Apache-2.0
"""Imported once by the process that all those are forked from which tests start and kill.

What each of them would import, or make out of nothing, is there before it is forked. No operation
of torch may be run here: its threads would be missing in the forks.
"""

from __future__ import annotations

import gc
import importlib
import os

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for module in (
    "compressed_tensors.linear.compressed_linear",
    "datasets",
    "llmcompressor.cli",
    "llmcompressor.entrypoints.model_free",
    "llmcompressor.entrypoints.oneshot",
    "llmcompressor.entrypoints.train",
    "llmcompressor.modifiers.distillation.output",
    "llmcompressor.modifiers.gptq.base",
    "llmcompressor.modifiers.pruning.gradual",
    "llmcompressor.modifiers.quantization.rounding",
    "llmcompressor.modifiers.reap",
    "llmcompressor.modifiers.smoothquant",
    "llmcompressor.modifiers.sparsity",
    "llmcompressor.modifiers.transform.awq",
    "llmcompressor.modifiers.transform.spinquant",
    "llmcompressor.pipelines.basic",
    "llmcompressor.pipelines.sequential",
    "numpy.ctypeslib",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
):
    importlib.import_module(module)
os.fsync = os.fdatasync = lambda handle: None  # what a process wrote outlives it anyway
get_checkpoint_conversion_mapping("llama")  # of all model types, and kept
gc.freeze()
