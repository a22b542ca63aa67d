# SPDX-License-Identifier: Apache-2.0
r"""Distillation losses: transforms of outputs, and distances between student and teacher.

``N`` tokens (rows), ``D`` features or vocabulary entries. A comparison takes two tensors ``[N, D]``
and returns one value per token, float32 ``[N]`` (float64 if the inputs are float64), which is
smaller the better the student agrees. The mean over tokens is the loss; over many tokens it is
computed in chunks (:mod:`llmcompressor.numerics.distillation`).

The softened distribution of Hinton et al. (arXiv:1503.02531, equation 1), with logits z and
temperature T, is

.. math:: q_i = \frac{\exp(z_i / T)}{\sum_j \exp(z_j / T)} .

Its gradients shrink with 1/T², so comparisons of such distributions are multiplied by T² (section
2 there): then a change of T keeps the balance with the other loss, and in the limit T → ∞ the loss
is the squared difference of the centred logits, ‖z − v‖² / (2 D) (equation 4).

Log probabilities are logits too: their softmax gives the probabilities. So :func:`kl_divergence`
and :func:`cross_entropy` need only one form of input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_SMALLEST_NORM = 1e-12
"""What a mean square is at least when something is divided by it."""
_EXCLUDED = 1e30
"""A logit below minus this stands for an entry that cannot be."""


def to_compute_dtype(input_ND: Tensor) -> Tensor:
    """The tensor in the dtype of the computations: float64 stays, all others become float32."""
    return input_ND if input_ND.dtype == torch.float64 else input_ND.float()


def identity(input_ND: Tensor) -> Tensor:
    """The tensor, unchanged."""
    return input_ND


def softmax(input_ND: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Probabilities at a temperature (arXiv:1503.02531, equation 1).

    >>> softmax(torch.tensor([[0.0, 0.0]]))
    tensor([[0.5000, 0.5000]])
    """
    return torch.softmax(to_compute_dtype(input_ND) / temperature, dim=-1)


def log_softmax(input_ND: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log probabilities at a temperature."""
    return torch.log_softmax(to_compute_dtype(input_ND) / temperature, dim=-1)


def normalize(input_ND: Tensor, *, p: float = 2.0) -> Tensor:
    """Each row divided by its p-norm; rows of zeros stay unchanged.

    >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    return functional.normalize(to_compute_dtype(input_ND), p=p, dim=-1, eps=_SMALLEST_NORM)


# ---- comparisons: [N, D], [N, D] → [N]


def l1_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Sum of the absolute differences.

    >>> l1_distance(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]]))
    tensor([3.])
    """
    return (to_compute_dtype(student_ND) - to_compute_dtype(teacher_ND)).abs().sum(dim=-1)


def l2_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Euclidean distance; its gradient is zero if there is no difference.

    >>> l2_distance(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    tensor([5.])
    """
    length_N: Tensor = torch.linalg.vector_norm(
        to_compute_dtype(student_ND) - to_compute_dtype(teacher_ND), dim=-1
    )
    return length_N


