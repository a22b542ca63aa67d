# SPDX-License-Identifier: Apache-2.0
"""What has no end ends with an error, and everything else is as without the bounds."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmcompressor.errors import CheckpointError, DatasetError, TargetError
from llmcompressor.runtime import limits
from llmcompressor.runtime.limits import (
    TimedPattern,
    check_regular,
    copy_values,
    impossible_size,
    time_limit,
    timed_pattern,
)

NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:[a-z0-9_]+\.?)+!",
        r"([a-z0-9_.]+)*!",
        r"(.*)*!",
        r"(.|\w)+!",
        r"(?:[\w.]|[\w.]{2}){9,}!",
        "(.?){40}!",
        ".*.*.*.*.*.*.*.*!",
        ".?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.?.*!",
        "(?=((.+)+!))",
        r"(?!(\w+\.?)+!).*",
    ],
)
def test_a_pattern_without_end_is_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PATTERN_SECONDS", 0.05)
    timed, name = TimedPattern(pattern), NAME + ".x" * 20
    for find in (timed.match, timed.search, timed.match):
        with pytest.raises(TargetError, match=r"takes too long.*without a repetition within"):
            find(name)
    assert timed.slow_on == name
    assert timed.is_slow_on([])


def test_many_names_that_take_a_moment_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PATTERN_SECONDS", 0.2)
    pattern, names = TimedPattern(".*.*.*.*!"), [f"{NAME}.{'y' * 50}.{n}" for n in range(10**6)]
    started = time.thread_time()
    assert pattern.is_slow_on(names)
    assert time.thread_time() - started < 2


PARTS = ["a", "b", ".", r"\.", ".*", r"\d+", "(a|b)", r"(?:b\.)?", "[ab]{1,2}", "(a.)+", "^", "$"]


@given(st.text("ab.01_", max_size=20), st.lists(st.sampled_from(PARTS)))
def test_all_others_match_as_without_a_limit(name: str, parts: list[str]) -> None:
    pattern = "".join(parts)
    assert timed_pattern(pattern).match(name) is (re.match(pattern, name) is not None)
    assert timed_pattern(pattern).search(name) is (re.search(pattern, name) is not None)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(" * 20000 + ")" * 20000])
def test_what_is_no_pattern_is_one_kind_of_error(pattern: str) -> None:
    with pytest.raises(re.error):
        TimedPattern(pattern)


def _compute_for_ever() -> None:
    while True:
        pass


def test_a_limit_leaves_signals_and_timers_as_they_were() -> None:
    before = signal.getsignal(signal.SIGVTALRM)

    def never() -> Exception:
        return AssertionError("the outer limit is far away")

    with time_limit(60, never), pytest.raises(TimeoutError), time_limit(0.02, TimeoutError):
        _compute_for_ever()
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_another_thread_has_no_limit() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(TimedPattern("(a+)+").match("aab")))
    thread.start()
    thread.join()
    assert found == [True]


def test_only_what_no_model_has_is_impossible() -> None:
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"):
        found = impossible_size({"text_config": {key: 10**6}})
        assert found == f"{key} 1000000: no model is so large"
        assert not impossible_size({key: 1000})
    for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_local_experts"):
        assert impossible_size({key: 10**12})
        assert not impossible_size({key: 10**7})
    others = ("max_position_embeddings", "sliding_window", "attention_chunk_size", "pad_token_id")
    assert not impossible_size(dict.fromkeys(others, 10**15))
    assert impossible_size({"hidden_size": -1}) == "hidden_size -1: no model is so small"
    no_meaning = ("sliding_window", "num_experts", "num_nextn_predict_layers", "top_k")
    assert not impossible_size(dict.fromkeys(no_meaning, -1))
    assert not impossible_size({"num_hidden_layers": True, "vocab_size": None, "n_layer": "many"})


def test_only_files_and_folders_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    server.close()
    for name, kind in {"pipe": "a pipe", "link": "a pipe", "s": "a socket"}.items():
        with pytest.raises(DatasetError, match=rf"{name} is {kind}, not a file"):
            check_regular(tmp_path / name, DatasetError)
    with pytest.raises(CheckpointError, match="is a device"):
        check_regular("/dev/zero", CheckpointError)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file", tmp_path / "absent", "\0", "n" * 999):
        check_regular(path, DatasetError)


def test_copies_are_equal_and_new() -> None:
    value = {"a": [1, (2, ["b"]), {"c": None}], "d": (1.5,)}
    copied = copy_values(value)
    assert copied == value
    assert copied["a"] is not value["a"]
    assert copied["a"][1][1] is not value["a"][1][1]
