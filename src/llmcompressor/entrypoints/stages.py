# SPDX-License-Identifier: Apache-2.0
"""``run_stages``: run all stages of a recipe in order, each into a folder of its own.

::

    OUTPUT/
        stages.json      inputs of each stage: recipe, arguments, model and data
        stage_first/     output of the stage `first`, which the next one reads
        stage_second/

The output of a run gets its name when it is complete, so an existing folder is a finished stage. It
is skipped if ``stages.json`` has the same inputs for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    TrainingArguments,
    parse_arguments,
)
from llmcompressor.core.session_functions import free_session
from llmcompressor.entrypoints.job import Job
from llmcompressor.entrypoints.model_prints import note_change
from llmcompressor.entrypoints.oneshot import oneshot
from llmcompressor.entrypoints.stage_record import StageRecord, shown, shown_model
from llmcompressor.entrypoints.task import as_path, check_run_types, is_idle
from llmcompressor.entrypoints.teacher import check_teacher, load_possibly_compressed
from llmcompressor.entrypoints.training_run import run_training
from llmcompressor.entrypoints.training_task import NOT_OF_TRAINING, Training
from llmcompressor.errors import ArgumentError, InputError, RecipeError
from llmcompressor.logger import logger
from llmcompressor.metrics import LoggerManager
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.modifiers.rotation.base import RotationModifier
from llmcompressor.planning.matching import unmatched_targets
from llmcompressor.planning.subject import open_subject
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.recipe import Recipe, Stage

__all__ = ["run_stages"]

_ONESHOT = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)
_TRAIN = (*_ONESHOT, TrainingArguments)
_OF_THE_WHOLE = ("dry_run", "model", "recipe", "recipe_args", "resume_from_checkpoint", "stage")
_FOR_THE_FIRST = ("config_name", "model_revision")
_QUANTIZED, _ROTATED = "has quantized", "rotates at run time"
_MULTIPLIED_IN = {"R1", "R2"}
"""Rotations of which nothing is left in the forward."""
_OF_TRAINING = {"distill_teacher", "max_train_samples"}
"""What ``oneshot`` takes and training alone goes by."""
_NOT_RECORDED = (
    "loggers",
    "log_dir",
    "overwrite",
    "resume",
    "verify",
    "max_memory",
    "use_auth_token",
)


def run_stages(
    model: Any,
    recipe: Any,
    dataset: Any = None,
    output_dir: str | Path = "./output",
    **arguments: Any,
) -> Any:
    """Run all stages of a recipe in order, each as ``oneshot`` or as ``train``.

    A stage's ``run_type`` or its name selects the kind of run. Otherwise it is ``train`` if one of
    its modifiers works only there, and ``oneshot`` if not. Each stage writes
    ``output_dir/stage_NAME`` and reads the folder of the one before.

    Args:
        model: for the first stage: a folder, the id of a model on the hub, or a loaded model.
        recipe: in any form that ``Recipe`` reads.
        dataset: data for the stages that need any; ``splits={"calibration": …, "train": …}`` gives
            them different parts of it.
        output_dir: parent of the stages' folders.
        **arguments: those of ``oneshot`` and of ``train``; each stage gets those of its kind.

    Returns:
        The model of the last stage.

    Raises:
        InputError: an invalid argument, recipe, model or data set; raised before any work if
            possible, else by the stage.

    A repeated call with the same recipe, arguments, model and data skips finished stages and
    resumes an interrupted one.
    """
    if as_path("output_dir", output_dir) is None:
        raise ArgumentError(
            "The argument 'output_dir' cannot be None: each stage is written for the next one.",
            "Give the path of a folder.",
        )
    given = {"dataset": dataset, **arguments}
    for name in ("run_stages", "do_oneshot"):
        given.pop(name, None)
    whole = Recipe.create_instance(recipe, recipe_args=given.pop("recipe_args", None))
    if not whole.modifiers:
        raise RecipeError("The recipe has no stages to run.", "Give one with modifiers.")
    _check_whole(given)
    plan = [_Stage(stage, whole, given, Path(output_dir)) for stage in whole.stages]
    _check_order(plan)
    record = StageRecord(Path(output_dir), must_exist=given.get("resume") == "must")
    before: _Stage | None = None
    for stage in plan:
        stage.follow(before, model, [each.folder for each in plan])
        stage.record = record.settled(
            stage.name,
            stage.record,
            stage.folder,
            stage.model,
            goes_on=given.get("resume") != "never",
        )
        stage.is_finished = record.is_finished(
            stage.name, stage.record, stage.folder, overwrite=bool(given.get("overwrite"))
        )
        before = stage
    for place, stage in enumerate(plan):
        if not stage.is_finished:
            stage.check(model, plan[:place])
    _warn_of_targets(plan, model)
    return _run(plan, record, model)


class _Stage:
    """A stage of the recipe: its run type, arguments and record."""

    def __init__(self, stage: Stage, whole: Recipe, given: Mapping[str, Any], root: Path) -> None:
        self.name = stage.name
        self.kind = stage.run_type or _only_kind(stage)
        check_run_types(stage, self.kind)
        self.bars_others = _bars_others(stage)
        self.recipe = Recipe([stage], args=whole.args)
        self.folder = root / f"stage_{stage.name}"
        self.is_finished = False
        names = (_names(_ONESHOT) | {"log_dir"}) - _OF_TRAINING
        if self.kind == "train":
            names = (_names(_TRAIN) | {"loggers"}) - set(NOT_OF_TRAINING)
        self.arguments = {name: value for name, value in given.items() if name in names}
        if self.arguments.get("resume") == "must":
            self.arguments["resume"] = "auto"  # it concerns all stages, and is checked for all
        self.record: dict[str, Any] = {}

    def follow(self, before: _Stage | None, model: Any, written: Sequence[Path]) -> None:
        """Set the output of the previous stage as the model of this one.

        Args:
            before: the previous stage, ``None`` for the first one.
            model: the model of the first stage.
            written: the folders of all stages.
        """
        if before is not None:
            for name in _FOR_THE_FIRST:
                self.arguments.pop(name, None)
        self.model = model if before is None else str(before.folder)
        kept = {k: v for k, v in self.arguments.items() if k not in _NOT_RECORDED}
        self.record = {
            "run_type": self.kind,
            "recipe": self.recipe.yaml(),
            "model": shown_model(model, ()) if before is None else before.folder.name,
            "stages_before": None if before is None else before.digest,
            "arguments": {name: shown(name, kept[name], written) for name in sorted(kept)},
        }

    @property
    def digest(self) -> str:
        """Hash of the records of this stage and those before it."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.record, sort_keys=True).encode())

    def check(self, model: Any, before: Sequence[_Stage]) -> None:
        """Check the arguments, with the first stage's model in place of one not yet written.

        Raises:
            InputError: as the entrypoint would.
        """
        arguments = {**self.arguments, "model": model, "recipe": self.recipe}
        if self.kind == "train":
            self._check_teacher(Training(self.folder, **arguments), before)
        else:
            Job(self.folder, **arguments).open_data()

    def _check_teacher(self, task: Training, before: Sequence[_Stage]) -> None:
        """Refuse a training whose teacher is required but missing, or does not exist."""
        teacher: Any = task.model_args.distill_teacher
        if teacher is not None:
            written = [one.folder.resolve() for one in before]
            if not (isinstance(teacher, str) and Path(teacher).resolve() in written):
                check_teacher(teacher)
        elif any(isinstance(one, OutputDistillationModifier) for one in self.recipe.modifiers):
            raise ArgumentError(
                f"OutputDistillationModifier, in the stage {self.name!r} of the recipe, has no "
                "teacher to learn from.",
                "Give distill_teacher=... (--distill-teacher).",
            )

    @property
    def matching(self) -> list[Modifier]:
        """Modifiers of the stage whose targets are names or classes of modules."""
        found: Sequence[Modifier] = self.recipe.modifiers
        if self.kind == "train":  # pruning there is about names of parameters
            return [one for one in found if isinstance(one, QuantizationMixin)]
        return list(found)

    def run(self) -> Any:
        """Run the stage and return its model."""
        arguments = {**self.arguments, "model": self.model, "recipe": self.recipe}
        if self.kind == "train":
            return run_training(Training(self.folder, **arguments))
        return oneshot(output_dir=self.folder, **arguments)


