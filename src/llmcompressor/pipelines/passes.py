# SPDX-License-Identifier: Apache-2.0
"""Split of a recipe into as few passes over the model as its modifiers allow.

A modifier that needs data wants the whole model as the modifiers before it leave it, so each one
begins a pass of its own. The exception is a modifier that can take over each module right after
another one: GPTQ quantizes what SparseGPT has just pruned. Modifiers without data join a
neighbour's pass: those before the modifier that needs data work when a block is entered, those
after it when the block is left. They do not join where they would round pruned weights that data
has already passed through, because the file would not hold the weights from which an interrupted
run resumes. A modifier that surveys all layers first gets an extra pass before its own. A modifier
that learns first begins a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from llmcompressor.core.contract import DataUse, Edits
from llmcompressor.core.modifier import Modifier
from llmcompressor.logger import logger
from llmcompressor.pipelines.batches import calibration_batches
from llmcompressor.pipelines.registry import PIPELINES, infer_pipeline
from llmcompressor.recipe import Recipe
from llmcompressor.session.functions import active_session

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments

KEPT = "kept"
"""The pipeline that works from kept statistics, which a run chooses by itself."""
BY_BLOCK = frozenset({"independent", "sequential", "layer_sequential", "datafree", KEPT})
"""The pipelines that need only one block at a time."""


def split_into_passes(modifiers: Sequence[Modifier], pipeline: str) -> list[list[Modifier]]:
    """Split the modifiers of a recipe into passes.

    A modifier that does not finish single blocks works on the whole model at once. It shares a pass
    only with others that collect data in the same pipeline.

    Args:
        modifiers: of the recipe, in order.
        pipeline: others than ``independent`` make more than one pass only where a modifier rewrites
            the inputs that later ones would collect. A modifier without data shares the pass of the
            next one, which must not see its rounding. ``kept`` makes one pass of all, and surveys.
    """
    if pipeline == KEPT:
        return _insert_surveys([list(modifiers)])
    passes: list[list[Modifier]] = [[]]
    for place, modifier in enumerate(modifiers):
        needs = modifier.traits.needs_data
        waits = needs or (pipeline != "independent" and _any_needs_data(modifiers[place:]))
        taken = _any_needs_data(passes[-1])
        alone = pipeline == "independent" and not _joins(modifier, passes[-1])
        # they rewrite the inputs that this one would collect
        rewritten = any(
            Edits.INPUTS in one.traits.edits or one.traits.data is DataUse.LEARN_FIRST
            for one in passes[-1]
        )
        apart = alone or rewritten
        # it works on what the calibration of those before it leaves
        is_open = any(Edits.OPEN in one.traits.edits for one in passes[-1])
        later = modifier.traits.begins_pass or (is_open and not needs)
        whole = passes[-1] and not all(one.traits.by_block for one in [modifier, *passes[-1]])
        if (
            _needs_survey_pass(modifier, passes[-1], pipeline)
            or (apart and (whole or (waits and taken)))
            or (taken and later)
        ):
            passes.append([])
        passes[-1].append(modifier)
    return _insert_surveys(passes)


def _any_needs_data(modifiers: Sequence[Modifier]) -> bool:
    return any(one.traits.needs_data for one in modifiers)


def _needs_survey_pass(modifier: Modifier, others: Sequence[Modifier], pipeline: str) -> bool:
    """Return True if a modifier needs a pass over the others' results before its own pass."""
    data = modifier.traits.data
    if data is DataUse.LEARN_FIRST:
        return bool(others)
    seen = (pipeline == "independent" or Edits.AT_ONCE in one.traits.edits for one in others)
    return data is DataUse.SURVEY_FIRST and any(seen)


def _insert_surveys(passes: Sequence[list[Modifier]]) -> list[list[Modifier]]:
    """Insert, before each pass, a pass of the modifiers that survey all data without changes."""
    surveys = [
        [modifier for modifier in one if modifier.traits.data is DataUse.SURVEY_FIRST]
        for one in passes
    ]
    pairs = zip(surveys, passes, strict=True)
    return [each for survey, one in pairs for each in (survey, one) if each or each is one]


def _joins(modifier: Modifier, others: Sequence[Modifier]) -> bool:
    """Return True if a modifier can take over each module from all ``others`` that need data."""
    needing = [one for one in others if one.traits.needs_data]
    return bool(needing) and all(
        modifier.traits.joins & {base.__name__ for base in type(one).__mro__} for one in needing
    )


def run_passes(
    passes: Sequence[Sequence[Modifier]],
    model: Module,
    batches: Any,
    dataset_args: DatasetArguments,
    *,
    pipeline: str,
) -> None:
    """Run all passes; while one runs, the session's recipe holds only its modifiers.

    Args:
        passes: result of :func:`split_into_passes`.
        model: the model.
        batches: calibration batches, or kept statistics.
        dataset_args: for the pipelines.
        pipeline: as for :func:`split_into_passes`.
    """
    session = active_session()
    lifecycle, blocks = session.lifecycle, session.state.run.block_source
    if pipeline != KEPT:
        _show_original(passes, model, batches, dataset_args)
    whole = lifecycle.recipe
    blocks.one_by_one = pipeline == "independent"
    try:
        for number, modifiers in enumerate(passes):
            blocks.stage = number
            if not modifiers:
                continue
            name = infer_pipeline(modifiers)
            if PIPELINES.is_added(pipeline) or (pipeline != "independent" and name != "datafree"):
                name = pipeline
            shown = ", ".join(type(modifier).__name__ for modifier in modifiers)
            logger.info(f"Pass {number + 1} of {len(passes)}, {name} pipeline: {shown}.")
            if len(passes) > 1:
                lifecycle.recipe = Recipe.from_modifiers(list(modifiers))
            PIPELINES.load(name)()(model, batches, dataset_args)
    finally:
        lifecycle.recipe = whole


def _show_original(
    passes: Sequence[Sequence[Modifier]],
    model: Module,
    batches: Any,
    dataset_args: DatasetArguments,
) -> None:
    """Show the model to the modifiers that have to see it as it is before the first pass."""
    state = active_session().state
    every = {id(one): one for modifiers in passes for one in modifiers}
    looking = [one for one in every.values() if one.traits.sees_original]
    if not looking:
        return
    use_mask = dataset_args.use_loss_mask
    with calibration_batches(model, batches, state, use_loss_mask=use_mask) as data:
        pairs = [(batch, data.mask(index)) for index, batch in enumerate(data)]
        for modifier in looking:
            modifier.see_original(state, pairs)
