# SPDX-License-Identifier: Apache-2.0
"""Value, output and down projections, which rotations of heads and of the MLP act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import Linear, Module

from llmcompressor.errors import TargetError
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.settings import text_config
from llmcompressor.modifiers.rotation.mappings import SAY_PARTS, SpinQuantMapping
from llmcompressor.names import named_modules

__all__ = ["ATTENTION_WRITERS", "MLP_WRITERS", "Heads", "down_projections", "find_heads"]

ATTENTION_WRITERS = ("o_proj", "out_proj", "linear_out", "wo", "dense")
"""Names of the Linears at the end of attention, and of what stands in its place."""
MLP_WRITERS = ("down_proj", "w2", "fc2", "dense_4h_to_h", "linear_2", "output_linear")
"""Names of the Linears at the end of an MLP."""
_VALUES = ("v_proj",)


@dataclass(frozen=True)
class Heads:
    """Value and output projection of one attention module.

    Attributes:
        name: name of the attention module.
        values: the value projection.
        output: the output projection.
        head_dim: head dimension.
    """

    name: str
    values: tuple[str, Linear]
    output: tuple[str, Linear]
    head_dim: int


def find_heads(model: Any, mapping: SpinQuantMapping | None = None) -> list[Heads]:
    """The value and output projections of all attention modules.

    Raises:
        TargetError: there are none, or their widths do not go together.
    """
    values = [mapping.attn_v] if mapping else [rf"re:(?:.*\.)?{name}$" for name in _VALUES]
    outputs = (
        [mapping.attn_o] if mapping else [rf"re:(?:.*\.)?{name}$" for name in ATTENTION_WRITERS]
    )
    by_parent = {name.rpartition(".")[0]: (name, one) for name, one in _linears(model, outputs)}
    modules = dict(named_modules(model))
    found = []
    for name, module in _linears(model, values):
        parent = name.rpartition(".")[0]
        if parent not in by_parent:
            raise TargetError(f"Beside {name} nothing was found that reads the values.", SAY_PARTS)
        width = mapping.attn_head_dim if mapping else None
        width = width or _head_dim(model, modules[parent])
        output = by_parent[parent][1]
        if width is None or module.out_features % width or output.in_features % width:
            raise TargetError(
                f"The width of a head of {parent} is not known.",
                "Say it with attn_head_dim in mappings, or leave R2 out of rotations.",
            )
        found.append(Heads(parent, (name, module), by_parent[parent], width))
    if not found:
        raise TargetError(
            f"{type(model).__name__} has no Linear that makes values alone (v_proj).",
            "Leave R2 out of rotations, or name one that does in the field mappings.",
        )
    return found


def _head_dim(model: Any, attention: Module) -> int | None:
    own = getattr(attention, "head_dim", None)
    if isinstance(own, int):
        return own
    config = text_config(model.config)
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)


def down_projections(model: Any, mapping: SpinQuantMapping | None = None) -> dict[str, Linear]:
    """The last Linear of each MLP, by name.

    Raises:
        TargetError: there are none.
    """
    targets = mapping.mlp_out if mapping else [rf"re:.*\.{name}$" for name in MLP_WRITERS]
    found = dict(_linears(model, targets))
    if not found:
        raise TargetError(
            f"{type(model).__name__} has no down projection that is a Linear.",
            f"Leave R4 out of rotations. {SAY_PARTS}",
        )
    return found


def _linears(model: Module, targets: list[str]) -> list[tuple[str, Linear]]:
    matched = match_named_modules(model, targets)
    return [(name, module) for name, module in matched if isinstance(module, Linear)]
