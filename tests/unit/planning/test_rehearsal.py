# SPDX-License-Identifier: Apache-2.0
"""A plan says what a modifier would find out by trying its work out on the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import published_models as published

from llmcompressor import plan
from llmcompressor.args import ModelArguments
from llmcompressor.modeling import meta_weights
from llmcompressor.modeling.call_graph import trace_flow
from llmcompressor.modifiers.rotation import SpinQuantModifier
from llmcompressor.planning import proxy_model
from llmcompressor.planning.subject import open_planned_model


def spin(*names: str) -> SpinQuantModifier:
    return SpinQuantModifier(rotations=list(names))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 with four blocks, without a weight; its head is as large as published."""
    config = {**published.DEEPSEEK_V3, "num_hidden_layers": 4, "n_routed_experts": 16}
    place = tmp_path_factory.mktemp("latent") / "model"
    return published.write_headers(place, config, published.tensors_of(config))


def test_a_cache_that_holds_no_keys_is_a_problem(latent: Path) -> None:
    found = plan(latent, spin("R3"), measure=False)
    assert not found.ok
    (problem,) = found.problems
    assert (problem.where, problem.error) == ("SpinQuantModifier", "TargetError")
    assert "with R3 DeepseekV3ForCausalLM computes something else" in problem.message
    assert problem.remedy == "Leave R3 out of rotations."


def test_what_passes_is_no_problem_and_no_note(latent: Path) -> None:
    found = plan(latent, spin("R4"), measure=False)
    assert not found.problems
    assert not any("SpinQuantModifier" in note for note in found.notes)


def test_without_a_small_model_the_plan_says_what_is_left(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_model, "_SMALL", 0)
    monkeypatch.setattr(proxy_model, "_MOST", 0)
    found = plan(llama_folder, spin("R1"), measure=False)
    assert not found.problems
    (note,) = [note for note in found.notes if "SpinQuantModifier" in note]
    assert "tries out on the weights" in note
    assert note.endswith("are large still.")


def test_a_matrix_that_is_not_loaded_is_not_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros for products with zeros: the flow is the same, and takes no time for wide models."""
    hollow = torch.zeros(()).expand(3, 2)
    given = torch.ones(5, 2)
    assert meta_weights._is_expanded_zero(given, hollow)
    assert not meta_weights._is_expanded_zero(given, hollow.clone())
    # Small, and no 16-bit floats: all is multiplied in full once, and some processors are slow.
    config = {**published.DEEPSEEK_V3, "num_hidden_layers": 4, "n_routed_experts": 16}
    config |= {"hidden_size": 512, "intermediate_size": 512, "vocab_size": 1000}
    folder = published.write_headers(tmp_path / "model", config, published.tensors_of(config))
    wanted = ModelArguments(model=str(folder), precision="float32")
    model = open_planned_model(wanted).model
    short = trace_flow(model)
    monkeypatch.setattr(meta_weights, "_is_expanded_zero", lambda *args: False)
    small = open_planned_model(wanted).model
    long = trace_flow(small)
    names, others = ({one: name for name, one in each.named_modules()} for each in (model, small))
    assert [names[one] for one in short.called] == [others[one] for one in long.called]
    assert {names[a]: names[b] for a, b in short.feeder.items()} == {
        others[a]: others[b] for a, b in long.feeder.items()
    }
