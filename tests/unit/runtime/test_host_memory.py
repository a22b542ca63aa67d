# SPDX-License-Identifier: Apache-2.0
"""A container's limit counts where it is less than what the machine has."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llmcompressor.modeling.offload import activation_budget
from llmcompressor.runtime.memory import free_host_memory

MIB = 2**20
NAMES = {
    "unified": ("", "memory.max", "memory.current", "inactive_file"),
    "old": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
OWN = {"unified": "0::/pods/one\n", "old": "5:devices:/\n4:cpu,memory:/pods/one\n0::/\n"}


def group(root: Path, kind: str, place: str, limit: int | str, usage: int, cached: int) -> None:
    mount, *names, reclaimable = NAMES[kind]
    folder = root / mount / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 17\n{reclaimable} {cached}\nslab 5\n")


@pytest.fixture(params=list(NAMES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def free(root: Path, kind: str) -> int:
    own = root / "own"
    own.write_text(OWN[kind])
    return free_host_memory(root, own)


def test_what_is_left_of_a_limit_is_free(kind: str, tmp_path: Path) -> None:
    group(tmp_path, kind, "pods/one", 100 * MIB, 70 * MIB, 20 * MIB)
    assert free(tmp_path, kind) == 50 * MIB


def test_a_container_sees_its_group_as_the_root(kind: str, tmp_path: Path) -> None:
    group(tmp_path, kind, ".", 80 * MIB, 30 * MIB, 0)
    assert free(tmp_path, kind) == 50 * MIB


@pytest.mark.parametrize("limit", ["max", 2**63 - 4096])
def test_no_limit_leaves_what_the_machine_has(kind: str, limit: int | str, tmp_path: Path) -> None:
    group(tmp_path, kind, "pods/one", limit, 10 * MIB, 0)
    machine = psutil.virtual_memory().available
    assert free(tmp_path, kind) == pytest.approx(machine, rel=0.2)
    assert free_host_memory(tmp_path, tmp_path / "none") == pytest.approx(machine, rel=0.2)


def test_activations_get_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcompressor.modeling.offload.free_host_memory", lambda: 10 * MIB)
    assert activation_budget(None) == 5 * MIB
    assert activation_budget(3 * MIB) == 3 * MIB
