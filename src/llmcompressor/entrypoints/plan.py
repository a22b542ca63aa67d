# SPDX-License-Identifier: Apache-2.0
"""``plan``: predict the matches, output, memory and time of a run before a weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from llmcompressor.args.parsing import told_by_name
from llmcompressor.budget.options import (
    BudgetOptions,
    OptionFinder,
    Writing,
    budgeted,
    check_size_limit,
    size_limit_of,
)
from llmcompressor.budget.search import CurvePoint, allowance_of, choose, curve_of
from llmcompressor.budget.sensitivity import kept_losses, measure_losses
from llmcompressor.checkpoint.block_reader import BlockWeights
from llmcompressor.checkpoint.kept_statistics import KeptStatistics
from llmcompressor.checkpoint.moe_names import dense_experts_fused
from llmcompressor.core.modifier import Modifier
from llmcompressor.entrypoints.arguments import Job, parse_device
from llmcompressor.entrypoints.budget import with_choice
from llmcompressor.entrypoints.gates import check_size
from llmcompressor.entrypoints.run import (
    SHARE_FOR_WEIGHTS,
    MemoryLimits,
    build_streamable,
    streamed_blocks,
    whole_model_reason,
)
from llmcompressor.entrypoints.verify import SERVING, check_servable, is_meant_unservable
from llmcompressor.errors import ArgumentError, InputError, RecipeError, TargetError
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.numerics.products import float32_by_default
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.planning.make import RECIPE, Request, make_plan, problem_of
from llmcompressor.planning.ranks import Layout
from llmcompressor.planning.result import BudgetPoint, Plan, Problem, Rates, Tokens
from llmcompressor.planning.subject import PlannedModel, open_planned_model
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.recipe import Recipe
from llmcompressor.runtime.memory import free_device_memory
from llmcompressor.runtime.registry import gc_relaxed
from llmcompressor.schemes.budget import KL
from llmcompressor.schemes.parse import parse_names
from llmcompressor.verification import Deployment
from llmcompressor.verification.facts import DEFAULT_TP

if TYPE_CHECKING:
    from llmcompressor.args.keywords import DataInput, ModelInput, OneshotKeywords
    from llmcompressor.recipe import RecipeInput

_ASSUMED_SAMPLES = 512
_ASSUMED_LENGTH = 2048


@told_by_name
def plan(
    model: ModelInput,
    recipe: RecipeInput = None,
    dataset: DataInput = None,
    output_dir: str | Path | None = None,
    *,
    serve: str | None = None,
    tp: int | tuple[int, ...] | None = None,
    gpu: str | None = None,
    measure: bool | Rates = True,
    ranks: int = 1,
    nodes: int = 1,
    link_speed: float | None = None,
    node_link_speed: float | None = None,
    **arguments: Unpack[OneshotKeywords],
) -> Plan:
    """Predict what ``oneshot`` would do, need and write with the same arguments.

    Only configurations and the headers of weight files are read, so that it takes seconds for a
    model of any size. With a budget and data, the run's search for its schemes is made as well,
    which reads the weights twice. Nothing is written except a small file to measure the speed of
    the disk.

    Args:
        model: as for ``oneshot``; the weight files of a folder may end after their headers.
        recipe: as for ``oneshot``.
        dataset: as for ``oneshot``. It is tokenized, to count its tokens.
        output_dir: as for ``oneshot``.
        serve: the server whose rules are checked, as for ``verify``; all by default.
        tp: the size of tensor parallelism to serve with, or several.
        gpu: the device to serve on, such as ``"sm90"`` or ``"h100"``.
        measure: measure this machine for about a second, to estimate the time, and the losses of
            a budget's candidates; or the :class:`.Rates` of another machine.
        ranks: the number of processes to plan for, each with a device of its own.
        nodes: the number of machines that they are on, as many on each.
        link_speed: gigabytes (10⁹) per second of a rank to others of its node, each way; by default
            50 with CUDA and 0.5 without.
        node_link_speed: the same into and out of a node; by default 12.5 with CUDA and 1.25
            without.
        **arguments: as for ``oneshot``.

    Returns:
        The plan. Errors of the run about the recipe, the data and the output are in its
        ``problems``; ``ok`` is True if there are none and the output could be served.

    Raises:
        ArgumentError: an argument is unknown or invalid.
        CheckpointError: the model cannot be read, or is quantized already.

    Example::

        found = plan("./my-model", "recipe.yaml", "calibration.jsonl")
        print(found.ok, found.sizes.weights, found.peak_host)
    """
    show_runs_quietly()
    layout = Layout(ranks, nodes, link_speed, node_link_speed)
    given: dict[str, Any] = {
        "model": model,
        "recipe": recipe,
        "dataset": dataset,
        **arguments,
    }
    deployment = None
    if not (serve is None and tp is None and gpu is None):
        sizes = DEFAULT_TP if tp is None else (tp,) if isinstance(tp, int) else tuple(tp)
        deployment = Deployment(serve, sizes, gpu)
    call = {"output_dir": output_dir, **given}
    return plan_from_arguments(call, deployment, measure=measure, layout=layout)


@float32_by_default()
def plan_from_arguments(
    arguments: Mapping[str, Any],
    deployment: Deployment | None = None,
    *,
    measure: bool | Rates = True,
    layout: Layout | None = None,
) -> Plan:
    """Return the plan of a call of ``oneshot`` with these arguments, as :func:`plan`."""
    job = _DraftJob(**arguments)
    with gc_relaxed():
        subject = _subject(job)
    limit = None
    with suppress(RecipeError):  # several budgets: told by the plan of them
        limit = size_limit_of(job.recipe.modifiers)
    asked = job.recipe.modifiers
    curve = _plan_budget(job, subject, measure=measure is not False)
    tokens, batches, batch_samples = _count_data(job, subject.model)
    device = _device(job, subject)
    limits = MemoryLimits(job.run_args.max_memory)
    request = Request(
        [  # fresh copies, because each can be used only once
            type(one)(**{name: getattr(one, name) for name in one.model_fields_set})
            for one in job.recipe.modifiers
        ],
        job.recipe.yaml() if job.recipe.modifiers else "",
        job.pipeline(),
        job.dataset_args,
        tokens,
        batches,
        batch_samples,
        device,
        _is_streamed(job, subject),
        limits.room,
        job.model_args.save_compressed,
        job.output_dir,
        deployment,
        measure,
        job.problems,
        limits.of(device),
        limits.host,
        job.keeps_ties,
        layout or Layout(),
        asked,
    )
    with gc_relaxed():
        found = make_plan(subject, request)
    problems = list(found.problems)
    size = 0 if found.sizes is None else found.sizes.weights
    try:
        check_size(job.gates, size)
    except ArgumentError as error:
        problems.append(problem_of("gates", error))
    try:
        check_size_limit(limit if curve else None, size)
    except RecipeError as error:
        problems.append(problem_of(RECIPE, error))
    if job.run_args.save_statistics is not None:
        job.notes.append("Statistics are kept in one more forward, which is not counted here.")
    notes = [*job.notes, *found.notes]
    return replace(found, notes=notes, problems=problems, budget=curve)


def _subject(job: _DraftJob) -> PlannedModel:
    """Open the model, with experts unfused if the recipe targets them."""
    with job.recording_problems(RECIPE, TargetError):
        return open_planned_model(job.model_args, job.recipe.modifiers)
    return open_planned_model(job.model_args)


# --------------------
# The budget of a recipe: what it could choose, and what it will choose.


def _plan_budget(job: _DraftJob, subject: PlannedModel, *, measure: bool) -> list[BudgetPoint]:
    """Put the schemes of the recipe's budget into the recipe, and return the points of its curve.

    They are those of the run where data is given; otherwise any that use the budget up.
    """
    with job.recording_problems(RECIPE):
        modifier = budgeted(job.recipe.modifiers)
        if modifier is None:
            return []
        streamed = _is_streamed(job, subject)
        structure = nullcontext if streamed else partial(dense_experts_fused, subject.model)
        is_meant = not job.run_args.verify or is_meant_unservable(job.recipe.modifiers)
        writing = Writing(
            subject.headers,
            subject.directory,
            structure,
            job.model_args.save_compressed,
            partial(check_servable, is_meant=is_meant, servers=SERVING),
        )
        finder = OptionFinder(subject.model, job.recipe.modifiers, modifier, writing)
        options = finder()
        allowance = allowance_of(finder, options)
        allowance.limit()
        losses = _budget_losses(job, subject, options) if measure else None
        chosen = choose(finder, allowance, losses)
        job.notes.extend(_told_of(options, chosen))
        job.recipe = with_choice(job.recipe, modifier, options, chosen.places)
        points = {one.size: one for one in (*curve_of(finder, allowance, losses), chosen)}
        return [
            BudgetPoint(one.bits, one.size, one.loss, one.counts, is_chosen=one is chosen)
            for _, one in sorted(points.items())
        ]
    job.recipe = _with_first_candidates(job.recipe)
    return []


def _told_of(options: BudgetOptions, chosen: CurvePoint) -> Iterator[str]:
    """Yield what is not known yet of the choice for a budget."""
    budget = options.budget
    if budget.kind == KL and chosen.loss is not None:
        expected = (
            f"A KL divergence of {budget.limit:g} is expected of {chosen.size:,} bytes of weights."
            if chosen.loss <= budget.limit
            else f"No choice is expected to keep a KL divergence of {budget.limit:g}: that of "
            f"{chosen.size:,} bytes is expected to have {chosen.loss:.4g}."
        )
        yield (
            f"{expected} The run makes and measures it, and then others, in {budget.rounds} rounds "
            "at most; the time is that of one."
        )
    elif budget.kind == KL:
        yield (
            f"Which bytes keep a KL divergence of {budget.limit:g} is not known without data and "
            "weights; the plan is that of the largest candidates."
        )
    elif chosen.loss is None:
        yield (
            "The schemes of the budget are found when the run begins. Which modules get them is "
            "not known before; the plan is that of any choice that uses the budget up."
        )


def _with_first_candidates(recipe: Recipe) -> Recipe:
    """The recipe with a scheme in the place of a budget that was refused, so that it is planned."""

    def plain(one: Modifier) -> Modifier:
        if not isinstance(one, QuantizationMixin) or one.budget is None:
            return one
        first = next(iter(one.resolve_candidates()))
        return one.with_choice({first: parse_names(one.targets, "targets")})

    stages = [replace(each, modifiers=tuple(map(plain, each.modifiers))) for each in recipe.stages]
    return Recipe(stages, args=recipe.args)


def _budget_losses(
    job: _DraftJob, subject: PlannedModel, options: BudgetOptions
) -> list[list[float]] | None:
    """The losses of a budget's candidates; ``None`` without data, or without weights."""
    data, kept = job.dataset_args.dataset, job.statistics
    blueprint, is_lasting = subject.blueprint, not isinstance(data, Iterator)
    has_data = kept is not None or (job.has_data and is_lasting)
    if not has_data or blueprint is None or subject.is_hollow:
        return None
    again = build_streamable(job, blueprint.source)  # the plan's own stays without weights
    if again is None:
        return None
    with streamed_blocks(job, again) as blocks:
        blocks.load(check=False, tied=job.model_args.tie_word_embeddings)
        blocks.update(blocks.model)
        if kept is not None:
            return kept_losses(blocks.model, options, blocks, kept)
        batches = list(job.load_data(blocks.model, job.load_processor(), job.open_data()))
        return measure_losses(
            blocks.model,
            options,
            batches,
            source=blocks,
            budget=job.dataset_args.activation_budget,
            use_loss_mask=job.dataset_args.use_loss_mask,
        )


