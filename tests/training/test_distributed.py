# SPDX-License-Identifier: Apache-2.0
"""Several processes train as one does; ``distributed_run.py`` is what they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed_run
import pytest
import torch

SCRIPT = Path(distributed_run.__file__)


def run(folder: Path, *, processes: int, batch: int, **settings: Any) -> list[dict[str, Any]]:
    """What each process wrote, by rank."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *(launcher if processes > 1 or "fsdp" in settings else [])]
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="accelerate shards on devices only")
def test_sharded_processes_train_as_one_does(tmp_path):
    """On one device the sharding is one of one: everything is wrapped, and nothing is split."""
    processes = min(2, torch.cuda.device_count())
    [alone] = run(tmp_path / "alone", processes=1, batch=4, use_cpu=False)
    sharded = run(
        tmp_path / "sharded",
        processes=processes,
        batch=4 // processes,
        use_cpu=False,
        fsdp=True,
        fsdp_config={"version": 2, "reshard_after_forward": True},
    )
    assert {each["strategy"] for each in sharded} == {"fsdp"}
    assert sharded[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert sharded[0]["events"] == alone["events"]
