# SPDX-License-Identifier: Apache-2.0
"""Quality gates of a run: its output gets its name only if it keeps their limits.

What is measured is the checkpoint as it lies on the disk, loaded as ``evaluate`` loads it, on text
that the run has not calibrated or trained with. The text is read before any work, and the original
model after it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.args.gates import GATES, SIZE
from llmcompressor.checkpoint.atomic_output import rejected_folder
from llmcompressor.checkpoint.load import load_config, loading_errors, model_class
from llmcompressor.checkpoint.manifest import note_gates
from llmcompressor.checkpoint.source import is_hub_id
from llmcompressor.datasets import open_source
from llmcompressor.datasets import rows as table
from llmcompressor.datasets.rows import has_columns
from llmcompressor.datasets.source import parse_split
from llmcompressor.entrypoints.arguments import Task, position_limit
from llmcompressor.entrypoints.evaluate import check_windows, evaluate
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    DatasetError,
    GateError,
    NonFiniteError,
)
from llmcompressor.evaluation.models import check_not_encoder_decoder
from llmcompressor.evaluation.sources import (
    Window,
    cut_windows,
    documents_of_rows,
    sample_windows,
    tokenized_documents,
)
from llmcompressor.logger import logger
from llmcompressor.modeling.sharded import is_sharded
from llmcompressor.modeling.weights import text_config
from llmcompressor.reporting.report import show_evaluation
from llmcompressor.runtime.processes import is_first_rank, working_alone
from llmcompressor.runtime.run_record import CHECKING, phase

_HELD_OUT = ("test", "validation", "eval")
"""Splits to measure on, the best first."""
_WINDOWS = 128
_LENGTH = 256
"""Tokens of a window."""
_ENOUGH = 8 * _WINDOWS * _LENGTH
"""Tokens of which the windows are drawn."""
_LEAST_SHARED = 16
"""Tokens that two documents begin with, for one of them to be taken for the other."""
_GIVE = "Give text to measure on: gate_dataset=... (--gate-dataset FILE)."


@dataclass(frozen=True)
class HeldOut:
    """Text to measure on.

    Attributes:
        name: of its source, in words.
        windows: token ids.
        length: of a window, but the last.
    """

    name: str
    windows: Sequence[Window]
    length: int


@dataclass(frozen=True)
class Comparison:
    """Compares an output with the original model, on held-out text.

    Attributes:
        text: what is measured on.
        reference: the original model.
        trusts: run modelling code that comes with the models.
    """

    text: HeldOut
    reference: Any
    trusts: bool = False

    def __call__(self, folder: Path) -> dict[str, float | None]:
        """Measure the checkpoint in a folder.

        Returns:
            The value of each gate but the size; ``None`` where it is no number.

        Raises:
            CheckpointError: transformers cannot load it.
        """
        try:
            with working_alone():
                report = evaluate(
                    folder,
                    reference=self.reference,
                    dataset=[{"input_ids": window} for window in self.text.windows],
                    max_seq_length=self.text.length,
                    trust_remote_code_model=self.trusts,
                )
        except NonFiniteError as error:
            logger.error(f"The checkpoint cannot be measured. {error}")
            return dict.fromkeys(GATES.keys() - {SIZE})
        increase = report.loss_increase
        return {
            "kl": report.kl_divergence,
            "perplexity": None if increase is None else math.exp(min(increase, 700.0)),
            "top1": report.top1_agreement,
        }

    @property
    def tokens(self) -> int:
        """The number of tokens whose prediction is measured."""
        return sum(len(one) - 1 for one in self.text.windows)


@dataclass(frozen=True)
class Gates:
    """The gates of a run, called with the folder of a whole output.

    Attributes:
        limits: name → limit.
        target: the folder whose name the output gets if it keeps them.
        compare: measures them; ``None`` for gates that need nothing measured.
    """

    limits: Mapping[str, float]
    target: Path
    compare: Comparison | None = None

    def __call__(self, folder: Path) -> None:
        """Measure an output, and note the figures in its report and its manifest.

        Raises:
            GateError: it does not keep a limit.
            CheckpointError: transformers cannot load it.
        """
        with phase(CHECKING):
            values: dict[str, float | None] = {SIZE: bytes_of_weights(folder)}
            if self.compare is not None:
                values |= self.compare(folder)
        measured = {
            name: {
                "value": values[name],
                "limit": limit,
                "passed": GATES[name].passes(values[name], limit),
            }
            for name, limit in self.limits.items()
        }
        broken = [name for name, one in measured.items() if not one["passed"]]
        found: dict[str, Any] = {"passed": not broken, "measured": measured}
        if self.compare is not None:
            found |= {"text": self.compare.text.name, "tokens": self.compare.tokens}
        note_gates(folder, found)
        show_evaluation(folder)
        if broken:
            reasons = [_told(name, values[name], self.limits[name]) for name in broken]
            raise GateError(str(rejected_folder(self.target)), str(self.target), reasons)
        logger.info(f"The gates are kept: {', '.join(self.limits)}.")


def bytes_of_weights(folder: Path) -> int:
    """Bytes of the weight files of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _told(name: str, value: float | None, limit: float) -> str:
    """Return a clause about a gate that is not kept.

    >>> _told("kl", 0.25, 0.02), _told("top1", None, 0.9)
    ('kl is 0.25, and at most 0.02 is allowed', 'top1 is no number, and at least 0.9 is allowed')
    >>> _told("size", 187376, 187375)
    'size is 187,376 bytes, and at most 187,375 bytes is allowed'
    """
    shown = [
        "no number" if one is None else f"{int(one):,} bytes" if name == SIZE else f"{one:.5g}"
        for one in (value, limit)
    ]
    allowed = "at least" if GATES[name].is_least else "at most"
    return f"{name} is {shown[0]}, and {allowed} {shown[1]} is allowed"


