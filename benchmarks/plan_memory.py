# SPDX-License-Identifier: Apache-2.0
"""Planned and measured peak memory, size and time, of random models of several depths.

Every plan and every run is a process of its own::

    python benchmarks/plan_memory.py --depths 8 32 --recipes rtn gptq fp8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from run_one import resident
from safetensors.torch import save_file

RECIPES = {
    "rtn": "QuantizationModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}",
    "fp8": "QuantizationModifier: {targets: [Linear], scheme: FP8_DYNAMIC, ignore: [lm_head]}",
    "w8a8": "QuantizationModifier: {targets: [Linear], scheme: W8A8, ignore: [lm_head]}",
    "nvfp4": "QuantizationModifier: {targets: [Linear], scheme: NVFP4A16, ignore: [lm_head]}",
    "r1r2": "SpinQuantModifier: {rotations: [R1, R2]}\n  QuantizationModifier: "
    "{targets: [Linear], scheme: W4A16, ignore: [lm_head]}",
    "learned": "SpinQuantModifier: {rotations: [R1, R2], learnable: true, learning_steps: 2}\n"
    "  QuantizationModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}",
    "gptq": "GPTQModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}",
    "reap": "REAPPruningModifier: {sparsity: 0.5}",
}
CALIBRATED = ("gptq", "reap", "learned")
VOCABULARY = 32000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["rtn", "fp8", "gptq"])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=0, help="Qwen3-MoE with so many per block")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--granularity", default="auto")
    parser.add_argument("--folder", type=Path, help="where models are written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    print(f"{'recipe':<7}{'blocks':>7}{'planned MiB':>13}{'measured MiB':>14}{'ratio':>7}", end="")
    print(f"{'above imports':>21}{'bytes':>7}{'planned s':>11}{'measured s':>12}")
    with TemporaryDirectory(dir=args.folder) as work:
        for depth in args.depths:
            model = write_model(Path(work) / f"model-{depth}", depth, args)
            for recipe in args.recipes:
                compare(model, recipe, depth, Path(work), args)


def compare(model: Path, recipe: str, depth: int, work: Path, args: argparse.Namespace) -> None:
    """One row of the table."""
    job = {
        "model": str(model),
        "recipe": f"modifiers:\n  {RECIPES[recipe]}\n",
        "output_dir": str(work / f"{recipe}-{depth}"),
        "samples": args.samples if recipe in CALIBRATED else 0,
        "length": args.length,
        "granularity": args.granularity,
    }
    planned, measured = run_child({"kind": "plan", **job}), run_child({"kind": "run", **job})
    ratio = planned["peak"] / measured["peak"]
    own = (planned["peak"] - measured["imports"]) / (measured["peak"] - measured["imports"])
    same = "equal" if planned["bytes"] == measured["bytes"] else "DIFFER"
    print(
        f"{recipe:<7}{depth:>7}{planned['peak'] / 2**20:>13.0f}{measured['peak'] / 2**20:>14.0f}"
        f"{ratio:>7.2f}{own:>21.2f}{same:>7}{planned['seconds']:>11.1f}{measured['seconds']:>12.1f}",
        flush=True,
    )


def run_child(job: dict[str, Any]) -> dict[str, float]:
    process = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return found


def child(job: dict[str, Any]) -> None:
    from datasets import Dataset  # noqa: PLC0415  # the parent needs none of these

    from llmcompressor import oneshot, plan  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    shape = (job["samples"], job["length"])
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    call: dict[str, Any] = {
        "model": job["model"],
        "recipe": job["recipe"],
        "output_dir": job["output_dir"],
        "dataset": Dataset.from_dict({"input_ids": ids.tolist()}) if len(ids) else None,
        "sequential_granularity": job["granularity"],
    }
    imports = peak()
    start = time.perf_counter()
    if job["kind"] == "plan":
        found = plan(**call)
        report = {
            "peak": found.peak_host,
            "bytes": found.sizes.weights,
            "seconds": found.time.seconds,
        }
    else:
        oneshot(**call)
        written = sum(one.stat().st_size for one in Path(job["output_dir"]).glob("*.safetensors"))
        report = {"peak": peak(), "bytes": written, "seconds": time.perf_counter() - start}
    print(json.dumps({**report, "imports": imports}))


def peak() -> int:
    """Most bytes that this process had resident, in its own address space."""
    return int(resident()["peak"] * 2**20)


def write_model(folder: Path, depth: int, args: argparse.Namespace) -> Path:
    """A model with random weights; one file per block, so that little is held at once."""
    heads = args.hidden // 128
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    if args.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "moe_intermediate_size": args.intermediate // args.experts,
            "num_experts": args.experts,
            "num_experts_per_tok": 2,
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    places = {}
    for number, tensors in enumerate(parts(depth, args)):
        name = f"part-{number:03d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return folder


def parts(depth: int, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.02).to(torch.bfloat16)

    hidden, inner = args.hidden, args.intermediate

    def mlp(prefix: str, width: int) -> dict[str, torch.Tensor]:
        rows = {f"{prefix}{one}_proj": matrix(width, hidden) for one in ("gate", "up")}
        return {**rows, f"{prefix}down_proj": matrix(hidden, width)}

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    yield {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden),
        "lm_head.weight": matrix(VOCABULARY, hidden),
        "model.norm.weight": ones.clone(),
    }
    for block in range(depth):
        prefix = f"model.layers.{block}."
        own = {f"self_attn.{one}_proj": matrix(hidden, hidden) for one in "qkvo"}
        own |= {} if args.experts else mlp("mlp.", inner)
        for expert in range(args.experts):
            own |= mlp(f"mlp.experts.{expert}.", inner // args.experts)
        if args.experts:
            own["mlp.gate"] = matrix(args.experts, hidden)
            own |= {f"self_attn.{one}_norm": ones[:128].clone() for one in "qk"}
        own["input_layernorm"] = ones.clone()
        own["post_attention_layernorm"] = ones.clone()
        yield {f"{prefix}{name}.weight": tensor for name, tensor in own.items()}


if __name__ == "__main__":
    main()
