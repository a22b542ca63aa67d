# SPDX-License-Identifier: Apache-2.0
"""Files and tensors that a source folder holds besides the model: draft heads, tokenizer, code."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.source import SIDE_FILES, TensorHeader, local_directory
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.runtime.progress import join_names
from llmcompressor.transformers_internals import unexpected_patterns

__all__ = [
    "PROCESSOR_FILES",
    "SPEAKERS_FILE",
    "LoadedProcessor",
    "copy_side_files",
    "extra_ignore_patterns",
    "extra_tensors",
    "layer_prefix",
    "load_processor",
    "matches_stored_files",
    "module_folders",
    "processor_directory",
    "replaced_files",
    "side_files",
    "write_processor",
]

_RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")
_LAYER = re.compile(r"^((?:.*\.)?(?:layers?|h|blocks?))\.(\d+)\.")
_ADAPTER = re.compile(r"(?:^|[._])lora_(?:[AB]|down|up|embedding_[AB]|magnitude_vector)(?:[._]|$)")
_TOWER = re.compile(r"vis|audio|speech")
_LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
)
_COPIED_SUFFIXES = {
    ".json",
    ".jinja",
    ".txt",
    ".model",
    ".py",
    ".tiktoken",
    ".vocab",
    ".bpe",
    ".spm",
}
_COPIED_STEMS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_COPIED_FOLDERS = ("additional_chat_templates",)
_MODULES = "modules.json"
"""Of sentence-transformers."""
SPEAKERS_FILE = "spk_dict.pt"
"""The voices of a model that speaks (Qwen2.5-Omni), which its class cannot be loaded without."""
_CACHE = "__pycache__"
_REQUIREMENTS = "requirements.txt"
"""What transformers checks before it runs the code beside it."""
_WRITTEN_HERE = {"config.json", "recipe.yaml", "compression_report.json"}
_OF_A_RUN = {"all_results.json", "eval_results.json", "train_results.json", "trainer_state.json"}
"""What a training leaves beside its model: of the model that is copied from, not of the copy."""
_OF_ANOTHER_METHOD = {*SIDE_FILES}


def extra_tensors(
    model: PreTrainedModel,
    source: Mapping[str, TensorHeader],
    state: Mapping[str, Tensor],
    written: set[str],
) -> list[str]:
    """Return the source's tensors that the model class does not own, such as draft heads.

    Args:
        model: the loaded model.
        source: the source's tensors.
        state: the model's state dict.
        written: tensor names that are in the output already.

    Returns:
        The names, in the source's order. Caches that loaders compute themselves, and tensors of
        experts and layers that were pruned from the model, are left out. So are tensors in layers
        and modules that the model has, as a change of these may have made them meaningless. A
        warning is logged for those, and for adapters.
    """
    candidates = [name for name in source if name not in written]
    owned = NameMap(model).owned(candidates, state)
    written_modules = {name.rpartition(".")[0] for name in written} - {""}
    expert_lists = {
        match.group(1) for match in (_EXPERT.match(name) for name in written) if match is not None
    }
    written_layers = {match.group() for match in map(_LAYER.match, written) if match is not None}
    stacks = {layer.rpartition(".")[0].rpartition(".")[0] for layer in written_layers}
    layers = {stack for stack in stacks if not _TOWER.search(stack)}
    count = _layer_count(source)
    extras, left = [], []
    for name in candidates:
        expert = _EXPERT.match(name)
        if (
            name in owned
            or _RECOMPUTED.search(name)
            or (expert is not None and expert.group(1) in expert_lists)
        ):
            continue
        layer = _LAYER.match(name)
        # a layer beyond the configured count is a draft layer
        inside = layer is not None and layer.group(1) in layers and int(layer.group(2)) < count
        if not inside and name.rpartition(".")[0] not in written_modules:
            extras.append(name)
        elif layer is None or layer.group() in written_layers:  # else the layer was pruned
            left.append(name)
    _warn_of_dropped(model, left)
    _warn_of_adapters([*extras, *left])
    return extras


def _warn_of_dropped(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Warn of tensors in modules and layers of the model that are not written."""
    patterns = unexpected_patterns(model)
    told = [
        name
        for name in names
        if not _ADAPTER.search(name) and not any(re.search(one, name) for one in patterns)
    ]
    if told:
        logger.warning(
            f"Left out of the output, because {type(model).__name__} has the layers or modules "
            f"that they lie in and does not read them: {join_names(told)}. A server whose class "
            "reads "
            "them would miss them: model_free_ptq keeps every tensor."
        )


