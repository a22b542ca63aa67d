# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``oneshot``, parsed and checked before any work, and the steps of every run."""

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
    """Arguments of a ``oneshot`` run, parsed and checked, and the steps common to all runs.

    Attributes:
        processes: the processes that execute this run.
        told_fingerprint: fingerprint of the output that the first process has written.
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
        """Compare the recipe only; the rest is compared once model and data are known."""
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
        """Give data to third-party modifiers if the user names a pipeline that runs data.

        They may watch it with hooks of their own. Modifiers of this package declare their needs, so
        that the pipeline need not run for them alone.
        """
        if not self.has_data or self.dataset_args.pipeline in (None, "independent", "datafree"):
            return
        for each in self._foreign():
            each.be_given_data()

    def _foreign(self) -> list[Modifier]:
        """Modifiers of third parties."""
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
        """Modifiers that need calibration data."""
        return [each for each in self.recipe.modifiers if each.requires_calibration_data]

    @property
    def _reads_data(self) -> bool:
        """True if a modifier or a custom pipeline needs the data."""
        own = self.has_data and PIPELINES.is_added(self.dataset_args.pipeline or "")
        return own or bool(self.needing_data)

    def open_data(self) -> Source | None:
        """Open the raw data before the model is loaded, so that a wrong path fails early.

        A registered data set is opened later, because its class may need the processor.
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
        """Load the calibration batches; ``None`` if the run needs no data."""
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
        """Collect the batches of a loader and those of the other processes."""
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
        """Give all processes the same activation budget, as it determines where forwards pause."""
        if self.processes.count == 1 or self.dataset_args.activation_budget is not None:
            return
        mine = (platform.node(), activation_budget(None))
        found = self.processes.agree("free memory", mine)
        beside = Counter(node for node, _ in found)
        least = min(budget // beside[node] for node, budget in found)
        self.dataset_args = replace(self.dataset_args, activation_budget=max(1, least))

    def check_batches(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Refuse calibration data that a modifier cannot work with, before the first pass."""
        for each in self.recipe.modifiers:
            each.check_data(batches, use_loss_mask=self.dataset_args.use_loss_mask)

    def pipeline(self) -> str:
        """Name of the pipeline to run: the user's, or ``datafree`` if no modifier needs data."""
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
    """Drop arguments that affect training only, which scripts may pass to every run.

    Those that ask for the CPU are translated to ``device``.
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
    """Return True if the rows have token ids already."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):
        return "input_ids" in names
    if isinstance(data, Mapping):
        return "input_ids" in data
    first = data[0] if isinstance(data, list) and data else None
    return isinstance(first, Mapping) and "input_ids" in first
