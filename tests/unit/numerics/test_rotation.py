# SPDX-License-Identifier: Apache-2.0
"""Weights undo rotations; steps of Cayley SGD stay orthogonal and come down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmcompressor.numerics.hadamard import hadamard, random_orthogonal
from llmcompressor.numerics.rotation import (
    Rotation,
    cayley_step,
    orthogonality_error,
    rotated_bias,
    rotated_weight,
)

R, C, T = 24, 40, 7


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rotations(order: int) -> list[Rotation]:
    generator = torch.Generator().manual_seed(order)
    return [
        Rotation.of_hadamard(order),
        Rotation.of_hadamard(order, generator),
        Rotation.of_matrix(random_orthogonal(order, generator)),
    ]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize(("inner", "outer"), [(40, 24), (20, 12), (4, 8)])
def test_a_linear_takes_rotated_inputs_and_gives_rotated_outputs(
    kind: int, inner: int, outer: int
) -> None:
    W, b, x, gain = draw(R, C), draw(R), draw(T, C), draw(C)
    before, after = rotations(inner)[kind], rotations(outer)[kind]
    turned = rotated_weight(W, gain_C=gain, inputs=[before], outputs=[after])
    bias = rotated_bias(b, [after])
    assert torch.allclose(before(x) @ turned.T + bias, after((x * gain) @ W.T + b))


@pytest.mark.parametrize("kind", range(3))
def test_blocks_are_a_block_diagonal_matrix(kind: int) -> None:
    rotation, x = rotations(8)[kind], draw(T, C)
    whole = torch.block_diag(*[rotation.matrix()] * (C // 8))
    assert torch.allclose(rotation(x), x @ whole)
    assert torch.allclose(rotation.transposed()(rotation(x)), x)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("order", [256, 172])
def test_random_signs_spread_what_all_places_have_in_common(side: str, order: int) -> None:
    """Behind the mixing they would leave it gathered in one place, as a plain matrix does."""
    common = hadamard(order)[:, 0]  # all ones, where the order is a power of two
    W = common + 0.1 * draw(order, order)
    W = W if side == "inputs" else W.T

    def peak(rotation: Rotation) -> float:
        """The largest value of a vector beside its mean square, on average."""
        by_output = {"inputs": (), "outputs": (), side: [rotation]}
        turned = rotated_weight(W, **by_output)
        rows = turned if side == "inputs" else turned.T
        return float((rows.abs().amax(1) / rows.square().mean(1).sqrt()).mean())

    plain = Rotation.of_hadamard(order)
    drawn = [Rotation.of_hadamard(order, torch.Generator().manual_seed(seed)) for seed in range(8)]
    assert peak(plain) > 0.8 * order**0.5
    assert all(one.is_random for one in drawn)
    assert not plain.is_random
    assert max(map(peak, drawn)) < 5
    assert len({peak(one) for one in drawn}) == len(drawn)


def test_one_rounding_is_better_than_two() -> None:
    """bfloat16 weights: everything in float64 and rounded once, against a rounding at each step."""
    W = draw(R, C).bfloat16()
    gain, before, after = 1 + 0.1 * draw(C), rotations(40)[0], rotations(24)[0]
    exact = after(before(W.double() * gain).T).T
    once = rotated_weight(W, gain_C=gain, inputs=[before], outputs=[after])
    steps = (W * gain.bfloat16()).bfloat16()
    steps = rotated_weight(steps, inputs=[before], precision=torch.bfloat16)
    steps = rotated_weight(steps, outputs=[after], precision=torch.bfloat16)
    assert once.dtype is torch.bfloat16
    assert torch.equal(once, exact.bfloat16())
    assert float((once - exact).norm()) < 0.6 * float((steps - exact).norm())


def textbook_step(Q: Tensor, gradient: Tensor, momentum: Tensor, rate: float) -> Tensor:
    """Algorithm 1 of the paper: the fixed point by iteration, in place of the inverse."""
    M = 0.9 * momentum - gradient
    hat = M @ Q.T - 0.5 * Q @ (Q.T @ M @ Q.T)
    W = hat - hat.T
    Y = Q + rate * W @ Q
    for _ in range(60):
        Y = Q + rate / 2 * W @ (Q + Y)
    return Y


def test_a_step_is_the_papers() -> None:
    torch.manual_seed(0)
    Q, gradient, momentum = rotations(12)[2].matrix(), draw(12, 12), 0.1 * draw(12, 12)
    moved, kept = cayley_step(Q, gradient, momentum, 0.01)
    assert torch.allclose(moved, textbook_step(Q, gradient, momentum, 0.01), atol=1e-12)
    skew = kept @ Q.T  # the momentum is a tangent at Q
    assert torch.allclose(skew, -skew.T, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_steps_stay_orthogonal(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    Q, momentum = torch.eye(16).double(), torch.zeros(16, 16).double()
    for _ in range(500):
        Q, momentum = cayley_step(Q, 10 * torch.randn(16, 16, dtype=dtype), momentum, 1.5)
    assert orthogonality_error(Q) < 1e-6
    assert orthogonality_error(Q) < 1e-12  # what is measured


def test_it_finds_the_rotation_between_two_sets_of_points() -> None:
    """min ||X Q - Y||, whose solution is known in closed form (Procrustes)."""
    torch.manual_seed(2)
    X, true = draw(60, 8), random_orthogonal(8, torch.Generator().manual_seed(5))
    if torch.linalg.det(true) < 0:
        true[:, 0] *= -1  # steps do not leave the rotations for the reflections
    Y = X @ true
    Q, momentum = torch.eye(8).double(), torch.zeros(8, 8).double()
    for step in range(300):
        gradient = 2 * X.T @ (X @ Q - Y) / len(X)
        Q, momentum = cayley_step(Q, gradient, momentum, 0.2 * (1 - step / 300))
    assert float((Q - true).abs().max()) < 1e-3
