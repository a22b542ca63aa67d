# SPDX-License-Identifier: Apache-2.0
"""Trains the tiny model; run by torchrun, or alone. Each process writes what it ended with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import tiny_training as tiny
from torch import Tensor

from llmcompressor.core import active_session
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.training import Trainer


def digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().float().numpy().tobytes().hex()


class Ranks(tiny.Recorder):
    """Which process its modifiers believe to be."""


def main(folder: Path, batch: int, settings: dict) -> None:
    resume = settings.pop("resume", None)
    masked = settings.pop("masked", True)
    taught = settings.pop("taught", None)  # fields of the distillation
    further = [OutputDistillationModifier(**taught)] if taught else []
    trainer = Trainer(
        model=tiny.tiny_model(),
        args=tiny.arguments(
            folder / "run",
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            **settings,
        ),
        train_dataset=tiny.Rows(16, uneven=True),
        recipe=[Ranks(), *([tiny.ScaledMask(start=0)] if masked else []), *further],
        teacher=tiny.tiny_model(seed=1) if taught else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    [(model, _, hardware)] = Ranks.begun
    assert model is trainer.accelerator.unwrap_model(trainer.model)
    modifiers = active_session().lifecycle.recipe.modifiers
    logged = [each for each in trainer.state.log_history if "loss" in each]
    result = {
        "rank": hardware.rank,
        "world_size": hardware.world_size,
        "strategy": hardware.distributed_strategy,
        "events": Ranks.seen,
        "losses": [each["loss"] for each in logged],
        "weights": {name: digest(each) for name, each in model.named_parameters()},
        "masks": {
            name: digest(each) for name, each in (modifiers[1]._masks if masked else {}).items()
        },
    }
    (folder / f"{hardware.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
