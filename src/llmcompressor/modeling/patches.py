# SPDX-License-Identifier: Apache-2.0
"""Forward overrides: forwards of modules that are replaced temporarily."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.transform import TransformBase, TransformLocation
from torch import Tensor
from torch.nn import Module, Parameter, functional

from llmcompressor.modeling.names import named_modules
from llmcompressor.transformers_internals import QUANTIZED_MARK

__all__ = [
    "MERGE",
    "RESTS",
    "eval_mode",
    "exclude_from_compile",
    "forward_overridden",
    "input_rotation_key",
    "linear_with_rotations",
    "mark_quantized",
    "marked_quantized",
    "modules_with_adapters",
    "quantization_disabled",
    "replace_functional_linear",
    "reset_compiled",
    "restore_forward",
    "rotations_suspended",
]

Forward = Callable[..., Any]


def restore_forward(module: Module, own: Forward | None) -> None:
    """Restore a module's forward.

    Args:
        module: the module whose forward was replaced.
        own: the forward that the object had of its own; ``None`` if it had that of its class.
    """
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.forward = own


@contextlib.contextmanager
def forward_overridden(
    modules: Iterable[Module], stub: Callable[[Module, Forward], Forward]
) -> Iterator[None]:
    """Override the forwards of modules while the body runs.

    Args:
        modules: the modules to override.
        stub: makes the override, given the module and its own forward.
    """
    own = {module: module.__dict__.get("forward") for module in modules}
    try:
        for module in own:
            forward = module.forward
            module.forward = stub(module, forward)
            # inspect.signature follows it
            module.forward.__wrapped__ = forward  # type: ignore[attr-defined]
        yield
    finally:
        for module, before in own.items():
            restore_forward(module, before)


# --------------------
# Temporary replacement of ``torch.nn.functional.linear`` where inputs and weights fit.

Fits = Callable[[Tensor, Tensor], bool]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _ActiveReplacements(threading.local):
    """The active replacements of ``functional.linear`` in this thread, innermost last."""

    def __init__(self) -> None:
        self.products: tuple[tuple[Fits, Product], ...] = ()


_here = _ActiveReplacements()
_lock = threading.Lock()
_plain = functional.linear
_users = 0


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if type(input) is Tensor and type(weight) in (Tensor, Parameter):
        for fits, product in reversed(_here.products):
            if fits(input, weight):
                return product(input, weight, bias)
    return _plain(input, weight, bias)


@contextlib.contextmanager
def replace_functional_linear(fits: Fits, product: Product) -> Iterator[None]:
    """Make ``functional.linear`` call ``product`` in the body, in this thread, where ``fits``.

    Args:
        fits: returns True for an input and a weight, both plain tensors, that it is to handle.
        product: computes the result from an input, a weight, and a bias or ``None``.
    """
    before = _here.products
    _patch_functional_linear(1)
    _here.products = (*before, (fits, product))
    try:
        yield
    finally:
        _here.products = before
        _patch_functional_linear(-1)


def _patch_functional_linear(change: int) -> None:
    """Patch the function for its first user, and restore it after the last one."""
    global _plain, _users  # noqa: PLW0603 - the function is one for the whole process
    with _lock:
        if not _users:
            _plain = functional.linear
        _users += change
        setattr(functional, "linear", _linear if _users else _plain)  # noqa: B010 - torch declares it a function


# --------------------
# Temporary modes of a model: evaluation mode, and quantization disabled.


@contextmanager
def eval_mode(module: Module) -> Iterator[None]:
    """Put a module in eval mode in the body, and restore each submodule's mode afterwards."""
    before = [(one, one.training) for one in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for one, training in before:
            one.training = training


@contextmanager
def quantization_disabled(module: Module) -> Iterator[None]:
    """Disable quantization of the modules in the body, and restore it afterwards."""
    quantized = [one for one in module.modules() if hasattr(one, "quantization_scheme")]
    before = [vars(one).get("quantization_enabled") for one in quantized]
    try:
        for one in quantized:
            one.quantization_enabled = False  # type: ignore[assignment]
        yield
    finally:
        for one, enabled in zip(quantized, before, strict=True):
            if enabled is None:
                vars(one).pop("quantization_enabled", None)
            else:
                one.quantization_enabled = enabled


# --------------------
# transformers' flag for models with quantized weights, which some forwards check.
#
# Mamba's blocks multiply by the weight of ``dt_proj`` directly, unless the model is quantized:
# then they call the Linear. A quantized checkpoint is loaded that way, so it is calibrated that
# way, and the model in memory computes what the loaded one will.


def mark_quantized(model: Module) -> None:
    """Mark each configuration of ``model`` as quantized, as transformers does."""
    for config in _configs(model):
        setattr(config, QUANTIZED_MARK, True)


@contextlib.contextmanager
def marked_quantized(model: Module) -> Iterator[None]:
    """Apply :func:`mark_quantized` while the body runs."""
    unmarked = [config for config in _configs(model) if not hasattr(config, QUANTIZED_MARK)]
    mark_quantized(model)
    try:
        yield
    finally:
        for config in unmarked:
            vars(config).pop(QUANTIZED_MARK, None)


def _configs(model: Module) -> list[Any]:
    found = {id(one): one for one in (getattr(each, "config", None) for each in model.modules())}
    return [one for one in found.values() if hasattr(one, "to_diff_dict")]


# --------------------
# Input and output rotations of modules: transforms of compressed-tensors in a forward.

RESTS = "rotation_rests"
"""Attribute of a rotation: true while it gives back what it is given."""


def input_rotation_key(module: Module) -> tuple[object, ...]:
    """Return a key of a module's input rotations, equal for modules that rotate an input alike.

    Empty where nothing rotates the input. Rotations count even while they are suspended, or have no
    values yet.
    """
    return tuple(
        (id(one.weight), bool(one.args.inverse)) for one in _input_transforms(module.children())
    )


@contextmanager
def rotations_suspended(model: Module) -> Iterator[None]:
    """Suspend input rotations in the body, so that modules are seen to share an input.

    Rotations that another library attached are not suspended.
    """
    awake = [one for one in _input_transforms(model.modules()) if not one.__dict__.get(RESTS)]
    for one in awake:
        one.__dict__[RESTS] = True
    try:
        yield
    finally:
        for one in awake:
            one.__dict__[RESTS] = False


def linear_with_rotations(linear: Module, given: Tensor) -> Tensor:
    """The output of a Linear, rotations included, computed without calling any hook."""
    for one in reversed(
        list(_input_transforms(linear.children()))
    ):  # the last one attached runs first
        given = _rotate(one, given)
    made: Tensor = linear.forward(given)
    for one in _transforms_at(TransformLocation.OUTPUT, linear.children()):
        made = _rotate(one, made)
    return made


def _rotate(rotation: TransformBase, values: Tensor) -> Tensor:
    turned: Tensor = values if rotation.__dict__.get(RESTS) else rotation(values)
    return turned


def _input_transforms(modules: Iterator[Module]) -> Iterator[TransformBase]:
    return _transforms_at(TransformLocation.INPUT, modules)


def _transforms_at(
    location: TransformLocation, modules: Iterator[Module]
) -> Iterator[TransformBase]:
    for one in modules:
        if isinstance(one, TransformBase) and one.args.location == location:
            yield one


# --------------------
# Hooks on compiled models, which do not notice hooks that are added or removed.


def reset_compiled() -> None:
    """Make ``torch.compile`` recompile everything at its next call.

    A compiled forward keeps the hooks that its modules had when it was traced, and torch leaves out
    the guards that would detect others (``skip_nnmodule_hook_guards``). So this is called whenever
    hooks are added or removed during training. It costs nothing where nothing is compiled.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def exclude_from_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude ``function`` from compilation: compiled forwards call it as plain Python.

    For hooks that collect statistics. Traced, they would be recompiled for each module, because
    their state differs, until torch gives up on compiling them.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    kept: Callable[..., Any] = torch._dynamo.disable(function)  # type: ignore[no-untyped-call]
    return kept


# --------------------
# PEFT adapters: detection of models whose weights have adapters attached.
#
# A module with an adapter exposes the weight of its base as its own, and adds the adapter's
# product to the output. An adapter no longer fits once its base is compressed. Adapters are
# detected by the names of PEFT's classes, so PEFT need not be installed.

MERGE = "Merge them first: model = model.merge_and_unload(); model.unload() takes them off."
"""What to do about adapters."""

_LAYER = "BaseTunerLayer"
_WRAPPERS = frozenset({"PeftModel", "PeftMixedModel"})


def modules_with_adapters(model: Module) -> list[str]:
    """Names of the modules with adapters; if there are none, the name of PEFT's wrapper class.

    >>> modules_with_adapters(Module())
    []
    """
    names = [name for name, module in named_modules(model) if _LAYER in _class_names(module)]
    return names or ([type(model).__name__] if _WRAPPERS & _class_names(model) else [])


def _class_names(module: Module) -> set[str]:
    return {one.__name__ for one in type(module).__mro__}
