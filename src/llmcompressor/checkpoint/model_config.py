# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a written checkpoint: ``config.json`` and the report; and the upload."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import CommitOperationAdd, HfApi
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.hub import create_and_tag_model_card

from llmcompressor.checkpoint.names import config_levels
from llmcompressor.logger import logger
from llmcompressor.modeling.weights import config_value, text_config
from llmcompressor.runtime.limits import parse_json

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_MODELS = "transformers.models."
_PLAIN = (bool, int, float, str, list, tuple, dict)
_FLOAT = "__float__"
_RUN_TIME = {
    *_QUANTIZATION_KEYS,
    *_DTYPE_KEYS,
    "_name_or_path",
    "architectures",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "tie_word_embeddings",
    "transformers_version",
    "use_cache",
}

REPORT_FILE = "compression_report.json"
STORED_AS = "stored_as"
"""Module → its names in the files, where these are others; what is recorded goes by modules."""
LEFT_BEHIND = "left_behind"
"""Files, folders and tensors of the source that the output does not hold."""
GATES = "gates"
"""What was measured of the output, beside the limits that it has to keep."""
_EARLIER = "before"
_OF_FILES = "verification"
"""What a report says of the files beside it; of other files it says nothing."""
_CARD = "README.md"


def json_text(content: Mapping[str, Any]) -> str:
    """Serialize JSON as in all written files: indented, keys in their given order.

    Surrogates without a partner, which UTF-8 does not have, stay escaped.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace").decode()


def checkpoint_config(
    model: PreTrainedModel,
    source: Path | None,
    *,
    tied: bool | None,
    quantization: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the ``config.json`` to write.

    The one in ``source`` is the base, so that keys which transformers does not know, or omits
    because they are defaults, survive. A submodel's settings are written in their place in it.
    ``tied`` tells if input and output embeddings are one tensor; ``None`` if the model has no such
    pair.
    """
    original: Any = None
    if source is not None and (source / "config.json").is_file():
        original = parse_json((source / "config.json").read_text(encoding="utf-8"))
    has_original = isinstance(original, dict) and bool(original)
    config: dict[str, Any] = copy.deepcopy(
        original if has_original else json.loads(model.config.to_json_string())
    )
    levels = config_levels(config, model.config)
    own = levels[-1]
    if has_original:
        _patch_changes(own, model.config, copy.deepcopy(own))
    if len(levels) == 1:  # a submodel is written into the whole, which keeps its class
        _patch_class(config, model)
    text = own.get("text_config")
    with_text = [*levels, text] if isinstance(text, dict) else levels
    for level in with_text:
        for key in _QUANTIZATION_KEYS:
            level.pop(key, None)
    _patch_dtype(levels, str(model.dtype).removeprefix("torch."))
    if tied is not None:  # where loaders look: at the top and in text_config
        is_wrapped = text_config(model.config) is not model.config
        for level in with_text if is_wrapped else levels:
            level["tie_word_embeddings"] = tied
    if quantization is not None:
        for level in (levels[0], own):
            # a class that loads the submodel alone looks nowhere else
            level["quantization_config"] = dict(quantization)
    return config


def _patch_changes(
    config: dict[str, Any], current: PretrainedConfig, original: Mapping[str, Any]
) -> None:
    """Copy settings that were changed in memory, such as the number of experts.

    The model's configuration is compared with the original file loaded afresh, not with the file
    itself, because loading alone already normalizes values.
    """
    plain = {key: value for key, value in original.items() if key not in _QUANTIZATION_KEYS}
    try:
        fresh = type(current).from_dict(_decode_floats(copy.deepcopy(plain)))
    except Exception as error:  # configuration classes may be anybody's code
        logger.warning(
            f"config.json is kept as it was, since {type(current).__name__} cannot read it again "
            f"({error!r:.200}). What was changed in memory, such as a number of experts, is not "
            "in it."
        )
        return
    _patch_level(config, current, fresh)


