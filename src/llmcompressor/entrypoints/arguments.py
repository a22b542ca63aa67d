# SPDX-License-Identifier: Apache-2.0
"""Common base of ``oneshot`` and ``train`` runs: arguments, parsed and checked before any work.

A modifier declares the types of run that it supports (``RecipeRules.run_types``). One that does not
support the present type is refused here, before the run.
"""

from __future__ import annotations

import inspect
import os
import platform
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    parse_arguments,
)
from llmcompressor.args.gates import SIZE
from llmcompressor.args.parsing import training_argument_names
from llmcompressor.budget.options import budgeted
from llmcompressor.budget.search import SettledBudget
from llmcompressor.checkpoint.atomic_output import (
    check_file,
    check_output_dir,
    check_path_argument,
    rejected_folder,
    rounds_folder,
)
from llmcompressor.checkpoint.journal import resumable_fingerprint, rounds_of
from llmcompressor.checkpoint.kept_statistics import KeptStatistics, check_statistics_folder
from llmcompressor.checkpoint.manifest import is_rejected
from llmcompressor.checkpoint.save import RECIPE_FILE
from llmcompressor.checkpoint.side_files import load_processor
from llmcompressor.checkpoint.source import SourceInfo, local_directory
from llmcompressor.core.contract import DataUse
from llmcompressor.core.modifier import Modifier
from llmcompressor.datasets import rows
from llmcompressor.datasets.calibration import load_calibration
from llmcompressor.datasets.source import GOOD_CHOICES, Source, check_data_exists, open_source
from llmcompressor.datasets.text import NoTokenizerError, moment
from llmcompressor.engines.check import Engine
from llmcompressor.entrypoints.fingerprints import (
    call_record,
    sample_fingerprints,
    values_fingerprint,
)
from llmcompressor.entrypoints.verify import engine_of
from llmcompressor.errors import (
    ArgumentError,
    DatasetError,
    OutputError,
    ProcessError,
    RecipeError,
    TargetError,
)
from llmcompressor.logger import logger, quiet
from llmcompressor.modeling.call_graph import main_input_names
from llmcompressor.modeling.matching import matches_any
from llmcompressor.modeling.offload import activation_budget
from llmcompressor.modeling.sharded import full_shape
from llmcompressor.modeling.weights import embeddings
from llmcompressor.pipelines import PIPELINES, infer_pipeline
from llmcompressor.pipelines.kept_statistics import check_statistics_suffice
from llmcompressor.pipelines.passes import KEPT
from llmcompressor.recipe import Recipe, Stage
from llmcompressor.recipe.recipe import applied_stages, renew_recipe
from llmcompressor.recipe.stages import RunType, rename_duplicates
from llmcompressor.recipe.writing import to_yaml
from llmcompressor.runtime.launch import JOIN, patience
from llmcompressor.runtime.processes import Processes
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.budget import KL, Budget, parse_budget
from llmcompressor.session.session import CompressionSession

# --------------------
# Check of a device argument against the devices of this machine.


def parse_device(asked: Any, what: str = "The argument 'device'") -> torch.device:
    """Parse a device argument and check that the device exists.

    Args:
        asked: a name such as ``"cuda:0"``, or a device.
        what: name of the argument, for the error.

    Raises:
        ArgumentError: the name is invalid or the device is missing; lists the devices that exist.

    >>> parse_device("cpu")
    device(type='cpu')
    """
    counts = {"cpu": 1}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        counts[accelerator.type] = torch.accelerator.device_count()
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError):
        why = "no device has that name"
    else:
        if device.type == "meta":
            why = "nothing can be computed there"
        elif (device.index or 0) >= counts.get(device.type, 0):
            why = "this machine, or this build of torch, has none"
        else:
            return device
    names = [kind if count == 1 else f"{kind}:0 to {count - 1}" for kind, count in counts.items()]
    raise ArgumentError(
        f"{what} cannot be {str(asked)!r}: {why}.", f"This machine has {' and '.join(names)}."
    )


# --------------------
# Processes that do a run together.

_PAUSE = 0.02
"""Seconds between two looks for the others."""


