# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group do in the tests of collectives; each function runs on all of them."""

from __future__ import annotations

import time
from typing import Any

import torch
from tests.support.rank_group import die, on_ranks
from torch import Tensor

from llmcompressor.runtime.collectives import Ranks

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64),
]

KINDS = ("sum", "max", "min")


def gram(rank: int, side: int = 37) -> Tensor:
    """A symmetric matrix, another one on each rank, of terms that nearly cancel."""
    x = torch.randn(50, side, generator=torch.Generator().manual_seed(rank))
    h = (x.T @ x) * (-1e4 if rank % 2 else 1e4)
    return (h + h.T) / 2


def numbers(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(5, 7, 3, generator=draw) * 100).to(dtype)


def sums(panel: int) -> dict[str, Any]:
    """Sums at owners and on all ranks, and the inputs that they left alone."""

    def body(ranks: Ranks) -> dict[str, Any]:
        own, h, last = numbers(ranks.rank), gram(ranks.rank), ranks.count - 1
        strided = numbers(ranks.rank).permute(2, 0, 1)[:, ::2]
        found = {
            "to": ranks.sum_to(last, own, what="numbers"),
            "all": ranks.sum_all(own, what="numbers"),
            "strided": ranks.sum_to(0, strided, what="strided"),
            "strided all": ranks.sum_all(strided, what="strided"),
            "whole": ranks.sum_all(h, what="H"),
            "triangle": ranks.sum_to(0, h, what="H", symmetric=True),
            "triangle all": ranks.sum_all(h, what="H", symmetric=True),
            "nothing": ranks.sum_all(torch.empty(0, 4), what="nothing"),
            "scalar": ranks.sum_all(torch.tensor(2.5), what="scalar"),
        }
        assert torch.equal(own, numbers(ranks.rank))
        assert torch.equal(h, gram(ranks.rank))
        return found

    return on_ranks(body, panel=panel)


def sum_of(dtype: torch.dtype) -> Tensor:
    return on_ranks(lambda ranks: ranks.sum_all(numbers(ranks.rank, dtype), what="x"))


def listed(
    values: list[Any], dtype: torch.dtype | None = None, names: tuple[str, ...] = KINDS
) -> dict[str, Tensor]:
    """The sum and extremes of numbers, one for each rank."""

    def body(ranks: Ranks) -> dict[str, Tensor]:
        own = torch.tensor(values[ranks.rank], dtype=dtype).expand(9)
        return {name: getattr(ranks, f"{name}_all")(own, what=name) for name in names}

    return on_ranks(body)


def bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of random bits, NaN included."""
    size = torch.empty(0, dtype=dtype).itemsize
    draw = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), generator=draw)
    return raw.to(torch.uint8).view(dtype).squeeze(-1)


def copied(owner: int, panel: int) -> bool:
    """Copies of every dtype, into new tensors, given ones and ones that are not contiguous."""
    known, strided = torch.float8_e4m3fn, torch.int16

    def body(ranks: Ranks) -> bool:
        wanted = {str(dtype): bits(dtype, 3, 5) for dtype in DTYPES}
        wanted |= {"none": torch.empty(0, 2), "one": torch.tensor(3)}
        given = dict(wanted)
        if ranks.rank != owner:
            given = {str(one): torch.empty(3, 5, dtype=one) for one in (known,)}
            given[str(strided)] = torch.zeros(5, 3, dtype=strided).T
        else:
            given[str(torch.int32)] = wanted[str(torch.int32)].T.contiguous().T
        found = ranks.broadcast_from(owner, given, what="weights")
        assert list(found) == list(wanted)
        assert all(found[name] is one for name, one in given.items()), "in place"
        return all(same_bits(found[name], one) for name, one in wanted.items())

    return on_ranks(body, panel=panel)


def gathered(panel: int) -> bool:
    """Tensors of every dtype, of which some ranks have fewer rows, or none."""

    def body(ranks: Ranks) -> bool:
        shapes = [[max(0, 3 - rank), 5] for rank in range(ranks.count)]
        alike = []
        for dtype in DTYPES:
            every = bits(dtype, 12, 5)
            wanted = [every[3 * rank :][: shape[0]] for rank, shape in enumerate(shapes)]
            found = ranks.all_gather(wanted[ranks.rank], shapes, what="shards")
            alike += [same_bits(*pair) for pair in zip(found, wanted, strict=True)]
        return all(alike) and len(alike) == ranks.count * len(DTYPES)

    return on_ranks(body, panel=panel)


def same_bits(one: Tensor, other: Tensor) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and one.shape == other.shape and raw(one).equal(raw(other))


def traffic(side: int, panel: int) -> list[tuple[int, int]]:
    """Bytes sent and received in four operations on a matrix of this side."""

    def body(ranks: Ranks) -> list[tuple[int, int]]:
        h, found = torch.zeros(side, side), []
        for operation in (
            lambda: ranks.sum_to(0, h, what="H"),
            lambda: ranks.sum_to(0, h, what="H", symmetric=True),
            lambda: ranks.sum_all(h, what="H"),
            lambda: ranks.broadcast_from(0, {"H": h}, what="H"),
        ):
            before = ranks.sent, ranks.received
            operation()
            found.append((ranks.sent - before[0], ranks.received - before[1]))
        return found

    return on_ranks(body, panel=panel)


def unlike(how: str) -> None:
    """The last rank does something else."""

    def body(ranks: Ranks) -> None:
        is_last = ranks.rank == ranks.count - 1
        if how == "other work" and is_last:
            ranks.max_all(torch.zeros(3), what="the extremes")
        elif how == "other shape":
            ranks.sum_all(torch.zeros(4 if is_last else 3), what="the sums")
        elif how == "other place":
            given = {"w": torch.zeros(4 if is_last else 3)}
            ranks.broadcast_from(0, given, what="the weights")
        else:
            ranks.sum_all(torch.zeros(3), what="the sums")
        ranks.sum_all(torch.zeros(3), what="what comes after")

    on_ranks(body)


def broken(how: str, timeout: float | None) -> str:
    """The last rank fails; what the others are told, and after how many seconds."""
    begun = time.monotonic()

    def body(ranks: Ranks) -> None:
        is_last = ranks.rank == ranks.count - 1
        ranks.sum_all(torch.zeros(3), what="the first sums")
        if how == "raises in a part" or not is_last:
            with ranks.agreed("a part"):
                if is_last:
                    raise KeyError("gone")
        elif how == "raises":
            raise KeyError("gone")
        elif how == "is killed":
            die()
        elif how == "hangs":
            time.sleep((timeout or 1.5) + 1)
        ranks.sum_to(0, torch.zeros(3), what="the later sums")

    try:
        on_ranks(body, timeout=timeout)
    except Exception as error:
        return f"{time.monotonic() - begun:.1f} {type(error).__name__}: {error}"
    return "none"


def on_device() -> tuple[float, str, float, str]:
    """A sum and an extreme of tensors of a device, and where the results lie."""

    def body(ranks: Ranks) -> tuple[float, str, float, str]:
        own = torch.full((3,), ranks.rank + 1.0, device="cuda")
        total = ranks.sum_all(own, what="x")
        greatest = ranks.max_all(own, what="x")
        return total[0].item(), total.device.type, greatest[0].item(), greatest.device.type

    return on_ranks(body)