def _run(plan: list[_Stage], record: StageRecord, model: Any) -> Any:
    result = None
    for place, stage in enumerate(plan, 1):
        what = f"Stage {place} of {len(plan)}, {stage.name} ({stage.kind})"
        if stage.is_finished:
            logger.info(f"{what}: finished before, skipped.")
            continue
        logger.info(f"{what}.")
        result = None  # free the model of the stage before
        with free_session() as session:
            session.reset()
        record.begin(stage.name, stage.record)
        try:
            result = stage.run()
        except InputError:
            record.take_back(stage.folder)
            raise
        finally:
            note_change(stage.model, stage.record["model"])
    if result is None:
        last = plan[-1]
        [args] = parse_arguments(
            {"model": model} | _only(last.arguments, ModelArguments), ModelArguments
        )
        result = load_possibly_compressed(str(last.folder), args).eval()
    return result


def _check_whole(given: Mapping[str, Any]) -> None:
    """Check arguments that do not apply to single stages, and names that no stage knows."""
    named = given.get("resume_from_checkpoint")
    if isinstance(named, str | os.PathLike) and str(named).lower() not in ("true", "false"):
        raise ArgumentError(
            "The argument 'resume_from_checkpoint' names a checkpoint, and run_stages continues "
            "by itself.",
            "Repeat the call that was broken off, or continue one stage with train.",
        )
    if given.get("stage") is not None:
        raise ArgumentError(
            "The argument 'stage' names one stage, and run_stages runs all.",
            "Leave it out, or run the stage with train or oneshot.",
        )
    if given.get("dry_run"):
        raise ArgumentError(
            "A dry run is not there for run_stages.", "Use plan for a stage that is a oneshot."
        )
    LoggerManager.of(given.get("loggers"))
    plain = {name: value for name, value in given.items() if name not in ("log_dir", "loggers")}
    parse_arguments(
        {"model": "the model", **plain}, *_TRAIN, also_known=("output_dir", "log_dir", "loggers")
    )


