# SPDX-License-Identifier: Apache-2.0
"""The run of a recipe: one runner for models in memory and for streamed checkpoints."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.budget.options import check_size_limit, size_limit_of
from llmcompressor.budget.search import SettledBudget
from llmcompressor.checkpoint.block_reader import REST, BlockWeights
from llmcompressor.checkpoint.block_stream import PlannedOutput, ResidentBlocks, StreamedBlocks
from llmcompressor.checkpoint.journal import PROCESSORS, RunIdentity, reserve_output
from llmcompressor.checkpoint.load import (
    check_no_peft_adapters,
    check_unquantized,
    codes_without_scheme,
    decompress_weights,
    fetch,
    load_model,
    parse_precision,
    remove_offloading,
)
from llmcompressor.checkpoint.manifest import RunRecord
from llmcompressor.checkpoint.meta_model import MetaModel, build_meta_model
from llmcompressor.checkpoint.moe_names import unfuse_meta_model, unfuse_stored_experts
from llmcompressor.checkpoint.names import drop_dequantizing_conversions, record_prefix
from llmcompressor.checkpoint.planned_tensors import module_kinds
from llmcompressor.checkpoint.quantization_config import existing_quantization
from llmcompressor.checkpoint.save import SaveOptions, modify_save_pretrained
from llmcompressor.checkpoint.shared_output import check_alike
from llmcompressor.checkpoint.source import (
    SourceInfo,
    check_config_unquantized,
    check_dense,
    check_no_adapter,
    code_tensors,
    inspect_source,
    is_compressed_tensors,
    is_hub_id,
    local_directory,
    quantization_method,
    source_of,
    tell_remarks,
)
from llmcompressor.checkpoint.spread_blocks import SpreadBlocks
from llmcompressor.checkpoint.spread_weights import (
    FOLDER,
    is_fully_sharded,
    is_offloaded,
    is_spread,
)
from llmcompressor.checkpoint.tensor_files import layout_files
from llmcompressor.core.block_source import BlockSource
from llmcompressor.core.contract import DataSize, DataUse, Edits, Prediction, Solving
from llmcompressor.core.modifier import Modifier
from llmcompressor.datasets.source import Source
from llmcompressor.datasets.text import rendered_at
from llmcompressor.entrypoints.arguments import (
    EXPERTS,
    MOMENT,
    Job,
    Records,
    Task,
    clean_up_on_error,
    collect_reports,
    compression_report,
    parse_device,
)
from llmcompressor.entrypoints.budget import BUDGET, losses_of, open_budget, settle_budget
from llmcompressor.entrypoints.fingerprints import (
    fingerprint_of,
    model_fingerprint,
    run_identity,
    run_record,
    weight_digests,
)
from llmcompressor.entrypoints.gates import Gates, check_size, prepare_gates
from llmcompressor.entrypoints.statistics import (
    check_statistics,
    keeping_statistics,
    statistics_identity,
)
from llmcompressor.entrypoints.verify import (
    check_servable,
    is_meant_unservable,
    predict_output,
    verify_saved,
    verify_written,
    warn_save_problems,
)
from llmcompressor.errors import ArgumentError, CheckpointError, OutputError
from llmcompressor.logger import logger
from llmcompressor.modeling.sharded import has_partitioned_parameters
from llmcompressor.modeling.weights import (
    align_parameters,
    has_tied_embeddings,
    untie_embeddings,
)
from llmcompressor.pipelines.attention_trial import check_attention_forward
from llmcompressor.pipelines.kept_statistics import check_statistics_cover
from llmcompressor.pipelines.moe_routing import experts_report
from llmcompressor.pipelines.moe_selection import (
    targeted_moes,
    unquantized_moes,
    warn_unloadable_experts,
)
from llmcompressor.pipelines.passes import BY_BLOCK, run_passes, split_into_passes
from llmcompressor.pipelines.targets import check_reached
from llmcompressor.reporting.report import write_run_page
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.memory import empty_device_cache, free_device_memory
from llmcompressor.runtime.progress import format_bytes, join_names
from llmcompressor.runtime.threads import short_spin_waits
from llmcompressor.session.functions import active_session
from llmcompressor.session.session import CompressionSession
from llmcompressor.verification import Deployment, TensorInfo, check_serving
from llmcompressor.verification.facts import Severity

Blocks: TypeAlias = StreamedBlocks | ResidentBlocks
RANKS = "ranks"
"""Of a report: the share of each rank in the work."""


# --------------------
# Compression of partly quantized models: quantized modules keep their codes.

_READ_HERE = {"L2", "L9"}
"""Rules of what transformers does not read, or some releases, unless it is loaded as it is here."""
_OF_STATES = {"L11"}
"""Rules of what is lost of caches, and not of weights."""


def is_partly_quantized(source: SourceInfo) -> bool:
    """Return True if a checkpoint is quantized by compressed-tensors and can be compressed further.

    Returns:
        ``False`` for other formats and for unquantized checkpoints.

    Raises:
        CheckpointError: a part of it cannot be kept, or would not be loaded as it was written.
    """
    if not is_compressed_tensors(quantization_method(source.config)):
        return False
    existing_quantization(str(source.directory), source.config)
    _check_loadable(source, but=_READ_HERE)
    return True


def prepare_partly_quantized(model: PreTrainedModel, *, told: bool = True) -> None:
    """Prepare a model that may be partly quantized; packed weights are unpacked.

    compressed-tensors may keep unpacked weights outside of the model.

    Args:
        model: the model.
        told: tell that the recipe goes on with the modules that are not quantized.

    Raises:
        CheckpointError: it is quantized by another method, or its weights differ from those of its
            folder.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", "")
    is_packed = is_compressed_tensors(str(getattr(method, "value", method)))
    if not is_packed:
        check_unquantized(model)
    names = [name for name, one in model.named_modules() if hasattr(one, "quantization_scheme")]
    source = _source_of(model)
    if source is not None and names:
        is_partly_quantized(source)
    elif source is not None:  # all its weights are unquantized
        _check_loadable(source, but=_READ_HERE | _OF_STATES)
    if is_packed:
        decompress_weights(model)
    if names and told:
        logger.warning(
            f"Quantized already: {join_names(names, most=3)}. That keeps its codes, and the recipe "
            "goes on with the rest."
        )
    lost = [] if source is None else codes_without_scheme(model, code_tensors(source.tensors))
    if lost and source is not None:
        logger.warning(
            f"Of {source.directory} not all codes are kept: {join_names(lost, most=3)}. "
            "transformers "
            "makes plain weights of these, with the values that the codes stand for. They are "
            "written in full, and rounded once more where the recipe means them."
        )


