# SPDX-License-Identifier: Apache-2.0
"""Pipelines without pauses: plain forwards (``basic``), and no forward at all (``datafree``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from llmcompressor.core.session_functions import LifecycleCallbacks, active_session
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.pipelines.batches import calibrating
from llmcompressor.pipelines.calibrated import owners_of, watch_calibrated
from llmcompressor.pipelines.coverage import scarcity_reported
from llmcompressor.pipelines.experts import experts_watched
from llmcompressor.pipelines.finite_blocks import blocks_watched
from llmcompressor.pipelines.listed_experts import listed_experts_counted, listed_experts_shown
from llmcompressor.pipelines.model_runs import calibration_mode
from llmcompressor.pipelines.residency import Residency
from llmcompressor.progress import progress

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from llmcompressor.args import DatasetArguments

__all__ = ["BasicPipeline", "DataFreePipeline"]


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
            calibrating(
                model, dataloader, state, use_loss_mask=dataset_args.use_loss_mask
            ) as batches,
            experts_watched(model, state, modifiers, batches, dataset_args) as experts,
            listed_experts_shown(model, state, modifiers, batches, dataset_args) as lists,
        ):
            owners, blocks = owners_of(modifiers, state), find_blocks(model)
            state.call_order = watch_calibrated(model, batches, owners, blocks, lists).order
            LifecycleCallbacks.calibration_epoch_start()
            share = dataset_args.min_tokens_per_module
            with (
                scarcity_reported(model, owners, batches, state, share),
                listed_experts_counted(model, state, modifiers, batches, dataset_args, lists),
                blocks_watched(model, state),
                progress(len(batches), "Calibrating") as advance,
            ):
                for index, batch in enumerate(batches):
                    state.batch_data, state.token_mask = batch, batches.mask(index)
                    state.batch_sizes = batches.sizes(index)
                    batches.run(batch)
                    advance(1)
            experts.all_ran()
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
        state.activation_budget = None if given is None else int(given)
        state.use_loss_mask = dataset_args is not None and dataset_args.use_loss_mask
        modifiers = session.lifecycle.recipe.modifiers
        with calibration_mode(model):
            LifecycleCallbacks.calibration_epoch_start()
            if state.keeper is None:
                LifecycleCallbacks.sequential_epoch_end(tuple(model.modules()))
            else:
                self._by_block(model, Residency(state.keeper, state, modifiers))
            LifecycleCallbacks.calibration_epoch_end()

    @staticmethod
    def _by_block(model: Module, residency: Residency) -> None:
        """Compress the model block by block; each block is loaded, compressed and freed."""
        names = residency.unfinished
        with progress(len(names), "Compressing") as advance:
            for name in names:
                advance(0, note=name)
                residency.enter(name)
                LifecycleCallbacks.sequential_epoch_end(residency.modules_of(name))
                residency.leave(name)
                advance(1)
        residency.visit_rest()
        if not residency.rest_is_finished:
            LifecycleCallbacks.sequential_epoch_end(residency.others(model.modules()))
