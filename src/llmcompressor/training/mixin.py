# SPDX-License-Identifier: Apache-2.0
"""A mixin that makes a trainer drive the active session."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, has_length

from llmcompressor.checkpoint.names import drop_dequantizing_conversions
from llmcompressor.checkpoint.save import SaveOptions, modify_save_pretrained
from llmcompressor.datasets.samples import MAIN_INPUTS
from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.metrics import BaseLogger, LoggerManager
from llmcompressor.modeling.call_graph import model_dtype
from llmcompressor.modeling.patches import modules_with_adapters
from llmcompressor.modeling.sharded import was_loaded_sharded
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.arguments import RecipeArgs
from llmcompressor.recipe.recipe import RecipeInput, renew_recipe
from llmcompressor.runtime.progress import hide_tqdm_bars
from llmcompressor.session.functions import active_session
from llmcompressor.training.callbacks import SessionEvents, TrainingProgress, summary
from llmcompressor.training.checkpoints import (
    checkpoint_to_resume,
    invalid_generation_written,
    write_checksums,
    write_session,
)
from llmcompressor.training.checks import check_can_train, check_trainer, zero_stage
from llmcompressor.training.driver import (
    SessionDriver,
    modifiers_to_apply,
    remove_checkpoint_wrappers,
)
from llmcompressor.training.loss import (
    RunLoss,
    count_step_tokens,
    count_targets,
    explain_missing_loss,
    micro_batch_share,
    token_weight,
)
from llmcompressor.training.optimizer import bare_optimizer, parameter_ids, train_new_parameters
from llmcompressor.transformers_internals import keep_columns, overrides_steps, trainer_step

if TYPE_CHECKING:
    # The mixin precedes a trainer among the bases of a class, whichever trainer that is.
    from transformers import Trainer as _Base
else:
    _Base = object


@overrides_steps
class SessionManagerMixIn(_Base):
    """Makes a subclass of ``transformers.Trainer`` send its events to the active session.

    ::

        class SparseSFTTrainer(SessionManagerMixIn, SFTTrainer): ...

    ``train()`` begins the session when the optimizer is created: modifiers are initialized with
    the model before it is wrapped for its distribution and with the real optimizer, and
    parameters that they add to the model go to the optimizer. It finalizes the session at its end.

    Args:
        *args: arguments of the other base.
        recipe: the recipe, in any form; by default that of the active session, if it has one.
        recipe_args: values for the recipe's arguments.
        recipe_stage: the stage of the recipe to apply.
        stage: the same as ``recipe_stage``.
        teacher: the teacher model of distillation.
        model_args: kept as an attribute.
        data_args: kept as the attribute ``dataset_args``.
        dataset_args: the same as ``data_args``.
        loggers: a ``LoggerManager`` or loggers, for the session.
        **kwargs: arguments of the other base.

    Attributes:
        loss_was_replaced: modifiers replaced the model's own loss in the last training.

    Raises:
        RecipeError: the recipe cannot be read, or one of its modifiers cannot train.
        ArgumentError: the teacher is no model.
    """

    def __init__(
        self,
        *args: Any,
        recipe: RecipeInput = None,
        recipe_args: RecipeArgs = None,
        recipe_stage: str | None = None,
        stage: str | None = None,
        teacher: Module | None = None,
        model_args: Any = None,
        data_args: Any = None,
        dataset_args: Any = None,
        loggers: LoggerManager | Iterable[BaseLogger] | None = None,
        **kwargs: Any,
    ) -> None:
        if teacher is not None and not isinstance(teacher, Module):
            raise ArgumentError(
                f"The teacher is a {type(teacher).__name__}, not a model.",
                "Load it: AutoModelForCausalLM.from_pretrained(...).",
            )
        self.recipe = recipe
        self.recipe_args = recipe_args
        self.recipe_stage = stage if recipe_stage is None else recipe_stage
        self.teacher = teacher
        self.model_args = model_args
        self.dataset_args = data_args if dataset_args is None else dataset_args
        self._session_loggers = loggers
        self._driver: SessionDriver | None = None
        self._weights_to_load: str | None = None
        self._tokens_in_step: Tensor | None = None
        self._next_recipe = self._read_recipe()
        self.loss_was_replaced = False
        super().__init__(*args, **kwargs)
        self.add_callback(SessionEvents(lambda: self._driver, self._session_is_ready))
        if not sys.stderr.isatty() and self.pop_callback(ProgressCallback) is not None:
            self.add_callback(TrainingProgress(terminal=False))

    # ---- the run

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> TrainOutput:
        """Train as the other base does, and apply the recipe meanwhile.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or true for the last complete one.
            *args: arguments of the other base.
            **kwargs: arguments of the other base.

        Returns:
            The result of the other base. Its metrics also have the model's number of parameters,
            sparsity and quantized share; and where modifiers replaced the loss, the model's own
            (``task_loss``) and its exponential (``perplexity``). From here on the model, and so
            ``save_model``, is saved compressed.

        Raises:
            CheckpointError: there is no complete checkpoint, or it has no session.
            RecipeError: the checkpoint has another recipe.
            ArgumentError: modifiers do not support one of the trainer's arguments.
        """
        folder = checkpoint_to_resume(resume_from_checkpoint, Path(self.args.output_dir or "."))
        driver = self._driver = self._new_driver(folder)
        drop_dequantizing_conversions(
            self.model
        )  # checkpoints of the training are written by transformers
        makes_optimizer = getattr(self, "optimizer", None) is None
        try:
            with invalid_generation_written(self.accelerator.unwrap_model(self.model)):
                output = super().train(None if folder is None else str(folder), *args, **kwargs)
            driver.finish()
        except BaseException:
            driver.abandon()
            if makes_optimizer:  # it has parameters that modifiers have removed from the model
                self.optimizer = self.lr_scheduler = None
            raise
        finally:
            self._driver, self._weights_to_load = None, None
        model = self.accelerator.unwrap_model(self.model)
        remove_checkpoint_wrappers(model)
        is_whole = isinstance(model, PreTrainedModel) and not modules_with_adapters(model)
        if is_whole and driver.session.lifecycle.recipe.modifiers:
            # from here on, for save_model too; checkpoints of the training hold what is trained
            recipe = driver.session.get_serialized_recipe()
            modify_save_pretrained(model, SaveOptions(recipe=recipe))
        self.loss_was_replaced = driver.run_loss.is_replaced
        self._tell_losses(output.metrics, driver.run_loss)
        figures = summary(model)
        output.metrics.update(figures)
        if self.is_world_process_zero():
            logger.info(
                f"The model has {figures['total_params']:,.0f} parameters; of its matrices' "
                f"elements {figures['sparsity_percent']:.1f} % are zero and "
                f"{figures['quantized_percent']:.1f} % are quantized."
            )
        return output

    @staticmethod
    def _tell_losses(metrics: dict[str, float], losses: RunLoss) -> None:
        """Correct the metrics if the trainer reports a loss that did not exist."""
        metrics.update(losses.figures())
        if losses.has_no_loss and metrics.pop("train_loss", None) is not None:
            logger.warning(
                "No step had a loss that is a number: either no token had a label, or the training "
                "has diverged. There is no train_loss."
            )

    def _read_recipe(self) -> Recipe | None:
        if self.recipe is None:
            return None
        recipe = Recipe.create_instance(
            self.recipe, target_stage=self.recipe_stage, recipe_args=self.recipe_args
        )
        check_can_train(recipe.modifiers)
        return recipe

    def _new_driver(self, checkpoint: Path | None) -> SessionDriver:
        # Modifiers can be used once: a second training reads the recipe again.
        recipe, self._next_recipe = self._next_recipe or self._read_recipe(), None
        recipe = None if recipe is None else renew_recipe(recipe)
        session = active_session()
        if modifiers := modifiers_to_apply(session, recipe):
            check_trainer(self, modifiers)
        return SessionDriver(
            session,
            checkpoint,
            recipe=recipe,
            strategy=self._strategy(),
            teacher_model=self.teacher,
            train_data=self.train_dataset,
            loggers=self._session_loggers,
            batches_per_step=self.args.gradient_accumulation_steps,
        )

    def _strategy(self) -> str:
        if self.is_fsdp_enabled or was_loaded_sharded(self.model):
            return "fsdp"
        if self.is_deepspeed_enabled:
            return "zero3" if zero_stage(self.accelerator.state) == 3 else "deepspeed"
        return "ddp" if self.args.world_size > 1 else "none"

    def set_initial_training_values(
        self, args: Any, dataloader: Any, *rest: Any, **kwargs: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Override to pass the length of an epoch and the run to the session."""
        values = super().set_initial_training_values(args, dataloader, *rest, **kwargs)
        if self._driver is not None:
            epoch = values[1] if has_length(dataloader) else None
            self._driver.measure(steps_per_epoch=epoch, max_steps=values[-1])
        return values

    def restore_position(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Override to restore the position in a stream, which the trainer cannot compute."""
        found: tuple[int, int] = trainer_step(super(), "restore_position")(*args, **kwargs)
        place = None if self._driver is None else self._driver.place.resumed
        if place is None or self.args.ignore_data_skip or has_length(self.train_dataset):
            return found
        return place

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Override to begin the session in ``train`` once the optimizer exists.

        The optimizer is created first, so that modifiers find it when they are initialized;
        parameters that they add are added to it afterwards. Both happen before the model is
        wrapped.
        """
        optimizer = super().create_optimizer(*args, **kwargs)
        driver = self._driver
        if driver is None or driver.begun:
            return optimizer
        model = self.accelerator.unwrap_model(self.model)
        before = parameter_ids(model)
        driver.begin(model, bare_optimizer(optimizer))
        train_new_parameters(
            model, bare_optimizer(optimizer), before, has_scheduler=self.lr_scheduler is not None
        )
        if self._weights_to_load is not None:
            trainer_step(super(), "restore_weights")(self._weights_to_load)
        return optimizer

    def restore_weights(self, folder: str, model: Any = None) -> None:
        """Override to load weights only once the model has the parameters of the modifiers."""
        if self._driver is not None and not self._driver.begun:
            self._weights_to_load = folder
        else:
            trainer_step(super(), "restore_weights")(folder, model)

    def _session_is_ready(self) -> None:
        if self._driver is not None and self._driver.begun:
            optimizer = bare_optimizer(self.optimizer)
            self._driver.ready(self.model_wrapped, optimizer, self.state.global_step)

    # ---- events

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Override to send ``BATCH_START`` before the step."""
        driver = self._driver
        if driver is None or not driver.begun:
            return super().training_step(model, inputs, *args, **kwargs)
        driver.place.take_batch()
        driver.batch_start(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)
        driver.backward_done()
        return loss

    def choose_columns(self) -> None:
        """Keep all columns that the model accepts, as a custom collator may pass them on.

        TRL's trainers keep those that their own collators use, and masks are not among them.
        """
        trainer_step(super(), "choose_columns")()
        model: Any = self.model
        keep_columns(self, inspect.signature(model.forward).parameters)

    def prepare_inputs(self, inputs: Any) -> Any:
        """Give the model embeddings, sounds and pictures in its own dtype, as calibration does.

        In mixed precision autocast does so.
        """
        prepared = trainer_step(super(), "prepare_inputs")(inputs)
        if self.args.bf16 or self.args.fp16 or not isinstance(prepared, dict):
            return prepared
        model: Any = self.model
        dtype = model_dtype(model)
        for name in MAIN_INPUTS & prepared.keys():
            if isinstance(value := prepared[name], Tensor) and value.is_floating_point():
                prepared[name] = value.to(dtype)
        return prepared

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Override to count the tokens of the step."""
        samples, items = super().get_batch_samples(*args, **kwargs)
        if self._driver is not None:
            self._tokens_in_step = count_step_tokens(self, samples)
        return samples, items

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Override to let modifiers replace the loss in training."""
        driver = self._driver
        in_training = driver is not None and driver.awaits_loss  # evaluation calls this too
        share = weight = targets = None
        if driver is not None and in_training:
            driver.batch_on_device(inputs)
            targets = count_targets(self, inputs)  # now: labels may be removed later
            share = micro_batch_share(self, inputs, num_items_in_batch)
            weight = token_weight(self, inputs, self._tokens_in_step, share)
        with explain_missing_loss():
            result: Any = super().compute_loss(
                model,
                inputs,
                return_outputs=return_outputs,
                num_items_in_batch=num_items_in_batch,
                **kwargs,
            )
        if driver is None or not in_training:
            return result
        if not return_outputs:
            return driver.loss(result, share, weight, targets)
        loss, outputs = result
        return driver.loss(loss, share, weight, targets), outputs

    # ---- checkpoints and logs

    def write_checkpoint(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Override to write the session's file first, and checksums last."""
        trial = args[0] if args else kwargs.get("trial")
        runs = Path(trainer_step(self, "checkpoints_folder")(trial=trial))
        folder = runs / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self._driver is not None and self._driver.begun:
            saved = self._driver.session.lifecycle.state_dict() | self._driver.place.record()
            if self.args.should_save:
                write_session(folder, saved)
            # No process may write into the folder while it may still look complete.
            self.accelerator.wait_for_everyone()
        with hide_tqdm_bars():  # one bar per file would interrupt that of the training
            trainer_step(super(), "write_checkpoint")(model, *args, **kwargs)
        if self.args.should_save and folder.is_dir():  # else it was rotated out at once
            write_checksums(folder)

    def write_rng_state(self, *args: Any, **kwargs: Any) -> None:
        """Override to return only when every process has written its file."""
        trainer_step(super(), "write_rng_state")(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def restore_best_model(self) -> None:
        """Override to restore the modifiers' state of the same step too."""
        trainer_step(super(), "restore_best_model")()
        if self._driver is not None and self._driver.begun:
            self._driver.restore_checkpoint(Path(self.state.best_model_checkpoint or ""))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Override to add the modifiers' metrics to the loss of a training."""
        if self._driver is not None and self._driver.begun and "loss" in logs:
            logs = {**logs, **self._driver.figures()}
        super().log(logs, *args, **kwargs)


# --------------------
# transformers' ``Trainer`` with a recipe.


class Trainer(SessionManagerMixIn, transformers.Trainer):
    """``transformers.Trainer`` that applies a recipe while it trains.

    It takes the arguments of both of its bases.
    """
