# SPDX-License-Identifier: Apache-2.0
"""Runs in processes that can be killed, on a model of three blocks."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger as loguru_logger
from tests.support.manifests import stable_bytes
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from llmcompressor import oneshot
from llmcompressor.checkpoint import journal, tensor_files
from llmcompressor.checkpoint.block_stream import BlockRestorer, StreamedBlocks
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.rotation import learned as rotations
from llmcompressor.modifiers.scale_tuning import ScaleTuningModifier
from llmcompressor.modifiers.scale_tuning import tune as scales
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.transform import AWQModifier, SpinQuantModifier

BLOCKS = 3
KILLED = -signal.SIGKILL
_MLP = ["re:.*mlp.*proj"]
_ATTENTION = ["re:.*self_attn.*_proj"]


def rtn() -> list[Any]:
    return [QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])]


def gptq() -> list[Any]:
    return [GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])]


def gptq_fitted() -> list[Any]:
    """One and two ranks write equal files of it: no value lies between codes to the last digit."""
    return [GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"], refit_scales=True)]


def ragged() -> list[Any]:
    """Rows that end within a group, which compressed-tensors does not read back."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 48}
    group = {"targets": ["Linear"], "weights": weights}
    return [
        GPTQModifier(
            config_groups={"g": group}, ignore=["lm_head"], bypass_divisibility_checks=True
        )
    ]


def two() -> list[Any]:
    """Both need data: two passes, with all blocks in a scratch folder between them."""
    return [
        GPTQModifier(targets=_MLP, scheme="W4A16"),
        QuantizationModifier(targets=_ATTENTION, scheme="FP8"),
    ]


def one_pass() -> list[Any]:
    """What needs no data stands before, and behind, what does: all in one pass."""
    return [
        QuantizationModifier(targets=_ATTENTION, scheme="FP8_DYNAMIC"),
        GPTQModifier(targets=_MLP, scheme="W4A16"),
        QuantizationModifier(targets=["lm_head"], scheme="W8A16"),
    ]


def cache() -> list[Any]:
    """Everything is measured on the model as it was: what is resumed must be, too."""
    args = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    return [
        QuantizationModifier(
            targets="Linear", scheme="FP8", ignore=["lm_head"], kv_cache_scheme=args
        )
    ]


def sparse() -> list[Any]:
    """A pass that only looks, and one that prunes and quantizes what was pruned."""
    return [
        SparseGPTModifier(
            sparsity=0.5,
            sparsity_profile="owl",
            owl_m=3,
            owl_lmbda=0.1,
            targets="LlamaDecoderLayer",
        ),
        GPTQModifier(targets=_MLP, scheme="W4A16"),
    ]


