# SPDX-License-Identifier: Apache-2.0
"""``oneshot``: read a model, apply a recipe with calibration data, write what serves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    parse_arguments,
)
from llmcompressor.checkpoint.finite import first_nonfinite
from llmcompressor.checkpoint.load import (
    check_unquantized,
    load_model,
    untie_embeddings,
)
from llmcompressor.checkpoint.processor import load_processor
from llmcompressor.checkpoint.save import modify_save_pretrained, save_checkpoint
from llmcompressor.checkpoint.source import local_directory
from llmcompressor.checkpoint.staging import check_output_dir
from llmcompressor.core.session import CompressionSession
from llmcompressor.core.session_functions import active_session
from llmcompressor.datasets import table
from llmcompressor.datasets.calibration import load_calibration
from llmcompressor.datasets.source import Source, open_source
from llmcompressor.errors import ArgumentError, DatasetError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.memory import give_back_freed
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines import PIPELINES, infer_pipeline
from llmcompressor.recipe import Recipe

__all__ = ["Oneshot", "oneshot"]

_SHARE_FOR_WEIGHTS = 0.6
"""Of an accelerator's free memory: the rest is for activations and solvers."""


def oneshot(
    model: Any,
    recipe: Any = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    log_dir: str | Path | None = None,
    **arguments: Any,
) -> Module:
    """Compress a model once, after training, with calibration data where the recipe needs it.

    Args:
        model: a folder, the id of a model on the hub, or a loaded transformers model.
        recipe: modifiers, a recipe file or its text, in any form that ``Recipe`` reads.
        dataset: calibration data: a registered name, a file or folder, a ``Dataset``, a
            ``DataLoader``, or a list of strings.
        output_dir: where to write the compressed checkpoint; nothing is written without it.
        log_dir: write a log file into this folder.
        **arguments: every other argument of :class:`~llmcompressor.args.ModelArguments`,
            :class:`~llmcompressor.args.DatasetArguments` and
            :class:`~llmcompressor.args.RecipeArguments`.

    Returns:
        The compressed model, in memory and ready to run; its ``save_pretrained`` writes
        compressed checkpoints.

    Raises:
        InputError: one of many things that the user can mend; the message says which and how.
            It comes before any calibration, and nothing has been written.
        NonFiniteError: NaN or infinity in weights or activations, with the module's name.

    Example::

        oneshot(
            model="./my-model",
            recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
            dataset="calibration.jsonl",
            output_dir="./my-model-W4A16",
        )
    """
    given = {"model": model, "recipe": recipe, "dataset": dataset, **arguments}
    return Oneshot(output_dir=output_dir, log_dir=log_dir, **given)()


