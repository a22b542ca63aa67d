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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from compressed_tensors.modeling import IMPL_ATTR, KV_CACHE_ATTR, QuantizedAttentionImpl
from compressed_tensors.modeling.attention import HOOKED_ATTENTION_NAME
from compressed_tensors.transform import (
    HadamardTransform,
    TransformArgs,
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


def has_online_rotation(module: Module) -> bool:
    """Return True if a module has a rotation in its forward already."""
    return any(isinstance(child, HadamardTransform) for child in module.children())


def stored_weight(rotation: Rotation, device: torch.device) -> Parameter:
    """The stored form of a rotation, ``Q sqrt(n)``; without values on the meta device."""
    if device.type == "meta":
        shape = (rotation.order, rotation.order)
        matrix = torch.empty(shape, dtype=ONLINE_DTYPE, device=device)
    else:
        matrix = rotation.matrix() * math.sqrt(rotation.order)
        matrix = matrix if rotation.signs_N is None else matrix.round()
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
        has_other = name != "sdpa" and supports_sdpa(model)
        other = ', or load it with attn_implementation="sdpa"' if has_other else ""
        raise TargetError(
            f"R3 needs the queries and keys after RoPE, and {type(model).__name__} {problem}.",
            f"Leave R3 out of rotations{other}.",
        )


@dataclass
class OnlineRotation:
    """A rotation that stays in the forward of a module.

    Attributes:
        module: a Linear, or an attention module for the locations of queries and keys.
        module_name: its name.
        scheme: name of its scheme.
        location: location in the forward.
        rotation: the matrix; modules with the same object share its storage.
        inverse: apply the transpose.
        transform: the submodule that applies it, once it is attached.
        detach: removes it from the forward without a trace, in reverse order of attachment.
    """

    module: Module
    module_name: str
    scheme: str
    location: TransformLocation
    rotation: Rotation
    inverse: bool = False
    transform: Module | None = None
    detach: Callable[[], None] = field(default=lambda: None)

    @property
    def in_linear(self) -> bool:
        """Return True if outputs are wrong without it; queries and keys rotate alike."""
        return self.location in (TransformLocation.INPUT, TransformLocation.OUTPUT)

    @property
    def child_name(self) -> str:
        """Name of the submodule within the module."""
        return f"{self.scheme}_{self.location.value}"

    def attach(self, model: Any, scheme: TransformScheme, weight: Any) -> None:
        """Add it to the forward of its module.

        Args:
            model: the whole model.
            scheme: the scheme.
            weight: :func:`stored_weight`, shared by all modules with the same matrix.
        """
        module = self.module
        args = TransformArgs(
            targets=[self.module_name], location=self.location, inverse=self.inverse
        )
        transform: Module = HadamardTransform(weight, None, scheme, args, type(module))
        hooks_attention = not self.in_linear and IMPL_ATTR not in module._modules
        if hooks_attention:
            try:
                enable_attention_hooks(model, module, queries=True)
            except BaseException:
                disable_attention_hooks(model, module)
                raise
        module.register_module(self.child_name, transform)
        rotate = partial(_rotate_argument, transform, self.module_name, 0)
        if self.location is TransformLocation.INPUT:
            handle = module.register_forward_pre_hook(rotate, prepend=True)
        elif self.location is TransformLocation.OUTPUT:
            rotate_output = partial(_rotate_output, transform, self.module_name)
            handle = module.register_forward_hook(rotate_output)
        elif self.location is TransformLocation.K_CACHE:
            handle = getattr(module, KV_CACHE_ATTR).register_forward_pre_hook(rotate)
        else:  # behind the attention module itself
            rotate = partial(_rotate_argument, transform, self.module_name, 1)
            handle = getattr(module, IMPL_ATTR).register_forward_pre_hook(rotate)

        def detach() -> None:
            handle.remove()
            del module._modules[self.child_name]
            if hooks_attention:
                disable_attention_hooks(model, module)
            self.transform = None

        self.transform, self.detach = transform, detach


def _rotate_argument(
    transform: Module, name: str, place: int, module: Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    if len(args) <= place or not isinstance(args[place], Tensor):
        raise TargetError(
            f"{name} is not called with one tensor, which a rotation of its input could act on.",
            "Put it on the ignore list.",
        )
    if transform.__dict__.get(RESTS):
        return args
    return (*args[:place], transform(args[place]), *args[place + 1 :])


def _rotate_output(
    transform: Module, name: str, module: Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    if not isinstance(output, Tensor):
        raise TargetError(
            f"{name} ({type(module).__name__}) returns a {type(output).__name__}, and not one "
            "tensor, which a rotation of its output could act on.",
            "Put it on the ignore list.",
        )
    rotated: Tensor = output if transform.__dict__.get(RESTS) else transform(output)
    return rotated


def tie_weights(online: Iterable[OnlineRotation]) -> None:
    """Mark transforms with the same matrix as tied, so that it is stored once.

    It is stored with the first module that does not make queries or keys, if there is one: vLLM
    reorders all rows that are stored under these in a Llama 4.

    Args:
        online: attached; all of a model; loaders look for the one that holds the matrix.
    """
    first: dict[int, str] = {}
    for one in sorted(online, key=lambda one: one.module_name.endswith(("q_proj", "k_proj"))):
        transform: Any = one.transform
        key = f"{one.module_name}.{one.child_name}.weight"
        if first.setdefault(id(transform.weight), key) != key:
            mark_tied(transform, {"weight": first[id(transform.weight)]})
