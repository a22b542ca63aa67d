# SPDX-License-Identifier: Apache-2.0
"""``verify``: check the files, the values and the servability of a written checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from llmcompressor.args.checks import path
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint import save
from llmcompressor.checkpoint.moe_names import dense_experts_fused
from llmcompressor.checkpoint.planned_tensors import PlannedTensors, plan_tensors
from llmcompressor.checkpoint.save import (
    SaveOptions,
    Text,
    planned_config,
    save_options,
)
from llmcompressor.checkpoint.source import TensorHeader, local_directory
from llmcompressor.core.contract import Prediction
from llmcompressor.core.modifier import Modifier, planned_structure
from llmcompressor.core.state import State
from llmcompressor.engines.check import Engine, verify_with
from llmcompressor.errors import ArgumentError, CheckpointError, RecipeError
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.stages import rename_duplicates
from llmcompressor.recipe.writing import to_yaml
from llmcompressor.runtime.progress import join_names
from llmcompressor.session.functions import active_session
from llmcompressor.verification import TensorInfo, check_serving
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import DEFAULT_TP, SERVERS, Deployment, Finding, Severity
from llmcompressor.verification.report import VerificationReport, merged
from llmcompressor.verification.transformers_model import bare_model


@told_by_name
def verify(
    checkpoint: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    *,
    serve: str | None = None,
    tp: int | Iterable[int] | None = None,
    gpu: str | None = None,
    dtype: str | None = None,
    workers: int | None = None,
    engine: str | None = None,
    python: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> VerificationReport:
    """Verify a checkpoint: its files, structure and values, and the rules of servers.

    The files are read by code that is independent of the code that writes them, each tensor once
    and in slices, so the memory does not grow with the model.

    Args:
        checkpoint: folder, or the id of a model in the hub's cache.
        reference: the original model, likewise; with it every tensor is accounted for and every
            decoded weight is compared.
        serve: ``"vllm"``, ``"transformers"`` or ``"sglang"``, the rules of all three by default; or
            ``"llama.cpp"``, for what ``convert_hf_to_gguf`` takes.
        tp: size of tensor parallelism, or several; 1, 2, 4 and 8 by default, where a misfit
            above 1 is a warning.
        gpu: the device's capability such as ``"sm90"``, or its name such as ``"h100"``.
        dtype: the dtype of activations while serving; the model's own by default.
        workers: number of reading threads; by default the number of cores, four at most.
        engine: also run it in ``"vllm"``, ``"transformers"`` or ``"sglang"``, beside its decoded
            weights and the reference.
        python: the interpreter of the engine's environment; this one by default.
        timeout: seconds that the engine has for one model; 900 by default.

    Returns:
        The report; its ``ok`` is True if there is no error.

    Raises:
        CheckpointError: a folder does not exist or holds no model, or the reference is damaged.
        ArgumentError: an argument about the deployment is invalid, or the engine is not there.

    Example::

        report = verify("./my-model-W4A16", reference="./my-model", serve="vllm", tp=4)
        print(report)
    """
    show_runs_quietly()
    sizes = DEFAULT_TP if tp is None else (tp,) if isinstance(tp, int) else tuple(tp)
    deployment = Deployment(server=serve, tp=sizes, gpu=gpu, dtype=dtype)
    asked = engine_of(engine, python, timeout)
    report = verify_files(
        _folder("checkpoint", checkpoint),
        None if reference is None else _folder("reference", reference),
        deployment=deployment,
        workers=workers,
    )
    return report if asked is None else verify_with(report, asked, deployment=deployment)


def engine_of(
    name: str | None,
    python: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> Engine | None:
    """The engine to verify with; ``None`` if none is asked for.

    Raises:
        ArgumentError: it is not there, or something is said about an engine that is not named.
    """
    if name is not None:
        return Engine.checked(name, python, timeout)
    if python is not None or timeout is not None:
        raise ArgumentError(
            "A Python or a time limit is given for an engine, and no engine is named.",
            'Name it: engine="vllm" (--with vllm; for a run verify_with, --verify-with).',
        )
    return None


def _folder(argument: str, given: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the folder of a model in the hub's cache; other values are returned unchanged."""
    model = path(argument, given)
    return local_directory(model) or model


# --------------------
# Checks of a run's output: serving limits before the run, the written files after it.

