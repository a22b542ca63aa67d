# SPDX-License-Identifier: Apache-2.0
"""Calibrated modules of a recipe, and the order in which a forward calls them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from llmcompressor.errors import CheckpointError, CompressorError, DatasetError
from llmcompressor.modeling.call_order import CallOrder, version_of, watch_calls
from llmcompressor.modeling.expert_stages import ExpertStage
from llmcompressor.modeling.hollow import hollow_weights, zero_products
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.input_rotations import input_rotations, resting
from llmcompressor.modeling.shown_lists import ShownLists
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.pipelines.experts import every_expert_called
from llmcompressor.pipelines.model_runs import small_batch

if TYPE_CHECKING:
    from llmcompressor.core.state import State

__all__ = ["Calibrated", "owners_of", "seen_without_weights", "watch_calibrated"]


@dataclass(frozen=True)
class Calibrated:
    """The calibrated modules, with their call order."""

    names: Mapping[Module, str]
    """Module → name, in the order of the model."""
    order: CallOrder
    """When they are called, and which of them share an input; other parts of blocks are counted."""
    stages: Mapping[Module, tuple[Module, str]]
    """Linear of an expert → the stage at which it gets its input, and that one's name."""


def owners_of(modifiers: Sequence[Modifier], state: State) -> dict[Module, list[int]]:
    """Map each calibrated module to the indices of the modifiers that declare it."""
    owners: dict[Module, list[int]] = {}
    for position, modifier in enumerate(modifiers):
        for module in modifier.calibrated_modules(state):
            owners.setdefault(module, []).append(position)
    return owners


def watch_calibrated(
    model: Module,
    batches: CalibrationBatches,
    owners: Mapping[Module, list[int]],
    blocks: Mapping[Module, str],
    lists: ShownLists,
) -> Calibrated:
    """Run a small forward and record the calls of the calibrated modules.

    Args:
        model: the model to compress.
        batches: a slice of the first one is run.
        owners: result of :func:`owners_of`.
        blocks: inputs are shared within a block, not between blocks.
        lists: expert lists whose members get broadcast inputs.

    Raises:
        CheckpointError: the model's forward writes to its own weights.
        DatasetError: the model's forward fails on the first batch.
    """
    names = {module: name for name, module in model.named_modules() if module in owners}
    region = {inner: name for block, name in blocks.items() for inner in block.modules()}
    modules_by_name = {name: module for module, name in names.items()}
    stages: dict[Module, tuple[Module, str]] = {
        linear: (stage, name)
        for name, stage in model.named_modules()
        if isinstance(stage, ExpertStage)
        for linear in stage.linears
        if linear in names
    }
    with seen_without_weights(model, batches[0]), lists.calls_watched():
        order = watch_calls(
            lambda: batches.run(small_batch(batches[0])),
            names,
            region=lambda name: region.get(modules_by_name[name], name.rpartition(".")[0]),
            also_count=region,
        )
    order = lists.counted(order)
    # Each modifier hooks the first of its own modules, which gets the rotated input.
    order = order.split(
        lambda module: (tuple(owners[module]), stages.get(module), input_rotations(module))
    )
    return Calibrated(names, order, stages)


@contextmanager
def seen_without_weights(model: Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Context for a dry-run forward: weights that are not loaded are zeros, and hooks are off.

    Hooks of modifiers are off because the dry run is not calibration data.

    Args:
        model: the model to run.
        batch: the batch it is run on, for the error message.
    """
    with (
        _accepted(model, batch),
        HooksMixin.disable_hooks(),
        hollow_weights(model),
        zero_products(),
        every_expert_called(model),
        resting(model),
        _weights_unchanged(model),
    ):
        yield


@contextmanager
def _accepted(model: Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Turn exceptions that a forward raises for unsuitable arguments into a DatasetError."""
    try:
        yield
    except (CompressorError, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        columns = ", ".join(sorted(batch)) or "nothing"
        raise DatasetError(
            f"The forward of {type(model).__name__} fails on the first batch, which has {columns}: "
            f"{type(error).__name__}: {str(error).rstrip('.')}.",
            "Give it the columns, and of the shapes, that this forward takes.",
        ) from error


@contextmanager
def _weights_unchanged(model: Module) -> Iterator[None]:
    """Refuse a model whose forward writes to its weights, as RWKV's does to rescale them.

    Such a model would not go on with the calibrated weights. Weights that are not loaded are
    expanded zeros, which torch refuses to write to.
    """
    before = {parameter: version_of(parameter) for parameter in model.parameters()}
    try:
        yield
    except RuntimeError as error:
        if "single memory location" not in str(error):
            raise
        raise _writes_to_weights(model) from error
    if any(version_of(parameter) != version for parameter, version in before.items()):
        raise _writes_to_weights(model)


def _writes_to_weights(model: Module) -> CheckpointError:
    return CheckpointError(
        f"The forward of {type(model).__name__} writes to its own weights: they can neither be "
        "calibrated as they are nor saved as it leaves them.",
        "Turn that off in config.json (RWKV: rescale_every 0), or take a recipe without "
        "calibration.",
    )
