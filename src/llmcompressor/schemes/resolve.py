# SPDX-License-Identifier: Apache-2.0
"""Resolution of the fields of a quantizing modifier to its schemes.

:func:`resolve_schemes` needs no model: it reads the fields, refuses contradictions, and fills in
formats and observers, so a recipe is checked before any model is loaded.
:meth:`ResolvedSchemes.schemes_by_module` then assigns a scheme to each module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn import Module

from llmcompressor.errors import RecipeError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.schemes.assign import SchemeLookup, assign_schemes, is_empty, match_schemes
from llmcompressor.schemes.attention import state_strategies
from llmcompressor.schemes.bridge import default_observer
from llmcompressor.schemes.parse import (
    ARGUMENT_FIELDS,
    parse_args,
    parse_group,
    parse_names,
    parse_scheme,
)
from llmcompressor.schemes.presets import is_preset, preset_scheme, with_format

BASE_NAMES = {"weights": "weight", "input_activations": "input", "output_activations": "output"}
"""What observers call the tensors that the arguments of a scheme are for."""
_OBSERVER_KEYS = {
    "weights": "weights",
    "input": "input_activations",
    "output": "output_activations",
}


@dataclass(frozen=True, kw_only=True)
class ResolvedSchemes:
    """The schemes of one modifier, complete with formats and observers.

    Attributes:
        groups: schemes by the name of their group, in the recipe's order.
        ignore: modules that no scheme applies to, whatever target matches them.
        kv_cache_scheme: how keys and values are cached, or ``None``.
        bypass_divisibility_checks: accept group sizes that do not divide the columns.
        allow_unmatched: accept targets that match nothing.
        observer_fields: the recipe field that names the observer, by group and argument.
        names_weight_observer: whether a field or a scheme names an observer of weights, so that it
            is not the usual one.
    """

    groups: Mapping[str, QuantizationScheme]
    ignore: tuple[str, ...] = ()
    kv_cache_scheme: QuantizationArgs | None = None
    bypass_divisibility_checks: bool = False
    allow_unmatched: bool = False
    observer_fields: Mapping[tuple[str, str], str] = field(default_factory=dict, compare=False)
    names_weight_observer: bool = False

    @property
    def config_groups(self) -> Mapping[str, QuantizationScheme]:
        """The schemes by the name of their group in the ``quantization_config``."""
        return self.groups

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of all groups, without duplicates, in order."""
        every = (target for scheme in self.groups.values() for target in scheme.targets)
        return tuple(dict.fromkeys(every))

    @property
    def requires_calibration_data(self) -> bool:
        """Return True if activations or the KV cache need a static scale."""
        cache = self.kv_cache_scheme
        return (cache is not None and cache.dynamic is not True) or any(
            _needs_data(scheme) for scheme in self.groups.values()
        )

    @cached_property
    def lookup(self) -> SchemeLookup:
        """Lookup of the scheme of a Linear by its name."""
        return SchemeLookup(self.groups.values(), self.ignore)

    def schemes_by_module(self, model: Module) -> dict[str, QuantizationScheme]:
        """The scheme of each module to quantize, by full name, in model order.

        Of the targets that match a module, the first in this order decides: those that match its
        name, then those that match its class, names before ``re:`` patterns, alphabetically.
        Modules of one group share one scheme object, except where a matrix is narrower than the
        group (see :mod:`llmcompressor.schemes.assign`).

        Raises:
            TargetError: a target matches only modules that cannot be quantized, or no module is
                left to quantize; never with ``allow_unmatched``.
        """
        return assign_schemes(
            model,
            self.groups.values(),
            self.ignore,
            may_be_empty=self.allow_unmatched or self.kv_cache_scheme is not None,
            allow_unquantizable=self.allow_unmatched,
        )

    def match_schemes(self, model: Module) -> dict[str, QuantizationScheme]:
        """The matches that :meth:`schemes_by_module` starts from, unchecked and without logging."""
        return match_schemes(model, self.groups.values(), self.ignore)


