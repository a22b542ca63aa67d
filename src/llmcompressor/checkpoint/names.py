# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of tensors in a checkpoint, where they differ from the module tree.

transformers renames, fuses and splits tensors while loading, and does the reverse while saving. The
tensors of a compressed module can be renamed but not fused or split (packed words and scales have
no meaning across modules). So they, and the tensors that would be fused with them, keep the
partition of the module tree.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import Embedding, Linear
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from llmcompressor.checkpoint.source import source_of
from llmcompressor.logger import logger
from llmcompressor.modeling.names import distinguishes_digits, is_in_tower, named_modules
from llmcompressor.modeling.weights import text_config
from llmcompressor.moe.layouts import StackedMoE
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.runtime.limits import parse_json
from llmcompressor.transformers_internals import (
    build_from_config,
    conversions_of,
    original_patterns,
    set_conversions,
)
from llmcompressor.verification.modules import family_of, mapped_name, prefix_of

# a letter with a digit, as in w1: no pattern that has it can tell one layer from another by it
_LETTERED = re.compile(r"(?<!\\)[A-Za-z_]\d+")
_STAND_INS = "123456789"
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(?:\d+|\*)(?:\.|$)")
_PER_EXPERT = re.compile(r"\*\\?\.(\w+)\\?\.weight\$?$")
_NOT_READ = {"quantization_config", "compression_config"}
INDEXED = re.compile(r"(?:^|\.)([^.\d]+\.\d+\..*)$")
IN_LAYER = re.compile(r"(\.\d+\.)experts\.")
"""Experts right in a layer: vLLM and SGLang have a module ``moe`` between the two (Gemma 4)."""


class _Transforms:
    """A model's conversions of names and weights, for saving if ``reverse``; looked up once.

    They are fresh ones, since some store what they have matched.
    """

    def __init__(self, model: PreTrainedModel, *, reverse: bool) -> None:
        found: Any = conversions_of(model)
        if found is None:
            found = get_model_conversion_mapping(model, add_legacy=not reverse)
            if reverse:
                # the prefix in the checkpoint of a model that was never loaded is unknown
                found = [entry for entry in found if not isinstance(entry, PrefixChange)]
        if reverse:
            found = [entry.reverse_transform() for entry in reversed(found)]
        self.converters = [entry for entry in found if isinstance(entry, WeightConverter)]
        self._renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
        self._prefix = model.base_model_prefix
        self._reverse = reverse
        self._known: dict[tuple[str, bool], tuple[str, str | None]] = {}
        # the number of a layer or an expert may matter
        self._takes_numbers = any(
            distinguishes_digits(_LETTERED.sub("", text))
            for one in (*self._renamings, *self.converters)
            for text in (
                *one.source_patterns,
                *one.target_patterns,
                getattr(one, "scope_prefix", None) or "",
            )
        )

    def name(self, key: str, *, convert: bool = True) -> tuple[str, str | None]:
        """Return a tensor's new name, and the pattern by which it is merged or split."""
        form, numbers = (key, {}) if self._takes_numbers else _canonical_tensor(key)
        if (form, convert) not in self._known:
            converters = self.converters if convert else []
            found = rename_source_key(form, self._renamings, converters, reverse=self._reverse)
            self._known[form, convert] = (str(found[0]), found[1])
        renamed, pattern = self._known[form, convert]
        if not numbers:
            return renamed, pattern
        return ".".join([numbers.get(part, part) for part in renamed.split(".")]), pattern

    def loaded(
        self, key: str, state: dict[str, Any], *, convert: bool = True
    ) -> tuple[str, str | None]:
        """Map a name as :meth:`name` does, with the base model's prefix as ``state`` has it."""
        renamed, pattern = self.name(key, convert=convert)
        inner = renamed[len(self._prefix) + 1 :] if renamed.startswith(self._prefix) else None
        if f"{self._prefix}.{renamed}" in state or inner in state:
            converters = self.converters if convert else []
            renamed, pattern = rename_source_key(
                key, self._renamings, converters, self._prefix, state
            )
        return str(renamed), pattern


def _canonical_tensor(key: str) -> tuple[str, dict[str, str]]:
    owner, dot, own = key.rpartition(".")
    if own.isdigit():
        return _canonical_name(key)
    form, numbers = _canonical_name(owner)
    return f"{form}{dot}{own}", numbers


