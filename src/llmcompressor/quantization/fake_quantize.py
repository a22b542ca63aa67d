# SPDX-License-Identifier: Apache-2.0
"""Fake quantization of activations in training, bit for bit as the loaders of the checkpoint do it.

====================  ==================  ===================================================
``dynamic``           scale               computed
====================  ==================  ===================================================
``True``              per token, group    from the activation itself, in every forward
``"local"``           per group           the same, relative to a static scale of the tensor
``False``             as stored           by an observer from earlier steps, or learned
====================  ==================  ===================================================

Scales are constants in the backward, unless they are learned. Observations of a step take effect
from the next step on: all forwards of a step use the same scales, including those repeated by
gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization import (
    DynamicType,
    QuantizationArgs,
    QuantizationStrategy,
)
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from llmcompressor.errors import NonFiniteError
from llmcompressor.modeling.sharded import gather_full, is_partitioned, local_shard
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.scales import effective_scale, global_scale_from_amax, scales_from_range
from llmcompressor.numerics.straight_through import (
    fake_quantize,
    fake_quantize_matrix,
    learned_scale,
    lsq_gradient_scale,
    storable_scale,
)
from llmcompressor.observers.base import Observer
from llmcompressor.observers.canonical import ATTENTION_STATES
from llmcompressor.observers.min_max import RangeObserver
from llmcompressor.observers.tokens import real_states, real_tokens
from llmcompressor.quantization.parameters import (
    WeightParameters,
    activation_parameters,
    min_max_parameters,
    observe_weight,
    uses_only_extremes,
    weight_amax_with_headroom,
    weight_of,
)
from llmcompressor.schemes.bridge import (
    default_observer,
    grid_of,
    partition_of,
    scale_dtype_of,
    scale_format_of,
    zero_dtype_of,
)

_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def dynamic_fake_quantize(
    x: Tensor, args: QuantizationArgs, global_scale: Tensor | None = None
) -> Tensor:
    """An activation ``[..., C]`` rounded with scales computed from itself.

    ``args`` are dynamic, or locally dynamic; ``global_scale`` is float32 ``[1]``, where the
    strategy has one.
    """
    with torch.no_grad():
        minimum, maximum = _extremes(x.detach(), args)
        scale, zero = scales_from_range(
            minimum,
            maximum,
            grid_of(args),
            scale_format=scale_format_of(args),
            global_scale=global_scale,
            scale_dtype=scale_dtype_of(args),
            zero_dtype=zero_dtype_of(args),
        )
        scale = effective_scale(scale, global_scale)
    return _rounded(x, scale, None if args.symmetric else zero, args)


def _extremes(x: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Minimum and maximum per scale, in a shape that :func:`_rounded` broadcasts."""
    if args.strategy in _GROUPED:
        parts = _reshape_to_groups(x, args)
        return parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    # Loaders treat the first two dimensions as tokens, so that a matrix, the input of an MoE
    # expert, has one scale. We do the same: the checkpoint has to produce these values.
    if args.strategy == QuantizationStrategy.TOKEN and x.ndim > 2:
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:]))
        return x.flatten(2).amin(-1).reshape(shape), x.flatten(2).amax(-1).reshape(shape)
    least, greatest = torch.aminmax(x)
    return least.reshape(1), greatest.reshape(1)


