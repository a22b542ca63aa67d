# SPDX-License-Identifier: Apache-2.0
"""Validation of smoothing mappings: named modules are tried on a run of their block."""

from __future__ import annotations

from collections.abc import Mapping

from llmcompressor.modeling.mapped_places import Place
from llmcompressor.modeling.scaling import columns_of
from llmcompressor.modeling.structure import BlockProbe, Link, Outcome, Verdict

__all__ = ["Prover"]


class Prover:
    """Validates places by running their block, once per structure of block.

    Args:
        probes: block name → probe.
    """

    def __init__(self, probes: Mapping[str, BlockProbe]) -> None:
        self._probes = probes
        self._links: dict[BlockProbe, dict[str, Link]] = {}

    def judge(self, place: Place) -> Verdict:
        """The verdict on a place, from a run of its block."""
        if rows := _fewer_rows(place):
            return Verdict(Outcome.SHARES, rows=rows)
        probe = self._probes.get(place.block or "")
        if probe is None or place.block is None:
            return Verdict(Outcome.UNTRIED)
        own = [name.removeprefix(f"{place.block}.") for name in (place.name, *place.readers)]
        return probe.verify(own[0], own[1:])

    def readers(self, place: Place) -> tuple[str, ...]:
        """All modules that read the smooth module of a place; empty if they were not found."""
        probe = self._probes.get(place.block or "")
        if probe is None:
            return ()
        if probe not in self._links:
            self._links[probe] = {link.smooth: link for link in probe.find()}
        link = self._links[probe].get(place.name.removeprefix(f"{place.block}."))
        return () if link is None else tuple(f"{place.block}.{name}" for name in link.balance)

    def reason(self, place: Place, verdict: Verdict) -> str:
        """Why a place is not smoothed, without a full stop."""
        others = ", ".join(f"{place.block}.{name}" for name in verdict.others)
        if verdict.outcome is Outcome.SHARES:
            reader = next(iter(place.readers))
            columns, rows = columns_of(place.readers[reader]), verdict.rows
            has = f"{rows} rows" if _fewer_rows(place) else f"{rows} rows of values"
            return (
                f"{place.name} has {has} and {reader} {columns} columns: where heads share keys "
                "and values, several columns read one row, and one scale cannot serve them all"
            )
        if verdict.outcome is Outcome.CHANGES:
            also = f"it is read by {others}, too" if others else "it reaches them otherwise"
            return f"Smoothing {place} would change what the model computes: {also}"
        why = f"no token reached {others}" if others else _not_run(place)
        return f"Whether smoothing {place} leaves what the model computes cannot be tried: {why}"


def _not_run(place: Place) -> str:
    if place.block is None:
        return f"{place.name} lies in no block"
    return f"{place.block} could not be run"


def _fewer_rows(place: Place) -> int:
    """Rows of a Linear with fewer rows than its readers have columns (grouped heads), else 0."""
    columns = columns_of(next(iter(place.readers.values())))
    rows = getattr(place.smooth, "out_features", None)
    return 0 if rows is None or columns is None or rows >= columns else int(rows)
