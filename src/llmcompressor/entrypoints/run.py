# SPDX-License-Identifier: Apache-2.0
"""Streamed runs: checkpoint to checkpoint, one block in memory at a time, with a journal."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import xxhash
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.block_reader import REST, BlockWeights
from llmcompressor.checkpoint.block_stream import BlockStream, CompletedOutput
from llmcompressor.checkpoint.load import (
    check_no_peft_adapters,
    check_unquantized,
    codes_without_scheme,
    decompress_weights,
    fetch,
    has_offload_caches,
    is_dispatched,
    is_offloaded,
    load_model,
    parse_precision,
    remove_accelerate_hooks,
    remove_offload_caches,
    untie_embeddings,
)
from llmcompressor.checkpoint.manifest import OutputManifest, build_manifest, module_kinds
from llmcompressor.checkpoint.meta_model import MetaModel, build_meta_model
from llmcompressor.checkpoint.model_config import read_report
from llmcompressor.checkpoint.moe_names import (
    fuse_dense_experts,
    unfuse_meta_model,
    unfuse_stored_experts,
)
from llmcompressor.checkpoint.names import drop_dequantizing_conversions, record_prefix
from llmcompressor.checkpoint.quantization_config import existing_quantization
from llmcompressor.checkpoint.save import (
    SaveOptions,
    modify_save_pretrained,
    planned_config,
    save_checkpoint,
    write_non_weight_files,
)
from llmcompressor.checkpoint.source import (
    SourceInfo,
    check_no_adapter,
    check_source_unquantized,
    code_tensors,
    inspect_source,
    is_compressed_tensors,
    is_hub_id,
    local_directory,
    quantization_method,
)
from llmcompressor.checkpoint.tensor_files import OutputLayout, layout_files
from llmcompressor.checkpoint.workspace import (
    Workspace,
    open_workspace,
    reserve_output,
)
from llmcompressor.core.contract import DataSize, DataUse
from llmcompressor.core.modifier import Modifier, planned_structure
from llmcompressor.datasets.source import Source
from llmcompressor.entrypoints.arguments import (
    EXPERTS,
    Job,
    Records,
    Task,
    clean_up_on_error,
    collect_reports,
    compression_report,
    parse_device,
)
from llmcompressor.entrypoints.fingerprints import run_fingerprint
from llmcompressor.entrypoints.verify import (
    check_servable,
    check_writable_model,
    is_meant_unservable,
    verify_saved,
    verify_written,
    warn_save_problems,
)
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    DatasetError,
    NonFiniteError,
    OutputError,
    RecipeError,
    TargetError,
)
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.sharded import has_partitioned_parameters
from llmcompressor.modeling.weights import align_parameters, first_nonfinite
from llmcompressor.pipelines import PIPELINES
from llmcompressor.pipelines.attention_trial import check_attention_forward
from llmcompressor.pipelines.moe_routing import experts_report
from llmcompressor.pipelines.moe_selection import (
    targeted_moes,
    unquantized_moes,
    warn_unloadable_experts,
)
from llmcompressor.pipelines.passes import (
    BY_BLOCK,
    insert_surveys,
    run_passes,
    split_at_rewrites,
    split_into_passes,
)
from llmcompressor.pipelines.targets import check_reached
from llmcompressor.runtime.memory import empty_device_cache, free_device_memory, malloc_trim
from llmcompressor.runtime.progress import join_names
from llmcompressor.runtime.threads import short_spin_waits
from llmcompressor.session.functions import active_session
from llmcompressor.session.session import CompressionSession
from llmcompressor.verification import Deployment, TensorInfo, check_serving
from llmcompressor.verification.facts import Severity

if TYPE_CHECKING:
    from llmcompressor.core.state import BlockSource

__all__ = [
    "MemoryLimits",
    "check_finite_weights",
    "is_partly_quantized",
    "load_whole_model",
    "prepare_partly_quantized",
    "run_blueprint",
    "run_in_memory",
    "run_streamed",
    "streamable_source",
]


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


def prepare_partly_quantized(model: PreTrainedModel) -> None:
    """Prepare a model that may be partly quantized; packed weights are unpacked.

    compressed-tensors may keep unpacked weights outside of the model.

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
    if names:
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
        source = None if folder is None else inspect_source(folder, allow_quantized=True)
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
# In-memory runs: the whole model is loaded, for model objects or modifiers that need it.