@contextmanager
def together(what: str, timeout: float | None = None) -> Iterator[Processes]:
    """Yield the processes of a run when all have come; they leave it together, and the first logs.

    Args:
        what: the function that they call.
        timeout: seconds to wait for the others; ``None``: as :func:`.launch.patience` says.

    Raises:
        ProcessError: one of them has failed, or does not come in time.
    """
    processes = Processes.from_process_group()
    if processes.count == 1:
        yield processes
        return
    with processes.notify_on_failure(), quiet(wanted=not processes.is_first) as warnings:
        _await_others(processes, what, timeout)
        yield processes
        processes.gather_warnings(f"end of {what}", warnings)


def _await_others(processes: Processes, what: str, timeout: float | None) -> None:
    waiting = patience(JOIN)
    seconds = waiting.seconds if timeout is None else timeout
    end = time.monotonic() + seconds
    processes.note(f"0:{what}")
    while absent := [str(rank) for rank, note in enumerate(processes.notes()) if not note]:
        if told := processes.failure():
            raise ProcessError(told)
        if time.monotonic() > end:
            why = (
                f"Rank {processes.rank} has waited {seconds:g} s for rank {', '.join(absent)} of "
                f"{processes.count} to call {what}. Call it on all ranks; if they need longer, "
                f"{waiting.remedy}."
            )
            processes.tell_failure(why)  # to those that come later
            raise ProcessError(why)
        time.sleep(_PAUSE)


@contextmanager
def first_before_others(processes: Processes, what: str) -> Iterator[None]:
    """Let the other processes enter the body when the first one has left it."""
    if not processes.is_first:
        processes.all_gather(what, is_long=True)
    yield
    if processes.is_first:
        processes.all_gather(what, is_long=True)


# --------------------
# Common base of ``oneshot`` and ``train`` runs: arguments, parsed and checked before any work.

Records = dict[str, dict[str, Any]]
"""Class of a modifier → module → what was recorded."""

