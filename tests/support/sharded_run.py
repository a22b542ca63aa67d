# SPDX-License-Identifier: Apache-2.0
"""Prunes, quantizes and distils the tiny model while it trains: on one process, or on several."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from tests.support import tiny_training as tiny
from transformers import AutoModelForCausalLM

from llmcompressor import train
from llmcompressor.core import EventType
from llmcompressor.modifiers import Modifier

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
LINEARS = {"targets": ["Linear"], "ignore": ["lm_head"]}
LAYER = "re:model.layers.1$"
PRUNING = {"start": 0, "end": 0.5, "init_sparsity": 0.1, "final_sparsity": 0.5}
RECIPE: dict[str, Any] = {
    "stage_modifiers": {
        "MagnitudePruningModifier": {**LINEARS, **PRUNING},
        "QuantizationModifier": {**LINEARS, "scheme": "W8A8", "start": 0.5},
        "OutputDistillationModifier": {
            "targets": [[LAYER, LAYER]],
            "comparison": "l2_distance",
        },
        "Quitter": {},
    }
}


class Quitter(Modifier):
    """Ends the process after the step that the environment names, as a kill would.

    It is not a field: a run with another recipe is another run.
    """

    def on_initialize(self, state, **kwargs):
        return True

    def on_event(self, state, event, **kwargs):
        last = int(os.environ.get("QUIT_AFTER", "0"))
        if last and event.type_ is EventType.OPTIM_POST_STEP and event.global_step >= last:
            os._exit(9)


def let_processors_shard() -> None:
    """Have accelerate wrap models by FSDP where there are no devices.

    It looks at the configuration on devices only; all that it calls then, torch can do with gloo.
    """
    original = AcceleratorState.__init__

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
        if plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = begin


def main(folder: Path, world: int, settings: dict[str, Any]) -> None:
    """Train on as many rows per step as one process would."""
    rows = [{key: value.tolist() for key, value in tiny.row(n).items()} for n in range(32)]
    given: dict[str, Any] = {
        "recipe": RECIPE,
        "precision": "float32",
        "per_device_train_batch_size": 4 // world,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
    }
    dense = str(folder / "dense")
    started = str(folder / settings.pop("started", "dense"))
    model = loaded_spread(dense, world) if settings.pop("loaded_spread", False) else started
    train(model, distill_teacher=dense, dataset=Dataset.from_list(rows), **given | settings)


def loaded_spread(folder: str, world: int) -> Any:
    """A model that transformers spreads over the processes as it loads it."""
    from transformers.distributed import DistributedConfig

    torch.distributed.init_process_group("gloo")
    spread = DistributedConfig(fsdp_size=world)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread)
    assert model.is_distributed_loading_by_transformers
    return model


def as_rank(rank: int, world: int, port: int, folder: str, settings: dict[str, Any]) -> None:
    """:func:`main` as one of several processes, with what torchrun tells each of them."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    os.environ["QUIT_AFTER"] = str(settings.pop("quit_after", 0))
    torch.set_num_threads(1)
    let_processors_shard()
    main(Path(folder), world, settings)
