# SPDX-License-Identifier: Apache-2.0
"""Masks are those of a slow textbook version, exact in number, and only grow."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.pairs import each
from tests.support.thinned import thinned
from torch import Tensor

from llmcompressor.numerics import masks
from llmcompressor.numerics import masks as selection
from llmcompressor.numerics.masks import (
    LazyWeight,
    Pool,
    find_threshold,
    grow_masks,
    linear,
    multi_step,
    num_zeros,
    parse_structure,
    polynomial,
    polynomial_decay,
    progress,
    select_below,
)

STRUCTURES = ["unstructured", "filter", "channel", "block_1,4", "block_4,2", "2:4", "1:4", "5:8"]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks smaller than the weights, so that their borders are tested too."""
    monkeypatch.setattr(selection, "_SELECTION_CHUNK", 7)
    monkeypatch.setattr(selection, "_CPU_CHUNK_ELEMENTS", 7)
    monkeypatch.setattr(masks, "_CHUNK_ELEMENTS", 16)


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def mask_of(weight, name, sparsity, before=None):
    [mask] = grow_masks([LazyWeight.of(weight, before)], parse_structure(name), sparsity)
    assert mask.dtype == torch.bool
    assert mask.shape == weight.shape
    return mask


def units(shape, name):
    """Flat positions of the weights of each unit, in the order of memory."""
    flat = torch.arange(torch.Size(shape).numel()).reshape(shape[0], -1)
    if name == "filter":
        return [row.tolist() for row in flat]
    if name == "channel":
        apart = flat.reshape(shape)
        return [apart[:, c].flatten().tolist() for c in range(shape[1])]
    if name.startswith("block"):
        a, b = map(int, name.removeprefix("block_").split(","))
        corners = itertools.product(range(0, flat.shape[0], a), range(0, flat.shape[1], b))
        return [flat[r : r + a, c : c + b].flatten().tolist() for r, c in corners]
    return [[i] for i in flat.flatten().tolist()]