EXPERTS = "experts"
"""Among :data:`Records`, in the place of a modifier: how many tokens were routed to each expert."""
MOMENT = "moment"
"""The part of a run's identity that says when it began."""

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
    """The arguments of a run, parsed and checked, and the steps that all runs share.

    Args:
        run_type: ``oneshot`` or ``train``.
        output_dir: the output folder; nothing is written without it.
        classes: dataclasses of further arguments.
        arguments: by name.

    Attributes:
        gates: the limits that the output has to keep, those of the recipe among them.
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
        self.call = call_record(run_type, arguments)
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
        self.model_args: ModelArguments = parsed[0]
        # torch.compile wraps the model and renames all parameters
        inner = getattr(self.model_args.model, "_orig_mod", None)
        if inner is not None:
            self.model_args = replace(self.model_args, model=inner)
        self.dataset_args: DatasetArguments = parsed[1]
        self.recipe_args: RecipeArguments = parsed[2]
        self.run_args: RunArguments = parsed[3]
        self.further_args: tuple[Any, ...] = parsed[4:]
        # by default a recipe may untie them: only an explicit True keeps them tied
        self.keeps_ties = bool(arguments.get("tie_word_embeddings", False))
        if self.model_args.device is not None:
            parse_device(self.model_args.device)
        with_gates = self._read_recipe()
        self.gates: dict[str, float] = {**with_gates.gates, **(self.run_args.gates or {})}
        self.recipe = with_gates.without_gates()
        if self.gates:
            self.call["arguments"]["gates"] = self.gates
        self.output_dir = self._check_output(output_dir)
        self._check_gates()
        self.engine = self._check_engine()

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
            for name, device in modifier.traits.devices.items():
                parse_device(device, f"{kind}: {name}")
            for name, file in modifier.traits.files.items():
                check_file(Path(file), f"{kind}: {name}")
        return renew_recipe(recipe)

    def _check_engine(self) -> Engine | None:
        """The engine that the output is verified with, if one is asked for."""
        args = self.run_args
        engine = engine_of(args.verify_with, args.verify_python, args.verify_timeout)
        if engine is not None and (self.output_dir is None or not args.verify):
            missing = "no output directory is" if self.output_dir is None else "verify=False was"
            raise ArgumentError(
                f"The output is to be verified with {engine.name}, and {missing} given.",
                "Give output_dir, or leave verify_with out."
                if self.output_dir is None
                else "Leave one of the two out.",
            )
        return engine

    def _check_output(self, output_dir: str | Path | None) -> Path | None:
        target = as_path("output_dir", output_dir)
        if target is None:
            return None
        if self.recipe_args.stage:
            target /= self.recipe_args.stage
        self.check_free(target)
        return target.expanduser().resolve()

    def _check_gates(self) -> None:
        """Refuse gates without an output, and arguments of gates without any that need them."""
        limits_kl = self.kl_budget is not None
        measures = limits_kl or self.gates.keys() - {SIZE}
        for name in ("gate_dataset", "gate_reference"):
            if getattr(self.run_args, name) is not None and not measures:
                raise ArgumentError(
                    f"The argument {name!r} is of gates that are measured, and none is given.",
                    "Give gates={'kl': 0.02} (--gate kl=0.02) too, or leave it out.",
                )
        keeps = self.run_args.keep_rejected
        if keeps and not limits_kl:
            raise ArgumentError(
                "The argument 'keep_rejected' is of a budget of kl, and there is none.",
                "Leave it out: what does not keep its gates is kept in any case.",
            )
        if not self.gates and not keeps:
            return
        if self.output_dir is None:
            raise ArgumentError(
                "Gates decide whether an output gets its name, and there is no output_dir.",
                "Give output_dir (--output), or leave the gates out.",
            )
        folder = rejected_folder(self.output_dir)
        check_output_dir(folder, source=self.source, is_ours=True)
        if folder.exists() and any(folder.iterdir()) and not is_rejected(folder):
            raise OutputError(
                f"{folder} is where a checkpoint goes that does not keep its gates, and it holds "
                "something else.",
                "Move it elsewhere, or choose another output directory.",
            )

    @cached_property
    def kl_budget(self) -> Budget | None:
        """The budget of the recipe, if it is a limit of the divergence, which is measured."""
        return kl_budget_of(self.recipe)

    def check_free(self, target: Path) -> None:
        """Refuse an output directory that could not be written at the end.

        Args:
            target: the directory.

        Raises:
            OutputError: it is a file, is in use, overlaps the input, or cannot be created.
        """
        check_output_dir(target, source=self.source, overwrite=self.model_args.overwrite)

    @property
    def has_data(self) -> bool:
        """True if a data set was given by name, path or value."""
        return self.dataset_args.dataset is not None or self.dataset_args.dataset_path is not None

    @property
    def place(self) -> str | None:
        """Folder or hub id from which the model was loaded."""
        model = self.model_args.model
        if isinstance(model, str | Path):
            return str(model)
        config = getattr(model, "config", None)
        return getattr(config, "name_or_path", "") or getattr(model, "name_or_path", "") or None

    @property
    def source(self) -> str | None:
        """Local folder of the model's files, also in the hub's cache; ``None`` if there is none."""
        if self.place is None:
            return None
        args = self.model_args
        found = local_directory(self.place, revision=args.model_revision, cache_dir=args.cache_dir)
        return None if found is None else str(found)

    @cached_property
    def moment(self) -> datetime:
        """The moment at which the run began, which one that goes on keeps."""
        recorded: str | None = None
        if self.output_dir is not None and self.run_args.resume != "never":
            found = resumable_fingerprint(self.output_dir, has_progress=False) or {}
            recorded = found.get(MOMENT)
        return moment() if recorded is None else datetime.fromisoformat(recorded)

    def applied_recipe(self, recipe: Recipe) -> str | None:
        """The text of ``recipe.yaml``: the stages of the source's, then those of ``recipe``.

        ``None`` if there are no stages.
        """
        own = recipe.stages if recipe.modifiers else ()
        if self._stages_before:
            text = to_yaml(rename_duplicates([*self._stages_before, *own]))
            try:
                Recipe.create_instance(text)
            except RecipeError as error:  # an order that one run could not have
                logger.warning(f"What was applied before is not part of {RECIPE_FILE}. {error}")
            else:
                return text
        return recipe.yaml() if own else None

    @cached_property
    def _stages_before(self) -> tuple[Stage, ...]:
        file = None if self.source is None else Path(self.source) / RECIPE_FILE
        return () if file is None or not file.is_file() else applied_stages(file)

    # ------------------------------------------------------------------ the processor

    def processor_to_write(self, processor: Any) -> Any:
        """Return the processor to save; ``None`` if the files of the model's folder are copied."""
        if self.model_args.processor is not None:
            return processor
        return None if self.place is not None and Path(self.place).is_dir() else processor

    def load_processor(self) -> Any:
        """Load the tokenizer or processor if the data or the output needs one, else ``None``."""
        place, args = self.place, self.model_args
        wants = args.processor is not None
        if place is not None and not wants:
            copied = self.output_dir is None or Path(place).is_dir()
            wants = not copied or (self.has_data and not self._is_ready_data())
        return self.processor if wants else None

    @cached_property
    def processor(self) -> Any:
        """The tokenizer or processor that was given, else the model's own, loaded lazily.

        ``None`` if the model has none. It can be set to another one.
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
    def explain_missing_processor(self) -> Iterator[None]:
        """Add the reason why no tokenizer was loaded to errors about a missing one."""
        try:
            yield
        except NoTokenizerError as error:
            if not self._no_processor:
                raise
            problem = f"{error.problem.rstrip('.')}. {self._no_processor}"
            raise DatasetError(problem, error.remedy) from error

    def _is_ready_data(self) -> bool:
        """Return True if the data needs no processor."""
        return False


def kl_budget_of(recipe: Recipe) -> Budget | None:
    """Return the budget of a recipe if it is a limit of the divergence."""
    modifier = budgeted(recipe.modifiers)
    found = None if modifier is None else parse_budget(modifier.budget)
    return found if found is not None and found.kind == KL else None


def as_path(argument: str, given: Any) -> Path | None:
    """Return a path argument as a Path, or ``None``.

    Raises:
        ArgumentError: it is not a path.
        OutputError: it is empty.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(
            f"The argument {argument!r} cannot be {given!r}.", "Give the path of a folder."
        )
    check_path_argument(argument, given)
    return Path(given)


