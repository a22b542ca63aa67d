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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import compressed_tensors
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.quant_config import get_vllm_module_type
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from transformers import PreTrainedModel

from llmcompressor.checkpoint.compress import QuantizedModule
from llmcompressor.checkpoint.expert_groups import dense_experts, expert_stacks, found_for_experts
from llmcompressor.checkpoint.experts import dense_closed
from llmcompressor.checkpoint.layout import checkpoint_names, sources_of_plain
from llmcompressor.checkpoint.other_names import other_names, readers, tied_names
from llmcompressor.logger import logger
from llmcompressor.modeling.embeddings import embeddings
from llmcompressor.modeling.fused import absent_partners, is_expert
from llmcompressor.modeling.settings import text_config
from llmcompressor.names import is_of_tower, named_modules, names_of

__all__ = ["build_quantization_config"]

_INDEXED = re.compile(r"(?:^|\.)([^.\d]+\.\d+\..*)$")
_IN_LAYER = re.compile(r"(\.\d+\.)experts\.")
"""Experts right in a layer: vLLM and SGLang have a module ``moe`` between the two (Gemma 4)."""


@dataclass(frozen=True)
class _Candidate:
    """A module that some loader may quantize.

    Attributes:
        name: name in the module tree.
        stored: name in the checkpoint.
        others: its names in other classes that load the checkpoint.
        served: its name in vLLM: like ``stored``, possibly after other prefixes.
        classes: class names that compressed-tensors compares.
        served_class: its class in vLLM; empty if it is matched by name only.
        group: index of its group, ``None`` if it is not quantized.
    """

    name: str
    stored: str
    others: tuple[str, ...]
    served: str
    classes: frozenset[str]
    served_class: str
    group: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """All names to write where the module is targeted by name."""
        return tuple(dict.fromkeys((self.name, self.stored, *self.others)))


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
    """Return the configuration as plain JSON data.

    It describes the model that loaders build: experts that were unfused for the run and are not
    quantized are stacks there.

    Args:
        model: the model.
        quantized: its quantized modules.
        status: ``COMPRESSED``, or ``DECOMPRESSED`` where weights are written dense.
        extra_ignore: patterns of modules that only the checkpoint holds.

    Returns:
        The configuration, or ``None`` if nothing is quantized and no rotation is online.
    """
    transform = getattr(model, "transform_config", None)
    if not quantized:
        return _transforms_alone(transform)
    with dense_closed(model):
        return _as_json(_config(model, quantized, status, extra_ignore), transform)


def _config(
    model: PreTrainedModel,
    quantized: Sequence[QuantizedModule],
    status: QuantizationStatus,
    extra_ignore: Iterable[str],
) -> QuantizationConfig:
    groups = _group([entry for entry in quantized if not entry.is_attention])
    attention = _group([entry for entry in quantized if entry.is_attention and entry.has_group])
    classes = readers(model)
    others = other_names(model, classes)
    candidates = _candidates(model, groups, others)
    tied = tied_names(model, classes, others)  # Linears in a loader, stored in no file
    ignore = [*_ignore(model, candidates, quantized, others), *tied, *extra_ignore]
    _choose_targets(groups, candidates, ignore)
    _name_absent(groups, candidates, ignore)
    for group in attention:
        group.targets = _attention_targets(model, group)

    every = [*groups, *attention]
    schemes = [
        every[index].scheme.model_copy(update={"targets": targets})
        for index, targets in found_for_experts(
            [group.targets for group in every], _of_experts(groups)
        )
    ]
    named = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    coded = [one for one in candidates if one.group is not None]
    names = {name for one in coded for name in (one.name, *one.others)}
    return QuantizationConfig(
        config_groups={**dense_experts([model, *classes], schemes, names), **named},
        quantization_status=status,
        kv_cache_scheme=_kv_cache_scheme(quantized),
        format=_overall_format(groups).value,
        ignore=list(dict.fromkeys(ignore)),
    )


def _as_json(config: QuantizationConfig, transform: Any) -> dict[str, Any]:
    found = config.model_dump(mode="json")
    if found.get("moe_sparsity_config", ...) is None:
        del found["moe_sparsity_config"]  # older loaders do not know it
    if config.kv_cache_scheme is not None:
        found["kv_cache_scheme"] = _in_full(config.kv_cache_scheme)
    for name, scheme in config.config_groups.items():
        for own in ("weights", "input_activations", "output_activations"):
            args = getattr(scheme, own)
            if args is not None:
                found["config_groups"][name][own] = _in_full(args)
    return {
        **found,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": transform.model_dump(mode="json") if transform is not None else {},
        "version": compressed_tensors.__version__,
    }


