# SPDX-License-Identifier: Apache-2.0
"""A bit budget: how large a checkpoint may become, and the schemes to choose from.

A modifier with a ``budget`` has several candidates in the place of a scheme. Which module gets
which one is found before the run (:mod:`llmcompressor.budget`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compressed_tensors.quantization import QuantizationScheme

from llmcompressor.args.checks import Check, divergence, integer, number, size
from llmcompressor.errors import ArgumentError, InputError, RecipeError, did_you_mean, listed
from llmcompressor.schemes.checks import describe
from llmcompressor.schemes.parse import parse_scheme
from llmcompressor.schemes.presets import format_of, preset_scheme

DEFAULT_CANDIDATES = ("W4A16", "W8A16")
"""What every server reads side by side."""
DEFAULT_SAMPLES = 8
DEFAULT_ROUNDS = 6
FEWEST_ROUNDS = 2
"""The last one measures the largest candidates, if none before has kept the limit."""

Kind = Literal["bits", "size", "kl"]
KL: Kind = "kl"
KINDS: tuple[Kind, ...] = ("bits", "size", KL)
_KEYS = (*KINDS, "samples", "rounds")
_CHECKS: Mapping[Kind, Check] = {"bits": number(1.0, 16.0), "size": size, KL: divergence}
_ONE_OF = "Give it one of {bits: 4.25}, {size: 5.5GB} and {kl: 0.01}."
_TWO = 2
_TARGETS = "targets"


@dataclass(frozen=True)
class Budget:
    """A limit for what is written.

    Attributes:
        kind: ``bits`` for each weight of the modules that are quantized, with their scales; the
            ``size`` of all weight files; or ``kl``, the divergence from the original that is
            measured.
        limit: the bits, the bytes, or the nats a token.
        samples: calibration samples whose gradients are used.
        rounds: choices that are made and measured at most, for ``kl``.
    """

    kind: Kind
    limit: float
    samples: int = DEFAULT_SAMPLES
    rounds: int = DEFAULT_ROUNDS


@dataclass(frozen=True, eq=False)
class Candidate:
    """A scheme that may be chosen.

    Attributes:
        name: of the preset, or a description.
        given: the preset's name or the fields of the scheme, as a recipe has them.
        scheme: without targets of its own.
    """

    name: str
    given: str | Mapping[str, Any]
    scheme: QuantizationScheme

    def group(self, targets: Sequence[str]) -> Any:
        """The entry of ``config_groups`` for ``targets``."""
        return (
            list(targets) if isinstance(self.given, str) else {**self.given, "targets": [*targets]}
        )


def parse_budget(value: Any) -> Budget:
    """Read a budget.

    Raises:
        RecipeError: it is no mapping, a key is unknown, or a limit is out of range.

    >>> parse_budget({"size": "5.5GB"})
    Budget(kind='size', limit=5500000000, samples=8, rounds=6)
    """
    if isinstance(value, Budget):
        return value
    if not isinstance(value, Mapping):
        raise RecipeError(f"budget is {value!r:.80}, but must be a mapping.", _ONE_OF)
    for key in value:
        if key not in _KEYS:
            raise RecipeError(f"budget has no key {key!r:.80}.", did_you_mean(str(key), _KEYS))
    kinds = [key for key in KINDS if value.get(key) is not None]
    if len(kinds) != 1:
        both = "both " if len(kinds) == _TWO else ""
        said = f"{both}{listed(kinds)}" if kinds else "no limit"
        raise RecipeError(f"budget has {said}.", _ONE_OF)
    (kind,) = kinds
    if kind != KL and value.get("rounds") is not None:
        raise RecipeError(
            f"budget has rounds, and nothing is measured for a budget of {kind}.",
            "Leave rounds out, or give a limit of kl.",
        )
    try:
        limit = _CHECKS[kind](f"budget.{kind}", value[kind])
        samples = integer(1)("budget.samples", value.get("samples", DEFAULT_SAMPLES))
        rounds = integer(FEWEST_ROUNDS)("budget.rounds", value.get("rounds", DEFAULT_ROUNDS))
    except ArgumentError as error:
        raise RecipeError(error.problem, error.remedy) from error
    return Budget(kind, limit, samples, rounds)


def parse_candidates(value: Any) -> list[Candidate]:
    """Read the candidates of a budget: presets, or fields of schemes; ``None`` for the default.

    Raises:
        RecipeError: there are fewer than two, one is wrong or quantizes no weights, two are the
            same, or they quantize activations differently.

    >>> [one.name for one in parse_candidates(["w4a16", "W8A16"])]
    ['W4A16', 'W8A16']
    """
    given = DEFAULT_CANDIDATES if value is None else value
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence) or len(given) < _TWO:
        raise RecipeError(
            f"candidates is {given!r:.80}, but must be a list of two schemes or more.",
            "Give names of presets, such as [W4A16, W8A16], or fields of schemes.",
        )
    found = [_candidate(one, f"candidates[{place}]") for place, one in enumerate(given)]
    names = [one.name for one in found]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RecipeError(f"The candidate {twice[0]} is given twice.", "Give each once.")
    known: dict[str, Candidate] = {}
    for one in found:
        fields = one.scheme.model_dump(mode="json", exclude={_TARGETS, "format"})
        stored = json.dumps([fields, format_of(one.scheme)], sort_keys=True)
        if (other := known.setdefault(stored, one)) is not one:
            raise RecipeError(
                f"The candidates {other.name} and {one.name} are the same scheme.",
                "Give each once, by its name or by its fields.",
            )
    first = found[0]
    for one in found[1:]:
        if _activations(one) != _activations(first):
            raise RecipeError(
                f"The candidates {first.name} and {one.name} quantize activations differently, "
                "and a budget weighs the errors of weights alone.",
                "Give candidates that differ in their weights only, such as [W4A16, W8A16].",
            )
    return found


def _candidate(value: Any, where: str) -> Candidate:
    if isinstance(value, str):
        try:
            found = Candidate(value.upper(), value.upper(), preset_scheme(value))
        except InputError as error:
            raise RecipeError(f"{where}: {error.problem}", error.remedy) from error
    elif not isinstance(value, Mapping):
        raise RecipeError(
            f"{where} is {value!r:.80}, but must be a preset or the fields of a scheme.",
            "Give the name of a preset, such as W4A16, or fields, such as "
            "{weights: {num_bits: 4, group_size: 128}}.",
        )
    else:
        _check_fields(value, where)
        scheme = parse_scheme({"targets": ["Linear"], **value}, where)
        found = Candidate(describe(scheme).removeprefix("in "), dict(value), scheme)
    if found.scheme.weights is None:
        raise RecipeError(
            f"{where}, {found.name}, quantizes no weights.",
            "Give schemes of weights. What is to stay as it is belongs on the ignore list.",
        )
    return found


def _check_fields(value: Mapping[Any, Any], where: str) -> None:
    """Refuse fields that no candidate has; those of a scheme but its targets."""
    if _TARGETS in value:
        raise RecipeError(
            f"{where} has targets, but it is found out which modules it is for.",
            "Leave them out: the targets of the modifier hold for all candidates.",
        )
    known = QuantizationScheme.model_fields.keys() - {_TARGETS}
    for key in value:
        if key not in known:
            raise RecipeError(f"{where} has no field {key!r:.80}.", did_you_mean(str(key), known))


def _activations(candidate: Candidate) -> Any:
    fields = {"input_activations", "output_activations"}
    return candidate.scheme.model_dump(mode="json", include=fields)
