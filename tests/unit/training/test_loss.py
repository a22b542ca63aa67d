# SPDX-License-Identifier: Apache-2.0
"""What modifiers see of the loss, what becomes of it, and what is logged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import PrivateAttr
from tests.support import tiny_training as tiny
from torch.nn import functional

from llmcompressor.core import EventType, active_session
from llmcompressor.metrics import LambdaLogger, LoggerManager
from llmcompressor.modifiers import Modifier
from llmcompressor.training import Trainer


class Listener(Modifier):
    """Compares the loss that it is shown with one that it computes from the batch."""

    _shown: list[float] = PrivateAttr(default_factory=list)
    _textbook: list[float] = PrivateAttr(default_factory=list)

    def on_initialize(self, state, **kwargs):
        return True

    def on_event(self, state, event, **kwargs):
        if event.type_ is EventType.BATCH_START:
            assert set(state.batch_data) >= {"input_ids", "labels", "attention_mask"}
        if event.type_ is EventType.LOSS_CALCULATED:
            batch = state.batch_data
            with torch.no_grad():
                logits = state.model(input_ids=batch["input_ids"]).logits
            targets = batch["labels"][:, 1:].flatten()
            mean = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
            self._shown.append(state.loss.item())
            self._textbook.append(mean.item())


class Penalty(Modifier):
    """Adds a term of its own, the mean square of one matrix."""

    weight: float = 0.5

    def on_initialize(self, state, **kwargs):
        return True

    def on_event(self, state, event, **kwargs):
        if event.type_ is EventType.LOSS_CALCULATED:
            state.loss = state.loss + self.term(state)

    def term(self, state):
        return self.weight * state.model.lm_head.weight.square().sum()

    def figures(self, state):
        return {"penalty": self.term(state).item()}


def train(folder: Path, recipe, *, accumulation: int, batch: int, **changed) -> Trainer:
    settings = {
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": batch,
        "optim": "sgd",
        "max_grad_norm": 0,
        "train_sampling_strategy": "sequential",
        **changed,
    }
    trainer = trainer_of(folder, recipe, **settings)
    trainer.train()
    return trainer


def trainer_of(folder: Path, recipe, **changed) -> Trainer:
    keys = ("loggers", "compute_loss_func", "eval_dataset")
    extra = {name: changed.pop(name) for name in keys if name in changed}
    return Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(folder, **changed),
        train_dataset=tiny.Rows(12, uneven=True),
        recipe=recipe,
        **extra,
    )


@pytest.mark.parametrize(("accumulation", "batch"), [(1, 4), (3, 2), (4, 2)])
def test_modifiers_see_the_mean_over_the_micro_batch(tmp_path, accumulation, batch):
    listener = Listener()
    train(tmp_path, listener, accumulation=accumulation, batch=batch)
    assert listener._shown == pytest.approx(listener._textbook, rel=1e-5)
    assert len(listener._shown) == 12 / batch


def by_sum(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = functional.cross_entropy(logits, targets, reduction="sum")
    return total / num_items_in_batch


@pytest.mark.parametrize(
    "changed", [{}, {"label_smoothing_factor": 0.1}, {"compute_loss_func": by_sum}]
)
def test_a_term_counts_once_per_step_however_split(tmp_path, changed):
    whole = train(tmp_path, Penalty(), accumulation=1, batch=6, **changed)
    parts = train(tmp_path, Penalty(), accumulation=3, batch=2, **changed)
    plain = train(tmp_path, None, accumulation=1, batch=6, **changed)
    for name, parameter in whole.model.named_parameters():
        assert torch.allclose(parameter, parts.model.get_parameter(name), atol=1e-6), name
    assert not torch.allclose(whole.model.lm_head.weight, plain.model.lm_head.weight, atol=1e-4)


def test_a_model_that_takes_means_divides_them(tmp_path, monkeypatch):
    """Where the trainer averages micro-batches itself, so it does with what modifiers add."""
    monkeypatch.setattr("transformers.LlamaForCausalLM.accepts_loss_kwargs", False, raising=False)
    listener = Listener()
    parts = train(tmp_path, [listener, Penalty()], accumulation=3, batch=2)
    assert listener._shown == pytest.approx(listener._textbook, rel=1e-5)
    logged = [each for each in parts.state.log_history if "loss" in each]
    for each, shown in zip(logged, (listener._shown[:3], listener._shown[3:]), strict=True):
        assert each["step_loss"] == pytest.approx(sum(shown) / 3, rel=1e-5)


def test_an_evaluation_has_the_models_own_loss(tmp_path):
    trainer = train(tmp_path, Penalty(weight=100), accumulation=1, batch=4)
    with_session = trainer.evaluate(tiny.Rows(4))["eval_loss"]
    assert with_session < 10
    [during] = [
        each["eval_loss"]
        for each in train(
            tmp_path,
            Penalty(weight=100),
            accumulation=1,
            batch=4,
            eval_strategy="epoch",
            eval_dataset=tiny.Rows(4),
        ).state.log_history
        if "eval_loss" in each
    ]
    assert during == pytest.approx(with_session)


def test_the_trainer_logs_both_losses_and_figures(tmp_path):
    trainer = train(tmp_path, Penalty(), accumulation=3, batch=2)
    first = trainer.state.log_history[0]
    model = tiny.tiny_model()
    penalty = 0.5 * model.lm_head.weight.square().sum().item()
    assert first["loss"] == pytest.approx(first["step_loss"] + penalty, rel=1e-5)
    assert first["distill_step_loss"] == pytest.approx(penalty, rel=1e-5)
    assert first["perplexity"] == pytest.approx(torch.tensor(first["step_loss"]).exp().item())
    # Figures are of the moment, the loss is from before the step.
    assert 0 < first["penalty"] < penalty


@pytest.mark.parametrize(
    ("frequency", "kind", "steps"),
    [(2, "step", [1, 3, 5]), (0.5, "epoch", [1, 4]), (0, "step", [1, 2, 3, 4, 5, 6])],
)
def test_loggers_hear_by_their_own_cadence(tmp_path, frequency, kind, steps):
    heard, asked = [], []

    class Counted(Penalty):
        def figures(self, state):
            asked.append(active_session().lifecycle.global_step)
            return super().figures(state)

    logger = LambdaLogger(lambda tag, value, values, step, *_: heard.append((step, values)) or True)
    loggers = LoggerManager(
        [logger], log_frequency=frequency, frequency_type=kind, log_python=False
    )
    trainer = train(
        tmp_path,
        Counted(),
        accumulation=1,
        batch=2,
        loggers=loggers,
        logging_strategy="no",
        learning_rate=0.6,
    )
    assert [step for step, _ in heard] == steps == asked
    assert not any("loss" in each for each in trainer.state.log_history)
    for step, values in heard:
        assert set(values) == {
            *("loss", "step_loss", "distill_step_loss", "perplexity"),
            *("penalty", "learning_rate", "step", "epoch"),
        }
        assert values["epoch"] == pytest.approx(step / 6)
        # Linear decay to zero; the rate is that of the step which was taken.
        assert values["learning_rate"] == pytest.approx(0.6 * (7 - step) / 6)


def test_the_result_tells_the_summary(tmp_path):
    class Zero(Modifier):
        def on_initialize(self, state, **kwargs):
            return True

        def on_finalize(self, state, **kwargs):
            with torch.no_grad():
                for each in state.model.parameters():
                    each.zero_()
            return True

    trainer = Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(tmp_path),
        train_dataset=tiny.Rows(4),
        recipe=Zero(),
    )
    assert trainer.train().metrics["sparsity_percent"] == 100
    assert active_session().lifecycle.finalized
