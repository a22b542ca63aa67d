# SPDX-License-Identifier: Apache-2.0
"""Scores of known benchmarks, measured by lm-eval where it is installed.

lm-eval is imported when tasks are asked for: it and the index of its tasks take ten seconds.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn import Module
from transformers import PreTrainedTokenizerBase

from llmcompressor.args.checks import invalid_value, strings
from llmcompressor.datasets.tokenize import tokenizer_of
from llmcompressor.errors import ArgumentError, DatasetError, did_you_mean
from llmcompressor.evaluation.metrics import TaskScore
from llmcompressor.evaluation.models import check_causal
from llmcompressor.logger import is_quiet, others_in_log
from llmcompressor.modeling.patches import eval_mode
from llmcompressor.runtime.launch import launch_of
from llmcompressor.runtime.processes import rank_and_world_size
from llmcompressor.runtime.progress import hide_tqdm_bars

_INSTALL = "pip install 'llmcompressor[eval]'"
_SAMPLE = "A model that goes on with a text sees what stands before."
_NOT_HERE = {"UNSAFE_CODE": "runs what a model writes", "MULTIMODAL": "shows pictures"}
"""Marks of lm-eval's tasks."""
_LONGEST = 400
"""Characters of another library's message."""


@dataclass(frozen=True)
class Tasks:
    """Tasks of lm-eval that are loaded, with their data.

    Attributes:
        manager: lm-eval's index of tasks.
        loaded: its tasks and groups of tasks.
    """

    manager: Any
    loaded: Sequence[Any]


def load_tasks(given: str | Sequence[str], include_path: str | Path | None = None) -> Tasks:
    """Load tasks of lm-eval, before any model.

    Args:
        given: their names, those of groups or tags, patterns such as ``mmlu_*`` or YAML files; a
            string may hold several with commas.
        include_path: a folder with YAML files of further tasks. Python code that they name runs.

    Raises:
        ArgumentError: lm-eval is not installed, there is no such task or folder, or a task is one
            that cannot be measured here.
        DatasetError: the data of a task cannot be loaded.
    """
    names = [name.strip() for part in strings("tasks", given) for name in part.split(",")]
    if not names or not all(names):
        raise invalid_value("tasks", given, "names of lm-eval's tasks")
    if find_spec("lm_eval") is None:
        raise ArgumentError("lm-eval, which measures tasks, is not installed.", f"{_INSTALL}.")
    launch, (_, count) = launch_of(os.environ), rank_and_world_size()
    count = count if launch is None else launch.count
    if count > 1:
        raise ArgumentError(
            f"Tasks are measured in one process, and this is one of {count}.",
            "Start it without torchrun or srun.",
        )
    if include_path is not None and not Path(include_path).expanduser().is_dir():
        raise ArgumentError(f"There is no folder {include_path} of tasks.", "Check include_path.")
    with others_in_log():
        folder = None if include_path is None else str(Path(include_path).expanduser())
        manager = import_module("lm_eval.tasks").TaskManager(include_path=folder)
        known = [one for name in names for one in _matching(name, manager, include_path)]
        return Tasks(manager, [task for name in known for task in _load(name, manager)])


def _matching(name: str, manager: Any, include_path: str | Path | None) -> list[str]:
    """Return the tasks that a name or pattern means; a file of YAML means itself."""
    if Path(name).suffix in (".yaml", ".yml") and Path(name).expanduser().is_file():
        return [str(Path(name).expanduser())]
    found: list[str] = manager.match_tasks([name])
    if found:
        return found
    nearest = did_you_mean(name, manager.all_tasks)
    if not nearest.startswith("Did"):  # there are ten thousand
        nearest = "`lm_eval ls tasks` lists them all."
    if include_path is not None:
        nearest += f" Of {include_path}, YAML files that lm-eval cannot read are passed over."
    raise ArgumentError(f"lm-eval has no task {name!r}.", nearest)


