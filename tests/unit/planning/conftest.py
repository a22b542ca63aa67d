# SPDX-License-Identifier: Apache-2.0
"""Models that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import published_models as published


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights; not to be written to."""
    config = published.small(published.LLAMA_3_8B)
    return published.write_weights(tmp_path_factory.mktemp("source") / "llama", config)
