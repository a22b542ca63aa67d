# SPDX-License-Identifier: Apache-2.0
"""A session of its own for each test of this folder."""

from __future__ import annotations

import pytest
from tests.support.trained import nothing_seen, session

__all__ = ["nothing_seen", "session"]


@pytest.fixture(autouse=True)
def _alone(session: object, nothing_seen: None) -> None:
    """Every test has them."""
