# SPDX-License-Identifier: Apache-2.0
"""Channel scaling between two modules that leaves what they compute together unchanged.

With one positive factor ``s_c`` per channel, a *smooth* module whose output is divided by s and
*balance* modules whose input is multiplied by it give the same result as before::

    norm    y = (w + o) n(x) + b     ->   w' = (w + o) / s - o,   b' = b / s
    Linear  y = W x + b              ->   its last C rows and biases, divided by s
    Linear  z = V y                  ->   V' = V diag(s); a router's weight alike

The offset o of a norm is 0, or 1 where its weight is stored as a difference from one (Gemma).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.errors import InputError

_OFFSETS = (0.0, 1.0)
_CLOSE = 1e-4
"""Relative deviation of float32 results that is taken for rounding."""


def input_channels(module: Module) -> int | None:
    """Number of input channels that a module can have scaled: the columns of its one matrix.

    Args:
        module: a Linear, or another module with a weight ``[rows, C]``, as routers have.

    Returns:
        C; ``None`` for a module without such a weight, or with a part that has a weight, too.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2:
        return None
    if not isinstance(module, Linear) and any(  # a Linear may have a rotation in it
        "weight" in part._parameters for part in module.modules() if part is not module
    ):
        return None
    return int(weight.shape[1])


def divided_outputs(module: Module, scale_C: Tensor, offset: float = 0.0) -> dict[str, Tensor]:
    """Parameters with which a module returns its last C channels divided by ``scale_C``.

    Args:
        module: a norm with a weight ``[C]``, or a Linear with at least C rows.
        scale_C: positive, float32 ``[C]``.
        offset: what a norm adds to its weight.

    Returns:
        Parameter name → new value, in the parameter's dtype; the arithmetic is float32.
    """
    found = {}
    for name in ("weight", "bias"):
        old = module._parameters.get(name)
        if old is None:
            continue
        own = offset if name == "weight" and old.ndim == 1 else 0.0
        new = old.detach().to(torch.promote_types(old.dtype, torch.float32), copy=True)
        tail = new[-len(scale_C) :]
        shape = (-1, *[1] * (new.ndim - 1))
        tail.add_(own).div_(scale_C.to(new).reshape(shape)).sub_(own)
        found[name] = new.to(old.dtype)
    return found


def multiplied_inputs(module: Module, scale_C: Tensor) -> dict[str, Tensor]:
    """Parameters with which a Linear or a router takes inputs multiplied by ``scale_C``.

    Args:
        module: one for which :func:`input_channels` is C.
        scale_C: positive, float32 ``[C]``.

    Returns:
        As :func:`divided_outputs`.
    """
    weight_RC = module._parameters["weight"]
    assert weight_RC is not None
    wide_RC = weight_RC.detach().to(torch.promote_types(weight_RC.dtype, torch.float32))
    return {"weight": (wide_RC * scale_C.to(wide_RC)).to(weight_RC.dtype)}


def divide_outputs(module: Module, scale_C: Tensor, offset: float = 0.0) -> None:
    """Write :func:`divided_outputs` into the module."""
    write_parameters(module, divided_outputs(module, scale_C, offset))


def multiply_inputs(module: Module, scale_C: Tensor) -> None:
    """Write :func:`multiplied_inputs` into the module."""
    write_parameters(module, multiplied_inputs(module, scale_C))


def write_parameters(module: Module, values: Mapping[str, Tensor]) -> None:
    """Overwrite parameters of a module by name, keeping their dtype."""
    for name, value in values.items():
        parameter = module._parameters[name]
        assert parameter is not None
        parameter.data.copy_(value)