def textbook(weight, name, sparsity):
    """Sort all units by mean magnitude, then position; zero the first of them."""
    size = weight.double().abs().flatten()
    groups = units(weight.shape, name)
    if ":" in name:
        n, m = map(int, name.split(":"))
        rows = range(0, len(groups), m)
        allowed = [sorted(range(r, r + m), key=lambda i: (size[i].item(), i))[:n] for r in rows]
        groups = [[i] for i in sorted(itertools.chain(*allowed))]
    order = sorted(range(len(groups)), key=lambda u: (size[groups[u]].mean().item(), u))
    unit = len(groups[0])
    number = num_zeros(sparsity, weight.numel() // unit)
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    for u in order[:number]:
        mask[groups[u]] = True
    return mask.view(weight.shape)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    thinned(
        itertools.product(STRUCTURES, [(8, 16), (4, 8, 2, 1)]),
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_masks_are_those_of_the_textbook(name, shape, dtype):
    # Multiples of 1/8 that are exact in every dtype: many ties, and equal means stay equal.
    weight = (random(*shape) * 8).round().div(8).to(dtype)
    full = parse_structure(name).full_sparsity or 1.0
    for sparsity in (0.0, 0.1, 0.25, 0.37, 0.5, 0.9, 1.0):
        wanted = sparsity * full
        assert torch.equal(mask_of(weight, name, wanted), textbook(weight, name, wanted))


@given(
    values=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40),
    sparsity=st.floats(0, 1),
)
@settings(deadline=None)
def test_any_values_are_cut_exactly(values, sparsity):
    weight = torch.tensor(values)
    mask = mask_of(weight, "unstructured", sparsity)
    assert torch.equal(mask, textbook(weight.view(-1, 1), "unstructured", sparsity).view(-1))


@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_only_grow_and_are_exact_whatever_the_weights_do(name):
    structure = parse_structure(name)
    unit = structure.unit((8, 16))
    before = None
    for step, share in enumerate((0.0, 0.07, 0.2, 0.2, 0.45, 0.8, 1.0)):
        sparsity = share * (structure.full_sparsity or 1.0)
        mask = mask_of(random(8, 16, seed=step), name, sparsity, before)
        assert int(mask.sum()) == num_zeros(sparsity, 128 // unit) * unit
        assert before is None or bool((mask | ~before).all())
        before = mask


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4), (4, 8), (1, 2)])
def test_n_of_m_never_has_more_zeros_and_in_the_end_just_as_many(n, m):
    before = None
    for step in range(11):
        mask = mask_of(random(8, 16, seed=step), f"{n}:{m}", step / 10 * n / m, before)
        zeros = mask.view(-1, m).sum(1)
        assert int(zeros.max()) <= n
        before = mask
    assert zeros.tolist() == [n] * (128 // m)


@pytest.mark.parametrize("name", ["unstructured", "filter", "channel"])
def test_permuting_rows_and_columns_permutes_the_mask(name):
    weight = random(12, 20) * 64
    weight = weight.round() + torch.arange(240).view(12, 20) / 256  # sums are exact, no ties
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randperm(12, generator=generator), torch.randperm(20, generator=generator)
    moved = mask_of(weight[rows][:, columns], name, 0.4)
    assert torch.equal(moved, mask_of(weight, name, 0.4)[rows][:, columns])


@pytest.mark.parametrize("name", STRUCTURES)
def test_sign_and_scale_do_not_matter(name):
    weight = random(8, 16)
    sparsity = 0.5 * (parse_structure(name).full_sparsity or 1.0)
    mask = mask_of(weight, name, sparsity)
    assert torch.equal(mask_of(-weight, name, sparsity), mask)
    assert torch.equal(mask_of(weight * 0.25, name, sparsity), mask)
    assert torch.equal(mask_of(weight, name, sparsity), mask)


def together(weights, name, sparsity, before=None):
    before = before or [None] * len(weights)
    sources = [LazyWeight.of(*pair) for pair in zip(weights, before, strict=True)]
    return list(grow_masks(sources, parse_structure(name), sparsity))


def test_one_threshold_is_that_of_all_weights_joined():
    weights = [random(4, 8), random(16, 4, seed=1) * 3, random(5, seed=2).bfloat16()]
    weights[0][0] = weights[1][0, 0]  # ties across weights
    joined = torch.cat([weight.flatten().float() for weight in weights])
    for sparsity in (0.0, 0.05, 0.33, 0.5, 0.98, 1.0):
        found = torch.cat([mask.flatten() for mask in together(weights, "unstructured", sparsity)])
        assert torch.equal(found, textbook(joined.view(-1, 1), "unstructured", sparsity).view(-1))


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("2:4", (4, 6), "6 columns are no multiple of 4"),
        ("block_2,4", (4, 6), "4 x 6 is no multiple of 2 x 4"),
        ("filter", (4,), "no matrix"),
        ("2:4", (4,), "no matrix"),
        ("block_1,4", (4,), "no matrix"),
        ("unstructured", (), None),
        ("channel", (4, 6), None),
    ],
)
def test_shapes_that_do_not_fit(name, shape, reason):
    misfit = parse_structure(name).misfit(shape)
    assert misfit is None if reason is None else reason in misfit


FORMS = [linear, polynomial, polynomial_decay]


shares = st.floats(0, 1)


@pytest.mark.parametrize("form", FORMS)
@given(pair=st.tuples(shares, shares).map(sorted))
def test_both_ends_are_exact(form, pair):
    init, final = pair
    assert form(0.0, init, final) == init
    assert form(1.0, init, final) == final


@pytest.mark.parametrize("form", FORMS)
@given(pair=st.tuples(shares, shares).map(sorted), ts=st.tuples(shares, shares).map(sorted))
def test_no_schedule_falls(form, pair, ts):
    before, after = (form(t, *pair) for t in ts)
    assert pair[0] - 1e-12 <= before <= after + 1e-12 <= pair[1] + 2e-12


