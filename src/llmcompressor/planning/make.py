# SPDX-License-Identifier: Apache-2.0
"""Construction of a plan from a model's headers, the modifiers and measurements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.atomic_output import FILES, work_folder
from llmcompressor.checkpoint.block_writer import check_space, non_weight_bytes, unallocated_bytes
from llmcompressor.checkpoint.journal import SCRATCH
from llmcompressor.core.contract import (
    ELEMENTWISE,
    Cost,
    DataSize,
    DataUse,
    Edits,
    PlannedModule,
    Solving,
)
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import RunSettings, State
from llmcompressor.errors import CompressorError, InputError, OutputError, TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.pipelines.attention_trial import check_attention_forward
from llmcompressor.pipelines.batches import RUN_TOKENS
from llmcompressor.pipelines.passes import BY_BLOCK, KEPT
from llmcompressor.pipelines.targets import check_reached
from llmcompressor.planning.matching import STACK, descriptions, match_patterns, module_rows
from llmcompressor.planning.memory import (
    Capacity,
    PartMemory,
    RunMemory,
    estimate_phases,
    shortages,
)
from llmcompressor.planning.passes import PassContext, Passes, plan_passes
from llmcompressor.planning.ranks import (
    Layout,
    RankRun,
    divisible_work,
    peaks_of_rank,
    plan_ranks,
)
from llmcompressor.planning.result import (
    ModuleRow,
    Operations,
    Plan,
    Problem,
    RankPlan,
    Rates,
    Sizes,
    Tokens,
)
from llmcompressor.planning.sizes import Output, predict_output, serving_notes
from llmcompressor.planning.subject import Part, PlannedModel
from llmcompressor.planning.trial import SchemeCost, measure_scheme
from llmcompressor.planning.workload import (
    GroupShare,
    Traffic,
    count_operations,
    estimate_time,
    matrix_elements,
    measure_rates,
    part_cost,
    read_widths,
)
from llmcompressor.runtime.memory import free_device_memory, free_host_memory, malloc_trim
from llmcompressor.verification import Deployment

_START_SECONDS = 0.05
_PASS_SECONDS = 0.15
_MODULE_SECONDS = 0.0007
"""Of Python, for a run, for each pass with data, and for each module that is quantized."""

_ROUNDING_VISITS = 8
"""Passes over a weight to round and pack it, where that is not measured."""

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
        measure: measure the machine and estimate the time; or its rates, where it is another one.
        problems: problems found before.
        device_limit: bytes that the run may use of ``device``; ``None`` for what is free.
        host_limit: the same of main memory.
        keeps_ties: the user has asked to keep tied embeddings tied.
        layout: the ranks of the run.
        asked: the modifiers with the patterns that the user gave, if a budget's choice stands in
            their place in ``modifiers``; in the same order.
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
    measure: bool | Rates = True
    problems: Sequence[Problem] = ()
    device_limit: int | None = None
    host_limit: int | None = None
    keeps_ties: bool = False
    layout: Layout = field(default_factory=Layout)
    asked: Sequence[Modifier] = ()


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
        self._state.data.calib = request.samples or None
        # parts of the model as they are loaded, before a modifier removes any modules
        self._parts: Sequence[Part] | None = None
        self._widths = read_widths(subject.model.config)  # before modifiers change the model
        self._reads_ahead = True
        self._base = 0

    def __call__(self) -> Plan:
        subject, request = self._subject, self._request
        # counted first: a modifier may untie the head, or add rotations
        parameters = sum(one.numel() for one in subject.model.parameters())
        planned = _without_overridden([self._initialized(one) for one in request.modifiers])
        is_ready = None not in planned
        for modifier in self._ready:
            with self._recording(type(modifier).__name__, CompressorError, quietly=not is_ready):
                modifier.on_all_initialized(self._state)
        everything = [one for each in planned for one in each or ()]
        names = [
            _modified_names(subject.model, modifier, each or (), self._state)
            for modifier, each in zip(request.modifiers, planned, strict=True)
        ]
        words = descriptions(everything)
        parts = self._parts or subject.parts()
        is_ready = is_ready and not any(one.where == RECIPE for one in self._problems)
        rows = module_rows(subject.model, request.modifiers, everything) if is_ready else []
        asked = request.asked or request.modifiers
        plan = Plan(
            model=subject.place,
            architecture=type(subject.model).__name__,
            parameters=parameters,
            blocks=len(parts) - 1,
            recipe=request.recipe,
            residency="one block at a time, the next one read ahead"
            if request.is_streamed
            else "the whole model in memory" + f", because {subject.whole}" * bool(subject.whole),
            matches=match_patterns(subject.model, zip(asked, names, strict=True)),
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
        self._try_data()
        for modifier in self._ready:
            modifier.finalize(self._state)
        return replace(plan, problems=self._problems, notes=self._notes)

    @property
    def _ready(self) -> list[Modifier]:
        return [one for one in self._request.modifiers if one.initialized]

    @contextmanager
    def _recording(
        self, where: str, kind: type[CompressorError] = InputError, *, quietly: bool = False
    ) -> Iterator[None]:
        """Record an error of the body as a problem."""
        try:
            yield
        except kind as error:
            if not quietly:
                self._problems.append(problem_of(where, error))

    # ------------------------------------------------------------------ the recipe

    def _initialized(self, modifier: Modifier) -> list[PlannedModule] | None:
        """Initialize a modifier and return its planned modules; an error becomes a problem."""
        name = type(modifier).__name__
        try:
            modifier.initialize(self._state)
            if Edits.STRUCTURE in modifier.traits.edits and self._parts is None:
                self._parts = self._subject.parts()
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
        return planned

    def _try_data(self) -> None:
        """Record modules that no data reaches, and attention that fails with quantized states."""
        request, state = self._request, self._state
        with self._recording("dataset", TargetError):
            if request.samples:
                check_reached(self._subject.model, self._ready, request.samples, request.pipeline)
        owners = {type(state.facts.quantizer[one]).__name__ for one in state.facts.kv_cache}
        with self._recording(", ".join(sorted(owners)), TargetError):
            check_attention_forward(
                self._subject.model, request.samples, self._ready, state, tell=self._notes.append
            )

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

    # ------------------------------------------------------------------ the output

    def _with_output(
        self, plan: Plan, planned: Sequence[PlannedModule], parts: Sequence[Part]
    ) -> Plan:
        subject, request = self._subject, self._request
        with self._recording("output"):
            output = predict_output(
                subject,
                planned,
                is_streamed=request.is_streamed,
                save_compressed=request.save_compressed,
            )
            sizes = output.sizes(subject, request.recipe)
            plan = replace(
                plan,
                serving=serving_notes(output, request.deployment),
                scheme_bytes=output.by_scheme(planned),
                dense=output.dense(plan.modules, subject.names),
                sizes=sizes,
            )
            return self._with_demands(plan, output, sizes, planned, parts)
        return plan

    # ------------------------------------------------------------------ memory and time

    def _with_demands(
        self,
        plan: Plan,
        output: Output,
        sizes: Sizes,
        planned: Sequence[PlannedModule],
        parts: Sequence[Part],
    ) -> Plan:
        request = self._request
        context = self._context(parts)
        passes = plan_passes(request.modifiers, context)
        beside, learning = self._part_costs(parts, context)
        schemes = self._scheme_costs(planned)
        rounded = sum(row.weights for row in plan.scheme_bytes)
        rates, rounding = self._rates(), self._rounding_seconds(planned, schemes)

        def work_of(passes: Passes) -> tuple[Operations, int, Traffic]:
            works = [work for one, works in passes if one.forwards for work in works]
            steps = sum(len(work.stops) for work in works) * request.batches
            operations = self._operations(passes, rounded, beside, learning)
            return operations, steps, self._traffic(passes, sizes, parts, rounding)

        operations, steps, traffic = work_of(passes)
        plan = replace(plan, passes=[one for one, _ in passes], operations=operations)
        seconds: Mapping[str, float] = {}
        if rates is not None:
            seconds, time = estimate_time(rates, operations, steps, traffic)
            plan = replace(plan, rates=rates, time=time)
        scratch = self._scratch(max(len(passes) - 1, 0), learning)
        self._check_space(output, scratch)
        memory = self._run_memory(sizes, output, scratch)
        loads = self._loads(parts, output, planned, schemes, beside, learning)
        phases = estimate_phases(memory, loads, passes, seconds)
        host = Capacity("main memory", self._base + free_host_memory(), request.host_limit)
        self._notes.extend(shortages(phases, host, self._device))

        def run_of(passes: Passes, ranks: int) -> RankRun:
            copied = {
                name: {key: one.nbytes for key, one in module.named_parameters(recurse=False)}
                for part in parts
                for name, module in part.modules.items()
            }
            copied |= {
                one.name: {k: each.nbytes for k, each in one.tensors.items()} for one in planned
            }
            work = divisible_work(
                passes,
                self._batches,
                *work_of(passes),
                copied,
                output.written_units,
                self._shares_by_block(parts),
            )
            return RankRun(work, *peaks_of_rank(memory, loads, passes, work.share(ranks)))

        return replace(plan, phases=phases, ranks=self._ranks(context, rates, run_of))

    def _operations(
        self,
        passes: Passes,
        rounded: int,
        beside: Sequence[Cost],
        learning: Sequence[Sequence[Cost]],
    ) -> Operations:
        tokens = self._request.tokens
        return count_operations(
            passes,
            tokens.tokens if tokens else 0,
            tokens.longest if tokens else 0,
            rounded=rounded,
            beside=sum(one.flops for one in beside),
            learn=sum(one.flops for costs in learning for one in costs),
        )

    def _rates(self) -> Rates | None:
        """The rates that were given, or else those of this machine."""
        request = self._request
        if isinstance(request.measure, Rates):
            return request.measure
        if not request.measure:
            return None
        folder = request.output_dir  # or the nearest parent there is, on the same disk
        while folder is not None and not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        return measure_rates(request.device, self._subject.model.dtype, folder)

    def _rounding_seconds(
        self, planned: Sequence[PlannedModule], schemes: Mapping[int, SchemeCost]
    ) -> float:
        """Seconds to round and pack all weights."""
        rates, elements = self._request.measure, [matrix_elements(one.module) for one in planned]
        python = _MODULE_SECONDS * len(planned)
        if isinstance(rates, Rates):  # what was measured here is no measure of that machine
            visits = ELEMENTWISE * _ROUNDING_VISITS * sum(elements)
            return visits / rates.float32_products + python
        costs = (schemes[id(one.scheme)].seconds for one in planned)
        seconds: float = sum(map(operator.mul, costs, elements))
        return seconds + python

    def _traffic(
        self, passes: Passes, sizes: Sizes, parts: Sequence[Part], rounding: float
    ) -> Traffic:
        # of Python, independent of sizes
        calibrating = sum(bool(one.forwards) for one, _ in passes)
        return Traffic(
            self._subject.source_bytes * max(len(passes), 1),
            sizes.weights,
            rounding + _START_SECONDS + _PASS_SECONDS * calibrating,
            parts[-1].source + parts[0].source,
            self._request.is_streamed,
        )

    # ------------------------------------------------------------------ several ranks

    @property
    def _batches(self) -> int:
        """Number of calibration batches, before short ones are joined."""
        tokens = self._request.tokens
        return 0 if tokens is None else -(-tokens.samples // self._request.args.batch_size)

    def _ranks(
        self,
        context: PassContext,
        rates: Rates | None,
        run_of: Callable[[Passes, int], RankRun],
    ) -> RankPlan | None:
        """The plan of several ranks; ``None`` for one, and where each would do all of it."""
        request, layout = self._request, self._request.layout
        if layout.ranks == 1 or not self._is_shared:
            return None
        with self._recording("ranks"):
            if request.tokens is not None:
                layout.check_batches(self._batches)
            runs = {}
            for ranks in layout.counts():
                beside = -(-ranks // layout.nodes_of(ranks))
                each = replace(context, ranks=ranks, beside=beside)
                passes = plan_passes(request.modifiers, each)
                runs[ranks] = run_of(passes, ranks)
            return plan_ranks(layout, runs, rates, layout.links(request.device.type))
        return None

    def _shares_by_block(self, parts: Sequence[Part]) -> list[list[GroupShare]]:
        """Of a run without data, what each module adds to its block, which is done at once."""
        if self._request.tokens is not None:
            return []
        owning = [one for one in self._ready if one.traits.over_ranks is Solving.OWNER]
        chosen = {inner for one in owning for inner in one.select(self._state).modules}
        shares = [
            [
                GroupShare(
                    (name,),
                    sum(one.cost([inner], DataSize()).flops for one in owning),
                    *(0, 0, 0),
                    changes=False,
                )
                for name, inner in part.modules.items()
                if inner in chosen
            ]
            for part in parts
        ]
        return [block for block in shares if block]

    @property
    def _is_shared(self) -> bool:
        """Whether several ranks share the work of the run; a note says why not."""
        why = ""
        if self._request.pipeline not in BY_BLOCK:
            why = f"the {self._request.pipeline} pipeline needs all samples in one process"
        for one in self._request.modifiers:
            is_alone = one.traits.over_ranks is Solving.ALONE
            if one.traits.data is not DataUse.NONE and is_alone:
                why = f"{type(one).__name__} needs all samples in one process"
        if why:
            self._notes.append(f"Several ranks would not share the work: {why}.")
        return not why

    @property
    def _device(self) -> Capacity:
        device, free = self._request.device, None
        if device.type == "cuda":
            free = free_device_memory(device) + torch.cuda.memory_allocated(device)
        return Capacity(f"the memory of {device}", free, self._request.device_limit)

    def _scratch(self, passes_before: int, learning: Sequence[Sequence[Cost]]) -> int:
        """Bytes on disk of blocks that a pass leaves for the next, and of progress in learning."""
        if not self._request.is_streamed:
            return 0
        # with blocks of the size that modifiers leave
        blocks = sum(part.loaded for part in self._subject.parts()[:-1]) if passes_before else 0
        matrices = [max(one.held_bytes for one in each) for each in zip(*learning, strict=True)]
        progress: int = 2 * sum(matrices)  # a new file is written before the old one is removed
        return passes_before * blocks + progress

    def _check_space(self, output: Output, scratch: int) -> None:
        """Record insufficient disk space as a problem."""
        target = self._request.output_dir
        if target is None:
            return
        folder = work_folder(target)
        beside = non_weight_bytes(self._subject.directory, len(output.layout.places))
        with self._recording("output_dir", OutputError):
            check_space(
                folder,
                output=unallocated_bytes(folder / FILES, output.layout.file_size + beside),
                scratch=unallocated_bytes(folder / SCRATCH, scratch),
            )

    def _part_costs(
        self, parts: Sequence[Part], context: PassContext
    ) -> tuple[list[Cost], list[list[Cost]]]:
        """Costs by part: of modifiers that run no data, and of each that learns first."""
        runs = self._request.pipeline != KEPT  # else their statistics are there
        data, beside = context.data, list[Cost]()
        steps = replace(data, batch=context.longest)  # batches as they were made
        learning: list[list[Cost]] = []
        for part in parts:
            total, learned = Cost(), []
            for modifier in self._ready:
                use = modifier.traits.data
                if use is DataUse.LEARN_FIRST:
                    learned.append(part_cost(modifier, part, steps))
                elif not (runs and use.collects):
                    total += part_cost(modifier, part, data)
            beside.append(total)
            learning.append(learned)
        return beside, learning

    def _scheme_costs(self, planned: Sequence[PlannedModule]) -> dict[int, SchemeCost]:
        """Measured costs by identity of the scheme; equal ones are measured once."""
        request, words = self._request, descriptions(planned)
        measured: dict[str, SchemeCost] = {}
        for one in planned:
            if (key := words[id(one.scheme)]) not in measured:
                dtype = next((p.dtype for p in one.module.parameters()), torch.float32)
                measured[key] = measure_scheme(
                    one.scheme, dtype, request.device, is_written=request.is_streamed
                )
        return {key: measured[word] for key, word in words.items()}

    def _loads(
        self,
        parts: Sequence[Part],
        output: Output,
        planned: Sequence[PlannedModule],
        schemes: Mapping[int, SchemeCost],
        beside: Sequence[Cost],
        learning: Sequence[Sequence[Cost]],
    ) -> list[PartMemory]:
        by_name = {one.name: one for one in planned}
        found = []
        for part, cost, learned in zip(parts, beside, learning, strict=True):
            own = [by_name[name] for name in part.modules if name in by_name]
            packed = sum(output.stored_bytes.get(output.places.get(one.name, ""), 0) for one in own)
            sizes = [(schemes[id(one.scheme)], matrix_elements(one.module)) for one in own]
            rounding = [one.rounding.of(size) for one, size in sizes]
            packing = [one.packing.of(size) for one, size in sizes]
            changing = cost.held_bytes + cost.peak_bytes
            found.append(
                PartMemory(part, packed, max([changing, *rounding]), max([0, *packing]), learned)
            )
        return found

    def _context(self, parts: Sequence[Part]) -> PassContext:
        request, tokens, widths = self._request, self._request.tokens, self._widths
        room, stops = None, {}
        if request.is_streamed:
            self._reads_ahead = False
            with self._recording("max_memory"):
                largest = max((part.source for part in parts[:-1]), default=0)
                used = self._base + parts[-1].loaded
                room, self._reads_ahead = request.room(used, largest)
        if request.args.sequential_targets:
            with self._recording("sequential_targets"):
                stops = find_blocks(self._subject.model, request.args.sequential_targets)
        longest = 0 if tokens is None else tokens.longest * request.args.batch_size
        on_device = request.device.type != "cpu"
        data = DataSize(expert_share=widths.expert_share, on_device=on_device)
        if tokens is not None:
            is_even = tokens.samples * tokens.longest == tokens.tokens >= CHUNK_TOKENS
            fills_chunks = is_even and 0 in (longest % CHUNK_TOKENS, CHUNK_TOKENS % longest)
            data = DataSize(
                tokens=tokens.tokens,
                real=tokens.real,
                samples=tokens.samples,
                batch=tokens.tokens // max(request.batches, 1),
                attention=widths.heads * tokens.longest,
                expert_share=widths.expert_share,
                buffered=0 if fills_chunks else CHUNK_TOKENS,
                on_device=on_device,
            )
        return PassContext(
            self._state,
            request.args,
            request.pipeline,
            request.is_streamed,
            parts,
            stops,
            widths,
            data,
            longest,
            room,
            ranks=None if request.layout.ranks == 1 else 1,
        )

    def _run_memory(self, sizes: Sizes, output: Output, scratch: int) -> RunMemory:
        subject, request, tokens = self._subject, self._request, self._request.tokens
        longest = 0 if tokens is None else tokens.longest * request.args.batch_size
        limits = [one for one in (self._device.free, request.device_limit) if one]
        return RunMemory(
            base=self._base,
            is_streamed=request.is_streamed,
            present=subject.source_bytes if subject.is_in_memory else 0,
            on_device=request.device.type != "cpu",
            output=sizes.weights,
            shard=max((file.size for file in output.layout.files), default=0),
            others=sizes.others,
            itemsize=subject.model.dtype.itemsize,
            run_tokens=0 if tokens is None else max(longest, min(RUN_TOKENS, tokens.tokens)),
            scratch=scratch,
            reads_ahead=self._reads_ahead,
            tokens=0 if tokens is None else tokens.tokens,
            hidden=self._widths.hidden,
            limit=min(limits, default=None),
        )


def _bytes_by_module(
    planned: Sequence[PlannedModule], output: Output
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of planned modules in memory, and as stored, by name."""
    memory = {one.name: sum(each.nbytes for each in one.tensors.values()) for one in planned}
    places = {one.name: output.places.get(one.name, "") for one in planned}
    return memory, {name: output.stored_bytes.get(place, 0) for name, place in places.items()}


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
