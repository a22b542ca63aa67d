# SPDX-License-Identifier: Apache-2.0
"""Runs of ``evaluate`` and ``model_free_ptq`` that ranks share; all of them call each function."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from compressed_tensors.entrypoints.convert import Converter
from tests.support.rank_group import die
from torch import Tensor, nn

from llmcompressor import evaluate, model_free_ptq
from llmcompressor.checkpoint import shared_output
from llmcompressor.checkpoint.tensor_files import TensorWriter
from llmcompressor.entrypoints import arguments
from llmcompressor.entrypoints import evaluate as evaluation
from llmcompressor.errors import OutputError
from llmcompressor.runtime import durable
from llmcompressor.runtime.processes import rank_and_world_size

DATA = [[1 + (7 * row + 5 * place * row) % 100 for place in range(32)] for row in range(7)]
"""Windows of 16 tokens: 14 of them."""


def measured(model: str, **given: Any) -> tuple[dict[str, float], list[int]]:
    """The figures of an evaluation, and the windows in each of this rank's forwards."""
    sizes: list[int] = []
    original = evaluation.measure

    def counted(one: nn.Module, *args: Any, **how: Any) -> Any:
        handle = one.register_forward_pre_hook(
            lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        try:
            return original(one, *args, **how)
        finally:
            handle.remove()

    given = {"dataset": DATA, "max_seq_length": 16, "batch_size": 1, **given}
    with patch.object(evaluation, "measure", counted):
        report = evaluate(model, **given)
    figures = {name: one for name, one in report.as_dict().items() if isinstance(one, int | float)}
    for place, one in enumerate(report.worst):
        figures |= {f"window {place}": one.window, f"value {place}": one.value}
    return figures, sizes[2:]  # the first two are a trial


def spread(model: str) -> list[int]:
    """The forwards of this rank for a model that takes all ranks to run."""
    with patch.object(evaluation, "is_sharded", lambda one: True):
        return measured(model)[1]


def unlike(model: str, other: str) -> list[str]:
    """Evaluations in which the ranks do not agree, or cannot share."""
    rank = rank_and_world_size()[0]
    return [
        error_of(evaluate, (model, other)[rank], dataset=DATA),
        error_of(evaluate, model, reference=(None, other)[rank], dataset=DATA),
        error_of(evaluate, model, dataset=DATA[rank:]),
        error_of(evaluate, (model, f"{other}-gone")[rank], dataset=DATA),
        error_of(evaluate, model, dataset=DATA[1:2], max_seq_length=32),
    ]


def alone(model: str) -> str:
    """The error of an evaluation that only the first rank makes."""
    if rank_and_world_size()[0]:
        return ""
    with patch.object(evaluation, "together", partial(arguments.together, timeout=0.3)):
        return error_of(evaluate, model, dataset=DATA)


def quantized(
    model: str, folder: str, where: str = "", *, rank: int = 1, after: int = 0, **given: Any
) -> int | str:
    """The bytes that this rank writes of a checkpoint, or its error.

    ``where`` says what goes wrong on a rank: it is ``killed``, or ``full`` is its disk, when it
    records its block with the number ``after``; or it sees another folder (``elsewhere``).
    """
    if where == "scheme":
        given["scheme"] = ("W4A16", "W8A16")[rank_and_world_size()[0]]
    if where == "converter" and rank_and_world_size()[0] == 0:
        given["converter"] = Doubling()
    counts: list[int] = []
    original = TensorWriter.write

    def counted(writer: TensorWriter, tensors: Any, **how: Any) -> Any:
        counts.append(sum(one.nbytes for one in tensors.values()))
        return original(writer, tensors, **how)

    fault = _fault(where, after) if rank_and_world_size()[0] == rank else nullcontext()
    arguments = {"scheme": "W4A16", "ignore": ["lm_head"], **given}
    with patch.object(TensorWriter, "write", counted), fault:
        error = error_of(model_free_ptq, model, folder, **arguments)
    return sum(counts) if error == "none" else error


def quantized_of(model: str, other: str, folder: str) -> int | str:
    """The same, of another model on the last rank."""
    rank, count = rank_and_world_size()
    return quantized(other if rank == count - 1 else model, folder)


class Doubling(Converter):
    """A converter that doubles all weights."""

    def process(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: 2 * one for name, one in tensors.items()}

    def get_dependencies(self, weight_name: str) -> set[str]:
        return set()

    def update_config(self, config: Any) -> Any:
        return config


def _fault(where: str, after: int) -> AbstractContextManager[Any]:
    numbers, append = itertools.count(), durable.append

    def appended(file: Path, content: bytes) -> None:
        if next(numbers) < after:
            append(file, content)
        elif where == "killed":
            die()
        else:
            raise OutputError("The disk is full.")

    if where in ("killed", "full"):
        return patch.object(durable, "append", appended)
    if where == "elsewhere":
        return patch.object(shared_output, "Path", lambda path: Path(f"{path}.away"))
    return nullcontext()


def error_of(function: Any, *args: Any, **given: Any) -> str:
    """The kind and the text of an error, or ``none``."""
    try:
        function(*args, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