def _load(name: str, manager: Any) -> list[Any]:
    """Load the data of a task, of a group of tasks or of all tasks with a tag."""
    try:
        found = manager.load([name])
    except Exception as error:  # of any kind: tasks bring code of their own
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST].rstrip(".")
        raise DatasetError(
            f"lm-eval cannot load the task {name}: {reason}.",
            "Its data may need the network or a further package; include_path takes tasks whose "
            "data are local files.",
        ) from error
    for one, task in found["tasks"].items():
        for mark, why in _NOT_HERE.items():
            if getattr(task, mark, False):
                raise ArgumentError(
                    f"The task {one} {why}, which `evaluate` does not.",
                    "Measure it by the command `lm_eval`, which reads the same folder.",
                )
    return list(found["groups"].values())[:1] or list(found["tasks"].values())


def measure_tasks(
    model: Module,
    tokenizer: Any,
    tasks: Tasks,
    *,
    reference: Module | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
) -> tuple[TaskScore, ...]:
    """Measure a model on tasks, and its original; neither is moved or changed.

    Random numbers are seeded as lm-eval seeds them, so that scores compare with published ones;
    afterwards those of the CPU go on where they were.

    Args:
        model: a causal language model.
        tokenizer: the tokenizer of both, or a processor that has one.
        tasks: what to measure.
        reference: the original.
        limit: samples of each task, the first ones; all if ``None``.
        num_fewshot: examples before each question; by default those that a task asks for.
        batch_size: requests per forward.

    Returns:
        A score for each metric of each task and group, in lm-eval's order.

    Raises:
        ArgumentError: the tokenizer is none of transformers'.
        CheckpointError: a model is not causal.
    """
    own = copy.deepcopy(tokenizer_of(tokenizer))  # lm-eval gives it a padding token
    if not isinstance(own, PreTrainedTokenizerBase):
        raise ArgumentError(
            f"lm-eval takes tokenizers of transformers, and this one is a {type(own).__name__}.",
            "Pass `tokenizer`.",
        )
    found = []
    for one in (model, *([] if reference is None else [reference])):
        with eval_mode(one), torch.no_grad(), _apart():
            check_causal(one, own(_SAMPLE)["input_ids"])
            adapter = import_module("lm_eval.models.huggingface").HFLM(
                pretrained=one, tokenizer=own, backend="causal", batch_size=batch_size
            )
            results = import_module("lm_eval").simple_evaluate(
                adapter,
                tasks=list(tasks.loaded),
                task_manager=tasks.manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=False,
            )
        found.append({(score.task, score.metric): score for score in _scores(results)})
    beside = found[1] if found[1:] else {}
    return tuple(_beside(score, beside.get(name)) for name, score in found[0].items())


def _beside(score: TaskScore, of_reference: TaskScore | None) -> TaskScore:
    if of_reference is None:
        return score
    return replace(score, reference=of_reference.value, reference_stderr=of_reference.stderr)


def _scores(found: Mapping[str, Any]) -> Iterator[TaskScore]:
    """Read the figures of lm-eval's results, whose keys are ``metric,filter``."""
    for task, figures in found["results"].items():
        better = found.get("higher_is_better", {}).get(task) or {}
        samples = found.get("n-samples", {}).get(task) or {}
        for key, value in figures.items():
            metric, comma, selected = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            stderr = figures.get(f"{metric}_stderr,{selected}")
            yield TaskScore(
                task=task,
                metric=metric if selected == "none" else f"{metric} ({selected})",
                value=float(value),
                stderr=float(stderr) if _is_number(stderr) else None,
                higher_is_better=better.get(metric),
                samples=samples.get("effective", figures.get("sample_len")),
                num_fewshot=found.get("n-shot", {}).get(task),
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


@contextmanager
def _apart() -> Iterator[None]:
    """Show of what lm-eval says only its bars, on a terminal, and undo what it sets.

    It seeds Python, numpy and torch. It asks git for the commit of the working folder, and git
    complains where that has none.
    """
    evaluator = import_module("lm_eval.evaluator")
    ask_git = evaluator.get_git_commit_hash
    of_python, of_numpy = random.getstate(), np.random.get_state()
    has_bars = Console(stderr=True).is_terminal and not is_quiet()
    evaluator.get_git_commit_hash = lambda: None  # type: ignore[attr-defined]
    try:
        with ExitStack() as stack:
            stack.enter_context(others_in_log())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if not has_bars:
                stack.enter_context(hide_tqdm_bars())
            yield
    finally:
        evaluator.get_git_commit_hash = ask_git  # type: ignore[attr-defined]
        random.setstate(of_python)
        np.random.set_state(of_numpy)
