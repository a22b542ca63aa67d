# SPDX-License-Identifier: Apache-2.0
"""How long it takes until the command answers, beside the interpreter and the libraries alone.

benchmarks/startup.py [--repeat 5] [--output benchmarks/results/startup.md]

Each is a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from jobs import variables_for
from tables import publish, table

_COMMAND = "import sys; from llmcompressor.cli import main; main(sys.argv[1:])"
_ASKED = {
    "python, nothing else": ["pass"],
    "llmcompressor --help": [_COMMAND, "--help"],
    "llmcompressor oneshot --help": [_COMMAND, "oneshot", "--help"],
    "llmcompressor plan --help": [_COMMAND, "plan", "--help"],
    "import llmcompressor": ["import llmcompressor"],
    "import torch": ["import torch"],
    "import transformers' classes": ["from transformers import LlamaForCausalLM"],
    "import compressed_tensors": ["import compressed_tensors"],
    "import llmcompressor's oneshot": [
        "import llmcompressor.entrypoints.run, llmcompressor.entrypoints.oneshot"
    ],
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-c", *arguments]
    variables = variables_for(sys.executable)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=variables)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for name, arguments in _ASKED.items():
        best = min(seconds(arguments) for _ in range(given.repeat))
        rows.append([name, f"{best:.2f}"])
        print(*rows[-1], flush=True)
    body = (
        f"Seconds of a whole process, the best of {given.repeat}. "
        f"Written by `benchmarks/startup.py`.\n\n{table(['what', 's'], rows)}"
    )
    publish("Until it answers", body, given.output)


if __name__ == "__main__":
    main()
