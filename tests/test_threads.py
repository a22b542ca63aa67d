# SPDX-License-Identifier: Apache-2.0
"""The number of threads follows what is fastest, and is always put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmcompressor.threads import ThreadPacer, one_thread

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Torch's number of threads as a list of all that were set, without setting any."""
    number = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[-1])
    monkeypatch.setattr(torch, "set_num_threads", number.append)
    return number


class Paced(ThreadPacer):
    """A pacer whose clock and rates are given."""

    def __init__(self, speed: Callable[[int], float], device: torch.device = CPU) -> None:
        self.now = 0.0
        self.tried: list[int] = []
        self.speed = speed
        super().__init__(device, clock=lambda: self.now)

    def rate(self, threads: int) -> float:
        self.tried.append(threads)
        return self.speed(threads)


def test_one_thread_is_for_the_body_alone(threads: list[int]) -> None:
    with one_thread(CPU):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_the_number_is_restored_after_an_error(threads: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), one_thread(CPU):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 4


def test_other_devices_and_single_threads_are_left_alone(threads: list[int]) -> None:
    with one_thread(OTHER):
        assert torch.get_num_threads() == 4
    threads.append(1)
    with one_thread(CPU):
        pass
    assert threads == [4, 1]


@pytest.mark.parametrize(
    ("speed", "best"),
    [
        (lambda threads: threads, 4),
        (lambda threads: 1 / threads, 1),
        (lambda threads: 1.0 + 0.01 * threads, 1),
        (lambda threads: {1: 1.0, 2: 1.9, 4: 1.0}[threads], 2),
        (lambda threads: {1: 1.0, 2: 1.9, 4: 2.0}[threads], 2),
    ],
    ids=["more are faster", "more are slower", "hardly faster", "half", "hardly faster than half"],
)
def test_more_threads_are_taken_where_they_pay(
    speed: Callable[[int], float], best: int, threads: list[int]
) -> None:
    with Paced(speed) as pacer:
        pacer.pace()
        assert torch.get_num_threads() == best
        assert pacer.tried == [1, 2, 4]
    assert torch.get_num_threads() == 4


def test_it_tries_once_a_second_and_changes_its_mind(threads: list[int]) -> None:
    with Paced(lambda threads: threads) as pacer:
        pacer.pace()
        pacer.speed = lambda threads: 1 / threads
        for pacer.now in (0.0, 0.5, 0.99):
            pacer.pace()
            assert len(pacer.tried) == 3
        assert torch.get_num_threads() == 4
        pacer.now = 1.0
        pacer.pace()
        assert len(pacer.tried) == 6
        assert torch.get_num_threads() == 1


def test_the_number_is_put_back_after_an_error(threads: list[int]) -> None:
    pacer = Paced(lambda threads: 1 / threads)
    pacer.pace()
    assert torch.get_num_threads() == 1
    with pytest.raises(ZeroDivisionError), pacer:
        raise ZeroDivisionError
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("device", "most"), [(OTHER, 4), (CPU, 1)])
def test_off_the_cpu_or_with_one_thread_nothing_is_tried(
    device: torch.device, most: int, threads: list[int]
) -> None:
    threads[:] = [most]
    with Paced(lambda threads: threads, device) as pacer:
        pacer.pace()
    assert pacer.tried == []
    assert threads == [most]


def test_a_rate_is_operations_by_time(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that takes two milliseconds is done five hundred times a second."""
    pacer = Paced(lambda threads: 0)

    def product(left: torch.Tensor, right: torch.Tensor) -> None:
        pacer.now += 0.002

    monkeypatch.setattr(torch, "mm", product)
    assert ThreadPacer.rate(pacer, 2) == pytest.approx(500)
    assert torch.get_num_threads() == 2


def test_a_float32_model_keeps_its_number_of_threads(threads: list[int]) -> None:
    """Its products depend on it for some shapes."""
    with ThreadPacer(CPU, torch.float32, clock=lambda: 0.0) as pacer:
        pacer.pace()
        assert torch.get_num_threads() == 4
    assert threads == [4]  # nothing was tried, and nothing had to be put back