@functools.lru_cache(maxsize=2**17)  # a module has several tensors, and each is asked for often
def _canonical_name(key: str) -> tuple[str, dict[str, str]]:
    """Return a name with canonical layer and expert numbers, and the numbers that they replace.

    >>> _canonical_name("layers.47.experts.5.w1.weight")
    ('layers.11.experts.2.w1.weight', {'11': '47', '2': '5'})
    """
    parts, numbers = key.split("."), dict[str, str]()
    for place, part in enumerate(parts):
        if part.isdigit():
            # of the same length: a pattern may match a single digit only
            if len(numbers) == len(_STAND_INS):
                return key, {}
            stand_in = _STAND_INS[len(numbers)] * len(part)
            numbers[stand_in] = part
            parts[place] = stand_in
    return ".".join(parts), numbers


def drop_dequantizing_conversions(model: Any) -> None:
    """Make a transformers model that was dequantized while loading be saved as it is now.

    transformers records what it did to each tensor and reverts it when the model is saved. What is
    not compressed would be quantized again as the files were, without a warning.
    """
    found = conversions_of(model) or ()
    operations = [one for entry in found for one in getattr(entry, "operations", ())]
    is_dequantized = any(hasattr(one, "hf_quantizer") for one in operations)
    if getattr(model, "hf_quantizer", None) is not None or not is_dequantized:
        return

    prefixes = [
        (list(entry.source_patterns), list(entry.target_patterns))
        for entry in found
        if isinstance(entry, PrefixChange)
    ]
    mapping = get_model_conversion_mapping(model, add_legacy=False)
    kept = [
        one
        for one in mapping
        if not isinstance(one, PrefixChange)
        or (list(one.source_patterns), list(one.target_patterns)) in prefixes
    ]
    set_conversions(model, kept)


def stacks_tensors(kind: str) -> bool:
    """Return True if transformers stacks tensors while loading models of a type or class."""
    conversions_of: Any = get_checkpoint_conversion_mapping
    return any(map(_is_stacking, conversions_of(kind) or ()))


def _is_stacking(transform: Any) -> bool:
    is_converter = isinstance(transform, WeightConverter)
    return is_converter and type(transform.operations[0]) is MergeModulelist


class LoadedName(NamedTuple):
    """The model's tensor that a checkpoint tensor becomes (a part of).

    ``merged`` if it is merged with others, or split, on the way, by ``pattern``.
    """

    target: str
    merged: bool
    pattern: str | None = None


def first_of_each(names: Mapping[str, LoadedName]) -> dict[str, LoadedName]:
    """Return what transformers takes of tensors with one place, as of one stored with two prefixes.

    It loads them in a natural order of their names, and the first of them counts.
    """
    taken: dict[str, str] = {}
    for name in sorted(names, key=dot_natural_key):
        if not names[name].merged:
            taken.setdefault(names[name].target, name)
    return {name: own for name, own in names.items() if own.merged or taken[own.target] == name}


