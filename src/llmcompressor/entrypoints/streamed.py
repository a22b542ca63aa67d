# SPDX-License-Identifier: Apache-2.0
"""Streamed runs: checkpoint to checkpoint, one block in memory at a time, with a journal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.checkpoint.block_stream import BlockStream
from llmcompressor.checkpoint.block_weights import BlockWeights
from llmcompressor.checkpoint.blueprint import Blueprint, build_blueprint
from llmcompressor.checkpoint.experts import open_blueprint
from llmcompressor.checkpoint.finished_output import FinishedOutput
from llmcompressor.checkpoint.finished_run import FinishedRun, forget_run, hash_of
from llmcompressor.checkpoint.hub import fetch
from llmcompressor.checkpoint.output_layout import OutputLayout, lay_out
from llmcompressor.checkpoint.prediction import Prediction, module_kinds, predict
from llmcompressor.checkpoint.run_report import own_report
from llmcompressor.checkpoint.save import (
    DEFAULT_SHARD_SIZE,
    SaveOptions,
    modify_save_pretrained,
    planned_config,
    write_beside_weights,
)
from llmcompressor.checkpoint.shards import parse_size
from llmcompressor.checkpoint.source import (
    SourceInfo,
    check_no_adapter,
    check_plain,
    inspect_source,
    is_hub_id,
    local_directory,
)
from llmcompressor.checkpoint.staging import remove_stale
from llmcompressor.checkpoint.workspace import Workspace, opened, was_published
from llmcompressor.core.session import CompressionSession
from llmcompressor.core.session_functions import active_session
from llmcompressor.datasets.source import Source
from llmcompressor.entrypoints.checking import (
    check_saved,
    check_servable,
    check_written,
    serves_nobody,
)
from llmcompressor.entrypoints.fingerprint import fingerprint_of, source_print
from llmcompressor.entrypoints.going_on import is_gone_on_with
from llmcompressor.entrypoints.in_memory import run_in_memory
from llmcompressor.entrypoints.job import (
    Job,
    Records,
    compression_report,
    report_of,
    undone_on_error,
)
from llmcompressor.entrypoints.limits import Limits
from llmcompressor.entrypoints.task import EXPERTS
from llmcompressor.errors import (
    ArgumentError,
    DatasetError,
    NonFiniteError,
    OutputError,
    RecipeError,
    TargetError,
)
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.embeddings import untie_embeddings
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.modifiers.outlined import outlined
from llmcompressor.pipelines.attention_trial import try_attention
from llmcompressor.pipelines.experts import experts_report
from llmcompressor.pipelines.mixtures import dense_mixtures, meant_mixtures, warn_unread
from llmcompressor.pipelines.passes import BY_BLOCK, passes_of, run_passes
from llmcompressor.pipelines.unreached import check_reached
from llmcompressor.threads import short_waits

__all__ = ["run_blueprint", "run_streamed", "streamable"]

_IN_THE_CALL = (ArgumentError, DatasetError, NonFiniteError, RecipeError, TargetError)
"""What the same call runs into again, while another call would not go on from its progress."""


def streamable(job: Job) -> SourceInfo | None:
    """Return the source checkpoint if the run can stream it block by block, else ``None``.

    That needs an output to write blocks to, safetensors to read them from, and modifiers that
    complete one block at a time.
    """
    model = job.model_args.model
    if job.output_dir is None or not isinstance(model, str | os.PathLike):
        return None
    whole = [type(one).__name__ for one in job.recipe.modifiers if not one.works_by_block]
    if whole or job.pipeline() not in BY_BLOCK:
        _say_in_memory(f"{', '.join(whole) or f'the {job.pipeline()} pipeline'} needs all of it")
        return None
    source = inspect_source(_local(job, str(model)), allow_quantized=True)
    if is_gone_on_with(source):
        _say_in_memory("a part of it is quantized already")
        return None
    check_plain(source)
    check_no_adapter(source.directory)
    if not source.tensors:
        _say_in_memory("its weights are not safetensors")
        return None
    return source


def _say_in_memory(reason: str) -> None:
    logger.warning(
        f"The whole model is loaded, because {reason}: the run keeps no journal and cannot be "
        "continued."
    )


def _local(job: Job, model: str) -> str | Path:
    args = job.model_args
    if not is_hub_id(model):
        return model
    return fetch(
        model, revision=args.model_revision, cache_dir=args.cache_dir, token=args.use_auth_token
    )


def run_streamed(job: Job, source: SourceInfo, data: Source | None) -> Module:
    """Compress a checkpoint into another one.

    Args:
        job: the arguments of the run.
        source: the original checkpoint.
        data: the raw calibration data.

    Returns:
        The compressed model, which loads its blocks lazily from the output.
    """
    args = job.model_args
    blueprint = build_blueprint(
        source,
        config_name=args.config_name,
        precision=args.precision,
        trust_remote_code=args.trust_remote_code_model,
    )
    model = blueprint.model
    modifiers = job.recipe.modifiers
    mixtures = meant_mixtures(model, modifiers)
    dense = dense_mixtures(mixtures, model, modifiers)
    warn_unread(model, [one for one in mixtures if one.name not in dense])
    reason = open_blueprint(blueprint, mixtures, dense)
    if reason:
        _say_in_memory(reason)
        return run_in_memory(job, data)
    processor = job.load_processor()
    loader = job.load_data(model, processor, data)
    return _run_once(job, blueprint, processor, job.pooled(loader))


def _run_once(
    job: Job, blueprint: Blueprint, processor: Any, batches: Sequence[Any] | None
) -> Module:
    """Run in the first process only; the others load the model from its output."""
    processes = job.processes
    if processes.count == 1:
        return run_blueprint(job, blueprint, processor, batches)
    if not processes.is_first:
        # results may differ on another machine; recipe and data are those of the first process
        job.told_fingerprint = processes.agree("output")[0]
        job.run_args = replace(job.run_args, resume="auto")
        job.model_args = replace(job.model_args, overwrite=False)
    model = run_blueprint(job, blueprint, processor, batches)
    assert job.output_dir is not None
    try:
        if processes.is_first:
            made = FinishedRun.read(job.output_dir)
            processes.agree("output", None if made is None else made.fingerprint)
        processes.agree("model of the output")
    finally:
        if processes.is_first:
            forget_run(job.output_dir)
    return model


def run_blueprint(
    job: Job, blueprint: Blueprint, processor: Any = None, batches: Sequence[Any] | None = None
) -> Module:
    """Compress a model that was built without its weights into a checkpoint.

    Args:
        job: the arguments of the run.
        blueprint: the model, with no weights loaded yet.
        processor: written with the weights; the source's files if ``None``.
        batches: calibration batches.

    Returns:
        As :func:`run_streamed`.
    """
    args, model = job.model_args, blueprint.model
    assert job.output_dir is not None
    earlier = FinishedRun.read(job.output_dir)
    if earlier is not None and earlier.origin != hash_of(source_print(blueprint.source)):
        job.check_free(job.output_dir)
    weights = BlockWeights(blueprint, list(find_blocks(model).values()))
    limits = Limits(job.run_args.max_memory)
    weights.device = limits.choose_device(weights, args.device)
    session = active_session()
    session.reset()
    if batches is not None:
        weights.check()
    session.state.keeps_ties = job.keeps_ties
    session.state.device_memory = limits.of(weights.device)
    with undone_on_error(session):
        _load_rest(blueprint, weights, tied=args.tie_word_embeddings)
        _Run(job, blueprint, weights, limits, batches, processor, session)()
    if job.recipe_args.clear_sparse_session:
        session.reset()
    return model


def _load_rest(blueprint: Blueprint, weights: BlockWeights, *, tied: bool) -> None:
    weights.load_rest()
    if not tied:
        untie_embeddings(blueprint.model)
    blueprint.forget_ties()


@dataclass
class _Run:
    """State of a streamed run."""

    job: Job
    blueprint: Blueprint
    weights: BlockWeights
    limits: Limits
    batches: Sequence[Any] | None
    processor: Any
    session: CompressionSession
    _counts: bool = field(default=False, init=False)

    def __call__(self) -> None:
        """Lay out the output, write it, and publish it."""
        job, model = self.job, self.blueprint.model
        assert job.output_dir is not None
        self.session.initialize(
            model=model, start=-1, recipe=job.recipe, calib_data=self.batches, copy_data=False
        )
        self.blueprint.forget_ties()  # a modifier may have untied them
        # everything permanent is allocated by now, including rotation matrices
        job.dataset_args = self.limits.bound(job.dataset_args, self.weights)
        self._modifiers: list[Modifier] = list(self.session.lifecycle.recipe.modifiers)
        if self.batches is not None:
            check_reached(model, self._modifiers, self.batches, job.pipeline())
            job.check_batches(self.batches)
        state = self.session.state
        try_attention(model, self.batches, self._modifiers, state)
        with outlined(self._modifiers, state):
            planned = [one for modifier in self._modifiers for one in modifier.planned(state)]
            prediction = predict(
                model,
                planned,
                self.blueprint.source.tensors,
                save_compressed=job.model_args.save_compressed,
            )
            compressed, source = job.model_args.save_compressed, self.blueprint.source.directory
            config = planned_config(model, source, prediction, compressed=compressed)
            is_meant = not job.run_args.verify or serves_nobody(self._modifiers)
            check_servable(config, prediction, is_meant=is_meant)
            layout = lay_out(prediction.stored, parse_size(DEFAULT_SHARD_SIZE))
            left = sum(_stored_bytes(block) for block in find_blocks(model))
        passes = passes_of(self._modifiers, job.pipeline())
        self._prints = self._fingerprint()
        if not was_published(job.output_dir):
            if self._take_up(prediction, layout, passes):
                return
            if not job.processes.is_first:
                raise OutputError(
                    f"{job.output_dir} is not what the first process has just written.",
                    "Give an output directory that all processes see.",
                )
            job.check_free(job.output_dir)
        with opened(job.output_dir, self._prints, resume=job.run_args.resume) as workspace:
            try:
                self._work(workspace, prediction, layout, passes, left)
            except _IN_THE_CALL:
                workspace.abandon()
                raise

    def _take_up(
        self,
        prediction: Prediction,
        layout: OutputLayout,
        passes: Sequence[Sequence[Modifier]],
    ) -> bool:
        """Load the model from a finished output of the same call; return True if it exists."""
        job, target = self.job, self.job.output_dir
        assert target is not None
        earlier = FinishedRun.read(target)
        if earlier is None or job.run_args.resume == "never" or job.model_args.overwrite:
            return False
        if earlier.fingerprint != (job.told_fingerprint or hash_of(self._prints)):
            return False
        output = FinishedOutput(self.blueprint, self.weights, prediction, layout, earlier)
        try:
            if not output.is_of(target):
                return False
            logger.info(f"{target} is what this very call has made: nothing is done again.")
            self._fill(output, passes)
            self._hand_over(output, own_report(target))
        finally:
            output.close()
        remove_stale(target)
        return True

    def _work(
        self,
        workspace: Workspace,
        prediction: Prediction,
        layout: OutputLayout,
        passes: Sequence[Sequence[Modifier]],
        left: int,
    ) -> None:
        stream = BlockStream(
            self.blueprint,
            self.weights,
            prediction,
            layout,
            workspace,
            self._report,
            stages=len(passes),
            scratch=left * (len(passes) - 1) + _kept_of_learning(self._modifiers),
            compressed=self.job.model_args.save_compressed,
        )
        try:
            self._fill(stream, passes)
            if workspace.is_published:
                workspace.remove()
            else:
                self._publish(stream, workspace, prediction, layout)
            self._hand_over(stream, self._told(stream))
        finally:
            stream.close()

    def _fill(
        self, stream: BlockStream | FinishedOutput, passes: Sequence[Sequence[Modifier]]
    ) -> None:
        state = self.session.state

        def begin(stage: int) -> None:
            stream.stage = stage
            self._counts = any(one.collects for one in passes[stage])

        stream.one_by_one = self.job.pipeline() == "independent"
        state.keeper = stream
        try:
            with short_waits():
                run_passes(
                    passes,
                    self.blueprint.model,
                    self.batches,
                    self.job.dataset_args,
                    pipeline=self.job.pipeline(),
                    begin=begin,
                )
                self.session.finalize()
                stream.complete()
        finally:
            state.keeper = None

    def _publish(
        self,
        stream: BlockStream,
        workspace: Workspace,
        prediction: Prediction,
        layout: OutputLayout,
    ) -> None:
        options = self._options(self._told(stream))
        write_beside_weights(self.blueprint.model, workspace.files, options, prediction, layout)
        stream.remember_run(self._prints)
        workspace.journal.mark_ready()
        workspace.publish(replace=self.job.model_args.overwrite)
        logger.info(f"Saved {workspace.target}.")

    def _hand_over(
        self, stream: BlockStream | FinishedOutput, report: Mapping[str, Any] | None
    ) -> None:
        """Turn the model into one that loads its blocks from the output and saves compressed."""
        target = self.job.output_dir
        assert target is not None
        if stream.rest_is_finished:
            stream.restore_rest(target)
        stream.hand_over(target)
        options = self._options(report)
        modify_save_pretrained(
            self.blueprint.model,
            recipe=options.recipe,
            source=options.source,
            report=options.report,
            check=check_saved if self.job.run_args.verify else None,
            once=self.job.processes.count > 1,
        )
        if self.job.processes.count == 1:  # else the other processes still need it
            forget_run(target)

    def _told(self, stream: BlockStream) -> dict[str, Any] | None:
        return compression_report(stream.reports(), self.blueprint.model)

    def _options(self, report: Mapping[str, Any] | None) -> SaveOptions:
        job = self.job
        return SaveOptions(
            save_compressed=job.model_args.save_compressed,
            processor=job.processor_to_write(self.processor),
            recipe=job.applied_recipe(self.session.lifecycle.recipe),
            source=str(self.blueprint.source.directory),
            report=report,
            check=partial(check_written, kinds=module_kinds(self.blueprint.model))
            if job.run_args.verify
            else None,
        )

    def _report(self, names: Sequence[str]) -> Records:
        found = report_of(self._modifiers, frozenset(names))
        if self._counts:  # else the journal has the counts of the last pass with data
            found[EXPERTS] = experts_report(self.blueprint.model, names)
        return {modifier: records for modifier, records in found.items() if records}

    def _fingerprint(self) -> dict[str, Any]:
        job = self.job
        processor = job.model_args.processor
        prints = fingerprint_of(
            self.blueprint.source,
            recipe=self.session.get_serialized_recipe(),
            batches=self.batches,
            dataset_args=job.dataset_args,
            dtype=self.blueprint.dtype,
            device=self.weights.device,
            output={
                "class": type(self.blueprint.model).__name__,
                "save_compressed": job.model_args.save_compressed,
                "tie_word_embeddings": job.model_args.tie_word_embeddings,
                "processor": str(local_directory(processor) or processor)
                if isinstance(processor, str)
                else type(processor).__name__,
            },
        )
        model, modifiers = self.blueprint.model, self._modifiers
        registered = {str(i): one.registered(model) for i, one in enumerate(modifiers)}
        registered = {i: found for i, found in registered.items() if found is not None}
        prints |= {"registered": registered} if registered else {}
        return prints | {"weights": self.weights.fingerprint}


def _kept_of_learning(modifiers: Iterable[Modifier]) -> int:
    """Disk space for the progress of learning: a new file is written before the old one goes."""
    learning = (one.learning() for one in modifiers if one.initialized)
    return sum(2 * one.kept for one in learning if one is not None)


def _stored_bytes(block: Module) -> int:
    """Bytes of a block in a file between two passes."""
    return sum(one.nbytes for one in block.state_dict().values() if isinstance(one, Tensor))
