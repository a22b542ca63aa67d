# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``oneshot``, read and checked before any work, and the steps of every run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    parse_arguments,
)
from llmcompressor.checkpoint.processor import load_processor
from llmcompressor.checkpoint.source import local_directory
from llmcompressor.checkpoint.staging import check_output_dir
from llmcompressor.checkpoint.workspace import is_being_published
from llmcompressor.core.session import CompressionSession
from llmcompressor.datasets import table
from llmcompressor.datasets.calibration import load_calibration
from llmcompressor.datasets.source import Source, open_source
from llmcompressor.errors import ArgumentError, DatasetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines import infer_pipeline
from llmcompressor.recipe import Recipe

__all__ = ["Job", "Records", "compression_report", "report_of", "undone_on_error"]

Records = dict[str, dict[str, Any]]
"""Class of a modifier → module → what was recorded."""


class Job:
    """The arguments of a run, read and checked, and the steps that every way to run it takes."""

    def __init__(
        self,
        output_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        parsed = parse_arguments(
            arguments,
            ModelArguments,
            DatasetArguments,
            RecipeArguments,
            RunArguments,
            also_known=("output_dir", "log_dir"),
        )
        self.model_args: ModelArguments = parsed[0]
        self.dataset_args: DatasetArguments = parsed[1]
        self.recipe_args: RecipeArguments = parsed[2]
        self.run_args: RunArguments = parsed[3]
        self.log_dir = log_dir
        self.recipe = self._read_recipe()
        self.output_dir = self._check_output(output_dir)
        self._check_data_needed()
        self._check_pipeline()

    # ------------------------------------------------------------------ checks, before anything

    def _read_recipe(self) -> Recipe:
        recipe = Recipe.create_instance(
            self.recipe_args.recipe,
            target_stage=self.recipe_args.stage,
            recipe_args=self.recipe_args.recipe_args,
        )
        if not recipe.modifiers:
            logger.warning("The recipe is empty: the model will not be changed.")
        for stage in recipe.stages:
            if stage.run_type == "train":
                logger.warning(
                    f"The stage {stage.name!r} of the recipe has the run_type train, and nothing "
                    "is trained: its modifiers are applied once, like those of other stages. To "
                    "leave it out, name another stage with stage=... (--stage)."
                )
        return _unused(recipe)

    def _check_output(self, output_dir: str | Path | None) -> Path | None:
        if output_dir is None:
            return None
        target = Path(output_dir)
        if self.recipe_args.stage:
            target /= self.recipe_args.stage
        return check_output_dir(
            target,
            source=self.source,
            overwrite=self.model_args.overwrite,
            is_ours=is_being_published(target),
        )

    def _check_data_needed(self) -> None:
        data = self.dataset_args.dataset is not None or self.dataset_args.dataset_path is not None
        needing = self.needing_data
        if needing and not data:
            raise DatasetError(
                f"{type(needing[0]).__name__} needs calibration data, and no dataset was given.",
                "Pass dataset=..., or use a scheme that needs none, such as FP8_DYNAMIC.",
            )
        if data and self.recipe.modifiers and not needing:
            logger.info("The dataset is not read: no modifier of the recipe needs data.")

    def _check_pipeline(self) -> None:
        needing = self.needing_data
        if self.dataset_args.pipeline == "datafree" and needing:
            raise ArgumentError(
                f"The datafree pipeline reads no data, and {type(needing[0]).__name__} needs "
                "calibration.",
                "Leave pipeline out, or use a scheme that needs no data, such as FP8_DYNAMIC.",
            )

    @property
    def needing_data(self) -> list[Modifier]:
        """The modifiers that calibration data has to run for."""
        return [each for each in self.recipe.modifiers if each.requires_calibration_data]

    @property
    def place(self) -> str | None:
        """Where the model comes from: a folder, or its id on the hub."""
        model = self.model_args.model
        if isinstance(model, str | Path):
            return str(model)
        config = getattr(model, "config", None)
        return getattr(config, "name_or_path", "") or getattr(model, "name_or_path", "") or None

    @property
    def source(self) -> str | None:
        """The model's files on this machine: its folder, or what the hub's cache has of it."""
        if self.place is None:
            return None
        args = self.model_args
        found = local_directory(self.place, revision=args.model_revision, cache_dir=args.cache_dir)
        return None if found is None else str(found)

    def processor_to_write(self, processor: Any) -> Any:
        """The one that was asked for; ``None`` where the files of the model's folder are copied."""
        if self.model_args.processor is not None:
            return processor
        return None if self.place is not None and Path(self.place).is_dir() else processor

    def open_data(self) -> Source | None:
        """The raw data, before the model: a wrong path is not to cost the time of loading it.

        A registered data set is opened later, because its class may want the processor.
        """
        name = self.dataset_args.dataset
        if not self.needing_data or (isinstance(name, str) and table.find(name) is not None):
            return None
        return open_source(self.dataset_args)

    def load_processor(self, model: Module) -> Any:
        """The tokenizer or processor, if the data or the output needs one."""
        args = self.model_args
        place = self.place
        if args.processor is None and not self._wants_processor(place):
            return None
        found = load_processor(
            args.processor,
            place,
            trust_remote_code=args.trust_remote_code_model,
            revision=args.model_revision,
            cache_dir=args.cache_dir,
            token=args.use_auth_token,
        )
        if found.processor is None:
            logger.debug(f"No processor: {found.reason}")
        return found.processor

    def _wants_processor(self, place: Any) -> bool:
        """Whether data has to be prepared, or the source has no files that saving could copy."""
        if place is None:
            return False
        if self.output_dir is not None and not Path(place).is_dir():
            return True
        args = self.dataset_args
        if args.dataset is None and args.dataset_path is None:
            return False
        ready = isinstance(args.dataset, torch.utils.data.DataLoader) or (
            _is_tokenized(args.dataset)
            and args.preprocessing_func is None
            and args.data_collator == "truncation"
        )
        return not ready

    def load_data(self, model: Module, processor: Any, source: Source | None) -> Any:
        """The calibration batches, if a modifier needs them."""
        if not self.needing_data:
            return None
        config = getattr(model, "config", None)
        return load_calibration(
            self.dataset_args,
            processor=processor,
            model_input_names=tuple(inspect.signature(model.forward).parameters),
            vocab_size=_vocabulary(model),
            model_max_length=getattr(config, "max_position_embeddings", None),
            seed=self.dataset_args.seed,
            source=source,
        )

    def pipeline(self) -> str:
        """The pipeline to run: the user's, with a word where it cannot do what is needed."""
        asked = self.dataset_args.pipeline or "independent"
        inferred = infer_pipeline(self.recipe.modifiers)
        if asked != "independent" and inferred == "datafree":
            if asked != "datafree":
                logger.info(f"The recipe needs no data: {asked} would run the model for nothing.")
            return "datafree"
        return asked


def _unused(recipe: Recipe) -> Recipe:
    """The recipe with a new modifier in place of each that was part of a run before.

    A modifier serves once; whoever compresses several models by one recipe, or tries again after
    an error, need not know that.
    """
    if not any(modifier.initialized for modifier in recipe.modifiers):
        return recipe
    stages = [
        replace(stage, modifiers=tuple(map(_like, stage.modifiers))) for stage in recipe.stages
    ]
    return Recipe(stages, args=recipe.args)


def _like(modifier: Modifier) -> Modifier:
    fields = {name: getattr(modifier, name) for name in modifier.model_fields_set}
    return type(modifier)(**fields) if modifier.initialized else modifier


def report_of(modifiers: Sequence[Modifier]) -> Records:
    """What modifiers recorded of their work: class → module → record."""
    records: Records = {}
    for modifier in modifiers:
        found = modifier.report()
        if found:
            records.setdefault(type(modifier).__name__, {}).update(found)
    return records


def compression_report(records: Records, model: Module) -> dict[str, Any] | None:
    """What is kept beside the weights: records in the order of the model's modules."""
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    ordered = {
        modifier: dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
        for modifier, found in sorted(records.items())
    }
    return {"modifiers": ordered} if ordered else None


def _is_tokenized(data: Any) -> bool:
    """Whether rows have token ids already: nothing has to be prepared then."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):
        return "input_ids" in names
    first = data[0] if isinstance(data, list) and data else None
    return isinstance(first, Mapping) and "input_ids" in first


def _vocabulary(model: Any) -> int | None:
    """Rows of the input embedding: token ids must be below."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


@contextmanager
def undone_on_error(session: CompressionSession) -> Iterator[None]:
    """No hook and no half-done modifier stays behind when something fails."""
    try:
        yield
    except BaseException:
        session.reset()
        raise
