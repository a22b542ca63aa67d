# SPDX-License-Identifier: Apache-2.0
"""Collectives of real processes: exact, in order, alike on all ranks, and never stuck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import reduce

import pytest
import torch
from tests.support import rank_work as work
from tests.support.rank_group import Group, group_of

from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.launch import TIMEOUT

COUNTS = [2, 3, 4]


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> Iterator[Callable[[int], Group]]:
    """The group of so many ranks, whose processes are started once."""
    begun: dict[int, Group] = {}
    with ExitStack() as stack:

        def group(count: int) -> Group:
            if count not in begun:
                folder = tmp_path_factory.mktemp(f"{count}-ranks")
                begun[count] = stack.enter_context(group_of(count, folder))
            return begun[count]

        yield group


def in_order(parts):
    """The sum as one process computes it, rank after rank."""
    return reduce(torch.add, parts)


def test_one_rank_is_alone_and_gets_back_what_it_gives():
    x = torch.randn(3, 3)
    with Ranks() as ranks, ranks.agreed("nothing"):
        assert ranks.sum_to(0, x, what="x") is x
        assert ranks.sum_all(x, what="x", symmetric=True) is x
        assert ranks.max_all(x, what="x") is x
        assert ranks.broadcast_from(0, {"x": x}, what="x")["x"] is x
    assert ranks.sum_all(torch.tensor([True, True]), what="x").dtype == torch.int64
    assert (ranks.sent, ranks.received) == (0, 0)


@pytest.mark.parametrize("count", COUNTS)
def test_a_sum_is_that_of_one_process_in_the_order_of_the_ranks(groups, count):
    found = groups(count)(work.sums, panel=1 << 20)
    exact = in_order([work.numbers(rank).double() for rank in range(count)])
    numbers = in_order([work.numbers(rank) for rank in range(count)])
    torch.testing.assert_close(numbers.double(), exact, rtol=1e-5, atol=1e-4)
    matrix = in_order([work.gram(rank) for rank in range(count)])
    for rank, one in enumerate(found):
        assert one["all"].equal(numbers)
        assert one["strided all"].equal(numbers.permute(2, 0, 1)[:, ::2])
        assert one["whole"].equal(matrix)
        assert one["triangle all"].equal(matrix)
        assert one["nothing"].shape == (0, 4)
        assert one["scalar"] == 2.5 * count
        assert (one["to"] is None) == (rank != count - 1)
        assert (one["triangle"] is None) == (rank != 0)
    assert found[-1]["to"].equal(numbers)
    assert found[0]["strided"].equal(numbers.permute(2, 0, 1)[:, ::2])
    assert found[0]["triangle"].equal(matrix)
    assert matrix.equal(matrix.T)


@pytest.mark.parametrize("panel", [64, 200, 1500])
def test_neither_panels_nor_repetition_change_a_sum(groups, panel):
    whole = groups(3)(work.sums, panel=1 << 20)
    again = groups(3)(work.sums, panel=panel)
    for one, other in zip(whole, again, strict=True):
        for name, value in one.items():
            assert value is other[name] is None or value.equal(other[name]), name


def test_sums_have_room(groups):
    """Half precision is added in float32, integers and bool in int64."""
    [found, *_] = groups(3)(work.listed, [60000.0, 60000.0, 1.0], torch.float16)
    assert (found["sum"].dtype, found["max"].dtype) == (torch.float32, torch.float16)
    assert found["sum"].unique().tolist() == [120001.0]
    [found, *_] = groups(3)(work.listed, [200, 200, 7], torch.uint8)
    assert [one.unique().tolist() for one in found.values()] == [[407], [200], [7]]
    [found, *_] = groups(3)(work.listed, [True, True, False])
    assert [one.unique().tolist() for one in found.values()] == [[2], [True], [False]]
    [found, *_] = groups(4)(work.listed, [256.0, 1.0, 1.0, 1.0], torch.bfloat16)
    assert found["sum"].unique().tolist() == [259.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_a_sum_of_each_dtype_is_exact(groups, dtype):
    wide = {torch.bfloat16: torch.float32, torch.int32: torch.int64}.get(dtype, dtype)
    expected = in_order([work.numbers(rank, dtype).to(wide) for rank in range(3)])
    for found in groups(3)(work.sum_of, dtype):
        assert found.dtype == wide
        assert found.equal(expected)


@pytest.mark.parametrize("place", range(3))
def test_nan_and_infinity_are_seen_by_all(groups, place):
    values = [1.0, 2.0, 3.0]
    values[place] = torch.nan
    for found in groups(3)(work.listed, values):
        assert all(one.isnan().all() for one in found.values())
    values[place] = torch.inf
    for found in groups(3)(work.listed, values):
        assert found["max"].isposinf().all()
        assert found["min"].unique().tolist() == [min(values)]


def test_extremes_are_bitwise_those_of_one_process(groups):
    values, dtype = [3.5, -7.0, 0.25, 9.0], torch.float8_e4m3fn
    [first, *others] = groups(4)(work.listed, values, dtype, names=("max", "min"))
    assert first["max"].dtype == dtype
    assert first["max"].float().unique().tolist() == [9.0]
    assert first["min"].float().unique().tolist() == [-7.0]
    assert all(one["max"].float().equal(first["max"].float()) for one in others)


@pytest.mark.parametrize(("count", "owner"), [(2, 0), (3, 1), (4, 3)])
@pytest.mark.parametrize("panel", [1 << 20, 50])
def test_copies_are_bitwise_for_each_dtype(groups, count, owner, panel):
    assert groups(count)(work.copied, owner, panel) == [True] * count


@pytest.mark.parametrize("panel", [1 << 20, 50])
def test_tensors_of_all_ranks_are_bitwise_those_that_they_have(groups, panel):
    assert groups(4)(work.gathered, panel) == [True] * 4


def test_bytes_are_those_of_the_lower_bound(groups):
    side, count = 64, 4
    size = 4 * side * side
    found = groups(count)(work.traffic, side, 4096)
    slack = 1000  # bytes that ranks compare, and the header of a copy
    to, triangle, every, copy = zip(*found, strict=True)

    def check(pairs, sent, received):
        for pair, expected in zip(pairs, zip(sent, received, strict=True), strict=True):
            assert pair == pytest.approx(expected, abs=slack)

    check(to, [0, size, size, size], [3 * size, 0, 0, 0])
    half = 4 * side * (side + 1) // 2
    check(triangle, [0, half, half, half], [3 * half, 0, 0, 0])
    check(every, [2 * size * 3 / 4] * 4, [2 * size * 3 / 4] * 4)
    check(copy, [2 * size, size, 0, 0], [0, size, size, size])


@pytest.mark.parametrize("how", ["other work", "other shape", "other place"])
def test_ranks_that_do_different_things_are_told(groups, how):
    found = groups(3)(work.unlike, how)
    assert all(one.startswith("ProcessError") for one in found)
    if how == "other place":
        assert all("w is float32 (4,) here, and float32 (3,) at its owner" in one for one in found)
        assert all("Process 2" in one for one in found)
    else:
        assert len(set(found)) == 1
        assert "0: add of all of 'the sums', float32 (3,)" in found[0]
        assert "2: " in found[0]
    assert groups(3)(work.listed, [1, 2, 3])[0]["sum"].unique().tolist() == [6], "it goes on"


def test_an_error_of_one_rank_ends_all(groups):
    for how in ("raises", "raises in a part"):
        *others, last = groups(3)(work.broken, how, 60)
        assert "KeyError: 'gone'" in last
        for one in others:
            assert "ProcessError: Process 2 has failed: KeyError: 'gone'" in one
            assert float(one.split()[0]) < 5


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_dies_ends_the_others_within_seconds(tmp_path, count):
    with group_of(count, tmp_path) as group:
        *others, last = group(work.broken, "is killed", 60)
    assert last is None
    for one in others:
        assert f"Rank {count - 1} has ended while rank" in one
        assert "at 'a part'" in one
        assert float(one.split()[0]) < 10


def test_a_rank_that_hangs_ends_all_by_the_timeout_with_its_name(tmp_path):
    with group_of(3, tmp_path) as group:
        found = group(work.broken, "hangs", 1.5)
    for one in found:
        assert "has waited 1.5 s at 'a part' for rank 2, not there yet" in one
        assert float(one.split()[0]) < 8


def test_ranks_wait_as_long_as_the_group_of_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "900")  # for groups that are made here
    with group_of(2, tmp_path, timeout=timedelta(seconds=1.5)) as group:
        found = group(work.broken, "hangs", None)
    for one in found:
        assert "has waited 1.5 s at 'a part' for rank 1, not there yet. If it needs that" in one
        assert "give init_process_group a longer timeout" in one
        assert float(one.split()[0]) < 8


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint64])
def test_what_cannot_be_added_is_refused_before_anything_is_sent(dtype):
    with pytest.raises(TypeError, match=f"H is {str(dtype)[6:]}, which cannot be combined"):
        Ranks().sum_all(torch.zeros(2, dtype=dtype), what="H")


def test_only_a_square_matrix_is_symmetric():
    with pytest.raises(ValueError, match=r"H has the shape \(2, 3\): no symmetric matrix"):
        Ranks().sum_to(0, torch.zeros(2, 3), what="H", symmetric=True)


@pytest.mark.gpu
def test_tensors_of_a_device_go_through_main_memory(tmp_path):
    """The group has gloo alone; with NCCL they would stay on the device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with group_of(2, tmp_path) as group:
        for found in group(work.on_device):
            assert found == (3.0, "cuda", 2.0, "cuda")
