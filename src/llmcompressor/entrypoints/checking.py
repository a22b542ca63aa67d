# SPDX-License-Identifier: Apache-2.0
"""The last step of a run: what was written is read again, before it gets its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmcompressor.checkpoint.output_layout import Stored
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.verification import TensorInfo, check_serving
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.report import merged

__all__ = ["check_written", "warn_unservable"]

_MOST_SHOWN = 5
_OF_VALUES = {"S27", "S72"}
"""Rules of servers that are about values: no recipe asks for breaking them."""


def check_written(folder: Path) -> dict[str, Any]:
    """Read a written checkpoint and say what came of it.

    What a server would refuse may be what the recipe asks for: it was said before
    (:func:`warn_unservable`), and stands in the report.  Files that are not what they say they are
    must not be taken for a result.

    Args:
        folder: where its files are.

    Returns:
        What the run's report keeps of it.

    Raises:
        CheckpointError: a file, a tensor or a value is wrong.
    """
    report = verify_files(folder)
    broken = [
        one
        for one in report.findings
        if one.severity is Severity.ERROR and (not one.server or one.rule in _OF_VALUES)
    ]
    if broken:
        raise CheckpointError(
            f"What was written is not good: {_said(broken)}.",
            "It was not given its name. Look at it with `llmcompressor verify`, or leave the check "
            "out with verify=False (--no-verify).",
        )
    counts = ", ".join(f"{count} {name}s" for name, count in report.counts.items())
    logger.info(
        f"Verified {report.tensors} tensors of {report.bytes / 1e6:.1f} MB in "
        f"{report.seconds:.1f} s: {counts}."
    )
    kept = report.as_dict()
    for of_this_run in ("checkpoint", "reference", "seconds"):
        kept.pop(of_this_run, None)
    return kept


def warn_unservable(config: Mapping[str, Any], stored: Iterable[Stored]) -> None:
    """Say before the work what servers would refuse, or run wrong, of its output.

    Args:
        config: the ``config.json`` that will be written.
        stored: the tensors that will be.
    """
    headers = {one.name: TensorInfo(one.dtype, one.shape) for one in stored}
    errors = [one for one in check_serving(config, headers) if one.severity is Severity.ERROR]
    for one in merged(errors):
        logger.warning(
            f"{one.first.server} would not serve this ({one.first.rule}). "
            f"{_said([one.first])}" + (f" ({len(one.modules)} modules)" if one.modules[1:] else "")
        )


def _said(findings: list[Finding]) -> str:
    shown = [f"{one.module}: {one.message} {one.remedy}".strip() for one in findings[:_MOST_SHOWN]]
    more = len(findings) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
