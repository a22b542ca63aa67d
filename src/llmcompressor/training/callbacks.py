# SPDX-License-Identifier: Apache-2.0
"""Callbacks of transformers' trainer: events without a method to override, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from transformers import TrainerCallback

from llmcompressor.core.events import EventType
from llmcompressor.logger import logger
from llmcompressor.modeling.sharded import full_shapes_reported, gather_full, is_partitioned
from llmcompressor.runtime.progress import Advance, progress
from llmcompressor.training.driver import SessionDriver


class SessionEvents(TrainerCallback):
    """Sends the events around the optimizer's step to the session.

    Args:
        driver: return the driver of the current training, or ``None``.
        ready: called when model and optimizer are wrapped and loaded, and no batch has come yet.
    """

    def __init__(
        self, driver: Callable[[], SessionDriver | None], ready: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._ready = ready

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Resume the session, before the first batch."""
        self._ready()

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """The data starts from the beginning, or from the place of a checkpoint."""
        self._call(lambda driver: driver.place.begin_pass())

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The gradients of the step are complete and clipped."""
        self._call(lambda driver: driver.before_step())

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The optimizer has stepped, the scheduler has not."""
        self._call(lambda driver: driver.step_done())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A micro-batch is done."""
        self._call(lambda driver: driver.send(EventType.BATCH_END))

    on_substep_end = on_step_end

    def _call(self, call: Callable[[SessionDriver], None]) -> None:
        if driver := self._driver():
            call(driver)


class TrainingProgress(TrainerCallback):
    """Shows steps and remaining time as a bar or log lines, and logs the trainer's metrics.

    Args:
        stack: closes the bar if the training fails.
        terminal: a bar where there is a terminal; otherwise an occasional log line.
    """

    def __init__(self, stack: ExitStack | None = None, *, terminal: bool = True) -> None:
        self._stack = ExitStack() if stack is None else stack
        self._terminal = terminal
        self._advance: Advance | None = None
        self._done = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting at the first step, or at the step of a resumed training."""
        self._done = state.global_step
        if state.is_world_process_zero:
            left = state.max_steps - state.global_step
            bar = progress(left, "Training", terminal=self._terminal)
            self._advance = self._stack.enter_context(bar)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the steps taken."""
        if self._advance is not None:
            self._advance(state.global_step - self._done)
        self._done = state.global_step

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write the trainer's log entry as one line."""
        told = {name: one for name, one in (logs or {}).items() if name != "total_flos"}
        if self._advance is None or not told:
            return
        if isinstance(told.get("loss"), float):
            self._advance(0, note=f"loss {told['loss']:.4g}")
        parts = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in told.items()
        )
        logger.info("Step {}: {}", state.global_step, ", ".join(parts))

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop counting."""
        self._stack.close()
        self._advance = None


# --------------------
# Size, sparsity and quantized share of a model after its training.


def summary(model: Module) -> dict[str, float]:
    """Return metrics of a whole model; in a distributed run every process calls this.

    Returns:
        ``total_params``; ``sparsity_percent``, the share of zeros in the matrices outside
        embeddings; ``quantized_percent``, the share of those matrices' elements whose module has a
        scheme for its weight.
    """
    elements = zeros = quantized = 0
    with full_shapes_reported(model):
        matrices = [(module, matrix, matrix.numel()) for module, matrix in _matrices(model)]
        total = sum(each.numel() for each in model.parameters())
        # quantization parameters of modules with flattened weights are buffers
        schemed = (each for each in model.modules() if hasattr(each, "quantization_scheme"))
        total += sum(one.numel() for each in schemed for one in each.buffers(recurse=False))
    for module, matrix, size in matrices:
        elements += size
        zeros += _zeros(matrix)
        scheme = getattr(module, "quantization_scheme", None)
        quantized += size if getattr(scheme, "weights", None) is not None else 0
    return {
        "total_params": float(total),
        "sparsity_percent": 100.0 * zeros / max(elements, 1),
        "quantized_percent": 100.0 * quantized / max(elements, 1),
    }


def _matrices(model: Module) -> Iterator[tuple[Module, Parameter]]:
    """Yield each parameter of two or more dimensions once, without embeddings and vectors."""
    modules = list(model.modules())
    seen = {id(each.weight) for each in modules if isinstance(each, Embedding)}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            is_vector = parameter.dim() < 2 or parameter.numel() == max(parameter.shape)
            if not is_vector and id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, parameter


@torch.no_grad()
def _zeros(matrix: Tensor) -> int:
    count = ((gather_full(matrix) if is_partitioned(matrix) else matrix) == 0).sum()
    # A sharded tensor's sum is distributed over the processes.
    return int(gather_full(count))
