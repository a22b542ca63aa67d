# SPDX-License-Identifier: Apache-2.0
"""The ``quantization_config`` of a written checkpoint.

Loaders differ in how they match a module to its scheme. compressed-tensors (and so transformers)
compares class names along the inheritance chain and looks at exact names, then patterns, then
classes, each alphabetically. vLLM takes groups in their order in the file, compares class names as
substrings of its own class names, and never looks at classes in ``ignore``. A configuration is
written only in a form that both match alike: every quantized module matches the targets of its own
group and of no other, every other module matches none or is ignored by its exact name. Where
the recipe's own targets do not have this property, exact module names are written instead.
Key and value projections that a layer shares with another are named too, as engines look up their
scheme.

A module may have several names: in memory, in the checkpoint, and in other classes that
transformers loads it with. Wherever one is written, all are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, TypeAlias

import compressed_tensors
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.quant_config import get_vllm_module_type
from compressed_tensors.utils.match import match_name
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from llmcompressor.checkpoint.moe_names import dense_experts_fused
from llmcompressor.checkpoint.names import IN_LAYER, INDEXED, NameMap, ServedName
from llmcompressor.checkpoint.packing import QuantizedModule
from llmcompressor.checkpoint.source import (
    check_format,
    is_compressed_tensors,
    quantization_method,
    quantization_settings,
    quantized_error,
)
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.modeling.fused import is_expert, missing_qkv_partners
from llmcompressor.modeling.names import name_aliases, named_modules, own_parameters
from llmcompressor.modeling.weights import embeddings
from llmcompressor.runtime.limits import timed_pattern

# The config group that transformers applies to stacked experts.
#
# Where a checkpoint stores experts one by one and the model holds a stack, transformers has no
# module to match by name. It applies one group to the experts of all layers: the first with a
# pattern that contains ``experts``, else the first with a target that is no pattern, else the
# first one. All other servers match names.

_NOTHING = "re:(?!)experts"
"""A target that matches no module, and that transformers takes to name experts."""
_COMPRESSED = "compressed"
_NOT_KEPT = ("transform_config", "sparsity_config")

Targets: TypeAlias = Sequence[str]


def _mentions_experts(targets: Targets) -> bool:
    return any(target.startswith("re:") and "experts" in target for target in targets)


def _expert_group(groups: Mapping[Any, Targets]) -> Any:
    """Return the key of the group that transformers applies to experts; ``None`` without groups."""
    with_class = (
        key for key, targets in groups.items() if any(not one.startswith("re:") for one in targets)
    )
    named = (key for key, targets in groups.items() if _mentions_experts(targets))
    return next(chain(named, with_class, groups), None)


def order_groups_for_experts(
    groups: Mapping[Any, Targets], of_experts: Collection[Any]
) -> dict[Any, list[str]]:
    """Order and extend groups so that transformers applies the right one to experts.

    The group of the experts gets one more target, which matches nothing. It is moved to the front
    where a group before it has a pattern with that word (for shared experts, say). Each module
    matches the targets of one group only, so the order has no other effect. With several groups of
    experts (``of_experts``) nothing is changed, as transformers can apply only one.

    >>> order_groups_for_experts({0: ["re:.*attn.*"], 1: ["re:.*mlp.*"]}, {1})
    {0: ['re:.*attn.*'], 1: ['re:.*mlp.*', 're:(?!)experts']}
    """
    found = {key: list(targets) for key, targets in groups.items()}
    if len(of_experts) != 1 or _expert_group(groups) in of_experts:
        return found
    (own,) = of_experts
    if not _mentions_experts(found[own]):
        found[own].append(_NOTHING)
    before = list(groups)[: list(groups).index(own)]
    is_behind = any(_mentions_experts(groups[key]) for key in before)
    return {own: found[own], **found} if is_behind else found


def dense_experts_group(
    classes: Sequence[NameMap], schemes: Sequence[QuantizationScheme], quantized: Collection[str]
) -> dict[str, QuantizationScheme]:
    """Return a group that matches nothing, to make transformers load experts as not quantized.

    For the group that it applies to experts, transformers looks for packed tensors only, and leaves
    dense experts random with no more than a warning; only for 8-bit floats it accepts dense weights
    too. So this group must come first, also when group names are sorted. Some releases apply the
    same group to any module whose tensors are merged while loading (one convolution of three), and
    fail to load it. ``classes`` are those that load the checkpoint, ``quantized`` the names in all.
    """
    has_experts = any(
        one.merges_experts() and expert_stacks(one.model, quantized) for one in classes
    )
    if not (has_experts or any(one.merges_weights(quantized) for one in classes)):
        return {}
    if any(is_expert(name) for name in quantized):  # quantized experts need the group
        return {}
    taken = _expert_group({index: scheme.targets for index, scheme in enumerate(schemes)})
    weights = schemes[taken].weights if taken is not None else None
    if weights is not None and weights.type == "float" and weights.num_bits == 8:
        return {}
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    scheme = QuantizationScheme(
        targets=[_NOTHING],
        weights=QuantizationArgs(**args),
        input_activations=QuantizationArgs(**args, dynamic=True),
        format=CompressionFormat.float_quantized.value,
    )
    return {"experts_not_quantized" if has_experts else "dense_weights": scheme}


def expert_stacks(model: PreTrainedModel, quantized: Collection[str]) -> list[str]:
    """Return the modules with stacked matrices of their own and no quantized module inside.

    Matrices of experts may also lie one above the other (DBRX).
    """
    return [
        name
        for name, module in named_modules(model)
        if not isinstance(module, _ConvNd | Linear)
        and any(
            parameter.ndim == 3 or (parameter.ndim == 2 and "experts." in name)
            for parameter in own_parameters(module)
        )
        and not any(other.startswith(f"{name}.") for other in quantized)
    ]


@dataclass(frozen=True)
class _Candidate:
    """A module that some loader may quantize.

    Attributes:
        name: name in the module tree.
        stored: name in the checkpoint.
        others: its names in other classes that load the checkpoint.
        served: its name in vLLM.
        classes: class names that compressed-tensors compares.
        served_class: its class in vLLM; empty if it is matched by name only.
        group: index of its group, ``None`` if it is not quantized.
    """

    name: str
    stored: str
    others: tuple[str, ...]
    served: ServedName
    classes: frozenset[str]
    served_class: str
    group: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """All names to write where the module is targeted by name."""
        return tuple(dict.fromkeys((self.name, self.stored, *self.others, *self.asked)))

    @property
    def asked(self) -> tuple[str, ...]:
        """The name that vLLM asks for where it does not follow the checkpoint's.

        Experts directly in a layer have patterns instead.
        """
        is_own = self.served.path and not self.served.follows
        return (self.served.path,) if is_own and not IN_LAYER.search(self.stored) else ()


@dataclass
class _Group:
    scheme: QuantizationScheme
    members: list[QuantizedModule] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


def build_quantization_config(
    model: PreTrainedModel,
    quantized: Sequence[QuantizedModule],
    *,
    status: QuantizationStatus,
    extra_ignore: Iterable[str] = (),
) -> dict[str, Any] | None:
    """Return the configuration as plain JSON data; ``None`` if nothing needs one.

    It describes the model that loaders build: experts that were unfused for the run and are not
    quantized are stacks there. The status is ``DECOMPRESSED`` where weights are written dense, and
    ``extra_ignore`` are patterns of modules that only the checkpoint holds.
    """
    transform = getattr(model, "transform_config", None)
    if not quantized:
        return _transform_only_config(transform)
    with dense_experts_fused(model):
        return _as_json(_config(model, quantized, status, extra_ignore), transform)


def _config(
    model: PreTrainedModel,
    quantized: Sequence[QuantizedModule],
    status: QuantizationStatus,
    extra_ignore: Iterable[str],
) -> QuantizationConfig:
    groups = _group_by_scheme([entry for entry in quantized if not entry.is_attention])
    attention = _group_by_scheme(
        [entry for entry in quantized if entry.is_attention and entry.has_group]
    )
    names = NameMap(model)
    candidates = _candidates(names, groups)
    tied = names.tied_heads()  # Linears in a loader, stored in no file
    ignore = [*_ignored_names(names, candidates, quantized), *tied, *extra_ignore]
    _choose_targets(groups, candidates, ignore)
    _target_missing_projections(groups, candidates, ignore)
    for group in attention:  # vLLM skips a group with one target ``…Attention``
        members = {entry.name for entry in group.members}
        classes = {type(entry.module).__name__ for entry in group.members}
        same = {name for name, module in model.named_modules() if type(module).__name__ in classes}
        is_one = len(classes) == 1 and same == members
        group.targets = list(classes if is_one else (entry.name for entry in group.members))

    every = [*groups, *attention]
    of_experts = {
        index
        for index, group in enumerate(groups)
        if any(is_expert(entry.name) for entry in group.members)
    }
    ordered = order_groups_for_experts(
        {index: group.targets for index, group in enumerate(every)}, of_experts
    )
    schemes = [
        every[index].scheme.model_copy(update={"targets": targets})
        for index, targets in ordered.items()
    ]
    named = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    coded = [one for one in candidates if one.group is not None]
    coded_names = {name for one in coded for name in (one.name, *one.others)}
    caches: list[QuantizationArgs] = []
    for entry in quantized:
        if entry.is_attention and entry.scheme.input_activations not in caches:
            caches.append(entry.scheme.input_activations)
    if len(caches) > 1:
        logger.warning(
            "The format holds one scheme for the cache of all layers, the model has "
            f"{len(caches)}; the first one is written."
        )
    formats = {group.scheme.format for group in groups} - {CompressionFormat.dense.value}
    overall = next(iter(formats), CompressionFormat.dense.value)
    return QuantizationConfig(
        config_groups={
            **dense_experts_group([names, *names.loaders], schemes, coded_names),
            **named,
        },
        quantization_status=status,
        kv_cache_scheme=caches[0] if caches else None,
        format=CompressionFormat.mixed_precision.value if len(formats) > 1 else overall,
        ignore=list(dict.fromkeys(ignore)),
    )


def _as_json(config: QuantizationConfig, transform: Any) -> dict[str, Any]:
    found = config.model_dump(mode="json")
    if found.get("moe_sparsity_config", ...) is None:
        del found["moe_sparsity_config"]  # older loaders do not know it
    if config.kv_cache_scheme is not None:
        found["kv_cache_scheme"] = _dump_all_keys(config.kv_cache_scheme)
    for name, scheme in config.config_groups.items():
        for own in ("weights", "input_activations", "output_activations"):
            args = getattr(scheme, own)
            if args is not None:
                found["config_groups"][name][own] = _dump_all_keys(args)
    return {
        **found,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": transform.model_dump(mode="json") if transform is not None else {},
        "version": compressed_tensors.__version__,
    }


def _dump_all_keys(args: QuantizationArgs) -> dict[str, Any]:
    """Return all keys of the arguments, in the order of the fields.

    compressed-tensors 0.20 omits ``None`` and inferred values, and what was inferred depends on how
    an object was created: a resumed run would write other bytes than an uninterrupted one.
    """
    found = {name: getattr(args, name) for name in type(args).model_fields}
    found |= args.model_dump(mode="json")
    zero = None if args.symmetric else str(args.zp_dtype)  # undefined without zero points
    return {name: zero if name == "zp_dtype" else each for name, each in found.items()}


def _transform_only_config(transform: Any) -> dict[str, Any] | None:
    """Return the configuration of a model with online rotations and no quantization.

    Loaders fail on a configuration without groups, or on a group without weights. So there is one
    group, and every module is ignored. Rotations that are fused into the weights need no entry.
    """
    schemes = transform.config_groups.values() if transform is not None else ()
    if not any(args.is_online() for scheme in schemes for args in scheme.apply):
        return None
    group = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=8, strategy="channel"),
        format=CompressionFormat.pack_quantized.value,
    )
    config = QuantizationConfig(
        config_groups={"group_0": group},
        quantization_status=QuantizationStatus.COMPRESSED,
        format=CompressionFormat.pack_quantized.value,
        ignore=["re:.*"],
    )
    return _as_json(config, transform)


def _group_by_scheme(entries: Iterable[QuantizedModule]) -> list[_Group]:
    """Group modules with equal arguments and format; their targets are merged in order."""
    groups: list[_Group] = []
    group_of: dict[int, _Group] = {}  # modules of one group may share their scheme
    for entry in entries:
        known = group_of.get(id(entry.scheme))
        if known is not None:
            known.members.append(entry)
            continue
        key = entry.scheme.model_copy(update={"targets": []})
        group = next((group for group in groups if group.scheme == key), None)
        if group is None:
            group = _Group(key)
            groups.append(group)
        group_of[id(entry.scheme)] = group
        group.members.append(entry)
        known_targets = set(group.targets)
        group.targets += [one for one in entry.scheme.targets if one not in known_targets]
    return groups


def _candidates(names: NameMap, groups: Sequence[_Group]) -> list[_Candidate]:
    group_of = {entry.name: index for index, group in enumerate(groups) for entry in group.members}
    modules = {
        name: module
        for name, module in named_modules(names.model, remove_duplicate=False)
        if isinstance(module, Linear | Embedding)
        or name in group_of
        or get_vllm_module_type(type(module).__name__) == "Linear"
    }
    stored = names.stored(modules)
    served = names.in_vllm(stored)
    _, head = embeddings(names.model)
    classes = {kind: _class_names(kind) for kind in set(map(type, modules.values()))}
    found = []
    for name, module in modules.items():
        kind = "Linear" if isinstance(module, Linear) else type(module).__name__
        is_table = isinstance(module, Embedding)
        in_vllm = "VocabParallelEmbedding" if is_table else str(get_vllm_module_type(kind))
        others = names.in_loaders.get(stored[name], ())
        places = (name, stored[name], others, served[name], classes[type(module)])
        found.append(_Candidate(*places, "" if module is head else in_vllm, group_of.get(name)))
    return found


def _class_names(kind: type[Module]) -> frozenset[str]:
    names = {cls.__name__ for cls in kind.__mro__ if issubclass(cls, Module)}
    return frozenset(names - {"Module"})


class _TargetMatcher:
    """Targets or ignore entries as loaders match them; there may be thousands of names."""

    def __init__(self, targets: Iterable[str]) -> None:
        every = set(targets)
        self._patterns = sorted(target for target in every if target.startswith("re:"))
        self.exact = every.difference(self._patterns)
        self._lower = [target.lower() for target in self.exact]
        self._served: dict[str, bool] = {}

    def matches_in_vllm(self, item: _Candidate) -> bool:
        """Return True if vLLM matches the module."""
        by_name = item.name in self.exact or item.stored in self.exact
        by_name = (by_name and item.served.follows) or item.served.path in self.exact
        kind = item.served_class
        if kind not in self._served:
            by_class = any(target in kind.lower() for target in self._lower) or self._match(kind)
            self._served[kind] = bool(kind) and by_class
        return by_name or self._match(item.served.path) or self._served[kind]

    def means(self, name: str) -> bool:
        """Return True if a target is this name or a pattern that matches it."""
        return name in self.exact or self._match(name)

    def first(self, name: str, module: Module) -> str | None:
        """Return the entry that matches a module: a name before a pattern before a class."""
        if name in self.exact:
            return name
        found = (pattern for pattern in self._patterns if _matches(name, pattern))
        return next(found, None) or self._class(module)

    def reaches(self, modules: Mapping[str, Module]) -> set[str]:
        """Return the entries that match any of ``modules``."""
        found = self.exact & set(modules)
        found |= {str(self._class(one)) for one in modules.values()} & self.exact
        for entry in self._patterns:
            if any(_matches(name, entry) for name in modules):
                found.add(entry)
        return found

    def _class(self, module: Module) -> str | None:
        names = [cls.__name__ for cls in type(module).__mro__ if issubclass(cls, Module)]
        return next((name for name in names if name in self.exact), None)

    def _match(self, name: str) -> bool:
        return any(_matches(name, pattern) for pattern in self._patterns)


def _matches(name: str, pattern: str) -> bool:
    return timed_pattern(pattern.removeprefix("re:")).match(name)


def _choose_targets(
    groups: Sequence[_Group], candidates: Sequence[_Candidate], ignore: Sequence[str]
) -> None:
    """Keep the recipe's targets if every loader matches them alike, else write module names."""
    names = {item.name: item.names for item in candidates}
    for group in groups:
        # a module targeted by name may have other names in the checkpoint and elsewhere
        others = (name for target in group.targets for name in names.get(target, ()))
        group.targets = list(dict.fromkeys([*group.targets, *others]))
        more = (*_named_targets(group, candidates), *_expert_targets(group))
        group.targets = list(dict.fromkeys([*group.targets, *more]))
    if _is_unambiguous(groups, candidates, ignore):
        return
    logger.info("Readers would resolve the recipe's targets differently; module names are written.")
    by_name = {item.name: item for item in candidates}
    for group in groups:
        own = [name for entry in group.members for name in by_name[entry.name].names]
        more = (*_named_targets(group, candidates), *_layer_expert_targets(group))
        group.targets = list(dict.fromkeys([*own, *more]))


