# SPDX-License-Identifier: Apache-2.0
"""Runs a block again and again on what it was called with, with other weights in place of its own.

The error of weights is the squared change, over the real tokens of a call, of the block's output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.expert_places import expert_places
from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.observers.tokens import real_tokens

__all__ = ["BlockRunner", "Call"]

_BATCHED = 3
"""Dimensions of ``[batch, tokens, C]``."""


@dataclass(frozen=True)
class Call:
    """What a block was called with.

    Attributes:
        args: positional arguments; floating tensors may lie in main memory.
        kwargs: named ones, likewise.
        mask: bool ``[batch, tokens]`` of the real tokens; ``None``: all are.
        reference: what it gets in the original model in place of the first tensor; ``None``: that.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mask: Tensor | None
    reference: Tensor | None = None

    @property
    def original(self) -> Call:
        """The same call in the original model."""
        if self.reference is None:
            return self
        for place, value in enumerate(self.args):
            if isinstance(value, Tensor):
                args = (*self.args[:place], self.reference, *self.args[place + 1 :])
                return Call(args, self.kwargs, self.mask)
        first = next(name for name, value in self.kwargs.items() if isinstance(value, Tensor))
        return Call(self.args, {**self.kwargs, first: self.reference}, self.mask)

    @property
    def rows(self) -> int:
        """Samples of the batch."""
        tensor = first_tensor(self.args, dict(self.kwargs))
        return 1 if tensor is None or tensor.ndim < _BATCHED else len(tensor)


class BlockRunner:
    """A block, and the calls that it is run on.

    A CPU takes several times as long for products of 16 bits, and for their gradients: there the
    block computes in float32, with the weights that it has.

    Args:
        block: it is not changed.
        calls: at least one.

    Attributes:
        block: the same.
        calls: the same.
        targets: what the original block returns for each call, ``[tokens, C]``, in main memory.
        values: how many values these have.
        seen: how many tokens.
        experts: weight → where it stands, for those of experts.
    """

    def __init__(self, block: Module, calls: Sequence[Call]) -> None:
        self.block, self.calls = block, calls
        parameters = dict(block.named_parameters())
        self._device = next(iter(parameters.values())).device
        self._dtype = torch.float32 if self._device.type == "cpu" else None
        self._own = {name: one.dtype for name, one in parameters.items()}
        self._plain = {name: self._cast(one.detach()) for name, one in parameters.items()}
        self._held: dict[str, Tensor] = {}
        places = expert_places(block)
        self.experts = {
            f"{name}.weight": places[module]
            for name, module in block.named_modules()
            if module in places
        }
        with torch.no_grad():
            self.targets = [self.tokens(call.original, None).cpu() for call in calls]
        self.values = max(1, sum(target.numel() for target in self.targets))
        self.seen = sum(map(len, self.targets))

    def weight(self, name: str, values: Tensor) -> Tensor:
        """A weight with the values that it will have, in the dtype to compute in."""
        weight_RC: Tensor = self._cast(values.to(self._own[name]))
        return weight_RC

    def is_rounded(self, name: str) -> bool:
        """Whether a weight is of a starved expert that is to be rounded to nearest."""
        return name in self.experts and self.experts[name].policy == "rtn"

    def hold(self, weights: Mapping[str, Tensor]) -> None:
        """Have these in place of the block's own wherever no others are given."""
        self._held = dict(weights)

    def error(self, index: int, weights: Mapping[str, Tensor]) -> Tensor:
        """Squared change of the output of a call, float32."""
        return self.missing(index, self.tokens(self.calls[index], weights)).square().sum()

    def missing(self, index: int, output_TC: Tensor) -> Tensor:
        """What the output of a call has less than the original one's, float32."""
        return (self.targets[index].to(self._device) - output_TC).float()

    def tokens(self, call: Call, weights: Mapping[str, Tensor] | None) -> Tensor:
        """What the block returns for the real tokens of a call, with weights as in :meth:`run`."""
        return real_tokens(self.run(call, weights), call.mask)

    def run(self, call: Call, weights: Mapping[str, Tensor] | None) -> Tensor:
        """The first tensor that the block returns with some other weights.

        Args:
            call: what it is called with.
            weights: these, beside those that are held; ``None``: all are those of the original.
        """
        args, kwargs = self._cast(call.args), self._cast(dict(call.kwargs))
        others = {} if weights is None else {**self._held, **weights}
        with HooksMixin.disable_hooks(), _plainly(self.block):
            output = functional_call(
                self.block, {**self._plain, **others}, args, kwargs, tie_weights=False
            )
        if isinstance(output, Mapping):
            output = tuple(output.values())
        tensor = first_tensor(tuple(output) if isinstance(output, tuple | list) else (output,), {})
        assert tensor is not None
        return tensor

    def _cast(self, value: Any) -> Any:
        """Floating tensors where, and in the dtype, that the block computes in."""

        def cast(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point()
            return tensor.to(self._device, self._dtype or tensor.dtype) if floating else tensor

        return for_another_run(value, cast)


@contextlib.contextmanager
def _plainly(block: Module) -> Iterator[None]:
    """Experts get the tokens that are routed to them, and are shown no others."""
    mixtures = [
        one for one in block.modules() if isinstance(one, LinearExperts) and one.calibrating
    ]
    for one in mixtures:
        one.calibrating = False
    try:
        yield
    finally:
        for one in mixtures:
            one.calibrating = True
