# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks write: markdown tables, and the machine they were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("torch", "transformers", "compressed-tensors", "numpy")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table; all columns but the first are aligned to the right.

    >>> print(table(["a", "b"], [[1, 2]]))
    | a | b |
    |---|---:|
    | 1 | 2 |
    """
    lines = [header, *rows]
    text = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join([text[0], rule, *text[1:]])


def machine() -> str:
    """One line: processor, cores this process may use, memory, system and versions."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"{memory:.0f} GiB, {platform.system()}; Python {platform.python_version()}, {versions}"
    )


def publish(title: str, body: str, output: Path | None) -> None:
    """Show a page of results, headed by the machine, and write it where ``output`` says."""
    text = f"# {title}\n\n{machine()}.\n\n{body}\n"
    if output:
        output.write_text(text)
    print(text)
