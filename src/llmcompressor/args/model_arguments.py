# SPDX-License-Identifier: Apache-2.0
"""Arguments for loading and saving the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

from llmcompressor.args.checks import (
    CheckedFields,
    Named,
    Text,
    anything,
    argument,
    boolean,
    divergence,
    invalid_value,
    number,
    one_of,
    optional,
    path,
    size,
    string,
    strings,
)
from llmcompressor.args.gates import parse_gates
from llmcompressor.errors import ArgumentError, listed

if TYPE_CHECKING:
    _Token: TypeAlias = str | bool | None
else:  # HfArgumentParser finds no type in a union with None
    _Token: TypeAlias = Text | str | bool

PRECISIONS = {
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
    return str(one_of(PRECISIONS)(name, str(value).removeprefix("torch.")))


def _model(name: str, value: Any) -> Any:
    """Check for a path, a hub name, or a loaded model."""
    if isinstance(value, (str, os.PathLike)):
        return path(name, value)
    if value is None or isinstance(value, (bool, int, float, list, tuple, dict)):
        raise invalid_value(name, value, "a path, a model's name on the hub, or a loaded model")
    return value


def _token(name: str, value: Any) -> bool | str:
    """Check for a token, or a boolean to use the stored one, also as a string."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    return value if isinstance(value, bool) else string(name, value)


@dataclass
class ModelArguments(CheckedFields):
    """The model to compress, its precision, and the settings for saving it.

    ``tokenizer`` is an alias of ``processor``: its value is moved to ``processor``, and giving both
    is an error.
    """

    model: Named = argument(
        "The model: a path, a name on the hub, or a loaded model.", _model, default=MISSING
    )
    config_name: str | None = argument(
        "A configuration other than the model's own.", optional(path)
    )
    tokenizer: Named = argument("The tokenizer: its path, name or object.", anything)
    processor: Named = argument("The processor: its path, name or object.", anything)
    precision: str = argument(
        "The weights' dtype when loaded: auto (as stored), float16, bfloat16 or float32.",
        precision_name,
        default="auto",
    )
    tie_word_embeddings: bool = argument(
        "Keep tied embeddings tied; False unties them, as targets that mean one of them do.",
        boolean,
        off="Untie the output head from the embedding.",
        default=True,
    )
    trust_remote_code_model: bool = argument(
        "Run code that the model's folder brings.", boolean, default=False
    )
    save_compressed: bool = argument(
        "Save in compressed form, not as dense weights.",
        boolean,
        off="Save dense weights with their scales, instead of compressed ones.",
        default=True,
    )
    model_revision: str = argument("Branch, tag or commit on the hub.", string, default="main")
    overwrite: bool = argument(
        "Replace an output directory that is in use.", boolean, default=False
    )
    device: str | None = argument(
        "Where the model computes, for instance cuda:0; not given: an accelerator if "
        "there is one, else the CPU.",
        optional(lambda name, value: string(name, str(value))),
    )
    cache_dir: str | None = argument(
        "Where models from the hub are kept; not given: the hub's own cache.", optional(path)
    )
    use_auth_token: _Token = argument("A hub token, or True for the stored one.", optional(_token))
    distill_teacher: Named = argument(
        "The teacher for distillation in train: a path, a name on the hub, or a model.",
        optional(_model),
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


# --------------------
# Arguments for the recipe, its values and its stages.


def _recipe(name: str, value: Any) -> Any:
    """Check for a path, recipe text, a recipe or modifiers; the recipe parser checks the rest."""
    if isinstance(value, (bool, int, float)):
        raise invalid_value(
            name, value, "a path, recipe text, a Recipe, or one or several modifiers"
        )
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _recipe_args(name: str, value: Any) -> dict[str, Any] | list[str]:
    """Check for a dict or ``"key=value"`` strings; stored as a new dict or list."""
    if isinstance(value, Mapping):
        return dict(value)
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, (list, tuple)) or not all(
        isinstance(item, str) and "=" in item for item in several
    ):
        raise invalid_value(name, value, "a dict, or a list of 'key=value' strings")
    return list(several)


BUDGETS = {"bits": "bits", "size": "size", "max_kl": "kl"}
"""Arguments that stand for a recipe with a budget, and the budget's own name for each."""


@dataclass
class RecipeArguments(CheckedFields):
    """The recipe to apply, its arguments, and its stage."""

    recipe: Named = argument(
        "The recipe: a path, its text, a Recipe, or modifiers.", optional(_recipe)
    )
    # HfArgumentParser uses the member before None
    recipe_args: list[str] | None | str | dict[str, Any] = argument(  # noqa: RUF036
        "Values that override the recipe's own arguments, as key=value.", optional(_recipe_args)
    )
    clear_sparse_session: bool = argument("Reset the session when done.", boolean, default=False)
    stage: str | None = argument("Run only this stage of the recipe.", optional(string))
    bits: float | None = argument(
        "Without a recipe: GPTQ with so many bits a weight, in schemes that are chosen for it.",
        optional(number(1.0, 16.0)),
    )
    size: str | int | None = argument(
        "The same with a size of the weight files, such as 5.5GB.", optional(size)
    )
    max_kl: float | None = argument(
        "The same with a limit of the KL divergence from the original, in nats a token: the "
        "smallest checkpoint that is measured to keep it.",
        optional(divergence),
    )
    candidates: list[str] | str | None = argument(
        "The schemes to choose from; W4A16 and W8A16 by default.", optional(strings)
    )

    def __post_init__(self) -> None:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if self.recipe is not None and (given or self.candidates is not None):
            name = (given or ["candidates"])[0]
            raise ArgumentError(
                f"The argument {name!r} stands for a recipe, and a recipe was given too.",
                "Leave one of them out; a modifier of a recipe has the field budget.",
            )
        if len(given) != 1 and (given or self.candidates is not None):
            told = (
                f"The arguments {listed([*map(repr, given)])} were "
                f"{'both' if len(given) == 2 else 'all'} given."
                if given
                else "The argument 'candidates' was given without a limit to choose them by."
            )
            raise ArgumentError(told, f"Give one of {', '.join(BUDGETS)}.")
        if given:
            fields: dict[str, Any] = {"targets": "Linear", "ignore": ["re:.*lm_head$"]}
            fields["budget"] = {BUDGETS[given[0]]: getattr(self, given[0])}
            if self.candidates is not None:
                fields["candidates"] = self.candidates
            self.recipe = json.dumps({"modifiers": {"GPTQModifier": fields}})


