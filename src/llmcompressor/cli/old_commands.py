# SPDX-License-Identifier: Apache-2.0
"""The commands of earlier releases.

Each ``llmcompressor.transformers.text_generation.*`` becomes the command of today: it is shown and
run. Their options were the fields of the argument dataclasses as ``--name value``, truth values
written out. ``reindex`` and ``trace`` did work that is not needed here.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.args.parsing import OLD_NAMES, RENAMED, training_argument_names
from llmcompressor.cli import main
from llmcompressor.cli.commands import OF_CALIBRATION, OPTIONS
from llmcompressor.cli.options import dashed, flag_defaults

_CLASSES = (ModelArguments, DatasetArguments, RecipeArguments, RunArguments)
_TRUE = frozenset({"1", "t", "true", "y", "yes"})
_HELP = frozenset({"-h", "--help"})


def oneshot(arguments: Sequence[str] | None = None) -> None:
    """Run ``llmcompressor oneshot``."""
    _run("oneshot", arguments)


def train(arguments: Sequence[str] | None = None) -> None:
    """Run ``llmcompressor train``."""
    _run("train", arguments)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run ``llmcompressor run``: all stages."""
    _run("run", arguments)


def evaluate(arguments: Sequence[str] | None = None) -> None:
    """Say what evaluates."""
    del arguments
    sys.stderr.write(
        "Error: this command is no longer there. `llmcompressor evaluate MODEL --text FILE` "
        "measures perplexity, `llmcompressor train` with --eval-strategy the loss in a training.\n"
    )
    raise SystemExit(2)


def _run(command: str, arguments: Sequence[str] | None) -> None:
    typed = sys.argv[1:] if arguments is None else list(arguments)
    line = [command, "--help"] if _HELP & set(typed) else translated(command, typed)
    sys.stderr.write(f"This command is now: llmcompressor {shlex.join(line)}\n")
    main(line)


def translated(command: str, arguments: Sequence[str]) -> list[str]:
    """The arguments of today's command.

    >>> translated("oneshot", ["--model", "m", "--max_seq_length", "8", "--streaming", "True"])
    ['oneshot', 'm', '--max-seq-length', '8', '--streaming']
    """
    given = dict(_by_present_names(_values(arguments)))
    left_out = set[str]()
    if command == "oneshot":
        left_out.update(training_argument_names(given, *_CLASSES))
    elif command == "train":
        left_out.update(set(given) & set(OF_CALIBRATION))
    flags: Mapping[str, bool] = {
        name: default for one in _CLASSES for name, default in flag_defaults(one).items()
    }
    line = [command, *given.pop("model", [])]
    for name, values in given.items():
        if name in left_out:
            continue
        if name in flags:
            line += _flag(name, values, usual=flags[name])
        elif name in OPTIONS and OPTIONS[name].type is bool:
            line += _flag(name, values, usual=False)
        elif (
            command == "oneshot"
            or name in OPTIONS
            or name == "output_dir"
            or any(name in one.__dataclass_fields__ for one in _CLASSES)
        ):
            line += [part for value in values for part in (dashed(name), value)]
        else:
            line += ["--set", f"{name}={_as_json(values)}"]
    return line


def _values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """``--name value value``, ``--name=value`` and ``--name`` alone, by name."""
    found: dict[str, list[str]] = {}
    current = found.setdefault("model", [])
    for one in arguments:
        if not one.startswith("--"):
            current.append(one)
            continue
        name, equals, value = one.removeprefix("--").partition("=")
        current = found.setdefault(name.replace("-", "_"), [])
        if equals:
            current.append(value)
    return found


def _by_present_names(given: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    for name, values in given.items():
        if name not in OLD_NAMES:
            yield RENAMED.get(name, name), values
        elif (new := OLD_NAMES[name].new) is not None:
            yield new, values


def _flag(name: str, values: Iterable[str], *, usual: bool) -> list[str]:
    """The option that turns something on or off; nothing where that is as it is anyway."""
    wanted = all(value.lower() in _TRUE for value in values)
    if wanted == usual:
        return []
    return [dashed(name if wanted else f"no-{name}")]


def _as_json(values: Sequence[str]) -> str:
    text = " ".join(values) if values else "true"
    return text.lower() if text in {"True", "False"} else text


def reindex(arguments: Sequence[str] | None = None) -> None:
    """Give the next step the folder that it reads: a copy of the checkpoint."""
    parser = argparse.ArgumentParser(
        prog="llmcompressor.reindex_fused_weights",
        description="Not needed: model_free_ptq takes a checkpoint however its weights lie in "
        "files. For scripts that go on from the folder SAVE_DIRECTORY it is made, as a copy.",
    )
    parser.add_argument("model_stub", help="folder or name of the model")
    parser.add_argument("save_directory", help="folder to write; must be new")
    parser.add_argument("--num_workers", type=int, default=5, help="without effect")
    given = parser.parse_args(arguments)
    from llmcompressor.errors import InputError  # noqa: PLC0415  # --help is quick

    try:
        _copy(given.model_stub, Path(given.save_directory))
    except (InputError, OSError) as error:
        parser.exit(2, f"Error: {error}\n")
    sys.stdout.write(
        "This step is not needed: model_free_ptq takes the checkpoint however its weights lie in "
        f"files.\nWritten: {given.save_directory}, a copy.\n"
    )


def trace(arguments: Sequence[str] | None = None) -> None:
    """Say that nothing is traced."""
    del arguments
    sys.stderr.write(
        "Error: nothing is traced here, since a run pauses the model's own forward. "
        "`llmcompressor plan` says what a run would do.\n"
    )
    raise SystemExit(2)


def _copy(model: str, target: Path) -> None:
    """Copy a checkpoint; the folder has its name when it is complete."""
    from llmcompressor.checkpoint.load import fetch  # noqa: PLC0415  # loads torch
    from llmcompressor.checkpoint.source import is_hub_id  # noqa: PLC0415
    from llmcompressor.errors import CheckpointError, OutputError  # noqa: PLC0415
    from llmcompressor.runtime.temporary import temporary_folder  # noqa: PLC0415

    source = fetch(model) if is_hub_id(model) else Path(model)
    if not source.is_dir():
        raise CheckpointError(f"There is no folder {model}.", "Give a model's folder or name.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target} already holds files.", "Give a new folder.")
    if target.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"{target} lies within the model's folder.", "Give another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{target.name}", target.parent) as place:
        made = place / "copy"
        shutil.copytree(source, made)  # of the hub's cache the files that its links lead to
        made.rename(target)
