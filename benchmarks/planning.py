# SPDX-License-Identifier: Apache-2.0
"""How long a plan takes, of published configurations and the headers of their files.

    benchmarks/planning.py [--models Llama-3-70B] [--output benchmarks/results/planning.md]

The headers are written out from the configurations, without data behind them.  Each plan is a
process of its own; what it takes to import the package and the model's class is given apart.  The
machine is not measured by these plans: that takes about a second more, whatever the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from run_one import build_recipe, processor_seconds, run_apart
from tables import publish, table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

MODELS = {
    "Llama-3-8B": "LLAMA_3_8B",
    "Llama-3-70B": "LLAMA_3_70B",
    "Mixtral-8x7B": "MIXTRAL_8X7B",
    "Qwen3-30B-A3B": "QWEN3_30B_A3B",
    "DeepSeek-V3": "DEEPSEEK_V3",
}
JOB = {
    "modifier": "QuantizationModifier",
    "fields": {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]},
}


def run(job: dict) -> dict[str, float]:
    """Plan a model in this process; another of its class, a tiny one, is planned before."""
    started = processor_seconds()
    from llmcompressor import plan  # noqa: PLC0415

    plan(job["tiny"], build_recipe(job), measure=False)
    imported = processor_seconds() - started
    busy, begin = processor_seconds(), time.perf_counter()
    found = plan(job["model"], build_recipe(job), measure=False)
    seconds, processor = time.perf_counter() - begin, processor_seconds() - busy
    if found.problems:
        raise SystemExit("\n".join(one.message for one in found.problems))
    return {
        "seconds": seconds,
        "processor": processor,
        "imports": imported,
        "linears": sum(row.modules for row in found.modules if row.format),
        "parameters": found.parameters,
    }


def measure(name: str, work: Path, repeat: int) -> list[object]:
    """One row: the plan that took the least processor time counts, others disturb the rest."""
    import published_models as published  # noqa: PLC0415

    config = getattr(published, MODELS[name])
    tiny = published.small(config)
    tensors = published.tensors_of(config)
    job = JOB | {
        "model": str(published.write_headers(work / name, config, tensors)),
        "tiny": str(
            published.write_headers(work / f"{name}-tiny", tiny, published.tensors_of(tiny))
        ),
    }
    runs = [run_apart(__file__, job) for _ in range(repeat)]
    best = min(runs, key=lambda one: one["processor"])
    figures = (f"{best[key]:.1f}" for key in ("seconds", "processor", "imports"))
    parameters = f"{best['parameters'] / 1e9:.1f}"
    return [name, parameters, len(tensors), int(best["linears"]), *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(run(json.loads(given.job))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for name in given.models:
            rows.append(measure(name, Path(work), given.repeat))
            print(*rows[-1], flush=True)
    header = ["model", "parameters, 10⁹", "tensors", "quantized", "seconds", "processor", "imports"]
    body = (
        f"W4A16 of all Linears, from configurations and headers; the best of {given.repeat}. "
        "Seconds by the clock and of the processor are those of `plan` alone, without measuring "
        "the machine; `imports` is the processor's time for importing everything and planning a "
        "tiny model before. Experts are stacks of matrices in memory, no Linears. "
        "Written by `benchmarks/planning.py`.\n\n"
        f"{table(header, rows)}"
    )
    publish("Time of a plan", body, given.output)


if __name__ == "__main__":
    main()
