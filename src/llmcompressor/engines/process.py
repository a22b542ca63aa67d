# SPDX-License-Identifier: Apache-2.0
"""A job in an engine's own process, and in the environment of another Python if that is asked for.

The process may do anything: refuse the model, die, take too long, write what cannot be read. All of
that becomes an :class:`Answer`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from llmcompressor.errors import ArgumentError, did_you_mean

ENGINES = ("vllm", "transformers", "sglang")
"""Engines that a checkpoint can be run with."""
TIMEOUT = 900.0
"""Seconds that an engine has for one model, unless another number is given."""
_RUNNER = Path(__file__).parent / "runner"
_PACKAGE = "llmcompressor_runner"
_ANSWER = "llmcompressor-lacks"
_LOOK = 60.0
"""Seconds to find out whether an environment has an engine."""
_GRACE = 5.0
"""Seconds that a process has to end after it was told to."""
_MOST_TOLD = 600
_SHELL = 128
"""A shell that runs a process which a signal has ended ends with this and the signal's number."""
_CRASHES = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
    | {signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process gets for what it does itself."""
_NO_CODE = re.compile(
    r"has no attribute 'cpu_linear'|^NotImplementedError|^AttributeError: module 'triton'"
)
"""What an engine raises that has no code for the device; Triton is a stand-in where it lacks."""
_NOISE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Answer:
    """What a process has given.

    Attributes:
        stage: how far it came: ``importing``, ``loading``, ``running`` or ``done``.
        error: why it ended before that, in the engine's own words; empty if it did not.
        versions: of the engine and of what it computes with.
        outputs: tensors by name, as :mod:`llmcompressor.engines.runner.__main__` says.
        amplitudes: module → magnitude of its inputs.
        silent: module that could not be called by itself → why.
        is_late: it was ended, since it took too long.
        signal: the number of the signal that ended it otherwise; 0 if none did.
        drawn: tensors that the engine found no values for, and has drawn at random.
        rounded: modules whose inputs the engine rounds to 8 bits, whatever their scheme is.
    """

    stage: str = "importing"
    error: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    amplitudes: Mapping[str, float] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)
    is_late: bool = False
    signal: int = 0
    drawn: Sequence[str] = ()
    rounded: Sequence[str] = ()

    @property
    def is_refusal(self) -> bool:
        """True if the engine did not take the model."""
        return bool(self.error) and self.stage == "loading" and not (self.is_late or self.signal)

    @property
    def is_crash(self) -> bool:
        """True if a signal ended it for what it did itself, such as reading where nothing is."""
        return self.signal in _CRASHES

    @property
    def is_broken_off(self) -> bool:
        """True if it was ended from outside, which tells nothing of the model."""
        return self.is_late or (self.signal > 0 and not self.is_crash)

    @property
    def may_lack_a_kernel(self) -> bool:
        """True if the engine may do so on another device: it refuses, or has no code for this one.

        vLLM has none for rotations in the forward and for packed embeddings on a CPU, and finds out
        when it runs.
        """
        return self.is_refusal or _NO_CODE.search(self.error) is not None


def check_engine(engine: str, python: str | os.PathLike[str] | None, timeout: float | None) -> str:
    """The Python to run an engine with.

    Args:
        engine: of :data:`ENGINES`.
        python: the interpreter of its environment; the one that runs by default.
        timeout: seconds for one model.

    Raises:
        ArgumentError: there is no such engine or interpreter, the environment does not have the
            engine, or the number of seconds is not positive.
    """
    if engine not in ENGINES:
        raise ArgumentError(
            f"There is no engine named {engine!r} to verify with.", did_you_mean(engine, ENGINES)
        )
    if timeout is not None and not timeout > 0:
        raise ArgumentError(
            f"The time limit of the engine is {timeout} seconds.", "Give a positive number."
        )
    found = sys.executable if python is None else shutil.which(Path(python).expanduser())
    if found is None:
        raise ArgumentError(
            f"There is no Python interpreter {os.fspath(python or '')}.",
            "Give the path of the one in the engine's environment, such as ENV/bin/python.",
        )
    found = os.path.abspath(found)  # links stay: by them an environment is found
    is_there = _has(found, engine)
    if is_there is None:
        raise ArgumentError(
            f"{found} did not say whether its environment has {engine}: it ended with an error, "
            "or runs no Python code.",
            "Give the Python of the engine's environment, such as ENV/bin/python, and see that it "
            "starts.",
        )
    if not is_there:
        raise ArgumentError(
            f"The environment of {found} has no {engine}.",
            f"Install {engine} there, or name the Python of an environment that has it by --python "
            "(python=, verify_python=).",
        )
    return found


def _has(python: str, engine: str) -> bool | None:
    """``None`` if the program gives no answer."""
    asked = (
        f"import importlib.util; print({_ANSWER!r}, importlib.util.find_spec({engine!r}) is None)"
    )
    try:
        done = subprocess.run(
            [python, "-c", asked],
            cwd=_RUNNER,
            env=_environment(python),
            capture_output=True,
            check=False,
            timeout=_LOOK,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode(errors="replace").split("\n")  # an environment may print more
    said = [line.split()[1] for line in lines if line.startswith(f"{_ANSWER} ")]
    return said[-1] == "False" if said else None


def _environment(python: str) -> dict[str, str]:
    """The variables of the engine's process: what this one finds is not for another Python."""
    is_own = python == sys.executable
    kept = {name: value for name, value in os.environ.items() if is_own or name != "PYTHONPATH"}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}