def _patch_level(
    config: dict[str, Any], current: PretrainedConfig, fresh: PretrainedConfig
) -> None:
    earlier = fresh.to_dict()
    for key, value in current.to_dict().items():
        now = config_value(current, key, value)
        before = config_value(fresh, key, earlier.get(key))
        if key in _RUN_TIME or key.startswith("_"):
            continue
        if isinstance(now, PretrainedConfig):
            if isinstance(before, PretrainedConfig) and isinstance(config.get(key), dict):
                _patch_level(config[key], now, before)
        elif isinstance(now, _PLAIN):
            try:
                text = json.dumps(now)
            except TypeError:  # dtypes and configurations are left unchanged
                continue
            if text != json.dumps(before, default=repr):  # JSON stores lists and tuples alike
                logger.info(f"config.json: {key} becomes {now} (was {before}).")
                aliases = [name for name, real in current.attribute_map.items() if real == key]
                names = [name for name in dict.fromkeys([key, *aliases]) if name in config]
                config.update(dict.fromkeys(names or [key], json.loads(text)))


def _decode_floats(value: Any) -> Any:
    """Decode non-finite numbers, which transformers writes as ``{"__float__": "Infinity"}``.

    >>> _decode_floats({"limits": [0.0, {"__float__": "Infinity"}]})
    {'limits': [0.0, inf]}
    """
    if isinstance(value, list):
        return [_decode_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT} and isinstance(value[_FLOAT], str):
        return float(value[_FLOAT])
    return {key: _decode_floats(one) for key, one in value.items()}


def _patch_class(config: dict[str, Any], model: PreTrainedModel) -> None:
    known = [name for name in config.get("architectures") or () if hasattr(transformers, name)]
    # the nearest base: the class may be a wrapper
    every = (kind for kind in type(model).__mro__ if kind.__module__.startswith(_MODELS))
    own = next((kind.__name__ for kind in every), None)
    if known and own is not None and own not in known and hasattr(transformers, own):
        logger.info(f"config.json: architectures becomes {own} (was {', '.join(known)}).")
        config["architectures"] = [own]
    if model.config.model_type:  # otherwise the class is unknown
        config.setdefault("architectures", [type(model).__name__])


def _patch_dtype(levels: Sequence[dict[str, Any]], dtype: str) -> None:
    """Write the dtype where the file has one, at every level with the top's value.

    The levels that lead to a submodel get the submodel's dtype, if they have any.
    """
    config = levels[0]
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    before = config.get(keys[0])
    config.update(dict.fromkeys(keys, dtype))
    for level in config.values():
        for key in _DTYPE_KEYS if isinstance(level, dict) and before is not None else ():
            if level.get(key) == before:
                level[key] = dtype
    for level in levels[1:]:
        level.update({key: dtype for key in _DTYPE_KEYS if key in level})


def write_report(
    folder: Path,
    report: Mapping[str, Any] | None,
    source: Path | None,
    check: Callable[..., Mapping[str, Any]] | None,
) -> None:
    """Write the report of a run, with that of its source nested in it; no file if it is empty.

    ``check`` verifies the otherwise complete output, given its ``source``; its findings become part
    of the report.
    """
    content = dict(report or {})
    earlier = _report_of(source)
    if earlier:
        content[_EARLIER] = earlier
    if check is not None:
        content[_OF_FILES] = dict(check(folder, source=source))
    if content:
        (folder / REPORT_FILE).write_text(json_text(content), encoding="utf-8")


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of the run that wrote ``folder``, without earlier ones."""
    found = _report_of(folder)
    return {key: value for key, value in found.items() if key != _EARLIER} or None


def _report_of(source: Path | None) -> dict[str, Any]:
    file = None if source is None else source / REPORT_FILE
    if file is None or not file.is_file():
        return {}
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning(f"{file} cannot be read, and what it tells is lost: {error!r:.200}")
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key != _OF_FILES}


def push_files(
    folder: Path,
    names: Iterable[str],
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: Sequence[str] | None = None,
) -> None:
    """Upload files below ``folder`` unchanged, with a model card if there is none among them.

    Repository and branch are created if they do not exist; other arguments are ``HfApi``'s.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    files = sorted(names)
    operations = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files
    ]
    if _CARD not in files:
        card = create_and_tag_model_card(repo_id, None if tags is None else list(tags), token)  # type: ignore[arg-type]  # it takes a bool too
        operations.append(CommitOperationAdd(_CARD, str(card).encode()))
    if revision is not None and not revision.startswith("refs/pr") and not create_pr:
        api.create_branch(repo_id=repo_id, branch=revision, exist_ok=True)
    api.create_commit(
        repo_id=repo_id,
        operations=operations,
        commit_message=commit_message or "Upload model",
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )
    logger.info(f"Uploaded {len(operations)} files to {repo_id}.")
