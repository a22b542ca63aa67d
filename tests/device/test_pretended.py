# SPDX-License-Identifier: Apache-2.0
"""Runs on a device that is only pretended: nothing may reach for a tensor on another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.device.recipes import RECIPES, TRAININGS

MIB = 2**20
Run = Callable[..., dict[str, Any]]
DATA_FREE = [name for name, recipe in RECIPES.items() if not recipe.takes_data]

pytestmark = pytest.mark.slow  # the device is compiled first


def test_the_device_itself(on_device: Run) -> None:
    found = on_device("itself")
    errors = ["RuntimeError", "RuntimeError", "TypeError", "RuntimeError", "OutOfMemoryError"]
    assert found.pop("refused") == errors
    assert found.pop("scores") < 2**17  # a device's attention keeps no scores
    assert found == {"taken": True, "counted": 4000, "size": 4000, "free": 4000}


def test_every_recipe_runs_on_the_device(on_device: Run) -> None:
    names = list(RECIPES)
    assert on_device("compress", names=names) == dict.fromkeys(names, "cuda:0")


def test_a_model_that_is_there_already(on_device: Run) -> None:
    names = ["rtn", "gptq", "awq", "spin", "autoround", "sparsegpt", "reap"]
    assert on_device("object", names=names) == dict.fromkeys(names, "cuda:0")


@pytest.mark.parametrize(("kind", "second"), [("two devices", "cpu"), ("offloaded", "meta")])
def test_a_model_that_is_dispatched_stays_so(kind: str, second: str, on_device: Run) -> None:
    found = on_device("dispatched", names=["fp8", "gptq", "awq"], kind=kind)
    for name, (layers, distance) in found.items():
        assert layers == [["cuda:0"], [second]], name
        assert distance < 0.02, name


def test_what_needs_no_data_has_the_bytes_of_the_host(on_device: Run) -> None:
    assert on_device("same_bytes", names=DATA_FREE) == dict.fromkeys(DATA_FREE, True)


def test_every_training_runs_on_the_device(on_device: Run) -> None:
    names = list(TRAININGS)
    assert on_device("train", names=names) == dict.fromkeys(names, "cuda:0")


def test_a_training_continues_there_with_the_same_bytes(on_device: Run) -> None:
    found = on_device("train_resumed", name="pruned_distilled")
    assert found == {"interrupted": True, "same": True}


@pytest.mark.parametrize("name", ["rtn", "gptq"])
def test_a_run_that_was_broken_off_continues_there(name: str, on_device: Run) -> None:
    assert on_device("killed", name=name) == {"partial": True, "same": True}


def test_the_peak_does_not_grow_with_depth(on_device: Run) -> None:
    found = on_device("peaks", names=["rtn", "gptq", "spin"], depths=[3, 9])
    for name, (few, many) in found.items():
        assert many < 1.02 * few, name


def _within(name: str) -> float:
    """What AWQ keeps of the data is planned to be there while it clips, too."""
    return 0.3 if name == "awq_output" else 0.15


def test_the_planned_peak_is_the_measured_one(on_device: Run) -> None:
    names = ["hqq", "fp8", "imatrix", "gptq", "awq", "awq_output", "wanda"]
    found = on_device("planned", names=names, hidden=256, length=256)
    for name, (planned, measured) in found.items():
        assert planned == pytest.approx(measured, rel=_within(name)), name


def test_the_planned_peak_of_rounding_has_no_room_for_codes(on_device: Run) -> None:
    """The codes of a whole block would be a tenth or more."""
    names = ["rtn", "fp8_dynamic", "nvfp4a16"]
    found = on_device("planned", names=names, hidden=512, length=256)
    for name, (planned, measured) in found.items():
        assert planned == pytest.approx(measured, rel=0.05), name


@pytest.mark.timeout(1200)  # learning takes minutes without products of bfloat16
@pytest.mark.parametrize("samples", [16, 64])
def test_the_planned_peak_of_autoround_counts_tokens(samples: int, on_device: Run) -> None:
    """Too few of them to be solved first, and enough: a tenth between them."""
    found = on_device("planned", names=["autoround"], hidden=256, length=256, samples=samples)
    planned, measured = found["autoround"]
    assert planned == pytest.approx(measured, rel=0.07)


@pytest.mark.timeout(1200)  # a forward for every candidate: minutes without products of bfloat16
def test_what_awq_keeps_leaves_room_on_a_limited_device(on_device: Run) -> None:
    """Four times the data: inputs of parents, and what they return, wait on the host."""
    few, many = (
        on_device("bounded", name="awq_output", limits=[24 * MIB, None], samples=samples)
        for samples in (64, 256)
    )
    for planned, measured in (few[0], many[0]):
        assert measured < 24 * MIB
        assert 0.85 * measured < planned < 1.45 * measured
    assert many[1][1] > 100 * MIB
    assert many[1][0] == pytest.approx(many[1][1], rel=_within("awq_output"))
    assert few[2]
    assert many[2]


def test_what_waits_on_the_host_leaves_nothing_on_the_device(on_device: Run) -> None:
    """Four times the data, of which the device has the token ids and tables of positions more."""
    few, many = (
        on_device("bounded", name="gptq_once", limits=[16 * MIB, None], samples=samples)[0]
        for samples in (64, 256)
    )
    assert many[1] < 1.3 * few[1]
    for planned, measured in (few, many):
        assert planned == pytest.approx(measured, rel=0.15)


def test_under_a_limit_the_planned_peak_is_the_measured_one(on_device: Run) -> None:
    asked = {"hidden": 128, "length": 256, "samples": 64, "limit": 16}
    for name, (planned, measured) in on_device(
        "planned", names=["imatrix", "sparsegpt", "awq_output"], **asked
    ).items():
        assert measured < 16 or name == "awq_output"  # what clipping takes
        assert planned == pytest.approx(measured, rel=_within(name)), name


def test_a_limit_of_the_device_is_kept_or_refused(on_device: Run) -> None:
    free, limited, refused, same = on_device(
        "bounded", name="gptq_once", limits=[None, 16 * MIB, MIB // 2]
    )
    assert limited[1] < 16 * MIB < free[1]
    assert free[0] == pytest.approx(free[1], rel=0.15)
    assert limited[0] == pytest.approx(limited[1], rel=0.15)
    assert "max_memory allows 524 kB on cuda" in refused[0]
    assert refused[1] == []
    assert same


def test_what_the_allocator_holds_for_nobody_is_free(on_device: Run) -> None:
    """A second run in a process finds the device as full as the first one ever had it."""
    found = on_device("held")
    assert found["folder"] == found["whole"] == "cuda:0"
    assert found["free, held"] == found["free"] > 2**20
    assert found["kept"] == 0
