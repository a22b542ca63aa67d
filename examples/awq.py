# SPDX-License-Identifier: Apache-2.0
"""AWQ W4A16 with zero points: a quarter of the size where there is little text to calibrate with.

For whom: anybody with some dozens of samples; with hundreds GPTQ loses less.
Needs: a little calibration data, and a GPU if it is to be quick; one block is in memory.
Serve with: vLLM, on a T4 or newer.
Comes out: a folder in the compressed-tensors format, with report.html beside the weights.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-AWQ-W4A16"

oneshot(
    model=MODEL,
    recipe=[
        AWQModifier(),  # scales the columns that meet large inputs; it rounds nothing
        QuantizationModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"]),
    ],
    dataset=DATASET,
    num_calibration_samples=128,
    max_seq_length=512,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
