# SPDX-License-Identifier: Apache-2.0
"""Gradients of a loss with respect to what Linears compute, block by block, over many batches.

A forward of all batches visits the blocks in order, and a backward visits them in reverse. Each
block is loaded once for either, and no more than one is in memory::

    forward    block 0 → block 1 → … → block n → loss     of every batch: inputs are put on a shelf
    backward   block 0 ← block 1 ← … ← block n ← loss     of every batch: each is run again

What a model computes between its blocks is kept as a graph, which is small: the outputs of blocks
are its leaves, and nothing of a block is in it. No gradient of a weight is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Linear, Module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from llmcompressor.core.block_source import BlockSource, Visit
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import copy_arguments
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modeling.patches import forward_overridden
from llmcompressor.modeling.paused_forward import Pass, PausedForward
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.runtime.progress import progress

Watch: TypeAlias = Callable[[Module, Tensor, Tensor], None]
"""Is given a Linear, its input ``[..., C]``, and the gradient of its output ``[..., R]``."""
LossOf: TypeAlias = Callable[[int, Any], Tensor]
"""The loss of a batch, given its index and what the model returned."""


def watch_gradients(
    model: Module,
    linears: Sequence[Module],
    batches: CalibrationBatches,
    loss_of: LossOf,
    watch: Watch,
    *,
    source: BlockSource,
    shelf: TensorStore,
    leave: Callable[[Module], None] = lambda block: None,
) -> list[float]:
    """Run all batches forward and backward, one block at a time.

    A block must not be random, nor change its inputs in place.

    Args:
        model: in evaluation mode; its parameters get no gradients.
        linears: those that are watched, within blocks or not.
        batches: the data.
        loss_of: computes the loss.
        watch: called once for each call of a watched Linear that the loss depends on.
        source: loads the blocks.
        shelf: the store of the blocks' inputs.
        leave: called when all batches have gone backward through a block, which is still loaded.

    Returns:
        The losses of the batches.
    """
    with ExitStack() as stack:
        stack.enter_context(_frozen(model))
        visit = stack.enter_context(source.visits())
        run = _Backward(model, find_blocks(model), shelf, visit, leave)
        stack.enter_context(_tapped(linears, watch, run.anchor))
        stack.enter_context(forward_overridden(list(run.blocks), run.stub))
        return run(batches, loss_of)


@contextlib.contextmanager
def _frozen(model: Module) -> Iterator[None]:
    """Have no parameter of a model need a gradient while the body runs."""
    flags = [
        (module, name, one.requires_grad)
        for module in model.modules()
        for name, one in module._parameters.items()
        if one is not None
    ]

    def put(module: Module, name: str, *, flag: bool) -> None:
        parameter = module._parameters.get(name)
        if parameter is not None:
            parameter.requires_grad_(flag)

    for module, name, _ in flags:
        put(module, name, flag=False)
    try:
        yield
    finally:
        for module, name, flag in flags:
            put(module, name, flag=flag)


# --------------------
# Taps: what a Linear reads, and the gradient of what it returns.


class _Tap(torch.autograd.Function):
    """Identity, whose backward shows an input and a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, module: Module, watch: Watch, given: Tensor, output: Tensor
    ) -> Tensor:
        ctx.save_for_backward(given)
        ctx.module, ctx.watch = module, watch
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (given,) = ctx.saved_tensors
        ctx.watch(ctx.module, given, gradient)
        return None, None, None, None, gradient


