# SPDX-License-Identifier: Apache-2.0
"""A session of its own for those tests of this folder that ask for one."""

from __future__ import annotations

from tests.support.trained import nothing_seen, session

__all__ = ["nothing_seen", "session"]
