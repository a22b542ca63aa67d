# SPDX-License-Identifier: Apache-2.0
"""Tensors that a source holds besides the model, such as draft heads, and its processor's files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmcompressor.checkpoint.names import NameMap, first_of_each
from llmcompressor.checkpoint.source import TensorHeader, local_directory
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.runtime.limits import parse_json
from llmcompressor.runtime.progress import join_names
from llmcompressor.transformers_internals import unexpected_patterns

_RECOMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.")
_LAYER = re.compile(r"^((?:.*\.)?(?:layers?|h|blocks?))\.(\d+)\.")
_ADAPTER = re.compile(r"(?:^|[._])lora_(?:[AB]|down|up|embedding_[AB]|magnitude_vector)(?:[._]|$)")
_TOWER = re.compile(r"vis|audio|speech")
_LAYER_COUNT = re.compile(r"num_(?:hidden_|decoder_)?layers|n_layers?|(?:de|en)coder_layers")
SPEAKERS_FILE = "spk_dict.pt"
"""The voices of a model that speaks (Qwen2.5-Omni), which its class cannot be loaded without."""


def extra_tensors(
    model: PreTrainedModel,
    source: Mapping[str, TensorHeader],
    state: Mapping[str, Tensor],
    written: set[str],
) -> tuple[list[str], list[str]]:
    """Return the source's tensors to carry over, such as draft heads, and those left behind.

    What the model class does not own is carried over.

    Caches that loaders compute themselves, and tensors of experts and layers that were pruned from
    the model, are left out. So are tensors in layers and modules that the model has, as a change of
    these may have made them meaningless. A warning is logged for those, and for adapters.
    """
    candidates = [name for name in source if name not in written]
    names = NameMap(model)
    owned = names.owned(candidates, state)
    written_modules = {name.rpartition(".")[0] for name in written} - {""}
    expert_lists = {match.group(1) for match in map(_EXPERT.match, written) if match is not None}
    written_layers = {match.group() for match in map(_LAYER.match, written) if match is not None}
    stacks = {layer.rpartition(".")[0].rpartition(".")[0] for layer in written_layers}
    layers = {stack for stack in stacks if not _TOWER.search(stack)}
    count = _layer_count(source)
    extras, left = [], []
    for name in candidates:
        expert, layer = _EXPERT.match(name), _LAYER.match(name)
        is_pruned = expert is not None and expert.group(1) in expert_lists
        if name in owned or is_pruned or _RECOMPUTED.search(name):
            continue
        # a layer beyond the configured count is a draft layer
        inside = layer is not None and layer.group(1) in layers and int(layer.group(2)) < count
        if not inside and name.rpartition(".")[0] not in written_modules:
            extras.append(name)
        elif layer is None or layer.group() in written_layers:  # else the layer was pruned
            left.append(name)
    _warn(model, extras, left)
    loaded = names.loaded(source, state)
    chosen = first_of_each(loaded)
    return extras, [*left, *(name for name in loaded if name not in chosen)]


def _warn(model: PreTrainedModel, extras: Sequence[str], left: Sequence[str]) -> None:
    patterns = unexpected_patterns(model)
    told = [
        name
        for name in left
        if not _ADAPTER.search(name) and not any(re.search(one, name) for one in patterns)
    ]
    if told:
        logger.warning(
            f"Left out of the output, because {type(model).__name__} has the layers or modules "
            f"that they lie in and does not read them: {join_names(told)}. A server whose class "
            "reads them would miss them: model_free_ptq keeps every tensor."
        )
    adapters = [name for name in (*extras, *left) if _ADAPTER.search(name)]
    if adapters:
        logger.warning(
            "The checkpoint holds tensors of an adapter (LoRA) that the model's class does not "
            f"read: {join_names(adapters)}. What is compressed is the model without it: if it is "
            "meant, merge it into the weights, save the model, and compress that."
        )


def layer_prefix(name: str) -> str | None:
    """Return the prefix of a tensor's layer, with its dot; ``None`` outside layers."""
    found = _LAYER.match(name)
    return None if found is None else found.group()


