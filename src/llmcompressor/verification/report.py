# SPDX-License-Identifier: Apache-2.0
"""Report of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
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
class Divergence:
    """Distance of a model's distributions of the next token from those of another.

    Attributes:
        tokens: how many tokens were predicted.
        agreement: share of them where both find the same token likeliest.
        kl: mean KL divergence from the other, in nats.
        mean: mean difference of the log-probability of the other's likeliest token.
        largest: the largest of these differences.
    """

    tokens: int = 0
    agreement: float = 0.0
    kl: float = 0.0
    mean: float = 0.0
    largest: float = 0.0

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.4f}, same token {self.agreement:.1%}, log-probabilities {self.mean:.4f} "
            f"apart on average and {self.largest:.4f} at most ({self.tokens} tokens)"
        )


@dataclass(frozen=True)
class EngineRun:
    """What an engine made of a checkpoint.

    Attributes:
        engine: its name.
        status: ``run``; ``run, not compared`` where there is nothing to compare it with;
            ``loaded, not run`` where the platform lacks a kernel and only what was loaded was
            compared; ``not run`` where it could not be loaded either; ``refused``; ``failed``,
            which is after it was loaded.
        versions: of the engine and of what it computes with.
        blocks: how many of the first blocks were taken; ``None`` for all.
        alike: ``original`` or ``decoded`` where that model is refused, or fails, in the same way.
        overruled: rules of this server that it has shown to be otherwise.
        modules: how many modules were compared by themselves.
        worst: the module that is furthest from the product with its decoded weight.
        error: its relative difference.
        decoded: from the decoded model, in the same engine.
        original: from the original model, in the same engine.
        decoded_original: of the decoded model from the original.
    """

    engine: str
    status: str
    versions: Mapping[str, str] = field(default_factory=dict)
    blocks: int | None = None
    alike: str = ""
    overruled: tuple[str, ...] = ()
    modules: int = 0
    worst: str = ""
    error: float = 0.0
    decoded: Divergence | None = None
    original: Divergence | None = None
    decoded_original: Divergence | None = None

    def lines(self) -> list[str]:
        """The figures for a person."""
        releases = ", ".join(f"{name} {one}" for name, one in self.versions.items())
        part = f", first {self.blocks} blocks" if self.blocks is not None else ""
        lines = [f"with {self.engine} ({releases}){part}: {self.status}"]
        if self.modules:
            lines.append(
                f"{self.modules} modules beside their decoded weights: {self.error:.4f} at most "
                f"({self.worst})"
            )
        for what, one in (
            ("from the decoded model", self.decoded),
            ("from the original", self.original),
            ("of the decoded model from the original", self.decoded_original),
        ):
            lines += [] if one is None else [f"{what}: {one}"]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        return {**asdict(self), "versions": dict(self.versions)}


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
        engine: what an engine made of it, if one was asked.
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
    engine: EngineRun | None = None

    @property
    def ok(self) -> bool:
        """True if there is no error."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    @property
    def verdict(self) -> str:
        """``good``, ``NOT good``, or how far an engine that was asked has come without a fault."""
        if not self.ok:
            return "NOT good"
        return "good" if self.engine is None or self.engine.status == "run" else self.engine.status

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings of each severity."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity.value: found[severity] for severity in _ORDER}

    def figures(self) -> list[str]:
        """The report in a few lines, without its findings."""
        counts = self.counts
        lines = [
            f"{self.checkpoint}: {self.verdict}",
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
        return lines + ([] if self.engine is None else self.engine.lines())

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
            **({} if self.engine is None else {"engine": self.engine.as_dict()}),
            "verdict": self.verdict,
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
