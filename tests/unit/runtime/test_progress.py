# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from huggingface_hub.utils import tqdm as hub_tqdm
from loguru import logger
from rich.console import Console
from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm

import llmcompressor.runtime.progress as page
from llmcompressor.runtime.progress import hide_tqdm_bars, progress


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []
    sink = logger.add(lambda message: found.append(message.record["message"]), level="INFO")
    yield found
    logger.remove(sink)


def test_without_a_terminal_there_is_a_line_every_ten_seconds(lines: list[str]) -> None:
    now = [0.0]
    with progress(60, "Compressing", terminal=False, clock=lambda: now[0]) as advance:
        for step in range(60):
            advance(0, note=f"layers.{step}")
            now[0] += 0.5
            advance()
    assert lines == [
        "Compressing: 20/60 (layers.19), 0:10 elapsed, 0:20 left",
        "Compressing: 40/60 (layers.39), 0:20 elapsed, 0:10 left",
        "Compressing: 60/60 (layers.59), 0:30 elapsed, 0:00 left",
    ]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    monkeypatch.setattr(page, "Console", lambda **_: console)
    return text


def test_on_a_terminal_there_is_a_bar_with_the_module(screen: io.StringIO) -> None:
    with progress(2, "Compressing") as advance:
        advance(1, note="layers.0.mlp")
    for part in ("Compressing", "1/2", "layers.0.mlp", "left"):
        assert part in screen.getvalue()


def test_a_job_within_a_job_is_told_on_its_line(screen: io.StringIO) -> None:
    with progress(2, "Outer") as outer:
        with progress(5, "Inner") as inner:
            outer(1)
            inner(3, note="q_proj")
            shown = page._shown.get()
            assert shown is not None
            shown[0].refresh()
        assert len(shown[0].tasks) == 1
    last = [line for line in screen.getvalue().splitlines() if "Outer" in line][-1]
    for part in ("Outer", "1/2", "Inner 3/5 q_proj", "left"):
        assert part in last
    assert page._shown.get() is None


def test_a_long_job_tells_of_itself_less_often(lines: list[str]) -> None:
    now = [0.0]
    with progress(10_000, "Compressing", terminal=False, clock=lambda: now[0]) as advance:
        for _ in range(10_000):
            now[0] += 10.0
            advance()
    assert 100 < len(lines) < 200


def test_an_error_takes_the_display_down(screen: io.StringIO) -> None:
    with pytest.raises(ValueError, match="no"), progress(2, "First"):
        raise ValueError("no")
    with progress(2, "Next") as advance:
        advance(2)
    assert "Next" in screen.getvalue()


@pytest.mark.parametrize("kind", [tqdm, auto_tqdm])
def test_other_bars_are_hidden_and_come_back(
    kind: type[tqdm], capfd: pytest.CaptureFixture[str]
) -> None:
    before = vars(tqdm)["__init__"]
    with hide_tqdm_bars():
        assert list(kind(range(3), desc="theirs")) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    assert vars(tqdm)["__init__"] is before
    list(kind(range(3), desc="theirs"))
    assert "theirs" in capfd.readouterr().err


def test_downloads_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with hide_tqdm_bars():
        list(hub_tqdm(range(3), desc="model.safetensors"))
    assert "model.safetensors" in capfd.readouterr().err
