# SPDX-License-Identifier: Apache-2.0
"""The plan of several ranks, against small cases counted one message at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import published_models as published
from tests.support.rank_group import group_of, on_ranks
from torch import Tensor
from typer.testing import CliRunner

from llmcompressor import oneshot, plan
from llmcompressor.cli.app import app
from llmcompressor.core.contract import Cost, DataSize
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.pruning import SparseGPTModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.sparsity.solve import sparsegpt_cost
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.planning import make, passes
from llmcompressor.planning.ranks import (
    Layout,
    OwnedGroup,
    RankWork,
    divided,
    owners,
    pays_to,
    rank_loads,
    rank_seconds,
    wire_seconds,
)
from llmcompressor.planning.result import Links, Operations, RankCount, Rates
from llmcompressor.planning.workload import Traffic, estimate_time
from llmcompressor.quantization.column_solver import gptq_cost
from llmcompressor.runtime.collectives import Ranks

RATES = Rates("cpu", 1e12, 1e11, 1e9, 5e8, 1.0)
LINKS = Links(within=1e9, between=1e8)
DATA = [{"input_ids": list(range(3, 19))} for _ in range(16)]
GIVEN: dict[str, Any] = {"measure": RATES, "max_seq_length": 16}


def group(name: str, cost: int = 1) -> OwnedGroup:
    return OwnedGroup(name, solving=100 * cost, summed=30 * cost, copied=7 * cost)


def work_of(*stops: list[OwnedGroup]) -> RankWork:
    groups = [one for stop in stops for one in stop]
    solving = sum(one.solving for one in groups)
    return RankWork(
        stops=stops,
        batches=10,
        operations=Operations(forward=10_007, solve=solving + 503 + 11),
        statistics=503,
        steps=20,
        traffic=Traffic(10**6, 1000 + 7 * len(groups), 2.0, 10, True),
        stored={"head": 900, **{one.name: 7 for one in groups}},
    )


MIXED = work_of([group("a", 5)], [group("b", 1), group("c", 2), group("d", 2)], [group("e", 3)])


def messages(work: RankWork, ranks: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Bytes of reduce and broadcast that each rank sends and receives, message by message."""
    found = tuple([0] * ranks for _ in range(4))
    for owner, one in zip(owners(work.groups, ranks), work.groups, strict=True):
        for rank in set(range(ranks)) - {owner}:
            found[0][rank] += one.summed
            found[1][owner] += one.summed
        having = [owner]
        while len(having) < ranks:  # all that have it send it to one more
            for sender in list(having):
                reached = (owner + len(having)) % ranks
                if len(having) < ranks and reached not in having:
                    found[2][sender] += one.copied
                    found[3][reached] += one.copied
                    having.append(reached)
    return found[0], found[1], found[2], found[3]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 16])
def test_bytes_are_those_of_all_messages(ranks: int) -> None:
    loads = rank_loads(MIXED, ranks)
    sent, received, copied, copies = messages(MIXED, ranks)

    assert [one.reduce_sent for one in loads] == sent
    assert [one.reduce_received for one in loads] == received
    assert [one.broadcast_sent for one in loads] == copied
    assert [one.broadcast_received for one in loads] == copies


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 10])
def test_shares_add_up_to_the_work_of_one(ranks: int) -> None:
    loads, groups = rank_loads(MIXED, ranks), MIXED.groups

    assert sum(one.batches for one in loads) == MIXED.batches
    assert sum(one.forward for one in loads) == MIXED.operations.forward + MIXED.statistics
    assert sum(one.solving for one in loads) == sum(one.solving for one in groups)
    assert sum(one.written for one in loads) == MIXED.traffic.written
    summed, copied = sum(one.summed for one in groups), sum(one.copied for one in groups)
    assert sum(one.reduce_sent for one in loads) == (ranks - 1) * summed
    assert sum(one.reduce_received for one in loads) == (ranks - 1) * summed
    assert sum(one.broadcast_sent for one in loads) == (ranks - 1) * copied
    assert sum(one.broadcast_received for one in loads) == (ranks - 1) * copied


