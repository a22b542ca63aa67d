# SPDX-License-Identifier: Apache-2.0
"""A run that goes on another day renders its data as on the day on which it began."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.killed_runs import tree

from llmcompressor import oneshot
from llmcompressor.checkpoint.journal import Journal
from llmcompressor.modifiers.quantization import GPTQModifier

TEMPLATE = (
    "{{ strftime_now('%d %B %Y %H:%M') }}{% for turn in messages %}{{ turn.content }}{% endfor %}"
)
DAYS = [str(1_700_000_000 + number * 86_400) for number in range(2)]


@pytest.fixture
def dated(short_pico: Path, tmp_path: Path) -> Path:
    """A model whose chat template names the moment."""
    folder = shutil.copytree(short_pico, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def call(model: Path, output: Path) -> dict[str, str]:
    turns = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well."}]
    oneshot(
        model=str(model),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        dataset=[{"messages": turns}] * 2,
        max_seq_length=48,
        output_dir=str(output),
        verify=False,
    )
    return tree(output)


def test_killed_on_one_day_and_continued_on_the_next(
    dated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", DAYS[0])
    whole = call(dated, tmp_path / "whole")
    add = Journal.add

    def killed(self: Journal, entry: Any) -> None:
        add(self, entry)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", killed)
        with pytest.raises(KeyboardInterrupt):
            call(dated, tmp_path / "output")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", DAYS[1])
    assert call(dated, tmp_path / "output") == whole
    assert call(dated, tmp_path / "another") != whole
