# SPDX-License-Identifier: Apache-2.0
r"""Rotations, and weights that compensate for them: :math:`y = x W^\top = (x Q)(W Q)^\top`.

A rotation Q (orthogonal, :math:`Q Q^\top = I`) acts on row vectors, block by block if it is smaller
than they are. The weights of a Linear ``y = x Wᵀ + b`` become:

==========================  =====================================================
input rotated to  x Q       :math:`W' = W Q`
output rotated to  y Q      :math:`W' = Q^\top W, \quad b' = b Q`
embedding rows  e Q         :math:`E' = E Q`
gain g of a norm fused      :math:`W' = W \operatorname{diag}(g)`
==========================  =====================================================

so only products from the right occur. QuaRot, arXiv:2404.00456; SpinQuant, arXiv:2405.16406. All
products of a weight are computed in float64 and rounded to the weight's dtype once.

Legend: R outputs, C inputs, N order of a rotation, T rows of any kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.numerics.hadamard import fast_hadamard, hadamard, split_order

_CHUNK = 1 << 22
"""Elements that are rotated at once: 32 MiB of float64."""
_BUTTERFLY_COPIES, _PRODUCT_COPIES, _SIGNED_PRODUCT_COPIES = 2.5, 2.0, 3.0
"""Of what is rotated at once, those that a butterfly of additions holds, a product, and one whose
rows get signs before."""


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q: ``diag(signs) hadamard(N) / sqrt(N)``, or any other given in full.

    The signs are applied first: after the Hadamard matrix they would not change any magnitude, and
    a constant part of a vector would still be concentrated in one entry (QuIP#, arXiv:2402.04396,
    section 3).

    Attributes:
        order: N.
        signs_N: the signs of a Hadamard matrix's rows, float64 ``[N]``.
        matrix_NN: Q if it is not a Hadamard matrix, float64 ``[N, N]``.

    >>> Rotation.of_hadamard(2)(torch.tensor([[1.0, 1.0]], dtype=torch.float64)).round(decimals=4)
    tensor([[1.4142, 0.0000]], dtype=torch.float64)
    """

    order: int
    signs_N: Tensor | None = None
    matrix_NN: Tensor | None = None

    @classmethod
    def of_hadamard(cls, order: int, generator: torch.Generator | None = None) -> Rotation:
        """H / sqrt(N), with random signs of its rows if a generator is given."""
        if generator is None:
            return cls(order, signs_N=torch.ones(order, dtype=torch.float64))
        signs_N = torch.randint(0, 2, (order,), generator=generator).double() * 2 - 1
        return cls(order, signs_N=signs_N)

    @classmethod
    def of_matrix(cls, matrix_NN: Tensor) -> Rotation:
        """A rotation by an orthogonal matrix."""
        return cls(len(matrix_NN), matrix_NN=matrix_NN.double())

    @property
    def is_random(self) -> bool:
        """True for a Hadamard matrix with rows of changed sign."""
        return self.signs_N is not None and bool((self.signs_N < 0).any())

    @property
    def is_sylvester(self) -> bool:
        """True for Sylvester's matrix: a Hadamard matrix of a power of two, without signs."""
        is_power = self.order & (self.order - 1) == 0
        return is_power and self.signs_N is not None and not self.is_random

    def __call__(self, x: Tensor) -> Tensor:
        """Compute ``x Q`` for ``[..., k N]``, in blocks of N columns, in the dtype of ``x``."""
        y = x.reshape(*x.shape[:-1], -1, self.order)
        if self.signs_N is not None:
            signs_N = self.signs_N if self.is_random else None
            y = fast_hadamard(y, signs_N=signs_N).mul_(1 / math.sqrt(self.order))
        else:
            assert self.matrix_NN is not None
            y = y @ self.matrix_NN.to(y)
        return y.flatten(-2)

    def placed(self, device: torch.device, dtype: torch.dtype) -> Rotation:
        """The same rotation, with its matrix on ``device`` and in ``dtype``."""
        if self.matrix_NN is None:
            return self
        return dataclasses.replace(self, matrix_NN=self.matrix_NN.to(device, dtype))

    def transposed(self) -> Rotation:
        """The inverse rotation."""
        return Rotation.of_matrix(self.matrix().T.contiguous())

    def matrix(self) -> Tensor:
        """Q, float64 ``[N, N]``."""
        if self.matrix_NN is not None:
            return self.matrix_NN
        assert self.signs_N is not None
        return self.signs_N[:, None] * hadamard(self.order) / math.sqrt(self.order)


