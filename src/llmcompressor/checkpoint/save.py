# SPDX-License-Identifier: Apache-2.0
"""Saving of a compressed model as a checkpoint that transformers and vLLM load.

The model in memory stays unchanged: modules are compressed one at a time while they are written.
The hub is not contacted unless ``push_to_hub`` is given.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from itertools import chain
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
from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.checkpoint.copied_files import copy_side_files, left_behind
from llmcompressor.checkpoint.generic_model import TreeModel
from llmcompressor.checkpoint.manifest import (
    MANIFEST_FILE,
    RunRecord,
    WrittenWeights,
    write_manifest,
)
from llmcompressor.checkpoint.model_config import (
    LEFT_BEHIND,
    STORED_AS,
    checkpoint_config,
    json_text,
    push_files,
    write_report,
)
from llmcompressor.checkpoint.names import NameMap, drop_dequantizing_conversions
from llmcompressor.checkpoint.packing import parse_format, quantized_modules, warn_cast
from llmcompressor.checkpoint.planned_tensors import (
    PartitionedState,
    PlannedTensors,
    compress_block,
    module_kinds,
    packed_modules,
    partition_state_dict,
    planned_tensors,
)
from llmcompressor.checkpoint.quantization_config import build_quantization_config
from llmcompressor.checkpoint.shared_output import SharedOutput
from llmcompressor.checkpoint.side_files import (
    PROCESSOR_FILES,
    layer_prefix,
    matches_stored_files,
    processor_directory,
    replaced_files,
    tokenizer_files,
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
from llmcompressor.checkpoint.spread_weights import (
    SpreadWeights,
    is_fully_sharded,
    is_spread,
)
from llmcompressor.checkpoint.tensor_files import (
    OutputLayout,
    TensorWriter,
    layout_files,
    read_tensors,
)
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    GateError,
    OutputError,
    did_you_mean,
)
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import model_dtype
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.sharded import (
    full_shapes_reported,
    full_state_dict,
    has_partitioned_parameters,
    was_loaded_sharded,
)
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.durable import errors_with_files
from llmcompressor.runtime.memory import malloc_trim
from llmcompressor.runtime.processes import Processes, skip_write, write_once
from llmcompressor.runtime.progress import join_names
from llmcompressor.runtime.run_record import CHECKING, phase
from llmcompressor.transformers_internals import commit_of, declare_ties, not_saved

RECIPE_FILE = "recipe.yaml"
SCHEMA_FILE = "recipe.schema.json"
"""By which editors check and complete recipes: ``llmcompressor schema``."""
DEFAULT_SHARD_SIZE = "20GB"
_RETURN_EVERY = 2**25
"""Bytes of packed tensors after which freed memory is returned."""
_OPTIONS = "_llmcompressor_save_options"
_HUB_ARGUMENTS = [*inspect.signature(push_files).parameters][2:]
_WITHOUT_EFFECT = {
    "save_function": "how files are written",
    "save_original_format": "",
    "save_peft_format": "",
    "skip_compression_stats": "",
    "variant": "names of files",
}
"""Arguments of transformers and of older releases, and what they ask for that is not done."""

Text = str | Callable[[], str | None] | None
Check = Callable[..., Mapping[str, Any]] | None
Gate = Callable[[Path], None] | None


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
        run: what decided the output, for its manifest.
        check: called with the folder and the original's as ``source`` when all else is written (by
            ``save_pretrained`` with ``kinds`` too, those of the modules); its result is stored in
            the report.
        page: called with the folder and the original's at the very end, to write a page about them.
        gate: called with the folder of the whole output before it gets its name; notes what it
            measures in its report, and raises GateError. ``save_pretrained`` does not call it.
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
    run: RunRecord | None = None
    check: Check = None
    page: Callable[[Path, Path | None], None] | None = None
    gate: Gate = None
    dtype: torch.dtype | None = None
    once: bool = False

    def folder(self, model: PreTrainedModel) -> Path | None:
        """Return the local folder of the original model."""
        place = self.source or model.config.name_or_path
        if not place:
            return None
        return local_directory(place, revision=commit_of(model.config))


def save_checkpoint(
    model: PreTrainedModel,
    output_dir: str | os.PathLike[str],
    options: SaveOptions | None = None,
    *,
    overwrite: bool = False,
    was_free: bool = False,
) -> Path:
    """Write ``model`` to ``output_dir``, which appears only when it is complete.

    Args:
        model: the model, with dense weights that lie on their grids; it is not changed.
        output_dir: must be free, or hold a checkpoint and ``overwrite`` be given.
        options: the save options.
        overwrite: replace the checkpoint that ``output_dir`` holds.
        was_free: ``output_dir`` was free when the work on ``model`` began. If it no longer
            is, the checkpoint is written under a name alongside it, which the error reports.

    Raises:
        OutputError: the directory may not be written, or the disk is full.
        GateError: the checkpoint does not keep its gates; on all ranks.
        NonFiniteError: a scale is not finite.
        GateError: the checkpoint does not keep its gates, and is in ``NAME.rejected``.
    """
    options = options or SaveOptions()
    target = _free_target(model, output_dir, options, overwrite=overwrite, was_free=was_free)
    on_existing = OnExisting.REPLACE if overwrite else OnExisting.REFUSE
    with staged_output(target, on_existing=on_existing, gate=options.gate) as folder:
        write_checkpoint(model, folder, options)
    logger.info(f"Saved {target}.")
    return target


def _free_target(
    model: PreTrainedModel,
    output_dir: str | os.PathLike[str],
    options: SaveOptions,
    *,
    overwrite: bool,
    was_free: bool,
) -> Path:
    return check_output_dir(
        output_dir, source=options.folder(model), overwrite=overwrite, is_ours=was_free
    )


def save_in_parts(
    weights: SpreadWeights,
    output_dir: str | os.PathLike[str],
    options: SaveOptions,
    *,
    overwrite: bool = False,
    was_free: bool = False,
) -> None:
    """Write a spread model as :func:`save_checkpoint` does, a block of it in memory at a time.

    Of several ranks each writes its own tensors into the same files, and the first all else; the
    first writes all of it where another one does not see its folder.

    Args:
        weights: of the model; what lies outside of blocks is loaded.
        output_dir: as for :func:`save_checkpoint`, as are all others.
        options: the save options.
        overwrite: replace the checkpoint that ``output_dir`` holds.
        was_free: ``output_dir`` was free when the work on the model began.

    Raises:
        OutputError: the directory may not be written, or the disk is full.
        GateError: the checkpoint does not keep its gates; on all ranks.
        NonFiniteError: a scale is not finite.
        ProcessError: another rank has failed.
    """
    model: Any = weights.model
    ranks, refused = weights.ranks, None
    with ranks.agreed("published"):
        if ranks.rank != 0:
            _write_parts(weights, None, options)
        else:
            target = _free_target(
                model, output_dir, options, overwrite=overwrite, was_free=was_free
            )
            on_existing = OnExisting.REPLACE if overwrite else OnExisting.REFUSE
            try:
                with staged_output(target, on_existing=on_existing, gate=options.gate) as folder:
                    _write_parts(weights, folder, options)
                logger.info(f"Saved {target}.")
            except GateError as error:
                refused = error
    refused = ranks.patient(refused, what="gates")[0]
    if refused is not None:
        raise refused


def modify_save_pretrained(model: PreTrainedModel, options: SaveOptions | None = None) -> None:
    """Make ``model.save_pretrained`` write compressed checkpoints.

    Calling it again only replaces the options. A copy of the model, deep or through pickle, saves
    itself.
    """
    drop_dequantizing_conversions(model)
    dtype = model_dtype(model) if any(map(is_module_quantized, model.modules())) else None
    object.__setattr__(model, _OPTIONS, replace(options or SaveOptions(), dtype=dtype))
    # a bound method is pickled by name, and the model's class has another method of that name
    declare_ties(model)
    object.__setattr__(model, "save_pretrained", partial(_save_pretrained, model))
    for name, part in named_modules(model):
        given = part.__dict__.get("save_pretrained")
        is_free = given is None or getattr(given, "func", None) is _save_submodel
        if part is not model and isinstance(part, PreTrainedModel) and is_free:
            object.__setattr__(part, "save_pretrained", partial(_save_submodel, part, name))


def save_options(model: Module) -> SaveOptions | None:
    """Return the options of :func:`modify_save_pretrained` for a model or submodel, or ``None``."""
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


@errors_with_files()
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
    once the new ones are complete. ``max_shard_size``, ``save_compressed`` and
    ``quantization_format`` are those of :class:`SaveOptions`, ``state_dict`` is written instead of
    the model's own. Processes other than the main one write nothing, unless the model is sharded:
    then all processes call this, and each writes its part. Of processes that compressed the same
    model together one writes, and the others wait for it. With ``push_to_hub`` the written files
    are uploaded, by ``repo_id``, ``token``, … All other arguments are those of transformers and of
    old scripts, and have no effect.
    """
    _check_hub_arguments(hub_arguments)
    if not safe_serialization or sparsity_config is not None:
        logger.warning("Only dense safetensors are written: the arguments for others do nothing.")
    is_sharded = state_dict is None and is_fully_sharded(model)
    if is_sharded:
        is_main_process = True  # no process has all of it, so that each of them writes its part
    elif state_dict is None and was_loaded_sharded(model):
        is_main_process = model.should_save_on_this_rank(is_main_process)
        state_dict = full_state_dict(model, keep=is_main_process)
    check_path_argument("save_directory", save_directory)
    options: SaveOptions = getattr(model, _OPTIONS)
    target = Path(save_directory).expanduser().resolve()
    if not is_main_process:
        if options.once:
            skip_write(target)
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
    is_once = options.once and not is_sharded
    with write_once(target) if is_once else nullcontext(True) as is_mine:
        if not is_mine:
            return
        if state_dict is None and is_spread(model):
            written = _save_spread_into(model, target, options)
        else:
            written = _save_into(
                model, target, options, partial(write_checkpoint, state_dict=state_dict)
            )
        if push_to_hub and written:  # transformers' own would write the files again, dense
            given = {"repo_id": target.name, "tags": model.model_tags, **hub_arguments}
            push_files(target, written, **given)


