# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support import tiny_training as tiny

from llmcompressor.core import CompressionSession, create_session


@pytest.fixture
def session() -> Iterator[CompressionSession]:
    with create_session() as fresh:
        yield fresh


@pytest.fixture
def nothing_seen() -> None:
    tiny.Recorder.seen.clear()
    tiny.Recorder.begun.clear()
