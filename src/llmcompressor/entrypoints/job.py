# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``oneshot``, read and checked before any work, and the steps of every run."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.args.parsing import those_of_training
from llmcompressor.checkpoint.finished_run import FinishedRun
from llmcompressor.checkpoint.save import RECIPE_FILE
from llmcompressor.checkpoint.write_errors import check_file
from llmcompressor.datasets import table
from llmcompressor.datasets.calibration import load_calibration
from llmcompressor.datasets.source import Source, check_name, open_source
from llmcompressor.entrypoints.data_limits import data_limits, placeholders
from llmcompressor.entrypoints.data_prints import values_print
from llmcompressor.entrypoints.task import (
    Records,
    Task,
    as_path,
    compression_report,
    report_of,
    undone_on_error,
)
from llmcompressor.errors import ArgumentError, DatasetError, OutputError
from llmcompressor.logger import logger
from llmcompressor.modeling.spilled import activation_budget
from llmcompressor.modeling.spread import is_spread
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines import PIPELINES, infer_pipeline
from llmcompressor.processes import Processes
from llmcompressor.recipe import Recipe
from llmcompressor.wording import listed

__all__ = ["Job", "Records", "compression_report", "report_of", "undone_on_error"]

_OWN = __name__.partition(".")[0]
_WITHOUT_EFFECT = {
    "distill_teacher": "a teacher is for train",
    "max_train_samples": "num_calibration_samples is its like",
    "sequential_offload_device": "activations wait where activation_budget has room",
    "sequential_prefetch": "there is nothing to fetch",
    "sequential_targets_per_subgraph": "blocks are calibrated one by one",
}
"""Arguments that scripts give, and why nothing comes of them."""
_WITHOUT_DATA = "QuantizationModifier needs none with a scheme such as FP8_DYNAMIC."