def resolve_schemes(
    *,
    config_groups: Mapping[str, Any] | None = None,
    targets: str | Iterable[str] = "Linear",
    ignore: str | Iterable[str] | None = None,
    scheme: str | Mapping[str, Any] | QuantizationScheme | None = None,
    kv_cache_scheme: QuantizationArgs | Mapping[str, Any] | None = None,
    weight_observer: str | None = None,
    input_observer: str | None = None,
    output_observer: str | None = None,
    observer: Mapping[str, str] | str | None = None,
    bypass_divisibility_checks: bool = False,
    allow_unmatched: bool = False,
) -> ResolvedSchemes:
    """Resolve the quantization fields of a modifier to schemes.

    Args:
        config_groups: group name to a scheme, to a mapping of its fields, or, under a preset's
            name, to a list of targets.
        targets: targets of ``scheme``; ignored for ``config_groups``.
        ignore: modules to exclude.
        scheme: a preset's name, a mapping from presets to targets, or the fields of a scheme.
        kv_cache_scheme: arguments of the KV cache.
        weight_observer: observer of all weights.
        input_observer: observer of all inputs that are not fully dynamic.
        output_observer: observer of all outputs that are not fully dynamic.
        observer: the same three, under ``weights``, ``input`` and ``output``; a single name is that
            of the weights.
        bypass_divisibility_checks: passed through.
        allow_unmatched: passed through.

    Returns:
        The schemes, independent of any model.

    Raises:
        RecipeError: the fields are wrong or contradict each other.
        InputError: there is no preset of that name.
    """
    groups = _groups(config_groups, scheme, targets)
    if not groups and kv_cache_scheme is None:
        raise RecipeError(
            "Nothing says how to quantize: scheme, config_groups, kv_cache_scheme are all unset.",
            "Set one of them, for example scheme: W4A16. What another modifier of the recipe says "
            "is for that one alone: move it here.",
        )
    _refuse_shared_targets(groups)
    own = dict(
        zip(ARGUMENT_FIELDS, (weight_observer, input_observer, output_observer), strict=True)
    )
    observers = _observers({name: one for name, one in own.items() if one is not None}, observer)
    complete = {
        name: _with_observers(with_format(group), observers) for name, group in groups.items()
    }
    static = {
        argument
        for group in complete.values()
        for argument in ARGUMENT_FIELDS
        if (args := getattr(group, argument)) is not None and args.dynamic is not True
    }
    if unused := [argument for argument in observers if argument not in static]:
        logger.warning(
            f"An observer is set for {', '.join(unused)}, but no scheme here has a static scale "
            "for them; it has no effect."
        )
    return ResolvedSchemes(
        groups=complete,
        ignore=tuple(parse_names(ignore, "ignore")) if ignore else (),
        kv_cache_scheme=_cache_arguments(kv_cache_scheme),
        bypass_divisibility_checks=bypass_divisibility_checks,
        allow_unmatched=allow_unmatched,
        observer_fields={
            (name, argument): observers[argument].field
            if argument in observers
            else (f"config_groups.{name}.{argument}" if scheme is None else "scheme")
            for name in groups
            for argument in ARGUMENT_FIELDS
        },
        names_weight_observer="weights" in observers
        or any(one.weights is not None and one.weights.observer for one in groups.values()),
    )


def _refuse_shared_targets(groups: Mapping[str, QuantizationScheme]) -> None:
    """Refuse a target that stands in two groups."""
    owner: dict[str, str] = {}
    for name, target in ((name, target) for name, one in groups.items() for target in one.targets):
        if owner.setdefault(target, name) != name:  # loaders silently keep one of the groups
            raise RecipeError(
                f"The target {target!r} stands in {owner[target]!r} and in {name!r}.",
                "Keep it in one of them.",
            )


def _groups(
    config_groups: Mapping[str, Any] | None,
    scheme: str | Mapping[str, Any] | QuantizationScheme | None,
    targets: str | Iterable[str],
) -> dict[str, QuantizationScheme]:
    if scheme is not None and config_groups is not None:
        raise RecipeError(
            "scheme and config_groups are both set.",
            "Keep one: a preset in config_groups is its name with a list of targets.",
        )
    if scheme is not None:
        return _groups_of_scheme(scheme, targets)
    if not isinstance(config_groups or {}, Mapping):
        raise RecipeError(
            f"config_groups is {config_groups!r}, but must be a mapping.",
            "Give each group a name, with its targets, weights and input_activations below it.",
        )
    return {
        name: parse_group(name, value, f"config_groups.{name}")
        for name, value in (config_groups or {}).items()
    }


