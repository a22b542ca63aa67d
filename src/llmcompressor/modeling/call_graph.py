# SPDX-License-Identifier: Apache-2.0
"""Call order of modules in a forward, and the modules that share an input tensor.

q, k and v share one input, and so do gate and up: their input statistics are the same, and they can
be solved together. Sharing is not guessed from names but observed in one small forward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.modeling.meta_weights import skip_zero_products, zero_weights
from llmcompressor.modeling.patches import eval_mode, restored
from llmcompressor.modeling.weights import text_config


@dataclass(frozen=True)
class CallOrder:
    """Modules in call order, grouped by shared input, as :func:`trace_calls` records them."""

    groups: tuple[tuple[Module, ...], ...]
    """Modules with one and the same input, in the order of the first call of each group."""
    calls: Mapping[Module, int]
    """How often each module was called."""

    @property
    def order(self) -> tuple[Module, ...]:
        """All modules that were called, by the first call of their group."""
        return tuple(module for group in self.groups for module in group)

    def split(self, key: Callable[[Module], object]) -> CallOrder:
        """The same calls, with each group split by ``key``."""
        groups: list[tuple[Module, ...]] = []
        for group in self.groups:
            parts: dict[object, list[Module]] = {}
            for module in group:
                parts.setdefault(key(module), []).append(module)
            groups += [tuple(part) for part in parts.values()]
        return CallOrder(tuple(groups), self.calls)

    def group_of(self, module: Module) -> tuple[Module, ...]:
        """The modules that share ``module``'s input, itself included."""
        return self._group_by_module.get(module, (module,))

    @cached_property
    def _group_by_module(self) -> Mapping[Module, tuple[Module, ...]]:
        return {module: group for group in reversed(self.groups) for module in group}


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The input of a Linear-like call: its first tensor argument."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    return None


