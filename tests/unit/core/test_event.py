# SPDX-License-Identifier: Apache-2.0
"""Events know where in the run they stand."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcompressor.core.events import Event, has_reached
from llmcompressor.errors import InputError

steps = st.integers(0, 10_000)
counts = st.integers(1, 500)


@given(steps, counts)
def test_epoch_and_step_in_it_make_up_the_global_step(step, per_epoch):
    event = Event(global_step=step, steps_per_epoch=per_epoch)
    assert event.epoch * per_epoch + event.epoch_step == step
    assert 0 <= event.epoch_step < per_epoch
    assert event.epoch_full == step / per_epoch == event.current_index


def test_index_counts_steps_without_epochs():
    event = Event(global_step=7)
    assert not event.epoch_based
    assert event.current_index == 7


@pytest.mark.parametrize("name", ["epoch", "epoch_full", "epoch_step", "epoch_batch"])
def test_epoch_properties_need_epochs(name):
    with pytest.raises(ValueError, match=f"{name}.*steps_per_epoch"):
        getattr(Event(global_step=3), name)


@pytest.mark.parametrize(
    ("per_epoch", "per_step", "value", "step", "batch"),
    [
        (None, None, 7, 7, 7),
        (None, None, 7.9, 7, 7),
        (10, None, 2.55, 25, 25),
        (10, 1, 2.5, 25, 25),
        (10, 4, 2.5, 25, 100),
        (None, 3, 5, 5, 15),
    ],
)
def test_setting_the_index_moves_step_and_batch(per_epoch, per_step, value, step, batch):
    event = Event(steps_per_epoch=per_epoch, batches_per_step=per_step)
    event.current_index = value
    assert (event.global_step, event.global_batch) == (step, batch)


@pytest.mark.parametrize(
    "fields",
    [
        {"steps_per_epoch": 0},
        {"steps_per_epoch": -2},
        {"steps_per_epoch": "4"},
        {"steps_per_epoch": float("nan")},
        {"batches_per_step": -1},
        {"invocations_per_step": 0},
        {"invocations_per_step": True},
        {"global_step": -3},
        {"global_step": "1"},
        {"global_batch": -1},
    ],
)
def test_counts_that_no_run_has_are_refused(fields):
    ((name, value),) = fields.items()
    with pytest.raises(InputError, match=f"{name} is {value!r}, and"):
        Event(**fields)
    with pytest.raises(InputError, match=f"{name} is {value!r}, and"):
        Event().new_instance(**fields)


@given(
    st.integers(0, 20),
    st.one_of(st.none(), st.integers(-5, 25)),
    st.one_of(st.none(), st.integers(-5, 25)),
    st.sampled_from([None, 0, -1, 1]),
)
def test_update_only_between_start_and_end(step, start, end, update):
    inside = (start is None or step >= start) and (end is None or step <= end)
    assert Event(global_step=step).should_update(start, end, update) == inside


@given(steps, counts, st.integers(0, 2000), st.integers(1, 50))
def test_a_schedule_comes_to_its_points_as_exact_fractions_say(step, per_epoch, top, bottom):
    """Whatever a recipe's expression has rounded off on the way."""
    event = Event(global_step=step, steps_per_epoch=per_epoch)
    exact = Fraction(step, per_epoch) - Fraction(top, bottom)
    for bound in (top / bottom, top * (1 / bottom), top / bottom + 0.1 - 0.1):
        assert has_reached(event.current_index, bound) == (exact >= 0)
        assert event.should_update(bound, None, None) == (exact >= 0)
        assert event.should_update(None, bound, None) == (exact <= 0)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "soon", None])
def test_what_is_no_index_is_refused(value):
    event = Event(steps_per_epoch=10, global_step=3)
    with pytest.raises(InputError, match=r"current_index is .* counted from 0 on"):
        event.current_index = value
    assert event.global_step == 3


@pytest.mark.parametrize("module", ["llmcompressor.core.events", "llmcompressor.core.state"])
def test_importing_it_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
