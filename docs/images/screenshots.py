# SPDX-License-Identifier: Apache-2.0
"""Take the screenshots of a report and of a comparison, on the embedded model.

    python docs/images/screenshots.py  # needs chromium

Writes ``report.png`` and ``comparison.png`` beside this file.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from llmcompressor import compare, evaluate, model_free_ptq, oneshot

HERE = Path(__file__).parent
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
SIZE = "1280,1500"


def take(page: Path, name: str) -> None:
    """Write what a browser shows of a page first."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("There is neither chromium nor google-chrome. Install one of them.")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser, *FLAGS, profile, f"--window-size={SIZE}", f"--screenshot={HERE / name}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Compress the embedded model in two ways, and show one and both."""
    original = Path(str(files("llmcompressor") / "data" / "pico-stdlib"))
    recipe = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
    with TemporaryDirectory() as folder:
        gptq, fp8 = Path(folder) / "pico-W4A16", Path(folder) / "pico-FP8"
        oneshot(
            model=original,
            recipe=recipe,
            dataset="default",
            num_calibration_samples=64,
            max_seq_length=256,
            output_dir=gptq,
        )
        model_free_ptq(original, fp8, "FP8_DYNAMIC", ["lm_head"])
        evaluate(gptq, reference=original, num_samples=32)
        take(gptq / "report.html", "report.png")
        both = Path(folder) / "comparison.html"
        compare(gptq, fp8, reference=original, output=both)
        take(both, "comparison.png")


if __name__ == "__main__":
    main()