def _check_hub_arguments(hub_arguments: dict[str, Any]) -> None:
    """Refuse unknown arguments, and remove those that have no effect."""
    for key in hub_arguments.keys() & {*_WITHOUT_EFFECT}:
        value = hub_arguments.pop(key)
        if _WITHOUT_EFFECT[key] and value is not None:  # the rest ask for what is done anyway
            logger.warning(
                f"save_pretrained({key}={value!r}) has no effect on {_WITHOUT_EFFECT[key]}."
            )
    unknown = [key for key in hub_arguments if key not in _HUB_ARGUMENTS]
    if unknown:
        raise ArgumentError(
            f"save_pretrained has no argument {unknown[0]!r}.",
            did_you_mean(unknown[0], [*_HUB_ARGUMENTS, "save_compressed", "quantization_format"]),
        )


def _save_spread_into(model: PreTrainedModel, target: Path, options: SaveOptions) -> list[str]:
    """Write a spread model as :func:`_save_into`; all ranks of a sharded one call this."""
    with _opened(model) as weights:
        if weights.ranks.rank != 0:
            _write_parts(weights, None, options)
            return []
        return _save_into(
            model, target, options, lambda _, folder, told: _write_parts(weights, folder, told)
        )


@contextmanager
def _opened(model: PreTrainedModel) -> Iterator[SpreadWeights]:
    """Open a spread model to write it; all ranks of a sharded one leave the body together."""
    processes = Processes.from_process_group() if is_fully_sharded(model) else Processes()
    with (
        processes.notify_on_failure(),
        Ranks(processes) as ranks,
        closing(SpreadWeights(model, ranks)) as weights,
        ranks.agreed("saved"),
    ):
        weights.load(REST)
        yield weights