class _DraftJob(Job):
    """The checks of a run, with failures recorded as problems instead of raised."""

    def __init__(self, **arguments: Any) -> None:
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        super().__init__(**arguments)

    def _check_gates(self) -> None:
        """Leave to the run what needs an output."""

    def _check_kl_budget(self) -> None:
        """Leave to the run what needs one."""

    @contextmanager
    def recording_problems(self, where: str, kind: type[InputError] = InputError) -> Iterator[None]:
        """Record an error in the body as a problem."""
        try:
            yield
        except kind as error:
            self.problems.append(problem_of(where, error))

    def _read_recipe(self) -> Recipe:
        with self.recording_problems(RECIPE):
            return super()._read_recipe()
        return Recipe()

    def _check_output(self, output_dir: str | Path | None) -> Path | None:
        with self.recording_problems("output_dir"):
            return super()._check_output(output_dir)
        return None

    def _open_statistics(self) -> KeptStatistics | None:
        if any(one.where == RECIPE for one in self.problems):
            return None  # nothing is known of what would use them
        with self.recording_problems("statistics"):
            return super()._open_statistics()
        return None

    def _check_data_needed(self) -> None:
        with self.recording_problems("dataset"):
            super()._check_data_needed()

    def _check_pipeline(self) -> None:
        with self.recording_problems("pipeline"):
            super()._check_pipeline()


