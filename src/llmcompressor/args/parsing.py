# SPDX-License-Identifier: Apache-2.0
"""Parsing of an entrypoint's keyword arguments into argument dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from llmcompressor.args.dataset_arguments import DatasetArguments
from llmcompressor.args.model_arguments import ModelArguments, RecipeArguments
from llmcompressor.errors import ArgumentError, did_you_mean
from llmcompressor.runtime.durable import errors_with_files

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

# --------------------
# Arguments that transformers has renamed within the supported releases.

RENAMED: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Old name → new name. A release that has the new one may know the old one too, and warns of it."""


def current_name(known: Container[str], name: str) -> str:
    """Return the name of an argument that is among ``known``, whichever release is installed.

    Args:
        known: the names of a class's fields or of a function's parameters.
        name: any of the argument's names.

    >>> current_name({"gradient_checkpointing", "seed"}, "activation_checkpointing")
    'gradient_checkpointing'
    >>> both = {"gradient_checkpointing", "activation_checkpointing"}
    >>> current_name(both, "gradient_checkpointing")
    'activation_checkpointing'
    >>> current_name({"seed"}, "seed")
    'seed'
    """
    new = RENAMED.get(name, name)
    if new in known:
        return new
    return next((old for old, other in RENAMED.items() if other == new and old in known), name)


# --------------------
# Parsing of an entrypoint's keyword arguments into argument dataclasses.


class _OldName(NamedTuple):
    """A renamed or removed argument: its new name, or ``None`` and the reason.

    ``usual`` is the value that matches the present behaviour, for which no warning is given.
    """

    new: str | None
    why: str = ""
    is_told: bool = True
    usual: bool = False


OLD_NAMES: Mapping[str, _OldName] = {
    "calibrate_moe_context": _OldName("moe_calibrate_all_experts"),
    "evaluation_strategy": _OldName("eval_strategy"),
    "max_calibration_samples": _OldName("num_calibration_samples"),
    "no_cuda": _OldName("use_cpu"),
    "oneshot_device": _OldName("device"),
    "overwrite_output_dir": _OldName("overwrite"),
    "save_safetensors": _OldName(None, "weights are written as safetensors", usual=True),
    "trust_remote_code_data": _OldName(
        None, "the datasets library no longer runs code that a data set brings"
    ),
    "use_fast_tokenizer": _OldName(
        None, "the tokenizer is the one that transformers has for the model", usual=True
    ),
    "warmup_ratio": _OldName("warmup_steps"),  # below 1 it is a share of the steps
}
"""Arguments of earlier releases that are still understood.

``distill_teacher``, ``cache_dir``, ``use_auth_token`` and ``max_train_samples`` are not here:
they are fields still. ``None`` given under an old name means that it was not given. What the
installed transformers decides the name of is in ``renamed.RENAMED``.
"""


def parse_arguments(
    kwargs: Mapping[str, Any], *classes: type, also_known: Iterable[str] = ()
) -> tuple[Any, ...]:
    """Fill an instance of each class from the keyword arguments of an entrypoint.

    An argument goes to every class that has a field of its name (``seed`` is one of
    :class:`DatasetArguments` and one of :class:`TrainingArguments`).

    Args:
        kwargs: the arguments by name; not changed.
        classes: dataclasses, whose fields together are all known arguments.
        also_known: names that the caller handles itself, for the suggestions in an error.

    Returns:
        The instances, in the order of ``classes``.

    Raises:
        ArgumentError: for a name that no class has (with the nearest that one has), for a
            required argument that is missing, and for a value that its field does not accept.
    """
    names = {cls: _field_names(cls) for cls in classes}
    known = set().union(*names.values())
    given = _with_new_names(kwargs, known)
    for name in given:
        if name not in known:
            raise _unknown(name, known | set(OLD_NAMES) | set(also_known))
    made = []
    for cls in classes:
        own = {name: value for name, value in given.items() if name in names[cls]}
        for field in dataclasses.fields(cls):
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
            if field.init and not has_default and field.name not in own:
                raise ArgumentError(
                    f"The argument {field.name!r} is missing.", "It has no default."
                )
        made.append(cls(**own))
    return tuple(made)


