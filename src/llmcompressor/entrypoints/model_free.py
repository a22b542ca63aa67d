# SPDX-License-Identifier: Apache-2.0
"""``model_free_ptq``: quantize a checkpoint without its model class."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch.nn import Embedding, Linear

from llmcompressor.args.checks import invalid_value, path
from llmcompressor.args.parsing import told_by_name
from llmcompressor.checkpoint.generic_model import (
    TreeModel,
    build_tree,
    is_stack_of_matrices,
    tied_pair,
    untie_source,
)
from llmcompressor.checkpoint.load import fetch
from llmcompressor.checkpoint.meta_model import MetaModel
from llmcompressor.checkpoint.moe_names import FusedExperts, find_fused_experts, split_fused_experts
from llmcompressor.checkpoint.quantization_config import existing_quantization
from llmcompressor.checkpoint.shared_blocks import SharedBlocks
from llmcompressor.checkpoint.source import (
    SourceInfo,
    TensorHeader,
    check_no_adapter,
    inspect_source,
    is_hub_id,
    tell_remarks,
)
from llmcompressor.entrypoints.arguments import (
    Job,
    as_path,
    first_before_others,
    parse_device,
    refuse_transposed,
    together,
)
from llmcompressor.entrypoints.conversion import converted_checkpoint, parse_converters
from llmcompressor.entrypoints.fingerprints import call_record
from llmcompressor.entrypoints.run import MemoryLimits, compress, streamed_blocks
from llmcompressor.errors import ArgumentError, CheckpointError, TargetError
from llmcompressor.logger import logger, show_runs_quietly
from llmcompressor.modeling.matching import (
    check_targets,
    looks_like_pattern,
    matches_any,
    matches_name,
    suggest_targets,
    unmatched,
)
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.numerics.products import float32_by_default
from llmcompressor.recipe import Recipe
from llmcompressor.reporting.summary import tell_summary, told_run
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.launch import launched_group
from llmcompressor.runtime.processes import Processes
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.assign import is_empty
from llmcompressor.schemes.budget import KL, parse_budget
from llmcompressor.schemes.resolve import ResolvedSchemes
from llmcompressor.verification.modules import plain_in_draft
from llmcompressor.verification.transformers_model import refusal

_LINEAR = ["Linear"]
"""Of what may be a matrix; kernels of convolutions are smaller."""


@told_by_name
def model_free_ptq(
    model_stub: str | os.PathLike[str],
    save_directory: str | os.PathLike[str],
    scheme: str | QuantizationScheme | Mapping[str, Any] | None = None,
    ignore: str | Iterable[str] | None = (),
    max_workers: int = 1,
    device: str | torch.device | Sequence[str | torch.device] | None = None,
    converter: Any = None,
    *,
    config: QuantizationConfig | Mapping[str, Any] | None = None,
    budget: Mapping[str, Any] | None = None,
    candidates: Sequence[Any] | None = None,
    resume: str = "auto",
    max_memory: Any = None,
    verify: bool = True,
    report: bool = True,
    overwrite: bool = False,
    gates: Any = None,
    gate_dataset: Any = None,
    gate_reference: Any = None,
    verify_with: str | None = None,
    verify_python: str | os.PathLike[str] | None = None,
    verify_timeout: float | None = None,
) -> Path:
    """Quantize the weights of a checkpoint by round-to-nearest, from its files alone.

    No model class is needed and no code of the checkpoint is run: ``config.json`` is carried
    over, and modules are inferred from the names and shapes of tensors. So it works for unknown
    architectures, but cannot calibrate. If transformers has the class, its names of modules are
    written in addition to those of the files.

    Several processes share the blocks of the model: all of them have to call, with the same
    arguments, and see the folder of the output.

    Args:
        model_stub: the checkpoint: a folder with safetensors, or an id on the hub.
        save_directory: the output folder; it appears when it is complete.
        scheme: a preset's name, or a scheme. Without targets of its own it applies to
            ``Linear``: every two-dimensional ``X.weight`` where X does not end in ``norm`` and is
            not named like an embedding.
        ignore: modules that stay unquantized: names, ``re:`` patterns, class names.
        max_workers: number of files to convert at a time. Otherwise it has no effect: reading,
            computing and writing overlap in any case.
        device: the device to compute on; by default an accelerator if there is one, else the CPU.
        converter: converts the checkpoint before it is quantized: an object of the converter
            interface of compressed-tensors, such as ``FP8BlockDequantizer``, or several in a list.
            The converted checkpoint needs temporary disk space next to the output.
        config: several schemes instead of ``scheme``: a ``QuantizationConfig``, the same as a
            mapping, or a mapping from names of groups to schemes.
        budget: a limit instead of ``scheme``: ``{"bits": 4.25}`` for each weight, or
            ``{"size": "5.5GB"}`` of the weight files. Modules get the candidates with which the
            squared error of all weights is least.
        candidates: the schemes to choose from; by default W4A16 and W8A16.
        resume: ``"auto"`` continues an interrupted run, ``"never"`` discards its progress,
            ``"must"`` refuses to begin without one, ``"mixed"`` continues it also on another kind
            of processor.
        max_memory: limit of memory, such as ``"40GiB"`` for the host, or by device.
        verify: read the written files again and check them.
        report: write ``report.html`` beside the weights.
        overwrite: replace an existing checkpoint in ``save_directory``.
        gates: limits that the checkpoint has to keep to get its name, as for ``oneshot``. For
            those that are measured transformers has to have the model's class.
        gate_dataset: text to measure them on; by default held-out modules of Python's library.
        gate_reference: the original to compare with; by default the checkpoint itself.
        verify_with: also run the first blocks of the output, one of each kind, in this engine:
            ``"vllm"``, ``"transformers"`` or ``"sglang"``. What it refuses gets no name.
        verify_python: the interpreter of the engine's environment; this one by default.
        verify_timeout: seconds that the engine has for one model; 900 by default.

    Returns:
        The folder.

    Raises:
        InputError: an invalid argument or checkpoint; nothing has been written then.
        NonFiniteError: a weight holds NaN or infinity.
        ProcessError: another process has failed, or does not come in time.
        GateError: the checkpoint does not keep its gates, and is in ``NAME.rejected``.

    Example::

        model_free_ptq("./new-model", "./new-model-FP8", "FP8_BLOCK", ignore=["re:.*gate$"])
    """
    show_runs_quietly()
    with launched_group(), together("model_free_ptq") as processes:
        _check_workers(max_workers)
        converters = parse_converters(converter)
        fields = _fields(scheme, config, budget, () if ignore is None else ignore)
        if budget is not None or candidates is not None:
            fields["candidates"] = candidates
        modifier = QuantizationModifier(**fields)
        plain = _without_budget(modifier)
        for one in plain:
            _check_needs_no_data(one, one.resolve_quantization_config())
        chosen = _device(device)
        limits = {"resume": resume, "max_memory": max_memory, "verify": verify, "report": report}
        limits |= {"verify_with": verify_with, "verify_python": verify_python}
        limits |= {"verify_timeout": verify_timeout}
        gated = {"gates": gates, "gate_dataset": gate_dataset, "gate_reference": gate_reference}
        given = {"model": path("model_stub", model_stub), "recipe": plain[0], "device": chosen}
        target = as_path("save_directory", save_directory)
        job = Job(target, None, overwrite=overwrite, **given, **limits, **gated)
        assert job.output_dir is not None
        what = {"model": job.place, "scheme": scheme, "ignore": ignore, "config": config, **gated}
        what |= {"budget": budget, "candidates": candidates} if budget is not None else {}
        what |= {"device": chosen, "converter": converter, "gates": job.gates or None}
        job.call = call_record("model_free_ptq", what)
        processes.check_equal(
            "recipe", Recipe.from_modifiers(QuantizationModifier(**fields)).yaml()
        )
        processes.check_equal("save_directory", str(job.output_dir))
        with first_before_others(processes, "source"):
            source = _inspect(os.fspath(model_stub), is_verified=verify)
        tell_remarks(source)
        _convert(job, processes, source, converters, fields, max_workers)
    return job.output_dir


def _convert(
    job: Job,
    processes: Processes,
    source: SourceInfo,
    converters: Sequence[Any],
    fields: dict[str, Any],
    workers: int,
) -> None:
    """Convert the checkpoint, if that is asked for, and quantize it."""
    assert job.output_dir is not None
    resolved = QuantizationModifier(**fields).resolve_quantization_config()
    device = job.model_args.device
    with (
        told_run(),
        converted_checkpoint(
            source,
            converters,
            job.output_dir,
            device=device,
            workers=workers,
            processes=processes,
        ) as converted,
    ):
        _quantize(job, processes, converted, fields, resolved)
        if processes.is_first:
            tell_summary(job.output_dir)


@float32_by_default()
def _quantize(
    job: Job,
    processes: Processes,
    source: SourceInfo,
    fields: dict[str, Any],
    resolved: ResolvedSchemes,
) -> None:
    blueprint = _blueprint(source, resolved)
    # The modifier checks again, but its remedy is a field of recipes, which users cannot set here.
    check_targets(blueprint.model, resolved.targets)
    fields["ignore"] = _complete_ignore_list(blueprint, resolved)
    refuse_transposed(source, blueprint.model, fields["ignore"], resolved.targets)
    job.recipe = Recipe.from_modifiers(QuantizationModifier(**fields))
    if processes.count == 1:
        with streamed_blocks(job, blueprint) as blocks:
            compress(job, blocks)
        return
    with (  # to the rest of a run each process is alone, with blocks that others have finished
        Ranks(processes) as ranks,
        closing(SharedBlocks(blueprint, processes, ranks)) as shared,
    ):
        limits = MemoryLimits(job.run_args.max_memory)
        shared.weights.device = limits.choose_device(shared.weights, job.model_args.device)
        compress(job, shared)


# ---------------------------------------------------------------------- arguments


def _check_workers(max_workers: Any) -> None:
    if isinstance(max_workers, bool) or not isinstance(max_workers, int) or max_workers < 1:
        raise ArgumentError(
            f"The argument 'max_workers' cannot be {max_workers!r}.",
            "Give a whole number of at least 1, or leave it out.",
        )


def _device(given: Any) -> str | None:
    """Return the device, the first of several, as blocks are processed one after another."""
    several = [given] if isinstance(given, str | torch.device) else given
    if several is None:
        return None
    devices = [parse_device(one) for one in several] if isinstance(several, Sequence) else []
    if not devices:
        raise ArgumentError(
            f"The argument 'device' cannot be {given!r}.", 'Give a device such as "cuda:0".'
        )
    if len(devices) > 1:
        logger.warning(f"One device computes, {devices[0]}: the blocks come one after another.")
    return str(devices[0])


def _fields(scheme: Any, config: Any, budget: Any, ignore: str | Iterable[str]) -> dict[str, Any]:
    """Fields of the QuantizationModifier for the arguments."""
    count = sum(one is not None for one in (scheme, config, budget))
    if count != 1:
        given = "None of them was" if count == 0 else "Several were"
        raise ArgumentError(
            f"One of 'scheme', 'config' and 'budget' says how to quantize. {given} given.",
            'Give a preset, scheme="FP8_DYNAMIC", several groups in config, or a budget.',
        )
    if not isinstance(ignore, str | Iterable):
        raise invalid_value("ignore", ignore, "names, 're:' patterns or class names in a list")
    ignored = [ignore] if isinstance(ignore, str) else list(ignore)
    if isinstance(scheme, QuantizationScheme):
        return {"config_groups": {"group_0": _with_default_targets(scheme)}, "ignore": ignored}
    if scheme is not None:
        return {"scheme": scheme, "targets": _LINEAR, "ignore": ignored}
    if budget is not None:
        if parse_budget(budget).kind == KL:
            raise ArgumentError(
                "A budget of kl is measured by running the model, which model_free_ptq does not.",
                "Use oneshot for it, or give a budget of bits or size.",
            )
        return {"budget": budget, "targets": _LINEAR, "ignore": ignored}
    groups, more = _groups(config)
    return {"config_groups": groups, "ignore": list(dict.fromkeys([*ignored, *more]))}


def _groups(config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the groups and the ignore list of a configuration."""
    if isinstance(config, QuantizationConfig):
        config = config.model_dump()
    if not isinstance(config, Mapping):
        raise ArgumentError(
            f"The argument 'config' is a {type(config).__name__}.",
            "Give a QuantizationConfig, or a mapping with config_groups.",
        )
    if "config_groups" not in config:
        return {name: _with_default_targets(group) for name, group in config.items()}, []
    for name in ("kv_cache_scheme", "transform_config"):
        if config.get(name):
            raise ArgumentError(
                f"The config has a {name}, which weights alone do not tell.", "Use oneshot for it."
            )
    groups = config["config_groups"] or {}
    return {name: _with_default_targets(group) for name, group in groups.items()}, list(
        config.get("ignore") or []
    )


