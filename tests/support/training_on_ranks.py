# SPDX-License-Identifier: Apache-2.0
"""What a process of a distributed training does, for a test that starts two of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import quantization_loop as loop
from tests.support import tiny_llama as tiny

from llmcompressor.modeling.sharded import gather_full
from llmcompressor.modifiers.quantization import QuantizationModifier

INT8 = {"num_bits": 8, "strategy": "tensor", "observer": "minmax"}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": INT8,
    "output_activations": INT8,
}


WAYS: dict[str, dict[str, Any]] = {
    "observed": {"config_groups": {"a": GROUP}},
    "learned": {"config_groups": {"a": GROUP}, "learned_scales": True},
    "spread": {"scheme": "NVFP4"},
    "spread, learned": {"scheme": "FP8", "learned_scales": True},
}
"""How it is trained; what is spread is so by FSDP, the others by DDP."""


def train(world: int, rank: int, way: str) -> dict[str, Any]:
    """Four steps on this rank's rows; the losses, the ranges, the quantized weights."""
    model = tiny.llama(num_hidden_layers=1)
    modifier = QuantizationModifier(ignore=["lm_head"], start=1, **WAYS[way])
    session = loop.begin(model, modifier)
    wrapped = model
    if world > 1 and "spread" in way:
        mesh = init_device_mesh("cpu", (world,))
        for part in (model.model.layers[0], model):
            fully_shard(part, mesh=mesh)
    elif world > 1:
        wrapped = DistributedDataParallel(model)
    optimizer = loop.optimizer_of(model)
    data = [{k: v[rank::world] for k, v in one.items()} for one in tiny.batches(number=4)]
    losses = loop.train(session, wrapped, optimizer, data)
    ranges = modifier.figures(session.state)
    session.finalize()
    tensors = {name: gather_full(one.detach()).clone() for name, one in model.named_parameters()}
    return {"losses": losses, "ranges": ranges, "tensors": tensors}


def main(rank: int, world: int, folder: str) -> None:
    """Train in all ways, and write what came out."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = {way: train(world, rank, way) for way in WAYS}
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()
