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
from llmcompressor.budget.search import allowance_of, choose, tell_choice
from llmcompressor.budget.sensitivity import measure_losses, weight_errors
from llmcompressor.checkpoint.block_stream import ResidentBlocks, StreamedBlocks
from llmcompressor.checkpoint.journal import PROCESSOR, resumable_fingerprint
from llmcompressor.core.modifier import Modifier
from llmcompressor.entrypoints.arguments import Job
from llmcompressor.entrypoints.verify import check_servable, is_meant_unservable
from llmcompressor.logger import logger
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.recipe import Recipe
from llmcompressor.runtime.collectives import Ranks

BUDGET = "budget"
"""The part of a run's identity that says what was chosen, and for what."""
_OF_THE_COMPUTER = frozenset({PROCESSOR, "versions", "device"})


@dataclass(frozen=True)
class SettledBudget:
    """A budget for which the schemes have been found.

    Attributes:
        key: of all that the choice depends on.
        places: the place of the candidate of each set.
    """

    key: str
    places: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """What a journal keeps."""
        return {"key": self.key, "places": list(self.places)}


def writing_of(job: Job, blocks: StreamedBlocks | ResidentBlocks) -> Writing:
    """How a run writes, as far as that decides the bytes of its output."""
    is_meant = not job.run_args.verify or is_meant_unservable(job.recipe.modifiers)
    folder = blocks.source_folder
    return Writing(
        blocks.headers,
        None if folder is None else Path(folder),
        blocks.as_written,
        job.model_args.save_compressed,
        partial(check_servable, is_meant=is_meant, is_verified=job.run_args.verify),
    )


def settle_budget(
    job: Job,
    blocks: StreamedBlocks | ResidentBlocks,
    batches: Sequence[Mapping[str, Any]] | None,
    identity: Callable[[], Mapping[str, Any]],
    room: Callable[[], int | None],
    *,
    ranks: Ranks | None = None,
    device_memory: int | None = None,
) -> SettledBudget | None:
    """Find the schemes for the budget of a run's recipe, and put them into the recipe.

    Args:
        job: the run; its recipe has plain ``config_groups`` afterwards.
        blocks: the model, loaded as far as it stays in memory.
        batches: calibration batches; ``None``: errors of weights count.
        identity: of the run, with the budget in its recipe. An interrupted run with the same
            identity keeps the schemes that it had found.
        room: bytes that activations may take in main memory; ``None`` for half of what is free.
        ranks: the ranks of the run; all get the choice of the first.
        device_memory: limit for bytes on an accelerator.

    Returns:
        The choice; ``None`` without a budget.

    Raises:
        RecipeError: the budget cannot be kept, or no server takes the candidates together.
    """
    modifier = budgeted(job.recipe.modifiers)
    if modifier is None:
        return None
    blocks.update(blocks.model)
    finder = OptionFinder(blocks.model, job.recipe.modifiers, modifier, writing_of(job, blocks))
    options = finder()
    allowance = allowance_of(finder, options)
    allowance.limit()  # refused before the work
    key = _key(identity())
    places = _recorded(job, key, options)
    if places is None:
        if batches is None:
            losses = weight_errors(blocks.model, options, blocks)
        else:
            losses = measure_losses(
                blocks.model,
                options,
                batches,
                source=blocks,
                budget=job.dataset_args.activation_budget or room(),
                device_memory=device_memory,
                use_loss_mask=job.dataset_args.use_loss_mask,
            )
        point = choose(finder, allowance, losses)
        tell_choice(options, point)
        places = point.places
    if ranks is not None:
        places = tuple(ranks.exchange(places, what="choice of the budget")[0])
    job.recipe = with_choice(job.recipe, modifier, options, places)
    return SettledBudget(key, places)


def _key(identity: Mapping[str, Any]) -> str:
    """Of what decides the choice: a processor that rounds differently is to keep it."""
    own = {name: one for name, one in identity.items() if name not in _OF_THE_COMPUTER}
    return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


def _recorded(job: Job, key: str, options: BudgetOptions) -> tuple[int, ...] | None:
    """What an interrupted run has chosen, if this one continues it."""
    if job.output_dir is None or job.run_args.resume == "never":
        return None
    found = (resumable_fingerprint(job.output_dir, has_progress=False) or {}).get(BUDGET)
    if found is None or found["key"] != key or len(found["places"]) != len(options.sets):
        return None
    logger.info("The schemes of the budget are those that the interrupted run has found.")
    return tuple(found["places"])


def with_choice(
    recipe: Recipe, modifier: QuantizationMixin, options: BudgetOptions, places: Sequence[int]
) -> Recipe:
    """The recipe with the chosen schemes in the place of a budget."""
    chosen = modifier.with_choice(options.targets(places))

    def put(one: Modifier) -> Modifier:
        return chosen if one is modifier else one

    stages = [replace(each, modifiers=tuple(map(put, each.modifiers))) for each in recipe.stages]
    return Recipe(stages, args=recipe.args)
