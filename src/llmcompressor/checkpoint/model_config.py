# SPDX-License-Identifier: Apache-2.0
"""The ``config.json`` of a written checkpoint: the original with the changes patched in."""

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

__all__ = [
    "REPORT_FILE",
    "STORED_AS",
    "checkpoint_config",
    "json_text",
    "push_files",
    "read_report",
    "write_json",
    "write_report",
]

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_MODELS = "transformers.models."
_PLAIN = (bool, int, float, str, list, tuple, dict)
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


def checkpoint_config(
    model: PreTrainedModel,
    source: Path | None,
    *,
    tied: bool | None,
    quantization: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the configuration to write.

    Args:
        model: the model; its configuration is only read.
        source: the folder of the original model. Its ``config.json`` is the base, so that keys
            which transformers does not know, or omits because they are defaults, survive.
            A submodel's settings are written in their place in it.
        tied: input and output embeddings are one tensor in the output; ``None`` if the model
            has no such pair.
        quantization: the ``quantization_config``, or ``None``.
    """
    original = _read(source)
    config: dict[str, Any] = copy.deepcopy(original or json.loads(model.config.to_json_string()))
    levels = config_levels(config, model.config)
    own = levels[-1]
    if original:
        _patch_changes(own, model.config, copy.deepcopy(own))
    if len(levels) == 1:  # a submodel is written into the whole, which keeps its class
        _patch_class(config, model)
    _drop_quantization([*levels, own.get("text_config")])
    _patch_dtype(levels, str(model.dtype).removeprefix("torch."))
    if tied is not None:
        _patch_tie(levels, model.config, tied=tied)
    if quantization is not None:
        for level in (levels[0], own):
            # a class that loads the submodel alone looks nowhere else
            level["quantization_config"] = dict(quantization)
    return config


def _drop_quantization(levels: Iterable[Any]) -> None:
    """Remove the source's own quantization configuration."""
    for level in levels:
        if isinstance(level, dict):
            for key in _QUANTIZATION_KEYS:
                level.pop(key, None)


def json_text(content: Mapping[str, Any]) -> str:
    """Serialize JSON as in all written files: indented, keys in their given order."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file with :func:`json_text`."""
    file.write_text(json_text(content), encoding="utf-8")


_FLOAT = "__float__"


def _read(source: Path | None) -> dict[str, Any] | None:
    file = source / "config.json" if source is not None else None
    if file is None or not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else None


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
        elif (
            isinstance(now, _PLAIN)
            and _is_json(now)
            and _canonical_json(now) != _canonical_json(before)
        ):
            logger.info(f"config.json: {key} becomes {now} (was {before}).")
            aliases = [name for name, real in current.attribute_map.items() if real == key]
            names = [name for name in dict.fromkeys([key, *aliases]) if name in config]
            config.update(dict.fromkeys(names or [key], json.loads(_canonical_json(now))))


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


def _is_json(value: Any) -> bool:
    """Return True if JSON can hold ``value``; dtypes and configurations are left unchanged."""
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _canonical_json(value: Any) -> str:
    """Return a text that is equal for values that JSON stores alike, as lists and tuples."""
    return json.dumps(value, default=repr)


def _patch_class(config: dict[str, Any], model: PreTrainedModel) -> None:
    """Write the model's class where the file names another class of transformers."""
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
    for key in keys:
        config[key] = dtype
    for value in config.values():
        if isinstance(value, dict):
            for key in _DTYPE_KEYS:
                if before is not None and value.get(key) == before:
                    value[key] = dtype
    for level in levels[1:]:
        level.update({key: dtype for key in _DTYPE_KEYS if key in level})


def _patch_tie(levels: Sequence[dict[str, Any]], current: PretrainedConfig, *, tied: bool) -> None:
    """Write ``tie_word_embeddings`` where loaders look: at the top and in ``text_config``."""
    for level in levels:
        level["tie_word_embeddings"] = tied
    own = levels[-1]
    if text_config(current) is not current and isinstance(own.get("text_config"), dict):
        own["text_config"]["tie_word_embeddings"] = tied


# --------------------
# ``compression_report.json``: the report of a run, with those of earlier runs on its source.

REPORT_FILE = "compression_report.json"
STORED_AS = "stored_as"
"""Module → its names in the files, where these are others; what is recorded goes by modules."""
_EARLIER = "before"
_OF_FILES = "verification"
"""What a report says of the files beside it; of other files it says nothing."""


def write_report(
    folder: Path,
    report: Mapping[str, Any] | None,
    source: Path | None,
    check: Callable[[Path], Mapping[str, Any]] | None,
) -> None:
    """Write the report of a run; no file if it is empty.

    Args:
        folder: the output, otherwise complete.
        report: the run's report.
        source: the folder of the source model, whose report is nested in this one.
        check: verify the output and return findings, which become part of the report.
    """
    content = dict(report or {})
    earlier = _report_of(source)
    if earlier:
        content[_EARLIER] = earlier
    if check is not None:
        content[_OF_FILES] = dict(check(folder))
    if content:
        write_json(folder / REPORT_FILE, content)


def read_report(folder: Path) -> dict[str, Any] | None:
    """Return the report of the run that wrote ``folder``, without earlier ones."""
    found = _report_of(folder)
    return {key: value for key, value in found.items() if key != _EARLIER} or None


def _report_of(source: Path | None) -> dict[str, Any]:
    file = None if source is None else source / REPORT_FILE
    if file is None or not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning(f"{file} cannot be read, and what it tells is lost: {error!r:.200}")
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if key != _OF_FILES}


# --------------------
# Upload of a written checkpoint to the Hugging Face Hub.

_CARD = "README.md"


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
    """Upload files unchanged, with a model card if there is none among them.

    Args:
        folder: the folder of the files.
        names: their paths below ``folder``.
        repo_id: the repository; it is created if it does not exist.
        commit_message: by default "Upload model".
        commit_description: more about the commit.
        private: make a created repository private.
        token: the token to log in with.
        revision: the branch; it is created if it does not exist.
        create_pr: open a pull request.
        tags: tags of the model card.
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
