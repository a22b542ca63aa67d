# SPDX-License-Identifier: Apache-2.0
"""Models and data that the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import small_models as small

from llmcompressor import reset_session
from llmcompressor.logger import logger


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama in bfloat16, without a tokenizer; not to be written to."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    small.llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _no_waiting(no_waiting_for_the_disk: None) -> None:
    """That what is written survives a crash of the machine is not what these tests are about."""


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    """What a test leaves in the default session is gone before the next."""
    reset_session()
    yield
    reset_session()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged, one line each."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).rstrip()), format="{message}")
    yield lines
    logger.remove(sink)
