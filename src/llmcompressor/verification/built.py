# SPDX-License-Identifier: Apache-2.0
"""What transformers would find missing in a checkpoint, or of another shape, found without data.

The class that ``config.json`` names is built on the meta device and loads the checkpoint's headers:
each tensor stands there with its shape, and each quantized module with the shape of its weight. So
everything that transformers does with names (renaming them, stacking experts, tying embeddings)
is done by itself, and what it misses it would begin with at random.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcompressor.verification.config_changes import configuration, quiet_transformers, read_by
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.families import class_names
from llmcompressor.verification.layout import PLAIN_FLOATS

__all__ = [
    "Built",
    "bare_model",
    "build",
    "build_others",
    "class_of_type",
    "every_name",
    "is_known_type",
    "is_of_another_type",
    "refusal",
    "renamed_names",
    "stored_names",
    "text_class",
]

_FROM_FILES = frozenset(
    {"quantization_config", "compression_config", "architectures", "dtype", "torch_dtype"}
)
_MOST_LAYERS = 4096
"""Building takes time for each: of more than this a configuration is damaged."""
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

    @property
    def fits(self) -> bool:
        """Whether every tensor of it was found, in its shape."""
        return not self.missing and not self.wrong

    def has_module(self, path: str) -> bool:
        """Whether the class has a module, or a tensor, of this path."""
        return any(name == path or name.startswith(f"{path}.") for name in self.shapes)


def _model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a configuration names; ``None`` if there is none."""
    import transformers  # noqa: PLC0415  # loads much

    found = getattr(transformers, next(iter(class_names(config)), ""), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def is_known_type(config: Mapping[str, Any]) -> bool:
    """Whether transformers has the model type of a configuration, or it brings code of its own."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much

    return bool(config.get("auto_map")) or config.get("model_type") in CONFIG_MAPPING


def is_of_another_type(config: Mapping[str, Any]) -> bool:
    """Whether the class that a configuration names takes configurations of another model type."""
    kind, settings = _model_class(config), configuration(config, _FROM_FILES)
    if kind is None or settings is None or not isinstance(kind.config_class, type):
        return False
    parts = (getattr(settings, name, None) for name in settings.sub_configs)
    # the language model of a larger one may be loaded alone
    return not any(_takes(kind, each) for each in (settings, *parts))


def _takes(kind: Any, settings: Any) -> bool:
    """Whether a class is one of those that transformers makes of a configuration.

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


def _class_and_settings(config: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """The class of transformers that a configuration names, and the configuration read by it.

    ``None`` if there is none, or the two do not belong together.
    """
    kind, settings = _model_class(config), configuration(config, _FROM_FILES)
    if kind is None or settings is None or not _takes(kind, settings):
        return None
    return kind, settings


def build(config: Mapping[str, Any], headers: Mapping[str, TensorInfo]) -> Built | None:
    """Build the class that a configuration names, and let it load headers.

    Args:
        config: the content of ``config.json``.
        headers: tensors, with a plain weight for each quantized module.

    Returns:
        ``None`` if transformers has no such class, or cannot build it of this configuration.
    """
    found = _class_and_settings(config)
    return None if found is None else _load(*found, headers)


def build_others(
    config: Mapping[str, Any], headers: Mapping[str, TensorInfo]
) -> Iterator[Built | None]:
    """What readers take where class and model type of a configuration do not belong together.

    The class that is named, with a configuration of its own, and the class that transformers has
    for the model type. ``None`` for each that cannot be built.
    """
    from transformers import AutoModel, AutoModelForCausalLM  # noqa: PLC0415  # loads much

    kind, settings = _model_class(config), configuration(config, _FROM_FILES)
    if kind is not None and isinstance(kind.config_class, type):
        try:
            own = read_by(kind.config_class, config, {*_FROM_FILES, "model_type"})
        except Exception:  # what a class refuses may be of any kind
            yield None
        else:
            yield _load(kind, own, headers)
    for auto in (AutoModelForCausalLM, AutoModel):
        mapping: Any = auto._model_mapping
        if type(settings) in mapping:
            yield _load(mapping[type(settings)], settings, headers)
            return


def class_of_type(config: Mapping[str, Any]) -> str:
    """The name of the class that transformers has for a model type; empty if there is none."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: PLC0415

    if _most_layers(config) > _MOST_LAYERS:
        return ""
    settings = configuration(config, _FROM_FILES)
    for auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        mapping: Any = auto._model_mapping
        if type(settings) in mapping:
            return str(mapping[type(settings)].__name__)
    return ""


def text_class(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``config.json`` of the class that ``AutoModelForCausalLM`` makes of a larger model.

    ``None`` where that is the class which the configuration names, or one that takes it whole.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # loads much

    settings, text = configuration(config, _FROM_FILES), config.get("text_config")
    mapping: Any = AutoModelForCausalLM._model_mapping
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
    found = None if _most_layers(config) > _MOST_LAYERS else _class_and_settings(config)
    if found is None:
        return None
    kind, settings = found
    try:
        with quiet_transformers(), torch.device("meta"):
            return kind(settings)
    except Exception:  # a class of any kind, and what it refuses other rules speak of
        return None


def _most_layers(config: Mapping[str, Any]) -> int:
    """The largest number of layers that is given at any level."""
    found = 0
    for key, value in config.items():
        if isinstance(value, Mapping):
            found = max(found, _most_layers(value))
        elif type(value) is int and "layer" in key:
            found = max(found, value)
    return found


def refusal(config: Mapping[str, Any]) -> str:
    """Why transformers cannot make a model of a configuration; empty if it can.

    Neither what code of the checkpoint's own may read, nor what another package is needed for, is
    a reason.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  # loads much

    name = config.get("model_type")
    if config.get("auto_map") or not isinstance(name, str) or name not in CONFIG_MAPPING:
        return ""
    try:
        settings = read_by(CONFIG_MAPPING[name], config, _FROM_FILES)
        kind = _model_class(config)
        if kind is not None and _takes(kind, settings):
            with quiet_transformers(), torch.device("meta"):
                kind(settings)
    except ImportError:
        return ""
    except Exception as error:  # a class of any kind
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def _load(kind: Any, settings: Any, headers: Mapping[str, TensorInfo]) -> Built | None:
    from transformers import PreTrainedModel  # noqa: PLC0415  # loads much

    state = {
        name: torch.empty(info.shape, dtype=torch.bfloat16, device="meta")
        for name, info in headers.items()
    }
    try:
        with quiet_transformers():
            # a class's own way of loading may look for more than weights, and in other places
            load: Any = PreTrainedModel.from_pretrained
            model, info = load.__func__(
                kind,
                None,
                config=settings,
                state_dict=state,
                dtype=torch.bfloat16,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    except Exception:  # a class of any kind, and what it cannot load other rules speak of
        return None
    own = model.state_dict()
    apart = {match[0] for match in map(_LAYER.match, _experts(info["unexpected_keys"])) if match}
    return Built(
        kind.__name__,
        {name: tuple(tensor.shape) for name, tensor in own.items()},
        tuple(sorted(name for name in info["missing_keys"] if not _is_apart(name, own, apart))),
        {name: (tuple(ours), tuple(theirs)) for name, ours, theirs in info["mismatched_keys"]},
        tuple(_not_floats(model, own, headers)),
        tuple(sorted(name for name in info["unexpected_keys"] if not _EXPERT.match(name))),
        _tied_head(model, {*map(stored_names(model), headers), *info["missing_keys"]}),
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
    """Whether a norm whose parameters are zero gives zeros; it is tried with a row of its width."""
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


def _experts(names: Any) -> Iterator[str]:
    """Experts that are stored one by one, and that the class does not take so (T6)."""
    return (name for name in names if _EXPERT.match(name))


def _is_apart(name: str, own: Mapping[str, Tensor], layers: set[str]) -> bool:
    """Whether a tensor is a stack, in a layer whose experts are stored one by one."""
    layer, tensor = _LAYER.match(name), own.get(name)
    if layer is None or layer[0] not in layers:
        return False
    return "experts" in name or (tensor is not None and tensor.ndim == 3)


def _not_floats(
    model: Any, own: Mapping[str, Tensor], headers: Mapping[str, TensorInfo]
) -> Iterator[str]:
    """Integers, and floats of 8 bits, where the class has floats."""
    strange = [name for name, info in headers.items() if info.dtype not in PLAIN_FLOATS]
    if not strange:
        return
    stored = stored_names(model)
    for name in strange:
        tensor = own.get(stored(name), own.get(name))
        if tensor is not None and tensor.is_floating_point():
            yield name


def stored_names(model: Any) -> Callable[[str], str]:
    """Name of a tensor in the file → its name in the model, as transformers renames it.

    Of several that a tensor is split into it is the first (:func:`every_name`).
    """
    names = every_name(model)
    return lambda name: names(name)[0]


def renamed_names(model: Any, others: Iterable[str] = ()) -> Callable[[str], str]:
    """As :func:`stored_names`, of tensors that are loaded as they are: none is split or joined.

    Args:
        model: without data.
        others: names of tensors that it will have beside its own.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightRenaming,
        rename_source_key,
    )

    every: list[Any] = get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    # transformers looks whether there is anything under a name
    own, prefix = dict.fromkeys([*model.state_dict(), *others], True), model.base_model_prefix
    return lambda name: str(rename_source_key(name, renamings, [], prefix, own)[0])


def every_name(model: Any) -> Callable[[str], tuple[str, ...]]:
    """Name of a tensor in the file → those of all that it becomes, or becomes a part of."""
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    every: list[Any] = get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    converters = [one for one in every if isinstance(one, WeightConverter)]
    parts = {pattern: _parts(one) for one in converters for pattern in one.source_patterns}
    own = dict(model.state_dict())
    prefix = model.base_model_prefix

    def renamed(name: str, converters: list[Any]) -> tuple[str, str | None]:
        found, pattern = rename_source_key(name, renamings, converters, prefix, own)
        return str(found), pattern

    def names(name: str) -> tuple[str, ...]:
        first, pattern = renamed(name, converters)
        return (first, *(renamed(name, [part])[0] for part in parts.get(pattern or "", ())))

    return names


def _parts(converter: Any) -> list[Any]:
    """What renames a tensor to the others of what it is split into."""
    from transformers.core_model_loading import WeightTransform  # noqa: PLC0415

    found = []
    for target in converter._original_target_patterns[1:]:
        part: Any = WeightTransform([*converter._original_source_patterns], [target])
        part.scope_prefix = converter.scope_prefix
        part.base_model_prefix = converter.base_model_prefix
        found.append(part)
    return found
