# SPDX-License-Identifier: Apache-2.0
"""Experts in one of two groups: transformers takes one for all of them, and has to take theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import mixtures
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, plan
from llmcompressor.entrypoints.verify import verify
from llmcompressor.modifiers.quantization import QuantizationModifier

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
IGNORE = ["lm_head", "re:.*gate$"]
QKV = [f"model.layers.{i}.self_attn.{own}_proj" for i in range(2) for own in "qkv"]
NOTHING = "re:(?!)experts"
FAILURES = (RuntimeError, AttributeError)
"""How a load ends that finds no codes of the group; it depends on the release."""
ATTENTION = {"targets": ["re:.*self_attn.*"], "weights": FP8, "input_activations": TOKEN}
MLP = {"targets": ["re:.*mlp.*"], "weights": INT4}
SHARED = {"targets": ["re:.*mlp.shared_experts.*"], "weights": FP8, "input_activations": TOKEN}
REST = {"targets": ["re:.*mlp.*(experts.\\d|layers.0.mlp|self_attn).*_proj$"], "weights": INT4}


def logits(folder: Path) -> torch.Tensor:
    return mixtures.logits(AutoModelForCausalLM.from_pretrained(folder).eval())


def errors(folder: Path) -> set[str]:
    found = verify(folder, serve="transformers").findings
    return {one.rule for one in found if one.severity == "error"}


def edit(folder: Path, change: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("qwen3_moe", {"attn": ATTENTION, "exp": MLP}),
        pytest.param("deepseek_v3", {"attn": ATTENTION, "exp": MLP}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"attn": ATTENTION, "exp": MLP}, marks=pytest.mark.slow),
        ("deepseek_v3", {"shared": SHARED, "rest": REST}),
        ("qwen3_moe", {"attn": {**ATTENTION, "targets": QKV}, "exp": MLP}),
    ],
    ids=["qwen3", "deepseek", "mixtral", "shared", "names"],
)
def test_the_group_of_the_experts_is_the_one_that_is_taken(
    family: str, groups: dict[str, Any], tmp_path: Path
) -> None:
    mixtures.saved(family, tmp_path / "source")
    recipe = QuantizationModifier(config_groups=groups, ignore=IGNORE)
    assert plan(tmp_path / "source", recipe, serve="transformers", measure=False).ok
    made = oneshot(model=tmp_path / "source", recipe=recipe, output_dir=str(tmp_path / "out"))
    assert not errors(tmp_path / "out")
    assert verify(tmp_path / "out", tmp_path / "source", serve="vllm", tp=1).ok
    assert torch.allclose(logits(tmp_path / "out"), mixtures.logits(made), atol=1e-5)

    def forget(settings: dict[str, Any]) -> None:
        for group in settings["config_groups"].values():
            if NOTHING in group["targets"]:
                group["targets"].remove(NOTHING)
        settings["config_groups"] = dict(sorted(settings["config_groups"].items(), reverse=True))

    # the other order is what the writer has kept from happening
    edit(tmp_path / "out", forget)
    is_taken = not errors(tmp_path / "out")
    try:
        reread = logits(tmp_path / "out")
    except FAILURES:
        assert not is_taken
    else:
        assert torch.allclose(reread, mixtures.logits(made), atol=1e-5) == is_taken


@pytest.mark.parametrize("order", [["attn", "exp"], ["exp", "attn"]], ids="-".join)
@pytest.mark.parametrize(
    "names", [pytest.param(["a", "b"], marks=pytest.mark.slow), ["b", "a"]], ids=str
)
def test_the_order_is_that_of_the_file(order: list[str], names: list[str], tmp_path: Path) -> None:
    """Not that of the names: without a pattern that says experts the first group is taken."""
    mixtures.saved("qwen3_moe", tmp_path / "source")
    recipe = QuantizationModifier(config_groups={"attn": ATTENTION, "exp": MLP}, ignore=IGNORE)
    oneshot(model=tmp_path / "source", recipe=recipe, output_dir=str(tmp_path / "out"))

    def reorder(settings: dict[str, Any]) -> None:
        groups = settings["config_groups"].values()
        by_name = dict(zip(("attn", "exp"), groups, strict=True))
        by_name["exp"]["targets"].remove(NOTHING)
        settings["config_groups"] = {
            name: by_name[each] for name, each in zip(names, order, strict=True)
        }

    edit(tmp_path / "out", reorder)
    is_taken = order[0] == "exp"
    assert errors(tmp_path / "out") == (set() if is_taken else {"T6"})
    if is_taken:
        assert logits(tmp_path / "out").isfinite().all()
    else:
        with pytest.raises(FAILURES, match=r"automatic conversion|has no attribute"):
            logits(tmp_path / "out")