class Oneshot:
    """One run of :func:`oneshot`: its arguments, read and checked, and its steps."""

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
            also_known=("output_dir", "log_dir"),
        )
        self.model_args: ModelArguments = parsed[0]
        self.dataset_args: DatasetArguments = parsed[1]
        self.recipe_args: RecipeArguments = parsed[2]
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
        return _unused(recipe)

    def _check_output(self, output_dir: str | Path | None) -> Path | None:
        if output_dir is None:
            return None
        target = Path(output_dir)
        if self.recipe_args.stage:
            target /= self.recipe_args.stage
        return check_output_dir(target, source=self._source, overwrite=self.model_args.overwrite)

    def _check_data_needed(self) -> None:
        data = self.dataset_args.dataset is not None or self.dataset_args.dataset_path is not None
        needing = self._needing_data
        if needing and not data:
            raise DatasetError(
                f"{type(needing[0]).__name__} needs calibration data, and no dataset was given.",
                "Pass dataset=..., or use a scheme that needs none, such as FP8_DYNAMIC.",
            )

    def _check_pipeline(self) -> None:
        needing = self._needing_data
        if self.dataset_args.pipeline == "datafree" and needing:
            raise ArgumentError(
                f"The datafree pipeline reads no data, and {type(needing[0]).__name__} needs "
                "calibration.",
                "Leave pipeline out, or use a scheme that needs no data, such as FP8_DYNAMIC.",
            )

    @property
    def _needing_data(self) -> list[Modifier]:
        return [each for each in self.recipe.modifiers if each.requires_calibration_data]

    @property
    def _place(self) -> str | None:
        """Where the model comes from: a folder, or its id on the hub."""
        model = self.model_args.model
        if isinstance(model, str | Path):
            return str(model)
        config = getattr(model, "config", None)
        return getattr(config, "name_or_path", "") or getattr(model, "name_or_path", "") or None

    @property
    def _source(self) -> str | None:
        """The model's files on this machine: its folder, or what the hub's cache has of it."""
        if self._place is None:
            return None
        args = self.model_args
        found = local_directory(self._place, revision=args.model_revision, cache_dir=args.cache_dir)
        return None if found is None else str(found)

    def _unless_copied(self, processor: Any) -> Any:
        """Nothing to write where the files of a folder are copied as they are."""
        return None if self._place is not None and Path(self._place).is_dir() else processor

    # ------------------------------------------------------------------ the run

    def __call__(self) -> Module:
        """Load, calibrate, compress, and save."""
        with _log_file(self.log_dir):
            source = self._open_data()
            model = self._load_model()
            processor = self._load_processor(model)
            batches = self._load_data(model, processor, source)
            session = active_session()
            session.reset()
            with _undone_on_error(session):
                self._compress(model, batches, session)
            self._offer_saving(model, processor, session)
            if self.output_dir is not None:
                self._save(model, processor, session)
            if self.recipe_args.clear_sparse_session:
                session.reset()
            return model

    def _open_data(self) -> Source | None:
        """The raw data, before the model: a wrong path is not to cost the time of loading it.

        A registered data set is opened later, because its class may want the processor.
        """
        name = self.dataset_args.dataset
        if not self._needing_data or (isinstance(name, str) and table.find(name) is not None):
            return None
        return open_source(self.dataset_args)

    def _load_model(self) -> Module:
        args = self.model_args
        if not isinstance(args.model, str | Path):
            return self._given_model(args.model)
        model = load_model(
            args.model,
            config_name=args.config_name,
            precision=args.precision,
            tie_word_embeddings=args.tie_word_embeddings,
            trust_remote_code=args.trust_remote_code_model,
            revision=args.model_revision,
            cache_dir=args.cache_dir,
            token=args.use_auth_token,
        )
        return _placed(model, args.device)

    def _given_model(self, given: Any) -> Module:
        writable = hasattr(given, "config") and hasattr(given, "save_pretrained")
        if not isinstance(given, Module) or (self.output_dir is not None and not writable):
            raise ArgumentError(
                f"The model is a {type(given).__name__}, which cannot be compressed"
                f"{' and written' if self.output_dir else ''}.",
                "Pass a folder, the id of a model on the hub, or a loaded transformers model.",
            )
        model: Any = given
        check_unquantized(model)
        _check_values(model)
        if not self.model_args.tie_word_embeddings:
            untie_embeddings(model)
        if self.model_args.device is not None:
            model.to(self.model_args.device)
        return given

    def _load_processor(self, model: Module) -> Any:
        args = self.model_args
        place = self._place
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

    def _load_data(self, model: Module, processor: Any, source: Source | None) -> Any:
        if not self._needing_data:
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

    def _compress(self, model: Module, batches: Any, session: CompressionSession) -> None:
        _check_finite(model)
        session.initialize(
            model=model,
            start=-1,
            recipe=self.recipe,
            calib_data=batches,
            copy_data=False,
        )
        if self.recipe.modifiers:
            PIPELINES.load(self._pipeline())()(model, batches, self.dataset_args)
        session.finalize()

    def _pipeline(self) -> str:
        """The pipeline to run: the user's, with a word where it cannot do what is needed."""
        asked = self.dataset_args.pipeline or "independent"
        inferred = infer_pipeline(self.recipe.modifiers)
        if asked != "independent" and inferred == "datafree":
            if asked != "datafree":
                logger.info(f"The recipe needs no data: {asked} would run the model for nothing.")
            return "datafree"
        return asked

    # ------------------------------------------------------------------ saving

    def _offer_saving(self, model: Module, processor: Any, session: CompressionSession) -> None:
        """From now on ``model.save_pretrained`` writes compressed."""
        if hasattr(model, "save_pretrained"):
            modify_save_pretrained(
                model,  # type: ignore[arg-type]  # it has what a PreTrainedModel has
                recipe=session.get_serialized_recipe(),
                source=self._source,
                processor=None,
                report=_report(session),
            )

    def _save(self, model: Any, processor: Any, session: CompressionSession) -> None:
        assert self.output_dir is not None
        give_back_freed()
        save_checkpoint(
            model,
            self.output_dir,
            save_compressed=self.model_args.save_compressed,
            processor=self.model_args.processor or self._unless_copied(processor),
            recipe_yaml=session.get_serialized_recipe(),
            source=self._source,
            overwrite=self.model_args.overwrite,
            report=_report(session),
        )


def _check_values(model: Module) -> None:
    """Refuse a model without weights; accelerate's offloaded modules have theirs elsewhere."""
    for name, module in model.named_modules():
        own = module._parameters.values()
        empty = any(parameter is not None and parameter.is_meta for parameter in own)
        if empty and not hasattr(module, "_hf_hook"):
            raise ArgumentError(
                f"The weights of {name} have no values, they are on the meta device.",
                "Load the model's weights, or pass its folder instead of the model.",
            )


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


def _report(session: CompressionSession) -> Mapping[str, Any] | None:
    """What the modifiers recorded of their work."""
    records = {
        type(modifier).__name__: modifier.report()
        for modifier in session.lifecycle.recipe.modifiers
        if modifier.report()
    }
    return {"modifiers": records} if records else None


def _check_finite(model: Module) -> None:
    """Refuse a broken model also where no modifier would look at the broken weight."""
    bad = first_nonfinite(model)
    if bad is not None:
        raise NonFiniteError(
            f"The weight {bad} holds NaN or infinity. The checkpoint is damaged or was saved in a "
            "dtype too narrow for it: get it anew, or load it with precision='float32' if its "
            "files are in float32."
        )


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


def _placed(model: Module, device: str | None) -> Module:
    """``model`` where it is to compute: as asked, else on an accelerator that it fits on."""
    if device is not None:
        return model.to(device)
    if not torch.cuda.is_available():
        return model
    free, _ = torch.cuda.mem_get_info()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > free * _SHARE_FOR_WEIGHTS:
        logger.warning(
            f"The model takes {size / 2**30:.1f} GiB and the accelerator has "
            f"{free / 2**30:.1f} GiB free: it computes on the CPU."
        )
        return model
    return model.to("cuda")


@contextmanager
def _undone_on_error(session: CompressionSession) -> Iterator[None]:
    """No hook and no half-done modifier stays behind when something fails."""
    try:
        yield
    except BaseException:
        session.reset()
        raise


@contextmanager
def _log_file(log_dir: str | Path | None) -> Iterator[None]:
    """Also write the log to a file in ``log_dir``, for the time of the run."""
    if log_dir is None:
        yield
        return
    name = f"oneshot_{datetime.now():%Y-%m-%d_%H-%M-%S}.log"
    sink = logger.add(str(Path(log_dir) / name), level="DEBUG")
    try:
        yield
    finally:
        logger.remove(sink)