def _in_full(args: QuantizationArgs) -> dict[str, Any]:
    """Return all keys of the arguments, in the order of the fields.

    compressed-tensors 0.20 omits ``None`` and inferred values, and what was inferred depends on how
    an object was created: a resumed run would write other bytes than an uninterrupted one.
    """
    found = {name: getattr(args, name) for name in type(args).model_fields}
    found |= args.model_dump(mode="json")
    zero = None if args.symmetric else str(args.zp_dtype)  # undefined without zero points
    return {name: zero if name == "zp_dtype" else each for name, each in found.items()}


def _transforms_alone(transform: Any) -> dict[str, Any] | None:
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


def _group(entries: Iterable[QuantizedModule]) -> list[_Group]:
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


def _of_experts(groups: Sequence[_Group]) -> set[int]:
    """Return the indices of the groups that contain MoE experts."""
    return {
        index
        for index, group in enumerate(groups)
        if any(is_expert(entry.name) for entry in group.members)
    }


def _candidates(
    model: PreTrainedModel, groups: Sequence[_Group], others: Mapping[str, tuple[str, ...]]
) -> list[_Candidate]:
    group_of = {entry.name: index for index, group in enumerate(groups) for entry in group.members}
    modules = {
        name: module
        for name, module in named_modules(model, remove_duplicate=False)
        if isinstance(module, Linear | Embedding)
        or name in group_of
        or get_vllm_module_type(type(module).__name__) == "Linear"
    }
    stored = checkpoint_names(model, modules)
    config = model.config
    is_wrapped = text_config(config) is not config or any(
        name != other for name, other in stored.items()
    )
    _, head = embeddings(model)
    classes = {kind: _class_names(kind) for kind in set(map(type, modules.values()))}
    return [
        _Candidate(
            name=name,
            stored=stored[name],
            others=others.get(stored[name], ()),
            served=_IN_LAYER.sub(
                r"\1moe.experts.", _served_name(stored[name]) if is_wrapped else stored[name]
            ),
            classes=classes[type(module)],
            served_class="" if module is head else _served_class(module),
            group=group_of.get(name),
        )
        for name, module in modules.items()
    ]


def _served_name(stored: str) -> str:
    """Return the name that a module of a multimodal model has in vLLM.

    >>> _served_name("model.language_model.layers.3.mlp.up_proj")
    'language_model.model.layers.3.mlp.up_proj'
    >>> _served_name("model.vision_tower.layers.3.mlp.up_proj")
    'vision_tower.layers.3.mlp.up_proj'
    """
    if is_of_tower(stored):
        return stored.removeprefix("model.")
    match = _INDEXED.search(stored)
    tail = match.group(1) if match else stored.rpartition(".")[2]
    return f"language_model.model.{tail}"


def _class_names(kind: type[Module]) -> frozenset[str]:
    names = {cls.__name__ for cls in kind.__mro__ if issubclass(cls, Module)}
    return frozenset(names - {"Module"})


def _served_class(module: Module) -> str:
    if isinstance(module, Linear):
        return "Linear"
    if isinstance(module, Embedding):
        return "VocabParallelEmbedding"
    return str(get_vllm_module_type(type(module).__name__))


