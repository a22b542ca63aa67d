# SPDX-License-Identifier: Apache-2.0
"""Zero weights: models run without loading their weights, to see calls and shared inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.modeling.patches import forward_overridden, replace_functional_linear
from llmcompressor.transformers_internals import has_gate_function

__all__ = ["skip_zero_products", "zero_weights"]


@contextlib.contextmanager
def zero_weights(model: Module, *, skips_experts: bool = False) -> Iterator[torch.device]:
    """Replace every parameter and buffer that is not loaded by zeros, which take no memory.

    No weight is read. Yields the device on which the model runs then: that of the loaded weights.

    Args:
        model: the model.
        skips_experts: stacked experts return zeros without computing them, which would take time
            and a matrix of each stack.
    """
    modules = list(model.modules())
    skipped = {one for one in modules if skips_experts and _is_unloaded_expert_stack(one)}
    parameters = [
        (module, *one) for module in modules for one in _present_values(module._parameters)
    ]
    device = next((one.device for _, _, one in parameters if not one.is_meta), torch.device("cpu"))
    empty = [each for each in parameters if each[2].is_meta]
    buffers = [
        (module, name, buffer)
        for module in modules
        for name, buffer in _present_values(module._buffers)
        if buffer.is_meta
    ]
    try:
        for module, name, parameter in empty:
            # kernels for stacks of experts take no strides of zero within a matrix
            real = parameter.shape[1:] if parameter.ndim > 2 and module not in skipped else ()
            zero = torch.zeros(real, dtype=parameter.dtype, device=device).expand(parameter.shape)
            module._parameters[name] = Parameter(zero, requires_grad=False)
        for module, name, buffer in buffers:
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        with forward_overridden(skipped, _zero_expert_forward):
            yield device
    finally:
        for module, name, parameter in empty:
            module._parameters[name] = parameter  # type: ignore[assignment]  # it was a Parameter
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextlib.contextmanager
def skip_zero_products() -> Iterator[None]:
    """Make ``torch.nn.functional.linear`` skip the product with a weight that is an expanded zero.

    torch would write such a weight out in full, and multiply.
    """

    def zero_output(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made = given.new_zeros((*given.shape[:-1], weight.shape[0]))
        return made if bias is None else made + bias

    with replace_functional_linear(_is_expanded_zero, zero_output):
        yield


def _is_expanded_zero(given: Tensor, weight: Tensor) -> bool:
    is_expanded = weight.ndim == 2 and weight.stride() == (0, 0)
    fits = is_expanded and given.dtype == weight.dtype and given.shape[-1] == weight.shape[1]
    return fits and not weight.is_meta and weight.numel() > 0 and not weight[0, 0].item()


def _is_unloaded_expert_stack(module: Module) -> bool:
    """Return True if a module holds stacked experts of transformers, none of them loaded.

    Llama 4's has none of the marks of the others, but stacks of the same names.
    """
    own = dict(_present_values(module._parameters))
    is_marked = has_gate_function(type(module)) and hasattr(module, "has_gate")
    is_called_so = is_marked or own.keys() >= {"gate_up_proj", "down_proj"}
    return is_called_so and bool(own) and all(one.is_meta for one in own.values())


def _zero_expert_forward(module: Module, forward: Any) -> Any:
    del module, forward

    def zeros(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(hidden_states)

    return zeros


def _present_values(values: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The values that are present; weights that are loaded on access stay unloaded."""
    items = dict.items(values) if isinstance(values, dict) else values.items()
    return [(name, value) for name, value in items if value is not None]
