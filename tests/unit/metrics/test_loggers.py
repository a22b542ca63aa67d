# SPDX-License-Identifier: Apache-2.0
"""Every logger gets what is logged, when it is time to."""

from __future__ import annotations

import logging
import sys
import types

import pytest
from loguru import logger as package_log

from llmcompressor.errors import ArgumentError, InputError
from llmcompressor.metrics import (
    BaseLogger,
    Entry,
    LambdaLogger,
    LoggerManager,
    PythonLogger,
    SparsificationGroupLogger,
    TensorBoardLogger,
    WANDBLogger,
)


class Sink(BaseLogger):
    def __init__(self, enabled=True):
        super().__init__("sink", enabled)
        self.entries: list[Entry] = []
        self.files = []

    def write(self, entry):
        self.entries.append(entry)
        return True

    def save(self, file_path, **kwargs):
        self.files.append(file_path)
        return True


class Writer:
    """Stands in for TensorBoard's."""

    def __init__(self, log_dir=None):
        self.log_dir, self.calls = log_dir, []

    def add_scalar(self, tag, value, global_step, walltime):
        self.calls.append(("scalar", tag, value, global_step, walltime))

    def add_text(self, tag, text, global_step, walltime):
        self.calls.append(("text", tag, text, global_step, walltime))

    def flush(self):
        pass


def use_all(logger):
    return [
        logger.log_hyperparams({"lr": 0.1, "name": "x"}),
        logger.log_scalar("loss", 1.5, step=3, wall_time=9.0),
        logger.log_scalars("losses", {"a": 1.0}, step=4, wall_time=9.0),
        logger.log_string("note", "hello", step=5, wall_time=9.0),
    ]


def test_a_disabled_logger_writes_nothing():
    sink = Sink(enabled=False)
    assert use_all(sink) == [False] * 4
    assert sink.entries == []


def test_lambda_gets_every_argument(monkeypatch):
    seen = []
    monkeypatch.setattr("time.time", lambda: 7.0)
    logger = LambdaLogger(lambda *entry: seen.append(entry) or entry[0] != "note")
    assert use_all(logger) == [True, True, True, False]
    assert seen == [
        ("hyperparams", None, {"lr": 0.1, "name": "x"}, None, 7.0, None),
        ("loss", 1.5, None, 3, 9.0, None),
        ("losses", None, {"a": 1.0}, 4, 9.0, None),
        ("note", "hello", None, 5, 9.0, None),
    ]


def records_of(name):
    """A logger of ``logging`` that no other test has, and the list that its records go to."""
    records, logger = [], logging.getLogger(name)
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger, records


def test_python_logger_to_logging():
    mine, records = records_of("mine")
    logger = PythonLogger(mine, log_level=logging.INFO)
    logger.log_scalar("loss", 1.5, step=3)
    logger.log_string("note", "50 %s {}", level=logging.ERROR)
    assert [(each.levelno, each.getMessage()) for each in records] == [
        (logging.INFO, "python loss step 3: 1.5"),
        (logging.ERROR, "python note: 50 %s {}"),
    ]


def test_python_logger_to_the_packages_log():
    lines = []
    sink = package_log.add(lines.append, level="DEBUG", format="{level}|{message}")
    try:
        PythonLogger().log_scalars("losses", {"a": 1.0}, step=2)
        PythonLogger().log_string("note", "{braces}", level=logging.WARNING)
    finally:
        package_log.remove(sink)
    assert [str(line).strip() for line in lines] == [
        "DEBUG|python losses step 2: {'a': 1.0}",
        "WARNING|python note: {braces}",
    ]


