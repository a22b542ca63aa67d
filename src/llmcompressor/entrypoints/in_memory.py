# SPDX-License-Identifier: Apache-2.0
"""In-memory runs: the whole model is loaded, for model objects or modifiers that need it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.checkpoint.dispatched import is_dispatched, is_offloaded, take_back
from llmcompressor.checkpoint.experts import close_dense, open_experts
from llmcompressor.checkpoint.layout import forget_dequantizing
from llmcompressor.checkpoint.load import (
    check_unadapted,
    check_unquantized,
    load_model,
    parse_precision,
    untie_embeddings,
)
from llmcompressor.checkpoint.offload_caches import is_cached, take_out
from llmcompressor.checkpoint.parts import keep_prefix
from llmcompressor.checkpoint.prediction import module_kinds
from llmcompressor.checkpoint.save import modify_save_pretrained, save_checkpoint
from llmcompressor.checkpoint.source import inspect_source, local_directory
from llmcompressor.checkpoint.workspace import reserved
from llmcompressor.core.session import CompressionSession
from llmcompressor.core.session_functions import active_session
from llmcompressor.datasets.source import Source
from llmcompressor.device_memory import free_device_memory, give_back_device_memory
from llmcompressor.entrypoints.checking import (
    check_saved,
    check_writable_model,
    check_written,
    serves_nobody,
    warn_of_saving,
)
from llmcompressor.entrypoints.going_on import go_on_with, is_gone_on_with
from llmcompressor.entrypoints.job import Job, compression_report, report_of, undone_on_error
from llmcompressor.entrypoints.task import EXPERTS, Task
from llmcompressor.errors import ArgumentError, NonFiniteError, OutputError
from llmcompressor.logger import logger
from llmcompressor.memory import give_back_freed
from llmcompressor.modeling.alignment import align
from llmcompressor.modeling.finite_weights import first_nonfinite
from llmcompressor.modeling.flat_pieces import in_pieces
from llmcompressor.pipelines import PIPELINES
from llmcompressor.pipelines.attention_trial import try_attention
from llmcompressor.pipelines.experts import experts_report
from llmcompressor.pipelines.mixtures import meant_mixtures
from llmcompressor.pipelines.passes import run_passes, stretches_of, with_surveys
from llmcompressor.pipelines.unreached import check_reached

__all__ = ["check_finite", "load_whole_model", "run_in_memory"]

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
    with reserved(Path(job.output_dir), resume=job.run_args.resume):
        return _run(job, source)


def _run(job: Job, source: Source | None) -> Module:
    model = load_whole_model(job, device=job.model_args.device, goes_on=True)
    mixtures = meant_mixtures(model, job.recipe.modifiers)
    open_experts(model, mixtures)  # type: ignore[arg-type]  # others have no MoE modules
    processor = job.load_processor()
    loader = job.load_data(model, processor, source)
    batches = job.pooled(loader)
    job.share_memory()
    session = active_session()
    session.reset()
    session.state.keeps_ties = job.keeps_ties
    with undone_on_error(session):
        model = _compress(job, model, batches, session)
    records = report_of(session.lifecycle.recipe.modifiers)
    report = compression_report({**records, EXPERTS: experts_report(model)}, model)
    close_dense(model)  # type: ignore[arg-type]  # others have no MoE modules
    if hasattr(model, "save_pretrained"):
        modify_save_pretrained(
            model,  # type: ignore[arg-type]  # it has the methods of a PreTrainedModel
            recipe=job.applied_recipe(session.lifecycle.recipe),
            source=job.source,
            report=report,
            check=check_saved if job.run_args.verify else None,
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
        is_gone_on_with(inspect_source(folder, allow_quantized=True))
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
        go_on_with(model)
        forget_dequantizing(model)
    if is_cached(model):
        take_out(model)
    align(model)
    return _placed(model, device)


def _given_model(task: Task, given: Any, *, goes_on: bool) -> Module:
    writable = hasattr(given, "config") and hasattr(given, "save_pretrained")
    if not isinstance(given, Module) or (task.output_dir is not None and not writable):
        raise ArgumentError(
            f"The model is a {type(given).__name__}, which cannot be compressed"
            f"{' and written' if task.output_dir else ''}.",
            "Pass a folder, the id of a model on the hub, or a loaded transformers model.",
        )
    model: Any = given
    check_unadapted(model)
    (go_on_with if goes_on else check_unquantized)(model)
    forget_dequantizing(model)
    device = task.model_args.device
    was_offloaded = is_offloaded(model) or is_cached(model)
    if is_cached(model):
        take_out(model)
    if was_offloaded or (device is not None and is_dispatched(model)):
        take_back(model)  # hooks would send inputs to the former devices of the weights
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
        _placed(model.to("cpu"), None)
    align(model)
    if isinstance(model, PreTrainedModel):
        keep_prefix(model)
    return given


def _compress(job: Job, model: Module, batches: Any, session: CompressionSession) -> Module:
    """Apply the recipe and return the model, which a modifier may have replaced."""
    check_finite(model)
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
    try_attention(model, batches, session.lifecycle.recipe.modifiers, session.state)
    modifiers = session.lifecycle.recipe.modifiers
    if job.output_dir is None:
        warn_of_saving(model, modifiers, session.state, job.source)
    else:
        check_writable_model(
            model,
            modifiers,
            session.state,
            job.source,
            job.output_dir,
            packed=job.model_args.save_compressed,
            is_meant=not job.run_args.verify or serves_nobody(job.recipe.modifiers),
        )
    if job.recipe.modifiers:
        _run_pipelines(job, model, batches, session)
    session.finalize()
    return model


def _run_pipelines(job: Job, model: Module, batches: Any, session: CompressionSession) -> None:
    """Run one pipeline for all modifiers, or one pass for each group that needs the one before."""
    name = job.pipeline()
    passes = with_surveys(stretches_of(session.lifecycle.recipe.modifiers))
    if name == "independent" or len(passes) == 1:
        PIPELINES.load(name)()(model, batches, job.dataset_args)
    else:
        args = job.dataset_args
        run_passes(passes, model, batches, args, pipeline=name, begin=lambda number: None)


def _save(
    job: Job, model: Any, processor: Any, session: CompressionSession, report: dict[str, Any] | None
) -> None:
    assert job.output_dir is not None
    give_back_freed()
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
        check=partial(check_written, kinds=module_kinds(model)) if job.run_args.verify else None,
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


def check_finite(model: Module) -> None:
    """Refuse a model with NaN or infinity in any weight, targeted by a modifier or not."""
    bad = first_nonfinite(model)
    if bad is not None:
        raise NonFiniteError(
            f"The weight {bad} holds NaN or infinity. The checkpoint is damaged or was saved in a "
            "dtype too narrow for it: get it anew, or load it with precision='float32' if its "
            "files are in float32."
        )


def _placed(model: Module, device: str | None) -> Module:
    """Move a model to the given device, else to an accelerator if it fits."""
    if in_pieces(model):
        return model  # DeepSpeed has placed them
    if device is not None:
        return model.to(device)
    if not torch.cuda.is_available():
        return model
    give_back_device_memory()
    free = free_device_memory(torch.cuda.current_device())
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > free * _SHARE_FOR_WEIGHTS:
        logger.warning(
            f"The model takes {size / 2**30:.1f} GiB and the accelerator has "
            f"{free / 2**30:.1f} GiB free: it computes on the CPU."
        )
        return model
    return model.to("cuda")
