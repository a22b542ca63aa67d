# SPDX-License-Identifier: Apache-2.0
"""Runs of one block on random hidden states with stand-in weights, to probe its structure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.logger import logger
from llmcompressor.modeling.alike_experts import to_few
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.modeling.scaling import columns_of, swapped
from llmcompressor.names import named_modules

__all__ = ["BlockRun", "BlockRuns", "Call", "place_of"]

_HIDDEN_DIMS = 3
_SEED = 20


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a leaf module or MoE of the block, with its output.

    Calls never compare equal, as comparing their tensors has no single result.
    """

    name: str
    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> Tensor | None:
        """The first tensor argument."""
        return first_tensor(self.args, self.kwargs)

    @property
    def takes_scales(self) -> bool:
        """Return True if the columns of the module's weight are the channels of its input."""
        columns, given = columns_of(self.module), self.input
        if columns is None or given is None or not given.is_floating_point():
            return False
        return given.shape[-1] == columns


@dataclass(frozen=True)
class BlockRun:
    """A run of the unmodified block: the calls of its leaves and MoEs, and its output.

    Attributes:
        leaves: calls of its leaves, in order.
        mixtures: calls of its MoEs, in order.
        output: the floating tensors that it returned.
        failed: the block failed to run; nothing is known of it.
    """

    leaves: list[Call]
    mixtures: list[Call]
    output: list[Tensor]
    failed: bool = False


class BlockRuns:
    """Runs a block with stand-in weights on random hidden states.

    All tokens of an MoE are routed to a few of its experts.

    Args:
        block: the block; its own weights are neither read nor changed.
        args: how the model calls it.
        kwargs: the same, by name.

    Attributes:
        modules: of the block, by name.
        generator: of all random values.
        device: on which it runs.
    """

    def __init__(self, block: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._block = block
        self.generator = torch.Generator().manual_seed(_SEED)
        self._args = tuple(self._prepared(value) for value in args)
        self._kwargs = {name: self._prepared(value) for name, value in kwargs.items()}
        tensor = first_tensor(self._args, self._kwargs)
        self.device = torch.device("cpu") if tensor is None else tensor.device
        self.modules = dict(named_modules(block))

    def change(
        self, plain: Sequence[Tensor], changes: Mapping[Module, Mapping[str, Tensor]]
    ) -> float:
        """Relative change of the block's output with other parameters; NaN if it fails to run."""
        try:
            with swapped(changes):
                moved = self._run()
        except Exception as error:  # the model's own code, on stand-ins
            logger.debug(f"{type(self._block).__name__} with other parameters: {error!r:.200}")
            return float("nan")
        shares = [
            float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
            for one, other in zip(plain, moved, strict=True)
            if one.shape == other.shape and one.numel()
        ]
        return max(shares, default=float("nan"))

    def watch(self) -> BlockRun:
        """Run the block and record the calls of its leaves and MoEs, in order."""
        leaves: list[Call] = []
        mixtures: list[Call] = []
        names = {module: name for name, module in self.modules.items()}

        def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = mixtures if isinstance(module, LinearExperts) else leaves
            calls.append(Call(names[module], module, args, kwargs, output))

        watched = [
            module
            for module in names
            if isinstance(module, LinearExperts | Linear)
            or (module is not self._block and module._parameters and not module._modules)
            or columns_of(module) is not None  # a router may hold its correction in a part
        ]
        handles = [one.register_forward_hook(note, with_kwargs=True) for one in watched]
        try:
            return BlockRun(leaves, mixtures, self._run())
        except Exception as error:  # the model's own code, on stand-ins
            shown = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning(
                f"The structure of {type(self._block).__name__} was not seen: it does not run on "
                f"random states in float32 ({shown:.200})."
            )
            return BlockRun([], [], [], failed=True)
        finally:
            for handle in handles:
                handle.remove()

    def _run(self) -> list[Tensor]:
        args, kwargs = for_another_run((self._args, self._kwargs))
        return list(_tensors(self._block(*args, **kwargs)))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Use stand-in weights, eval mode and no gradients in the body; restore all afterwards."""
        training = [(module, module.training) for module in self.modules.values()]
        stand_ins = {
            module: {
                name: self._stand_in(parameter)
                for name, parameter in dict.items(module._parameters)
                if parameter is not None and parameter.is_floating_point()
            }
            for module in self.modules.values()
        }
        try:
            self._block.eval()
            with (
                torch.no_grad(),
                swapped(stand_ins),
                self._filled_buffers(),
                to_few(self.modules.values()),
            ):
                yield
        finally:
            for module, was_training in training:
                module.training = was_training

    @contextlib.contextmanager
    def _filled_buffers(self) -> Iterator[None]:
        """Fill buffers that are not loaded (a router's bias, say) with stand-ins in the body."""
        unread = [
            (module, name, buffer)
            for module in self.modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        try:
            for module, name, buffer in unread:
                module._buffers[name] = (
                    self._stand_in(buffer)
                    if buffer.is_floating_point()
                    else torch.zeros_like(buffer, device=self.device)
                )
            yield
        finally:
            for module, name, buffer in unread:
                module._buffers[name] = buffer

    def _stand_in(self, parameter: Tensor) -> Tensor:
        """Random values of a parameter's shape; a matrix is constant along its anti-diagonals."""
        shape = tuple(parameter.shape)
        if len(shape) <= 1:
            values = torch.rand(shape, generator=self.generator) + 0.5
            return values.to(self.device)
        rows, columns = shape[-2:]
        values = torch.randn(rows + columns - 1, generator=self.generator) / columns**0.5
        matrix: Tensor = values.to(self.device).as_strided((rows, columns), (1, 1))
        return matrix if len(shape) == 2 else matrix.contiguous().expand(shape)

    def _prepared(self, value: Any) -> Any:
        """Replace hidden states by random ones, and cast other floating tensors to float32."""
        is_states = isinstance(value, Tensor) and value.ndim == _HIDDEN_DIMS
        if is_states and value.is_floating_point():
            states = torch.randn(value.shape, generator=self.generator)
            return states.to(value.device)
        return for_another_run(value, _wide)


def _wide(value: Tensor) -> Tensor:
    return value.detach().float() if value.is_floating_point() else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.float()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def place_of(value: Any) -> tuple[int, int] | None:
    """Return a key that is equal for a tensor and a view of all of it."""
    return (value.data_ptr(), value.numel()) if isinstance(value, Tensor) else None