def check_run_types(stage: Stage, run_type: RunType) -> None:
    """Refuse modifiers that do not support this type of run.

    Raises:
        RecipeError: a modifier of the stage does not support it.
    """
    for modifier in stage.modifiers:
        if run_type not in type(modifier).rules.run_types and not is_idle(
            modifier, stage, run_type
        ):
            other = _OTHER[run_type]
            raise RecipeError(
                f"{type(modifier).__name__}, in the stage {stage.name!r} of the recipe, "
                f"{_WHY[run_type]}.",
                f"Give the recipe to {other} (llmcompressor {other}), or to run_stages "
                "(llmcompressor run) if it has stages of both kinds.",
            )


def is_idle(modifier: Modifier, stage: Stage, run_type: RunType) -> bool:
    """Return True if a modifier can be left out in a run of this type, where it does nothing.

    It cannot be left out of a stage for the other type of run, or of one without other modifiers
    for this type.
    """
    if run_type not in type(modifier).rules.idle_types or stage.run_type == _OTHER[run_type]:
        return False
    return any(run_type in type(one).rules.run_types for one in stage.modifiers)


def _without_idle(recipe: Recipe, run_type: RunType) -> Recipe:
    """Return the recipe without idle modifiers, with a warning for each."""
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


def collect_reports(modifiers: Sequence[Modifier], names: Container[str] | None = None) -> Records:
    """Collect the reports of modifiers: class → module → record.

    Args:
        modifiers: the modifiers.
        names: of the modules to report; all if ``None``.
    """
    records: Records = {}
    for modifier in modifiers:
        found = modifier.report(names)
        if found:
            records.setdefault(type(modifier).__name__, {}).update(found)
    return records


def compression_report(records: Records, modules: Iterable[str]) -> dict[str, Any] | None:
    """Build the report that is saved with the weights.

    Args:
        records: of modifiers; under :data:`EXPERTS` the tokens of experts.
        modules: names of modules, in the order of the report.
    """
    order = {name: place for place, name in enumerate(modules)}
    ordered = {
        modifier: dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
        for modifier, found in sorted(records.items())
    }
    experts = ordered.pop(EXPERTS, {})
    if not ordered and not experts:
        return None
    return {"modifiers": ordered, **({"experts": experts} if experts else {})}


