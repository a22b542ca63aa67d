# SPDX-License-Identifier: Apache-2.0
"""The last step of a run: what was written is read again, before it gets its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.report import merged

__all__ = ["check_written"]

_MOST_SHOWN = 5


def check_written(folder: Path) -> dict[str, Any]:
    """Read a written checkpoint and say what came of it.

    What a server would refuse may be what the recipe asks for: it is logged, and stands in the
    report.  Files that are not what they say they are must not be taken for a result.

    Args:
        folder: where its files are.

    Returns:
        What the run's report keeps of it.

    Raises:
        CheckpointError: a file, a tensor or a value is wrong.
    """
    report = verify_files(folder)
    broken = [one for one in report.findings if one.severity is Severity.ERROR and not one.server]
    if broken:
        raise CheckpointError(
            f"What was written is not good: {_said(broken)}.",
            "It was not given its name. Look at it with `llmcompressor verify`, or leave the check "
            "out with verify=False (--no-verify).",
        )
    for one in merged(report.findings):
        if one.first.severity is Severity.ERROR:
            logger.warning(f"{one.first.server} ({one.first.rule}): {_said([one.first])}")
    counts = ", ".join(f"{count} {name}s" for name, count in report.counts.items())
    logger.info(
        f"Verified {report.tensors} tensors of {report.bytes / 1e6:.1f} MB in "
        f"{report.seconds:.1f} s: {counts}."
    )
    kept = report.as_dict()
    for of_this_run in ("checkpoint", "reference", "seconds"):
        kept.pop(of_this_run, None)
    return kept


def _said(findings: list[Finding]) -> str:
    shown = [f"{one.module}: {one.message} {one.remedy}".strip() for one in findings[:_MOST_SHOWN]]
    more = len(findings) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
