# SPDX-License-Identifier: Apache-2.0
"""Online rotations: transforms in a module's forward, as compressed-tensors implements them.

A loader builds one submodule ``{scheme}_{location}`` per module that a transform targets, loads its
``weight`` and computes ``x @ weight / sqrt(n)``. The same submodule is registered here, so that the
model in memory computes the same as the loaded checkpoint. Every orthogonal Q has this form: its
weight is ``Q sqrt(n)``, with the type ``random-hadamard``, whose stored matrix loaders use as it
is. (For the type ``hadamard`` they build Sylvester's matrix, whatever is stored; ``random-matrix``
is scaled by one loader and not by another.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compressed_tensors.modeling import IMPL_ATTR, KV_CACHE_ATTR, QuantizedAttentionImpl
from compressed_tensors.modeling.attention import HOOKED_ATTENTION_NAME
from compressed_tensors.transform import (
    HadamardTransform,
    TransformArgs,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from torch import Tensor
from torch.nn import Module, Parameter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmcompressor.errors import TargetError
from llmcompressor.modeling.patches import RESTS
from llmcompressor.numerics.rotation import Rotation
from llmcompressor.quantization.attach import disable_attention_hooks, enable_attention_hooks
from llmcompressor.transformers_internals import (
    attention_of,
    can_set_attention,
    mark_tied,
    supports_sdpa,
)

__all__ = [
    "AttachedTransform",
    "add_schemes",
    "attach_transform",
    "check_attention_hookable",
    "drop_schemes",
    "has_online_rotation",
    "is_loadable_order",
    "stored_weight",
    "tie_transforms",
]

ONLINE_DTYPE = torch.float32
"""In which rotations at run time are computed and stored: signs are exact in it."""

_LARGEST_KNOWN = 256


def is_loadable_order(order: int) -> bool:
    """Return True if loaders can build a ``random-hadamard`` transform of this size.

    They have Hadamard matrices of every multiple of 4 up to 256, and powers of two times those.

    >>> [is_loadable_order(order) for order in (11008, 29568, 16, 90)]
    [True, False, True, False]
    """
    odd = order // (order & -order)
    return order in (1, 2) or (order % 4 == 0 and (odd == 1 or 4 * odd <= _LARGEST_KNOWN))


def stored_weight(rotation: Rotation, device: torch.device) -> Parameter:
    """The stored form of a rotation, ``Q sqrt(n)``; without values on the meta device."""
    if device.type == "meta":
        shape = (rotation.order, rotation.order)
        return Parameter(torch.empty(shape, dtype=ONLINE_DTYPE, device=device), requires_grad=False)
    matrix = rotation.matrix() * math.sqrt(rotation.order)
    if rotation.signs_N is not None:
        matrix = matrix.round()
    matrix = matrix.to(device=device, dtype=ONLINE_DTYPE).contiguous()
    return Parameter(matrix, requires_grad=False)


def check_attention_hookable(model: Any) -> None:
    """Refuse a model whose queries and keys cannot be hooked.

    compressed-tensors replaces the attention function, which has to be one of those that
    transformers registers by name.

    Raises:
        TargetError: there is no such function, or it cannot be replaced.
    """
    problem = ""
    name = attention_of(model.config)
    if name == HOOKED_ATTENTION_NAME:
        name = QuantizedAttentionImpl._original_impl
    if name not in ALL_ATTENTION_FUNCTIONS:
        problem = f"runs with the attention {name!r}, which has no function that could be hooked"
    elif not can_set_attention(type(model)):
        problem = "does not let its function of attention be replaced"
    if problem:
        other = ', or load it with attn_implementation="sdpa"'
        has_other = name != "sdpa" and supports_sdpa(model)
        raise TargetError(
            f"R3 needs the queries and keys after RoPE, and {type(model).__name__} {problem}.",
            f"Leave R3 out of rotations{other if has_other else ''}.",
        )


@dataclass(frozen=True)
class AttachedTransform:
    """A rotation in the forward of a module.

    Attributes:
        name: name of the submodule that applies it.
        transform: that submodule.
        remove: removes it without a trace; to be called in reverse order of attachment.
    """

    name: str
    transform: Module
    remove: Callable[[], None]

    def rest(self, *, rests: bool) -> None:
        """Deactivate the rotation, or activate it again."""
        self.transform.__dict__[RESTS] = rests


def attach_transform(
    model: Any,
    module: Module,
    module_name: str,
    name: str,
    scheme: TransformScheme,
    args: TransformArgs,
    weight: Any,
) -> AttachedTransform:
    """Add a rotation to the forward of a module.

    Args:
        model: the whole model.
        module: a Linear, or an attention module for the locations of queries and keys.
        module_name: its name.
        name: name of the scheme.
        scheme: the scheme.
        args: location and direction of the rotation.
        weight: the parameter, shared by all modules with the same matrix.
    """
    location = TransformLocation(args.location)
    own_name = f"{name}_{location.value}"
    transform: Module = HadamardTransform(weight, None, scheme, args, type(module))
    states = location in (TransformLocation.Q_ATTN, TransformLocation.K_CACHE)
    tapped = states and IMPL_ATTR not in module._modules
    if tapped:
        try:
            enable_attention_hooks(model, module, queries=True)
        except BaseException:
            disable_attention_hooks(model, module)
            raise
    module.register_module(own_name, transform)
    if location is TransformLocation.INPUT:
        turn = partial(_rotate_input, own_name, module_name)
        handle = module.register_forward_pre_hook(turn, prepend=True)
    elif location is TransformLocation.OUTPUT:
        handle = module.register_forward_hook(partial(_rotate_output, own_name, module_name))
    else:
        queries = location is TransformLocation.Q_ATTN
        states_of = getattr(module, IMPL_ATTR if queries else KV_CACHE_ATTR)
        hook = _rotate_queries if queries else _rotate_keys
        handle = states_of.register_forward_pre_hook(partial(hook, own_name))

    def remove() -> None:
        handle.remove()
        del module._modules[own_name]
        if tapped:
            disable_attention_hooks(model, module)

    return AttachedTransform(f"{module_name}.{own_name}", transform, remove)


def _rotate_input(
    name: str, module_name: str, module: Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    if not args or not isinstance(args[0], Tensor):
        raise TargetError(
            f"{module_name} ({type(module).__name__}) is not called with one tensor, which a "
            "rotation of its input could act on.",
            "Put it on the ignore list.",
        )
    return (_apply_transform(module, name, args[0]), *args[1:])


def _apply_transform(module: Module, name: str, values: Tensor) -> Tensor:
    transform = getattr(module, name)
    return values if transform.__dict__.get(RESTS) else transform(values)


def _rotate_output(
    name: str, module_name: str, module: Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    if not isinstance(output, Tensor):
        raise TargetError(
            f"{module_name} ({type(module).__name__}) returns a {type(output).__name__}, and not "
            "one tensor, which a rotation of its output could act on.",
            "Put it on the ignore list.",
        )
    return _apply_transform(module, name, output)


def _rotate_queries(name: str, tapped: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    attention, query, *rest = args
    return (attention, _apply_transform(attention, name, query), *rest)


def _rotate_keys(name: str, cache: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    keys, *rest = args
    return (_apply_transform(cache.attn_module(), name, keys), *rest)


def tie_transforms(attached: Iterable[AttachedTransform]) -> None:
    """Mark transforms with the same matrix as tied, so that it is stored once.

    Args:
        attached: all of a model; loaders look for the first.
    """
    first: dict[int, str] = {}
    for one in attached:
        transform, key = one.transform, f"{one.name}.weight"
        weight: Any = transform.weight
        if first.setdefault(id(weight), key) != key:
            mark_tied(transform, {"weight": first[id(weight)]})


def has_online_rotation(module: Module) -> bool:
    """Return True if a module has a rotation in its forward already."""
    return any(isinstance(child, HadamardTransform) for child in module.children())


def add_schemes(model: Any, schemes: Mapping[str, TransformScheme]) -> None:
    """Add transforms to those in the model's configuration."""
    _set_config_schemes(model, {**_config_schemes(model), **schemes})


def drop_schemes(model: Any, names: Iterable[str]) -> None:
    """Remove transforms that :func:`add_schemes` has added."""
    gone = set(names)
    _set_config_schemes(
        model, {name: one for name, one in _config_schemes(model).items() if name not in gone}
    )


def _config_schemes(model: Any) -> dict[str, TransformScheme]:
    config = getattr(model, "transform_config", None)
    return dict(config.config_groups) if config is not None else {}


def _set_config_schemes(model: Any, schemes: dict[str, TransformScheme]) -> None:
    if schemes:
        model.transform_config = TransformConfig(config_groups=schemes)
    elif getattr(model, "transform_config", None) is not None:
        model.transform_config = None
