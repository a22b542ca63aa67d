# SPDX-License-Identifier: Apache-2.0
"""Runs of models that FSDP shards over the ranks of a group; each rank calls the functions here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.support.small_models import logits, token_rows
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.checkpoint.spread_blocks import SpreadBlocks
from llmcompressor.checkpoint.spread_weights import SpreadWeights
from llmcompressor.errors import ProcessError
from llmcompressor.modeling.sharded import reshard


def whole(folder: str) -> Any:
    """The model of a folder, in the memory of this rank."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def sharded(folder: str, *, mesh: tuple[int, ...] = ()) -> Any:
    """The model of a folder, each layer and the rest sharded by FSDP 2."""
    model = whole(folder)
    sizes = mesh or (distributed.get_world_size(),)
    made = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    for layer in model.model.layers:
        fully_shard(layer, mesh=made)
    fully_shard(model, mesh=made)
    return model


def compress(model: Any, output: Path | None, modifiers: dict[str, Any], **given: Any) -> Any:
    """Compress a model object, with data."""
    return oneshot(
        model=model,
        recipe={"modifiers": modifiers},
        dataset=token_rows(16, 64),
        output_dir=None if output is None else str(output),
        report=False,
        **given,
    )


def run(
    folder: str,
    output: Path,
    modifiers: dict[str, Any],
    *,
    spread: bool,
    forward_before: bool = False,
    mesh: tuple[int, ...] = (),
    **given: Any,
) -> Any:
    """Compress a folder's model, sharded or whole; its logits, and whether it is sharded then."""
    model = sharded(folder, mesh=mesh) if spread else whole(folder)
    if forward_before:  # what the root holds stays whole after it
        logits(model)
    found = compress(model, output, modifiers, **given)
    assert found is model
    found_logits = logits(found)
    if spread:
        reshard(found)
    weights = [one for name, one in found.named_parameters() if name.endswith(".weight")]
    is_sharded = all(isinstance(one, DTensor) for one in weights)
    return found_logits, is_sharded, isinstance(found, FSDPModule)


def loaded_sharded(folder: str, output: Path, modifiers: dict[str, Any]) -> dict[str, Any]:
    """Compress a model that transformers shards as it loads it; its configuration as written."""
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(fsdp_size=distributed.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread, dtype="auto")
    compress(model, output, modifiers)
    found: dict[str, Any] = json.loads((output / "config.json").read_text())
    return found


def save(folder: str, output: Path, modifiers: dict[str, Any]) -> None:
    """Compress a sharded model, and have it save itself."""
    model = compress(sharded(folder), None, modifiers)
    model.save_pretrained(output)


def fail(folder: str, modifiers: dict[str, Any]) -> tuple[bool, bool]:
    """A run that fails at its first block: whether the model is sharded, and computes as before.

    FSDP's own class and hooks are back as well, else the forward would meet shards.
    """
    model = sharded(folder)
    before = logits(model)
    leave = SpreadBlocks.leave

    def failing(self: SpreadBlocks, block: str) -> None:
        raise ValueError(block)

    SpreadBlocks.leave = failing  # type: ignore[method-assign]
    try:
        compress(model, None, modifiers)
    except (ValueError, ProcessError):
        return isinstance(model.model.layers[0], FSDPModule), torch.equal(logits(model), before)
    finally:
        SpreadBlocks.leave = leave  # type: ignore[method-assign]
    return False, False


def most_held(folder: str, output: Path, modifiers: dict[str, Any]) -> tuple[int, int, int]:
    """The most bytes of whole weights in blocks at once; of a block, and of all blocks."""
    model = sharded(folder)
    layers = [dict(one.named_parameters()) for one in model.model.layers]
    sizes = [sum(one.numel() * one.itemsize for one in each.values()) for each in layers]
    most = 0
    load = SpreadWeights.load

    def loading(self: SpreadWeights, block: str) -> None:
        nonlocal most
        load(self, block)
        held = (
            one.nbytes
            for each in self.blocks.values()
            for name, one in each.named_parameters()
            if not one.is_meta and name.endswith("weight")
        )
        most = max(most, sum(held))

    SpreadWeights.load = loading  # type: ignore[method-assign]
    try:
        compress(model, output, modifiers)
    finally:
        SpreadWeights.load = load  # type: ignore[method-assign]
    return most, max(sizes), sum(sizes)


def refused(folder: str, kind: str, output: Path) -> str:
    """The error for a model that is spread in another way."""
    model = whole(folder)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    given: dict[str, Any] = {}
    modifiers: dict[str, Any] = {
        "QuantizationModifier": {"targets": "Linear", "scheme": "W8A16", "ignore": ["lm_head"]}
    }
    if kind == "FSDP 1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model.model.layers[0] = FullyShardedDataParallel(
            model.model.layers[0], device_id=torch.device("cpu")
        )
    elif kind == "tensor parallel":
        from torch.distributed.tensor import Shard, distribute_tensor

        weight = model.model.layers[0].mlp.up_proj.weight
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
            distribute_tensor(weight.data, mesh, [Shard(0)])
        )
    elif kind == "ZeRO":
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.ds_tensor = weight.data
    elif kind == "tied":
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
        fully_shard(model, mesh=mesh)
        modifiers = {"SpinQuantModifier": {"rotations": ["R1"]}}
    elif kind == "untied":
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
        fully_shard(model, mesh=mesh)
        given["tie_word_embeddings"] = False
    try:
        oneshot(model=model, recipe={"modifiers": modifiers}, output_dir=str(output), **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
