# SPDX-License-Identifier: Apache-2.0
"""Matrix views of prunable modules, and the inputs that these matrices are multiplied with.

=====================  ==========================  ==========================================
module                 matrix [R, C]               a token
=====================  ==========================  ==========================================
``Linear``             weight                      a row of the input
transformers' Conv1D   weight, transposed          a row of the input
``Conv1d``, ``Conv2d`` weight, kernel flattened    the patch below the kernel, zeros included
=====================  ==========================  ==========================================
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Conv1d, Conv2d, Linear, Module
from torch.nn.functional import pad, unfold

from llmcompressor.modeling.matching import matches_class
from llmcompressor.observers.tokens import real_tokens

__all__ = ["is_prunable", "matrix_of", "matrix_shape", "misfit", "reads_rows", "tokens_of", "write"]

_CLASSES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Conv1D")


def is_prunable(module: Module) -> bool:
    """Return True if a module has a weight that can be pruned."""
    found = any(matches_class(module, name) for name in _CLASSES)
    return found and isinstance(getattr(module, "weight", None), Tensor)


def misfit(module: Module) -> str | None:
    """The reason why a module cannot be pruned; ``None`` if it can."""
    weight = _weight(module)
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its dtype is {str(weight.dtype).removeprefix('torch.')}"
    if isinstance(module, Linear) or _is_transposed(module):
        return None
    if not isinstance(module, Conv1d | Conv2d):
        return f"a {type(module).__name__} has no matrix form here"
    return "its channels are convolved in groups" if module.groups > 1 else None


def reads_rows(module: Module) -> bool:
    """Return True if its tokens are the rows of its input, so that they can be shared."""
    return not isinstance(module, Conv1d | Conv2d)


def matrix_shape(module: Module) -> tuple[int, int]:
    """Rows R and columns C of the matrix."""
    shape = _weight(module).shape
    return (shape[1], shape[0]) if _is_transposed(module) else (shape[0], shape[1:].numel())


def matrix_of(module: Module) -> Tensor:
    """The matrix ``[R, C]`` in the weight's dtype, a view if possible."""
    weight = _weight(module).detach()
    return weight.T if _is_transposed(module) else weight.flatten(1)


def write(module: Module, matrix_RC: Tensor) -> None:
    """Copy a matrix into the weight."""
    weight = _weight(module).data
    weight.copy_(matrix_RC.T if _is_transposed(module) else matrix_RC.view(weight.shape))


def tokens_of(module: Module, tensor: Tensor, token_mask: Tensor | None) -> Tensor:
    """The inputs that the matrix is multiplied with, ``[tokens, C]``, without padding."""
    if not isinstance(module, Conv1d | Conv2d):
        return real_tokens(tensor, token_mask)
    around: list[int] = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if tensor.ndim == len(module.kernel_size) + 1:
        tensor = tensor.unsqueeze(0)
    tensor = pad(tensor, around, mode=mode)
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    if isinstance(module, Conv1d):
        tensor = tensor.unsqueeze(-2)
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    patches: Tensor = unfold(tensor, kernel, dilation=dilation, stride=stride)
    return patches.transpose(1, 2).flatten(0, 1).contiguous()


def _weight(module: Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _is_transposed(module: Module) -> bool:
    return matches_class(module, "Conv1D")
