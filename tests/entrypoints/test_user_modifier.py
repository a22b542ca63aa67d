# SPDX-License-Identifier: Apache-2.0
"""Modifiers of users' own, named in a recipe and nowhere registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import small_models as small
import torch

from llmcompressor import active_session, create_session, oneshot
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe


class LoggingModifier(Modifier):
    """Writes down what it is shown."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        self.seen.append((state.model, state.hardware.device, state.optimizer, active_session()))
        return True


class TokenCounter(Modifier):
    """Counts the tokens that go into each layer, with hooks and calibration events."""

    requires_calibration_data: ClassVar[bool] = True
    counts: ClassVar[dict[str, int]] = {}
    events: ClassVar[list[str]] = []

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        self.events.append("start")
        for name, module in state.model.named_modules():
            if name.endswith("down_proj"):
                self.counts[name] = 0
                self.register_hook(module, self._counter(state, name), "forward_pre")

    def _counter(self, state: State, name: str) -> Any:
        def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            assert state.batch_data is not None
            assert args[0].shape[:2] == state.batch_data["input_ids"].shape
            self.counts[name] += args[0].shape[:2].numel()

        return count

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        self.events.append("end")
        self.remove_hooks()


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    LoggingModifier.seen.clear()
    TokenCounter.counts.clear()
    TokenCounter.events.clear()


RECIPE = "modifiers:\n  LoggingModifier: {}\n"


def test_it_sees_the_real_model_and_device(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    model = small.llama()
    default = active_session()
    with create_session() as session:
        assert oneshot(model=model, recipe=str(tmp_path / "recipe.yaml")) is model
        assert active_session() is session
    assert active_session() is default
    assert not default.lifecycle.initialized_
    assert LoggingModifier.seen == [(model, torch.device("cpu"), None, session)]


def test_it_works_without_a_session_of_its_own(llama_folder: Path) -> None:
    model = oneshot(model=str(llama_folder), recipe=RECIPE)
    assert LoggingModifier.seen == [(model, model.device, None, active_session())]


@pytest.mark.parametrize("pipeline", ["independent", "sequential", "basic", "layer_sequential"])
def test_its_hooks_see_every_calibration_token_once(pipeline: str) -> None:
    model = small.llama()
    oneshot(
        model=model,
        recipe="modifiers: {TokenCounter: {}}",
        dataset=small.token_rows(samples=5, length=12),
        num_calibration_samples=5,
        batch_size=2,
        pipeline=pipeline,
    )
    assert TokenCounter.counts == {f"model.layers.{n}.mlp.down_proj": 5 * 12 for n in (0, 1)}
    assert TokenCounter.events == ["start", "end"]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_it_runs_beside_ours(tmp_path: Path) -> None:
    recipe = (
        "modifiers:\n"
        "  QuantizationModifier: {targets: Linear, scheme: FP8, ignore: [lm_head]}\n"
        "  LoggingModifier: {}\n"
    )
    oneshot(
        model=small.llama(),
        recipe=recipe,
        dataset=small.token_rows(),
        num_calibration_samples=4,
        output_dir=tmp_path / "out",
    )
    assert len(LoggingModifier.seen) == 1
    saved = Recipe.create_instance(tmp_path / "out" / "recipe.yaml")
    assert saved == Recipe.create_instance(recipe)


MODULE = """
from llmcompressor.modifiers import Modifier

class ModelNoter(Modifier):
    factor: float = 1.0

    def on_initialize(self, state, **kwargs):
        state.model.noted = (self.factor, str(state.hardware.device))
        return True
"""


def test_a_dotted_path_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "notes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = "modifiers: {users_package.notes.ModelNoter: {factor: 2.5}}"
    model: Any = oneshot(model=small.llama(), recipe=recipe, output_dir=tmp_path / "out")
    assert model.noted == (2.5, "cpu")
    assert Recipe.create_instance(tmp_path / "out" / "recipe.yaml").modifiers[0].factor == 2.5  # type: ignore[attr-defined]
