# SPDX-License-Identifier: Apache-2.0
"""NVFP4: floats of 4 bits for weights and inputs, computed as such on Blackwell.

For whom: anybody who serves many requests on a B200 or RTX 50; measure what it costs in quality.
Needs: calibration data for the scale of the inputs, and a GPU if it is to be quick.
Serve with: vLLM on Blackwell; from a T4 on it reads it as weights only.
Comes out: a folder in the compressed-tensors format, with report.html beside the weights.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

MODEL = "Qwen/Qwen3-32B"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-NVFP4"

oneshot(
    model=MODEL,
    # "NVFP4A16" leaves the inputs in 16 bits, which costs less quality and gains memory alone.
    recipe=GPTQModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head"]),
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
