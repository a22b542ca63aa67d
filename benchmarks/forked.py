# SPDX-License-Identifier: Apache-2.0
"""Engines that are imported once: each job runs in a fork of a process that has done it.

Run as a script, in the environment of the engine, it is that process. It needs nothing but
Python's library.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_MODULES = {
    "vllm": (
        "vllm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    ),
    "transformers": ("transformers", "compressed_tensors", "transformers.modeling_utils"),
}
_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # tiny models; threads that wait for each other cost more
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_READY = "ready"


@contextlib.contextmanager
def forked(engines: dict[str, str]) -> Iterator[None]:
    """Have ``verify --with`` run its jobs in forks inside the block.

    Args:
        engines: name → Python of its environment; no two have the same Python.
    """
    from llmcompressor.engines import process  # noqa: PLC0415  # the script does without it

    servers = {python: _started(name, python) for name, python in engines.items()}
    plain = process._wait

    def wait(command: Sequence[str], folder: Path, seconds: float) -> int | None:
        server = servers[command[0]]
        print(json.dumps([str(folder), seconds]), file=server.stdin, flush=True)
        for line in server.stdout:
            if line.startswith("{"):
                return json.loads(line)["code"]
        raise RuntimeError(f"the process of {command[0]} has ended")

    process._wait = wait
    try:
        yield
    finally:
        process._wait = plain
        for server in servers.values():
            server.stdin.close()
            server.wait()


def _started(engine: str, python: str) -> subprocess.Popen:
    from llmcompressor.engines.process import _environment  # noqa: PLC0415  # as above

    server = subprocess.Popen(
        [python, str(Path(__file__).resolve()), engine],
        env=_environment(python),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if not any(line.strip() == _READY for line in server.stdout):
        raise RuntimeError(f"{python} cannot import {engine}")
    return server


def _serve(engine: str) -> None:
    """Import an engine, then fork for each line: a folder with a job, and its limit in seconds."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    sys.path.pop(0)  # this folder
    for name in _MODULES[engine]:
        importlib.import_module(name)
    print(_READY, flush=True)
    for line in sys.stdin:
        folder, seconds = json.loads(line)
        child = os.fork()
        if not child:
            _run(folder)
        print(json.dumps({"code": _ended(child, time.monotonic() + seconds)}), flush=True)


def _run(folder: str) -> None:
    try:
        os.setsid()
        os.chdir(folder)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, number in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(stream, number)
        sys.path.insert(0, folder)
        code = importlib.import_module("llmcompressor_runner.__main__").main("job.json")
        sys.stdout.flush()
    finally:
        os._exit(locals().get("code", 9))


def _ended(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    _serve(sys.argv[1])
