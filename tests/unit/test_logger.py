# SPDX-License-Identifier: Apache-2.0
"""The set-up of the log: what of a configuration and of the environment counts, and where."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import loguru
import pytest
import torch.distributed
from transformers.utils import logging as transformers_logging

import llmcompressor
import llmcompressor.logger
from llmcompressor.logger import (
    LoggerConfig,
    configure_distributed_logger,
    configure_logger,
    log_to_file,
    logger,
    others_in_log,
)

_VARIABLES = ("LEVEL", "FILE", "FILE_LEVEL", "DISABLED")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _VARIABLES:
        monkeypatch.delenv(f"LLM_COMPRESSOR_LOG_{name}", raising=False)
    monkeypatch.setattr("llmcompressor.logger._FILES", [])
    monkeypatch.setattr("llmcompressor.logger._RANKS", [])
    yield
    logger.remove()
    logger.add(sys.__stderr__)  # this test's own will be closed
    logger.enable("llmcompressor")


def messages(file: Path) -> list[str]:
    """What a file of JSON lines holds."""
    return [json.loads(line)["record"]["message"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize("keyword", ["logger_config", "config", None])
def test_the_configuration_is_taken_under_both_names(keyword: str | None, tmp_path: Path) -> None:
    given = LoggerConfig(console_log_level=None, log_file=tmp_path / "one.log")
    if keyword is None:
        configure_logger(given)
    else:
        configure_logger(**{keyword: given})
    logger.info("hello")
    assert messages(tmp_path / "one.log") == ["hello"]


def test_a_configuration_can_be_changed_after_it_was_made(tmp_path: Path) -> None:
    given = LoggerConfig(console_log_level=None)
    given.log_file = str(tmp_path / "later.log")
    given.log_file_level = "debug"
    configure_logger(given)
    logger.debug("hello")
    assert messages(tmp_path / "later.log") == ["hello"]


def test_a_file_begins_at_info_unless_a_level_is_named(tmp_path: Path) -> None:
    configure_logger(LoggerConfig(console_log_level=None, log_file=tmp_path / "one.log"))
    logger.debug("small")
    logger.info("large")
    assert messages(tmp_path / "one.log") == ["large"]


def test_a_level_without_a_file_is_for_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configure_logger(LoggerConfig(console_log_level=None, log_file_level="WARNING"))
    logger.info("small")
    logger.warning("large")
    assert messages(tmp_path / "llmcompressor.log") == ["large"]


def test_the_environment_names_the_level_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_COMPRESSOR_LOG_FILE_LEVEL", "warning")
    configure_logger(LoggerConfig(False, None, tmp_path / "one.log", "DEBUG"))
    with log_to_file(tmp_path / "run.log"):
        logger.info("small")
        logger.warning("large")
    assert messages(tmp_path / "one.log") == ["large"]
    text = (tmp_path / "run.log").read_text()
    assert "large" in text
    assert "small" not in text


def test_the_file_of_the_environment_holds_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_COMPRESSOR_LOG_FILE", str(tmp_path / "run.log"))
    configure_logger(LoggerConfig(console_log_level=None, log_file=tmp_path / "other.log"))
    logger.debug("hello")
    assert (tmp_path / "run.log").read_text().endswith(" hello\n")
    assert not (tmp_path / "other.log").exists()


@pytest.mark.parametrize(
    ("said", "field", "written"),
    [("true", False, False), ("1", False, False), ("false", True, True), ("", True, False)],
)
def test_the_environment_has_the_last_word_on_silence(
    said: str, field: bool, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_COMPRESSOR_LOG_DISABLED", said)
    configure_logger(LoggerConfig(disabled=field, log_file=tmp_path / "one.log"))
    assert (tmp_path / "one.log").exists() is written


@pytest.mark.parametrize("disabled", [False, True])
def test_metrics_can_be_left_out(disabled: bool, tmp_path: Path) -> None:
    configure_logger(LoggerConfig(False, None, tmp_path / "one.log", None, disabled))
    logger.log("METRIC", "a figure")
    logger.error("no figure")
    expected = ["no figure"] if disabled else ["a figure", "no figure"]
    assert messages(tmp_path / "one.log") == expected


def test_lines_name_the_rank_of_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    configure_distributed_logger(LoggerConfig())
    logger.info("hello")
    assert "[Rank 3] " in capsys.readouterr().err


def test_what_is_to_be_shown_once_is_shown_once_in_each_place(tmp_path: Path) -> None:
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    configure_logger(LoggerConfig(console_log_level=None, log_file=first))
    with log_to_file(second):
        for text in ("odd", "odd", "even"):
            logger.bind(log_once=True).warning(text)
            logger.warning(text)
    assert messages(first).count("odd") == 3  # once, and the two that bear no mark
    assert messages(first).count("even") == 2
    assert second.read_text().count("odd") == 3


def test_the_module_answers_for_its_logger() -> None:
    said: list[str] = []
    handle = llmcompressor.logger.add(lambda message: said.append(message.record["message"]))
    llmcompressor.logger.info("hello")
    llmcompressor.logger.remove(handle)
    assert said == ["hello"]
    assert llmcompressor.logger.logger is loguru.logger
    with pytest.raises(AttributeError, match="inof"):
        llmcompressor.logger.inof  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "from llmcompressor import logger, configure_logger; logger.info('hello')",
        "import llmcompressor; llmcompressor.logger.info('hello')",
        "from llmcompressor.logger import logger, configure_logger; logger.info('hello')",
        "import llmcompressor.version as _; from llmcompressor import version; print(version + '')",
        "from llmcompressor import version; from llmcompressor.version import version_tuple;"
        "import llmcompressor; print(version + '', llmcompressor.version + '')",
    ],
)
def test_the_front_page_has_the_logger_and_the_version(code: str) -> None:
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "hello" in said.stderr or llmcompressor.__version__ in said.stdout


_TOLD = """
import sys
import loguru
from llmcompressor.logger import LoggerConfig, configure_logger, log_progress, show_runs_quietly

