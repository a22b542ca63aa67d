# SPDX-License-Identifier: Apache-2.0
"""Early check for vision and audio towers that no calibration batch reaches.

The towers of a multimodal model run only on images or audio. transformers finds them by modality.
Modules after a tower, and towers that transformers does not know, are not checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.modeling.embeddings import embeddings
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines.passes import BY_BLOCK
from llmcompressor.wording import listed

__all__ = ["check_reached"]

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
    needing = [one for one in modifiers if one.collects]
    wanted = [(one, set(one.calibrated_modules(state))) for one in needing]
    towers = {modality: _tower(model, modality) for modality in _MODALITIES}
    reached = {towers[one] for one in _MODALITIES if _given(one, inputs)}
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
                f"No calibration batch reaches {listed(missed, most=8)}: no sample holds "
                f"{_WHAT[modality]}.",
                "Add data that uses these modules, or put them on the recipe's ignore list.",
            )


def _given(modality: str, inputs: Iterable[str]) -> bool:
    """Return True if some batch has inputs of a modality."""
    return any(name.startswith(_MODALITIES[modality]) for name in inputs)


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
