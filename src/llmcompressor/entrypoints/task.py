# SPDX-License-Identifier: Apache-2.0
"""Common base of ``oneshot`` and ``train`` runs: arguments, parsed and checked before any work.

A modifier declares the types of run that it supports (``Modifier.run_types``). One that does not
support the present type is refused here, before the run.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

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
from llmcompressor.checkpoint.write_errors import check_file, check_named
from llmcompressor.core.session import CompressionSession
from llmcompressor.datasets.chat import NoTokenizerError
from llmcompressor.entrypoints.applied_recipe import applied_recipe, stages_before
from llmcompressor.entrypoints.devices import named_device
from llmcompressor.errors import ArgumentError, DatasetError, RecipeError
from llmcompressor.logger import logger
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.stages import RunType, Stage
from llmcompressor.recipe.unused import unused

__all__ = [
    "EXPERTS",
    "Records",
    "Task",
    "as_path",
    "check_run_types",
    "compression_report",
    "is_idle",
    "report_of",
    "undone_on_error",
]

Records = dict[str, dict[str, Any]]
"""Class of a modifier → module → what was recorded."""

EXPERTS = "experts"
"""Among :data:`Records`, in the place of a modifier: how many tokens were routed to each expert."""

_OTHER: Mapping[RunType, RunType] = {"oneshot": "train", "train": "oneshot"}
_WHY: Mapping[RunType, str] = {
    "oneshot": "acts over the steps of a training, and oneshot takes none",
    "train": "compresses a model once, and cannot work while it is trained",
}
_MISMATCH: Mapping[RunType, str] = {
    "oneshot": "nothing is trained: its modifiers are applied once, like those of other stages",
    "train": "it is trained with: its modifiers act like those of other stages",
}


class Task:
    """The arguments of a run, parsed and checked, and the steps that all runs share.

    Args:
        run_type: ``oneshot`` or ``train``.
        output_dir: the output folder; nothing is written without it.
        classes: dataclasses of further arguments.
        arguments: by name.
    """

    def __init__(
        self,
        run_type: RunType,
        output_dir: str | Path | None,
        classes: Sequence[type],
        arguments: Mapping[str, Any],
        also_known: Iterable[str] = (),
    ) -> None:
        self.run_type = run_type
        self._no_processor = ""
        parsed = parse_arguments(
            arguments,
            ModelArguments,
            DatasetArguments,
            RecipeArguments,
            RunArguments,
            *classes,
            also_known=("output_dir", *also_known),
        )
        self.model_args: ModelArguments = _uncompiled(parsed[0])
        self.dataset_args: DatasetArguments = parsed[1]
        self.recipe_args: RecipeArguments = parsed[2]
        self.run_args: RunArguments = parsed[3]
        self.further_args: tuple[Any, ...] = parsed[4:]
        # by default a recipe may untie them: only an explicit True keeps them tied
        self.keeps_ties = bool(arguments.get("tie_word_embeddings", False))
        if self.model_args.device is not None:
            named_device(self.model_args.device)
        self.recipe = self._read_recipe()
        self.output_dir = self._check_output(output_dir)

    # ------------------------------------------------------------------ checks, before anything

    def _read_recipe(self) -> Recipe:
        recipe = Recipe.create_instance(
            self.recipe_args.recipe,
            target_stage=self.recipe_args.stage,
            recipe_args=self.recipe_args.recipe_args,
        )
        for stage in recipe.stages:
            check_run_types(stage, self.run_type)
        recipe = _without_idle(recipe, self.run_type)
        for stage in recipe.stages:
            if stage.run_type == _OTHER[self.run_type]:
                logger.warning(
                    f"The stage {stage.name!r} of the recipe has the run_type {stage.run_type}, "
                    f"and {_MISMATCH[self.run_type]}. To leave it out, name another stage with "
                    "stage=... (--stage); run_stages (llmcompressor run) runs each in its own way."
                )
        for modifier in recipe.modifiers:
            kind = type(modifier).__name__
            for name, device in modifier.devices.items():
                named_device(device, f"{kind}: {name}")
            for name, file in modifier.writes.items():
                check_file(Path(file), f"{kind}: {name}")
        return unused(recipe)

    def _check_output(self, output_dir: str | Path | None) -> Path | None:
        target = as_path("output_dir", output_dir)
        if target is None:
            return None
        if self.recipe_args.stage:
            target /= self.recipe_args.stage
        self.check_free(target, is_ours=self._may_be_finished(target))
        return target.expanduser().resolve()

    def _may_be_finished(self, target: Path) -> bool:
        """Return True if the output may be that of the same call."""
        return False

    def check_free(self, target: Path, *, is_ours: bool = False) -> None:
        """Refuse an output directory that could not be written at the end.

        Args:
            target: the directory.
            is_ours: existing files are known to be this call's own.

        Raises:
            OutputError: it is a file, is in use, overlaps the input, or cannot be created.
        """
        check_output_dir(
            target,
            source=self.source,
            overwrite=self.model_args.overwrite,
            is_ours=is_ours or is_being_published(target),
        )

    @property
    def has_data(self) -> bool:
        """True if a data set was given by name, path or value."""
        return self.dataset_args.dataset is not None or self.dataset_args.dataset_path is not None

    @property
    def place(self) -> str | None:
        """Folder or hub id from which the model was loaded."""
        model = self.model_args.model
        if isinstance(model, str | Path):
            return str(model)
        config = getattr(model, "config", None)
        return getattr(config, "name_or_path", "") or getattr(model, "name_or_path", "") or None

    @property
    def source(self) -> str | None:
        """Local folder of the model's files, also in the hub's cache; ``None`` if there is none."""
        if self.place is None:
            return None
        args = self.model_args
        found = local_directory(self.place, revision=args.model_revision, cache_dir=args.cache_dir)
        return None if found is None else str(found)

    def applied_recipe(self, recipe: Recipe) -> str | None:
        """The text of ``recipe.yaml``: the source's stages, then those of ``recipe``."""
        return applied_recipe(recipe, self._stages_before)

    @cached_property
    def _stages_before(self) -> tuple[Stage, ...]:
        return stages_before(self.source)

    # ------------------------------------------------------------------ the processor

    def processor_to_write(self, processor: Any) -> Any:
        """Return the processor to save; ``None`` if the files of the model's folder are copied."""
        if self.model_args.processor is not None:
            return processor
        return None if self.place is not None and Path(self.place).is_dir() else processor

    def load_processor(self) -> Any:
        """Load the tokenizer or processor if the data or the output needs one, else ``None``."""
        wants = self.model_args.processor is not None or self._wants_processor(self.place)
        return self.processor if wants else None

    @cached_property
    def processor(self) -> Any:
        """The tokenizer or processor that was given, else the model's own, loaded lazily.

        ``None`` if the model has none. It can be set to another one.
        """
        args = self.model_args
        found = load_processor(
            args.processor,
            self.place,
            trust_remote_code=args.trust_remote_code_model,
            revision=args.model_revision,
            cache_dir=args.cache_dir,
            token=args.use_auth_token,
        )
        self._no_processor = found.reason
        return found.processor

    @contextmanager
    def told_why(self) -> Iterator[None]:
        """Add the reason why no tokenizer was loaded to errors about a missing one."""
        try:
            yield
        except NoTokenizerError as error:
            if not self._no_processor:
                raise
            problem = f"{error.problem.rstrip('.')}. {self._no_processor}"
            raise DatasetError(problem, error.remedy) from error

    def _wants_processor(self, place: Any) -> bool:
        """Return True if data needs the processor, or if it cannot be copied from the source."""
        if place is None:
            return False
        if self.output_dir is not None and not Path(place).is_dir():
            return True
        return self.has_data and not self._is_ready_data()

    def _is_ready_data(self) -> bool:
        """Return True if the data needs no processor."""
        return False


