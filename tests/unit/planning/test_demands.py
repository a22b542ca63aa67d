# SPDX-License-Identifier: Apache-2.0
"""Memory, disk and time: the counting behind the estimates."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
)
from tests.support import published_models as published
from tests.support.thinned import thinned
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.args import ModelArguments
from llmcompressor.checkpoint.packing import compress, quantized_module
from llmcompressor.core.contract import Cost, DataSize, Granularity
from llmcompressor.core.state import State
from llmcompressor.modifiers.awq.base import AWQModifier
from llmcompressor.modifiers.awq.base import _InputMoments as Moments
from llmcompressor.modifiers.awq.parents import awq_cost
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.sparsity.solve import sparsegpt_cost
from llmcompressor.modifiers.transform import QuIPModifier
from llmcompressor.numerics.hessian import factorize_with_rising_dampening
from llmcompressor.numerics.masks import NofM, Share, Sparsity
from llmcompressor.numerics.sparse_fit import sparse_fit
from llmcompressor.numerics.sparsegpt import sparse_sweep
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.planning import trial as trials
from llmcompressor.planning.memory import PartMemory, RunMemory, estimate_phases
from llmcompressor.planning.result import Operations, PassPlan, Phase, Rates
from llmcompressor.planning.subject import REST, Part, open_planned_model
from llmcompressor.planning.trial import SchemeCost, count_memory, measure_scheme
from llmcompressor.planning.workload import (
    BlockWork,
    BlockWorks,
    Stop,
    Traffic,
    estimate_time,
    measure_rates,
    read_widths,
)
from llmcompressor.quantization.column_solver import Options, Problem, gptq_cost, solve
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.runtime.memory import TOLERATED

MIB = 2**20


def scheme_of(preset: str) -> Any:
    modifier = QuantizationModifier(targets=["Linear"], scheme=preset)
    return next(iter(modifier.resolve_quantization_config().groups.values()))


def test_the_counter_sees_what_is_alive_at_once() -> None:
    with count_memory() as counter:
        first = torch.zeros(MIB, dtype=torch.uint8)
        del first
        second = torch.zeros(2 * MIB, dtype=torch.uint8)
        view = second[:10]
        third = torch.zeros(MIB, dtype=torch.uint8)

    assert counter.peak == 3 * MIB
    assert len(view) + len(third) > 0


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """What other threads allocate is not counted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("rows", [128, 512, 1024])
@pytest.mark.parametrize(("twin", "refinements"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("answered", [True, False])
def test_the_workspace_of_gptq_is_that_of_its_solver(
    rows: int, twin: bool, refinements: int, answered: bool
) -> None:
    columns = 512
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    inputs = torch.randn(1024, columns, generator=generator).bfloat16()
    weights = [weight] if answered else []
    statistics = InputStatistics(columns, "cpu", twin=twin, weights=weights)
    statistics.update(inputs, inputs * 1.01 if twin else None)
    gram, cross, missing = statistics.gram, statistics.cross, statistics.missing
    assert (missing is not None) == (twin and answered and rows == 128)
    args = scheme_of("W4A16").weights
    problem = Problem(
        [weight],
        [observe_weight(weight, args)],
        gram,
        cross,
        tokens=len(inputs),
        ordered=True,
        missing_CR=missing,
    )
    options = Options(128, 0.01, 0.05 if twin else None, refinements=refinements)
    with count_memory() as counter:
        solve([problem], options)

    planned = gptq_cost([weight], DataSize(), twin=twin, refinements=refinements, answered=answered)
    assert planned.peak_bytes == pytest.approx(counter.peak, rel=0.12)
    held = sum(one.nbytes for one in (gram, cross, missing) if one is not None)
    copied = weight.nbytes if missing is not None else 0
    assert held + copied == planned.held_bytes


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("rows", "group"), thinned([512, 1024, 2048], [None, NofM(2, 4)]))
def test_the_workspace_of_sparsegpt_is_that_of_its_solver(rows: int, group: NofM | None) -> None:
    columns = 512
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(rows, columns, generator=generator)
    inputs_TC = torch.randn(1024, columns, generator=generator)
    hessian_CC = inputs_TC.T @ inputs_TC
    with count_memory() as counter:
        sparse_fit(weight_RC, hessian_CC, Sparsity((Share(rows, 0.5),), group))
    planned = sparsegpt_cost(
        [weight_RC], DataSize(), twin=False, refinements=4, grouped=bool(group)
    )
    assert planned.peak_bytes == pytest.approx(counter.peak, rel=0.15)

    with count_memory() as counter:
        factor_CC = factorize_with_rising_dampening(hessian_CC, 0.01).factor_CC
        sparse_sweep(weight_RC, factor_CC, Sparsity((Share(rows, 0.5),), group))
    planned = sparsegpt_cost(
        [weight_RC], DataSize(), twin=False, refinements=0, grouped=bool(group)
    )
    assert planned.peak_bytes == pytest.approx(counter.peak, rel=0.2)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("rows", "columns", "group"), thinned([(256, 512), (1024, 512), (512, 1024)], [32, 128])
)
def test_the_workspace_of_clipping_is_that_of_its_solver(
    rows: int, columns: int, group: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Linear(columns, rows, bias=False, dtype=torch.bfloat16)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=False)
    vars(linear)["quantization_scheme"] = QuantizationScheme(targets=["Linear"], weights=args)
    inputs_TC = torch.randn(1024, columns, generator=generator)
    modifier, tally = AWQModifier(), Moments(columns, torch.device("cpu"), "")
    tally.update(inputs_TC)
    scale_C = torch.rand(columns, generator=generator) + 0.5
    assert tally.gram.shape == (columns, columns)  # made whole before memory is counted
    with torch.no_grad(), count_memory() as counter:
        modifier._clip([linear], tally, scale_C)
    planned = awq_cost([], DataSize(), points=20, clipped=[linear.weight], group=group)
    assert planned.peak_bytes == pytest.approx(counter.peak, rel=0.2)