# --------------------
# Preparation, before any work.


def check_size(limits: Mapping[str, float], predicted: int, *, is_least: bool = False) -> None:
    """Refuse a run whose weight files will be larger than its gate allows.

    Args:
        limits: the gates.
        predicted: bytes of the files, exactly.
        is_least: they are those of the smallest choice of schemes that a budget has.

    Raises:
        ArgumentError: they are larger.
    """
    limit = limits.get(SIZE)
    if limit is not None and predicted > limit:
        files = "the smallest files that the budget can choose" if is_least else "the weight files"
        fewer = "give candidates of" if is_least else "quantize more modules or to"
        raise ArgumentError(
            f"The gate 'size' allows {int(limit):,} bytes, and {files} will have {predicted:,}.",
            f"Allow that much, or {fewer} fewer bits.",
        )


def prepare_gates(
    task: Task, model: Module, processor: Any, seen: Iterable[Mapping[str, Any]] | None
) -> Gates | None:
    """Return the gates of a run, with the text to measure on; ``None`` if it has none.

    Args:
        task: the arguments of the run.
        model: the model, before any change; its weights may be on the meta device. An object is
            copied if gates compare with it.
        processor: the tokenizer or processor, if it is loaded already.
        seen: batches or samples of the run, of which none is measured on.

    Raises:
        ArgumentError: the original cannot be compared with.
        CheckpointError: there is no such original, or it is of no kind that can be measured.
        DatasetError: there is no held-out text.
    """
    if not task.gates or task.output_dir is None:
        return None
    if not task.gates.keys() - {SIZE}:
        return Gates(task.gates, task.output_dir)
    compare = prepare_comparison(task, model, processor, seen)
    return Gates(task.gates, task.output_dir, compare)


def prepare_comparison(
    task: Task, model: Module, processor: Any, seen: Iterable[Mapping[str, Any]] | None
) -> Comparison:
    """Return what measures outputs of a run, with the text to measure on.

    Args and errors are those of :func:`prepare_gates`.
    """
    reference, positions = _original(task, model)
    text = _held_out(task, model, processor, seen, min(_LENGTH, positions or _LENGTH))
    if reference is model:
        logger.info(
            "The model is copied, for its gates to compare with. gate_reference=... takes a "
            "folder in its place, and no memory meanwhile."
        )
        reference = copy.deepcopy(model).eval() if is_first_rank() else None
    return Comparison(text, reference, task.model_args.trust_remote_code_model)


def _original(task: Task, model: Module) -> tuple[Any, int | None]:
    """Return what gates compare with, a place or an object, and how many tokens it takes."""
    given = task.run_args.gate_reference
    if given is None and isinstance(task.model_args.model, str | Path):
        given = task.source or task.model_args.model
    is_open = any(one.is_meta for one in model.parameters())  # its weights are loaded by block
    if given is None and (is_open or is_sharded(model)):
        raise ArgumentError(
            "The model is spread, so that gates cannot compare with a copy of it.",
            "Give the original: gate_reference=...",
        )
    found = model if given is None else given
    if isinstance(found, Module):
        check_not_encoder_decoder(getattr(found, "config", None), f"the {type(found).__name__}")
        return found, position_limit(found).limit
    place = str(Path(found).expanduser())
    if not Path(place).is_dir() and not is_hub_id(str(found)):
        raise CheckpointError(f"There is no model folder {found}.", "Check gate_reference.")
    place = place if Path(place).is_dir() else str(found)
    trusts = task.model_args.trust_remote_code_model
    with loading_errors(place):
        config = load_config(place, trust_remote_code=trusts)
        check_not_encoder_decoder(config, place)
        model_class(config, trust_remote_code=trusts)
    return found, getattr(text_config(config), "max_position_embeddings", None)