def parse_args(
    **kwargs: Any,
) -> tuple[ModelArguments, DatasetArguments, RecipeArguments, Any]:
    """Return the arguments of a script by dataclass, and ``output_dir`` unchanged.

    ``recipe_args`` are returned as a dict; the values of ``"key=value"`` strings as strings.

    Raises:
        ArgumentError: as :func:`parse_arguments`.
    """
    output_dir = kwargs.pop("output_dir", None)
    classes = (ModelArguments, DatasetArguments, RecipeArguments)
    model, dataset, recipe = parse_arguments(kwargs, *classes, also_known=("output_dir",))
    if isinstance(recipe.recipe_args, list):
        pairs = (pair.partition("=") for pair in recipe.recipe_args)
        recipe.recipe_args = {key.strip(): value.strip() for key, _, value in pairs}
    return model, dataset, recipe, output_dir


def training_argument_names(names: Iterable[str], *classes: type) -> list[str]:
    """Return the names of training arguments that are no fields of ``classes``.

    ``run_stages`` is not among them: it requests that a model is trained too.
    """
    own = set().union(*map(_field_names, classes)) | {"log_dir", "output_dir", "run_stages"}
    rest = [name for name in names if name not in own]
    if not rest:
        return []
    from llmcompressor.args.training_arguments import (  # noqa: PLC0415  # loads transformers
        TrainingArguments,
    )

    theirs = _field_names(TrainingArguments) - own
    earlier = {**{name: one.new for name, one in OLD_NAMES.items()}, **RENAMED}
    return [name for name in rest if name in theirs or earlier.get(name) in theirs]


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls) if field.init}


def _with_new_names(kwargs: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the arguments with old names replaced; giving both names is an error."""
    old_names = {**OLD_NAMES, **_renamed(known)}
    given = {name: value for name, value in kwargs.items() if name not in old_names}
    for name in kwargs.keys() & old_names.keys():
        value, (new, why, is_told, usual) = kwargs[name], old_names[name]
        if value is None:
            continue
        if new is None:
            if value != usual:
                _warn(f"The argument {name!r} has no effect: {why}.")
            continue
        if new not in known:
            raise _unknown(name, known)
        if new in given:
            raise ArgumentError(
                f"The arguments {name!r} and {new!r} were both given, and they mean the same.",
                f"Give only {new!r}.",
            )
        if is_told:
            _warn(f"The argument {name!r} is now called {new!r}.")
        given[new] = value
    return given


def _renamed(known: set[str]) -> dict[str, _OldName]:
    """Return the aliases of present fields; a newer name than the field's is used silently."""
    pairs = [(name, current_name(known, name)) for pair in RENAMED.items() for name in pair]
    return {
        name: _OldName(current, is_told=name in RENAMED)
        for name, current in pairs
        if name != current
    }


def _unknown(name: str, known: Iterable[str]) -> ArgumentError:
    suggestion = did_you_mean(name, known)
    if not suggestion.startswith("Did you mean"):
        suggestion = "Remove it, or look up the name of the argument that was meant."
    return ArgumentError(f"There is no argument named {name!r}.", suggestion)


def told_by_name(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorate an entrypoint: a wrong argument is an :class:`ArgumentError` with a suggestion.

    Errors of the file system name a file.
    """
    signature = inspect.signature(function)
    takes_more = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        for name in () if takes_more else kwargs.keys() - signature.parameters.keys():
            raise _unknown(name, signature.parameters)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            said = f"{function.__name__}() does not take these arguments: {error}."
            raise ArgumentError(said, f"It is {function.__name__}{_briefly(signature)}.") from None
        with errors_with_files():
            return function(*args, **kwargs)

    return call


def _briefly(signature: inspect.Signature) -> str:
    """The arguments that may be given by position, and the fewest that have to be."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [one.name for one in signature.parameters.values() if one.kind is by_position]
    return f"({', '.join(names)}, ...)"


def _warn(message: str) -> None:
    from llmcompressor.logger import logger  # noqa: PLC0415  # --help must not wait for loguru

    logger.warning(message)
