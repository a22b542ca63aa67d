# SPDX-License-Identifier: Apache-2.0
"""A process that is told to end: at a consistent point, with the command that continues it."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.support.thinned import few
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


def _child(arguments: list[str], stderr: Path) -> None:
    """The command in a process of its own."""
    torch.set_num_threads(1)
    sys.argv = ["llmcompressor", *arguments]
    with stderr.open("w", buffering=1) as sys.stderr:
        main()


@pytest.mark.parametrize("kind", few(["oneshot", "model-free-ptq"], "oneshot"))
def test_sigterm_ends_at_a_consistent_point(kind: str, model: Path, tmp_path: Path) -> None:
    output, stderr = tmp_path / "out put", tmp_path / "stderr"
    arguments = command(model, kind, output)
    context = multiprocessing.get_context("forkserver")
    running = context.Process(target=_child, args=(arguments, stderr))
    running.start()
    until = time.monotonic() + PATIENCE
    while finished_blocks(output) < 1 and time.monotonic() < until:
        assert running.is_alive(), stderr.read_text()
        time.sleep(0.005)
    assert running.pid is not None
    os.kill(running.pid, signal.SIGTERM)
    told = time.monotonic()
    running.join(PATIENCE)
    said = stderr.read_text()
    assert running.exitcode == 143, said
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
    again = context.Process(target=_child, args=(arguments, stderr))
    again.start()
    again.join(PATIENCE)
    assert again.exitcode == 0, stderr.read_text()
    assert output.is_dir()
    assert not output.with_name(f"{output.name}.partial").exists()
    assert "ontinu" in stderr.read_text()
