# SPDX-License-Identifier: Apache-2.0
"""One job: load a model in an engine, run prompts and single modules, and write what they gave.

The job is a JSON file. ``state.json`` in its folder tells how far the process has come and why it
ended; ``outputs.safetensors`` holds ``logits/0`` … float32 ``[tokens, vocabulary]`` of each prompt
and ``module/NAME`` float32 ``[rows, outputs]`` of each module.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENGINES = {"transformers": "of_transformers", "vllm": "of_vllm", "sglang": "of_sglang"}


class State:
    """What is known of the job; each change is written at once, so that a dead process has told it.

    Args:
        file: where it is written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Any] = {}

    def tell(self, **facts: Any) -> None:
        """Add facts."""
        self._known |= facts
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(self._known), encoding="utf-8")
        beside.replace(self._file)


def end_with(pipe: int) -> None:
    """End this process and what it starts when the other end of a pipe is closed.

    Then whoever waits for the job is gone, or does not wait any longer.
    """
    os.set_inheritable(pipe, False)

    def wait() -> None:
        os.read(pipe, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(job_file: str) -> int:
    """Do the job; the exit code is 1 if it failed."""
    folder = Path(job_file).resolve().parent
    job: Mapping[str, Any] = json.loads(Path(job_file).read_text(encoding="utf-8"))
    state = State(folder / "state.json")
    state.tell(stage="importing")
    try:
        _run(job, state, folder)
    except BaseException as error:  # of any kind: it is what a user of the engine would see
        state.tell(error=f"{type(error).__name__}: {error}", causes=_causes(error))
        traceback.print_exc()
        return 1
    return 0


def _run(job: Mapping[str, Any], state: State, folder: Path) -> None:
    engine = importlib.import_module(f".{ENGINES[job['engine']]}", __package__)
    versions = engine.prepare(job)
    state.tell(stage="loading", versions=versions)
    model = engine.load(job)
    state.tell(stage="running")
    outputs, facts = engine.run(model, job)
    from safetensors.torch import save_file  # noqa: PLC0415  # after the engine has set torch up

    plain = {name: one.detach().float().cpu().contiguous() for name, one in outputs.items()}
    save_file(plain, str(folder / "outputs.safetensors"))
    state.tell(stage="done", **facts)


def _causes(error: BaseException) -> list[str]:
    """The exceptions behind one, in their own words."""
    found: list[str] = []
    cause = error.__cause__ or error.__context__
    while cause is not None and len(found) < 4:
        found.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return found


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads and processes of engines may not end by themselves
