# SPDX-License-Identifier: Apache-2.0
"""Masks of weights: choosing, applying, saving.

A mask is one byte per weight, with all bits set for kept weights and cleared for pruned ones. A
bitwise and with a weight makes it exactly zero, whatever it was, NaN included, at memory bandwidth:
a product with a bool tensor or a masked fill takes two to six times as long.

A weight that is sharded over processes (FSDP version 2, ZeRO stage 3) is gathered while its mask is
chosen, on all processes alike; each keeps and applies its shard.

DeepSpeed's optimizers keep a float32 copy of the weights, sharded over the processes, and restore
the weights from it at each step. The copy is masked too: a weight whose mask is dropped later grows
from zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompressor.errors import CheckpointError, NonFiniteError, RecipeError, did_you_mean
from llmcompressor.modeling.sharded import (
    gather_full,
    gather_shards,
    is_partitioned,
    is_sharded_like,
    local_shard,
    shard_like,
    update_gradient_partition,
    update_partition,
)
from llmcompressor.modifiers.pruning.targets import ParameterLocation
from llmcompressor.numerics import masks
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.masks import LazyWeight, Structure, grow_masks
from llmcompressor.recipe.expressions import evaluate
from llmcompressor.runtime.progress import join_names

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class MaskedWeights:
    """Parameters of a model and their masks.

    Args:
        places: the parameters, each once.
    """

    def __init__(self, places: Sequence[ParameterLocation]) -> None:
        self.places = list(places)
        # int8, like the parameter: -1 keeps, 0 prunes; empty until a mask is chosen
        self._keep: dict[str, Tensor] = {}
        self._zeros: dict[str, int] = {}

    @property
    def held(self) -> bool:
        """Return True if masks were chosen."""
        return bool(self._keep)

    @torch.no_grad()
    def grow(self, structure: Structure, sparsity: float, *, together: bool) -> None:
        """Mask more weights, smallest first, and zero them.

        Args:
            structure: the unit of weights that is masked as one.
            sparsity: the share to reach, of each parameter or of all.
            together: use one threshold for all parameters instead of one for each.

        Raises:
            NonFiniteError: a weight is NaN or infinite.
        """
        groups = [self.places] if together else [[place] for place in self.places]
        for group in groups:
            sources = [self._source(place) for place in group]
            for place, mask in zip(group, grow_masks(sources, structure, sparsity), strict=True):
                self._hold(place, mask.t() if place.transposed else mask)
        self.apply()

    @torch.no_grad()
    def freeze(self) -> None:
        """Mask the weights that are zero now."""
        for place in self.places:
            self._hold(place, gather_full(place.parameter) == 0)

    @torch.no_grad()
    def apply(self) -> None:
        """Zero the masked weights."""
        for place, keep in self._aligned_masks():
            parameter = place.parameter
            if is_partitioned(parameter):
                update_partition(parameter, partial(_apply_mask, keep=keep))
            else:
                _apply_mask(local_shard(parameter.detach()), keep)
                _apply_mask_to_master_copy(parameter, keep)

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Zero the gradients of masked weights, so that they do not enter the optimizer's state."""
        for place, keep in self._aligned_masks():
            if is_partitioned(place.parameter):
                update_gradient_partition(place.parameter, partial(_apply_mask, keep=keep))
                continue
            gradient = place.parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                _apply_mask(local_shard(gradient), keep)

    @torch.no_grad()
    def masked_gradient(self, place: ParameterLocation, gradient: Tensor) -> Tensor | None:
        """Mask the gradient of a parameter.

        Args:
            place: the parameter.
            gradient: gradient of the whole parameter; it is not changed.

        Returns:
            A new tensor; ``None`` if nothing is masked, or if it is masked by shards before the
            step.
        """
        keep = self._keep.get(place.name)
        in_pieces = is_partitioned(place.parameter)
        if keep is None or in_pieces or gradient.layout is not torch.strided:
            return None
        bits = gradient.view(_BITS[gradient.element_size()])
        return (bits & keep.to(gradient.device)).view(gradient.dtype)

    def drop(self) -> None:
        """Drop all masks."""
        self._keep.clear()
        self._zeros.clear()

    def sparsities(self) -> dict[str, float]:
        """Masked share of each parameter, by name."""
        sizes = {place.name: math.prod(place.shape) for place in self.places}
        return {name: zeros / sizes[name] for name, zeros in self._zeros.items()}

    def sparsity(self) -> float:
        """Masked share of all parameters."""
        weights = sum(math.prod(place.shape) for place in self.places)
        return sum(self._zeros.values()) / weights

    @torch.no_grad()
    def measure_sparsity(self) -> dict[ParameterLocation, float]:
        """Counted share of zeros of each parameter; all processes have to call it."""
        return {
            place: 1.0 - int(torch.count_nonzero(gather_full(place.parameter))) / size
            for place in self.places
            if (size := math.prod(place.shape))
        }

    # ---- for a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """The masks, one bit per weight, in memory order, the first in the highest bit.

        All processes have to call it if parameters are sharded.
        """
        packed = {}
        for place in self.places if self._keep else ():
            keep = gather_shards(self._keep[place.name], place.parameter)
            pruned = (keep == 0).cpu().numpy()
            bits = torch.from_numpy(np.packbits(pruned.reshape(-1)))
            packed[place.name] = {"bits": bits, "shape": list(pruned.shape)}
        return packed

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the masks of a checkpoint.

        Raises:
            CheckpointError: they are those of other parameters.
        """
        if not saved:
            self.drop()
            return
        shapes = {place.name: list(place.shape) for place in self.places}
        theirs = {name: list(mask["shape"]) for name, mask in saved.items()}
        if shapes != theirs:
            unlike = sorted(
                name for name in {*shapes, *theirs} if shapes.get(name) != theirs.get(name)
            )
            raise CheckpointError(
                f"The checkpoint has masks of other parameters: {join_names(unlike)} differ.",
                "Continue with the model and the recipe that it was written with.",
            )
        for place in self.places:
            number = math.prod(place.shape)
            bits = np.unpackbits(saved[place.name]["bits"].cpu().numpy(), count=number)
            self._hold(place, torch.from_numpy(bits).bool().view(place.shape))

    # ---- inner workings

    def _hold(self, place: ParameterLocation, pruned: Tensor) -> None:
        """Set the mask of a parameter from ``pruned``, bool of the whole parameter."""
        self._zeros[place.name] = int(pruned.sum())
        keep = pruned.to(torch.int8).contiguous().sub_(1)
        self._keep[place.name] = shard_like(keep, place.parameter)

    def _aligned_masks(self) -> Iterator[tuple[ParameterLocation, Tensor]]:
        """Parameters with their masks, on the parameter's device and with its sharding."""
        for place in self.places if self._keep else ():
            keep, parameter = self._keep[place.name], place.parameter
            if not is_sharded_like(keep, parameter):
                keep = self._keep[place.name] = shard_like(gather_full(keep), parameter)
            yield place, local_shard(keep)

    def _source(self, place: ParameterLocation) -> LazyWeight:
        def read() -> tuple[Tensor, Tensor | None]:
            weight = gather_full(place.parameter).detach()
            if not is_finite(weight):
                raise NonFiniteError(
                    f"{place.name} holds NaN or infinity, so its least weights cannot be found. "
                    "Lower the learning rate, or clip gradients."
                )
            keep = self._keep.get(place.name)
            pruned = None if keep is None else gather_shards(keep, place.parameter) == 0
            pruned = None if pruned is None else pruned.to(weight.device)
            if place.transposed:
                return weight.t(), None if pruned is None else pruned.t()
            return weight, pruned

        shape = place.shape[::-1] if place.transposed else place.shape
        zeros = self._zeros.get(place.name, 0)
        return LazyWeight(shape, place.parameter.dtype, zeros, read)


