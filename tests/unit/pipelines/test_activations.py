# SPDX-License-Identifier: Apache-2.0
"""What suspended passes hold is put away and brought back, and nobody notices."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections import OrderedDict, UserDict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, run_pipeline
from tests.support.thinned import thinned
from torch import nn

from llmcompressor.core.contract import Granularity
from llmcompressor.errors import OutputError
from llmcompressor.modeling.offload import MmapStoragePool
from llmcompressor.modeling.paused_forward import Pass, PausedForward
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.pipelines import activations, sequential
from llmcompressor.pipelines.activations import ActivationStore, held_tensors

LARGE = 256  # squared, in float32: above the smallest storage that is moved


class Toy(nn.Module):
    """Holds views, aliases and small tensors while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(LARGE, LARGE)
        self.register_buffer("table", torch.randn(LARGE, LARGE))
        self.plain = torch.randn(LARGE, LARGE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = x[LARGE // 2 :]
        turned = x.t()
        nested = {"list": [(x + 1,)], "small": torch.ones(3)}
        table, plain, weight = self.table, self.plain, self.layer.weight
        y = self.layer(x)
        x.mul_(2)  # half and turned are views of x, before and after
        total = half.sum() + turned.sum() + nested["list"][0][0].sum() + nested["small"].sum()
        return x, half, turned, y, total, table, plain, weight


def _input(index: int) -> torch.Tensor:
    return torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(index))


def _waiting(count: int = 2) -> tuple[Toy, PausedForward, dict[int, Any]]:
    model, outputs = Toy(), {}

    def run(index: int) -> None:
        outputs[index] = model(_input(index))

    passes = [Pass(index, lambda index=index: run(index)) for index in range(count)]
    return model, PausedForward({model.layer: "layer"}, passes), outputs


def _store(model: nn.Module, budget: int) -> ActivationStore:
    keep = [*model.parameters(), *model.buffers(), model.plain]
    return ActivationStore(budget, keep)


def test_held_tensors_are_those_of_the_call_and_of_every_frame() -> None:
    model, paused, _ = _waiting(1)
    with torch.no_grad(), paused as forward:
        (one,) = forward.next_stop().passes
        held = held_tensors(one)
        shapes = sorted(tuple(tensor.shape) for tensor in held)
        assert shapes.count((LARGE, LARGE)) >= 4  # x, turned, x + 1, and the buffer
        assert (LARGE // 2, LARGE) in shapes
        assert (3,) in shapes
        assert not any(tensor is model.layer.weight for tensor in held)


def test_tensors_are_found_in_containers_of_every_kind() -> None:
    given = [torch.full((2,), float(number)) for number in range(9)]
    skipped = nn.Parameter(given[7]), {1: [({2: given[8]},)]}, "text", 3, None, nn.Linear(2, 2)
    kwargs = {"pair": (given[2], {"deep": given[3]}), "set": {given[4]}, "rest": skipped}
    one = Pass(0, lambda: None, args=(given[0], [given[1]]), kwargs=kwargs)
    one.args += (OrderedDict(last=given[5]), UserDict(last=given[6]))
    found = {id(tensor) for tensor in held_tensors(one)}
    assert found == {id(tensor) for tensor in given[:7]}


def test_parameters_set_aside_are_the_same_elsewhere() -> None:
    model = Toy()
    weight, before = model.layer.weight, model.layer.weight.detach().clone()
    store = ActivationStore(10**9, [*model.parameters()], fits=True, is_little=True)
    address = weight.data_ptr()
    store.set_aside([weight, weight, model.layer.bias])
    store.close()
    assert weight.data_ptr() != address
    assert model.layer.weight is weight
    assert torch.equal(weight, before)
    weight.data.add_(1)
    assert torch.equal(weight, before + 1)


@pytest.mark.parametrize("budget", [0, 10**9])
def test_views_stay_views_and_values_stay_to_the_bit(budget: int) -> None:
    model, paused, outputs = _waiting()
    with torch.no_grad(), paused as forward:
        stop = forward.next_stop()
        store = _store(model, budget)
        for _ in range(2):
            for one in stop.passes:
                store.park(one)
            for one in stop.passes:
                store.fetch(one)
        for one in stop.passes:
            store.park(one)
        forward.release(model.layer)
        for one in stop.passes:
            store.fetch(one)
            forward.resume(one)
        store.close()
    with torch.no_grad():
        for index in range(2):
            expected = model(_input(index))
            assert all(map(torch.equal, outputs[index], expected))
            full, half, turned, *_ = outputs[index]
            assert half.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
            assert turned.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
    assert (store.spilled > 0) == (budget == 0)


def test_what_the_model_owns_is_not_moved() -> None:
    model, paused, _ = _waiting()
    owned = [model.layer.weight, model.table, model.plain]
    before = [tensor.data_ptr() for tensor in owned]
    with torch.no_grad(), paused as forward:
        stop = forward.next_stop()
        store = _store(model, 0)
        for one in stop.passes:
            store.park(one)
        assert [tensor.data_ptr() for tensor in owned] == before
        store.close()


def test_only_what_exceeds_memory_goes_to_files() -> None:
    model, paused, _ = _waiting(3)
    size = 4 * LARGE**2
    with torch.no_grad(), paused as forward:
        stop = forward.next_stop()
        store = _store(model, 2 * size)  # x (with its views) and x + 1 of one pass
        for one in stop.passes:
            store.park(one)
        assert store.peak == 2 * size
        assert store.spilled == 2 * 2 * size
        store.fetch(stop.passes[0])
        store.park(stop.passes[0])  # its place was free again
        assert store.spilled == 2 * 2 * size
        for one in stop.passes:
            store.fetch(one)
        store.park(stop.passes[2])
        assert store.spilled == 2 * 2 * size
        store.close()


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(activations, "_SMALLEST", 1)
    monkeypatch.setattr(sequential, "activation_budget", lambda _: 1)
    with pytest.raises(OutputError, match=r"No space left on device.*TMPDIR"):
        run_pipeline(tiny.build("llama"), tiny.text_batches(), Recorder())
    assert list(tmp_path.iterdir()) == []


def _assert_same(one: Recorder, other: Recorder) -> None:
    """Both were told the same in the same order, and saw the same bits."""
    assert one._events == other._events
    for kind in ("_inputs", "_references"):
        assert getattr(one, kind).keys() == getattr(other, kind).keys()
        for module, tensors in getattr(one, kind).items():
            assert all(map(torch.equal, tensors, getattr(other, kind)[module])), module


@pytest.mark.parametrize(("name", "level"), thinned(["llama", "t5", "llava"], Granularity))
def test_a_tiny_budget_changes_nothing_to_the_bit(
    name: str, level: Granularity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    architecture = tiny.ARCHITECTURES[name]
    runs, spilled = [], []
    close = ActivationStore.close

    def watched_close(store: ActivationStore) -> None:
        spilled.append(store.spilled)
        close(store)

    monkeypatch.setattr(ActivationStore, "close", watched_close)
    for budget in (10**9, 1):
        monkeypatch.setattr(activations, "_SMALLEST", 1024)
        monkeypatch.setattr(sequential, "activation_budget", lambda _, budget=budget: budget)
        recorder = Recorder(ignore=architecture.ignore, granularity=level, twin=True, round_to=2)
        model = tiny.build(name)
        batches = architecture.batches()
        before = [tensor.clone() for tensor in tiny.tensors_of(batches)]
        # So small a budget would choose blocks.
        monkeypatch.setattr("llmcompressor.pipelines.granularity.estimate_bytes", lambda *_: 1)
        if budget == 1:
            never = partial(ActivationStore, fits=False, is_little=False)
            monkeypatch.setattr(
                sequential,
                "ActivationStore",
                lambda *given, never=never, streams, **_: never(*given, streams=streams),
            )
        run_pipeline(model, batches, recorder)
        assert all(map(torch.equal, tiny.tensors_of(batches), before))
        runs.append(recorder)
    assert spilled[0] == 0
    assert spilled[1] > 0
    _assert_same(*runs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "llava", "mixtral"])
def test_pages_of_files_change_nothing_to_the_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is little waits there by itself; a table that every pass holds stays one table."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(activations, "_SMALLEST", 1024)
    architecture = tiny.ARCHITECTURES[name]
    runs, taken = [], []
    put = MmapStoragePool.put

    def watched_put(pages: MmapStoragePool, storage: torch.UntypedStorage) -> Any:
        taken.append(storage.nbytes())
        return put(pages, storage)

    monkeypatch.setattr(MmapStoragePool, "put", watched_put)
    for most in (-1, activations.LITTLE):
        monkeypatch.setattr(sequential, "LITTLE", most)
        taken.clear()
        recorder = Recorder(ignore=architecture.ignore, twin=True, round_to=2)
        model, batches = tiny.build(name), architecture.batches()
        before = [tensor.clone() for tensor in tiny.tensors_of(batches)]
        run_pipeline(model, batches, recorder)
        assert all(map(torch.equal, tiny.tensors_of(batches), before))
        assert (sum(taken) > 0) == (most > 0)
        runs.append(recorder)
    _assert_same(*runs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="pages are counted in /proc")
def test_what_a_pass_that_ends_has_looked_at_is_let_go_of() -> None:
    """Its pages would count as the process's memory, and with them those of every batch."""

    def run(index: int) -> None:
        held = torch.full((16 * 2**20,), float(index))  # 64 MiB
        model.layer(_input(index))
        assert bool((held == index).all())

    model = Toy()
    passes = [Pass(index, lambda index=index: run(index)) for index in range(3)]
    resident = []
    with torch.no_grad(), PausedForward({model.layer: "layer"}, passes) as forward:
        stop = forward.next_stop()
        store = ActivationStore(10**9, [*model.parameters()], fits=True, is_little=True)
        for one in stop.passes:
            store.park(one)
        forward.release(model.layer)
        for one in stop.passes:
            store.fetch(one)
            forward.resume(one)
            assert one.finished
            store.park(one)
            resident.append(psutil.Process().memory_info().rss)
        store.close()
    assert max(resident) - min(resident) < 48 * 2**20


@pytest.mark.parametrize("asymmetric", [True, False])
def test_gptq_writes_the_same_weights_with_and_without_files(
    asymmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for budget in (10**9, 1):
        monkeypatch.setattr(activations, "_SMALLEST", 1)
        monkeypatch.setattr(sequential, "activation_budget", lambda _, budget=budget: budget)
        model = tiny.build("llama")
        recipe = GPTQModifier(
            targets="Linear",
            scheme="W4A16",
            ignore=["lm_head"],
            asymmetric=asymmetric,
            config_groups=None,
            bypass_divisibility_checks=True,
        )
        run_pipeline(model, tiny.text_batches(), recipe, "layer_sequential")
        weights.append([module.weight for module in tiny.leaves(model, "Linear", [])])
    assert all(map(torch.equal, *weights))


def test_putting_away_frees_the_memory() -> None:
    model, paused, _ = _waiting(1)
    with torch.no_grad(), paused as forward:
        (one,) = forward.next_stop().passes
        storage = one.args[0].untyped_storage().data_ptr()
        store = _store(model, 0)
        store.park(one)
        gc.collect()
        assert one.args[0].untyped_storage().data_ptr() != storage
        in_memory = {tensor.untyped_storage().data_ptr() for tensor in held_tensors(one)}
        assert storage not in in_memory
        store.close()
