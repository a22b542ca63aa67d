# SPDX-License-Identifier: Apache-2.0
"""Products are those of torch, whole where they are to be, and the same for any thread count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.pairs import pairs
from torch import Tensor
from torch.nn import functional

from llmcompressor.modeling import patches as quick
from llmcompressor.modeling.patches import float32_linears
from llmcompressor.numerics import products
from llmcompressor.numerics.products import (
    MANY_ALIKE,
    fast_matmul_dtype,
    float32_by_default,
    full_float32_products,
    has_multiply_instruction,
    is_slow_dtype,
    matmul,
    parallel_matmul,
    subtract_matmul_,
    wide_linear,
)

SHAPES = [(64, 64, 512), (130, 257, 129), (16, 4096, 40), (5, 3, 2), (0, 4, 3), (3, 0, 4)]


HAS_ONEDNN = torch.backends.mkldnn.is_available()


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of the two multiplies; oneDNN at any size."""
    if request.param == "onednn" and not HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: request.param == "onednn")
    return str(request.param)


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """The same numbers: in rows, in columns, or as a part of something wider."""
    if layout == "columns":
        return matrix.mT.contiguous().mT
    if layout == "part":
        wide = torch.cat([matrix, matrix, matrix], dim=-1)
        return wide[..., matrix.shape[-1] : 2 * matrix.shape[-1]]
    return matrix


@pairs(
    shape=SHAPES,
    left_layout=["rows", "columns", "part"],
    right_layout=["rows", "columns", "part"],
    batch=[(), (2,)],
)
@pytest.mark.usefixtures("library")
def test_it_is_the_product(
    shape: tuple[int, int, int], left_layout: str, right_layout: str, batch: tuple[int, ...]
) -> None:
    rows, inner, columns = shape
    left, right = torch.randn(*batch, rows, inner), torch.randn(*batch, inner, columns)
    exact = left.double() @ right.double()
    operands = laid_out(left, left_layout), laid_out(right, right_layout)
    within = {"atol": 1e-5 * max(inner, 1), "rtol": 1e-5}
    assert torch.allclose(matmul(*operands, fewest=0).double(), exact, **within)
    assert torch.allclose(parallel_matmul(*operands, fewest=0).double(), exact, **within)
    target = torch.ones(*batch, rows, columns)
    subtract_matmul_(target, *operands, fewest=0)
    assert torch.allclose(1 - target.double(), exact, **within)


@pytest.mark.usefixtures("library")
def test_gradients_are_kept() -> None:
    left = torch.randn(64, 64, requires_grad=True)
    matmul(left, torch.eye(64), fewest=0).sum().backward()
    assert left.grad is not None
    assert torch.equal(left.grad, torch.ones(64, 64))


@pytest.mark.skipif(not products.prefers_onednn(), reason="MKL is used here")
def test_where_onednn_is_used_it_is_no_less_exact() -> None:
    left, right = torch.randn(256, 1024), torch.randn(1024, 256)
    exact = left.double() @ right.double()
    error = (matmul(left, right, fewest=0).double() - exact).norm()
    assert error < 2 * ((left @ right).double() - exact).norm()


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("machine", "dtype", "has", "expected"),
    [
        ("x86_64", torch.bfloat16, False, False),
        ("AMD64", torch.bfloat16, False, False),
        ("x86_64", torch.bfloat16, True, True),
        ("aarch64", torch.bfloat16, False, None),
        ("x86_64", torch.float32, False, None),
    ],
)
def test_what_the_processor_has(
    machine: str,
    dtype: torch.dtype,
    has: bool,
    expected: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products.platform, "machine", lambda: machine)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: has)
    assert has_multiply_instruction.__wrapped__(dtype) is expected


def test_torch_can_be_asked_for_every_instruction() -> None:
    """Otherwise nothing would be widened, and nothing made in bfloat16."""
    for names in products._INSTRUCTIONS.values():
        assert all(callable(getattr(torch.cpu, name)) for name in names)


