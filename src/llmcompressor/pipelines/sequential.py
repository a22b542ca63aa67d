# SPDX-License-Identifier: Apache-2.0
"""Calibrates and compresses a model part by part, each with the inputs that it really gets.

The mechanism is the paused forward (:mod:`llmcompressor.modeling.paused_forward`). At each stop
all passes wait; the modifiers that watched the inputs are told that these modules have seen all
batches (``SEQUENTIAL_EPOCH_END``), compress them, and every pass goes on with what the compressed
module returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch.nn import Module

from llmcompressor.core.session_functions import LifecycleCallbacks, active_session
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_order import CallOrder, first_tensor, watch_calls
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.paused_forward import Pass, PausedForward, Stop
from llmcompressor.modifiers.modifier import Granularity, Modifier
from llmcompressor.pipelines.activations import ActivationStore
from llmcompressor.pipelines.batches import CalibrationBatches, calibrating
from llmcompressor.pipelines.granularity import Plan, Unit, make_plan
from llmcompressor.pipelines.model_runs import model_device, small_batch
from llmcompressor.pipelines.streams import OriginalWeights, input_capture
from llmcompressor.progress import Advance, progress

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.state import State

__all__ = ["LayerSequentialPipeline", "SequentialPipeline"]

_SHARE_OF_FREE_MEMORY = 0.5


class SequentialPipeline:
    """Part by part, at the finest level that the recipe allows and that fits in memory."""

    forced_level: Granularity | None = None

    def __call__(
        self, model: Module, dataloader: DataLoader[Any], dataset_args: DatasetArguments
    ) -> None:
        """Run all modifiers of the active session over the calibration data.

        Args:
            model: what is compressed, in place.
            dataloader: calibration batches (mappings of the model's arguments).
            dataset_args: granularity, targets and budget.

        Raises:
            TargetError: a module that is to be calibrated was reached by no batch.
            NonFiniteError: NaN or infinity in the activations, with the module's name.
        """
        session = active_session()
        state, modifiers = session.state, session.lifecycle.recipe.modifiers
        with calibrating(
            model, dataloader, state, use_loss_mask=getattr(dataset_args, "use_loss_mask", False)
        ) as batches:
            run = _prepare(model, batches, modifiers, state, dataset_args, self.forced_level)
            logger.info(
                f"Sequential calibration: {len(run.plan.units)} stops at {run.plan.level} level "
                f"({run.plan.reason}); {len(batches)} batches, {run.streams} stream(s)."
            )
            LifecycleCallbacks.calibration_epoch_start()
            with progress(len(run.plan.units), "Calibrating") as advance:
                run.go(advance)
            LifecycleCallbacks.calibration_epoch_end()


class LayerSequentialPipeline(SequentialPipeline):
    """Part by part, at the level of blocks (decoder layers)."""

    forced_level = Granularity.BLOCK


def _prepare(
    model: Module,
    batches: CalibrationBatches,
    modifiers: Sequence[Modifier],
    state: State,
    dataset_args: DatasetArguments,
    forced: Granularity | None,
) -> _SequentialRun:
    calibrated = {
        module for modifier in modifiers for module in modifier.calibrated_modules(state)
    }
    names = {module: name for name, module in model.named_modules() if module in calibrated}
    blocks = find_blocks(model, dataset_args.sequential_targets)
    if dataset_args.sequential_targets and set(blocks) <= calibrated:
        forced, blocks = forced or Granularity.LINEAR, find_blocks(model)
    elif dataset_args.sequential_targets:
        forced = forced or Granularity.BLOCK
    region = {inner: name for block, name in blocks.items() for inner in block.modules()}
    modules_by_name = {name: module for module, name in names.items()}
    order = watch_calls(
        lambda: batches.run(small_batch(batches[0])),
        names,
        region=lambda name: region.get(modules_by_name[name], name.rpartition(".")[0]),
        also_count=region,
    )
    streams = 2 if any(modifier.twin_streams for modifier in modifiers) else 1
    plan = make_plan(
        names,
        order,
        blocks,
        finest=max((m.finest_granularity for m in modifiers), default=Granularity.BLOCK),
        forced=forced,
        tokens=batches.tokens,
        streams=streams,
        budget=_budget(dataset_args),
    )
    state.call_order = order
    return _SequentialRun(
        model,
        batches,
        state,
        plan,
        order,
        streams,
        budget=_budget(dataset_args),
        to_end=any(modifier.runs_to_end for modifier in modifiers),
    )


def _budget(dataset_args: DatasetArguments) -> int:
    given = getattr(dataset_args, "activation_budget", None)
    return int(given or psutil.virtual_memory().available * _SHARE_OF_FREE_MEMORY)


@dataclass
class _SequentialRun:
    """One calibration: the passes, the plan, and what goes between them."""

    model: Module
    batches: CalibrationBatches
    state: State
    plan: Plan
    order: CallOrder
    streams: int
    budget: int
    to_end: bool

    def go(self, advance: Advance) -> None:
        """Take every unit of the plan in turn."""
        units = {unit.stop: unit for unit in self.plan.units}
        device = model_device(self.model)
        keep = [*self.model.parameters(), *self.model.buffers()]
        store = ActivationStore(device, self.budget, keep)
        originals = OriginalWeights(len(self.batches), self.order.calls)
        targets = {stop: unit.name for stop, unit in units.items()}
        if self.streams == 2:
            # Members of a group are stubs too: an original pass must find the old weights there.
            targets |= {m: "" for unit in units.values() for m in unit.modules if not unit.runs_twice}
        with PausedForward(targets, self._passes()) as forward:
            forward.intercept = originals.answer
            for unit in units.values():
                for member in set(unit.modules) - {unit.stop}:
                    forward.release(member)
            stepper = _Stepper(self, forward, store, originals)
            try:
                while (forward.pending or self.to_end) and (stop := stepper.next_stop()):
                    unit = units[stop.module]
                    advance(note=unit.name)
                    stepper.serve(stop, unit)
                    advance(1)
            finally:
                store.close()
            self._check_all_reached(forward.pending)

    def _passes(self) -> Iterator[Pass]:
        """Of each batch the original pass first: its inputs are there when the other arrives."""
        for index, batch in enumerate(self.batches):
            run = self.batches.runner(batch)
            if self.streams == 2:
                yield Pass(index, run, "original")
            yield Pass(index, run)

    @staticmethod
    def _check_all_reached(pending: Sequence[str]) -> None:
        missed = [name for name in pending if name]
        if missed:
            shown = ", ".join(missed[:8]) + (f" and {len(missed) - 8} more" if len(missed) > 8 else "")
            raise TargetError(
                f"No calibration batch reached {shown}.",
                "Add data that uses these modules (images for a vision tower, for instance), or "
                "put them on the recipe's ignore list.",
            )


@dataclass
class _Stepper:
    """Serves one stop after another."""

    run: _SequentialRun
    forward: PausedForward
    store: ActivationStore
    originals: OriginalWeights

    def next_stop(self) -> Stop | None:
        """Start what was not started, one batch at a time, and look who waits first."""
        for one in self.forward.unstarted():
            self._around(one, lambda one=one: self.forward.start(one))
        return self.forward.next_stop()

    def serve(self, stop: Stop, unit: Unit) -> None:
        """Calibrate the unit, let the modifiers compress it, and send every pass on."""
        if unit.runs_twice:
            self._calibrate(stop, unit)
        if self.run.streams == 2:
            self.originals.keep([unit.stop] if unit.runs_twice else unit.modules)
        modules = tuple(unit.stop.modules()) if unit.runs_twice else unit.modules
        LifecycleCallbacks.sequential_epoch_end(modules)
        self.forward.release(unit.stop)
        if not self.forward.pending and not self.run.to_end:
            return  # nobody needs what lies behind the last stop, the head for instance
        for one in stop.passes:
            if one.module is not None:
                self._send_on(one)

    def _calibrate(self, stop: Stop, unit: Unit) -> None:
        """Run the unit with all hooks on; an original pass goes on at once, it has its output."""
        references: dict[int, dict[Module, torch.Tensor]] = {}
        for one in stop.passes:
            if one.stream == "original":
                self.store.fetch(one)
                with HooksMixin.disable_hooks(), input_capture(unit.modules) as captured:
                    output = self.forward.execute(one)
                references[one.index] = captured
                self._around(one, lambda one=one, out=output: self.forward.resume(one, out))
            else:
                self.store.fetch(one)
                self._set_batch(one, references.pop(one.index, None))
                self.forward.execute(one)
                self.store.park(one)
        self._set_batch(None, None)

    def _send_on(self, one: Pass) -> None:
        self.store.fetch(one)
        assert one.module is not None
        with HooksMixin.disable_hooks():
            if one.stream == "original":
                with self.originals.in_place(one.module):
                    output = self.forward.execute(one)
            else:
                output = self.forward.execute(one)
        self._around(one, lambda: self.forward.resume(one, output))

    def _around(self, one: Pass, step: Any) -> None:
        """Let ``one`` run to its next stop, with the state telling hooks which batch it is."""
        original = one.stream == "original"
        self._set_batch(one, self._reference_of(one))
        try:
            with HooksMixin.disable_hooks() if original else contextlib.nullcontext():
                step()
        finally:
            self._set_batch(None, None)
        self.store.park(one)

    def _reference_of(self, one: Pass) -> Mapping[Module, torch.Tensor] | None:
        """Where the original pass of the same batch waits, and what it brings."""
        if self.run.streams == 1 or one.stream == "original":
            return None
        return _WaitingInputs(self.forward.passes[2 * one.index])

    def _set_batch(
        self, one: Pass | None, references: Mapping[Module, torch.Tensor] | None
    ) -> None:
        state = self.run.state
        state.batch_data = None if one is None else self.run.batches[one.index]
        state.token_mask = None if one is None else self.run.batches.mask(one.index)
        state.reference_inputs = references


class _WaitingInputs(Mapping[Module, torch.Tensor]):
    """What a waiting pass brings to the module it waits at, looked up when it is asked for."""

    def __init__(self, one: Pass) -> None:
        self._one = one

    def __getitem__(self, module: Module) -> torch.Tensor:
        tensor = first_tensor(self._one.args, self._one.kwargs)
        if self._one.module is not module or tensor is None:
            raise KeyError(module)
        return tensor

    def __iter__(self) -> Iterator[Module]:
        return iter(() if self._one.module is None else (self._one.module,))

    def __len__(self) -> int:
        return int(self._one.module is not None)
