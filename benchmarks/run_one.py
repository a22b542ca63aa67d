# SPDX-License-Identifier: Apache-2.0
"""Run one compression job in this process and report what it cost.

The script knows only the public API, so it runs the same under either implementation: which one
is measured is the choice of the interpreter that runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SERVED = "-- served --"
# Where both implementations have the modifiers.
PAGES = {
    "AWQModifier": "transform.awq",
    "AutoRoundModifier": "autoround",
    "GPTQModifier": "gptq",
    "HQQModifier": "hqq",
    "QuIPModifier": "transform",
    "QuantizationModifier": "quantization",
    "REAPPruningModifier": "pruning",
    "ScaleTuningModifier": "scale_tuning",
    "SmoothQuantModifier": "transform",
    "SparseGPTModifier": "pruning",
    "SpinQuantModifier": "transform",
    "WandaPruningModifier": "pruning",
}


def resident() -> dict[str, float]:
    """Memory of this process in MiB: at present (private, mapped from files) and at its peak.

    The peak is that of this program's address space.  ``ru_maxrss`` is not: it begins with what
    the parent held when it started this process.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = {"private": "RssAnon", "mapped": "RssFile", "peak": "VmHWM"}
    return {name: int(fields[field].split()[0]) / 1024 for name, field in names.items()}


def processor_seconds() -> float:
    """User and system time which this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_apart(script: str, job: dict):
    """Have ``script --job`` do a job in a process of its own; returns its last line, as JSON."""
    done = subprocess.run(
        [sys.executable, script, "--job", json.dumps(job)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def build_recipe(job: dict) -> list:
    """The modifiers which a job names, made by the installed implementation."""
    wanted = job["recipe"] if "recipe" in job else {job["modifier"]: job["fields"]}
    made = []
    for name, fields in wanted.items():
        modifier = getattr(importlib.import_module(f"llmcompressor.modifiers.{PAGES[name]}"), name)
        drawn = {} if job.get("draw") is None else {"seed": job["draw"]}
        known = {key: value for key, value in drawn.items() if key in modifier.model_fields}
        made.append(modifier(**fields, **known))
    return made


def build_dataset(token_file: str):
    """Pre-tokenized calibration data in the order of the file."""
    from datasets import Dataset  # noqa: PLC0415

    ids = json.loads(Path(token_file).read_text())
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})


def without_accelerator() -> None:
    """Let pinned memory be plain memory where nothing is there that it could be pinned for.

    The reference's AWQ pins its activations on a machine without an accelerator too, where torch
    refuses to.
    """
    import torch  # noqa: PLC0415

    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda self, *_: self


@contextlib.contextmanager
def drawn_from(seed: int | None) -> Iterator[None]:
    """The reference's random rotations are those of a seed inside, and not always the same."""
    if seed is None:
        yield
        return
    from compressed_tensors.transform import TransformFactory  # noqa: PLC0415

    plain = TransformFactory.__init__

    def seeded(self, name, scheme, seed_of_its_own=None) -> None:
        plain(self, name, scheme, seed if seed_of_its_own is None else seed_of_its_own)

    TransformFactory.__init__ = seeded
    try:
        yield
    finally:
        TransformFactory.__init__ = plain


@contextlib.contextmanager
def full_attention(wanted: bool) -> Iterator[None]:
    """Where it is wanted, tokens see those behind them too inside: attention knows no mask.

    The reference calibrates Qwen3-MoE so.
    """
    if not wanted:
        yield
        return
    from torch.nn import functional  # noqa: PLC0415

    plain = functional.scaled_dot_product_attention

    def unmasked(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        return plain(query, key, value, None, dropout_p, False, **others)

    functional.scaled_dot_product_attention = unmasked
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def given_model(job: dict):
    """What the job compresses: a folder, or the model that transformers loads from it."""
    if not job.get("as_object"):
        return job["model"]
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")


def measured_here(model, job: dict) -> dict:
    """What the model in memory loses: all of it is applied there, also what no reader applies."""
    from evaluate_one import load, lost, read  # noqa: PLC0415

    return lost(model.eval(), load(job["model"]), read(job["held_out"]), batch=4)


def run(job: dict) -> dict:
    """Run a job: its model folder, recipe, token file (or None) and output folder.

    With ``held_out``, a token file, nothing is written, and the model is measured in memory.
    """
    started = time.perf_counter()
    from llmcompressor import oneshot  # noqa: PLC0415

    recipe = build_recipe(job)
    report = {"import_seconds": time.perf_counter() - started, "after_import": resident()}
    without_accelerator()
    if job.get("wide"):
        from wide import multiply_in_float32  # noqa: PLC0415

        multiply_in_float32()
    arguments = {}
    if job["tokens"]:
        dataset = build_dataset(job["tokens"])
        arguments = {
            "dataset": dataset,
            "num_calibration_samples": len(dataset),
            "max_seq_length": len(dataset[0]["input_ids"]),
            "shuffle_calibration_samples": False,
        }
    model = given_model(job)
    busy = processor_seconds()
    started = time.perf_counter()
    if not job.get("held_out"):
        arguments["output_dir"] = job["output"]
    with drawn_from(job.get("draw")), full_attention(job.get("unmasked", False)):
        model = oneshot(model=model, recipe=recipe, **arguments)
    report["oneshot_seconds"] = time.perf_counter() - started
    report["oneshot_processor_seconds"] = processor_seconds() - busy
    report["after_oneshot"] = resident()
    if job.get("held_out"):
        report["quality"] = measured_here(model, job)
    report["versions"] = {
        name: importlib.metadata.version(name)
        for name in ("llmcompressor", "torch", "transformers", "compressed-tensors")
    }
    return report


def serve(answer) -> None:
    """Answer requests, a JSON object on a line each, until there are no more.

    A reply is a file beside standard output, to which libraries may write too: the request names
    it, and a line tells that it is there.
    """
    for line in sys.stdin:
        request = json.loads(line)
        target = Path(request.pop("report"))
        target.write_text(json.dumps(answer(request)))
        print(f"\n{SERVED}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, nargs="?", help="JSON file that describes the job")
    parser.add_argument("report", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--serve", action="store_true", help="take jobs from standard input")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(run)
        return
    report = run(json.loads(arguments.job.read_text()))
    arguments.report.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
