# SPDX-License-Identifier: Apache-2.0
"""The commands ``llmcompressor.transformers.text_generation.*`` of an earlier release.

Each is translated into the present command, which is shown and run. Their options were the fields
of the argument dataclasses as ``--name value``, with booleans written out.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments, RunArguments
from llmcompressor.args.parsing import OLD_NAMES, those_of_training
from llmcompressor.args.renamed import RENAMED
from llmcompressor.cli import main
from llmcompressor.cli.options import flags_of
from llmcompressor.cli.train import OF_CALIBRATION
from llmcompressor.cli.training_options import OPTIONS

__all__ = ["evaluate", "oneshot", "run", "train", "translated"]

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
    """Report which command evaluates."""
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
    """Return the arguments of the present command.

    >>> translated("oneshot", ["--model", "m", "--max_seq_length", "8", "--streaming", "True"])
    ['oneshot', 'm', '--max-seq-length', '8', '--streaming']
    """
    given = dict(_by_present_names(_values(arguments)))
    left_out = set[str]()
    if command == "oneshot":
        left_out.update(those_of_training(given, *_CLASSES))
    elif command == "train":
        left_out.update(set(given) & set(OF_CALIBRATION))
    flags: Mapping[str, bool] = {
        name: default for one in _CLASSES for name, default in flags_of(one).items()
    }
    line = [command, *given.pop("model", [])]
    for name, values in given.items():
        if name in left_out:
            continue
        if name in flags:
            line += _flag(name, values, usual=flags[name])
        elif name in OPTIONS and OPTIONS[name].type is bool:
            line += _flag(name, values, usual=False)
        elif command == "oneshot" or name in OPTIONS or _is_field(name):
            line += [part for value in values for part in (_dashed(name), value)]
        else:
            line += ["--set", f"{name}={_as_json(values)}"]
    return line


def _values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Group ``--name value value``, ``--name=value`` and ``--name`` by name."""
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


def _is_field(name: str) -> bool:
    return name == "output_dir" or any(name in one.__dataclass_fields__ for one in _CLASSES)


def _flag(name: str, values: Iterable[str], *, usual: bool) -> list[str]:
    """Return the option that switches a flag from its default; empty if it has the default."""
    wanted = all(value.lower() in _TRUE for value in values)
    if wanted == usual:
        return []
    return [_dashed(name if wanted else f"no-{name}")]


def _as_json(values: Sequence[str]) -> str:
    text = " ".join(values) if values else "true"
    return text.lower() if text in {"True", "False"} else text


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")
