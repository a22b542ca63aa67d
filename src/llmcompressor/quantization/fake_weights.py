# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of weights during training.

The scales follow the weights: they are recomputed from the present weight whenever it may have
changed. Min-max observers take one pass over it; observers with a search run at an interval.
Learned scales start from the observer's result and are updated by the optimizer
(:func:`~llmcompressor.numerics.straight_through.learned_scale`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.flat_pieces import is_flat
from llmcompressor.modeling.spread import local, whole
from llmcompressor.numerics.finite import is_finite
from llmcompressor.numerics.scales import effective_scale, global_scale_from_amax
from llmcompressor.numerics.straight_through import (
    fake_quantize_matrix,
    learned_scale,
    step_gradient,
    storable_scale,
)
from llmcompressor.quantization.parameters import (
    WeightParameters,
    extreme_parameters,
    follows_extremes,
    observe_weight,
    weight_of,
    weight_span,
)
from llmcompressor.schemes.bridge import grid_of, partition_of, scale_dtype_of, scale_format_of

__all__ = ["WEIGHT_STEP", "FakeWeights"]

WEIGHT_STEP = "weight_log_step"
"""The parameter of a module whose weight has learned scales: log of scale over first scale."""

_Key = tuple[tuple[int, int], ...]


class FakeWeights:
    """The fake quantization of all weights of a modifier.

    Args:
        args: module → quantization arguments of its weight.
        names: module → its name.
        fused: module → the modules, including itself, that share a global scale.
        learned: whether scales are learned.
        follow: recompute scales whenever a weight may have changed, where that is cheap; otherwise
            only after :meth:`renew`.
    """

    def __init__(
        self,
        args: Mapping[Module, QuantizationArgs],
        names: Mapping[Module, str],
        fused: Mapping[Module, tuple[Module, ...]],
        *,
        learned: bool,
        follow: bool,
    ) -> None:
        self._args = args
        self._names = names
        self._fused = fused
        self._learned = learned
        self._follows = {
            module: follow and not learned and follows_extremes(one) for module, one in args.items()
        }
        self._found: dict[Module, tuple[_Key, WeightParameters]] = {}
        self._global_scales: dict[Module, tuple[_Key, Tensor]] = {}

    def __contains__(self, module: Module) -> bool:
        return module in self._args

    def __iter__(self) -> Iterator[Module]:
        return iter(self._args)

    def __len__(self) -> int:
        return len(self._args)

    def register(self) -> None:
        """Register the parameters of learned scales on each module, all zero."""
        for module, args in self._args.items():
            weight = weight_of(module)
            shape = partition_of(args).shape(*weight.flatten(1).shape)
            steps = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            module.register_parameter(WEIGHT_STEP, Parameter(steps))

    def invalidate(self) -> None:
        """Invalidate scales that follow the weights; they are recomputed when needed."""
        for module in [one for one in self._found if self._follows[one]]:
            del self._found[module]
        self._global_scales.clear()

    @torch.no_grad()
    def share(self) -> None:
        """Compute global scales now for fused weights that are only gathered one at a time."""
        for module in self._args:
            if module in self._fused and is_flat(weight_of(module)):
                self._global_scale(module)

    def renew(self) -> None:
        """Recompute the scales that do not follow the weights automatically."""
        if not self._learned:
            self._found.clear()
            self._global_scales.clear()

    def __call__(self, module: Module, weight: Tensor) -> Tensor:
        """Round ``weight``, the present weight of ``module``, to its grid."""
        parameters = self._present(module, weight)
        args, gradient_scale, scale = parameters.args, 1.0, parameters.effective_scale
        grid, partition = grid_of(args), partition_of(args)
        if self._learned:
            stored = self._learned_scale(module, parameters)
            scale = effective_scale(stored, parameters.global_scale)
            gradient_scale = step_gradient(weight.numel() // max(scale.numel(), 1), grid)
        zero = None if args.symmetric else parameters.zero_point
        return fake_quantize_matrix(
            weight,
            scale,
            zero,
            grid,
            partition,
            through=parameters.through,
            gradient_scale=gradient_scale,
        )

    @torch.no_grad()
    def parameters(self, module: Module) -> WeightParameters:
        """The parameters of a weight for the next forward, as they are stored.

        Raises:
            NonFiniteError: the weight or a scale holds NaN or infinity.
        """
        weight = whole(weight_of(module)).detach()
        if not is_finite(weight):
            raise NonFiniteError(
                f"The weight of {self._names[module]} holds NaN or infinity: the training has "
                "diverged. Go back to an earlier checkpoint and lower the learning rate."
            )
        parameters = self._present(module, weight)
        if self._learned:
            parameters = replace(parameters, scale=self._learned_scale(module, parameters))
        if not is_finite(parameters.scale):
            raise NonFiniteError(f"The scales of {self._names[module]} are not finite.")
        return parameters

    def state_dict(self) -> dict[str, Any]:
        """The scales that cannot be recomputed from the weights, by module name."""
        return {
            self._names[module]: {
                "scale": found.scale,
                "zero_point": found.zero_point,
                "global_scale": found.global_scale,
            }
            for module, (_, found) in self._found.items()
            if not self._follows[module]
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the scales saved by :meth:`state_dict`."""
        self._found.clear()
        for module, args in self._args.items():
            one = saved.get(self._names[module])
            if one is not None:
                device = weight_of(module).device
                scale, zero_point = one["scale"].to(device), one["zero_point"].to(device)
                shared = one["global_scale"]
                shared = None if shared is None else shared.to(device)
                self._found[module] = ((), WeightParameters(args, scale, zero_point, shared))

    def _learned_scale(self, module: Module, first: WeightParameters) -> Tensor:
        """The scale to be stored, differentiable with respect to the parameter of ``module``."""
        steps = whole(getattr(module, WEIGHT_STEP))
        start = first.effective_scale
        wide = start.to(torch.promote_types(start.dtype, torch.float32))
        scale = learned_scale(steps, wide)
        named = scale_dtype_of(first.args)
        if named is not None:
            scale = scale.to(named)
        return storable_scale(
            scale,
            scale_format_of(first.args),
            global_scale=first.global_scale,
            dtype=first.scale.dtype,
        )

    @torch.no_grad()
    def _present(self, module: Module, weight: Tensor) -> WeightParameters:
        """The observer's parameters for the present weight, cached while they are valid."""
        follows = self._follows[module]
        # A weight that was changed without an event has another version counter.
        key = self._key(module, weight) if follows else ()
        held = self._found.get(module)
        if held is not None and held[0] == key:
            return held[1]
        args, global_scale = self._args[module], self._global_scale(module)
        if follows_extremes(args):
            found = extreme_parameters(weight, args, global_scale)
        else:
            found = observe_weight(weight.detach(), args, global_scale=global_scale)
        self._found[module] = (key, found)
        return found

    def _key(self, module: Module, weight: Tensor) -> _Key:
        members = self._fused.get(module)
        present = [weight] if members is None else [weight_of(one) for one in members]
        lasting: list[Any] = [getattr(one, "ds_tensor", one) for one in present]  # see flat_pieces
        return tuple((local(one).data_ptr(), one._version) for one in lasting)

    def _span(self, module: Module) -> Tensor:
        return weight_span(whole(weight_of(module)).detach(), self._args[module])

    def _global_scale(self, module: Module) -> Tensor | None:
        """The global scale of ``module`` and all fused with it, from their present weights."""
        members = self._fused.get(module)
        if members is None:
            return None
        key = self._key(module, weight_of(module))
        held = self._global_scales.get(module)
        if held is None or held[0] != key:
            device = weight_of(module).device
            spans = [self._span(one).to(device) for one in members]
            scale = global_scale_from_amax(torch.stack(spans))
            held = (key, scale)
            for member in members:
                self._global_scales[member] = (key, scale.to(weight_of(member).device))
        return held[1]
