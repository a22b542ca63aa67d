# SPDX-License-Identifier: Apache-2.0
"""Distillation in a loop of one's own: what it adds to the loss, and when."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import kl_div, log_softmax, mse_loss

from llmcompressor.core import CompressionSession, callbacks, create_session
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.recipe import Recipe

LAYERS = r"re:.*layers\.\d+$"
MIDDLE = {"targets": LAYERS, "comparison": "square_head"}


def with_labels(batches: Sequence[tiny.Batch]) -> list[tiny.Batch]:
    return [
        {**one, "labels": one["input_ids"].masked_fill(one["attention_mask"] == 0, -100)}
        for one in batches
    ]


def teacher_model(**changes: Any) -> Any:
    """Not the student: other weights of the same form."""
    model = tiny.llama(**changes)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.fixture
def session() -> Iterator[CompressionSession]:
    with create_session() as opened:
        yield opened
        opened.reset()


def begin(session: CompressionSession, student: Module, teacher: Module, **fields: Any) -> Any:
    modifier = OutputDistillationModifier(**fields)
    session.initialize(recipe=[modifier], model=student, teacher_model=teacher)
    return modifier


def loss_of(student: Any, batch: tiny.Batch, **given: Any) -> Tensor:
    """The loss that the optimizer sees for one batch."""
    callbacks.batch_start(batch_data=batch)
    keyword = {key: value for key, value in given.items() if key == "num_items_in_batch"}
    own = student(**batch, use_cache=False, **keyword).loss
    loss: Tensor = callbacks.loss_calculated(loss=own, **given).loss
    return loss


def end_batch() -> None:
    callbacks.optim_pre_step()
    callbacks.optim_post_step()
    callbacks.batch_end()


def gradients(model: Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def expect_same_gradients(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert first
    for name, gradient in first.items():
        torch.testing.assert_close(gradient, second[name], rtol=1e-4, atol=1e-6, msg=name)


def real(outputs: Tensor, batch: tiny.Batch) -> Tensor:
    return outputs[batch["attention_mask"].bool()]


def textbook_kl(student: Any, teacher: Any, batch: tiny.Batch, temperature: float) -> Tensor:
    with torch.no_grad():
        aims = real(teacher(**batch).logits, batch)
    ours = log_softmax(real(student(**batch).logits, batch) / temperature, -1)
    aims = log_softmax(aims / temperature, -1)
    return temperature**2 * kl_div(ours, aims, reduction="batchmean", log_target=True)


def textbook_square_head(student: Any, teacher: Any, batch: tiny.Batch) -> Tensor:
    """Sum over layers, of the outputs of decoder layers before the last norm."""
    found: list[list[Tensor]] = [[], []]
    for model, outputs in zip((student, teacher), found, strict=True):
        handles = [
            layer.register_forward_hook(lambda _, __, output, kept=outputs: kept.append(output))
            for layer in model.model.layers
        ]
        model(**batch)
        for handle in handles:
            handle.remove()
    pairs = [(real(s, batch), real(t, batch).detach()) for s, t in zip(*found, strict=True)]
    return torch.stack([mse_loss(s, t) / t.square().mean() for s, t in pairs]).sum()


BATCH = with_labels(tiny.padded(tiny.batches(number=1), 6))[0]


@pytest.mark.parametrize("temperature", [None, 2.0])
@pytest.mark.parametrize(
    "targets", [None, ["lm_head"], "LlamaForCausalLM", [["lm_head", "re:lm_"]]]
)
def test_logits(session: CompressionSession, temperature: float | None, targets: Any) -> None:
    student, teacher = tiny.llama(), teacher_model()
    modifier = begin(
        session, student, teacher, targets=targets, temperature=temperature, orig_scale=0.3
    )
    loss = loss_of(student, BATCH)
    task = student(**BATCH).loss
    distance = textbook_kl(student, teacher, BATCH, temperature or 1.0)
    torch.testing.assert_close(loss, 0.3 * task + distance)
    loss.backward()
    found = gradients(student)
    student.zero_grad()
    (0.3 * task + distance).backward()
    expect_same_gradients(found, gradients(student))
    figures = modifier.figures(session.state)
    assert figures == pytest.approx({"task_loss": task.item(), "distill_loss": distance.item()})


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (0.8, 0.4)])
def test_hidden_states_of_layers(session: CompressionSession, scale: float, factor: float) -> None:
    """A scale of 1 stands for the number of pairs, any other for itself."""
    student, teacher = tiny.llama(), teacher_model()
    modifier = begin(session, student, teacher, **MIDDLE, distill_scale=scale)
    names = [f"model.layers.{number}" for number in range(2)]
    assert modifier.pairs == list(zip(names, names, strict=True))
    loss = loss_of(student, BATCH)
    expected = student(**BATCH).loss + factor * textbook_square_head(student, teacher, BATCH)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    found = gradients(student)
    student.zero_grad()
    expected.backward()
    expect_same_gradients(found, gradients(student))
    tags = {"task_loss", "distill_loss", *(f"distill_loss/{name}" for name in names)}
    assert modifier.figures(session.state).keys() == tags


@pytest.mark.parametrize("transform", ["softmax", "log_softmax", ["identity", "softmax"]])
@pytest.mark.parametrize("comparison", ["kl_divergence", "cross_entropy"])
def test_probabilities_are_compared_as_logits_are(
    session: CompressionSession, transform: Any, comparison: str
) -> None:
    student, teacher = tiny.llama(), teacher_model()
    begin(session, student, teacher, transforms=transform, comparison=comparison)
    found = loss_of(student, BATCH)
    session.reset()
    begin(session, student, teacher, comparison=comparison)
    torch.testing.assert_close(found, loss_of(student, BATCH))


@pytest.mark.parametrize("fields", [{}, MIDDLE, {"temperature": 3.0}], ids=str)
def test_a_teacher_like_the_student_changes_nothing(
    session: CompressionSession, fields: dict[str, Any]
) -> None:
    student = tiny.llama()
    begin(session, student, copy.deepcopy(student), **fields)
    loss_of(student, BATCH).backward()
    found = gradients(student)
    student.zero_grad()
    student(**BATCH).loss.backward()
    expect_same_gradients(found, gradients(student))


@pytest.mark.parametrize(
    "fields",
    [{}, MIDDLE, {**MIDDLE, "comparison_args": {"per_token": True}}, {"comparison": "l1_distance"}],
    ids=str,
)
def test_padding_changes_nothing(session: CompressionSession, fields: dict[str, Any]) -> None:
    student, teacher = tiny.llama(), teacher_model()
    begin(session, student, teacher, **fields)
    plain = tiny.batches(number=1)
    found = []
    for batches in (plain, tiny.padded(plain, 9)):
        [batch] = with_labels(batches)
        loss_of(student, batch).backward()
        found.append(gradients(student))
        student.zero_grad()
        end_batch()
    expect_same_gradients(*found)


def rows_of(batch: tiny.Batch) -> list[tiny.Batch]:
    count = len(batch["input_ids"])
    return [{name: value[row : row + 1] for name, value in batch.items()} for row in range(count)]


def uneven() -> tiny.Batch:
    """Four rows of different lengths, and prompts without labels."""
    batch = with_labels(tiny.batches(number=1, seed=3))[0]
    batch = {name: torch.cat([value, value.flip(1)]) for name, value in batch.items()}
    for row, length in enumerate((24, 20, 13, 6)):
        batch["attention_mask"][row, length:] = 0
        batch["labels"][row, length:] = -100
        batch["labels"][row, : length // 3] = -100
    return batch


def even() -> tiny.Batch:
    batch = with_labels(tiny.batches(number=1, seed=3))[0]
    return {name: torch.cat([value, value.flip(1)]) for name, value in batch.items()}


PER_TOKEN = [{}, {**MIDDLE, "comparison_args": {"per_token": True}}, {"comparison": "l2_distance"}]


@pytest.mark.parametrize("fields", PER_TOKEN, ids=str)
def test_accumulated_means_are_the_mean_of_the_batch(
    session: CompressionSession, fields: dict[str, Any]
) -> None:
    student, teacher = tiny.llama(), teacher_model()
    begin(session, student, teacher, **fields)
    batch = even()
    loss_of(student, batch).backward()
    whole = gradients(student)
    end_batch()
    student.zero_grad()
    for row in rows_of(batch):
        (loss_of(student, row) / 4).backward()
        callbacks.batch_end()
    expect_same_gradients(gradients(student), whole)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fields", [{}, MIDDLE], ids=str)
def test_gradient_checkpointing_changes_nothing(
    session: CompressionSession, fields: dict[str, Any], reentrant: bool
) -> None:
    student, teacher = tiny.llama().train(), teacher_model()
    modifier = begin(session, student, teacher, **fields)
    found = []
    for _ in range(2):
        loss_of(student, BATCH).backward()
        assert modifier._student is not None
        assert not modifier._student._kept  # nothing is caught when layers are computed again
        found.append(gradients(student))
        student.zero_grad()
        end_batch()
        tiny.recompute(student, reentrant=reentrant)
    expect_same_gradients(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own look, while it compiles
def test_a_compiled_student(session: CompressionSession) -> None:
    student, teacher = tiny.llama(), teacher_model()
    begin(session, student, teacher, **MIDDLE)
    found = []
    for model in (student, torch.compile(student, backend="eager")):
        loss_of(model, BATCH).backward()
        found.append(gradients(student))
        student.zero_grad()
        end_batch()
    expect_same_gradients(*found)


def counting(model: Module, name: str) -> list[int]:
    """How often a module was called, as the length of a list."""
    calls: list[int] = []
    module = model.get_submodule(name)
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    module.forward = counted  # type: ignore[method-assign] # a hook would be seen as one
    return calls


def test_the_teacher_runs_once_a_batch_and_no_further_than_asked(
    session: CompressionSession,
) -> None:
    student, teacher = tiny.llama(), teacher_model()
    head, first, second = (
        counting(teacher, name) for name in ("lm_head", "model.layers.0", "model.layers.1")
    )
    begin(session, student, teacher, targets="model.layers.0", comparison="l2_distance")
    losses = []
    for _ in range(3):
        losses.append(loss_of(student, BATCH).item())
        end_batch()
    assert losses[0] == losses[1] == losses[2]
    # the first batch shows that no module is called twice
    assert (len(first), len(second), len(head)) == (3, 1, 1)


def test_the_teacher_is_left_as_it_was_but_for_its_mode(session: CompressionSession) -> None:
    student, teacher = tiny.llama().train(), teacher_model(attention_dropout=0.5).train()
    before = copy.deepcopy(teacher.state_dict())
    begin(session, student, teacher)
    teacher.train()  # whatever the loop does to it
    first = loss_of(student, BATCH)
    first.backward()
    end_batch()
    torch.testing.assert_close(loss_of(student, BATCH), first)  # no dropout
    assert not teacher.training
    assert student.training
    session.finalize()
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert tiny.traces(teacher) == tiny.traces(student) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", [False, True])
def test_a_teacher_on_another_device(session: CompressionSession, offload: bool) -> None:
    student, teacher = tiny.llama().cuda(), teacher_model()
    batch = {name: value.cuda() for name, value in BATCH.items()}
    begin(session, student, teacher, **MIDDLE, offload_layer_output=offload)
    found = loss_of(student, batch)
    expected = student(**batch).loss.cpu() + textbook_square_head(
        copy.deepcopy(student).cpu(), teacher, BATCH
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
    found.backward()


def test_nothing_is_kept_after_a_batch(session: CompressionSession) -> None:
    student, teacher = tiny.llama(), teacher_model()
    modifier = begin(session, student, teacher, **MIDDLE)
    loss_of(student, BATCH).backward()
    assert not modifier._student._kept
    assert not modifier._teacher._kept
    end_batch()
    student(**BATCH)  # an evaluation between two batches
    assert not modifier._student._kept


def flags(session: CompressionSession, student: Any, steps: int) -> list[bool]:
    """At which steps the loss was replaced."""
    found = []
    for _ in range(steps):
        callbacks.batch_start(batch_data=BATCH)
        own = student(**BATCH, use_cache=False).loss
        found.append(callbacks.loss_calculated(loss=own).loss is not own)
        end_batch()
    return found


@pytest.mark.parametrize(
    ("fields", "steps_per_epoch", "expected"),
    [
        ({}, None, [1, 1, 1, 1, 1]),
        ({"start": 2}, None, [0, 0, 1, 1, 1]),
        ({"start": 1, "end": 3}, None, [0, 1, 1, 0, 0]),
        ({"end": 2}, None, [1, 1, 0, 0, 0]),
        ({"start": 0.5, "end": 1.0}, 4, [0, 0, 1, 1, 0]),
    ],
)
def test_the_schedule_is_kept(
    session: CompressionSession, fields: Any, steps_per_epoch: int | None, expected: list[int]
) -> None:
    student, teacher = tiny.llama(), teacher_model()
    session.initialize(
        recipe=[OutputDistillationModifier(**fields)],
        model=student,
        teacher_model=teacher,
        steps_per_epoch=steps_per_epoch,
    )
    assert flags(session, student, 5) == [bool(flag) for flag in expected]
    session.finalize()
    assert tiny.traces(student) == tiny.traces(teacher) == {}


def training(
    session: CompressionSession, student: Any, optimizer: Any, batches: Sequence[tiny.Batch]
) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(student, batch)
        loss.backward()
        losses.append(loss.item())
        callbacks.optim_pre_step()
        optimizer.step()
        optimizer.zero_grad()
        callbacks.optim_post_step()
        callbacks.batch_end()
    return losses


def sgd(model: Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


PROJECTED = {**MIDDLE, "projection": "linear", "projection_args": {"seed": 3}}


def test_a_projection_is_learned_and_gone_in_the_end(session: CompressionSession) -> None:
    student, teacher = tiny.llama(), teacher_model(hidden_size=96)
    names = list(student.state_dict())
    state = torch.random.get_rng_state()
    begin(session, student, teacher, **PROJECTED, orig_scale=0.0)
    assert torch.equal(torch.random.get_rng_state(), state)
    first = student.model.layers[0].distillation_projection.detach().clone()
    assert first.shape == (96, 64)
    torch.testing.assert_close(first.T @ first, torch.eye(64), atol=1e-5, rtol=1e-5)
    losses = training(session, student, sgd(student), [BATCH] * 8)
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(student.model.layers[0].distillation_projection, first)
    session.finalize()
    assert list(student.state_dict()) == names


@pytest.mark.parametrize("fields", [{}, PROJECTED], ids=str)
def test_a_resumed_run_gives_equal_weights(fields: dict[str, Any]) -> None:
    """With the weights of the model taken back, or without those of the modifier among them."""
    wide = {"hidden_size": 96} if fields else {}
    data = with_labels(tiny.batches(number=4))
    straight = tiny.llama()
    with create_session() as session:
        begin(session, straight, teacher_model(**wide), **fields)
        optimizer = sgd(straight)
        training(session, straight, optimizer, data[:2])
        weights = copy.deepcopy(straight.state_dict())
        moments = copy.deepcopy(optimizer.state_dict())
        saved = copy.deepcopy(session.lifecycle.state_dict())
        training(session, straight, optimizer, data[2:])
        session.finalize()

    resumed = tiny.llama()
    with create_session() as session:
        session.initialize(
            recipe=[OutputDistillationModifier(**fields)],
            model=resumed,
            teacher_model=teacher_model(**wide),
            resumes=True,
        )
        own = {name: value for name, value in weights.items() if "distillation" not in name}
        resumed.load_state_dict(own, strict=False)
        session.lifecycle.load_state_dict(saved)
        optimizer = sgd(resumed)
        optimizer.load_state_dict(moments)
        training(session, resumed, optimizer, data[2:])
        session.finalize()
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_recipe_is_written_and_read_again() -> None:
    modifier = OutputDistillationModifier(
        targets=[("re:a", "re:b"), "lm_head"], temperature=2.0, comparison="kl_divergence"
    )
    text = Recipe.from_modifiers([modifier]).yaml()
    [again] = Recipe.create_instance(text).modifiers
    assert again.model_dump(exclude={"group"}) == modifier.model_dump(exclude={"group"})
    assert again._measure == modifier._measure
