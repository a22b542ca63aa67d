# SPDX-License-Identifier: Apache-2.0
"""Gates as they are given: names, limits and their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from llmcompressor.args import RunArguments
from llmcompressor.args.gates import GATES, parse_gates
from llmcompressor.errors import ArgumentError


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"kl": 0.02, "top1": 1}, {"kl": 0.02, "top1": 1.0}),
        ("size=2GiB", {"size": 2 * 1024**3}),
        (["size=1e9", "perplexity = 1.03"], {"size": 10**9, "perplexity": 1.03}),
        ({}, {}),
    ],
    ids=str,
)
def test_forms(given: Any, stored: dict[str, float]) -> None:
    assert parse_gates("gates", given) == stored
    assert RunArguments(gates=given).gates == stored


@pytest.mark.parametrize(
    "given",
    [
        *({name: limit} for name in GATES for limit in (0, -1, float("nan"), float("inf"), None)),
        {"top1": 1.01},
        {"perplexity": 0.4},
        {"kl": "small"},
        {"loss": 1.0},
        {1: 1.0},
        ["kl=1", "kl=2"],
        ["kl"],
        0.02,
    ],
    ids=str,
)
def test_wrong_ones(given: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_gates("gates", given)
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("name", "kept", "broken"), [("kl", 0.5, 0.51), ("top1", 0.5, 0.49), ("size", 9, 10)]
)
def test_a_limit_itself_is_kept(name: str, kept: float, broken: float) -> None:
    limit = kept
    assert GATES[name].passes(kept, limit)
    assert not GATES[name].passes(broken, limit)
    assert not GATES[name].passes(None, limit)
