# SPDX-License-Identifier: Apache-2.0
"""Invariance check without the weights: on small, randomly initialized models of the same class.

Invariance under a rotation depends on the model's class, and on values only if they are special: a
bias of zeros or a gain of ones hides a violation. A small model with the initial values of its
class has these special ones. A violation that it shows with each of several seeds, beyond rounding,
occurs in every trained model: the model is refused. A violation that it shows only with other
values depends on the weights: that is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.modeling.call_graph import trace_flow
from llmcompressor.modeling.names import named_modules
from llmcompressor.modifiers.rotation.plan import RotationPlan
from llmcompressor.modifiers.rotation.probe import TOLERANCE, InvarianceProbe
from llmcompressor.runtime.threads import one_thread

if TYPE_CHECKING:
    from llmcompressor.modifiers.rotation.base import RotationModifier

__all__ = ["check_on_proxy"]

_SEEDS = (0, 1, 2)
_CERTAIN = 50 * TOLERANCE
"""How far outputs move where a rotation does not pass, at the least; mostly by 0.1 and more."""
_NOISE = 0.3
_SEEN = "That was seen on a small model of its class, with random weights."


class _InconclusiveError(Exception):  # a result, not an error
    """The reason why the small model is inconclusive, as a clause."""


def check_on_proxy(
    modifier: RotationModifier, model: Any, plan: RotationPlan, build: Callable[[int], Any]
) -> str:
    """Check on small models whether outputs are invariant under the rotations.

    Args:
        modifier: the rotation modifier.
        model: the large model; its weights are not read.
        plan: its planned rotations.
        build: builds a small model of its class with the values of a seed.

    Returns:
        The reason why that is unknown; empty if outputs are invariant.

    Raises:
        TargetError: they are not, with the message of the run.
    """
    fault: TargetError | None = None
    with one_thread(torch.device("cpu")):  # too small for more threads
        for seed in _SEEDS:
            try:
                fault = _proxy_fault(modifier, model, plan, build(seed))
            except _InconclusiveError as finding:
                return str(finding)
            except CompressorError as error:
                return str(error)
            if fault is None:
                return _value_dependent_fault(modifier, model, plan, build(seed))
    assert fault is not None
    raise TargetError(f"{fault.problem} {_SEEN}", fault.remedy)


def _value_dependent_fault(
    modifier: RotationModifier, model: Any, plan: RotationPlan, small: Any
) -> str:
    """A violation that a small model shows only after its constant parameters were perturbed."""
    generator = torch.Generator().manual_seed(0)
    for parameter in small.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(noise, alpha=_NOISE)
    try:
        fault = _proxy_fault(modifier, model, plan, small)
    except (_InconclusiveError, CompressorError):  # perturbed values may break the model itself
        return ""
    if fault is None:
        return ""
    return (
        "a small model of its class passes with the gains and biases that the class begins with, "
        f"and not with others. {fault.problem} {fault.remedy}"
    )


def _proxy_fault(
    modifier: RotationModifier, model: Any, plan: RotationPlan, small: Any
) -> TargetError | None:
    """The error that the run would raise on the small model, ``None`` if it would not."""
    try:
        standing, own = modifier.for_small_model(small)
    except CompressorError:
        raise
    except Exception as error:
        raise _InconclusiveError(f"a small model of its class does not run ({error})") from error
    if not _is_same_plan(_plan_signature(plan, model), _plan_signature(own, small), small):
        raise _InconclusiveError("other parts of a small model would be rotated")
    probe = _probe(model, small)
    try:
        standing.check_modules_called(small, own, probe)
        if _is_invariant(probe, own):
            return None
        standing.check_outputs(small, own, probe, by_part=True)
    except TargetError as error:
        return error
    return None


def _is_invariant(probe: InvarianceProbe, plan: RotationPlan) -> bool:
    """Return True if outputs are clearly invariant, False if they clearly are not."""
    try:
        moved = probe.moved(plan)
    except CompressorError:
        raise
    except Exception:
        return False
    if not math.isfinite(moved):
        raise _InconclusiveError("a small model of its class computes NaN or infinity")
    if TOLERANCE < moved <= _CERTAIN:
        raise _InconclusiveError("a small model of its class leaves it open")
    return moved <= TOLERANCE


def _probe(model: Any, small: Any) -> InvarianceProbe:
    """A probe with the original outputs of the small model."""
    try:
        probe = InvarianceProbe(small)
    except TargetError as error:
        try:
            trace_flow(model)
        except TargetError:
            raise error from error  # the large model does not run on tokens either
        raise _InconclusiveError(
            f"a small model of its class does not run ({error.problem})"
        ) from error
    except Exception as error:
        raise _InconclusiveError(f"a small model of its class does not run ({error})") from error
    if not probe.runs_in_float32():
        raise _InconclusiveError("a small model of its class does not run in float32")
    return probe


# ---------------------------------------------------------------------- comparison of plans

_Form = dict[tuple[str, ...], Any]


def _plan_signature(plan: RotationPlan, model: Module) -> _Form:
    """Size-independent form of a plan: (kind, module name, ...) → details."""
    names = {module: name for name, module in named_modules(model)}
    found: _Form = {}
    for module, one in plan.fusions.items():
        before = None if one.norm is None else names[one.norm.module]
        found["fusion", names[module]] = (before, len(one.inputs), len(one.outputs))
    for norm in plan.norms:
        found["norm", names[norm.module]] = norm.offset
    for online in plan.online:
        found["online", online.module_name, str(online.location)] = online.inverse
    return found


def _is_same_plan(large: _Form, small: _Form, model: Module) -> bool:
    """Return True if both plans agree on common modules, and on the kinds of modules changed."""
    names = {name for name, _ in named_modules(model)}
    if {key: one for key, one in large.items() if key[1] in names} != small:
        return False
    return {_name_pattern(key) for key in large} == {_name_pattern(key) for key in small}


def _name_pattern(key: tuple[str, ...]) -> tuple[str, ...]:
    what, name, *place = key
    parts = ("*" if part.isdecimal() else part for part in name.split("."))
    return (what, ".".join(parts), *place)
