# SPDX-License-Identifier: Apache-2.0
"""Planned and measured time of runs, in seconds of one processor, on random models of 30M weights.

What the machine does in a second is measured in processor time as well, so that other work on it
does not count::

    python benchmarks/plan_time.py --recipes gptq awq r1r2 --samples 32 --length 128
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.planning import trial, workload

LINEARS = "targets: [Linear], ignore: [lm_head]"
ROUND = f"QuantizationModifier: {{{LINEARS}, scheme: W4A16}}"
ASYMMETRIC = f"QuantizationModifier: {{{LINEARS}, scheme: W4A16_ASYM}}"
GPTQ = f"GPTQModifier: {{{LINEARS}, scheme: W4A16}}"
RECIPES = {
    "rtn": [ROUND],
    "fp8": [f"QuantizationModifier: {{{LINEARS}, scheme: FP8}}"],
    "hqq": [f"HQQModifier: {{{LINEARS}, scheme: W4A16_ASYM}}"],
    "gptq": [GPTQ],
    "smoothquant": [
        "SmoothQuantModifier: {}",
        f"QuantizationModifier: {{{LINEARS}, scheme: W8A8}}",
    ],
    "awq": ["AWQModifier: {}", ASYMMETRIC],
    "awq-output": ["AWQModifier: {loss: output, clip: false}", ASYMMETRIC],
    "autoround": [f"AutoRoundModifier: {{{LINEARS}, scheme: W4A16, iters: 20}}"],
    "sparsegpt": ["SparseGPTModifier: {sparsity: 0.5, mask_structure: '2:4', ignore: [lm_head]}"],
    "wanda": ["WandaPruningModifier: {sparsity: 0.5, ignore: [lm_head]}"],
    "r1r2": ["SpinQuantModifier: {rotations: [R1, R2]}", ROUND],
    "r1r2r3r4": ["SpinQuantModifier: {rotations: [R1, R2, R3, R4]}", ROUND],
    "r1r2-matrix": [
        "SpinQuantModifier: {rotations: [R1, R2], transform_type: random-matrix}",
        ROUND,
    ],
    "r1r2r4-gptq": ["SpinQuantModifier: {rotations: [R1, R2, R4]}", GPTQ],
    "r1-learned": [
        "SpinQuantModifier: {rotations: [R1], learnable: true, learning_steps: 10}",
        ROUND,
    ],
    "quip": ["QuIPModifier: {rotations: [u, v]}", ROUND],
    "moe-rtn": [ROUND],
    "moe-gptq": [GPTQ],
    "moe-reap": ["REAPPruningModifier: {sparsity: 0.5}"],
    "moe-reap-gptq": ["REAPPruningModifier: {sparsity: 0.5}", GPTQ],
}
SIZES: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="where models are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock: Any = SimpleNamespace(perf_counter=time.process_time, thread_time=time.thread_time)
    workload.time = trial.time = clock
    print(f"{'recipe':<14}{'planned s':>11}{'from':>8}{'to':>8}{'measured s':>12}{'ratio':>7}")
    with TemporaryDirectory(dir=args.folder) as work:
        folder = Path(work)
        models = {"": dense(folder / "dense"), "moe": mixture(folder / "mixture")}
        shape, generator = (args.samples, args.length), torch.Generator().manual_seed(0)
        ids = torch.randint(3, 1000, shape, generator=generator)
        data = Dataset.from_dict({"input_ids": ids.tolist()})
        measured("rtn", models[""], data, folder / "first")  # what is imported late
        for name in args.recipes:
            row(name, models["moe" if name.startswith("moe") else ""], data, folder / name)


def row(name: str, model: Path, data: Dataset, output: Path) -> None:
    """One line of the table."""
    time_of = plan(str(model), recipe(name), data).time
    assert time_of is not None
    took = measured(name, model, data, output)
    print(
        f"{name:<14}{time_of.seconds:>11.2f}{time_of.low:>8.2f}{time_of.high:>8.2f}{took:>12.2f}"
        f"{time_of.seconds / took:>7.2f}",
        flush=True,
    )


def measured(name: str, model: Path, data: Dataset, output: Path) -> float:
    """Seconds of a run."""
    start = time.process_time()
    oneshot(model=str(model), recipe=recipe(name), dataset=data, output_dir=output, verify=False)
    return time.process_time() - start


def recipe(name: str) -> str:
    return "modifiers:\n" + "".join(f"  {one}\n" for one in RECIPES[name])


def dense(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, **SIZES
    )
    return written(LlamaForCausalLM(config), folder)


def mixture(folder: Path) -> Path:
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        **SIZES,
    )
    return written(MixtralForCausalLM(config), folder)


def written(model: Any, folder: Path) -> Path:
    model.bfloat16().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
