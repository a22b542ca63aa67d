# SPDX-License-Identifier: Apache-2.0
"""AWQ's published loss: the mean squared error of the output of the Linears' parent module.

For every candidate the parent (an attention, an MLP; the Linear itself if it is alone) is rerun on
all batches, with the weights of its Linears scaled, rounded and unscaled.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.core.state import State
from llmcompressor.equalization.mappings import SmoothSet
from llmcompressor.equalization.rescale import swapped_parameters
from llmcompressor.modeling.call_graph import copy_arguments, first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.matching import common_parent
from llmcompressor.modeling.names import own_parameters
from llmcompressor.modeling.offload import TensorStore, device_activation_budget
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.numerics.awq import (
    CLIP_ATTEMPTS,
    CLIPPED_ROWS,
    ErrorOf,
    Round,
    evaluations,
)
from llmcompressor.numerics.cholesky import WIDTH
from llmcompressor.numerics.gram import triangle_bytes
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.schemes.attention import updates_kv_cache

_EVERYTHING = sys.maxsize
"""Bytes that no data exceeds."""


@dataclass(frozen=True)
class _ParentCall:
    """Recorded arguments of a parent's forward.

    Attributes:
        args: positional arguments without its input: masks and position embeddings, which the
            paused forward holds too.
        kwargs: keyword arguments without its input.
        ticket: shelf ticket of the input, which replaces each :data:`_INPUT`; ``None`` if no
            argument is a tensor.
        mask: bool ``[batch, tokens]`` of the real tokens; ``None``: all are.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ticket: int | None
    mask: Tensor | None

    def with_input(self, tensor: Tensor | None) -> tuple[list[Any], dict[str, Any]]:
        """The arguments to call the parent with."""
        own_args, own_kwargs = copy_arguments((self.args, dict(self.kwargs)))
        args = [tensor if value is _INPUT else value for value in own_args]
        return args, {
            key: tensor if value is _INPUT else value for key, value in own_kwargs.items()
        }


_INPUT = object()