def _source_of(model: PreTrainedModel) -> SourceInfo | None:
    """Return the compressed-tensors checkpoint from which a model was loaded, if it exists."""
    place = getattr(getattr(model, "config", None), "name_or_path", None)
    folder = local_directory(place) if isinstance(place, str) and place else None
    try:
        source = (
            None
            if folder is None
            else inspect_source(folder, allow_quantized=True, allow_absent=True)
        )
    except CheckpointError:  # the folder may have changed since the model was loaded
        return None
    is_compressed = source and is_compressed_tensors(quantization_method(source.config))
    return source if is_compressed else None


def _check_loadable(source: SourceInfo, *, but: Collection[str]) -> None:
    headers = {name: TensorInfo(one.dtype, one.shape) for name, one in source.tensors.items()}
    found = check_serving(source.config, headers, deployment=Deployment("transformers"))
    for one in found:
        if one.severity is Severity.ERROR and one.rule not in but:
            raise CheckpointError(
                f"The model {source.directory} is quantized already, and transformers does not "
                f"read it as it was written ({one.rule}). {one.module}: {one.message}",
                "Compress the original, unquantized model.",
            )


# --------------------
# Loading of a model as a whole, for model objects or modifiers that need it.

SHARE_FOR_WEIGHTS = 0.6
"""Of an accelerator's free memory: the rest is for activations and solvers."""


def load_whole_model(
    task: Task, *, device: str | None, goes_on: bool = False, spread: bool = False
) -> Module:
    """Load the model of a run into memory.

    Args:
        task: the arguments of the run; a model object is used as it is.
        device: the device to compute on; ``None`` for an accelerator if the model fits.
        goes_on: accept a model that an earlier run has partly quantized.
        spread: leave the weights of a model object where they are spread.

    Raises:
        ArgumentError: the object is not a model, or has no weights.
        CheckpointError: the model is missing, damaged, incomplete or quantized already.
    """
    args = task.model_args
    if not isinstance(args.model, str | Path):
        return _given_model(task, args.model, goes_on=goes_on, spread=spread)
    folder = local_directory(args.model) if goes_on else None
    if folder is not None:
        is_partly_quantized(inspect_source(folder, allow_quantized=True, allow_absent=True))
    model = load_model(
        args.model,
        config_name=args.config_name,
        precision=args.precision,
        tie_word_embeddings=args.tie_word_embeddings,
        trust_remote_code=args.trust_remote_code_model,
        revision=args.model_revision,
        cache_dir=args.cache_dir,
        token=args.use_auth_token,
        unpacks=goes_on,
    )
    if goes_on:
        prepare_partly_quantized(model, told=task.run_type == "oneshot")
        drop_dequantizing_conversions(model)
    remove_offloading(model)
    align_parameters(model)
    return _move_to_device(model, device)


