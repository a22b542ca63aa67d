# SPDX-License-Identifier: Apache-2.0
"""The private names of transformers that the package uses, and no other module touches.

A release of transformers that renames one is followed here alone. ``tests/test_architecture.py``
finds private names of other libraries elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

# --------------------
# Classes of models


def whole_classes(model: Any) -> list[str]:
    """The classes of modules that a model keeps on one device: its decoder layers."""
    return sorted(getattr(model, "_no_split_modules", None) or ())


def keep_whole(kind: Any, names: Sequence[str]) -> None:
    """Set the classes of modules that a class of models keeps on one device."""
    kind._no_split_modules = list(names)


def build_from_config(kind: Any, config: Any, **arguments: Any) -> Any:
    """Return a model of a class or auto class, with the weights that it initializes."""
    make = getattr(kind, "from_config", None) or kind._from_config
    return make(config, **arguments)


def auto_mapping(auto: Any) -> Any:
    """Class of a configuration → what an auto class makes; ``None`` for other classes."""
    return getattr(auto, "_model_mapping", None)


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Pattern of names → dtype of what a model keeps in another dtype than ``dtype``."""
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def watch_loading(
    kind: Any,
    begun: Callable[[Any, tuple[Any, ...]], None],
    loaded: Callable[[Any], None],
) -> Any:
    """Return a subclass of a class of models whose ``from_pretrained`` can be watched.

    Args:
        kind: the class.
        begun: called with the model before its weights are loaded, and all else that the step is
            given.
        loaded: called with the loading report, before transformers judges it.
    """
    begin, end = kind._load_pretrained_model, kind._finalize_model_loading

    def load(model: Any, *rest: Any, **more: Any) -> Any:
        begun(model, (*rest, *more.values()))
        return begin(model, *rest, **more)

    def finalize(model: Any, load_config: Any, info: Any) -> Any:
        loaded(info)
        return end(model, load_config, info)

    steps = {
        "_load_pretrained_model": staticmethod(load),
        "_finalize_model_loading": staticmethod(finalize),
    }
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **steps})


# --------------------
# Names of tensors


def tied_keys(module: Any) -> Mapping[str, str]:
    """Tensor of a module → the one that it is tied to, as its class declares it.

    Classes written for transformers 4 list the tensors alone: those are tied to the embeddings.
    """
    found: Any = getattr(module, "_tied_weights_keys", None) or {}
    if isinstance(found, Mapping):
        return found
    embedding = None
    with suppress(AttributeError, NotImplementedError):
        embedding = module.get_input_embeddings()
    name = next((name for name, one in module.named_modules() if one is embedding), None)
    return {} if name is None else dict.fromkeys(found, f"{name}.weight")


def declare_ties(model: Any) -> None:
    """Let every class in a model declare its ties as transformers 5 reads them."""
    for module in model.modules():
        listed = getattr(module, "_tied_weights_keys", None)
        if listed is not None and not isinstance(listed, Mapping):
            mark_tied(module, tied_keys(module))


def mark_tied(module: Any, keys: Mapping[str, str]) -> None:
    """Declare tensors of a module as tied, so that transformers stores them once."""
    module._tied_weights_keys = dict(keys)


