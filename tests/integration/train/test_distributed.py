# SPDX-License-Identifier: Apache-2.0
"""Several processes train as one does."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support import distributed_run, sharded_run
from tests.support import tiny_training as tiny
from torch import multiprocessing
from transformers import PreTrainedModel, TrainingArguments

from llmcompressor import oneshot
from llmcompressor.args.parsing import current_name
from llmcompressor.modifiers.quantization import QuantizationModifier

pytestmark = pytest.mark.usefixtures("session", "nothing_seen")

SCRIPT = Path(distributed_run.__file__)


def launcher(processes: int) -> list[str]:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    # Else they look for each other by the machine's own name, for minutes where nobody knows it.
    command += ["--local-addr", "localhost"]
    return [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def run(folder: Path, *, processes: int, batch: int, **settings: Any) -> list[dict[str, Any]]:
    """What each process wrote, by rank."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, *launcher(processes)]
    ended = subprocess.run(
        [*command, str(SCRIPT), str(folder), str(batch), json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    """Rows with different numbers of targets, two micro-batches per step, a term in the loss."""
    (tmp_path / "alone").mkdir()
    distributed_run.main(tmp_path / "alone", 4, {})
    alone = json.loads((tmp_path / "alone" / "0.json").read_text())
    pair = run(tmp_path / "pair", processes=2, batch=2, ddp_backend="gloo")
    assert [(each["rank"], each["world_size"], each["strategy"]) for each in pair] == [
        (0, 2, "ddp"),
        (1, 2, "ddp"),
    ]
    for name in ("weights", "masks", "events"):
        assert pair[0][name] == pair[1][name], name
    assert pair[0]["events"] == alone["events"], "JSON makes lists of both"
    assert pair[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert pair[0]["masks"] == alone["masks"]
    assert any(name.endswith("extra_scale") for name in pair[0]["weights"])


PROJECTED = {
    "targets": [["re:.*layers.0$", "re:.*layers.1$"]],
    "projection": "linear",
    "comparison": "l2_distance",
}


CHECKPOINTING = current_name(TrainingArguments.__dataclass_fields__, "activation_checkpointing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({}, {}),
        ({"start": 1}, {}),
        ({"end": 1}, {CHECKPOINTING: True}),
        ({"start": 1}, {CHECKPOINTING: True}),
    ],
    ids=str,
)
def test_projections_are_learned_by_two_processes_as_by_one(tmp_path, fields, changed):
    """They are used in the loss, outside the forward that DDP looks at."""
    settings = {"masked": False, "taught": {**PROJECTED, **fields}, "optim": "sgd", **changed}
    (tmp_path / "alone").mkdir()
    distributed_run.main(tmp_path / "alone", 4, dict(settings))
    alone = json.loads((tmp_path / "alone" / "0.json").read_text())
    pair = run(tmp_path / "pair", processes=2, batch=2, ddp_backend="gloo", **settings)
    assert pair[0]["strategy"] == "ddp"
    assert pair[0]["weights"] == pair[1]["weights"]
    assert pair[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def sharded(folder: Path, name: str, *, processes: int, **settings: Any) -> None:
    """Train under FSDP to a checkpoint."""
    sharding = {} if settings.get("loaded_spread") else sharded_run.FSDP
    given = {"output_dir": str(folder / name), **sharding, **settings}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    multiprocessing.start_processes(
        sharded_run.as_rank,
        args=(processes, port, str(folder), given),
        nprocs=processes,
        start_method="forkserver",
    )


def losses(folder: Path) -> list[float]:
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [each["loss"] for each in log if "loss" in each]


def assert_alike(one: Path, other: Path) -> None:
    """The same zeros, and codes that differ where rounding tips them over."""
    weights, others = (load_file(each / "model.safetensors") for each in (one, other))
    assert weights.keys() == others.keys()
    codes = [name for name, each in weights.items() if each.dtype is torch.int8]
    assert len(codes) == 14
    for name in codes:
        zeros = [each[name] == 0 for each in (weights, others)]  # some are masked, some rounded
        assert (zeros[0] != zeros[1]).float().mean() < 0.02, name
        assert (weights[name] != others[name]).float().mean() < 0.15, name
        assert (weights[name] == 0).float().mean() >= 0.5, name
    assert losses(one) == pytest.approx(losses(other), rel=1e-3)


@pytest.fixture
def dense(tmp_path):
    """A folder with the tiny model."""
    tiny.tiny_model().save_pretrained(tmp_path / "dense")
    return tmp_path


def test_sharded_processes_train_as_one_does(dense):
    """The whole of ``train`` under FSDP, by accelerate, with a teacher and checkpoints."""
    sharded_run.main(dense, 1, {"output_dir": str(dense / "alone"), "use_cpu": True})
    sharded(dense, "sharded", processes=2, use_cpu=True, ddp_backend="gloo")
    assert_alike(dense / "alone", dense / "sharded")


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"),
    reason="the installed transformers does not train what it spreads as it loads it",
)
def test_a_model_that_was_loaded_spread_trains_as_one_does(dense):
    """No wrapper gathers it, and parameters that are added have optimizer groups of their own."""
    recipe = copy.deepcopy(sharded_run.RECIPE)
    recipe["stage_modifiers"]["QuantizationModifier"]["learned_scales"] = True
    given = {"use_cpu": True, "recipe": recipe, "save_strategy": "no"}
    sharded_run.main(dense, 1, {"output_dir": str(dense / "alone"), **given})
    whole = {"precision": "auto", "ddp_backend": "gloo", "loaded_spread": True}
    sharded(dense, "spread", processes=2, **given, **whole)
    assert_alike(dense / "alone", dense / "spread")


@pytest.mark.parametrize(
    "sharding",
    [
        pytest.param(sharded_run.FSDP, marks=pytest.mark.slow, id="fsdp"),
        pytest.param({"fsdp": ""}, id="ddp"),
    ],
)
def test_scales_of_a_quantized_folder_train_as_on_one(dense, sharding):
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    oneshot(model=str(dense / "dense"), recipe=recipe, output_dir=dense / "start", verify=False)
    taught = {"OutputDistillationModifier": {"targets": ["lm_head"]}}
    tuning = {"stage_modifiers": {"ScaleTuningModifier": {}, **taught}}
    given = {"started": "start", "recipe": tuning, "use_cpu": True, "save_strategy": "no"}
    sharded_run.main(dense, 1, {"output_dir": str(dense / "alone"), **given})
    sharded(dense, "pair", processes=2, ddp_backend="gloo", **{**given, **sharding})
    start, alone, pair = (
        load_file(dense / name / "model.safetensors") for name in ("start", "alone", "pair")
    )
    changed = [name for name in start if not torch.equal(start[name], alone[name])]
    assert all(name.endswith(("weight_scale", "norm.weight")) for name in changed)
    assert changed == [name for name in start if not torch.equal(start[name], pair[name])]
    for name in changed:
        torch.testing.assert_close(alone[name], pair[name], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_sharded_training_goes_on_where_it_was_killed(dense):
    settings = {"processes": 2, "use_cpu": True, "ddp_backend": "gloo"}
    sharded(dense, "whole", **settings)
    with pytest.raises(multiprocessing.ProcessExitedException):
        sharded(dense, "killed", **settings, quit_after=5)
    assert not (dense / "killed").exists()
    sharded(dense, "killed", **settings)
    ways = [load_file(dense / name / "model.safetensors") for name in ("whole", "killed")]
    for name, tensor in ways[0].items():
        assert torch.equal(tensor, ways[1][name]), name
