# SPDX-License-Identifier: Apache-2.0
"""Repeated runs of a block on its recorded calls with replaced weights.

The error of weights is the squared change of the block's output over the real tokens of a call.
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
    """Recorded arguments of a block's forward.

    Attributes:
        args: positional arguments; floating-point tensors may be in main memory.
        kwargs: keyword arguments; floating-point tensors may be in main memory.
        mask: bool ``[batch, tokens]`` of the real tokens; ``None``: all are.
        reference: input of the block in the original model, in place of the first tensor; ``None``
            if it is the same.
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
        """Number of samples in the batch."""
        tensor = first_tensor(self.args, dict(self.kwargs))
        return 1 if tensor is None or tensor.ndim < _BATCHED else len(tensor)


class BlockRunner:
    """A block and the calls that it is run on.

    A CPU takes several times as long for 16-bit products and their gradients, so there the block
    computes in float32, with its own weights cast.

    Args:
        block: it is not changed.
        calls: at least one.

    Attributes:
        block: the same.
        calls: the same.
        targets: output of the original block for each call, ``[tokens, C]``, in main memory.
        values: number of values in ``targets``.
        seen: number of tokens.
        experts: weight → its place in the MoE, for weights of experts.
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
        """A weight's new values, rounded to its dtype and cast to the compute dtype."""
        weight_RC: Tensor = self._cast(values.to(self._own[name]))
        return weight_RC

    def is_rounded(self, name: str) -> bool:
        """Return True if a weight is of a starved expert with the policy ``rtn``."""
        return name in self.experts and self.experts[name].policy == "rtn"

    def hold(self, weights: Mapping[str, Tensor]) -> None:
        """Use these weights in place of the block's own unless others are given."""
        self._held = dict(weights)

    def error(self, index: int, weights: Mapping[str, Tensor]) -> Tensor:
        """Squared error of the output of a call, float32."""
        return self.missing(index, self.tokens(self.calls[index], weights)).square().sum()

    def missing(self, index: int, output_TC: Tensor) -> Tensor:
        """Residual of a call's output: the original output minus this one, float32."""
        return (self.targets[index].to(self._device) - output_TC).float()

    def tokens(self, call: Call, weights: Mapping[str, Tensor] | None) -> Tensor:
        """The block's output for the real tokens of a call, with weights as in :meth:`run`."""
        return real_tokens(self.run(call, weights), call.mask)

    def run(self, call: Call, weights: Mapping[str, Tensor] | None) -> Tensor:
        """The first output tensor of the block with replaced weights.

        Args:
            call: the recorded call.
            weights: replacements, in addition to the held ones; ``None``: the original weights
                only.
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
        """Move floating-point tensors to the block's device and compute dtype."""

        def cast(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point()
            return tensor.to(self._device, self._dtype or tensor.dtype) if floating else tensor

        return for_another_run(value, cast)


@contextlib.contextmanager
def _plainly(block: Module) -> Iterator[None]:
    """While the body runs, experts get only their routed tokens, as outside of calibration."""
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