def not_saved(model: Any) -> Sequence[str]:
    """Names of tensors that a model leaves out when it is saved."""
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def unexpected_patterns(model: Any) -> Sequence[str]:
    """Patterns of tensors in files that a model passes over without a warning."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def conversions_of(model: Any) -> Sequence[Any] | None:
    """The conversions that transformers loaded a model with; ``None`` if it did not load it."""
    found: Sequence[Any] | None = getattr(model, "_weight_conversions", None)
    return found


def set_conversions(model: Any, conversions: Sequence[Any] | None) -> None:
    """Set the conversions that transformers reverts when it saves a model."""
    model._weight_conversions = conversions


def original_patterns(converter: Any) -> tuple[list[str], list[str]]:
    """Patterns of sources and of targets of a conversion, as its table has them."""
    return list(converter._original_source_patterns), list(converter._original_target_patterns)


# --------------------
# Configurations


def commit_of(config: Any) -> str | None:
    """The commit of the hub that a configuration was read from."""
    return getattr(config, "_commit_hash", None)


def name_config(config: Any, name: str) -> None:
    """Set the place that a configuration says it was read from."""
    config._name_or_path = name


def attention_of(config: Any) -> str:
    """The name of the attention function that a configuration selects."""
    name: str = config._attn_implementation
    return name


def attention_names(model: Module) -> list[tuple[Any, str]]:
    """Every configuration in a model, with the name of its attention function."""
    open_ones = [getattr(module, "config", None) for module in model.modules()]
    found: dict[int, Any] = {}
    while open_ones:
        config = open_ones.pop()
        if id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            continue
        found[id(config)] = config
        parts = getattr(config, "sub_configs", None) or {}
        open_ones += [getattr(config, part, None) for part in parts]
    return [(one, one._attn_implementation_internal) for one in found.values()]


def set_attention_name(config: Any, name: str) -> None:
    """Set the attention function of one configuration, without those of its parts."""
    config._attn_implementation_internal = name


def can_set_attention(model: Any) -> bool:
    """True if the attention function of a model can be replaced by a registered one."""
    return bool(getattr(model, "_can_set_attn_implementation", lambda: True)())


QUANTIZED_MARK = "_is_quantized"
"""Attribute of configurations: some forwards of transformers call Linears only where it is set."""


def supports_sdpa(model: Any) -> bool:
    """True if a model can run with torch's scaled dot product attention."""
    return bool(getattr(model, "_supports_sdpa", False))


# --------------------
# Modules


def has_gate_function(experts: Any) -> bool:
    """True if stacked experts, or their class, activate and gate with a function of their own."""
    return hasattr(experts, "_apply_gate")


def apply_gate(experts: Any, joined: Tensor) -> Tensor:
    """Activate and gate the output of the matrices gate and up, joined as the experts store them.

    Args:
        experts: stacked experts that have a gate function.
        joined: shape ``(tokens, 2 * width)``.

    Returns:
        Shape ``(tokens, width)``.
    """
    gated: Tensor = experts._apply_gate(joined)
    return gated


def has_peft_adapters(model: Any) -> bool:
    """True if transformers itself added adapters to a model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


# --------------------
# The trainer


STEPS = {
    "restore_position": "_init_training_state",
    "restore_weights": "_load_from_checkpoint",
    "restore_best_model": "_load_best_model",
    "choose_columns": "_set_signature_columns_if_needed",
    "write_checkpoint": "_save_checkpoint",
    "write_rng_state": "_save_rng_state",
    "checkpoints_folder": "_get_output_dir",
    "prepare_inputs": "_prepare_inputs",
}
"""Public name → the private method of a trainer that is a step of a training."""
Kind = TypeVar("Kind", bound=type)


def overrides_steps(kind: Kind) -> Kind:
    """Make the methods of a class that are called as in :data:`STEPS` override a trainer's."""
    for public, private in STEPS.items():
        if public in vars(kind):
            setattr(kind, private, vars(kind)[public])
    return kind


def trainer_step(trainer: Any, name: str) -> Callable[..., Any]:
    """A step of a trainer, or of ``super()`` in a class that overrides it."""
    step: Callable[..., Any] = getattr(trainer, STEPS[name])
    return step


def keep_columns(trainer: Any, names: Iterable[str]) -> None:
    """Make a trainer keep more columns of the data, after it has chosen its own."""
    kept = trainer._signature_columns
    trainer._signature_columns = [*kept, *(name for name in names if name not in kept)]


def loss_shifts_labels(trainer: Any) -> bool:
    """True if a trainer's loss compares each output with the label after it."""
    return bool(getattr(trainer, "_loss_shifts_labels", False))


def divides_by_steps_since_resume(trainer: Any) -> bool:
    """True if the mean loss is over the steps since a training was resumed.

    So it is since transformers 5.20; before, the sum is divided by all steps of the training.
    """
    return hasattr(trainer, "_initial_global_step")


def use_one_accelerator(args: Any) -> None:
    """Make a trainer use one of the accelerators that this process sees."""
    args._n_gpu = 1
