# SPDX-License-Identifier: Apache-2.0
"""An independent reading of checkpoints: files, structure, values, and the rules of servers.

Nothing here shares code with what writes a checkpoint. What is read is described by its headers
and its ``config.json`` alone; packed weights are decoded by compressed-tensors itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcompressor.verification.check import verify_files
    from llmcompressor.verification.facts import Deployment, Finding, Severity, TensorInfo
    from llmcompressor.verification.report import VerificationReport
    from llmcompressor.verification.rules import check_serving

__all__ = [
    "Deployment",
    "Finding",
    "Severity",
    "TensorInfo",
    "VerificationReport",
    "check_serving",
    "verify_files",
]

_HOMES = {
    "Deployment": "facts",
    "Finding": "facts",
    "Severity": "facts",
    "TensorInfo": "facts",
    "VerificationReport": "report",
    "check_serving": "rules",
    "verify_files": "check",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