_SHARE_FOR_WEIGHTS = 0.6
"""Of an accelerator's free memory: the rest is for activations and solvers."""


def run_in_memory(job: Job, source: Source | None) -> Module:
    """Load a model, compress all of it, and write it.

    Args:
        job: the arguments of the run.
        source: the raw calibration data.

    Returns:
        The compressed model.
    """
    if job.run_args.resume == "must":
        raise OutputError(
            "There is nothing to resume: this run needs the whole model in memory, and such a run "
            "keeps no journal.",
            'Leave resume="must" (--resume must) out.',
        )
    if job.run_args.max_memory is not None:
        logger.warning("max_memory has no effect: this run needs the whole model in memory.")
    if job.output_dir is None or not job.processes.is_first:
        return _run(job, source)
    job.check_free(job.output_dir)
    with reserve_output(Path(job.output_dir), resume=job.run_args.resume):
        return _run(job, source)


def _run(job: Job, source: Source | None) -> Module:
    model = load_whole_model(job, device=job.model_args.device, goes_on=True)
    mixtures = targeted_moes(model, job.recipe.modifiers)
    unfuse_stored_experts(model, mixtures)  # type: ignore[arg-type]  # others have no MoE modules
    processor = job.load_processor()
    loader = job.load_data(model, processor, source)
    batches = job.pooled(loader)
    job.share_memory()
    session = active_session()
    session.reset()
    session.state.run.keeps_tied_embeddings = job.keeps_ties
    with clean_up_on_error(session):
        model = _compress(job, model, batches, session)
    records = collect_reports(session.lifecycle.recipe.modifiers)
    report = compression_report({**records, EXPERTS: experts_report(model)}, model)
    fuse_dense_experts(model)  # type: ignore[arg-type]  # others have no MoE modules
    if hasattr(model, "save_pretrained"):
        modify_save_pretrained(
            model,  # type: ignore[arg-type]  # it has the methods of a PreTrainedModel
            recipe=job.applied_recipe(session.lifecycle.recipe),
            source=job.source,
            report=report,
            check=verify_saved if job.run_args.verify else None,
            once=job.processes.count > 1,
        )
    if job.output_dir is not None and job.processes.is_first:
        _save(job, model, processor, session, report)
    if job.recipe_args.clear_sparse_session:
        session.reset()
    return model


def load_whole_model(task: Task, *, device: str | None, goes_on: bool = False) -> Module:
    """Load the model of a run into memory.

    Args:
        task: the arguments of the run; a model object is used as it is.
        device: the device to compute on; ``None`` for an accelerator if the model fits.
        goes_on: accept a model that an earlier run has partly quantized.

    Raises:
        ArgumentError: the object is not a model, or has no weights.
        CheckpointError: the model is missing, damaged, incomplete or quantized already.
    """
    args = task.model_args
    if not isinstance(args.model, str | Path):
        return _given_model(task, args.model, goes_on=goes_on)
    folder = local_directory(args.model) if goes_on else None
    if folder is not None:
        is_partly_quantized(inspect_source(folder, allow_quantized=True))
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
        prepare_partly_quantized(model)
        drop_dequantizing_conversions(model)
    if has_offload_caches(model):
        remove_offload_caches(model)
    align_parameters(model)
    return _move_to_device(model, device)