def _count_data(job: _DraftJob, model: Any) -> tuple[Tokens | None, int, list[Mapping[str, Any]]]:
    """Return the number of tokens and of batches, and the first batch with each set of inputs."""
    args = job.dataset_args
    if not job.needing_data or job.statistics is not None:
        return None, 0, []
    why = "the data cannot be used"
    if args.dataset is None and args.dataset_path is None:
        why = "no data was given"
    elif isinstance(args.dataset, Iterator):
        why = "the data can be read only once"
    else:
        with job.recording_problems("dataset"), _collect_data_warnings(job.notes):
            return _load_and_count(job, model)
    samples = args.num_calibration_samples or _ASSUMED_SAMPLES
    limit = getattr(model.config, "max_position_embeddings", None) or _ASSUMED_LENGTH
    length = min(args.max_seq_length or _ASSUMED_LENGTH, limit)
    tokens = samples * length
    how = f"assumed: {why}"
    return Tokens(samples, tokens, tokens, length, how, is_exact=False), samples, []


def _load_and_count(job: _DraftJob, model: Any) -> tuple[Tokens, int, list[Mapping[str, Any]]]:
    source = job.open_data()
    loaded = list(job.load_data(model, job.load_processor(), source))
    with job.recording_problems("dataset"):
        job.check_batches(loaded)
    kinds = {frozenset(batch): batch for batch in reversed(loaded)}
    batches = CalibrationBatches(model, loaded, use_loss_mask=job.dataset_args.use_loss_mask)
    samples = sum(sum(batches.sizes(index)) for index in range(len(batches)))
    ids = [batch["input_ids"] for batch in batches if "input_ids" in batch]
    longest = max((one.shape[-1] for one in ids), default=0)
    tokens = Tokens(samples, batches.tokens, batches.real_tokens, longest, "counted", is_exact=True)
    return tokens, len(batches), list(reversed(kinds.values()))


