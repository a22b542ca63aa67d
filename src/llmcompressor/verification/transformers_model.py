# SPDX-License-Identifier: Apache-2.0
"""The model of transformers that a ``config.json`` describes, built on the meta device."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from compressed_tensors.offload import as_single_threaded
from torch import Tensor

from llmcompressor.runtime.limits import impossible_size
from llmcompressor.transformers_internals import (
    auto_mapping,
    dtype_plan,
    original_patterns,
    unexpected_patterns,
)
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.files import without_prefixes
from llmcompressor.verification.modules import PLAIN_FLOATS, class_names

ABSENT = object()
"""The value of what is not there."""
_FREE = (
    "_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation "
    "_name_or_path architectures compression_config dtype name_or_path quantization_config "
    "tie_word_embeddings torch_dtype transformers_version use_cache"
)
"""Settings that are no change: classes are compared by themselves, ties are R5."""


@dataclass(frozen=True)
class Change:
    """A setting that differs.

    Attributes:
        path: its keys, joined by dots.
        now: its value in the checkpoint, or :data:`ABSENT`.
        before: its value in the original, or :data:`ABSENT`.
        is_lost: the checkpoint's file does not hold what the original's does.
    """

    path: str
    now: Any
    before: Any
    is_lost: bool = False

    @property
    def sentence(self) -> str:
        """The change in words."""
        if self.is_lost:
            return f"config.json has lost {self.path}."
        if self.before is ABSENT:
            return f"config.json has {self.path} {self.now!r}, and the original has none."
        return f"{self.path} is {self.now!r} in config.json and was {self.before!r}."


def config_changes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[Change]:
    """Settings that differ in meaning.

    Args:
        ours: the content of the checkpoint's ``config.json``.
        theirs: that of the original's.
    """
    found = []
    now, before = (each.get("architectures") or ABSENT for each in (ours, theirs))
    if before is not ABSENT and now != before:
        found.append(Change("architectures", now, before, is_lost=now is ABSENT))
    kinds: list[dict[str, Any]] = [
        {"model_type": each.get("model_type")} for each in (ours, theirs)
    ]
    if kinds[0] != kinds[1]:
        return [*found, *_raw(kinds[0], kinds[1])]  # in another class nothing else means the same
    read = [as_read(each) for each in (ours, theirs)]
    if read[0] is None or read[1] is None:
        raw = (one for one in _raw(ours, theirs) if one.before is not ABSENT)
        return [*found, *(one for one in raw if not (one.is_lost and _is_of_every_model(one)))]
    changes: dict[str, Change] = {}
    for one in _raw(read[0], read[1]):  # in terms of the files: a part that is lost is one change
        path = _lost(one.path.split("."), ours, theirs)
        told = one if path is None else Change(path, one.now, one.before, is_lost=True)
        if not (told.is_lost and _is_of_every_model(told)):
            changes.setdefault(told.path, told)
    return [*found, *changes.values()]


def _is_of_every_model(change: Change) -> bool:
    """True if what is lost is the default that all classes share."""
    from transformers import PretrainedConfig  # noqa: PLC0415  # loads much

    defaults = json.loads(json.dumps(PretrainedConfig().to_dict(), default=str))
    return bool(change.before == defaults.get(change.path.rpartition(".")[2], ABSENT))


def as_read(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """All settings as transformers' class for the model type has them; ``None`` without a class."""
    read = _configuration(config, _FREE.split())
    try:
        found = None if read is None else json.loads(json.dumps(read.to_dict(), default=str))
    except Exception:  # configuration classes may be anybody's code
        return None
    return found


def _configuration(config: Mapping[str, Any], left_out: Container[str]) -> Any:
    """The configuration object that transformers makes of a file, ``None`` if it makes none."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much

    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING or impossible_size(config):
        return None
    try:
        return _read_by(CONFIG_MAPPING[name], config, left_out)
    except Exception:  # what a class refuses may be of any kind
        return None


def _read_by(kind: Any, config: Mapping[str, Any], left_out: Container[str]) -> Any:
    """The configuration object that a class makes of a file; it raises what the class raises."""
    plain = {key: _decoded(value) for key, value in config.items() if key not in left_out}
    with quiet_transformers():
        return kind.from_dict(copy.deepcopy(plain))


def _decoded(value: Any) -> Any:
    """A value without quantization settings, and with infinity where transformers wrote it."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _decoded(each) for key, each in value.items() if key != "quantization_config"}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers read without a word."""
    from transformers.utils import logging  # noqa: PLC0415  # loads much

    said: Any = logging
    level, bars = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity(said.CRITICAL)
    said.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()