@pytest.mark.parametrize(("has", "slow"), [(True, False), (False, True), (None, False)])
def test_what_follows(has: bool | None, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sure answer changes how products are made."""
    monkeypatch.setattr(products, "has_multiply_instruction", lambda dtype: has)
    monkeypatch.setattr(products, "has_multiply_instruction", lambda dtype: has)
    products._multiplies_bfloat16.cache_clear()
    try:
        assert is_slow_dtype(torch.bfloat16) is slow
        expected = torch.bfloat16 if has else torch.float32
        assert fast_matmul_dtype(CPU, MANY_ALIKE) is expected
        assert fast_matmul_dtype(CPU, MANY_ALIKE - 1) is torch.float32
        assert fast_matmul_dtype(torch.device("mps"), 2**40) is torch.float32
    finally:
        products._multiplies_bfloat16.cache_clear()


BACKENDS: Any = torch.backends


def found() -> tuple[str, ...]:
    return (
        BACKENDS.fp32_precision,
        BACKENDS.cuda.matmul.fp32_precision,
        BACKENDS.mkldnn.matmul.fp32_precision,
    )


def set_below(value: str) -> None:
    BACKENDS.cuda.matmul.fp32_precision = value


def set_all(value: str) -> None:
    BACKENDS.fp32_precision = value


pytestmark = pytest.mark.usefixtures("_products_as_before")


@pytest.mark.parametrize(
    "allow",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: set_all("tf32"),  # what TrainingArguments(tf32=True) does
        lambda: set_below("tf32"),
    ],
    ids=["nothing", "high", "medium", "all", "products"],
)
def test_they_are_whole_inside_and_as_before_afterwards(allow: Callable[[], None]) -> None:
    allow()
    before = found()
    with full_float32_products():
        assert found()[1:] == ("ieee", "ieee")
        with full_float32_products():
            assert found()[1:] == ("ieee", "ieee")
        assert found()[1:] == ("ieee", "ieee")
    assert found() == before


@pytest.mark.parametrize("said", ["highest", "high", "medium"])
def test_the_older_setting_can_be_asked_inside(said: str) -> None:
    torch.set_float32_matmul_precision(said)
    with full_float32_products():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not BACKENDS.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == said


def test_the_last_of_several_runs_puts_it_back() -> None:
    torch.set_float32_matmul_precision("high")
    before = found()
    first, second = full_float32_products(), full_float32_products()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert found()[1:] == ("ieee", "ieee")
    second.__exit__(None, None, None)
    assert found() == before


def test_new_tensors_are_float32_inside_and_as_before_afterwards() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        first, second = float32_by_default(), float32_by_default()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.zeros(1).dtype is torch.float32, "another run is still at work"
        second.__exit__(None, None, None)
        assert torch.zeros(1).dtype is torch.bfloat16
        with pytest.raises(KeyError), float32_by_default():
            raise KeyError
        assert torch.zeros(1).dtype is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that lacks the instructions."""
    monkeypatch.setattr(quick, "is_slow_dtype", lambda dtype: dtype in DTYPES)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that were widened."""
    shapes: list[tuple[int, ...]] = []
    real: Callable[..., Tensor] = quick.wide_linear

    def wide(given: Tensor, *rest: Tensor) -> Tensor:
        shapes.append(tuple(given.shape))
        return real(given, *rest)

    monkeypatch.setattr(quick, "wide_linear", wide)
    return shapes


def operands(dtype: torch.dtype, *shape: int, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(*shape), torch.randn(rows, shape[-1])
    return x.to(dtype), weight.to(dtype), torch.randn(rows).to(dtype)


@pairs(dtype=DTYPES, has_bias=[False, True], shape=[(3, 100, 48), (1, 48), (0, 48), (257, 48)])
def test_it_rounds_the_exact_result_once(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_PIECE_WEIGHTS", 7 * 48)  # several pieces, the last one smaller
    x, weight, bias = operands(dtype, *shape)
    given = bias if has_bias else None
    exact = functional.linear(x.double(), weight.double(), None if given is None else bias.double())
    found = wide_linear(x, weight, given)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    spacing = torch.finfo(dtype).eps * exact.abs().clamp_min(1e-2)
    assert bool(((found.double() - exact).abs() <= 0.51 * spacing).all())


@pytest.mark.parametrize("tokens", [113, 700])
def test_the_number_of_threads_never_changes_it(tokens: int) -> None:
    x, weight, bias = operands(torch.bfloat16, tokens, 96)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(wide_linear(x, weight, bias))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_linears_of_a_model_are_widened_inside_only(
    slow: None, taken: list[tuple[int, ...]]
) -> None:
    x, weight, _ = operands(torch.bfloat16, 2, 64, 48)
    module = torch.nn.Linear(48, 40).bfloat16()
    plain = functional.linear
    with torch.no_grad():
        outside = module(x)
        with float32_linears():
            inside = module(x)
            functional.linear(x[:, :20], weight)  # too few tokens
            functional.linear(x.float(), weight.float())
        assert functional.linear is plain
        module(x)
    assert taken == [(2, 64, 48)]
    assert torch.allclose(inside.float(), outside.float(), rtol=2**-7, atol=1e-2)


@pairs(dtype=DTYPES, has_bias=[False, True])
def test_gradients_of_inputs_are_widened_too(
    dtype: torch.dtype, has_bias: bool, slow: None, taken: list[tuple[int, ...]]
) -> None:
    x, weight, bias = operands(dtype, 2, 64, 48)
    torch.manual_seed(1)
    coming = torch.randn(2, 64, 40).to(dtype)

    def gradients(*operands: Tensor) -> list[Tensor]:
        given, matrix, shift = operands[0], operands[1], operands[2] if has_bias else None
        wanted = [given.requires_grad_(), *([shift.requires_grad_()] if shift is not None else [])]
        result = functional.linear(given, matrix, shift)
        return list(torch.autograd.grad(result, wanted, coming.to(result.dtype)))

    exact = gradients(x.double(), weight.double(), bias.double())
    with float32_linears():
        found = gradients(x.clone(), weight, bias.clone())
        functional.linear(x, weight.clone().requires_grad_())  # trained: as before
    assert taken == [(2, 64, 48), (2, 64, 40)]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        spacing = torch.finfo(dtype).eps * other.abs().clamp_min(1e-2)
        assert bool(((one.double() - other).abs() <= 0.51 * spacing).all())
