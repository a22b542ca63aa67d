# SPDX-License-Identifier: Apache-2.0
"""``reproduce``: make a checkpoint again by its manifest, and compare the bytes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from llmcompressor.args.checks import path
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint.atomic_output import check_output_dir
from llmcompressor.checkpoint.journal import PROCESSOR, RunIdentity
from llmcompressor.checkpoint.manifest import read_manifest
from llmcompressor.checkpoint.model_config import GATES
from llmcompressor.checkpoint.source import is_hub_id, local_directory
from llmcompressor.datasets import rows
from llmcompressor.datasets.source import KIND_NAMES
from llmcompressor.datasets.text import rendered_at
from llmcompressor.entrypoints.fingerprints import NOT_OF_A_CALL, OBJECT, versions
from llmcompressor.entrypoints.model_free import model_free_ptq
from llmcompressor.entrypoints.oneshot import oneshot
from llmcompressor.entrypoints.train import train
from llmcompressor.errors import ArgumentError, CheckpointError, GateError
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.reporting.summary import summary_left_out
from llmcompressor.runtime.launch import launched_group
from llmcompressor.runtime.processes import Processes
from llmcompressor.runtime.progress import join_names
from llmcompressor.runtime.registry import normalize_name
from llmcompressor.runtime.temporary import temporary_folder

_MOST = 5
_PLACES = (
    *("model", "dataset", "dataset_path", "tokenizer", "processor", "distill_teacher"),
    *("gate_dataset", "gate_reference", "statistics"),
)
"""Arguments that may be paths."""
_OPTIONS = ("model", "dataset", "gate_dataset", "gate_reference")
"""Arguments that the command takes."""
_TRUST = ("trust_remote_code_model", "trust_remote_code_data")
"""Arguments that let code of others run: whoever reproduces gives them, not a manifest."""

_GIVE = "reproduce(..., {}=...)"
_FIXED = {"recipe", "report", "verify", "resume", "overwrite"}
"""Arguments of a run that are not given again."""


@dataclass(frozen=True)
class Reproduction:
    """What came of making a checkpoint again.

    Attributes:
        checkpoint: its folder.
        tensors: names of tensors that are not the same, or are in one of the two alone.
        files: other files, likewise.
        reasons: what decided the two runs and differs, a line each.
        output_dir: the folder of the new one; ``None`` if it was removed.
    """

    checkpoint: Path
    tensors: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    output_dir: Path | None = None

    @property
    def same(self) -> bool:
        """True if all weights and files have the same bytes."""
        return not self.tensors and not self.files

    def __str__(self) -> str:
        if self.same:
            lines = [f"{self.checkpoint}: same bytes"]
        else:
            lines = [f"{self.checkpoint}: NOT the same bytes"]
            lines += [f"tensors: {join_names(self.tensors, most=_MOST)}"] * bool(self.tensors)
            lines += [f"files: {join_names(self.files, most=_MOST)}"] * bool(self.files)
        lines += [f"what differs: {reason}" for reason in self.reasons]
        if not self.same and not self.reasons:
            lines.append("All that is recorded of the two runs is the same.")
        return "\n".join(lines)


@told_by_name
def reproduce(
    checkpoint: str | os.PathLike[str],
    *,
    model: Any = None,
    dataset: Any = None,
    output_dir: str | os.PathLike[str] | None = None,
    **arguments: Any,
) -> Reproduction:
    """Make a checkpoint again, by what its manifest says of the run, and compare the bytes.

    What already differs, such as versions or the processor, is logged before the run begins.

    Args:
        checkpoint: the folder of ``oneshot``, ``train``, ``model_free_ptq`` or of a stage.
        model: the model; by default the place that the run was given.
        dataset: the data; likewise.
        output_dir: where the new one is written, and stays; by default in a folder beside the
            checkpoint, which is removed.
        **arguments: further arguments of the run that are no longer what they were, or were
            objects.

    Returns:
        What differs; its ``same`` is True if nothing does.

    Raises:
        CheckpointError: the folder has no manifest, or it does not say how it was made.
        ArgumentError: an argument was an object or a path that is gone, and was not given.
    """
    show_runs_quietly()
    if fixed := sorted(_FIXED & arguments.keys()):
        raise ArgumentError(
            f"reproduce() does not take {fixed[0]!r}: the run is made again as its manifest says.",
            "Leave it out; to change it, compress the model anew.",
        )
    folder = Path(path("checkpoint", checkpoint)).expanduser().resolve()
    given = {"model": model, "dataset": dataset, **arguments}
    with ExitStack() as cleanup, ExitStack() as group:
        group.enter_context(launched_group())
        processes = Processes.from_process_group()
        with processes.notify_on_failure():
            before = read_manifest(folder)
            call = _Call.read(folder, before, {k: v for k, v in given.items() if v is not None})
            known = _known_before(before, call.arguments["model"], processes.count)
            for line in known if processes.is_first else ():
                logger.warning(f"It differs from the run that made {folder.name}: {line}.")
            place = cleanup.enter_context(_place(folder, output_dir, processes))
        if call.function == "train":
            group.close()  # accelerate makes its own
        with call.rendered(), summary_left_out() if output_dir is None else nullcontext():
            written = call.make(place)
        after = read_manifest(written)
        Processes.from_process_group().all_gather("manifests", is_long=True)  # before it is removed
    kept = None if output_dir is None else written
    return _compared(folder, before, after, kept)


@dataclass(frozen=True)
class _Call:
    """A call that made a checkpoint.

    Attributes:
        function: what was called.
        arguments: with those that are given now.
        recipe: the text of the recipe; ``None`` where the arguments say it.
        moment: which templates take for the present one.
        is_model_given: the model is not the one that is recorded.
    """

    function: str
    arguments: Mapping[str, Any]
    recipe: str | None
    moment: str | None
    is_model_given: bool

    @classmethod
    def read(cls, folder: Path, manifest: Mapping[str, Any], given: Mapping[str, Any]) -> _Call:
        """Read it from a manifest; errors as of :func:`reproduce`."""
        about = manifest["about"]
        call = about.get("call")
        if call is None or call.get("function") not in _FUNCTIONS:
            raise CheckpointError(
                f"The manifest of {folder} does not say how it was made: it was saved without a "
                "run of llmcompressor.",
                "Give the output of oneshot, train, model_free_ptq or of a stage of run_stages.",
            )
        told = {k: v for k, v in call["arguments"].items() if k not in NOT_OF_A_CALL}
        arguments = {**told, **given}
        arguments.setdefault("model", {OBJECT: "an object"})
        for name, value in arguments.items():
            if name not in given:
                _check_recorded(name, value)
        recipe, moment = call.get("recipe"), about.get("moment")
        return cls(call["function"], arguments, recipe, moment, "model" in given)

    def rendered(self) -> Any:
        """Return the context in which templates take the run's moment for the present one."""
        if self.moment is None:
            return nullcontext()
        return rendered_at(datetime.fromisoformat(self.moment))

    def make(self, place: Path) -> Path:
        """Call it again, for another output; return where that lies, also if gates reject it."""
        try:
            _FUNCTIONS[self.function](self, place)
        except GateError as error:
            return Path(error.folder)
        except CheckpointError as error:
            model = self.arguments["model"]
            if self.is_model_given or not isinstance(model, str) or local_directory(model):
                raise
            raise CheckpointError(
                error.problem, f"If it lies elsewhere, give it: {_GIVE.format('model')}, --model."
            ) from error
        return place


