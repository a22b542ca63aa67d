# SPDX-License-Identifier: Apache-2.0
"""Keeping of statistics by a run (``save_statistics``), and their check by later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.args import DatasetArguments
from llmcompressor.budget.options import budgeted
from llmcompressor.checkpoint.block_stream import ResidentBlocks, StreamedBlocks
from llmcompressor.checkpoint.journal import RunIdentity
from llmcompressor.checkpoint.kept_statistics import (
    INDEX,
    KeptStatistics,
    StatisticsWriter,
    writing_statistics,
)
from llmcompressor.entrypoints.arguments import Job, clean_up_on_error
from llmcompressor.entrypoints.fingerprints import batches_fingerprint, fingerprint_of
from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.pipelines.kept_statistics import SumCollectingModifier
from llmcompressor.pipelines.sequential import SequentialPipeline
from llmcompressor.session.functions import create_session

_DATA = "data"
_NOT_OF_SUMS = frozenset({"processor"})
"""Parts of a model's fingerprint that decide no sum."""
_SETTINGS = (
    "use_loss_mask",
    "moe_calibrate_all_experts",
    "starved_experts",
    "min_tokens_per_module",
)
"""Arguments that decide which tokens count for a module."""


def statistics_identity(
    job: Job, given: Module, batches: Sequence[Mapping[str, Any]] | None
) -> RunIdentity:
    """What kept statistics depend on; empty for a run that keeps and takes none.

    Args:
        job: the run.
        given: the model, before anything was loaded or changed.
        batches: the data; ``None`` if it is not given.
    """
    if job.statistics is None and job.run_args.save_statistics is None:
        return RunIdentity()
    model = fingerprint_of(job.model_args.model, given, job.source)
    found = RunIdentity(
        model={name: one for name, one in model.items() if name not in _NOT_OF_SUMS},
        dtype=str(getattr(given, "dtype", torch.float32)).removeprefix("torch."),
        calibration={name: getattr(job.dataset_args, name) for name in _SETTINGS},
    )
    if batches is not None:
        found[_DATA] = batches_fingerprint(batches)
    return found


def check_statistics(statistics: KeptStatistics, identity: RunIdentity) -> None:
    """Refuse statistics of another model, of other data or of other settings.

    Args:
        statistics: as they were kept.
        identity: of the run that would use them.

    Raises:
        ArgumentError: says what differs.
    """
    recorded = dict(statistics.identity)
    if _DATA not in identity:
        recorded.pop(_DATA, None)
    if differences := identity.differences(recorded):
        raise ArgumentError(
            f"The statistics in {statistics.folder} are of another model, of other data or "
            f"settings. {'; '.join(differences)}.",
            "Give what they were collected with, or collect statistics into another folder: "
            "save_statistics=... (--save-statistics).",
        )


@contextmanager
def keeping_statistics(
    job: Job,
    blocks: StreamedBlocks | ResidentBlocks,
    batches: Sequence[Mapping[str, Any]] | None,
    identity: RunIdentity,
    room: Callable[[], int | None],
    *,
    device_memory: int | None = None,
) -> Iterator[StatisticsWriter | None]:
    """Collect statistics of the original model, if asked to, and complete them after the body.

    Args:
        job: the run.
        blocks: the model, before anything was changed, with what lies outside of blocks loaded.
        batches: the calibration batches.
        identity: what the statistics depend on.
        room: bytes that activations may take in main memory; ``None`` for half of what is free.
        device_memory: limit for bytes on an accelerator.

    Yields:
        What the body may add to the statistics; ``None`` if they are not asked for, or complete.

    Raises:
        ArgumentError: the folder has statistics of something else.
    """
    asked = job.run_args.save_statistics
    if asked is None or batches is None:
        yield None
        return
    folder = Path(asked).expanduser()
    if (folder / INDEX).is_file():
        found = KeptStatistics.open(folder)
        check_statistics(found, identity)
        logger.info(f"{folder} has the statistics of this model and data already.")
        if budgeted(job.recipe.modifiers) is not None and not found.modules_with_loss:
            logger.warning(
                f"{folder} has nothing that a budget could be chosen by, as no run with a budget "
                "has filled it. Give another folder to keep that too."
            )
        yield None
        return
    with writing_statistics(folder, identity) as writer:
        blocks.update(blocks.model)
        budget = job.dataset_args.activation_budget or room()
        args = replace(job.dataset_args, sequential_targets=None, activation_budget=budget)
        _collect(blocks, batches, args, writer, device_memory)
        yield writer
    logger.info(f"Statistics of {writer.contents.tokens} tokens are kept in {folder}.")


def _collect(
    blocks: StreamedBlocks | ResidentBlocks,
    batches: Sequence[Mapping[str, Any]],
    args: DatasetArguments,
    writer: StatisticsWriter,
    device_memory: int | None,
) -> None:
    """Run the original model over all data once, and write the sums of each block."""
    collector = SumCollectingModifier.writing(writer)
    with create_session() as session, clean_up_on_error(session):
        session.initialize(
            model=blocks.model, start=-1, recipe=[collector], calib_data=batches, copy_data=False
        )
        own = session.state.run
        own.block_source = blocks.reading()
        own.device_memory, own.use_loss_mask = device_memory, args.use_loss_mask
        SequentialPipeline()(blocks.model, batches, args)  # type: ignore[arg-type]  # a list will do
        session.finalize()
    data = CalibrationBatches(blocks.model, batches, use_loss_mask=args.use_loss_mask)
    writer.contents.tokens = data.real_tokens
    writer.contents.modules = collector.observed
