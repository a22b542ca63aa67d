# SPDX-License-Identifier: Apache-2.0
"""The search of a run for the schemes of its bit budget, before the first pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmcompressor.budget.options import BudgetOptions, OptionFinder, Writing, budgeted
from llmcompressor.budget.search import (
    Allowance,
    SettledBudget,
    allowance_of,
    choose,
    curve_of,
    figures_of,
    tell_choice,
)
from llmcompressor.budget.sensitivity import kept_losses, measure_losses, weight_errors
from llmcompressor.checkpoint.block_stream import ResidentBlocks, StreamedBlocks
from llmcompressor.checkpoint.journal import PROCESSOR, resumable_run
from llmcompressor.checkpoint.kept_statistics import StatisticsWriter
from llmcompressor.core.modifier import Modifier
from llmcompressor.entrypoints.arguments import Job
from llmcompressor.entrypoints.gates import check_size
from llmcompressor.entrypoints.verify import SERVING, check_servable, is_meant_unservable
from llmcompressor.logger import logger
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.recipe import Recipe
from llmcompressor.runtime.collectives import Ranks

BUDGET = "budget"
"""The part of a run's identity that says what was chosen, and for what."""
_OF_THE_COMPUTER = frozenset({PROCESSOR, "versions", "device"})


@dataclass(frozen=True)
class OpenBudget:
    """The budget of a run's recipe on its model.

    Attributes:
        modifier: that has it.
        finder: predicts bytes; it holds on to the model.
        options: what there is to choose from.
        allowance: the budget in bytes.
        identity: all that the choice depends on: a processor that rounds differently is to keep it.
    """

    modifier: QuantizationMixin
    finder: OptionFinder
    options: BudgetOptions
    allowance: Allowance
    identity: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A hash of the identity."""
        text = json.dumps(self.identity, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def writing_of(job: Job, blocks: StreamedBlocks | ResidentBlocks) -> Writing:
    """How a run writes, as far as that decides the bytes of its output."""
    is_meant = not job.run_args.verify or is_meant_unservable(job.recipe.modifiers)
    folder = blocks.source_folder
    return Writing(
        blocks.headers,
        None if folder is None else Path(folder),
        blocks.as_written,
        job.model_args.save_compressed,
        partial(
            check_servable, is_meant=is_meant, is_verified=job.run_args.verify, servers=SERVING
        ),
    )


def settle_budget(
    job: Job,
    opened: OpenBudget,
    measure: Callable[[BudgetOptions], list[list[float]]],
    *,
    keeps: bool = False,
    ranks: Ranks | None = None,
) -> SettledBudget:
    """Find the schemes for the budget of a run's recipe, and put them into the recipe.

    Args:
        job: the run; its recipe has plain ``config_groups`` afterwards.
        opened: its budget. An interrupted run with the same identity keeps the schemes that it had
            found.
        measure: finds the loss of each set and candidate, as :func:`losses_of`.
        keeps: what is measured is kept for later runs, so that it is measured in any case.
        ranks: the ranks of the run; all get the choice of the first.
    """
    settled = recorded_budget(job, opened)
    if settled is not None and settled.figures is None:  # killed between the two: found again
        settled = None
    losses = measure(opened.options) if keeps or settled is None else None
    if settled is None:
        point = choose(opened.finder, opened.allowance, losses)
        tell_choice(opened.options, point)
        curve = curve_of(opened.finder, opened.allowance, losses)
        figures = figures_of(opened.options, curve, point)
        settled = SettledBudget(opened.key, point.places, figures)
    if ranks is not None:
        places = ranks.exchange(settled.places, what="choice of the budget")[0]
        settled = replace(settled, places=tuple(places))
    job.recipe = with_choice(job.recipe, opened.modifier, opened.options, settled.places)
    return settled


def open_budget(
    job: Job,
    blocks: StreamedBlocks | ResidentBlocks,
    identity: Callable[[], Mapping[str, Any]],
) -> OpenBudget | None:
    """Find what the budget of a run's recipe can choose from.

    Args:
        job: the run.
        blocks: the model, loaded as far as it stays in memory.
        identity: of the run, with the budget in its recipe.

    Returns:
        ``None`` without a budget, or if its schemes are found already.

    Raises:
        RecipeError: the budget cannot be kept, or no server takes the candidates together.
        ArgumentError: all that can be chosen is larger than the run's gate allows.
    """
    modifier = budgeted(job.recipe.modifiers)
    if modifier is None or job.settled is not None:
        return None
    blocks.update(blocks.model)
    finder = OptionFinder(blocks.model, job.recipe.modifiers, modifier, writing_of(job, blocks))
    options = finder()
    allowance = allowance_of(finder, options)
    allowance.limit()  # refused before the work
    check_size(job.gates, allowance.files[0], is_least=True)
    own = {name: one for name, one in identity().items() if name not in _OF_THE_COMPUTER}
    return OpenBudget(modifier, finder, options, allowance, own)


def losses_of(
    options: BudgetOptions,
    job: Job,
    blocks: StreamedBlocks | ResidentBlocks,
    batches: Sequence[Mapping[str, Any]] | None,
    room: Callable[[], int | None],
    *,
    device_memory: int | None = None,
    keep_in: StatisticsWriter | None = None,
    ranks: Ranks | None = None,
) -> list[list[float]]:
    """The loss of each set and candidate.

    Args:
        options: the sets and candidates.
        job: the run, which may have kept statistics in place of data.
        blocks: the model, loaded as far as it stays in memory.
        batches: calibration batches; ``None`` without any: errors of weights count.
        room: bytes that activations may take in main memory; ``None`` for half of what is free.
        device_memory: limit for bytes on an accelerator.
        keep_in: statistics that are being collected.
        ranks: the ranks of the run, which share the work.
    """
    if job.statistics is not None:
        return kept_losses(blocks.model, options, blocks, job.statistics, ranks=ranks)
    if batches is None:
        return weight_errors(blocks.model, options, blocks, ranks=ranks)
    return measure_losses(
        blocks.model,
        options,
        batches,
        source=blocks,
        budget=job.dataset_args.activation_budget or room(),
        device_memory=device_memory,
        use_loss_mask=job.dataset_args.use_loss_mask,
        propagates=job.dataset_args.propagate_error
        and job.dataset_args.pipeline != "basic"
        and all(one.traits.propagates_error for one in job.recipe.modifiers),
        keep_in=keep_in,
        ranks=ranks,
    )


def recorded_budget(job: Job, opened: OpenBudget) -> SettledBudget | None:
    """Return what an interrupted run has chosen, if this one continues it."""
    if job.output_dir is None or job.run_args.resume == "never":
        return None
    fingerprint, choices = resumable_run(job.output_dir)
    found = fingerprint.get(BUDGET)
    count = len(opened.options.sets)
    if found is None or found["key"] != opened.key or len(found["places"]) != count:
        return None
    logger.info("The schemes of the budget are those that the interrupted run has found.")
    return SettledBudget(opened.key, tuple(found["places"]), choices.get(f"0.{BUDGET}"))


def with_choice(
    recipe: Recipe, modifier: QuantizationMixin, options: BudgetOptions, places: Sequence[int]
) -> Recipe:
    """The recipe with the chosen schemes in the place of a budget."""
    chosen = modifier.with_choice(options.targets(places))

    def put(one: Modifier) -> Modifier:
        return chosen if one is modifier else one

    stages = [replace(each, modifiers=tuple(map(put, each.modifiers))) for each in recipe.stages]
    return Recipe(stages, args=recipe.args)
