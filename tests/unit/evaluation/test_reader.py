# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor.evaluation import reader

PICO = Path(str(files("llmcompressor") / "data" / "pico-stdlib"))
PROMPT = "import os\nimport "


def test_the_reader_imports_nothing_of_this_package() -> None:
    tree = ast.parse(Path(str(reader.__file__)).read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not [name for name in names if name.startswith("llmcompressor")]


@pytest.mark.slow
def test_a_process_of_its_own_writes_the_likeliest_tokens() -> None:
    request = {"prompt": PROMPT, "tokens": 4, "checkpoints": {"pico": str(PICO)}}
    process = subprocess.run(
        [sys.executable, "-I", str(reader.__file__)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype="auto")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in range(4):
        with torch.no_grad():
            best = model(input_ids=ids).logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, best), 1)
    assert json.loads(process.stdout) == {"pico": tokenizer.decode(ids[0, start:])}
