# SPDX-License-Identifier: Apache-2.0
"""Models and data that the tests of this folder share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "pipelines"))

import small_models as small


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in bfloat16, without a tokenizer; not to be written to."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    small.llama().save_pretrained(folder)
    return folder
