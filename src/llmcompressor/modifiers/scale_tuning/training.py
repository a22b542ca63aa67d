# SPDX-License-Identifier: Apache-2.0
"""Scales and gains of a quantized model as the only parameters of a training.

All parameters of the model are frozen, and offsets are put beside those that are trained. A hook
before a module's forward puts its weight, computed from the offset, where ``module.weight`` finds
it before the parameter; one after the forward removes it. Inputs are quantized with
straight-through gradients, as those of compressed-tensors pass none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import TargetError
from llmcompressor.modeling.patches import exclude_from_compile
from llmcompressor.modeling.sharded import is_dtensor, is_partitioned
from llmcompressor.modifiers.scale_tuning.model import TunedTensors, moved_gain, round_input

OFFSET = "tuned_offset"
"""The parameter that is trained beside a module's own."""
_ENABLED = "quantization_enabled"


class TrainedOffsets:
    """The offsets of a training.

    Args:
        modifier: registers the hooks.
        model: quantized; its codes stay.
        tensors: those that are trained.
    """

    def __init__(self, modifier: Modifier, model: Module, tensors: TunedTensors) -> None:
        self._modifier, self._tensors = modifier, tensors
        self._modules = [*tensors.weights, *tensors.norms]
        self._quantized = [one for one in model.modules() if hasattr(one, "quantization_scheme")]
        self._enabled = {one: vars(one).get(_ENABLED) for one in self._quantized}
        self._needed_gradients = {one: one.requires_grad for one in model.parameters()}
        for one in self._needed_gradients:
            one.requires_grad = False
        starts = tensors.starts()
        for module in self._modules:
            device = module.get_parameter("weight").device
            start = torch.zeros_like(starts[str(tensors.name(module))], device=device)
            module.register_parameter(OFFSET, Parameter(start))
        self.watch()

    def watch(self) -> None:
        """Register the hooks."""
        register = self._modifier.register_hook
        for module in self._modules:
            register(module, exclude_from_compile(self._before), "forward_pre")
            register(module, exclude_from_compile(self._after), "forward", always_call=True)
        for module in self._quantized:
            vars(module)[_ENABLED] = False
            register(module, exclude_from_compile(partial(round_input)), "forward_pre")

    def weight(self, module: Module) -> Tensor:
        """The weight of a module with its present offset, differentiable."""
        offset = module.get_parameter(OFFSET)
        if module in self._tensors.weights:
            return self._tensors.coded(module).decoded(offset)
        return moved_gain(module.get_parameter("weight"), offset)

    def _before(self, module: Module, args: tuple[Any, ...]) -> None:
        weight = module.get_parameter("weight")
        if is_dtensor(weight) or is_partitioned(weight):
            raise TargetError(
                f"{type(self._modifier).__name__} trains whole scales, and here weights stay "
                "divided while the model computes.",
                "Train it with one process, or with several by DDP or FSDP.",
            )
        vars(module)["weight"] = self.weight(module)

    def _after(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        vars(module).pop("weight", None)

    def remove(self) -> dict[str, Tensor]:
        """Restore the model, hooks excepted; return the offsets by the names of stored tensors."""
        found = {}
        for module in self._modules:
            vars(module).pop("weight", None)
            offset = module._parameters.pop(OFFSET)
            assert offset is not None
            found[str(self._tensors.name(module))] = offset.detach().float()
        for module, was in self._enabled.items():
            if was is None:
                vars(module).pop(_ENABLED, None)
            else:
                vars(module)[_ENABLED] = was
        for one, needed in self._needed_gradients.items():
            one.requires_grad = needed
        return found
