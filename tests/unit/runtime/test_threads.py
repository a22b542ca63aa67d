# SPDX-License-Identifier: Apache-2.0
"""The number of threads changes no result, and is always put back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from llmcompressor.numerics.gram import (
    add_cross_product,
    add_residual_product,
    add_symmetric_product,
)
from llmcompressor.runtime.threads import one_thread, parallel_for, parallel_spans

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch's number of threads as a list of all that were set, without setting any."""
    number = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[-1])
    monkeypatch.setattr(torch, "set_num_threads", number.append)
    return number


def test_pieces_run_on_one_thread_each() -> None:
    before = torch.get_num_threads()
    seen: list[tuple[int, int]] = []
    parallel_for(lambda item: seen.append((item, torch.get_num_threads())), range(6))
    assert sorted(seen) == [(item, 1) for item in range(6)]
    assert torch.get_num_threads() == before


def test_an_error_in_a_piece_is_raised_and_the_number_put_back() -> None:
    before = torch.get_num_threads()

    def work(item: int) -> None:
        if item == 3:
            raise KeyError(item)

    with pytest.raises(KeyError):
        parallel_for(work, range(6))
    assert torch.get_num_threads() == before


def test_the_calling_thread_takes_part_and_waits_for_the_others() -> None:
    before = torch.get_num_threads()
    both_at_work = threading.Barrier(2, timeout=30)
    seen: set[int] = set()

    def work(item: int) -> None:
        both_at_work.wait()  # broken, were all items with one thread
        seen.add(threading.get_ident())

    torch.set_num_threads(2)
    try:
        parallel_for(work, range(2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 2
    assert threading.get_ident() in seen


@pytest.mark.parametrize("tokens", [113, 2048])
def test_second_moments_do_not_depend_on_the_number_of_threads(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    input_TC = torch.randn(tokens, 320, generator=generator).to(torch.bfloat16)
    weight_RC = torch.randn(150, 320, generator=generator).to(torch.bfloat16)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            gram_CC, cross_CC = torch.zeros(320, 320), torch.zeros(320, 320)
            add_symmetric_product(gram_CC, input_TC)
            add_cross_product(cross_CC, input_TC, input_TC.flip(0))
            missing_RC = torch.zeros(150, 320)
            add_residual_product(missing_RC, weight_RC, input_TC, input_TC.flip(0))
            found.append((gram_CC, cross_CC, missing_RC))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@pytest.mark.parametrize("length", [1, 256, 257, 1000])
def test_spans_cover_a_dimension_once(length: int) -> None:
    seen = torch.zeros(length)

    def count(span: slice) -> None:
        seen[span] += 1

    parallel_spans(count, length, CPU)
    assert bool((seen == 1).all())


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_body_on_one_thread_gives_its_pieces_to_all() -> None:
    """Two pieces that wait for each other: on one thread they would never end."""
    meeting = threading.Barrier(2, timeout=30)
    with one_thread(CPU):
        parallel_for(lambda _: meeting.wait(), range(2))
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_pieces_of_a_piece_are_done_where_it_is() -> None:
    """Were they handed on, all threads could wait for pieces that none of them begins."""
    seen: list[tuple[int, int, bool]] = []

    def work(item: int) -> None:
        here = threading.get_ident()
        parallel_for(
            lambda inner: seen.append((item, inner, threading.get_ident() == here)), range(3)
        )

    with one_thread(CPU):
        parallel_for(work, range(4))
    assert sorted(seen) == [(item, inner, True) for item in range(4) for inner in range(3)]
