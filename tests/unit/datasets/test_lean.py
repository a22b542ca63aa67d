# SPDX-License-Identifier: Apache-2.0
"""What importing and using this package loads, and where it writes."""

from __future__ import annotations

import os
import subprocess
import sys

from llmcompressor import datasets as package


def test_every_exported_name_is_there():
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_loads_neither_torch_nor_the_datasets_library():
    done = run(
        "import sys, llmcompressor.datasets\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_reading_local_files_leaves_nothing_on_the_disk(tmp_path):
    places = {name: tmp_path / name for name in ("home", "tmp", "data")}
    for place in places.values():
        place.mkdir()
    (places["data"] / "train.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    done = run(
        "import socket\n"
        "from llmcompressor.args import DatasetArguments\n"
        "from llmcompressor.datasets import load_calibration\n"
        "def refuse(*given):\n"
        "    raise AssertionError(given)\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        f"args = DatasetArguments(dataset_path={str(places['data'])!r})\n"
        "(batch,) = load_calibration(args, vocab_size=4)\n"
        "assert batch['input_ids'].tolist() == [[1, 2, 3]]",
        HOME=str(places["home"]),
        HF_HOME=str(places["home"] / "hf"),
        HF_HUB_OFFLINE="0",
        TMPDIR=str(places["tmp"]),
    )
    assert done.returncode == 0, done.stderr
    assert {file.name for file in tmp_path.rglob("*")} == {*places, "train.jsonl"}