def _given_model(task: Task, given: Any, *, goes_on: bool, spread: bool) -> Module:
    writable = hasattr(given, "config") and hasattr(given, "save_pretrained")
    if not isinstance(given, Module) or (task.output_dir is not None and not writable):
        raise ArgumentError(
            f"The model is a {type(given).__name__}, which cannot be compressed"
            f"{' and written' if task.output_dir else ''}.",
            "Pass a folder, the id of a model on the hub, or a loaded transformers model.",
        )
    model: Any = given
    check_no_peft_adapters(model)
    told = task.run_type == "oneshot"
    prepare = partial(prepare_partly_quantized, told=told) if goes_on else check_unquantized
    prepare(model)
    drop_dequantizing_conversions(model)
    device = None if spread else task.model_args.device
    was_offloaded = not spread and remove_offloading(model, hooks=device is not None)
    if not spread:
        _check_values(model)
    wanted, own = parse_precision(task.model_args.precision), getattr(model, "dtype", None)
    if isinstance(wanted, torch.dtype) and wanted != own:
        logger.warning(
            f"precision={task.model_args.precision!r} has no effect on a loaded model, whose dtype "
            f"is {own}: load it with that dtype, or give oneshot its folder."
        )
    if not task.model_args.tie_word_embeddings:
        untie_embeddings(model)
    if device is not None:
        model.to(device)
    elif was_offloaded:  # it may be on several devices, and its inputs are not moved any more
        _move_to_device(model.to("cpu"), None)
    if not spread:
        align_parameters(model)
    if isinstance(model, PreTrainedModel):
        record_prefix(model)
        if (source := source_of(model)) is not None:
            tell_remarks(source)
    return given


def _check_values(model: Module) -> None:
    """Refuse a model with weights on the meta device."""
    for name, module in model.named_modules():
        own = module._parameters.values()
        if any(parameter is not None and parameter.is_meta for parameter in own):
            raise ArgumentError(
                f"The weights of {name} have no values, they are on the meta device.",
                "Load the model's weights, or pass its folder instead of the model.",
            )


def _move_to_device(model: Module, device: str | None) -> Module:
    """Move a model to the given device, else to an accelerator if it fits."""
    if has_partitioned_parameters(model):
        return model  # DeepSpeed has placed them
    if device is not None:
        return model.to(device)
    if not torch.cuda.is_available():
        return model
    empty_device_cache()
    free = free_device_memory(torch.cuda.current_device())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > free * SHARE_FOR_WEIGHTS:
        logger.warning(
            f"The model takes {size / 2**30:.1f} GiB and the accelerator has "
            f"{free / 2**30:.1f} GiB free: it computes on the CPU."
        )
        return model
    return model.to("cuda")


# --------------------
# Memory limits of a run, by device.

_SHARE_FOR_ACTIVATIONS = 0.5
"""Of the host memory that blocks leave: the rest is for solvers and what is packed."""
_BLOCKS_AT_ONCE = 2
"""One that is worked on, and one that is read or written meanwhile."""