@contextmanager
def clean_up_on_error(session: CompressionSession) -> Iterator[None]:
    """Remove hooks and unfinished modifiers from the session if the body fails."""
    try:
        yield
    except BaseException:
        session.abort()
        raise


# --------------------
# Maximum sequence length of a model, from its configuration and its position embeddings.
#
# Models with rotary embeddings run beyond the configured length with worse outputs. Models with
# learned position embeddings (OPT, GPT-2, BERT) fail beyond their number of rows.

_MOST_UNUSED = 8
"""Rows that a table may have beyond the configuration's number; OPT leaves its first two free."""


@dataclass(frozen=True)
class PositionLimit:
    """Maximum number of positions of a model.

    Attributes:
        limit: maximum sequence length; ``None`` if unknown.
        in_table: the model has a table of positions, so that it fails beyond the limit.
    """

    limit: int | None = None
    in_table: bool = False


def position_limit(model: Any) -> PositionLimit:
    """Return the position limit of a model, whose weights may be on the meta device.

    >>> from types import SimpleNamespace
    >>> rotary = nn.Linear(2, 2)
    >>> rotary.config = SimpleNamespace(max_position_embeddings=16)
    >>> position_limit(rotary)
    PositionLimit(limit=16, in_table=False)
    """
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return PositionLimit()
    sizes = []  # usable rows of each position table
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _is_of_positions(name):
            # With a padding position, positions are counted from the row after it (RoBERTa).
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            sizes.append(module.num_embeddings - unused)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim == 2 and _is_of_positions(name):  # GPT-J keeps sines and cosines in a buffer
            sizes.append(tensor.shape[0])
    rows = [one for one in sizes if limit - _MOST_UNUSED <= one <= limit + _MOST_UNUSED]
    return PositionLimit(min([limit, *rows]), bool(rows))