def pruned() -> list[Any]:
    """Weights that change while data passes, and are stored as they are."""
    return [SparseGPTModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"])]


def pruned_rounded() -> list[Any]:
    """Data passes weights that are pruned; what is stored is rounded, too."""
    return [
        WandaPruningModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"]),
        *rtn(),
    ]


def rotated() -> list[Any]:
    """Weights that are rotated when their block is entered; some rotations stay in the forward."""
    return [SpinQuantModifier(rotations=["R1", "R2", "R4"]), *gptq()]


def rotated_stream() -> list[Any]:
    """What is tried out first, on a few tokens, is no calibration of experts."""
    return [SpinQuantModifier(rotations=["R1"]), *gptq()]


def rotated_between() -> list[Any]:
    """A pass in which what is to be rotated in the next one stands by."""
    return [
        SmoothQuantModifier(),
        SpinQuantModifier(rotations=["R1", "R3", "R4"], transform_type="random-hadamard"),
        *rtn(),
    ]


def smoothed() -> list[Any]:
    """Mappings that are found, unless some are registered."""
    return [AWQModifier(), QuantizationModifier(targets=_MLP, scheme="W4A16")]


def learned() -> list[Any]:
    """Rotations that are learned before the first block is rotated; on random weights they may be
    no better than the first ones, and are kept all the same."""
    falling = lambda self, batches: 2 - self.steps / 1000  # noqa: E731
    rotations._RotationOptimizer.mean_loss = falling  # type: ignore[method-assign]
    spin = SpinQuantModifier(rotations=["R1", "R2", "R4"], learnable=True, learning_steps=3)
    return [spin, *gptq()]


def tuned() -> list[Any]:
    """Scales are trained on all blocks, with what the original model predicts, before the second
    pass; on random weights that may help nothing, and is kept all the same."""
    falling = lambda self, indices: 2 - self.steps / 1000  # noqa: E731
    scales._Training.mean_divergence = falling  # type: ignore[method-assign]
    return [*gptq(), ScaleTuningModifier(epochs=3, batch_size=1, learning_rate=0.01)]


def dropped() -> list[Any]:
    """Experts go when all batches have come; what comes behind in the next pass has none."""
    return [
        REAPPruningModifier(sparsity=0.25),
        GPTQModifier(targets=_ATTENTION, scheme="W4A16"),
    ]


def dropped_quantized() -> list[Any]:
    """Experts are Linears from the start on; those that are left are quantized in the next pass."""
    return [REAPPruningModifier(sparsity=0.5), *gptq()]


def dropped_rounded() -> list[Any]:
    """Experts that are left are rounded and written when their block is left, in the one pass."""
    return [REAPPruningModifier(sparsity=0.5), *rtn()]


def dropped_pruned() -> list[Any]:
    """A pass in front and one behind, and experts that are stored as they are."""
    return [
        SmoothQuantModifier(),
        REAPPruningModifier(sparsity=0.5),
        SparseGPTModifier(sparsity=0.5, mask_structure="2:4", ignore=["lm_head"]),
    ]


RECIPES: dict[str, Callable[[], list[Any]]] = {
    "rtn": rtn,
    "gptq": gptq,
    "gptq_fitted": gptq_fitted,
    "ragged": ragged,
    "two": two,
    "one_pass": one_pass,
    "cache": cache,
    "sparse": sparse,
    "pruned": pruned,
    "pruned_rounded": pruned_rounded,
    "rotated": rotated,
    "rotated_between": rotated_between,
    "smoothed": smoothed,
    "learned": learned,
    "tuned": tuned,
    "dropped": dropped,
    "dropped_quantized": dropped_quantized,
    "dropped_rounded": dropped_rounded,
    "dropped_pruned": dropped_pruned,
    "starved": gptq,
    "starved_pruned": pruned_rounded,
    "starved_rotated": rotated_stream,
    "linear_by_linear": gptq,
}
NEEDS_DATA = RECIPES.keys() - {"rtn"}
STARVED = {"moe_calibrate_all_experts": False, "min_tokens_per_module": 0.5}
"""With these experts get too little, and are rounded or pruned without data."""
MIXTURES = {name for name in RECIPES if name.startswith(("dropped", "starved"))}


SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": torch.bfloat16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="150KB")
    return folder


def write_mixture(folder: Path) -> Path:
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, head_dim=16))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # what an expert adds is to matter behind it
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def rows() -> list[dict[str, list[int]]]:
    chooser = random.Random(0)
    return [{"input_ids": [chooser.randrange(3, 128) for _ in range(16)]} for _ in range(4)]


@dataclass(frozen=True)
class Job:
    """One call of ``oneshot``."""

    model: Path
    recipe: str
    output: Path
    resume: str = "auto"
    reverse: bool = False
    batch_size: int = 1

    def __call__(self) -> Any:
        data = rows() if self.recipe in NEEDS_DATA else None
        if self.reverse and data is not None:
            data.reverse()
        is_starved = self.recipe.startswith("starved")
        return oneshot(
            model=str(self.model.with_name("mixture") if self.recipe in MIXTURES else self.model),
            recipe=RECIPES[self.recipe](),
            dataset=data,
            starved_experts="rtn",
            **(STARVED if is_starved else {}),
            sequential_targets=["Linear"] if self.recipe == "linear_by_linear" else None,
            output_dir=str(self.output),
            batch_size=self.batch_size,
            resume=self.resume,
            verify=False,
        )

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")


@dataclass(frozen=True)
class Died:
    """How a process ended, what it said, and how long it was at work."""

    code: int
    said: str
    seconds: float


def run(job: Job, *, die_at: str | None = None, after_s: float | None = None) -> Died:
    """Do ``job`` in a process of its own.

    Args:
        job: what to do.
        die_at: ``"append 3"``, ``"write 2"`` …: it is killed there (see :func:`_armed`).
        after_s: it is killed so many seconds after the work began.
    """
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, die_at, sender))
    process.start()
    sender.close()
    began = time.perf_counter()
    with contextlib.suppress(EOFError):
        receiver.recv()  # the work begins
        began = time.perf_counter()
        if after_s is not None:
            process.join(after_s)
            process.kill()
    said = ""
    with contextlib.suppress(EOFError):
        said = receiver.recv()
    seconds = time.perf_counter() - began
    process.join(120)
    return Died(process.exitcode or 0, said, seconds)


