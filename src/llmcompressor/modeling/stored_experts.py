# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that store experts one by one where transformers expects them stacked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightTransform,
)

from llmcompressor.errors import ArgumentError

__all__ = ["patch_moe_mappings"]

_EACH = "experts.*."


def patch_moe_mappings(
    model_type: str,
    mappings: Sequence[Any],
    remove_targets: Iterable[str] | None = None,
) -> None:
    r"""Let transformers load experts that are stored one by one into the stacks of a model type.

    The layout depends on the checkpoint, and transformers may know only one: with another layout
    it leaves the experts random. After this call it stacks them, in this process::

        patch_moe_mappings(
            "qwen3_vl_moe", [WeightRenaming(r"experts\.(\d+)\.w1\.", r"experts.\1.gate_proj.")]
        )

    Args:
        model_type: the ``model_type`` of ``config.json``, or of a part of it.
        mappings: transformers' ``WeightRenaming`` and ``WeightConverter``. After the renamings
            experts are named as in the type's own table; where it stacks none,
            ``experts.0.gate_proj``, ``up_proj`` and ``down_proj``.
        remove_targets: entries of the type's own table to leave out, by what they make.

    Raises:
        ArgumentError: transformers does not know the type, or an entry is no mapping of its.
    """
    if model_type not in CONFIG_MAPPING:
        raise ArgumentError(
            f"The installed transformers knows no model type {model_type!r}.",
            "Give the model_type of the checkpoint's config.json.",
        )
    wrong = [one for one in mappings if not isinstance(one, WeightTransform)]
    if wrong:
        raise ArgumentError(
            f"Among the mappings is a {type(wrong[0]).__name__}.",
            "Give WeightRenaming or WeightConverter of transformers.core_model_loading.",
        )
    removed = set(remove_targets or ())
    kept = [one for one in _table(model_type) if removed.isdisjoint(one.target_patterns)]
    tables = [*kept, *mappings, *_table(_text_type(model_type))]
    stacking = [] if any(map(_stacks, tables)) else _stacking()
    register_checkpoint_conversion_mapping(
        model_type, [*kept, *mappings, *stacking], overwrite=True
    )


def _table(model_type: str | None) -> list[Any]:
    read: Any = get_checkpoint_conversion_mapping  # it has no types
    return list(read(model_type) or []) if model_type else []


def _text_type(model_type: str) -> str | None:
    """The type of the language model within, which has a table of its own."""
    part = (CONFIG_MAPPING[model_type].sub_configs or {}).get("text_config")
    return getattr(part, "model_type", None)


def _stacks(entry: Any) -> bool:
    return isinstance(entry, WeightConverter) and any(
        _EACH in source for source in entry.source_patterns
    )


def _stacking() -> list[Any]:
    """Converters that stack gate with up projections, and down projections."""
    return [
        WeightConverter(
            source_patterns=[f".{_EACH}gate_proj.weight", f".{_EACH}up_proj.weight"],
            target_patterns=".experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=[f".{_EACH}down_proj.weight"],
            target_patterns=".experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
