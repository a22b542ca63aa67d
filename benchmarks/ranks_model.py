# SPDX-License-Identifier: Apache-2.0
"""The cost model of several ranks, computed for large published models.

    benchmarks/ranks_model.py [--page docs/ranks_cost.md]

Nothing is measured: configurations and headers of real size are planned, without weights, at
assumed rates of an accelerator. With a page, the text between its two marks is replaced.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tables import table  # noqa: E402  # beside this file
from tests.support import published_models as published  # noqa: E402  # below the root

from llmcompressor import plan  # noqa: E402
from llmcompressor.modifiers.quantization import GPTQModifier  # noqa: E402
from llmcompressor.planning.result import RankCount, RankLoad, RankPlan, Rates  # noqa: E402

RATES = Rates("assumed", 200e12, 25e12, 4e9, 2e9, 1.0)
"""Multiply-adds per second in bfloat16 and in float32, bytes per second read and written: 40 % and
75 % of an H100's data sheet, and a fast disk."""
GIVEN: dict[str, Any] = {
    "num_calibration_samples": 512,
    "max_seq_length": 2048,
    "sequential_granularity": "linear",
    "activation_budget": "256GiB",
    "measure": RATES,
    "ranks": 16,
    "nodes": 2,
}
SLOW: dict[str, Any] = {"link_speed": 50, "node_link_speed": 12.5}
FAST: dict[str, Any] = {"link_speed": 200, "node_link_speed": 50}
ROUTED: dict[str, Any] = {"moe_calibrate_all_experts": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1 405B": (published.LLAMA_3_405B, SLOW),
    "Llama 3.1 405B, faster links": (published.LLAMA_3_405B, FAST),
    "DeepSeek V3, every expert sees all tokens": (published.DEEPSEEK_V3, SLOW),
    "DeepSeek V3, experts see the tokens routed to them": (published.DEEPSEEK_V3, SLOW | ROUTED),
}
BEGIN, END = "<!-- computed -->\n", "<!-- end -->"


def planned(config: dict[str, Any], given: dict[str, Any], folder: Path) -> RankPlan:
    source = published.write_headers(folder, config, published.tensors_of(config))
    recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    found = plan(source, recipe, **GIVEN, **given).ranks
    assert found is not None
    return found


def row(one: RankCount) -> list[object]:
    minutes = [one.seconds.get(name, 0.0) / 60 for name in ("calibrate", "solve")]
    minutes += [one.seconds.get(name, 0.0) / 60 for name in ("reduce", "broadcast")]
    assert one.time is not None
    assert one.speedup is not None
    return [
        f"{one.ranks} ({one.nodes})",
        f"{one.host / 1e9:.0f}",
        f"{one.sent / 1e12:.2f}",
        f"{one.received / 1e12:.2f}",
        *(f"{each:.1f}" for each in minutes),
        f"{one.time / 60 - sum(minutes):.1f}",
        f"{one.time / 60:.0f}",
        f"{one.speedup:.2f}",
    ]


def spread(loads: Sequence[RankLoad], value: Callable[[RankLoad], int]) -> str:
    """The least and the most of a rank, as shares of all."""
    values = [value(one) for one in loads]
    return f"{min(values) / sum(values):.2%} to {max(values) / sum(values):.2%}"


def section(name: str, found: RankPlan) -> Iterator[str]:
    within, between = found.links.within / 1e9, found.links.between / 1e9
    yield f"### {name}\n"
    yield f"Links of {within:g} GB/s within a node and {between:g} GB/s between nodes.\n"
    header = ["ranks (nodes)", "memory, GB", "sent, TB", "received, TB", "forward, min", "solve"]
    header += ["reduce", "broadcast", "other", "together", "times faster"]
    yield table(header, [row(one) for one in found.counts]) + "\n"
    loads = found.loads
    end = "Each doubling gains 10 % or more."
    if found.pays_to is not None:
        end = f"Twice {found.pays_to} ranks gain less than 10 %."
    yield (
        f"Of {found.ranks} ranks one runs {spread(loads, lambda one: one.batches)} of the samples, "
        f"solves {spread(loads, lambda one: one.solving)} of the cost, writes "
        f"{spread(loads, lambda one: one.written)} of the bytes and sends "
        f"{spread(loads, lambda one: one.reduce_sent + one.broadcast_sent)} of those on the wire. "
        f"{end}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        lines = [
            line
            for number, (name, (config, more)) in enumerate(CASES.items())
            for line in section(name, planned(config, more, Path(work) / str(number)))
        ]
    text = f"{BEGIN}\n" + "\n".join(lines) + f"\n{END}"
    print(text)
    if given.page:
        page = given.page.read_text(encoding="utf-8")
        marks = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
        given.page.write_text(marks.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    main()
