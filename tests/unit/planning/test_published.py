# SPDX-License-Identifier: Apache-2.0
"""Plans of published models, from their configurations and headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
from tests.support import published_models as published

from llmcompressor import plan
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.planning.result import Plan

Shape = published.Shape
BFLOAT16 = 2


def planned(
    folder: Path, config: Mapping[str, Any], scheme: str, *, ignore: Sequence[str] = ("lm_head",)
) -> Plan:
    source = published.write_headers(folder, config, published.tensors_of(config))
    modifier = QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=list(ignore))
    return plan(source, modifier, measure=False)


def is_linear(name: str) -> bool:
    """Whether the published tensor is the weight of a Linear: those of experts are, gates not."""
    inside = "_proj" in name or ".experts." in name
    return inside and name.endswith(".weight")


def data_bytes(config: Mapping[str, Any], bits: int, group: int | None, extra: int = 0) -> int:
    """Bytes of all tensors, by hand: codes, a bfloat16 scale per group, and what comes on top."""
    total = 0
    for name, shape in published.tensors_of(config).items():
        if not is_linear(name):
            total += published.source_bytes(name, shape)
            continue
        rows, columns = shape
        scales = rows * (1 if group is None else columns // group)
        total += rows * columns * bits // 8 + scales * BFLOAT16 + extra
    return total


CASES = {
    # configuration, parameters, Linears: q k v o gate up down in each of the dense blocks
    "llama-3-8b": (published.LLAMA_3_8B, 8_030_261_248, 7 * 32),
    "llama-3-70b": (published.LLAMA_3_70B, 70_553_706_496, 7 * 80),
    # q k v o, and gate up down of each expert
    "mixtral-8x7b": (published.MIXTRAL_8X7B, 46_702_792_704, (4 + 3 * 8) * 32),
    "qwen3-30b-a3b": (published.QWEN3_30B_A3B, 30_532_122_624, (4 + 3 * 128) * 48),
    # q_a q_b kv_a kv_b o, three dense blocks, the experts of the others and their shared one
    "deepseek-v3": (published.DEEPSEEK_V3, 671_026_419_200, 5 * 61 + 3 * 3 + 3 * 257 * 58),
}
SLOW = ("deepseek-v3", "llama-3-70b", "mixtral-8x7b", "qwen3-30b-a3b")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES],
)
def test_modules_and_bytes_of(name: str, tmp_path: Path) -> None:
    config, parameters, linears = CASES[name]
    found = planned(tmp_path / name, config, "W4A16")
    by_hand = data_bytes(config, bits=4, group=128, extra=16)
    shapes = published.tensors_of(config)

    assert not found.problems
    assert found.parameters == pytest.approx(parameters, rel=1e-6)
    assert found.blocks == config["num_hidden_layers"]
    assert len(found.schemes) == linears
    assert [one.modules for one in found.scheme_bytes] == [linears]
    linear_weights = sum(prod(shape) for one, shape in shapes.items() if is_linear(one))
    assert found.scheme_bytes[0].weights == linear_weights
    assert found.scheme_bytes[0].bytes_before == linear_weights * BFLOAT16
    assert found.sizes is not None
    headers = found.sizes.weights - by_hand
    assert 0 < headers < 400 * len(shapes) + 1000 * linears


@pytest.mark.parametrize(
    ("scheme", "bits", "group"), [("W8A8", 8, None), ("FP8_DYNAMIC", 8, None), ("W4A16", 4, 128)]
)
def test_bytes_of_each_scheme(scheme: str, bits: int, group: int | None, tmp_path: Path) -> None:
    config = published.LLAMA_3_8B
    found = planned(tmp_path / "llama", config, scheme)
    (row,) = found.scheme_bytes
    linears = [shape for name, shape in published.tensors_of(config).items() if is_linear(name)]
    scales = sum(rows * (columns // group if group else 1) for rows, columns in linears)
    shape_tensors = 16 * len(linears) if bits == 4 else 0

    assert row.bytes_after == row.weights * bits // 8 + scales * BFLOAT16 + shape_tensors
    dense = sum(one.bytes for one in found.dense)
    assert dense == data_bytes(config, bits, group) - (row.bytes_after - shape_tensors)


def test_a_stack_of_experts_is_named_as_what_no_target_reaches(tmp_path: Path) -> None:
    ignore = ["lm_head", "re:.*experts.*"]
    found = planned(tmp_path / "mixtral", published.MIXTRAL_8X7B, "W4A16", ignore=ignore)
    (experts,) = [row for row in found.modules if row.pattern.endswith("experts")]

    assert experts.scheme == "dense"
    assert "stack" in experts.why
    assert experts.modules == 32
    assert experts.weights == 32 * 8 * 3 * 4096 * 14336
    assert sum(one.bytes for one in found.dense if "stack" in one.why) == (
        experts.weights * BFLOAT16
    )
    assert any("experts" in note for note in found.notes)


def test_the_peak_does_not_grow_with_depth(tmp_path: Path) -> None:
    peaks = []
    for depth in (8, 64):
        config = published.LLAMA_3_8B | {"num_hidden_layers": depth}
        peaks.append(planned(tmp_path / str(depth), config, "W4A16").peak_host)

    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)