def write_spread_checkpoint(
    model: PreTrainedModel, folder: Path | None, options: SaveOptions
) -> None:
    """Write every file of a checkpoint of a spread model, a block of it in memory at a time.

    Args:
        model: all processes that it is sharded over call this.
        folder: an empty folder, given by the first of them.
        options: the save options.
    """
    with _opened(model) as weights:
        _write_parts(weights, folder if weights.ranks.rank == 0 else None, options)


def _save_into(
    model: PreTrainedModel,
    target: Path,
    options: SaveOptions,
    write: Callable[[PreTrainedModel, Path, SaveOptions], None],
) -> list[str]:
    """Write to a folder that may hold other files; return the paths of the files written."""
    if target.is_file():
        raise OutputError(f"The output {target} is a file.", "Choose another output directory.")
    if target == options.folder(model):
        raise OutputError(
            f"The output directory {target} is the input model itself.",
            "Choose another output directory.",
        )
    with staged_output(target, on_existing=OnExisting.MERGE) as folder:
        write(model, folder, options)
        files = (path for path in folder.rglob("*") if path.is_file())
        written = [path.relative_to(folder).as_posix() for path in files]
    logger.info(f"Saved {target}.")
    return written


@torch.no_grad()
def write_checkpoint(
    model: PreTrainedModel,
    folder: Path,
    options: SaveOptions,
    state_dict: Mapping[str, Tensor] | None = None,
) -> None:
    """Write every file of a checkpoint, with the model's tensors or a given state dict."""
    state = _state_to_write(model, state_dict)
    forced = parse_format(options.quantization_format if options.save_compressed else "dense")
    with full_shapes_reported(model):
        contents = partition_state_dict(
            model, quantized_modules(model, forced_format=forced), state
        )
        source = options.folder(model)
        lost: list[str] = []
        planned = planned_tensors(model, contents, partial(_source_headers, source, model, lost))
        planned = replace(planned, left=[*planned.left, *lost])
        if planned.extras:
            name = type(model).__name__
            logger.info(f"Carrying over {len(planned.extras)} tensors that {name} does not own.")
        layout = layout_files(planned.stored, size("max_shard_size", options.max_shard_size))
        written = _write_weights(folder, layout, contents, planned)
        write_non_weight_files(model, folder, options, planned, WrittenWeights(layout, written))