def _given_model(task: Task, given: Any, *, goes_on: bool) -> Module:
    writable = hasattr(given, "config") and hasattr(given, "save_pretrained")
    if not isinstance(given, Module) or (task.output_dir is not None and not writable):
        raise ArgumentError(
            f"The model is a {type(given).__name__}, which cannot be compressed"
            f"{' and written' if task.output_dir else ''}.",
            "Pass a folder, the id of a model on the hub, or a loaded transformers model.",
        )
    model: Any = given
    check_no_peft_adapters(model)
    (prepare_partly_quantized if goes_on else check_unquantized)(model)
    drop_dequantizing_conversions(model)
    device = task.model_args.device
    was_offloaded = is_offloaded(model) or has_offload_caches(model)
    if has_offload_caches(model):
        remove_offload_caches(model)
    if was_offloaded or (device is not None and is_dispatched(model)):
        remove_accelerate_hooks(
            model
        )  # hooks would send inputs to the former devices of the weights
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
    align_parameters(model)
    if isinstance(model, PreTrainedModel):
        record_prefix(model)
    return given


def _compress(job: Job, model: Module, batches: Any, session: CompressionSession) -> Module:
    """Apply the recipe and return the model, which a modifier may have replaced."""
    check_finite_weights(model)
    going_on = session.initialize(
        model=model,
        start=-1,
        recipe=job.recipe,
        calib_data=batches,
        copy_data=False,
    )
    model = going_on.model
    if batches is not None:
        check_reached(model, session.lifecycle.recipe.modifiers, batches, job.pipeline())
        job.check_batches(batches)
    check_attention_forward(model, batches, session.lifecycle.recipe.modifiers, session.state)
    modifiers = session.lifecycle.recipe.modifiers
    if job.output_dir is None:
        if batches is not None:  # else its save_pretrained tells as soon
            warn_save_problems(model, modifiers, session.state, job.source)
    else:
        check_writable_model(
            model,
            modifiers,
            session.state,
            job.source,
            job.output_dir,
            packed=job.model_args.save_compressed,
            is_meant=not job.run_args.verify or is_meant_unservable(job.recipe.modifiers),
        )
    if job.recipe.modifiers:
        _run_pipelines(job, model, batches, session)
    session.finalize()
    return model


def _run_pipelines(job: Job, model: Module, batches: Any, session: CompressionSession) -> None:
    """Run one pipeline for all modifiers, or one pass for each group that needs the one before."""
    name = job.pipeline()
    passes = insert_surveys(split_at_rewrites(session.lifecycle.recipe.modifiers))
    if name == "independent" or len(passes) == 1:
        PIPELINES.load(name)()(model, batches, job.dataset_args)
    else:
        args = job.dataset_args
        run_passes(passes, model, batches, args, pipeline=name, begin=lambda number: None)


def _save(
    job: Job, model: Any, processor: Any, session: CompressionSession, report: dict[str, Any] | None
) -> None:
    assert job.output_dir is not None
    malloc_trim()
    save_checkpoint(
        model,
        job.output_dir,
        save_compressed=job.model_args.save_compressed,
        processor=job.processor_to_write(processor),
        recipe_yaml=job.applied_recipe(session.lifecycle.recipe),
        source=job.source,
        overwrite=job.model_args.overwrite,
        was_free=True,
        report=report,
        check=partial(verify_written, kinds=module_kinds(model)) if job.run_args.verify else None,
    )


def _check_values(model: Module) -> None:
    """Refuse a model with weights on the meta device."""
    for name, module in model.named_modules():
        own = module._parameters.values()
        if any(parameter is not None and parameter.is_meta for parameter in own):
            raise ArgumentError(
                f"The weights of {name} have no values, they are on the meta device.",
                "Load the model's weights, or pass its folder instead of the model.",
            )


