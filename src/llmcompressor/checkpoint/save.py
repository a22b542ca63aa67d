# SPDX-License-Identifier: Apache-2.0
"""Saving of a compressed model as a checkpoint that transformers and vLLM load.

The model in memory stays unchanged: modules are compressed one at a time while they are written.
The hub is not contacted unless ``push_to_hub`` is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from compressed_tensors.quantization import QuantizationStatus
from compressed_tensors.quantization.utils import is_module_quantized
from torch import Tensor
from torch.nn import Module
from transformers import GenerationConfig, PreTrainedModel

from llmcompressor.args.checks import size
from llmcompressor.checkpoint.atomic_output import (
    OnExisting,
    check_output_dir,
    check_path_argument,
    staged_output,
)
from llmcompressor.checkpoint.generic_model import TreeModel
from llmcompressor.checkpoint.manifest import (
    OutputManifest,
    PartitionedState,
    manifest_of,
    module_kinds,
    packed_modules,
    partition_state_dict,
)
from llmcompressor.checkpoint.model_config import (
    STORED_AS,
    checkpoint_config,
    write_json,
    write_report,
)
from llmcompressor.checkpoint.names import (
    NameMap,
    drop_dequantizing_conversions,
)
from llmcompressor.checkpoint.packing import (
    parse_format,
    quantized_modules,
    warn_cast,
)
from llmcompressor.checkpoint.quantization_config import build_quantization_config
from llmcompressor.checkpoint.side_files import (
    PROCESSOR_FILES,
    copy_side_files,
    layer_prefix,
    matches_stored_files,
    processor_directory,
    replaced_files,
    write_processor,
)
from llmcompressor.checkpoint.source import (
    INDEX,
    TensorHeader,
    code_tensors,
    inspect_source,
    local_directory,
    quantization_method,
    with_scales,
)
from llmcompressor.checkpoint.tensor_files import (
    OutputLayout,
    TensorWriter,
    layout_files,
    read_tensors,
)
from llmcompressor.errors import ArgumentError, CheckpointError, OutputError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import model_dtype
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.sharded import (
    full_shapes_reported,
    full_state_dict,
    has_partitioned_parameters,
    was_loaded_sharded,
)
from llmcompressor.runtime.memory import malloc_trim
from llmcompressor.runtime.processes import skip_write, write_once
from llmcompressor.runtime.progress import join_names
from llmcompressor.transformers_internals import commit_of, not_saved

__all__ = [
    "DEFAULT_SHARD_SIZE",
    "SaveOptions",
    "modify_save_pretrained",
    "planned_config",
    "save_checkpoint",
    "save_options",
    "write_checkpoint",
    "write_non_weight_files",
]

RECIPE_FILE = "recipe.yaml"
DEFAULT_SHARD_SIZE = "20GB"
_RETURN_EVERY = 2**25
"""Bytes of packed tensors after which freed memory is returned."""
_OPTIONS = "_llmcompressor_save_options"
_HUB_ARGUMENTS = (
    "commit_description",
    "commit_message",
    "create_pr",
    "private",
    "repo_id",
    "revision",
    "tags",
    "token",
)

_WITHOUT_EFFECT = (
    "save_function",
    "save_original_format",
    "save_peft_format",
    "skip_compression_stats",
    "variant",
)
"""Of transformers and of older releases of this API; by the time of saving, all work is done."""

_OTHERWISE = {"save_function": "how files are written", "variant": "names of files"}
"""Those of them that ask for something else than is done."""

Text = str | Callable[[], str | None] | None
Check = Callable[..., Mapping[str, Any]] | None


@dataclass(frozen=True)
class SaveOptions:
    """Options for saving a model.

    Attributes:
        save_compressed: pack the weights; otherwise write them dense with their scales.
        quantization_format: one format for all modules, instead of the default for each.
        max_shard_size: the maximum size of one file's tensors.
        processor: the tokenizer or processor to write; the source's files if ``None``.
        recipe: the text of ``recipe.yaml``, or a function that returns it when saving.
        source: the original model's folder or hub id; the folder the model was loaded from if
            ``None``.
        report: decisions and figures to store alongside the weights, as JSON data.
        check: called with the folder when all else is written; its result is stored in the
            report as ``verification``.
        dtype: the model's dtype when it was quantized, if known.
        once: several processes hold the same model, and only one of them writes.
    """

    save_compressed: bool = True
    quantization_format: str | None = None
    max_shard_size: int | str = DEFAULT_SHARD_SIZE
    processor: Any | None = None
    recipe: Text = None
    source: str | os.PathLike[str] | None = None
    report: Mapping[str, Any] | None = None
    check: Check = None
    dtype: torch.dtype | None = None
    once: bool = False

    @property
    def shard_bytes(self) -> int:
        """``max_shard_size`` as a number."""
        return size("max_shard_size", self.max_shard_size)


def save_checkpoint(
    model: PreTrainedModel,
    output_dir: str | os.PathLike[str],
    *,
    save_compressed: bool = True,
    quantization_format: str | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    processor: Any | None = None,
    recipe_yaml: Text = None,
    source: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    was_free: bool = False,
    report: Mapping[str, Any] | None = None,
    check: Check = None,
) -> Path:
    """Write ``model`` to ``output_dir``, which appears only when it is complete.

    Args:
        model: the model, with dense weights that lie on their grids; it is not changed.
        output_dir: must be free, or hold a checkpoint and ``overwrite`` be given.
        save_compressed: see :class:`SaveOptions`, like all others.
        quantization_format: see there.
        max_shard_size: see there.
        processor: see there.
        recipe_yaml: see there (``recipe``).
        source: see there.
        overwrite: replace the checkpoint that ``output_dir`` holds.
        was_free: ``output_dir`` was free when the work on ``model`` began. If it no longer
            is, the checkpoint is written under a name alongside it, which the error reports.
        report: see there.
        check: see there.

    Returns:
        The absolute path of the directory.

    Raises:
        OutputError: the directory may not be written, or the disk is full.
        NonFiniteError: a scale is not finite.
    """
    options = SaveOptions(
        save_compressed=save_compressed,
        quantization_format=quantization_format,
        max_shard_size=max_shard_size,
        processor=processor,
        recipe=recipe_yaml,
        source=source,
        report=report,
        check=check,
    )
    target = check_output_dir(
        output_dir,
        source=_source_directory(model, options),
        overwrite=overwrite,
        is_ours=was_free,
    )
    if overwrite:
        on_existing = OnExisting.REPLACE
    else:
        on_existing = OnExisting.SPARE if was_free else OnExisting.REFUSE
    with staged_output(target, on_existing=on_existing) as folder:
        write_checkpoint(model, folder, options)
    logger.info(f"Saved {target}.")
    return target


def modify_save_pretrained(
    model: PreTrainedModel,
    *,
    recipe: Text = None,
    source: str | os.PathLike[str] | None = None,
    processor: Any | None = None,
    report: Mapping[str, Any] | None = None,
    check: Check = None,
    once: bool = False,
) -> None:
    """Make ``model.save_pretrained`` write compressed checkpoints.

    Calling it again only replaces the options. A copy of the model, deep or through pickle, saves
    itself.

    Args:
        model: the model.
        recipe: the text of ``recipe.yaml``, or a function that returns it when saving.
        source: the original model's folder or hub id; the folder the model was loaded from if
            ``None``.
        processor: written too if given; ``save_pretrained`` of a model writes none by itself.
        report: see :class:`SaveOptions`.
        check: see there; called with ``kinds`` too, the kinds of the modules.
        once: see there.
    """
    drop_dequantizing_conversions(model)
    dtype = model_dtype(model) if any(map(is_module_quantized, model.modules())) else None
    options = SaveOptions(
        recipe=recipe,
        source=source,
        processor=processor,
        report=report,
        check=check,
        dtype=dtype,
        once=once,
    )
    object.__setattr__(model, _OPTIONS, options)
    # a bound method is pickled by name, and the model's class has another method of that name
    object.__setattr__(model, "save_pretrained", partial(_save_pretrained, model))
    for name, part in named_modules(model):
        given = part.__dict__.get("save_pretrained")
        is_free = given is None or getattr(given, "func", None) is _save_submodel
        if part is not model and isinstance(part, PreTrainedModel) and is_free:
            object.__setattr__(part, "save_pretrained", partial(_save_submodel, part, name))


def save_options(model: Module) -> SaveOptions | None:
    """Return the save options of a model set up by :func:`modify_save_pretrained`, else ``None``.

    Args:
        model: the model, or a submodel.
    """
    found: SaveOptions | None = vars(model).get(_OPTIONS)
    return found


def _save_submodel(part: PreTrainedModel, name: str, *args: Any, **kwargs: Any) -> None:
    """Save a submodel of a compressed model as transformers does, without its schemes."""
    if any(map(is_module_quantized, part.modules())):
        logger.warning(
            f"{name} is a part of a compressed model: by itself it is written with dense weights, "
            "their scales beside them, and a configuration that says nothing of either. "
            "save_pretrained of the whole model writes it compressed."
        )
    type(part).save_pretrained(part, *args, **kwargs)


def _save_pretrained(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    push_to_hub: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    save_compressed: bool = True,
    quantization_format: str | None = None,
    sparsity_config: None = None,
    skip_sparsity_compression_stats: bool = True,
    disable_sparse_compression: bool = False,
    safe_serialization: bool = True,
    **hub_arguments: Any,
) -> None:
    """Save this model compressed; see :func:`modify_save_pretrained`.

    Other files in the directory (a tokenizer, say) stay; weights and configuration are replaced
    once the new ones are complete. The sparsity arguments have no effect: the format stores pruned
    weights densely.

    Args:
        model: the model.
        save_directory: the folder to write to.
        is_main_process: other processes write nothing. They call this too if transformers sharded
            the model when it loaded it. Of processes that compressed the same model together one
            writes, and the others wait for it.
        state_dict: tensors to write instead of the model's own.
        push_to_hub: upload the files that were written to ``repo_id``.
        max_shard_size: the maximum size of one file's tensors.
        save_compressed: pack the weights; otherwise write them dense with their scales.
        quantization_format: one format for all modules.
        sparsity_config: accepted for old scripts.
        skip_sparsity_compression_stats: accepted for old scripts.
        disable_sparse_compression: accepted for old scripts.
        safe_serialization: accepted for old scripts; only safetensors is written.
        hub_arguments: ``repo_id``, ``token``, … for ``push_to_hub``; and arguments of transformers
            or older releases that have no effect here (``variant``, ``skip_compression_stats``).
    """
    for key in hub_arguments.keys() & {*_WITHOUT_EFFECT}:
        value = hub_arguments.pop(key)
        if key in _OTHERWISE and value is not None:  # the rest ask for what is done anyway
            logger.warning(f"save_pretrained({key}={value!r}) has no effect on {_OTHERWISE[key]}.")
    unknown = [key for key in hub_arguments if key not in _HUB_ARGUMENTS]
    if unknown:
        raise ArgumentError(
            f"save_pretrained has no argument {unknown[0]!r}.",
            did_you_mean(unknown[0], [*_HUB_ARGUMENTS, "save_compressed", "quantization_format"]),
        )
    if not safe_serialization or sparsity_config is not None:
        logger.warning("Only dense safetensors are written: the arguments for others do nothing.")
    if state_dict is None and was_loaded_sharded(model):
        is_main_process = model.should_save_on_this_rank(is_main_process)
        state_dict = full_state_dict(model, keep=is_main_process)
    check_path_argument("save_directory", save_directory)
    options: SaveOptions = getattr(model, _OPTIONS)
    place = Path(save_directory).expanduser().resolve()
    if not is_main_process:
        if options.once:
            skip_write(place)
        return
    check = options.check
    options = replace(
        options,
        check=None if check is None else partial(check, kinds=module_kinds(model)),
        save_compressed=save_compressed,
        quantization_format=quantization_format,
        max_shard_size=max_shard_size,
    )
    warn_cast(model_dtype(model), options.dtype)
    with write_once(place) if options.once else nullcontext(True) as is_mine:
        if not is_mine:
            return
        written = _save_into(model, Path(save_directory), options, state_dict)
        if push_to_hub:
            _push(model, Path(save_directory), written, hub_arguments)


def _push(
    model: PreTrainedModel, directory: Path, names: Sequence[str], arguments: Mapping[str, Any]
) -> None:
    """Upload the written files; transformers' ``push_to_hub`` would write them again, dense."""
    from llmcompressor.checkpoint.model_config import push_files  # noqa: PLC0415  # few ask for it

    folder = directory.expanduser().resolve()
    given = {"repo_id": folder.name, "tags": model.model_tags, **arguments}
    push_files(folder, names, **given)


