# SPDX-License-Identifier: Apache-2.0
r"""Hadamard matrices that are the array of Goethals and Seidel with a border.

The four blocks are indexed by an abelian group G: entry (g, h) is a function of h - g. Their
squares need not sum to a multiple of I, only to one less a matrix that is constant on the cosets of
a subgroup. Columns that are constant on the cosets make up for it; so do rows. The corner is what
makes these orthogonal to the others.

All are Alpöge, Voinov and Reynolds-Haertle's, who announced in 2026 matrices of the twelve orders
up to 2000 for which none was known (:mod:`llmcompressor.numerics.orbits` has the other five, which
need no border).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.numerics.constructions import goethals_seidel_array
from llmcompressor.numerics.orbits import four_rows

__all__ = ["bordered", "has_bordered"]


@dataclass(frozen=True)
class _Bordered:
    shape: tuple[int, ...]
    """G as a product of cyclic groups."""

    cosets: tuple[int, ...]
    """Elements equal modulo these lie in one coset."""

    multiplier: int
    text: str
    """The four functions, as in :func:`llmcompressor.numerics.orbits.four_rows`."""

    rows: str
    columns: str
    """A line of the border after another, a bit for each coset of each block, one for -1."""


_BORDERED = {
    668: _Bordered(
        shape=(166,),
        cosets=(1,),
        multiplier=1,
        text=(
            "666f1b0f093ea1f9523b25aae9459c6bdff7dea8d70488c05a5fe87725263f1cf184f7ba11b6ed5cb2b999"
            "0e4f0f6c15e06adc0da5516ba639420082151688488c05a5fe8772526271cf184f7ba11b6ed5cb2b"
        ),
        rows="fac9",
        columns="8421",
    ),
    716: _Bordered(
        shape=(178,),
        cosets=(1,),
        multiplier=1,
        text=(
            "1bb777bb1bdf412281c02f79ee1b0c39afca6f961878a9d581b59aac6bfadc10a26744d372d96f95706768"
            "70ae4488844e420bedd7e3fd08a11e4f3c650359069e78503c581b59aac6bfadc10a2e744d372d96f95706"
            "76870a"
        ),
        rows="fac9",
        columns="8421",
    ),
    1388: _Bordered(
        shape=(2, 3, 57),
        cosets=(2, 3, 1),
        multiplier=7,
        text=(
            "9957e2e0c95b235e1ca03e2e0db09b1bd7386c4643e180670442bdb3edcb6938f056b3cdf00b3068d2c3d9"
            "dafcd3054743328a0e3d53a24dea947c3df80033"
        ),
        rows=(
            "6744dc2e66a364ba9a2d9553355a69595cb234ed3458e6594e5b156ac96a4da8e569372c569666572d0b3a"
            "9c8d3b2a567383b17071c71dc38e1e31f8"
        ),
        columns=(
            "6719652ceb2c65c2cb2e36593693965b238d356c9558da554e5c8e6ac5b14da556693ab272695a70b4ec3b"
            "4666399d0b55573856ae231f88f81c71e3"
        ),
    ),
    1436: _Bordered(
        shape=(2, 2, 8, 11),
        cosets=(2, 2, 2, 1),
        multiplier=3,
        text=(
            "7f9fc3a5a2c3b68ba5a43ab4b16f96ac3b96f96a2d2cb23cb162a5ac3e0bf78b7828fb6da34af0f2d22dac"
            "3a1e3f8078"
        ),
        rows=(
            "ac1d95a98ec94b87d21747d19aa3b11b6c272b4d7259396374e1c535554ee18b33b4598d69b82793c36a17"
            "2d99d4a3650f3ac971a5c61d53c6f0acc93a668ea3b4aa72e16accd259b85a6c1d4e967427d43c9a17c965"
            "78b1598b9cc52753b295e193ca2b178d2e391d71564ba32de447"
        ),
        columns=(
            "2eaa2db84ecc56e4369672934bc32b8759995c9a71f063e835a51dc56c63744b3a5c394e782d6a3565564d"
            "36471d27591b721e71172b532e72878e6a5c93b17456e8c9532bc5d13963b8b4272d9aca4d1de4a61e6671"
            "9a9c5a36c58d3c5987a3692e93d20f35e8e2334be4d4554eb8a9"
        ),
    ),
    1676: _Bordered(
        shape=(418,),
        cosets=(1,),
        multiplier=49,
        text="9a0f8f7194de6af1009b43f0452ee5ffbf03065284",
        rows="fac9",
        columns="8421",
    ),
    1772: _Bordered(
        shape=(442,),
        cosets=(1,),
        multiplier=55,
        text="9ca819dc036853ecd2831f7179fe404df27120cabf8f663769",
        rows="fac9",
        columns="8421",
    ),
    1916: _Bordered(
        shape=(2, 2, 119),
        cosets=(2, 2, 1),
        multiplier=13,
        text=(
            "7b31c4a1df69598d340d4a3ae6ac1e24d31b4749dce8973234fcac4e9413287af4f2a139ed98217394eccc"
            "1126f816c7b545aebd888876c5408bb2f53227f855"
        ),
        rows="55c95ac6533c5c3335663a6933933c9c665566aa695a69a5",
        columns="5a535aac55695596363a36c5393539ca6c5c6ca363666399",
    ),
}


def has_bordered(order: int) -> bool:
    """Whether :func:`bordered` makes one of this order."""
    return order in _BORDERED


def bordered(order: int) -> Tensor:
    """A Hadamard matrix of this order, float64."""
    found = _BORDERED[order]
    core = _core(found)
    coset = _coset_of(found)
    rows, columns = _lines(found.rows, coset), _lines(found.columns, coset).T
    corner = -rows @ core.T @ columns / len(core)
    return torch.cat([torch.cat([corner, rows], 1), torch.cat([columns, core], 1)])


def _core(found: _Bordered) -> Tensor:
    elements = torch.cartesian_prod(*map(torch.arange, found.shape)).reshape(-1, len(found.shape))
    places = torch.tensor([math.prod(found.shape[i + 1 :]) for i in range(len(found.shape))])

    def number(element: Tensor) -> Tensor:
        return (element % torch.tensor(found.shape) * places).sum(-1)

    difference = number(elements - elements[:, None])
    size = math.prod(found.shape)
    values = torch.tensor(four_rows(size, found.shape[-1], found.multiplier, found.text)).double()
    reversal = torch.eye(size, dtype=torch.float64)[number(-elements)]
    return goethals_seidel_array([row[difference] for row in values], reversal)


def _coset_of(found: _Bordered) -> Tensor:
    """The number of each element's coset."""
    numbers = torch.zeros(1, dtype=torch.int64)
    for order, cosets in zip(found.shape, found.cosets, strict=True):
        numbers = (numbers[:, None] * cosets + torch.arange(order) % cosets).flatten()
    return numbers


def _lines(text: str, coset: Tensor) -> Tensor:
    """Lines of the border, over the elements of the four blocks."""
    bits = [int(bit) for digit in text for bit in f"{int(digit, 16):04b}"]
    signs = 1 - 2 * torch.tensor(bits, dtype=torch.float64)
    return signs.reshape(-1, 4, int(coset.max()) + 1)[..., coset].flatten(1)
