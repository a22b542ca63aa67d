# SPDX-License-Identifier: Apache-2.0
"""Planned and measured peak memory of a device that is only pretended (``tests/device``).

Needs a C++ compiler::

    python benchmarks/plan_device.py --hidden 512 --length 256
    python benchmarks/plan_device.py --hidden 128 --length 256 --samples 64 --limit 16
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.device.pretended import compile_device  # noqa: E402  # found by the line above
from tests.device.recipes import RECIPES  # noqa: E402

LLAMA = [name for name, recipe in RECIPES.items() if recipe.kind == "llama"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=LLAMA, default=LLAMA)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--length", type=int, default=256, help="of each sample")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--limit", type=int, help="MiB of the device that may be used")
    args = parser.parse_args()
    print("| recipe | planned MiB | measured MiB | ratio |\n|---|---|---|---|")
    with TemporaryDirectory() as folder:
        library = compile_device(Path(folder))
        for name in args.recipes:
            asked = {"names": [name], "hidden": args.hidden, "length": args.length}
            asked |= {"samples": args.samples, "limit": args.limit}
            command = [sys.executable, "-m", "tests.device.runs", str(library), folder, "planned"]
            done = subprocess.run(
                [*command, json.dumps(asked)], cwd=ROOT, capture_output=True, text=True, check=True
            )
            planned, measured = json.loads(done.stdout.splitlines()[-1])[name]
            print(
                f"| {name} | {planned:.1f} | {measured:.1f} | {planned / measured:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