def _child(job: Job, die_at: str | None, sender: Any) -> None:
    torch.set_num_threads(1)
    said = io.StringIO()
    loguru_logger.remove()
    loguru_logger.add(said, level="INFO", format="{message}")
    sender.send("begins")
    try:
        with _armed(die_at):
            job()
    except BaseException as error:
        sender.send(f"{said.getvalue()}{type(error).__name__}: {error}")
        _exit(1)
    sender.send(said.getvalue())
    _exit(0)


def _exit(code: int) -> None:
    """End as a script does: a rank with the store lets the others read from it what they need."""
    atexit._run_exitfuncs()
    os._exit(code)


@contextlib.contextmanager
def killed_at_the_last_step() -> Iterator[None]:
    """End a run in this process when its output has its name, and its folder of work is there."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "remove_work_folder", killed)
        try:
            yield
        except KeyboardInterrupt:
            return
    pytest.fail("It was not killed.")


@contextlib.contextmanager
def _armed(die_at: str | None) -> Iterator[None]:
    """Die at the n-th line of the journal (before it is there, torn, behind it), at the n-th write,
    when the first file of the working folder is removed at the end, or before or behind the n-th
    step that changes names or hands the model over once the journal says that all is ready."""
    if die_at is not None:
        if die_at.startswith("step"):
            _arm_steps(int(die_at.split()[1]))
        kind, number = die_at.rsplit(" ", 1)
        left = itertools.count(int(number) - 1, -1)

        def strikes(at: str) -> bool:
            return kind == at and next(left) == 0

        _arm_journal(strikes)
        _arm_writes(strikes)
        _arm_removal(strikes)
        _arm_end(strikes)
    yield


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm_steps(number: int) -> None:
    """Die within the n-th step of learning rotations, when its gradients are there."""
    gradients = rotations._RotationOptimizer._gradients
    left = itertools.count(number - 1, -1)

    def dying_gradients(self: Any, batch: Any) -> Any:
        found = gradients(self, batch)
        if next(left) == 0:
            _die()
        return found

    rotations._RotationOptimizer._gradients = dying_gradients  # type: ignore[method-assign]


def _arm_journal(strikes: Callable[[str], bool]) -> None:
    append = journal.Journal._append

    def dying_append(self: Any, entry: str, content: Any) -> None:
        if strikes("append"):
            _die()
        if strikes("torn"):
            with self._file.open("ab") as stream:
                stream.write(journal._line(entry, content)[:20])
            _die()
        append(self, entry, content)
        if strikes("appended"):
            _die()

    journal.Journal._append = dying_append  # type: ignore[method-assign]


def _arm_writes(strikes: Callable[[str], bool]) -> None:
    write = tensor_files._write_all

    def dying_write(descriptor: int, view: memoryview, offset: int) -> None:
        if strikes("write"):
            os.pwrite(descriptor, view[: len(view) // 2], offset)
            _die()
        write(descriptor, view, offset)

    tensor_files._write_all = dying_write


def _arm_removal(strikes: Callable[[str], bool]) -> None:
    remove: Any = shutil.rmtree

    def dying_remove(path: Any, *arguments: Any, **options: Any) -> None:
        entry = Path(path) / "journal"
        if entry.exists() and strikes("remove"):
            entry.unlink()
            _die()
        remove(path, *arguments, **options)

    shutil.rmtree = dying_remove


def _arm_end(strikes: Callable[[str], bool]) -> None:
    ready = journal.Journal.mark_ready
    is_ready = []

    def mark_ready(self: Any) -> None:
        ready(self)
        is_ready.append(True)

    def armed(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> Any:
            if is_ready and strikes("step"):
                _die()
            found = own(*arguments, **options)
            if is_ready and strikes("step"):
                _die()
            return found

        setattr(owner, name, step)

    journal.Journal.mark_ready = mark_ready  # type: ignore[method-assign]
    for name in ("rename", "replace", "unlink", "rmdir"):
        armed(Path, name)
    armed(shutil, "rmtree")
    armed(BlockRestorer, "attach_lazy_blocks")


def tree(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` and a hash of its bytes, of a manifest without this run."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(stable_bytes(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class CrashError(Exception):
    """Ends a run as a crash would."""


@contextlib.contextmanager
def crashing_after(blocks: int) -> Iterator[None]:
    """Have a run from a folder crash once it has finished so many blocks."""
    left, count = StreamedBlocks.leave, iter(range(1, 1 + 2 * blocks))

    def leave(self: StreamedBlocks, block: str) -> None:
        left(self, block)
        if next(count) == blocks:
            raise CrashError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StreamedBlocks, "leave", leave)
        yield