def _write_weights(
    folder: Path, layout: OutputLayout, contents: PartitionedState, planned: PlannedTensors
) -> dict[str, str]:
    """Write all tensors, and return the SHA-256 of each."""
    every = chain(
        ({name: tensor} for name, tensor in contents.plain.items()),
        packed_modules(contents.names, contents.compressed),
        ({name: tensor} for name, tensor in read_tensors(planned.extras)),
    )
    written: dict[str, str] = {}
    unreturned = 0
    with closing(TensorWriter(folder, layout)) as writer:
        for tensors in every:
            written |= writer.write(writer.as_planned(tensors))
            unreturned += sum(tensor.nbytes for tensor in tensors.values())
            if unreturned >= _RETURN_EVERY:
                malloc_trim()  # temporaries of packing fragment the heap
                unreturned = 0
    return written


@torch.no_grad()
def _write_parts(weights: SpreadWeights, folder: Path | None, options: SaveOptions) -> None:
    """Write every file of a checkpoint of a spread model, together with the other ranks.

    Args:
        weights: of the model; what lies outside of blocks is loaded.
        folder: of the first rank, which has made it; ``None`` on the others.
        options: the save options.
    """
    model: Any = weights.model
    ranks = weights.ranks
    forced = parse_format(options.quantization_format if options.save_compressed else "dense")
    contents = partition_state_dict(
        model, quantized_modules(model, forced_format=forced), _named_tensors(model)
    )
    source, lost = options.folder(model), list[str]()
    planned = planned_tensors(model, contents, partial(_source_headers, source, model, lost))
    planned = replace(planned, left=[*planned.left, *lost])
    layout = layout_files(planned.stored, size("max_shard_size", options.max_shard_size))
    place = Path(ranks.exchange(str(folder), what="the output")[0])
    writer = _join_writers(place, layout, ranks)
    with nullcontext() if writer is None else closing(writer):
        written = _write_blocks(weights, writer, contents, planned)
        every = ranks.exchange(written, what="written tensors")
    if folder is not None:
        hashes = {name: digest for own in every for name, digest in own.items()}
        write_non_weight_files(model, folder, options, planned, WrittenWeights(layout, hashes))


def _join_writers(folder: Path, layout: OutputLayout, ranks: Ranks) -> TensorWriter | None:
    """Open the files of an output, which the first rank creates.

    Returns:
        ``None`` on all ranks but the first where one of them does not see the folder.
    """
    writer = None
    with ranks.agreed("creating the output"):
        if ranks.rank == 0:
            writer = TensorWriter(folder, layout)
    is_seen = all(ranks.exchange(folder.is_dir(), what="who sees the output"))
    with ranks.agreed("opening the output"):
        if writer is None and is_seen:
            writer = TensorWriter(folder, layout, joins=True)
    return writer


def _write_blocks(
    weights: SpreadWeights,
    writer: TensorWriter | None,
    contents: PartitionedState,
    planned: PlannedTensors,
) -> dict[str, str]:
    """Write this rank's tensors of all blocks; return the SHA-256 of each."""
    names, ranks = contents.names, weights.ranks
    places = names.stored([one.name for one in planned.quantized])
    is_shared = all(ranks.exchange(writer is not None, what="who writes"))
    shared = SharedOutput(ranks if is_shared else Ranks(), planned.stored, places.values())
    written: dict[str, str] = {}

    def write(tensors: Mapping[str, Tensor]) -> None:
        assert writer is not None, "a rank without a writer has nothing to write"
        written.update(writer.write(writer.as_planned(tensors), durable=ranks.count > 1))

    for block in (*weights.blocks, REST):
        weights.load(block)
        if writer is not None:
            entries = [one for one in planned.quantized if weights.block_of(one.name) == block]
            mine = [one for one in entries if shared.packs(places[one.name])]
            tensors = weights.tensors_of(block)
            stored = compress_block(names, tensors, mine, planned.plain_keys)
            write({name: one for name, one in stored.items() if shared.writes(name)})
            del tensors, stored
        if block != REST:
            weights.release(block)
            malloc_trim()
    if writer is not None:
        extras = {name: one for name, one in planned.extras.items() if shared.writes(name)}
        for name, tensor in read_tensors(extras):
            write({name: tensor})
    return written