class NameMap:
    """Names of a model's modules and tensors in the model, in its files and in other loaders.

    transformers' own tables of conversions are read once; a change of the model's structure needs
    a new map. The names that a server gives to modules belong here too (:meth:`in_vllm`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @functools.cached_property
    def _reading(self) -> _Transforms:
        return _Transforms(self.model, reverse=False)

    @functools.cached_property
    def _writing(self) -> _Transforms:
        return _Transforms(self.model, reverse=True)

    def stored(self, modules: Iterable[str]) -> dict[str, str]:
        """Return the name of each module's tensors in a checkpoint."""
        names = {}
        for name in modules:
            renamed, _ = self._writing.name(f"{name}.weight", convert=False)
            names[name] = renamed.removesuffix(".weight") if renamed.endswith(".weight") else name
        return names

    def renamed(self, modules: Iterable[str]) -> dict[str, list[str]]:
        """Return the modules that have other names in a checkpoint, and those names.

        Experts count as one module, whether they are modules or stacked.
        """
        owned: dict[str, list[str]] = {}
        for key in self.model.state_dict():
            owned.setdefault(_collapse_expert(key.rpartition(".")[0]), []).append(key)
        found = {}
        for module in sorted({_collapse_expert(module) for module in modules} & owned.keys()):
            targets = (self._writing.name(key)[0] for key in owned[module])
            names = {_collapse_expert(target.rpartition(".")[0]) for target in targets}
            if names != {module}:
                found[module] = sorted(names)
        return found

    def layout(self, tensors: Mapping[str, Tensor], compressed: Iterable[str]) -> dict[str, Tensor]:
        """Return uncompressed tensors under the names and in the shapes of a checkpoint.

        ``tensors`` go by names in the module tree; ``compressed`` names the compressed modules.
        """
        fused_with_compressed = set()
        for module in compressed:
            for own in ("weight", "bias"):
                target, pattern = self._writing.name(f"{module}.{own}")
                if pattern is not None:
                    fused_with_compressed.add(target)
        apart: dict[str, Tensor] = {}
        rest: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            target, pattern = self._writing.name(key)
            keep = pattern is not None and (
                target in fused_with_compressed or self._is_inside_linear(key)
            )
            (apart if keep else rest)[key] = tensor
        result: dict[str, Tensor] = dict(revert_weight_conversion(self.model, rest))
        for key, tensor in apart.items():
            result[self._writing.name(key, convert=False)[0]] = tensor
        return result

    def _is_inside_linear(self, key: str) -> bool:
        """Return True for a tensor of a module inside a Linear, such as a rotation matrix.

        It is named after the Linear, but takes no part in the conversion of the Linear's weight.
        """
        owner = key.rpartition(".")[0].rpartition(".")[0]
        try:
            return isinstance(self.model.get_submodule(owner), Linear)
        except AttributeError:
            return False

    def fused(self, tensors: Mapping[str, Tensor], compressed: Iterable[str]) -> list[str]:
        """Return modules that exist only in a checkpoint, where one tensor fuses several modules.

        A module that is written unfused, because a part of it is compressed, is not among them. The
        arguments are those of :meth:`layout`.
        """
        # only the names that transformers' own operations give are needed, no values
        stand_ins = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
            if not name.endswith(".weight") or self._writing.name(name)[1] is not None
        }
        if not stand_ins:
            return []
        weights = [name for name in stand_ins if name.endswith(".weight")]
        apart = {self._writing.name(name, convert=False)[0] for name in weights}
        return [
            name.removesuffix(".weight")
            for name in self.layout(stand_ins, compressed)
            if name.endswith(".weight") and name not in apart
        ]

    def merges_weights(self, quantized: Collection[str]) -> bool:
        """Return True if plain weights, not experts, are merged that are stored separately."""
        patterns = {
            pattern
            for converter in self._writing.converters
            if all(
                one.endswith(".weight") and "experts" not in one
                for one in converter.target_patterns
            )
            for pattern in converter.source_patterns
        }
        return bool(patterns) and any(
            self._writing.name(name)[1] in patterns
            for name in self.model.state_dict()
            if name.rpartition(".")[0] not in quantized
        )

    def merges_experts(self) -> bool:
        """Return True if there is one stored ``….weight`` per expert and a stack in the model."""
        return any(
            all("experts" in pattern for pattern in converter.source_patterns)
            and any(pattern.endswith(".weight") for pattern in converter.source_patterns)
            for converter in self._reading.converters
        )

    def loaded(self, keys: Iterable[str], state: Mapping[str, Tensor]) -> dict[str, LoadedName]:
        """Return the tensor in the model's ``state`` of each checkpoint tensor that it loads."""
        own_names = dict(state)
        names = {}
        for key in keys:
            renamed, pattern = self._reading.loaded(key, own_names)
            if renamed in state:
                names[key] = LoadedName(renamed, pattern is not None, pattern)
            elif key in state:
                names[key] = LoadedName(key, False)
            elif pattern is not None:  # part of a stack that was unfused
                alone, _ = self._reading.loaded(key, own_names, convert=False)
                if alone in state:
                    names[key] = LoadedName(alone, False)
        return names

    def owned(self, keys: Iterable[str], state: Mapping[str, Tensor]) -> set[str]:
        """Return those of a checkpoint's tensors that the model loads, as :meth:`loaded` does.

        Expert stacks that were unfused into Linears are among them.
        """
        every = list(keys)
        owned = set(self.loaded(every, state))
        opened = {
            f"{name}.{stack}"
            for name, module in named_modules(self.model)
            if isinstance(module, LinearExperts)
            for stack in module.form.stacks
        }
        given: dict[str, Any] = dict.fromkeys([*state, *opened])
        for key in set(every) - owned if opened else ():
            renamed, _ = self._reading.loaded(key, given)
            if renamed in opened:
                owned.add(key)
        return owned

    def stacks(self, names: Mapping[str, LoadedName]) -> list[list[str]]:
        """Return the tensors that each stack is built from, of those that :meth:`loaded` found."""
        patterns = {
            pattern
            for converter in self._reading.converters
            if _is_stacking(converter)
            for pattern in converter.source_patterns
        }
        stacks: dict[tuple[str, str | None], list[str]] = {}
        for name, own in names.items():
            if own.pattern in patterns:
                stacks.setdefault((own.target, own.pattern), []).append(name)
        return list(stacks.values())

    @functools.cached_property
    def loaders(self) -> tuple[NameMap, ...]:
        """The maps of the other classes that load the checkpoint, built on the meta device.

        transformers matches targets and ignore entries against the names of the class that it
        builds. That may be the language model alone (``AutoModelForCausalLM`` of Qwen 3.5), the
        whole that a model is a part of, or the class of ``config.json``.
        """
        found = []
        for kind, settings in _loader_classes(self.model):
            try:
                with torch.device("meta"):
                    found.append(NameMap(build_from_config(kind, copy.deepcopy(settings))))
            except Exception as error:  # a class of any kind
                logger.debug(f"{kind.__name__} is not asked for names of modules: {error!r:.200}")
        return tuple(found)

    @functools.cached_property
    def in_loaders(self) -> dict[str, tuple[str, ...]]:
        """The names that other classes have for each module of the checkpoint.

        Names that the model, or the checkpoint, has for any module are left out.
        """
        own = [name for name, _ in named_modules(self.model, remove_duplicate=False)]
        known = {*self.stored(own).values()}
        found: dict[str, dict[str, None]] = {}
        for loader in self.loaders:
            for name, others in loader._of_weights(known):
                found.setdefault(name, {}).update(dict.fromkeys(others))
        taken = {*own, *known}
        return {
            name: tuple(other for other in others if other not in taken)
            for name, others in found.items()
        }

    def tied_heads(self) -> list[str]:
        """Return the heads that another class ties to an embedding and the model does not have."""
        named = named_modules(self.model, remove_duplicate=False)
        own = [name for name, module in named if getattr(module, "weight", None) is not None]
        stored = self.stored(own).values()  # a head may have a bias only
        others = (other for name in stored for other in self.in_loaders.get(name, ()))
        known = {*own, *stored, *others}
        heads = []
        for loader in self.loaders:
            ties: Mapping[str, str] = getattr(loader.model, "all_tied_weights_keys", None) or {}
            modules = dict(loader.model.named_modules(remove_duplicate=False))
            for pair in ties.items():
                head, embedding = (one.removesuffix(".weight") for one in pair)
                is_head = isinstance(modules.get(head), Linear) and head not in known
                if is_head and isinstance(modules.get(embedding), Embedding):
                    heads.append(head)
        return heads

    def _of_weights(self, known: Collection[str]) -> Iterator[tuple[str, list[str]]]:
        weights = self.loaded([f"{name}.weight" for name in known], self.model.state_dict())
        split: dict[str, list[str]] = {}  # one stored tensor may become several
        for name in self.model.state_dict():
            target, pattern = self._writing.name(name)
            if pattern is not None:
                split.setdefault(target, []).append(name)
        for name, loaded in weights.items():
            places = dict.fromkeys([loaded.target, *split.get(name, ())])
            yield (
                name.removesuffix(".weight"),
                [one.removesuffix(".weight") for one in places if one.endswith(".weight")],
            )

    def in_vllm(self, stored: Mapping[str, str]) -> dict[str, ServedName]:
        """Return the name in vLLM of each module in a result of :meth:`stored`."""
        config = self.model.config
        is_wrapped = text_config(config) is not config or any(
            name != other for name, other in stored.items()
        )
        settings, _ = _written_config(self.model)
        described = _file_config(self.model) if settings is None else settings.to_dict()
        owns = {place.rpartition(".")[2] for place in stored.values()}
        family = family_of(described, owns)
        unnamed = {} if family.names_shards else family.fused
        joined = {own: key for key, shards in unnamed.items() for own in shards}
        found = {}
        for name, place in stored.items():
            path = mapped_name(place, described, family)
            if is_wrapped and path == place:
                path = _vllm_name(place)
            prefix = IN_LAYER.sub(r"\1moe.experts.", prefix_of(path, described, family))
            parent, dot, own = prefix.rpartition(".")
            prefix = f"{parent}{dot}{joined.get(own, own)}"
            found[name] = ServedName(prefix, follows=prefix == path)
        return found


