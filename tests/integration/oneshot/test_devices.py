# SPDX-License-Identifier: Apache-2.0
"""A device that is not there is an error before any work, whoever is asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.pairs import each

from llmcompressor import model_free_ptq, oneshot, plan, train
from llmcompressor.entrypoints.arguments import parse_device
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier

RECIPE = "modifiers: {QuantizationModifier: {targets: Linear, scheme: W4A16, ignore: [lm_head]}}"
WRONG = {
    "gpu": "'gpu': no device has that name",
    "foo:1": "'foo:1': no device has that name",
    "meta": "'meta': nothing can be computed there",
    "xla:7": "'xla:7': this machine, or this build of torch, has none",
    "cpu:3": "'cpu:3': this machine",
}
CALLS: dict[str, Callable[[str, Path, Any], object]] = {
    "oneshot": lambda model, out, device: oneshot(
        model=model, recipe=RECIPE, output_dir=out, device=device
    ),
    "plan": lambda model, out, device: plan(model, RECIPE, device=device, measure=False),
    "model_free_ptq": lambda model, out, device: model_free_ptq(
        model, out, scheme="FP8_DYNAMIC", device=device
    ),
    "train": lambda model, out, device: train(
        model=model, recipe=RECIPE, dataset=["a"], output_dir=out, device=device
    ),
}


@each(device=WRONG, call=CALLS)
def test_a_device_that_is_not_there(call: str, device: str, pico: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=WRONG[device]) as raised:
        CALLS[call](str(pico), tmp_path / "out", device)
    assert "cpu" in raised.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", WRONG)
def test_a_device_that_a_modifier_names(device: str, pico: Path, tmp_path: Path) -> None:
    """The data is not even looked for."""
    recipe = [AWQModifier(offload_device=device), GPTQModifier(targets="Linear", scheme="W4A16")]
    match = f"AWQModifier: offload_device cannot be {WRONG[device]}"
    with pytest.raises(ArgumentError, match=match):
        oneshot(model=pico, recipe=recipe, dataset="no-such-data", output_dir=tmp_path / "out")
    recipe = [AWQModifier(offload_device=device), GPTQModifier(targets="Linear", scheme="W4A16")]
    problems = plan(pico, recipe, [{"input_ids": [1, 2, 3]}], measure=False).problems
    assert [one for one in problems if re.search(match, str(one.message))]
    assert not list(tmp_path.iterdir())


def test_accelerators_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert parse_device("cuda").type == "cuda"
    assert parse_device("cuda:1").index == 1
    with pytest.raises(ArgumentError, match="This machine has cpu and cuda:0 to 1"):
        parse_device("cuda:2")