def test_ranks_divide_a_stop_with_fewer_groups() -> None:
    one, other = (replace(group(name, 60), divides=True) for name in "ab")
    for ranks in (3, 4, 6):
        loads, stop = rank_loads(work_of([one, other]), ranks), [one, other]
        assert {load.solving for load in loads} == {2 * one.solving // ranks}
        summed, copied = (sum(getattr(own, name) for own in stop) for name in ("summed", "copied"))
        first = loads[0]
        assert first.reduce_sent == first.reduce_received == 2 * summed * (ranks - 1) // ranks
        assert sum(load.broadcast_sent for load in loads) == (ranks - 1) * copied
    two = rank_loads(work_of([one, other]), 2)
    assert [load.solving for load in two] == [one.solving] * 2, "each has its own"
    mixed = rank_loads(work_of([replace(one, divides=False), other]), 3)
    assert sorted(load.solving for load in mixed) == [0, one.solving, one.solving]


def test_owners_have_about_the_same_work() -> None:
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(1, 1000, (200,), generator=generator).tolist()
    groups = [group(f"{place}", cost) for place, cost in enumerate(costs)]
    for ranks in (2, 4, 16):
        work = [one.solving for one in rank_loads(work_of(groups), ranks)]
        assert max(work) - min(work) <= 100 * max(costs)
        assert max(work) / min(work) < 1.01
    assert owners(groups[::-1], 4) == owners(groups, 4)[::-1]  # whatever their order
    assert owners([OwnedGroup(name) for name in "dcba"], 4) == [3, 2, 1, 0]  # also without costs


def test_parts_of_a_total() -> None:
    assert divided(7, [0, 0]) == [3, 4]
    assert divided(100, [3, 1]) == [75, 25]
    assert sum(divided(10**18 + 1, [5, 4, 4])) == 10**18 + 1


def test_one_rank_takes_what_the_plan_says() -> None:
    seconds = rank_seconds(MIXED, rank_loads(MIXED, 1), 1, RATES, LINKS)
    alone, _ = estimate_time(RATES, MIXED.operations, MIXED.steps, MIXED.traffic)

    assert seconds == alone
    assert wire_seconds(MIXED, 1, 1, LINKS) == {}


def test_seconds_of_two_nodes_by_hand() -> None:
    """Four ranks, two a node: the owner hears one in its node and two in the other.

    A tree from rank 0 or 2 first reaches the node of its root, and then the other twice at once;
    from rank 1 or 3 it crosses at both levels.
    """
    summed, even, odd = 30 * 13, 7 * (5 + 1 + 2), 7 * (3 + 2)
    wire = wire_seconds(MIXED, 4, 2, LINKS)

    assert wire["reduce"] == pytest.approx(summed * max(1 / 1e9, 2 / 1e8))
    assert wire["broadcast"] == pytest.approx(even * (1 / 1e9 + 2 / 1e8) + odd * 2 / 1e8)
    assert wire_seconds(MIXED, 4, 1, LINKS)["reduce"] == pytest.approx(summed * 3 / 1e9)

    seconds = rank_seconds(MIXED, rank_loads(MIXED, 4), 2, RATES, LINKS)
    solving = 500 + 300 + 300  # one rank has both b and c of the second stop
    assert seconds["calibrate"] == pytest.approx(10_007 * 0.3 / 1e12 + 6 * 0.003)
    assert seconds["solve"] == pytest.approx((503 * 0.3 + solving + 11) / 1e11, abs=1e-11)
    assert {name: seconds[name] for name in wire} == wire


def test_groups_of_one_stop_are_solved_at_once_and_stops_are_not() -> None:
    groups = [group(f"{place}", 10**9) for place in range(8)]
    together, apart = work_of(groups), work_of(*([one] for one in groups))
    times = {
        name: [
            rank_seconds(work, rank_loads(work, ranks), 1, RATES, LINKS)["solve"]
            for ranks in (1, 2, 4, 8)
        ]
        for name, work in {"together": together, "apart": apart}.items()
    }
    assert times["together"] == pytest.approx([8, 4, 2, 1], rel=1e-3)
    assert times["apart"] == pytest.approx([8, 8, 8, 8], rel=1e-3)


def test_where_a_doubling_gains_less_than_a_tenth() -> None:
    def counts(*times: float | None) -> list[RankCount]:
        return [
            RankCount(1 << place, 1, 0, 0, 0, 0, {}, time, None) for place, time in enumerate(times)
        ]

    assert pays_to(counts(100, 60, 50, 46, 45)) == 4
    assert pays_to(counts(100, 50, 25)) is None
    assert pays_to(counts(None, None)) is None


# --------------------
# What statistics send.


def own_statistics(columns: int, rows: int, *, twin: bool) -> InputStatistics:
    weights = [torch.ones(rows, columns, dtype=torch.bfloat16)]
    found = InputStatistics(columns, "cpu", twin=twin, weights=weights)
    found.update(torch.ones(3, columns), torch.zeros(3, columns) if twin else None)
    return found


def sum_and_copy(ranks: Ranks) -> list[int]:
    """Bytes that this rank sends: sums of both kinds of statistics, and a copy."""
    sent = [ranks.sent]
    for rows, twin in ((8, True), (16, False), (4, True)):
        own_statistics(8, rows, twin=twin).sum_over(ranks, owner=1)
        sent.append(ranks.sent)
    ranks.broadcast_from(1, {"weight": torch.ones(5000)}, what="a weight")
    return [after - before for before, after in zip(sent, [*sent[1:], ranks.sent], strict=True)]


def on_each() -> Any:
    return on_ranks(sum_and_copy)


def test_ranks_send_what_is_planned(tmp_path: Path) -> None:
    """But for the records that they compare, some hundred bytes an operation."""
    costs = [
        gptq_cost(
            [torch.empty(rows, 8, dtype=torch.bfloat16)],
            DataSize(),
            twin=twin,
            refinements=0,
            answered=True,
        )
        for rows, twin in ((8, True), (16, False), (4, True))
    ]
    summed = [cost.summed_bytes for cost in costs]
    assert summed == [4 * 36 + 4 * 64, 4 * 36, 4 * 36 + 4 * 32]
    with group_of(3, tmp_path) as run:
        sent = run(on_each)
    (load, *_) = rank_loads(work_of([OwnedGroup("w", copied=20_000)]), 3)
    assert sent[1][3] - load.broadcast_sent in range(1000)
    owner = sent[1]
    for rank in (0, 2):
        records = [one - other for one, other in zip(sent[rank], summed, strict=False)]
        assert records == owner[:3]


@pytest.mark.parametrize("twin", [False, True])
def test_pruning_declares_the_sums_it_keeps(twin: bool) -> None:
    matrix: Tensor = torch.empty(6, 8)
    cost = sparsegpt_cost([matrix], DataSize(), twin=twin, refinements=0, grouped=True)
    assert cost.summed_bytes == 4 * 36 + twin * 4 * 64
    assert (cost + cost).summed_bytes == 2 * cost.summed_bytes
    assert Cost().summed_bytes == 0


# --------------------
# Whole plans.


def gptq() -> GPTQModifier:
    return GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])


