# SPDX-License-Identifier: Apache-2.0
"""Weights undo rotations; steps of Cayley SGD stay orthogonal and come down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmcompressor.numerics import rotation as module
from llmcompressor.numerics.hadamard import hadamard, random_orthogonal
from llmcompressor.numerics.rotation import (
    Rotation,
    cayley_step,
    orthogonality_error,
    rotated_bias,
    rotated_weight,
    rotated_weight_peak_bytes,
)
from llmcompressor.planning.trial import count_memory

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


def test_several_rotations_act_one_after_another() -> None:
    first, second = rotations(40)[1], rotations(20)[2]
    W, x = draw(R, C), draw(T, C)
    assert torch.allclose(second(first(x)) @ rotated_weight(W, inputs=[first, second]).T, x @ W.T)


def test_long_weights_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    W, rotation = draw(R, C), rotations(40)[0]
    whole = rotated_weight(W, inputs=[rotation])
    monkeypatch.setattr(module, "_CHUNK", 3 * C)
    assert torch.equal(rotated_weight(W, inputs=[rotation]), whole)


class _Conversions(TorchDispatchMode):
    """Counts those of ``[N, N]`` tensors."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.found, self._shape = 0, (order, order)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_matrix = func is torch.ops.aten._to_copy.default and args[0].shape == self._shape
        self.found += is_matrix
        return func(*args, **(kwargs or {}))


def test_a_matrix_is_brought_to_the_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each part of it: that is gigabytes for every weight of a large model."""
    monkeypatch.setattr(module, "_CHUNK", 3 * C)
    one = Rotation.of_matrix(random_orthogonal(C, torch.Generator().manual_seed(0)))
    other = Rotation.of_matrix(random_orthogonal(R, torch.Generator().manual_seed(0)))
    W = draw(R, C).float()
    with _Conversions(C) as of_inputs, _Conversions(R) as of_outputs:
        rotated_weight(W, inputs=[one], outputs=[other], precision=torch.float32)
    assert of_inputs.found == of_outputs.found == 1


@pytest.mark.parametrize("is_hadamard", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 0), (0, 1), (1, 1), (0, 0)])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_what_a_rotation_holds_is_foretold(
    is_hadamard: bool, inputs: int, outputs: int, precision: torch.dtype
) -> None:
    W = torch.randn(256, 512, dtype=torch.bfloat16)

    def some(order: int, count: int) -> list[Rotation]:
        whole = Rotation.of_matrix(random_orthogonal(order, torch.Generator().manual_seed(0)))
        return [Rotation.of_hadamard(order) if is_hadamard else whole] * count

    turns = {"inputs": some(512, inputs), "outputs": some(256, outputs)}
    with count_memory() as counted:
        returned = rotated_weight(W, **turns, precision=precision)
    foretold = rotated_weight_peak_bytes(W.numel(), **turns, precision=precision) + returned.nbytes
    is_copied = precision != torch.float64 and not is_hadamard
    matrices = 4 * max(512**2 * inputs, 256**2 * outputs) if is_copied else 0
    assert foretold <= counted.peak + 16 * W.shape[1]
    assert counted.peak <= 1.02 * (foretold + matrices)


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


# ---------------------------------------------------------------------- Cayley SGD


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


def test_without_a_gradient_nothing_moves() -> None:
    Q, zero = rotations(12)[2].matrix(), torch.zeros(12, 12).double()
    moved, _ = cayley_step(Q, zero, zero, 1.0)
    assert torch.allclose(moved, Q, atol=1e-14)