def _reshape_to_groups(x: Tensor, args: QuantizationArgs) -> Tensor:
    assert args.group_size is not None
    return x.reshape(*x.shape[:-1], -(-x.shape[-1] // args.group_size), args.group_size)


def _rounded(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    args: QuantizationArgs,
    gradient_scale: float = 1.0,
) -> Tensor:
    """``x`` rounded with broadcast scales, reshaped to groups for group strategies."""
    grouped = args.strategy in _GROUPED
    parts = _reshape_to_groups(x, args) if grouped else x
    values = fake_quantize(parts, scale, zero, grid_of(args), gradient_scale=gradient_scale)
    return values.flatten(-2) if grouped else values


def stored_fake_quantize(module: Module, base: str, x: Tensor, args: QuantizationArgs) -> Tensor:
    """An activation of a quantized module, rounded as in the module's own forward.

    ``base`` is ``"input"``, ``"output"``, ``"q"``, ``"k"`` or ``"v"``; the module has the static
    parameters, if there are any.
    """
    if x.numel() == 0:
        return x
    names = ("scale", "zero_point", "global_scale")
    found = {name: getattr(module, f"{base}_{name}", None) for name in names}
    if args.dynamic in (True, DynamicType.LOCAL):
        return dynamic_fake_quantize(x, args, found["global_scale"])
    return _static_fake_quantize(x, found, args)


def _static_fake_quantize(
    x: Tensor,
    found: Mapping[str, Tensor | None],
    args: QuantizationArgs,
    gradient_scale: float = 1.0,
) -> Tensor:
    stored = found["scale"]
    assert stored is not None
    scale = effective_scale(stored, found.get("global_scale"))
    zero = None if args.symmetric else found.get("zero_point")
    if args.strategy in _GROUPED:
        scale = scale.unsqueeze(-1)
        zero = None if zero is None else zero.unsqueeze(-1)
    return _rounded(x, scale, zero, args, gradient_scale)


class ActivationFakeQuantizer:
    """The fake quantization of one activation of one module.

    ``base`` is ``"input"``, ``"output"``, ``"q"``, ``"k"`` or ``"v"``; ``learned``: whether a
    static scale is learned.
    """

    def __init__(
        self, module: Module, name: str, base: str, args: QuantizationArgs, *, learned: bool
    ) -> None:
        self.module, self.name, self.base, self.args = module, name, base, args
        observer = default_observer(args, base)
        self.observer: Observer | None = None
        if observer is not None:
            self.observer = Observer.load_from_registry(observer, base_name=base, args=args)
        self.learned = (
            learned
            and self.observer is not None
            and args.dynamic != DynamicType.LOCAL
            and base not in ATTENTION_STATES
        )
        self._found: dict[str, Tensor] | None = None

    @property
    def step_name(self) -> str:
        """The name of the learned scale's parameter: log of scale over initial scale."""
        return f"{self.base}_log_step"

    @property
    def is_known(self) -> bool:
        """True if there is a scale to round with."""
        return self.observer is None or self.observer.observations > 0

    @property
    def is_learning_scale(self) -> bool:
        """True if observations no longer have an effect because the scale is being learned."""
        return self.learned and self._found is not None

    def register(self) -> None:
        """Register the module's parameter for a learned scale, initially zero."""
        if self.learned:
            weight = next(self.module.parameters())
            shape = self._scale_shape()
            steps = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self.module.register_parameter(self.step_name, Parameter(steps))

    def collect(self, x: Tensor, token_mask: Tensor | None) -> None:
        """Collect ``x`` without its padding in the observer; see :meth:`Observer.collect`."""
        if self.observer is None or self.is_learning_scale:
            return
        real = real_states if self.base in ATTENTION_STATES else real_tokens
        try:
            self.observer.collect(real(x, token_mask))
        except NonFiniteError as error:
            raise self._non_finite_error() from error

    def collected(self) -> Any:
        """The observations collected in this step; ``None`` if there are none."""
        return None if self.observer is None else self.observer.collected()

    def commit(self, seen: Iterable[Any]) -> None:
        """Commit the :meth:`collected` observations of all processes; they count from now on."""
        if self.observer is None:
            return
        before = self.observer.observations
        try:
            self.observer.commit(seen)
        except NonFiniteError as error:
            raise self._non_finite_error() from error
        if self.observer.observations > before and isinstance(self.observer, RangeObserver):
            self.renew()

    def renew(self) -> None:
        """Recompute the scale from all observations, for observers with an expensive search."""
        if not self.is_learning_scale:
            self._found = None

    def __call__(self, x: Tensor) -> Tensor:
        """Round ``x``; return it unchanged while no scale is known."""
        if x.numel() == 0 or not self.is_known:
            return x
        args = self.args
        if args.dynamic is True:
            return dynamic_fake_quantize(x, args)
        found = self._parameters()
        if args.dynamic == DynamicType.LOCAL:
            return dynamic_fake_quantize(x, args, found["global_scale"])
        gradient_scale, scale = 1.0, found["scale"]
        if self.learned:
            scale = self._present_scale(found)
            features = x.shape[-1] // max(scale.numel(), 1)
            gradient_scale = lsq_gradient_scale(features, grid_of(args))
        return _static_fake_quantize(x, {**found, "scale": scale}, args, gradient_scale)

    @torch.no_grad()
    def stored(self) -> dict[str, Tensor]:
        """The static parameters by their names in the checkpoint."""
        if self.observer is None:
            return {}
        found = dict(self._parameters())
        if self.learned:
            found["scale"] = self._present_scale(found)
        return {f"{self.base}_{name}": value for name, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """The observations, and the scale if it cannot be recomputed from them."""
        if self.observer is None:
            return {}
        again = isinstance(self.observer, RangeObserver) and not self.is_learning_scale
        return {"observer": self.observer.state_dict(), "found": None if again else self._found}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state saved by :meth:`state_dict`."""
        self._found = None
        if self.observer is None or not saved:
            return
        device = next(self.module.parameters()).device
        self.observer.load_state_dict(_on_device(saved["observer"], device))
        if saved["found"] is not None:
            self._found = _on_device(saved["found"], device)

    @torch.no_grad()
    def _parameters(self) -> dict[str, Tensor]:
        """The observer's quantization parameters, cached until new observations are committed."""
        if self._found is None:
            assert self.observer is not None
            dtype = next(self.module.parameters()).dtype
            self._found = activation_parameters(self.observer, dtype)
        return self._found

    def _present_scale(self, found: Mapping[str, Tensor]) -> Tensor:
        step = getattr(self.module, self.step_name)
        return _learned_scale(step, found["scale"], found.get("global_scale"), self.args)

    def _scale_shape(self) -> tuple[int, ...]:
        if self.args.strategy not in _GROUPED:
            return (1,)
        weight: Any = self.module.weight
        rows = self.base == "output" and isinstance(self.module, Linear)
        features = weight.shape[0 if rows else -1]
        return (max(1, features // (self.args.group_size or 1)),)

    def _non_finite_error(self) -> NonFiniteError:
        return NonFiniteError(
            f"The {self.base} activations of {self.name} hold NaN or infinity: the training has "
            "diverged. Go back to an earlier checkpoint and lower the learning rate."
        )


def _learned_scale(
    step: Tensor, scale: Tensor, global_scale: Tensor | None, args: QuantizationArgs
) -> Tensor:
    """The scale to be stored, ``scale`` after so many steps of its logarithm; differentiable."""
    start = effective_scale(scale, global_scale)
    wide = start.to(torch.promote_types(start.dtype, torch.float32))
    learned = learned_scale(gather_full(step), wide)
    named = scale_dtype_of(args)
    return storable_scale(
        learned if named is None else learned.to(named),
        scale_format_of(args),
        global_scale=global_scale,
        dtype=scale.dtype,
    )


def _on_device(saved: Any, device: torch.device) -> Any:
    if isinstance(saved, Tensor):
        return saved.to(device)
    if isinstance(saved, Mapping):
        return {name: _on_device(one, device) for name, one in saved.items()}
    return [_on_device(one, device) for one in saved] if isinstance(saved, list) else saved


# --------------------
# Fake quantization of weights during training.
#
# The scales follow the weights: they are recomputed from the present weight whenever it may have
# changed. Min-max observers take one pass over it; observers with a search run at an interval.
# Learned scales start from the observer's result and are updated by the optimizer
# (:func:`~llmcompressor.numerics.straight_through.learned_scale`).

WEIGHT_STEP = "weight_log_step"
"""The parameter of a module whose weight has learned scales: log of scale over first scale."""

_Key = tuple[tuple[int, int], ...]


class WeightFakeQuantizer:
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
            module: follow and not learned and uses_only_extremes(one)
            for module, one in args.items()
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
            if module in self._fused and is_partitioned(weight_of(module)):
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
            stored = self._present_scale(module, parameters)
            scale = effective_scale(stored, parameters.global_scale)
            gradient_scale = lsq_gradient_scale(weight.numel() // max(scale.numel(), 1), grid)
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
        weight = gather_full(weight_of(module)).detach()
        if not is_finite(weight):
            raise NonFiniteError(
                f"The weight of {self._names[module]} holds NaN or infinity: the training has "
                "diverged. Go back to an earlier checkpoint and lower the learning rate."
            )
        parameters = self._present(module, weight)
        if self._learned:
            parameters = replace(parameters, scale=self._present_scale(module, parameters))
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

    def _present_scale(self, module: Module, first: WeightParameters) -> Tensor:
        step = getattr(module, WEIGHT_STEP)
        return _learned_scale(step, first.scale, first.global_scale, first.args)

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
        if uses_only_extremes(args):
            found = min_max_parameters(weight, args, global_scale)
        else:
            found = observe_weight(weight.detach(), args, global_scale=global_scale)
        self._found[module] = (key, found)
        return found

    def _key(self, module: Module, weight: Tensor) -> _Key:
        members = self._fused.get(module)
        present = [weight] if members is None else [weight_of(one) for one in members]
        lasting: list[Any] = [getattr(one, "ds_tensor", one) for one in present]  # see flat_pieces
        return tuple((local_shard(one).data_ptr(), one._version) for one in lasting)

    def _global_scale(self, module: Module) -> Tensor | None:
        """The global scale of ``module`` and all fused with it, from their present weights."""
        members = self._fused.get(module)
        if members is None:
            return None
        key = self._key(module, weight_of(module))
        held = self._global_scales.get(module)
        if held is None or held[0] != key:
            device = weight_of(module).device
            spans = (
                weight_amax_with_headroom(gather_full(weight_of(one)).detach(), self._args[one])
                for one in members
            )
            scale = global_scale_from_amax(torch.stack([span.to(device) for span in spans]))
            held = (key, scale)
            for member in members:
                self._global_scales[member] = (key, scale.to(weight_of(member).device))
        return held[1]
