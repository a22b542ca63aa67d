# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: MLPs in 4 bits, attention in FP8.

For whom: anybody to whom 4 bits everywhere cost too much: the MLPs are most of the weights.
Needs: calibration data, and a GPU if it is to be quick; one block at a time is in memory.
Serve with: vLLM, on an L4, RTX 40, H100 or newer.
Comes out: a folder whose configuration has a group for each of the two schemes.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-W4A16-FP8"

oneshot(
    model=MODEL,
    recipe=GPTQModifier(
        # report.html of a first run shows the error of each layer: move the worst to 8 bits.
        # q, k and v need one scheme, and so do gate and up, since servers join them.
        config_groups={
            "W4A16": ["re:.*mlp.*_proj$"],
            "FP8_DYNAMIC": ["re:.*self_attn.*_proj$"],
        },
        ignore=["lm_head"],
    ),
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
