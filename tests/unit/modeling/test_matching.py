# SPDX-License-Identifier: Apache-2.0
"""The matching rule, held against compressed-tensors' own functions, and the hints on misses."""

from __future__ import annotations

import itertools

import pytest
import torch
from compressed_tensors.utils import InternalModule
from compressed_tensors.utils.match import is_match
from compressed_tensors.utils.match import match_modules_set as oracle_sets
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import (
    check_targets,
    match_modules_set,
    match_named_modules,
    matches,
    unmatched,
)


class LinearBase(nn.Module):
    pass


class RowLinear(LinearBase):
    pass


class MyLinear(nn.Linear):
    pass


class Helper(InternalModule):
    pass


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(4, 4)
        self.up_proj = MyLinear(4, 4)
        self.down_proj = RowLinear()
        self.observer = Helper()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = Mlp()


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(4, 4)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def warnings_logged() -> list[str]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)


TOY = Toy()
TARGETS = [
    "Linear",
    "LinearBase",
    "RowLinear",
    "MyLinear",
    "Module",
    "Helper",
    "InternalModule",
    "Embedding",
    "linear",
    "lm_head",
    "embed",
    "layers.0",
    "layers.0.mlp",
    "mlp",
    "layers.1.mlp.up_proj",
    "re:.*",
    "re:.*mlp",
    "re:.*mlp$",
    "re:mlp",
    r"re:layers\.0\..*_proj$",
    "re:.*proj",
    "re:.*proj.weight",
    "re:layers.1",
    "re:",
    "",
    "re:(lm_head|embed)$",
]


def test_the_rule_is_that_of_compressed_tensors() -> None:
    for target, (name, module) in itertools.product(TARGETS, TOY.named_modules()):
        assert matches(name, module, target) == is_match(name, module, target), (name, target)


def test_unmatched_keeps_order_and_counts_ignored_as_matched() -> None:
    assert unmatched(TOY, ["zz", "Linear", "re:up_proj", "lm_head"]) == ("zz", "re:up_proj")
    check_targets(TOY, ["lm_head"], ["lm_head"])


MISSES = {
    "q_porj": "re:.*q_proj$",
    "q_proj": "re:.*q_proj$",
    "linear": "Linear",
    "LlamaMPL": "LlamaMLP",
    "model.layers.0.self_atn.q_proj": "model.layers.0.self_attn.q_proj",
    "layers.0.mlp": "model.layers.0.mlp",
    "lm_haed": "lm_head",
    "model.norm.weight": "model.norm",
    "*down_proj": "re:.*down_proj",
    "re:.*q_proj.weight": "re:.*q_proj'",
    r"re:.*q_proj\.weight$": "re:.*q_proj'",
    "re:layers.0": "re:.*layers.0",
    "re:.*mlp_gate_proj": "re:.*gate_proj'",
    "re:^layers": "re:.*layers'",
    "re:model.layers.[0-9]+.self_atn.*": "re:model.layers.[0-9]+.self_attn.*",
    "re:.*mlp.experts.*": "model.layers.0.mlp",
    "re:.*MLP.*down": "re:.*mlp.*down'",
    "Conv1D": "Embedding, Linear, LlamaRMSNorm",
}
"""A target that matches nothing → what its error suggests."""


def test_a_miss_is_an_error_with_a_suggestion(llama: LlamaForCausalLM) -> None:
    for target, expected in MISSES.items():
        with pytest.raises(TargetError) as caught:
            check_targets(llama, [target])
        assert repr(target) in str(caught.value)
        assert expected in caught.value.remedy
        assert "allow_unmatched" not in caught.value.remedy
        with pytest.raises(TargetError, match="allow_unmatched: true"):
            check_targets(llama, [target], allow_unmatched=False)


def test_misses_can_be_allowed_and_ignores_only_warn(
    llama: LlamaForCausalLM, warnings_logged: list[str]
) -> None:
    check_targets(llama, ["Linaer"], ["lm_haed", "re:.*vision.*"], allow_unmatched=True)
    assert len(warnings_logged) == 2
    assert "'Linaer'" in warnings_logged[0]
    assert "lm_head" in warnings_logged[1]
    check_targets(llama, ["Linear"], ["lm_head"])
    assert len(warnings_logged) == 2


@pytest.mark.parametrize(
    ("ignore", "meant"),
    [
        ("model.layers.0", "re:model[.]layers[.]0[.]"),
        ("LlamaMLP", "re:model[.]layers[.][0-9]+[.]mlp[.]"),
        ("re:.*self_attn$", "re:model[.]layers[.][0-9]+[.]self_attn[.]"),
        ("LlamaForCausalLM", "re:.*"),
    ],
)
def test_an_ignore_entry_does_not_reach_into_what_it_names(
    llama: LlamaForCausalLM, warnings_logged: list[str], ignore: str, meant: str
) -> None:
    check_targets(llama, ["Linear"], [ignore])
    (said,) = warnings_logged
    assert ignore in said
    assert f"Did you mean {meant!r}" in said
    check_targets(llama, ["Linear"], [ignore, meant])
    assert len(warnings_logged) == 1
    left = [name for name, _ in match_named_modules(llama, ["Linear"], [meant])]
    every = [name for name, _ in match_named_modules(llama, ["Linear"])]
    held = [name for name, one in llama.named_modules() if matches(name, one, ignore)]
    assert set(every) - set(left) == {
        name for name in every if any(name.startswith(f"{each}." if each else "") for each in held)
    }


def test_sets_are_those_of_the_reference_matcher(llama: LlamaForCausalLM) -> None:
    for targets in (
        ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"],
        ["re:.*input_layernorm$", "re:.*q_proj$", "re:.*v_proj$"],
        ["re:.*post_attention_layernorm$", "re:.*(gate|up)_proj$"],
        ["re:.*up_proj$"],
        ["re:.*absent$"],
    ):
        ours = [
            [[module for _, module in pairs] for pairs in each]
            for each in match_modules_set(llama, targets)
        ]
        assert ours == list(oracle_sets(llama, targets))


def test_experts_of_a_block_are_in_one_set() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(2, 2), nn.Linear(2, 2)

    def block() -> nn.Module:
        return nn.ModuleDict(
            {"norm": nn.LayerNorm(2), "experts": nn.ModuleList([Expert(), Expert(), Expert()])}
        )

    model = nn.ModuleList([block(), block()])
    targets = ["re:.*norm$", "re:.*up$", "re:.*down$"]
    sets = list(match_modules_set(model, targets))
    assert [[len(pairs) for pairs in each] for each in sets] == [[1, 3, 3], [1, 3, 3]]
    assert sets[1][0][0][0] == "1.norm"
    oracle = list(oracle_sets(model, targets))
    assert [[[m for _, m in pairs] for pairs in each] for each in sets] == oracle