class ServedName(NamedTuple):
    """The name under which vLLM looks up the scheme of a module, less its prefix.

    It is that of what the module is joined with, where shards are not asked for.
    """

    path: str
    """Empty for a module that is found by its class alone."""
    follows: bool
    """vLLM renames the checkpoint's name in the configuration likewise."""


def _collapse_expert(name: str) -> str:
    """Return the module that holds all experts for an expert's module, else the module itself.

    >>> _collapse_expert("h.0.mlp.experts.*.up"), _collapse_expert("h.0.mlp.shared_experts.up")
    ('h.0.mlp.experts', 'h.0.mlp.shared_experts.up')
    """
    found = _EXPERT.match(name)
    return name if found is None else found[1]


def _vllm_name(stored: str) -> str:
    """Return the name that a module of a multimodal model has in vLLM.

    >>> _vllm_name("model.language_model.layers.3.mlp.up_proj")
    'language_model.model.layers.3.mlp.up_proj'
    >>> _vllm_name("model.vision_tower.layers.3.mlp.up_proj")
    'vision_tower.layers.3.mlp.up_proj'
    """
    if is_in_tower(stored):
        return stored.removeprefix("model.")
    match = INDEXED.search(stored)
    tail = match.group(1) if match else stored.rpartition(".")[2]
    return f"language_model.model.{tail}"