class Job(Task):
    """The arguments of a run, read and checked, and the steps that every way to run it takes.

    Attributes:
        processes: those that each do this job.
        told_fingerprint: of the output that the first of them has made.
    """

    processes = Processes()
    told_fingerprint: str | None = None

    def __init__(
        self,
        output_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        arguments = _without_those_of_training(arguments)
        super().__init__("oneshot", output_dir, (), arguments, also_known=("log_dir",))
        self.log_dir = as_path("log_dir", log_dir)
        self._check_log_dir()
        self._give_data()
        self._check_data_needed()
        self._check_pipeline()
        self._tell_of_schedules()
        self._tell_without_effect()

    # ------------------------------------------------------------------ checks, before anything

    def _read_recipe(self) -> Recipe:
        recipe = super()._read_recipe()
        if not recipe.modifiers:
            logger.warning("The recipe is empty: the model will not be changed.")
        return recipe

    def _may_be_finished(self, target: Path) -> bool:
        """As far as the recipe tells; the rest is known when model and data are."""
        if self.run_args.resume == "never" or self.model_args.overwrite:
            return False
        if FinishedRun.read(target) is None:
            return False
        file = target / RECIPE_FILE
        found = file.read_text(encoding="utf-8") if file.is_file() else None
        return found == self.applied_recipe(self.recipe)

    def _check_log_dir(self) -> None:
        if self.log_dir is None:
            return
        self.log_dir = logs = self.log_dir.expanduser().resolve()
        check_file(logs / "oneshot.log", "The file of log_dir")
        if self.output_dir in (logs, *logs.parents):
            raise OutputError(
                f"log_dir, {logs}, lies in the output directory {self.output_dir}.",
                "Choose a folder beside it: the output appears at the end, as a whole.",
            )

    def _give_data(self) -> None:
        """A pipeline that is asked for runs: modifiers of others may watch with hooks of theirs.

        The project's own say what they need; for them alone it would run the model for nothing.
        """
        if not self.has_data or self.dataset_args.pipeline in (None, "independent", "datafree"):
            return
        for each in self._foreign():
            each.be_given_data()

    def _foreign(self) -> list[Modifier]:
        """The modifiers that are not the project's own."""
        return [
            each
            for each in self.recipe.modifiers
            if type(each).__module__.partition(".")[0] != _OWN
        ]

    def _check_data_needed(self) -> None:
        needing = self.needing_data
        if needing and not self.has_data:
            raise DatasetError(
                f"{type(needing[0]).__name__} needs calibration data, and no dataset was given.",
                f"Pass dataset=...; {_WITHOUT_DATA}",
            )
        if self.has_data and self.recipe.modifiers and not self._reads_data:
            check_name(self.dataset_args)
            logger.info("The dataset is not read: no modifier of the recipe needs data.")
            self._tell_how_to_ask()

    def _tell_how_to_ask(self) -> None:
        names = ", ".join(type(each).__name__ for each in self._foreign())
        if names:
            logger.warning(
                f"The dataset is not read, and {names} may want it: write "
                "requires_calibration_data: ClassVar[bool] = True in the class, or ask for a "
                "pipeline (sequential)."
            )

    def _tell_of_schedules(self) -> None:
        for each in self.recipe.modifiers:
            for name, value in (("start", each.start), ("end", each.end)):
                if value not in (None, 0, -1):
                    logger.warning(
                        f"{name}: {value:g} of {type(each).__name__} has no effect in oneshot, "
                        "which has no steps. It is for train."
                    )

    def _tell_without_effect(self) -> None:
        arguments = (self.model_args, self.dataset_args)
        given = [
            one.name
            for each in arguments
            for one in fields(each)
            if one.name in _WITHOUT_EFFECT and getattr(each, one.name) != one.default
        ]
        if given:
            logger.warning(
                "Without effect in oneshot: "
                f"{', '.join(f'{name} ({_WITHOUT_EFFECT[name]})' for name in given)}."
            )

    def _check_pipeline(self) -> None:
        needing = self.needing_data
        if self.dataset_args.pipeline == "datafree" and needing:
            raise ArgumentError(
                f"The datafree pipeline reads no data, and {type(needing[0]).__name__} needs "
                "calibration.",
                f"Leave pipeline out; {_WITHOUT_DATA}",
            )

    @property
    def needing_data(self) -> list[Modifier]:
        """The modifiers that calibration data has to run for."""
        return [each for each in self.recipe.modifiers if each.requires_calibration_data]

    @property
    def _reads_data(self) -> bool:
        """Whether a modifier needs the data, or a pipeline of the user's gets it."""
        own = self.has_data and PIPELINES.is_added(self.dataset_args.pipeline or "")
        return own or bool(self.needing_data)

    def open_data(self) -> Source | None:
        """The raw data, before the model: a wrong path is not to cost the time of loading it.

        A registered data set is opened later, because its class may want the processor.
        """
        name = self.dataset_args.dataset
        if not self._reads_data or (isinstance(name, str) and table.find(name) is not None):
            return None
        return open_source(self.dataset_args)

    def _is_ready_data(self) -> bool:
        args = self.dataset_args
        return isinstance(args.dataset, torch.utils.data.DataLoader) or (
            _is_tokenized(args.dataset)
            and args.preprocessing_func is None
            and args.data_collator == "truncation"
        )

    def load_data(self, model: Module, processor: Any, source: Source | None) -> Any:
        """The calibration batches, if anything reads them."""
        if not self._reads_data:
            return None
        with self.told_why():
            return load_calibration(
                self.dataset_args,
                processor=processor,
                source=source,
                processes=None if is_spread(model) else self.processes,
                placeholders=placeholders(model),
                **data_limits(model),
            )

    def pooled(self, loader: Any) -> list[Any] | None:
        """The batches of a loader, and those that other processes were given."""
        if loader is None:
            return None
        own, count = list(loader), self.processes.count
        if count == 1:
            return own
        batches, parts = self.processes.pooled(own, values_print(own))
        whose = f"those of {parts} processes together" if parts > 1 else "the same for all"
        logger.info(
            f"Calibration with {_samples_of(batches)} samples, {whose}; {count} processes do not "
            "share the work."
        )
        return list(batches)

    def share_memory(self) -> None:
        """Give all processes the same room for activations: it decides where forwards pause."""
        if self.processes.count == 1 or self.dataset_args.activation_budget is not None:
            return
        mine = (platform.node(), activation_budget(None))
        found = self.processes.agree("free memory", mine)
        beside = Counter(node for node, _ in found)
        least = min(budget // beside[node] for node, budget in found)
        self.dataset_args = replace(self.dataset_args, activation_budget=max(1, least))

    def check_batches(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Refuse, before the first pass, calibration data that a modifier could not work with."""
        for each in self.recipe.modifiers:
            each.check_data(batches, use_loss_mask=self.dataset_args.use_loss_mask)

    def pipeline(self) -> str:
        """The pipeline to run: the user's, with a word where it cannot do what is needed."""
        asked = self.dataset_args.pipeline or "independent"
        if PIPELINES.is_added(asked):
            return asked
        inferred = infer_pipeline(self.recipe.modifiers)
        if asked != "independent" and inferred == "datafree":
            if asked != "datafree":
                logger.info(
                    f"The recipe collects no data: {asked} would run the model for nothing."
                )
            return "datafree"
        return asked


_ON_THE_CPU = ("use_cpu", "no_cuda")
"""Arguments of training, now and before, that ask for no accelerator."""


def _without_those_of_training(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments less those that a script gives to every run, and training alone goes by.

    Of these one asks for a device, too.
    """
    theirs = those_of_training(
        given, ModelArguments, DatasetArguments, RecipeArguments, RunArguments
    )
    kept = {name: value for name, value in given.items() if name not in theirs}
    asking = [name for name in theirs if name in _ON_THE_CPU and given[name] is True]
    if asking and not {"device", "oneshot_device"} & kept.keys():
        kept["device"] = "cpu"
    if told := [name for name in theirs if given[name] is not None and name not in asking]:
        logger.warning(f"Without effect in oneshot, where nothing is trained: {listed(told)}.")
    return kept


def _samples_of(batches: Iterable[Mapping[str, Any]]) -> int:
    firsts = (
        next((each for each in one.values() if isinstance(each, Tensor)), ()) for one in batches
    )
    return sum(map(len, firsts))


def _is_tokenized(data: Any) -> bool:
    """Whether rows have token ids already: nothing has to be prepared then."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):
        return "input_ids" in names
    if isinstance(data, Mapping):
        return "input_ids" in data
    first = data[0] if isinstance(data, list) and data else None
    return isinstance(first, Mapping) and "input_ids" in first
