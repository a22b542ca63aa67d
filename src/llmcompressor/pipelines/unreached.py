# SPDX-License-Identifier: Apache-2.0
"""What no calibration batch will reach, as far as the inputs of the batches say it.

The towers of a model that sees or hears run only on images or sound. transformers knows which part
that is by its name. Nothing is said of the modules behind it, nor of a tower that it does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.errors import TargetError
from llmcompressor.modeling.embeddings import embeddings
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines.passes import BY_BLOCK

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
        pipeline: which will run; one that does not pause leaves it to the modifiers.

    Raises:
        TargetError: names the modules.
    """
    if pipeline not in BY_BLOCK:
        return
    inputs = {name for batch in batches for name in batch}
    state = State(model=model)
    needing = [one for one in modifiers if one.collects]
    wanted = [(one, set(one.calibrated_modules(state))) for one in needing]
    for modality, prefixes in _MODALITIES.items():
        if any(name.startswith(prefixes) for name in inputs):
            continue
        missed = [
            name
            for name, module in _tower(model, modality)
            if any(module in own and not one.accepts_unreached(name) for one, own in wanted)
        ]
        if missed:
            more = f" and {len(missed) - 8} more" if missed[8:] else ""
            raise TargetError(
                f"No calibration batch reaches {', '.join(missed[:8])}{more}: no sample holds "
                f"{_WHAT[modality]}.",
                "Add data that uses these modules, or put them on the recipe's ignore list.",
            )


def _tower(model: Any, modality: str) -> Iterator[tuple[str, Module]]:
    """The modules, by name, that run on nothing but images or sound; none in most models."""
    find = getattr(model, "get_encoder", None)
    if find is None or "modality" not in inspect.signature(find).parameters:
        return
    tower = find(modality=modality)
    inside = set(tower.modules()) if isinstance(tower, Module) else set()
    # Where there is no such tower, the model itself is what is found.
    if model not in inside and embeddings(model)[0] not in inside:
        yield from ((name, module) for name, module in model.named_modules() if module in inside)