class MemoryLimits:
    """Memory limits by device.

    Args:
        given: device → bytes, ``"cpu"`` for the host; other devices are limited by free memory.
    """

    def __init__(self, given: Mapping[str | int, int] | None) -> None:
        self._given = dict(given or {})

    def choose_device(self, weights: BlockWeights, asked: str | None) -> torch.device:
        """Choose the device to compute on: as given, else an accelerator if the blocks fit.

        Args:
            weights: the blocks.
            asked: a device's name.

        Raises:
            ArgumentError: the device does not exist, or its limit is too small for one block.
        """
        if asked is not None:
            device = parse_device(asked)
            self._check_room(device, weights)
            return device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", torch.cuda.current_device())
        empty_device_cache()
        free = free_device_memory(device)
        allowed = min(free, self._given.get(device.index, free))
        needed = self._needed(weights)
        if needed <= allowed * SHARE_FOR_WEIGHTS:
            return device
        logger.warning(
            f"Two blocks and the embeddings take {needed / 2**30:.1f} GiB and the accelerator has "
            f"{allowed / 2**30:.1f} GiB: the model computes on the CPU."
        )
        return torch.device("cpu")

    @property
    def host(self) -> int | None:
        """Limit of main memory; ``None`` if not given."""
        return self._given.get("cpu")

    def of(self, device: torch.device) -> int | None:
        """Limit of an accelerator; ``None`` if not given, and for the host."""
        return None if device.type == "cpu" else self._given.get(device.index or 0)

    def _check_room(self, device: torch.device, weights: BlockWeights) -> None:
        limit = self.of(device)
        block = max(map(weights.source_bytes, weights.blocks), default=0)
        rest = weights.source_bytes(REST)
        if limit is not None and limit < rest + 2 * block:
            raise ArgumentError(
                f"max_memory allows {format_bytes(limit)} on {device}; embeddings and head take "
                f"{format_bytes(rest)} there, and a block of this model {format_bytes(block)}, "
                "once as it is and once while it is worked on.",
                f"Allow at least {format_bytes(rest + 2 * block)}, or compute on the CPU.",
            )

    def room(self, used: int, block: int) -> tuple[int | None, bool]:
        """Return the bytes for activations (``None``: no limit), and whether to prefetch blocks.

        Args:
            used: bytes of main memory in use before any block is loaded.
            block: bytes of the largest block.

        Raises:
            ArgumentError: the limit is too small for one block.
        """
        limit = self.host
        if limit is None:
            return None, True
        reads_ahead = limit >= used + block * _BLOCKS_AT_ONCE
        left = limit - used - block * (_BLOCKS_AT_ONCE if reads_ahead else 1)
        if left < block:
            raise ArgumentError(
                f"max_memory allows {format_bytes(limit)} on the host; {format_bytes(used)} are in "
                f"use (libraries and embeddings), and a block of this model takes "
                f"{format_bytes(block)}, once as it is and once compressed.",
                f"Allow at least {format_bytes(used + 2 * block)}.",
            )
        return int(left * _SHARE_FOR_ACTIVATIONS), reads_ahead

    @staticmethod
    def _needed(weights: BlockWeights) -> int:
        blocks = sorted(map(weights.source_bytes, weights.blocks), reverse=True)
        return weights.source_bytes(REST) + sum(blocks[:_BLOCKS_AT_ONCE])


# --------------------
# The runner: one for a model in memory and for a checkpoint that is streamed block by block.


def run(job: Job, data: Source | None) -> Module:
    """Compress a model, and write it where there is an output.

    Args:
        job: the arguments of the run.
        data: the raw calibration data.

    Returns:
        The compressed model; one that was streamed loads its blocks lazily from the output.
    """
    with opened_model(job) as blocks:
        processor = job.load_processor()
        with rendered_at(job.moment):
            batches = job.pooled(job.load_data(blocks.model, processor, data))
        return compress(job, blocks, processor, batches)


@contextmanager
def opened_model(job: Job) -> Iterator[Blocks]:
    """Open the model of a run: block by block where the run allows it, else as a whole."""
    source = streamable_source(job)
    blueprint = None if source is None else build_streamable(job, source)
    if blueprint is not None:
        with streamed_blocks(job, blueprint) as blocks:
            yield blocks
        return
    if job.run_args.resume == "must":
        raise OutputError(
            "There is nothing to resume: this run needs the whole model in memory, and such a run "
            "keeps no journal.",
            'Leave resume="must" (--resume must) out.',
        )
    if job.run_args.max_memory is not None:
        logger.warning("max_memory has no effect: this run needs the whole model in memory.")
    target = job.output_dir if job.processes.is_first else None
    overwrite = job.model_args.overwrite
    reserved = partial(reserve_output, resume=job.run_args.resume, overwrite=overwrite)
    with nullcontext() if target is None else reserved(target):
        spread = _stays_spread(job)
        device = job.model_args.device
        model = load_whole_model(job, device=device, goes_on=True, spread=spread)
        mixtures = targeted_moes(model, job.recipe.modifiers)
        unfuse_stored_experts(model, mixtures)  # type: ignore[arg-type]  # others have no MoE
        job.share_memory()
        by_block = not whole_model_reason(job)
        kind = SpreadBlocks if spread else ResidentBlocks
        yield kind(model, job.source, by_block=by_block, writes=target is not None)