@contextlib.contextmanager
def swapped_parameters(changes: Mapping[Module, Mapping[str, Tensor]]) -> Iterator[None]:
    """Replace parameters and buffers of modules while the body runs, and restore them afterwards.

    New values may be part of a graph: they are taken as they are.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, values in changes.items():
            for name, value in values.items():
                own: dict[str, Any] = module._parameters
                own = own if name in own else module._buffers
                before.append((own, name, own[name]))
                own[name] = value
        yield
    finally:
        for own, name, value in reversed(before):
            own[name] = value


def norm_offset(module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """The offset that a norm adds to its weight, found by running it.

    Args:
        module: has a weight of one dimension, and perhaps a bias; float32.
        args: what to call it with.
        kwargs: the same, by name.

    Returns:
        0 or 1; ``None`` where the module is no norm of the form ``(w + o) n(x) + b``.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or isinstance(module, Linear):
        return None
    weight_C = weight.detach()
    if weight_C.is_meta:  # not loaded; only its width and dtype are looked at
        weight_C = torch.empty_like(weight_C, device=args[0].device if args else "cpu")
    bias = module._parameters.get("bias")
    no_bias = {} if bias is None else {"bias": torch.zeros_like(weight_C)}

    def run(weight: Tensor, **biases: Tensor) -> Tensor:
        with swapped_parameters({module: {"weight": weight, **{**no_bias, **biases}}}):
            found: Tensor = module(*args, **kwargs)
        return found.float()

    at_zero = run(torch.zeros_like(weight_C))
    unit = run(torch.ones_like(weight_C)) - at_zero
    ramp_C = torch.linspace(0.5, 1.5, len(weight_C)).to(weight_C)
    for offset in _OFFSETS:
        fits = _is_close(at_zero, offset * unit) and _is_close(
            run(ramp_C), (ramp_C + offset) * unit
        )
        if fits and bias is not None:
            fits = _is_close(run(ramp_C, bias=ramp_C), (ramp_C + offset) * unit + ramp_C)
        if fits:
            return offset
    return None


def _is_close(first: Tensor, second: Tensor) -> bool:
    size = float(second.abs().max().clamp(min=1e-6))
    return bool((first - second).abs().max() <= _CLOSE * max(size, 1.0))


# --------------------
# Norm fusion before rotations: zero-mean embeddings, norm gains folded into Linears.
#
# With g the gain of a norm n and b its bias, a Linear W that reads it computes the same from a
# norm without gain once its columns have it:
#
# .. math:: W (g \odot n(x) + b) = (W\,\mathrm{diag}(g))\, (n(x) + b / g)


@torch.no_grad()
def center_embeddings(embedding: Module) -> None:
    """Subtract the mean from each row of an embedding, in float64.

    Raises:
        InputError: the module has no weight.
    """
    wide = _weight(embedding).double()
    write_parameters(embedding, {"weight": wide - wide.mean(dim=-1, keepdim=True)})


@torch.no_grad()
def fuse_norm_linears(norm: Module, linears: Iterable[Linear]) -> None:
    """Fold the gain of a norm into the columns of the Linears that read it, in float64.

    Args:
        norm: a norm of the form ``(w + o) n(x) + b``, where o is 0, or 1 as in Gemma.
        linears: all that read its output.

    Raises:
        InputError: it is no such norm, or has a bias where its gain is zero.
    """
    weight_C = _weight(norm)
    sample = torch.linspace(-1, 2, len(weight_C), device=weight_C.device)
    try:
        offset = norm_offset(norm, (sample.to(weight_C)[None],), {})
    except (TypeError, RuntimeError):
        offset = None
    if offset is None:
        raise InputError(
            f"{type(norm).__name__} is not a norm that multiplies by its weight.",
            "Give a norm, and the Linears that read it.",
        )
    gain_C, bias_C = weight_C.double() + offset, norm._parameters.get("bias")
    if bias_C is not None and bool(((gain_C == 0) & (bias_C != 0)).any()):
        raise InputError(
            f"The gain of {type(norm).__name__} is zero where its bias is not.",
            "Such a norm cannot be taken over by what reads it.",
        )
    for linear in linears:
        write_parameters(
            linear, {"weight": _weight(linear).double() * gain_C.to(linear.weight.device)}
        )
    values = {"weight": torch.full_like(weight_C, 1.0 - offset)}
    if bias_C is not None:
        values["bias"] = torch.where(gain_C == 0, 0.0, bias_C.double() / gain_C)
    write_parameters(norm, values)


def _weight(module: Module) -> Tensor:
    weight = module._parameters.get("weight")
    if weight is None:
        raise InputError(f"{type(module).__name__} has no weight.", "Give a module with a weight.")
    return weight.detach()
