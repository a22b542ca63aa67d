# SPDX-License-Identifier: Apache-2.0
"""Plain-text help of a command under headings, which is faster than drawing boxes."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

__all__ = ["GroupedCommand"]


class GroupedCommand(TyperCommand):
    """A command that lists its options under their headings (``rich_help_panel``)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments first, then each heading in the order of its first option."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None)
            heading = "Arguments" if is_argument else panel or "Options"
            sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