def _stays_spread(job: Job) -> bool:
    """Return True for a model object that a run loads block by block from where it is spread.

    Where accelerate offloads weights of a model that is needed as a whole, or whose structure the
    run changes, they are brought into memory instead.

    Raises:
        ArgumentError: the run changes the structure of a model that FSDP has sharded.
    """
    model, modifiers = job.model_args.model, job.recipe.modifiers
    if not is_spread(model):
        return False
    stacked = [one.name for one in targeted_moes(model, modifiers)]
    shaping = [type(one).__name__ for one in modifiers if Edits.STRUCTURE in one.traits.edits]
    whole = whole_model_reason(job)
    if not is_fully_sharded(model):
        is_needed_whole = is_offloaded(model) and (stacked or shaping or whole)
        return job.model_args.device is None and not is_needed_whole
    if stacked or shaping:
        why = f"the experts of {join_names(stacked)} are stacks of which the recipe makes Linears"
        raise ArgumentError(
            f"The model is sharded by FSDP, which holds on to its modules, and "
            f"{f'{shaping[0]} removes some' if shaping else why}.",
            FOLDER,
        )
    if not job.model_args.tie_word_embeddings and has_tied_embeddings(model):
        raise ArgumentError(
            "The model is sharded by FSDP with its embeddings tied, so that they cannot be untied.",
            f"Load it with tie_word_embeddings=False before it is sharded. {FOLDER}",
        )
    if whole:
        logger.warning(f"Every process gathers the whole model, because {whole}.")
    if job.model_args.device is not None:
        logger.warning(
            f"device={job.model_args.device!r} has no effect on a model that is sharded."
        )
    return True


@contextmanager
def streamed_blocks(job: Job, blueprint: MetaModel) -> Iterator[StreamedBlocks]:
    """Open a model that was built without its weights, on the device that the run computes on."""
    with closing(StreamedBlocks(blueprint)) as blocks:
        limits = MemoryLimits(job.run_args.max_memory)
        blocks.weights.device = limits.choose_device(blocks.weights, job.model_args.device)
        yield blocks


def whole_model_reason(job: Job) -> str:
    """Return why modifiers cannot finish one block after another; empty if they can."""
    whole = [type(one).__name__ for one in job.recipe.modifiers if not one.traits.by_block]
    if whole or job.pipeline() not in BY_BLOCK:
        return f"{', '.join(whole) or f'the {job.pipeline()} pipeline'} needs all of it"
    return ""


def streamable_source(job: Job) -> SourceInfo | None:
    """Return the source checkpoint if the run can stream it block by block, else ``None``.

    That needs an output to write blocks to, unless they are only read, safetensors to read them
    from, and modifiers that complete one block at a time.
    """
    args = job.model_args
    is_read = job.output_dir is not None or job.only_collects
    if not is_read or not isinstance(args.model, str | os.PathLike):
        return None
    reason = whole_model_reason(job)
    if reason:
        _warn_in_memory(reason)
        return None
    model = str(args.model)
    if is_hub_id(model):
        model = str(
            fetch(
                model,
                revision=args.model_revision,
                cache_dir=args.cache_dir,
                token=args.use_auth_token,
            )
        )
    source = inspect_source(model, allow_quantized=True, allow_absent=True)
    if is_partly_quantized(source):
        _warn_in_memory("a part of it is quantized already")
        return None
    check_config_unquantized(str(source.directory), source.config)
    check_dense(source.tensors)
    check_no_adapter(source.directory)
    if not source.tensors:
        _warn_in_memory("its weights are not safetensors")
        return None
    return source


def _warn_in_memory(reason: str) -> None:
    logger.warning(
        f"The whole model is loaded, because {reason}: the run keeps no journal and cannot be "
        "continued."
    )


def build_streamable(job: Job, source: SourceInfo) -> MetaModel | None:
    """Build the model without weights, with experts unfused; ``None`` if they cannot be."""
    args, modifiers = job.model_args, job.recipe.modifiers
    blueprint = build_meta_model(
        source,
        config_name=args.config_name,
        precision=args.precision,
        trust_remote_code=args.trust_remote_code_model,
    )
    model = blueprint.model
    mixtures = targeted_moes(model, modifiers)
    dense = unquantized_moes(mixtures, model, modifiers)
    warn_unloadable_experts(model, [one for one in mixtures if one.name not in dense])
    reason = unfuse_meta_model(blueprint, mixtures, dense)
    if reason:
        _warn_in_memory(reason)
        return None
    return blueprint


def compress(
    job: Job, blocks: Blocks, processor: Any = None, batches: Sequence[Any] | None = None
) -> Module:
    """Compress a model that is open, and write it where there is an output.

    Args:
        job: the arguments of the run.
        blocks: the model.
        processor: written with the weights; the source's files if ``None``.
        batches: calibration batches.

    Returns:
        As :func:`run`.
    """
    session = active_session()
    session.reset()
    ranks = sharing_ranks(job, batches)
    with (
        nullcontext() if ranks is None else ranks,
        clean_up_on_error(session),
        blocks.shared_by(job.processes, ranks),
    ):
        session.state.run.ranks = ranks
        model = _Run(job, blocks, processor, batches, session)()
    if job.recipe_args.clear_sparse_session:
        session.reset()
    return model


