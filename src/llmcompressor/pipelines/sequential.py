# SPDX-License-Identifier: Apache-2.0
"""Sequential pipeline: calibrates and compresses a model part by part, with error propagation.

The mechanism is the paused forward (:mod:`llmcompressor.modeling.paused_forward`). At each stop
all passes wait. The event ``SEQUENTIAL_EPOCH_END`` then tells the modifiers that these modules
have seen all batches; they compress the modules, and every pass goes on with the output of the
compressed module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from llmcompressor.core.contract import Granularity
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import first_tensor, model_device
from llmcompressor.modeling.hooks import HooksMixin, has_output_hooks
from llmcompressor.modeling.offload import activation_budget, device_activation_budget
from llmcompressor.modeling.paused_forward import Pass, PausedForward, Stop
from llmcompressor.modeling.weights import embeddings
from llmcompressor.moe.expert_stops import ExpertStage
from llmcompressor.moe.module_list import ExpertBroadcast, ExpertList
from llmcompressor.pipelines.activations import LITTLE, ActivationStore
from llmcompressor.pipelines.batches import CalibrationBatches, calibration_batches
from llmcompressor.pipelines.block_loading import BlockLoader
from llmcompressor.pipelines.granularity import (
    StopUnit,
    count_forwards,
    plan_stops,
    target_stops,
    whole_modules,
)
from llmcompressor.pipelines.moe_lists import (
    apply_starvation_policy,
    broadcast_expert_inputs,
    count_listed_experts,
)
from llmcompressor.pipelines.moe_routing import (
    ExpertCalibration,
    StarvationPolicy,
    expert_calibration,
)
from llmcompressor.pipelines.shared_work import SharedWork
from llmcompressor.pipelines.targets import (
    modifier_indices,
    report_low_coverage,
    trace_calibrated_modules,
    uncalled_blocks,
    warn_uncalled_modules,
)
from llmcompressor.pipelines.watchers import (
    EarlyHooks,
    OriginalWeights,
    capture_inputs,
    check_finite_outputs,
    end_passes_after,
)
from llmcompressor.runtime.memory import malloc_trim
from llmcompressor.runtime.progress import Advance, join_names, progress
from llmcompressor.runtime.run_record import FORWARD, phase
from llmcompressor.session.functions import LifecycleCallbacks, active_session

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.state import State


class SequentialPipeline:
    """Calibrates part by part, at the finest level that is allowed and fits in memory."""

    forced_level: Granularity | None = None

    def __call__(
        self, model: Module, dataloader: DataLoader[Any], dataset_args: DatasetArguments
    ) -> None:
        """Run all modifiers of the active session over the calibration data.

        Args:
            model: the model to compress in place.
            dataloader: calibration batches (mappings of the model's arguments).
            dataset_args: granularity, targets and budget.

        Raises:
            TargetError: a module that is to be calibrated was reached by no batch.
            NonFiniteError: NaN or infinity in the activations, with the module's name.
        """
        session = active_session()
        state, modifiers = session.state, session.lifecycle.recipe.modifiers
        blocks, level = _stops(model, modifiers, state, dataset_args)
        with (
            calibration_batches(
                model, dataloader, state, use_loss_mask=dataset_args.use_loss_mask
            ) as batches,
            expert_calibration(model, state, modifiers, batches, dataset_args) as experts,
            broadcast_expert_inputs(
                model, state, modifiers, batches, dataset_args, blocks=blocks
            ) as lists,
        ):
            forced = self.forced_level or level
            run = _SequentialRun(
                model, batches, state, dataset_args, blocks, forced, lists, experts
            )
            logger.info(
                f"Sequential calibration: {len(run.plan.units)} stops at {run.plan.level} level "
                f"({run.plan.reason}); {len(batches)} batches, {run.streams} stream(s): "
                f"{run.forwards} forward(s)."
            )
            LifecycleCallbacks.calibration_epoch_start()
            run.loader.begin()
            if run.has_work:
                share = dataset_args.min_tokens_per_module
                with (
                    report_low_coverage(model, run.owners, batches, state, share),
                    count_listed_experts(model, state, modifiers, batches, dataset_args, lists),
                    check_finite_outputs(model, state),
                    progress(len(run.plan.units), "Calibrating") as advance,
                ):
                    run.run_units(advance)
            run.loader.finish_unvisited()
            run.loader.finish_others()
            malloc_trim()
            LifecycleCallbacks.calibration_epoch_end()


class LayerSequentialPipeline(SequentialPipeline):
    """Calibrates part by part, at the level of blocks (decoder layers)."""

    forced_level = Granularity.BLOCK


def _stops(
    model: Module, modifiers: Sequence[Modifier], state: State, args: DatasetArguments
) -> tuple[dict[Module, str], Granularity | None]:
    """Return the stops of the model, and the level that the arguments ask for, if any."""
    level = None
    if args.sequential_granularity != "auto":
        level = Granularity(args.sequential_granularity)
    blocks = find_blocks(model, args.sequential_targets)
    if not args.sequential_targets:
        return blocks, level
    owners = modifier_indices(modifiers, state)
    undeclared = any(_is_undeclared(one, state) for one in modifiers)
    return target_stops(model, blocks, owners, modifiers, state, level, at_blocks=undeclared)


def _is_undeclared(modifier: Modifier, state: State) -> bool:
    """Return True if a modifier needs data without declaring modules, so it gets all modules."""
    own = modifier.select(state)
    return modifier.traits.needs_data and not (own.to_end or own.modules)


class _SequentialRun:
    """One calibration run: the plan of its stops, the batches and the options of the pass."""

    def __init__(
        self,
        model: Module,
        batches: CalibrationBatches,
        state: State,
        args: DatasetArguments,
        blocks: dict[Module, str],
        forced: Granularity | None,
        lists: ExpertBroadcast,
        experts: ExpertCalibration,
    ) -> None:
        self.model, self.batches, self.state = model, batches, state
        self.lists, self.experts = lists, experts
        self.starvation = StarvationPolicy.from_arguments(args, batches)
        self.modifiers = modifiers = active_session().lifecycle.recipe.modifiers
        self.work = SharedWork(state, modifiers)
        self.loader = BlockLoader(state, modifiers, self.work)
        needing = [modifier for modifier in modifiers if modifier.traits.needs_data]
        self.owners = {
            module: positions
            for module, positions in modifier_indices(needing, state).items()
            if not self.loader.is_finished(module)  # by an earlier run
        }
        calibrated = trace_calibrated_modules(model, batches, self.owners, blocks, lists)
        source = state.run.block_source
        loaded = {one: name for one, name in source.names.items() if one in blocks}
        source.refuse_uncalled(uncalled_blocks(calibrated, loaded))
        warn_uncalled_modules(calibrated, modifiers, state)
        self.order = calibrated.order
        self.propagates = args.propagate_error and all(m.traits.propagates_error for m in modifiers)
        state.calibration.propagates_error = self.propagates
        state.calibration.call_order = self.order
        self.streams = 2 if self.propagates and any(m.traits.twin for m in modifiers) else 1
        self.undeclared = any(_is_undeclared(modifier, state) for modifier in modifiers)
        self.to_end = self.undeclared or any(m.select(state).to_end for m in modifiers)
        self.budget = activation_budget(args.activation_budget)
        finest = max((m.traits.granularity for m in modifiers), default=Granularity.BLOCK)
        lay_out = partial(
            plan_stops,
            calibrated,
            blocks,
            finest=Granularity.BLOCK if lists.waits_at_blocks else finest,
            tokens=batches.tokens,
            streams=self.streams,
            budget=self.budget,
            every_block=self.undeclared,
            gates=source.names,
            to_end=self.to_end,
            undivided=whole_modules(modifiers, state),
        )
        self.plan = lay_out(forced=forced)
        # the level decides the result: all ranks have it, and it stays that of the first attempt
        levels = list(Granularity)
        coarsest = self.work.most(levels.index(self.plan.level), "level of granularity")
        level = Granularity(source.decide("granularity", str(levels[coarsest])))
        if level is not self.plan.level:
            self.plan = lay_out(forced=level)
        self.work.assign(self._groups())

    def _groups(self) -> Iterator[dict[str, list[Module]]]:
        """Yield, for each unit, the modules that share an input, by a name of their own."""
        for unit in self.plan.units:
            groups: dict[Module, list[Module]] = {}
            for module in unit.modules:
                groups.setdefault(self.order.group_of(module)[0], []).append(module)
            yield {f"{unit.name} {number}": own for number, own in enumerate(groups.values())}

    @property
    def has_work(self) -> bool:
        """True unless an earlier run has already calibrated everything."""
        if any(not unit.is_gate for unit in self.plan.units):
            return True
        return self.to_end and not self.loader.is_complete

    def run_units(self, advance: Advance) -> None:
        """Calibrate and compress all units of the plan in order."""
        units = {unit.stop: unit for unit in self.plan.units}
        device = model_device(self.model)
        room = self.budget
        if device.type == "cuda":  # bytes that may stay there
            room = device_activation_budget(device, self.state.run.device_memory)
        fits = self.plan.bytes <= room
        store = ActivationStore(
            self.budget,
            self._tensors_of_others(),
            fits=fits,
            is_little=fits and device.type == "cpu" and self.plan.bytes <= LITTLE,
            streams=self.streams,
        )
        originals = OriginalWeights(len(self.batches), self.order.calls, self.lists.is_layer_active)
        with (
            PausedForward(self._targets(), self._passes()) as forward,
            self.loader.watching(),
        ):
            forward.surroundings = originals.in_place
            self.lists.pending = forward.pending_modules
            for unit in units.values():
                for member in unit.others:
                    forward.release(member)
            hooks = EarlyHooks(forward)
            stepper = _Stepper(self, forward, store, originals, hooks, units)
            try:
                for unit in units.values():
                    hooks.watch([unit.stop] if unit.runs_twice else unit.others)
                while (forward.pending_modules or self.to_end) and (stop := stepper.next_stop()):
                    unit = units[stop.module]
                    advance(0, note=unit.name)
                    stepper.serve(stop, unit)
                    stepper.settle()
                    advance()
                missed = {unit for unit in units.values() if unit.stop in forward.pending_modules}
                self._tell_unreached([unit for unit in units.values() if unit in missed])
                stepper.free_all_blocks()
            finally:
                hooks.close()
                store.close()
        if self.undeclared:
            told = {inner for unit in self.plan.units for inner in unit.stop.modules()}
            told |= {module for unit in self.plan.units for module in unit.modules}
            between = tuple(module for module in self.model.modules() if module not in told)
            LifecycleCallbacks.sequential_epoch_end(between)

    def _tensors_of_others(self) -> Iterator[torch.Tensor]:
        """Yield tensors that passes do not own: those of the model and of the batches."""
        for module in self.model.modules():
            for values in (module._parameters, module._buffers, vars(module)):
                yield from (one for one in values.values() if isinstance(one, torch.Tensor))
        for batch in self.batches:
            yield from (one for one in batch.values() if isinstance(one, torch.Tensor))

    @property
    def forwards(self) -> int:
        """Number of forwards of the model over the data."""
        return count_forwards(self.plan.level, self.streams, propagates=self.propagates)

    @property
    def watched(self) -> str:
        """Name of the stream whose passes call the hooks."""
        return "compressed" if self.propagates else "original"

    @property
    def keeps_originals(self) -> bool:
        """True if some passes run with the original weights."""
        return self.streams == 2 or not self.propagates

    def _targets(self) -> dict[Module, str]:
        targets = {unit.stop: unit.name for unit in self.plan.units}
        if self.keeps_originals:
            # Members of a group are stops too: an original pass needs their old weights.
            targets |= {member: "" for unit in self.plan.units for member in unit.others}
        return targets

    def _passes(self) -> Iterator[Pass]:
        """Yield the passes of each batch, the original first, as the other needs its inputs."""
        for index, batch in enumerate(self.batches):
            run = self.batches.runner(batch)
            if self.keeps_originals:
                yield Pass(index, run, "original")
            if self.propagates:
                yield Pass(index, run)

    def _tell_unreached(self, units: Sequence[StopUnit]) -> None:
        """Pass modules that no batch reached to modifiers with a policy for them, or raise."""
        units = [unit for unit in units if not unit.is_gate]
        if not units:
            return
        missed = [unit.name for unit in units]
        shown = join_names(missed, most=8)
        selections = [one.select(self.state) for one in self.modifiers]
        if not all(one.accepts_unreached(name) for name in missed for one in selections):
            raise TargetError(
                f"No calibration batch reached {shown}.",
                "Add data that uses these modules (images for a vision tower, for instance), or "
                "put them on the recipe's ignore list.",
            )
        logger.warning(f"No calibration batch reached {shown}.")
        for unit in units:
            self.loader.enter_block_of(unit.stop)
            self.compress(unit.modules, unit.name)

    def sum_listed(self, lists: Iterable[ExpertList]) -> None:
        """Sum the tokens routed to experts in lists over ranks."""
        for one in lists:
            tokens, what = self.lists.tokens_of(one), f"tokens of the experts of {one.name}"
            total = self.work.ranks.sum_all(torch.tensor(tokens), what=what)
            tokens[:] = total.tolist()

    def compress(self, modules: Sequence[Module], name: str) -> None:
        """Compress modules that have seen all samples: each rank its own, and all get them."""
        self.work.sum_collected(modules)
        LifecycleCallbacks.sequential_epoch_end(modules, own=self.work.own(modules))
        self.work.copy_compressed(modules, name)


@dataclass
class _Stepper:
    """Runs the passes from stop to stop and has each unit compressed."""

    run: _SequentialRun
    forward: PausedForward
    store: ActivationStore
    originals: OriginalWeights
    hooks: EarlyHooks
    units: Mapping[Module, StopUnit]

    def next_stop(self) -> Stop | None:
        """Start passes that have not started, and return the first stop where passes wait."""
        started = self.forward.unstarted()
        for one in started:
            self._run_to_next_stop(one, partial(self.forward.start, one))
        if started and not self.run.to_end and not self.run.state.run.block_source.holds_all:
            # all passes have read the embeddings, and the head is not called
            modules = [one for one in embeddings(self.run.model) if one is not None]
            self.store.set_aside(weight for one in modules for weight in one.parameters())
        stop = self.forward.next_stop(lambda place: self.run.work.least(place, "next stop"))
        if stop is not None and not stop.passes:  # those of other ranks have brought us here
            self.run.loader.enter_block_of(stop.module)
        return stop

    def serve(self, stop: Stop, unit: StopUnit) -> None:
        """Calibrate the unit, let the modifiers compress it, and resume every pass."""
        modules = unit.modules
        if unit.runs_twice:  # so that its hooks are called
            self._count_routed_tokens(stop, unit)
            self._calibrate(stop, unit)
            modules = tuple(dict.fromkeys([*unit.stop.modules(), *modules]))
            self.run.experts.sum_counts(modules)  # of experts whose tokens decide something
            _mark_stages_done(modules)
        if self.run.keeps_originals:
            self._keep_originals(unit)
        self.store.return_freed()
        is_finished = self.run.loader.is_finished(unit.stop)
        if not unit.is_gate:
            self.run.compress(modules, unit.name)
            self.store.return_freed(is_solved=True)
        elif is_finished:
            self.run.loader.replace_finished(unit.stop)
            _mark_stages_done(unit.stop.modules())
        last = self._is_last(unit)
        self.forward.release(unit.stop)
        if last:
            self._run_past_last_block(stop, unit)
            return  # modules after the last block, such as the head, need not run
        for one in stop.passes:
            if one.module is stop.module:  # original passes may have gone on already
                # Modules of a gate did not run before; finished ones need no hooks any more.
                self._resume_pass(one, hooks_on=unit.is_gate and not is_finished)

    def _run_past_last_block(self, stop: Stop, unit: StopUnit) -> None:
        """Run passes past the last block, up to the module whose output is checked."""
        block = next(
            (one for one in find_blocks(self.run.model) if unit.stop in set(one.modules())), None
        )
        if block is None:
            return
        with end_passes_after(self.run.model, block) as begin:
            for one in stop.passes:
                if one.module is stop.module and one.stream == self.run.watched:
                    begin()
                    self._resume_pass(one)

    def _keep_originals(self, unit: StopUnit) -> None:
        whole = unit.runs_twice or unit.is_gate
        self.originals.keep([unit.stop] if whole else unit.modules)
        if isinstance(unit.stop, ExpertStage) and unit.stop.is_first:
            self.originals.keep_for(unit.stop.last_stage, unit.modules)

    def _count_routed_tokens(self, stop: Stop, unit: StopUnit) -> None:
        """Count the tokens routed to each expert of the unit and decide their inputs."""
        experts = self.run.experts
        mixtures = experts.undecided(unit.stop.modules())
        if isinstance(unit.stop, ExpertStage):
            experts.decide(mixtures)  # all passes have brought their routes here
        elif mixtures:
            experts.survey(mixtures, partial(self._run_once, stop))
        lists = self.run.lists
        if undecided := lists.undecided(set(unit.stop.modules())):
            with lists.counting_tokens(), HooksMixin.disable_hooks():
                self._run_once(stop)
            self.run.sum_listed(undecided)
            apply_starvation_policy(undecided, lists, self.run.starvation)

    def _run_once(self, stop: Stop) -> None:
        """Run the module at which passes wait, with the hooks that are enabled."""
        for one in stop.passes:
            if one.stream == self.run.watched:
                self.store.fetch(one)
                self._set_batch(one, None)
                try:
                    with phase(FORWARD):
                        self.forward.execute(one)
                finally:
                    self._set_batch(None, None)
                self.store.park(one)

    def settle(self) -> None:
        """Free every block that all passes have left and that has no stop ahead."""
        every = list(self.run.state.run.block_source.names.values())
        for name in self.run.work.common(self._left_blocks(), every, "blocks to leave"):
            self._leave(name)

    def _left_blocks(self) -> Iterator[str]:
        loader = self.run.loader
        waiting = [one.module for one in self.forward.passes if one.module is not None]
        places = {loader.block_of(module) for module in waiting}
        if None in places:
            return  # a pass that waits outside may have come from inside
        for name in [one for one in loader.loaded if one not in places]:
            again = self.run.order.calls.get(loader.loaded[name], 1) > 1
            inside = loader.modules_of(name)
            if not again and self.forward.pending_modules.isdisjoint(inside):
                yield name

    def _leave(self, name: str) -> None:
        inside = self.run.loader.modules_of(name)
        self.forward.restore_forwards(inside)
        self.run.experts.sum_counts(inside)
        if self.run.lists.every:  # else counted before they were shown anything
            self.run.sum_listed(one for one in self.run.lists.lists if one.owner in inside)
        self.run.loader.leave(name)

    def free_all_blocks(self) -> None:
        """Free all blocks that are still loaded, after everything was calibrated."""
        loader = self.run.loader
        if not loader.loaded:
            return
        self.forward.stop()
        for name in list(loader.loaded):
            self._leave(name)

    def _is_last(self, unit: StopUnit) -> bool:
        if self.run.to_end or self.forward.pending_modules != {unit.stop}:
            return False
        return unit.runs_twice or not any(has_output_hooks(module) for module in unit.modules)

    def _calibrate(self, stop: Stop, unit: StopUnit) -> None:
        """Run the unit with all hooks on; an original pass goes straight on with its output."""
        references: dict[int, dict[Module, torch.Tensor]] = {}
        last = self._is_last(unit)
        for one in stop.passes:
            if one.stream == "original":
                self.store.fetch(one)
                brought = first_tensor(one.args, one.kwargs)  # the stop's call has begun: no hook
                brought = None if brought is None else brought.clone()  # it may be added to
                with capture_inputs([*unit.modules, unit.stop]) as captured:
                    if last:
                        with self.originals.in_place(one, stop.module):
                            self._calibrate_pass(one, None)
                    else:
                        self._resume_pass(one, hooks_on=True)
                if brought is not None:
                    captured[unit.stop] = brought
                references[one.index] = captured
            else:
                self._calibrate_pass(one, references.pop(one.index, None))

    def _calibrate_pass(self, one: Pass, references: Mapping[Module, torch.Tensor] | None) -> None:
        """Run the module at which ``one`` waits to call its hooks; the pass does not go on."""
        self.store.fetch(one)
        self._set_batch(one, references)
        try:
            with self._listening(one), phase(FORWARD):
                self.hooks.run(one)
        finally:
            self._set_batch(None, None)
        self.store.park(one)

    def _listening(self, one: Pass) -> AbstractContextManager[object]:
        """Disable hooks while the body runs, unless ``one`` belongs to the watched stream."""
        watched = one.stream == self.run.watched
        return contextlib.nullcontext() if watched else HooksMixin.disable_hooks()

    def _resume_pass(self, one: Pass, *, hooks_on: bool = False) -> None:
        """Resume ``one``: run the module at which it waits, and go on to the next stop."""
        assert one.module is not None
        self.store.fetch(one)
        inside = self._inside(one, one.module, hooks_on)
        self._run_to_next_stop(one, partial(self.forward.resume, one, inside))

    @contextlib.contextmanager
    def _inside(self, one: Pass, module: Module, hooks_on: bool) -> Iterator[None]:
        quiet = contextlib.nullcontext() if hooks_on else HooksMixin.disable_hooks()
        with quiet, self.originals.in_place(one, module):
            yield

    def _run_to_next_stop(self, one: Pass, step: Callable[[], None]) -> None:
        """Run ``one`` to its next stop, with its batch set in the state for the hooks."""
        reference: Mapping[Module, torch.Tensor] | None = None
        if self.run.streams != 1 and one.stream != "original":
            # inputs of the waiting original pass of the same batch
            reference = _WaitingInputs(self.forward.passes[2 * one.index], self.units)
        self._set_batch(one, reference)
        try:
            with self._listening(one), phase(FORWARD):
                step()
                if one.module is not None:
                    self.hooks.show_input(one, self.units[one.module].others)
        finally:
            self._set_batch(None, None)
        self.store.park(one)

    def _set_batch(
        self, one: Pass | None, references: Mapping[Module, torch.Tensor] | None
    ) -> None:
        state = self.run.state
        state.batch_data = None if one is None else self.run.batches[one.index]
        state.calibration.token_mask = None if one is None else self.run.batches.mask(one.index)
        state.calibration.batch_sizes = None if one is None else self.run.batches.sizes(one.index)
        state.calibration.batch_numbers = (
            None if one is None else self.run.batches.numbers(one.index)
        )
        state.calibration.reference_inputs = references


def _mark_stages_done(modules: Iterable[Module]) -> None:
    for module in modules:
        if isinstance(module, ExpertStage):
            module.is_done = True


class _WaitingInputs(Mapping[Module, torch.Tensor]):
    """Lazy mapping from modules at a stop to the input of the pass that waits there."""

    def __init__(self, one: Pass, units: Mapping[Module, StopUnit]) -> None:
        self._one = one
        self._units = units

    def __getitem__(self, module: Module) -> torch.Tensor:
        tensor = first_tensor(self._one.args, self._one.kwargs)
        if module not in self._modules() or tensor is None:
            raise KeyError(module)
        return tensor

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules())

    def __len__(self) -> int:
        return len(self._modules())

    def _modules(self) -> tuple[Module, ...]:
        stop = self._one.module
        return () if stop is None else (stop, *self._units[stop].others)