@contextmanager
def _collect_data_warnings(notes: list[str]) -> Iterator[None]:
    """Collect warnings of data preparation, which a run would log."""
    sink = logger.add(
        lambda message: notes.append(message.record["message"]),
        level="WARNING",
        filter="llmcompressor.datasets",
    )
    try:
        yield
    finally:
        logger.remove(sink)


def _is_streamed(job: Job, subject: PlannedModel) -> bool:
    """Return True if blocks would be streamed one by one, given an output folder."""
    is_place = isinstance(job.model_args.model, str | os.PathLike)
    return is_place and not whole_model_reason(job) and not subject.whole


def _device(job: Job, subject: PlannedModel) -> torch.device:
    """Return the device on which the model would compute."""
    asked = job.model_args.device
    if asked is None and not torch.cuda.is_available():
        return torch.device("cpu")
    if subject.blueprint is not None and _is_streamed(job, subject):
        weights = BlockWeights(subject.blueprint, list(find_blocks(subject.model).values()))
        try:
            return MemoryLimits(job.run_args.max_memory).choose_device(weights, asked)
        finally:
            weights.close()
    if asked is not None:
        return parse_device(asked)
    free = free_device_memory(torch.cuda.current_device())
    return torch.device("cuda" if subject.source_bytes <= free * SHARE_FOR_WEIGHTS else "cpu")
