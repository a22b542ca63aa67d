# SPDX-License-Identifier: Apache-2.0
"""Before a run, what readers would refuse of its output; after it, the files are read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.checkpoint.experts import dense_closed
from llmcompressor.checkpoint.output_layout import Stored, lay_out
from llmcompressor.checkpoint.prediction import predict
from llmcompressor.checkpoint.save import DEFAULT_SHARD_SIZE, planned_config
from llmcompressor.checkpoint.shards import parse_size
from llmcompressor.checkpoint.space import beside_weights, check_space
from llmcompressor.core.state import State
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.modifiers.outlined import outlined
from llmcompressor.schemes.assign import listed
from llmcompressor.verification import Deployment, TensorInfo, check_serving
from llmcompressor.verification.check import verify_files
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.report import merged

__all__ = ["check_writable_model", "check_written", "warn_unservable"]

_MOST_SHOWN = 5
_OF_VALUES = {"S27", "S72"}
"""Rules of servers that are about values: no recipe asks for breaking them."""
_REMEDIES = {
    "L2": "Ignore these modules, take a scheme whose codes keep the name weight (W8A8, "
    "FP8_DYNAMIC), or serve it with vLLM."
}
"""What the user of a recipe can do, where the rule itself can only speak of a checkpoint."""


def check_written(folder: Path) -> dict[str, Any]:
    """Read a written checkpoint and say what came of it.

    What a server would refuse may be what the recipe asks for: it was said before
    (:func:`warn_unservable`), and stands in the report.  Files that are not what they say they are
    must not be taken for a result.

    Args:
        folder: where its files are.

    Returns:
        What the run's report keeps of it.

    Raises:
        CheckpointError: a file, a tensor or a value is wrong.
    """
    report = verify_files(folder)
    broken = [
        one
        for one in report.findings
        if one.severity is Severity.ERROR and (not one.server or one.rule in _OF_VALUES)
    ]
    if broken:
        raise CheckpointError(
            f"What was written is not good: {_said(broken)}.",
            "It was not given its name. Look at it with `llmcompressor verify`, or leave the check "
            "out with verify=False (--no-verify).",
        )
    counts = ", ".join(f"{count} {name}s" for name, count in report.counts.items())
    logger.info(
        f"Verified {report.tensors} tensors of {report.bytes / 1e6:.1f} MB in "
        f"{report.seconds:.1f} s: {counts}."
    )
    kept = report.as_dict()
    for of_this_run in ("checkpoint", "reference", "seconds"):
        kept.pop(of_this_run, None)
    return kept


def warn_unservable(config: Mapping[str, Any], stored: Iterable[Stored]) -> None:
    """Say before the work what servers would refuse, or run wrong, of its output.

    What transformers alone cannot read is among it. Such a checkpoint is sound, but it is what most
    people read theirs with first, and the reason is in none of the errors that they would get.

    Args:
        config: the ``config.json`` that will be written.
        stored: the tensors that will be.
    """
    headers = {one.name: TensorInfo(one.dtype, one.shape) for one in stored}
    errors = _errors(config, headers)
    for one in merged(errors):
        logger.warning(
            f"{one.first.server} would not serve this ({one.first.rule}). "
            f"{_said([one.first])}" + (f" ({len(one.modules)} modules)" if one.modules[1:] else "")
        )
    alone = Deployment("transformers")
    limits = [one for one in _errors(config, headers, alone) if one not in errors]
    for one in merged(limits):
        remedy = _REMEDIES.get(one.first.rule, one.first.remedy)
        logger.warning(
            f"transformers would not load or run this ({one.first.rule}). "
            f"{listed(one.modules)}: {one.first.message} {remedy}".strip()
        )


def check_writable_model(
    model: Module,
    modifiers: Sequence[Modifier],
    state: State,
    source: str | None,
    output_dir: str | Path,
    *,
    packed: bool,
    warn: bool,
) -> None:
    """See before the work that the disk has room for a model that is in memory.

    Args:
        model: the model; only of transformers' classes is it known what will be written.
        modifiers: what will be done, initialized.
        state: of the session.
        source: the folder of the original.
        output_dir: where it will be written.
        packed: weights are packed, not written dense.
        warn: say what servers would refuse (:func:`warn_unservable`).

    Raises:
        OutputError: there is not enough room.
    """
    if not isinstance(model, PreTrainedModel):
        return
    folder = None if source is None else Path(source)
    with outlined(modifiers, state), dense_closed(model):
        planned = [one for modifier in modifiers for one in modifier.planned(state)]
        prediction = predict(model, planned, {}, save_compressed=packed)
        config = planned_config(model, folder, prediction, compressed=packed)
    layout = lay_out(prediction.stored, parse_size(DEFAULT_SHARD_SIZE))
    beside = beside_weights(folder, len(prediction.stored))
    check_space(Path(output_dir), output=layout.file_size + beside)
    if warn:
        warn_unservable(config, prediction.stored)


def _errors(
    config: Mapping[str, Any],
    headers: Mapping[str, TensorInfo],
    deployment: Deployment | None = None,
) -> list[Finding]:
    found = check_serving(config, headers, deployment=deployment)
    return [one for one in found if one.severity is Severity.ERROR]


def _said(findings: list[Finding]) -> str:
    shown = [f"{one.module}: {one.message} {one.remedy}".strip() for one in findings[:_MOST_SHOWN]]
    more = len(findings) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")
