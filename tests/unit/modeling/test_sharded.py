# SPDX-License-Identifier: Apache-2.0
"""Parameters of which each process has a flat piece, as DeepSpeed's ZeRO stage 3 leaves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from llmcompressor.modeling import sharded
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.sharded import (
    gather_shards,
    is_sharded_like,
    local_shard,
    shard_like,
    write_sharded,
    zero_sharded,
)


def cut_up(parameter: Any, processes: int = 3) -> Any:
    """Leave a parameter as ZeRO does: empty, with a padded piece; the first process's."""
    whole, size = parameter.detach().clone(), -(-parameter.numel() // processes)
    parameter.ds_shape, parameter.ds_numel = whole.shape, whole.numel()
    parameter.ds_process_group = None
    parameter.ds_tensor = torch.cat([whole.flatten(), torch.zeros(processes)])[:size].clone()
    parameter.partition = lambda: setattr(parameter, "data", torch.empty(0))
    parameter.partition()
    return whole


@pytest.fixture
def as_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets which process this is."""

    def choose(rank: int) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)

    return choose


def test_pieces_are_cut_and_joined(as_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 x 5 values four processes have four each, the last one three and a zero."""
    parameter = nn.Parameter(torch.randn(3, 5))
    values = cut_up(parameter, 4)
    pieces = []
    for rank in range(4):
        as_process(rank)
        pieces.append(sharded.partition_of(values, parameter))
        assert is_sharded_like(pieces[-1], parameter)
    assert torch.equal(torch.cat(pieces)[:15].view(3, 5), values)
    assert pieces[-1].tolist()[3] == 0
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(
        torch.distributed,
        "all_gather",
        lambda parts, piece, group: [
            one.copy_(two) for one, two in zip(parts, pieces, strict=True)
        ],
    )
    assert torch.equal(gather_shards(pieces[0], parameter), values)


def test_a_piece_is_written_and_what_was_gathered_is_let_go(as_process: Any) -> None:
    parameter: Any = nn.Parameter(torch.randn(4, 6))
    values = cut_up(parameter)
    parameter.data = values.clone()  # as while its module runs
    as_process(0)
    write_sharded(parameter, values + 1)
    assert torch.equal(parameter.ds_tensor, (values + 1).flatten()[:8])
    assert parameter.numel() == 0, "the next forward gathers what was written"
    zero_sharded(parameter)
    assert not local_shard(parameter).any()


def test_shapes_are_shown_and_hidden_again() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    cut_up(model[0].weight)
    assert sharded.has_partitioned_parameters(model)
    assert sharded.full_shape(model[0].weight) == (4, 6)
    with sharded.full_shapes_reported(model):
        assert model[0].weight.shape == (4, 6)
        assert model[0].weight.untyped_storage().nbytes() <= 4, "it takes no memory"
        assert model[1].weight.any(), "what is whole stays as it is"
    assert model[0].weight.shape == (0,)


def test_a_whole_state_is_kept_by_who_wants_it() -> None:
    """A weight that two modules share is one tensor there too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    values = cut_up(model[0].weight)
    model[0].weight.data = values.clone()  # gathered
    state = sharded.full_state_dict(model, keep=True)
    assert torch.equal(state["0.weight"], values)
    assert state["0.weight"] is state["1.weight"]
    assert sharded.full_state_dict(model, keep=False) == {}


def test_what_is_added_later_becomes_a_buffer() -> None:
    """DeepSpeed's hooks would look for the pieces of a parameter."""
    layer = nn.Linear(4, 4)
    for parameter in (layer.weight, layer.bias):
        cut_up(parameter)
    layer.register_parameter("weight_scale", nn.Parameter(torch.ones(4, 1)))
    sharded.convert_to_buffers(layer)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert "weight_scale" in layer.state_dict()


def test_whole_tensors_are_left_alone() -> None:
    parameter = nn.Parameter(torch.randn(2, 3))
    assert not sharded.is_partitioned(parameter)
    assert torch.equal(shard_like(torch.ones(2, 3), parameter), torch.ones(2, 3))
    assert sharded.full_shape(parameter) == (2, 3)


def test_hooks_before_a_forward_come_after_those_that_gather() -> None:
    """Those after it stay where they are, before the weight is let go."""
    seen: list[str] = []
    layer, ours = nn.Linear(2, 2), HooksMixin()
    ours.register_hook(layer, lambda *_: seen.append("ours"), "forward_pre")
    ours.register_hook(layer, lambda *_: seen.append("also ours"), "forward_pre")
    ours.register_hook(layer, lambda *_: seen.append("after"), "forward")
    layer.register_forward_pre_hook(lambda *_: seen.append("gather"))
    layer.register_forward_hook(lambda *_: seen.append("let go"))
    ours.move_pre_hooks_last()
    layer(torch.ones(1, 2))
    assert seen == ["gather", "ours", "also ours", "after", "let go"]
    ours.remove_hooks()
    seen.clear()
    layer(torch.ones(1, 2))
    assert seen == ["gather", "let go"]
