# SPDX-License-Identifier: Apache-2.0
"""How much quality the embedded model loses to weight quantization, by method.

Held-out loss above the dense model's, in nats per token, for round-to-nearest and GPTQ at 4 bits
in groups of 128 and 3 bits in groups of 64.  Calibrated on 128 windows of 256 tokens; a seed
chooses which.  Each checkpoint is saved, and measured by transformers in another process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from jobs import HERE, compress_and_evaluate, evaluate, reference_python
from models import PICO
from tables import machine, table
from text import calibration_files, held_out_file

SAMPLES = 128
FORMATS = {"4 bits, group 128": (4, 128), "3 bits, group 64": (3, 64)}
# Name -> (modifier, fields beyond the scheme, whether the reference runs it).
METHODS = {
    "round-to-nearest": ("QuantizationModifier", {}, False),
    "GPTQ, one forward": ("GPTQModifier", {"asymmetric": False}, False),
    "GPTQ, as it comes": ("GPTQModifier", {}, False),
    "reference, round-to-nearest": ("QuantizationModifier", {}, True),
    "reference, GPTQ": ("GPTQModifier", {}, True),
}
# What the mean of a method must not exceed, in the order of FORMATS.
LIMITS = {"GPTQ, as it comes": (0.017, 0.062)}
# What a method must not be worse than, on the same calibration windows.
RIVALS = {"GPTQ, one forward": "reference, GPTQ"}


def recipe(method: str, bits: int, group: int) -> tuple[str, dict]:
    """Class name of the modifier and its fields."""
    modifier, fields, _ = METHODS[method]
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return modifier, {"config_groups": groups, "ignore": ["lm_head"], **fields}


def measure(methods: list[str], seeds: list[int], reference: str | None) -> dict:
    """``{method: {format: [loss above the dense model's, by seed]}}`` and the dense loss."""
    held_out = held_out_file()
    calibration = calibration_files(seeds, SAMPLES)
    dense = evaluate(str(PICO), held_out)["loss"]
    print(f"dense: {dense:.4f}", flush=True)
    results: dict = {"dense": dense, "seeds": seeds, "above": {}}
    for method in methods:
        modifier, _, by_reference = METHODS[method]
        python = reference_python(reference) if by_reference else sys.executable
        for name, (bits, group) in FORMATS.items():
            losses = []
            for seed in seeds if modifier == "GPTQModifier" else seeds[:1]:
                tokens = calibration[seed] if modifier == "GPTQModifier" else None
                job = recipe(method, bits, group)
                run = compress_and_evaluate(python, str(PICO), job, tokens, held_out)
                losses.append(run["quality"]["loss"] - dense)
                print(f"{method}, {name}, seed {seed}: {losses[-1]:.4f}", flush=True)
            results["above"].setdefault(method, {})[name] = losses
    return results


def render(results: dict) -> str:
    """The markdown page."""
    rows = [
        [method, *(_cell(losses[name]) for name in FORMATS), _limits(method, results["above"])]
        for method, losses in results["above"].items()
    ]
    return "\n\n".join(
        [
            "# Quality on the embedded model",
            f"{machine()}.",
            f"Held-out loss above the dense model's {results['dense']:.4f} (nats per token): mean "
            f"of {len(results['seeds'])} seeds, in brackets the lowest and the highest. "
            f"{SAMPLES} x 256 calibration tokens. Written by `benchmarks/quality.py`.",
            table(["", *FORMATS, "at most"], rows) + "\n",
        ]
    )


def _limits(method: str, above: dict) -> str:
    """What the method must not exceed: fixed figures, or those of a rival that was measured."""
    rival = above.get(RIVALS.get(method))
    limits = [statistics.mean(rival[name]) for name in FORMATS] if rival else LIMITS.get(method)
    return " / ".join(f"{limit:.4f}" for limit in limits) if limits else ""


def _cell(losses: list[float]) -> str:
    mean = f"{statistics.mean(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean} ({min(losses):.4f} to {max(losses):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--reference", action="store_true", help="run the reference too")
    parser.add_argument("--reference-python", help="interpreter with the reference installed")
    parser.add_argument("--name", default="quality", help="stem of the files in results/")
    given = parser.parse_args()
    own = [method for method, (_, _, reference) in METHODS.items() if not reference]
    methods = given.methods or (list(METHODS) if given.reference else own)
    results = measure(methods, given.seeds, given.reference_python)
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{given.name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / f"{given.name}.md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
