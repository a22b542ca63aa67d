# SPDX-License-Identifier: Apache-2.0
"""``run_stages``: run all stages of a recipe in order, each into a folder of its own.

::

    OUTPUT/
        stages.json      inputs of each stage: recipe, arguments, model and data; and checksums
        stage_first/     output of the stage `first`, which the next one reads
        stage_second/

The output of a run gets its name when it is complete, so an existing folder is a finished stage. It
is skipped if ``stages.json`` has the same inputs for it, and if its weights are as they were
written. A stage whose weights are damaged is done again, where a later one or the caller needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import xxhash
from torch.nn import Module

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    TrainingArguments,
    parse_arguments,
)
from llmcompressor.args.gates import SIZE, parse_gates
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint.journal import (
    RunIdentity,
    remove_remains,
    resumable_fingerprint,
)
from llmcompressor.checkpoint.shared_output import check_alike
from llmcompressor.core.modifier import Modifier
from llmcompressor.datasets.text import moment, rendered_at
from llmcompressor.entrypoints.arguments import (
    MOMENT,
    Job,
    as_path,
    check_run_types,
    first_before_others,
    is_idle,
    kl_budget_of,
)
from llmcompressor.entrypoints.fingerprints import (
    data_fingerprint,
    folder_fingerprint,
    is_result_of,
    model_fingerprint,
    path_fingerprint,
    record_change,
    type_fingerprint,
    values_fingerprint,
)
from llmcompressor.entrypoints.oneshot import oneshot
from llmcompressor.entrypoints.training_run import check_teacher, load_maybe_quantized, run_training
from llmcompressor.entrypoints.training_task import NOT_OF_TRAINING, Training
from llmcompressor.errors import ArgumentError, InputError, OutputError, RecipeError
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.metrics import LoggerManager
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.modifiers.rotation.base import RotationModifier
from llmcompressor.planning.matching import unmatched_targets
from llmcompressor.planning.subject import open_planned_model
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.recipe import Recipe, Stage
from llmcompressor.recipe.stages import check_codes_stay
from llmcompressor.runtime import durable
from llmcompressor.runtime.launch import launch_of, launched_group
from llmcompressor.runtime.limits import parse_json
from llmcompressor.runtime.processes import Processes, rank_and_world_size
from llmcompressor.session.functions import exclusive_session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmcompressor.args.keywords import DataInput, ModelInput, StageKeywords
    from llmcompressor.recipe import RecipeInput

# --------------------
# ``stages.json``: the inputs of each stage, to detect stages that are finished already.

_RECORD = "stages.json"
_PATH = "path"
_SHOWN = 16
"""Items of a list that stand in the record; of a longer one a hash does."""


class StageRecord:
    """Reads and writes ``stages.json``, which is updated before a stage begins.

    Args:
        root: the folder of all stages.
        must_exist: refuse to begin without a record.

    Attributes:
        moment: when the first stage began, which all stages take for the present moment.

    Raises:
        OutputError: it cannot be read, is required but missing, or the folder holds other files.
    """

    def __init__(self, root: Path, *, must_exist: bool) -> None:
        self._root = root.expanduser().resolve()
        self._file = self._root / _RECORD
        self._stages: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._written: dict[str, dict[str, str]] = {}
        self._made: list[Path] = []
        self.moment = moment()
        if self._root.exists() and not self._root.is_dir():
            raise OutputError(f"The output {root} is a file.", "Choose another output directory.")
        if self._file.is_file():
            try:
                found = parse_json(self._file.read_text(encoding="utf-8"))
                self._stages, self._written = found["stages"], found.get("written", {})
                self.moment = datetime.fromisoformat(found.get(MOMENT) or self.moment.isoformat())
            except (ValueError, KeyError, TypeError) as error:
                raise OutputError(
                    f"{self._file} cannot be read: {error}.", "Choose another output directory."
                ) from error
        elif must_exist:
            raise OutputError(
                f"There is nothing to resume: {self._file} is not there.",
                'Start with resume="auto" (the default).',
            )
        elif self._root.is_dir() and any(
            not path.name.startswith(f"{_RECORD}.new")
            for path in self._root.iterdir()  # left by a kill
        ):
            raise OutputError(
                f"The output directory {self._root} already holds files, which are no stages.",
                "Choose another one.",
            )

    def settled(
        self, stage: str, present: RunIdentity, folder: Path, model: Any, *, goes_on: bool
    ) -> RunIdentity:
        """Return the identity of a stage, with recorded values for inputs that changed or vanished.

        A deleted folder or file counts as recorded. So does a model object that this stage itself
        changed in an earlier call of this process, if the stage is finished or resumes from a
        checkpoint that replaces the weights.
        """
        then, now = self._stages.get(stage, {}), RunIdentity(present)
        recorded = then.get("model")
        now["model"] = _recorded_if_gone(now["model"], recorded)
        past = then.get("arguments", {})
        now["arguments"] = {
            name: _recorded_if_gone(value, past.get(name))
            for name, value in now["arguments"].items()
        }
        if recorded != now["model"] and is_result_of(model, recorded):
            known = RunIdentity({**now, "model": recorded})
            progress = resumable_fingerprint(folder) or {}
            is_kept = _is_finished(folder) or (goes_on and progress.get("model") == recorded)
            if is_kept and not known.differences(then):
                return known
        return now

    def is_finished(
        self, stage: str, present: RunIdentity, folder: Path, *, overwrite: bool
    ) -> bool:
        """Return True if a stage was finished with the same inputs.

        Raises:
            OutputError: it was finished with other inputs, and may not be overwritten.
        """
        if not _is_finished(folder):
            return False
        differing = present.differences(self._stages.get(stage, {}))
        if differing and not overwrite:
            raise OutputError(
                f"The folder {folder} holds the stage {stage!r} of another run: "
                f"{'; '.join(differing[:3])}.",
                "Choose another output directory, or pass overwrite=True (--overwrite) to run it "
                "again.",
            )
        return not differing

    def begin(self, stage: str, present: Mapping[str, Any]) -> None:
        """Record the inputs of a stage that begins."""
        self._before = dict(self._stages)
        self._stages[stage] = dict(present)
        self._written.pop(stage, None)
        self._made = [each for each in (self._root, *self._root.parents) if not each.exists()]
        self._write()

    def end(self, stage: str, folder: Path) -> None:
        """Record the checksums of what a stage has written, unless they are recorded already."""
        if stage not in self._written:
            self._written[stage] = durable.checksums(folder, _weight_files(folder))
            self._write()

    def set_aside_damaged(self, stage: str, folder: Path) -> bool:
        """Return True if the weights of a finished stage are damaged, which get another name."""
        damage = durable.find_damage(folder, self._written.get(stage, {}))
        if damage is None:
            return False
        names = (f".damaged-{number}" if number else ".damaged" for number in itertools.count())
        aside = next(one for end in names if not (one := Path(f"{folder}{end}")).exists())
        logger.warning(
            f"The stage {stage!r} is done again, as {folder} is damaged: {damage}. That folder is "
            f"now {aside.name}."
        )
        durable.rename(folder, aside)
        return True

    def take_back(self, folder: Path) -> None:
        """Remove the record of the stage that began last, if it left nothing in its ``folder``."""
        if any(self._root.glob(f"{folder.name}*")):
            return
        self._stages = self._before
        if self._stages:
            self._write()
            return
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            for each in self._made:
                each.rmdir()

    def _write(self) -> None:
        durable.make_folder(self._root)
        content = {"stages": self._stages, "written": self._written}
        text = json.dumps({**content, MOMENT: self.moment.isoformat()}, indent=2) + "\n"
        launch = launch_of(os.environ)  # its ranks write the same, at about the same time
        rank = rank_and_world_size()[0] if launch is None else launch.rank
        durable.replace(self._file, text.encode(), ending=f".new{rank or ''}")


def argument_record(name: str, value: Any, written: Sequence[Path]) -> Any:
    """Return the JSON value of an argument for the record; a fingerprint of data and models."""
    if name in ("dataset", "gate_dataset"):
        return data_fingerprint(value)
    if name == "dataset_path":
        return None if value is None else path_fingerprint(value)
    if name in ("distill_teacher", "gate_reference"):
        return model_record(value, written)
    return _as_json(value)


def model_record(model: Any, written: Sequence[Path]) -> Any:
    """Return the JSON value of a model for the record: its fingerprint and its path.

    Args:
        model: an object, a folder, or an id on the hub.
        written: folders that the stages themselves write; their contents are not read.
    """
    if isinstance(model, Module):
        return model_fingerprint(model)
    if not isinstance(model, str | os.PathLike):
        return _as_json(model)
    place = Path(model).expanduser()
    given = {_PATH: os.fspath(model)}
    if place.is_dir() and place.resolve() not in [each.expanduser().resolve() for each in written]:
        return {**given, **folder_fingerprint(place)}
    return given


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (
            [_as_json(one) for one in value] if len(value) <= _SHOWN else values_fingerprint(value)
        )
    return type_fingerprint(value)


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _weight_files(folder: Path) -> list[Path]:
    names = ("config.json", "*.safetensors", "*.safetensors.index.json")
    return [file for name in names for file in folder.glob(name)]


def _recorded_if_gone(now: Any, then: Any) -> Any:
    """Return the recorded value of a path if the path no longer exists, else the present one."""
    given = now.get(_PATH) if isinstance(now, Mapping) and set(now) == {_PATH} else now
    is_gone = isinstance(given, str) and isinstance(then, Mapping)
    return then if is_gone and then.get(_PATH) == given else now


# --------------------
# ``run_stages``: run all stages of a recipe in order, each into a folder of its own.

_ONESHOT = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)
_TRAIN = (*_ONESHOT, TrainingArguments)
_OF_THE_WHOLE = ("dry_run", "model", "recipe", "recipe_args", "resume_from_checkpoint", "stage")
_FOR_THE_FIRST = ("config_name", "model_revision")
_QUANTIZED, _ROTATED = "has quantized", "rotates at run time"
_MULTIPLIED_IN = {"R1", "R2"}
"""Rotations of which nothing is left in the forward."""
_OF_GATES = ("gates", "gate_dataset", "gate_reference", "keep_rejected")
"""Arguments of the last stage, and of others whose recipe has gates of its own."""
_OF_TRAINING = {"distill_teacher", "max_train_samples"}
"""What ``oneshot`` takes and training alone goes by."""
_OF_ONE_RANK = {"cache_dir", "dataset", "dataset_path", "device"}
"""Arguments that ranks may be given different values of."""
_NOT_RECORDED = (
    "keep_rejected",
    "loggers",
    "log_dir",
    "overwrite",
    "resume",
    "report",
    "verify",
    "verify_with",
    "verify_python",
    "verify_timeout",
    "max_memory",
    "use_auth_token",
)


@told_by_name
def run_stages(
    model: ModelInput,
    recipe: RecipeInput,
    dataset: DataInput = None,
    output_dir: str | Path = "./output",
    **arguments: Unpack[StageKeywords],
) -> PreTrainedModel:
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

    Gates are of the last stage, or of the stage in whose part of the recipe they stand. They
    compare with ``model``, not with the output of the stage before.

    Returns:
        The model of the last stage.

    Raises:
        InputError: an invalid argument, recipe, model or data set; raised before any work if
            possible, else by the stage.
        GateError: the checkpoint of a stage does not keep its gates; the stages before stay.

    A repeated call with the same recipe, arguments, model and data skips finished stages and
    resumes an interrupted one.
    """
    show_runs_quietly()
    if as_path("output_dir", output_dir) is None:
        raise ArgumentError(
            "The argument 'output_dir' cannot be None: each stage is written for the next one.",
            "Give the path of a folder.",
        )
    given: dict[str, Any] = {"dataset": dataset, **arguments}
    for name in ("run_stages", "do_oneshot"):
        given.pop(name, None)
    whole = Recipe.create_instance(recipe, recipe_args=given.pop("recipe_args", None))
    if not whole.modifiers:
        raise RecipeError("The recipe has no stages to run.", "Give one with modifiers.")
    _check_whole(given)
    plan = [_Stage(stage, whole, given, Path(output_dir)) for stage in whole.stages]
    _give_gates(plan, model, given)
    _check_order(plan)
    kinds = {stage.kind for stage in plan}
    with nullcontext() if "train" in kinds else launched_group():  # accelerate makes its own
        processes = _processes(kinds)
        with processes.notify_on_failure():
            record = StageRecord(Path(output_dir), must_exist=given.get("resume") == "must")
            _find_finished(plan, record, model, given)
            with first_before_others(processes, "damaged stages"):
                _set_aside_damaged(plan, record)
            for place, stage in enumerate(plan):
                if not stage.is_finished:
                    stage.check(model, plan[:place])
        _check_alike(_processes(kinds), plan, record, Path(output_dir))
    _warn_of_targets(plan, model)
    with rendered_at(record.moment):
        return cast("PreTrainedModel", _run(plan, record, model))