def test_a_plan_of_several_ranks(llama_folder: Path) -> None:
    alone = plan(llama_folder, gptq(), DATA, **GIVEN)
    found = plan(llama_folder, gptq(), DATA, ranks=6, nodes=3, link_speed=2, **GIVEN)
    assert not found.problems
    assert found.ranks is not None
    assert alone.ranks is None
    assert found.operations == alone.operations
    assert found.time == alone.time
    counts = found.ranks.counts

    assert [one.ranks for one in counts] == [1, 2, 4, 6]
    assert [one.nodes for one in counts] == [1, 1, 2, 3]
    assert counts[0].sent == counts[0].received == 0
    assert found.time is not None
    assert counts[0].time == pytest.approx(found.time.seconds)
    assert counts[0].host == max(one.host for one in found.phases)
    assert counts[0].seconds == {one.name: one.seconds for one in found.phases} | {"learn": 0.0}
    assert found.ranks.links == Links(2e9, 1.25e9)
    assert sum(one.written for one in found.ranks.loads) == found.sizes.weights
    assert [one.batches for one in found.ranks.loads] == [3, 3, 3, 3, 2, 2]
    # two blocks: q k v, o, gate up, of 128 columns each, with rows 256, 128, 512; and down
    square, down = 4 * 128 * 129 // 2 + 4 * 128**2, 4 * 256 * 257 // 2 + 4 * 256 * 128
    total = sum(one.reduce_sent for one in found.ranks.loads)
    # of each stop all ranks solve the one group together, so that all of them need the sums
    assert total == 6 * (2 * 2 * (3 * square + down) * 5 // 6)


@pytest.mark.parametrize("given", [None, 700])
def test_the_free_memory_is_divided_by_the_ranks_of_a_node(
    given: int | None, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int | None, int]] = []

    def watched(modifiers: Any, context: passes.PassContext) -> Any:
        found.append((context.ranks, context.budget))
        return passes.plan_passes(modifiers, context)

    monkeypatch.setattr(passes, "activation_budget", lambda _: 1000)
    monkeypatch.setattr(make, "plan_passes", watched)
    plan(llama_folder, gptq(), DATA, ranks=6, nodes=3, activation_budget=given, **GIVEN)
    each = given or 500  # what is given is that of a rank
    assert found == [(1, given or 1000), (1, given or 1000), (2, each), (4, each), (6, each)]


