# SPDX-License-Identifier: Apache-2.0
"""Sparse fine-tuning: prune to 2:4 by SparseGPT, then train what is left beside a teacher.

For whom: anybody who wants half of the weights zero with most of the quality back.
Needs: text of the task, and a GPU that holds the model in float32, its teacher and AdamW's state.
Serve with: vLLM or SGLang. Zeros are stored like other numbers: no server here gains by them.
Comes out: two folders, the pruned model and the trained one, whose zeros are the same.
"""

import torch

from llmcompressor import oneshot, train
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.modifiers.pruning import ConstantPruningModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier

MODEL = "Qwen/Qwen3-0.6B"
DATASET = "ultrachat_200k"
PRUNED = MODEL.rpartition("/")[2] + "-2of4"
OUTPUT = PRUNED + "-trained"

oneshot(
    model=MODEL,
    recipe=SparseGPTModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"]),
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=PRUNED,
)
train(
    model=PRUNED,
    recipe=[
        ConstantPruningModifier(targets="Linear", ignore=["lm_head"]),  # zeros stay zeros
        OutputDistillationModifier(temperature=2.0, orig_scale=0.5),
    ],
    distill_teacher=MODEL,
    dataset=DATASET,
    splits="train",
    max_train_samples=20_000,
    max_seq_length=1024,
    precision="float32",  # small steps are rounded away in 16 bits
    bf16=torch.cuda.is_available(),
    learning_rate=1e-5,
    per_device_train_batch_size=2,
    num_train_epochs=1,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
