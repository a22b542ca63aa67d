# SPDX-License-Identifier: Apache-2.0
"""What ``oneshot`` and ``train`` have in common: their arguments, read and checked before any work.

A modifier says where it can do its work (``Modifier.run_types``). One that cannot do it where its
recipe was given is refused here, and not found out about at the end of a run.
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
    """The arguments of a run, read and checked, and what every run does with them.

    Args:
        run_type: what this run is.
        output_dir: where its output shall appear; nothing is written without it.
        classes: dataclasses of arguments beyond those that every run takes.
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
        # the default lets a recipe untie them: only who says so wants them tied whatever it is
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
        """Whether what is in the output may be what this very call would make."""
        return False

    def check_free(self, target: Path, *, is_ours: bool = False) -> None:
        """Refuse an output directory that could not be written at the end.

        Args:
            target: the directory.
            is_ours: what is there is known to be this call's.

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
        """Whether any data was named or given."""
        return self.dataset_args.dataset is not None or self.dataset_args.dataset_path is not None

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

    def applied_recipe(self, recipe: Recipe) -> str | None:
        """The text of ``recipe.yaml``: the source's stages, then those of ``recipe``."""
        return applied_recipe(recipe, self._stages_before)

    @cached_property
    def _stages_before(self) -> tuple[Stage, ...]:
        return stages_before(self.source)

    # ------------------------------------------------------------------ the processor

    def processor_to_write(self, processor: Any) -> Any:
        """The one that was asked for; ``None`` where the files of the model's folder are copied."""
        if self.model_args.processor is not None:
            return processor
        return None if self.place is not None and Path(self.place).is_dir() else processor

    def load_processor(self) -> Any:
        """The tokenizer or processor, if the data or the output needs one."""
        wants = self.model_args.processor is not None or self._wants_processor(self.place)
        return self.processor if wants else None

    @cached_property
    def processor(self) -> Any:
        """The tokenizer or processor that was given, else the model's own, read when asked for.

        ``None`` if the model has none. What is set here is used in its place.
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
        """Have an error about a tokenizer that is missing say why none was loaded."""
        try:
            yield
        except NoTokenizerError as error:
            if not self._no_processor:
                raise
            problem = f"{error.problem.rstrip('.')}. {self._no_processor}"
            raise DatasetError(problem, error.remedy) from error

    def _wants_processor(self, place: Any) -> bool:
        """Whether data has to be prepared, or the source has no files that saving could copy."""
        if place is None:
            return False
        if self.output_dir is not None and not Path(place).is_dir():
            return True
        return self.has_data and not self._is_ready_data()

    def _is_ready_data(self) -> bool:
        """Whether the data needs no processor."""
        return False


def as_path(argument: str, given: Any) -> Path | None:
    """A path that a user gave, or ``None``.

    Raises:
        ArgumentError: it is something else.
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
    """Refuse a modifier that cannot do its work in a run of this type.

    Raises:
        RecipeError: names the modifier and what to do.
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
    """Whether a modifier has nothing to do in a run of this type, and nothing is lost without it.

    In a stage that is for the other type of run, or that has nothing else to do, it is a mistake.
    """
    if run_type not in type(modifier).idle_types or stage.run_type == _OTHER[run_type]:
        return False
    return any(run_type in type(one).run_types for one in stage.modifiers)


def _without_idle(recipe: Recipe, run_type: RunType) -> Recipe:
    """The recipe without what has nothing to do; each is told of."""
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
    """What modifiers recorded of their work: class → module → record.

    Args:
        modifiers: which.
        names: of the modules that are asked about; all if ``None``.
    """
    records: Records = {}
    for modifier in modifiers:
        found = modifier.report() if names is None else modifier.report_of(names)
        if found:
            records.setdefault(type(modifier).__name__, {}).update(found)
    return records


def compression_report(records: Records, model: Module) -> dict[str, Any] | None:
    """What is kept beside the weights: records in the order of the model's modules.

    Args:
        records: of modifiers; under :data:`EXPERTS` the tokens of experts.
        model: what was compressed.
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
    """No hook and no half-done modifier stays behind when something fails."""
    try:
        yield
    except BaseException:
        session.break_off()
        raise


def _uncompiled(args: ModelArguments) -> ModelArguments:
    """With what torch.compile has wrapped as the model: the wrapper names all parameters anew."""
    inner = getattr(args.model, "_orig_mod", None)
    return args if inner is None else replace(args, model=inner)