def run_job(job: Mapping[str, Any], folder: Path, python: str, timeout: float | None) -> Answer:
    """Run a job and wait for it.

    Args:
        job: ``engine``, ``model`` and all that its module in the runner reads.
        folder: an empty folder for the job's files.
        python: the interpreter.
        timeout: seconds; :data:`TIMEOUT` by default. The process and its children are ended then.

    Returns:
        What came of it, whatever it was.
    """
    shutil.copytree(_RUNNER, folder / _PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    seconds = TIMEOUT if timeout is None else timeout
    ended = _wait([python, "-m", _PACKAGE, "job.json"], folder, seconds)
    state = _state(folder / "state.json")
    known = Answer(
        stage=str(state.get("stage") or "importing"),
        error=str(state.get("error") or "")[:_MOST_TOLD],
        versions=_texts(state.get("versions")),
        silent=_texts(state.get("silent")),
    )
    if known.error:
        causes = [str(one) for one in state.get("causes") or ()]
        return _with_error(known, told(known.error, causes))
    if ended is None:
        said = f"it was not done after {seconds:g} seconds"
        return replace(_with_error(known, said), is_late=True)
    number = -ended if ended < 0 else ended - _SHELL if ended > _SHELL else 0
    if number and known.stage != "done":
        return replace(_with_error(known, killed_by(number)), signal=number)
    if known.stage != "done":
        last = _last_line(folder / "log.txt")
        return _with_error(known, f"its process ended with {ended}, and said last: {last}")
    try:
        outputs = load_file(folder / "outputs.safetensors")
        amplitudes = {str(name): float(one) for name, one in state["amplitudes"].items()}
        drawn, rounded = (
            [str(one) for one in state.get(key) or ()] for key in ("drawn", "rounded")
        )
    except Exception as error:  # of any kind: what an engine's process writes may be anything
        return _with_error(known, f"what its process wrote cannot be read: {error!r:.200}")
    return replace(
        known, stage="done", outputs=outputs, amplitudes=amplitudes, drawn=drawn, rounded=rounded
    )


def killed_by(number: int) -> str:
    """A clause about a process that a signal has ended.

    >>> killed_by(9)
    'its process was killed by signal 9 (SIGKILL), probably for memory'
    >>> killed_by(99)
    'its process was killed by signal 99'
    """
    with suppress(ValueError):
        name = signal.Signals(number).name
        why = ", probably for memory" if number == signal.SIGKILL else ""
        return f"its process was killed by signal {number} ({name}){why}"
    return f"its process was killed by signal {number}"


def _with_error(known: Answer, error: str) -> Answer:
    return Answer(known.stage, error, known.versions, silent=known.silent)


def told(error: str, causes: Sequence[str]) -> str:
    """An engine's message, with the exception behind it where that says more.

    >>> told("RuntimeError: Engine core initialization failed. See root cause above.", [])
    'RuntimeError: Engine core initialization failed. See root cause above.'
    >>> told("RuntimeError: Engine core initialization failed.", ["KeyError: 'up'"])
    "KeyError: 'up'"
    """
    is_empty = "initialization failed" in error
    text = causes[0] if is_empty and causes else error
    return " ".join(_NOISE.sub("", text).split())[:_MOST_TOLD]


def _wait(command: Sequence[str], folder: Path, seconds: float) -> int | None:
    """The exit code of a command, ``None`` if it did not end in time.

    Its last argument is a pipe that ends with this process, also if that is killed.
    """
    ours, theirs = os.pipe()[::-1]
    try:
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(theirs)],
                cwd=folder,
                env=_environment(command[0]),
                pass_fds=(theirs,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
    finally:
        os.close(theirs)
        os.close(ours)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
            if number is signal.SIGKILL:
                return


def _state(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "nothing"
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][-_MOST_TOLD:] if said else "nothing"
