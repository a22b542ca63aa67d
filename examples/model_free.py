# SPDX-License-Identifier: Apache-2.0
"""FP8 in blocks from the files alone: no model class, no data, no code of the checkpoint.

For whom: anybody with a model that is newer than the installed transformers, or very large.
Needs: no data and no GPU; one block of the model at a time is in memory.
Serve with: vLLM, if it knows the architecture; on H100 or newer it computes in FP8.
Comes out: a folder with the same config.json, but for what says how it is quantized.
"""

from llmcompressor import model_free_ptq

MODEL = "Qwen/Qwen3-235B-A22B-Instruct-2507"
OUTPUT = MODEL.rpartition("/")[2] + "-FP8-BLOCK"

model_free_ptq(
    MODEL,
    OUTPUT,
    scheme="FP8_BLOCK",
    ignore=["lm_head"],  # embeddings, norms and routers are left out by themselves
)
print(f"Next: vllm serve {OUTPUT}")