def sharing_ranks(job: Job, batches: Sequence[Any] | None) -> Ranks | None:
    """Connect the ranks that share the work of a run; ``None`` if each process does all of it.

    They share it where all that the modifiers collect of the data can be added over ranks.

    Raises:
        ArgumentError: there are more ranks than calibration batches; on all ranks.
    """
    if job.processes.count == 1 or job.pipeline() not in BY_BLOCK:
        return None
    whole = [one for one in job.recipe.modifiers if not _is_shareable(one)]
    if whole:
        logger.warning(
            f"The {job.processes.count} processes do not share the work: {type(whole[0]).__name__} "
            "needs all samples in one process."
        )
        return None
    if batches is not None and len(batches) < job.processes.count:
        raise ArgumentError(
            f"{job.processes.count} ranks are to share {len(batches)} calibration batches.",
            "Start as many ranks as there are batches at most, or give more samples.",
        )
    return Ranks(job.processes)


def shares_of(ranks: Ranks) -> list[dict[str, int]]:
    """The shares of all ranks in the work of a run.

    Returns:
        For each rank the ``samples`` that it ran, the multiply-adds of what it ``solved``, as
        modifiers estimate them, and the bytes that it has ``written``, ``sent`` and ``received``.
    """
    own = {name: ranks.tally[name] for name in ("samples", "solved", "written")}
    own |= {"sent": ranks.sent, "received": ranks.received}
    return ranks.exchange(own, what="shares of the work")


def _is_shareable(modifier: Modifier) -> bool:
    traits = modifier.traits
    return traits.over_ranks is not Solving.ALONE or traits.data is DataUse.NONE


def identity_with_budget(
    job: Job, blocks: Blocks, batches: Sequence[Mapping[str, Any]] | None
) -> RunIdentity:
    """Return the identity of a run whose recipe has a budget, of a model that is loaded."""
    return _Run(job, blocks, None, batches, active_session()).identity_before()