def _apply_mask(tensor: Tensor, keep: Tensor) -> None:
    """Bitwise and of ``tensor`` with ``keep``, int8 of the same shape, in place."""
    tensor.view(_BITS[tensor.element_size()]).bitwise_and_(keep.to(tensor.device))


def _apply_mask_to_master_copy(parameter: Any, keep: Tensor) -> None:
    """Apply the mask to this process's shard of the optimizer's own copy, if there is one."""
    copy = getattr(parameter, "fp32_copy", None)  # set by the training package
    if copy is not None:
        _apply_mask(copy.detach(), keep)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        part, copy = mapping.lp_fragment_address, mapping.hp_fragment
        _apply_mask(copy, keep.flatten()[part.start : part.start + part.numel])


# --------------------
# Sparsity schedules of a recipe, checked before the first step.

_ARGUMENTS: dict[str, set[str]] = {
    "cubic": set(),
    "linear": set(),
    "multi_step": {"steps"},
    "polynomial": {"exponent"},
    "polynomial_decay": {"exponent"},
}
_DEFAULT_EXPONENT = 2.0
_MOST_CHECKED = 1_000
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ScheduleWindow:
    """Parameters of a sparsity schedule.

    Attributes:
        start: index of the first sparsity, in epochs or steps.
        end: index of the final sparsity.
        update: distance between two updates, ``None`` for every step.
        init: first sparsity.
        final: final sparsity.
        arguments: further arguments, by name.
    """

    start: float
    end: float
    update: float | None
    init: float
    final: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


Schedule = Callable[[float], float]


