# SPDX-License-Identifier: Apache-2.0
"""Modifiers of users' own, named in a recipe and nowhere registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support import small_models as small
from tests.support.logging_modifier import LoggingModifier

from llmcompressor import active_session, create_session, oneshot
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.recipe import Recipe


class Undeclared(Modifier):
    """Counts the tokens that go into each layer, with hooks and calibration events."""

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


class TokenCounter(Undeclared):
    """The same, and says that it needs data."""

    requires_calibration_data: ClassVar[bool] = True


class FieldCounter(Undeclared):
    """Says so by a field, as in the reference, and notes its phases itself."""

    requires_calibration_data: bool = True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        super().on_calibration_start(state, event, **kwargs)
        self.started_ = True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        super().on_calibration_end(state, event, **kwargs)
        self.ended_ = True


class EarlyCounter(Undeclared):
    """Puts its hooks on as it is initialized."""

    requires_calibration_data: ClassVar[bool] = True

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        super().on_calibration_start(state, Event())
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        pass


class Replacer(Modifier):
    """Goes on with a model of its own, which has other weights."""

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        state.model = small.llama(seed=5)
        return True


class Spoiler(Modifier):
    """Changes a weight at the very end."""

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        with torch.no_grad():
            state.model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
        return True


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


BY_DATA = ("sequential", "basic", "layer_sequential")


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        *(("TokenCounter", each) for each in ("independent", *BY_DATA)),
        *(("FieldCounter", each) for each in ("independent", *BY_DATA)),
        *(("EarlyCounter", each) for each in ("independent", *BY_DATA)),
        *(("Undeclared", each) for each in BY_DATA),
    ],
)
def test_its_hooks_see_every_calibration_token_once(name: str, pipeline: str) -> None:
    model = small.llama()
    oneshot(
        model=model,
        recipe=f"modifiers: {{{name}: {{}}}}",
        dataset=small.token_rows(samples=5, length=12),
        num_calibration_samples=5,
        batch_size=2,
        pipeline=pipeline,
    )
    assert TokenCounter.counts == {f"model.layers.{n}.mlp.down_proj": 5 * 12 for n in (0, 1)}
    assert TokenCounter.events == ["start", "end"]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("scheme", "spoils", "is_raw"),
    [
        pytest.param(
            scheme,
            spoils,
            is_raw,
            marks=[] if is_raw or scheme in ("W4A16", "W8A8") else [pytest.mark.slow],
        )
        for scheme in ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "W8A16_ASYM")
        for spoils in (False, True)
        for is_raw in (False, True)
    ],
)
def test_a_weight_that_is_changed_after_it_was_quantized_is_told(
    scheme: str, spoils: bool, is_raw: bool, tmp_path: Path, log: list[tuple[str, str]]
) -> None:
    modifier = "QuantizationModifier" if is_raw else "GPTQModifier"
    recipe = f"modifiers: {{{modifier}: {{targets: Linear, scheme: {scheme}, ignore: [lm_head]}}"
    recipe += ", Spoiler: {}}" if spoils else "}"
    oneshot(
        small.one_block(),
        recipe=recipe,
        dataset=None if is_raw else small.token_rows(),
        num_calibration_samples=4,
        output_dir=tmp_path / "out",
    )
    said = [text for _, text in log if "after they were quantized" in text]
    assert len(said) == spoils
    assert not spoils or "weights of model.layers.0.mlp.up_proj after" in said[0]


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
