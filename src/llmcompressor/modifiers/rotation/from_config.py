# SPDX-License-Identifier: Apache-2.0
"""Rotation plan from the transforms of a ``config.json``.

Loaders interpret them as follows, Q being the matrix of a scheme (transposed with ``inverse``)::

    input           x Q              at run time
    output          y Q              at run time
    weight_input    W Qᵀ             so an inverse one undoes an ``input`` that is none
    weight_output   Qᵀ W, b Q        an embedding's rows: e Q
    q_attn, k_cache q Q, k Q         at run time, after RoPE
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from torch.nn import Embedding, Linear, Module

from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modifiers.rotation.plan import RotationPlan
from llmcompressor.numerics.rotation import Rotation

if TYPE_CHECKING:
    from llmcompressor.modifiers.rotation.base import RotationModifier

__all__ = ["plan_from_config"]

_ATTENTION = (TransformLocation.Q_ATTN, TransformLocation.K_CACHE)


def plan_from_config(
    modifier: RotationModifier, model: Any, config: TransformConfig
) -> RotationPlan:
    """Plan the rotations of the schemes of ``config``.

    Args:
        modifier: makes the matrices.
        model: the model whose modules the targets match.
        config: its schemes have one matrix per size each.

    Raises:
        RecipeError: a scheme has an unknown type, or needs several matrices.
        TargetError: targets match nothing, or modules of the wrong kind or width.
    """
    plan = RotationPlan(modifier.torch_precision)
    for name, scheme in config.config_groups.items():
        if scheme.randomize:
            raise RecipeError(
                f"transform_config: {name} has randomize, whose permutations not every reader "
                "applies.",
                "Give each module a scheme of its own instead, without randomize.",
            )
        online = any(args.is_online() for args in scheme.apply)
        orders: dict[int, Rotation] = {}
        for args in scheme.apply:
            found = list(match_named_modules(model, args.targets, args.ignore))
            if not found:
                raise TargetError(
                    f"The rotation {name} matches no module: {args.targets}.",
                    "Correct its targets.",
                )
            for module_name, module in found:
                order = _matrix_order(modifier, scheme, args, module_name, module)
                rotation = modifier.rotation(name, order, module_name, kind=scheme.type)
                orders[order] = rotation
                plan.add(name, args, module_name, module, rotation)
        plan.schemes[name] = modifier.written(scheme, list(orders.values()), online=online)
    return plan


def _matrix_order(
    modifier: RotationModifier,
    scheme: TransformScheme,
    args: TransformArgs,
    name: str,
    module: Module,
) -> int:
    location = TransformLocation(args.location)
    if location in _ATTENTION:
        order: Any = scheme.head_dim or getattr(module, "head_dim", None)
        if not isinstance(order, int):
            raise TargetError(f"The width of a head of {name} is not known.", "Give head_dim.")
        return order
    incoming = location in (TransformLocation.INPUT, TransformLocation.WEIGHT_INPUT)
    if isinstance(module, Embedding) and location is TransformLocation.WEIGHT_OUTPUT:
        width = module.embedding_dim
    elif isinstance(module, Linear):
        width = module.in_features if incoming else module.out_features
    else:
        raise TargetError(
            f"{name} is a {type(module).__name__}: a rotation at {location.value} needs a Linear.",
            "Correct the targets, or put it on the ignore list.",
        )
    if scheme.head_dim is None:
        return width
    if width % scheme.head_dim:
        raise TargetError(
            f"Blocks of {scheme.head_dim} channels do not divide {width}, the width of {name}.",
            "Choose another block size, or put it on the ignore list.",
        )
    return int(scheme.head_dim)
