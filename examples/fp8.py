# SPDX-License-Identifier: Apache-2.0
"""FP8: half the size, without data and with hardly any loss. The one to begin with.

For whom: anybody who serves on an Ada, Hopper or Blackwell GPU.
Needs: no data and no GPU; one block of the model at a time is in memory.
Serve with: vLLM or SGLang, on an L4, RTX 40, H100 or newer. Older GPUs read it as weights only.
Comes out: a folder in the compressed-tensors format, with report.html beside the weights.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

MODEL = "Qwen/Qwen3-8B"
OUTPUT = MODEL.rpartition("/")[2] + "-FP8"

oneshot(
    model=MODEL,
    recipe=QuantizationModifier(
        targets="Linear",
        scheme="FP8_DYNAMIC",  # a scale per row; inputs get theirs per token while serving
        ignore=["lm_head"],
    ),
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
