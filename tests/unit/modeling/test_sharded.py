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