def _loader_classes(model: PreTrainedModel) -> Iterator[tuple[Any, Any]]:
    settings, named = _written_config(model)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    text = None if settings is None else mapping.get(type(settings), None)
    parts = getattr(settings, "sub_configs", None) or {}
    if getattr(text, "config_class", None) is not parts.get("text_config", ...):
        text = None  # as in transformers' auto classes, which pass only the part then
    for name in named[:1]:
        kind: Any = getattr(transformers, str(name), None)
        is_class = isinstance(kind, type) and issubclass(kind, PreTrainedModel)
        if is_class and kind is not text and not isinstance(model, kind):
            yield kind, settings
    if text is not None and not isinstance(model, text):
        yield text, settings.get_text_config()


def _file_config(model: PreTrainedModel) -> Mapping[str, Any]:
    place, content = model.config.name_or_path, None
    try:
        file = Path(place or "") / "config.json"
        content = parse_json(file.read_text(encoding="utf-8")) if place else {}
    except (OSError, ValueError):  # reported where it is needed
        content = {}
    return content if isinstance(content, Mapping) else {}


def _written_config(model: PreTrainedModel) -> tuple[Any, list[str]]:
    """Return the configuration and the class names that the written checkpoint will have.

    It is the model's own, unless the model is a part of what the file describes, or is made of it.
    """
    content = _file_config(model)
    is_part = len(config_levels(dict(content), model.config)) > 1
    if model.config.model_type and not is_part:
        return model.config, []  # it is written with its own class
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None, []
    try:
        plain = {key: value for key, value in content.items() if key not in _NOT_READ}
        settings = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(plain))
    except Exception as error:  # what a class refuses may be of any kind
        logger.debug(f"config.json is not read for other names of modules: {error!r:.200}")
        return None, []
    return settings, content.get("architectures") or []


# Submodels: models that are a part of their folder's model, such as its language model.
#
# Such a model is written into a copy of the whole: its tensors under their names there, its
# settings in their place in the whole's ``config.json``, and all else unchanged.


