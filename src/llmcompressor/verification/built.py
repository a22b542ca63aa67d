# SPDX-License-Identifier: Apache-2.0
"""What transformers would find missing in a checkpoint, or of another shape, found without data.

The class that ``config.json`` names is built on the meta device and loads the checkpoint's headers:
each tensor stands there with its shape, and each quantized module with the shape of its weight. So
everything that transformers does with names (renaming them, stacking experts, tying embeddings)
is done by itself, and what it misses it would begin with at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcompressor.verification.config_changes import configuration, quiet_transformers
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.families import class_names
from llmcompressor.verification.layout import PLAIN_FLOATS

__all__ = ["Built", "build", "is_of_another_type"]

_FROM_FILES = frozenset(
    {"quantization_config", "compression_config", "architectures", "dtype", "torch_dtype"}
)
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
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    missing: tuple[str, ...]
    wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    not_floats: tuple[str, ...]

    def has_module(self, path: str) -> bool:
        """Whether the class has a module, or a tensor, of this path."""
        return any(name == path or name.startswith(f"{path}.") for name in self.shapes)


def _model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a configuration names; ``None`` if there is none."""
    import transformers  # noqa: PLC0415  # loads much

    found = getattr(transformers, next(iter(class_names(config)), ""), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else None


def is_of_another_type(config: Mapping[str, Any]) -> bool:
    """Whether the class that a configuration names takes configurations of another model type."""
    kind, settings = _model_class(config), configuration(config, _FROM_FILES)
    if kind is None or settings is None or not isinstance(kind.config_class, type):
        return False
    parts = (getattr(settings, name, None) for name in settings.sub_configs)
    # the language model of a larger one may be loaded alone
    return not any(isinstance(each, kind.config_class) for each in (settings, *parts))


def build(config: Mapping[str, Any], headers: Mapping[str, TensorInfo]) -> Built | None:
    """Build the class that a configuration names, and let it load headers.

    Args:
        config: the content of ``config.json``.
        headers: tensors, with a plain weight for each quantized module.

    Returns:
        ``None`` if transformers has no such class, or cannot build it of this configuration.
    """
    kind, settings = _model_class(config), configuration(config, _FROM_FILES)
    if kind is None or settings is None or not isinstance(settings, kind.config_class or ()):
        return None
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
    )


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
    from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    every = get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, WeightRenaming)]
    converters = [one for one in every if isinstance(one, WeightConverter)]
    for name in strange:
        target, _ = rename_source_key(
            name, renamings, converters, model.base_model_prefix, dict(own)
        )
        tensor = own.get(str(target), own.get(name))
        if tensor is not None and tensor.is_floating_point():
            yield name
