# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
from loguru import logger

from llmcompressor.logger import others_in_log


@pytest.fixture
def logged() -> Iterator[list[str]]:
    found: list[str] = []
    sink = logger.add(
        lambda text: found.append(str(text)), level="INFO", format="{level} {message}"
    )
    yield found
    logger.remove(sink)


@pytest.fixture
def bare_root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    return root


@pytest.mark.parametrize("library", ["transformers.modeling_utils", "a_package.of_someone"])
def test_lines_of_others_go_to_the_log(
    library: str,
    bare_root: logging.Logger,
    logged: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    import transformers  # noqa: F401  # it adds a handler of its own

    handlers = list(logging.getLogger("transformers").handlers)
    assert handlers
    with others_in_log(), others_in_log():
        logging.getLogger(library).warning("%s is deprecated", "that")
    name = library.partition(".")[0]
    assert logged == [f"INFO {name}: that is deprecated\n"]
    assert capfd.readouterr().err == ""
    assert logging.getLogger("transformers").handlers == handlers
    assert not bare_root.handlers


def test_a_process_with_a_log_of_its_own_keeps_it(
    bare_root: logging.Logger, logged: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bare_root.addHandler(logging.StreamHandler(sys.stderr))
    with others_in_log():
        logging.getLogger("a_package").warning("hello")
    assert capsys.readouterr().err == "hello\n"
    assert not logged


def test_who_asks_for_more_of_a_library_gets_it(
    bare_root: logging.Logger,
    logged: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = logging.getLogger("transformers")
    monkeypatch.setattr(one, "handlers", [logging.StreamHandler(sys.stderr)])
    before = one.level
    one.setLevel(logging.INFO)
    with others_in_log():
        one.info("wanted")
    one.setLevel(before)
    assert capsys.readouterr().err == "wanted\n"
