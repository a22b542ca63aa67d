# SPDX-License-Identifier: Apache-2.0
"""Arguments for loading and saving the model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from llmcompressor.args.checks import (
    Checked,
    Named,
    Text,
    about,
    anything,
    boolean,
    one_of,
    optional,
    path,
    reject,
    string,
)
from llmcompressor.errors import ArgumentError

__all__ = ["ModelArguments"]

if TYPE_CHECKING:
    _Token: TypeAlias = str | bool | None
else:  # HfArgumentParser finds no type in a union with None
    _Token: TypeAlias = Text | str | bool

_PRECISIONS = {
    "auto": "auto",
    "half": "float16",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "full": "float32",
    "fp32": "float32",
    "float32": "float32",
}


def precision_name(name: str, value: Any) -> str:
    """Check for a precision's name or a torch dtype; stored as "auto" or the dtype's name."""
    return str(one_of(_PRECISIONS)(name, str(value).removeprefix("torch.")))


def _model(name: str, value: Any) -> Any:
    """Check for a path, a hub name, or a loaded model."""
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    if value is None or isinstance(value, (bool, int, float, list, tuple, dict)):
        raise reject(name, value, "a path, a model's name on the hub, or a loaded model")
    return value


def _device(name: str, value: Any) -> str:
    """Check for a device or its name; stored as its name."""
    return string(name, str(value))


def _token(name: str, value: Any) -> bool | str:
    """Check for a token, or a boolean to use the stored one, also as a string."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    return value if isinstance(value, bool) else string(name, value)


@dataclass
class ModelArguments(Checked):
    """The model to compress, its precision, and the settings for saving it.

    ``tokenizer`` is an alias of ``processor``: its value is moved to ``processor``, and giving both
    is an error.
    """

    model: Named = field(
        metadata=about("The model: a path, a name on the hub, or a loaded model.", _model)
    )
    config_name: str | None = field(
        default=None, metadata=about("A configuration other than the model's own.", optional(path))
    )
    tokenizer: Named = field(
        default=None, metadata=about("The tokenizer: its path, name or object.", anything)
    )
    processor: Named = field(
        default=None, metadata=about("The processor: its path, name or object.", anything)
    )
    precision: str = field(
        default="auto",
        metadata=about(
            "The weights' dtype when loaded: auto (as stored), float16, bfloat16 or float32.",
            precision_name,
        ),
    )
    tie_word_embeddings: bool = field(
        default=True,
        metadata=about(
            "Keep tied embeddings tied; False unties them, as targets that mean one of them do.",
            boolean,
            off="Untie the output head from the embedding.",
        ),
    )
    trust_remote_code_model: bool = field(
        default=False, metadata=about("Run code that the model's folder brings.", boolean)
    )
    save_compressed: bool = field(
        default=True,
        metadata=about(
            "Save in compressed form, not as dense weights.",
            boolean,
            off="Save dense weights with their scales, instead of compressed ones.",
        ),
    )
    model_revision: str = field(
        default="main", metadata=about("Branch, tag or commit on the hub.", string)
    )
    overwrite: bool = field(
        default=False, metadata=about("Replace an output directory that is in use.", boolean)
    )
    device: str | None = field(
        default=None,
        metadata=about(
            "Where the model computes, for instance cuda:0; not given: an accelerator if there "
            "is one, else the CPU.",
            optional(_device),
        ),
    )
    cache_dir: str | None = field(
        default=None,
        metadata=about(
            "Where models from the hub are kept; not given: the hub's own cache.", optional(path)
        ),
    )
    use_auth_token: _Token = field(
        default=None,
        metadata=about("A hub token, or True for the stored one.", optional(_token)),
    )
    distill_teacher: Named = field(
        default=None,
        metadata=about(
            "The teacher for distillation in train: a path, a name on the hub, or a model.",
            optional(_model),
        ),
    )

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            return
        if self.processor is not None:
            raise ArgumentError(
                "The arguments 'tokenizer' and 'processor' mean the same, and both were given.",
                "Give only one of them.",
            )
        self.processor, self.tokenizer = self.tokenizer, None
