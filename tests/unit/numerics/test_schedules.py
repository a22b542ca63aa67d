# SPDX-License-Identifier: Apache-2.0
"""Sparsity schedules are exact at both ends, rise in between, and are those of their papers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcompressor.numerics.masks import linear, multi_step, polynomial, polynomial_decay, progress

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
