# SPDX-License-Identifier: Apache-2.0
"""Independent pipeline: modifiers run one after another, each with the pipeline it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from llmcompressor.core.session_functions import active_session
from llmcompressor.logger import logger
from llmcompressor.pipelines.passes import joined, with_surveys
from llmcompressor.pipelines.registry import PIPELINES, infer_pipeline
from llmcompressor.recipe import Recipe

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from llmcompressor.args import DatasetArguments

__all__ = ["IndependentPipeline"]


class IndependentPipeline:
    """Runs the modifiers of the recipe one by one, in recipe order.

    A modifier that joins those before it runs together with them. All modifiers are initialized
    before; during each run the session's recipe holds only the modifiers that run.
    """

    def __call__(
        self,
        model: Module,
        dataloader: DataLoader[Any] | None,
        dataset_args: DatasetArguments,
    ) -> None:
        """Run all modifiers of the active session."""
        lifecycle = active_session().lifecycle
        whole = lifecycle.recipe
        try:
            done = 0
            for modifiers in joined(whole.modifiers):
                name = infer_pipeline(modifiers)
                for modifier in modifiers:
                    done += 1
                    logger.info(
                        f"{type(modifier).__name__} ({done} of {len(whole.modifiers)}): "
                        f"{name} pipeline."
                    )
                for some in with_surveys([modifiers]):
                    lifecycle.recipe = Recipe.from_modifiers(list(some))
                    PIPELINES.load(name)()(model, dataloader, dataset_args)
        finally:
            lifecycle.recipe = whole
