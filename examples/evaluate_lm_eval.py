# SPDX-License-Identifier: Apache-2.0
"""Scores of lm-eval for the model as it was and for what fp8.py has written.

For whom: anybody who wants scores of known benchmarks before the new folder replaces the old.
Needs: lm-eval (pip install lm-eval), what fp8.py writes, and a GPU that holds the model.
Serve with: nothing here; transformers computes, and lm-eval has a model "vllm" to be faster.
Comes out: a table of scores for each of the two.
"""

import torch
from lm_eval import simple_evaluate
from lm_eval.utils import make_table

MODEL = "Qwen/Qwen3-8B"
OUTPUT = MODEL.rpartition("/")[2] + "-FP8"
TASK = "arc_easy"  # a name of lm-eval's, or the path of a YAML file that defines one

for folder in (MODEL, OUTPUT):
    scores = simple_evaluate(
        model="hf",
        model_args={"pretrained": folder, "dtype": "auto"},
        tasks=[TASK],
        batch_size=8,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    print(folder, make_table(scores), sep="\n")
print(f"Next: vllm serve {OUTPUT}")
