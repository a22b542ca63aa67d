# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``train``, parsed and checked before any work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import DatasetArguments, TrainingArguments
from llmcompressor.checkpoint.atomic_output import work_folder
from llmcompressor.checkpoint.journal import (
    BlockEntry,
    RunIdentity,
    Workspace,
    open_workspace,
    resumable_fingerprint,
)
from llmcompressor.checkpoint.save import Gate
from llmcompressor.checkpoint.source import inspect_source
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.calibration import load_training, make_collator
from llmcompressor.datasets.rows import Stream
from llmcompressor.datasets.source import (
    GOOD_CHOICES,
    Source,
    is_loader,
    open_source,
    parse_split,
)
from llmcompressor.entrypoints.arguments import Task, data_limits
from llmcompressor.entrypoints.fingerprints import (
    data_fingerprint,
    environment,
    is_result_of,
    model_fingerprint,
    source_fingerprint,
    values_fingerprint,
)
from llmcompressor.errors import ArgumentError, DatasetError, OutputError
from llmcompressor.logger import logger
from llmcompressor.metrics import LoggerManager
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.stages import check_codes_stay
from llmcompressor.runtime import durable
from llmcompressor.runtime.limits import parse_json
from llmcompressor.runtime.temporary import temporary_folder
from llmcompressor.training.checkpoints import checkpoint_to_resume, find_fault

# --------------------
# Data of ``train``: the splits for training and evaluation, opened before the model is loaded.

_TRAIN = "train"
_IGNORED = -100  # transformers' label of a position without a target
_EVAL_ROLES = ("eval", "validation", "test")
_NOTHING_TO_EVALUATE = "There is nothing to evaluate on: eval_strategy or do_eval is set"


class _Role:
    """The training or the evaluation data, opened.

    A registered data set is opened later, as it may need the processor.
    """

    def __init__(self, args: DatasetArguments) -> None:
        self.args = args
        owner = table.find(args.dataset) if isinstance(args.dataset, str) else None
        self._is_streamed = args.streaming or getattr(owner, "is_mix", False)
        self.source: Source | None = None if owner is not None else open_source(args, "train")

    @property
    def is_stream(self) -> bool:
        """True if the number of samples is unknown."""
        rows = None if self.source is None else self.source.rows
        streamed = self._is_streamed if rows is None else isinstance(rows, Stream)
        return streamed and self.args.max_train_samples is None

    def load(self, model: Module, processor: Any) -> Any:
        """Load the samples."""
        limits = data_limits(model)
        return load_training(self.args, processor=processor, source=self.source, **limits)


class TrainingData:
    """Training data, and evaluation data if required.

    Args:
        args: the user's arguments.
        evaluates: whether evaluation data is needed.

    Raises:
        DatasetError: there is no data, or none for evaluation.
    """

    def __init__(self, args: DatasetArguments, *, evaluates: bool) -> None:
        if args.dataset is None and args.dataset_path is None:
            raise DatasetError("Training needs data, and no dataset was given.", GOOD_CHOICES)
        if is_loader(args.dataset):
            raise DatasetError(
                "The dataset is a DataLoader, and training makes its own batches.",
                "Pass the data set itself, and the loader's collate_fn as data_collator.",
            )
        splits: Any = args.splits
        if isinstance(splits, Mapping) and _TRAIN in splits:
            splits = splits[_TRAIN]
        self._train = _Role(replace(args, splits=splits))
        self._eval: _Role | None = None
        if evaluates:
            split = _eval_split(args.splits)
            _refuse_the_same_data(args, split)
            self._eval = _Role(replace(args, splits=split, max_train_samples=None))

    def check_steps(self, max_steps: int) -> None:
        """Refuse a stream of unknown length without a number of steps.

        Raises:
            ArgumentError: the data is such a stream and ``max_steps`` is not given.
        """
        if self._train.is_stream and max_steps < 1:
            raise ArgumentError(
                "The data set is a stream, whose length is not known, so that the number of "
                "training steps is not known either.",
                "Give max_steps (--max-steps), or max_train_samples to take that many of it.",
            )

    def load(self, model: Module, processor: Any) -> tuple[Any, Any]:
        """Load the training samples and the evaluation samples, which may be ``None``."""
        train = self._train.load(model, processor)
        return train, None if self._eval is None else self._eval.load(model, processor)

    def collator(self, model: Module, processor: Any, *, given: bool) -> Any:
        """Make the data collator, which pads by default.

        Args:
            model: the model.
            processor: the tokenizer or processor.
            given: whether the user named a collator; the default of calibration, which truncates
                every sample to the shortest, would drop text.
        """
        args = self._train.args if given else replace(self._train.args, data_collator="padding")
        limits = data_limits(model)
        return make_collator(
            args,
            processor=processor,
            vocab_size=limits["vocab_size"],
            positions=limits["model_max_length"] if limits["in_table"] else None,
            learns=True,
        )