def make_schedule(name: str, window: ScheduleWindow) -> Schedule:
    """Create the function from an index, clamped to the window, to a sparsity.

    Raises:
        RecipeError: there is no such schedule, an argument is wrong, or sparsities are outside of
            [0, 1], decrease, or do not end at the final one.
    """
    text = name.strip()
    if text.startswith("calc(") and text.endswith(")"):
        schedule = _from_expression(text.removeprefix("calc(")[:-1], window)
    else:
        schedule = _builtin_schedule(text, window)

    def clamped(index: float) -> float:
        return schedule(min(max(index, window.start), window.end))

    _check_schedule(name, clamped, window)
    return lambda index: min(1.0, max(0.0, clamped(index)))


def _builtin_schedule(name: str, window: ScheduleWindow) -> Schedule:
    if name not in _ARGUMENTS:
        raise RecipeError(
            f"There is no schedule named {name!r}.",
            f"{did_you_mean(name, _ARGUMENTS)} Or give an expression, as in "
            "calc(final_sparsity * (index - start) / (end - start)).",
        )
    unknown = sorted(set(window.arguments) - _ARGUMENTS[name])
    if unknown:
        takes = ", ".join(sorted(_ARGUMENTS[name])) or "none"
        raise RecipeError(
            f"The schedule {name!r} has no argument {unknown[0]!r}.", f"It takes: {takes}."
        )
    if name == "multi_step":
        return _multi_step(window)
    init, final = window.init, window.final
    if name == "linear":
        return lambda index: masks.linear(_progress(index, window), init, final)
    if name == "cubic":
        return lambda index: masks.polynomial_decay(_progress(index, window), init, final, 3.0)
    form = masks.polynomial if name == "polynomial" else masks.polynomial_decay
    given: Any = window.arguments.get("exponent", _DEFAULT_EXPONENT)
    if not _is_number(given) or given <= 0:
        raise RecipeError(f"The exponent is {given!r}.", "Give a number above 0.")
    exponent = float(given)
    return lambda index: form(_progress(index, window), init, final, exponent)


def _progress(index: float, window: ScheduleWindow) -> float:
    return masks.progress(index, window.start, window.end)


def _multi_step(window: ScheduleWindow) -> Schedule:
    given = window.arguments.get("steps")
    if not isinstance(given, list | tuple) or not given:
        raise RecipeError(
            "The schedule 'multi_step' has no steps.",
            "Give scheduler_args: {steps: [[INDEX, SPARSITY], ...]}.",
        )
    steps = []
    for step in given:
        if not (isinstance(step, list | tuple) and len(step) == 2 and all(map(_is_number, step))):
            raise RecipeError(f"The step {step!r} is no [INDEX, SPARSITY].", "Give two numbers.")
        if not window.start <= step[0] <= window.end:
            raise RecipeError(
                f"The step at {step[0]:g} lies outside of start ({window.start:g}) to end "
                f"({window.end:g}).",
                "Move it or the window.",
            )
        steps.append((float(step[0]), float(step[1])))
    # The window ends at the final sparsity, with or without a step for it.
    steps.sort()
    steps.append((window.end, max(window.final, steps[-1][1])))
    return lambda index: masks.multi_step(index, reversed(steps), window.init)


def _from_expression(expression: str, window: ScheduleWindow) -> Schedule:
    names: dict[str, object] = {
        **window.arguments,
        "start": window.start,
        "end": window.end,
        "init_sparsity": window.init,
        "final_sparsity": window.final,
    }
    if window.update is not None:
        names["update"] = window.update

    def schedule(index: float) -> float:
        value = evaluate(expression, {**names, "index": index})
        if not _is_number(value) or not math.isfinite(value):
            raise RecipeError(
                f"The expression {expression!r} gives {value!r} at index {index:g}.",
                "A sparsity is a number from 0 to 1.",
            )
        return float(value)

    return schedule


def _check_schedule(name: str, schedule: Schedule, window: ScheduleWindow) -> None:
    before = 0.0
    for index in _update_indices(window):
        sparsity = schedule(index)
        if not -_ROUNDING <= sparsity <= 1.0 + _ROUNDING:
            raise RecipeError(
                f"The schedule {name!r} gives a sparsity of {sparsity:g} at index {index:g}.",
                "Sparsities lie between 0 and 1.",
            )
        if sparsity < before - _ROUNDING:
            raise RecipeError(
                f"The schedule {name!r} falls from {before:g} to {sparsity:g} at index {index:g}: "
                "weights that were pruned do not grow back.",
                "Give one that does not fall.",
            )
        before = sparsity
    if abs(before - window.final) > _ROUNDING:
        raise RecipeError(
            f"The schedule {name!r} ends at {before:g}, and final_sparsity is {window.final:g}.",
            "Make them agree.",
        )


def _update_indices(window: ScheduleWindow) -> Iterator[float]:
    """Indices at which masks will be chosen, or a thousand evenly spaced ones if there are more."""
    length = window.end - window.start
    count = length / window.update if window.update else _MOST_CHECKED
    count = min(_MOST_CHECKED, math.ceil(count)) if length else 0
    yield from (window.start + length * number / count for number in range(count))
    yield window.end


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