def _named_targets(group: _Group, candidates: Sequence[_Candidate]) -> list[str]:
    """Return what vLLM finds heads and tables by, where ``Linear`` or a name does not do.

    Heads are matched by name only, perhaps with a prefix; a table that is built without a name by
    its class.
    """
    members = {entry.name: entry.module for entry in group.members}
    mine = [item for item in candidates if item.name in members]
    heads = [one for one in mine if not one.served_class and isinstance(members[one.name], Linear)]
    met = _TargetMatcher(group.targets)
    tables = [
        one for one in mine if not one.served.path and isinstance(members[one.name], Embedding)
    ]
    return [
        *(
            rf"re:(?:.*\.)?{re.escape(name)}$" if "." not in name else name
            for item in heads
            for name in (item.stored, *item.asked)
        ),
        *(one.served_class for one in tables if not met.matches_in_vllm(one)),
    ]


def _expert_targets(group: _Group) -> list[str]:
    """Return patterns for experts that the recipe targets by their names in other classes."""
    if "Linear" in group.targets:
        return []
    met = _TargetMatcher(group.targets)
    names = [entry.name for entry in group.members if "experts." in entry.name]
    unmet = {
        name.rpartition(".")[2]
        for name in names
        if len({alias.rpartition(".")[2] for alias in name_aliases(name)}) > 1
        and not met.means(name)
    }
    return [rf"re:.*experts\.\d+\.(?:{'|'.join(sorted(unmet))})$"] if unmet else []


