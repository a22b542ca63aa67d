# SPDX-License-Identifier: Apache-2.0
"""Whatever an engine's process does becomes an answer, and nothing of it is left running."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmcompressor.engines import process
from llmcompressor.engines.check import Engine
from llmcompressor.engines.process import Answer, check_engine, run_job
from llmcompressor.errors import ArgumentError

STATE = "import json, os, sys, time\nfrom pathlib import Path\n"


def state(**facts: object) -> str:
    return f"Path('state.json').write_text(json.dumps({facts!r}))\n"


def asked(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None = 60
) -> Answer:
    """The answer of a stand-in for an engine's process that runs some code."""
    runner, job = tmp_path / "runner", tmp_path / "job"
    runner.mkdir(), job.mkdir()
    (runner / "__init__.py").write_text("")
    (runner / "__main__.py").write_text(STATE + code)
    monkeypatch.setattr(process, "_RUNNER", runner)
    return run_job({"engine": "vllm"}, job, sys.executable, timeout)


def test_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = state(stage="running") + "print('no more memory')\nsys.stdout.flush()\nos._exit(9)"
    answer = asked(code, tmp_path, monkeypatch)
    assert answer.stage == "running"
    assert answer.error == "its process ended with 9, and said last: no more memory"
    assert not answer.is_refusal


SELF = "os.kill(os.getpid(), {})\ntime.sleep(60)"


@pytest.mark.parametrize(("number", "is_crash"), [(9, False), (15, False), (11, True), (6, True)])
@pytest.mark.parametrize("stage", ["loading", "running"])
def test_a_process_that_a_signal_ends(
    stage: str, number: int, is_crash: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From outside, or for what it did itself; a refusal is neither."""
    answer = asked(state(stage=stage) + SELF.format(number), tmp_path, monkeypatch)
    assert (answer.signal, answer.is_crash, answer.is_broken_off) == (
        number,
        is_crash,
        not is_crash,
    )
    assert answer.stage == stage
    assert answer.error.startswith(f"its process was killed by signal {number} (SIG")
    assert ("for memory" in answer.error) == (number == 9)
    assert not answer.is_refusal


def test_a_signal_that_a_shell_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter may be a script that starts another."""
    answer = asked(state(stage="loading") + "os._exit(137)", tmp_path, monkeypatch)
    assert answer.signal == 9
    assert not answer.is_refusal


def test_what_was_done_before_a_signal_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines may die of what they have to tidy up; and their own words say more than a number."""
    spoken = state(stage="loading", error="KeyError: 'up'") + SELF.format(9)
    answer = asked(spoken, tmp_path, monkeypatch)
    assert answer.error == "KeyError: 'up'"
    assert answer.is_refusal


def test_a_process_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with its children."""
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "Path('child').write_text(str(child.pid))\n" + state(stage="loading") + "time.sleep(60)"
    )
    began = time.monotonic()
    answer = asked(code, tmp_path, monkeypatch, timeout=1.5)
    assert time.monotonic() - began < 20
    assert answer.error == "it was not done after 1.5 seconds"
    assert not answer.is_refusal
    _wait_for_end(int((tmp_path / "job" / "child").read_text()))


def test_an_engine_ends_with_a_killed_caller(tmp_path: Path) -> None:
    """Nor do its children: the engine is a module that sleeps and has started a process."""
    slow, job = tmp_path / "slow", tmp_path / "job"
    shutil.copytree(process._RUNNER, slow)
    (slow / "of_vllm.py").write_text(
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "def prepare(job):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    Path('new').write_text(f'{os.getpid()} {child.pid}')\n"
        "    os.replace('new', 'pids')\n"
        "    time.sleep(60)\n"
    )
    job.mkdir()
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from llmcompressor.engines import process\n"
        f"process._RUNNER = Path({str(slow)!r})\n"
        f"process.run_job({{'engine': 'vllm'}}, Path({str(job)!r}), sys.executable, 60)\n"
    )
    waiting = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(600):
            if (job / "pids").exists():
                break
            time.sleep(0.05)
    finally:
        waiting.kill()
        waiting.wait()
    for number in map(int, (job / "pids").read_text().split()):
        _wait_for_end(number)


def _wait_for_end(number: int) -> None:
    for _ in range(100):
        if not _is_running(number):
            return
        time.sleep(0.05)
    raise AssertionError(f"the process {number} goes on")


def _is_running(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_refusal_is_told_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = state(
        stage="loading",
        error="RuntimeError: Engine core initialization failed.",
        causes=["KeyError: 'layers.0.w2_bias'"],
        versions={"vllm": "1"},
    )
    answer = asked(code, tmp_path, monkeypatch)
    assert answer.is_refusal
    assert answer.error == "KeyError: 'layers.0.w2_bias'"
    assert answer.versions == {"vllm": "1"}


@pytest.mark.parametrize(
    "code",
    [
        state(stage="done", amplitudes={}),
        state(stage="done", amplitudes={}) + "Path('outputs.safetensors').write_bytes(b'garbage')",
        state(stage="done", amplitudes=7) + "Path('outputs.safetensors').write_bytes(b'')",
    ],
)
def test_what_cannot_be_read(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asked(code, tmp_path, monkeypatch)
    assert "cannot be read" in answer.error
    assert not answer.outputs


@pytest.mark.parametrize("text", ["garbage", "[1, 2]", '{"stage": ["x"]}'])
def test_a_state_of_garbage(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = asked(f"Path('state.json').write_text({text!r})", tmp_path, monkeypatch)
    assert answer.error.startswith("its process ended with 0")


def test_another_python_has_a_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert "PYTHONPATH" not in process._environment("other/python")
    assert process._environment(sys.executable)["PYTHONPATH"] == "elsewhere"


@pytest.mark.parametrize(
    ("name", "python", "timeout", "told"),
    [
        ("vlm", None, None, "Did you mean vllm?"),
        ("transformers", "no/such/python", None, "no Python interpreter no/such/python"),
        ("transformers", None, 0, "0 seconds"),
        ("sglang", None, None, "has no sglang. Install sglang there"),
        ("vllm", "/bin/false", None, "did not say whether its environment has vllm"),
        ("vllm", "/bin/echo", None, "did not say whether its environment has vllm"),
    ],
)
def test_an_engine_that_is_not_there(
    name: str, python: str | None, timeout: float | None, told: str
) -> None:
    with pytest.raises(ArgumentError, match=told.replace("?", r"\?")):
        Engine.checked(name, python, timeout)


def test_an_engine_that_is_there() -> None:
    assert check_engine("transformers", None, None) == sys.executable
    assert os.path.exists(check_engine("transformers", sys.executable, 3.5))


def test_what_it_gave_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = state(stage="done", amplitudes={"up": 2.0}, rounded=["up"])
    code = told + "import torch\nfrom safetensors.torch import save_file\n"
    code += "save_file({'module/up': torch.ones(2, 3)}, 'outputs.safetensors')\n"
    answer = asked(code, tmp_path, monkeypatch)
    assert not answer.error
    assert answer.amplitudes == {"up": 2.0}
    assert list(answer.rounded) == ["up"]
    assert answer.outputs["module/up"].shape == (2, 3)