def _again(function: Callable[..., Any]) -> Callable[[_Call, Path], None]:
    def make(call: _Call, place: Path) -> None:
        function(recipe=call.recipe, output_dir=place, verify=False, report=False, **call.arguments)

    return make


def _model_free_again(call: _Call, place: Path) -> None:
    given = dict(call.arguments)
    model_free_ptq(given.pop("model"), place, verify=False, report=False, **given)


_FUNCTIONS: Mapping[str, Callable[[_Call, Path], None]] = {
    "oneshot": _again(oneshot),
    "train": _again(train),
    "model_free_ptq": _model_free_again,
}


def _check_recorded(name: str, value: Any) -> None:
    """Refuse an argument that cannot be given again as it is recorded."""
    remedy = f"Give it: {_GIVE.format(name)}"
    remedy += f", --{name.replace('_', '-')}." if name in _OPTIONS else "."
    if name in _TRUST and value:
        raise ArgumentError(
            f"The run was given {name}, which lets code that lies beside a model run here, and a "
            "manifest cannot allow that.",
            f"If you trust that code, {remedy[0].lower()}{remedy[1:]}",
        )
    if isinstance(value, Mapping) and value.keys() == {OBJECT}:
        raise ArgumentError(
            f"The run was given an object as {name} ({value[OBJECT]}), which the manifest does "
            "not hold.",
            remedy,
        )
    if name in _PLACES and isinstance(value, str) and not _is_there(name, value):
        raise ArgumentError(
            f"The run was given {name}={value!r}, and there is no such folder or file here.", remedy
        )


