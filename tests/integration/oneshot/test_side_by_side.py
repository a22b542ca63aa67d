# SPDX-License-Identifier: Apache-2.0
"""Runs do not disturb each other: in several threads, or one within another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from tests.support.small_models import one_block, token_rows, tree
from torch.nn import Module

from llmcompressor import active_session, create_session, oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

RUNS = 3


def _recipe() -> GPTQModifier:
    return GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])


def _compress(seed: int, model: Module | None = None) -> dict[str, torch.Tensor]:
    model = one_block(seed=seed) if model is None else model
    made = oneshot(model=model, recipe=_recipe(), dataset=token_rows(32, seed=seed))
    return dict(made.state_dict())


def test_runs_of_several_threads_make_what_each_makes_alone() -> None:
    """They all find the one session that the process shares."""
    alone = [_compress(seed) for seed in range(RUNS)]
    models = [one_block(seed=seed) for seed in range(RUNS)]  # drawn from what threads share
    together = Barrier(RUNS)

    def compress(seed: int) -> dict[str, torch.Tensor]:
        together.wait()
        return _compress(seed, models[seed])

    with ThreadPoolExecutor(RUNS) as pool:
        threaded = list(pool.map(compress, range(RUNS)))
    for one, other in zip(alone, threaded, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_folders_of_several_threads_are_those_of_each_alone(tmp_path: Path) -> None:
    for seed in range(RUNS):
        one_block(seed=seed).save_pretrained(tmp_path / f"{seed}")

    def compress(place: str) -> Path:
        seed = place[0]
        oneshot(
            model=str(tmp_path / seed),
            recipe=_recipe(),
            dataset=token_rows(32, seed=int(seed)),
            output_dir=tmp_path / place,
        )
        return tmp_path / place

    alone = [compress(f"{seed}-alone") for seed in range(RUNS)]
    with ThreadPoolExecutor(RUNS) as pool:
        threaded = list(pool.map(compress, [f"{seed}-threaded" for seed in range(RUNS)]))
    for one, other in zip(alone, threaded, strict=True):
        assert tree(one) == tree(other)


class Inner(Modifier):
    """Compresses another model as soon as it is initialized."""

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        type(self).made = _compress(1)
        return True


@pytest.mark.parametrize("created", [False, True], ids=["shared session", "session of its own"])
def test_a_run_within_a_run_leaves_it_alone(created: bool) -> None:
    outer = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])

    def run() -> None:
        model = oneshot(model=one_block(), recipe=[Inner(), outer])
        assert model.model.layers[0].mlp.up_proj.weight_scale.shape == (128, 1)
        assert active_session().state.model is model

    if created:
        with create_session():
            run()
    else:
        run()
    expected = _compress(1)
    assert expected.keys() == Inner.made.keys()
    assert all(torch.equal(expected[name], Inner.made[name]) for name in expected)
