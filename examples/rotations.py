# SPDX-License-Identifier: Apache-2.0
"""SpinQuant and GPTQ, W4A16: rotate outliers away, then round to 4 bits.

For whom: anybody whose model has outlier channels, which rounding to 4 bits would drown in.
Needs: calibration data, and a GPU if it is to be quick; one block at a time is in memory.
Serve with: vLLM, as any W4A16: R1 and R2 are multiplied into the weights.
Comes out: a folder with rotated weights, and a head of its own where it was the embedding.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.transform import SpinQuantModifier

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-SpinQuant-W4A16"

oneshot(
    model=MODEL,
    recipe=[
        # R3 and R4 are computed while serving, and not everywhere: docs/modifiers/spinquant.md.
        SpinQuantModifier(rotations=["R1", "R2"], transform_type="hadamard"),
        GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    ],
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