def _held_out(
    task: Task,
    model: Module,
    processor: Any,
    seen: Iterable[Mapping[str, Any]] | None,
    length: int,
) -> HeldOut:
    given = task.run_args.gate_dataset
    source = _source_of_text(task.dataset_args, given)
    tokenizer = task.processor if processor is None else processor
    with task.explain_missing_processor():
        if isinstance(source, DatasetArguments):
            documents = documents_of_rows(source, tokenizer)
            name = f"the split {source.splits!r} of the data"
        else:
            documents = tokenized_documents(source, tokenizer)
            name = "held-out modules of Python's standard library"
        kept = list(_unseen(documents, seen))
    if given is not None and source is not None:
        name = str(given) if isinstance(given, str | Path) else f"the given {type(given).__name__}"
    length = min(length, position_limit(model).limit or length)
    windows = sample_windows(cut_windows(kept, length), _WINDOWS, seed=0)
    if not windows:
        raise DatasetError(
            f"There is nothing to measure gates on: of {name} no text is left that the run has "
            "not seen.",
            _GIVE,
        )
    check_windows(windows, model)
    return HeldOut(name, windows, length)


def _source_of_text(args: DatasetArguments, given: Any) -> Any:
    """Return the source of held-out text: arguments of rows, a text file or ``None`` for Python's.

    Raises:
        DatasetError: the data of the run has no held-out part.
    """
    data = args.dataset
    if _is_mix(given):
        return None
    if given is not None:
        other = DatasetArguments(dataset=given, text_column=args.text_column)
        split = _held_out_split(other, ())
        if split is not None:
            return replace(other, splits=split)
        is_named = isinstance(given, str | Path) and str(given) == str(data)
        if is_named and (args.concatenate_data or args.streaming):  # no sample tells its row
            raise DatasetError(f"Gates would be measured on the data of the run, {data}.", _GIVE)
        return given
    if data is None and args.dataset_path is None:
        return None
    if _is_mix(data):
        return None
    used = args.splits.values() if isinstance(args.splits, Mapping) else args.splits or ()
    used = [used] if isinstance(used, str) else used
    split = _held_out_split(args, {part.name for one in used for part in parse_split(one)})
    if split is None:
        raise DatasetError(
            "Gates and a budget of kl are measured on text that the run has not seen, and its "
            f"data has no split for it ({', '.join(_HELD_OUT)}).",
            _GIVE,
        )
    return replace(args, splits=split)


def _is_mix(data: Any) -> bool:
    """Return True for a mix to calibrate with, from which modules of Python are held out."""
    return isinstance(data, str) and bool(getattr(table.find(data), "is_mix", False))


def _held_out_split(args: DatasetArguments, used: Collection[str]) -> str | None:
    """Return the best split of the data that is not used; ``None`` if it has none."""
    data = args.dataset
    free = [one for one in _HELD_OUT if one not in used]
    if isinstance(data, Mapping) and not has_columns(data):
        return next((one for one in free if one in data), None)
    if not (data is None or isinstance(data, str | Path)):
        return None
    for split in free:
        with suppress(DatasetError):
            if open_source(replace(args, splits=split)) is not None:
                return split
    return None


def _unseen(
    documents: Iterable[Window], seen: Iterable[Mapping[str, Any]] | None
) -> Iterator[Window]:
    """Yield documents that do not begin with a sample that the run has seen, and enough of them."""
    known: dict[int, set[int]] = {}
    for ids in _samples(seen):
        known.setdefault(len(ids), set()).add(hash(tuple(ids)))
    left = tokens = 0
    for one in documents:
        if any(
            hash(tuple(one[:length])) in hashes
            for length, hashes in known.items()
            if length == len(one) or _LEAST_SHARED <= length < len(one)
        ):
            left += 1
            continue
        yield one
        tokens += len(one)
        if tokens >= _ENOUGH:
            break
    if left:
        logger.warning(
            f"{left} documents to measure gates on were calibrated or trained with, and are left "
            "out."
        )


def _samples(seen: Iterable[Mapping[str, Any]] | None) -> Iterator[list[int]]:
    """Yield the token ids of samples, of which a batch may hold several; a stream is not read."""
    for one in () if seen is None or not hasattr(seen, "__len__") else seen:
        if not isinstance(one, Mapping) or one.get("input_ids") is None:
            continue
        ids = torch.as_tensor(one["input_ids"])
        mask = one.get("attention_mask")
        real = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
        rows = (each.reshape(-1, ids.shape[-1]) for each in (ids, real.bool()))
        for ids_T, real_T in zip(*rows, strict=True):
            yield ids_T[real_T].tolist()
