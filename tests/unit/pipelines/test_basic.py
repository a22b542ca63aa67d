# SPDX-License-Identifier: Apache-2.0
"""The pipelines that do not pause, and the mode in which all of them run a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, hooks_left, plain_inputs, run_pipeline

from llmcompressor.args.dataset_arguments import PIPELINES as SPELLINGS
from llmcompressor.errors import DatasetError
from llmcompressor.modeling.call_graph import model_inputs
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.pipelines import PIPELINES, CalibrationPipeline, infer_pipeline
from llmcompressor.pipelines.batches import calibration_mode
from llmcompressor.session.functions import create_session

PIPELINES_WITH_DATA = ["basic", "sequential", "layer_sequential", "independent"]


def _linears(model: Any) -> list[str]:
    return list(tiny.leaves(model, "Linear", ["lm_head"]).values())


def test_basic_runs_every_batch_and_tells_of_all_modules_at_once() -> None:
    model, batches = tiny.build("llama"), tiny.text_batches()
    recorder = Recorder()
    expected = plain_inputs(model, batches, tiny.leaves(model, "Linear", ["lm_head"]))
    run_pipeline(model, batches, recorder, "basic")
    start, told, end = recorder._events
    assert (start, end) == ("start", "end")
    assert sorted(told) == sorted(_linears(model))
    for name, inputs in expected.items():
        assert all(map(torch.equal, recorder._inputs[name], inputs))
    assert not hooks_left(model)


def test_datafree_fires_the_events_and_runs_nothing() -> None:
    model, recorder = tiny.build("llama"), Recorder()
    run_pipeline(model, [], recorder, "datafree")
    assert recorder._events == ["start", tuple(_linears(model)), "end"]
    assert recorder._inputs == {}


@pytest.mark.parametrize("pipeline", PIPELINES_WITH_DATA)
def test_hooks_are_told_which_batch_and_which_tokens(pipeline: str) -> None:
    model, batches = tiny.build("llama"), tiny.text_batches()
    recorder = Recorder(twin=True)
    run_pipeline(model, batches, recorder, pipeline)
    for name in _linears(model):
        assert [id(batch) for batch in recorder._batches[name]] == [id(one) for one in batches]
        masks = [batch["attention_mask"].bool() for batch in batches]
        assert all(map(torch.equal, recorder._masks[name], masks))
        assert all(
            one.shape[:2] == mask.shape
            for one, mask in zip(recorder._inputs[name], masks, strict=True)
        )


@pytest.mark.parametrize("pipeline", [*PIPELINES_WITH_DATA, "datafree"])
def test_model_and_state_are_as_before(pipeline: str) -> None:
    model = tiny.build("llava")
    model.model.language_model.train()
    model.model.language_model.layers[1].eval()
    model.lm_head.quantization_scheme = "anything"
    model.model.quantization_scheme = "anything"
    model.model.quantization_enabled = True
    text_config = model.config.text_config
    text_config.use_cache = True
    modes = [module.training for module in model.modules()]
    seen: list[Any] = []

    class Looking(Recorder):
        def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
            seen.append(
                (
                    any(module.training for module in model.modules()),
                    text_config.use_cache,
                    model.model.quantization_enabled,
                    model.lm_head.quantization_enabled,
                    torch.is_grad_enabled(),
                )
            )

    with create_session() as session:
        session.initialize(model=model, start=-1, recipe=[Looking()], copy_data=False)
        from llmcompressor.args import DatasetArguments

        PIPELINES.load(pipeline)()(model, tiny.image_batches(), DatasetArguments())
        state = session.state
        assert (
            state.batch_data,
            state.calibration.token_mask,
            state.calibration.reference_inputs,
        ) == (None, None, None)
        assert state.calibration.call_order is None
        session.finalize()
    assert set(seen) == {(False, False, False, False, False)}
    assert [module.training for module in model.modules()] == modes
    assert text_config.use_cache is True
    assert model.model.quantization_enabled is True
    assert "quantization_enabled" not in vars(model.lm_head)
    assert torch.is_grad_enabled()


def test_the_mode_is_undone_by_an_error() -> None:
    model = tiny.build("llama").train()
    with pytest.raises(ZeroDivisionError), calibration_mode(model):
        raise ZeroDivisionError
    assert model.training
    assert torch.is_grad_enabled()


def test_basic_shares_statistics_and_solves_as_if_it_did_not() -> None:
    """One input, one Hessian: a hook on q serves k and v, and changes no result."""
    weights = []
    for alone in (False, True):
        model = tiny.build("llama")
        modifier = GPTQModifier(
            targets="Linear",
            scheme="W8A16",
            ignore=["lm_head"],
            asymmetric=False,
            batched_quantization=False,
        )
        if alone:
            model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(
                lambda module, args: (args[0].clone(),)
            )
        order: list[Any] = []

        class Looking(Recorder):
            def on_calibration_start(self, state: Any, event: Any, _order=order, **kw: Any) -> None:
                _order.append(state.calibration.call_order)

        run_pipeline(model, tiny.text_batches(), [modifier, Looking(targets=["None"])], "basic")
        attention = model.model.layers[0].self_attn
        shared = (attention.q_proj, attention.k_proj, attention.v_proj)
        seen = order[0].group_of(attention.q_proj)
        assert seen == (shared if not alone else (attention.q_proj, attention.v_proj))
        weights.append([module.weight for module in tiny.leaves(model, "Linear", ["lm_head"])])
    assert all(torch.allclose(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("pipeline", ["basic", "sequential", "layer_sequential"])
def test_without_data_there_is_an_error(pipeline: str) -> None:
    with pytest.raises(DatasetError, match="needs calibration data"):
        run_pipeline(tiny.build("llama"), None, Recorder(), pipeline)
    with pytest.raises(DatasetError, match="holds no batch"):
        run_pipeline(tiny.build("llama"), [], Recorder(), pipeline)


def test_a_recipe_with_data_is_sequential_else_datafree() -> None:
    free = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC")
    assert infer_pipeline([free]) == "datafree"
    assert infer_pipeline([free, Recorder()]) == "sequential"
    assert infer_pipeline([]) == "datafree"


def test_a_pipeline_follows_modifiers_or_the_user(
    log: list[tuple[str, str]],
) -> None:
    kinds = {name: PIPELINES.load(name) for name in ("datafree", "sequential", "independent")}
    assert type(CalibrationPipeline.from_modifiers([])) is kinds["datafree"]
    assert type(CalibrationPipeline.from_modifiers([Recorder()])) is kinds["sequential"]
    assert type(CalibrationPipeline.from_modifiers([], "independent")) is kinds["independent"]
    assert type(CalibrationPipeline.from_modifiers([], "data-free")) is kinds["datafree"]
    assert not log
    assert type(CalibrationPipeline.from_modifiers([], "Sequential")) is kinds["sequential"]
    assert [level for level, _ in log] == ["WARNING"]


@pytest.fixture
def own_pipelines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pipelines may be registered, and are forgotten afterwards."""
    monkeypatch.setattr(PIPELINES, "_added", {})
    spellings = dict(SPELLINGS)
    yield
    SPELLINGS.clear()
    SPELLINGS.update(spellings)


@pytest.mark.usefixtures("own_pipelines")
def test_a_pipeline_of_ones_own_is_found_by_its_name() -> None:

    @CalibrationPipeline.register("own")
    class Own(CalibrationPipeline):
        @staticmethod
        def __call__(model: Any, dataloader: Any, dataset_args: Any) -> None:
            model.append(dataset_args)

    seen: list[str] = []
    CalibrationPipeline.load_from_registry("own")(seen, None, "arguments")
    assert seen == ["arguments"]
    assert isinstance(CalibrationPipeline.from_modifiers([], "own"), Own)


def test_a_decoder_that_makes_its_inputs_of_labels_gets_them() -> None:
    model, ids = tiny.build("t5"), torch.ones(1, 4, dtype=torch.long)
    assert set(model_inputs(model, {"input_ids": ids, "labels": ids})) == {"input_ids", "labels"}
    both = {"input_ids": ids, "labels": ids, "decoder_input_ids": ids}
    assert set(model_inputs(model, both)) == {"input_ids", "decoder_input_ids"}
