# SPDX-License-Identifier: Apache-2.0
r"""The mean over tokens of a comparison of two tensors, in bounded memory.

``R`` rows of a tensor, ``N`` of them selected (real tokens), ``D`` features.

A comparison of logits in float32 allocates several tensors of their size: with a vocabulary of
128 k and 4 k tokens each is 2 GiB. Here rows are widened, compared and differentiated in chunks.
Only the gradient of the student's tensor, in that tensor's own dtype, is saved for the backward
pass, but neither float32 copies nor the teacher's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmcompressor.numerics.distillation import wide

__all__ = ["CHUNK_ELEMENTS", "CPU_CHUNK_ELEMENTS", "mean_of_rows", "mean_over_tokens"]

Compare = Callable[[Tensor, Tensor], Tensor]
"""``[N, D], [N, D] → [N]``, one value per token."""

CHUNK_ELEMENTS = 4 * 2**20
"""Elements of a chunk, 16 MiB in float32; a few such tensors exist at a time."""
CPU_CHUNK_ELEMENTS = 2**19
"""The same on a CPU, where they should fit into its cache."""


def mean_over_tokens(
    compare: Compare,
    student_RD: Tensor,
    teacher_RD: Tensor,
    rows_N: Tensor | None = None,
    chunk_elements: int | None = None,
) -> Tensor:
    """The mean of ``compare`` over the selected rows.

    Args:
        compare: returns one value per row, from the two rows alone.
        student_RD: differentiated, any floating dtype.
        teacher_RD: a constant, with the same number of rows.
        rows_N: indices of the selected rows, long; by default all. Others get a gradient of zero.
        chunk_elements: elements of the wider tensor per chunk; the default depends on the device.

    Returns:
        A float32 scalar, float64 if the student's tensor is; 0 if no row is selected.

    >>> from llmcompressor.numerics.distillation import l1_distance
    >>> student = torch.tensor([[1.0], [5.0]], requires_grad=True)
    >>> loss = mean_over_tokens(l1_distance, student, torch.zeros(2, 1), torch.tensor([1]))
    >>> loss.backward()
    >>> loss.item(), student.grad.flatten()
    (5.0, tensor([0., 1.]))
    """
    result: Tensor = _MeanOverTokens.apply(  # type: ignore[no-untyped-call] # torch's
        student_RD, teacher_RD.detach(), rows_N, compare, chunk_elements
    )
    return result


def mean_of_rows(
    function: Callable[[Tensor], Tensor],
    input_RD: Tensor,
    rows_N: Tensor | None = None,
    chunk_elements: int | None = None,
) -> Tensor:
    """The mean of ``function`` (``[N, D] → [N]``) over the selected rows, without gradient.

    Args:
        function: returns one value per row.
        input_RD: any floating dtype.
        rows_N: indices of the selected rows, long; by default all.
        chunk_elements: elements per chunk; the default depends on the device.
    """
    with torch.no_grad():
        sums = [
            function(input_RD[chunk]).sum()
            for chunk in _chunks(input_RD, input_RD, rows_N, chunk_elements)
        ]
        return _mean(sums, input_RD, rows_N)


class _MeanOverTokens(torch.autograd.Function):
    """Computes the gradient together with the value, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        student_RD: Tensor,
        teacher_RD: Tensor,
        rows_N: Tensor | None,
        compare: Compare,
        chunk_elements: int | None,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        gradient_RD = None
        if wanted:
            whole = rows_N is None
            gradient_RD = (torch.empty_like if whole else torch.zeros_like)(student_RD)
        sums = []
        for chunk in _chunks(student_RD, teacher_RD, rows_N, chunk_elements):
            with torch.set_grad_enabled(wanted):
                part_ND = wide(student_RD[chunk].detach()).requires_grad_(wanted)
                total = compare(part_ND, teacher_RD[chunk]).sum()
            sums.append(total.detach())
            if gradient_RD is not None:
                (part_grad_ND,) = torch.autograd.grad(total, part_ND)
                gradient_RD[chunk] = part_grad_ND.to(gradient_RD.dtype)
        if gradient_RD is not None:
            # Gradient of the sum, not of the mean, whose small numbers would underflow float16.
            ctx.save_for_backward(gradient_RD)
        ctx.count = _count(student_RD, rows_N)
        ctx.chunk_elements = chunk_elements
        return _mean(sums, student_RD, rows_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        (gradient_RD,) = ctx.saved_tensors
        scale = grad_output / max(ctx.count, 1)
        if gradient_RD.dtype == scale.dtype:
            return gradient_RD * scale, None, None, None, None
        result_RD = torch.empty_like(gradient_RD)
        for chunk in _chunks(gradient_RD, gradient_RD, None, ctx.chunk_elements):
            result_RD[chunk] = (wide(gradient_RD[chunk]) * scale).to(result_RD.dtype)
        return result_RD, None, None, None, None


def _chunks(
    first_RD: Tensor, second_RD: Tensor, rows_N: Tensor | None, elements: int | None
) -> Iterator[Tensor | slice]:
    """Indices of the selected rows, in chunks that limit the size of the wider tensor."""
    if elements is None:
        on_cpu = first_RD.device.type == "cpu"
        elements = CPU_CHUNK_ELEMENTS if on_cpu else CHUNK_ELEMENTS
    width = max(first_RD.shape[-1], second_RD.shape[-1], 1)
    step = max(1, elements // width)
    if rows_N is not None:
        yield from (chunk for chunk in torch.split(rows_N, step) if len(chunk))
        return
    for start in range(0, len(first_RD), step):
        yield slice(start, start + step)


def _count(input_RD: Tensor, rows_N: Tensor | None) -> int:
    return len(input_RD) if rows_N is None else len(rows_N)


def _mean(sums: list[Tensor], like: Tensor, rows_N: Tensor | None) -> Tensor:
    if not sums:
        return wide(like.new_zeros(()))
    return torch.stack(sums).sum() / _count(like, rows_N)