def _find_finished(
    plan: Sequence[_Stage], record: StageRecord, model: Any, given: Mapping[str, Any]
) -> None:
    """Find the stages that are finished."""
    before: _Stage | None = None
    goes_on, overwrite = given.get("resume") != "never", bool(given.get("overwrite"))
    for stage in plan:
        name, folder = stage.name, stage.folder
        found = stage.follow(before, model, [each.folder for each in plan])
        stage.record = record.settled(name, found, folder, stage.model, goes_on=goes_on)
        stage.is_finished = record.is_finished(name, stage.record, folder, overwrite=overwrite)
        before = stage


def _set_aside_damaged(plan: Sequence[_Stage], record: StageRecord) -> None:
    """Set aside the stages that are damaged and needed."""
    is_needed = True
    for stage in reversed(plan):
        if is_needed and stage.is_finished:
            stage.is_finished = not record.set_aside_damaged(stage.name, stage.folder)
        is_needed = not stage.is_finished


def _processes(kinds: Collection[str]) -> Processes:
    """The processes that run the stages together; trainings find those of theirs themselves."""
    return Processes.from_process_group() if "oneshot" in kinds else Processes()


def _check_alike(
    processes: Processes, plan: Sequence[_Stage], record: StageRecord, root: Path
) -> None:
    """Refuse processes whose stages differ, and have all take the moment of the first one.

    Data is left to the stages: they take parts of it from all processes.

    Raises:
        ArgumentError: names what differs; on all processes.
    """
    if processes.count == 1:
        return
    own: dict[str, Any] = {"output_dir": str(root.expanduser().resolve())}
    for stage in plan:
        kept = dict(stage.record)
        own[stage.name] = kept | {
            "arguments": _without(kept["arguments"], _OF_ONE_RANK),
            "model": _without(kept["model"], {_PATH}),
        }
        del own[stage.name]["stages_before"]  # a hash of what is compared itself
    with processes.notify_on_failure():
        check_alike(own, lambda value, what: processes.all_gather(what, value))
        record.moment = processes.all_gather(MOMENT, record.moment)[0]