# --------------------
# Arguments for a run's use of the machine and for repeated runs.

RESUME: Mapping[str, str] = {name: name for name in ("auto", "never", "must", "mixed")}
"""What to do with the progress of a run that was broken off."""

_HOST = ("cpu", "host")
_DEVICE = re.compile(r"(?:cuda:|xpu:)?(\d+)")


def _max_memory(name: str, value: Any) -> dict[str | int, int]:
    """Check for a size for the host, or sizes by device: accelerator numbers, "cpu" for it."""
    if isinstance(value, str) and "=" in value:
        pairs = _pairs(name, value)
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    else:
        return {"cpu": size(name, value)}
    limits: dict[str | int, int] = {}
    for given, limit in pairs:
        found = _DEVICE.fullmatch(str(given))
        if found is None and str(given) not in _HOST:
            form = 'sizes by device, such as {0: "40GiB", "cpu": "100GiB"}'
            raise invalid_value(name, value, form)
        device: str | int = "cpu" if found is None else int(found.group(1))
        if device in limits:
            shown = "the host (cpu)" if device == "cpu" else f"device {device}"
            raise ArgumentError(
                f"The argument {name!r} gives more than one size for {shown}.",
                "Name each device once.",
            )
        limits[device] = size(f"{name}[{given!r}]", limit)
    return limits


def _pairs(name: str, value: str) -> list[tuple[str, str]]:
    """Parse ``"0=40GiB,cpu=100GiB"``, as given on a command line, into pairs."""
    parts = [part.partition("=") for part in value.split(",")]
    if not all(equals for _, equals, _ in parts):
        raise invalid_value(name, value, 'sizes by device, such as "0=40GiB,cpu=100GiB"')
    return [(device.strip(), limit.strip()) for device, _, limit in parts]


@dataclass
class RunArguments(CheckedFields):
    """The limits of a run on the machine, and the settings for repeated runs."""

    max_memory: Named = argument(
        "The most memory to use: a size such as 40GiB for the host, or by device, "
        "0=40GiB,cpu=100GiB. Not given: what is free.",
        optional(_max_memory),
    )
    resume: str = argument(
        "A run on this output that was broken off: auto continues it, never throws "
        "its progress away, must refuses to begin without one, mixed continues it also on another "
        "kind of processor.",
        one_of(RESUME),
        default="auto",
    )
    verify: bool = argument(
        "Read the written files again and check them at the end.",
        boolean,
        off="Do not read the written files again to check them.",
        default=True,
    )
    verify_with: str | None = argument(
        "Also run the first blocks of the output, one of each kind, in this engine at the end: "
        "vllm, transformers or sglang. What the engine refuses gets no name.",
        optional(string),
    )
    verify_python: str | None = argument(
        "The Python of the engine's environment, if not this one.", optional(string)
    )
    verify_timeout: float | None = argument(
        "Seconds that the engine has for one model; not given: 900.", optional(number(0, inf))
    )
    report: bool = argument(
        "Write report.html beside the weights, a page that shows what the run did.",
        boolean,
        off="Do not write report.html.",
        default=True,
    )
    # HfArgumentParser uses the member before None
    gates: list[str] | None | str | dict[str, Any] = argument(  # noqa: RUF036
        "A limit that the checkpoint has to keep to get its name, repeatable: kl=0.02, "
        "perplexity=1.03 (times the original's), top1=0.9, size=5GB.",
        optional(parse_gates),
        option="gate",
    )
    gate_dataset: Named = argument(
        "Text to measure the gates on, as for evaluate; not given: a test split of the data, or "
        "held-out modules of Python's standard library.",
        anything,
    )
    gate_reference: Named = argument(
        "The original model that gates compare with; not given: the model.", optional(_model)
    )
    keep_rejected: bool = argument(
        "Where no choice keeps max_kl, or a recipe's budget of kl: write the best one that was "
        "found to OUTPUT.rejected. What fails gates is kept there in any case.",
        boolean,
        default=False,
    )
    save_statistics: str | None = argument(
        "A folder, new or empty, for statistics of the calibration of the original model: runs of "
        "other recipes on the same model and data take them in place of the data.",
        optional(path),
    )
    statistics: str | None = argument(
        "A folder that save_statistics has filled: the recipe works from it, and no data is run.",
        optional(path),
    )
    dry_run: bool = argument(
        "Make and show the plan of the run; compress and write nothing.", boolean, default=False
    )
