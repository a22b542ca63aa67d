# SPDX-License-Identifier: Apache-2.0
"""Run of a training: load the model and its data, train with session events, and write it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import Module
from transformers import PreTrainedModel, PrinterCallback
from transformers.trainer_utils import rotate_checkpoints

from llmcompressor.args import ModelArguments
from llmcompressor.checkpoint.block_stream import check_output_space
from llmcompressor.checkpoint.journal import PROCESSORS
from llmcompressor.checkpoint.load import (
    check_complete,
    check_finite_weights,
    check_quantization_declared,
    load_config,
    loading_errors,
    model_class,
)
from llmcompressor.checkpoint.manifest import RunRecord
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.checkpoint.planned_tensors import module_kinds
from llmcompressor.checkpoint.save import (
    SaveOptions,
    modify_save_pretrained,
    write_checkpoint,
    write_spread_checkpoint,
)
from llmcompressor.checkpoint.shared_output import check_alike
from llmcompressor.checkpoint.source import is_hub_id, quantization_method
from llmcompressor.checkpoint.spread_weights import is_fully_sharded
from llmcompressor.checkpoint.tensor_files import layout_files
from llmcompressor.datasets.text import rendered_at
from llmcompressor.entrypoints.arguments import (
    MOMENT,
    clean_up_on_error,
    collect_reports,
    compression_report,
)
from llmcompressor.entrypoints.fingerprints import record_change, run_record
from llmcompressor.entrypoints.gates import Gates, check_size, prepare_gates
from llmcompressor.entrypoints.run import load_whole_model
from llmcompressor.entrypoints.training_task import (
    Training,
    TrainingFolder,
    check_labels,
    open_training_folder,
)
from llmcompressor.entrypoints.verify import (
    check_servable,
    predict_output,
    verify_saved,
    verify_written,
)
from llmcompressor.errors import ArgumentError, CheckpointError, GateError
from llmcompressor.logger import logger
from llmcompressor.modeling.sharded import (
    full_shapes_reported,
    full_state_dict,
    has_partitioned_parameters,
    was_loaded_sharded,
)
from llmcompressor.reporting.report import write_run_page
from llmcompressor.reporting.summary import tell_summary
from llmcompressor.runtime.processes import Processes
from llmcompressor.session.functions import run_session
from llmcompressor.session.session import CompressionSession
from llmcompressor.training import Trainer
from llmcompressor.training.callbacks import TrainingProgress
from llmcompressor.training.optimizer import parameter_ids, without_new_parameters
from llmcompressor.transformers_internals import (
    divides_by_steps_since_resume,
    overrides_steps,
    trainer_step,
    use_one_accelerator,
)

# --------------------
# Loading of the teacher model for distillation, which may be a compressed checkpoint.


def load_teacher(args: ModelArguments, device: torch.device | str | None) -> Module | None:
    """Load the teacher model in evaluation mode.

    Args:
        args: ``distill_teacher`` is the teacher; it is loaded with the model's settings for
            remote code, cache and token.
        device: device for a teacher that is loaded here; a model object is not moved.

    Returns:
        The teacher; ``None`` if there is none.

    Raises:
        CheckpointError: it does not exist, cannot be loaded, or lacks weights.
    """
    given = args.distill_teacher
    if given is None:
        return None
    check_teacher(given)
    if isinstance(given, Module):
        given.eval()
        return given
    path = Path(given).expanduser()
    teacher = load_maybe_quantized(str(path) if path.exists() else str(given), args)
    teacher.eval().requires_grad_(requires_grad=False)
    found: Module = teacher if device is None else teacher.to(device)
    return found


def check_teacher(given: Any) -> None:
    """Refuse an invalid teacher without reading its files.

    Raises:
        CheckpointError: it is neither a model nor the name of one, or its folder does not exist.
    """
    if isinstance(given, Module):
        return
    if not isinstance(given, str | Path):
        raise CheckpointError(
            f"The teacher is a {type(given).__name__}.",
            "Pass a folder, the id of a model on the hub, or a loaded model as distill_teacher.",
        )
    if not Path(given).expanduser().exists() and not is_hub_id(given):
        raise CheckpointError(f"There is no folder {given} with a teacher.", "Check the path.")


def load_maybe_quantized(place: str, args: ModelArguments) -> Any:
    """Load a model that may be quantized, with its weights on the CPU.

    Args:
        place: a folder, or an id on the hub.
        args: settings for remote code, cache and token.

    Raises:
        CheckpointError: it cannot be loaded, lacks weights, or has quantized weights that its
            configuration does not declare.
    """
    hub: dict[str, Any] = {
        "cache_dir": args.cache_dir,
        "token": args.use_auth_token,
        "trust_remote_code": args.trust_remote_code_model,
    }
    with loading_errors(place):
        config = load_config(place, **hub)
        loader = model_class(config, trust_remote_code=args.trust_remote_code_model)
        with loading_compressed():
            model, info = loader.from_pretrained(
                place, config=config, dtype="auto", output_loading_info=True, **hub
            )
    check_quantization_declared(place, cache_dir=args.cache_dir)
    if quantization_method(config.to_dict()) is None:
        check_complete(place, info)
    return model


# --------------------
# Run of a training: load the model and its data, train with session events, and write it.

T = TypeVar("T")
_KEPT_FIGURES = ("train_loss", "task_loss", "perplexity", "train_samples", "eval_loss")


def run_training(task: Training) -> Module:
    """Train a model with a recipe, and write it.

    Args:
        task: the arguments of the training.

    Returns:
        The trained model, finalized.
    """
    with run_session() as session:
        session.reset()
        run = _Run(task, session)
        try:
            with clean_up_on_error(session):
                model = run()
        finally:
            record_change(task.model_args.model, run.began_with)
        if task.recipe_args.clear_sparse_session:
            session.reset()
    return model


@overrides_steps
class _Trainer(Trainer):
    """A trainer with a callback at the start of its session, which journals each checkpoint.

    Attributes:
        session_has_begun: called before the model is sharded or trained.
        folder: journals checkpoints before older ones are rotated out.
    """

    session_has_begun: Callable[[], None] | None = None
    folder: TrainingFolder | None = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        model = self.accelerator.unwrap_model(self.model)
        before = parameter_ids(model)
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.session_has_begun is not None:
            with without_new_parameters(model, before), full_shapes_reported(model):
                self.session_has_begun()
            self.session_has_begun = None
        return optimizer

    def write_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            trainer_step(super(), "write_checkpoint")(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        if self.folder is not None and not self.args.save_only_model:  # else it cannot be resumed
            self.folder.note(self.state.global_step)
        if self.args.should_save:
            # Last, so that the journal names a complete checkpoint whenever the process is killed.
            best = self.state.best_model_checkpoint
            rotate_checkpoints(
                trainer_step(self, "checkpoints_folder")(trial=None), limit, best, use_mtime=True
            )


class _Run:
    """State of a training run.

    Attributes:
        began_with: fingerprint of the model before any change; ``None`` until it is computed.
    """

    def __init__(self, task: Training, session: CompressionSession) -> None:
        self.task = task
        self.session = session
        self.is_main = task.args.process_index == 0
        self.model: Any = None
        self.processor: Any = None
        self.began_with: Mapping[str, str] | None = None
        self.record = RunRecord()
        self.gates: Gates | None = None

    def __call__(self) -> Module:
        """Load, train and write the model."""
        task = self.task
        device = _device(task)
        goes_on = any(one.rules.takes_quantized for one in task.recipe.modifiers)
        self.model = load_whole_model(task, device=str(device), goes_on=goes_on)
        _move_given_model(self.model, task, device)
        check_finite_weights(self.model)
        if not goes_on:  # else the weights are frozen, and what is trained is float32
            _check_precision(self.model, task)
        teacher = load_teacher(task.model_args, device)
        self.processor = task.load_processor()
        with task.explain_missing_processor(), rendered_at(_broadcast(task.moment)):
            train_samples, eval_samples = task.data.load(self.model, self.processor)
        if not task.learns_from_teacher:
            check_labels(train_samples)
        if not hasattr(train_samples, "__len__"):
            task.data.check_steps(task.args.max_steps)
        self.gates = prepare_gates(task, self.model, self.processor, train_samples)
        use_cache = getattr(self.model.config, "use_cache", None)
        identity = task.identity(self.model, teacher, train_samples)
        _check_alike(task, identity, train_samples)
        self.record = run_record(
            identity, task.call, ranks=task.args.world_size, source=identity["model"]
        )
        folder = open_training_folder(
            task.output_dir,
            identity,
            resume=task.run_args.resume,
            is_main=self.is_main,
            overwrite=task.model_args.overwrite,
        )
        try:
            with folder as opened, ExitStack() as stack:
                self.began_with = identity["model"]
                if _broadcast(opened.is_written):
                    return self._publish_finished(opened)
                trainer = self._trainer(opened, stack, teacher, train_samples, eval_samples)
                figures = self._train(trainer, opened)
                stack.close()  # the bar
                self._finish(trainer, opened, figures)
                # The returned model computes in its own dtype, not in that of the training.
                trainer.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        finally:
            if use_cache is not None:
                self.model.config.use_cache = use_cache  # the trainer turns it off
        return self.model  # type: ignore[no-any-return]  # as it came from the loader

    def _trainer(
        self, folder: TrainingFolder, stack: ExitStack, teacher: Any, train: Any, evaluate: Any
    ) -> Trainer:
        task = self.task
        args = task.args
        args.output_dir = str(folder.training)
        args.resume_from_checkpoint = None  # given to train() instead
        if task.output_dir is None:
            args.save_strategy = type(args.save_strategy)("no")
        if task.own_bar:
            args.disable_tqdm = True
        trainer = _Trainer(
            model=self.model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluate,
            data_collator=task.data.collator(self.model, self.processor, given=task.collator_given),
            processing_class=self.processor,
            teacher=teacher,
            recipe=task.recipe,
            loggers=task.loggers,
        )
        trainer.session_has_begun = self._check_writable
        trainer.folder = folder
        if task.own_bar:
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(TrainingProgress(stack))
        return trainer

    def _check_writable(self) -> None:
        task, session = self.task, self.session
        if task.output_dir is None or not self.is_main:
            return
        if isinstance(self.model, PreTrainedModel):
            packed = task.model_args.save_compressed
            modifiers = session.lifecycle.recipe.modifiers
            found = predict_output(self.model, modifiers, session.state, task.source, packed=packed)
            check_size(task.gates, layout_files(found.planned.stored).file_size)
            check_output_space(task.output_dir, found.planned, task.source)
            # a training is worthwhile anyway: warn only
            check_servable(
                found.config,
                found.planned,
                is_meant=True,
                is_verified=task.run_args.verify,
            )

    def _train(self, trainer: Trainer, folder: TrainingFolder) -> dict[str, Any]:
        """Train the model and return the metrics."""
        task = self.task
        progress = None if task.run_args.resume == "never" else folder.last_checkpoint()
        start = _broadcast(task.resume_from or progress)
        if start is not None:
            logger.info(f"Continuing the training at {start}.")
        began = time.monotonic()
        result = trainer.train(resume_from_checkpoint=None if start is None else str(start))
        figures: dict[str, Any] = dict(result.metrics)
        figures["train_runtime"] = round(time.monotonic() - began, 4)
        number = "" if start is None else start.name.rpartition("-")[2]
        steps = trainer.state.global_step
        taken = steps - (int(number) if number.isdigit() else 0)
        divided_by = taken if divides_by_steps_since_resume(trainer) else steps
        _correct_mean_loss(figures, divided_by, taken, replaced=trainer.loss_was_replaced)
        samples: Any = trainer.train_dataset
        if hasattr(samples, "__len__"):
            figures["train_samples"] = len(samples)
        if not self.session.lifecycle.finalized:
            self.session.finalize()
        self.model.eval()
        check_finite_weights(self.model)
        return figures

    def _finish(self, trainer: Trainer, folder: TrainingFolder, figures: dict[str, Any]) -> None:
        """Write the metrics, the trainer state and the compressed checkpoint, and publish it."""
        task = self.task
        trainer.save_metrics("train", figures)
        if task.args.do_eval and trainer.eval_dataset is not None:
            found = trainer.evaluate()
            _add_perplexity(found, "eval_loss", "eval_perplexity")
            trainer.save_metrics("eval", found)
            figures = {**figures, **found}
        trainer.save_state()
        shown = {name: figures[name] for name in _KEPT_FIGURES if name in figures}
        report = (
            compression_report(
                collect_reports(self.session.lifecycle.recipe.modifiers),
                (name for name, _ in self.model.named_modules()),
            )
            or {}
        )
        report["training"] = {"steps": trainer.state.global_step, **shown}
        if folder.processors:
            report[PROCESSORS] = folder.processors
        said = ", ".join(f"{name} {value:.5g}" for name, value in shown.items())
        if self.is_main:
            logger.info(f"Trained for {trainer.state.global_step} steps: {said}.")
        recipe = task.applied_recipe(self.session.lifecycle.recipe)
        check = verify_saved if task.run_args.verify else None
        page = write_run_page if task.run_args.report else None
        options = SaveOptions(
            recipe=recipe,
            source=task.source,
            report=report,
            run=self.record,
            check=check,
            page=page,
        )
        modify_save_pretrained(self.model, options)
        if task.output_dir is not None:
            given = replace(
                options,
                save_compressed=task.model_args.save_compressed,
                processor=task.processor_to_write(self.processor),
                check=partial(verify_written, kinds=module_kinds(self.model), engine=task.engine)
                if check
                else None,
            )
            self._write(trainer, folder, given)
        self._publish(folder)
        trainer.accelerator.wait_for_everyone()

    def _write(self, trainer: Trainer, folder: TrainingFolder, options: SaveOptions) -> None:
        """Write the checkpoint: all processes gather what is sharded."""
        gathers = has_partitioned_parameters(self.model) or was_loaded_sharded(self.model)
        state = None
        if is_fully_sharded(self.model):  # each process writes a part of each block
            write_spread_checkpoint(self.model, folder.files if self.is_main else None, options)
        elif gathers:
            state = full_state_dict(self.model, keep=self.is_main)
        elif trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # from all processes
        if self.is_main:
            if not is_fully_sharded(self.model):
                write_checkpoint(self.model, folder.files, options, state)
            folder.mark_written()

    def _publish(self, folder: TrainingFolder) -> None:
        """Give the output its name in the main process; GateError on all if it may not get it."""
        task, refused = self.task, None
        if task.output_dir is not None and self.is_main:
            try:
                folder.publish(
                    replace=task.model_args.overwrite,
                    keep_checkpoints=task.keeps_checkpoints,
                    gate=self.gates,
                )
            except GateError as error:
                refused = error
            else:
                logger.info(f"Saved {task.output_dir}.")
                tell_summary(task.output_dir)
        if self.gates is not None and (refused := _broadcast(refused)) is not None:
            raise refused

    def _publish_finished(self, folder: TrainingFolder) -> Module:
        """Publish the output of a training that was killed after writing it, and load the model."""
        logger.info("The training was done and its output written: it only gets its name.")
        self._publish(folder)
        _broadcast(None)  # wait until it is published
        with loading_compressed():
            model = type(self.model).from_pretrained(self.task.output_dir, dtype="auto")
        return model.eval()  # type: ignore[no-any-return]  # as it came from the loader


def _check_alike(task: Training, identity: Mapping[str, Any], samples: Any) -> None:
    """Refuse processes whose trainings differ.

    Raises:
        ArgumentError: names what differs; on all processes.
    """
    if task.args.world_size == 1:
        return
    processes = Processes.from_process_group()
    but = {MOMENT, "place"} | (set() if hasattr(samples, "__len__") else {"data"})
    own = {name: one for name, one in identity.items() if name not in but}
    if own["teacher"] is not None:
        own["teacher"] = {name: one for name, one in own["teacher"].items() if name != "place"}
    own["output_dir"] = str(task.output_dir)
    with processes.notify_on_failure():
        check_alike(own, lambda value, what: processes.all_gather(what, value))


def _device(task: Training) -> torch.device:
    """Return the device of the trainer, with one accelerator per process."""
    args = task.args
    if args.n_gpu > 1:
        logger.warning(
            f"Of {args.n_gpu} accelerators one is used: start one process for each, with torchrun "
            "or accelerate launch, to use all."
        )
        use_one_accelerator(args)
    asked = task.model_args.device
    computes = torch.device(args.device)
    if asked is not None and torch.device(asked).type != computes.type:
        raise ArgumentError(
            f"The argument 'device' asks for {asked}, and the training computes on {computes}.",
            "Give use_cpu (--use-cpu) for the CPU, or leave device out.",
        )
    sharded = args.deepspeed or args.fsdp_plugin_args is not None
    return torch.device("cpu") if sharded else computes


def _move_given_model(model: Any, task: Training, device: torch.device) -> None:
    """Move a model object to the trainer's device, unless it is on several devices already."""
    given = not isinstance(task.model_args.model, str | Path)
    if not given or hasattr(model, "hf_device_map") or has_partitioned_parameters(model):
        return
    here = {parameter.device.type for parameter in model.parameters()}
    if here != {device.type}:
        logger.info(f"The model is moved to {device}, where the training computes.")
        model.to(device)


