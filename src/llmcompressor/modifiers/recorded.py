# SPDX-License-Identifier: Apache-2.0
"""What modifiers report that keep a record of each module."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict
from typing import Any

__all__ = ["RecordedMixin"]


class RecordedMixin:
    """Reports the records, which are dataclasses, as plain values; stands before the modifier."""

    @property
    def records(self) -> Mapping[str, Any]:
        """What happened, by module name."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """The fields of every record."""
        return {name: asdict(record) for name, record in self.records.items()}

    def report_of(self, names: Container[str]) -> dict[str, Any]:
        """Those of some records."""
        found = self.records.items()
        return {name: asdict(record) for name, record in found if name in names}