def _raw(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    nothing = (None, ABSENT)
    for key in sorted({*map(str, ours), *map(str, theirs)} - set(_FREE.split())):
        now, before = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if isinstance(now, Mapping) and isinstance(before, Mapping):
            yield from _raw(now, before, f"{prefix}{key}.")
        elif now != before and not (now in nothing and before in nothing):
            yield Change(f"{prefix}{key}", now, before, is_lost=now is ABSENT)


def _lost(keys: list[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first part of a path that the original's file has and the checkpoint's has not."""
    for index, key in enumerate(keys):
        if not isinstance(theirs, Mapping) or key not in theirs:
            return None
        if not isinstance(ours, Mapping) or key not in ours:
            return ".".join(keys[: index + 1])
        ours, theirs = ours[key], theirs[key]
    return None


_FROM_FILES = frozenset(
    {"quantization_config", "compression_config", "architectures", "dtype", "torch_dtype"}
)
_CLASS_NAMES = "_MAPPING_NAMES"
"""What the tables end in by which transformers finds classes: model type → name of a class."""
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.\d+\.")
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+\.")


@dataclass(frozen=True)
class Built:
    """A class that was built and given the headers of a checkpoint.

    Attributes:
        name: of the class.
        shapes: every parameter and stored buffer of it, by the class's own names.
        missing: those that nothing was loaded into.
        wrong: name → the file's shape and the class's.
        not_floats: tensors of the file that are no floats, and are loaded into floats.
        unexpected: tensors of the file that it has no place for.
        tied_head: a Linear that takes the embedding for its weight, and of which the file holds
            nothing; empty if there is none.
        silencing: weights of norms that let nothing through where they are zero. (Of many
            classes, such as Gemma's, the weight is what is added to one.)
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    missing: tuple[str, ...]
    wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    not_floats: tuple[str, ...]
    unexpected: tuple[str, ...] = ()
    tied_head: str = ""
    silencing: frozenset[str] = frozenset()


def _model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a configuration names; ``None`` if there is none."""
    import transformers  # noqa: PLC0415  # loads much

    found = getattr(transformers, next(iter(class_names(config)), ""), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def is_known_type(config: Mapping[str, Any]) -> bool:
    """True if transformers has the model type of a configuration, or it brings code of its own."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much

    return bool(config.get("auto_map")) or config.get("model_type") in CONFIG_MAPPING


def unread_method(settings: Mapping[str, Any]) -> str:
    """Why transformers does not read the method of a ``quantization_config``; empty if it does."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # noqa: PLC0415

    named, codes = settings.get("quant_method"), "takes codes for weights, or random ones for them"
    if not settings:
        return f"config.json does not say that it is quantized: transformers {codes}."
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return ""
    if named is None:
        return "transformers refuses a quantization_config without quant_method."
    if named not in [*AUTO_QUANTIZATION_CONFIG_MAPPING]:  # of whatever type it is
        return f"transformers knows no quant_method {named!r}, passes over it, and {codes}."
    return ""


def _takes(kind: Any, settings: Any) -> bool:
    """True if a class is one of those that transformers makes of a configuration.

    Some model types have a configuration of their own, and the class of another type.
    """
    if isinstance(settings, kind.config_class or ()):
        return True
    from transformers.models.auto import modeling_auto  # noqa: PLC0415  # loads much

    tables = (table for name, table in vars(modeling_auto).items() if name.endswith(_CLASS_NAMES))
    named = (table.get(getattr(settings, "model_type", None)) for table in tables)
    return any(
        kind.__name__ in (names if isinstance(names, tuple | list) else (names,)) for names in named
    )


def class_and_settings(config: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The class of transformers that a configuration names, and the configuration read by it.

    ``None`` if there is none, or the two do not belong together.
    """
    kind, settings = _model_class(config), _configuration(config, _FROM_FILES)
    if kind is None or settings is None or not _takes(kind, settings):
        return None
    return kind, settings


def build(
    config: Mapping[str, Any], headers: Mapping[str, TensorInfo], *, is_clean: bool = False
) -> Built | None:
    """Build the class that a configuration names, and let it load headers.

    Args:
        config: the content of ``config.json``.
        headers: tensors, with a plain weight for each quantized module.
        is_clean: a trial load has found a place for each tensor, and a tensor for each place.

    Returns:
        ``None`` if transformers has no such class, or cannot build it of this configuration.
    """
    if is_clean and (model := class_model(config)) is not None:
        report = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys"), ())
        return _built(model, headers, report)
    found = class_and_settings(config)
    return None if found is None else _load(*found, headers)


def _load(kind: Any, settings: Any, headers: Mapping[str, TensorInfo]) -> Built | None:
    state = {
        name: torch.empty(info.shape, dtype=torch.bfloat16, device="meta")
        for name, info in headers.items()
    }
    try:
        model, info = load_headers(kind, settings, state)
    except Exception:  # a class of any kind, and what it cannot load other rules speak of
        return None
    return _built(model, headers, info)


def readings_of_both(config: Mapping[str, Any], headers: Mapping[str, TensorInfo]) -> Iterator[str]:
    """What readers find where the named class and the model type do not belong together.

    vLLM goes by the class, transformers by the type. Nothing where they do belong together; for
    each of the two why it cannot be read, or an empty text.
    """
    kind, settings = _model_class(config), _configuration(config, _FROM_FILES)
    if kind is None or settings is None or not isinstance(kind.config_class, type):
        return
    parts = (getattr(settings, name, None) for name in settings.sub_configs)
    if any(_takes(kind, each) for each in (settings, *parts)):
        return  # the language model of a larger one may be loaded alone
    of_type = {**config, "architectures": [_class_of_type(config)]}
    own: Any = kind.config_class
    for each in ({**config, "model_type": own.model_type}, of_type):
        name, built = class_names(each)[0], build(each, headers)
        if built is None:
            yield f"{name or 'a class'} cannot be built of it"
        else:
            lost = [*built.missing, *built.wrong][:4]
            yield f"{name} does not find {', '.join(lost)} in the file" if lost else ""


def _class_of_type(config: Mapping[str, Any]) -> str:
    """The name of the class that transformers has for a model type; empty if there is none."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: PLC0415

    settings = _configuration(config, _FROM_FILES)
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        mapping = auto_mapping(auto)
        if type(settings) in mapping:
            return str(mapping[type(settings)].__name__)
    return ""


def text_class(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``config.json`` of the class that ``AutoModelForCausalLM`` makes of a larger model.

    ``None`` where that is the class which the configuration names, or one that takes it whole.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # loads much

    settings, text = _configuration(config, _FROM_FILES), config.get("text_config")
    mapping = auto_mapping(AutoModelForCausalLM)
    if type(settings) not in mapping or not isinstance(text, Mapping):
        return None
    kind = mapping[type(settings)]
    if kind.config_class is not settings.sub_configs.get("text_config"):
        return None
    name = kind.__name__
    if name in class_names(config):
        return None
    return {**text, "model_type": kind.config_class.model_type, "architectures": [name]}


def bare_model(config: Mapping[str, Any]) -> Any:
    """The model that a configuration describes, without data; ``None`` if it cannot be built."""
    found = class_and_settings(config)
    if found is None:
        return None
    kind, settings = found
    try:
        with quiet_transformers(), torch.device("meta"):
            return kind(settings)
    except Exception:  # a class of any kind, and what it refuses other rules speak of
        return None


def refusal(config: Mapping[str, Any]) -> str:
    """Why transformers cannot make a model of a configuration; empty if it can.

    Neither what code of the checkpoint's own may read, nor what another package is needed for, is
    a reason.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much

    name = config.get("model_type")
    if config.get("auto_map") or not isinstance(name, str) or name not in CONFIG_MAPPING:
        return ""
    if found := impossible_size(config):
        return found
    try:
        settings = _read_by(CONFIG_MAPPING[name], config, _FROM_FILES)
        kind = _model_class(config)
        if kind is not None and _takes(kind, settings):
            with quiet_transformers(), torch.device("meta"):
                kind(settings)
    except ImportError:
        return ""
    except Exception as error:  # a class of any kind
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


@contextmanager
def quiet_compressors() -> Iterator[None]:
    """Silence what compressed-tensors logs of weights that have no data."""
    from loguru import logger  # noqa: PLC0415  # loaded with compressed-tensors

    logger.disable("compressed_tensors")
    try:
        yield
    finally:
        logger.enable("compressed_tensors")


def load_headers(
    kind: Any, settings: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, Mapping[str, Any]]:
    """Load tensors without data into a class: the model, and the loading report."""
    from transformers import PreTrainedModel  # noqa: PLC0415  # loads much

    # a class's own way of loading may look for more than weights, and in other places
    load: Any = PreTrainedModel.from_pretrained
    with quiet_transformers(), as_single_threaded():  # some processes may load nothing
        found: tuple[Any, Mapping[str, Any]] = load.__func__(
            kind,
            None,
            config=settings,
            state_dict=tensors,
            dtype=dtype,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
        )
    return found


def _built(model: Any, headers: Mapping[str, TensorInfo], info: Mapping[str, Any]) -> Built:
    own, names = model.state_dict(), ModelNames(model)
    # experts that are stored one by one, and that the class does not take so (T6)
    single = filter(_EXPERT.match, info["unexpected_keys"])
    apart = {match[0] for match in map(_LAYER.match, single) if match}
    return Built(
        type(model).__name__,
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        tuple(sorted(name for name in info["missing_keys"] if not _is_apart(name, own, apart))),
        {name: (tuple(ours), tuple(theirs)) for name, ours, theirs in info["mismatched_keys"]},
        tuple(_not_floats(names, own, headers)),
        tuple(sorted(name for name in info["unexpected_keys"] if not _EXPERT.match(name))),
        _tied_head(model, {*map(names.first, headers), *info["missing_keys"]}),
        frozenset(_silencing(model)),
    )


def _silencing(model: Any) -> Iterator[str]:
    known: dict[tuple[type, int], bool] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1:
            key = (type(module), len(weight))
            if key not in known:
                known[key] = _is_silenced(module, len(weight))
            if known[key]:
                yield f"{name}.weight"


def _is_silenced(norm: torch.nn.Module, width: int) -> bool:
    """True if a norm whose parameters are zero gives zeros; it is tried with a row of its width."""
    try:
        own = copy.deepcopy(norm).to_empty(device="cpu").float()
        for parameter in own.parameters():
            parameter.data.zero_()
        found = own(torch.linspace(-1, 2, width).reshape(1, width))
    except Exception:  # a module of any kind
        return False
    return isinstance(found, Tensor) and not bool(found.any())


def _tied_head(model: Any, known: Container[str]) -> str:
    """The output head, where neither the file has its weight nor transformers misses it.

    Args:
        model: without data.
        known: names in the model of what the file has and what is missed.
    """
    head = model.get_output_embeddings()
    names = (name for name, module in model.named_modules() if module is head)
    name = next(names, "") if isinstance(head, torch.nn.Linear) else ""
    return "" if f"{name}.weight" in known else name


def _is_apart(name: str, own: Mapping[str, Tensor], layers: set[str]) -> bool:
    """True if a tensor is a stack, in a layer whose experts are stored one by one."""
    layer, tensor = _LAYER.match(name), own.get(name)
    if layer is None or layer[0] not in layers:
        return False
    return "experts" in name or (tensor is not None and tensor.ndim == 3)


def _not_floats(
    names: ModelNames, own: Mapping[str, Tensor], headers: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """Integers, and floats of 8 bits, where the class has floats."""
    strange = [name for name, info in headers.items() if info.dtype not in PLAIN_FLOATS]
    for name in strange:
        tensor = own.get(names.first(name), own.get(name))
        if tensor is not None and tensor.is_floating_point():
            yield name


class ModelNames:
    """Names of a model's tensors for the names in a file, as transformers renames them.

    Args:
        model: without data.
        others: names of tensors that the model will have beside its own.
        converted: tensors may be split and joined; otherwise each is loaded as it is.
    """

    def __init__(self, model: Any, others: Iterable[str] = (), *, converted: bool = True) -> None:
        from transformers.conversion_mapping import (  # noqa: PLC0415
            get_model_conversion_mapping,
        )
        from transformers.core_model_loading import WeightConverter, WeightRenaming  # noqa: PLC0415

        every: list[Any] = get_model_conversion_mapping(model)
        self._renamings = [one for one in every if isinstance(one, WeightRenaming)]
        self.converters = [one for one in every if converted and isinstance(one, WeightConverter)]
        self._parts = {
            pattern: _parts(one) for one in self.converters for pattern in one.source_patterns
        }
        # transformers looks whether there is anything under a name
        self._own = dict.fromkeys([*model.state_dict(), *others], True)
        self._prefix = model.base_model_prefix

    def rename(self, name: str, converters: Iterable[Any]) -> tuple[str, str | None]:
        """The new name of a tensor, and the pattern of the converter that takes it."""
        from transformers.core_model_loading import rename_source_key  # noqa: PLC0415

        found, pattern = rename_source_key(
            name, self._renamings, list(converters), self._prefix, self._own
        )
        return str(found), pattern

    def first(self, name: str) -> str:
        """The name of a tensor in the model; of several that it is split into the first."""
        return self.rename(name, self.converters)[0]

    def every(self, name: str) -> tuple[str, ...]:
        """All that a tensor becomes, or becomes a part of."""
        first, pattern = self.rename(name, self.converters)
        parts = self._parts.get(pattern or "", ())
        return (first, *(self.rename(name, [part])[0] for part in parts))


def _parts(converter: Any) -> list[Any]:
    """Transforms of a tensor to the others of what it is split into."""
    from transformers.core_model_loading import WeightTransform  # noqa: PLC0415

    found = []
    sources, targets = original_patterns(converter)
    for target in targets[1:]:
        part: Any = WeightTransform([*sources], [target])
        part.scope_prefix = converter.scope_prefix
        part.base_model_prefix = converter.base_model_prefix
        found.append(part)
    return found


_OF_CODES = frozenset({"quantization_config", "compression_config"})
_LAYER_OF = re.compile(r"(?:.*\.)?(?:layers?|h|blocks?)\.\d+\.")


def config_text(config: Mapping[str, Any], *, quantized: bool = False) -> str:
    """A ``config.json`` as text, with or without how it is quantized; empty if it is no JSON."""
    kept = {key: each for key, each in config.items() if quantized or key not in _OF_CODES}
    try:
        return json.dumps(kept, sort_keys=not quantized)  # groups have an order
    except TypeError:  # what is no JSON was in no file
        return ""


def class_model(config: Mapping[str, Any]) -> Any:
    """The plain model of a ``config.json``, without data; ``None`` where it cannot be built.

    It is shared by all who ask: nothing of it may be changed.
    """
    text = config_text(config)
    return _class_model(text) if text else None


@lru_cache(maxsize=4)  # the check before a run asks once for each server, and for the text alone
def _class_model(config: str) -> Any:
    return bare_model(json.loads(config))


def passes_over(config: Mapping[str, Any], name: str) -> bool:
    """True if the class leaves out a tensor of a layer that it has, and says so beforehand.

    A layer that it has not, as one that drafts tokens, may be one of another class's.
    """
    model, layer = class_model(config), _LAYER_OF.match(name)
    if model is None or layer is None:
        return False
    return any(re.search(one, name) for one in unexpected_patterns(model)) and any(
        each.startswith(layer.group()) for each, _ in model.named_parameters()
    )


def doubles(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[list[str]]:
    """Names of tensors with one place in the class, as of one stored with two prefixes.

    transformers takes the first of each. Nothing where the class is not known.
    """
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(without_prefixes(name), []).append(name)
    several = [each for each in tails.values() if len(each) > 1]
    model = class_model(config) if several else None
    if model is None:
        return
    from transformers.core_model_loading import dot_natural_key  # noqa: PLC0415

    own = ModelNames(model)
    for each in several:
        places: dict[str, list[str]] = {}
        for name in sorted(each, key=dot_natural_key):
            places.setdefault(own.first(name), []).append(name)
        yield from (same for same in places.values() if len(same) > 1)


def reader_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A ``config.json`` that names the class which transformers loads the checkpoint by.

    Where the named class is none of its, or not one of the model type, that is the type's.
    """
    if class_and_settings(config) is not None:
        return config
    name = _class_of_type(config)
    return {**config, "architectures": [name]} if name else config


def float32_names(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """The tensors that a class keeps in float32 whatever ``dtype`` the model has, by their name."""
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415

    plan = dtype_plan(model, dtype)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    return lambda name: pattern is not None and pattern.search(name) is not None


class ModuleClasses:
    """The modules of a class, asked by their paths in a file.

    Args:
        model: without data.
    """

    def __init__(self, model: Any) -> None:
        self._kinds = {name: _kind(module) for name, module in model.named_modules()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.names = ModelNames(model)

    def kind(self, path: str) -> str:
        """``linear``, ``embedding``, ``other`` (a norm), or nothing where its class tells none."""
        own = self.names.first(f"{path}.weight").rpartition(".")[0]
        return self._kinds.get(own, self._kinds.get(path, ""))

    def experts(self, path: str) -> int | None:
        """Number of experts stacked of the list that a projection is of; ``None`` if none."""
        shapes = [self._shapes.get(name, ()) for name in self.names.every(f"{path}.weight")]
        return sum(shape[0] for shape in shapes if len(shape) == 3) or None


def module_classes(config: Mapping[str, Any]) -> ModuleClasses | None:
    """The modules of the class of a ``config.json``; ``None`` where it cannot be built."""
    model = class_model(config)
    return None if model is None else _module_classes(model)


_module_classes = lru_cache(maxsize=4)(ModuleClasses)


def _kind(module: torch.nn.Module) -> str:
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if isinstance(module, torch.nn.Linear):
        return "linear"
    return "other" if "norm" in type(module).__name__.lower() else ""
