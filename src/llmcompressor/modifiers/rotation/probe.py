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
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import FORWARD_FAILURES, probe_inputs
from llmcompressor.modifiers.rotation.plan import Norm, RotationPlan, cached_gain
from llmcompressor.numerics.products import full_float32_products

__all__ = [
    "NARROW_TOLERANCE",
    "TOLERANCE",
    "InvarianceProbe",
    "is_loaded",
    "probe_logits",
    "relative_distance",
]

TOLERANCE = 2e-4
"""How far float32 outputs may move. Random orders of summation move them by 1e-7 to 1e-5."""
NARROW_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.2}
"""By dtype, how far outputs may move where weights are rounded anew: without float32, see
:class:`Probe`. Where something is not rotated that has to be, they mostly move by more."""
_WIDE = 4


class InvarianceProbe:
    """A model with its original outputs, to try plans on; it is not changed.

    A model that does not run in float32 is compared in its own dtype.

    Args:
        model: all of its weights are loaded, or those of each block when it is called.

    Attributes:
        read_uncalled: modules with a parameter that is read while they do not run.

    Raises:
        TargetError: the model does not run on token ids alone.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        watch = _record_reads(model)
        self.read_uncalled = watch.read
        self._units = list(_swap_units(model, watch))
        self._wide = True
        self._before: Tensor | None = None

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

    def runs_in_float32(self) -> bool:
        """Return True if the original model runs in float32."""
        try:
            self._own_logits()
        except torch.OutOfMemoryError:  # not a property of the model
            raise
        except FORWARD_FAILURES:
            return False
        return self._wide

    def moved(self, plan: RotationPlan) -> float:
        """Relative change of the outputs with the rotations of ``plan``."""
        before = self._own_logits()
        with plan.attached(self._model):
            return relative_distance(before, self._logits(plan))

    def _own_logits(self) -> Tensor:
        if self._before is None:
            self._before = self._float32_logits()
        if self._before is None:
            self._wide = False
            self._before = self._logits(RotationPlan(torch.float32))
        return self._before

    def _float32_logits(self) -> Tensor | None:
        """The model's outputs in float32; ``None`` if it does not run in it."""
        try:
            return self._logits(RotationPlan(torch.float32))
        except (CompressorError, torch.OutOfMemoryError):  # not faults of the model
            raise
        except FORWARD_FAILURES as error:
            logger.warning(
                f"{type(self._model).__name__} does not run in float32 ({error}): whether "
                "rotations keep its outputs is seen in its own dtype, less sharply."
            )
            return None

    def _logits(self, plan: RotationPlan) -> Tensor:
        gains = plan.gains()  # before norms are replaced by ones
        norms = {norm.module: norm for norm in plan.norms}

        def values(module: Module) -> dict[str, Tensor]:
            return _planned_tensors(module, plan, gains, norms, wide=self._wide)

        with full_float32_products(), _swapped_while_running(self._units, values):
            return probe_logits(self._model)


def is_loaded(model: Module) -> bool:
    """Return True if no parameter is on the meta device."""
    return not any(parameter.is_meta for parameter in model.parameters())


def probe_logits(model: Any) -> Tensor:
    """The model's logits (or first output) on a few tokens, float64."""
    was_training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            output = model(**probe_inputs(model))
    finally:
        for module in was_training:
            module.training = True
    found = getattr(output, "logits", None)
    first: Tensor = output[0] if found is None else found
    return first.double()


def relative_distance(before: Tensor, after: Tensor) -> float:
    """Relative distance ||after - before|| / ||before||."""
    return float((after - before).norm() / before.norm().clamp(min=1e-30))


# ---------------------------------------------------------------------- reads of weights


class _ReadRecorder(TorchFunctionMode):
    """Record which modules run, and whose parameters are read while they do not.

    Args:
        model: its parameters are watched.

    Attributes:
        called: modules that ran.
        read: modules with a parameter that was used in a computation while they did not run.
        asked: modules with a parameter whose dtype was read while they did not run.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.called: set[Module] = set()
        self.read: set[Module] = set()
        self.asked: set[Module] = set()
        self._running: list[Module] = []
        self._owners: dict[int, set[Module]] = {}
        self._visited: list[int] = []
        self._blocks = set(find_blocks(model))
        self._arriving = False
        for module in model.modules():
            self._note(module)

    def _note(self, module: Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:  # else loading replaces it
                self._owners.setdefault(id(parameter), set()).add(module)

    def arrive(self, block: Module, args: Any) -> None:
        """Hook before a block runs, whose weights may have been loaded just now."""
        for gone in self._visited:  # their ids may have been reused
            self._owners.pop(gone, None)
        inside = list(block.modules())
        self._visited = [id(one) for part in inside for one in part._parameters.values()]
        for part in inside:
            self._note(part)
        self._arriving = False

    def before(self, module: Module, args: Any) -> None:
        """Hook before a module runs."""
        self.called.add(module)
        self._running.append(module)
        self._arriving = self._arriving or module in self._blocks

    def after(self, module: Module, args: Any, output: Any) -> None:
        """Hook after a module has run."""
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function; only one that returns a tensor counts as a read."""
        result = func(*args, **(kwargs or {}))
        if self._arriving:  # its weights are being loaded
            return result
        reads = any(isinstance(one, Tensor) for one in _flatten([result]))
        if reads or isinstance(result, torch.dtype):
            for one in _flatten([*args, *(kwargs or {}).values()]):
                owners = self._owners.get(id(one)) if isinstance(one, Parameter) else None
                if owners and owners.isdisjoint(self._running):
                    (self.read if reads else self.asked).update(owners)
        return result