def config_levels(config: dict[str, Any], current: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the levels of a ``config.json`` from its top down to that of ``current``.

    It is the top alone for a model that is no submodel. As in transformers, the submodel is found
    by the ``base_config_key`` of its configuration class, and by model types.
    """
    kind = current.model_type
    if not kind or config.get("model_type") in (None, kind):
        return [config]
    found = _find_levels(config, kind, getattr(current, "base_config_key", "") or "")
    return [config] if found is None else [config, *found]


def _find_levels(config: dict[str, Any], kind: str, key: str) -> list[dict[str, Any]] | None:
    named = config.get(key)
    if isinstance(named, dict) and named.get("model_type") in (None, kind):
        return [named]
    for level in config.values():
        if not isinstance(level, dict):
            continue
        if level.get("model_type") == kind:
            return [level]
        deeper = _find_levels(level, kind, key)
        if deeper is not None:
            return [level, *deeper]
    return None


def record_prefix(model: PreTrainedModel) -> None:
    """Record the prefix that transformers removed from a submodel's tensor names while loading.

    transformers records a prefix from a class's own table itself, but not the base model prefix
    (``language_model`` of Llama 4's text model).
    """
    prefix, source = model.base_model_prefix, source_of(model)
    conversions: Any = conversions_of(model)
    if source is None or not prefix or conversions is None:
        return  # it was not loaded from a folder
    if len(config_levels(dict(source.config), model.config)) == 1:
        return
    weights = [name for name in model.state_dict() if name.endswith(".weight")]
    modules = NameMap(model).stored([name.removesuffix(".weight") for name in weights])
    names = [f"{name}.weight" for name in modules.values()]
    after = sum(f"{prefix}.{name}" in source.tensors for name in names)
    if after > sum(name in source.tensors for name in names):
        # applied first while loading, and last while saving
        conversions[:0] = [PrefixChange(prefix_to_remove=prefix)]


# Names of expert matrices in the checkpoints of a family, from transformers' own tables.
#
# Where transformers stacks tensors that a checkpoint stores per expert, its table has their
# patterns: ``.experts.*.w1.weight`` and ``.experts.*.w3.weight`` become ``.experts.gate_up_proj``.
# Without a table, checkpoints store stacks; servers then accept the names ``gate_proj``,
# ``up_proj`` and ``down_proj``.


def stacking_converters(model: PreTrainedModel) -> list[WeightConverter]:
    """Return the model's weight converters that stack tensors of single experts."""
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    return list(filter(_is_stacking, found))


def expert_linear_names(mixture: StackedMoE, converters: list[WeightConverter]) -> dict[str, str]:
    """Return the checkpoint names of an MoE's Linears by role (:func:`stacking_converters`)."""
    assert mixture.form is not None
    names = {part.role: part.role for part in mixture.form.parts}
    for stack in dict.fromkeys(part.stack for part in mixture.form.parts):
        roles = [part.role for part in mixture.form.parts if part.stack == stack]
        for converter in converters:
            sources = _source_names(converter, f"{mixture.name}.{stack}")
            if len(sources) == len(roles):
                names |= dict(zip(roles, sources, strict=True))
    return names


def loads_experts_one_by_one(mixture: StackedMoE, converters: list[WeightConverter]) -> bool:
    """Return True if transformers loads the quantized experts of an MoE one by one."""
    assert mixture.form is not None
    if type(mixture.module).__name__ in MODULES_TO_PATCH_FOR_QUANTIZATION:
        return True
    stack = f"{mixture.name}.{mixture.form.parts[0].stack}"
    return any(_source_names(converter, stack) for converter in converters)


def has_reordered_experts(mixture: StackedMoE, model: PreTrainedModel) -> bool:
    """Return True if a stack is built from single experts, but not in the order of its experts.

    An expert's number in the checkpoint then differs from its number in the model.
    """
    assert mixture.form is not None
    stacks = {f"{mixture.name}.{part.stack}" for part in mixture.form.parts}
    found: list[Any] = get_model_conversion_mapping(model, add_legacy=False)
    reordering = (
        entry
        for entry in found
        if isinstance(entry, WeightConverter)
        and not (
            _is_stacking(entry) and all(type(one) is Concatenate for one in entry.operations[1:])
        )
    )
    return any(_source_names(entry, stack) for entry in reordering for stack in stacks)


def _source_names(converter: Any, target: str) -> list[str]:
    """Return the names that a converter builds ``target`` from; empty for another target."""
    # the parts of a composite model have tables of their own, and several may have experts
    scope, base = converter.scope_prefix, converter.base_model_prefix
    if scope and not target.startswith((f"{scope}.", f"{base}.{scope}.")):
        return []
    sources, targets = original_patterns(converter)
    patterns = [str(one).replace("\\", "").rstrip("$") for one in targets]
    if not any(target.endswith(pattern.lstrip("^")) for pattern in patterns):
        return []
    found = [_PER_EXPERT.search(str(one)) for one in sources]
    return [one.group(1) for one in found if one is not None]
