# SPDX-License-Identifier: Apache-2.0
"""Models that the tests of this folder share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import published_models as published

from llmcompressor import reset_session


@pytest.fixture(scope="session")
def pico() -> Iterator[Path]:
    """The embedded model: four layers, tied embeddings, with its tokenizer."""
    with as_file(files("llmcompressor") / "data" / "pico-stdlib") as folder:
        yield folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights; not to be written to."""
    config = published.small(published.LLAMA_3_8B)
    return published.write_weights(tmp_path_factory.mktemp("source") / "llama", config)


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """That what is written survives a crash of the machine is not what these tests are about."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        patched.setattr(os, "fdatasync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    reset_session()
    yield
    reset_session()
