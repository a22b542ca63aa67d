# SPDX-License-Identifier: Apache-2.0
"""Calibrated modules of a recipe, and the order in which a forward calls them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import CheckpointError, CompressorError, DatasetError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import first_tensor, tensor_version, trace_calls
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.meta_weights import skip_zero_products, zero_weights
from llmcompressor.modeling.patches import input_rotation_key, rotations_suspended
from llmcompressor.modeling.weights import embeddings
from llmcompressor.moe.expert_stops import ExpertStage
from llmcompressor.moe.module_list import ExpertBroadcast, is_linear_like
from llmcompressor.observers.tokens import count_tokens
from llmcompressor.pipelines.batches import CalibrationBatches, small_batch
from llmcompressor.pipelines.granularity import CalibratedModules
from llmcompressor.pipelines.moe_routing import call_all_experts
from llmcompressor.pipelines.passes import BY_BLOCK
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names


def modifier_indices(modifiers: Sequence[Modifier], state: State) -> dict[Module, list[int]]:
    """Map each calibrated module to the indices of the modifiers that declare it."""
    owners: dict[Module, list[int]] = {}
    for position, modifier in enumerate(modifiers):
        for module in modifier.select(state).modules:
            owners.setdefault(module, []).append(position)
    return owners


def trace_calibrated_modules(
    model: Module,
    batches: CalibrationBatches,
    owners: Mapping[Module, list[int]],
    blocks: Mapping[Module, str],
    lists: ExpertBroadcast,
) -> CalibratedModules:
    """Run a small forward and record the calls of the calibrated modules.

    Args:
        model: the model to compress.
        batches: a slice of the first one is run.
        owners: result of :func:`modifier_indices`.
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
    with dry_run_context(model, batches.first), lists.all_members_called():
        order = trace_calls(
            lambda: batches.run(small_batch(batches.first)),
            names,
            region=lambda name: region.get(modules_by_name[name], name.rpartition(".")[0]),
            also_count=region,
        )
    order = lists.with_shown_calls(order)
    # Each modifier hooks the first of its own modules, which gets the rotated input.
    order = order.split(
        lambda module: (tuple(owners[module]), stages.get(module), input_rotation_key(module))
    )
    return CalibratedModules(names, order, stages)


@contextmanager
def dry_run_context(model: Module, batch: Mapping[str, Any]) -> Iterator[None]:
    """Context for a dry-run forward: weights that are not loaded are zeros, and hooks are off.

    Hooks of modifiers are off because the dry run is not calibration data.

    Args:
        model: the model to run.
        batch: the batch it is run on, for the error message.
    """
    with (
        _as_dataset_error(model, batch),
        HooksMixin.disable_hooks(),
        zero_weights(model),
        skip_zero_products(),
        call_all_experts(model),
        rotations_suspended(model),
        _refuse_weight_changes(model),
    ):
        yield


@contextmanager
def _as_dataset_error(model: Module, batch: Mapping[str, Any]) -> Iterator[None]:
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
def _refuse_weight_changes(model: Module) -> Iterator[None]:
    """Refuse a model whose forward writes to its weights, as RWKV's does to rescale them.

    Such a model would not go on with the calibrated weights. Weights that are not loaded are
    expanded zeros, which torch refuses to write to.
    """
    before = {parameter: tensor_version(parameter) for parameter in model.parameters()}
    try:
        yield
    except RuntimeError as error:
        if "single memory location" not in str(error):
            raise
        raise _writes_to_weights(model) from error
    if any(tensor_version(parameter) != version for parameter, version in before.items()):
        raise _writes_to_weights(model)


def _writes_to_weights(model: Module) -> CheckpointError:
    return CheckpointError(
        f"The forward of {type(model).__name__} writes to its own weights: they can neither be "
        "calibrated as they are nor saved as it leaves them.",
        "Turn that off in config.json (RWKV: rescale_every 0), or take a recipe without "
        "calibration.",
    )


# --------------------
# Calibration coverage: tokens seen by each module, and warnings for modules that saw too few.


@contextlib.contextmanager
def report_low_coverage(
    model: Module,
    modules: Iterable[Module],
    batches: CalibrationBatches,
    state: State,
    share: float | None,
) -> Iterator[None]:
    """Warn after a calibration about modules that saw less than a share of the tokens.

    Args:
        model: the model being calibrated.
        modules: its calibrated modules.
        batches: the calibration batches.
        state: holds the token mask of the current batch.
        share: required share of all real tokens, between 0 and 1; ``None`` disables counting.
    """
    if share is None:
        yield
        return
    counter = TokenCounter()
    counter.watch(modules, state)
    try:
        yield
    finally:
        counter.remove_hooks()
    counter.sum_over(state.run.ranks)
    total = batches.real_tokens
    names = {module: name for name, module in model.named_modules()}
    found = [
        (seen, names.get(module, "?"))
        for module, seen in counter.seen.items()
        if seen < share * total
    ]
    if found:
        shown = join_names(f"{name} ({seen})" for seen, name in sorted(found))
        logger.warning(
            f"{len(found)} of {len(counter.seen)} modules saw less than {share:.4g} of the "
            f"{total} calibration tokens: {shown}. Calibrate with more data, or with data that "
            "reaches them."
        )