def _with_default_targets(group: Any) -> Any:
    """Return the group, with targets ``Linear`` if it has none."""
    if isinstance(group, QuantizationScheme) and not group.targets:
        return group.model_copy(update={"targets": _LINEAR})
    if isinstance(group, Mapping) and not group.get("targets"):
        return {**group, "targets": _LINEAR}
    return group


def _without_budget(modifier: QuantizationModifier) -> list[QuantizationModifier]:
    """The modifier, or one for each candidate of its budget."""
    if modifier.budget is None:
        return [modifier]
    fields = {"targets": modifier.targets, "ignore": modifier.ignore}
    given = (one.given for one in modifier.resolve_candidates())
    return [QuantizationModifier(scheme=one, **fields) for one in given]


def _check_needs_no_data(modifier: QuantizationModifier, resolved: ResolvedSchemes) -> None:
    if modifier.traits.needs_data:
        raise ArgumentError(
            "The scheme has scales of activations, or an observer of inputs, that calibration "
            "data has to run through the model for.",
            "Use one for weights alone or with dynamic activations, such as FP8_DYNAMIC, "
            "FP8_BLOCK, W4A16 or NVFP4A16, or use oneshot with a dataset.",
        )
    for name, group in resolved.groups.items():
        if group.weights is None and not is_empty(group):
            raise ArgumentError(
                f"The scheme {name!r} quantizes no weights, and there is nothing else in a "
                "checkpoint to quantize.",
                "Give it weights, or use oneshot.",
            )


