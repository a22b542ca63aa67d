# SPDX-License-Identifier: Apache-2.0
"""``oneshot``: apply a recipe to a model with calibration data, and write a servable checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, get_args, get_type_hints, overload

import torch
from torch.nn import Module

from llmcompressor.args import (
    DatasetArguments,
    ModelArguments,
    RecipeArguments,
    RunArguments,
    parse_arguments,
)
from llmcompressor.args.checks import Text
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint.spread_weights import refuse_spread
from llmcompressor.entrypoints.arguments import Job
from llmcompressor.entrypoints.measured_budget import run_to_budget
from llmcompressor.errors import ArgumentError, InputError
from llmcompressor.logger import log_to_file, logger, quiet, show_runs_quietly
from llmcompressor.numerics.products import float32_by_default, full_float32_products
from llmcompressor.reporting.summary import tell_summary, told_run
from llmcompressor.runtime.launch import launched_group
from llmcompressor.runtime.processes import Processes
from llmcompressor.session.functions import exclusive_session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmcompressor.args.keywords import DataInput, ModelInput, OneshotKeywords
    from llmcompressor.planning.result import Plan
    from llmcompressor.recipe import RecipeInput

# --------------------
# Complete signatures of entry points for ``inspect.signature`` and ``help``.

_Function = TypeVar("_Function", bound=Callable[..., Any])
_VARIABLE = inspect.Parameter.VAR_KEYWORD


def with_dataclass_signature(*classes: type) -> Callable[[_Function], _Function]:
    """Return a decorator that adds the fields of dataclasses to a function's signature.

    They follow the function's own parameters as keyword-only parameters. ``**arguments`` is kept,
    as it accepts the names of earlier releases.

    Args:
        classes: the dataclasses; for a field that several have, the first one counts.
    """

    def decorate(function: _Function) -> _Function:
        try:
            found = inspect.signature(function, eval_str=True)
        except NameError:  # types that are imported for type checkers only stay as text
            found = inspect.signature(function)
        own = [one for one in found.parameters.values() if one.kind != _VARIABLE]
        rest = [one for one in found.parameters.values() if one.kind == _VARIABLE]
        shown = {one.name: one for one in own}
        for one in itertools.chain.from_iterable(map(_parameters, classes)):
            shown.setdefault(one.name, one)
        signature = found.replace(parameters=[*shown.values(), *rest])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.init:
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=_shown(hints[field.name]),
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _shown(hint: Any) -> Any:
    """Remove the marker type for ``HfArgumentParser`` from a type hint."""
    members = get_args(hint)
    if Text not in members:
        return hint
    return functools.reduce(operator.or_, (one for one in members if one is not Text))


# --------------------
# ``oneshot``: apply a recipe to a model with calibration data, and write a servable checkpoint.

_CLASSES = (ModelArguments, RecipeArguments, DatasetArguments, RunArguments)
_TOKENIZERS = "TOKENIZERS_PARALLELISM"
_AUTOCAST_DEVICES = ("cpu", "cuda")


@overload
def oneshot(
    model: ModelInput,
    recipe: RecipeInput = None,
    dataset: DataInput = None,
    output_dir: str | Path | None = None,
    log_dir: str | Path | None = None,
    *,
    dry_run: Literal[False] = False,
    **arguments: Unpack[OneshotKeywords],
) -> PreTrainedModel: ...
@overload
def oneshot(
    model: ModelInput,
    recipe: RecipeInput = None,
    dataset: DataInput = None,
    output_dir: str | Path | None = None,
    log_dir: str | Path | None = None,
    *,
    dry_run: Literal[True],
    **arguments: Unpack[OneshotKeywords],
) -> Plan: ...
@told_by_name
@with_dataclass_signature(*_CLASSES)
def oneshot(
    model: Any,
    recipe: Any = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    log_dir: str | Path | None = None,
    **arguments: Any,
) -> Any:
    """Compress a trained model in one run, with calibration data if the recipe needs it.

    Args:
        model: a folder, the id of a model on the hub, or a loaded transformers model.
        recipe: modifiers, a recipe file or its text, in any form that ``Recipe`` reads.
        dataset: calibration data: ``"default"`` for a mix that suits most models, a registered
            name, a file or folder, a ``Dataset``, a ``DataLoader``, or a list of strings.
        output_dir: folder for the compressed checkpoint; nothing is written without it.
        log_dir: write a log file into this folder; the environment variable
            ``LLM_COMPRESSOR_LOG_FILE`` names a file instead.
        **arguments: every other argument of :class:`~llmcompressor.args.ModelArguments`,
            :class:`~llmcompressor.args.DatasetArguments`,
            :class:`~llmcompressor.args.RecipeArguments` and
            :class:`~llmcompressor.args.RunArguments`.

    Returns:
        The compressed model, ready to run; its ``save_pretrained`` writes compressed
        checkpoints. After a run from checkpoint to checkpoint, its blocks are loaded lazily from
        the output. With ``dry_run=True`` the :class:`~llmcompressor.planning.result.Plan`; errors
        that the run would raise are in its ``problems``.

    Raises:
        InputError: an invalid argument, recipe, model or data set; the message has the remedy. It
            is raised before any calibration, and nothing has been written.
        NonFiniteError: NaN or infinity in weights or activations, with the module's name.
        GateError: the checkpoint does not keep its ``gates``, and is in ``NAME.rejected``.
        BudgetError: no choice of a budget's candidates was measured to keep its limit of ``kl``.

    An interrupted run with an output directory is resumed by the same call: its progress is in
    ``NAME.partial`` next to the output ``NAME``.

    Example::

        oneshot(
            model="./my-model",
            recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
            dataset="calibration.jsonl",
            output_dir="./my-model-W4A16",
        )
    """
    given: dict[str, Any] = {
        "model": model,
        "recipe": recipe,
        "dataset": dataset,
        **arguments,
    }
    if _is_dry(given):  # a plan notes failed checks as problems, which end a run
        return _planned({"output_dir": output_dir, "log_dir": log_dir, **given})
    return Oneshot(output_dir=output_dir, log_dir=log_dir, **given)()


_OF_THE_END = ("gates", "overwrite", "report", "resume", "verify", "verify_with")
"""Arguments that no identity of a run has, and that the first of several processes acts on."""


class Oneshot(Job):
    """A single run of :func:`oneshot`, as an object.

    Scripts that prepare data themselves may read and set :attr:`processor` before the run.

    Attributes:
        model: the model that the run returned; ``None`` before.
    """

    @with_dataclass_signature(*_CLASSES)
    def __init__(
        self,
        output_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        **arguments: Any,
    ) -> None:
        self._given = {"output_dir": output_dir, "log_dir": log_dir, **arguments}
        show_runs_quietly()
        self.model: Any = None
        if hasattr(type(self), "apply_recipe_modifiers"):
            raise InputError(
                f"{type(self).__name__} has a method apply_recipe_modifiers, which no run would "
                "call: blocks are loaded, compressed and written one after another.",
                "Do before and after super().__call__() what it does, or write a modifier.",
            )
        with ExitStack() as group:
            if not _is_dry(arguments):
                refuse_spread(arguments.get("model"))
                group.enter_context(launched_group())
                self.processes = Processes.from_process_group()
            is_first = self.processes.is_first
            with self.processes.notify_on_failure(), quiet(wanted=not is_first) as warnings:
                super().__init__(output_dir, log_dir, **arguments)
            self._warnings = list(warnings)
            self._group = group.pop_all()  # left at the end of the run
        if _TOKENIZERS not in os.environ:
            os.environ[_TOKENIZERS] = "false"
            logger.info(
                f"{_TOKENIZERS} is set to false: tokenizers' threads do not go with processes that "
                "a DataLoader forks. Set it, to true or false, and nothing is said."
            )

    def __call__(self) -> Any:
        """Load, calibrate, compress and save the model, or return the plan of a dry run."""
        if self.run_args.dry_run:
            return _planned(self._given)
        model, log = self.model_args.model, None
        if self.log_dir is not None:
            log = Path(self.log_dir) / f"oneshot_{datetime.now():%Y-%m-%d_%H-%M-%S}.log"
        with (
            self._group,
            self._synchronized(),
            log_to_file(log if self.processes.is_first else None),
            exclusive_session(),
            told_run(),
            _leave_inference_mode(model),
            _leave_autocast(),
            float32_by_default(),
            full_float32_products(),
        ):
            self.model = run_to_budget(self, self.open_data())
            if self.output_dir is not None and self.processes.is_first:
                tell_summary(self.output_dir)
        return self.model

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        """Synchronize the start and the end of the run with all other processes."""
        processes = self.processes
        if processes.count == 1:
            yield
            return
        with processes.notify_on_failure(), torch.random.fork_rng(devices=[]):
            processes.check_equal("recipe", self.recipe.yaml())
            processes.check_equal("output_dir", str(self.output_dir))
            for name in _OF_THE_END:
                processes.check_equal(name, repr(self._given.get(name)))
            torch.set_rng_state(processes.all_gather("random numbers", torch.get_rng_state())[0])
            with quiet(wanted=not processes.is_first) as warnings:
                yield
                processes.gather_warnings("end", [*self._warnings, *warnings])


def _planned(given: Mapping[str, Any]) -> Any:
    """Return the plan of a run with these arguments."""
    from llmcompressor.entrypoints.plan import (  # noqa: PLC0415  # not needed by runs
        plan_from_arguments,
    )

    return plan_from_arguments(given)


def _is_dry(arguments: Mapping[str, Any]) -> bool:
    own = {name: value for name, value in arguments.items() if name == "dry_run"}
    args: RunArguments = parse_arguments(own, RunArguments)[0]
    return args.dry_run


@contextmanager
def _leave_inference_mode(model: Any) -> Iterator[None]:
    """Leave torch's inference mode, which forbids threads to write to each other's tensors.

    Raises:
        ArgumentError: the model was created in it, so that its weights cannot be changed.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    if isinstance(model, Module) and any(one.is_inference() for one in model.parameters()):
        raise ArgumentError(
            "The model was made in torch.inference_mode(), so that its weights cannot be changed.",
            "Load it outside of inference mode, or give its folder.",
        )
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


@contextmanager
def _leave_autocast() -> Iterator[None]:
    """Leave torch's autocast, so that solvers compute in the dtype that they choose."""
    devices = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    if devices:
        logger.warning(
            f"oneshot computes outside of torch.autocast({', '.join(devices)}): the model runs in "
            "its own dtype, as readers run it. precision gives it another."
        )
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
