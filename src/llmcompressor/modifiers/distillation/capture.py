# SPDX-License-Identifier: Apache-2.0
"""Capture of module outputs in a forward, and the teacher's forward, stopped early if possible."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import InputError

__all__ = ["Outputs", "main_tensor", "run_teacher", "token_rows", "waits_elsewhere"]

# Keys of a batch that are for the loss only; the teacher computes none.
_FOR_THE_LOSS = {"labels", "shift_labels", "num_items_in_batch", "return_loss"}


class _AllSeenError(Exception):
    """Raised to stop a forward at the last module that is needed."""


class Outputs:
    """The latest output of each of some modules, captured while it is open.

    :meth:`keep` is the forward hook to register on them.

    Args:
        modules: module → its name in messages.
        role: ``student`` or ``teacher``, for messages.
        offload: keep the outputs in main memory.
    """

    def __init__(self, modules: Mapping[Module, str], role: str, offload: bool = False) -> None:
        self.modules = dict(modules)
        self.is_open = False
        self.stops = False
        self._role = role
        self._offload = offload
        # With the version counter, which torch increments on every in-place change.
        self._kept: dict[Module, tuple[Tensor, int]] = {}
        self._calls = 0

    def open(self) -> None:
        """Start capturing; free earlier outputs."""
        self._kept.clear()
        self._calls, self.is_open = 0, True

    def close(self) -> None:
        """Stop capturing, and free the outputs."""
        self._kept.clear()
        self.is_open = self.stops = False

    @property
    def complete(self) -> bool:
        """Return True if every module has produced an output."""
        return len(self._kept) == len(self.modules)

    @property
    def once_each(self) -> bool:
        """Return True if every module was called exactly once."""
        return self.complete and self._calls == len(self.modules)

    def keep(self, module: Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: capture the output of a module."""
        if not self.is_open:
            return
        tensor = main_tensor(output)
        if tensor is None:
            return
        kept = self._kept.get(module)
        if kept is not None and kept[0].requires_grad and not tensor.requires_grad:
            return  # another forward without gradients, for a trainer's metrics
        if self._offload:
            tensor = tensor.to("cpu")
        self._kept[module] = (tensor, tensor._version)
        self._calls += 1
        if self.stops and self.complete:
            raise _AllSeenError

    def of(self, module: Module) -> Tensor:
        """The captured output of a module.

        Raises:
            InputError: there is none, or it was changed in place since.
        """
        name = f"{self.modules[module]} of the {self._role}"
        tensor, version = self._kept.get(module, (None, 0))
        if tensor is None:
            raise InputError(
                f"{name} gave no tensor in this batch: it was not called.",
                "Compare modules that the forward calls, and send batch_start before the "
                "forward, loss_calculated after it. A head is not called by trainers that compute "
                "the loss from its weight, as TRL's SFTTrainer does: derive from it a class with "
                "compute_loss = transformers.Trainer.compute_loss, or name other targets.",
            )
        if tensor._version != version:
            raise InputError(
                f"The output of {name} is changed in place by what comes after it.",
                "Compare the output of another module, for instance that of the next one.",
            )
        return tensor


def main_tensor(output: Any) -> Tensor | None:
    """The main tensor of a module's output: the logits, else its first tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        logits = output.get("logits")
        if isinstance(logits, Tensor):
            return logits
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((each for each in output if isinstance(each, Tensor)), None)
    return None


# ---- the teacher's forward


@torch.no_grad()
def run_teacher(teacher: Module, batch: Any, outputs: Outputs, *, may_stop: bool) -> None:
    """Run the teacher on a batch, in evaluation mode, without a cache and without a loss.

    Args:
        teacher: the model; ``outputs.keep`` is a hook on its modules.
        batch: the student's batch.
        outputs: opened here.
        may_stop: stop the forward at the last module that is needed.
    """
    if teacher.training:
        teacher.eval()
    args, kwargs = _inputs(teacher, batch)
    outputs.open()
    outputs.stops = may_stop
    try:
        teacher(*args, **kwargs)
    except _AllSeenError:
        pass
    finally:
        outputs.stops = False


def _inputs(teacher: Module, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    # Offloaded weights are on the meta device; their loading hooks move the inputs too.
    devices = (each.device for each in teacher.parameters() if not each.is_meta)
    device = next(devices, torch.device("cpu"))
    if not isinstance(batch, Mapping):
        values = batch if isinstance(batch, list | tuple) else [batch]
        return [_moved(value, device) for value in values], {}
    accepted = inspect.signature(teacher.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    # An encoder-decoder model derives the decoder's inputs from the labels.
    encoder_decoder = getattr(getattr(teacher, "config", None), "is_encoder_decoder", False)
    unwanted = _FOR_THE_LOSS - ({"labels"} if encoder_decoder else set())
    kwargs = {
        name: _moved(value, device)
        for name, value in batch.items()
        if name not in unwanted and (anything or name in accepted)
    }
    if "use_cache" in accepted or (anything and hasattr(teacher, "config")):
        kwargs["use_cache"] = False
    return [], kwargs


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


# ---- rows of real tokens


def token_rows(output: Tensor, mask_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Flatten an output to rows; also return the indices of the real tokens.

    Args:
        output: ``[B, T, D]`` or ``[B · T, D]``; another layout has no token positions, so all of
            its rows count.
        mask_BT: true (or 1) for real tokens; ``None``: all are.

    Returns:
        ``[R, D]``, and the rows that count as int64 ``[N]``, ``None`` for all of them.
    """
    rows_RD = output.reshape(-1, output.shape[-1])
    if mask_BT is None or mask_BT.ndim != 2:
        return rows_RD, None
    flat = output.ndim == 2 and len(output) == mask_BT.numel()
    if output.shape[:-1] != mask_BT.shape and not flat:
        return rows_RD, None
    rows_N = (mask_BT.flatten() == 1).nonzero().squeeze(1)
    if len(rows_N) == len(rows_RD):
        return rows_RD, None
    return rows_RD, rows_N.to(output.device)


def waits_elsewhere(modules: Iterable[Module], ours: Outputs) -> bool:
    """Return True if other hooks need outputs of the same forward, so it may not stop early."""
    hooks = sum(len(module._forward_hooks) for module in modules)
    return hooks > len(ours.modules)
