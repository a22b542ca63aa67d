# SPDX-License-Identifier: Apache-2.0
"""Float32 products are whole within, and what a process allows is as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmcompressor.numerics.products import float32_by_default, full_float32_products

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