@pytest.mark.parametrize("is_written", [True, False])
def test_packing_of_another_size_follows_from_the_trial(is_written: bool) -> None:
    scheme = scheme_of("W4A16")
    trial = measure_scheme(scheme, torch.bfloat16, torch.device("cpu"), is_written=is_written)
    linear = Linear(2048, 512, bias=False, dtype=torch.bfloat16)
    parameters = observe_weight(linear.weight.detach(), scheme.weights)
    own = {"weight": linear.weight.detach(), "weight_scale": parameters.scale}
    if is_written:
        vars(linear)["quantization_status"] = QuantizationStatus.FROZEN
    entry = quantized_module("it", linear, scheme)
    assert entry is not None
    with count_memory() as counter:
        compress(entry, own)

    assert trial.packing.of(2048 * 512) == pytest.approx(counter.peak, rel=0.25)
    assert trial.seconds > 0
    again = measure_scheme(scheme, torch.bfloat16, torch.device("cpu"), is_written=is_written)
    assert (again.rounding, again.packing) == (trial.rounding, trial.packing)
    empty = QuantizationScheme(targets=[])
    assert measure_scheme(empty, torch.bfloat16, torch.device("cpu")) == SchemeCost()


def histogram_of_groups(group: int, **more: Any) -> QuantizationScheme:
    weights = {"num_bits": 4, "strategy": "group", "group_size": group, "observer": "histogram"}
    return QuantizationScheme(targets=["Linear"], weights={**weights, **more})


