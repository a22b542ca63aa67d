# SPDX-License-Identifier: Apache-2.0
"""Time, memory and traffic of several ranks beside one process, on the cores of one machine.

    benchmarks/ranks.py [--model 386M] [--repeat 3] [--reference-python PYTHON]
                        [--output benchmarks/results/ranks.md]

Two ranks of one thread each stand beside one process of one thread, and one of two.  Two processes
that each do all of the work at one time tell the floor: half of their time is what two ranks would
take if sharing cost nothing, since two cores of one machine slow each other.  GPTQ corrects the
error of earlier layers by default, and llm-compressor's does not: a row is without it.  With the
reference's interpreter its distributed calibration runs too, as its examples start it: in memory,
each rank with its part of the samples.  Times are the least of ``--repeat`` runs of ``oneshot``,
each the longest of its ranks, peaks the highest of any rank.  The tools take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from models import ROOT, SIZES, model_path, token_file
from run_one import build_dataset, build_recipe, resident
from tables import publish, table

RECIPE = {"GPTQModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16"}}
PLAIN_RECIPE = {"GPTQModifier": {**RECIPE["GPTQModifier"], "asymmetric": False}}
WAYS = {
    "one process, 1 thread": (1, 1),
    "one process, 2 threads": (1, 2),
    "2 ranks, 1 thread each": (2, 1),
}
PLAIN = "2 ranks, 1 thread each, without error correction, as llm-compressor"
FLOOR = "floor: half of the time of two processes at once, 1 thread and all of the work each"
REFERENCE = "llm-compressor, 2 ranks, 1 thread each"
LAUNCH = ["-m", "torch.distributed.run", "--local-addr", "localhost", "--rdzv-backend", "c10d"]


def run(job: dict) -> dict[str, Any]:
    """Do one job as one rank; its seconds, its peak in MiB, and the shares of all ranks."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(job["threads"])
    return _reference(job) if job["is_reference"] else _own(job)


def _own(job: dict) -> dict[str, Any]:
    from llmcompressor import oneshot  # noqa: PLC0415

    data = build_dataset(job["tokens"])
    given = {"num_calibration_samples": len(data), "max_seq_length": 512, "output_dir": job["to"]}
    recipe = build_recipe(job)
    started = time.perf_counter()
    oneshot(model=job["model"], recipe=recipe, dataset=data, overwrite=True, **given)
    seconds = time.perf_counter() - started
    report = json.loads((Path(job["to"]) / "compression_report.json").read_text())
    return {"seconds": seconds, "peak": resident()["peak"], "ranks": report.get("ranks", [])}


def _reference(job: dict) -> dict[str, Any]:
    """The reference calibrates a model in memory; each rank gives it its own samples."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from llmcompressor import oneshot  # noqa: PLC0415

    torch.distributed.init_process_group("gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    data = build_dataset(job["tokens"])
    own = data.select(range(rank, len(data), count))
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    recipe = build_recipe(job)
    started = time.perf_counter()
    given = {"num_calibration_samples": len(own), "max_seq_length": 512}
    oneshot(model=model, recipe=recipe, dataset=own, **given)
    model.save_pretrained(job["to"])  # of all ranks: it waits for them itself
    torch.distributed.barrier()
    return {"seconds": time.perf_counter() - started, "peak": resident()["peak"], "ranks": []}


def run_apart(python: str, ranks: int, job: dict) -> dict[str, Any]:
    """Do a job on ranks of their own, and return the figures of all."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": str(job["threads"]), "PYTHONPATH": str(ROOT / "src")}
    if job["is_reference"]:
        del environment["PYTHONPATH"]
    launch = [] if ranks == 1 else [*LAUNCH, "--rdzv-endpoint", "localhost:0"]
    launch += [] if ranks == 1 else ["--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory(dir=ROOT / "benchmarks" / ".models") as folder:
        job = {**job, "to": f"{folder}/output", "figures": folder}
        command = [python, *launch, __file__, "--job", json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        found = [json.loads(one.read_text()) for one in Path(folder).glob("rank-*.json")]
    shares = next((one["ranks"] for one in found if one["ranks"]), [])
    return {
        "seconds": max(one["seconds"] for one in found),
        "peak": max(one["peak"] for one in found),
        "sent": sum(one["sent"] for one in shares),
        "ranks": shares,
    }


def run_floor(job: dict) -> dict[str, Any]:
    """Two processes do all of the work at one time; half of the time of the slower one."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: run_apart(sys.executable, 1, job), range(2)))
    seconds = max(one["seconds"] for one in found) / 2
    return {**found[0], "seconds": seconds, "peak": max(one["peak"] for one in found)}


def main() -> None:
    """Measure all ways in turns, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="386M", choices=SIZES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--reference-python")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--job")
    given = parser.parse_args()
    if given.job is not None:
        job = json.loads(given.job)
        found = run(job)
        rank = os.environ.get("RANK", "0")
        (Path(job["figures"]) / f"rank-{rank}.json").write_text(json.dumps(found))
        return
    size = SIZES[given.model]
    common = {
        "model": str(model_path(size)),
        "tokens": str(token_file(size, "calibration")),
    }
    ways = {name: (sys.executable, *how, False) for name, how in WAYS.items()}
    ways[FLOOR] = (sys.executable, 1, 1, False)
    ways[PLAIN] = (sys.executable, 2, 1, False)
    if given.reference_python:
        ways[REFERENCE] = (given.reference_python, 2, 1, True)
    best: dict[str, dict[str, Any]] = {}
    for _ in range(given.repeat):
        for name, (python, ranks, threads, is_reference) in ways.items():
            job = {**common, "threads": threads, "is_reference": is_reference}
            job["recipe"] = PLAIN_RECIPE if name == PLAIN else RECIPE
            found = run_floor(job) if name == FLOOR else run_apart(python, ranks, job)
            known = best.setdefault(name, found)
            known["seconds"] = min(known["seconds"], found["seconds"])
            known["peak"] = max(known["peak"], found["peak"])
            print(f"{name}: {found['seconds']:.1f} s", file=sys.stderr, flush=True)
    alone = best["one process, 1 thread"]["seconds"]
    rows = [
        (
            name,
            f"{one['seconds']:.1f} s",
            f"{one['seconds'] / alone:.2f}",
            f"{one['peak']:.0f} MiB",
            f"{one['sent'] / 1e6:.0f} MB" if one["ranks"] else "",
        )
        for name, one in best.items()
    ]
    header = ["GPTQ W4A16", "`oneshot`", "of 1 thread", "peak of a rank", "sent by all"]
    title = f"Ranks: {given.model} parameters, {size.samples} x {size.length} tokens"
    publish(title, table(header, rows), given.output)


if __name__ == "__main__":
    main()
