# SPDX-License-Identifier: Apache-2.0
"""The pipelines that do not pause, and the mode in which all of them run a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, hooks_left, plain_inputs, run_pipeline

from llmcompressor import oneshot
from llmcompressor.args.dataset_arguments import PIPELINES as SPELLINGS
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.errors import DatasetError
from llmcompressor.modeling.call_graph import model_inputs
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.pipelines import PIPELINES, CalibrationPipeline, infer_pipeline
from llmcompressor.pipelines.batches import calibration_mode, small_batch
from llmcompressor.session.functions import create_session
from llmcompressor.utils.devices import DisableQuantization, calibration_forward_context

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


def test_a_recipe_that_needs_data_is_sequential_and_another_is_free_of_data() -> None:
    free = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC")
    assert infer_pipeline([free]) == "datafree"
    assert infer_pipeline([free, Recorder()]) == "sequential"
    assert infer_pipeline([]) == "datafree"


def test_a_pipeline_is_made_of_what_modifiers_need_or_the_user_names(
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


@pytest.mark.usefixtures("own_pipelines")
def test_a_pipeline_of_ones_own_is_named_in_oneshot() -> None:
    seen: list[int] = []

    def calibrated(**given: Any) -> dict[str, torch.Tensor]:
        model = tiny.build("llama")
        batches = [{"input_ids": torch.arange(8 * n, 8 * n + 8)[None]} for n in range(3)]
        recipe = [
            QuantizationModifier(targets="re:.*o_proj", scheme="W8A16"),
            GPTQModifier(targets="re:.*up_proj", scheme="W4A16"),
        ]
        oneshot(model=model, dataset=batches, recipe=recipe, **given)
        return model.state_dict()

    with pytest.raises(ValueError, match="whole_at_once"):
        calibrated(pipeline="whole_at_once")

    @CalibrationPipeline.register("whole_at_once")
    class Whole(CalibrationPipeline):
        @staticmethod
        def __call__(model: Any, dataloader: Any, dataset_args: Any) -> None:
            LifecycleCallbacks.calibration_epoch_start()
            with calibration_forward_context(model), DisableQuantization(model):
                for batch in dataloader:
                    model(**batch)
                    seen.append(batch["input_ids"].numel())
            LifecycleCallbacks.sequential_epoch_end()
            LifecycleCallbacks.calibration_epoch_end()

    own, basic = calibrated(pipeline="whole_at_once"), calibrated(pipeline="basic")
    assert seen == [8, 8, 8]
    assert own.keys() == basic.keys()
    assert all(torch.equal(value, basic[name]) for name, value in own.items())


# ---------------------------------------------------------------------- what the model is run on


def test_the_model_gets_what_it_takes_and_no_labels() -> None:
    model = tiny.build("llama")
    ids = torch.ones(1, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "loss_mask": ids, "text": ["a"], "prompt": "b"}
    assert model_inputs(model, batch).keys() == {"input_ids"}


def test_a_decoder_that_makes_its_inputs_of_labels_gets_them() -> None:
    model, ids = tiny.build("t5"), torch.ones(1, 4, dtype=torch.long)
    assert set(model_inputs(model, {"input_ids": ids, "labels": ids})) == {"input_ids", "labels"}
    both = {"input_ids": ids, "labels": ids, "decoder_input_ids": ids}
    assert set(model_inputs(model, both)) == {"input_ids", "decoder_input_ids"}


@pytest.mark.parametrize("family", ["t5", "whisper"])
@pytest.mark.parametrize("pipeline", PIPELINES_WITH_DATA)
def test_data_that_a_forward_cannot_do_with_is_told_as_such(family: str, pipeline: str) -> None:
    model, recorder = tiny.build(family), Recorder()
    with pytest.raises(DatasetError, match="fails on the first batch, which has attention_mask"):
        run_pipeline(model, tiny.text_batches(), recorder, pipeline)
    assert recorder._inputs == {}
    assert not hooks_left(model)


@pytest.mark.parametrize("pipeline", PIPELINES_WITH_DATA)
def test_so_is_data_of_another_shape(pipeline: str) -> None:
    """torch raises of it what it raises of all else."""
    batch = {"input_features": torch.randn(1, 3, 16)}
    with pytest.raises(DatasetError, match="fails on the first batch, which has input_features: R"):
        run_pipeline(tiny.build("whisper"), [batch], Recorder(), pipeline)


def test_images_get_the_models_dtype_and_ids_keep_theirs() -> None:
    model = tiny.build("llava").to(torch.bfloat16)
    inputs = model_inputs(model, tiny.image_batches()[0])
    assert inputs["pixel_values"].dtype is torch.bfloat16
    assert inputs["input_ids"].dtype is torch.long


def test_a_text_batch_is_cut_for_watching_and_others_are_not() -> None:
    batch = tiny.text_batches(1)[0]
    assert {key: value.shape for key, value in small_batch(batch).items()} == {
        "input_ids": (1, 8),
        "attention_mask": (1, 8),
    }
    assert small_batch({**batch, "loss_mask": batch["input_ids"]})["loss_mask"].shape == (1, 8)
    image = tiny.image_batches()[0]
    assert small_batch(image).keys() == image.keys()
    assert small_batch(image)["input_ids"] is image["input_ids"]
