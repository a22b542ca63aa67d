# SPDX-License-Identifier: Apache-2.0
"""What is asked of the processor, and what follows from the answer."""

from __future__ import annotations

import pytest
import torch

from llmcompressor.numerics import products
from llmcompressor.numerics import products as instructions
from llmcompressor.numerics import products as linear
from llmcompressor.numerics.products import (
    MANY_ALIKE,
    fast_matmul_dtype,
    has_multiply_instruction,
    is_slow_dtype,
)

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
    monkeypatch.setattr(instructions.platform, "machine", lambda: machine)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: has)
    assert has_multiply_instruction.__wrapped__(dtype) is expected


def test_torch_can_be_asked_for_every_instruction() -> None:
    """Otherwise nothing would be widened, and nothing made in bfloat16."""
    for names in instructions._INSTRUCTIONS.values():
        assert all(callable(getattr(torch.cpu, name)) for name in names)


@pytest.mark.parametrize(("has", "slow"), [(True, False), (False, True), (None, False)])
def test_what_follows(has: bool | None, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sure answer changes how products are made."""
    monkeypatch.setattr(linear, "has_multiply_instruction", lambda dtype: has)
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
