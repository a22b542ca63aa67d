# SPDX-License-Identifier: Apache-2.0
"""One modifier after another, each with a pipeline of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support import tiny_models as tiny
from tests.support.recorders import Recorder, plain_inputs, run_pipeline

from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines.registry import PIPELINES
from llmcompressor.session.functions import active_session, create_session


class Free(Modifier):
    """Needs no data; halves a weight when it is told of the modules."""

    log: Any = None

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        self.log.append("free initialized")
        return True

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        self.log.append("free start")

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any, **kw: Any) -> None:
        self.log.append(f"free {len(list(modules))}")
        weight = state.model.model.layers[0].self_attn.q_proj.weight
        weight.data = weight.data / 2

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        self.log.append("free end")


class Logged(Recorder):
    log: Any = None

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        self.log.append("recorder initialized")
        return super().on_initialize(state, **kwargs)

    def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
        self.log.append("recorder start")
        self.log.append([type(one).__name__ for one in active_session().lifecycle.recipe.modifiers])
        super().on_calibration_start(state, event, **kwargs)

    def on_calibration_end(self, state: Any, event: Any, **kwargs: Any) -> None:
        self.log.append("recorder end")
        super().on_calibration_end(state, event, **kwargs)


def test_each_modifier_runs_alone_after_all_are_initialized() -> None:
    log: list[Any] = []
    model, batches = tiny.build("llama"), tiny.text_batches()
    recorder = Logged(log=log)
    run_pipeline(model, batches, [Free(log=log), recorder], "independent")
    assert log == [
        "free initialized",
        "recorder initialized",
        "free start",
        f"free {len(list(model.modules()))}",
        "free end",
        "recorder start",
        ["Logged"],
        "recorder end",
    ]
    # It ran on what the first has made of the model.
    expected = plain_inputs(model, batches, tiny.leaves(model, "Linear", ["lm_head"]))
    for name, inputs in expected.items():
        assert all(map(torch.equal, recorder._inputs[name], inputs))
    assert recorder._told == list(recorder._inputs)


@pytest.mark.parametrize("fails", [False, True])
def test_the_sessions_recipe_is_whole_again(fails: bool) -> None:
    class Failing(Recorder):
        def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
            if fails:
                raise ZeroDivisionError

    from llmcompressor.args import DatasetArguments

    model = tiny.build("llama")
    with create_session() as session:
        modifiers = [Failing(), Recorder()]
        session.initialize(model=model, start=-1, recipe=modifiers, copy_data=False)
        pipeline = PIPELINES.load("independent")()
        try:
            pipeline(model, tiny.text_batches(), DatasetArguments())
        except ZeroDivisionError:
            assert fails
        assert session.lifecycle.recipe.modifiers == modifiers


def test_two_that_share_a_model_may_run_together() -> None:
    """In one sequential pipeline, each with modules of its own, even of one input."""
    model, batches = tiny.build("llama"), tiny.text_batches()
    queries = Recorder(targets=["Linear"], ignore=["lm_head", "re:.*(k|v)_proj"], round_to=2)
    keys = Recorder(targets=["Linear"], ignore=["lm_head", "re:.*(q|o|gate|up|down)_proj"])
    run_pipeline(model, batches, [queries, keys], "sequential")
    expected = plain_inputs(model, batches, tiny.leaves(model, "Linear", ["lm_head"]))
    found = {**queries._inputs, **keys._inputs}
    assert found.keys() == expected.keys()
    for name, inputs in expected.items():
        assert all(map(torch.equal, found[name], inputs)), name
    seen = {**queries._seen_when_told, **keys._seen_when_told}
    assert set(seen.values()) == {len(batches)}
