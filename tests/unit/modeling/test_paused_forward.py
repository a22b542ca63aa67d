# SPDX-License-Identifier: Apache-2.0
"""A forward that is paused at its targets: what comes out, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.thinned import thinned
from torch import nn

from llmcompressor.errors import TargetError
from llmcompressor.modeling.paused_forward import Pass, PausedForward, TorchState, check_not_nested


class Toy(nn.Module):
    """Three layers and a head; ``body`` may do otherwise."""

    def __init__(self, body: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 9)
        self.body = body
        self.unwound: list[int] = []

    def forward(self, x: torch.Tensor, index: int = 0) -> Any:
        try:
            if self.body is not None:
                return self.body(self, x, index)
            return self.head(self.c(self.b(self.a(x))))
        finally:
            self.unwound.append(index)


def _x(index: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(index))


def _paused(
    model: Toy, outputs: dict[int, Any] | None = None, targets: str = "abc", count: int = 3
) -> PausedForward:
    found = {} if outputs is None else outputs

    def run(index: int) -> None:
        found[index] = model(_x(index), index)

    passes = [Pass(index, lambda index=index: run(index)) for index in range(count)]
    return PausedForward({model.get_submodule(name): name for name in targets}, passes)


def _serve(forward: PausedForward, *, trial: bool = True) -> Iterator[tuple[str, list[int]]]:
    """Take all stops; yields the name and the batches of each."""
    while stop := forward.next_stop():
        yield stop.name, [one.index for one in stop.passes]
        for one in stop.passes:
            if trial:
                forward.execute(one)
        forward.release(stop.module)
        for one in stop.passes:
            forward.resume(one)


def _is_clean(model: Toy) -> bool:
    return not any("forward" in vars(module) for module in model.modules())


def test_all_passes_wait_at_each_target_and_return_the_same() -> None:
    model, outputs = Toy(), {}
    with torch.no_grad(), _paused(model, outputs) as forward:
        assert list(_serve(forward)) == [("a", [0, 1, 2]), ("b", [0, 1, 2]), ("c", [0, 1, 2])]
        assert all(one.finished for one in forward.passes)
    with torch.no_grad():
        assert all(torch.equal(outputs[index], model(_x(index))) for index in range(3))
    assert _is_clean(model)


def test_a_change_of_a_module_while_all_wait_is_seen_by_all() -> None:
    model, outputs = Toy(), {}
    with torch.no_grad(), _paused(model, outputs) as forward:
        for name, _ in _serve(forward):
            model.get_submodule(name).weight.mul_(2)
    with torch.no_grad():  # the weights are now what they were for each batch
        assert all(torch.equal(outputs[index], model(_x(index))) for index in range(3))


def test_the_call_is_at_hand_while_a_pass_waits() -> None:
    model = Toy(lambda m, x, i: m.a(input=x + i))
    with torch.no_grad(), _paused(model) as forward:
        stop = forward.next_stop()
        assert [one.args for one in stop.passes] == [()] * 3
        assert torch.equal(stop.passes[2].kwargs["input"], _x(2) + 2)
        assert torch.equal(forward.execute(stop.passes[2]), model.a(_x(2) + 2))
        assert stop.passes[0].call == ((), stop.passes[0].kwargs)


def test_what_lies_behind_the_last_target_is_not_computed() -> None:
    model, calls = Toy(), []
    model.head.register_forward_hook(lambda *_: calls.append("head"))
    with torch.no_grad(), _paused(model) as forward:
        for name, _ in _serve(forward):
            if name == "c":
                break
    assert not calls
    assert sorted(model.unwound) == [0, 1, 2]


def test_a_module_called_again_pauses_only_at_its_first_call() -> None:
    model, outputs = Toy(lambda m, x, i: m.a(m.b(m.a(m.a(x))))), {}
    with torch.no_grad(), _paused(model, outputs, "ab") as forward:
        stops = []
        for name, indices in _serve(forward):
            stops.append((name, indices))
            if name == "a":
                model.a.weight.mul_(2)
    assert stops == [("a", [0, 1, 2]), ("b", [0, 1, 2])]
    with torch.no_grad():  # every call of a was with its new weight
        assert all(torch.equal(outputs[index], model(_x(index))) for index in range(3))


def test_batches_on_different_routes_are_served_in_groups() -> None:
    def body(model: Toy, x: torch.Tensor, index: int) -> torch.Tensor:
        return model.c(model.a(x) if index % 2 else model.b(x))

    model, outputs = Toy(body), {}
    with torch.no_grad(), _paused(model, outputs, "abc", count=4) as forward:
        stops = list(_serve(forward))
    assert stops == [("a", [1, 3]), ("b", [0, 2]), ("c", [0, 1, 2, 3])]
    with torch.no_grad():
        assert all(torch.equal(outputs[index], model(_x(index), index)) for index in range(4))


def test_calls_from_outside_of_a_pass_are_not_paused() -> None:
    model = Toy()
    with torch.no_grad(), _paused(model) as forward:
        forward.next_stop()
        assert model(_x(7)).shape == (2, 9)
        assert forward.current is None


@pytest.mark.parametrize(
    "inside",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
    ],
    ids=["autocast", "grad", "inference", "device"],
)
def test_state_set_inside_a_pass_holds_for_its_modules_only(inside) -> None:
    def body(model: Toy, x: torch.Tensor, index: int) -> Any:
        with inside():
            y = model.b(model.a(x))
            made = torch.empty(1).device.type
        return y, y.dtype, y.requires_grad, y.is_inference(), made, torch.is_grad_enabled()

    model, outputs = Toy(body), {}
    with torch.no_grad():
        before = TorchState.capture()
        with _paused(model, outputs, "ab") as forward:
            for name, _ in _serve(forward):
                assert TorchState.capture() == before
                for one in forward.passes:
                    trial = forward.execute(one)
                    assert TorchState.capture() == before
                if name == "a":  # changed after the trial, so that a cast would be stale
                    model.a.weight.data = model.a.weight.data * 2
        assert TorchState.capture() == before
        expected = [model(_x(index), index) for index in range(3)]
    for index in range(3):
        assert torch.equal(outputs[index][0], expected[index][0])
        assert outputs[index][1:] == expected[index][1:]
    x = _x(2)
    with torch.no_grad(), inside():
        ordinary = model.b(model.a(x))
    assert (trial.dtype, trial.is_inference()) == (ordinary.dtype, ordinary.is_inference())


def test_nothing_is_kept_alive_afterwards() -> None:
    model = Toy()
    with torch.no_grad(), _paused(model) as forward:
        stop = forward.next_stop()
        inputs = [weakref.ref(one.args[0]) for one in stop.passes]
        for one in stop.passes:
            forward.resume(one)
        inputs += [weakref.ref(one.args[0]) for one in forward.next_stop().passes]
    del stop, one
    gc.collect()
    assert [reference() for reference in inputs] == [None] * 6


class Broken(Exception):  # noqa: N818
    pass


ERRORS = [Broken, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_the_scheduler_unwinds_every_pass(error: type[BaseException]) -> None:
    model, forward = Toy(), None

    def until_b() -> None:
        nonlocal forward
        with torch.no_grad(), _paused(model) as forward:
            for name, _ in _serve(forward):
                if name == "b":
                    raise error

    with pytest.raises(error):
        until_b()
    assert sorted(model.unwound) == [0, 1, 2]
    assert all(one.finished and one.module is None for one in forward.passes)
    assert _is_clean(model)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("error", "where"), thinned(ERRORS, ["start", "between", "in a trial", "in a module"])
)
def test_an_error_inside_a_pass_unwinds_all_others(error: type[BaseException], where: str) -> None:
    def body(model: Toy, x: torch.Tensor, index: int) -> Any:
        if where == "start" and index == 1:
            raise error
        y = model.a(x)
        if where == "between" and index == 1:
            raise error
        return model.b(y)

    def fail(*_: Any) -> None:
        raise error

    model = Toy(body)
    failing = model.b.register_forward_hook(fail)
    if where in ("start", "between"):
        failing.remove()

    def run() -> None:
        with torch.no_grad(), _paused(model, targets="ab") as forward:
            while stop := forward.next_stop():
                forward.release(stop.module)
                for one in stop.passes:
                    if where == "in a trial":
                        forward.execute(one, with_hooks=True)
                    forward.resume(one)

    with pytest.raises(error):
        run()
    started = [0, 1] if where == "start" else [0, 1, 2]
    assert sorted(model.unwound) == started
    assert _is_clean(model)
    assert torch.is_grad_enabled()


def test_a_model_that_swallows_everything_is_unwound_too() -> None:
    def body(model: Toy, x: torch.Tensor, index: int) -> Any:
        for layer in (model.a, model.b, model.c):
            with contextlib.suppress(BaseException):
                layer(x)

    model = Toy(body)
    with torch.no_grad(), _paused(model) as forward:
        forward.next_stop()
    assert sorted(model.unwound) == [0, 1, 2]
    assert all(one.frame is None for one in forward.passes)
    assert _is_clean(model)


def test_nested_targets_are_an_error_that_names_both() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TargetError, match=r"'outer' and 'outer\.inner' are nested"):
        check_not_nested({model: "outer", model[0][0]: "outer.inner"})
    with pytest.raises(TargetError, match=r"'outer' and 'outer\.inner' are nested"):
        PausedForward({model[0][0]: "outer.inner", model: "outer"}, [])
    assert "forward" not in vars(model)