@given(t=shares)
def test_cubic_is_equation_1_of_zhu_and_gupta(t):
    # s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 with t_0 = 100, n = 8, dt = 25
    at, s_i, s_f = 100 + 200 * t, 0.05, 0.8
    expected = s_f + (s_i - s_f) * (1 - (at - 100) / (8 * 25)) ** 3
    assert polynomial_decay(progress(at, 100, 300), s_i, s_f) == pytest.approx(expected, abs=1e-12)


@given(t=shares)
def test_decay_mirrors_growth(t):
    up = polynomial(1 - t, 0.0, 1.0, 4.0)
    assert polynomial_decay(t, 0.0, 1.0, 4.0) == pytest.approx(1 - up, abs=1e-12)


def test_stair_does_not_depend_on_the_order_of_its_steps():
    steps = [(3.0, 0.5), (1.0, 0.25), (2.0, 0.3)]
    expected = [0.1, 0.25, 0.3, 0.5, 0.5]
    assert [multi_step(i, steps, 0.1) for i in range(5)] == expected
    assert [multi_step(i, sorted(steps), 0.1) for i in range(5)] == expected


@pytest.fixture(autouse=True)
def _selected_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks smaller than the pools, so that their borders are tested too."""
    monkeypatch.setattr(masks, "_CPU_CHUNK_ELEMENTS", 5)


def taken(pools: list[Pool], budget: int, dtype: torch.dtype) -> list[Tensor]:
    cut = find_threshold(lambda: pools, budget, dtype)
    found = []
    for pool in pools:
        units, cut = select_below(pool, cut)
        found.append(units)
    return found


def sorted_choice(pools: list[Pool], budget: int, dtype: torch.dtype) -> list[Tensor]:
    """Sort all free units by magnitude, then by place; take until one does not fit."""
    units = [
        (abs(float(score.to(dtype))), number, place)
        for number, pool in enumerate(pools)
        for place, score in enumerate(pool.score_U.flatten())
        if pool.free_U.flatten()[place]
    ]
    found = [torch.zeros(pool.free_U.numel(), dtype=torch.bool) for pool in pools]
    for _, number, place in sorted(units):
        if pools[number].size > budget:
            break
        budget -= pools[number].size
        found[number][place] = True
    return [one.view(pool.free_U.shape) for one, pool in zip(found, pools, strict=True)]


VALUES = [0.0, -0.0, 1e-45, -1e-38, 1.0, -1.0, 1.0 + 2**-23, 2.5, 3e38, float("inf")]


pools = st.lists(
    st.lists(
        st.tuples(st.sampled_from(VALUES) | st.floats(-4, 4, width=32), st.booleans()),
        max_size=14,
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(drawn=pools, budget=st.integers(-1, 45))
@settings(deadline=None, max_examples=60)
def test_it_is_what_a_sort_takes(
    dtype: torch.dtype, drawn: list[list[tuple[float, bool]]], budget: int
) -> None:
    made = [
        Pool(
            torch.tensor([score for score, _ in one], dtype=torch.float32),
            torch.tensor([free for _, free in one], dtype=torch.bool),
        )
        for one in drawn
    ]
    for found, expected in zip(
        taken(made, budget, dtype), sorted_choice(made, budget, dtype), strict=True
    ):
        assert torch.equal(found, expected)


@each(budget=range(0, 60, 3), score_dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_units_of_several_sizes_are_taken_while_they_fit(
    budget: int, score_dtype: torch.dtype
) -> None:
    """Scores without ties: with them, what is left of a budget may fit a smaller unit behind."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)) + 1.0
    parts = torch.split(order.to(score_dtype), [8, 12, 4])
    made = [
        Pool(part.view(-1, 2), torch.ones(len(part) // 2, 2, dtype=torch.bool), size)
        for part, size in zip(parts, (1, 3, 4), strict=True)
    ]
    found, expected = (way(made, budget, torch.float32) for way in (taken, sorted_choice))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    spent = sum(int(one.sum()) * pool.size for one, pool in zip(found, made, strict=True))
    assert spent <= budget