def check_labels(samples: Any) -> None:
    """Refuse training samples without any label; a stream is not read.

    Raises:
        DatasetError: all labels are -100, so that there is no loss.
    """
    if not hasattr(samples, "__len__") or not len(samples):
        return
    labels = (one.get("labels") if isinstance(one, Mapping) else None for one in samples)
    if all(one is not None and bool((torch.as_tensor(one) == _IGNORED).all()) for one in labels):
        raise DatasetError(
            "No token of the training data has a label (all are -100), so there is nothing to "
            "learn.",
            "Give labels, or leave them out to have them made of the tokens; where the data has "
            "prompts only, learn from a teacher (OutputDistillationModifier).",
        )


def _eval_split(splits: Any) -> str:
    if splits is None:
        return "validation"
    if isinstance(splits, Mapping):
        found = [splits[role] for role in _EVAL_ROLES if role in splits]
    elif isinstance(splits, str):
        found = []
    else:
        found = [one for one in splits if parse_split(one)[0].name in _EVAL_ROLES]
    if not found:
        raise DatasetError(
            f"{_NOTHING_TO_EVALUATE}, and splits names no split for it.",
            "Name both, as in splits={'train': 'train', 'eval': 'validation'} "
            "(--splits train=train --splits eval=validation).",
        )
    return str(found[0])


def _refuse_the_same_data(args: DatasetArguments, split: str) -> None:
    """Refuse to evaluate on the whole training data, where the data has no splits.

    Every split of such data is all of it, whatever its name. A slice, or ``train``, is accepted.
    """
    parts, data = parse_split(split), args.dataset
    if isinstance(data, Mapping):  # keys are splits or columns
        has_splits = bool({_TRAIN, *_EVAL_ROLES} & set(data))
    elif data is not None and not isinstance(data, str):
        has_splits = False
    else:  # where save_to_disk wrote several data sets, there is a dataset_dict.json instead
        place = Path(args.dataset_path or str(data)).expanduser()
        has_splits = not (place.is_file() or (place / "state.json").is_file())
    if has_splits or any(not part.whole or part.name == _TRAIN for part in parts):
        return
    raise DatasetError(
        f"{_NOTHING_TO_EVALUATE}, and the data has no split {split!r}.",
        "Give both in dataset, as in dataset={'train': ..., 'validation': ...}, or cut some of it "
        "off, as in splits={'train': 'train[100:]', 'eval': 'train[:100]'} "
        "(--splits 'train=train[100:]' --splits 'eval=train[:100]').",
    )


# --------------------
# Work folder of a training: ``NAME.partial`` next to its output, with the trainer's checkpoints.
#
# ::
#
#     NAME.partial/
#         lock             held while a training is at work; it dies with its process
#         journal          what run it is, and one line per complete checkpoint
#         training/        the trainer's own folder: checkpoint-N, logs, state, metrics
#         files/           the compressed checkpoint, written at the end; renamed to NAME
#
# The journal records when everything is written. A training that was killed after that only
# renames the output when it is run again.

STATE_FILE = "trainer_state.json"
_TRAINING = "training"
_CHECKPOINT = "checkpoint-"
_BEST = "best_model_checkpoint"