def check_finite_weights(model: Module) -> None:
    """Refuse a model with NaN or infinity in any weight, targeted by a modifier or not."""
    bad = first_nonfinite(model)
    if bad is not None:
        raise NonFiniteError(
            f"The weight {bad} holds NaN or infinity. The checkpoint is damaged or was saved in a "
            "dtype too narrow for it: get it anew, or load it with precision='float32' if its "
            "files are in float32."
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
    if size > free * _SHARE_FOR_WEIGHTS:
        logger.warning(
            f"The model takes {size / 2**30:.1f} GiB and the accelerator has "
            f"{free / 2**30:.1f} GiB free: it computes on the CPU."
        )
        return model
    return model.to("cuda")


# --------------------
# Memory limits of a run, by device.

"""Of an accelerator's free memory: the rest is for activations and solvers."""
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
        if needed <= allowed * _SHARE_FOR_WEIGHTS:
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
                f"max_memory allows {_gib(limit)} on {device}; embeddings and head take "
                f"{_gib(rest)} there, and a block of this model {_gib(block)}, once as it is and "
                "once while it is worked on.",
                f"Allow at least {_gib(rest + 2 * block)}, or compute on the CPU.",
            )

    def with_activation_budget(
        self, dataset_args: DatasetArguments, weights: BlockWeights
    ) -> DatasetArguments:
        """Return arguments with an activation budget that keeps the host within its limit.

        Args:
            dataset_args: the user's arguments; a budget given there is kept.
            weights: the blocks; everything else is loaded.

        Raises:
            ArgumentError: the limit is too small for one block.
        """
        malloc_trim(at_least=0)
        used = psutil.Process().memory_info().rss
        block = max(map(weights.source_bytes, weights.blocks), default=0)
        activations, weights.reads_ahead = self.room(used, block)
        if activations is None or dataset_args.activation_budget is not None:
            return dataset_args
        return replace(dataset_args, activation_budget=activations)

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
                f"max_memory allows {_gib(limit)} on the host; {_gib(used)} are in use (libraries "
                f"and embeddings), and a block of this model takes {_gib(block)}, once as it is "
                "and once compressed.",
                f"Allow at least {_gib(used + 2 * block)}.",
            )
        return int(left * _SHARE_FOR_ACTIVATIONS), reads_ahead

    @staticmethod
    def _needed(weights: BlockWeights) -> int:
        blocks = sorted(map(weights.source_bytes, weights.blocks), reverse=True)
        return weights.source_bytes(REST) + sum(blocks[:_BLOCKS_AT_ONCE])


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


# --------------------
# Streamed runs: checkpoint to checkpoint, one block in memory at a time, with a journal.

_IN_THE_CALL = (ArgumentError, DatasetError, NonFiniteError, RecipeError, TargetError)
"""What the same call runs into again, while another call would not go on from its progress."""


def streamable_source(job: Job) -> SourceInfo | None:
    """Return the source checkpoint if the run can stream it block by block, else ``None``.

    That needs an output to write blocks to, safetensors to read them from, and modifiers that
    complete one block at a time.
    """
    model = job.model_args.model
    if job.output_dir is None or not isinstance(model, str | os.PathLike):
        return None
    whole = [type(one).__name__ for one in job.recipe.modifiers if not one.traits.by_block]
    if whole or job.pipeline() not in BY_BLOCK:
        _warn_in_memory(f"{', '.join(whole) or f'the {job.pipeline()} pipeline'} needs all of it")
        return None
    source = inspect_source(_local_folder(job, str(model)), allow_quantized=True)
    if is_partly_quantized(source):
        _warn_in_memory("a part of it is quantized already")
        return None
    check_source_unquantized(source)
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


def _local_folder(job: Job, model: str) -> str | Path:
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
    blueprint = build_meta_model(
        source,
        config_name=args.config_name,
        precision=args.precision,
        trust_remote_code=args.trust_remote_code_model,
    )
    model = blueprint.model
    modifiers = job.recipe.modifiers
    mixtures = targeted_moes(model, modifiers)
    dense = unquantized_moes(mixtures, model, modifiers)
    warn_unloadable_experts(model, [one for one in mixtures if one.name not in dense])
    reason = unfuse_meta_model(blueprint, mixtures, dense)
    if reason:
        _warn_in_memory(reason)
        return run_in_memory(job, data)
    processor = job.load_processor()
    loader = job.load_data(model, processor, data)
    return _run_in_first_process(job, blueprint, processor, job.pooled(loader))


