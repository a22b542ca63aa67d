# SPDX-License-Identifier: Apache-2.0
"""``train``: train a model while a recipe compresses it, and write a servable checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    TrainingArguments,
)
from llmcompressor.args.parsing import told_by_name
from llmcompressor.entrypoints.oneshot import with_dataclass_signature
from llmcompressor.entrypoints.training_run import run_training
from llmcompressor.entrypoints.training_task import Training
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.numerics.products import float32_by_default
from llmcompressor.reporting.summary import told_run
from llmcompressor.runtime.progress import join_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmcompressor.args.keywords import DataInput, ModelInput, TrainKeywords
    from llmcompressor.recipe import RecipeInput


@told_by_name
@with_dataclass_signature(
    ModelArguments, RecipeArguments, DatasetArguments, TrainingArguments, RunArguments
)
def train(
    model: ModelInput,
    recipe: RecipeInput = None,
    dataset: DataInput = None,
    output_dir: str | Path | None = "./output",
    *,
    loggers: Any = None,
    **arguments: Unpack[TrainKeywords],
) -> PreTrainedModel:
    """Train a model while a recipe compresses it.

    The training is that of transformers' ``Trainer``: its arguments, precision and optimizers, and
    accelerate's support for several processes. The modifiers of the recipe get each step's events.

    Args:
        model: a folder, the id of a model on the hub, or a loaded transformers model, which is
            then trained in place.
        recipe: modifiers, a recipe file or its text, in any form that ``Recipe`` reads; without
            one the model is only trained.
        dataset: training data: a registered name, a file or folder, a ``Dataset``, or a list of
            strings. Labels are the tokens, without those of prompts.
        output_dir: folder for the compressed checkpoint, with the metrics, the trainer's state and
            the recipe; it appears when it is complete. ``None`` writes nothing.
        loggers: a ``LoggerManager``, or a list of loggers, for the session.
        **arguments: every other argument of :class:`~llmcompressor.args.ModelArguments`,
            :class:`~llmcompressor.args.DatasetArguments`,
            :class:`~llmcompressor.args.RecipeArguments` and
            :class:`~llmcompressor.args.TrainingArguments`; of
            :class:`~llmcompressor.args.RunArguments` ``resume`` and ``verify``. With
            ``run_stages`` or ``do_oneshot`` all stages of the recipe are run, as
            :func:`~llmcompressor.entrypoints.stages.run_stages` does, unless ``stage`` names one.

    Returns:
        The trained model; its ``save_pretrained`` writes compressed checkpoints.

    Raises:
        InputError: an invalid argument, recipe, model or data set; the message has the remedy. It
            is raised before the first step, and nothing has been written.
        NonFiniteError: NaN or infinity in weights, before or after the training.
        GateError: the checkpoint does not keep its ``gates``, and is in ``NAME.rejected``.

    Inside ``with create_session():`` that session is used, otherwise a new one. An interrupted
    training is resumed by the same call from the last complete checkpoint in ``NAME.partial``
    next to the output ``NAME``.

    Example::

        train(
            model="./my-model",
            recipe="recipe.yaml",
            dataset="texts.jsonl",
            output_dir="./my-model-pruned",
            num_train_epochs=2,
            learning_rate=1e-5,
        )
    """
    show_runs_quietly()
    given: dict[str, Any] = {
        "model": model,
        "recipe": recipe,
        "dataset": dataset,
        **arguments,
    }
    staged = {"run_stages", "do_oneshot"} & {name for name, value in given.items() if value is True}
    if staged and given.get("stage") is not None:
        logger.warning(
            f"The stage {given['stage']!r} alone is run, as stage says: "
            f"{join_names(sorted(staged))} "
            "has no effect."
        )
    elif staged:
        from llmcompressor.entrypoints.stages import run_stages  # noqa: PLC0415  # it calls train

        rest = {name: value for name, value in given.items() if name not in {"stage", *staged}}
        place = "./output" if output_dir is None else output_dir
        return run_stages(output_dir=place, loggers=loggers, **rest)
    with float32_by_default(), told_run():
        return cast("PreTrainedModel", run_training(Training(output_dir, loggers, **given)))
