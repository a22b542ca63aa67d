# SPDX-License-Identifier: Apache-2.0
"""Runs with quality gates, by each entrypoint; ranks call the functions here too."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support import small_models as small

from llmcompressor import model_free_ptq, oneshot, run_stages, train
from llmcompressor.core import State
from llmcompressor.core.contract import DataUse, Granularity, Traits
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier

SCHEME: dict[str, Any] = {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}
ROUNDED = {"modifiers": {"QuantizationModifier": SCHEME}}
CALIBRATED = {"modifiers": {"GPTQModifier": SCHEME}}
STAGES = (
    "first_stage: {first_modifiers: {WandaPruningModifier: {sparsity: 0.5, targets: Linear}}}\n"
    "last_stage: {last_modifiers: {QuantizationModifier: "
    "{targets: Linear, scheme: W4A16, ignore: [lm_head]}}}\n"
)
IMPOSSIBLE, LOOSE = {"kl": 1e-9}, {"kl": 50.0, "perplexity": 9.0, "top1": 1e-9, "size": "1GB"}


def write_rows(file: Path, seed: int, samples: int = 8) -> str:
    """Write tokenized rows of 32 tokens, and return their path."""
    rows = small.token_rows(samples, 32, seed=seed)["input_ids"]
    file.write_text("\n".join(json.dumps({"input_ids": one}) for one in rows))
    return str(file)


def streamed(model: str, out: Path, **given: Any) -> None:
    given = {"dataset": write_rows(out.parent.with_name("rows.jsonl"), 0), **given}
    oneshot(model=model, recipe=CALIBRATED, output_dir=out, **given)


def in_memory(model: str, out: Path, **given: Any) -> None:
    streamed(model, out, pipeline="basic", **given)


class Watching(Modifier):
    """Sees data, and does not say how ranks could share it."""

    @property
    def traits(self) -> Traits:
        return Traits(data=DataUse.STREAM, granularity=Granularity.BLOCK, by_block=True)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True


def not_shared(model: str, out: Path, **given: Any) -> None:
    """On several ranks the first one does all of the work."""
    data = write_rows(out.parent.with_name("rows.jsonl"), 0)
    recipe = [Watching(), GPTQModifier(**SCHEME)]
    oneshot(model=model, recipe=recipe, dataset=data, output_dir=out, **given)


def without_class(model: str, out: Path, **given: Any) -> None:
    model_free_ptq(model, out, "W4A16", ["lm_head"], **given)


def trained(model: str, out: Path, **given: Any) -> None:
    data = {"dataset": {"train": small.token_rows()}, "use_cpu": True, "max_steps": 1}
    train(model=model, recipe=ROUNDED, output_dir=out, **data, **given)


def staged(model: str, out: Path, **given: Any) -> None:
    """The checkpoint of the last stage has the name ``out``."""
    data = write_rows(out.parent.with_name("rows.jsonl"), 0)
    text = STAGES.replace("last", out.name.removeprefix("stage_"))
    run_stages(model, text, dataset=data, output_dir=out.parent, **given)


def error_of_rank(way: str, model: str, out: str, **given: Any) -> str:
    """The error of this rank, in words; ``none`` if there is none."""
    try:
        globals()[way](model, Path(out), verify=False, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


if __name__ == "__main__":  # one of the processes of a training
    place, made, text = sys.argv[1:]
    given = {"gates": IMPOSSIBLE, "gate_dataset": text, "ddp_backend": "gloo"}
    told = error_of_rank("trained", place, made, **given)
    Path(made).parent.with_name(f"rank-{os.environ['RANK']}").write_text(told)