def _warn_of_adapters(names: Sequence[str]) -> None:
    """Warn of an adapter in the model's files, without which the model is a different one."""
    found = [name for name in names if _ADAPTER.search(name)]
    if found:
        logger.warning(
            "The checkpoint holds tensors of an adapter (LoRA) that the model's class does not "
            f"read: {join_names(found)}. What is compressed is the model without it: if it is "
            "meant, "
            "merge it into the weights, save the model, and compress that."
        )


def layer_prefix(name: str) -> str | None:
    """Return the prefix of a tensor's layer, with its dot; ``None`` outside layers."""
    found = _LAYER.match(name)
    return None if found is None else found.group()


def _layer_count(source: Mapping[str, TensorHeader]) -> int:
    """Return the configured number of layers of the source's language model; 0 if it is unknown.

    Other parts have counts of their own, and a draft layer may have a number below those.
    """
    header = next(iter(source.values()), None)
    file = None if header is None else header.file.parent / "config.json"
    if file is None or not file.is_file():
        return 0
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config.get("text_config")
    counts = [(text if isinstance(text, dict) else config).get(key) for key in _LAYER_COUNTS]
    return max((one for one in counts if isinstance(one, int)), default=0)


def extra_ignore_patterns(
    extras: Iterable[str], written: set[str], quantized: Sequence[str]
) -> list[str]:
    """Return ignore patterns that keep the modules of ``extras`` unquantized in every loader.

    Args:
        extras: names of tensors that were copied unchanged.
        written: all other tensor names of the output.
        quantized: names of quantized modules, in the module tree and in the checkpoint.

    Returns:
        One pattern per outermost module that holds only extras. It matches after any prefix,
        unless that would match a quantized module.
    """
    taken = {prefix for name in written for prefix in _prefixes(name)}
    roots: dict[str, None] = {}
    for name in extras:
        root = next((prefix for prefix in _prefixes(name) if prefix not in taken), None)
        if root is not None:
            roots[root] = None
    return [_pattern(root, quantized) for root in roots]


def copy_side_files(source: Path, target: Path, *, without: set[str] | None = None) -> None:
    """Copy the files of a model besides weights and configuration, byte by byte.

    Args:
        source: the folder of the original model.
        target: the folder to copy into.
        without: names of files and folders directly in ``source`` that are not copied.
    """
    for path in _files_to_copy(source, without or set()):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def side_files(source: Path) -> list[Path]:
    """Return the files that :func:`copy_side_files` copies, including those in folders."""
    return _files_to_copy(source, set())


