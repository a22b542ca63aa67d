# SPDX-License-Identifier: Apache-2.0
"""Models that the tests of this folder share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