def _check_precision(model: Module, task: Training) -> None:
    """Warn about training in float16 or bfloat16 weights, and refuse float16 with fp16."""
    narrow = {
        str(each.dtype).removeprefix("torch.")
        for each in model.parameters()
        if each.requires_grad and each.dtype in (torch.float16, torch.bfloat16)
    }
    if "float16" in narrow and task.args.fp16:
        raise ArgumentError(
            "The weights are float16, and mixed precision (fp16) scales gradients of float32 "
            "weights only.",
            "Give precision='float32' (--precision float32).",
        )
    if narrow:
        logger.warning(
            f"The weights are {' and '.join(sorted(narrow))} and are trained as they are: a step "
            "that is small beside its weight is rounded away. precision='float32' "
            "(--precision float32), with bf16=True on an accelerator, keeps every step."
        )


def _broadcast(found: T) -> T:
    """Broadcast a value from the first process to all."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return found
    box = [found]
    dist.broadcast_object_list(box)
    return box[0]


def _correct_mean_loss(
    figures: dict[str, Any], divided_by: int, taken: int, *, replaced: bool
) -> None:
    """Correct the mean loss of a resumed training to that of the steps taken since."""
    if "train_loss" not in figures:
        return
    if taken <= 0:
        del figures["train_loss"]
        return
    figures["train_loss"] *= divided_by / taken
    if not replaced:  # a replaced loss is no cross entropy; the trainer reports that one itself
        _add_perplexity(figures, "train_loss", "perplexity")


def _add_perplexity(figures: dict[str, Any], loss: str, name: str) -> None:
    if math.isfinite(figures.get(loss, math.nan)):
        figures[name] = math.exp(figures[loss]) if figures[loss] < 700 else math.inf
