# SPDX-License-Identifier: Apache-2.0
"""Parsing of recipe values into compressed-tensors' configuration classes.

These classes forbid unknown keys, but their errors are in the validator's terms. Here every wrong
key is an error with its location and the most similar valid key.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import BaseModel, ValidationError

from llmcompressor.errors import InputError, RecipeError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.schemes.bridge import format_mismatch
from llmcompressor.schemes.presets import (
    check_6_bit_floats,
    format_of,
    is_preset,
    preset_scheme,
)

ARGUMENT_FIELDS = ("weights", "input_activations", "output_activations")
_WEIGHT_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


def parse_names(value: Any, where: str) -> list[str]:
    """Return a name or a list of names as a list.

    Raises:
        RecipeError: the value is neither, or it is empty.
    """
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, Sequence | set | frozenset) and bool(names)
    if not is_list or not all(isinstance(name, str) and name for name in names):
        raise RecipeError(
            f"{where} is {value!r}, but must name modules.",
            "Give a name, a class name such as Linear, a 're:' pattern, or a list of these.",
        )
    _refuse_empty_pattern(names, where)
    return list(names)


def _refuse_empty_pattern(names: Collection[str], where: str) -> None:
    if "re:" in names:
        raise RecipeError(
            f"{where} is {list(names)!r}: an empty name or pattern stands for the whole model.",
            "Give a name, a class name such as Linear, or a 're:' pattern; 're:.*' means all.",
        )


def check_actorder(value: Any, where: str) -> None:
    """Refuse activation orders that current loaders no longer support.

    Raises:
        RecipeError: ``group``, ``dynamic`` or ``True``.
    """
    text = str(getattr(value, "value", value)).lower()
    if value is True or text in {"group", "dynamic"}:
        raise RecipeError(
            f"{where} is {text}, which stores an index of each column's group. "
            "compressed-tensors, and so every engine that reads its files, dropped that index.",
            "Use actorder: static (its other name is weight): columns are quantized in order of "
            "their activations and stored in their own.",
        )


def parse_args(value: Any, where: str) -> QuantizationArgs:
    """Quantization arguments from a mapping; an instance is returned unchanged.

    Raises:
        RecipeError: an unknown key, or inconsistent values.
    """
    if isinstance(value, QuantizationArgs):
        _check_known(value.type, value.num_bits, where)
        return value
    _check_keys(value, QuantizationArgs, where)
    _check_known(value.get("type"), value.get("num_bits"), where)
    check_actorder(value.get("actorder"), f"{where}.actorder")
    return _validated(QuantizationArgs, dict(value), where)


def _check_known(kind: Any, bits: Any, where: str) -> None:
    """Refuse types and bit widths that the installed compressed-tensors does not support."""
    if str(getattr(kind, "value", kind)).lower() == "float" and bits == 6:
        try:
            check_6_bit_floats(where)
        except InputError as error:
            raise RecipeError(error.problem, error.remedy) from error


def parse_scheme(value: Mapping[str, Any], where: str) -> QuantizationScheme:
    """A scheme from a mapping with the keys of ``QuantizationScheme``.

    Raises:
        RecipeError: an unknown key, no targets, or inconsistent values.
    """
    _check_keys(value, QuantizationScheme, where)
    fields = dict(value)
    if fields.get("targets") is None:
        raise RecipeError(f"{where} has no targets.", "Say which modules it is for: targets: [...]")
    fields["targets"] = parse_names(fields["targets"], f"{where}.targets")
    for name in ARGUMENT_FIELDS:
        if fields.get(name) is not None:
            fields[name] = parse_args(fields[name], f"{where}.{name}")
    return _checked_scheme(_validated(QuantizationScheme, fields, where), where)


def parse_group(name: str, value: Any, where: str) -> QuantizationScheme:
    """Parse an entry of ``config_groups``: a scheme, a mapping, or the targets of a preset."""
    if isinstance(value, QuantizationScheme):
        _refuse_empty_pattern(value.targets, f"{where}.targets")
        return _checked_scheme(value, where)
    if isinstance(value, Mapping):
        return parse_scheme(value, where)
    if is_preset(name):
        return preset_scheme(name, parse_names(value, where))
    if isinstance(value, str | Sequence):
        try:
            return preset_scheme(name)
        except InputError as error:
            raise RecipeError(
                f"{where} is a list of targets, so {name!r} should be a preset.", error.remedy
            ) from error
    raise RecipeError(
        f"{where} is {value!r}, but must be a mapping.",
        "Give targets, weights and input_activations, or a list of targets under a preset's name.",
    )


def _checked_scheme(scheme: QuantizationScheme, where: str) -> QuantizationScheme:
    """Refuse schemes that the classes accept but that no weight or no format supports."""
    for name in ARGUMENT_FIELDS:
        if (args := getattr(scheme, name)) is not None:
            _check_known(args.type, args.num_bits, f"{where}.{name}")
    _refuse_static_groups(scheme, where)
    checked = _with_checked_weights(scheme, where)
    if checked.weights is not None:
        wrong = format_mismatch(checked, format_of(checked))
        if wrong is not None:
            raise RecipeError(f"The format of {where} does not fit: {wrong[0]}.", wrong[1])
    return checked


def _with_checked_weights(scheme: QuantizationScheme, where: str) -> QuantizationScheme:
    weights = scheme.weights
    if weights is None:
        return scheme
    if weights.dynamic:
        raise RecipeError(
            f"{where}.weights is dynamic, but weights are stored once.", "Leave dynamic out."
        )
    if weights.strategy not in _WEIGHT_STRATEGIES:
        raise RecipeError(
            f"{where}.weights has the strategy {str(weights.strategy)!r}, which weights cannot.",
            did_you_mean(str(weights.strategy), _WEIGHT_STRATEGIES),
        )
    if weights.type == "int" and weights.num_bits < 2:
        raise RecipeError(
            f"{where}.weights has {weights.num_bits} bit, which leaves no value but zero.",
            "Use 2 bits or more.",
        )
    if weights.type == "float" and weights.num_bits in _FLOAT_SCALES:
        return scheme.model_copy(update={"weights": _with_float_scale_dtype(weights, where)})
    if weights.strategy == "tensor_group":
        raise RecipeError(
            f"{where}.weights has the strategy tensor_group, but is no 4-bit float: other formats "
            "store no global scale, so readers would take its scales for what they are not.",
            "Use strategy: group.",
        )
    return scheme


def _refuse_static_groups(scheme: QuantizationScheme, where: str) -> None:
    """Refuse static scales of groups of features: compressed-tensors cannot run them.

    It mistakes the dimension of the groups for that of the tokens.
    """
    for name in ("input_activations", "output_activations"):
        args = getattr(scheme, name)
        if args is None or args.dynamic or args.strategy not in ("group", "tensor_group"):
            continue
        strategy = str(getattr(args.strategy, "value", args.strategy))
        raise RecipeError(
            f"{where}.{name} has static scales with the strategy {strategy}, which no forward of "
            "compressed-tensors takes.",
            f"Use {'dynamic: true' if strategy == 'group' else 'dynamic: local'}, or "
            "strategy: tensor.",
        )


_FLOAT_SCALES = {
    4: {("group", 32): torch.uint8, ("tensor_group", 16): torch.float8_e4m3fn},
    6: {("group", 32): torch.uint8},
}
"""Bits of a float → strategy and group size of the ways in which it is stored → its scales."""
_NVFP4 = ", or tensor_group with group_size 16 and scale_dtype torch.float8_e4m3fn (NVFP4)"


def _with_float_scale_dtype(weights: QuantizationArgs, where: str) -> QuantizationArgs:
    """The arguments with the scale's dtype filled in.

    Raises:
        RecipeError: for floats of 4 or 6 bits that no format holds.
    """
    bits, strategy = weights.num_bits, getattr(weights.strategy, "value", weights.strategy)
    wanted = _FLOAT_SCALES[bits].get((str(strategy), weights.group_size or 0))
    if wanted is None or weights.scale_dtype not in (None, wanted):
        raise RecipeError(
            f"{where}.weights asks for {bits}-bit floats in a form that no format stores.",
            f"Use strategy group with group_size 32 and scale_dtype torch.uint8 (MXFP{bits})"
            f"{_NVFP4 if bits == 4 else ''}.",
        )
    return weights.model_copy(update={"scale_dtype": wanted})


def _check_keys(value: Any, cls: type[BaseModel], where: str) -> None:
    if not isinstance(value, Mapping):
        raise RecipeError(
            f"{where} is {value!r}, but must be a mapping.",
            f"Its keys are: {', '.join(cls.model_fields)}.",
        )
    for key in value:
        if key not in cls.model_fields:
            raise RecipeError(
                f"{where} has no field {key!r}.", did_you_mean(str(key), cls.model_fields)
            )


def _validated(cls: Any, fields: dict[str, Any], where: str) -> Any:
    size = fields.get("group_size")
    if isinstance(size, str):
        raise RecipeError(
            f"{where}.group_size is the text {size!r}, but must be a whole number.",
            "Write the number without quotes.",
        )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = cls(**fields)
    except ValidationError as error:
        raise RecipeError(f"{where} is not valid: {_validation_reasons(error)}.") from error
    except (NotImplementedError, TypeError, ValueError) as error:
        raise RecipeError(f"{where} is not valid: {_first_line_of_message(error)}.") from error
    for warning in caught:
        logger.warning(f"{where}: {warning.message}")
    return made


def _validation_reasons(error: ValidationError) -> str:
    return "; ".join(
        ": ".join(
            [
                *map(str, each["loc"]),
                _first_line_of_message(each["msg"].removeprefix("Value error, ")),
            ]
        )
        for each in error.errors(include_url=False, include_context=False)
    )


def _first_line_of_message(message: object) -> str:
    """The first line of a message without its full stop; the rest repeats the whole object."""
    return str(message).strip().partition("\n")[0].rstrip(".")