{before}
show_runs_quietly()
show_runs_quietly()
told = compile("loguru.logger.info('hello'); loguru.logger.success('done')", "told", "exec")
loguru.logger.info("of a script")
exec(told, {{"loguru": loguru, "__name__": "llmcompressor.a_module"}})
exec(told, {{"loguru": loguru, "__name__": "compressed_tensors.a_module"}})
log_progress("1 of 2")
"""


@pytest.mark.parametrize(
    ("before", "level", "shown"),
    [
        ("", None, ["of a script", "done", "1 of 2"]),
        ("", "INFO", ["of a script", "INFO    hello", "done", "1 of 2"]),
        ("configure_logger()", None, ["of a script", *["INFO    hello", "done"] * 2, "1 of 2"]),
        ("configure_logger(LoggerConfig(console_log_level='WARNING'))", None, []),
        ("loguru.logger.remove()", None, []),
    ],
)
def test_runs_show_little_unless_the_process_has_set_up_its_log(
    before: str, level: str | None, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLM_COMPRESSOR_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("LLM_COMPRESSOR_LOG_LEVEL", level)
    code = _TOLD.format(before=before)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = said.stderr.splitlines()
    assert len(lines) == len(shown), said.stderr
    for line, end in zip(lines, shown, strict=True):
        assert line.endswith(end)


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
    transformers_logging.get_logger()  # with a handler of its own
    handlers = list(logging.getLogger("transformers").handlers)
    assert handlers
    with others_in_log(), others_in_log():
        logging.getLogger(library).warning("%s is deprecated", "that")
    name = library.partition(".")[0]
    assert logged == [f"INFO {name}: that is deprecated\n"]
    told = capfd.readouterr().err.splitlines()  # by the sink that the test's process has
    assert all(line.endswith(f"{name}: that is deprecated") for line in told)
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
