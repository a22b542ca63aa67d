# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's output: serving limits before the run, the written files after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from llmcompressor.checkpoint.experts import dense_closed
from llmcompressor.checkpoint.output_layout import lay_out
from llmcompressor.checkpoint.prediction import Prediction, predict
from llmcompressor.checkpoint.save import DEFAULT_SHARD_SIZE, planned_config
from llmcompressor.checkpoint.shards import parse_size
from llmcompressor.checkpoint.space import beside_weights, check_space
from llmcompressor.core.state import State
from llmcompressor.errors import ArgumentError, CheckpointError, RecipeError
from llmcompressor.logger import logger
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.modifiers.outlined import outlined
from llmcompressor.verification import Deployment, TensorInfo, check_serving
from llmcompressor.verification.built import bare_model
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import SERVERS, Finding, Severity
from llmcompressor.verification.report import VerificationReport, merged
from llmcompressor.wording import listed

__all__ = [
    "check_saved",
    "check_servable",
    "check_writable_model",
    "check_written",
    "serves_nobody",
    "warn_of_saving",
]

_MOST_SHOWN = 5
_OF_VALUES = {"S27", "S72"}
"""Rules of servers that are about values: no recipe asks for breaking them."""
_OF_STATES = {"L11"}
"""Rules of what transformers leaves as it is: all else of the checkpoint is read."""
_OF_SOME_RELEASES = {"L9", "L10", "L11"}
"""Rules of what is read by other releases of the same server: reason to warn, not to refuse."""
_REMEDIES = {
    "L2": "Ignore these modules, take a scheme whose codes keep the name weight (W8A8, "
    "FP8_DYNAMIC), or serve it with vLLM."
}
"""What the user of a recipe can do, where the rule itself can only speak of a checkpoint."""


