# SPDX-License-Identifier: Apache-2.0
"""Checkpoints side by side: sizes, schemes, errors of weights, and distance on a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmcompressor.errors import ArgumentError
from llmcompressor.reporting.cards import depth_chart, number, size_card
from llmcompressor.reporting.contents import Contents, Matrix, contents_of
from llmcompressor.reporting.page import Card, Figure, render
from llmcompressor.runtime.progress import format_bytes
from llmcompressor.verification.check import verify_files

_MOST_ROWS = 300
_OF_SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size")
_METRICS = ("perplexity", "kl_divergence", "top1_agreement", "tokens")


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints side by side.

    Attributes:
        contents: name → what the checkpoint holds.
        errors: name → module → relative error of its weight against the reference; empty without
            a reference.
        evaluations: name → the metrics of ``evaluate``; empty without a text.
    """

    contents: Mapping[str, Contents]
    errors: Mapping[str, Mapping[str, float]]
    evaluations: Mapping[str, Mapping[str, Any]]

    def different_schemes(self) -> dict[str, tuple[str, ...]]:
        """Return the modules that are not quantized alike, and how each checkpoint has them."""
        every = [one.matrices for one in self.contents.values()]
        found = {}
        for module in dict.fromkeys(name for one in every for name in one):
            schemes = tuple(one[module].scheme if module in one else _PLAIN for one in every)
            if len(set(schemes)) > 1:
                found[module] = schemes
        return found

    def with_evaluations(self, found: Sequence[Mapping[str, Any]]) -> Comparison:
        """Return the same with the metrics of each checkpoint on a text."""
        return replace(self, evaluations=dict(zip(self.contents, found, strict=True)))

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        return {
            name: {
                "folder": str(one.folder),
                "bytes": one.file_bytes,
                "quantized": len(one.matrices),
                "errors": dict(self.errors.get(name, {})),
                "evaluation": dict(self.evaluations.get(name, {})) or None,
            }
            for name, one in self.contents.items()
        } | {"different_schemes": {k: list(v) for k, v in self.different_schemes().items()}}


_PLAIN = "not quantized"


def compare_folders(
    first: Path,
    second: Path,
    reference: Path | None = None,
) -> Comparison:
    """Compare two checkpoints of one model.

    Args:
        first: a folder.
        second: another.
        reference: the model that both were made of, for the errors of their weights.

    Raises:
        ArgumentError: they are not of one architecture, or of one size.
        CheckpointError: a folder holds no checkpoint, or half of one.
    """
    names = _names(first, second)
    contents = dict(zip(names, map(contents_of, (first, second)), strict=True))
    checked = [*contents.values(), *([] if reference is None else [contents_of(reference)])]
    for one in checked[1:]:
        _check_alike(checked[0], one)
    errors = {}
    for name, one in contents.items() if reference is not None else ():
        found = verify_files(one.folder, reference).errors
        errors[name] = {each.module: each.relative for each in found}
    return Comparison(contents, errors, {})


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return names that tell two folders apart.

    >>> _names(Path("a/x"), Path("b/y")), _names(Path("a/x"), Path("b/x"))
    (('x', 'y'), ('a/x', 'b/x'))
    """
    if first.resolve() == second.resolve():
        raise ArgumentError(f"Both checkpoints are {first}.", "Give two folders to compare.")
    if first.name != second.name:
        return first.name, second.name
    return str(first), str(second)


def _check_alike(one: Contents, other: Contents) -> None:
    for name in ("architecture", *_OF_SHAPE):
        own, others = (
            each.architecture if name == "architecture" else _setting(each, name)
            for each in (one, other)
        )
        if own != others:
            raise ArgumentError(
                f"{one.folder.name} and {other.folder.name} are different models: {name} is "
                f"{own} and {others}.",
                "Give checkpoints that were made of one model.",
            )


def _setting(contents: Contents, name: str) -> Any:
    text = contents.config.get("text_config")
    held = {**(text if isinstance(text, Mapping) else {}), **contents.config}
    return held.get(name)


def comparison_page(found: Comparison, reference: Path | None) -> str:
    """Return the page of a comparison."""
    contents = found.contents
    figures = [Figure(name, format_bytes(one.file_bytes)) for name, one in contents.items()]
    before = {} if reference is None else contents_of(reference).sizes
    sizes = {name: one.sizes for name, one in contents.items()}
    cards = [
        *_evaluations(found),
        size_card({"reference": before, **sizes}, contents),
        *_errors(found),
        _schemes(found),
    ]
    title = " and ".join(contents)
    subtitle = next(iter(contents.values())).architecture
    return render(title, subtitle, figures, cards, found.as_dict())


def _evaluations(found: Comparison) -> list[Card]:
    if not found.evaluations:
        return []
    rows = [
        (name, *(number(one.get(metric)) for metric in _METRICS))
        for name, one in found.evaluations.items()
    ]
    head = ("", "perplexity", "KL, nats a token", "same first choice", "tokens")
    return [Card("evaluation", "On a text", head=head, rows=rows, numbers=(1, 2, 3, 4))]


def _errors(found: Comparison) -> list[Card]:
    cards = []
    for name, errors in found.errors.items():
        matrices = [
            replace(found.contents[name].matrices.get(module, Matrix(module, "")), error=error)
            for module, error in errors.items()
        ]
        chart = depth_chart(matrices, lambda one: one.error, "relative error of weights")
        mean = sum(errors.values()) / max(len(errors), 1)
        cards.append(Card("errors", name, charts=[chart], note=f"{mean:.4f} on average."))
    modules = dict.fromkeys(module for errors in found.errors.values() for module in errors)
    if not modules:
        return []
    every = list(found.errors.values())

    def apart(module: str) -> float:
        held = [errors.get(module, 0.0) for errors in every]
        return max(held) - min(held)

    worst = sorted(modules, key=apart, reverse=True)[:_MOST_ROWS]
    rows = [(module, *(number(errors.get(module)) for errors in every)) for module in worst]
    head = ("module", *found.errors)
    return [
        *cards,
        Card(
            "differences",
            "Error of each weight, the largest difference first",
            head=head,
            rows=rows,
            numbers=range(1, len(head)),
            wide=True,
        ),
    ]


def _schemes(found: Comparison) -> Card:
    different = found.different_schemes()
    rows = [(module, *schemes) for module, schemes in list(different.items())[:_MOST_ROWS]]
    more = len(different) - len(rows)
    return Card(
        "schemes",
        "Modules that are quantized differently",
        lines=[] if rows else ["All modules have the same scheme in both."],
        head=("module", *found.contents),
        rows=rows,
        note=f"{more} more are in the page's data." if more else "",
        wide=True,
    )