def test_waiting_activations_are_divided(tmp_path: Path) -> None:
    config = published.LLAMA_3_8B | {"num_hidden_layers": 2}
    source = published.write_headers(tmp_path / "m", config, published.tensors_of(config))
    found = plan(
        source, gptq(), ranks=8, activation_budget="512GiB", **GIVEN | {"max_seq_length": 2048}
    )
    assert found.ranks is not None
    memory = [one.host for one in found.ranks.counts]
    times = [one.time for one in found.ranks.counts]

    assert memory == sorted(memory, reverse=True)
    assert memory[0] - memory[-1] > 0.8 * found.passes[0].activations
    assert times == sorted(times, reverse=True)


RECIPES: dict[str, Callable[[], Any]] = {
    "gptq": gptq,
    "observed": lambda: QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
    "rounded": lambda: QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    "pruned": lambda: SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets="Linear"),
}


def compress(recipe: str, source: str, folder: str) -> tuple[int, int]:
    """Compress in a group; the bytes that this rank has sent and received."""
    made: list[Ranks] = []
    initialize = Ranks.__init__

    def noting(self: Ranks, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "__init__", noting)
        modifier = RECIPES[recipe]()
        oneshot(source, modifier, DATA, output_dir=folder, max_seq_length=16, verify=False)
    (ranks,) = (one for one in made if one.count > 1)
    return ranks.sent, ranks.received


def test_runs_send_what_is_planned(llama_folder: Path, tmp_path: Path) -> None:
    """But for the records that ranks compare and what modifiers report, tens of kilobytes."""
    with group_of(3, tmp_path) as run:
        for recipe, make in RECIPES.items():
            found = plan(llama_folder, make(), DATA, ranks=3, **GIVEN).ranks
            assert found is not None
            counted = run(compress, recipe, str(llama_folder), str(tmp_path / recipe))
            for load, (sent, received) in zip(found.loads, counted, strict=True):
                assert 0 <= sent - load.reduce_sent - load.broadcast_sent < 60_000, recipe
                assert 0 <= received - load.reduce_received - load.broadcast_received < 60_000
                is_moved = load.reduce_sent + load.broadcast_sent > 500_000
                assert is_moved == (recipe in ("gptq", "pruned"))


