# SPDX-License-Identifier: Apache-2.0
"""Trains the tiny model by DeepSpeed's engine without a device, as one of two processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from pydantic import PrivateAttr
from tests.support import sharded_run
from torch import Tensor

from llmcompressor.core import EventType
from llmcompressor.modeling.sharded import gather_full
from llmcompressor.modifiers import Modifier


def zero(stage: int) -> dict[str, Any]:
    """The configuration of a stage of ZeRO; the trainer fills in its own values."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        # nothing is so small that it stays whole: all of the tiny model would
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": "auto",
        **dict.fromkeys(auto, "auto"),
    }


class Witness(Modifier):
    """Ends the training unless the step lies between the two events that stand around it."""

    _weight: Tensor | None = PrivateAttr(None)

    def on_initialize(self, state, **kwargs):
        return True

    def on_event(self, state, event, **kwargs):
        weight = gather_full(state.model.model.layers[0].mlp.down_proj.weight).detach()
        if event.type_ is EventType.BATCH_START:
            self._weight = weight.clone()
        elif event.type_ is EventType.OPTIM_PRE_STEP:
            assert torch.equal(weight, self._weight), "the step was taken before its event"
        elif event.type_ is EventType.OPTIM_POST_STEP:
            assert not torch.equal(weight, self._weight), "its event came before the step"


def let_processors_step() -> None:
    """Have accelerate use DeepSpeed where there are no devices.

    It looks for a device and its way to talk; all that DeepSpeed calls then, gloo can do.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    original = PartialState._prepare_backend

    def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        found = original(self, cpu, *args, **kwargs)
        return ("gloo", DistributedType.MULTI_CPU) if found[0] is None else found

    def place(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = prepare, place


def as_rank(rank: int, world: int, port: int, folder: str, settings: dict[str, Any]) -> None:
    """Train as ``sharded_run`` does, with a stage of ZeRO."""
    let_processors_step()
    given = settings.pop("zero", {})
    settings["deepspeed"] = zero(settings.pop("stage"))
    settings["deepspeed"]["zero_optimization"].update(given)
    sharded_run.as_rank(rank, world, port, folder, settings)
