# SPDX-License-Identifier: Apache-2.0
"""Registry of pipelines, and the pipeline that a recipe needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.nn import Module

from llmcompressor.args.dataset_arguments import PIPELINES as SPELLINGS
from llmcompressor.core.modifier import Modifier
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import LazyRegistry, normalize_name

_Class = TypeVar("_Class", bound=type)


class _Pipelines(LazyRegistry):
    """Registry of pipelines whose names are accepted by the argument ``pipeline``."""

    def add(self, name: str, value: Any) -> None:
        """Register a pipeline, and its name for ``oneshot(pipeline=...)``."""
        super().add(name, value)
        SPELLINGS.setdefault(normalize_name(name), normalize_name(name))


PIPELINES = _Pipelines(
    "pipeline",
    {
        "basic": "llmcompressor.pipelines.basic:BasicPipeline",
        "datafree": "llmcompressor.pipelines.basic:DataFreePipeline",
        "data_free": "llmcompressor.pipelines.basic:DataFreePipeline",
        "kept": "llmcompressor.pipelines.kept_statistics:KeptPipeline",
        "independent": "llmcompressor.pipelines.basic:IndependentPipeline",
        "sequential": "llmcompressor.pipelines.sequential:SequentialPipeline",
        "layer_sequential": "llmcompressor.pipelines.sequential:LayerSequentialPipeline",
    },
)


def infer_pipeline(modifiers: Sequence[Modifier]) -> str:
    """Return ``"sequential"`` if any modifier needs calibration data, else ``"datafree"``."""
    collects = any(modifier.traits.data.collects for modifier in modifiers)
    return "sequential" if collects else "datafree"


class CalibrationPipeline(ABC):
    """Base class for custom pipelines, with access to the registry."""

    @abstractmethod
    def __call__(self, model: Module, dataloader: Any, dataset_args: Any) -> None:
        """Run calibration data through a model for the modifiers of the active session."""

    @classmethod
    def register(cls, name: str) -> Callable[[_Class], _Class]:
        """Return a class decorator that registers a pipeline as ``name``."""

        def add(pipeline: _Class) -> _Class:
            PIPELINES.add(name, pipeline)
            return pipeline

        return add

    @classmethod
    def load_from_registry(cls, name: str) -> Callable[..., None]:
        """Create the pipeline that is registered as ``name``.

        Raises:
            InputError: there is none.
        """
        pipeline: Callable[..., None] = PIPELINES.load(name)()
        return pipeline

    @classmethod
    def from_modifiers(
        cls, modifiers: Sequence[Modifier], user: str | None = None
    ) -> Callable[..., None]:
        """Create the pipeline that the user names, or else the one that the modifiers need."""
        inferred = infer_pipeline(modifiers)
        named = normalize_name(user or inferred).replace("data_free", "datafree")
        if named not in (inferred, "independent"):
            logger.warning("The pipeline is {}; these modifiers would run in {}.", user, inferred)
        return cls.load_from_registry(user or inferred)
