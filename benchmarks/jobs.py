# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes of their own: compress with one of the two tools, then evaluate."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from run_one import SERVED

HERE = Path(__file__).resolve().parent
REFERENCE = "llmcompressor==0.14.0.1"
REFERENCE_VARIABLE = "LLMCOMPRESSOR_REFERENCE_PYTHON"


class JobError(RuntimeError):
    """A measured process failed; the message ends with what it wrote."""


@dataclass(frozen=True)
class Job:
    """One compression, for ``run_one.py``.

    Attributes:
        model: Folder of the dense checkpoint.
        recipe: Class name of each modifier → its fields.
        tokens: JSON file with calibration token ids, or nothing for a data-free job.
        output: Folder to write.
        held_out: JSON file with token ids to measure the model in memory on; nothing is written.
        draw: Seed of random rotations.
        unmasked: Calibrate with full attention, as the reference does with Qwen3-MoE.
        as_object: Give the model as transformers loads it, and not its folder.
        wide: Linears of 16 bits multiply in float32 where that is faster (``wide.py``).
    """

    model: str
    recipe: dict[str, dict]
    tokens: str | None
    output: str
    held_out: str | None = None
    draw: int | None = None
    unmasked: bool = False
    as_object: bool = False
    wide: bool = False


class Worker:
    """A script of this folder that does one request after another in one process.

    What is imported is imported once, so the seconds that it reports are those of the work alone.

    Args:
        python: Interpreter of the tool.
        script: The script; it is run with ``--serve``.
    """

    def __init__(self, python: Path | str, script: str) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), "--serve"],
            env=_environment(str(python)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def ask(self, request: dict) -> dict:
        """Have it do one job; its report."""
        with scratch() as folder:
            report = folder / "report.json"
            self._process.stdin.write(json.dumps(request | {"report": str(report)}) + "\n")
            self._process.stdin.flush()
            said: list[str] = []
            for line in self._process.stdout:
                if line.strip() == SERVED:
                    return json.loads(report.read_text())
                said = [*said[-29:], line]
            raise JobError(f"{self._script} failed at {request}:\n{''.join(said)}")

    def close(self) -> None:
        """Let it end."""
        self._process.stdin.close()
        self._process.wait()


def compress(python: Path | str, job: Job) -> dict:
    """Run a job under an interpreter; its report, with the seconds of the whole process."""
    with scratch() as folder:
        job_file, report_file = folder / "job.json", folder / "report.json"
        job_file.write_text(json.dumps(asdict(job)))
        started = time.perf_counter()
        execute([str(python), str(HERE / "run_one.py"), str(job_file), str(report_file)])
        seconds = time.perf_counter() - started
        return json.loads(report_file.read_text()) | {"process_seconds": seconds}


def evaluate(checkpoint: str, tokens: Path, dense: str | None = None) -> dict:
    """Loss of a checkpoint and its distance from the dense model, by transformers alone."""
    with scratch() as folder:
        report_file = folder / "report.json"
        command = [sys.executable, str(HERE / "evaluate_one.py"), checkpoint, str(tokens)]
        execute([*command, str(report_file), *(["--dense", dense] if dense else [])])
        return json.loads(report_file.read_text())


def compress_and_evaluate(
    python: Path | str, model: str, recipe: dict[str, dict], tokens: Path | None, held_out: Path
) -> dict:
    """Both, on an output folder that is removed afterwards.

    Args:
        python: Interpreter of the tool.
        model: Folder of the dense checkpoint.
        recipe: Class name of each modifier → its fields.
        tokens: Calibration token ids, or nothing for a data-free job.
        held_out: Token ids to evaluate on.
    """
    with scratch() as folder:
        output = str(folder / "compressed")
        job = Job(model, recipe, tokens=str(tokens) if tokens else None, output=output)
        cost = compress(python, job)
        size = sum(file.stat().st_size for file in Path(output).glob("*.safetensors"))
        return cost | {"bytes": size, "quality": evaluate(output, held_out, dense=model)}


def reference_python(given: str | None) -> Path:
    """Interpreter of the reference's environment, which is made if none is named.

    Args:
        given: What the command line names; the environment variable comes next.
    """
    named = given or os.environ.get(REFERENCE_VARIABLE)
    if named:
        return Path(named)
    # the reference takes no transformers as new as ours, so that one is left to it
    return made_environment(".reference", REFERENCE)


def made_environment(name: str, *packages: str) -> Path:
    """Interpreter of an environment with our torch and some packages, made on the first call.

    Args:
        name: Its folder beside the benchmarks.
        packages: What pip is to install.
    """
    folder = HERE / name
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making an environment for {', '.join(packages)} in {folder} ...", flush=True)
        torch = f"torch=={importlib.metadata.version('torch').split('+')[0]}"
        execute([sys.executable, "-m", "venv", str(folder)])
        try:
            execute([str(python), "-m", "pip", "install", "--quiet", torch, *packages])
        except JobError:
            shutil.rmtree(folder)
            raise
    return python


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one of the cores busy with another process for as long as the block runs.

    It also ends when this process is killed: whatever is measured next would suffer from it.
    """
    core = max(os.sched_getaffinity(0))
    code = (
        f"import os\nos.sched_setaffinity(0, {{{core}}})\n"
        f"while os.getppid() == {os.getpid()}:\n    for _ in range(100_000): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk of the project: ``/tmp`` may be memory, and would count as such."""
    (HERE / ".models").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HERE / ".models", prefix="run-") as folder:
        yield Path(folder)


def execute(command: list[str]) -> None:
    """Run a command to the end without network; what it prints is shown only if it fails."""
    done = subprocess.run(
        command,
        env=_environment(command[0], offline="pip" not in command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-30:])
        raise JobError(f"{' '.join(command[:3])} failed with code {done.returncode}:\n{tail}")


def _environment(python: str, *, offline: bool = True) -> dict[str, str]:
    quiet = {"TOKENIZERS_PARALLELISM": "false"}
    return variables_for(python) | quiet | ({"HF_HUB_OFFLINE": "1"} if offline else {})


def variables_for(python: str) -> dict[str, str]:
    """The environment variables that an interpreter is measured with.

    An interpreter other than this one must not find the packages of this one. An installed
    package is compiled once: what is run from its sources has to be so too, or it would be
    compiled for every process that is timed.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONDONTWRITEBYTECODE" and (name != "PYTHONPATH" or python == sys.executable)
    }
