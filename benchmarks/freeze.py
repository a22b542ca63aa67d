# SPDX-License-Identifier: Apache-2.0
"""Write down what the package does, and later say what it does otherwise.

PYTHONPATH=BASE/src benchmarks/freeze.py write RECORD       the commit that you begin from
benchmarks/freeze.py check RECORD                           your own
benchmarks/freeze.py check RECORD --only outputs --match moe/streamed

Three parts: ``outputs``, the hash of every file of many runs on small models; ``plans``, what
``plan`` says of them; ``exports``, every documented name, signature, field and help text. A record
is a folder with a file for each part, or one file (``.json``) with all.

Another checkout is judged with ``PYTHONPATH=/its/src``. Exit code of ``check``: 1 if anything
differs. Names that are new are listed and are no difference.

Hashes of weights depend on instructions of the processor and on versions of libraries. Runs are
held to instructions that processors have in common, those named ``native/`` excepted; ``check``
says where the record was made on another machine.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import frozen_cases as cases
from frozen_outputs import NATIVE_VARIABLE, OLD_PROCESSOR, SETTINGS
from frozen_surface import IMPORT

HERE = Path(__file__).resolve().parent
PARTS = ("outputs", "plans", "exports")
PACKAGES = cases.words(
    "torch transformers compressed-tensors numpy tokenizers safetensors datasets accelerate "
    "pydantic typer click"
)
ABSENT = "(absent)"
_LONGEST = 300
"""Characters of a value that are shown."""


# ------------------------------------------------------------------ the machine


def machine() -> dict[str, Any]:
    """What hashes may depend on."""
    import torch  # noqa: PLC0415

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
    return {
        "processor": info.get("model name", platform.machine()),
        "family": "/".join(info.get(key, "") for key in ("vendor_id", "cpu family", "model")),
        "instructions": [one for one in wanted if one in info.get("flags", "").split()],
        "torch computes with": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {' '.join(platform.libc_ver())}",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def unlike(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, how two machines differ."""
    return [f"{name}: {before!r} then, {after!r} now" for name, before, after in leaves(then, now)]


# ------------------------------------------------------------------ running


def _begin(folder: str, native: bool) -> None:
    """Of a process that does jobs: where it works, and what it computes with."""
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.nice(5)
    if native:
        os.environ[NATIVE_VARIABLE] = "1"
    from frozen_outputs import settle  # noqa: PLC0415

    settle()


def _build(name: str) -> None:
    import frozen_models  # noqa: PLC0415

    frozen_models.build(name)


def _job(name: str, keep: str | None) -> tuple[str, Any]:
    from frozen_outputs import run_job  # noqa: PLC0415

    try:
        return name, run_job(name, keep)
    except Exception:
        return name, {"failed": traceback.format_exc()}