def _check_order(plan: list[_Stage]) -> None:
    """Refuse a stage after one that quantizes the model or rotates it online."""
    for place, stage in enumerate(plan):
        before = next((one for one in plan[:place] if one.bars_others), None)
        if before is None:
            continue
        does = "trains" if stage.kind == "train" else "works on"
        remedy = "Let the last stage alone quantize, or rotate at run time."
        if all(before.kind in type(one).run_types for one in stage.recipe.modifiers):
            remedy = "Put the modifiers of both into one stage, in this order."
        elif stage.kind == "train" and before.bars_others == _QUANTIZED:
            remedy = (
                "Put the stage that quantizes last, or train with fake quantization: the "
                "QuantizationModifier in the stage that trains."
            )
        raise RecipeError(
            f"The stage {stage.name!r} of the recipe {does} what the stage {before.name!r} "
            f"{before.bars_others}, and no run can begin with such a checkpoint.",
            remedy,
        )


def _warn_of_targets(plan: Sequence[_Stage], model: Any) -> None:
    """Warn early about targets of later stages that match nothing now.

    Only the stage itself can refuse them, as stages before it may change the modules.
    """
    first = _only(plan[0].arguments, ModelArguments)
    for stage in [one for one in plan if not one.is_finished][1:]:
        [args] = parse_arguments({"model": model} | first, ModelArguments)
        try:
            model_now = open_subject(args, stage.matching).model
        except InputError as error:  # the stage that loads the model reports it
            logger.debug(f"Targets of the stage {stage.name!r} are not looked for: {error}")
            continue
        for problem in unmatched_targets(model_now, stage.matching):
            logger.warning(
                f"The stage {stage.name!r} of the recipe cannot begin unless one before it changes "
                f"what its targets match: {problem}"
            )


def _bars_others(stage: Stage) -> str | None:
    """Return the change by a stage that no later stage can start from, or ``None``."""
    if any(isinstance(one, QuantizationMixin) for one in stage.modifiers):
        return _QUANTIZED
    return _ROTATED if any(map(_rotates_online, stage.modifiers)) else None


def _rotates_online(modifier: Modifier) -> bool:
    """Return True if a modifier has online rotations, which stay in the forward."""
    if not isinstance(modifier, RotationModifier):
        return False
    config: Any = getattr(modifier, "transform_config", None)
    if config is not None:
        return any(args.is_online() for one in config.config_groups.values() for args in one.apply)
    return not set(getattr(modifier, "rotations", ())) <= _MULTIPLIED_IN


def _only_kind(stage: Stage) -> Any:
    only_there = [one for one in stage.modifiers if "oneshot" not in type(one).run_types]
    if any("train" not in type(one).run_types for one in stage.modifiers):
        only_there = [one for one in only_there if not is_idle(one, stage, "oneshot")]
    return "train" if only_there else "oneshot"


def _names(classes: tuple[type[Any], ...]) -> set[str]:
    found = {field.name for cls in classes for field in dataclasses.fields(cls) if field.init}
    return found - set(_OF_THE_WHOLE) - {"output_dir"}


def _only(arguments: Mapping[str, Any], cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in _names((cls,))}
