# SPDX-License-Identifier: Apache-2.0
"""Report of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.verification.closeness import WeightError
from llmcompressor.verification.facts import Finding, Severity

_ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)
_MOST_ROWS = 8


@dataclass(frozen=True)
class Merged:
    """Findings that say the same of several modules.

    Attributes:
        first: the first of them.
        modules: the modules.
    """

    first: Finding
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A line for a person.

    Attributes:
        severity: ``error``, ``warning`` or ``note``.
        rule: the rule's number.
        where: the first module and how many more.
        text: what is wrong and what to do.
    """

    severity: str
    rule: str
    where: str
    text: str


def merged(findings: Iterable[Finding], *, by_rule: bool = False) -> list[Merged]:
    """Findings with equal words, or of one server's rule, one entry each; errors first."""
    groups: dict[Hashable, list[Finding]] = {}
    for one in findings:
        same = (one.server,) if by_rule else (one.message,)
        groups.setdefault((one.severity, one.rule, *same), []).append(one)
    entries = [
        Merged(same[0], tuple(dict.fromkeys(each.module for each in same)))
        for same in groups.values()
    ]
    return sorted(entries, key=lambda entry: _ORDER.index(entry.first.severity))


def _where(modules: tuple[str, ...]) -> str:
    first, more = modules[0] or "the model", len(modules) - 1
    return f"{first} and {more} more" if more else first


@dataclass(frozen=True)
class VerificationReport:
    """Report of what was found in a checkpoint.

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
        has_manifest: all bytes were compared with those that the run wrote, by its manifest.
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
    has_manifest: bool = False

    @property
    def ok(self) -> bool:
        """True if there is no error."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings of each severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity.value: found[severity] for severity in _ORDER}

    def figures(self) -> list[str]:
        """The report in a few lines, without its findings."""
        counts = self.counts
        lines = [
            f"{self.checkpoint}: {'good' if self.ok else 'NOT good'}",
            f"{self.quantized} of {self.modules} matrices quantized, {self.tensors} tensors, "
            f"{self.bytes / 1e6:.1f} MB in {self.seconds:.1f} s",
            ", ".join(
                f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items()
            ),
        ]
        if self.has_manifest and not any(one.rule.startswith("M") for one in self.findings):
            lines.append("every tensor and file is as it was written, by manifest.json")
        if self.errors:
            worst = max(self.errors, key=lambda each: each.relative)
            mean = sum(each.relative for each in self.errors) / len(self.errors)
            lines.append(
                f"relative error of weights: {mean:.4f} on average, "
                f"{worst.relative:.4f} at most ({worst.module})"
            )
        return lines

    def rows(self, most: int = _MOST_ROWS) -> list[Row]:
        """A row for findings with equal words, errors first; ``most`` per rule, then one more."""
        rows = []
        by_rule: dict[tuple[Severity, str], list[Merged]] = {}
        for entry in merged(self.findings):
            by_rule.setdefault((entry.first.severity, entry.first.rule), []).append(entry)
        for (severity, rule), entries in by_rule.items():
            for entry in entries[:most]:
                text = f"{entry.first.message} {entry.first.remedy}".strip()
                rows.append(Row(severity.value, rule, _where(entry.modules), text))
            if left := entries[most:]:
                text = f"{len(left)} more of this kind; as JSON the report holds all."
                rows.append(Row(severity.value, rule, _where(left[0].modules), text))
        return rows

    def __str__(self) -> str:
        rows = (f"{row.severity} {row.rule} {row.where}: {row.text}" for row in self.rows())
        return "\n".join([*self.figures(), *rows])

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
            "has_manifest": self.has_manifest,
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
