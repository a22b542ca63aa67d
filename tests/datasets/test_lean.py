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


def test_local_data_needs_no_datasets_library_and_writes_nothing(tmp_path):
    home, data = tmp_path / "home", tmp_path / "data.jsonl"
    home.mkdir()
    data.write_text('{"input_ids": [1, 2, 3]}\n')
    done = run(
        "import sys\n"
        "from llmcompressor.args import DatasetArguments\n"
        "from llmcompressor.datasets import load_calibration\n"
        f"list(load_calibration(DatasetArguments(dataset_path={str(data)!r}), vocab_size=4))\n"
        "assert 'datasets' not in sys.modules and 'transformers' not in sys.modules",
        HOME=str(home),
        HF_HOME=str(home / "hf"),
    )
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []
