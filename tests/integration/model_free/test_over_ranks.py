# SPDX-License-Identifier: Apache-2.0
"""Ranks share the blocks of a checkpoint, and write together what one process writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.rank_group import Group, group_of
from tests.support.shared_runs import Doubling, quantized
from tests.support.small_models import llama, mixture, tree

BLOCKS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six equal blocks, with what is outside of them about as large as one."""
    folder = tmp_path_factory.mktemp("model")
    llama(num_hidden_layers=BLOCKS).save_pretrained(folder, max_shard_size="400KB")
    return str(folder)


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of one process."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    assert quantized(model, str(folder))
    return tree(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two ranks."""
    with group_of(2, tmp_path_factory.mktemp("two")) as group:
        yield group


def written(folder: Path) -> int:
    """Bytes of the tensors in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("count", [2, 3])
def test_each_rank_writes_its_share_of_the_bytes_of_one_process(
    model: str, alone: dict[str, str], tmp_path: Path, count: int
) -> None:
    (tmp_path / "group").mkdir()
    with group_of(count, tmp_path / "group") as group:
        shares = group(quantized, model, str(tmp_path / "out"))
    assert tree(tmp_path / "out") == alone
    assert {path.name for path in tmp_path.iterdir()} == {"group", "out"}
    assert sum(shares) == pytest.approx(written(tmp_path / "out"), rel=0.1)  # without headers
    for share in shares:
        assert abs(share / sum(shares) - 1 / count) < 0.1  # seven parts, not quite equal


def test_experts_that_are_stacked_are_shared_too(two: Group, tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path / "model")
    given = {"scheme": "NVFP4A16", "ignore": ["lm_head", "re:.*gate$"]}
    quantized(str(tmp_path / "model"), str(tmp_path / "alone"), **given)
    shares = two(quantized, str(tmp_path / "model"), str(tmp_path / "out"), **given)
    assert all(isinstance(one, int) for one in shares)
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_the_others_and_one_goes_on(
    model: str, alone: dict[str, str], two: Group, tmp_path: Path, rank: int
) -> None:
    out = tmp_path / "out"
    found = two(quantized, model, str(out), "full", rank=rank, after=2)
    assert found[rank] == "OutputError: The disk is full."
    assert found[1 - rank] == f"ProcessError: Process {rank} has failed: {found[rank]}"
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    share = quantized(model, str(out), resume="must")
    assert isinstance(share, int)
    assert 0 < share < written(out)
    assert tree(out) == alone


@pytest.mark.parametrize(
    ("rank", "after"),
    [(1, 0), (0, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 2), (0, 4)))],
)
def test_a_rank_is_killed_and_any_number_goes_on(
    model: str, alone: dict[str, str], tmp_path: Path, rank: int, after: int
) -> None:
    out = tmp_path / "out"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with group_of(2, tmp_path / "first") as group:
        found = group(quantized, model, str(out), "killed", rank=rank, after=after)
    assert found[rank] is None
    assert str(found[1 - rank]).startswith("ProcessError")
    assert not out.exists()
    with group_of(2 + after % 2, tmp_path / "second") as group:
        shares = group(quantized, model, str(out), resume="must")
    assert sum(shares) < written(out)
    assert tree(out) == alone


def test_ranks_that_do_not_agree_are_told_once_each(
    model: str, alone: dict[str, str], two: Group, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    for where, what in (("scheme", "recipe"), ("converter", "converter")):
        for error in two(quantized, model, out, where):
            assert error.startswith("ArgumentError")
            assert f"different values of {what}" in error
    first, second = two(quantized, model, out, "elsewhere")
    assert first.startswith("OutputError: Rank 1 does not see")
    assert first == second
    assert not list(tmp_path.iterdir())
    two(quantized, model, out)
    assert tree(tmp_path / "out") == alone


def test_a_converted_source_and_a_replaced_output(model: str, two: Group, tmp_path: Path) -> None:
    given = {"converter": Doubling(), "scheme": "FP8_DYNAMIC"}
    quantized(model, str(tmp_path / "alone"), **given)
    for again in (False, True):
        found = two(quantized, model, str(tmp_path / "out"), **given, overwrite=again)
        assert all(isinstance(one, int) for one in found)
        assert tree(tmp_path / "out") == tree(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "out"}


def test_an_error_of_the_first_rank_is_that_of_all(model: str, two: Group, tmp_path: Path) -> None:
    first, second = two(quantized, model, str(tmp_path / "out"), resume="must")
    assert first.startswith("OutputError: There is nothing to resume")
    assert second == f"ProcessError: Process 0 has failed: {first}"
