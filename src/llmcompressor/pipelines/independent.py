# SPDX-License-Identifier: Apache-2.0
"""One modifier after another, each with the pipeline that its declarations ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from llmcompressor.core.session_functions import active_session
from llmcompressor.logger import logger
from llmcompressor.pipelines.registry import PIPELINES, infer_pipeline
from llmcompressor.recipe import Recipe

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from llmcompressor.args import DatasetArguments

__all__ = ["IndependentPipeline"]


class IndependentPipeline:
    """Runs each modifier of the recipe alone, in recipe order.

    All modifiers were initialized before; while one runs, the session's recipe holds only it.
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
            for position, modifier in enumerate(whole.modifiers, start=1):
                name = infer_pipeline([modifier])
                logger.info(
                    f"{type(modifier).__name__} ({position} of {len(whole.modifiers)}): "
                    f"{name} pipeline."
                )
                lifecycle.recipe = Recipe.from_modifiers(modifier)
                for _ in range(2 if modifier.surveys_first else 1):
                    PIPELINES.load(name)()(model, dataloader, dataset_args)
        finally:
            lifecycle.recipe = whole
