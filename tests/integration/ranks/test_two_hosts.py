# SPDX-License-Identifier: Apache-2.0
"""Two ranks in network namespaces of their own, which see each other by one cable, as hosts do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import launched_run
from tests.support.rank_runs import share_differing
from tests.support.small_models import one_block

NAMES, CABLE, NET = ("lc-first", "lc-second"), "lc-cable", "192.0.2"


def ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode


def may_make_namespaces() -> bool:
    """Only root may, with iproute2, and not in every container."""
    if shutil.which("ip") is None or ip("netns", "add", NAMES[0]):
        return False
    return ip("netns", "del", NAMES[0]) == 0


@pytest.fixture
def hosts() -> Iterator[tuple[str, ...]]:
    """Two namespaces with an address each."""
    for name in NAMES:
        ip("netns", "add", name)
    try:
        ends = [f"{CABLE}{place}" for place in range(2)]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for place, (name, end) in enumerate(zip(NAMES, ends, strict=True)):
            ip("link", "set", end, "netns", name)
            for words in (
                ("addr", "add", f"{NET}.{place + 1}/24", "dev", end),
                ("link", "set", end, "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("-n", name, *words)
        yield NAMES
    finally:
        for name in NAMES:
            ip("netns", "del", name)


@pytest.mark.skipif(not may_make_namespaces(), reason="no network namespaces can be made here")
def test_ranks_of_two_hosts_write_one_output(hosts: tuple[str, ...], tmp_path: Path) -> None:
    one_block().save_pretrained(tmp_path / "model")
    launched_run.compress(str(tmp_path / "model"), str(tmp_path / "alone"), launched_run.GPTQ)
    work = "import sys; from tests.support.launched_run import GPTQ, compress; "
    work += "compress(*sys.argv[1:], GPTQ)"
    ranks = []
    for rank, name in enumerate(hosts):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": f"{NET}.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": f"{CABLE}{rank}",
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-c", work]
        given = [str(tmp_path / "model"), str(tmp_path / "two")]
        ranks.append(
            subprocess.Popen(
                [*command, *given],
                env=environment,
                cwd=Path(__file__).parents[3],
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [(one.communicate(timeout=120)[1], one.returncode) for one in ranks]
    assert [code for _, code in ended] == [0, 0], ended
    assert share_differing(tmp_path / "two", tmp_path / "alone") <= 0.001