_MOST_SHOWN = 5
_OF_VALUES = {"S27", "S72"}
"""Rules of servers that are about values: no recipe asks for breaking them."""
_OF_ENGINES = {f"E{number}" for number in range(1, 11)}
"""What an engine gave that was asked."""
_OF_STATES = {"L11"}
"""Rules of what transformers leaves as it is: all else of the checkpoint is read."""
_OF_SOME = {"L9", "L10", "L11", "S48", "S73"}
"""Rules of what is read all the same by other releases of a server, by a device that is not known,
or by compressed-tensors itself (R3): reason to warn, not to refuse."""
SERVING = ("vllm", "sglang")
"""What serves many users: for one of them candidates of a budget are chosen."""
_REMEDIES = {
    "L2": "Ignore these modules, or take a scheme whose codes keep the name weight (W8A8, "
    "FP8_DYNAMIC). Or serve it with vLLM."
}
"""What the user of a recipe can do, where the rule itself can only speak of a checkpoint."""


def verify_written(
    folder: Path,
    kinds: Mapping[str, str] | None = None,
    source: Path | None = None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Verify a written checkpoint and return a summary for the run's report.

    What a server would refuse may be intended by the recipe: it was reported before
    (:func:`check_servable`) and is part of the summary. Damaged or inconsistent files raise.

    Args:
        folder: the folder of the checkpoint.
        kinds: kinds of its modules, by ``module_kinds`` of ``checkpoint.planned_tensors``.
        source: the folder of the model that it was made from, if there is one.
        engine: run the first blocks of it there, one of each kind; its errors raise too.

    Returns:
        The verification report as a dict, without entries specific to this run.

    Raises:
        CheckpointError: a file, a tensor or a value is wrong.
    """
    report = verify_files(folder, kinds=kinds, source=source)
    if engine is not None and not _broken(report):
        try:
            report = verify_with(report, engine, is_trial=True)
        except ArgumentError as error:  # an error of the call would discard what is finished
            raise CheckpointError(
                f"What was written could not be run in {engine.name}: {error.problem}",
                f"{error.remedy} Or leave verify_with (--verify-with) out.",
            ) from error
    if broken := _broken(report):
        raise CheckpointError(
            f"What was written is not good: {_format_findings(broken).rstrip('.')}.",
            f"It was not given its name. {_remedy(broken)}",
        )
    return _summarize_report(report)


def _remedy(broken: Iterable[Finding]) -> str:
    """Return what to do about an output without its name."""
    if all(one.rule in _OF_ENGINES for one in broken):
        return (
            "Have it written without verify_with (--verify-with), and look at it with "
            "`llmcompressor verify OUTPUT --with ENGINE`."
        )
    return (
        "To look at it with `llmcompressor verify`, leave the check out with verify=False "
        "(--no-verify)."
    )


def verify_saved(
    folder: Path, kinds: Mapping[str, str] | None = None, source: Path | None = None
) -> dict[str, Any]:
    """Like :func:`verify_written`, but log errors instead of raising, for ``save_pretrained``.

    An exception could end the script and lose the model that was compressed in memory.
    """
    try:
        report = verify_files(folder, kinds=kinds, source=source)
    except Exception as error:  # of any kind: it must not discard the written files
        logger.error(f"What save_pretrained has written could not be checked: {error!r:.500}")
        return {}
    if broken := _broken(report):
        logger.error(
            "What save_pretrained has written is not good: "
            f"{_format_findings(broken).rstrip('.')}. Look at "
            "it with `llmcompressor verify`."
        )
    return _summarize_report(report)


def _broken(report: VerificationReport) -> list[Finding]:
    errors = _errors(report.findings)
    asked = _OF_VALUES | _OF_ENGINES
    return [one for one in errors if not one.server or one.rule in asked]


def _summarize_report(report: VerificationReport) -> dict[str, Any]:
    """Log a summary of the verification, and return the part kept in the run's report."""
    counts = ", ".join(f"{count} {name}s" for name, count in report.counts.items())
    logger.info(
        f"Verified {report.tensors} tensors of {report.bytes / 1e6:.1f} MB in "
        f"{report.seconds:.1f} s: {counts}."
    )
    for line in () if report.engine is None else report.engine.lines():
        logger.info(line)
    for one in report.findings:
        if one.rule in _OF_ENGINES and one.severity is Severity.WARNING:
            logger.warning(f"{one.message} {one.remedy} ({one.rule})")
    kept = report.as_dict()
    for of_this_run in ("checkpoint", "reference", "seconds", "has_manifest"):
        kept.pop(of_this_run, None)
    return kept


def is_meant_unservable(modifiers: Iterable[Modifier]) -> bool:
    """Return True if a modifier declares that its output is not meant to be served."""
    return any(one.traits.unservable for one in modifiers)


def check_servable(
    config: Mapping[str, Any],
    prediction: PlannedTensors,
    *,
    is_meant: bool = False,
    is_verified: bool = True,
    servers: Sequence[str] = SERVERS,
) -> None:
    """Warn before a run about output that servers would refuse or run incorrectly.

    Limits of transformers are reported too. Such a checkpoint is valid, but most users load theirs
    with transformers first, whose errors do not tell the reason.

    Args:
        config: the ``config.json`` that will be written.
        prediction: the tensors that will be written, and their modules.
        is_meant: the output need not be servable.
        is_verified: what is written will be verified.
        servers: that one of them takes it is enough.

    Raises:
        CheckpointError: the class of the configuration is none that readers find or can read with,
            and what is written would be refused for it.
        RecipeError: each of ``servers`` would refuse the output or run it incorrectly, and
            ``is_meant`` is False.
    """
    ask = partial(
        check_serving,
        config,
        {one.name: TensorInfo(one.dtype, one.shape) for one in prediction.stored},
        kinds=prediction.kinds,
    )
    errors = _errors(ask())
    of_class = [one for one in errors if one.rule == "C5"]
    if of_class and is_verified:
        raise CheckpointError(
            "The config.json of the model is wrong: "
            + " ".join(f"{one.module}: {one.message}" for one in of_class),
            "Compare it with that of the original model.",
        )
    of_transformers = ask(deployment=Deployment("transformers"))
    limits = _errors(of_transformers)
    if not is_meant and (limits or "transformers" not in servers):
        _refuse_unservable(ask, servers)
    for each in merged(errors, by_rule=True):
        logger.warning(
            f"{each.first.server or 'No server'} would {'not ' if each.first.server else ''}serve "
            f"this ({each.first.rule}). {_format_findings([each.first])}"
            + (f" ({len(each.modules)} modules)" if each.modules[1:] else "")
        )
    is_taken = all(one.server != "vllm" for one in errors)
    for each in merged((one for one in limits if one not in errors), by_rule=True):
        remedy = _REMEDIES.get(each.first.rule, each.first.remedy)
        sentences = re.split(r"(?<=\.) ", remedy)
        remedy = " ".join(one for one in sentences if is_taken or "vLLM" not in one)
        failing = "round all of" if each.first.rule in _OF_STATES else "load or run"
        logger.warning(
            f"transformers would not {failing} this ({each.first.rule}). "
            f"{join_names(each.modules)}: {each.first.message} {remedy}".strip()
        )
    # quality that is measured with transformers differs then from that of the recipe
    own = [] if limits else [one for one in of_transformers if one.server == "transformers"]
    for each in merged(own, by_rule=True):
        tell = logger.warning if each.first.severity is Severity.WARNING else logger.info
        tell(
            f"transformers would load this, with a limit ({each.first.rule}). "
            f"{join_names(each.modules)}: {each.first.message} {each.first.remedy}".strip()
        )


def _refuse_unservable(ask: Callable[..., list[Finding]], servers: Sequence[str]) -> None:
    """Raise if no server can serve the output."""
    firsts = []
    for server in servers:
        errors = _errors(ask(deployment=Deployment(server)))
        found = [one for one in errors if one.rule not in _OF_SOME]
        if not found:
            return
        firsts.append((server, found[0]))
    reasons = "; ".join(
        f"{server} ({one.rule}, {one.module}): {one.message.rstrip('.')}" for server, one in firsts
    )
    remedy = next((one.remedy for _, one in firsts if one.remedy), "Leave it as it is.")
    raise RecipeError(
        f"No server would serve what this recipe makes. {reasons}.",
        f"{remedy} To write it all the same, leave the check out with verify=False (--no-verify).",
    )


def warn_save_problems(
    model: Module, modifiers: Sequence[Modifier], state: State, source: str | None
) -> None:
    """Warn before a run about problems that ``save_pretrained`` of its model would have."""
    if not isinstance(model, PreTrainedModel):
        return
    try:
        predicted = predict_output(model, modifiers, state, source, packed=True)
        check_servable(predicted.config, predicted.planned, is_meant=True)
    except Exception as error:  # of any kind: the model may be meant for use in memory only
        said = " ".join(f"{error}".split()) or repr(error)
        logger.warning(f"Its save_pretrained would fail, or write what no one reads. {said:.500}")


@dataclass(frozen=True)
class PredictedOutput:
    """What a run will write.

    Attributes:
        predictions: those of the modifiers, in recipe order.
        planned: the tensors and modules.
        config: ``config.json``.
        block_bytes: bytes of all blocks, in the structure that the modifiers will leave.
    """

    predictions: Sequence[Prediction]
    planned: PlannedTensors
    config: dict[str, Any]
    block_bytes: int


def predict_output(
    model: PreTrainedModel,
    modifiers: Sequence[Modifier],
    state: State,
    source: str | None,
    *,
    packed: bool,
    headers: Mapping[str, TensorHeader] = MappingProxyType({}),
    as_written: AbstractContextManager[None] | None = None,
) -> PredictedOutput:
    """Predict the tensors and the configuration that will be written.

    Args:
        model: the model; its weights may be on the meta device.
        modifiers: of the recipe, initialized.
        state: of the session.
        source: the folder of the original model.
        packed: weights are packed, not written dense.
        headers: the tensors of the original, of which those without a place in the model are kept.
        as_written: a context with the structure that is written; by default experts that are not
            quantized are fused.

    Raises:
        ArgumentError: weights are parametrized, but not by the model's class.
    """
    _check_unparametrized(model)
    folder = None if source is None else Path(source)
    structure = dense_experts_fused(model) if as_written is None else as_written
    with planned_structure(modifiers, state), structure, ExitStack() as written:
        predictions = [modifier.predict(state) for modifier in modifiers]
        for one in predictions:
            written.enter_context(one.attached())
        planned = [module for one in predictions for module in one.modules]
        tensors = plan_tensors(model, planned, headers, save_compressed=packed)
        config = planned_config(model, folder, tensors, compressed=packed)
        inside = (one for block in find_blocks(model) for one in block.state_dict().values())
        block_bytes = sum(one.nbytes for one in inside if isinstance(one, Tensor))
    return PredictedOutput(predictions, tensors, config, block_bytes)


def _check_unparametrized(model: PreTrainedModel) -> None:
    """Refuse parametrized weights, whose names the model's class does not have."""
    found = [name for name, one in model.named_modules() if is_parametrized(one)]
    kind = type(model).__name__
    bare = bare_model({**model.config.to_dict(), "architectures": [kind]}) if found else None
    if bare is None:
        return
    own = {name for name, one in bare.named_modules() if is_parametrized(one)}
    if foreign := [name for name in found if name not in own]:
        raise ArgumentError(
            f"Weights of {join_names(foreign)} are parametrized (torch.nn.utils.parametrize), "
            "which "
            f"{kind} does not do by itself: no reader would find what is written of them.",
            "Call torch.nn.utils.parametrize.remove_parametrizations for each before.",
        )


def _errors(found: Iterable[Finding]) -> list[Finding]:
    return [one for one in found if one.severity is Severity.ERROR]


def _format_findings(findings: Iterable[Finding]) -> str:
    told = (f"{one.module or 'the model'}: {one.message} {one.remedy}".strip() for one in findings)
    return join_names(told, most=_MOST_SHOWN, separator="; ")


# --------------------
# ``modify_save_pretrained`` for scripts, with defaults from earlier runs.


def modify_save_pretrained(
    model: PreTrainedModel,
    *,
    recipe: Text = None,
    source: str | os.PathLike[str] | None = None,
    processor: Any | None = None,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Make ``model.save_pretrained`` write compressed checkpoints and verify them.

    Arguments default to those of an earlier run of ``oneshot`` or ``train`` on the model.

    Args:
        model: the model. Copies of it, deep or through pickle, save compressed too.
        recipe: the text of ``recipe.yaml``, or a function that returns it when saving. It
            defaults to the recipes of separately compressed parts, or to that of the active
            session, if the model has none.
        source: the original model's folder or hub id; by default the one it was loaded from.
        processor: the processor to write too; ``save_pretrained`` of a model writes none itself.
        report: JSON data to save with the weights.
    """
    known = [one for one in map(save_options, model.modules()) if one is not None]
    own = save_options(model) or SaveOptions()
    session = active_session()
    of_session = session.get_serialized_recipe() if session.state.model is model else None
    options = SaveOptions(
        recipe=recipe or own.recipe or _recipe_of_parts(known) or of_session,
        source=source or own.source,
        processor=own.processor if processor is None else processor,
        report=report or own.report,
        check=known[0].check if known else verify_saved,  # a run may have left it out
        once=any(one.once for one in known),
    )
    save.modify_save_pretrained(model, options)


def _recipe_of_parts(known: list[SaveOptions]) -> Text:
    recipes = list(dict.fromkeys(one.recipe for one in known if one.recipe is not None))
    return recipes[0] if len(recipes) == 1 else partial(_join_recipes, recipes) if recipes else None


def _join_recipes(recipes: list[Any]) -> str:
    texts = [one() if callable(one) else one for one in recipes]
    stages = [stage for text in texts if text for stage in Recipe.create_instance(text).stages]
    return to_yaml(rename_duplicates(stages))
