# SPDX-License-Identifier: Apache-2.0
"""Mixin for modifiers that keep one record per module."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict
from typing import Any

__all__ = ["RecordedMixin"]


class RecordedMixin:
    """Report dataclass records as plain dictionaries; has to precede ``Modifier`` in the bases."""

    @property
    def records(self) -> Mapping[str, Any]:
        """Records by module name."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """The fields of every record, by module name."""
        return {name: asdict(record) for name, record in self.records.items()}

    def report_of(self, names: Container[str]) -> dict[str, Any]:
        """The fields of the records of ``names``."""
        found = self.records.items()
        return {name: asdict(record) for name, record in found if name in names}