def _matches_name(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


class _Targets:
    """The targets of a group as loaders match them; a group may name thousands of modules."""

    def __init__(self, targets: Iterable[str]) -> None:
        every = list(targets)
        self._exact = {target for target in every if not target.startswith("re:")}
        self._patterns = [target for target in every if target.startswith("re:")]
        self._lower = [target.lower() for target in self._exact]
        self._served: dict[str, bool] = {}

    def written_for(self, item: _Candidate, name: str) -> bool:
        """Return True if transformers matches the module by its name in one of the classes."""
        return self.means(name) or not self._exact.isdisjoint(item.classes)

    def served_for(self, item: _Candidate) -> bool:
        """Return True if vLLM matches the module."""
        by_name = item.name in self._exact or item.stored in self._exact
        by_name &= _IN_LAYER.search(item.stored) is None
        return by_name or self._match(item.served) or self._is_served(item.served_class)

    def means(self, name: str) -> bool:
        """Return True if a target is this name or a pattern that matches it."""
        return name in self._exact or self._match(name)

    def _is_served(self, kind: str) -> bool:
        if kind not in self._served:
            by_class = any(target in kind.lower() for target in self._lower) or self._match(kind)
            self._served[kind] = bool(kind) and by_class
        return self._served[kind]

    def _match(self, name: str) -> bool:
        return any(_matches_name(pattern, name) for pattern in self._patterns)


def _choose_targets(
    groups: Sequence[_Group], candidates: Sequence[_Candidate], ignore: Sequence[str]
) -> None:
    """Keep the recipe's targets if every loader matches them alike, else write module names."""
    names = {item.name: item.names for item in candidates}
    for group in groups:
        # a module targeted by name may have other names in the checkpoint and elsewhere
        others = (name for target in group.targets for name in names.get(target, ()))
        group.targets = list(dict.fromkeys([*group.targets, *others]))
        more = (*_head_targets(group, candidates), *_expert_targets(group))
        group.targets = list(dict.fromkeys([*group.targets, *more]))
    if _is_unambiguous(groups, candidates, ignore):
        return
    logger.info("Readers would resolve the recipe's targets differently; module names are written.")
    by_name = {item.name: item for item in candidates}
    for group in groups:
        own = [name for entry in group.members for name in by_name[entry.name].names]
        more = (*_head_targets(group, candidates), *_held_targets(group))
        group.targets = list(dict.fromkeys([*own, *more]))


def _head_targets(group: _Group, candidates: Sequence[_Candidate]) -> list[str]:
    """Return the names of output heads: vLLM matches them by name only, perhaps with a prefix."""
    members = {entry.name for entry in group.members if isinstance(entry.module, Linear)}
    heads = [item for item in candidates if not item.served_class and item.name in members]
    return [
        rf"re:(?:.*\.)?{re.escape(item.stored)}$" if "." not in item.stored else item.stored
        for item in heads
    ]


def _expert_targets(group: _Group) -> list[str]:
    """Return patterns for experts that the recipe targets by their names in other classes."""
    names = [entry.name for entry in group.members if "experts." in entry.name]
    linears = [name for name in names if len({_own(one) for one in names_of(name)}) > 1]
    met = _Targets(group.targets)
    is_met = "Linear" in group.targets
    unmet = [] if is_met else [name for name in linears if not met.means(name)]
    own = sorted(set(map(_own, unmet)))
    return [rf"re:.*experts\.\d+\.(?:{'|'.join(own)})$"] if own else []


def _own(name: str) -> str:
    return name.rpartition(".")[2]


def _held_targets(group: _Group) -> list[str]:
    """Return patterns for experts directly in a layer, which full names do not match in vLLM."""
    found: dict[str, None] = {}
    for name in (entry.name for entry in group.members):
        match = _IN_LAYER.search(name)
        if match is not None:
            own = re.escape(name.rpartition(".")[2])
            found[rf"{_held(name[: match.end()])}\d+\.{own}$"] = None
    return list(found)


def _held(path: str) -> str:
    r"""Return a pattern for a path after any prefix, with experts possibly in a module ``moe``.

    >>> print(_held("model.layers.3.experts."))
    re:(?:.*\.)?layers\.3\.(?:moe\.)?experts\.
    """
    match = _INDEXED.search(path)
    parts = _IN_LAYER.split(match.group(1) if match else path)
    every = [re.escape(part) for part in parts]
    own = f"{every[0]}{every[1]}(?:moe\\.)?experts\\.{every[2]}" if every[1:] else every[0]
    return rf"re:(?:.*\.)?{own}"


def _is_unambiguous(
    groups: Sequence[_Group], candidates: Sequence[_Candidate], ignore: Sequence[str]
) -> bool:
    left_out = _Targets(ignore)
    every = [_Targets(group.targets) for group in groups]
    for item in candidates:
        is_ignored = left_out.means(item.name)
        wanted = set() if item.group is None else {item.group}
        if is_ignored and item.group is not None:
            return False
        if is_ignored:
            continue
        readings = [[own.served_for(item) for own in every]]
        for name in (item.name, *item.others):
            readings.append([own.written_for(item, name) for own in every])
        if any({index for index, hit in enumerate(hits) if hit} != wanted for hits in readings):
            return False
    return True


def _absent(candidates: Sequence[_Candidate]) -> Iterator[tuple[_Candidate, _Candidate]]:
    """Yield each projection that a layer lacks, with the module that it would be fused with."""
    absent = absent_partners([item.name for item in candidates])
    for item in candidates:
        for partner in absent.get(item.name, ()):
            own, other = (each.rpartition(".")[2] for each in (item.name, partner))
            name, stored, served, *others = (
                f"{each.removesuffix(own)}{other}"
                for each in (item.name, item.stored, item.served, *item.others)
            )
            yield replace(item, name=name, stored=stored, served=served, others=tuple(others)), item


def _name_absent(
    groups: Sequence[_Group], candidates: Sequence[_Candidate], ignore: list[str]
) -> None:
    """Give key and value projections that a layer lacks the scheme of its queries."""
    left_out = _Targets(ignore)
    targets = [_Targets(group.targets) for group in groups]
    for partner, item in _absent(candidates):
        if item.group is not None and not targets[item.group].served_for(partner):
            groups[item.group].targets += partner.names
        elif item.group is None and left_out.means(item.stored):
            ignore += [name for name in partner.names if not left_out.means(name)]


def _ignore(
    model: PreTrainedModel,
    candidates: Sequence[_Candidate],
    quantized: Sequence[QuantizedModule],
    others: Mapping[str, tuple[str, ...]],
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
    plain = []
    of_types: dict[type[Module], bool] = {}
    for name, module in named_modules(model, remove_duplicate=False):
        if not name or name in quantized_names:
            continue
        kind = type(module)
        if kind not in of_types:
            own = set(map(get_vllm_module_type, _class_names(kind)))
            of_types[kind] = bool(own & types)
        if of_types[kind]:
            plain.append(name)
    stored = checkpoint_names(model, [name for name in plain if name not in known])
    stored |= {name: item.stored for name, item in known.items()}
    taken = {item.stored for item in candidates if item.group is not None}
    names = [
        entry
        for name in plain
        for entry in dict.fromkeys((name, stored[name], *others.get(stored[name], ())))
        if entry == name or entry not in taken
    ]
    stacks = expert_stacks(model, quantized_names) if "Linear" in types else []
    patterns = _fused_experts(model, stacks)
    names += [
        source
        for source in _sources(model, plain, stacks, quantized_names)
        if source not in taken and not any(_matches_name(pattern, source) for pattern in patterns)
    ]
    return [*names, *patterns]


def _sources(
    model: PreTrainedModel, plain: Sequence[str], stacks: Sequence[str], quantized: set[str]
) -> list[str]:
    """Return the checkpoint's own names for modules that fuse weights of unquantized modules."""
    tensors: dict[str, Tensor] = {}
    for name in plain:
        weight = getattr(model.get_submodule(name), "weight", None)
        if isinstance(weight, Tensor):
            tensors[f"{name}.weight"] = weight
    for name in stacks:
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False):
            tensors[f"{name}.{own}"] = parameter
    return sources_of_plain(model, tensors, quantized)


def _fused_experts(model: PreTrainedModel, stacks: Sequence[str]) -> list[str]:
    """Return patterns for experts that are one 3-D parameter here and Linears elsewhere."""
    stored = checkpoint_names(model, stacks)
    patterns = []
    for name in stacks:
        for path in (f"{name}.", f"{stored[name]}."):
            patterns.append(f"{_held(path)}.*")
    return list(dict.fromkeys(patterns))


def _attention_targets(model: PreTrainedModel, group: _Group) -> list[str]:
    """Return one class name if it suffices: vLLM skips a group with one target ``…Attention``."""
    names = [entry.name for entry in group.members]
    classes = {type(entry.module).__name__ for entry in group.members}
    same = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    if len(classes) == 1 and set(same) == set(names):
        return list(classes)
    return names


def _kv_cache_scheme(quantized: Sequence[QuantizedModule]) -> QuantizationArgs | None:
    found: list[QuantizationArgs] = []
    for entry in quantized:
        if entry.is_attention and entry.scheme.input_activations not in found:
            found.append(entry.scheme.input_activations)
    if len(found) > 1:
        logger.warning(
            f"The format holds one scheme for the cache of all layers, the model has {len(found)}; "
            "the first one is written."
        )
    return found[0] if found else None


def _overall_format(groups: Sequence[_Group]) -> CompressionFormat:
    formats = {group.scheme.format for group in groups} - {CompressionFormat.dense.value}
    if len(formats) > 1:
        return CompressionFormat.mixed_precision
    return CompressionFormat(next(iter(formats), CompressionFormat.dense.value))
