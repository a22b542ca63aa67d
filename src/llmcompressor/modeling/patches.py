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
from torch.autograd.function import once_differentiable
from torch.nn import Module, Parameter, functional

from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.numerics.products import is_slow_dtype, wide_linear
from llmcompressor.transformers_internals import QUANTIZED_MARK

Forward = Callable[..., Any]


_ABSENT = object()


@contextmanager
def restored(objects: Iterable[Any], name: str) -> Iterator[None]:
    """Restore an attribute of objects after the body, also where an object had none of its own."""
    before = [(vars(one), vars(one).get(name, _ABSENT)) for one in objects]
    try:
        yield
    finally:
        for own, value in before:
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value


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
    overridden = dict.fromkeys(modules)
    with restored(overridden, "forward"):
        for module in overridden:
            forward = module.forward
            module.forward = stub(module, forward)
            # inspect.signature follows it
            module.forward.__wrapped__ = forward  # type: ignore[attr-defined]
        yield


# --------------------
# Temporary replacement of ``torch.nn.functional.linear`` where inputs and weights fit.

Fits = Callable[[Tensor, Tensor], bool]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Replacements(threading.local):
    """The active replacements of ``functional.linear`` in this thread, innermost last."""

    products: tuple[tuple[Fits, Product], ...] = ()


_here = _Replacements()
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
    with restored(module.modules(), "training"):
        module.eval()
        yield


@contextmanager
def quantization_disabled(module: Module) -> Iterator[None]:
    """Disable quantization of the modules in the body, and restore it afterwards."""
    quantized = [one for one in module.modules() if hasattr(one, "quantization_scheme")]
    with restored(quantized, "quantization_enabled"):
        for one in quantized:
            one.quantization_enabled = False  # type: ignore[assignment]
        yield


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
    with restored(_configs(model), QUANTIZED_MARK):
        mark_quantized(model)
        yield


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
    inputs = _transforms_at(TransformLocation.INPUT, module.children())
    return tuple((id(one.weight), bool(one.args.inverse)) for one in inputs)


@contextmanager
def rotations_suspended(model: Module) -> Iterator[None]:
    """Suspend input rotations in the body, so that modules are seen to share an input.

    Rotations that another library attached are not suspended.
    """
    rotations = list(_transforms_at(TransformLocation.INPUT, model.modules()))
    with restored(rotations, RESTS):
        for one in rotations:
            one.__dict__[RESTS] = True
        yield


def linear_with_rotations(linear: Module, given: Tensor) -> Tensor:
    """The output of a Linear, rotations included, computed without calling any hook."""
    inputs = list(_transforms_at(TransformLocation.INPUT, linear.children()))
    for one in reversed(inputs):  # the last one attached runs first
        given = given if one.__dict__.get(RESTS) else one(given)
    made: Tensor = linear.forward(given)
    for one in _transforms_at(TransformLocation.OUTPUT, linear.children()):
        made = made if one.__dict__.get(RESTS) else one(made)
    return made


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
    kinds = {name: type(module).__mro__ for name, module in named_modules(model)}
    bases = {name: {one.__name__ for one in kind} for name, kind in kinds.items()}
    names = [name for name, own in bases.items() if _LAYER in own]
    return names or ([type(model).__name__] if _WRAPPERS & bases[""] else [])


# --------------------
# Models that other libraries have quantized in memory, by the packages of modules and tensors.

ANEW = "Load the model anew, and give it before anything quantizes it."
"""What to do about them."""

_OF_MODULES = {
    "auto_gptq": "GPTQ (auto_gptq)",
    "auto_round_extension": "AutoRound (auto_round)",
    "awq": "AWQ (awq)",
    "gptqmodel": "GPTQ (gptqmodel)",
    "hqq": "HQQ (hqq)",
    "optimum.quanto": "quanto (optimum.quanto)",
    "quanto": "quanto",
    "torch.ao.nn.quantized": "PyTorch (torch.ao.quantization)",
}
_OF_TENSORS = {
    "bitsandbytes": "bitsandbytes",
    "optimum.quanto": "quanto (optimum.quanto)",
    "torchao.dtypes": "torchao",
    "torchao.quantization": "torchao",
    "torchao.prototype": "torchao",
}
"""Others of torchao hold plain weights, which are multiplied in float8."""


def quantized_by_hand(model: Module) -> tuple[str, str] | None:
    """Return the first module that another library has quantized, and its method; or ``None``.

    >>> quantized_by_hand(torch.nn.Linear(2, 2))
    """
    for name, module in named_modules(model):
        held: list[tuple[type, dict[str, str]]] = [(type(module), _OF_MODULES)]
        # bitsandbytes quantizes when a module comes to an accelerator: floats are plain
        own = [one for one in own_parameters(module) if type(one.data) is not Tensor]
        own += [one for one in own_parameters(module) if not one.is_floating_point()]
        held += [(kind, _OF_TENSORS) for one in own for kind in (type(one), type(one.data))]
        for kind, methods in held:
            for package, method in methods.items():
                if f"{kind.__module__}.".startswith(f"{package}."):
                    return name, method
    return None


# --------------------
# Float32 matrix products for half-precision Linears on CPUs where that is faster.

_DTYPES = (torch.bfloat16, torch.float16)
_FEWEST_TOKENS = 64
"""Below this, widening the weight takes longer than multiplying it."""


@contextlib.contextmanager
def float32_linears() -> Iterator[None]:
    """Make ``torch.nn.functional.linear`` multiply in float32 where that is faster.

    This applies to plain CPU tensors of many tokens, and to gradients of inputs where the weight is
    frozen; other calls are unchanged.
    """
    if not any(is_slow_dtype(dtype) for dtype in _DTYPES):
        yield
        return
    with replace_functional_linear(_runs_in_fp32, _frozen_linear):
        yield


def _runs_in_fp32(given: Tensor, weight: Tensor) -> bool:
    return (
        given.dtype == weight.dtype
        and given.device.type == weight.device.type == "cpu"
        and is_slow_dtype(given.dtype)
        and given.numel() >= _FEWEST_TOKENS * weight.shape[-1]
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and weight.requires_grad)
    )


def _frozen_linear(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`wide_linear`, whose result has a gradient where its input or bias has."""
    if not torch.is_grad_enabled():
        return wide_linear(given, weight, bias)
    result: Tensor = _FrozenLinear.apply(given, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _FrozenLinear(torch.autograd.Function):
    """:func:`wide_linear`, and its gradients, which are products in float32 too."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return wide_linear(given, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight_RC,) = ctx.saved_tensors
        of_input = wide_linear(gradient, weight_RC.T) if ctx.needs_input_grad[0] else None
        of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).float().sum(0).to(gradient.dtype)
        return of_input, None, of_bias
