# SPDX-License-Identifier: Apache-2.0
"""Construction of a plan from a model's headers, the modifiers and measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.atomic_output import work_folder
from llmcompressor.checkpoint.block_writer import check_space, non_weight_bytes, unallocated_bytes
from llmcompressor.checkpoint.journal import files_folder, scratch_folder
from llmcompressor.core.contract import ComputeCost, DataSize, Edits, PlannedModule
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import RunSettings, State
from llmcompressor.errors import CompressorError, InputError, OutputError, TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.names import own_parameters
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.pipelines.attention_trial import check_attention_forward
from llmcompressor.pipelines.batches import RUN_TOKENS
from llmcompressor.pipelines.targets import check_reached
from llmcompressor.planning.matching import STACK, descriptions, match_patterns, module_rows
from llmcompressor.planning.memory import (
    Capacity,
    PartMemory,
    RunMemory,
    estimate_phases,
    shortages,
)
from llmcompressor.planning.miniature import ProxyTrials
from llmcompressor.planning.passes import PassContext, Passes, plan_passes
from llmcompressor.planning.result import ModuleRow, Plan, Problem, Sizes, Tokens
from llmcompressor.planning.sizes import Output, predict_output, serving_notes
from llmcompressor.planning.subject import REST, Part, PlannedModel
from llmcompressor.planning.trial import SchemeCost, measure_scheme
from llmcompressor.planning.workload import (
    Traffic,
    count_operations,
    estimate_time,
    measure_rates,
    read_widths,
)
from llmcompressor.runtime.memory import free_device_memory, free_host_memory, malloc_trim
from llmcompressor.verification import Deployment

__all__ = ["RECIPE", "Request", "make_plan", "problem_of"]

_START_SECONDS = 0.05
_PASS_SECONDS = 0.15
_MODULE_SECONDS = 0.0007
"""Of Python, for a run, for each pass with data, and for each module that is quantized."""

RECIPE = "recipe"
"""Where a problem is that leaves nothing to plan."""

Room = Callable[[int, int], tuple[int | None, bool]]
"""Bytes in use and bytes of the largest block → bytes for activations, ``None`` for what is free,
and whether blocks are read ahead; an :class:`ArgumentError` where one block does not fit."""


@dataclass(frozen=True)
class Request:
    """Inputs of a plan besides the model.

    Attributes:
        modifiers: unused modifiers of the recipe.
        recipe: the recipe as YAML.
        pipeline: the pipeline to run.
        args: calibration arguments.
        tokens: the calibration data; ``None`` if none is needed.
        batches: number of batches.
        samples: the first batch with each set of inputs; empty if the data was not read.
        device: the device to compute on.
        is_streamed: blocks are loaded one by one.
        room: computes the activation budget within the limit of main memory.
        save_compressed: weights are packed, not written dense.
        output_dir: the output folder.
        deployment: serving environment, as far as known.
        measure: measure the machine and estimate the time.
        problems: problems found before.
        device_limit: bytes that the run may use of ``device``; ``None`` for what is free.
        host_limit: the same of main memory.
        keeps_ties: the user has asked to keep tied embeddings tied.
    """

    modifiers: Sequence[Modifier]
    recipe: str
    pipeline: str
    args: DatasetArguments
    tokens: Tokens | None = None
    batches: int = 0
    samples: Sequence[Mapping[str, Any]] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_streamed: bool = True
    room: Room = lambda used, block: (None, True)
    save_compressed: bool = True
    output_dir: Path | None = None
    deployment: Deployment | None = None
    measure: bool = True
    problems: Sequence[Problem] = ()
    device_limit: int | None = None
    host_limit: int | None = None
    keeps_ties: bool = False


def problem_of(where: str, error: CompressorError) -> Problem:
    """Return the problem for an error that the run would raise."""
    if isinstance(error, InputError):
        return Problem(where, type(error).__name__, error.problem, error.remedy)
    return Problem(where, type(error).__name__, str(error), "")


def make_plan(subject: PlannedModel, request: Request) -> Plan:
    """Make the plan of a run.

    Args:
        subject: the model.
        request: the other inputs of the plan.
    """
    return _PlanBuilder(subject, request)()


class _PlanBuilder:
    """Builder of a plan."""

    def __init__(self, subject: PlannedModel, request: Request) -> None:
        self._subject = subject
        self._request = request
        self._problems = list(request.problems)
        self._notes: list[str] = []
        self._state = State(
            model=subject.model, run=RunSettings(keeps_tied_embeddings=request.keeps_ties)
        )
        self._parts: Sequence[Part] | None = None
        self._state.data.calib = request.samples or None
        self._widths = read_widths(subject.model.config)  # before modifiers change the model
        self._reads_ahead = True
        self._base = 0
        self._rehearsal = ProxyTrials(subject.model, request.modifiers)

    def __call__(self) -> Plan:
        subject, request = self._subject, self._request
        # counted first: a modifier may untie the head, or add rotations
        parameters = sum(one.numel() for one in subject.model.parameters())
        planned = _without_overridden(
            [self._initialized(modifier) for modifier in request.modifiers]
        )
        self._all_initialized(are_all=None not in planned)
        everything = [one for each in planned for one in each or ()]
        names = [
            _modified_names(subject.model, modifier, each or (), self._state)
            for modifier, each in zip(request.modifiers, planned, strict=True)
        ]
        words = descriptions(everything)
        parts = self._parts_read
        is_ready = None not in planned and not any(one.where == RECIPE for one in self._problems)
        rows = module_rows(subject.model, request.modifiers, everything) if is_ready else []
        plan = Plan(
            model=subject.place,
            architecture=type(subject.model).__name__,
            parameters=parameters,
            blocks=len(parts) - 1,
            recipe=request.recipe,
            residency=self._residency(),
            matches=match_patterns(subject.model, zip(request.modifiers, names, strict=True)),
            modules=rows,
            schemes={one.name: words[id(one.scheme)] for one in everything},
            tokens=request.tokens,
        )
        # the run, too, holds the structure of the model and of its output
        malloc_trim(at_least=0)
        self._base = psutil.Process().memory_info().rss
        self._note_stacks(rows)
        self._notes.extend(subject.notes)
        if is_ready:
            plan = self._with_output(plan, everything, parts)
        self._find_unreached()
        self._try_attention()
        for modifier in request.modifiers:
            if modifier.initialized:
                modifier.finalize(self._state)
        return replace(plan, problems=self._problems, notes=self._notes)

    # ------------------------------------------------------------------ the recipe

    def _initialized(self, modifier: Modifier) -> list[PlannedModule] | None:
        """Initialize a modifier and return its planned modules; an error becomes a problem."""
        name = type(modifier).__name__
        try:
            modifier.initialize(self._state)
            if Edits.STRUCTURE in modifier.traits.edits:
                self._parts = self._parts_read
            modifier.outline(self._state)
            planned = list(modifier.predict(self._state).modules)
        except CompressorError as error:
            self._problems.append(problem_of(name, error))
            return None
        except Exception as error:  # a user's modifier may need weights, which are not loaded
            if modifier.traits.by_block:
                raise
            self._notes.append(
                f"{name} cannot be planned without the weights ({type(error).__name__}: {error}): "
                "what it does is left out."
            )
            return []
        self._rehearse(modifier)
        return planned

    def _all_initialized(self, *, are_all: bool) -> None:
        """Notify modifiers that all are initialized; errors count only if none was refused."""
        for modifier in self._request.modifiers:
            if not modifier.initialized:
                continue
            try:
                modifier.on_all_initialized(self._state)
            except CompressorError as error:
                if are_all:
                    self._problems.append(problem_of(type(modifier).__name__, error))

    def _rehearse(self, modifier: Modifier) -> None:
        """Run a modifier's rehearsal on a small proxy model, and record a refusal as a problem."""
        name = type(modifier).__name__
        try:
            unknown = self._rehearsal(modifier)
        except TargetError as error:
            self._problems.append(problem_of(name, error))
            return
        if unknown:
            self._notes.append(
                f"{name} tries out on the weights, before it changes any, whether the model would "
                f"compute what it does. The plan does not foresee that here: "
                f"{unknown.removesuffix('.')}."
            )

    @property
    def _parts_read(self) -> Sequence[Part]:
        """Parts of the model as they are loaded, before modifiers remove any modules."""
        return self._subject.parts() if self._parts is None else self._parts

    def _find_unreached(self) -> None:
        """Record modules that the calibration data cannot reach as a problem."""
        request = self._request
        ready = [one for one in request.modifiers if one.initialized]
        try:
            if request.samples:
                check_reached(self._subject.model, ready, request.samples, request.pipeline)
        except TargetError as error:
            self._problems.append(problem_of("dataset", error))

    def _try_attention(self) -> None:
        """Record attention that fails with quantized states as a problem."""
        request, state = self._request, self._state
        ready = [one for one in request.modifiers if one.initialized]
        try:
            check_attention_forward(
                self._subject.model, request.samples, ready, state, tell=self._notes.append
            )
        except TargetError as error:
            owners = {type(state.facts.quantizer[one]).__name__ for one in state.facts.kv_cache}
            self._problems.append(problem_of(", ".join(sorted(owners)), error))

    def _note_stacks(self, rows: Sequence[ModuleRow]) -> None:
        """Note stacks of expert matrices, which no target reaches and may be most of the model."""
        if any(Edits.STRUCTURE in one.traits.edits for one in self._request.modifiers):
            return  # it knows stacks, not targets
        stacks = [row for row in rows if row.why == STACK]
        weights, whole = sum(row.weights for row in stacks), sum(row.weights for row in rows)
        if stacks:
            self._notes.append(
                f"{weights / whole:.0%} of the weights are stacks of matrices "
                f"({', '.join(row.pattern for row in stacks)}: experts), which no target reaches: "
                "they stay as they are."
            )

    def _stops(self) -> dict[Module, str]:
        """Modules that match ``sequential_targets``; empty if there are none."""
        targets = self._request.args.sequential_targets
        try:
            return find_blocks(self._subject.model, targets) if targets else {}
        except InputError as error:
            self._problems.append(problem_of("sequential_targets", error))
            return {}

    def _residency(self) -> str:
        if self._request.is_streamed:
            return "one block at a time, the next one read ahead"
        reason = self._subject.whole
        return "the whole model in memory" + (f", because {reason}" if reason else "")

    # ------------------------------------------------------------------ the output

    def _with_output(
        self, plan: Plan, planned: Sequence[PlannedModule], parts: Sequence[Part]
    ) -> Plan:
        subject, request = self._subject, self._request
        try:
            output = predict_output(
                subject,
                planned,
                is_streamed=request.is_streamed,
                save_compressed=request.save_compressed,
            )
        except InputError as error:
            self._problems.append(problem_of("output", error))
            return plan
        sizes = output.sizes(subject, request.recipe)
        plan = replace(
            plan,
            serving=serving_notes(output, request.deployment),
            scheme_bytes=output.by_scheme(planned),
            dense=output.dense(plan.modules, subject.names),
            sizes=sizes,
        )
        return self._with_demands(plan, output, sizes, planned, parts)

    # ------------------------------------------------------------------ memory and time

    def _with_demands(
        self,
        plan: Plan,
        output: Output,
        sizes: Sizes,
        planned: Sequence[PlannedModule],
        parts: Sequence[Part],
    ) -> Plan:
        subject, request = self._subject, self._request
        trials = self._trials(planned)
        loads = self._loads(parts, output, planned, trials)
        passes, learned = plan_passes(request.modifiers, self._context(parts))
        tokens = request.tokens.tokens if request.tokens else 0
        context = request.tokens.longest if request.tokens else 0
        weights = sum(row.weights for row in plan.scheme_bytes)
        beside, again = self._work(parts)
        operations = count_operations(passes, tokens, context, weights, beside)
        plan = replace(plan, passes=[one for one, _ in passes], operations=operations)
        seconds: Mapping[str, float] = {}
        if request.measure:
            rates = measure_rates(
                request.device, subject.model.dtype, _nearest_existing(request.output_dir)
            )
            words = descriptions(planned)
            rounding = sum(trials[words[id(one.scheme)]].seconds * _weights(one) for one in planned)
            calibrating = sum(1 for one, _ in passes if one.forwards)
            # of Python, independent of sizes
            overhead = _START_SECONDS + _PASS_SECONDS * calibrating + _MODULE_SECONDS * len(planned)
            traffic = Traffic(
                subject.source_bytes * max(len(passes), 1) + again,
                sizes.weights,
                rounding,
                parts[-1].source + parts[0].source,
                request.is_streamed,
                overhead,
            )
            seconds, time = estimate_time(
                rates, operations, passes, request.batches, traffic, beside, tokens, context
            )
            plan = replace(plan, rates=rates, time=time)
        footprint = self._footprint(sizes, output, passes)
        phases = estimate_phases(footprint, loads, passes, seconds, learned)
        kept = sum(one.learning.kept for one, _ in passes if one.learning is not None)
        self._check_space(output, footprint.scratches, kept)
        host = Capacity("main memory", self._base + free_host_memory(), request.host_limit)
        self._notes.extend(shortages(phases, host, self._device))
        return replace(plan, phases=phases)

    @property
    def _device(self) -> Capacity:
        device, free = self._request.device, None
        if device.type == "cuda":
            free = free_device_memory(device) + torch.cuda.memory_allocated(device)
        return Capacity(f"the memory of {device}", free, self._request.device_limit)

    def _check_space(self, output: Output, scratches: int, kept: int) -> None:
        """Record insufficient disk space as a problem."""
        target = self._request.output_dir
        if target is None:
            return
        folder, scratch = work_folder(target), 0
        beside = non_weight_bytes(self._subject.directory, len(output.layout.places))
        if self._request.is_streamed:
            scratch = kept
        if self._request.is_streamed and scratches:  # with blocks of the size that modifiers leave
            scratch += scratches * sum(part.loaded for part in self._subject.parts()[:-1])
        try:
            check_space(
                folder,
                output=unallocated_bytes(files_folder(folder), output.layout.file_size + beside),
                scratch=unallocated_bytes(scratch_folder(folder), scratch),
            )
        except OutputError as error:
            self._problems.append(problem_of("output_dir", error))

    @property
    def _data(self) -> DataSize:
        """Size of the calibration data, with the model's attention and experts."""
        tokens, widths = self._request.tokens, self._widths
        if tokens is None:
            return DataSize(expert_share=widths.expert_share)
        return DataSize(
            tokens.tokens,
            tokens.real,
            tokens.samples,
            tokens.tokens // max(self._request.batches, 1),
            widths.heads * tokens.longest,
            widths.expert_share,
        )

    def _work(self, parts: Sequence[Part]) -> tuple[ComputeCost, int]:
        """Work of modifiers outside of calibration, and bytes that they read again."""
        total, again = ComputeCost(), 0
        for modifier in self._request.modifiers:
            for part in parts if modifier.initialized else ():
                own = modifier.cost().compute(list(part.modules.values()), self._data)
                total += own
                again += own.readings * part.source * self._request.is_streamed
        return total, again

    def _loads(
        self,
        parts: Sequence[Part],
        output: Output,
        planned: Sequence[PlannedModule],
        trials: Mapping[str, SchemeCost],
    ) -> list[PartMemory]:
        stored = output.stored_bytes
        words = descriptions(planned)
        by_name = {one.name: one for one in planned}
        ready = [one for one in self._request.modifiers if one.initialized]
        found = []
        for part in parts:
            own = [by_name[name] for name in part.modules if name in by_name]
            packed = sum(stored.get(output.places.get(one.name, ""), 0) for one in own)
            sizes = [(trials[words[id(one.scheme)]], _weights(one)) for one in own]
            modules, together = list(part.modules.values()), part.name != REST
            # by modifiers, in addition to the weights
            held = [one.cost().held(modules, together=together) for one in ready]
            found.append(
                PartMemory(
                    part,
                    packed,
                    max([0, *held, *(trial.rounding.of(size) for trial, size in sizes)]),
                    max((trial.packing.of(size) for trial, size in sizes), default=0),
                )
            )
        return found

    def _trials(self, planned: Sequence[PlannedModule]) -> dict[str, SchemeCost]:
        found: dict[str, SchemeCost] = {}
        words = descriptions(planned)
        for one in planned:
            key = words[id(one.scheme)]
            if key not in found:
                dtype = next((p.dtype for p in one.module.parameters()), torch.float32)
                found[key] = measure_scheme(
                    one.scheme,
                    dtype,
                    self._request.device,
                    is_written=self._request.is_streamed,
                )
        return found

    def _context(self, parts: Sequence[Part]) -> PassContext:
        request = self._request
        used = self._base + parts[-1].loaded
        room = None
        if request.is_streamed:
            try:
                largest = max((part.source for part in parts[:-1]), default=0)
                room, self._reads_ahead = request.room(used, largest)
            except InputError as error:
                self._problems.append(problem_of("max_memory", error))
                self._reads_ahead = False
        return PassContext(
            self._state,
            request.args,
            request.pipeline,
            request.is_streamed,
            parts,
            self._stops(),
            self._widths,
            self._data,
            request.tokens.longest * request.args.batch_size if request.tokens else 0,
            -(-request.tokens.samples // request.args.batch_size) if request.tokens else 0,
            room,
        )

    def _footprint(self, sizes: Sizes, output: Output, passes: Passes) -> RunMemory:
        subject, request = self._subject, self._request
        tokens = request.tokens
        longest = 0 if tokens is None else tokens.longest * request.args.batch_size
        limit = 0 if tokens is None else min(RUN_TOKENS, tokens.tokens)
        return RunMemory(
            self._base,
            request.is_streamed,
            subject.source_bytes if subject.is_in_memory else 0,
            request.device.type != "cpu",
            sizes.weights,
            max((file.size for file in output.layout.files), default=0),
            sizes.others,
            subject.model.dtype.itemsize,
            max(longest, limit),
            max(len(passes) - 1, 0),
            self._reads_ahead,
            0 if tokens is None else tokens.tokens,
            self._widths.hidden,
            min([one for one in (self._device.free, request.device_limit) if one], default=None),
            tokens is not None and not _fills_chunks(tokens, longest),
        )


def _without_overridden(
    planned: Sequence[list[PlannedModule] | None],
) -> list[list[PlannedModule] | None]:
    """Planned modules of each modifier, without those that a later modifier quantizes."""
    taken: set[Module] = set()
    found: list[list[PlannedModule] | None] = []
    for each in reversed(planned):
        own = None if each is None else [one for one in each if one.module not in taken]
        taken.update(one.module for one in own or () if not one.is_attention)
        found.append(own)
    return found[::-1]


def _fills_chunks(tokens: Tokens, batch: int) -> bool:
    """Return True if the tokens of batches are a multiple or a divisor of the chunk size."""
    is_even = tokens.samples * tokens.longest == tokens.tokens >= CHUNK_TOKENS
    return is_even and 0 in (batch % CHUNK_TOKENS, CHUNK_TOKENS % batch)


def _weights(planned: PlannedModule) -> int:
    return sum(one.numel() for one in own_parameters(planned.module) if one.ndim > 1)


def _nearest_existing(folder: Path | None) -> Path | None:
    """Return the nearest existing parent folder, which is on the output's disk."""
    while folder is not None and not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _modified_names(
    model: Module, modifier: Modifier, planned: Sequence[PlannedModule], state: State
) -> set[str]:
    """Names of modules that a modifier quantizes, or else calibrates, with their ancestors."""
    if planned or not modifier.initialized:
        return {one.name for one in planned}
    own = set(modifier.select(state).modules)
    names = [name for name, module in model.named_modules() if module in own]
    parts = [name.split(".") for name in names]
    return {".".join(each[:n]) for each in parts for n in range(1, len(each) + 1)}