@pytest.mark.parametrize("group", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_the_memory_of_a_slow_observer_is_measured(group: int) -> None:
    scheme = histogram_of_groups(group)
    trial = measure_scheme(scheme, torch.bfloat16, torch.device("cpu"))
    weight_RC = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    with count_memory() as counter:
        observe_weight(weight_RC, scheme.weights)
    assert trial.rounding.of(64 * 1024) == pytest.approx(counter.peak, rel=0.3)


def test_what_is_slow_is_tried_on_few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be minutes for matrices as large as those of other observers."""
    tried, clock = list[int](), itertools.count(step=trials._MOST_SECONDS + 1)

    def noted(weight_RC: Tensor, *rest: Any) -> Tensor:
        tried.append(len(weight_RC))
        return rounded(weight_RC, *rest)

    rounded = trials._rounded
    monkeypatch.setattr(trials, "_rounded", noted)
    measure_scheme(scheme_of("W4A16"), torch.bfloat16, torch.device("cpu"))
    assert sorted({*tried}) == [2, *trials._ROWS]
    tried.clear()
    monkeypatch.setattr(trials.time, "thread_time", lambda: next(clock))
    measure_scheme(scheme_of("W4A16"), torch.bfloat16, torch.device("cpu"))
    assert sorted({*tried}) == [2, *trials._ROWS[:1]]


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.attention.add_module(name, Linear(8, 8, bias=False))
        self.mlp = Module()
        for name in ("gate_proj", "up_proj"):
            self.mlp.add_module(name, Linear(8, 16, bias=False))
        self.mlp.down_proj = Linear(16, 8, bias=False)


class Counting(QuantizationModifier):
    """Takes as many bytes as there are columns."""

    def cost(self, modules: Any, data: DataSize) -> Cost:
        columns = modules[0].in_features
        return Cost(flops=data.tokens, held_bytes=columns, peak_bytes=columns * data.alike)


def works(level: Granularity | None) -> BlockWork:
    block = Block()
    names = {f"b.{name}" if name else "b": one for name, one in block.named_modules()}
    part = Part("b", names, 0, 0, 0)
    owners = {one: [0] for one in block.modules() if isinstance(one, Linear)}
    widths = read_widths(published_config())
    return BlockWorks(widths, [Counting(scheme="W8A8")], owners, level, DataSize())(part)


def published_config() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**published.small(published.MIXTRAL_8X7B))


def test_coarser_levels_hold_more_at_once() -> None:
    sub_block, block = works(Granularity.SUB_BLOCK), works(Granularity.BLOCK)
    assert [stop.cost.held_bytes for stop in sub_block.stops] == [16, 24]
    assert [stop.cost.held_bytes for stop in block.stops] == [40]
    assert block.stops[0].cost.peak_bytes == 16  # of one problem at a time


def test_float32_solutions_of_a_stop_wait_for_the_last() -> None:
    linear = Linear(8, 8)
    moments = Cost(held_bytes=4 * 8**2)
    assert Stop(groups=[[linear], [linear]], cost=moments).solutions == 4 * 64
    assert Stop(groups=[[linear], [linear]]).solutions == 0


def load(name: str, loaded: int, *, packed: int = 0, packing: int = 0) -> PartMemory:
    return PartMemory(Part(name, {}, loaded, loaded, 0), packed, 0, packing)


def footprint(**changes: Any) -> RunMemory:
    plain = RunMemory(
        base=1000 * MIB,
        is_streamed=True,
        present=0,
        on_device=False,
        output=500 * MIB,
        shard=500 * MIB,
        others=MIB,
        itemsize=2,
        run_tokens=0,
    )
    return dataclasses.replace(plain, **changes)


def data_free(own: RunMemory, blocks: int) -> dict[str, Phase]:
    loads = [load(f"b{index}", 400 * MIB, packed=100 * MIB) for index in range(blocks)]
    one = PassPlan(["RoundingParameters"], "datafree")
    phases = estimate_phases(own, [*loads, load(REST, 200 * MIB)], [(one, [])], {})
    return {phase.name: phase for phase in phases}


def test_a_streamed_run_holds_two_blocks_however_many_there_are() -> None:
    few, many = data_free(footprint(), 4), data_free(footprint(), 40)

    assert few["load"].host == (1000 + 200 + 400 + 400) * MIB + TOLERATED
    assert few["save"].host == few["load"].host + 2 * 100 * MIB
    assert many["save"].host == few["save"].host
    assert few["save"].disk == 501 * MIB


def test_a_model_in_memory_grows_with_its_blocks() -> None:
    few = data_free(footprint(is_streamed=False), 4)
    more = data_free(footprint(is_streamed=False), 5)

    assert more["load"].host - few["load"].host == 400 * MIB
    present = data_free(footprint(is_streamed=False, present=1800 * MIB), 4)
    assert present["load"].host == 1000 * MIB


def test_on_a_device_the_host_holds_what_is_read_and_written() -> None:
    phases = data_free(footprint(on_device=True), 4)
    assert phases["load"].device == (200 + 400) * MIB
    assert phases["load"].host == (1000 + 400) * MIB
    assert phases["save"].host == (1000 + 400 + 200) * MIB


def test_device_and_host_peak_at_different_moments() -> None:
    block, rest = Part("b", {}, 100 * MIB, 100 * MIB, 0), Part(REST, {}, 50 * MIB, 50 * MIB, 0)
    loads = [PartMemory(block, 30 * MIB, 10 * MIB, 0)] * 3 + [PartMemory(rest, 0, 200 * MIB, 0)]
    one = PassPlan(["RoundingParameters"], "datafree")
    phases = estimate_phases(footprint(on_device=True), loads, [(one, [])], {})
    (save,) = (phase for phase in phases if phase.name == "save")
    assert save.device == (50 + 200) * MIB  # the head has no block beside it
    assert save.host == (1000 + 100 + 2 * 30) * MIB  # a block is read, two are packed


def test_learning_adds_what_it_holds_and_its_peak() -> None:
    cost = Cost(held_bytes=40 * MIB, peak_bytes=30 * MIB)
    loads = [
        dataclasses.replace(load("b", 400 * MIB), learning=[cost]),
        load(REST, 200 * MIB),
    ]
    one = PassPlan(["M"], "datafree", activations=9 * MIB, budget=5 * MIB, spilled=4 * MIB)
    phases = estimate_phases(footprint(on_device=True), loads, [(one, [])], {})
    (learn,) = (phase for phase in phases if phase.name == "learn")
    assert learn.device == (600 + 5 + 40 + 30) * MIB
    assert learn.disk == (500 + 4) * MIB


def test_calibration_adds_activations_statistics_and_the_solver() -> None:
    kept = Linear(1024, 768, bias=False)  # 3 MiB, copied for the other stream
    stop = Stop(groups=[[kept]], cost=Cost(held_bytes=7 * MIB, peak_bytes=11 * MIB))
    loads = [load("b", 400 * MIB), load(REST, 200 * MIB)]
    one = PassPlan(["M"], "sequential", "linear", "", 2, 2, 90 * MIB, 50 * MIB, 40 * MIB)
    works = [BlockWork("b", 0, 0, 0, [stop]), BlockWork(REST, 0, 0, 0, ())]
    phases = estimate_phases(footprint(), loads, [(one, works)], {"solve": 5.0})
    found = {phase.name: phase for phase in phases}

    held = (1000 + 200 + 400 + 50 + 7) * MIB
    assert found["calibrate"].host == held
    assert found["solve"].host == held + (3 + 11) * MIB
    assert found["solve"].disk == (500 + 40) * MIB
    assert found["solve"].seconds == 5.0


@pytest.mark.parametrize(
    ("limit", "on_host", "kept", "computed"),
    [(None, False, 30, 15), (None, True, 0, 0), (680, False, 30, 10), (640, False, 20, 0)],
)
def test_kept_data_has_half_of_what_a_limit_leaves(
    limit: int | None, on_host: bool, kept: int, computed: int
) -> None:
    cost = Cost(peak_bytes=22 * MIB, peak_data_bytes=15 * MIB, data_bytes=30 * MIB)
    stop = Stop(cost=cost, data_on_host=on_host)
    loads = [load("b", 400 * MIB), load(REST, 200 * MIB)]
    one = PassPlan(["M"], "sequential", "linear", "", 1, 1)
    works = [BlockWork("b", 0, 0, 0, [stop]), BlockWork(REST, 0, 0, 0, ())]
    own = footprint(on_device=True, limit=None if limit is None else limit * MIB)
    phases = {one.name: one for one in estimate_phases(own, loads, [(one, works)], {})}
    assert phases["calibrate"].device == (600 + kept) * MIB
    assert phases["solve"].device == (600 + 7 + kept + computed) * MIB
    assert phases["solve"].host == (1000 + 45 - kept - computed) * MIB


@pytest.mark.parametrize("others", [[(9, 4)], [(20, 0)], [(3, 3), (30, 28), (11, 1)]])
def test_the_peak_of_costs_is_that_of_one_of_them(others: list[tuple[int, int]]) -> None:
    """With their data there, and without it, which need not be the same one."""
    moments = [(25, 15), *others]
    costs = [Cost(peak_bytes=total, peak_data_bytes=data) for total, data in moments]
    both = sum(costs, start=Cost())
    assert both.peak_bytes == max(total for total, _ in moments)
    assert both.own_peak_bytes == max(total - data for total, data in moments)


# ---------------------------------------------------------------------- time

RATES = Rates("cpu", 1e9, 1e9, disk_read=100.0, disk_write=50.0, spread=1.0)


def timed(*, is_streamed: bool, forward: int = 0) -> dict[str, float]:
    traffic = Traffic(1000, 500, rounding=2.0, first=100, is_streamed=is_streamed)
    operations = Operations(forward=forward)
    seconds = estimate_time(RATES, operations, 0, traffic)[0]
    assert seconds.pop("learn") == 0
    return seconds


def test_reading_and_writing_count_where_they_take_longer() -> None:
    assert timed(is_streamed=False) == {"load": 10, "calibrate": 0, "solve": 0, "save": 12}
    assert timed(is_streamed=True) == {"load": 1 + 7, "calibrate": 0, "solve": 0, "save": 2 + 8}
    busy = timed(is_streamed=True, forward=int(60e9))
    assert busy == {"load": 1, "calibrate": 60, "solve": 0, "save": 2}


def test_the_machine_is_measured_in_about_a_second() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)

    assert rates.spread >= 1
    positive = (rates.model_products, rates.float32_products)
    assert min(*positive, rates.disk_read, rates.disk_write) > 0


@pytest.mark.parametrize("randomize", [False, True])
def test_matrices_that_stay_in_forwards_are_there_all_the_time(
    randomize: bool, llama_folder: Path
) -> None:
    """They do not go with their block, whether all blocks share one or each has its own."""
    subject = open_planned_model(ModelArguments(model=str(llama_folder)))
    before = subject.parts()
    modifier = QuIPModifier(rotations=["v"], targets=r"re:.*down_proj$", randomize=randomize)
    modifier.initialize(State(model=subject.model))
    after = subject.parts()
    width = subject.model.config.intermediate_size
    matrices = 4 * width**2 * (len(before) - 1 if randomize else 1)
    assert [one.loaded for one in after[:-1]] == [one.loaded for one in before[:-1]]
    assert after[-1].loaded == before[-1].loaded + matrices
