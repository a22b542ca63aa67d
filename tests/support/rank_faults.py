# SPDX-License-Identifier: Apache-2.0
"""Calls that ranks make with bad input, or where one of them fails; each runs on all of them."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from tests.support.rank_runs import LINEARS
from tests.support.shared_runs import error_of
from tests.support.small_models import llama, token_rows

from llmcompressor import oneshot, run_stages, train
from llmcompressor.checkpoint import shared_output, tensor_files
from llmcompressor.entrypoints import arguments, fingerprints
from llmcompressor.logger import logger
from llmcompressor.pipelines import sequential
from llmcompressor.runtime.processes import rank_and_world_size

GPTQ = {"GPTQModifier": {**LINEARS, "scheme": "W4A16"}}
FP8 = {"QuantizationModifier": {**LINEARS, "scheme": "FP8_DYNAMIC"}}


def is_last() -> bool:
    """True on the rank that is unlike the others."""
    rank, count = rank_and_world_size()
    return rank == count - 1


def refused(how: str, model: str, other: str, output: Path, batch_size: int = 1) -> str:
    """The error of a run in which the last rank is unlike the first, or all lack samples."""
    is_unlike = is_last()
    rows = token_rows(8, 16).to_dict()["input_ids"]
    scheme = "W4A16"
    fault: AbstractContextManager[Any] = nullcontext()
    if how == "few samples":
        rows = rows[:1]
    elif is_unlike and how == "other token":
        rows[3][5] = 3 if rows[3][5] != 3 else 4
    elif is_unlike and how == "other order":
        rows.reverse()
    elif is_unlike and how == "other recipe":
        scheme = "W8A16"
    elif is_unlike and how == "other version":
        fault = _other_version()
    elif how == "other output":
        fault = _other_output(is_unlike=is_unlike)
    elif how == "copied output":
        fault = _other_output(is_unlike=is_unlike, copied=True)
    with fault:
        return error_of(
            oneshot,
            model=other if is_unlike and how.endswith("model") else model,
            recipe={"modifiers": {"GPTQModifier": {**LINEARS, "scheme": scheme}}},
            dataset=Dataset.from_dict({"input_ids": rows}),
            output_dir=str(output),
            batch_size=batch_size,
            verify=False,
            report=False,
        )


def _other_version() -> AbstractContextManager[Any]:
    return patch.object(fingerprints, "_version", lambda name: f"0.0 of {name}")


def _other_output(*, is_unlike: bool, copied: bool = False) -> AbstractContextManager[Any]:
    """One rank sees a folder with the same name on another machine, which may be an older copy."""
    if is_unlike:
        there = lambda path: Path(str(path).replace(".partial", ".away"))  # noqa: E731
        return patch.object(shared_output, "Path", there)
    original = shared_output.SharedOutput.opened

    def opened(self: Any, files: Path, folder: Path, told: Any) -> None:
        if copied:
            shutil.copytree(folder, str(folder).replace(".partial", ".away"))
        original(self, files, folder, told)

    return patch.object(shared_output.SharedOutput, "opened", opened)


def refused_without_data(model: str, other: str, output: Path) -> str:
    """The error of a run without data in which the last rank has another model."""
    given = other if is_last() else model
    return error_of(oneshot, given, {"modifiers": FP8}, output_dir=output, report=False)


def refused_argument(name: str, values: tuple[Any, Any], model: str, output: Path) -> str:
    """The error of a run in which the second rank has another value of an argument."""
    given = {name: values[rank_and_world_size()[0]]}
    return error_of(oneshot, model, {"modifiers": FP8}, output_dir=output, **given)


def refused_in_memory(how: str, recipe: dict[str, Any], output: Path | None) -> str:
    """The error of a run of a model object, in which that of the last rank is unlike the others."""
    model, given = llama(), dict[str, Any]()
    fault: AbstractContextManager[Any] = nullcontext()
    if is_last() and how == "weight":
        with torch.no_grad():  # the smallest change that there is, of one number in the last block
            raw = model.model.layers[-1].mlp.up_proj.weight.view(torch.int16)
            raw[77, 33] ^= 1
    elif is_last() and how == "config":
        model.config.rms_norm_eps = 0.5
    elif is_last() and how == "version":
        fault = _other_version()
    elif is_last() and how == "propagate_error":
        given = {how: False}
    with fault:
        return error_of(
            oneshot,
            model,
            {"modifiers": recipe},
            token_rows(8, 16) if "GPTQModifier" in recipe else None,
            output_dir=output,
            verify=False,
            report=False,
            **given,
        )


def stages_refused(model: str, folder: Path) -> list[str]:
    """Errors of calls of ``run_stages`` in which the last rank gives other arguments."""
    rows = token_rows(8, 16)

    def staged(scheme: str = "W4A16", root: Path = folder, **given: Any) -> str:
        quantized = {"GPTQModifier": {**LINEARS, "scheme": scheme}}
        recipe = {
            "sparse_stage": {
                "run_type": "oneshot",
                "sparse_modifiers": {"SmoothQuantModifier": {}},
            },
            "quant_stage": {"run_type": "oneshot", "quant_modifiers": quantized},
        }
        return error_of(run_stages, model, recipe, rows, root, **given)

    return [
        staged(scheme="W8A16" if is_last() else "W4A16"),
        staged(root=folder.with_name("elsewhere") if is_last() else folder),
        staged(propagate_error=not is_last()),
    ]


def trained(folder: Path, environment: dict[str, str]) -> list[str]:
    """Errors of calls of ``train`` in which the second rank gives other arguments."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    is_second = environment["RANK"] == "1"

    def training(**given: Any) -> str:
        settings = {"max_steps": 1, "learning_rate": 1e-3, "output_dir": folder, **given}
        return error_of(
            train,
            llama(),
            {"modifiers": {"ConstantPruningModifier": {"targets": ["Linear"], "start": 0}}},
            token_rows(8, 16),
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
            **settings,
        )

    return [
        training(learning_rate=1e-2 if is_second else 1e-3),
        training(output_dir=folder.with_name("elsewhere") if is_second else folder),
    ]