def _groups_of_scheme(
    scheme: str | Mapping[str, Any] | QuantizationScheme, targets: str | Iterable[str]
) -> dict[str, QuantizationScheme]:
    if isinstance(scheme, QuantizationScheme):
        return {"group_0": parse_group("group_0", scheme, "scheme")}
    if isinstance(scheme, str):
        return {"group_0": preset_scheme(scheme, parse_names(targets, "targets"))}
    if not isinstance(scheme, Mapping) or not scheme:
        raise RecipeError(
            f"scheme is {scheme!r}.",
            "Give a preset's name, or a mapping from presets to their targets.",
        )
    if not any(is_preset(str(key)) for key in scheme) and set(scheme) & set(_SCHEME_FIELDS):
        fields = {"targets": parse_names(targets, "targets"), **scheme}
        return {"group_0": parse_scheme(fields, "scheme")}
    return {
        f"group_{index}": preset_scheme(str(name), parse_names(value, f"scheme.{name}"))
        for index, (name, value) in enumerate(scheme.items())
    }


_SCHEME_FIELDS = tuple(QuantizationScheme.model_fields)


def _cache_arguments(value: QuantizationArgs | Mapping[str, Any] | None) -> QuantizationArgs | None:
    if value is None:
        return None
    args = parse_args(value, "kv_cache_scheme")
    strategy = str(getattr(args.strategy, "value", args.strategy))
    allowed = state_strategies(args)
    if strategy not in allowed:
        raise RecipeError(
            f"kv_cache_scheme has the strategy {strategy!r}, which keys and values cannot.",
            f"Use {' or '.join(allowed)}.",
        )
    return _with_observer(args, "k")


def _with_observer(
    args: QuantizationArgs, base_name: str, override: str | None = None
) -> QuantizationArgs:
    """A copy of ``args`` with its observer; without one if all scales are dynamic."""
    chosen = default_observer(args, base_name)
    return args.model_copy(update={"observer": chosen and (override or chosen)})


class _Observer(NamedTuple):
    """The observer that a modifier sets for an argument of all its schemes, and its field."""

    name: str
    field: str


def _observers(
    own: Mapping[str, str], observer: Mapping[str, str] | str | None
) -> dict[str, _Observer]:
    """The observers by argument, from the fields for each and from the field for all."""
    if observer is None:
        return {name: _Observer(one, f"{BASE_NAMES[name]}_observer") for name, one in own.items()}
    if own:
        raise RecipeError(
            "observer is set, and so is weight_observer, input_observer or output_observer.",
            "Keep either observer, with its keys weights, input and output, or the others.",
        )
    named: Any = {"weights": observer} if isinstance(observer, str) else observer
    if not isinstance(named, Mapping):
        raise RecipeError(
            f"observer is {observer!r}, but must be a mapping.",
            "Its keys are weights, input and output; or set weight_observer.",
        )
    found: dict[str, _Observer] = {}
    for key, value in named.items():
        if key not in _OBSERVER_KEYS:
            raise RecipeError(
                f"observer has no key {key!r}.", did_you_mean(str(key), _OBSERVER_KEYS)
            )
        if not isinstance(value, str):
            raise RecipeError(f"observer.{key} is {value!r}.", "Give the name of an observer.")
        found[_OBSERVER_KEYS[key]] = _Observer(value, f"observer.{key}")
    return found


def _with_observers(
    scheme: QuantizationScheme, observers: Mapping[str, _Observer]
) -> QuantizationScheme:
    """A copy of ``scheme`` with an observer in every argument."""
    update = {}
    for name in ARGUMENT_FIELDS:
        if (args := getattr(scheme, name)) is not None:
            override = observers[name].name if name in observers else None
            update[name] = _with_observer(args, BASE_NAMES[name], override)
    return scheme.model_copy(update=update)


def _needs_data(scheme: QuantizationScheme) -> bool:
    if is_empty(scheme):
        return False
    activations = (scheme.input_activations, scheme.output_activations)
    return any(args is not None and args.dynamic is not True for args in activations)
