# SPDX-License-Identifier: Apache-2.0
"""FP8 with a cache of keys and values in FP8: longer contexts, more requests at a time.

For whom: anybody whose memory goes to the cache rather than to the weights.
Needs: calibration data for the scales of the cache, and a GPU if it is to be quick.
Serve with: vLLM, which takes the cache's format from the folder; leave --kv-cache-dtype out.
Comes out: a folder in the compressed-tensors format, with a scale of keys and values per layer.
"""

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "ultrachat_200k"
OUTPUT = MODEL.rpartition("/")[2] + "-FP8-KV8"

oneshot(
    model=MODEL,
    recipe=QuantizationModifier(
        targets="Linear",
        scheme="FP8_DYNAMIC",
        ignore=["lm_head"],
        kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
    ),
    dataset=DATASET,
    num_calibration_samples=512,
    max_seq_length=2048,
    output_dir=OUTPUT,
)
print(f"Next: vllm serve {OUTPUT}")