def failing(where: str, model: str, output: Path, rank: int) -> str:
    """The error of a run in which a rank cannot write: its disk is full, or it may not open."""
    is_failing = rank_and_world_size()[0] == rank
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    writes = iter(range(100))
    original = tensor_files._write_all

    def write(*args: Any) -> None:
        if next(writes) >= 20:  # what it has written of the first block stays
            raise full
        original(*args)

    with ExitStack() as faults:
        if is_failing and where == "full":
            faults.enter_context(patch.object(tensor_files, "_write_all", write))
        elif is_failing and where == "closed":
            denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            opened = patch.object(tensor_files.TensorWriter, "_create", side_effect=denied)
            faults.enter_context(opened)
        return error_of(
            oneshot,
            model,
            {"modifiers": GPTQ},
            token_rows(8, 16),
            output_dir=output,
            verify=False,
            report=False,
        )


def warned(model: str, output: Path) -> list[str]:
    """The warnings that this rank logs, where the others have one that the first has not."""
    told: list[str] = []
    handler = logger.add(lambda line: told.append(line.record["message"]), level="WARNING")
    original, rank = tensor_files.TensorReader.file_stamps, rank_and_world_size()[0]
    said = "logger.warning('All have it.'); logger.info('Nothing.')"
    said += "; logger.warning('Slow {disk}.')" if rank else ""

    def stamped(*args: Any) -> Any:
        exec(said, {"logger": logger, "__name__": "llmcompressor.checkpoint.a_module"})
        return original(*args)

    try:
        with patch.object(tensor_files.TensorReader, "file_stamps", stamped):
            error = error_of(oneshot, model, {"modifiers": FP8}, output_dir=output, report=False)
    finally:
        logger.remove(handler)
    assert error == "none", error
    return [one for one in told if "All" in one or "Slow" in one]


def budgets(model: str, output: Path) -> list[Any]:
    """The bytes that a rank keeps of activations, where a GiB is free for one that is alone."""
    found: list[Any] = []
    original = sequential.activation_budget

    def watched(given: Any) -> int:
        found.append(given)
        return original(given)

    with (
        patch.object(arguments, "activation_budget", lambda _: 2**30),
        patch.object(sequential, "activation_budget", watched),
    ):
        oneshot(model, {"modifiers": GPTQ}, token_rows(8, 16), output_dir=output, report=False)
    return found
