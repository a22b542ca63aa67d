# SPDX-License-Identifier: Apache-2.0
"""Models that the tests of this folder share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from llmcompressor import reset_session


@pytest.fixture(scope="session", autouse=True)
def _no_waiting(no_waiting_for_the_disk: None) -> None:
    """That what is written survives a crash of the machine is not what these tests are about."""


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    """What a test leaves in the default session is gone before the next."""
    reset_session()
    yield
    reset_session()
