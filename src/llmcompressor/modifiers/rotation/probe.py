# SPDX-License-Identifier: Apache-2.0
"""Invariance check: compare the outputs of a model with and without rotations, before changing it.

Two forwards on a few tokens are compared, with the original and with rotated weights, both in
float32 whatever the model's dtype. So the rounding of weights does not matter, and a difference is
either within float32 precision, or due to a part of the model that is not invariant. Weights are
cast, and rotated, while their block runs, so that one block at a time is held in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.equalization.rescale import swapped_parameters
from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import FORWARD_FAILURES, probe_inputs
from llmcompressor.modeling.patches import eval_mode, forward_overridden
from llmcompressor.modifiers.rotation.plan import RotationPlan
from llmcompressor.numerics.products import full_float32_products

TOLERANCE = 2e-4
"""How far float32 outputs may move. Random orders of summation move them by 1e-7 to 1e-5."""
NARROW_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.2}
"""By dtype, how far outputs may move where weights are rounded anew. Where something is not rotated
that has to be, they mostly move by more."""
_WIDE = 4

Values = Callable[[Module], Mapping[str, Tensor]]


class InvarianceProbe:
    """A model with its original outputs, to try plans on; it is not changed.

    Args:
        model: all of its weights are loaded, or those of each block when it is called.

    Raises:
        TargetError: the model does not run on token ids alone.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._blocks = {block: list(block.modules()) for block in find_blocks(model)}
        inside = {part for parts in self._blocks.values() for part in parts}
        self._outside = [
            one
            for one in model.modules()
            if one not in inside and (one._parameters or one._buffers)
        ]
        self._before = self._original_logits()

    def _original_logits(self) -> Tensor:
        """The outputs in float32 if the model runs in it, else in its own dtype.

        Outside of blocks a module's weights are wide while it runs, or, if that fails because
        other code reads them, throughout.
        """
        failures: list[Exception] = []
        for self._wide, self._throughout in ((True, False), (True, True), (False, True)):
            try:
                found = self._logits(RotationPlan(torch.float32))
            except (CompressorError, torch.OutOfMemoryError):  # not faults of the model
                raise
            except FORWARD_FAILURES as error:
                failures.append(error)
                continue
            if not self._wide:
                logger.warning(
                    f"{type(self._model).__name__} does not run in float32 ({failures[0]}): "
                    "whether rotations keep its outputs is seen in its own dtype, less sharply."
                )
            return found
        raise TargetError(
            f"{type(self._model).__name__} does not run on token ids alone ({failures[-1]}), so "
            "that it cannot be seen whether rotations keep what it computes.",
            "Rotations need a language model that takes input_ids.",
        ) from failures[-1]

    @property
    def tolerance(self) -> float:
        """Upper limit of :meth:`moved` for an accepted plan."""
        dtype = torch.float32 if self._wide else next(self._model.parameters()).dtype
        return max(TOLERANCE, NARROW_TOLERANCE.get(dtype, 0.0))

    def fault(self, plan: RotationPlan) -> str | None:
        """The reason why outputs would change, as a clause; ``None`` if they would not.

        Raises:
            TargetError: a module cannot have a rotation in its forward.
        """
        try:
            moved = self.moved(plan)
        except (CompressorError, torch.OutOfMemoryError):
            raise
        except FORWARD_FAILURES as error:
            return f"its forward fails ({type(error).__name__}: {error})"
        return None if moved <= self.tolerance else f"its outputs move by {moved:.2g} of their size"

    def moved(self, plan: RotationPlan) -> float:
        """Relative change of the outputs with the rotations of ``plan``."""
        with plan.active(self._model):
            return relative_distance(self._before, self._logits(plan))

    def _logits(self, plan: RotationPlan) -> Tensor:
        plan.read_factors()  # before norms are replaced by ones

        def values(module: Module) -> dict[str, Tensor]:
            found = plan.values(module, wide=self._wide)
            if self._wide:
                for name, one in (*module._parameters.items(), *module._buffers.items()):
                    if one is not None and name not in found and one.is_floating_point():
                        found |= {name: one.detach().float()} if one.itemsize < _WIDE else {}
            return found

        units = self._blocks
        standing = {one: values(one) for one in self._outside if self._throughout}
        if not self._throughout:
            units = units | {one: [one] for one in self._outside}
        with (
            full_float32_products(),
            swapped_parameters(standing),
            swapped_while_running(units, values),
        ):
            return probe_logits(self._model)


@contextlib.contextmanager
def swapped_while_running(
    units: Mapping[Module, Sequence[Module]], values: Values
) -> Iterator[None]:
    """Swap parameters and buffers of some modules of each unit while the unit runs.

    Args:
        units: module → those of its modules whose tensors are swapped.
        values: module → its tensors by name; called when the unit runs.
    """

    def stub(unit: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(*args: Any, **kwargs: Any) -> Any:
            with swapped_parameters({part: values(part) for part in units[unit]}):
                return forward(*args, **kwargs)

        return swapped

    with forward_overridden(units, stub):
        yield


def probe_logits(model: Any) -> Tensor:
    """The model's logits (or first output) on a few tokens, float64."""
    with eval_mode(model), torch.no_grad():
        output = model(**probe_inputs(model))
    found = getattr(output, "logits", None)
    first: Tensor = output[0] if found is None else found
    return first.double()


def relative_distance(before: Tensor, after: Tensor) -> float:
    """Relative distance ||after - before|| / ||before||."""
    return float((after - before).norm() / before.norm().clamp(min=1e-30))