def _layer_count(source: Mapping[str, TensorHeader]) -> int:
    header = next(iter(source.values()), None)
    file = None if header is None else header.file.parent / "config.json"
    if file is None or not file.is_file():
        return 0
    config = parse_json(file.read_text(encoding="utf-8"))
    text = config.get("text_config")
    settings = text if isinstance(text, dict) else config
    counts = [value for key, value in settings.items() if _LAYER_COUNT.fullmatch(key)]
    return max((one for one in counts if isinstance(one, int)), default=0)


def extra_ignore_patterns(
    extras: Iterable[str], written: set[str], quantized: Sequence[str]
) -> list[str]:
    """Return ignore patterns that keep the modules of ``extras`` unquantized in every loader.

    There is one per outermost module that holds only extras. It matches after any prefix, unless
    that would match a quantized module, named as in the module tree or in the checkpoint.
    """
    taken = {prefix for name in written for prefix in _prefixes(name)}
    roots: dict[str, None] = {}
    for name in extras:
        root = next((prefix for prefix in _prefixes(name) if prefix not in taken), None)
        if root is not None:
            roots[root] = None
    patterns = []
    for root in roots:
        parts = root.split(".")
        tail = ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
        loose = rf"(?:.*\.)?{re.escape(tail)}(?:\..*)?$"
        is_taken = any(re.match(loose, name) for name in quantized)
        patterns.append(rf"re:{re.escape(root)}(?:\..*)?$" if is_taken else f"re:{loose}")
    return patterns


def _prefixes(name: str) -> list[str]:
    """Return all modules above a tensor, outermost first.

    >>> _prefixes("mtp.fc.weight")
    ['mtp', 'mtp.fc']
    """
    parts = name.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


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
_NOT_COMPARED = _OF_A_CALL | _OF_BATCHES | _OF_A_PLACE


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
    """Load a processor or tokenizer: a given one, one by folder or id, or else the model's own.

    ``None`` and the reason are returned if the model has none of its own: the caller decides if
    that matters. CheckpointError if one that was asked for by name cannot be loaded.
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
        except Exception as error:  # tokenizers may be anybody's code, of files that are damaged
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
    if source is None:
        return PROCESSOR_FILES
    own = PROCESSOR_FILES | tokenizer_files(source)
    if not isinstance(processor, PreTrainedTokenizerBase):
        return own
    kept = {name for name in _BEYOND_TOKENIZERS if (source / name).is_file()}
    if kept and not getattr(processor, "chat_template", None):
        kept |= {name for name in _TEMPLATES if (source / name).exists()}
    return own - kept


def tokenizer_files(folder: Path) -> frozenset[str]:
    """Return the names of a folder's files of a tokenizer, such as ``tokenizer.model.v3``."""
    return frozenset(path.name for path in folder.glob("tokenizer.*"))


def matches_stored_files(processor: Any, folder: Path) -> bool:
    """Return True if ``processor`` would be saved as ``folder`` holds it.

    A token may have been added, its chat template replaced, or a processor assembled from parts.
    Padding and truncation settings are ignored.
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
        held = parse_json(stored.read_text(encoding="utf-8"))
        if any(held.get(key) is not None for key in _OF_A_CALL):
            held |= dict.fromkeys(_OF_A_CALL & held.keys())
            text = json.dumps(held, ensure_ascii=False, indent=2)
            stored.write_text(text, encoding="utf-8")


def _saved_files(processor: Any) -> dict[str, Any]:
    """Return the content of each file that ``processor`` writes, without its origin."""
    contents: dict[str, Any] = {}
    with TemporaryDirectory(prefix="llmcompressor-") as place:
        processor.save_pretrained(place)
        for file in Path(place).rglob("*"):
            if not file.is_file():
                continue
            held: Any = file.read_bytes()
            if file.suffix == ".json":
                held = parse_json(held)
            if isinstance(held, dict):
                held = {key: held[key] for key in held.keys() - _NOT_COMPARED}
            contents[str(file.relative_to(place))] = held
    return contents