class TrainingFolder:
    """The work folder of a training.

    Attributes:
        training: the trainer's output folder.
    """

    def __init__(self, training: Path, workspace: Workspace | None) -> None:
        self.training = training
        self._workspace = workspace

    @property
    def files(self) -> Path:
        """Folder for the compressed checkpoint."""
        assert self._workspace is not None, "only the main process writes the output"
        return self._workspace.files

    def note(self, step: int) -> None:
        """Add a complete checkpoint, which is on the disk, to the journal."""
        if self._workspace is None:
            return
        name = f"{_CHECKPOINT}{step}"
        self._workspace.journal.add(BlockEntry(block=name, digest="", source=""))

    def drop_incomplete(self) -> None:
        """Remove what an earlier process left incomplete: checkpoints, and metrics of the end.

        A checkpoint that is not in the journal would be taken for the newest, and new ones would be
        rotated out before it. The trainer adds to the files of metrics, which may be torn.
        """
        for file in self.training.glob("*_results.json"):
            file.unlink()
        noted = {f"{_CHECKPOINT}{step}" for step in self._noted_steps()}
        if not noted:
            shutil.rmtree(self.training, ignore_errors=True)
            return
        last = self.last_checkpoint()
        for path in sorted(self.training.glob(f"{_CHECKPOINT}*")):
            if path.name not in noted:
                shutil.rmtree(path)
            elif last is None or _step_of(path) > _step_of(last):
                logger.warning(f"{path} is removed: {find_fault(path)}.")
                shutil.rmtree(path)

    def last_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, or ``None``."""
        for step in sorted(self._noted_steps(), reverse=True):
            checkpoint = self.training / f"{_CHECKPOINT}{step}"
            if find_fault(checkpoint) is None:
                return checkpoint
        return None

    def _noted_steps(self) -> list[int]:
        if self._workspace is None:
            return []
        return [_step_of(Path(name)) for _, name in self._workspace.journal.entries]

    @property
    def processors(self) -> list[Any]:
        """The processors that had a part in the training, if they are several."""
        return [] if self._workspace is None else self._workspace.journal.processors

    @property
    def is_written(self) -> bool:
        """True if the output is complete, and at most its renaming is missing."""
        return self._workspace is not None and self._workspace.journal.is_ready

    def mark_written(self) -> None:
        """Flush the complete compressed checkpoint to disk and record it in the journal."""
        assert self._workspace is not None, "only the main process writes the output"
        durable.sync_tree(self.training)
        self._workspace.mark_ready()

    def publish(self, *, replace: bool, keep_checkpoints: bool, gate: Gate = None) -> None:
        """Move the output and the trainer's other files to the final name.

        It can be repeated after an interruption.

        Args:
            replace: replace an existing checkpoint of that name.
            keep_checkpoints: move the trainer's checkpoints to the output too.
            gate: called with the output before it gets its name.

        Raises:
            GateError: raised by ``gate``; the output is in ``NAME.rejected``.
        """
        workspace = self._workspace
        assert workspace is not None, "only the main process writes the output"
        for path in () if workspace.is_published else sorted(self.training.iterdir()):
            if keep_checkpoints or not path.name.startswith(_CHECKPOINT):
                state = path if path.name == STATE_FILE else path / STATE_FILE
                self._update_best_checkpoint(state, workspace.target if keep_checkpoints else None)
                path.rename(workspace.files / path.name)
        workspace.publish(replace=replace, gate=gate)

    def _update_best_checkpoint(self, file: Path, output: Path | None) -> None:
        """Update the path of the best checkpoint in a trainer state; ``None`` if it is dropped."""
        if not file.is_file():
            return
        try:
            state = parse_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            logger.warning(f"{file} is damaged, and left as it is: {error}.")
            return
        best = state.get(_BEST)
        if best is None or Path(best).parent != self.training:
            return  # there is none, or it belongs to the training that this one extends
        state[_BEST] = None if output is None else str(output / Path(best).name)
        text = json.dumps(state, indent=2, sort_keys=True) + "\n"  # as transformers writes it
        durable.replace(file, text.encode())


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_CHECKPOINT))


@contextmanager
def open_training_folder(
    target: Path | None,
    fingerprint: Mapping[str, Any],
    *,
    resume: str,
    is_main: bool,
    overwrite: bool = False,
) -> Iterator[TrainingFolder]:
    """Open the work folder of a training that begins or resumes.

    Args:
        target: the output directory; without one a temporary folder is used.
        fingerprint: identifies the training.
        resume: see :func:`~llmcompressor.checkpoint.journal.open_workspace`.
        is_main: whether this process writes the output.
        overwrite: the output may replace a checkpoint.

    Raises:
        OutputError: the folder is in use, belongs to another run, or is empty while ``resume`` is
            ``"must"``.
    """
    if target is None:
        with temporary_folder("llmcompressor-training") as temporary:
            yield TrainingFolder(temporary, None)
        return
    training = work_folder(target) / _TRAINING
    if not is_main:
        yield TrainingFolder(training, None)
        return
    with open_workspace(target, fingerprint, resume=resume, overwrite=overwrite) as workspace:
        folder = TrainingFolder(training, workspace)
        if folder.is_written:
            yield folder
            return
        is_begun = training.exists()
        folder.drop_incomplete()
        if is_begun and folder.last_checkpoint() is None:
            logger.info(f"No checkpoint was written to {training}: the training begins anew.")
        if resume == "must" and folder.last_checkpoint() is None:
            raise OutputError(
                f"There is nothing to resume: {training} holds no complete checkpoint.",
                'Start with resume="auto" (the default).',
            )
        shutil.rmtree(workspace.files, ignore_errors=True)  # written at the end, at once
        for each in (workspace.files, training):
            durable.make_folder(each)
        yield folder


def find_checkpoint(given: str | Path, target: Path | None) -> Path:
    """Find the checkpoint that the user named, also in the work folder of an unfinished training.

    Args:
        given: its folder; one below the output directory may still be in ``NAME.partial``.
        target: the output directory.

    Raises:
        ArgumentError: the checkpoint does not exist; lists those that do.
        CheckpointError: it is not whole.
    """
    path = Path(given).expanduser().resolve()
    places = [path]
    if target is not None:
        training = work_folder(target) / _TRAINING
        places += [training / path.name] if path.parent == target else []
    for place in places:
        if (place / STATE_FILE).is_file():
            return checkpoint_to_resume(place, place.parent) or place
    known = [] if target is None else sorted(training.glob(f"{_CHECKPOINT}*"))
    listed = f"There are: {', '.join(map(str, known))}." if known else "Check the path."
    raise ArgumentError(
        f"The argument 'resume_from_checkpoint' names {given}, which holds no checkpoint of a "
        "training.",
        listed,
    )


# --------------------
# Arguments of ``train``, parsed and checked before any work.

_OF_CALIBRATION = (
    "activation_budget",
    "min_tokens_per_module",
    "moe_calibrate_all_experts",
    "num_calibration_samples",
    "pipeline",
    "propagate_error",
    "sequential_granularity",
    "sequential_targets",
    "shuffle_calibration_samples",
    "starved_experts",
)
"""Arguments of data that say how a model is calibrated."""

NOT_OF_TRAINING = (*_OF_CALIBRATION, "batch_size", "max_memory")
"""Arguments that a training has no use for."""

_FOR_CHECKPOINTS = (
    "load_best_model_at_end",
    "save_only_model",
    "save_steps",
    "save_strategy",
    "save_total_limit",
)
"""Who gives one of these wants the trainer's checkpoints for themselves."""

