# SPDX-License-Identifier: Apache-2.0
"""What was done to a checkpoint, run by run, as its ``compression_report.json`` tells.

A report holds that of the model its run began with, under ``before``, and so on. Where the original
has a report too, what that one tells is true of both, and is not looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcompressor.verification.files import Files

__all__ = ["DROPS", "EXPERT", "Changed", "Run", "layer_of", "runs_since", "without_prefixes"]

DROPS = "REAPPruningModifier"
"""The modifier that drops weights, and leaves the others as they are."""

_REPORT = "compression_report.json"
_EARLIER = "before"
_STORED_AS = "stored_as"
EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<index>\d+)(?:\.(?P<rest>.+))?$")
"""A module or tensor of one expert."""
_OF_FILES = "verification"
_PREFIXES = ("model.", "language_model.", "transformer.")
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.\d+\.")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        records: class of a modifier → module → what was recorded.
        trained: the model was trained, so that any weight may have changed.
        stored_as: module → what the files call it, where that is something else.
    """

    records: Mapping[str, Any]
    trained: bool
    stored_as: Mapping[str, Any] = field(default_factory=dict)

    def names_of(self, module: str) -> list[str]:
        """What the files may call a module that is recorded; its own name first."""
        expert = EXPERT.match(module)
        stored = self.stored_as.get(module if expert is None else expert["experts"])
        return [module, *map(str, stored)] if isinstance(stored, list) else [module]


def runs_since(checkpoint: Files, reference: Files) -> list[Run]:
    """The runs that made the checkpoint of the reference.

    Args:
        checkpoint: the files at the end.
        reference: those at the beginning.

    Returns:
        The latest run first; nothing where no report can be read.
    """
    begin = _comparable(_report(reference))
    found = []
    for report in _chain(_report(checkpoint)):
        if begin and _comparable(report) == begin:
            break
        records = report.get("modifiers")
        known = records if isinstance(records, Mapping) else {}
        stored = report.get(_STORED_AS)
        names = stored if isinstance(stored, Mapping) else {}
        found.append(Run(known, trained="training" in report, stored_as=names))
    return found


class Changed:
    """The modules whose weights runs have changed and recorded.

    Args:
        runs: which.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self._all = any(run.trained for run in runs)
        self._names = {
            _key(name)
            for run in runs
            for modifier, modules in run.records.items()
            if isinstance(modules, Mapping) and not str(modifier).startswith(DROPS)
            for module in modules
            for name in run.names_of(str(module))
        }

    def __contains__(self, module: str) -> bool:
        return self._all or _key(module) in self._names


def without_prefixes(name: str) -> str:
    """A name without the prefixes that differ between versions of transformers."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


def layer_of(tail: str) -> str:
    """The beginning of a name that says which layer it is in; empty for what is in none."""
    match = _LAYER.match(tail)
    return match[0] if match is not None else ""


def _key(module: str) -> str:
    """Equal for what files and the model may call differently: one expert or their stack."""
    tail = without_prefixes(module)
    return f"{layer_of(tail)}experts" if "experts" in tail.split(".") else tail


def _report(files: Files) -> Mapping[str, Any]:
    try:
        report = json.loads((files.directory / _REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, Mapping) else {}


def _chain(report: Any) -> Iterator[Mapping[str, Any]]:
    while isinstance(report, Mapping) and report:
        yield report
        report = report.get(_EARLIER)


def _comparable(report: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != _OF_FILES}