# ---------------------------------------------------------------------- the checkpoint


def _inspect(model: str, *, is_verified: bool) -> SourceInfo:
    folder = fetch(model) if is_hub_id(model) else model
    source = inspect_source(folder, allow_quantized=True)
    check_no_adapter(source.directory)
    if not source.tensors:
        raise CheckpointError(
            f"The folder {folder} holds no safetensors files.",
            "Save the model with save_pretrained of transformers, and use that.",
        )
    if is_verified and (reason := refusal(source.config)):  # which would be found after the work
        raise CheckpointError(
            f"transformers cannot build the model that the config.json of {folder} describes: "
            f"{reason}.",
            "Correct its fields; compare them with those of the original model.",
        )
    return source


def _blueprint(source: SourceInfo, resolved: ResolvedSchemes) -> MetaModel:
    """Build the tree of the checkpoint's modules, with targeted stacks of experts unfused."""
    stacks = find_fused_experts(source.tensors)
    meant = [one for one in stacks if _is_targeted(one, resolved)]
    if meant:
        count = sum(one.experts for one in meant)
        logger.info(f"{count} experts are stored in {len(meant)} stacks: each gets its own name.")
    kept = [one.name for one in stacks if one not in meant]
    if kept:
        logger.info(f"Left as they are: the experts of {join_names(kept)}.")
    known = {name for one in stacks for name in (one.gate_up, one.down)}
    _warn_unknown_stacks(
        {name: one for name, one in source.tensors.items() if name not in known}, resolved
    )
    existing = existing_quantization(str(source.directory), source.config)
    headers: Mapping[str, TensorHeader] = split_fused_experts(source.tensors, meant)
    pair = tied_pair(source.config, headers)
    if pair is not None and _targets_tied_pair(pair, resolved):
        source, headers = untie_source(source, headers, pair)
        logger.info(
            f"{join_names(pair)} shared one weight, and one of them is to be quantized: each gets "
            "a "
            "weight of its own, and config.json says tie_word_embeddings: false."
        )
    blueprint = build_tree(source, headers, existing)
    assert isinstance(blueprint.model, TreeModel)
    if blueprint.model.compressed:
        logger.info(f"Quantized already, and kept: {join_names(blueprint.model.compressed)}.")
    return blueprint