class Runner:
    """Runs jobs in processes, on models in a folder that is removed afterwards.

    Args:
        processes: how many.
        keep: where outputs are kept, to compare them; nowhere if ``None``.
    """

    def __init__(self, processes: int, keep: Path | None) -> None:
        self._processes = processes
        self._keep = None if keep is None else str(keep.resolve())
        self._folder = tempfile.TemporaryDirectory(prefix="freeze-")
        self._is_built = False

    def run(self, names: list[str], *, native: bool = False) -> dict[str, Any]:
        """Do the jobs; name → result."""
        if not names:
            return {}
        variables = {} if native else OLD_PROCESSOR
        with _environment({**SETTINGS, **variables}):
            pool = ProcessPoolExecutor(
                self._processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self._folder.name, native),
            )
            with pool:
                self._build(pool)
                found = self._collect(pool, names)
        return {name: found[name] for name in names}

    def _build(self, pool: ProcessPoolExecutor) -> None:
        if self._is_built:
            return
        import frozen_models  # noqa: PLC0415

        here = Path.cwd()
        os.chdir(self._folder.name)
        frozen_models.write_side_files()
        os.chdir(here)
        list(pool.map(_build, cases.MODELS))
        self._is_built = True

    def _collect(self, pool: ProcessPoolExecutor, names: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        waiting = [pool.submit(_job, name, self._keep) for name in names]
        for number, one in enumerate(as_completed(waiting), 1):
            name, result = one.result()
            found[name] = result
            if sys.stderr.isatty():
                print(f"\r\033[K{number}/{len(names)} {name}", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return found

    def surface(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The part ``exports``, from a process of its own."""
        question, answer = (Path(self._folder.name, f"{one}.json") for one in ("asked", "found"))
        question.write_text(json.dumps(asked), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(HERE / "frozen_surface.py"), str(question), str(answer)],
            env={**os.environ, **SETTINGS, "FREEZE_JOBS": str(self._processes)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()


class _environment:  # noqa: N801 - a context
    """Variables of this process and of those that it starts, inside."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


def observe(given: argparse.Namespace, before: Mapping[str, Any]) -> dict[str, Any]:
    """All parts that are asked for, of the package as it is now.

    Args:
        given: what the command line says.
        before: the record, if there is one: of it are the modules whose names are looked for.
    """
    runner = Runner(given.jobs, given.keep)
    found: dict[str, Any] = {}
    try:
        if "exports" in given.only:
            asked: dict[str, Any] = {"root": str(HERE.parent)}
            if given.what == "check":
                asked["described"] = list(before["exports"]["described"])
                asked["modules"] = {
                    module: [name for name in names if name != IMPORT]
                    for module, names in before["exports"]["names"].items()
                }
            found["exports"] = runner.surface(asked)
        if "plans" in given.only:
            found["plans"] = runner.run(_chosen(cases.plan_jobs(), given.match))
        if "outputs" in given.only:
            found["outputs"] = runner.run(_chosen(cases.output_jobs(), given.match))
            found["outputs"] |= runner.run(_chosen(cases.native_jobs(), given.match), native=True)
    finally:
        runner.close()
    return found


def _chosen(names: list[str], match: list[str]) -> list[str]:
    return [name for name in names if not match or any(part in name for part in match)]


# ------------------------------------------------------------------ comparing


def leaves(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Every value that differs: its place, what it was, what it is."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from leaves(before.get(key, ABSENT), after.get(key, ABSENT), (*path, str(key)))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from leaves(one, other, (*path, str(place)))
    elif before != after:
        yield " > ".join(path), before, after


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], match: list[str]
) -> tuple[list[str], list[str]]:
    """Differences and news between two records, in words."""
    differences, news = [], []
    for part in PARTS:
        if part not in before or part not in after:
            continue
        then = before[part]
        if part != "exports":
            then = {name: then[name] for name in _chosen(list(then), match)}
        for place, was, now in leaves(then, after[part], (part,)):
            if part == "exports" and match and not any(one in place for one in match):
                continue
            is_new = part == "exports" and was == ABSENT and not place.endswith(IMPORT)
            (news if is_new else differences).append(_told(place, was, now))
    return differences, news


def _told(place: str, was: Any, now: Any) -> str:
    if isinstance(was, str) and isinstance(now, str) and "\n" in was + now:
        lines = difflib.unified_diff(
            was.splitlines(), now.splitlines(), "before", "after", lineterm="", n=0
        )
        return f"{place}\n" + "\n".join(f"    {line}" for line in lines)
    return f"{place}\n    before: {_short(was)}\n    after:  {_short(now)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


# ------------------------------------------------------------------ the record


def read(place: Path) -> dict[str, Any]:
    """A record: all parts that are there, and the machine."""
    files = [place] if place.suffix == ".json" else [place / f"{one}.json" for one in PARTS]
    found: dict[str, Any] = {}
    for file in files:
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            machines = found.get("machine", content["machine"])
            found |= content
            if machines != content["machine"]:
                print(f"{file} is of another machine than the files beside it.")
    return found


def write(place: Path, record: Mapping[str, Any]) -> None:
    """Write a record: one file, or a folder with one for each part."""
    if place.suffix == ".json":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_text(record), encoding="utf-8")
        return
    place.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part in record:
            content = {"commit": record["commit"], "machine": record["machine"]}
            content[part] = record[part]
            (place / f"{part}.json").write_text(_text(content), encoding="utf-8")


def _text(record: Mapping[str, Any]) -> str:
    """A line for each run, so that versions of a record can be compared line by line."""
    parts = []
    for name, content in record.items():
        as_lines = name in ("outputs", "plans")
        if as_lines:
            lines = [f" {json.dumps(key)}: {_line(content[key])}" for key in sorted(content)]
            shown = "{\n" + ",\n".join(lines) + "\n}"
        else:
            shown = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False)
        parts.append(f"{json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(content: Any) -> str:
    return json.dumps(content, sort_keys=True, ensure_ascii=False)


def _write(given: argparse.Namespace, before: dict[str, Any], now: dict[str, Any]) -> int:
    """Store what was seen; with a filter, beside what the record has of other jobs."""
    found = observe(given, before)
    if given.match and before:
        if before["machine"] != now:
            raise SystemExit(f"The record is of another machine: {unlike(before['machine'], now)}")
        for part in ("outputs", "plans"):
            if part in found:
                found[part] = {**before.get(part, {}), **found[part]}
    commit = given.commit or before.get("commit", "")
    write(given.record, {"commit": commit, "machine": now, **found})
    failed = [f"{name}: {one['failed']}" for name, one in _results(found) if "failed" in one]
    refused = sum("refused" in one for _, one in _results(found))
    names = sum(map(len, found.get("exports", {}).get("names", {}).values()))
    print(f"{len(_results(found))} runs, {refused} of them refused; {names} names.")
    for one in failed:
        print(f"No error of the package: {one}")
    return 0


def _results(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [*found.get("outputs", {}).items(), *found.get("plans", {}).items()]


def _check(given: argparse.Namespace, before: dict[str, Any], now: dict[str, Any]) -> int:
    """Say what differs."""
    if not before:
        raise SystemExit(f"There is no record at {given.record}.")
    given.only = [part for part in given.only if part in before]
    other = unlike(before["machine"], now)
    differences, news = compare(before, observe(given, before), given.match)
    if other:
        differences = [one for one in differences if not one.startswith("outputs > native/")]
    for one in news:
        print(f"new: {one}")
    for one in differences:
        print(one)
    print(f"{len(differences)} differences, {len(news)} new names.")
    if other:
        print("The record was made on another machine: " + "; ".join(other) + ".")
        print("Runs with all that the processor has (native/) were not compared.")
        if differences:
            commit = before.get("commit") or "COMMIT"
            print(
                "If outputs differ that nobody changed, make the record anew here, from the commit "
                "that it is of:\n"
                f"    git archive {commit} | tar -x -C BASE\n"
                "    PYTHONPATH=BASE/src python benchmarks/freeze.py write RECORD "
                f"--commit {commit}"
            )
    return 1 if differences else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("record", type=Path, help="folder, or file that ends in .json")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part, repeatable")
    parser.add_argument("--match", action="append", default=[], help="part of a name, repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--commit", help="what is written down, for `write`")
    parser.add_argument("--keep", type=Path, help="folder to keep the outputs in")
    given = parser.parse_args()
    given.only = given.only or list(PARTS)
    started = time.perf_counter()
    before = read(given.record)
    with _environment({**SETTINGS, **OLD_PROCESSOR}):
        now = machine()
    code = (_write if given.what == "write" else _check)(given, before, now)
    print(f"{time.perf_counter() - started:.0f} s")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
