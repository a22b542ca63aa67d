# SPDX-License-Identifier: Apache-2.0
"""What came of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.reference import WeightError

__all__ = ["Merged", "VerificationReport", "merged"]

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


@dataclass(frozen=True)
class Merged:
    """Findings that say the same of several modules.

    Attributes:
        first: the first of them.
        modules: the modules.
    """

    first: Finding
    modules: tuple[str, ...]

    @property
    def where(self) -> str:
        """The first module and how many more."""
        more = len(self.modules) - 1
        return f"{self.modules[0]} and {more} more" if more else self.modules[0]


def merged(findings: Iterable[Finding]) -> list[Merged]:
    """Findings with equal words, one line each; errors first."""
    groups: dict[tuple[str, str, Severity], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.message, finding.severity), []).append(finding)
    lines = [
        Merged(same[0], tuple(dict.fromkeys(each.module for each in same)))
        for same in groups.values()
    ]
    return sorted(lines, key=lambda line: _ORDER.index(line.first.severity))


@dataclass(frozen=True)
class VerificationReport:
    """What was found in a checkpoint.

    Attributes:
        checkpoint: its folder.
        reference: the folder of the original, if there was one.
        findings: all findings, in the order of the checks.
        tensors: how many tensors the checkpoint has.
        modules: how many matrices.
        quantized: how many of them are quantized.
        bytes: bytes of its weight files.
        seconds: how long it took.
        work: what the recipe beside the weights says was done to them.
        errors: per quantized module the distance from the original.
    """

    checkpoint: str
    reference: str | None
    findings: tuple[Finding, ...]
    tensors: int
    modules: int
    quantized: int
    bytes: int
    seconds: float
    work: str = ""
    errors: tuple[WeightError, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """How many findings of each severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity.value: found[severity] for severity in _ORDER}

    def summary(self) -> str:
        """A few lines of text."""
        counts = self.counts
        lines = [
            f"{self.checkpoint}: {'good' if self.ok else 'NOT good'}",
            f"{self.quantized} of {self.modules} matrices quantized, {self.tensors} tensors, "
            f"{self.bytes / 1e6:.1f} MB in {self.seconds:.1f} s",
            f"{counts['error']} errors, {counts['warning']} warnings, {counts['note']} notes",
        ]
        if self.errors:
            worst = max(self.errors, key=lambda each: each.relative)
            mean = sum(each.relative for each in self.errors) / len(self.errors)
            lines.append(
                f"relative error of weights: {mean:.4f} on average, "
                f"{worst.relative:.4f} at most ({worst.module})"
            )
        for line in merged(self.findings):
            first = line.first
            lines.append(
                f"{first.severity.value} {first.rule} {line.where}: {first.message} {first.remedy}"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data; findings with equal words are one entry."""
        return {
            "checkpoint": self.checkpoint,
            "reference": self.reference,
            "ok": self.ok,
            "counts": self.counts,
            "tensors": self.tensors,
            "modules": self.modules,
            "quantized": self.quantized,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "work": self.work,
            "findings": [
                {**line.first.as_dict(), "modules": list(line.modules)}
                for line in merged(self.findings)
            ],
            "weight_errors": [
                {
                    "module": each.module,
                    "relative": round(each.relative, 6),
                    "cosine": round(each.cosine, 6),
                }
                for each in self.errors
            ],
        }