def _run_in_first_process(
    job: Job, blueprint: MetaModel, processor: Any, batches: Sequence[Any] | None
) -> Module:
    """Run in the first process only; the others load the model from its output."""
    processes = job.processes
    if processes.count == 1:
        return run_blueprint(job, blueprint, processor, batches)
    if not processes.is_first:
        job.made = processes.all_gather("output")[0]
    model = run_blueprint(job, blueprint, processor, batches)
    if processes.is_first:
        processes.all_gather("output", job.made)
    processes.all_gather("model of the output")
    return model


def run_blueprint(
    job: Job, blueprint: MetaModel, processor: Any = None, batches: Sequence[Any] | None = None
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
    weights = BlockWeights(blueprint, list(find_blocks(model).values()))
    limits = MemoryLimits(job.run_args.max_memory)
    weights.device = limits.choose_device(weights, args.device)
    session = active_session()
    session.reset()
    if batches is not None:
        weights.check()
    session.state.run.keeps_tied_embeddings = job.keeps_ties
    session.state.run.device_memory = limits.of(weights.device)
    with clean_up_on_error(session):
        weights.load_rest()
        if not args.tie_word_embeddings:
            untie_embeddings(model)
        blueprint.drop_broken_ties()
        _Run(job, blueprint, weights, limits, batches, processor, session)()
    if job.recipe_args.clear_sparse_session:
        session.reset()
    return model


@dataclass
class _Run:
    """State of a streamed run."""

    job: Job
    blueprint: MetaModel
    weights: BlockWeights
    limits: MemoryLimits
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
        self.blueprint.drop_broken_ties()  # a modifier may have untied them
        # everything permanent is allocated by now, including rotation matrices
        job.dataset_args = self.limits.with_activation_budget(job.dataset_args, self.weights)
        self._modifiers: list[Modifier] = list(self.session.lifecycle.recipe.modifiers)
        if self.batches is not None:
            check_reached(model, self._modifiers, self.batches, job.pipeline())
            job.check_batches(self.batches)
        state = self.session.state
        check_attention_forward(model, self.batches, self._modifiers, state)
        with planned_structure(self._modifiers, state):
            self._predictions = [modifier.predict(state) for modifier in self._modifiers]
            planned = [one for each in self._predictions for one in each.modules]
            prediction = build_manifest(
                model,
                planned,
                self.blueprint.source.tensors,
                save_compressed=job.model_args.save_compressed,
            )
            compressed, source = job.model_args.save_compressed, self.blueprint.source.directory
            config = planned_config(model, source, prediction, compressed=compressed)
            is_meant = not job.run_args.verify or is_meant_unservable(self._modifiers)
            check_servable(config, prediction, is_meant=is_meant)
            layout = layout_files(prediction.stored)
            left = sum(
                one.nbytes
                for block in find_blocks(model)
                for one in block.state_dict().values()
                if isinstance(one, Tensor)
            )
        passes = split_into_passes(self._modifiers, job.pipeline())
        self._prints = self._fingerprint()
        if not job.processes.is_first:
            self._load_output(prediction, layout, passes)
            return
        job.check_free(job.output_dir)
        with open_workspace(job.output_dir, self._prints, resume=job.run_args.resume) as workspace:
            try:
                self._work(workspace, prediction, layout, passes, left)
            except _IN_THE_CALL:
                workspace.abandon()
                raise

    def _load_output(
        self,
        prediction: OutputManifest,
        layout: OutputLayout,
        passes: Sequence[Sequence[Modifier]],
    ) -> None:
        """Load the model from the output that the first process has written."""
        target, made = self.job.output_dir, self.job.made
        assert target is not None
        assert made is not None
        if _config_hash(target) != made["config"]:
            raise OutputError(
                f"{target} is not what the first process has just written.",
                "Give an output directory that all processes see.",
            )
        output = CompletedOutput(self.blueprint, self.weights, prediction, layout, made["choices"])
        try:
            self._fill(output, passes)
            self._make_lazy_model(output, read_report(target))
        finally:
            output.close()

    def _work(
        self,
        workspace: Workspace,
        prediction: OutputManifest,
        layout: OutputLayout,
        passes: Sequence[Sequence[Modifier]],
        left: int,
    ) -> None:
        learning = [
            one
            for one in self._modifiers
            if one.initialized and one.traits.data is DataUse.LEARN_FIRST
        ]
        # of the progress of learning: a new file is written before the old one goes
        progress = sum(2 * one.cost((), DataSize()).held_bytes for one in learning)
        stream = BlockStream(
            self.blueprint,
            self.weights,
            prediction,
            layout,
            workspace,
            self._report,
            stages=len(passes),
            scratch=left * (len(passes) - 1) + progress,
            compressed=self.job.model_args.save_compressed,
        )
        try:
            self._fill(stream, passes)
            if workspace.is_published:
                workspace.remove()
            else:
                self._publish(stream, workspace, prediction, layout)
            self._make_lazy_model(stream, self._told(stream))
            self.job.made = {"config": _config_hash(workspace.target), "choices": stream.choices}
        finally:
            stream.close()

    def _fill(
        self, stream: BlockStream | CompletedOutput, passes: Sequence[Sequence[Modifier]]
    ) -> None:
        state = self.session.state

        def begin(stage: int) -> None:
            stream.stage = stage
            self._counts = any(one.traits.data.collects for one in passes[stage])

        stream.one_by_one = self.job.pipeline() == "independent"
        # A completed output has no blocks left to load or to store.
        state.run.block_source = cast("BlockSource", stream)
        try:
            with short_spin_waits():
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
            state.run.block_source = None

    def _publish(
        self,
        stream: BlockStream,
        workspace: Workspace,
        prediction: OutputManifest,
        layout: OutputLayout,
    ) -> None:
        options = self._options(self._told(stream))
        write_non_weight_files(self.blueprint.model, workspace.files, options, prediction, layout)
        workspace.journal.mark_ready()
        workspace.publish(replace=self.job.model_args.overwrite)
        logger.info(f"Saved {workspace.target}.")

    def _make_lazy_model(
        self, stream: BlockStream | CompletedOutput, report: Mapping[str, Any] | None
    ) -> None:
        """Turn the model into one that loads its blocks from the output and saves compressed."""
        target = self.job.output_dir
        assert target is not None
        if stream.rest_is_finished:
            stream.restore_rest(target)
        stream.attach_lazy_blocks(target)
        options = self._options(report)
        modify_save_pretrained(
            self.blueprint.model,
            recipe=options.recipe,
            source=options.source,
            report=options.report,
            check=verify_saved if self.job.run_args.verify else None,
            once=self.job.processes.count > 1,
        )

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
            check=partial(verify_written, kinds=module_kinds(self.blueprint.model))
            if job.run_args.verify
            else None,
        )

    def _report(self, names: Sequence[str]) -> Records:
        found = collect_reports(self._modifiers, frozenset(names))
        if self._counts:  # else the journal has the counts of the last pass with data
            found[EXPERTS] = experts_report(self.blueprint.model, names)
        return {modifier: records for modifier, records in found.items() if records}

    def _fingerprint(self) -> dict[str, Any]:
        job = self.job
        processor = job.model_args.processor
        prints = run_fingerprint(
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
        found = {str(i): one.registered for i, one in enumerate(self._predictions)}
        registered = {i: values for i, values in found.items() if values is not None}
        prints |= {"registered": registered} if registered else {}
        return prints | {"weights": self.weights.fingerprint}


def _config_hash(folder: Path) -> str:
    file = folder / "config.json"
    return xxhash.xxh3_128_hexdigest(file.read_bytes()) if file.is_file() else ""
