# SPDX-License-Identifier: Apache-2.0
"""The end of a run on the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from loguru import logger

from llmcompressor import model_free_ptq
from llmcompressor.reporting.summary import summary_lines, tell_summary
from llmcompressor.runtime.progress import format_bytes

_SCRIPT = """
import logging, sys, warnings
from llmcompressor.cli import main
from llmcompressor.runtime import run_record

def told(name, phase=run_record.phase):  # a library that a phase calls has a lot to say
    logging.getLogger("transformers.modeling").warning("deprecated")
    logging.getLogger("of_someone").warning("deprecated")
    warnings.warn("deprecated", FutureWarning)
    return phase(name)

import llmcompressor.checkpoint.save as save
save.phase = told
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def written(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a page."""
    return model_free_ptq(pico, tmp_path_factory.mktemp("made") / "my model", "W4A16", ["lm_head"])


@pytest.mark.parametrize("verbose", [False, True])
def test_a_command_tells_what_it_wrote_and_nothing_else(
    verbose: bool, pico: Path, tmp_path: Path
) -> None:
    typed = ["model-free-ptq", str(pico), "--scheme", "W4A16", "--ignore", "lm_head", "-o", "small"]
    environment = {**os.environ, "LLM_COMPRESSOR_REPORT": "1", "PYTHONWARNINGS": "default"}
    said = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *typed, *(["-v"] if verbose else [])],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("Written: ")
    assert ("deprecated" in said.stderr) is verbose
    lines = said.stderr.splitlines()
    assert (lines[0] == "small") is not verbose
    lines = lines[lines.index("small") :]
    assert all(one.startswith("  ") for one in lines[1:])
    assert lines[-2].split() == ["report", "small/report.html"]
    assert lines[-1].split(maxsplit=1) == ["next", "vllm serve small"]
    assert any(one.split() == ["of", "the", "original", "36.4", "%"] for one in lines)


def test_what_vllm_refuses_is_not_served_next(written: Path) -> None:
    plain = summary_lines(written)
    size = sum(one.stat().st_size for one in written.glob("*.safetensors"))
    assert plain[1].split(maxsplit=1) == ["size", format_bytes(size)]
    assert plain[0] == str(written)
    assert plain[-1].endswith(f"vllm serve '{written}'")
    file = written / "compression_report.json"
    report = json.loads(file.read_text())
    finding = {"severity": "error", "rule": "S1", "server": "vllm", "message": "no"}
    report["verification"]["findings"].append(finding)
    file.write_text(json.dumps(report))
    assert "vllm serve" not in "\n".join(summary_lines(written))


def test_a_summary_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    found: list[str] = []
    sink = logger.add(lambda text: found.append(str(text)), level="ERROR", format="{message}")
    tell_summary(tmp_path)
    logger.remove(sink)
    assert str(tmp_path) in found[0]
