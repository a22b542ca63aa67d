# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a run over models of 8, 16, 32 and 64 equal blocks.

    benchmarks/memory.py [--blocks 8 16 32 64] [--output benchmarks/results/memory.md]

Each model has random weights and blocks of 64 MiB; the largest takes 4 GiB on disk.  Each run is
a process of its own.  What is given is its peak resident memory, how much of that came after
everything was imported, and the time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

from run_one import build_dataset, build_recipe, resident, run_apart
from tables import publish, table

HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, VOCABULARY = 2048, 3840, 16, 4, 4096
SAMPLES, LENGTH = 4, 128
JOBS = {
    "RTN, W4A16": ("QuantizationModifier", "W4A16", False),
    "FP8 dynamic": ("QuantizationModifier", "FP8_DYNAMIC", False),
    "FP8 static": ("QuantizationModifier", "FP8", True),
    "GPTQ, W8A16": ("GPTQModifier", "W8A16", True),
    "GPTQ, W4A16": ("GPTQModifier", "W4A16", True),
}


def write_model(folder: Path, blocks: int) -> int:
    """Write a Llama with random weights, block by block; returns bytes of its weights."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import LlamaConfig  # noqa: PLC0415

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    head = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KEY_VALUE_HEADS * head, HIDDEN),
        "self_attn.v_proj.weight": (KEY_VALUE_HEADS * head, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    shards = [{"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "model.norm.weight": norm}]
    places: dict[str, str] = {}
    size = 0
    for number in range(blocks + 1):
        tensors = shards.pop() if shards else {}
        if number:
            prefix = f"model.layers.{number - 1}."
            tensors = {prefix + name: random(*shape) for name, shape in shapes.items()}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{name}.weight"] = norm.clone()
        name = f"model-{number + 1:05d}-of-{blocks + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def run(job: dict) -> dict[str, float]:
    """Run one job in this process."""
    import transformers.models.llama.modeling_llama  # noqa: F401, PLC0415

    from llmcompressor import oneshot  # noqa: PLC0415

    recipe = build_recipe(job)
    arguments = {}
    if job["tokens"]:
        arguments = {"dataset": build_dataset(job["tokens"]), "max_seq_length": LENGTH}
    before = resident()["peak"]
    started = time.perf_counter()
    oneshot(model=job["model"], recipe=recipe, output_dir=job["output"], **arguments)
    peak = resident()["peak"]
    return {"peak": peak, "above": peak - before, "seconds": time.perf_counter() - started}


def measure(name: str, model: Path, work: Path) -> dict[str, float]:
    """Run one job in a process of its own, and throw its output away."""
    modifier, scheme, needs_data = JOBS[name]
    tokens = work / "tokens.json"
    if not tokens.exists():
        rows = [[(7 * i + 13 * j) % VOCABULARY for j in range(LENGTH)] for i in range(SAMPLES)]
        tokens.write_text(json.dumps(rows))
    job = {
        "modifier": modifier,
        "fields": {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]},
        "model": str(model),
        "output": str(work / "output"),
        "tokens": str(tokens) if needs_data else None,
    }
    result: dict[str, float] = run_apart(__file__, job)
    shutil.rmtree(work / "output")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", type=Path, help="Where models are written for the time of a run.")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(run(json.loads(given.job))))
        return
    rows = []
    found: dict[str, list[float]] = {name: [] for name in given.jobs}
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        for blocks in given.blocks:
            model = Path(folder) / f"model-{blocks}"
            model.mkdir()
            size = write_model(model, blocks) / 2**30
            for name in given.jobs:
                one = measure(name, model, Path(folder))
                found[name].append(one["peak"])
                figures = (f"{one[key]:.0f}" for key in ("peak", "above", "seconds"))
                rows.append([name, blocks, f"{size:.2f}", *figures])
                print(*rows[-1], flush=True)
            shutil.rmtree(model)
    rows.sort(key=lambda row: (list(JOBS).index(row[0]), row[1]))
    header = ["job", "blocks", "model, GiB", "peak, MiB", "above the imports, MiB", "seconds"]
    spread = [[name, f"{max(all_) / min(all_) - 1:.1%}"] for name, all_ in found.items()]
    body = (
        f"Blocks of 64 MiB, {SAMPLES} calibration samples of {LENGTH} tokens. "
        "Written by `benchmarks/memory.py`.\n\n"
        f"{table(header, rows)}\n\n"
        f"{table(['job', 'largest over smallest peak'], spread)}"
    )
    publish("Peak memory by depth", body, given.output)


if __name__ == "__main__":
    main()
