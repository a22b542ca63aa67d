# SPDX-License-Identifier: Apache-2.0
"""How far a run without data is from copying its input and writing its output.

    benchmarks/streaming.py [--blocks 64] [--repeat 3] [--output benchmarks/results/streaming.md]

For a model of random weights it measures: ``cp`` of the input, writing as many bytes as the
output has, the arithmetic alone (weights in memory, extremes, scales and codes, on all cores),
and the run itself with everything imported.  ``cold`` drops the page cache before (where that is
allowed).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from memory import write_model
from run_one import build_recipe, run_apart
from tables import publish, table

SCHEMES = ["W4A16", "W8A16", "FP8_DYNAMIC", "NVFP4A16"]


def drop_cache() -> bool:
    """Forget what the system has read; whether that was allowed."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def timed(action: Callable[[], object], *, cold: bool) -> float:
    if cold:
        drop_cache()
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)


def write(target: Path, size: int) -> None:
    """Write zeros, and have them on the disk."""
    piece = bytes(2**24)
    with target.open("wb") as stream:
        for begin in range(0, size, len(piece)):
            stream.write(piece[: size - begin])
        os.fsync(stream.fileno())


def arithmetic(scheme: str, blocks: int) -> float:
    """Seconds to find the codes of all weights, from what one block takes."""
    import torch  # noqa: PLC0415
    from memory import HEADS, HIDDEN, INTERMEDIATE, KEY_VALUE_HEADS  # noqa: PLC0415
    from torch.nn import Linear  # noqa: PLC0415

    from llmcompressor.checkpoint.packing import compress, quantized_module  # noqa: PLC0415
    from llmcompressor.quantization.attach import attach_linear  # noqa: PLC0415
    from llmcompressor.quantization.parameters import observe_weight  # noqa: PLC0415
    from llmcompressor.schemes.presets import preset_scheme  # noqa: PLC0415

    rows = KEY_VALUE_HEADS * HIDDEN // HEADS
    shapes = [(HIDDEN, HIDDEN)] * 2 + [(rows, HIDDEN)] * 2
    shapes += [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)]
    parsed = preset_scheme(scheme, ["Linear"])
    best = float("inf")
    for _ in range(3):
        linears = []
        for height, width in shapes:
            linear = Linear(width, height, bias=False, dtype=torch.bfloat16)
            linears.append(linear)
        started = time.perf_counter()
        for linear in linears:
            found = observe_weight(linear.weight.detach(), parsed.weights)
            attach_linear(linear, parsed, found, {}, is_raw=True)
            entry = quantized_module("linear", linear, parsed)
            assert entry is not None
            compress(entry, {name: one.detach() for name, one in linear.named_parameters()})
        best = min(best, time.perf_counter() - started)
    return best * blocks


def run(job: dict) -> None:
    """Run one job in this process, and say how long it took."""
    import transformers.models.llama.modeling_llama  # noqa: F401, PLC0415

    from llmcompressor import oneshot  # noqa: PLC0415

    recipe = build_recipe(job)
    started = time.perf_counter()
    oneshot(model=job["model"], recipe=recipe, output_dir=job["output"], verify=job["verify"])
    print(json.dumps(time.perf_counter() - started))


def seconds_of(scheme: str, model: Path, output: Path, *, cold: bool, verify: bool) -> float:
    shutil.rmtree(output, ignore_errors=True)
    job = {
        "modifier": "QuantizationModifier",
        "fields": {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]},
        "model": str(model),
        "output": str(output),
        "verify": verify,
    }
    if cold:
        drop_cache()
    return float(run_apart(__file__, job))


def measure(work: Path, model: Path, scheme: str, blocks: int, repeat: int, *, cold: bool) -> list:
    """One row of the table: the best of several times each."""
    output, copied, zeros = work / "output", work / "copy", work / "zeros"
    run_s = min(seconds_of(scheme, model, output, cold=cold, verify=False) for _ in range(repeat))
    checked_s = seconds_of(scheme, model, output, cold=cold, verify=True)
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    copies, writes = [], []
    for _ in range(repeat):
        copies.append(timed(lambda: copy(model, copied), cold=cold))
        writes.append(timed(lambda: write(zeros, size), cold=cold))
        shutil.rmtree(copied)
        zeros.unlink()
    bound, floor = 2 * (min(copies) + min(writes)), arithmetic(scheme, blocks)
    figures = [min(copies), min(writes), floor, run_s, checked_s]
    return [
        scheme,
        "cold" if cold else "warm",
        *(f"{one:.1f}" for one in figures),
        f"{run_s / max(bound, floor):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        run(json.loads(given.job))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        model = work / "model"
        model.mkdir()
        size = write_model(model, given.blocks) / 2**30
        for cold in (False, True) if drop_cache() else (False,):
            for scheme in given.schemes:
                row = measure(work, model, scheme, given.blocks, given.repeat, cold=cold)
                print(*row, flush=True)
                rows.append(row)
    header = ["scheme", "cache", "cp", "write", "arithmetic", "run", "run, verified", "run / bound"]
    body = (
        f"{given.blocks} blocks of 64 MiB, {size:.2f} GiB of bfloat16; seconds, the best of "
        f"{given.repeat}. `write` ends when the disk has the data, as the run does. "
        "The bound is twice `cp` and `write`, or the arithmetic where that is more. "
        "Written by `benchmarks/streaming.py`.\n\n"
        f"{table(header, rows)}"
    )
    publish("A run without data beside copying", body, given.output)


if __name__ == "__main__":
    main()
