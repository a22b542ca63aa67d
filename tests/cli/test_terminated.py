# SPDX-License-Identifier: Apache-2.0
"""A process that is told to end: at a consistent point, with the command that continues it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.cli import main

LAYERS = 10
GPTQ = "modifiers: {GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
PATIENCE = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "llama"
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    rows = [json.dumps({"input_ids": list(range(start, start + 32))}) for start in range(32)]
    (folder.parent / "rows.jsonl").write_text("\n".join(rows))
    return folder


def command(model: Path, kind: str, output: Path) -> list[str]:
    if kind == "model-free-ptq":
        given = [str(model), "--scheme", "W4A16", "--ignore", "lm_head"]
    else:
        data = str(model.parent / "rows.jsonl")
        given = [str(model), "--recipe", GPTQ, "--dataset", data]
    return [kind, *given, "--output", str(output)]


def finished_blocks(output: Path) -> int:
    journal = output.with_name(f"{output.name}.partial") / "journal"
    return journal.read_bytes().count(b'["block",') if journal.exists() else 0


@pytest.mark.parametrize("kind", ["oneshot", "model-free-ptq"])
def test_sigterm_ends_at_a_consistent_point(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out put"
    arguments = command(model, kind, output)
    process = [sys.executable, "-m", "llmcompressor", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(process, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stderr is not None
        until = time.monotonic() + PATIENCE
        while finished_blocks(output) < 1 and time.monotonic() < until:
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.005)
        running.send_signal(signal.SIGTERM)
        told = time.monotonic()
        _, said = running.communicate(timeout=PATIENCE)
    assert running.returncode == 143, said
    assert time.monotonic() - told < 30  # seconds of a machine that others use too
    assert (
        said.splitlines()[-1]
        == f"Terminated. Continue with: {shlex.join(['llmcompressor', *arguments])}"
    )
    assert "Traceback" not in said
    assert 1 <= finished_blocks(output) < LAYERS
    assert not output.exists()

    if kind != "oneshot":
        return  # that the same call continues is the same there
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert output.is_dir()
    assert not output.with_name(f"{output.name}.partial").exists()
    assert "ontinu" in capsys.readouterr().err