def module_folders(source: Path) -> list[str]:
    """Return the folders of sentence-transformers' modules after the model, such as its pooling.

    ``modules.json`` names them. The model itself has no folder of its own, and folders outside the
    checkpoint are left out.
    """
    try:
        held = json.loads((source / _MODULES).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, or unreadable to sentence-transformers too
        return []
    entries = held if isinstance(held, list) else []
    named = [
        one.get("path")
        for one in entries
        if isinstance(one, dict) and str(one.get("type", "")).startswith("sentence_transformers.")
    ]
    paths = [PurePosixPath(one) for one in named if isinstance(one, str)]
    inside = [one for one in paths if one.parts and not one.is_absolute() and ".." not in one.parts]
    return [str(one) for one in inside]


def _files_to_copy(source: Path, without: set[str]) -> list[Path]:
    left_out = _WRITTEN_HERE | _OF_A_RUN | _OF_ANOTHER_METHOD | without
    whole = [*_COPIED_FOLDERS, *module_folders(source)]
    found: dict[Path, None] = {}
    for name in whole:
        if PurePosixPath(name).parts[0] in left_out:
            continue
        folder = source / name  # a link may lead out of the checkpoint to it
        if folder.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            below = (one for one in folder.rglob("*") if one.is_file())
            found |= dict.fromkeys(one for one in below if _CACHE not in one.parts)
    for path in source.iterdir():
        if path.name in left_out or path.name in whole:
            continue
        if path.is_dir():
            found |= dict.fromkeys(_python_files_below(path))
        elif path.is_file() and _is_side_file(path.name):
            found[path] = None
    return sorted(found)


def _python_files_below(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, such as ``custom_generate/generate.py``.

    A folder that is hidden, a cache, a link or a model of its own has none of this model's code.
    """
    if folder.name.startswith(".") or folder.name == _CACHE or folder.is_symlink():
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        logger.warning(f"Code in {folder}, which may not be read, is not copied.")
        return
    inside = sorted(folder.iterdir())
    if any(path.name == "config.json" for path in inside):
        return
    code = [path for path in inside if path.suffix == ".py" and path.is_file()]
    visible = [path for path in code if not path.name.startswith(".")]
    yield from visible
    if visible and (folder / _REQUIREMENTS).is_file():
        yield folder / _REQUIREMENTS
    for path in inside:
        if path.is_dir():
            yield from _python_files_below(path)


def _is_side_file(name: str) -> bool:
    if name.startswith(".") or name.endswith(".index.json"):
        return False
    known = Path(name).suffix in _COPIED_SUFFIXES or name == SPEAKERS_FILE
    return known or name.startswith(_COPIED_STEMS)


def _prefixes(name: str) -> list[str]:
    """Return all modules above a tensor, outermost first.

    >>> _prefixes("mtp.fc.weight")
    ['mtp', 'mtp.fc']
    """
    parts = name.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _pattern(root: str, quantized: Sequence[str]) -> str:
    parts = root.split(".")
    tail = ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
    loose = rf"(?:.*\.)?{re.escape(tail)}(?:\..*)?$"
    if any(re.match(loose, name) for name in quantized):
        return rf"re:{re.escape(root)}(?:\..*)?$"
    return f"re:{loose}"


# --------------------
# Loading of a model's tokenizer or processor, and writing it alongside the weights.

PROCESSOR_FILES = frozenset(
    {
        "added_tokens.json",
        "additional_chat_templates",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tekken.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
        "vocab.json",
        "vocab.txt",
    }
)

_BEYOND_TOKENIZERS = frozenset(
    {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
)
"""Of :data:`PROCESSOR_FILES`, what no tokenizer writes: of pictures, sound, and what joins them."""
_TEMPLATES = frozenset({"additional_chat_templates", "chat_template.jinja", "chat_template.json"})
_OF_A_CALL = frozenset({"padding", "truncation"})
"""What a fast tokenizer remembers of its last call, and would have every reader do."""
_OF_BATCHES = frozenset(
    {
        "max_length",
        "model_max_length",
        "pad_to_multiple_of",
        "pad_token",
        "pad_token_type_id",
        "padding_side",
        "stride",
        "truncation_side",
        "truncation_strategy",
    }
)
"""How samples are put together: scripts set it to calibrate, and no reader needs it."""
_NO_CLASS = "Unrecognized processing class"
_OF_A_PLACE = frozenset({"_commit_hash", "_name_or_path", "name_or_path", "tokenizer_file"})


class LoadedProcessor(NamedTuple):
    """A processor or tokenizer, or the reason why there is none."""

    processor: Any | None
    reason: str


def load_processor(
    processor: Any | None,
    model: str | os.PathLike[str] | None,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
) -> LoadedProcessor:
    """Load the tokenizer or processor of a model.

    Args:
        processor: a processor or tokenizer (returned unchanged), the folder or id to load one
            from, or ``None`` for the model's own.
        model: the folder or id that the model was loaded from.
        trust_remote_code: run code that comes with the processor.
        revision: the hub's revision.
        cache_dir: the hub's cache.
        token: the hub's token.

    Returns:
        The processor; or ``None`` and the reason, if the model has none of its own. The caller
        decides if that matters: pre-tokenized data needs none.

    Raises:
        CheckpointError: the processor that was asked for by name cannot be loaded.
    """
    if processor is not None and not isinstance(processor, str | os.PathLike):
        return LoadedProcessor(processor, "")
    place = processor if processor is not None else model
    if place is None or str(place) == "":
        return LoadedProcessor(None, "The model does not say where it was loaded from.")
    arguments = {
        "trust_remote_code": trust_remote_code,
        "revision": revision or "main",
        "cache_dir": cache_dir,
        "token": token,
    }
    reasons = []
    for loader in (AutoProcessor, AutoTokenizer):
        try:
            return LoadedProcessor(loader.from_pretrained(str(place), **arguments), "")
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if "trust_remote_code" in str(error):
                first_line = "it brings its own code, which runs with trust_remote_code_model=True"
            reasons.append(f"{loader.__name__}: {first_line}")
    if _NO_CLASS in reasons[0]:  # as of any folder whose tokenizer cannot be loaded
        del reasons[0]
    reason = f"No tokenizer or processor could be loaded from {place} ({'; '.join(reasons)})."
    if processor is not None:
        raise CheckpointError(reason, "Name a folder or hub id that holds one.")
    return LoadedProcessor(None, reason)


def processor_directory(processor: Any) -> Path | None:
    """Return the local folder that ``processor`` was loaded from, if it is known."""
    tokenizer = getattr(processor, "tokenizer", processor)
    name = getattr(tokenizer, "name_or_path", None) or getattr(processor, "name_or_path", None)
    return local_directory(name) if isinstance(name, str) and name else None


def replaced_files(processor: Any, source: Path | None) -> frozenset[str]:
    """Return the names of the source's files that the files of ``processor`` replace.

    A tokenizer alone keeps the source's files for images and sound, and a processor's template if
    it has none itself.
    """
    if source is None or not isinstance(processor, PreTrainedTokenizerBase):
        return PROCESSOR_FILES
    kept = {name for name in _BEYOND_TOKENIZERS if (source / name).is_file()}
    if kept and not getattr(processor, "chat_template", None):
        kept |= {name for name in _TEMPLATES if (source / name).exists()}
    return PROCESSOR_FILES - kept


def matches_stored_files(processor: Any, folder: Path) -> bool:
    """Return True if ``processor`` would be saved as ``folder`` holds it.

    A token may have been added, its chat template replaced, or a processor assembled from parts.
    Padding and truncation settings are ignored. Where its class finds no files of its own in
    ``folder``, the result is False.
    """
    try:
        stored = type(processor).from_pretrained(str(folder))
        return _saved_files(processor) == _saved_files(stored)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        logger.debug(f"{type(processor).__name__} is not that of {folder}: {error!r:.200}")
        return False


def write_processor(processor: Any, folder: Path) -> None:
    """Write a processor's files, without the padding and truncation of its last call.

    Otherwise loaders would truncate prompts to the length of calibration samples.
    """
    processor.save_pretrained(folder)
    stored = folder / "tokenizer.json"
    if stored.is_file():
        held = json.loads(stored.read_text(encoding="utf-8"))
        if any(held.get(key) is not None for key in _OF_A_CALL):
            held |= dict.fromkeys(_OF_A_CALL & held.keys())
            text = json.dumps(held, ensure_ascii=False, indent=2)
            stored.write_text(text, encoding="utf-8")


def _saved_files(processor: Any) -> dict[str, Any]:
    """Return the content of each file that ``processor`` writes, without its origin."""
    with TemporaryDirectory(prefix="llmcompressor-") as place:
        processor.save_pretrained(place)
        files = (file for file in Path(place).rglob("*") if file.is_file())
        return {str(file.relative_to(place)): _content(file) for file in files}


def _content(file: Path) -> Any:
    if file.suffix != ".json":
        return file.read_bytes()
    held = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(held, dict):
        return held
    return {key: held[key] for key in held.keys() - _OF_A_CALL - _OF_BATCHES - _OF_A_PLACE}