def check_written(folder: Path, kinds: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Verify a written checkpoint and return a summary for the run's report.

    What a server would refuse may be intended by the recipe: it was reported before
    (:func:`check_servable`) and is part of the summary. Damaged or inconsistent files raise.

    Args:
        folder: the folder of the checkpoint.
        kinds: kinds of its modules (:func:`~llmcompressor.checkpoint.prediction.module_kinds`).

    Returns:
        The verification report as a dict, without entries specific to this run.

    Raises:
        CheckpointError: a file, a tensor or a value is wrong.
    """
    report = verify_files(folder, kinds=kinds)
    if broken := _broken(report):
        raise CheckpointError(
            f"What was written is not good: {_said(broken).rstrip('.')}.",
            "It was not given its name. Look at it with `llmcompressor verify`, or leave the check "
            "out with verify=False (--no-verify).",
        )
    return _told(report)


def check_saved(folder: Path, kinds: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Like :func:`check_written`, but log errors instead of raising, for ``save_pretrained``.

    An exception could end the script and lose the model that was compressed in memory.
    """
    try:
        report = verify_files(folder, kinds=kinds)
    except Exception as error:  # of any kind: it must not discard the written files
        logger.error(f"What save_pretrained has written could not be checked: {error!r:.500}")
        return {}
    if broken := _broken(report):
        logger.error(
            f"What save_pretrained has written is not good: {_said(broken).rstrip('.')}. Look at "
            "it with `llmcompressor verify`."
        )
    return _told(report)


def _broken(report: VerificationReport) -> list[Finding]:
    return [
        one
        for one in report.findings
        if one.severity is Severity.ERROR and (not one.server or one.rule in _OF_VALUES)
    ]


def _told(report: VerificationReport) -> dict[str, Any]:
    """Log a summary of the verification, and return the part kept in the run's report."""
    counts = ", ".join(f"{count} {name}s" for name, count in report.counts.items())
    logger.info(
        f"Verified {report.tensors} tensors of {report.bytes / 1e6:.1f} MB in "
        f"{report.seconds:.1f} s: {counts}."
    )
    kept = report.as_dict()
    for of_this_run in ("checkpoint", "reference", "seconds"):
        kept.pop(of_this_run, None)
    return kept


def serves_nobody(modifiers: Iterable[Modifier]) -> bool:
    """Return True if a modifier declares that its output is not meant to be served."""
    return any(one.means_unservable for one in modifiers)


def check_servable(
    config: Mapping[str, Any], prediction: Prediction, *, is_meant: bool = False
) -> None:
    """Warn before a run about output that servers would refuse or run incorrectly.

    Limits of transformers are reported too. Such a checkpoint is valid, but most users load theirs
    with transformers first, whose errors do not tell the reason.

    Args:
        config: the ``config.json`` that will be written.
        prediction: the tensors that will be written, and their modules.
        is_meant: the output need not be servable.

    Raises:
        RecipeError: every server with known rules would refuse the output or run it incorrectly,
            and ``is_meant`` is False.
    """
    ask = partial(
        check_serving,
        config,
        {one.name: TensorInfo(one.dtype, one.shape) for one in prediction.stored},
        kinds=prediction.kinds,
    )
    errors = _errors(ask())
    of_transformers = ask(deployment=Deployment("transformers"))
    limits = [one for one in of_transformers if one.severity is Severity.ERROR]
    if limits and not is_meant:
        _refuse_unservable(ask)
    for each in merged(errors, by_rule=True):
        logger.warning(
            f"{each.first.server or 'No server'} would {'not ' if each.first.server else ''}serve "
            f"this ({each.first.rule}). {_said([each.first])}"
            + (f" ({len(each.modules)} modules)" if each.modules[1:] else "")
        )
    is_taken = all(one.server != "vllm" for one in errors)
    for each in merged((one for one in limits if one not in errors), by_rule=True):
        remedy = _REMEDIES.get(each.first.rule, each.first.remedy)
        remedy = remedy if is_taken or "vLLM" not in remedy else ""
        failing = "round all of" if each.first.rule in _OF_STATES else "load or run"
        logger.warning(
            f"transformers would not {failing} this ({each.first.rule}). "
            f"{listed(each.modules)}: {each.first.message} {remedy}".strip()
        )
    if not limits:
        _tell_how_transformers_differs(of_transformers)


def _tell_how_transformers_differs(findings: Iterable[Finding]) -> None:
    """Report differences of transformers' forward for a checkpoint that it can load.

    Quality that is measured with transformers then differs from that of the recipe.
    """
    own = (one for one in findings if one.server == "transformers")
    for each in merged(own, by_rule=True):
        tell = logger.warning if each.first.severity is Severity.WARNING else logger.info
        tell(
            f"transformers would load this, with a limit ({each.first.rule}). "
            f"{listed(each.modules)}: {each.first.message} {each.first.remedy}".strip()
        )


def _refuse_unservable(ask: Callable[..., list[Finding]]) -> None:
    """Raise if no server can serve the output."""
    firsts = []
    for server in SERVERS:
        errors = _errors(ask(deployment=Deployment(server)))
        found = [one for one in errors if one.rule not in _OF_SOME_RELEASES]
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


def check_writable_model(
    model: Module,
    modifiers: Sequence[Modifier],
    state: State,
    source: str | None,
    output_dir: str | Path,
    *,
    packed: bool,
    is_meant: bool,
) -> None:
    """Check before a run that a model in memory can be written and served.

    Args:
        model: the model; only models of transformers are checked.
        modifiers: of the recipe, initialized.
        state: of the session.
        source: the folder of the original model.
        output_dir: the output folder.
        packed: weights are packed, not written dense.
        is_meant: as for :func:`check_servable`.

    Raises:
        ArgumentError: weights are parametrized, but not by the model's class.
        OutputError: there is not enough disk space.
        RecipeError: no server would serve the output.
    """
    if not isinstance(model, PreTrainedModel):
        return
    _check_unparametrized(model)
    folder = None if source is None else Path(source)
    prediction, config = _predicted(model, modifiers, state, folder, packed=packed)
    layout = lay_out(prediction.stored, parse_size(DEFAULT_SHARD_SIZE))
    beside = beside_weights(folder, len(prediction.stored))
    check_space(Path(output_dir), output=layout.file_size + beside)
    check_servable(config, prediction, is_meant=is_meant)


def warn_of_saving(
    model: Module, modifiers: Sequence[Modifier], state: State, source: str | None
) -> None:
    """Warn before a run about problems that ``save_pretrained`` of its model would have.

    Args:
        model: as for :func:`check_writable_model`, like all others.
        modifiers: see there.
        state: see there.
        source: see there.
    """
    if not isinstance(model, PreTrainedModel):
        return
    folder = None if source is None else Path(source)
    try:
        _check_unparametrized(model)
        prediction, config = _predicted(model, modifiers, state, folder, packed=True)
        check_servable(config, prediction, is_meant=True)
    except Exception as error:  # of any kind: the model may be meant for use in memory only
        said = " ".join(f"{error}".split()) or repr(error)
        logger.warning(f"Its save_pretrained would fail, or write what no one reads. {said:.500}")


def _predicted(
    model: PreTrainedModel,
    modifiers: Sequence[Modifier],
    state: State,
    source: Path | None,
    *,
    packed: bool,
) -> tuple[Prediction, dict[str, Any]]:
    """Predict the tensors and the configuration that will be written."""
    with outlined(modifiers, state), dense_closed(model), ExitStack() as written:
        for modifier in modifiers:
            written.enter_context(modifier.as_written(state))
        planned = [one for modifier in modifiers for one in modifier.planned(state)]
        prediction = predict(model, planned, {}, save_compressed=packed)
        config = planned_config(model, source, prediction, compressed=packed)
    return prediction, config


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
            f"Weights of {listed(foreign)} are parametrized (torch.nn.utils.parametrize), which "
            f"{kind} does not do by itself: no reader would find what is written of them.",
            "Call torch.nn.utils.parametrize.remove_parametrizations for each before.",
        )


def _errors(found: Iterable[Finding]) -> list[Finding]:
    return [one for one in found if one.severity is Severity.ERROR]


def _said(findings: Iterable[Finding]) -> str:
    told = (f"{one.module}: {one.message} {one.remedy}".strip() for one in findings)
    return listed(told, most=_MOST_SHOWN, separator="; ")
