# SPDX-License-Identifier: Apache-2.0
"""What modifiers see of the loss, what becomes of it, and what is logged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from pydantic import PrivateAttr
from tests.support import tiny_training as tiny
from torch.nn import functional

from llmcompressor.core import EventType, active_session, callbacks, create_session
from llmcompressor.metrics import LambdaLogger, LoggerManager
from llmcompressor.modifiers import Modifier
from llmcompressor.training import SessionManagerMixIn, Trainer
from llmcompressor.training.callbacks import summary


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
def test_a_term_of_a_modifier_counts_once_per_step_however_it_is_split(tmp_path, changed):
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


class OfMeans(transformers.Trainer):
    """Takes the mean of a micro-batch and says so, though the model would take the step's items."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not hasattr(transformers.Trainer, "loss_is_scaled_for_ga"):  # nobody asks for it yet
            self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class OfTheStep(transformers.Trainer):
    """Divides by the step's items itself, and says so."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        loss = by_sum(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("base", [OfMeans, OfTheStep])
def test_what_a_trainer_says_of_its_loss_counts(tmp_path, base, monkeypatch):
    """As it does for the trainer itself, which divides the loss by the micro-batches or not."""
    listener = Listener()
    split = {"accumulation": 3, "batch": 2}
    with monkeypatch.context() as context:
        made = type("Made", (SessionManagerMixIn, base), {})
        context.setitem(globals(), "Trainer", made)
        parts = train(tmp_path, [listener, Penalty()], **split)
    assert listener._shown == pytest.approx(listener._textbook, rel=1e-5)
    if base is OfMeans:
        name = "transformers.LlamaForCausalLM.accepts_loss_kwargs"
        monkeypatch.setattr(name, False, raising=False)
    whole = train(tmp_path, Penalty(), **split)
    for name, parameter in whole.model.named_parameters():
        assert torch.allclose(parameter, parts.model.get_parameter(name), atol=1e-6), name


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


# ---- what is logged


def test_the_trainer_logs_the_models_loss_the_whole_one_and_figures(tmp_path):
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


def test_two_figures_of_one_name_are_told_apart():
    class Tells(Modifier):
        amount: float

        def on_initialize(self, state, **kwargs):
            return True

        def figures(self, state):
            return {"amount": self.amount}

    with create_session() as session:
        session.initialize(recipe=[Tells(amount=1), Tells(amount=2)])
        assert session.figures() == {"amount": 1, "amount_2": 2}
        session.finalize()
        assert session.figures() == {}


def test_only_the_first_process_writes_but_all_ask_the_modifiers():
    heard = []
    loggers = LoggerManager([LambdaLogger(lambda *told: heard.append(told) or True)], 0)
    with create_session() as session:
        model = tiny.tiny_model()
        session.initialize(recipe=Penalty(), model=model, loggers=loggers)
        session.state.hardware.rank = 1
        callbacks.batch_start()
        session.log(EventType.BATCH_END, lambda: {"loss": 1.0})
        assert not heard
        session.state.hardware.rank = 0
        session.log(EventType.BATCH_END, lambda: {"loss": 1.0})
        assert heard


def test_progress_is_lines_where_no_terminal_is_and_the_users_choice_stays(tmp_path):
    names = {
        shown: [
            type(each).__name__
            for each in Trainer(
                model=tiny.tiny_model(), args=tiny.arguments(tmp_path, disable_tqdm=not shown)
            ).callback_handler.callbacks
        ]
        for shown in (True, False)
    }
    assert "ProgressLines" in names[True]
    assert "ProgressCallback" not in names[True]
    assert "ProgressLines" not in names[False]
    assert "PrinterCallback" in names[False]


# ---- the end


def test_the_summary_counts_matrices_outside_embeddings():
    model = tiny.tiny_model()
    up, head = model.model.layers[0].mlp.up_proj, model.lm_head
    with torch.no_grad():
        up.weight.view(-1)[::2] = 0
        model.model.embed_tokens.weight.zero_()
    up.quantization_scheme = type("Scheme", (), {"weights": object()})()
    matrices = [
        each.numel()
        for name, each in model.named_parameters()
        if each.dim() == 2 and "embed" not in name
    ]
    told = summary(model)
    assert told["total_params"] == sum(each.numel() for each in model.parameters())
    zeros = sum(int((m.weight == 0).sum()) for m in (up, head))
    assert told["sparsity_percent"] == pytest.approx(100 * zeros / sum(matrices))
    assert told["quantized_percent"] == pytest.approx(100 * up.weight.numel() / sum(matrices))


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


class WithoutTargets(tiny.Rows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return tiny.row(index, ignored=tiny.TOKENS)


@pytest.mark.parametrize(("accumulation", "batch"), [(1, 4), (4, 1)])
def test_a_training_without_a_target_is_no_perfect_one(
    tmp_path, warned, monkeypatch, accumulation, batch
):
    monkeypatch.setattr(tiny, "Rows", WithoutTargets)
    heard = []
    manager = LoggerManager(
        [LambdaLogger(lambda tag, value, values, *_: heard.append(values) or True)],
        log_frequency=0,
        log_python=False,
    )
    made = train(tmp_path, [Listener()], accumulation=accumulation, batch=batch, loggers=manager)
    assert not any("perplexity" in entry for entry in made.state.log_history)
    assert heard
    assert not any({"loss", "perplexity"} & set(values) for values in heard)
    assert sum("no token of the first step" in line.lower() for line in warned) == 1
    assert sum("There is no train_loss" in line for line in warned) == 1


def test_a_replaced_loss_comes_with_the_models_own(tmp_path):
    made = trainer_of(tmp_path, [Penalty()])
    metrics = made.train().metrics
    shown = [entry["step_loss"] for entry in made.state.log_history if "step_loss" in entry]
    assert metrics["task_loss"] == pytest.approx(sum(shown) / len(shown), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["task_loss"]))
    assert metrics["train_loss"] > metrics["task_loss"]
    assert "task_loss" not in trainer_of(tmp_path, [Listener()]).train().metrics