def _layer_expert_targets(group: _Group) -> list[str]:
    """Return patterns for experts directly in a layer, which full names do not match in vLLM."""
    found: dict[str, None] = {}
    for name in (entry.name for entry in group.members):
        match = IN_LAYER.search(name)
        if match is not None:
            own = re.escape(name.rpartition(".")[2])
            found[rf"{_expert_prefix_pattern(name[: match.end()])}\d+\.{own}$"] = None
    return list(found)


def _expert_prefix_pattern(path: str) -> str:
    r"""Return a pattern for a path after any prefix, with experts possibly in a module ``moe``.

    >>> print(_expert_prefix_pattern("model.layers.3.experts."))
    re:(?:.*\.)?layers\.3\.(?:moe\.)?experts\.
    """
    match = INDEXED.search(path)
    parts = IN_LAYER.split(match.group(1) if match else path)
    every = [re.escape(part) for part in parts]
    own = f"{every[0]}{every[1]}(?:moe\\.)?experts\\.{every[2]}" if every[1:] else every[0]
    return rf"re:(?:.*\.)?{own}"


def _is_unambiguous(
    groups: Sequence[_Group], candidates: Sequence[_Candidate], ignore: Sequence[str]
) -> bool:
    left_out = _TargetMatcher(ignore)
    every = [_TargetMatcher(group.targets) for group in groups]
    for item in candidates:
        wanted = set() if item.group is None else {item.group}
        if left_out.means(item.name):
            if wanted:
                return False
            continue
        readings = [[own.matches_in_vllm(item) for own in every]]
        for name in (item.name, *item.others):
            by_class = [not own.exact.isdisjoint(item.classes) for own in every]  # transformers
            readings.append(
                [one.means(name) or hit for one, hit in zip(every, by_class, strict=True)]
            )
        if any({index for index, hit in enumerate(hits) if hit} != wanted for hits in readings):
            return False
    return True