def _without(value: Any, names: Collection[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: one for name, one in value.items() if name not in names}


class _Stage:
    """A stage of the recipe: its run type, arguments and record."""

    def __init__(self, stage: Stage, whole: Recipe, given: Mapping[str, Any], root: Path) -> None:
        self.name = stage.name
        self.kind = stage.run_type or _infer_run_type(stage)
        check_run_types(stage, self.kind)
        if self.kind == "train":
            check_codes_stay(one for one in stage.modifiers if not is_idle(one, stage, "train"))
        self.bars_others = _blocking_change(stage)
        self.recipe = Recipe([stage], args=whole.args)
        self.folder = root / f"stage_{stage.name}"
        self.is_finished = False
        names = (_argument_names(_ONESHOT) | {"log_dir"}) - _OF_TRAINING
        if self.kind == "train":
            names = (_argument_names(_TRAIN) | {"loggers"}) - set(NOT_OF_TRAINING)
        self.arguments = {name: value for name, value in given.items() if name in names}
        if self.arguments.get("resume") == "must":
            self.arguments["resume"] = "auto"  # it concerns all stages, and is checked for all
        self.record = RunIdentity()

    def follow(self, before: _Stage | None, model: Any, written: Sequence[Path]) -> RunIdentity:
        """Set the output of the previous stage as the model of this one, and return its identity.

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
        digest = None
        if before is not None:  # of all stages before, as its own record has that of the others
            text = json.dumps(before.record, sort_keys=True)
            digest = xxhash.xxh3_64_hexdigest(text.encode())
        return RunIdentity(
            run_type=self.kind,
            recipe=self.recipe.yaml(),
            model=model_record(model, ()) if before is None else before.folder.name,
            stages_before=digest,
            arguments={name: argument_record(name, kept[name], written) for name in sorted(kept)},
        )

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
            remove_remains(stage.folder)
            record.end(stage.name, stage.folder)
            continue
        logger.info(f"{what}.")
        result = None  # free the model of the stage before
        with exclusive_session() as session:
            session.reset()
        record.begin(stage.name, stage.record)
        try:
            result = stage.run()
            record.end(stage.name, stage.folder)
        except InputError:
            record.take_back(stage.folder)
            raise
        finally:
            record_change(stage.model, stage.record["model"])
    if result is None:
        last = plan[-1]
        [args] = parse_arguments(
            {"model": model} | _select_arguments(last.arguments, ModelArguments), ModelArguments
        )
        result = load_maybe_quantized(str(last.folder), args).eval()
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
    for name in ("save_statistics", "statistics"):
        if given.get(name) is not None:
            raise ArgumentError(
                f"The argument {name!r} is about the model of one run, and each stage has another.",
                "Use oneshot for the stage.",
            )
    LoggerManager.of(given.get("loggers"))
    plain = {name: value for name, value in given.items() if name not in ("log_dir", "loggers")}
    parse_arguments(
        {"model": "the model", **plain}, *_TRAIN, also_known=("output_dir", "log_dir", "loggers")
    )


def _give_gates(plan: list[_Stage], model: Any, given: Mapping[str, Any]) -> None:
    """Leave arguments about gates to the stages that have any, which compare with the first model.

    Raises:
        ArgumentError: that is an object, which the stages before change.
    """
    of_call, last = parse_gates("gates", given.get("gates") or {}), plan[-1]
    searching = [one for one in plan if kl_budget_of(one.recipe) is not None]
    measuring = [one for one in plan if one.recipe.gates.keys() - {SIZE} or one in searching]
    if of_call.keys() - {SIZE} or not measuring:
        measuring = [one for one in measuring if one is not last] + [last]
    for stage in plan:
        kept = {"gates"} if stage is last else set()
        kept |= {"gate_dataset", "gate_reference"} if stage in measuring else set()
        kept |= {"keep_rejected"} if stage in searching or not searching else set()
        for name in set(_OF_GATES) - kept:
            stage.arguments.pop(name, None)
        limits = (stage.recipe.gates.keys() | of_call.keys()) - {SIZE}
        needs = stage in searching or (stage in measuring and limits)
        if stage is plan[0] or not needs or given.get("gate_reference") is not None:
            continue
        if not isinstance(model, str | os.PathLike):
            raise ArgumentError(
                f"The limits of the stage {stage.name!r} compare with the original model, and that "
                "is an object, which the stages before change.",
                "Give its folder: gate_reference=...",
            )
        stage.arguments["gate_reference"] = os.fspath(model)


def _check_order(plan: list[_Stage]) -> None:
    """Refuse a stage after one that quantizes the model or rotates it online.

    A training that takes a quantized model may come after one that quantizes.
    """
    for place, stage in enumerate(plan):
        takes = any(type(one).rules.takes_quantized for one in stage.recipe.modifiers)
        open_to = {_QUANTIZED} if takes and stage.kind == "train" else set()
        barring = (one for one in plan[:place] if one.bars_others not in {None, *open_to})
        before = next(barring, None)
        if before is None:
            continue
        does = "trains" if stage.kind == "train" else "works on"
        remedy = "Let the last stage alone quantize, or rotate at run time."
        if all(before.kind in type(one).rules.run_types for one in stage.recipe.modifiers):
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
    first = _select_arguments(plan[0].arguments, ModelArguments)
    for stage in [one for one in plan if not one.is_finished][1:]:
        [args] = parse_arguments({"model": model} | first, ModelArguments)
        matching: list[Modifier] = list(stage.recipe.modifiers)
        if stage.kind == "train":  # pruning there is about names of parameters
            matching = [one for one in matching if isinstance(one, QuantizationMixin)]
        try:
            model_now = open_planned_model(args, matching).model
        except InputError as error:  # the stage that loads the model reports it
            logger.debug(f"Targets of the stage {stage.name!r} are not looked for: {error}")
            continue
        for problem in unmatched_targets(model_now, matching):
            logger.warning(
                f"The stage {stage.name!r} of the recipe cannot begin unless one before it changes "
                f"what its targets match: {problem}"
            )


def _blocking_change(stage: Stage) -> str | None:
    """Return the change by a stage that no later stage can start from, or ``None``."""
    if any(isinstance(one, QuantizationMixin) for one in stage.modifiers):
        return _QUANTIZED
    for modifier in stage.modifiers:
        if not isinstance(modifier, RotationModifier):
            continue
        config: Any = getattr(modifier, "transform_config", None)
        online = not set(getattr(modifier, "rotations", ())) <= _MULTIPLIED_IN
        if config is not None:
            every = (args for one in config.config_groups.values() for args in one.apply)
            online = any(args.is_online() for args in every)
        if online:  # it stays in the forward
            return _ROTATED
    return None


def _infer_run_type(stage: Stage) -> Any:
    only_there = [one for one in stage.modifiers if "oneshot" not in type(one).rules.run_types]
    if any("train" not in type(one).rules.run_types for one in stage.modifiers):
        only_there = [one for one in only_there if not is_idle(one, stage, "oneshot")]
    return "train" if only_there else "oneshot"


def _argument_names(classes: tuple[type[Any], ...]) -> set[str]:
    found = {field.name for cls in classes for field in dataclasses.fields(cls) if field.init}
    return found - set(_OF_THE_WHOLE) - {"output_dir"}


def _select_arguments(arguments: Mapping[str, Any], cls: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in _argument_names((cls,))}
