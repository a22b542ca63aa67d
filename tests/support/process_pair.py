# SPDX-License-Identifier: Apache-2.0
"""What two processes of a group are made to do; each function runs in both of them."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from datasets import Dataset
from tests.support import small_models as small

from llmcompressor import oneshot, verify
from llmcompressor.args import DatasetArguments, ModelArguments
from llmcompressor.checkpoint import block_stream
from llmcompressor.datasets import load_calibration
from llmcompressor.entrypoints.training_run import load_maybe_quantized
from llmcompressor.errors import OutputError
from llmcompressor.logger import logger
from llmcompressor.modifiers import Modifier
from llmcompressor.runtime import processes
from llmcompressor.runtime.processes import Processes, rank_and_world_size

SAMPLES = 8
GPTQ = {"GPTQModifier": {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}}
FP8 = {"QuantizationModifier": {"targets": "Linear", "scheme": "FP8", "ignore": ["lm_head"]}}


class Noise(Modifier):
    """Draws from the generator that the whole process shares."""

    requires_calibration_data: ClassVar[bool] = True

    def on_initialize(self, state, **kwargs):
        with torch.no_grad():
            state.model.lm_head.weight.add_(torch.rand(1).item())
        return True


def join(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def rows(*, parts: bool) -> Dataset:
    """Samples of different lengths: all of them, or those of this process."""
    draw = torch.Generator().manual_seed(3)
    ids = [
        torch.randint(3, small.VOCABULARY, (12 + n,), generator=draw).tolist()
        for n in range(SAMPLES)
    ]
    rank, count = rank_and_world_size()
    own = ids[SAMPLES * rank // count : SAMPLES * (rank + 1) // count] if parts else ids
    return Dataset.from_dict(
        {"input_ids": own, "attention_mask": [[1] * len(each) for each in own]}
    )


def compress(recipe: dict[str, Any], model: Any = None, *, parts: bool, **given: Any) -> Any:
    torch.manual_seed(rank_and_world_size()[0] + 5)
    return oneshot(
        model=small.one_block() if model is None else model,
        recipe={"modifiers": recipe},
        dataset=rows(parts=parts),
        num_calibration_samples=SAMPLES,
        shuffle_calibration_samples=False,
        propagate_error=False,  # else one code that differs changes all that come behind it
        **given,
    )


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.float().numpy().tobytes())
    return found.hexdigest()


def saved(folder: str, recipe: dict[str, Any], *, parts: bool, output: bool = False) -> Any:
    """Compress a model object; its weights, and what was logged."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    model = compress(recipe, parts=parts, **({"output_dir": folder} if output else {}))
    if not output:
        model.save_pretrained(folder)
    logger.remove(sink)
    return digest(model), "".join(lines)


def streamed(folder: str, source: str, **given: Any) -> Any:
    """From folder to folder; the weights of the model that is returned."""
    model = compress(GPTQ, source, parts=True, output_dir=folder, **given)
    model.save_pretrained(f"{folder}-again")
    return digest(model)


def unlike(folder: str, source: str) -> Any:
    """From folder to folder, in processes that compute with other numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 + rank_and_world_size()[0])
    try:
        return digest(compress(FP8, source, parts=True, output_dir=folder))
    finally:
        torch.set_num_threads(before)


def left_to_one(folder: str) -> bool:
    """A save that one process makes, then one that all make: it is there when they go on."""
    model = compress(FP8, parts=True)
    model.save_pretrained(folder, is_main_process=rank_and_world_size()[0] == 0)
    dist.barrier()
    if rank_and_world_size()[0] == 0:
        time.sleep(0.5)
    model.save_pretrained(f"{folder}-all")
    return (Path(f"{folder}-all") / "config.json").is_file()


def broken(folder: str, where: str) -> str:
    """The first process fails in one place; what becomes of this one."""
    first = rank_and_world_size()[0] == 0
    model, given, original = small.one_block(), {"output_dir": folder}, block_stream.save_checkpoint
    if where == "arguments" and first:
        given["max_seq_length"] = -1
    if where == "weights" and first:
        model.lm_head.weight.data[0, 0] = torch.nan
    if where == "recipe":
        return _error(compress, FP8 if first else GPTQ, parts=True)
    if where == "data" and first:
        wrong = {"model": model, "recipe": {"modifiers": FP8}, "dataset": [[10**6]]}
        return _error(oneshot, **wrong, **given)
    if where == "output" and first:
        block_stream.save_checkpoint = _full
    if where == "save":
        Path(folder).touch()
        return _error(compress(FP8, model, parts=True).save_pretrained, folder)
    found = _error(compress, FP8, model, parts=True, **given)
    block_stream.save_checkpoint = original
    return found


def _full(*args: Any, **kwargs: Any) -> None:
    raise OutputError("The disk is full.")


def _error(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def alone(folder: str) -> bool:
    """One process saves by itself, and waits for nobody."""
    model = compress(FP8, parts=True)
    if rank_and_world_size()[0] == 1:
        model.save_pretrained(folder)
    dist.barrier()
    return (Path(folder) / "config.json").is_file()


def read_by_one(folder: str) -> Any:
    """What one process alone makes of a checkpoint: whether it is good, and its weights."""
    if rank_and_world_size()[0] == 1:
        return None
    report = verify(folder, serve="transformers")
    teacher = load_maybe_quantized(folder, ModelArguments(model=folder))
    return report.ok, digest(teacher)


def taken(kind: str) -> list[int]:
    """First tokens of the samples that a process takes of data that all have, or of its own."""
    rank = rank_and_world_size()[0]
    ids = [[number + (100 * rank if "own" in kind else 0)] * 2 for number in range(10)]
    loader = load_calibration(
        DatasetArguments(
            dataset=iter(ids) if "stream" in kind else ids,
            num_calibration_samples=6,
            shuffle_calibration_samples=False,
        ),
        processes=Processes.from_process_group(),
    )
    return [int(batch["input_ids"][0, 0]) for batch in loader]


def through_main_memory() -> list[bytes]:
    """What processes exchange whose group is for accelerators."""
    original = dist.get_backend
    dist.get_backend = lambda *args: "nccl"
    try:
        return processes._gather_bytes(bytes([rank_and_world_size()[0]]), 2)
    finally:
        dist.get_backend = original
