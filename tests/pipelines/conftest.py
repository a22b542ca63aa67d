# SPDX-License-Identifier: Apache-2.0
"""Lets the tests of this folder import their shared helpers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from llmcompressor import reset_session


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    """What a test leaves in the default session is gone before the next."""
    reset_session()
    yield
    reset_session()
