# SPDX-License-Identifier: Apache-2.0
"""Every rule as a line: its number, who demands it, how bad a breach is, what decides it.

``python -m llmcompressor.verification.catalogue`` prints the table of the documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcompressor.verification import files, reference, values
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.rules import NOT_CHECKED, RULES
from llmcompressor.verification.rules.view import VERSIONS, Rule, place_of

__all__ = ["CATALOGUE", "Line", "markdown"]

_ANY = "any reader"
_NAMES = {"vllm": "vLLM", "transformers": "transformers", "sglang": "SGLang"}
_WARNINGS = frozenset({"R2", "R6", "S27", "V5", "V7"})
_DECIDED = {
    "config": "configuration",
    "headers": "headers",
    "tensors": "small tensors",
    "written": "headers, by transformers",
    "deployment": "deployment",
}


@dataclass(frozen=True)
class Line:
    """A rule for the documentation.

    Attributes:
        number: its number.
        title: what it demands.
        reader: who demands it, with the release.
        severity: how bad a breach is, as a rule.
        decided: what has to be known to decide it.
    """

    number: str
    title: str
    reader: str
    severity: str
    decided: str


def _of_rule(rule: Rule) -> Line:
    reader = f"{_NAMES[rule.server]} {rule.holds_for}" if rule.server else _ANY
    severity = rule.severity.value
    if rule.is_limit and rule.severity is Severity.ERROR:
        severity = "error where asked for"
    return Line(rule.number, rule.title, reader, severity, _DECIDED[rule.needs])


def _said(number: str) -> str:
    """Severity of a breach of what is checked with the data; the check itself says so."""
    return (Severity.WARNING if number in _WARNINGS else Severity.ERROR).value


def _of_titles(titles: dict[str, str], decided: str) -> list[Line]:
    vllm = f"{_NAMES['vllm']} {VERSIONS['vllm']}"
    return [
        Line(number, title, vllm if number.startswith("S") else _ANY, _said(number), decided)
        for number, title in titles.items()
    ]


def _lines() -> tuple[Line, ...]:
    every = [
        *_of_titles(files.TITLES, "files"),
        *(_of_rule(rule) for rule in RULES),
        *_of_titles(values.TITLES, "all data"),
        *_of_titles(reference.TITLES, "the original"),
    ]
    merged: dict[str, Line] = {}
    for line in sorted(every, key=lambda line: place_of(line.number)):
        known = merged.get(line.number, line).title
        title = known if line.title == known else f"{known}; {line.title}"
        merged[line.number] = replace(line, title=title)
    return tuple(merged.values())


CATALOGUE = _lines()
"""All rules that are checked."""


def markdown() -> str:
    """The rules as a table of Markdown, and what is not checked as a second one."""
    rows = ["| rule | what it demands | who | a breach is | decided by |", "|---|---|---|---|---|"]
    rows += [
        f"| {line.number} | {line.title} | {line.reader} | {line.severity} | {line.decided} |"
        for line in CATALOGUE
    ]
    rows += ["", "| number | why nothing is checked under it |", "|---|---|"]
    rows += [f"| {number} | {why} |" for number, why in NOT_CHECKED.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
