# SPDX-License-Identifier: Apache-2.0
"""A quantized model as a differentiable function of its scales and of the gains of its norms.

The model's own parameters do not change: they are replaced while a block runs. A block is loaded
when it runs and its activations are recomputed for the backward
(:mod:`llmcompressor.modeling.gradient_checkpointing`), so that one block is in memory at a time.

A CPU takes several times as long for 16-bit products and their gradients, so there the model
computes in float32, with weights that are rounded to their own dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn import functional as F  # noqa: N812

from llmcompressor.equalization.rescale import swapped_parameters
from llmcompressor.errors import NonFiniteError, TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import model_device, model_inputs
from llmcompressor.modeling.gradient_checkpointing import Arrive, CheckpointedBlocks
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.modeling.paused_forward import Pass, PausedForward
from llmcompressor.moe.expert_stops import stages_bypassed
from llmcompressor.numerics.distillation import kl_divergence, mean_over_tokens
from llmcompressor.numerics.scale_tuning import CodedWeight
from llmcompressor.quantization.fake_quantize import stored_fake_quantize
from llmcompressor.schemes.bridge import grid_of, partition_of

Batch: TypeAlias = tuple[Mapping[str, Any], Tensor | None]
"""The model's arguments, and the bool mask ``[batch, tokens]`` of its real tokens, if some are
padding."""
Leaves: TypeAlias = Mapping[str, Tensor]
"""Name of a stored tensor → its trained offset, float32."""


@dataclass(frozen=True)
class TunedTensors:
    """The tensors that are trained.

    Attributes:
        weights: quantized module → its name and the arguments of its weight, for its scale.
        norms: norm → its name, for its weight.
    """

    weights: Mapping[Module, tuple[str, QuantizationArgs]]
    norms: Mapping[Module, str]

    def name(self, module: Module) -> str | None:
        """The name of the stored tensor that is trained of a module, if there is one."""
        if module in self.weights:
            return f"{self.weights[module][0]}.weight_scale"
        return f"{self.norms[module]}.weight" if module in self.norms else None

    def starts(self) -> dict[str, Tensor]:
        """Offsets of zero for all tensors, float32, on the meta device."""
        found = {}
        for module, (_, args) in self.weights.items():
            rows, columns = module.get_parameter("weight").shape
            found[str(self.name(module))] = partition_of(args).shape(rows, columns)
        for module in self.norms:
            found[str(self.name(module))] = tuple(module.get_parameter("weight").shape)
        return {name: torch.zeros(shape, device="meta") for name, shape in found.items()}

    def coded(self, module: Module) -> CodedWeight:
        """The loaded weight of a module with its frozen codes."""
        _, args = self.weights[module]
        zero = None if args.symmetric else module.get_parameter("weight_zero_point").detach()
        return CodedWeight(
            module.get_parameter("weight").detach(),
            module.get_parameter("weight_scale").detach(),
            zero,
            grid_of(args),
            partition_of(args),
        )


def moved_gain(weight_C: Tensor, offset_C: Tensor) -> Tensor:
    """The gain of a norm moved by ``offset_C`` times the root mean square of the gain.

    Args:
        weight_C: the gain.
        offset_C: float32, differentiable.
    """
    wide_C = weight_C.detach().float()
    size = wide_C.square().mean().sqrt()
    size = torch.where(size > 0, size, torch.ones_like(size))
    return (wide_C + offset_C * size).to(weight_C.dtype)


class TunedModel:
    """A model that runs with trained tensors in the place of its own.

    Args:
        model: in evaluation mode; its parameters do not change.
        tensors: those that are trained.
        head: the Linear that computes the logits.
        arrive: loads a block.
        shelf: stores the inputs of blocks.
    """

    def __init__(
        self,
        model: Any,
        tensors: TunedTensors,
        head: Linear,
        arrive: Arrive,
        shelf: TensorStore,
    ) -> None:
        self._model, self._tensors, self._head, self._arrive = model, tensors, head, arrive
        self._dtype = torch.float32 if model_device(model).type == "cpu" else None
        self._blocks = find_blocks(model)
        inside = {part for block in self._blocks for part in block.modules()}
        self._outside = [one for one in model.modules() if one not in inside]
        self._sources = {block: self._names(block.modules()) for block in self._blocks}
        self._checkpointed = CheckpointedBlocks(list(self._blocks), arrive, self._inside, shelf)

    def _names(self, modules: Iterable[Module]) -> list[str]:
        found = (self._tensors.name(one) for one in modules)
        return [name for name in found if name is not None]

    @torch.no_grad()
    def store_hidden_states(self, batches: Sequence[Batch], store: TensorStore) -> list[int]:
        """Store the input of the head, ``[batch, tokens, C]``, with the model as it is.

        All batches go through a block before it is freed.

        Returns:
            A ticket of ``store`` for each batch.

        Raises:
            TargetError: the model does not call its head once in a forward.
        """
        tickets: dict[int, list[int]] = {index: [] for index in range(len(batches))}
        current = 0

        def keep(module: Module, args: tuple[Any, ...]) -> None:
            tickets[current].append(store.put(args[0]))

        def runner(batch: Mapping[str, Any]) -> Callable[[], object]:
            return lambda: self._model(**model_inputs(self._model, batch))

        passes = [Pass(index, runner(batch)) for index, (batch, _) in enumerate(batches)]
        following = dict(pairwise([*self._blocks, None]))
        with ExitStack() as stack:
            stack.enter_context(self._running({}))
            stack.callback(self._head.register_forward_pre_hook(keep).remove)
            forward = stack.enter_context(PausedForward(self._blocks, passes))
            while stop := forward.next_stop():
                self._arrive(stop.module, following[stop.module])
                for one in stop.passes:
                    current = one.index
                    forward.resume(one, self._inside(stop.module, ()))
        if any(len(each) != 1 for each in tickets.values()):
            raise TargetError(
                f"{type(self._model).__name__} does not call its head once in a forward, so that "
                "its logits cannot be compared.",
                "Leave ScaleTuningModifier out.",
            )
        return [each[0] for each in tickets.values()]

    def divergence(
        self, batch: Batch, hidden: Tensor, dense_head: tuple[Tensor, Tensor | None], leaves: Leaves
    ) -> Tensor:
        """KL from the original model's predictions, the mean over the real tokens of a batch.

        Args:
            batch: the batch.
            hidden: the input of the head in the original model.
            dense_head: the weight and bias of the head in the original model.
            leaves: offsets of the trained tensors.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        given, mask = batch

        def beside(module: Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            # what the model does to logits it does to those of the original too
            wide = hidden.to(output.device, output.dtype)
            weight, bias = (None if one is None else one.to(output) for one in dense_head)
            assert weight is not None
            return torch.cat([output, F.linear(wide, weight, bias)])

        sources = {block: [leaves[one] for one in own] for block, own in self._sources.items()}
        with self._running(leaves), self._checkpointed.checkpointing(sources):
            handle = self._head.register_forward_hook(beside)
            try:
                logits = self._model(**model_inputs(self._model, given)).logits
            finally:
                handle.remove()
            own, other = (one.flatten(0, 1) for one in logits.chunk(2))
            rows = None if mask is None else mask.to(own.device).flatten().nonzero().flatten()
            loss = mean_over_tokens(kl_divergence, own, other, rows)
            if not torch.isfinite(loss):
                raise NonFiniteError("The divergence of the quantized model is not finite.")
            if loss.requires_grad:  # while the blocks can be run again
                wanted = list(leaves.values())
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
                for one, gradient in zip(wanted, found, strict=True):
                    one.grad = gradient
        return loss.detach()

    @contextlib.contextmanager
    def _running(self, leaves: Leaves) -> Iterator[None]:
        """Give what lies outside of blocks its values, and round inputs, while the body runs."""
        handles = []
        if leaves:
            quantized = (one for one in self._model.modules() if isinstance(one, Linear))
            handles = [one.register_forward_pre_hook(round_input) for one in quantized]
        outside = {one: self._values(one, leaves) for one in self._outside if one._parameters}
        try:
            with (
                HooksMixin.disable_hooks(),
                stages_bypassed(self._model),
                swapped_parameters(outside),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _inside(self, block: Module, offsets: Sequence[Tensor]) -> AbstractContextManager[None]:
        leaves = dict(zip(self._sources[block], offsets, strict=True)) if offsets else {}
        parts = (one for one in block.modules() if one._parameters)
        return swapped_parameters({one: self._values(one, leaves) for one in parts})

    def _values(self, module: Module, leaves: Leaves) -> dict[str, Tensor]:
        """The parameters that a loaded module runs with."""
        own = {name: one.detach() for name, one in module._parameters.items() if one is not None}
        offset = leaves.get(self._tensors.name(module) or "")
        if offset is not None and module in self._tensors.weights:
            own["weight"] = self._tensors.coded(module).decoded(offset)
        elif offset is not None:
            own["weight"] = moved_gain(own["weight"], offset)
        if self._dtype is None:
            return own
        wide = {name: one for name, one in own.items() if one.is_floating_point()}
        return own | {name: one.to(self._dtype) for name, one in wide.items()}


def round_input(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Quantize the input of a quantized Linear as a server does."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    if scheme is None or scheme.input_activations is None:
        return None
    return (stored_fake_quantize(module, "input", args[0], scheme.input_activations), *args[1:])