def inner_product(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """The negated inner product: smaller values mean more agreement.

    >>> inner_product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([-11.])
    """
    return -(to_compute_dtype(student_ND) * to_compute_dtype(teacher_ND)).sum(dim=-1)


def cosine_similarity(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """1 minus the cosine of the angle: 0 in the same direction, 2 in the opposite one.

    >>> cosine_similarity(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    tensor([0.])
    """
    return 1 - functional.cosine_similarity(
        to_compute_dtype(student_ND), to_compute_dtype(teacher_ND), dim=-1
    )


def kl_divergence(student_ND: Tensor, teacher_ND: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""KL(teacher ‖ student) of the softened distributions, in nats, times T².

    With p the teacher's and q the student's distribution at temperature T,

    .. math:: T^2 \sum_i p_i (\log p_i - \log q_i) .

    The gradient to the student's logits is T (q − p); the teacher gets none. An entry that the
    teacher masks (−infinity, or a mask's lowest number) adds nothing. One that the student masks is
    removed from the teacher's distribution too: no weight could change it. Inputs are logits or log
    probabilities.

    >>> kl_divergence(torch.tensor([[5.0, 5.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([0.])
    """
    return _of_distributions(student_ND, teacher_ND, temperature, entropy=True)


def cross_entropy(student_ND: Tensor, teacher_ND: Tensor, *, temperature: float = 1.0) -> Tensor:
    r"""Cross entropy of the student's with the teacher's softened distribution, times T².

    .. math:: -T^2 \sum_i p_i \log q_i

    It has the same gradient as :func:`kl_divergence`, from which it differs by the teacher's
    entropy, and takes the same inputs.

    >>> cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([[9.0, 9.0]]))
    tensor([0.6931])
    """
    return _of_distributions(student_ND, teacher_ND, temperature, entropy=False)


def _of_distributions(
    student_ND: Tensor, teacher_ND: Tensor, temperature: float, *, entropy: bool
) -> Tensor:
    logits_ND, aims_ND = to_compute_dtype(student_ND), to_compute_dtype(teacher_ND)
    if temperature != 1.0:
        logits_ND, aims_ND = logits_ND / temperature, aims_ND / temperature
    value_N: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call] # torch's
        logits_ND, aims_ND.detach(), entropy
    )
    return temperature**2 * value_N


class _Divergence(torch.autograd.Function):
    """The sums at T = 1 with a closed-form gradient, at half the cost of autograd.

    Masks are applied by arithmetic: on a CPU, selecting elements by a condition costs more than all
    the rest.
    """

    @staticmethod
    def forward(ctx: Any, logits_ND: Tensor, aims_ND: Tensor, entropy: bool) -> Tensor:
        log_q_ND = torch.log_softmax(logits_ND, dim=-1)
        # Exactly zero, except where the student masks an entry.
        excluded_ND = logits_ND.clamp(max=-_EXCLUDED).add_(_EXCLUDED)
        log_p_ND = torch.log_softmax(excluded_ND.add_(aims_ND), dim=-1)
        p_ND = log_p_ND.exp()
        # 0 times a large number is 0, but 0 · (−inf) and −inf − (−inf) are NaN.
        log_q_ND.clamp_(min=-_EXCLUDED)
        if entropy:
            terms_ND = log_p_ND.clamp_(min=-_EXCLUDED).sub_(log_q_ND).mul_(p_ND)
        else:
            terms_ND = torch.mul(log_q_ND, p_ND, out=log_p_ND).neg_()
        value_N = terms_ND.sum(dim=-1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(log_q_ND.exp_().sub_(p_ND))
        return value_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        (difference_ND,) = ctx.saved_tensors
        return difference_ND * grad_N[..., None], None, None


def square_head(
    student_ND: Tensor,
    teacher_ND: Tensor,
    *,
    per_token: bool = False,
    mean_square: Tensor | None = None,
) -> Tensor:
    r"""Squared error relative to the teacher's mean square (arXiv:2310.06927, equation 2).

    .. math:: \frac{\operatorname{MSE}(f_t, f_s)}{\operatorname{MSE}(f_t, 0)}

    is the mean over tokens of the result: each token's squared error, divided by the mean over
    tokens of the teacher's squared norm. That makes layers of any magnitude comparable.

    Args:
        student_ND: features, any floating dtype.
        teacher_ND: the same.
        per_token: divide by each token's own squared norm. The loss of a batch is then the mean of
            its parts, and tokens of huge norm do not outweigh the others.
        mean_square: the mean of :func:`squared_norm` over all tokens, if these are only a part.

    >>> square_head(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([0.5000])
    """
    squares_N = squared_norm(to_compute_dtype(student_ND) - to_compute_dtype(teacher_ND))
    if per_token:
        return squares_N / squared_norm(teacher_ND).clamp_min(_SMALLEST_NORM)
    if mean_square is None:
        mean_square = squared_norm(teacher_ND).mean()
    return squares_N / mean_square.clamp_min(_SMALLEST_NORM)


def squared_norm(input_ND: Tensor) -> Tensor:
    """Sum of the squares of each row, ``[N]``."""
    return to_compute_dtype(input_ND).square().sum(dim=-1)


# --------------------
# The mean over tokens of a comparison of two tensors, in bounded memory.
#
# ``R`` rows of a tensor, ``N`` of them selected (real tokens), ``D`` features.
#
# A comparison of logits in float32 allocates several tensors of their size: with a vocabulary of
# 128 k and 4 k tokens each is 2 GiB. Here rows are widened, compared and differentiated in chunks.
# Only the gradient of the student's tensor, in that tensor's own dtype, is saved for the backward
# pass, but neither float32 copies nor the teacher's tensor.

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
    """The mean of ``compare`` over the selected rows: a scalar, 0 if no row is selected.

    Args:
        compare: returns one value per row, from the two rows alone.
        student_RD: differentiated, any floating dtype.
        teacher_RD: a constant, with the same number of rows.
        rows_N: indices of the selected rows, long; by default all. Others get a gradient of zero.
        chunk_elements: elements of the wider tensor per chunk; the default depends on the device.

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
    """The same for a function of one tensor, ``[N, D] → [N]``, without gradient."""
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
                part_ND = to_compute_dtype(student_RD[chunk].detach()).requires_grad_(wanted)
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
            result_RD[chunk] = (to_compute_dtype(gradient_RD[chunk]) * scale).to(result_RD.dtype)
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
        return to_compute_dtype(like.new_zeros(()))
    return torch.stack(sums).sum() / _count(like, rows_N)
