# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant and GPTQ, W8A8: half the size and products of 8-bit integers.

For whom: anybody who serves many requests on GPUs without FP8: A100, A10, RTX 30, T4.
Needs: calibration data, and a GPU if it is to be quick; one block at a time is in memory.
Serve with: vLLM or SGLang; not on Blackwell, where FP8 takes its place.
Comes out: a folder in the compressed-tensors format, with report.html beside the weights.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-W8A8"

oneshot(
    model=MODEL,
    recipe=[
        SmoothQuantModifier(smoothing_strength=0.8),  # moves outliers of the inputs into weights
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
    ],
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
