# SPDX-License-Identifier: Apache-2.0
"""Weights are pruned on schedule and stay pruned through every step of every optimizer."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from tests.support.thinned import thinned
from torch import nn

from llmcompressor.core import Event, EventType, State, callbacks, create_session
from llmcompressor.core.modifier_registry import ModifierFactory
from llmcompressor.errors import (
    CheckpointError,
    NonFiniteError,
    RecipeError,
    TargetError,
)
from llmcompressor.modifiers.pruning import (
    ConstantPruningModifier,
    MagnitudePruningModifier,
)
from llmcompressor.numerics.masks import num_zeros, parse_structure

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


def small_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))


def gradual(**changes: Any) -> MagnitudePruningModifier:
    fields: dict[str, Any] = {
        "targets": "Linear",
        "init_sparsity": 0.1,
        "final_sparsity": 0.75,
        "start": 0,
        "end": 8,
    }
    return MagnitudePruningModifier(**{**fields, **changes})


class Loop:
    """A training loop as a user would write it, one session around it."""

    def __init__(self, model: Any, recipe: Any, *, optimizer: str = "sgd", **session: Any):
        self.model, self.recipe, self.settings = model, recipe, session
        self.optimizer = OPTIMIZERS[optimizer](model.parameters())
        self.after: list[tuple[int, dict[str, float]]] = []
        self.random = torch.Generator().manual_seed(7)

    def batch(self, *, accumulation: int = 1, skip: bool = False) -> None:
        for micro in range(accumulation):
            inputs = torch.randn(4, 12, generator=self.random)
            callbacks.batch_start({"x": inputs})
            loss = self.model(inputs).square().mean()
            callbacks.loss_calculated(loss).loss.backward()
            if micro == accumulation - 1:
                callbacks.optim_pre_step()
                self.pruned_gradients = self.under_masks(lambda weight: weight.grad)
                if not skip:
                    self.optimizer.step()
                self.optimizer.zero_grad()
                callbacks.optim_post_step()
                self.observe()
            callbacks.batch_end()

    def under_masks(self, what: Any) -> float:
        """The largest value where a weight was zero before the step."""
        values = [
            what(module.weight)[module.weight == 0].abs().max().item()
            for module in self.linears
            if bool((module.weight == 0).any()) and module.weight.grad is not None
        ]
        return max(values, default=0.0)

    @property
    def linears(self) -> list[nn.Linear]:
        return [module for module in self.model.modules() if isinstance(module, nn.Linear)]

    def observe(self) -> None:
        found = {
            name: (weight == 0).sum().item() / weight.numel()
            for name, weight in self.model.named_parameters()
            if name.endswith("weight") and weight.ndim > 1
        }
        self.after.append((len(self.after) + 1, found))

    def run(self, steps: int, **how: Any) -> Loop:
        with create_session() as session:
            session.initialize(
                recipe=self.recipe, model=self.model, optimizer=self.optimizer, **self.settings
            )
            for _ in range(steps):
                self.batch(**how)
            session.finalize()
        return self


ROUNDED = {name: 12 * 16 if name == "0.weight" else 16 * 8 for name in ("0.weight", "2.weight")}


def expected(modifier: MagnitudePruningModifier, index: float) -> dict[str, float]:
    return {
        name: num_zeros(modifier.sparsity_at(index), size) / size for name, size in ROUNDED.items()
    }


SCHEDULES: list[tuple[str, dict[str, Any], Any]] = [
    ("linear", {}, lambda t: 0.1 + 0.65 * t),
    ("cubic", {}, lambda t: 0.75 - 0.65 * (1 - t) ** 3),
    ("polynomial_decay", {}, lambda t: 0.75 - 0.65 * (1 - t) ** 2),
    ("polynomial_decay", {"exponent": 1.5}, lambda t: 0.75 - 0.65 * (1 - t) ** 1.5),
    ("polynomial", {}, lambda t: 0.1 + 0.65 * t**2),
    ("polynomial", {"exponent": 3}, lambda t: 0.1 + 0.65 * t**3),
    (
        "calc(init_sparsity + gap * sqrt((index - start) / (end - start)))",
        {"gap": 0.65},
        lambda t: 0.1 + 0.65 * t**0.5,
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "formula", "start", "steps_per_epoch"),
    thinned(SCHEDULES, itertools.product([0, 2], [None, 4])),
)
def test_sparsity_after_each_step_is_the_formula(name, arguments, formula, start, steps_per_epoch):
    unit = steps_per_epoch or 1
    modifier = gradual(
        update_scheduler=name, scheduler_args=arguments, start=start / unit, end=(start + 8) / unit
    )
    loop = Loop(small_model(), modifier, steps_per_epoch=steps_per_epoch).run(start + 11)
    for step, found in loop.after:
        if step < start:
            assert found == dict.fromkeys(ROUNDED, 0.0)
            continue
        t = min(1.0, (step - start) / 8)
        assert modifier.sparsity_at(step / unit) == pytest.approx(formula(t), abs=1e-12)
        assert found == expected(modifier, step / unit), step


@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_a_stair_is_climbed_at_its_steps(steps_per_epoch):
    unit = steps_per_epoch or 1
    steps = [[3 / unit, 0.5], [6 / unit, 0.625]]
    modifier = gradual(update_scheduler="multi_step", scheduler_args={"steps": steps}, end=8 / unit)
    loop = Loop(small_model(), modifier, steps_per_epoch=steps_per_epoch).run(10)
    stair = [0.1] * 2 + [0.5] * 3 + [0.625] * 2 + [0.75] * 3
    assert [found["2.weight"] for _, found in loop.after] == [
        num_zeros(sparsity, 128) / 128 for sparsity in stair
    ]


@pytest.mark.parametrize(("update", "unit"), [(3, 1), (0.3, 10), (0.25, 10)])
def test_between_updates_the_sparsity_stays(update, unit):
    """A quarter of an epoch of ten steps lies between steps: the next one after it counts."""
    modifier = gradual(update=update, end=8 / unit)
    loop = Loop(small_model(), modifier, steps_per_epoch=unit if unit > 1 else None).run(10)
    updates = {3: [0, 3, 6, 8], 0.3: [0, 3, 6, 8], 0.25: [0, 3, 5, 8]}[update]
    for step, found in loop.after:
        last = max(at for at in updates if at <= step)
        assert found == expected(modifier, last / unit), step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_optimizer_revives_a_weight(optimizer, accumulation):
    model = small_model()
    masks: dict[str, torch.Tensor] = {}

    class Watch(Loop):
        def observe(self) -> None:
            super().observe()
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Linear):
                    zero = module.weight == 0
                    assert bool((zero | ~masks.get(name, zero)).all()), name
                    masks[name] = zero
            assert self.pruned_gradients == 0

    modifier = gradual(end=6)
    loop = Watch(model, modifier, optimizer=optimizer).run(12, accumulation=accumulation)
    for step, found in loop.after:
        assert found == expected(modifier, step), step


def test_a_mask_makes_zeros_even_of_what_is_not_finite():
    model = small_model()
    modifier = gradual(init_sparsity=0.75)
    with create_session() as session:
        session.initialize(recipe=modifier, model=model)
        callbacks.batch_start()
        pruned = model[0].weight == 0
        with torch.no_grad():
            model[0].weight[pruned] = float("nan")
        modifier.weights.apply()
        assert torch.equal(model[0].weight == 0, pruned)
        assert bool(torch.isfinite(model[0].weight).all())
        session.finalize()


def test_parameters_that_are_not_targeted_train_on():
    model = small_model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    Loop(model, gradual(targets=["re:0"], init_sparsity=0.75)).run(3)
    assert bool((model[0].weight == 0).any())
    for name in ("0.bias", "2.weight", "2.bias", "3.weight"):
        assert not torch.equal(model.get_parameter(name), before[name]), name
        assert not bool((model.get_parameter(name) == 0).any()), name


@pytest.mark.parametrize("structure", ["filter", "channel", "block_2,4", "2:4", "1:4"])
@pytest.mark.parametrize("together", [False, True])
def test_structures_hold_at_all_times(structure, together):
    form = parse_structure(structure)
    final = form.full_sparsity or 0.75

    class Watch(Loop):
        def observe(self) -> None:
            super().observe()
            for module in self.linears:
                zero = module.weight == 0
                if ":" in structure:
                    n, m = map(int, structure.split(":"))
                    assert int(zero.view(-1, m).sum(1).max()) <= n
                    continue
                pool = form.pool(module.weight.detach(), None)
                whole = form.spread(pool.score_U == 0, zero.shape)
                assert torch.equal(whole, zero)

    modifier = gradual(
        mask_structure=structure, final_sparsity=final, end=6, apply_globally=together
    )
    loop = Watch(small_model(), modifier, optimizer="momentum").run(8)
    last = loop.after[-1][1]
    if ":" in structure:
        assert set(last.values()) == {final}
    total = sum(last[name] * size for name, size in ROUNDED.items())
    assert total == pytest.approx(final * sum(ROUNDED.values()), abs=12)


def test_globally_all_weights_have_one_threshold():
    model = small_model()
    with torch.no_grad():
        model[2].weight *= 10
    modifier = gradual(apply_globally=True)
    loop = Loop(model, modifier).run(10)
    for step, found in loop.after:
        zeros = sum(found[name] * size for name, size in ROUNDED.items())
        assert zeros == num_zeros(modifier.sparsity_at(step), sum(ROUNDED.values()))
    assert loop.after[-1][1]["0.weight"] > 0.9
    assert loop.after[-1][1]["2.weight"] < 0.5


def test_masks_are_kept_after_the_end():
    loop = Loop(small_model(), gradual(end=3), optimizer="adamw").run(8)
    assert [found["0.weight"] for _, found in loop.after][3:] == [0.75] * 5


def test_a_constant_modifier_takes_over(warned):
    recipe = [
        gradual(end=3, leave_enabled=False),
        ConstantPruningModifier(targets="Linear", start=3),
    ]
    loop = Loop(small_model(), recipe, optimizer="adamw").run(8)
    assert [found["0.weight"] for _, found in loop.after][3:] == [0.75] * 5
    assert not recipe[0].weights.held
    assert warned == []


def test_constant_keeps_exactly_the_zeros_that_are_there():
    model = small_model()
    with torch.no_grad():
        model[0].weight[torch.rand(16, 12) < 0.4] = 0
    before = {name: value == 0 for name, value in model.named_parameters()}
    Loop(model, ConstantPruningModifier(targets="Linear"), optimizer="momentum").run(6)
    for name, value in model.named_parameters():
        if name != "3.bias":  # begins at zero, and trains
            assert torch.equal(value == 0, before[name]), name


@pytest.mark.parametrize(
    ("cut", "start", "structure", "together"),
    thinned(
        itertools.product([1, 4, 9], [0, 4]),
        itertools.product(["unstructured", "2:4"], [False, True]),
    ),
)
def test_a_resumed_training_is_the_same_bit_by_bit(structure, cut, start, together):
    """A cut after step 4 falls on the step that reaches the later of the two starts."""
    changes: dict[str, Any] = {
        "mask_structure": structure, "final_sparsity": 0.5, "update": 2, "start": start, "end": 7,
        "apply_globally": together,
    }  # fmt: skip
    whole = Loop(small_model(), gradual(**changes), optimizer="momentum").run(12)

    first, modifier = Loop(small_model(), None, optimizer="momentum"), gradual(**changes)
    with create_session() as session:
        session.initialize(recipe=modifier, model=first.model)
        for _ in range(cut):
            first.batch()
        written = io.BytesIO()
        torch.save(
            {
                "model": first.model.state_dict(),
                "optimizer": first.optimizer.state_dict(),
                "modifier": modifier.state_dict(),
                "phases": list(modifier.passed_phases),
            },
            written,
        )
        session.reset()
    saved = torch.load(io.BytesIO(written.getvalue()), weights_only=True)

    second, modifier = Loop(small_model(5), None, optimizer="momentum"), gradual(**changes)
    second.random = first.random
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    with create_session() as session:
        session.initialize(recipe=modifier, model=second.model, start=float(cut))
        modifier.resume(session.state, saved["phases"], saved["modifier"])
        for _ in range(12 - cut):
            second.batch()
        session.finalize()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name


def test_masks_are_packed_to_a_bit_per_weight():
    modifier, model = gradual(init_sparsity=0.5), small_model()
    with create_session() as session:
        session.initialize(recipe=modifier, model=model)
        callbacks.batch_start()
        saved = modifier.state_dict()
    assert saved["index"] == 0
    assert saved["sparsity"] == 0.5
    mask = saved["masks"]["0.weight"]
    assert mask["shape"] == [16, 12]
    assert (mask["bits"].dtype, mask["bits"].numel()) == (torch.uint8, 24)
    first = [(int(mask["bits"][0]) >> (7 - bit)) & 1 for bit in range(8)]
    assert first == (model[0].weight == 0).flatten()[:8].int().tolist()


def test_masks_of_another_model_are_refused():
    modifier, other = gradual(), gradual(targets="re:0")
    with create_session() as session:
        session.initialize(recipe=[modifier, other], model=small_model())
        callbacks.batch_start()
        with pytest.raises(CheckpointError, match=r"other parameters: 2\.weight differ"):
            other.load_state_dict(session.state, modifier.state_dict())


def test_weights_that_are_not_finite_are_refused():
    model = small_model()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with create_session() as session:
        session.initialize(recipe=gradual(), model=model)
        with pytest.raises(NonFiniteError, match=r"2\.weight holds NaN or infinity"):
            callbacks.batch_start()


@pytest.mark.parametrize("name", ["MagnitudePruningModifier", "ConstantPruningModifier"])
def test_a_start_before_the_training_is_refused(name):
    fields = {"init_sparsity": 0, "final_sparsity": 0.5, "end": 1} if name[0] == "M" else {}
    with pytest.raises(RecipeError, match=rf"{name}.*start is -1.*begins at 0.*Leave it out"):
        ModifierFactory.create(name, targets="Linear", start=-1, **fields)


def test_nothing_is_pruned_before_the_first_batch():
    """The model may yet be moved or spread over processes between the two."""
    model, modifier = small_model(), gradual(init_sparsity=0.5)
    with create_session() as session:
        session.initialize(recipe=modifier, model=model)
        assert modifier.started
        assert not bool((model[0].weight == 0).any())
        callbacks.batch_start()
        assert bool((model[0].weight == 0).any())


@pytest.mark.parametrize(
    ("replace", "reason"),
    [
        (lambda weight: weight.detach().flatten(), "fsdp_version: 2"),
        (lambda weight: None, "fsdp_version: 2"),
    ],
)
def test_a_parameter_that_is_cut_up_is_refused(replace, reason):
    model, modifier = small_model(), gradual()
    modifier.initialize(State(model=model))
    new = replace(model[0].weight)
    model[0].weight = None if new is None else nn.Parameter(new)
    with pytest.raises(TargetError, match=reason):
        modifier.update_event(State(model=model), Event(type_=EventType.BATCH_START))