@contextlib.contextmanager
def _tapped(linears: Sequence[Module], watch: Watch, anchor: Tensor) -> Iterator[None]:
    def tap(module: Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():  # on the way forward through a block
            return None
        made: Tensor = _Tap.apply(anchor, module, watch, args[0].detach(), output)  # type: ignore[no-untyped-call]
        return made

    handles = [one.register_forward_hook(tap) for one in linears if isinstance(one, Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --------------------
# Calls of blocks: without a graph on the way forward, and with one of their own on the way back.


@dataclass(eq=False)
class _Call:
    """A call of a block in a forward.

    Attributes:
        block: the block.
        values: flat arguments; those that depend on earlier blocks are on the shelf.
        spec: how they belong together.
        moving: places of the values on the shelf.
        tickets: of the shelf.
        devices: where those values belong.
        edges: the nodes of the graph that made them.
        gradients: what has arrived of the output's gradients, by place.
    """

    block: Module
    values: list[Any]
    spec: TreeSpec
    moving: list[int] = field(default_factory=list)
    tickets: list[int] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    edges: list[GradientEdge] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def run(self, forward: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """Run the block's own forward on the inputs that depend on earlier blocks."""
        values = list(self.values)
        for place, one in zip(self.moving, inputs, strict=True):
            values[place] = one
        args, kwargs = tree_unflatten(values, self.spec)
        return forward(*args, **kwargs)

    @staticmethod
    def computed(returned: Sequence[Any], given: Sequence[Any]) -> list[int]:
        """Places of the tensors in ``returned`` that depend on earlier blocks or this one."""
        given_ids = {id(one) for one in given if isinstance(one, Tensor)}
        return [
            place
            for place, one in enumerate(returned)
            if isinstance(one, Tensor) and one.is_floating_point() and id(one) not in given_ids
        ]


class _Leave(torch.autograd.Function):
    """Runs a block without a graph; its backward keeps the gradients that arrive."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, call: _Call, run: Callable[[], list[Tensor]]
    ) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        arrived = ctx.call.gradients
        for place, one in enumerate(gradients):
            if one is not None:
                arrived[place] = arrived[place] + one if place in arrived else one
        return None, None, None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


class _Backward:
    """A forward and a backward of all batches through the blocks.

    Args:
        model: the model.
        blocks: its blocks, in the order of their calls, and their names.
        shelf: stores their inputs.
        visit: loads them.
        leave: told of those that are done.

    Attributes:
        blocks: as given.
        anchor: a tensor that needs a gradient, through which everything that is tapped does.
    """

    def __init__(
        self,
        model: Module,
        blocks: Mapping[Module, str],
        shelf: TensorStore,
        visit: Visit,
        leave: Callable[[Module], None],
    ) -> None:
        self._model, self.blocks, self._shelf = model, blocks, shelf
        self._visit, self._leave = visit, leave
        self.anchor = torch.zeros((), requires_grad=True)
        self._forwards: dict[Module, Callable[..., Any]] = {}
        self._calls: list[list[_Call]] = []
        self._current = 0

    def __call__(self, batches: CalibrationBatches, loss_of: LossOf) -> list[float]:
        """Run all batches; return their losses."""
        self._calls = [[] for _ in range(len(batches))]
        losses = [0.0] * len(batches)

        def run(index: int) -> None:
            with torch.enable_grad():
                loss = loss_of(index, batches.run(batches[index]))
                losses[index] = float(loss.detach())
                self._go_back([loss], None)

        passes = [Pass(index, lambda index=index: run(index)) for index in range(len(batches))]  # type: ignore[misc]
        steps = len(self.blocks) * 2
        with progress(steps, "Measuring sensitivity") as advance:
            self._forward(passes, advance)
            self._backward(advance)
        return losses

    def _forward(self, passes: Sequence[Pass], advance: Callable[..., None]) -> None:
        blocks = list(self.blocks)
        following = dict(zip(blocks, [*blocks[1:], None], strict=True))
        with PausedForward(self.blocks, passes) as forward:
            for one in passes:
                self._current = one.index
                forward.start(one)
            while stop := forward.next_stop():
                advance(0, note=stop.name)
                self._visit(stop.module, following[stop.module])
                for one in stop.passes:
                    self._current = one.index
                    forward.resume(one)
                advance()

    def stub(self, block: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward that replaces the one of a block: it keeps its inputs, and no graph."""
        self._forwards[block] = forward

        def forgotten(*args: Any, **kwargs: Any) -> Any:
            # as the arguments are now: a forward may write to a cache, and it runs again
            call = _Call(block, *tree_flatten(copy_arguments((args, kwargs))))
            self._store(call)
            kept: list[Any] = []

            def run() -> list[Tensor]:
                own, own_kwargs = tree_map(_detached, (args, kwargs))
                fixed = [one for one in tree_leaves((args, kwargs)) if one is _detached(one)]
                returned, shape = tree_flatten(forward(*own, **own_kwargs))
                places = call.computed(returned, fixed)
                kept.extend((returned, shape, places))
                return [returned[place] for place in places]

            made = _Leave.apply(self.anchor, call, run)  # type: ignore[no-untyped-call]
            returned, shape, places = kept
            for place, one in zip(places, made, strict=True):
                returned[place] = one
            self._calls[self._current].append(call)
            return tree_unflatten(returned, shape)

        return forgotten

    def _store(self, call: _Call) -> None:
        """Put the inputs of a call that depend on earlier blocks on the shelf."""
        for place, value in enumerate(call.values):
            if isinstance(value, Tensor) and value.requires_grad:
                call.moving.append(place)
                call.tickets.append(self._shelf.put(value))
                call.devices.append(value.device)
                call.edges.append(get_gradient_edge(value))
        for place in call.moving:
            call.values[place] = None

    def _backward(self, advance: Callable[..., None]) -> None:
        order = list(self.blocks)
        preceding = dict(zip(order, [None, *order[:-1]], strict=True))
        while waiting := [calls for calls in self._calls if calls]:
            # of shared blocks, all batches go back through the same call first
            block = max((calls[-1].block for calls in waiting), key=order.index)
            advance(0, note=self.blocks[block])
            self._visit(block, preceding[block])
            for calls in waiting:
                if calls[-1].block is block:
                    self._call_back(calls.pop())
            if not any(one.block is block for calls in self._calls for one in calls):
                self._leave(block)
            advance()

    def _call_back(self, call: _Call) -> None:
        """Run a call again with a graph, and bring its gradients to what went in."""
        pairs = zip(call.tickets, call.devices, strict=True)
        inputs = [self._shelf.take(*pair).requires_grad_() for pair in pairs]
        if not call.gradients:
            return
        with torch.enable_grad(), _frozen(call.block):  # also where it was read anew
            returned, _ = tree_flatten(call.run(self._forwards[call.block], inputs))
            places = call.computed(returned, call.values)
            outputs = [returned[place] for place in places]
            weighted = [
                (outputs[place], one)
                for place, one in sorted(call.gradients.items())
                if outputs[place].requires_grad
            ]
            call.gradients.clear()
            if not weighted:
                return
            ends, gradients = zip(*weighted, strict=True)
            wanted = [self.anchor, *inputs]
            found = torch.autograd.grad(ends, wanted, gradients, allow_unused=True)[1:]
        arrived = [
            (edge, one) for edge, one in zip(call.edges, found, strict=True) if one is not None
        ]
        if arrived:
            edges, gradients = zip(*arrived, strict=True)
            self._go_back(edges, gradients)

    def _go_back(
        self, ends: Sequence[Tensor] | Sequence[GradientEdge], gradients: Sequence[Tensor] | None
    ) -> None:
        """Go back from a loss, or from inputs of a block, to the outputs of blocks before."""
        torch.autograd.grad(ends, [self.anchor], gradients, retain_graph=True, allow_unused=True)