def _is_there(name: str, value: str) -> bool:
    if Path(value).expanduser().exists():
        return True
    if name == "dataset" and (rows.find(value) is not None or normalize_name(value) in KIND_NAMES):
        return True
    return is_hub_id(value) and not value.endswith((".json", ".jsonl", ".txt", ".csv", ".parquet"))


@contextmanager
def _place(
    folder: Path, output_dir: str | os.PathLike[str] | None, processes: Processes
) -> Iterator[Path]:
    """Yield the folder to write: the given one, or one that is removed at the end."""
    if output_dir is not None:
        yield check_output_dir(output_dir)
        return
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None
    with ExitStack() as removing:
        made = ""
        if processes.is_first:
            made = str(removing.enter_context(temporary_folder(f"{folder.name}.again", beside)))
        yield Path(processes.all_gather("folder", made)[0]).resolve() / folder.name


def _known_before(manifest: Mapping[str, Any], model: Any, ranks: int) -> Iterator[str]:
    """Yield what is known to differ before the run begins."""
    run = manifest["run"]
    now = RunIdentity(versions=versions(), ranks=ranks)
    then = {name: run[name] for name in now if name in run}
    machine = run.get(PROCESSOR, {}).get("machine")
    if machine is not None:
        then["machine"], now["machine"] = machine, platform.machine()
    yield from now.differences({**now, **then})
    if isinstance(model, str | os.PathLike):
        yield from _other_sizes(manifest["source"].get("files") or {}, model)


def _other_sizes(files: Mapping[str, Any], model: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the weight files of a source that have another size."""
    folder = local_directory(model)
    if folder is None:
        return
    for name, recorded in files.items():
        size = recorded.get("bytes") if isinstance(recorded, Mapping) else None
        if size is None or not (folder / name).is_file():
            continue
        if (found := (folder / name).stat().st_size) != size:
            yield f"{name} of the model: {size} bytes then, {found} now"


def _compared(
    folder: Path, before: Mapping[str, Any], after: Mapping[str, Any], kept: Path | None
) -> Reproduction:
    tensors = [
        {name: one for file in each["weights"].values() for name, one in file["tensors"].items()}
        for each in (before, after)
    ]
    changed = _differing(*tensors)
    files = _differing(before["files"], after["files"])
    if not changed:  # the same tensors may be laid out in another way
        one, other = (
            {name: file["sha256"] for name, file in each["weights"].items()}
            for each in (before, after)
        )
        files = [*_differing(one, other), *files]
    reasons = [
        line
        for part in ("source", "run")
        for line in RunIdentity({part: after[part]}).differences({part: before[part]})
    ]
    kept_gates = [_gates_told(each["about"].get(GATES)) for each in (before, after)]
    if kept_gates[0] != kept_gates[1]:
        reasons.append(f"gates: {kept_gates[0]} then, {kept_gates[1]} now")
    return Reproduction(folder, tuple(changed), tuple(files), tuple(reasons), kept)


def _gates_told(found: Mapping[str, Any] | None) -> str:
    """Return which gates there are, and which are not kept.

    >>> _gates_told({"measured": {"kl": {"passed": True}, "top1": {"passed": False}}})
    'kl kept, top1 NOT kept'
    """
    measured = {} if found is None else found.get("measured") or {}
    told = (f"{name} {'kept' if one['passed'] else 'NOT kept'}" for name, one in measured.items())
    return ", ".join(told) or "none"


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]