def _save_into(
    model: PreTrainedModel,
    directory: Path,
    options: SaveOptions,
    state_dict: Mapping[str, Tensor] | None,
) -> list[str]:
    """Write to a folder that may hold other files; return the paths of the files written."""
    target = directory.expanduser().resolve()
    source = _source_directory(model, options)
    if target.is_file():
        raise OutputError(f"The output {target} is a file.", "Choose another output directory.")
    if source is not None and target == source:
        raise OutputError(
            f"The output directory {target} is the input model itself.",
            "Choose another output directory.",
        )
    with staged_output(target, on_existing=OnExisting.MERGE) as folder:
        write_checkpoint(model, folder, options, state_dict)
        files = (path for path in folder.rglob("*") if path.is_file())
        written = [path.relative_to(folder).as_posix() for path in files]
    logger.info(f"Saved {target}.")
    return written


def _source_directory(model: PreTrainedModel, options: SaveOptions) -> Path | None:
    place = options.source or model.config.name_or_path
    if not place:
        return None
    return local_directory(place, revision=commit_of(model.config))


@torch.no_grad()
def write_checkpoint(
    model: PreTrainedModel,
    folder: Path,
    options: SaveOptions,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write every file of a checkpoint into a folder that is not in place yet.

    Args:
        model: the model, as for :func:`save_checkpoint`.
        folder: the folder to write to.
        options: the save options.
        state_dict: tensors to write instead of the model's own.
    """
    state = _state_to_write(model, state_dict)
    with full_shapes_reported(model):
        _write(model, folder, options, state)


def _write(
    model: PreTrainedModel, folder: Path, options: SaveOptions, state: dict[str, Tensor]
) -> None:
    forced = parse_format(options.quantization_format if options.save_compressed else "dense")
    quantized = quantized_modules(model, forced_format=forced)
    source = _source_directory(model, options)
    contents = partition_state_dict(model, quantized, state)
    manifest = manifest_of(model, contents, partial(_source_headers, source, model))
    if manifest.extras:
        name = type(model).__name__
        logger.info(f"Carrying over {len(manifest.extras)} tensors that {name} does not own.")
    layout = layout_files(manifest.stored, options.shard_bytes)
    _write_weights(folder, layout, _stored_tensors(contents, manifest))
    write_non_weight_files(model, folder, options, manifest, layout)


def _stored_tensors(
    contents: PartitionedState, manifest: OutputManifest
) -> Iterator[Mapping[str, Tensor]]:
    for name, tensor in contents.plain.items():
        yield {name: tensor}
    yield from packed_modules(contents.names, contents.compressed)
    for name, tensor in read_tensors(manifest.extras):
        yield {name: tensor}


def _write_weights(
    folder: Path, layout: OutputLayout, every: Iterable[Mapping[str, Tensor]]
) -> None:
    writer = TensorWriter(folder, layout)
    unreturned = 0
    try:
        for tensors in every:
            writer.write(writer.as_planned(tensors))
            unreturned += sum(tensor.nbytes for tensor in tensors.values())
            if unreturned >= _RETURN_EVERY:
                malloc_trim()  # temporaries of packing fragment the heap
                unreturned = 0
    finally:
        writer.close()


def write_non_weight_files(
    model: PreTrainedModel,
    folder: Path,
    options: SaveOptions,
    prediction: OutputManifest,
    layout: OutputLayout,
) -> None:
    """Write every file of a checkpoint except its weights.

    Args:
        model: the model; its weights are not read.
        folder: the folder to write to.
        options: the save options.
        prediction: the tensors of the weight files.
        layout: the places of the tensors.
    """
    index = layout.index()
    if index is not None:
        (folder / INDEX).write_text(index, encoding="utf-8")
    source = _source_directory(model, options)
    _write_side_files(model, folder, source, options)
    config = planned_config(model, source, prediction, compressed=options.save_compressed)
    write_json(folder / "config.json", config)
    write_report(folder, _report_with_stored_names(model, options), source, options.check)


def _report_with_stored_names(
    model: PreTrainedModel, options: SaveOptions
) -> Mapping[str, Any] | None:
    """Return the run's report, with the stored names of the modules in it."""
    report = options.report or {}
    records = [each for each in report.get("modifiers", {}).values() if isinstance(each, Mapping)]
    modules = [str(module) for each in records for module in each]
    names = NameMap(model).renamed(modules) if modules else {}
    return {**report, STORED_AS: names} if names else options.report


def planned_config(
    model: PreTrainedModel,
    source: Path | None,
    prediction: OutputManifest,
    *,
    compressed: bool = True,
) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint whose tensors are known and not written yet.

    Args:
        model: the model; its weights are not read.
        source: the folder of the original.
        prediction: the tensors of the weight files.
        compressed: weights are packed, not written dense.
    """
    # loaders use dense weights with this status unchanged, without rounding them again
    status = QuantizationStatus.COMPRESSED if compressed else QuantizationStatus.DECOMPRESSED
    quantization = build_quantization_config(
        model, prediction.quantized, status=status, extra_ignore=prediction.ignore
    )
    if isinstance(model, TreeModel) and quantization is not None:
        quantization = model.merged(quantization, [entry.name for entry in prediction.quantized])
    return checkpoint_config(model, source, tied=prediction.tied, quantization=quantization)


def _state_to_write(
    model: PreTrainedModel, given: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    if given is None and has_partitioned_parameters(model):
        raise CheckpointError(
            "The weights of the model are in pieces on several processes (DeepSpeed ZeRO stage 3).",
            "Save it by train's output_dir, or by the trainer's save_model with "
            "stage3_gather_16bit_weights_on_model_save in DeepSpeed's configuration.",
        )
    everything = given if given is not None else model.state_dict()
    state = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    if any(tensor.is_meta for tensor in state.values()):
        state = get_state_dict_offloaded_model(model)
    empty = [name for name, tensor in state.items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"The tensor {empty[0]} has no data ({len(empty)} such tensors).",
            "Load the model's weights before saving it.",
        )
    for name in not_saved(model):
        state.pop(name, None)
    return state


def _source_headers(
    source: Path | None, model: PreTrainedModel, written: Collection[str]
) -> Mapping[str, TensorHeader]:
    """Return the source's tensors, except those whose meaning the output would lose."""
    if source is None:
        return {}
    try:
        found = inspect_source(source, allow_quantized=True)
        if quantization_method(found.config) is None:
            return found.tensors
        return _drop_codes(model, found.tensors, written)
    except CheckpointError as error:
        # the model was complete when it was loaded; its folder has changed since
        logger.warning(f"Tensors that the model class does not own are not carried over. {error}")
        return {}


def _drop_codes(
    model: PreTrainedModel, tensors: Mapping[str, TensorHeader], written: Collection[str]
) -> Mapping[str, TensorHeader]:
    """Return a quantized source's tensors that are not codes or scales.

    The model itself holds their values. A layer that the model does not have is left out as a whole
    if a part of it is codes.
    """
    codes = list(code_tensors(tensors))
    modules = {name.rpartition(".")[0] for name in written}
    lost = [name for name in codes if name.rpartition(".")[0] not in modules]
    if lost:
        logger.warning(
            f"Left out of the output: {join_names(lost)}. {type(model).__name__} does not own "
            "them, "
            "and they are quantized in the source in a way that the output does not say."
        )
    own = {layer_prefix(name) for name in written}
    layers = {layer_prefix(name) for name in lost} - own - {None}
    dropped = with_scales(codes)
    return {
        name: header
        for name, header in tensors.items()
        if name not in dropped and layer_prefix(name) not in layers
    }


def _write_side_files(
    model: PreTrainedModel, folder: Path, source: Path | None, options: SaveOptions
) -> None:
    processor = options.processor
    stored = None if processor is None else processor_directory(processor)
    if stored is not None and not (
        any((stored / name).exists() for name in PROCESSOR_FILES)
        and matches_stored_files(processor, stored)
    ):
        logger.info(
            f"The {type(processor).__name__} is not as {stored} holds it: it is written as it is."
        )
        stored = None
    own_processor = processor is None or (stored is not None and stored == source)
    replaced = frozenset() if own_processor else replaced_files(processor, source)
    if source is not None:
        copy_side_files(source, folder, without=set(replaced))
    if stored is not None and not own_processor:
        others = {path.name for path in stored.iterdir()} - replaced
        copy_side_files(stored, folder, without=others)
    elif processor is not None and stored is None:
        write_processor(processor, folder)
    if model.can_generate() and _generation_config_differs(model, folder):
        model.generation_config.to_json_file(folder / "generation_config.json")
    recipe = options.recipe() if callable(options.recipe) else options.recipe
    if recipe:
        (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")


def _generation_config_differs(model: PreTrainedModel, folder: Path) -> bool:
    """Return True if the model's generation settings differ from the copied file."""
    if not (folder / "generation_config.json").exists():
        return True
    copied = GenerationConfig.from_pretrained(str(folder)).to_diff_dict()
    own = model.generation_config.to_diff_dict()
    return any(
        own.get(key) != copied.get(key)
        for key in own.keys() | copied.keys()
        if key != "transformers_version" and not key.startswith("_")
    )
