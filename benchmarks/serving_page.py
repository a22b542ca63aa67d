# SPDX-License-Identifier: Apache-2.0
"""Tables of what servers made of checkpoints, from the rows that ``serving.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "benchmarks" / "results" / "serving.jsonl"


def latest() -> list[dict[str, Any]]:
    """The rows, of each checkpoint and engine the last one."""
    if not ROWS.exists():
        return []
    rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    return list({(one["model"], one["case"], one["engine"]): one for one in rows}.values())


def write_pages() -> None:
    """Nothing yet."""
