# SPDX-License-Identifier: Apache-2.0
"""How two ``config.json`` differ, key by key and at every level, in what they mean.

What a file leaves out has its class's default, and settings have had other names and places before
(``rope_theta`` is a part of ``rope_parameters`` now). So both files are read by the class that
transformers has for their model type, and what it makes of them is compared. The files themselves
are where there is no such class: what was added counts for nothing then, since it may be a default.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ABSENT",
    "Change",
    "as_read",
    "config_changes",
    "configuration",
    "quiet_transformers",
    "read_by",
]

ABSENT = object()
"""The value of what is not there."""
_FREE = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_experts_implementation",
        "_name_or_path",
        "architectures",  # compared by themselves
        "compression_config",
        "dtype",
        "name_or_path",
        "quantization_config",
        "tie_word_embeddings",  # R5
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)


@dataclass(frozen=True)
class Change:
    """One setting that differs.

    Attributes:
        path: its keys, joined by dots.
        now: its value in the checkpoint, or :data:`ABSENT`.
        before: its value in the original, or :data:`ABSENT`.
        is_lost: the checkpoint's file does not hold what the original's does.
    """

    path: str
    now: Any
    before: Any
    is_lost: bool = False

    @property
    def sentence(self) -> str:
        """What has changed."""
        if self.is_lost:
            return f"config.json has lost {self.path}."
        if self.before is ABSENT:
            return f"config.json has {self.path} {self.now!r}, and the original has none."
        return f"{self.path} is {self.now!r} in config.json and was {self.before!r}."


def config_changes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Change]:
    """What differs in meaning.

    Args:
        ours: the content of the checkpoint's ``config.json``.
        theirs: that of the original's.
    """
    found = list(_classes(ours, theirs))
    types = [each.get("model_type") for each in (ours, theirs)]
    if types[0] != types[1]:
        # nothing else has the same meaning in another class
        return [*found, *_raw({"model_type": types[0]}, {"model_type": types[1]})]
    read = [as_read(each) for each in (ours, theirs)]
    changes: Iterator[Change]
    if read[0] is None or read[1] is None:
        changes = (one for one in _raw(ours, theirs) if one.before is not ABSENT)
    else:
        changes = _merged(_raw(read[0], read[1]), ours, theirs)
    return [*found, *(one for one in changes if not _is_of_every_model(one))]


def _is_of_every_model(change: Change) -> bool:
    """Whether what is lost is the default that all classes share."""
    if not change.is_lost:
        return False
    from transformers import PretrainedConfig  # noqa: PLC0415  # loads much

    defaults = json.loads(json.dumps(PretrainedConfig().to_dict(), default=str))
    return bool(change.before == defaults.get(change.path.rpartition(".")[2], ABSENT))


def as_read(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """All settings as transformers' class for the model type has them; ``None`` without a class."""
    read = configuration(config)
    if read is None:
        return None
    try:
        found: dict[str, Any] = json.loads(json.dumps(read.to_dict(), default=str))
    except Exception:  # configuration classes may be anybody's code
        return None
    return found


def configuration(config: Mapping[str, Any], left_out: Container[str] = _FREE) -> Any:
    """The configuration object that transformers makes of a file, ``None`` if it makes none.

    Args:
        config: the content of ``config.json``.
        left_out: the keys that are not to be read.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much

    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        return None
    try:
        return read_by(CONFIG_MAPPING[name], config, left_out)
    except Exception:  # what a class refuses may be of any kind
        return None


def read_by(kind: Any, config: Mapping[str, Any], left_out: Container[str] = _FREE) -> Any:
    """The configuration object that a class of transformers makes of a file.

    Raises:
        Exception: of any kind, where the class refuses what it reads.
    """
    plain = {key: _decoded(value) for key, value in config.items() if key not in left_out}
    with quiet_transformers():
        return kind.from_dict(copy.deepcopy(plain))


def _decoded(value: Any) -> Any:
    """A value without quantization settings, and with infinity where transformers wrote it."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _decoded(each) for key, each in value.items() if key != "quantization_config"}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers read without a word."""
    from transformers.utils import logging  # noqa: PLC0415  # loads much

    said: Any = logging
    level, bars = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity(said.CRITICAL)
    said.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()


def _classes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Change]:
    """The model's class; an original may name none."""
    now, before = ours.get("architectures") or ABSENT, theirs.get("architectures")
    if before and now != before:
        yield Change("architectures", now, before, is_lost=now is ABSENT)


def _raw(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    for key in sorted({*map(str, ours), *map(str, theirs)} - _FREE):
        now, before = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if isinstance(now, Mapping) and isinstance(before, Mapping):
            yield from _raw(now, before, f"{prefix}{key}.")
        elif _is_other(now, before):
            yield Change(f"{prefix}{key}", now, before, is_lost=now is ABSENT)


def _is_other(now: Any, before: Any) -> bool:
    nothing = (None, ABSENT)
    return now != before and not (now in nothing and before in nothing)


def _merged(
    changes: Iterator[Change], ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[Change]:
    """Changes of what was read, in terms of the files: a part that is lost is one change."""
    seen = set()
    for one in changes:
        path = _lost(one.path.split("."), ours, theirs)
        if path is None:
            yield one
        elif path not in seen:
            seen.add(path)
            yield Change(path, one.now, one.before, is_lost=True)


def _lost(keys: list[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first part of a path that the original's file has and the checkpoint's has not."""
    for index, key in enumerate(keys):
        if not isinstance(theirs, Mapping) or key not in theirs:
            return None
        if not isinstance(ours, Mapping) or key not in ours:
            return ".".join(keys[: index + 1])
        ours, theirs = ours[key], theirs[key]
    return None