def test_what_all_ranks_work_on_is_not_divided() -> None:
    stop = [OwnedGroup("a", spread=300, repeated=2 * 10**9), group("b")]
    work = replace(work_of(stop), operations=Operations(solve=2 * 10**9 + 100), statistics=0)
    for ranks in (1, 2, 3, 4):
        loads = rank_loads(work, ranks)
        assert [one.reduce_sent for one in loads] == [
            600 * (ranks - 1) // ranks + 30 * (one.solving == 0) for one in loads
        ]
        seconds = rank_seconds(work, loads, 1, RATES, LINKS)
        assert seconds["solve"] == pytest.approx(2e-2, rel=1e-6)
    wire = wire_seconds(work, 4, 2, LINKS)
    assert wire["reduce"] == pytest.approx(30 * 2 / 1e8 + 2 * 300 * max(1 / 1e9, 4 / 1e8) / 4)


def test_a_note_says_why_ranks_would_not_share(llama_folder: Path) -> None:
    found = plan(llama_folder, gptq(), DATA, ranks=2, pipeline="basic", **GIVEN)
    assert found.ranks is None
    assert any("the basic pipeline needs all samples" in note for note in found.notes)


def test_without_data_scales_are_copied(llama_folder: Path) -> None:
    found = plan(llama_folder, RECIPES["rounded"](), ranks=4, measure=RATES)
    assert found.ranks is not None
    loads = found.ranks.loads
    assert {one.batches + one.forward + one.reduce_sent for one in loads} == {0}
    # bfloat16 scales of groups of 128: q k v, o, gate up of 128 columns, and down of 256
    scales = 2 * 2 * (256 + 128 + 512 + 2 * 128)
    assert sum(one.broadcast_sent for one in loads) == 3 * scales
    assert max(one.written for one in loads) < 1.1 * min(one.written for one in loads) + 41_000
    times = [one.seconds["save"] for one in found.ranks.counts]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": 2.0}, "whole number"),
        ({"ranks": 4, "nodes": 3}, "does not divide 4 ranks"),
        ({"nodes": 2}, "does not divide 1 rank"),
        ({"ranks": 2, "link_speed": 0}, "positive number"),
        ({"ranks": 2, "node_link_speed": float("nan")}, "positive number"),
        ({"ranks": 2, "link_speed": "fast"}, "positive number"),
    ],
)
def test_wrong_numbers_are_one_error(wrong: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=words):
        plan(tmp_path, gptq(), **wrong)


def test_more_ranks_than_samples_are_a_problem(llama_folder: Path) -> None:
    found = plan(llama_folder, gptq(), DATA[:3], ranks=4, **GIVEN)
    (problem,) = found.problems
    assert "4 ranks" in problem.message
    assert "3 calibration batches" in problem.message
    assert found.ranks is None
    Layout(3).check_batches(3)


def test_the_command_prints_it(llama_folder: Path) -> None:
    recipe = "modifiers:\n  GPTQModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}\n"
    call = ["plan", str(llama_folder), "--recipe", recipe, "--ranks", "4", "--nodes", "2"]
    call += ["--node-link-speed", "25"]
    shown = CliRunner().invoke(app, call, env={"COLUMNS": "160"})
    for words in ("On several ranks", "Times faster", "Shares of 4 ranks", "25 GB/s between nodes"):
        assert words in shown.output
    content = json.loads(CliRunner().invoke(app, [*call, "--json", "--no-measure"]).output)
    assert [one["ranks"] for one in content["ranks"]["counts"]] == [1, 2, 4]
    assert len(content["ranks"]["loads"]) == 4