def _warn_unknown_stacks(headers: Mapping[str, TensorHeader], resolved: ResolvedSchemes) -> None:
    """Warn about targeted stacks of matrices whose layout is unknown."""
    stand_in = Linear(1, 1, device="meta")
    left = [
        name
        for name, header in headers.items()
        if is_stack_of_matrices(header.shape)
        for module in (name.removesuffix(".weight"),)
        if matches_any(module, stand_in, resolved.targets)
        and not matches_any(module, stand_in, resolved.ignore)
    ]
    if left:
        logger.warning(
            f"Left as they are: {join_names(left)}. They have three dimensions, and nothing tells "
            "how "
            "matrices lie in them. oneshot asks the model's class."
        )


def _targets_tied_pair(pair: tuple[str, str], resolved: ResolvedSchemes) -> bool:
    """Return True if a tied head is targeted by name, or its embedding is targeted."""
    head, embedding = pair
    is_named = any(matches_name(head, target) for target in resolved.targets)
    stand_ins = {head: Linear(1, 1, device="meta"), embedding: Embedding(1, 1, device="meta")}
    return any(
        (is_named if name == head else matches_any(name, module, resolved.targets))
        and not matches_any(name, module, resolved.ignore)
        for name, module in stand_ins.items()
    )


def _is_targeted(stack: FusedExperts, resolved: ResolvedSchemes) -> bool:
    """Return True if an expert of a stack would be targeted as a module."""
    if any(matches_name(name, entry) for name in stack.whole for entry in resolved.ignore):
        return False
    stand_in = Linear(1, 1, device="meta")
    return any(
        matches_any(name, stand_in, resolved.targets)
        and not matches_any(name, stand_in, resolved.ignore)
        for name in stack.modules
    )


