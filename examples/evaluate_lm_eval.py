# SPDX-License-Identifier: Apache-2.0
"""Scores of known benchmarks for the model as it was and for what fp8.py has written.

For whom: anybody who wants scores of known benchmarks before the new folder replaces the old.
Needs: lm-eval (pip install '.[eval]'), what fp8.py writes, and a GPU that holds both models.
Serve with: nothing here; transformers computes.
Comes out: the scores of both, also in report.html of the new folder.
"""

from llmcompressor import evaluate

MODEL = "Qwen/Qwen3-8B"
OUTPUT = MODEL.rpartition("/")[2] + "-FP8"
TASK = "arc_easy"  # a name of lm-eval's, or the path of a YAML file that defines one

scores = evaluate(OUTPUT, reference=MODEL, tasks=TASK).tasks
for score in scores:
    print(f"{score.task} {score.metric}: {score.value:.3f}, original {score.reference:.3f}")
print(f"Next: vllm serve {OUTPUT}")