_DECIDE = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "dataloader_drop_last",
    "fp16",
    "gradient_accumulation_steps",
    "label_smoothing_factor",
    "learning_rate",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_grad_norm",
    "max_steps",
    "neftune_noise_alpha",
    "num_train_epochs",
    "optim",
    "optim_args",
    "per_device_train_batch_size",
    "seed",
    "train_sampling_strategy",
    "warmup_steps",
    "weight_decay",
    "world_size",
)
"""Training arguments that decide what is learned, and so make a training the same training."""


class Training(Task):
    """Arguments of a training, parsed and checked.

    Attributes:
        args: the training arguments of transformers.
        data: the training and evaluation data.
        loggers: for the session.
        keeps_checkpoints: whether the trainer's checkpoints are kept in the output.
        own_bar: whether to show this package's progress bar.
    """

    def __init__(
        self, output_dir: str | Path | None = "./output", loggers: Any = None, **arguments: Any
    ) -> None:
        if str(arguments.get("device") or "").startswith("cpu"):
            arguments.setdefault("use_cpu", True)
        if not torch.accelerator.is_available():  # torch would warn about pinning
            arguments.setdefault("dataloader_pin_memory", False)
        super().__init__("train", output_dir, (TrainingArguments,), arguments, ("loggers",))
        self.args: TrainingArguments = self.further_args[0]
        self.loggers = LoggerManager.of(loggers)
        self.keeps_checkpoints = any(name in arguments for name in _FOR_CHECKPOINTS)
        self.own_bar = arguments.get("disable_tqdm") is None
        self.collator_given = "data_collator" in arguments
        self._check_given(arguments)
        self.resume_from = self._read_resume()
        self.data = TrainingData(self.dataset_args, evaluates=self.args.do_eval)
        self.data.check_steps(self.args.max_steps)

    def _read_recipe(self) -> Recipe:
        recipe = super()._read_recipe()
        check_codes_stay(recipe.modifiers)
        if not recipe.modifiers:
            logger.warning("The recipe is empty: the model is trained, and not compressed.")
        return recipe

    def _check_given(self, given: Mapping[str, Any]) -> None:
        if "batch_size" in given:
            raise ArgumentError(
                "The argument 'batch_size' is that of calibration, and train does not calibrate.",
                "Give per_device_train_batch_size (--per-device-train-batch-size).",
            )
        if self.run_args.dry_run:
            raise ArgumentError(
                "A dry run is not there for train: plan knows runs of oneshot only.",
                "Leave dry_run (--dry-run) out.",
            )
        kept = [n for n in ("save_statistics", "statistics") if given.get(n) is not None]
        if kept:
            raise ArgumentError(
                f"The argument {kept[0]!r} is about statistics of a calibration, and train does "
                "not calibrate.",
                "Leave it out, or use oneshot.",
            )
        if self.args.push_to_hub:
            raise ArgumentError(
                "train uploads nothing: what the trainer would push are its own checkpoints.",
                "Leave push_to_hub out, and call model.push_to_hub(...) on what train returns.",
            )
        without_effect = [name for name in (*_OF_CALIBRATION, "max_memory") if name in given]
        if self.model_args.distill_teacher is not None and not self.learns_from_teacher:
            without_effect.append("distill_teacher (no modifier of the recipe uses a teacher)")
        if without_effect:
            logger.warning(f"Without effect in train: {', '.join(without_effect)}.")

    @property
    def learns_from_teacher(self) -> bool:
        """True if a modifier of the recipe uses the teacher."""
        return any(each.rules.uses_teacher for each in self.recipe.modifiers)

    def _read_resume(self) -> Path | None:
        """Return the checkpoint that the user named; ``True`` means ``resume="must"``."""
        given: Any = self.args.resume_from_checkpoint
        if given in (None, False, "false", "False"):
            return None
        if given in (True, "true", "True"):
            if self.output_dir is None:
                raise ArgumentError(
                    "The argument 'resume_from_checkpoint' is True, and there is no output_dir "
                    "that a training could have been broken off in.",
                    "Name the checkpoint's folder.",
                )
            self.run_args.resume = "must"
            return None
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise ArgumentError(
                f"The argument 'resume_from_checkpoint' cannot be {given!r}.",
                "Give the folder of a checkpoint, or True for the last one.",
            )
        return find_checkpoint(os.fspath(given), self.output_dir)

    def identity(self, model: Module, teacher: Module | None, samples: Any) -> RunIdentity:
        """Return the identity of the training, so that only the same training is resumed.

        If models are sharded over processes, all of these have to call it.

        Args:
            model: the model before the training. If it is an object that an interrupted training
                of this process has changed, it counts with its original fingerprint, as its
                weights are replaced by those of the checkpoint.
            teacher: the teacher model.
            samples: the training samples.
        """
        args: Mapping[str, Any] = self.args.to_dict()  # type: ignore[no-untyped-call]  # transformers'
        training = {name: args.get(name) for name in _DECIDE if name != "world_size"}
        first = next(model.parameters())
        given, named = self.model_args.model, self.model_args.distill_teacher
        of_folder = isinstance(given, str | Path) and Path(given).expanduser().is_dir()
        taught: dict[str, Any] | None = None
        if teacher is not None:
            place = str(named) if isinstance(named, str | Path) else None
            taught = {"place": place, **model_fingerprint(teacher)}
        has_length = hasattr(samples, "__len__")  # a stream is not read
        return RunIdentity(
            task="train",
            place=self.place,
            source=source_fingerprint(
                inspect_source(given, allow_quantized=True, allow_absent=True)
            )
            if of_folder
            else None,
            model=self._fingerprint_at_start(model_fingerprint(model)),
            recipe=self.recipe.yaml() if self.recipe.modifiers else None,
            teacher=taught,
            data=values_fingerprint(samples)
            if has_length
            else data_fingerprint(self.dataset_args.dataset),
            training={
                name: value if isinstance(value, int | float | None) else str(value)
                for name, value in {**training, "world_size": self.args.world_size}.items()
            },
            moment=self.moment.isoformat(),
            **environment(first.dtype, first.device, computes=True),
        )

    def _fingerprint_at_start(self, present: dict[str, str]) -> dict[str, str]:
        if self.output_dir is None or self.run_args.resume == "never":
            return present
        progress = resumable_fingerprint(self.output_dir)
        begun: dict[str, str] = {} if progress is None else progress.get("model", {})
        return begun if is_result_of(self.model_args.model, begun) else present