def _flatten(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _record_reads(model: Any) -> _ReadRecorder:
    """Run one forward of the original model under a :class:`_Watch`."""
    watch = _ReadRecorder(model)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(watch.before, prepend=True))
        handles.append(module.register_forward_hook(watch.after, always_call=True))
    handles.extend(block.register_forward_pre_hook(watch.arrive) for block in find_blocks(model))
    try:
        with watch:
            probe_logits(model)
    except (CompressorError, torch.OutOfMemoryError):  # not faults of the model
        raise
    except FORWARD_FAILURES as error:
        raise TargetError(
            f"{type(model).__name__} does not run on token ids alone ({error}), so that it cannot "
            "be seen whether rotations keep what it computes.",
            "Rotations need a language model that takes input_ids.",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return watch


# ---------------------------------------------------------------------- temporary values

_Units = Sequence[tuple[Module | None, list[Module]]]


def _swap_units(
    model: Module, watch: _ReadRecorder
) -> Iterator[tuple[Module | None, list[Module]]]:
    """Modules that are called → the parts to swap while they run; ``None``: swap permanently."""
    inside: set[Module] = set()
    for block in find_blocks(model):
        if block in watch.called:
            parts = list(block.modules())
            inside.update(parts)
            yield block, parts
    for module in model.modules():
        if module not in inside:
            alone = not module._modules and module in watch.called
            alone = alone and module not in watch.read | watch.asked
            yield (module if alone else None), [module]


@contextlib.contextmanager
def _swapped_while_running(
    units: _Units, values: Callable[[Module], dict[str, Tensor]]
) -> Iterator[None]:
    """Swap parameters and buffers of modules while their unit runs."""
    parts_of = {unit: parts for unit, parts in units if unit is not None}
    running: dict[Module, contextlib.ExitStack] = {}

    def begin(unit: Module, args: Any) -> None:
        running[unit] = contextlib.ExitStack()
        running[unit].enter_context(_swapped({part: values(part) for part in parts_of[unit]}))

    def end(unit: Module, args: Any, output: Any) -> None:
        running.pop(unit).close()

    with contextlib.ExitStack() as stack:
        for unit, parts in units:
            if unit is None:
                stack.enter_context(_swapped({part: values(part) for part in parts}))
            else:
                # after the hooks that load the weights of a block
                stack.callback(unit.register_forward_pre_hook(begin).remove)
                stack.callback(unit.register_forward_hook(end, always_call=True).remove)
        yield


@contextlib.contextmanager
def _swapped(changes: Mapping[Module, Mapping[str, Tensor]]) -> Iterator[None]:
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, values in changes.items():
            for name, value in values.items():
                is_parameter = name in module._parameters
                own: dict[str, Any] = module._parameters if is_parameter else module._buffers
                before.append((own, name, own[name]))
                own[name] = Parameter(value, requires_grad=False) if is_parameter else value
        yield
    finally:
        for own, name, value in reversed(before):
            own[name] = value


def _planned_tensors(
    module: Module,
    plan: RotationPlan,
    gains: dict[Module, Tensor | None],
    norms: Mapping[Module, Norm],
    *,
    wide: bool,
) -> dict[str, Tensor]:
    """The tensors of ``module`` that ``plan`` changes, or that are cast to float32."""
    found = {}
    fusion = plan.fusions.get(module)
    if fusion is not None:
        found = plan.rotated(module, fusion, gains=gains, wide=wide)
    if wide:
        for name, one in (*module._parameters.items(), *module._buffers.items()):
            if one is None or name in found or not one.is_floating_point():
                continue
            if one.dtype.itemsize < _WIDE:
                found[name] = one.detach().float()
    norm = norms.get(module)
    if norm is not None:
        for name, value_C in norm.without(cached_gain(norm, gains)).items():
            own = found.get(name, module._parameters[name])
            assert own is not None
            found[name] = value_C.to(own.dtype)
    return found
