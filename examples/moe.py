# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in W4A16 by GPTQ, with every expert calibrated.

For whom: anybody who serves Qwen3-MoE, Mixtral, DeepSeek, GLM, Llama 4 or another mixture.
Needs: calibration data, and a GPU if it is to be quick; one block at a time is in memory.
Serve with: vLLM, on a T4 or newer, or SGLang, on an A100 or newer.
Comes out: a folder in which each expert's matrices are stored one by one, as servers read them.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

MODEL = "Qwen/Qwen3-30B-A3B"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-W4A16"

oneshot(
    model=MODEL,
    recipe=GPTQModifier(
        targets="Linear",  # the experts too, though transformers holds them as one stack
        scheme="W4A16",
        ignore=["lm_head", "re:.*mlp.gate$"],  # the router decides by small differences
    ),
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    moe_calibrate_all_experts=True,  # the default: no expert lacks data
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