class ParentRuns:
    """Recorded calls of the sets' parents, and the output errors of candidates on them.

    Inputs and outputs stay on an accelerator while they fit half of its free memory, or of what a
    limit leaves; the others are offloaded to main memory.

    Args:
        state: has the mask of real tokens and the memory limit.
        names: module → name.
        device: device for all of it; ``None``: wherever there is room.

    Attributes:
        tokens: number of real tokens of the parent in the last :meth:`error_of`.
    """

    def __init__(self, state: State, names: Mapping[Module, str], device: str | None) -> None:
        self._state = state
        self._modules = {name: module for module, name in names.items()}
        self._device = device
        self._calls: dict[Module, list[_ParentCall]] = {}
        self._sets: dict[Module, set[str]] = {}
        self._shelf = TensorStore(_EVERYTHING)
        self.tokens = 0

    def watch(self, one: SmoothSet) -> Module | None:
        """The parent of a set, to register :attr:`hook` on; ``None`` if it has the hook already."""
        parent = parent_of(one, self._modules)
        self._sets.setdefault(parent, set()).add(one.name)
        if parent in self._calls:
            return None
        self._calls[parent] = []
        return parent

    def hook(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of a parent."""
        args, kwargs = copy_arguments((args, kwargs))
        given, mask = first_tensor(args, kwargs), self._state.calibration.token_mask
        if given is None:
            self._calls[module].append(_ParentCall(args, kwargs, None, mask))
            return
        if self._shelf.is_empty:  # measure the free memory while nothing of a block is kept
            room = device_activation_budget(given.device, self._state.run.device_memory)
            self._shelf = TensorStore(_EVERYTHING, room if self._device is None else _EVERYTHING)
        call = _ParentCall(
            tuple(_INPUT if value is given else value for value in args),
            {key: _INPUT if value is given else value for key, value in kwargs.items()},
            self._put(given),
            mask,
        )
        self._calls[module].append(call)

    def drop(self, one: SmoothSet) -> None:
        """Free the calls of a set's parent, unless another set needs them."""
        parent = parent_of(one, self._modules)
        self._sets[parent].discard(one.name)
        if not self._sets[parent]:
            for call in self._calls[parent]:
                if call.ticket is not None:
                    self._shelf.drop(call.ticket)
            self._calls[parent] = []

    @contextlib.contextmanager
    def error_of(self, one: SmoothSet, rounds: Mapping[Module, Round]) -> Iterator[ErrorOf]:
        """Yield a function from scales ``[K, C]`` to squared errors of the parent's output.

        The parent's original outputs over real tokens are kept while the body runs.

        Args:
            one: the set.
            rounds: the rounding of each of its Linears that is quantized.
        """
        parent = parent_of(one, self._modules)
        self.tokens, plain = 0, list[int]()
        for output_TC in self._outputs(parent):
            self.tokens += len(output_TC)
            plain.append(self._put(output_TC))

        def error_of(scale_C: Tensor) -> float:
            changes = {}
            for module, round_ in rounds.items():
                weight: Any = module.weight
                scaled_RC = (weight.detach().float() * scale_C).to(weight.dtype)
                back_RC = round_(scaled_RC).float() / scale_C
                changes[module] = {"weight": back_RC.to(weight.dtype)}
            with swapped_parameters(changes):
                pairs = zip(plain, self._outputs(parent), strict=True)
                return sum(
                    float((new_TC - self._shelf.peek(old, new_TC.device)).float().square().sum())
                    for old, new_TC in pairs
                )

        try:
            yield lambda scale_KC: [error_of(scale_C) for scale_C in scale_KC]
        finally:
            for ticket in plain:
                self._shelf.drop(ticket)

    def _outputs(self, parent: Module) -> Iterator[Tensor]:
        """Yield the parent's output for each recorded call, ``[tokens, C]``."""
        device = next(parent.parameters()).device
        for call in self._calls[parent]:
            kept = call.ticket
            args, kwargs = call.with_input(None if kept is None else self._shelf.peek(kept, device))
            with torch.no_grad(), HooksMixin.disable_hooks():
                output = parent(*args, **kwargs)
            values = output if isinstance(output, tuple | list) else (output,)
            tensor = first_tensor(tuple(values), {})
            assert tensor is not None
            yield real_tokens(tensor, call.mask)

    def _put(self, tensor: Tensor) -> int:
        kept = tensor.detach()
        return self._shelf.put(kept if self._device is None else kept.to(self._device))


def parent_of(one: SmoothSet, modules: Mapping[str, Module]) -> Module:
    """The innermost callable module that contains all balance layers of a set.

    Args:
        one: the set.
        modules: modules of the model, by name.
    """
    name = reduce(common_parent, one.balance)
    while isinstance(modules[name], ModuleList | ModuleDict):
        name = name.rpartition(".")[0]
    return modules[name]


# --------------------
# Cost of AWQ, for C columns and R rows of all Linears with one input.
#
# step               multiply-adds                          further bytes
# second moments     36/64 C² a token                       4 C²
# one candidate      R C (C + W) / 2, blocks of W columns   4 C (C + W) / 2; 16 R C elsewhere
# clipping, a sweep  R C (C + (K + 1) g), groups of g       2 of the weight, 4 C² and, of the
#                    columns, K attempts                    rows at once, 12 C + 20 K g each
#
# With ``loss: output`` a candidate instead reruns the set's parent on all tokens and takes 8
# passes over the weights. The calls of the parents are kept for all tokens until their sets are
# done, together with the original outputs of the current parent; the outputs of a candidate are
# compared batch by batch. On an accelerator all rows are clipped at once; before that, float32
# copies of the weight (8 R C) or of the moments (8 C²) are scaled.

_FLOAT = 4
_MATRIX = 2
"""Dimensions; what has more is a stack of experts' matrices."""
_VISITS = 8
"""Passes over a weight for one candidate: scaled, extremes, rounded, compared."""


def awq_cost(
    weights: Sequence[Tensor],
    data: DataSize,
    *,
    points: int,
    clipped: Sequence[Tensor] = (),
    group: int = 0,
) -> Cost:
    """Cost of finding the scale of Linears with one input, and the clip bounds of their groups.

    Args:
        weights: weights that the scale is evaluated on, each ``[R_i, C]``; only their shapes
            matter.
        data: size of the calibration data.
        points: number of candidates.
        clipped: weights that are clipped.
        group: columns of them that share a scale; 0 for all.
    """
    every = [*weights, *clipped]
    if not every:
        return Cost()
    columns, itemsize = every[0].shape[-1], every[0].element_size()
    moments = Cost(
        flops=data.tokens * columns**2 * 36 // 64,
        held_bytes=_FLOAT * columns**2 + data.buffered * columns * itemsize,
        summed_bytes=triangle_bytes(columns) + _FLOAT * columns,
    )
    elements = sum(weight.numel() for weight in weights)
    if weights:
        largest = max(weight.numel() for weight in weights)
        products = elements * (columns + WIDTH) // 2
        times = evaluations(points, elements // columns)
        moments += Cost(
            flops=int(times * (products + ELEMENTWISE * _VISITS * elements)),
            peak_bytes=_FLOAT * max(columns * (columns + WIDTH) // 2, 4 * largest),
        )
    return moments + _clipping_cost(clipped, columns, min(group, columns) or columns, data)


def _clipping_cost(weights: Sequence[Tensor], columns: int, group: int, data: DataSize) -> Cost:
    elements, square = sum(weight.numel() for weight in weights), columns**2
    if not elements:
        return Cost()
    tries, rows = sum(CLIP_ATTEMPTS), elements // columns
    at_once = rows if data.on_device else min(rows, CLIPPED_ROWS * torch.get_num_threads())
    most = max(CLIP_ATTEMPTS)
    # buffers of a group's attempts, and the ends and parameters of the attempts of all groups
    clipping = at_once * (12 * columns + 20 * most * group + 24 * most * (columns // group))
    clipping += 4 * square + 8 * elements // group
    products = len(CLIP_ATTEMPTS) * columns + (tries + len(CLIP_ATTEMPTS)) * group
    return Cost(
        flops=elements * (products + ELEMENTWISE * tries * _VISITS),
        peak_bytes=elements * weights[0].element_size() + max(8 * elements, 8 * square, clipping),
    )


def rerun_cost(
    parents: Sequence[Module], weights: Sequence[Tensor], runs: int, data: DataSize
) -> Cost:
    """Cost of rerunning the parents of Linears with one input on all data.

    Args:
        parents: an attention, an MLP, an MoE or a Linear each; only their shapes matter.
        weights: of the Linears; only their shapes matter.
        runs: number of reruns.
        data: size of the calibration data.
    """
    columns, itemsize = weights[0].shape[-1], weights[0].element_size()
    rows, elements = [weight.shape[0] for weight in weights], [one.numel() for one in weights]
    returned = columns if len(weights) > 1 else rows[0]  # output of a parent, or a Linear
    inside = sum(rows) + max(rows) if len(weights) > 1 else returned
    compared = 3 * itemsize * returned + 2 * _FLOAT * returned  # both outputs, and their difference
    running = itemsize * columns + max(itemsize * inside, compared)
    forwards = data.tokens * sum(_products(parent, data) for parent in parents)
    outputs = data.tokens * itemsize * returned
    return Cost(
        flops=runs * (forwards + ELEMENTWISE * _VISITS * sum(elements)),
        peak_bytes=itemsize * sum(elements)
        + 3 * _FLOAT * max(elements)
        + data.batch * running
        + outputs,
        peak_data_bytes=outputs,
        data_bytes=data.tokens * itemsize * columns,
    )


def _products(parent: Module, data: DataSize) -> int:
    """Multiply-adds of a module for one token."""
    mixtures = [one for one in parent.modules() if isinstance(one, LinearExperts)]
    experts = {inner for mixture in mixtures for inner in mixture.modules()}
    found = 0
    for module in parent.modules():
        found += data.attention if updates_kv_cache(module) else 0
        for one in own_parameters(module):
            routed = module in experts or one.ndim > _MATRIX
            matrix = one.numel() if one.ndim >= _MATRIX else 0
            found += int(matrix * (data.expert_share if routed else 1))
    return found
