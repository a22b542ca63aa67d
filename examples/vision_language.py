# SPDX-License-Identifier: Apache-2.0
"""A model that sees, in W4A16: its language model by GPTQ, calibrated with pictures.

For whom: anybody who serves Qwen-VL, LLaVA, Gemma 3, Mistral 3 or another of that kind.
Needs: pictures with text (pip install '.[vision]'), and a GPU if it is to be quick.
Serve with: vLLM, on a T4 or newer.
Comes out: a folder with the vision tower and the projector as they were, and the processor.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
DATASET = "flickr30k"  # photographs and captions
OUTPUT = MODEL.rpartition("/")[2] + "-W4A16"

oneshot(
    model=MODEL,
    recipe=GPTQModifier(
        targets="Linear",
        scheme="W4A16",
        # Small, sensitive, and called otherwise by each family: whatever sees or leads to text.
        ignore=["lm_head", "re:.*(visual|vision_tower|vision_model|multi_modal_projector).*"],
    ),
    dataset=DATASET,
    num_calibration_samples=256,
    max_seq_length=2048,  # a picture is never cut: one that is longer is an error
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
