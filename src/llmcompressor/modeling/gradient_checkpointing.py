# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing of models of which only one block is in memory at a time.

A forward keeps of each block what went into it, and nothing of what it computed. The backward comes
to the blocks in reverse order. It runs each one again, this time with gradients, and takes these
from what the block returns to what went in, and to the tensors that its weights are made of::

    forward    block 0 → block 1 → … → block n → loss          inputs are put on a shelf
    backward   block 0 ← block 1 ← … ← block n ← loss          each is run again on its own

What the model computes between its blocks is part of one graph, as its own code makes it. This is
gradient checkpointing (Chen et al., arXiv:1604.06174) with blocks that come and go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modeling.patches import forward_overridden

Inside = Callable[[Module, Sequence[Tensor]], AbstractContextManager[object]]
Arrive = Callable[[Module, Module | None], None]
"""Brings in a block before it runs; what it is told of besides comes next."""


@dataclass
class CheckpointedBlocks:
    """Blocks whose activations are dropped in the forward and recomputed in the backward.

    A block must not be random, nor change its inputs in place.

    Attributes:
        blocks: in the order in which they are called.
        arrive: called before a block runs, with the one that comes next or ``None``.
        inside: the context that a block runs in, given the tensors that its weights are made of.
        shelf: the store of the blocks' inputs.
    """

    blocks: Sequence[Module]
    arrive: Arrive
    inside: Inside
    shelf: TensorStore
    _following: dict[Module, Module | None] = field(init=False, default_factory=dict)
    _preceding: dict[Module, Module | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._following = dict(zip(self.blocks, [*self.blocks[1:], None], strict=True))
        self._preceding = dict(zip(self.blocks, [None, *self.blocks[:-1]], strict=True))

    @contextlib.contextmanager
    def checkpointing(self, sources: Mapping[Module, Sequence[Tensor]]) -> Iterator[None]:
        """Checkpoint the forwards of the blocks while the body runs.

        Args:
            sources: block → the tensors that its weights are made of, which get gradients.
        """

        def stub(block: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            return self._stub(block, forward, tuple(sources[block]))

        try:
            with forward_overridden(self.blocks, stub):
                yield
        finally:
            self.shelf.close()

    def _stub(
        self, block: Module, forward: Callable[..., Any], sources: tuple[Tensor, ...]
    ) -> Callable[..., Any]:
        def forgotten(*args: Any, **kwargs: Any) -> Any:
            self.arrive(block, self._following[block])
            if not torch.is_grad_enabled():
                with self.inside(block, sources):
                    return forward(*args, **kwargs)
            call = _CheckpointedCall(self, block, forward, len(sources))
            inputs = call.store_inputs(args, kwargs)
            returned = _CheckpointFunction.apply(call, *sources, *inputs)  # type: ignore[no-untyped-call]
            return call.restore_output(returned)

        return forgotten

    def reload_block(self, block: Module) -> None:
        """Load a block before the backward pass runs it again."""
        self.arrive(block, self._preceding[block])


class _CheckpointedCall:
    """A checkpointed call of a block.

    Args:
        owner: the checkpointing that the block belongs to.
        block: the block.
        forward: its own forward.
        sources: number of tensors that its weights are made of.
    """

    def __init__(
        self, owner: CheckpointedBlocks, block: Module, forward: Callable[..., Any], sources: int
    ) -> None:
        self.owner, self.block, self.sources = owner, block, sources
        self._forward = forward
        self._values: list[Any] = []
        self._moving: list[int] = []  # indices of the values that need gradients
        self._tickets: list[int] = []
        self._devices: list[torch.device] = []
        self._spec: TreeSpec | None = None
        self._returned: list[Any] = []
        self._computed: list[int] = []  # indices of the tensors that the block computed
        self._returned_spec: TreeSpec | None = None

    def store_inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Store the inputs that need gradients, and return them."""
        self._values, self._spec = tree_flatten((args, kwargs))
        for place, value in enumerate(self._values):
            if isinstance(value, Tensor) and value.requires_grad:
                self._moving.append(place)
        inputs = [self._values[place] for place in self._moving]
        for place, one in zip(self._moving, inputs, strict=True):
            self._values[place] = None
            self._tickets.append(self.owner.shelf.put(one))
            self._devices.append(one.device)
        return inputs

    def fetch(self) -> list[Tensor]:
        """Load the stored inputs."""
        places = zip(self._tickets, self._devices, strict=True)
        return [self.owner.shelf.take(ticket, device) for ticket, device in places]

    def run(self, sources: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the block, and return the tensors that it computed."""
        assert self._spec is not None
        values = list(self._values)
        for place, one in zip(self._moving, inputs, strict=True):
            values[place] = one
        args, kwargs = tree_unflatten(values, self._spec)
        with self.owner.inside(self.block, sources):
            output = self._forward(*args, **kwargs)
        self._returned, self._returned_spec = tree_flatten(output)
        given = {id(one) for one in self._values if isinstance(one, Tensor)}
        self._computed = [
            place
            for place, one in enumerate(self._returned)
            if isinstance(one, Tensor) and id(one) not in given
        ]
        computed = [self._returned[place] for place in self._computed]
        for place in self._computed:
            self._returned[place] = None
        return computed

    def restore_output(self, computed: Sequence[Tensor]) -> Any:
        """The block's output, with ``computed`` in the places of the tensors that it computed."""
        assert self._returned_spec is not None
        for place, one in zip(self._computed, computed, strict=True):
            self._returned[place] = one
        returned, self._returned = self._returned, []
        return tree_unflatten(returned, self._returned_spec)


class _CheckpointFunction(torch.autograd.Function):
    """Autograd function of a block: saves no activations, and recomputes them for gradients."""

    @staticmethod
    def forward(ctx: Any, call: _CheckpointedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.sources = call, tensors[: call.sources]
        ctx.set_materialize_grads(False)
        computed = call.run(tensors[: call.sources], tensors[call.sources :])
        ctx.mark_non_differentiable(*(one for one in computed if not one.is_floating_point()))
        return tuple(computed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _CheckpointedCall = ctx.call
        call.owner.reload_block(call.block)
        with torch.enable_grad():
            sources = [one.detach().requires_grad_(one.requires_grad) for one in ctx.sources]
            inputs = [one.detach().requires_grad_() for one in call.fetch()]
            computed = call.run(sources, inputs)
            pairs = [
                (one, gradient)
                for one, gradient in zip(computed, gradients, strict=True)
                if gradient is not None and one.requires_grad
            ]
            wanted = [one for one in (*sources, *inputs) if one.requires_grad]
            found: list[Tensor | None] = [None] * len(wanted)
            if pairs and wanted:
                outputs, weights = zip(*pairs, strict=True)
                found = list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))
        left = iter(found)
        return None, *(next(left) if one.requires_grad else None for one in (*sources, *inputs))
