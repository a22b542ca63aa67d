# SPDX-License-Identifier: Apache-2.0
"""Pipelines without pauses: plain forwards (``basic``), and no forward at all (``datafree``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.pipelines.batches import calibration_batches, calibration_mode
from llmcompressor.pipelines.block_loading import BlockLoader
from llmcompressor.pipelines.moe_lists import broadcast_expert_inputs, count_listed_experts
from llmcompressor.pipelines.moe_routing import expert_calibration
from llmcompressor.pipelines.passes import run_passes, split_into_passes
from llmcompressor.pipelines.shared_work import SharedWork
from llmcompressor.pipelines.targets import (
    modifier_indices,
    report_low_coverage,
    trace_calibrated_modules,
)
from llmcompressor.pipelines.watchers import check_finite_outputs
from llmcompressor.runtime.progress import progress
from llmcompressor.session.functions import LifecycleCallbacks, active_session

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from llmcompressor.args import DatasetArguments


class BasicPipeline:
    """Runs every batch through the whole model, then compresses all modules at once.

    Without error propagation: all statistics are those of the original model. It needs one
    forward, and memory for the statistics of all modules together.
    """

    def __call__(
        self, model: Module, dataloader: DataLoader[Any], dataset_args: DatasetArguments
    ) -> None:
        """Run all modifiers of the active session over the calibration data."""
        session = active_session()
        state, modifiers = session.state, session.lifecycle.recipe.modifiers
        with (
            calibration_batches(
                model, dataloader, state, use_loss_mask=dataset_args.use_loss_mask
            ) as batches,
            expert_calibration(model, state, modifiers, batches, dataset_args) as experts,
            broadcast_expert_inputs(model, state, modifiers, batches, dataset_args) as lists,
        ):
            owners, blocks = modifier_indices(modifiers, state), find_blocks(model)
            state.calibration.call_order = trace_calibrated_modules(
                model, batches, owners, blocks, lists
            ).order
            LifecycleCallbacks.calibration_epoch_start()
            share = dataset_args.min_tokens_per_module
            with (
                report_low_coverage(model, owners, batches, state, share),
                count_listed_experts(model, state, modifiers, batches, dataset_args, lists),
                check_finite_outputs(model, state),
                progress(len(batches), "Calibrating") as advance,
            ):
                for index, batch in enumerate(batches):
                    state.batch_data, state.calibration.token_mask = batch, batches.mask(index)
                    state.calibration.batch_sizes = batches.sizes(index)
                    batches.run(batch)
                    advance(1)
            experts.report_starved()
            LifecycleCallbacks.sequential_epoch_end(tuple(model.modules()))
            LifecycleCallbacks.calibration_epoch_end()


class DataFreePipeline:
    """Fires the calibration events without a forward, for recipes that need no data."""

    def __call__(
        self,
        model: Module,
        dataloader: DataLoader[Any] | None,
        dataset_args: DatasetArguments | None = None,
    ) -> None:
        """Fire the calibration events for all modifiers of the active session."""
        session = active_session()
        state = session.state
        given = None if dataset_args is None else dataset_args.activation_budget
        state.run.activation_budget = None if given is None else int(given)
        state.run.use_loss_mask = dataset_args is not None and dataset_args.use_loss_mask
        modifiers = session.lifecycle.recipe.modifiers
        with calibration_mode(model):
            LifecycleCallbacks.calibration_epoch_start()
            work = SharedWork(state, modifiers)
            loader = BlockLoader(state, modifiers, work)
            work.assign([{name: [one] for name, one in _selected(model, modifiers, state)}])
            with progress(len(loader.unfinished), "Compressing") as advance:
                for name in loader.unfinished:
                    advance(0, note=name)
                    loader.enter(name)
                    inside = loader.modules_of(name)
                    LifecycleCallbacks.sequential_epoch_end(inside, own=work.own(inside))
                    loader.leave(name)
                    advance(1)
            loader.finish_unvisited()
            if not state.run.block_source.rest_is_finished:
                others = loader.others()
                LifecycleCallbacks.sequential_epoch_end(others, own=work.own(others))
            loader.finish_others()
            LifecycleCallbacks.calibration_epoch_end()


def _selected(
    model: Module, modifiers: Sequence[Modifier], state: State
) -> Iterator[tuple[str, Module]]:
    """Yield the modules that modifiers work on, with their names."""
    chosen = {module for one in modifiers for module in one.select(state).modules}
    yield from ((name, one) for name, one in model.named_modules() if one in chosen)


# --------------------
# Independent pipeline: modifiers run one after another, each with the pipeline it needs.


class IndependentPipeline:
    """Runs the modifiers of the recipe one by one, in recipe order.

    All modifiers are initialized before; during each pass the session's recipe holds only the
    modifiers of the pass (:func:`~llmcompressor.pipelines.passes.split_into_passes`).
    """

    def __call__(
        self,
        model: Module,
        dataloader: DataLoader[Any] | None,
        dataset_args: DatasetArguments,
    ) -> None:
        """Run all modifiers of the active session."""
        modifiers = active_session().lifecycle.recipe.modifiers
        passes = split_into_passes(modifiers, "independent")
        run_passes(passes, model, dataloader, dataset_args, pipeline="independent")
