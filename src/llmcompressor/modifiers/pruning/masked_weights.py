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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcompressor.errors import CheckpointError, NonFiniteError
from llmcompressor.modeling.flat_pieces import change_gradient, change_piece, is_flat
from llmcompressor.modeling.spread import is_spread_as, local, spread_as, together, whole
from llmcompressor.modifiers.pruning.targets import Place
from llmcompressor.numerics.finite import is_finite
from llmcompressor.numerics.masks import Source, Structure, grow_masks
from llmcompressor.wording import listed

__all__ = ["MaskedWeights"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class MaskedWeights:
    """Parameters of a model and their masks.

    Args:
        places: the parameters, each once.
    """

    def __init__(self, places: Sequence[Place]) -> None:
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
            self._hold(place, whole(place.parameter) == 0)

    @torch.no_grad()
    def apply(self) -> None:
        """Zero the masked weights."""
        for place, keep in self._fitting():
            parameter = place.parameter
            if is_flat(parameter):
                change_piece(parameter, partial(_zero, keep=keep))
            else:
                _zero(local(parameter.detach()), keep)
                _zero_copy(parameter, keep)

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Zero the gradients of masked weights, so that they do not enter the optimizer's state."""
        for place, keep in self._fitting():
            if is_flat(place.parameter):
                change_gradient(place.parameter, partial(_zero, keep=keep))
                continue
            gradient = place.parameter.grad
            if gradient is not None and gradient.layout is torch.strided:
                _zero(local(gradient), keep)

    @torch.no_grad()
    def masked_gradient(self, place: Place, gradient: Tensor) -> Tensor | None:
        """Mask the gradient of a parameter.

        Args:
            place: the parameter.
            gradient: gradient of the whole parameter; it is not changed.

        Returns:
            A new tensor; ``None`` if nothing is masked, or if it is masked by shards before the
            step.
        """
        keep = self._keep.get(place.name)
        in_pieces = is_flat(place.parameter)
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
    def measured(self) -> dict[Place, float]:
        """Counted share of zeros of each parameter; all processes have to call it."""
        return {
            place: 1.0 - int(torch.count_nonzero(whole(place.parameter))) / size
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
            keep = together(self._keep[place.name], place.parameter)
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
                f"The checkpoint has masks of other parameters: {listed(unlike)} differ.",
                "Continue with the model and the recipe that it was written with.",
            )
        for place in self.places:
            number = math.prod(place.shape)
            bits = np.unpackbits(saved[place.name]["bits"].cpu().numpy(), count=number)
            self._hold(place, torch.from_numpy(bits).bool().view(place.shape))

    # ---- inner workings

    def _hold(self, place: Place, pruned: Tensor) -> None:
        """Set the mask of a parameter from ``pruned``, bool of the whole parameter."""
        self._zeros[place.name] = int(pruned.sum())
        keep = pruned.to(torch.int8).contiguous().sub_(1)
        self._keep[place.name] = spread_as(keep, place.parameter)

    def _fitting(self) -> Iterator[tuple[Place, Tensor]]:
        """Parameters with their masks, on the parameter's device and with its sharding."""
        for place in self.places if self._keep else ():
            keep, parameter = self._keep[place.name], place.parameter
            if not is_spread_as(keep, parameter):
                keep = self._keep[place.name] = spread_as(whole(keep), parameter)
            yield place, local(keep)

    def _source(self, place: Place) -> Source:
        def read() -> tuple[Tensor, Tensor | None]:
            weight = whole(place.parameter).detach()
            if not is_finite(weight):
                raise NonFiniteError(
                    f"{place.name} holds NaN or infinity, so its least weights cannot be found. "
                    "Lower the learning rate, or clip gradients."
                )
            keep = self._keep.get(place.name)
            pruned = None if keep is None else together(keep, place.parameter) == 0
            pruned = None if pruned is None else pruned.to(weight.device)
            if place.transposed:
                return weight.t(), None if pruned is None else pruned.t()
            return weight, pruned

        shape = place.shape[::-1] if place.transposed else place.shape
        zeros = self._zeros.get(place.name, 0)
        return Source(shape, place.parameter.dtype, zeros, read)


def _zero(tensor: Tensor, keep: Tensor) -> None:
    """Bitwise and of ``tensor`` with ``keep``, int8 of the same shape, in place."""
    tensor.view(_BITS[tensor.element_size()]).bitwise_and_(keep.to(tensor.device))


def _zero_copy(parameter: Any, keep: Tensor) -> None:
    """Apply the mask to this process's shard of the optimizer's own copy, if there is one."""
    copy = getattr(parameter, "fp32_copy", None)  # set by the training package
    if copy is not None:
        _zero(copy.detach(), keep)
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        part, copy = mapping.lp_fragment_address, mapping.hp_fragment
        _zero(copy, keep.flatten()[part.start : part.start + part.numel])