def rotated_weight(
    W_RC: Tensor,
    *,
    gain_C: Tensor | None = None,
    inputs: Sequence[Rotation] = (),
    outputs: Sequence[Rotation] = (),
    precision: torch.dtype = torch.float64,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``Qoutᵀ W diag(g) Qin``: the weight for rotated inputs and outputs, ``[R, C]``, rounded once.

    Args:
        W_RC: ``[R, C]``; not changed.
        gain_C: gain of the preceding norm to fuse into the weight, ``[C]``.
        inputs: rotations of the input, in the order in which they act; orders divide C.
        outputs: rotations of the output; orders divide R.
        precision: dtype of the computation.
        dtype: dtype of the result; that of ``W_RC`` if ``None``.
    """

    def columns(part_TC: Tensor) -> Tensor:
        wide_TC = part_TC.to(precision)
        if gain_C is not None:
            wide_TC = wide_TC * gain_C.to(wide_TC)
        for rotation in inputs:
            wide_TC = rotation(wide_TC)
        return wide_TC

    # once for all parts
    inputs, outputs = [one.placed(W_RC.device, precision) for one in inputs], list(outputs)
    R, C = W_RC.shape
    result_RC = torch.empty_like(W_RC, dtype=dtype, memory_format=torch.contiguous_format)
    is_apart = bool(outputs) and result_RC.dtype != precision
    between_RC = torch.empty_like(result_RC, dtype=precision) if is_apart else result_RC
    for low, high in _parts(R, C):  # embeddings are long
        between_RC[low:high] = columns(W_RC[low:high])
    inputs = []  # free the matrices on the device
    outputs = [one.placed(W_RC.device, precision) for one in outputs]
    for low, high in _parts(C, R) if outputs else ():
        wide_KR = between_RC[:, low:high].T
        for rotation in outputs:
            wide_KR = rotation(wide_KR)
        result_RC[:, low:high] = wide_KR.T
    return result_RC


def rotated_weight_peak_bytes(
    elements: int,
    *,
    inputs: Sequence[Rotation] = (),
    outputs: Sequence[Rotation] = (),
    precision: torch.dtype = torch.float64,
    is_apart: bool = True,
) -> int:
    """Peak bytes of :func:`rotated_weight` for so many elements, without the weight and the result.

    Rotations of the output get the weight in ``precision`` already; ``is_apart`` if the result has
    another dtype.
    """
    at_once = min(elements, _CHUNK)
    by_input = max(map(_copies, inputs), default=1.0) * at_once
    by_output = max((_copies(one) - 1 for one in outputs), default=0.0) * at_once
    between = elements if outputs and is_apart else 0
    return int(precision.itemsize * (max(by_input, by_output) + between))


def _copies(rotation: Rotation) -> float:
    power, base = split_order(rotation.order) if rotation.signs_N is not None else (1, 1)
    if rotation.is_random and base > 1:
        return _SIGNED_PRODUCT_COPIES
    return _BUTTERFLY_COPIES if power > 1 else _PRODUCT_COPIES


def _parts(length: int, width: int) -> Iterator[tuple[int, int]]:
    """First and last row of parts that are small enough to bound memory."""
    step = max(1, _CHUNK // max(width, 1))
    for low in range(0, length, step):
        yield low, min(low + step, length)


def rotated_bias(
    bias_R: Tensor, outputs: Sequence[Rotation], *, precision: torch.dtype = torch.float64
) -> Tensor:
    """``b Qout``, ``[R]``, in the dtype of ``bias_R``."""
    wide_R = bias_R.to(precision)
    for rotation in outputs:
        wide_R = rotation(wide_R)
    return wide_R.to(bias_R.dtype)


# --------------------
# Cayley SGD with momentum: gradient steps on orthogonal matrices.
#
# Li, Fuxin and Todorovic, arXiv:2002.01113, algorithm 1, as used by SpinQuant (arXiv:2405.16406,
# equation 3). With the gradient G of a loss at the orthogonal Q and momentum M
#
# .. math::
#     M \leftarrow \beta M - G,\qquad
#     \hat W = M Q^\top - \tfrac12\, Q\, (Q^\top M Q^\top),\qquad W = \hat W - \hat W^\top
#
# W is skew-symmetric, so its Cayley transform is orthogonal, and so is
#
# .. math:: Q' = (I - \tfrac{\alpha}{2} W)^{-1} (I + \tfrac{\alpha}{2} W)\, Q .
#
# The papers iterate to a fixed point; here the system is solved, in float64, which keeps Q
# orthogonal up to rounding at any step size.
#
# Legend: N order.

_MOST = 0.5
"""The largest alpha ||W||: about half a radian per step."""


def cayley_step(
    Q_NN: Tensor, gradient_NN: Tensor, momentum_NN: Tensor, rate: float, *, decay: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Take a step of Cayley SGD.

    Args:
        Q_NN: orthogonal, float64 ``[N, N]``.
        gradient_NN: of the loss with respect to Q, ``[N, N]``.
        momentum_NN: of the step before, float64 ``[N, N]``; zeros at first.
        rate: alpha; reduced if the step would exceed half a radian.
        decay: beta.

    Returns:
        The new Q and its momentum, float64, both new.

    >>> Q, M = cayley_step(torch.eye(2).double(), torch.zeros(2, 2), torch.zeros(2, 2), 1.0)
    >>> torch.equal(Q, torch.eye(2).double())
    True
    """
    Q_NN = Q_NN.double()
    M_NN = decay * momentum_NN.double() - gradient_NN.double()
    half_NN = M_NN @ Q_NN.T - 0.5 * Q_NN @ (Q_NN.T @ M_NN @ Q_NN.T)
    W_NN = half_NN - half_NN.T
    size = float(torch.linalg.matrix_norm(W_NN))
    alpha = min(rate, _MOST / size) if size > 0 else rate
    eye_NN = torch.eye(len(Q_NN), dtype=torch.float64, device=Q_NN.device)
    moved_NN = torch.linalg.solve(eye_NN - 0.5 * alpha * W_NN, Q_NN + 0.5 * alpha * W_NN @ Q_NN)
    return moved_NN, W_NN @ Q_NN


# --------------------
# Rescaling of channels before a rotation mixes them.
#
# After a rotation V has made entries similar in size, the error of rounding the weight :math:`W D
# V` and its inputs :math:`x D^{-1} V` is proportional to the sizes of both. With diagonal D,
# column j of the weight of norm :math:`w_j` and channel j of the inputs of mean square :math:`h_j`
# these are
#
# .. math:: \| W D \|_F^2 = \sum_j w_j^2 d_j^2, \qquad E \| x D^{-1} \|^2 = \sum_j h_j / d_j^2
#
# whose product is least, :math:`(\sum_j w_j \sqrt{h_j})^2`, if the terms of the two sums are
# proportional: :math:`d_j^4 = h_j / w_j^2`, and any multiple of d (Chee et al., *QuIP*,
# arXiv:2307.13304, the rescaling of its incoherence processing). Without D a channel with large
# values and small weights is mixed with all others, which then share its rounding error.
#
# Legend: C channels, R rows of a weight.

_RESCALE_CHUNK = 1 << 20
"""Elements that are made wide at once: 8 MiB, twice."""


def column_squares(weights: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of each column over several weights ``[R_i, C]``: float64 ``[C]``.

    >>> column_squares([torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 0.0]])])
    tensor([5., 9.], dtype=torch.float64)
    """
    parts = [
        part_RC.double().square().sum(dim=0)
        for weight_RC in weights
        for part_RC in torch.split(weight_RC.detach(), max(1, _RESCALE_CHUNK // weight_RC.shape[1]))
    ]
    return torch.stack(parts).sum(dim=0)


def channel_rescaling(square_C: Tensor, column_square_C: Tensor) -> Tensor:
    """Factors on columns, and divisors of channels: powers of two, exact in any dtype.

    1 for most channels if their optima are similar, and for channels that are zero or have only
    zero weights.

    Args:
        square_C: h, mean squares of the channels, ``[C]``.
        column_square_C: w², squared norms of the columns, ``[C]``, from :func:`column_squares`.

    >>> squares = torch.tensor([1.0, 1.0, 4096.0, 0.0])
    >>> channel_rescaling(squares, torch.tensor([1.0, 1.0, 2**-12, 1.0]))
    tensor([ 1.,  1., 64.,  1.], dtype=torch.float64)
    """
    fourth_C = square_C.double() / column_square_C.double()
    counts_C = fourth_C.isfinite() & (fourth_C > 0)
    exponent_C = torch.where(counts_C, fourth_C, 1.0).log2() / 4
    if not bool(counts_C.any()):
        return torch.ones_like(exponent_C)
    exponent_C = exponent_C - exponent_C[counts_C].median()
    return torch.where(counts_C, exponent_C.round(), 0.0).exp2()