class TokenCounter(HooksMixin):
    """Counts tokens with hooks that are switched on and off together with those of modifiers."""

    _seen: dict[Module, int] = PrivateAttr(default_factory=dict)

    @property
    def seen(self) -> dict[Module, int]:
        """Number of tokens by module, for modules that get activations."""
        return self._seen

    def sum_over(self, ranks: Ranks | None) -> None:
        """Sum the tokens that all ranks have counted, which watch the same modules."""
        if ranks is not None and self._seen:
            own = torch.tensor(list(self._seen.values()))
            total = ranks.sum_all(own, what="tokens of modules").tolist()
            self._seen.update(zip(self._seen, total, strict=True))

    def watch(self, modules: Iterable[Module], state: State) -> None:
        """Count the tokens of ``modules``, except embeddings, whose inputs are row numbers."""

        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if isinstance(tensor, Tensor) and module in self._seen:
                self._seen[module] += count_tokens(tensor, state.calibration.token_mask)

        for module in modules:
            if is_linear_like(module):
                self._seen[module] = 0
                self.register_hook(module, count, "forward_pre", with_kwargs=True)


def uncalled_blocks(calibrated: CalibratedModules, blocks: Mapping[Module, str]) -> list[str]:
    """Names of the blocks whose forward the model runs without calling the module."""
    calls = calibrated.order.calls
    return [
        name
        for block, name in blocks.items()
        if block not in calls and any(inner in calls for inner in block.modules())
    ]


def warn_uncalled_modules(
    calibrated: CalibratedModules, modifiers: Sequence[Modifier], state: State
) -> None:
    """Warn early about modules that may not be reached by any batch.

    Args:
        calibrated: result of the dry-run forward.
        modifiers: of the pass; some have a policy for unreached modules.
        state: of the run.
    """
    selections = [one.select(state) for one in modifiers]
    missed = [
        name
        for module, name in calibrated.names.items()
        if module not in calibrated.order.calls
        and not all(one.accepts_unreached(name) for one in selections)
    ]
    if not missed:
        return
    ends = {name.rpartition(".")[2]: None for name in missed}
    patterns = ", ".join(f"re:.*{end}$" for end in ends if not end.isdecimal())
    logger.warning(
        f"A first forward, of a few tokens of the first batch, did not call {join_names(missed)}. "
        "If "
        "no batch does, the run will be refused after the last one. Where a model multiplies by "
        "a weight without calling its module, put that on the ignore list"
        f"{f' ({patterns})' if patterns else ''}."
    )


# --------------------
# Early check for vision and audio towers that no calibration batch reaches.
#
# The towers of a multimodal model run only on images or audio. transformers finds them by
# modality. Modules after a tower, and towers that transformers does not know, are not checked.

_MODALITIES: Mapping[str, tuple[str, ...]] = {
    "image": ("pixel", "image", "video", "flattened_patches"),
    "audio": ("audio", "input_features", "input_values", "speech"),
}
"""What transformers calls a modality → how the names of its inputs begin."""
_WHAT = {"image": "images", "audio": "sound"}


def check_reached(
    model: Module,
    modifiers: Iterable[Modifier],
    batches: Iterable[Mapping[str, Any]],
    pipeline: str,
) -> None:
    """Refuse to calibrate a tower whose inputs are in no batch.

    Args:
        model: the model; its weights may be on ``meta``.
        modifiers: those of the recipe, initialized on it.
        batches: all of them, or one with each set of inputs.
        pipeline: the pipeline to run; without pauses the check is left to the modifiers.

    Raises:
        TargetError: a targeted tower gets no inputs; the error names its modules.
    """
    if pipeline not in BY_BLOCK:
        return
    inputs = {name for batch in batches for name in batch}
    state = State(model=model)
    selections = [one.select(state) for one in modifiers if one.traits.data.collects]
    wanted = [(one, set(one.modules)) for one in selections]
    towers = {modality: _tower(model, modality) for modality in _MODALITIES}
    reached = {
        towers[modality]
        for modality, prefixes in _MODALITIES.items()
        if any(name.startswith(prefixes) for name in inputs)
    }
    if getattr(model, "main_input_name", None) in inputs:
        reached.add(_tower(model, None))
    for modality, tower in towers.items():
        if tower is None or tower in reached:
            continue
        inside = set(tower.modules())
        missed = [
            name
            for name, module in model.named_modules()
            if module in inside
            and any(module in own and not one.accepts_unreached(name) for one, own in wanted)
        ]
        if missed:
            raise TargetError(
                f"No calibration batch reaches {join_names(missed, most=8)}: no sample holds "
                f"{_WHAT[modality]}.",
                "Add data that uses these modules, or put them on the recipe's ignore list.",
            )


def _tower(model: Any, modality: str | None) -> Module | None:
    """Return the encoder for a modality, or for the main input if ``None``; ``None`` if absent.

    A model may return the same encoder for all modalities.
    """
    find = getattr(model, "get_encoder", None)
    if find is None or "modality" not in inspect.signature(find).parameters:
        return None
    tower = find(modality=modality)
    inside = set(tower.modules()) if isinstance(tower, Module) else set()
    # transformers returns the model itself where there is no such tower.
    return None if not inside or model in inside or embeddings(model)[0] in inside else tower