def _named_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model that are saved, by name; those that are not loaded on meta."""
    ignored = not_saved(model)
    return {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and name not in ignored
    }


def write_non_weight_files(
    model: PreTrainedModel,
    folder: Path,
    options: SaveOptions,
    prediction: PlannedTensors,
    weights: WrittenWeights,
) -> None:
    """Write every file of a checkpoint except its weights, which are not read."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)  # of a call that was killed here
    index = weights.layout.index()
    if index is not None:
        (folder / INDEX).write_text(index, encoding="utf-8")
    source = options.folder(model)
    _write_side_files(model, folder, source, options)
    config = planned_config(model, source, prediction, compressed=options.save_compressed)
    (folder / "config.json").write_text(json_text(config), encoding="utf-8")
    report = options.report or {}
    records = [each for each in report.get("modifiers", {}).values() if isinstance(each, Mapping)]
    modules = [str(module) for each in records for module in each]
    names = NameMap(model).renamed(modules) if modules else {}
    report = {**report, STORED_AS: names} if names else report
    left = [*left_behind(source), *prediction.left] if source is not None else []
    if source is not None:
        tell = logger.warning if left else logger.info
        tell(f"Left behind, of what {source} holds: {join_names(left) or 'nothing'}.")
    if left or options.check is not None:
        report = {**report, LEFT_BEHIND: left}
    with phase(CHECKING):
        write_report(folder, report, source, options.check)
    if options.page is not None:
        options.page(folder, source)
    write_manifest(folder, weights, prediction.origins, source, options.run)


def planned_config(
    model: PreTrainedModel,
    source: Path | None,
    prediction: PlannedTensors,
    *,
    compressed: bool = True,
) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint whose tensors are known and not written yet."""
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
    source: Path | None, model: PreTrainedModel, lost: list[str], written: Collection[str]
) -> Mapping[str, TensorHeader]:
    """Return the source's tensors; ``lost`` gets those that cannot be carried over."""
    if source is None:
        return {}
    try:
        found = inspect_source(source, allow_quantized=True, allow_absent=True)
        if quantization_method(found.config) is None:
            return found.tensors
        return _without_codes(model, found.tensors, lost, written)
    except CheckpointError as error:
        # the model was complete when it was loaded; its folder has changed since
        logger.warning(f"Tensors that the model class does not own are not carried over. {error}")
        return {}


def _without_codes(
    model: PreTrainedModel,
    tensors: Mapping[str, TensorHeader],
    lost: list[str],
    written: Collection[str],
) -> Mapping[str, TensorHeader]:
    """Return a quantized source's tensors that are not codes or scales, whose values the model has.

    A layer that the model does not have is left out as a whole if a part of it is codes.
    """
    codes = list(code_tensors(tensors))
    modules = {name.rpartition(".")[0] for name in written}
    lost += [name for name in codes if name.rpartition(".")[0] not in modules]
    if lost:
        logger.warning(
            f"Left out of the output: {join_names(lost)}. {type(model).__name__} does not own "
            "them, and they are quantized in the source in a way that the output does not say."
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
        copy_side_files(source, folder, without=replaced)
    if stored is not None and not own_processor:
        taken = replaced | tokenizer_files(stored)
        copy_side_files(stored, folder, without={path.name for path in stored.iterdir()} - taken)
    elif processor is not None and stored is None:
        write_processor(processor, folder)
    if model.can_generate():
        settings = folder / "generation_config.json"
        own = model.generation_config.to_diff_dict()
        copied = GenerationConfig.from_pretrained(str(folder)) if settings.exists() else None
        held = {} if copied is None else copied.to_diff_dict()
        changed = (key for key in own.keys() | held.keys() if own.get(key) != held.get(key))
        known = (key == "transformers_version" or key.startswith("_") for key in changed)
        if copied is None or not all(known):
            model.generation_config.to_json_file(settings)
    recipe = options.recipe() if callable(options.recipe) else options.recipe
    if recipe:
        text = f"# yaml-language-server: $schema={SCHEMA_FILE}\n{recipe}"
        (folder / RECIPE_FILE).write_text(text, encoding="utf-8")
        schema = files("llmcompressor") / "data" / SCHEMA_FILE
        (folder / SCHEMA_FILE).write_bytes(schema.read_bytes())