def _is_of_positions(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return "pos" in leaf or leaf == "wpe"


# --------------------
# Input limits of a model (names, vocabulary, positions) for preparing its data.

_PLACEHOLDERS = tuple(
    f"{kind}_token_{number}" for kind in ("image", "video", "audio") for number in ("id", "index")
)


def vocab_size_of(model: Module) -> int | None:
    """Vocabulary size: number of rows of the input embedding, ``None`` without a weight."""
    weight = getattr(embeddings(model)[0], "weight", None)
    return None if weight is None else full_shape(weight)[0]


def placeholder_token_ids(model: Module) -> frozenset[int]:
    """Ids of the placeholder tokens for images, videos and audio in the configuration."""
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return frozenset(number for number in found if isinstance(number, int))


def data_limits(model: Module) -> dict[str, Any]:
    """Arguments of ``load_calibration`` and ``load_training`` that depend on the model.

    Its weights may be on the meta device.
    """
    positions = position_limit(model)
    return {
        "model_input_names": tuple(inspect.signature(model.forward).parameters),
        "main_inputs": main_input_names(model),
        "vocab_size": vocab_size_of(model),
        "model_max_length": positions.limit,
        "in_table": positions.in_table,
    }


# --------------------
# Arguments of ``oneshot``, parsed and checked before any work, and the steps of every run.

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
_USES = {
    DataUse.STREAM: "it measures what goes through the layers while the model reads",
    DataUse.SURVEY_FIRST: "it measures what goes through all layers while the model reads",
    DataUse.LEARN_FIRST: "it learns from what the model computes while it reads",
}
"""Why a technique needs data."""


class Job(Task):
    """Arguments of a ``oneshot`` run, parsed and checked, and the steps common to all runs.

    Attributes:
        processes: the processes that execute this run.
        settled: the budget of the recipe, where its schemes were found before the run.
        is_held: the output stays in the work folder, whole.
        statistics: kept statistics that the recipe works from, in place of data.
    """

    processes = Processes()
    settled: SettledBudget | None = None
    is_held = False

    def __init__(
        self,
        output_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        arguments = _without_training_arguments(arguments)
        super().__init__("oneshot", output_dir, (), arguments, also_known=("log_dir",))
        self.log_dir = as_path("log_dir", log_dir)
        self._check_log_dir()
        self.statistics = self._open_statistics()
        if self.has_data and self.dataset_args.pipeline not in (None, "independent", "datafree"):
            # Others may watch the data with hooks of their own. Modifiers of this package declare
            # their needs, so that the pipeline need not run for them alone.
            for each in self._third_party_modifiers():
                each.be_given_data()
        self._check_data_needed()
        self._check_pipeline()
        self._check_kl_budget()
        self._warn_of_schedules()
        self._warn_without_effect()

    @cached_property
    def moment(self) -> datetime:
        """The moment at which the run began in the first process."""
        begun: datetime = self.processes.all_gather("moment", super().moment)[0]
        return begun

    # ------------------------------------------------------------------ checks, before anything

    def _read_recipe(self) -> Recipe:
        recipe = super()._read_recipe()
        if not recipe.modifiers and self.run_args.save_statistics is None:
            logger.warning("The recipe is empty: the model will not be changed.")
        return recipe

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

    def _open_statistics(self) -> KeptStatistics | None:
        """Open kept statistics if the recipe needs them, and refuse what it cannot do with them."""
        args = self.run_args
        if args.save_statistics is None and args.statistics is None:
            return None
        pipeline = self.dataset_args.pipeline
        check_statistics_arguments(args, self.processes.count, pipeline, self.output_dir)
        if args.statistics is None:
            return None
        found = KeptStatistics.open(Path(args.statistics).expanduser())
        if not self.recipe.modifiers:
            raise ArgumentError(
                "The argument 'statistics' was given, and no recipe that could use them.",
                "Give recipe, or leave statistics out.",
            )
        if not self.needing_data:
            logger.info("The statistics are not read: no modifier of the recipe needs any.")
            return None
        check_statistics_suffice(self.recipe.modifiers)
        if "propagate_error" in self.call["arguments"] and self.dataset_args.propagate_error:
            logger.warning(
                "propagate_error has no effect with statistics: all inputs are those of the "
                "original model."
            )
        return found

    def _third_party_modifiers(self) -> list[Modifier]:
        every = self.recipe.modifiers
        return [each for each in every if type(each).__module__.partition(".")[0] != _OWN]

    def _check_data_needed(self) -> None:
        needing = self.needing_data
        if self.run_args.save_statistics is not None and not self.has_data:
            raise DatasetError(
                "Statistics are to be kept of the calibration data, and no dataset was given.",
                GOOD_CHOICES,
            )
        if needing and not self.has_data and self.statistics is None:
            raise DatasetError(
                f"{type(needing[0]).__name__} needs calibration data, and no dataset was given: "
                f"{_USES[needing[0].traits.data]}.",
                f"{GOOD_CHOICES} {_WITHOUT_DATA}",
            )
        if self.has_data and self.recipe.modifiers and not self._reads_data:
            check_data_exists(self.dataset_args)
            logger.info("The dataset is not read: no modifier of the recipe needs data.")
            if names := ", ".join(type(each).__name__ for each in self._third_party_modifiers()):
                logger.warning(
                    f"The dataset is not read, and {names} may want it: write "
                    "requires_calibration_data: ClassVar[bool] = True in the class, or ask for a "
                    "pipeline (sequential)."
                )

    def _warn_of_schedules(self) -> None:
        for each in self.recipe.modifiers:
            for name, value in (("start", each.start), ("end", each.end)):
                if value not in (None, 0, -1):
                    logger.warning(
                        f"{name}: {value:g} of {type(each).__name__} has no effect in oneshot, "
                        "which has no steps. It is for train."
                    )

    def _warn_without_effect(self) -> None:
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

    def _check_kl_budget(self) -> None:
        """Refuse a run that cannot make and measure its model several times."""
        if self.kl_budget is None:
            return
        said = "A budget of kl is kept by making the model several times and measuring each"
        if self.processes.count > 1:
            raise ArgumentError(
                f"{said}, which one process does, and there are {self.processes.count}.",
                "Start the run as one process, or give a budget of bits or size.",
            )
        if self.output_dir is None:
            raise ArgumentError(f"{said}, and there is no output_dir.", "Give output_dir.")
        if not isinstance(self.model_args.model, str | Path):
            kind = type(self.model_args.model).__name__
            raise ArgumentError(
                f"{said}, and the model is an object, a {kind}, which the first run would change.",
                "Give the folder that the model was loaded from.",
            )
        check_output_dir(rounds_folder(self.output_dir), source=self.source, is_ours=True)
        rounds_of(self.output_dir)

    @property
    def only_collects(self) -> bool:
        """True if the run keeps statistics, and neither changes nor writes the model."""
        asked = self.run_args.save_statistics is not None
        return asked and self.output_dir is None and not self.recipe.modifiers

    @property
    def needing_data(self) -> list[Modifier]:
        """Modifiers that need calibration data."""
        return [each for each in self.recipe.modifiers if each.traits.needs_data]

    @property
    def _reads_data(self) -> bool:
        """True if a modifier or a custom pipeline needs the data."""
        own = self.has_data and PIPELINES.is_added(self.dataset_args.pipeline or "")
        if self.statistics is not None:
            return self.has_data  # to compare it with what the statistics are of
        return own or bool(self.needing_data) or self.run_args.save_statistics is not None

    def open_data(self) -> Source | None:
        """Open the raw data before the model is loaded, so that a wrong path fails early.

        A registered data set is opened later, because its class may need the processor.
        """
        name = self.dataset_args.dataset
        if not self._reads_data or (isinstance(name, str) and rows.find(name) is not None):
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
        with self.explain_missing_processor():
            return load_calibration(
                self.dataset_args,
                processor=processor,
                source=source,
                processes=self.processes,
                placeholders=placeholder_token_ids(model),
                **data_limits(model),
            )

    def pooled(self, loader: Any) -> list[Any] | None:
        """Collect the batches of a loader and those of the other processes."""
        if loader is None:
            return None
        own, count = list(loader), self.processes.count
        if count == 1:
            return own
        samples = list(sample_fingerprints(own))
        batches, parts = self.processes.pooled(own, values_fingerprint(own), samples)
        whose = f"those of {parts} processes together" if parts > 1 else "the same for all"
        firsts = (next((v for v in one.values() if isinstance(v, Tensor)), ()) for one in batches)
        logger.info(
            f"Calibration with {sum(map(len, firsts))} samples, {whose}, in {count} processes."
        )
        return list(batches)

    def share_memory(self) -> None:
        """Give all processes the same activation budget, as it determines where forwards pause."""
        if self.processes.count == 1 or self.dataset_args.activation_budget is not None:
            return
        mine = (platform.node(), activation_budget(None))
        found = self.processes.all_gather("free memory", mine)
        beside = Counter(node for node, _ in found)
        least = min(budget // beside[node] for node, budget in found)
        self.dataset_args = replace(self.dataset_args, activation_budget=max(1, least))

    def check_batches(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Refuse calibration data that a modifier cannot work with, before the first pass."""
        for each in self.recipe.modifiers:
            each.check(batches, use_loss_mask=self.dataset_args.use_loss_mask)

    def pipeline(self) -> str:
        """Name of the pipeline to run: the user's, or ``datafree`` if no modifier needs data."""
        if self.statistics is not None:
            return KEPT
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


def check_statistics_arguments(
    args: RunArguments, processes: int, pipeline: str | None, output_dir: Path | None
) -> None:
    """Refuse arguments about kept statistics that do not go together.

    Raises:
        ArgumentError: both are given, or several processes, or a pipeline that runs data.
        OutputError: the folder to save them in holds something else, or is in the output.
    """
    given = "statistics" if args.save_statistics is None else "save_statistics"
    if args.statistics is not None and args.save_statistics is not None:
        raise ArgumentError(
            "The arguments 'save_statistics' and 'statistics' were both given: one collects "
            "statistics from data, the other takes them in place of data.",
            "Give one of them.",
        )
    if processes > 1:
        raise ArgumentError(
            f"The argument {given!r} is of runs in one process, and there are {processes}.",
            "Start one process.",
        )
    if args.save_statistics is not None:
        folder = Path(args.save_statistics).expanduser().resolve()
        check_statistics_folder(folder)
        if output_dir is not None and output_dir in (folder, *folder.parents):
            raise OutputError(
                f"save_statistics, {folder}, lies in the output directory {output_dir}.",
                "Choose a folder beside it: the output appears at the end, as a whole.",
            )
    elif pipeline not in (None, "independent"):
        raise ArgumentError(
            f"The pipeline {pipeline!r} runs data through the model, and statistics take its "
            "place.",
            "Leave one of the two out.",
        )


_ON_THE_CPU = ("use_cpu", "no_cuda")
"""Arguments of training, now and before, that ask for no accelerator."""


def _without_training_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Drop arguments that affect training only, which scripts may pass to every run.

    Those that ask for the CPU are translated to ``device``.
    """
    theirs = training_argument_names(
        given, ModelArguments, DatasetArguments, RecipeArguments, RunArguments
    )
    kept = {name: value for name, value in given.items() if name not in theirs}
    asking = [name for name in theirs if name in _ON_THE_CPU and given[name] is True]
    if asking and not {"device", "oneshot_device"} & kept.keys():
        kept["device"] = "cpu"
    if told := [name for name in theirs if given[name] is not None and name not in asking]:
        logger.warning(f"Without effect in oneshot, where nothing is trained: {join_names(told)}.")
    return kept


def _is_tokenized(data: Any) -> bool:
    """Return True if the rows have token ids already."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):
        return "input_ids" in names
    if isinstance(data, Mapping):
        return "input_ids" in data
    first = data[0] if isinstance(data, list) and data else None
    return isinstance(first, Mapping) and "input_ids" in first


# --------------------
# Detection of transposed weights (``Conv1D``), which cannot be quantized like those of a Linear.
#
# ``Conv1D`` of transformers stores ``[in, out]`` where a Linear stores ``[out, in]``. Quantized
# like a Linear, its groups and channels would run along the wrong dimension, and loaders support
# only quantized Linears.

CONV1D_TYPES = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
"""Values of ``model_type`` whose classes in transformers use ``Conv1D``; a test reads them."""

CONV1D_NAMES = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""What these classes call their ``Conv1D`` modules."""

_MATRIX = 2


def refuse_transposed(
    source: SourceInfo, model: nn.Module, ignore: Sequence[str], targets: Sequence[str]
) -> None:
    """Refuse to quantize modules whose weights are stored transposed.

    They are recognized by the configuration's ``model_type``, or by a bias whose length equals
    the weight's number of columns but not of rows.

    Args:
        source: the checkpoint.
        model: the tree of its modules.
        ignore: ignored modules.
        targets: targeted modules.

    Raises:
        TargetError: a targeted module has a transposed weight.
    """
    modules = dict(model.named_modules())  # an unfused part has another name there
    found = [
        name
        for name in _transposed(source)
        if name in modules
        and matches_any(name, modules[name], targets)
        and not matches_any(name, modules[name], ignore)
    ]
    if not found:
        return
    last = sorted({name.rpartition(".")[2] for name in found})
    pattern = f"re:.*\\.({'|'.join(last)})$" if last[1:] else f"re:.*\\.{last[0]}$"
    raise TargetError(
        f"{join_names(found)} of this checkpoint (model_type {source.config.get('model_type')!r}) "
        "hold their weights transposed, [in, out], as Conv1D of transformers does: rounding would "
        "run along the wrong dimension, and no reader knows a quantized Conv1D.",
        f'Ignore them with "{pattern}", or convert them to Linears first.',
    )


def _transposed(source: SourceInfo) -> Iterator[str]:
    """Yield the names of modules with a transposed weight."""
    known = bool(CONV1D_TYPES.intersection(_model_types(source.config)))
    for name, header in source.tensors.items():
        path, _, own = name.rpartition(".")
        if own != "weight" or len(header.shape) != _MATRIX:
            continue
        is_called_so = known and path.rpartition(".")[2] in CONV1D_NAMES
        rows, columns = header.shape
        bias = source.tensors.get(f"{path}.bias")
        is_shown = bias is not None and rows != columns and tuple(bias.shape) == (columns,)
        if is_called_so or is_shown:
            yield path


def _model_types(config: Any) -> Iterator[str]:
    """Yield every ``model_type`` in a configuration, including nested ones."""
    if isinstance(config, Mapping):
        if isinstance(config.get("model_type"), str):
            yield config["model_type"]
        for value in config.values():
            yield from _model_types(value)
