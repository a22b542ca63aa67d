# SPDX-License-Identifier: Apache-2.0
"""Compression of large language models into checkpoints that can be served.

All public names are available here and imported on first access, so that ``import llmcompressor``
is instant and changes nothing: no torch, no environment variable, no logging setup::

    from llmcompressor import oneshot

    oneshot(model="path/or/name", recipe=recipe, dataset=texts, output_dir="smaller")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmcompressor import _compat
from llmcompressor.runtime.registry import resolve

if TYPE_CHECKING:
    from llmcompressor import logger
    from llmcompressor.entrypoints.evaluate import evaluate
    from llmcompressor.entrypoints.model_free import model_free_ptq
    from llmcompressor.entrypoints.oneshot import Oneshot, oneshot
    from llmcompressor.entrypoints.plan import plan
    from llmcompressor.entrypoints.reports import compare, report
    from llmcompressor.entrypoints.reproduce import reproduce
    from llmcompressor.entrypoints.stages import run_stages
    from llmcompressor.entrypoints.train import train
    from llmcompressor.entrypoints.verify import verify
    from llmcompressor.logger import LoggerConfig, configure_logger
    from llmcompressor.session.functions import (
        active_session,
        callbacks,
        create_session,
        finalize,
        initialize,
        reset_session,
    )

__all__ = [
    "LoggerConfig",
    "Oneshot",
    "__version__",
    "active_session",
    "callbacks",
    "compare",
    "configure_logger",
    "create_session",
    "evaluate",
    "finalize",
    "initialize",
    "logger",
    "model_free_ptq",
    "oneshot",
    "plan",
    "report",
    "reproduce",
    "reset_session",
    "run_stages",
    "train",
    "verify",
    "version",
]

__version__ = "0.1.0"

# Bound after the module of that name, which would otherwise replace the text when it is imported.
from llmcompressor.version import version

_compat.install()

_HOMES = {
    "LoggerConfig": "llmcompressor.logger",
    "Oneshot": "llmcompressor.entrypoints.oneshot",
    "active_session": "llmcompressor.session.functions",
    "callbacks": "llmcompressor.session.functions",
    "compare": "llmcompressor.entrypoints.reports",
    "configure_logger": "llmcompressor.logger",
    "create_session": "llmcompressor.session.functions",
    "evaluate": "llmcompressor.entrypoints.evaluate",
    "finalize": "llmcompressor.session.functions",
    "initialize": "llmcompressor.session.functions",
    "model_free_ptq": "llmcompressor.entrypoints.model_free",
    "oneshot": "llmcompressor.entrypoints.oneshot",
    "plan": "llmcompressor.entrypoints.plan",
    "report": "llmcompressor.entrypoints.reports",
    "reproduce": "llmcompressor.entrypoints.reproduce",
    "reset_session": "llmcompressor.session.functions",
    "run_stages": "llmcompressor.entrypoints.stages",
    "train": "llmcompressor.entrypoints.train",
    "verify": "llmcompressor.entrypoints.verify",
}


def __getattr__(name: str) -> Any:
    if name == "logger":  # the module, which forwards to the logger in it
        return importlib.import_module("llmcompressor.logger")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = resolve(f"{_HOMES[name]}:{name}")
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
