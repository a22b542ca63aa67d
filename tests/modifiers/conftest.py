# SPDX-License-Identifier: Apache-2.0
"""Lets the tests of this folder import their shared helper, and hear what is logged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcompressor.logger import logger

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What was logged as a warning."""
    heard: list[str] = []
    sink = logger.add(lambda text: heard.append(str(text)), level="WARNING", format="{message}")
    yield heard
    logger.remove(sink)