def _complete_ignore_list(blueprint: MetaModel, resolved: ResolvedSchemes) -> list[str]:
    """Return the ignore list, extended by possible embeddings that are not targeted by name.

    Raises:
        TargetError: a plain name matches no module, but nearly does.
    """
    model = blueprint.model
    assert isinstance(model, TreeModel)
    pair = tied_pair(blueprint.source.config, blueprint.source.tensors)
    head = pair and pair[0].rpartition(".")[2]
    idle = unmatched(model, resolved.ignore)
    tied = {entry for entry in idle if entry.rpartition(".")[2] == head}  # it may be in no file
    for entry in idle:
        is_plain = not (entry in tied or entry.startswith("re:") or looks_like_pattern(entry))
        if is_plain and (hint := suggest_targets(model, entry)):  # others get a warning
            raise TargetError(
                f"The ignore entry {entry!r} matches no module of the checkpoint.", hint
            )
    unsure = (*model.doubtful, *model.tied, *_plain_parts(blueprint))
    named = [
        name for name in unsure if any(matches_name(name, target) for target in resolved.targets)
    ]
    ignored = {
        name for name in unsure if matches_any(name, model.get_submodule(name), resolved.ignore)
    }
    _refuse_tied([name for name in model.tied if name in named and name not in ignored])
    left = list(dict.fromkeys(name for name in unsure if name not in {*named, *ignored}))
    if left:
        logger.info(
            f"Left unquantized: {join_names(left)}; a norm, tied to an embedding, or like one, or "
            "a part of a draft that engines serve unquantized. To quantize what is not tied, "
            "target it by name."
        )
    return [*(entry for entry in resolved.ignore if entry not in tied), *left]


def _plain_parts(blueprint: MetaModel) -> list[str]:
    """Return the Linears of a draft that vLLM builds plain."""
    pattern = plain_in_draft(blueprint.source.config)
    return [
        name
        for name, module in blueprint.model.named_modules()
        if pattern is not None and isinstance(module, Linear) and re.fullmatch(pattern, name)
    ]


def _refuse_tied(heads: Sequence[str]) -> None:
    if heads:
        raise TargetError(
            f"{join_names(heads)} is tied to the embedding by config.json, so that readers do not "
            "look at the weight that is stored for it.",
            "Ignore it, or set tie_word_embeddings to false in config.json.",
        )
