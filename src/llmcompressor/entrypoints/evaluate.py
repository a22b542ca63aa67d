# SPDX-License-Identifier: Apache-2.0
"""``evaluate``: perplexity of a checkpoint, its distance from the original, and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Module
from transformers import AutoTokenizer, PreTrainedModel

from llmcompressor.args.checks import integer, optional
from llmcompressor.args.model_arguments import precision_name
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint.load import (
    check_model_declared,
    fetch,
    loading_errors,
    parse_precision,
)
from llmcompressor.checkpoint.source import is_hub_id
from llmcompressor.datasets.text import NoTokenizerError
from llmcompressor.entrypoints.arguments import position_limit, together, vocab_size_of
from llmcompressor.entrypoints.fingerprints import (
    model_fingerprint,
    values_fingerprint,
    weight_digests,
)
from llmcompressor.entrypoints.verify import verify
from llmcompressor.errors import ArgumentError, CheckpointError, CompressorError, DatasetError
from llmcompressor.evaluation.measure import measure
from llmcompressor.evaluation.metrics import Report
from llmcompressor.evaluation.models import check_not_encoder_decoder, load_for_evaluation
from llmcompressor.evaluation.sources import (
    Window,
    cut_windows,
    sample_windows,
    tokenized_documents,
)
from llmcompressor.evaluation.tasks import load_tasks, measure_tasks
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.modeling.patches import modules_with_adapters
from llmcompressor.modeling.sharded import is_sharded
from llmcompressor.reporting.report import show_evaluation
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.launch import launched_group, own_device
from llmcompressor.runtime.processes import Processes, is_first_rank
from llmcompressor.runtime.progress import hide_tqdm_bars, join_names
from llmcompressor.utils import dispatch_for_generation
from llmcompressor.verification.facts import Finding, Severity

_WINDOW = 256
_LEAST = {"max_seq_length": 2, "num_fewshot": 0}  # one token to see, and one to predict


@told_by_name
@own_device()
def evaluate(
    checkpoint: str | Path | PreTrainedModel,
    *,
    reference: str | Path | PreTrainedModel | None = None,
    tokenizer: Any = None,
    dataset: Any = None,
    dataset_config_name: str | None = None,
    split: str | None = None,
    text_column: str = "text",
    max_seq_length: int | None = None,
    num_samples: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    precision: str | torch.dtype = "auto",
    trust_remote_code_model: bool = False,
    tasks: str | Sequence[str] | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
) -> Report:
    """Measure the perplexity of a causal language model, and compare it with the original.

    With ``tasks`` lm-eval (extra ``eval``) measures those; a text is then measured only if
    ``dataset`` names one.

    The documents are joined and cut into windows of ``max_seq_length`` tokens that do not
    overlap. Checkpoints are loaded by transformers; those with packed zero points too, which some
    releases refuse by themselves (``verify``, L9).

    Several processes share the windows: all of them have to call, with the same arguments, and get
    the same report. Each has the models whole. Tasks are measured in one process only.

    Args:
        checkpoint: folder, name or model; one with adapters (PEFT) too.
        reference: the original model; with it the report has its loss, the mean KL divergence
            from it and the share of tokens on which both agree.
        tokenizer: a tokenizer, or the folder or name of one; by default that of
            ``checkpoint``, else that of ``reference``.
        dataset: a text file (one document), a file of rows, the name of a dataset, a dataset, a
            list of strings or rows with ``input_ids``; by default modules of the running Python's
            standard library (those that the embedded model was not trained on).
        dataset_config_name: configuration of a named dataset.
        split: split of a dataset; the only one, or ``train``, by default.
        text_column: the column with the text.
        max_seq_length: tokens of a window; by default 256, or the limit of the models if that
            is less.
        num_samples: number of windows, drawn at random; all by default.
        batch_size: windows, or requests of a task, per forward.
        seed: selects the windows; tasks have lm-eval's own seeds.
        precision: dtype to load and compute in; by default the one that the configuration
            names. A model object keeps its own.
        trust_remote_code_model: run code that comes with the checkpoint.
        tasks: names of lm-eval's tasks, groups, tags or patterns such as ``mmlu_*``, or YAML files;
            a string may hold several with commas.
        limit: samples of each task, the first ones; all by default.
        num_fewshot: examples before each question of a task; by default as many as it asks for. A
            task that is defined without examples keeps that.
        include_path: a folder with YAML files of further tasks. Python code that they name runs.

    Returns:
        The report. A checkpoint's ``report.html`` shows it too, if it has one.

    Raises:
        CheckpointError: a checkpoint does not exist, cannot be loaded, lacks weights, or is no
            causal language model.
        DatasetError: the text or the data of a task is missing, empty, or does not fit the model.
        ArgumentError: the two models have different vocabularies, a number is out of range, there
            is no such task, lm-eval is not installed, or processes were given different models or
            texts.
        ProcessError: another process has failed, or does not come in time.
    """
    show_runs_quietly()
    text_only = {"split": split, "dataset_config_name": dataset_config_name}
    sizes = {"max_seq_length": max_seq_length, "num_samples": num_samples}
    counts = {"limit": limit, "num_fewshot": num_fewshot}
    _check_numbers(**sizes, **counts, batch_size=batch_size)
    _check_used(tasks, dataset, {**text_only, **sizes}, {**counts, "include_path": include_path})
    dtype = parse_precision(precision_name("precision", precision))
    with hide_tqdm_bars():
        loaded = None if tasks is None else load_tasks(tasks, include_path)
    report = Report()
    with launched_group(), together("evaluate") as processes:
        with hide_tqdm_bars():
            sources = [checkpoint] if reference is None else [checkpoint, reference]
            models = [_load(one, trust_remote_code_model, dtype) for one in sources]
            tokenizer, why = _tokenizer(tokenizer, checkpoint, reference, trust_remote_code_model)
            with _explain_no_tokenizer(why):
                if loaded is not None and tokenizer is None:
                    raise NoTokenizerError("Tasks are texts, and the model has no tokenizer.")
                if loaded is None or dataset is not None:
                    length = _window_length(max_seq_length, models)
                    documents = tokenized_documents(
                        dataset,
                        tokenizer,
                        text_column=text_column,
                        config_name=dataset_config_name,
                        split=split,
                    )
                    windows = sample_windows(cut_windows(documents, length), num_samples, seed)
                    check_windows(windows, models[0])
                    with _explain_failures(checkpoint, reference, dtype=dtype):
                        report = _measure_shared(processes, models, windows, batch_size)
                    report = _with_texts(report, windows, tokenizer)
        if loaded is not None:  # with lm-eval's bars
            original = None if reference is None else models[1]
            how: dict[str, Any] = {**counts, "reference": original, "batch_size": batch_size}
            with _explain_failures(checkpoint, reference, dtype=dtype):
                report = replace(report, tasks=measure_tasks(models[0], tokenizer, loaded, **how))
        if not isinstance(checkpoint, Module) and is_first_rank():
            show_evaluation(Path(checkpoint).expanduser(), report.as_dict())
    return report


def _measure_shared(
    processes: Processes,
    models: Sequence[PreTrainedModel],
    windows: Sequence[Window],
    batch_size: int,
) -> Report:
    """Measure a model on windows that processes share, beside its reference if there are two."""
    reference = models[1] if len(models) > 1 else None
    with _sharing(processes, models, windows) as ranks:
        return measure(models[0], windows, reference=reference, batch_size=batch_size, ranks=ranks)


@contextmanager
def _sharing(
    processes: Processes, models: Sequence[Module], windows: Sequence[Window]
) -> Iterator[Ranks]:
    """Yield the ranks that share the windows; a single one if a model is spread over them.

    Raises:
        ArgumentError: the ranks have different models or texts, or are more than the windows.
    """
    if processes.count == 1 or any(map(is_sharded, models)):  # which all ranks have to run alike
        yield Ranks()
        return
    prints = [json.dumps([model_fingerprint(one), weight_digests(one)]) for one in models]
    given = {
        "checkpoint": prints[0],
        "reference": prints[1:],
        "dataset": values_fingerprint(list(windows)),
    }
    every = processes.all_gather("models and text", given)
    differing = [name for name in given if any(one[name] != every[0][name] for one in every)]
    if differing:
        raise ArgumentError(
            f"The processes measure one model together, and differ in {join_names(differing)}.",
            "Give all of them the same; to measure several models, start a script for each.",
        )
    if len(windows) < processes.count:
        raise ArgumentError(
            f"The text has {len(windows)} windows for {processes.count} processes to share.",
            "Start fewer processes, or give a longer text.",
        )
    with Ranks(processes) as ranks:
        yield ranks


@contextmanager
def _explain_no_tokenizer(why: str) -> Iterator[None]:
    """Say why there is no tokenizer where one is needed.

    Raises:
        DatasetError: the same, with the reason.
    """
    try:
        yield
    except NoTokenizerError as error:
        remedy = error.remedy or "Pass `tokenizer`."
        raise DatasetError(f"{error.problem} {why}".strip(), remedy) from error


def _check_used(
    tasks: Any, dataset: Any, of_text: Mapping[str, Any], of_tasks: Mapping[str, Any]
) -> None:
    """Raise for arguments of what is not measured.

    Raises:
        ArgumentError: one of a text that is not measured, or of tasks without ``tasks``.
    """
    if tasks is None:
        unused, of, needed = of_tasks, "tasks, and none is named", "tasks"
    elif dataset is None:
        unused, of, needed = of_text, "a text, and with tasks alone none is measured", "dataset"
    else:
        return
    for name, value in unused.items():
        if value is not None:
            raise ArgumentError(
                f"The argument {name!r} is of {of}.", f"Give {needed!r} too, or leave it out."
            )


def _with_texts(report: Report, windows: Sequence[Window], tokenizer: Any) -> Report:
    """Return the report with the texts of its passages, where a tokenizer is known."""
    if not hasattr(tokenizer, "decode"):
        return report
    worst = [
        replace(one, text=str(tokenizer.decode(list(windows[one.window])))) for one in report.worst
    ]
    return replace(report, worst=tuple(worst))


def _check_numbers(**given: Any) -> None:
    """Check the integer arguments before a model is loaded.

    Raises:
        ArgumentError: an argument is not an integer or too small.
    """
    for name, value in given.items():
        least = _LEAST.get(name, 1)
        (integer(least) if name == "batch_size" else optional(integer(least)))(name, value)


def _load(
    source: str | Path | PreTrainedModel, trust_remote_code: bool, dtype: torch.dtype | str
) -> PreTrainedModel:
    if isinstance(source, PreTrainedModel) or (
        isinstance(source, Module) and modules_with_adapters(source)
    ):
        check_not_encoder_decoder(getattr(source, "config", None), f"the {type(source).__name__}")
        check_model_declared(source)
        return cast("PreTrainedModel", source)  # a model with adapters runs like its base
    if not isinstance(source, str | Path):
        raise ArgumentError(
            f"What is to be measured is a {type(source).__name__}.",
            "Pass a folder, the id of a model on the hub, or a loaded transformers model.",
        )
    path = Path(source).expanduser()
    if not path.is_dir() and not is_hub_id(str(source)):
        raise CheckpointError(f"There is no model folder {source}.", "Check the path.")
    if not path.is_dir():
        path = Path(fetch(str(source)))
    with loading_errors(str(path)), _explain_failures(source, dtype=dtype):
        model = load_for_evaluation(path, trust_remote_code=trust_remote_code, dtype=dtype)
    return dispatch_for_generation(model)


@contextmanager
def _explain_failures(*sources: Any, dtype: torch.dtype | str) -> Iterator[None]:
    """Explain failures of transformers by the verification rule that a checkpoint violates.

    If there is none, a dtype other than the checkpoint's own is the likeliest reason.

    Raises:
        CheckpointError: the checkpoint, the reason and the remedy.
    """
    try:
        yield
    except (CompressorError, torch.OutOfMemoryError):  # these explain themselves
        raise
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        for source in sources:
            for finding in _findings(source):
                where = f"{finding.module}: " if finding.module else ""
                raise CheckpointError(
                    f"transformers cannot run {source} ({type(error).__name__}: {error}): "
                    f"{where}{finding.message}",
                    finding.remedy,
                ) from error
        if dtype == "auto":
            raise
        raise CheckpointError(
            f"transformers cannot run {sources[0]} in {dtype} ({type(error).__name__}: {error}).",
            "Leave out precision: not every packed format unpacks to another dtype.",
        ) from error


def _findings(source: Any) -> list[Finding]:
    """Rules of transformers that a checkpoint folder violates, the most severe first."""
    if not isinstance(source, str | Path) or not Path(source).expanduser().is_dir():
        return []
    try:
        found = verify(source, serve="transformers").findings
    except CompressorError:
        return []
    own = [one for one in found if one.server == "transformers"]
    grave = (Severity.ERROR, Severity.WARNING)
    return [one for severity in grave for one in own if one.severity is severity]


def _tokenizer(
    given: Any,
    checkpoint: str | Path | PreTrainedModel,
    reference: str | Path | PreTrainedModel | None,
    trust_remote_code: bool,
) -> Any:
    """Return the given tokenizer, or load the first one found; or ``None``, and why."""
    if given is not None and not isinstance(given, str | Path):
        if not callable(given):
            raise ArgumentError(
                f"The argument 'tokenizer' is a {type(given).__name__}.",
                "Give a tokenizer, a folder with tokenizer files, or the name of a model.",
            )
        return given, ""
    reason = ""
    for source in (checkpoint, reference) if given is None else (given,):
        place = source.config.name_or_path if isinstance(source, Module) else source
        if not place:
            continue
        try:
            found = AutoTokenizer.from_pretrained(str(place), trust_remote_code=trust_remote_code)
            return found, ""
        except Exception as error:  # tokenizers may be anybody's code, of files that are damaged
            if given is not None:
                raise CheckpointError(
                    f"transformers cannot load a tokenizer from {given}: {error}",
                    "Give a folder with tokenizer files, or the name of a model.",
                ) from error
            reason = reason or f"That of {place} cannot be loaded: {' '.join(str(error).split())}"
    return None, reason


def _window_length(asked: int | None, models: Sequence[PreTrainedModel]) -> int:
    """Return the window length in tokens, checked against the positions of the models."""
    for positions in map(position_limit, models):
        limit = positions.limit
        if asked is None or limit is None or asked <= limit:
            continue
        if positions.in_table:
            raise ArgumentError(
                f"max_seq_length is {asked}, and the model has positions for {limit} tokens.",
                f"Give {limit} or less.",
            )
        logger.warning(
            f"max_seq_length is {asked}, and the model takes {limit} tokens: what it predicts "
            "beyond them is likely poor, and the perplexity is that of both."
        )
    limits = [found.limit for found in map(position_limit, models) if found.limit is not None]
    return min([_WINDOW, *limits]) if asked is None else asked


def check_windows(windows: Sequence[Sequence[int]], model: Module) -> None:
    """Refuse text that a model cannot be measured on.

    Args:
        windows: token ids.
        model: its weights may be on the meta device.

    Raises:
        DatasetError: there is none, or it has tokens beyond the model's vocabulary.
    """
    if not windows:
        raise DatasetError(
            "The text to evaluate on is empty.", "Give a text with at least two tokens."
        )
    known = vocab_size_of(model)
    if known is None:
        return
    ends = (token for window in windows for token in (min(window), max(window)))
    outside = [token for token in ends if not 0 <= token < known]
    if outside:
        raise DatasetError(
            f"The text has token {outside[0]} and the model's vocabulary ends at {known - 1}.",
            "Use the tokenizer that belongs to the model.",
        )