def _target_missing_projections(
    groups: Sequence[_Group], candidates: Sequence[_Candidate], ignore: list[str]
) -> None:
    """Give key and value projections that a layer lacks the scheme of its queries."""
    left_out = _TargetMatcher(ignore)
    targets = [_TargetMatcher(group.targets) for group in groups]
    absent = missing_qkv_partners([item.name for item in candidates])
    for item in candidates:
        for lacking in absent.get(item.name, ()):
            own, other = (each.rpartition(".")[2] for each in (item.name, lacking))
            name, stored, path, *others = (
                f"{each.removesuffix(own)}{other}"
                for each in (item.name, item.stored, item.served.path, *item.others)
            )
            served = item.served._replace(path=path)
            partner = replace(item, name=name, stored=stored, served=served, others=tuple(others))
            if item.group is not None and not targets[item.group].matches_in_vllm(partner):
                groups[item.group].targets += partner.names
            elif item.group is None and left_out.means(item.stored):
                ignore += [name for name in partner.names if not left_out.means(name)]


def _ignored_names(
    names: NameMap, candidates: Sequence[_Candidate], quantized: Sequence[QuantizedModule]
) -> list[str]:
    """Return the names of unquantized modules whose class is that of a quantized one.

    The names in the module tree (which transformers compares), in the checkpoint (which vLLM
    compares) and in other classes are listed where they differ. So are names that only the
    checkpoint has, where one tensor fuses several modules. Routers count as Linear.
    """
    quantized_names = {entry.name for entry in quantized}
    # attention with only a quantized cache has no group, so nothing needs to be ignored for it
    classes = {type(entry.module).__name__ for entry in quantized if entry.has_group}
    types = set(map(get_vllm_module_type, classes))
    known = {item.name: item for item in candidates}
    own_types: dict[type[Module], set[str]] = {}
    plain = []
    for name, module in named_modules(names.model, remove_duplicate=False):
        if type(module) not in own_types:
            own_types[type(module)] = set(map(get_vllm_module_type, _class_names(type(module))))
        if name and name not in quantized_names and own_types[type(module)] & types:
            plain.append(name)
    stored = names.stored([name for name in plain if name not in known])
    stored |= {name: item.stored for name, item in known.items()}
    taken = {one for item in candidates if item.group is not None for one in item.names}
    found = []
    for name in plain:
        asked = known[name].asked if name in known else ()
        every = (name, stored[name], *names.in_loaders.get(stored[name], ()), *asked)
        found += [one for one in dict.fromkeys(every) if one == name or one not in taken]
    stacks = expert_stacks(names.model, quantized_names) if "Linear" in types else []
    places = names.stored(stacks)
    paths = (path for name in stacks for path in (f"{name}.", f"{places[name]}."))
    # experts that are one 3-D parameter here and Linears elsewhere
    patterns = list(dict.fromkeys(f"{_expert_prefix_pattern(path)}.*" for path in paths))
    beside = {places[name].rpartition(".")[0] for name in stacks if not name.endswith("experts")}
    for above in sorted(beside - {""}):  # of several stacks: servers have single experts there
        pattern = rf"{_expert_prefix_pattern(f'{above}.')}(?:experts\.)?\d+\..*"
        patterns += [] if any(match_name(one, pattern) for one in taken) else [pattern]
    tensors: dict[str, Tensor] = {}  # that the checkpoint may fuse under names of its own
    for name in plain:
        weight = getattr(names.model.get_submodule(name), "weight", None)
        if isinstance(weight, Tensor):
            tensors[f"{name}.weight"] = weight
    for name in stacks:
        for own, parameter in names.model.get_submodule(name).named_parameters(recurse=False):
            tensors[f"{name}.{own}"] = parameter
    found += [
        source
        for source in names.fused(tensors, quantized_names)
        if source not in taken and not any(match_name(source, pattern) for pattern in patterns)
    ]
    return [*found, *patterns]


