# SPDX-License-Identifier: Apache-2.0
"""Every comparison against a textbook version in float64, its gradient, and its limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.support.pairs import each, pairs
from torch import Tensor

from llmcompressor.numerics import distillation as d
from llmcompressor.numerics.distillation import mean_over_tokens


def rows(seed: int, count: int = 5, width: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, width, generator=generator, dtype=torch.float64)).to(dtype)


def softened(logits: list[float], temperature: float) -> list[float]:
    powers = [math.exp(z / temperature) for z in logits]
    return [power / sum(powers) for power in powers]


def slow_kl(s: list[float], t: list[float], temperature: float) -> float:
    q, p = softened(s, temperature), softened(t, temperature)
    terms = [a * math.log(a / b) for a, b in zip(p, q, strict=True)]
    return temperature**2 * sum(terms)


def slow_cross_entropy(s: list[float], t: list[float], temperature: float) -> float:
    q, p = softened(s, temperature), softened(t, temperature)
    return -(temperature**2) * sum(a * math.log(b) for a, b in zip(p, q, strict=True))


def length(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values))


def dot(s: list[float], t: list[float]) -> float:
    return sum(a * b for a, b in zip(s, t, strict=True))


def difference(s: list[float], t: list[float]) -> list[float]:
    return [a - b for a, b in zip(s, t, strict=True)]


SLOW: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {
    "l1": (d.l1_distance, lambda s, t: sum(map(abs, difference(s, t)))),
    "l2": (d.l2_distance, lambda s, t: length(difference(s, t))),
    "inner": (d.inner_product, lambda s, t: -dot(s, t)),
    "cosine": (d.cosine_similarity, lambda s, t: 1 - dot(s, t) / length(s) / length(t)),
    "kl": (d.kl_divergence, partial(slow_kl, temperature=1.0)),
    "kl at 3": (
        partial(d.kl_divergence, temperature=3.0),
        partial(slow_kl, temperature=3.0),
    ),
    "cross entropy": (d.cross_entropy, partial(slow_cross_entropy, temperature=1.0)),
    "cross entropy at half": (
        partial(d.cross_entropy, temperature=0.5),
        partial(slow_cross_entropy, temperature=0.5),
    ),
    "square head per token": (
        partial(d.square_head, per_token=True),
        lambda s, t: length(difference(s, t)) ** 2 / length(t) ** 2,
    ),
}
COMPARISONS: dict[str, Callable[..., Tensor]] = {
    **{name: fast for name, (fast, _) in SLOW.items()},
    "square head": partial(d.square_head, mean_square=torch.tensor(3.0, dtype=torch.float64)),
}


@each(name=SLOW, seed=[0, 1, 2])
def test_a_comparison_is_that_of_the_textbook(name: str, seed: int) -> None:
    fast, slow = SLOW[name]
    student, teacher = rows(seed), rows(seed + 100)
    expected = [slow(s, t) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
    found = fast(student, teacher)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", COMPARISONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    teacher = rows(4)
    student = rows(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: COMPARISONS[name](s, teacher), student)


def test_transforms_are_those_of_the_textbook() -> None:
    given = rows(5)
    expected = torch.tensor([softened(z, 2.0) for z in given.tolist()], dtype=torch.float64)
    torch.testing.assert_close(d.softmax(given, temperature=2.0), expected)
    torch.testing.assert_close(d.log_softmax(given, temperature=2.0), expected.log())
    lengths = torch.tensor([[length(z)] for z in given.tolist()], dtype=torch.float64)
    torch.testing.assert_close(d.normalize(given), given / lengths)
    assert d.identity(given) is given
    for transform in (d.softmax, d.log_softmax, d.normalize):
        assert transform(given.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["l1", "l2", "cosine", "kl", "kl at 3", "square head", "square head per token"]
)
def test_a_student_like_its_teacher_has_nothing_to_learn(name: str) -> None:
    student = rows(7).requires_grad_()
    loss = COMPARISONS[name](student, rows(7)).sum()
    (gradient,) = torch.autograd.grad(loss, student)
    assert abs(loss.item()) < 1e-12
    assert gradient.abs().max() < 1e-12


def test_hot_divergence_is_that_of_centred_logits() -> None:
    student, teacher = rows(0), rows(1)

    def centred(logits: Tensor) -> Tensor:
        return logits - logits.mean(dim=-1, keepdim=True)

    limit = (centred(student) - centred(teacher)).square().sum(-1) / (2 * student.shape[-1])
    for temperature, tolerance in ((1e2, 3e-2), (1e4, 3e-4)):
        found = d.kl_divergence(student, teacher, temperature=temperature)
        torch.testing.assert_close(found, limit, rtol=tolerance, atol=0)


EXTREME = [
    ([6e4, -6e4, 0.0], [-6e4, 6e4, 0.0]),
    ([1.0, 2.0, -math.inf], [2.0, 1.0, -math.inf]),
    ([1.0, 2.0, 3.0], [2.0, 1.0, -math.inf]),
    ([1.0, 2.0, -math.inf], [2.0, 1.0, 3.0]),
    ([0.0, 0.0, 0.0], [6e4, 0.0, 0.0]),
    ([1.0, 2.0, -3e38], [2.0, 1.0, 3.0]),
    ([1.0, 2.0, -3e38], [2.0, 1.0, -math.inf]),
]


@pairs(
    logits=EXTREME,
    name=["kl", "kl at 3", "cross entropy", "cross entropy at half"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_extreme_logits_give_numbers(
    logits: tuple[list[float], list[float]], name: str, dtype: torch.dtype
) -> None:
    student, teacher = logits
    ours = torch.tensor([student], dtype=dtype, requires_grad=True)
    loss = COMPARISONS[name](ours, torch.tensor([teacher], dtype=dtype))
    loss.sum().backward()
    assert loss.abs().max() < 1e6
    assert ours.grad is not None
    assert ours.grad.isfinite().all()


@pairs(name=COMPARISONS, chunk_elements=[1, 15, 10**6], chosen=[None, [0, 2, 5], []])
def test_chunks_give_what_the_whole_gives(
    name: str, chunk_elements: int, chosen: list[int] | None
) -> None:
    compare = COMPARISONS[name]
    which = None if chosen is None else torch.tensor(chosen, dtype=torch.long)
    plain = rows(0, count=6).requires_grad_()
    chunked = rows(0, count=6).requires_grad_()
    teacher = rows(1, count=6)
    index = slice(None) if which is None else which
    values = compare(plain[index], teacher[index])
    expected = values.mean() if len(values) else values.sum()
    found = mean_over_tokens(compare, chunked, teacher, which, chunk_elements)
    torch.testing.assert_close(found, expected)
    (3.0 * expected).backward()
    (3.0 * found).backward()
    torch.testing.assert_close(chunked.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_sixteen_bits_is_as_exact_as_they_allow(dtype: torch.dtype) -> None:
    # with the scale of a loss that float16 needs, and more tokens than it can divide by
    student = rows(0, count=3000, dtype=dtype).requires_grad_()
    teacher = rows(1, count=3000, dtype=dtype)
    reference = student.detach().double().requires_grad_()
    (2.0**16 * mean_over_tokens(d.kl_divergence, student, teacher)).backward()
    (2.0**16 * d.kl_divergence(reference, teacher.double()).mean()).backward()
    assert student.grad is not None
    assert reference.grad is not None
    assert student.grad.dtype == dtype
    error = (student.grad.double() - reference.grad).abs().max() / reference.grad.abs().max()
    assert error < 2 * torch.finfo(dtype).eps


def test_no_tensor_is_larger_than_a_chunk() -> None:
    """Of those that are computed; the gradient that is kept has the student's size and dtype."""
    count, width, chunk = 64, 50, 200
    student = rows(0, count=count, width=width, dtype=torch.bfloat16).requires_grad_()
    teacher = rows(1, count=count, width=width, dtype=torch.bfloat16)
    large: set[str] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple) else [result]:
                if isinstance(one, Tensor) and one.numel() > chunk:
                    large.add(f"{function} {one.dtype}")
            return result

    with Watch():
        mean_over_tokens(d.kl_divergence, student, teacher, None, chunk).backward()
    assert not [name for name in large if "float32" in name], large
