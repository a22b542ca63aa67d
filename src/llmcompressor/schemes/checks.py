# SPDX-License-Identifier: Apache-2.0
"""Checks of the schemes against the weights they apply to, before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn import Embedding, Linear, Module
from torch.nn.utils.parametrize import is_parametrized

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.names import named_modules
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.assign import is_quantizable, output_head, weight_without_onloading
from llmcompressor.schemes.attention import is_cached_attention, state_strategies
from llmcompressor.schemes.presets import format_of

__all__ = [
    "IndivisibleModule",
    "are_separate_after_untying",
    "check_attention",
    "check_divisible",
    "check_schemes",
    "check_tied",
    "check_weights_quantizable",
    "describe",
    "describe_arguments",
    "indivisible_modules",
    "supports_ragged_groups",
    "tied_weights",
    "warn_mixed_fused_sets",
]

Schemes = Mapping[str, QuantizationScheme]

_PAIRED = frozenset({"nvfp4-pack-quantized", "mxfp4-pack-quantized"})
_RAGGED = _PAIRED | {"pack-quantized"}
"""The formats that can hold weights whose last group is smaller than the rest; some of them hold
two codes in a byte, and have no word of how many columns there are."""


def check_schemes(
    model: Module,
    schemes: Schemes,
    *,
    bypass_divisibility: bool = False,
) -> None:
    """Run every check of this module on the schemes of one modifier.

    Args:
        model: the model, with its weights.
        schemes: module name to scheme.
        bypass_divisibility: as for :func:`check_divisible`.

    Raises:
        TargetError: from the single checks.
    """
    check_weights_quantizable(model, schemes)
    check_attention(model, schemes)
    check_tied(model, schemes)
    check_divisible(model, schemes, bypass=bypass_divisibility)


def check_weights_quantizable(model: Module, schemes: Schemes) -> None:
    """Refuse modules whose weight is not a float matrix with data of its own.

    Raises:
        TargetError: lists every such module and what its weight is.
    """
    _check_unparametrized(model, schemes)
    wrong = []
    for name, module in _submodules(model, schemes):
        if schemes[name].weights is None:
            continue
        reason = _unquantizable_reason(module)
        if reason:
            wrong.append(f"{name} ({type(module).__name__}: {reason})")
    if wrong:
        raise TargetError(
            f"These modules cannot be quantized: {join_names(wrong)}.",
            "Ignore them, or load the model with its weights in floating point.",
        )


def check_attention(model: Module, schemes: Schemes) -> None:
    """Refuse strategies that do not apply to queries, keys and values.

    Raises:
        TargetError: lists every such module.
    """
    wrong: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, module in _submodules(model, schemes):
        args = schemes[name].input_activations
        if schemes[name].weights is not None or args is None or not is_cached_attention(module):
            continue
        strategy = str(getattr(args.strategy, "value", args.strategy))
        if strategy not in state_strategies(args):
            wrong.setdefault((strategy, state_strategies(args)), []).append(name)
    for (strategy, allowed), names in wrong.items():
        raise TargetError(
            f"The scheme of {join_names(names)} has the strategy {strategy!r}, which queries, "
            "keys and "
            "values cannot.",
            f"Use {' or '.join(allowed)}.",
        )


def _check_unparametrized(model: Module, schemes: Schemes) -> None:
    """Refuse parametrized weights: torch recomputes them on every read, so none can be set."""
    found = [
        name
        for name, module in _submodules(model, schemes)
        if schemes[name].weights is not None and is_parametrized(module, "weight")
    ]
    if found:
        raise TargetError(
            f"The weights of {join_names(found)} are parametrized (torch.nn.utils.parametrize): "
            "they "
            "are computed whenever they are read, and cannot be quantized.",
            'Call torch.nn.utils.parametrize.remove_parametrizations(module, "weight") for each '
            "before; ignore those that the model's class parametrizes itself.",
        )


def _submodules(model: Module, names: Iterable[str]) -> Iterator[tuple[str, Module]]:
    """The named modules with their names."""
    known = dict(named_modules(model))
    for name in names:
        yield name, known[name] if name in known else model.get_submodule(name)


def _unquantizable_reason(module: Module) -> str:
    weight = weight_without_onloading(module)
    if not isinstance(module, Linear | Embedding) or weight is None:
        return "no Linear or Embedding with a weight"
    if not is_quantizable(module):
        return "its forward takes more than one input, which no reader gives it"
    if weight.dim() != 2:
        return f"the weight has {weight.dim()} dimensions"
    if not weight.is_floating_point():
        return f"the weight is {str(weight.dtype).removeprefix('torch.')}"
    return ""


class IndivisibleModule(NamedTuple):
    """A module whose number of columns is not divisible by its group size.

    Attributes:
        name: name of the module.
        columns: columns of its weight.
        size: the largest group size that does not divide them.
        is_bound: True if no bypass applies: inputs are grouped too, or the format needs whole
            groups.
    """

    name: str
    columns: int
    size: int
    is_bound: bool


def indivisible_modules(model: Module, schemes: Schemes) -> list[IndivisibleModule]:
    """The modules whose number of columns is not divisible by their group size, in order.

    Blocks are padded, so they always fit. Matrices narrower than the group already got a group of
    their own width; those that are still too narrow have a format with a fixed group size.
    """
    misfits = []
    sizes: dict[int, tuple[int, int]] = {}
    for name, module in _submodules(model, schemes):
        weight, scheme = weight_without_onloading(module), schemes[name]
        if weight is None or weight.dim() != 2:
            continue
        columns = weight.shape[-1]
        if id(scheme) not in sizes:
            sizes[id(scheme)] = (_group_size(scheme.weights), _group_size(scheme.input_activations))
        size, of_inputs = ((size if size and columns % size else 0) for size in sizes[id(scheme)])
        if size or of_inputs:
            is_bound = bool(of_inputs) or not supports_ragged_groups(format_of(scheme), columns)
            misfits.append(IndivisibleModule(name, columns, max(size, of_inputs), is_bound))
    return misfits


def supports_ragged_groups(form: str, columns: int) -> bool:
    """Return True if a format supports a smaller last group in weights with ``columns`` columns.

    >>> [supports_ragged_groups("nvfp4-pack-quantized", columns) for columns in (40, 41)]
    [True, False]
    """
    return form in _RAGGED and not (form in _PAIRED and columns % 2)


def _group_size(args: QuantizationArgs | None) -> int:
    if args is None or args.strategy not in ("group", "tensor_group"):
        return 0
    return int(args.group_size)


def check_divisible(model: Module, schemes: Schemes, *, bypass: bool = False) -> None:
    """Refuse numbers of columns that the group size does not divide: no loader supports them.

    Args:
        model: the model.
        schemes: module name to scheme.
        bypass: accept what can still be run and written; the user asked for it.

    Raises:
        TargetError: lists every such module with its columns and its group size.
    """
    misfits = indivisible_modules(model, schemes)
    bound = [one for one in misfits if one.is_bound]
    if not misfits or (bypass and not bound):
        return
    shown = bound if bypass else misfits
    lines = "\n".join(f"  {one.name}: {one.columns} columns, groups of {one.size}" for one in shown)
    reason, remedy = (
        ", which no reader takes",
        "Choose a group size that divides them, or add them to ignore.",
    )
    if bypass:
        reason = (
            ", and bypass_divisibility_checks cannot help: no forward rounds inputs in such "
            f"groups, and no format but {', '.join(sorted(_RAGGED))} holds such weights "
            "(floats of 4 bits in pairs)"
        )
    elif not bound:
        remedy = (
            "Choose a group size that divides them, add them to ignore, or set "
            "bypass_divisibility_checks: true."
        )
    raise TargetError(
        "The columns of these modules are not a whole number of groups of their weights or "
        f"inputs{reason}:\n{lines}\n",
        remedy,
    )


def tied_weights(model: Module, schemes: Schemes) -> list[tuple[str, ...]]:
    """The sets of modules that share one weight and of which at least one is to be quantized.

    The modifier unties them before it changes a weight; a quantized weight cannot be shared. A
    module registered under two names counts as two: loaders look for the scales of each.
    """
    owners: dict[int, list[str]] = {}
    for name, module in named_modules(model, remove_duplicate=False):
        weight = weight_without_onloading(module)
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    weighty = {name for name, scheme in schemes.items() if scheme.weights is not None}
    return [tuple(names) for names in owners.values() if len(names) > 1 and weighty & set(names)]


def check_tied(model: Module, schemes: Schemes) -> None:
    """Refuse to quantize one of several modules that share a weight.

    Raises:
        TargetError: names the modules.
    """
    sets = tied_weights(model, schemes)
    if not sets:
        return
    names = sets[0]
    meant = [name for name in names if name in schemes]
    more = len(sets) - 1
    problem = (
        f"{' and '.join(names)} share one weight, and {' and '.join(meant)} "
        f"{'is' if len(meant) == 1 else 'are'} to be quantized."
    )
    if more:
        problem += f" So it is with {more} more {'set' if more == 1 else 'sets'} of modules."
    raise TargetError(problem, _untying_remedy(model, schemes, sets))


def _untying_remedy(model: Module, schemes: Schemes, sets: Sequence[Sequence[str]]) -> str:
    """The remedy in the error message: untie the embeddings, if that separates all weights."""
    if are_separate_after_untying(model, schemes, sets):
        return "Pass tie_word_embeddings=False to give each its own weight, or ignore it."
    meant = join_names(name for names in sets for name in names if name in schemes)
    return f"Nothing gives each a weight of its own: add all of them to ignore ({meant})."


def are_separate_after_untying(
    model: Module, schemes: Schemes, sets: Sequence[Sequence[str]]
) -> bool:
    """Return True if untying the embeddings leaves no weight to be quantized shared.

    Args:
        model: the model.
        schemes: module name to scheme.
        sets: the sets of modules that share a weight, from :func:`tied_weights`.
    """
    own = output_head(model)
    untied = {name for name, module in named_modules(model) if module is own}
    if untied:
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        untied |= {target.rpartition(".")[0] for target in ties}
        named = dict(named_modules(model))  # one module in two places cannot be untied
        untied &= named.keys()
    left = [[name for name in names if name not in untied] for names in sets]
    return all(len(names) < 2 or not schemes.keys() & set(names) for names in left)


def warn_mixed_fused_sets(schemes: Schemes, joined: Iterable[Sequence[str]]) -> None:
    """Warn about modules that are served as one but quantized differently.

    Engines look up one scheme for the fused matrix: some refuse mixed schemes, others load one of
    the two wrongly. Transformers loads them correctly, so this is not an error.

    Args:
        schemes: module name to scheme, from all modifiers of the recipe.
        joined: sets of names that are served as one matrix or one set of experts.
    """
    mixed = []
    keys: dict[int, str] = {}  # the modules of a group share one scheme object
    for names in joined:
        present = {id(scheme): scheme for scheme in map(schemes.get, names)}
        for own, scheme in present.items():
            if own not in keys:
                keys[own] = _serving_key(scheme)
        if len({keys[own] for own in present}) > 1:
            mixed.append(_describe_mixed({name: describe(schemes.get(name)) for name in names}))
    if mixed:
        logger.warning(
            "These modules are served as one but would be quantized differently, which vLLM "
            f"refuses or reads wrongly: {'; '.join(mixed[:4])}"
            f"{f'; and {len(mixed) - 4} more sets' if len(mixed) > 4 else ''}. "
            "Give all members of a set one scheme, or ignore all of them."
        )


def _describe_mixed(kinds: Mapping[str, str]) -> str:
    by_kind: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        by_kind.setdefault(kind, []).append(name)
    return ", ".join(f"{join_names(names)} {kind}" for kind, names in by_kind.items())


def _serving_key(scheme: QuantizationScheme | None) -> str:
    """A key that is equal for schemes that loaders treat alike, ignoring targets and observers."""
    if scheme is None:
        return ""
    hidden = {"observer", "observer_kwargs", "actorder", "zp_dtype"}
    fields = ("weights", "input_activations", "output_activations")
    exclude = dict.fromkeys(fields, hidden)
    seen = scheme.model_dump(mode="json", include=set(fields), exclude=exclude)
    return f"{format_of(scheme)} {seen}"


def describe(scheme: QuantizationScheme | None) -> str:
    """A short description of a scheme.

    >>> from llmcompressor.schemes.presets import preset_scheme
    >>> describe(preset_scheme("W4A8")), describe(None)
    ('in int4 group 128 with int8 token dynamic inputs', 'not quantized')
    """
    if scheme is None:
        return "not quantized"
    weights = f"in {describe_arguments(scheme.weights)}" if scheme.weights else "in full"
    inputs = scheme.input_activations
    return weights + (f" with {describe_arguments(inputs)} inputs" if inputs else "")


def describe_arguments(args: QuantizationArgs) -> str:
    """A short description of how a tensor is quantized, such as ``int4 group 128``."""
    # Enum members where a default was taken, their values where a user wrote one.
    kind, strategy = (str(getattr(each, "value", each)) for each in (args.type, args.strategy))
    if args.group_size and args.group_size > 0:
        strategy = f"group {args.group_size}"
    elif args.block_structure:
        strategy = f"block {'x'.join(map(str, args.block_structure))}"
    flags = (" asymmetric" * (not args.symmetric), " dynamic" * bool(args.dynamic))
    return f"{kind}{args.num_bits} {strategy}{''.join(flags)}"