def trace_calls(
    run: Callable[[], object],
    modules: Mapping[Module, str],
    region: Callable[[str], object] = lambda name: name.rpartition(".")[0],
    also_count: Iterable[Module] = (),
) -> CallOrder:
    """Run a forward and record which of ``modules`` share an input.

    Args:
        run: runs the model once, on something small.
        modules: module → name.
        region: modules are grouped only within one region (by default: one parent).
        also_count: further modules whose calls are counted; they are grouped with none.
    """
    groups: list[list[Module]] = []
    seen: list[tuple[weakref.ref[Tensor], int, object, list[Module]]] = []
    calls: dict[Module, int] = {}

    def record(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = calls.get(module, 0) + 1
        tensor = first_tensor(args, kwargs)
        if calls[module] > 1:
            _split_from_group(groups, module)
            return
        place = region(modules[module])
        if tensor is not None:
            for reference, version, other_place, group in reversed(seen):
                is_same = reference() is tensor and version == tensor_version(tensor)
                if is_same and other_place == place:
                    group.append(module)
                    return
        groups.append([module])
        if tensor is not None:
            seen.append((weakref.ref(tensor), tensor_version(tensor), place, groups[-1]))
            del seen[:-64]  # calls this far apart share no input in practice

    def count(module: Module, args: tuple[Any, ...]) -> None:
        calls[module] = calls.get(module, 0) + 1

    handles = [module.register_forward_pre_hook(count) for module in set(also_count) - set(modules)]
    handles += [module.register_forward_pre_hook(record, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return CallOrder(tuple(tuple(group) for group in groups if group), calls)


def tensor_version(tensor: Tensor) -> int:
    """Number of in-place writes to a tensor; 0 where torch does not count (inference mode)."""
    return 0 if tensor.is_inference() else tensor._version


def _split_from_group(groups: list[list[Module]], module: Module) -> None:
    """Move a module that is called again to a group of its own, as it has several inputs."""
    for position, group in enumerate(groups):
        if module in group and len(group) > 1:
            first = group[0] is module
            group.remove(module)
            groups.insert(position if first else position + 1, [module])
            return


# --------------------
# Data flow between modules: whose output is whose input, traced in one small forward.
#
# A tensor that is passed on, or a view of it, has the same storage, so a norm is found to feed the
# Linears that read it, whatever they are called. Casts are followed too; sums and products make
# new tensors and end the trace. No weight is read; those that are not loaded count as zero.

_TOKENS = 8
_CASTS = tuple(
    getattr(Tensor, name)
    for name in ("to", "float", "half", "bfloat16", "double", "type", "type_as")
)

FORWARD_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""What a forward raises that was not made for what it got."""


@dataclass
class DataFlow:
    """The data flow that a forward showed.

    Attributes:
        feeder: module → the leaf whose output, a view or a cast of it, was its first input.
        called: every module that was called, in order of its first call.
    """

    feeder: dict[Module, Module] = field(default_factory=dict)
    called: dict[Module, None] = field(default_factory=dict)


def probe_inputs(model: Module) -> dict[str, Any]:
    """Model inputs for a probe: one row of token ids."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    ids = _token_ids(model).to(model_device(model))
    return {"input_ids": ids, **({"use_cache": False} if takes_cache else {})}


def token_id_inputs(model: Module) -> list[dict[str, Any]]:
    """Model inputs of one row of token ids; empty for models that need other inputs."""
    config = getattr(model, "config", None)
    if config is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return []
    ids = _token_ids(model)
    more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    return [{"input_ids": ids, **more}]


def _token_ids(model: Module) -> Tensor:
    text = text_config(getattr(model, "config", None))
    vocabulary = int(getattr(text, "vocab_size", None) or _TOKENS)
    return (torch.arange(_TOKENS) * 7 + 3).remainder(vocabulary).unsqueeze(0)


def trace_flow(model: Module) -> DataFlow:
    """Run ``model`` on a few tokens and trace which leaf module feeds which module.

    Raises:
        TargetError: the model does not run on token ids alone.
    """
    trail = _FlowTracer()
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(trail.before, with_kwargs=True))
        if not module._modules:
            handles.append(module.register_forward_hook(trail.after))
    try:
        with (
            torch.no_grad(),
            eval_mode(model),
            zero_weights(model),
            skip_zero_products(),
            trail,
        ):
            model(**probe_inputs(model))
    except (CompressorError, torch.OutOfMemoryError):  # by loading weights, or memory
        raise
    except FORWARD_FAILURES as error:
        raise TargetError(
            f"{type(model).__name__} does not run on token ids alone ({error}), so that it cannot "
            "be seen which norm feeds which Linear.",
            "Rotations need a language model that takes input_ids.",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return trail.flow


class _FlowTracer(TorchFunctionMode):
    """Follows the outputs of leaf modules by their storage, through views and casts.

    Attributes:
        flow: the traced data flow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flow = DataFlow()
        self._source: dict[int, Module] = {}
        self._alive: list[Tensor] = []  # or a later tensor could reuse the same storage

    def before(self, module: Module, args: Any, kwargs: Any) -> None:
        """Record the call of a module and the leaf that feeds it."""
        self.flow.called.setdefault(module)
        feeder = self._feeder_of(first_tensor(args, kwargs))
        if feeder is not None:
            self.flow.feeder.setdefault(module, feeder)

    def after(self, module: Module, _: Any, output: Any) -> None:
        """Follow the output of a leaf."""
        if isinstance(output, Tensor):
            self._follow(output, module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function; the cast of a followed tensor is followed."""
        result = func(*args, **(kwargs or {}))
        feeder = self._feeder_of(args[0]) if func in _CASTS else None
        if feeder is not None and isinstance(result, Tensor):
            self._follow(result, feeder)
        return result

    def _feeder_of(self, tensor: Tensor | None) -> Module | None:
        return None if tensor is None else self._source.get(tensor.untyped_storage().data_ptr())

    def _follow(self, tensor: Tensor, feeder: Module) -> None:
        self._alive.append(tensor)
        self._source.setdefault(tensor.untyped_storage().data_ptr(), feeder)


# --------------------
# Copied arguments for runs of a module outside of the model's own forward.
#
# A forward may write to its arguments: keys and values to a cache, or to a dict that later blocks
# read. A module that is run twice on the same arguments would find its own writes.


def copy_arguments(value: Any, of_tensor: Callable[[Tensor], Tensor] = lambda one: one) -> Any:
    """Copy arguments, so that a forward can write to them without side effects.

    Containers and stateful objects are copied, each once. Tensors are shared, except those that
    such an object holds, which it may change in place.

    Args:
        value: what a module is called with.
        of_tensor: what to put in place of each tensor, at any depth.
    """
    return _copy_argument(value, of_tensor, {}, is_held=False)


def _copy_argument(
    value: Any, of_tensor: Callable[[Tensor], Tensor], made: dict[int, Any], *, is_held: bool
) -> Any:
    """Copy one value; ``made`` has the copies by identity, ``is_held`` if an object holds it."""
    if isinstance(value, Tensor):
        return of_tensor(value.clone() if is_held else value)
    if id(value) in made:
        return made[id(value)]
    copied = functools.partial(_copy_argument, of_tensor=of_tensor, made=made)
    if type(value) in (tuple, list, set):
        made[id(value)] = type(value)(copied(item, is_held=is_held) for item in value)
        return made[id(value)]
    is_mapping = isinstance(value, MutableMapping)
    # a mapping, or another object with attributes that a forward may set: a cache, say
    is_stateful = is_mapping or (
        hasattr(value, "__dict__")
        and not isinstance(value, Module | type | Enum)
        and not callable(value)
    )
    if not is_stateful:
        return value
    try:
        made[id(value)] = twin = copy.copy(value)
    except TypeError:  # what cannot be copied: a lock, a handle
        return value
    items, target = (value, twin) if is_mapping else (vars(value), vars(twin))
    for key, item in items.items():
        target[key] = copied(item, is_held=is_held or not is_mapping)
    return twin


# --------------------
# Model inputs: the entries of a batch that a forward takes, on its device and in its dtype.


def model_device(model: Module) -> torch.device:
    """The device for the model's inputs: that of its first loaded parameter."""
    parameter = next((one for one in model.parameters() if not one.is_meta), None)
    return torch.device("cpu") if parameter is None else parameter.device


def model_dtype(model: Module) -> torch.dtype:
    """The dtype of the model's first floating parameter; float32 if it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def model_inputs(model: Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that ``model.forward`` takes, on the model's device.

    Labels are left out, as no loss is needed, unless the model derives its decoder inputs from
    them.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    device = model_device(model)
    dtype = model_dtype(model)
    inputs = {}
    for key, value in batch.items():
        if key not in parameters and not (takes_all and key not in ("loss_mask", "text", "prompt")):
            continue
        inputs[key] = value
        if isinstance(value, Tensor):  # floating: images, audio
            inputs[key] = value.to(device, dtype if value.is_floating_point() else None)
    if "decoder_input_ids" in inputs or "decoder_input_ids" not in parameters:
        inputs.pop("labels", None)
    return inputs


def main_input_names(model: Module) -> frozenset[str]:
    """Names of the model's main inputs, as its class declares them."""
    named = getattr(model, "main_input_name", None) or ()
    return frozenset({named} if isinstance(named, str) else named)


@contextlib.contextmanager
def without_cache(model: Module) -> Iterator[None]:
    """Disable the generation cache of a model, and of models within it, in the body."""
    configs: Iterator[Any] = (getattr(each, "config", None) for each in model.modules())
    every = {id(one): one for one in configs}
    caching = [one for one in every.values() if isinstance(getattr(one, "use_cache", None), bool)]
    with restored(caching, "use_cache"):
        for config in caching:
            config.use_cache = False
        yield