class _Run:
    """The steps of a run, from the open model to the written one."""

    def __init__(
        self,
        job: Job,
        blocks: Blocks,
        processor: Any,
        batches: Sequence[Any] | None,
        session: CompressionSession,
    ) -> None:
        self._job, self._blocks, self._processor = job, blocks, processor
        self._batches, self._session = batches, session
        self._known: RunIdentity | None = None
        self._began_with: Mapping[str, Any] = {}
        self._gates: Gates | None = None
        self._budget: SettledBudget | None = None
        self._of_budget: Mapping[str, Any] | None = None
        self._size_limit = size_limit_of(job.recipe.modifiers)
        self._kept = job.statistics

    def __call__(self) -> Module:
        """Load, check, compress, write and publish."""
        job, blocks, session = self._job, self._blocks, self._session
        limits = MemoryLimits(job.run_args.max_memory)
        self._load(limits)
        if job.only_collects and isinstance(blocks, StreamedBlocks):
            blocks.show_source()
            return blocks.model
        going_on = session.initialize(
            model=blocks.model,
            start=-1,
            recipe=job.recipe,
            calib_data=self._batches,
            copy_data=False,
        )
        model: Module = going_on.model  # a modifier may have replaced it
        blocks.update(model)
        # everything permanent is allocated by now, including rotation matrices
        room = blocks.activation_room(limits.room)
        if room is not None and job.dataset_args.activation_budget is None:
            job.dataset_args = replace(job.dataset_args, activation_budget=room)
        elif session.state.run.ranks is not None and self._batches is not None:
            job.share_memory()
        self._modifiers: list[Modifier] = list(session.lifecycle.recipe.modifiers)
        self._check_inputs(model)
        check_attention_forward(model, self._batches, self._modifiers, session.state)
        self._passes = split_into_passes(self._modifiers, job.pipeline())
        with blocks.writing(self._plan_output(), self._report):
            if self._budget is not None and not job.is_held:
                self._of_budget = blocks.decide(BUDGET, self._budget.figures)
            self._run_passes()
            ranks = session.state.run.ranks
            report = self._whole_report(ranks)
            if job.output_dir is not None:
                blocks.publish(self._options(report))
            if ranks is not None and not job.processes.is_first:
                report = compression_report(blocks.reports(), self._modules)  # as it was written
            blocks.show()
        if hasattr(model, "save_pretrained"):
            self._follow_saving(model, report)
        return model

    def _whole_report(self, ranks: Ranks | None) -> dict[str, Any] | None:
        """What the report of the output says: of modules, and of the run."""
        blocks, found = self._blocks, compression_report(self._blocks.reports(), self._modules)
        of_run: dict[str, Any] = {}
        if blocks.processors:
            of_run[PROCESSORS] = blocks.processors
        if self._of_budget:
            of_run[BUDGET] = self._of_budget
        if ranks is not None:
            of_run[RANKS] = shares_of(ranks)
        return {**(found or {}), **of_run} if of_run else found

    def _load(self, limits: MemoryLimits) -> None:
        """Load the model, and find or keep what the recipe needs to know before it begins."""
        job, blocks, session = self._job, self._blocks, self._session
        self._gates = prepare_gates(job, blocks.model, self._processor, self._batches)
        session.state.run.keeps_tied_embeddings = job.keeps_ties
        session.state.run.device_memory = limits.of(blocks.device)
        if isinstance(blocks, ResidentBlocks):  # others read the files, with a hash of each tensor
            self._check_alike(blocks.model)
            self._began_with = fingerprint_of(job.model_args.model, blocks.model, job.source)
        identity = statistics_identity(job, blocks.model, self._batches)
        if self._kept is not None:
            check_statistics(self._kept, identity)
            self._batches = None
        is_solved = self._batches is not None or self._kept is not None
        blocks.load(check=is_solved, tied=job.model_args.tie_word_embeddings)
        room = partial(blocks.activation_room, limits.room)
        device_memory = session.state.run.device_memory
        ranks = session.state.run.ranks
        opened = open_budget(job, blocks, self.identity_before)  # refused before the work
        with keeping_statistics(
            job, blocks, self._batches, identity, room, device_memory=device_memory
        ) as writer:
            measure = partial(
                losses_of,
                job=job,
                blocks=blocks,
                batches=self._batches,
                room=room,
                device_memory=device_memory,
                keep_in=writer,
                ranks=ranks,
            )
            self._budget = (
                job.settled
                if opened is None
                else settle_budget(job, opened, measure, keeps=writer is not None, ranks=ranks)
            )

    def _check_inputs(self, model: Module) -> None:
        """Refuse data, or statistics in its place, that the modifiers cannot work with."""
        if self._batches is not None:
            check_reached(model, self._modifiers, self._batches, self._job.pipeline())
            self._job.check_batches(self._batches)
        if self._kept is not None:
            check_statistics_cover(self._kept, self._modifiers, self._session.state)

    def _follow_saving(self, model: Module, report: Any) -> None:
        """Let ``save_pretrained`` of the model write what this run has made of it."""
        job = self._job
        options = SaveOptions(
            recipe=job.applied_recipe(self._session.lifecycle.recipe),
            source=self._blocks.source_folder,
            report=report,
            run=self._record(),
            check=verify_saved if job.run_args.verify else None,
            page=write_run_page if job.run_args.report else None,
            once=job.processes.count > 1,
        )
        modify_save_pretrained(model, options)  # type: ignore[arg-type]  # or one like it

    def _check_alike(self, model: Module) -> None:
        """Refuse processes whose models in memory, arguments or versions differ.

        Raises:
            ArgumentError: names what differs; on all processes.
        """
        processes = self._job.processes
        if processes.count == 1:
            return
        dtype = getattr(model, "dtype", torch.float32)
        found = self._identity_of(None, dtype, self._blocks.device)
        found["model"] = model_fingerprint(model).get("config")
        found["weights"] = weight_digests(model)
        check_alike(found, lambda value, what: processes.all_gather(what, value))

    def _plan_output(self) -> PlannedOutput | None:
        """Predict the output, and refuse what could not be written or served."""
        job, blocks, state = self._job, self._blocks, self._session.state
        if job.output_dir is None:
            if self._batches is not None:  # else its save_pretrained tells as soon
                warn_save_problems(blocks.model, self._modifiers, state, job.source)
            return None
        packed = job.model_args.save_compressed
        predicted = predict_output(
            blocks.model,  # type: ignore[arg-type]  # others have no output
            self._modifiers,
            state,
            blocks.source_folder,
            packed=packed,
            headers=blocks.headers,
            as_written=blocks.as_written(),
        )
        size = layout_files(predicted.planned.stored).file_size
        check_size_limit(self._size_limit, size)
        if job.kl_budget is None:  # else it was searched for, and its gates say so at the end
            check_size(job.gates, size)
        is_meant = not job.run_args.verify or is_meant_unservable(self._modifiers)
        check_servable(
            predicted.config,
            predicted.planned,
            is_meant=is_meant,
            is_verified=job.run_args.verify,
        )
        if job.processes.is_first:
            job.check_free(job.output_dir)
        learning = [
            one
            for one in self._modifiers
            if one.initialized
            and (one.traits.data is DataUse.LEARN_FIRST or one.traits.sees_original)
        ]
        # of the progress of learning: a new file is written before the old one goes
        progress = sum(2 * one.cost((), DataSize()).held_bytes for one in learning)
        return PlannedOutput(
            job.output_dir,
            predicted.planned,
            lambda source: self._identity(source, predicted.predictions),
            resume=job.run_args.resume,
            passes=len(self._passes),
            scratch=predicted.block_bytes * (len(self._passes) - 1) + progress,
            compressed=packed,
            overwrite=job.model_args.overwrite,
            is_held=job.is_held,
        )

    def _run_passes(self) -> None:
        state = self._session.state
        state.run.block_source = self._blocks
        try:
            with short_spin_waits():
                run_passes(
                    self._passes,
                    self._blocks.model,
                    self._batches if self._kept is None else self._kept,
                    self._job.dataset_args,
                    pipeline=self._job.pipeline(),
                )
                self._session.finalize()
                # before experts that are not quantized are fused again
                self._modules = [name for name, _ in self._blocks.model.named_modules()]
                self._blocks.complete()
        finally:
            state.run.block_source = BlockSource()

    def _report(self, names: Sequence[str] | None) -> Records:
        found = collect_reports(self._modifiers, None if names is None else frozenset(names))
        counts = any(one.traits.data.collects for one in self._passes[self._blocks.stage])
        if counts or names is None:  # else the journal has those of the last pass with data
            found[EXPERTS] = experts_report(self._blocks.model, names)
        return {modifier: records for modifier, records in found.items() if records}

    def _options(self, report: Mapping[str, Any] | None) -> SaveOptions:
        job, model = self._job, self._blocks.model
        kinds = module_kinds(model)  # type: ignore[arg-type]  # others have no output
        return SaveOptions(
            save_compressed=job.model_args.save_compressed,
            processor=job.processor_to_write(self._processor),
            recipe=job.applied_recipe(self._session.lifecycle.recipe),
            source=self._blocks.source_folder,
            report=report,
            run=self._record(),
            check=partial(verify_written, kinds=kinds, engine=job.engine)
            if job.run_args.verify
            else None,
            page=write_run_page if job.run_args.report else None,
            gate=self._gates,
        )

    def _record(self) -> RunRecord:
        """Return what the manifest says of the run."""
        if self._known is None:
            dtype = getattr(self._blocks.model, "dtype", torch.float32)
            self._known = self._identity_of(None, dtype, self._blocks.device)
        shared = self._session.state.run.ranks is not None
        count = self._job.processes.count if shared else 1
        return run_record(self._known, self._job.call, ranks=count, source=self._began_with)

    def identity_before(self) -> RunIdentity:
        """The identity of the run with the recipe as it was given, budget included."""
        job, blocks = self._job, self._blocks
        dtype = getattr(blocks.model, "dtype", torch.float32)
        if isinstance(blocks, ResidentBlocks):
            return self._identity_of(None, dtype, blocks.device, job.recipe.yaml())
        found = self._identity_of(blocks.source, blocks.dtype, blocks.device, job.recipe.yaml())
        found["weights"] = blocks.weights.fingerprint
        return found

    def _identity_of(
        self,
        source: SourceInfo | None,
        dtype: torch.dtype,
        device: torch.device,
        recipe: str | None = None,
    ) -> RunIdentity:
        job = self._job
        processor = job.model_args.processor
        found = run_identity(
            source,
            recipe=recipe or self._session.get_serialized_recipe(),
            batches=self._batches,
            dataset_args=job.dataset_args,
            dtype=dtype,
            device=device,
            statistics=None if self._kept is None else self._kept.digest,
            output={
                "class": type(self._blocks.model).__name__,
                "save_compressed": job.model_args.save_compressed,
                "tie_word_embeddings": job.model_args.tie_word_embeddings,
                "processor": str(local_directory(processor) or processor)
                if isinstance(processor, str)
                else type(processor).__name__,
            },
        )
        if self._batches is not None:
            found[MOMENT] = job.moment.isoformat()
        return found

    def _identity(self, blocks: StreamedBlocks, predictions: Sequence[Prediction]) -> RunIdentity:
        found = self._identity_of(blocks.source, blocks.dtype, blocks.device)
        registered = {
            str(place): one.registered
            for place, one in enumerate(predictions)
            if one.registered is not None
        }
        if registered:
            found["registered"] = registered
        found["weights"] = blocks.weights.fingerprint
        if self._budget is not None:
            found[BUDGET] = self._budget.as_json()
        self._known = found
        return found
