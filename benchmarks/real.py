# SPDX-License-Identifier: Apache-2.0
"""Quality, peak memory and time of GPTQ on a real model, beside the reference.

benchmarks/real.py [--bits 4 3] [--tools reference this "this, from a folder"] [--seeds 0]

The model and the text are those of ``smollm2.py``, 64 x 512 calibration tokens that a seed chooses.
Each tool runs with its own defaults, in a process of its own; transformers alone measures what
was written. Figures are kept as they come (``results/real.json``): a run that was broken off goes
on, and ``--again`` measures anew. ``--seconds`` keeps times too: give it where nothing else runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from jobs import HERE, Job, compress, evaluate, reference_python, scratch
from smollm2 import HELD_OUT, LENGTH, SAMPLES, calibration_files, held_out_file, model_path
from tables import machine, table

STORE = HERE / "results" / "real.json"
GROUP = 64  # 128 does not divide the 576 columns
MOST_LOST, MOST_MEMORY = 0.6, 1.0
REFERENCE, THIS, FOLDER = "reference", "this", "this, from a folder"


@dataclass(frozen=True)
class Bench:
    """The model and the texts.

    Attributes:
        model: Folder of the dense checkpoint.
        held_out: Token file to measure on.
        calibration: Seed → token file.
        reference: Interpreter of the reference.
        keeps_seconds: Whether times are kept.
    """

    model: Path
    held_out: Path
    calibration: dict[int, Path]
    reference: Path
    keeps_seconds: bool

    def measure(self, bits: int, tool: str, seed: int) -> dict:
        """Compress with one tool, and measure what was written."""
        with scratch() as folder:
            output = folder / "compressed"
            job = Job(
                str(self.model),
                recipe(bits),
                str(self.calibration[seed]),
                str(output),
                as_object=tool != FOLDER,
                wide=tool == REFERENCE and not self.keeps_seconds,  # this tool does it itself
            )
            report = compress(self.reference if tool == REFERENCE else sys.executable, job)
            size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
            found = evaluate(str(output), self.held_out)
        found |= {"peak_mib": report["after_oneshot"]["peak"], "bytes": size}
        found["versions"] = report["versions"]
        return found | ({"seconds": report["oneshot_seconds"]} if self.keeps_seconds else {})


def recipe(bits: int) -> dict[str, dict]:
    """GPTQ of all Linears but the head, with the defaults of whoever runs it."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": {**weights, "group_size": GROUP}}
    return {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": {"group_0": group}}}


def perplexities(run: dict) -> tuple[float, float, float]:
    """Of all windows, of source and of English: the halves of the held-out file."""
    losses = run["windows"]
    half = len(losses) // 2
    parts = (losses, losses[:half], losses[half:])
    return tuple(math.exp(statistics.mean(part)) for part in parts)


def mean(runs: list[dict], dense: dict) -> dict:
    """Means over the seeds: perplexities lost, memory, bytes and seconds where all have them."""
    base = perplexities(dense)
    by_seed = [[p - b for p, b in zip(perplexities(run), base, strict=True)] for run in runs]
    lost, source, english = (statistics.mean(part) for part in zip(*by_seed, strict=True))
    found = {"lost": lost, "source": source, "english": english, "seeds": len(runs)}
    found |= {key: statistics.mean(run[key] for run in runs) for key in ("peak_mib", "bytes")}
    seconds = [run["seconds"] for run in runs if "seconds" in run]
    return found | {"seconds": min(seconds) if len(seconds) == len(runs) else None}


def render(results: dict) -> str:
    """The markdown page."""
    means = {
        tuple(key.split("/")): mean(list(by_seed.values()), results["dense"])
        for key, by_seed in sorted(results["found"].items(), reverse=True)
    }
    rows = [
        [
            *key,
            one["seeds"],
            *(f"{one[part]:.3f}" for part in ("lost", "source", "english")),
            f"{one['bytes'] / 1e6:.1f}",
            f"{one['peak_mib']:.0f}",
            f"{one['seconds']:.0f}" if one["seconds"] else "",
        ]
        for key, one in means.items()
    ]
    header = ["GPTQ of", "tool", "seeds", "lost", "in source", "in English", "MB", "peak MiB", "s"]
    all_, source, english = (f"{value:.3f}" for value in perplexities(results["dense"]))
    return "\n\n".join(
        [
            "# A real model",
            f"{results['machine']}.",
            f"SmolLM2-135M-Instruct, dequantized from Q4_1 by `benchmarks/smollm2.py`; all Linears "
            f"but the head, symmetric integers in groups of {GROUP}. {SAMPLES} x {LENGTH} "
            f"calibration tokens, {HELD_OUT} x {LENGTH} held out, half of both source of the "
            "standard library and half the Python reference in English. Lost: perplexity above "
            f"the dense model's, which is {all_} ({source} in source, {english} in English), mean "
            "of the seeds. The model is given as an object but where a folder is named. Peak: "
            "resident memory of the process, mapped files included. Seconds: of `oneshot`, only "
            f"where nothing else ran. {versions(results)}. Written by `benchmarks/real.py`.",
            table(header, rows),
            "## Targets",
            table(["", "found", "at most", "holds"], targets(means)),
            "",
        ]
    )


def versions(results: dict) -> str:
    """What the tools ran with."""
    found = {}
    for key, by_seed in results["found"].items():
        tool = REFERENCE if key.endswith(REFERENCE) else THIS
        found[tool] = list(by_seed.values())[-1]["versions"]
    texts = {
        tool: ", ".join(f"{name} {version}" for name, version in sorted(one.items()))
        for tool, one in sorted(found.items())
    }
    return "; ".join(f"{tool}: {text}" for tool, text in texts.items())


def targets(means: dict[tuple[str, ...], dict]) -> list[list[str]]:
    """What was promised, and whether it holds."""
    lines = []
    for bits, tool in means:
        reference = means.get((bits, REFERENCE))
        if tool == THIS and reference:
            for name, most in (("lost", MOST_LOST), ("peak_mib", MOST_MEMORY)):
                share = means[bits, tool][name] / reference[name]
                holds = "yes" if round(share, 2) <= most else "NO"  # what is shown decides
                what = f"{bits}: {name} / the reference's"
                lines.append([what, f"{share:.2f}", f"{most}", holds])
    return lines


def main() -> None:
    """Measure what is asked for and not known yet, and write the page."""
    tools = [REFERENCE, THIS, FOLDER]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--tools", nargs="+", choices=tools, default=tools, metavar="TOOL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", action="store_true", help="nothing else runs: keep times too")
    parser.add_argument("--again", action="store_true", help="measure what is there as well")
    parser.add_argument("--reference-python", help="interpreter with the reference installed")
    given = parser.parse_args()
    results = json.loads(STORE.read_text()) if STORE.exists() else {"found": {}}
    reference = reference_python(given.reference_python)
    texts = (held_out_file(), calibration_files(given.seeds))
    bench = Bench(model_path(), *texts, reference, given.seconds)
    results["machine"] = machine()
    if "dense" not in results:
        results["dense"] = evaluate(str(bench.model), bench.held_out)
    for seed, bits, tool in itertools.product(given.seeds, given.bits, given.tools):
        entry = results["found"].setdefault(f"{bits} bits/{tool}", {})
        if given.again or str(seed) not in entry:
            entry[str(seed)] = found = bench.measure(bits, tool, seed)
            STORE.write_text(json.dumps(results, indent=1) + "\n")
            line = f"perplexity {found['perplexity']:.3f}, peak {found['peak_mib']:.0f} MiB"
            print(f"{bits} bits, {tool}, seed {seed}: {line}", flush=True)
    STORE.with_suffix(".md").write_text(render(results))
    print(render(results))


if __name__ == "__main__":
    main()
