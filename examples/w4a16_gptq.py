# SPDX-License-Identifier: Apache-2.0
"""GPTQ W4A16: a quarter of the size, for few requests at a time.

For whom: anybody whose model does not fit, or who serves few requests at a time.
Needs: calibration data, and a GPU if it is to be quick; one block at a time is in memory.
Serve with: vLLM or SGLang, on a T4 or newer (SGLang: A100 or newer).
Comes out: a folder in the compressed-tensors format, with report.html beside the weights.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

MODEL = "Qwen/Qwen3-8B"
DATASET = "ultrachat_200k"  # text like that which the model will see
OUTPUT = MODEL.rpartition("/")[2] + "-W4A16"

oneshot(
    model=MODEL,
    recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