def as_path(argument: str, given: Any) -> Path | None:
    """Return a path argument as a Path, or ``None``.

    Raises:
        ArgumentError: it is not a path.
        OutputError: it is empty.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(
            f"The argument {argument!r} cannot be {given!r}.", "Give the path of a folder."
        )
    check_named(argument, given)
    return Path(given)


def check_run_types(stage: Stage, run_type: RunType) -> None:
    """Refuse modifiers that do not support this type of run.

    Raises:
        RecipeError: a modifier of the stage does not support it.
    """
    for modifier in stage.modifiers:
        if run_type not in type(modifier).run_types and not is_idle(modifier, stage, run_type):
            other = _OTHER[run_type]
            raise RecipeError(
                f"{type(modifier).__name__}, in the stage {stage.name!r} of the recipe, "
                f"{_WHY[run_type]}.",
                f"Give the recipe to {other} (llmcompressor {other}), or to run_stages "
                "(llmcompressor run) if it has stages of both kinds.",
            )


def is_idle(modifier: Modifier, stage: Stage, run_type: RunType) -> bool:
    """Return True if a modifier can be left out in a run of this type, where it does nothing.

    It cannot be left out of a stage for the other type of run, or of one without other modifiers
    for this type.
    """
    if run_type not in type(modifier).idle_types or stage.run_type == _OTHER[run_type]:
        return False
    return any(run_type in type(one).run_types for one in stage.modifiers)


def _without_idle(recipe: Recipe, run_type: RunType) -> Recipe:
    """Return the recipe without idle modifiers, with a warning for each."""
    stages = []
    for stage in recipe.stages:
        idle = [one for one in stage.modifiers if is_idle(one, stage, run_type)]
        for modifier in idle:
            logger.warning(
                f"{type(modifier).__name__}, in the stage {stage.name!r} of the recipe, "
                f"{_WHY[run_type]}: it is left out."
            )
        kept = tuple(one for one in stage.modifiers if not is_idle(one, stage, run_type))
        stages.append(replace(stage, modifiers=kept) if idle else stage)
    return Recipe(stages, args=recipe.args) if stages != list(recipe.stages) else recipe


def report_of(modifiers: Sequence[Modifier], names: Container[str] | None = None) -> Records:
    """Collect the reports of modifiers: class → module → record.

    Args:
        modifiers: the modifiers.
        names: of the modules to report; all if ``None``.
    """
    records: Records = {}
    for modifier in modifiers:
        found = modifier.report() if names is None else modifier.report_of(names)
        if found:
            records.setdefault(type(modifier).__name__, {}).update(found)
    return records


def compression_report(records: Records, model: Module) -> dict[str, Any] | None:
    """Build the report that is saved with the weights, ordered by the model's modules.

    Args:
        records: of modifiers; under :data:`EXPERTS` the tokens of experts.
        model: the compressed model.
    """
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    ordered = {
        modifier: dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
        for modifier, found in sorted(records.items())
    }
    experts = ordered.pop(EXPERTS, {})
    if not ordered and not experts:
        return None
    return {"modifiers": ordered, **({"experts": experts} if experts else {})}


@contextmanager
def undone_on_error(session: CompressionSession) -> Iterator[None]:
    """Remove hooks and unfinished modifiers from the session if the body fails."""
    try:
        yield
    except BaseException:
        session.break_off()
        raise


def _uncompiled(args: ModelArguments) -> ModelArguments:
    """Replace a model wrapped by torch.compile, which renames all parameters, by the original."""
    inner = getattr(args.model, "_orig_mod", None)
    return args if inner is None else replace(args, model=inner)