def test_tensorboard_gets_scalars_and_texts():
    writer = Writer()
    assert all(use_all(TensorBoardLogger(writer=writer)))
    assert [call[:4] for call in writer.calls] == [
        ("text", "hyperparams", "{'lr': 0.1, 'name': 'x'}", None),
        ("scalar", "loss", 1.5, 3),
        ("scalar", "losses/a", 1.0, 4),
        ("text", "note", "hello", 5),
    ]
    with pytest.raises(InputError, match="both"):
        TensorBoardLogger(log_path="here", writer=writer)


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package, so that nothing leaves the machine."""
    fake = types.ModuleType("wandb")
    fake.run, fake.begun, fake.logged, fake.saved, fake.config = None, [], [], [], {}

    def init(**kwargs):
        fake.run = object()
        fake.begun.append(kwargs)

    fake.init = init
    fake.log = lambda data, step=None: fake.logged.append((data, step))
    fake.save = fake.saved.append
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb(wandb):
    logger = WANDBLogger({"project": "p"})
    assert all(use_all(logger))
    assert logger.save("file")
    assert wandb.begun == [{"project": "p"}]
    assert wandb.config == {"lr": 0.1, "name": "x"}
    assert wandb.logged == [({"loss": 1.5}, 3), ({"losses/a": 1.0}, 4), ({"note": "hello"}, 5)]
    assert wandb.saved == ["file"]


def test_wandb_joins_the_run_of_a_trainer(wandb):
    """Whose calls count as steps: an entry with a lower step of its own would be dropped."""
    wandb.init(project="the trainer's")
    logger = WANDBLogger()
    assert all(use_all(logger))
    assert wandb.begun == [{"project": "the trainer's"}]
    assert wandb.logged == [
        ({"loss": 1.5, "train/global_step": 3}, None),
        ({"losses/a": 1.0, "train/global_step": 4}, None),
        ({"note": "hello", "train/global_step": 5}, None),
    ]


@pytest.mark.parametrize(
    ("module", "make"),
    [("wandb", WANDBLogger), ("torch.utils.tensorboard", TensorBoardLogger)],
)
def test_a_package_that_is_not_there_is_named(monkeypatch, module, make):
    def missing(name):
        assert name == module
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'llmcompressor\["):
        make()


def test_group_logs_everywhere(wandb):
    own, records = records_of("group")
    seen, writer = [], Writer()
    group = SparsificationGroupLogger(
        lambda_func=lambda *entry: seen.append(entry[0]),
        python=own,
        tensorboard=writer,
        wandb_={"project": "p"},
    )
    assert all(use_all(group))
    assert seen == ["hyperparams", "loss", "losses", "note"]
    assert len(writer.calls) == len(records) == 4
    assert len(wandb.logged) == 3
    assert group.save("file")
    group.enabled = False
    assert not any(use_all(group))
    assert not SparsificationGroupLogger(python=False).loggers


def test_wrappers_reach_every_logger():
    first, second = Sink(), Sink(enabled=False)
    manager = LoggerManager([first], log_python=False)
    manager.add_logger(second)
    assert manager.loggers == list(manager) == [first, second]
    assert manager.metric.log_scalar("loss", 1.0, step=2)
    assert manager.metric.add_scalars("losses", {"a": 1.0})
    assert manager.metric.log_hyperparams({"lr": 1})
    assert manager.system.warning("note", "careful")
    assert [(each.tag, each.level) for each in first.entries] == [
        ("loss", None),
        ("losses", None),
        ("hyperparams", None),
        ("note", logging.WARNING),
    ]
    assert second.entries == []
    assert manager.save("file")
    assert first.files == ["file"]
    with pytest.raises(ArgumentError, match="not a logger"):
        manager.add_logger(print)


def logged_at(manager, positions):
    written = []
    for step, epoch in positions:
        if manager.log_ready(step, epoch):
            written.append(step)
            manager.log_written(step, epoch)
    return written


@pytest.mark.parametrize(
    ("frequency", "kind", "expected"),
    [
        (0.5, "epoch", [0, 5, 10, 15]),
        (0.1, "epoch", list(range(20))),
        (0.3, "epoch", [0, 3, 6, 9, 12, 15, 18]),
        (4, "step", [0, 4, 8, 12, 16]),
        (0, "step", list(range(20))),
        (None, "step", []),
    ],
)
def test_frequency(frequency, kind, expected):
    manager = LoggerManager([Sink()], log_frequency=frequency, frequency_type=kind)
    assert logged_at(manager, [(step, step / 10) for step in range(20)]) == expected


@pytest.mark.parametrize("frequency", ["a", -1, float("nan"), True])
def test_what_is_no_frequency_is_refused(frequency):
    with pytest.raises(ArgumentError, match="log_frequency is"):
        LoggerManager([], log_frequency=frequency)


@pytest.mark.parametrize(
    "wrong", [{"mode": "exakt"}, {"frequency_type": "steps"}, {"log_frequency": -1}]
)
def test_wrong_arguments(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        LoggerManager(**wrong)