# Further quantization of a partly quantized checkpoint, whose configuration is kept.
#
# The schemes of two runs are merged into one ``quantization_config``. Each module must match its
# own scheme and no other, so a target that would also match a module of the other run (``Linear``
# does) is replaced by the names of its modules.


def existing_quantization(model: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a partly quantized checkpoint, if any.

    CheckpointError if it is of another method, or a part of it cannot be kept.
    """
    method = quantization_method(config)
    if method is None:
        return None
    found = quantization_settings(config)
    if not is_compressed_tensors(method) or not found:
        raise quantized_error(model, method)
    check_format(model, found)
    problems = [f"a {name}" for name in _NOT_KEPT if found.get(name)]
    if found.get("quantization_status") != _COMPRESSED:
        problems.append(f"the status {found.get('quantization_status')!r}")
    if problems:
        raise CheckpointError(
            f"The model {model} is quantized already, with {problems[0]}, which another scheme "
            "beside it cannot keep.",
            "Compress the original, unquantized model.",
        )
    return found


def merge_quantization(
    new: Mapping[str, Any],
    modules: Mapping[str, Module],
    old: Mapping[str, Any],
    compressed: Mapping[str, Module],
) -> dict[str, Any]:
    """Merge the configurations of this run (``new``) and of the source (``old``) for modules.

    The source's groups come first, unless experts need another order. CheckpointError if it has no
    scheme for one of its quantized modules.
    """
    before = _ConfigGroups(old, compressed)
    after = _ConfigGroups(new, modules)
    groups: dict[str, Mapping[str, Any]] = {**before.excluding(modules)}
    of_experts = before.of_experts & set(groups)
    taken = set(groups)
    added = after.excluding(compressed)
    for number, (own, group) in enumerate(added.items(), start=len(groups)):
        names = (f"group_{free}" for free in count(number))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        groups[name] = group
        if own in after.of_experts:
            of_experts.add(name)
    ordered = order_groups_for_experts(
        {name: group["targets"] for name, group in groups.items()}, of_experts
    )
    groups = {name: {**groups[name], "targets": targets} for name, targets in ordered.items()}
    both = {**compressed, **modules}
    ignore = old.get("ignore") or ()
    wrong = _TargetMatcher(ignore).reaches(both)
    kept = [entry for entry in ignore if entry not in wrong]
    formats = {group["format"] for group in groups.values() if group.get("format")}
    mixed = CompressionFormat.mixed_precision.value
    return {
        **new,
        "config_groups": groups,
        "format": mixed if len(formats) > 1 else next(iter(formats), new["format"]),
        "kv_cache_scheme": old.get("kv_cache_scheme"),
        "ignore": list(dict.fromkeys([*new["ignore"], *kept])),
    }


class _ConfigGroups:
    def __init__(self, config: Mapping[str, Any], modules: Mapping[str, Module]) -> None:
        overall = config.get("format")
        overall = None if overall == CompressionFormat.mixed_precision.value else overall
        self._groups: dict[str, dict[str, Any]] = {
            name: {**group, "format": group.get("format") or overall}
            for name, group in config["config_groups"].items()
        }
        self._members: dict[str, dict[str, Module]] = {name: {} for name in self._groups}
        self._assign(modules, _TargetMatcher(config.get("ignore") or ()))
        self.of_experts = {name for name, one in self._members.items() if any(map(is_expert, one))}

    def _assign(self, modules: Mapping[str, Module], ignore: _TargetMatcher) -> None:
        by_target = {
            target: name for name, group in self._groups.items() for target in group["targets"]
        }
        targets = _TargetMatcher(by_target)
        for name, module in modules.items():
            found = targets.first(name, module)
            if found is None or ignore.first(name, module) is not None:
                raise CheckpointError(
                    f"The tensors of {name} are quantized, and the quantization_config does not "
                    "say how.",
                    "Compress the original, unquantized model.",
                )
            self._members[by_target[found]][name] = module

    def excluding(self, others: Mapping[str, Module]) -> dict[str, dict[str, Any]]:
        """Return the non-empty groups, with targets that match none of ``others``."""
        apart = {}
        for name, group in self._groups.items():
            too_wide = _TargetMatcher(group["targets"]).reaches(others)
            targets = [target for target in group["targets"] if target not in too_wide]
            if too_wide:
                kept, members = _TargetMatcher(targets), self._members[name]
                targets += [one for one in members if kept.first(one, members[one]) is None]
            if targets:
                apart[name] = {**group, "targets": targets}
        return apart
