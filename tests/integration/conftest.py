# SPDX-License-Identifier: Apache-2.0
"""Models and data that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import small_models as small
from tests.support.short_pico import write_short_pico


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in bfloat16, without a tokenizer; not to be written to."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    small.llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def one_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one block: for what is about runs, not what goes from one block to the next."""
    folder = tmp_path_factory.mktemp("source") / "one-block"
    small.one_block().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def short_pico(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first block of the embedded model, in float32, with its tokenizer."""
    return write_short_pico(pico, tmp_path_factory.mktemp("source") / "short-pico")
