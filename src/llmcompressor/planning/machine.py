# SPDX-License-Identifier: Apache-2.0
"""Benchmark of this machine: products, memory and disk, measured in about a second."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from llmcompressor.logger import logger
from llmcompressor.numerics.gram import CHUNK_TOKENS
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.pipelines.quick_linears import quick_linears
from llmcompressor.planning.result import Rates

__all__ = ["measure_rates"]

_SECONDS = 0.15
"""Of each measurement of products or memory."""
_TOKENS, _WIDTH = 512, 1024
_HEADS, _HEAD = 8, 64
_COPIED = 2**26
_WRITTEN = 2**25
_WRITES = 3


def measure_rates(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Rates:
    """Measure products, memory and disk.

    Args:
        device: the device to compute on.
        dtype: of the model.
        folder: a folder on the disk of the output; by default that for temporary files.
    """
    spreads = []
    found = []
    for kind in (dtype, torch.float32):
        with quick_linears():
            rate, spread = _rate(_product(device, kind), _TOKENS * _WIDTH * _WIDTH, device)
        found.append(rate)
        spreads.append(spread)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory, spread = _rate(lambda: target.copy_(source), 2 * _COPIED, device)
    spreads.append(spread)
    between, spread = _rate(_attention(device, dtype), _TOKENS * _TOKENS * _HEADS * _HEAD, device)
    spreads.append(spread)
    amount = CHUNK_TOKENS * (_WIDTH**2 * 36 // 64)  # block rows of a triangle
    moments, spread = _rate(_moments(device, dtype), amount, device)
    spreads.append(spread)
    read, write = _disk(folder)
    worst = max(spreads)
    return Rates(str(device), found[0], found[1], memory, read, write, worst, between, moments)


def _product(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    inputs = torch.ones(_TOKENS, _WIDTH, dtype=dtype, device=device)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device)
    return lambda: torch.nn.functional.linear(inputs, weight)


def _attention(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Causal attention of a sample, counted as products of each token with all before it."""
    states = torch.ones(1, _HEADS, _TOKENS, _HEAD, dtype=dtype, device=device)
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        states, states, states, is_causal=True
    )


def _moments(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    inputs = torch.ones(CHUNK_TOKENS, _WIDTH, dtype=dtype, device=device)
    statistics = InputStatistics(_WIDTH, device)
    return lambda: statistics.update(inputs)


def _rate(work: Callable[[], object], amount: int, device: torch.device) -> tuple[float, float]:
    """Return the median rate of several trials, and the ratio of the best to the worst."""
    work()
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < 3 or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append(amount / max(time.perf_counter() - start, 1e-9))
    rates.sort()
    tenth = len(rates) // 10
    return rates[len(rates) // 2], rates[-1 - tenth] / rates[tenth]


def _disk(folder: Path | None) -> tuple[float, float]:
    """Measure bytes per second of reading and writing; defaults if writing fails."""
    data = os.urandom(_WRITTEN)
    reads, writes = [], []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".llmcompressor-plan-") as file:
            for _ in range(_WRITES):
                writes.append(_timed_write(file.fileno(), data))
                reads.append(_timed_read(file.fileno()))
    except OSError as error:
        logger.debug(f"The disk could not be measured: {error}")
        return 1e9, 5e8
    return sorted(reads)[_WRITES // 2], sorted(writes)[_WRITES // 2]


def _timed_write(descriptor: int, data: bytes) -> float:
    start = time.perf_counter()
    os.pwrite(descriptor, data, 0)
    os.fsync(descriptor)
    return len(data) / max(time.perf_counter() - start, 1e-9)


def _timed_read(descriptor: int) -> float:
    if hasattr(os, "posix_fadvise"):  # drop the written data from the page cache
        os.posix_fadvise(descriptor, 0, _WRITTEN, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    done = len(os.pread(descriptor, _WRITTEN, 0))
    return done / max(time.perf_counter() - start, 1e-9)
