# SPDX-License-Identifier: Apache-2.0
"""Data flow between modules: whose output is whose input, traced in one small forward.

A tensor that is passed on, or a view of it, has the same storage, so a norm is found to feed the
Linears that read it, whatever they are called. Casts are followed too; sums and products make new
tensors and end the trace. No weight is read; those that are not loaded count as zero.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hollow import hollow_weights
from llmcompressor.modeling.settings import text_config

__all__ = ["FORWARD_FAILURES", "Flow", "probe_inputs", "trace_flow"]

_TOKENS = 8
_CASTS = (
    Tensor.to,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.double,
    Tensor.type,
    Tensor.type_as,
)

FORWARD_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a forward raises that was not made for what it got."""


@dataclass
class Flow:
    """The data flow that a forward showed.

    Attributes:
        feeder: module → the leaf whose output, a view or a cast of it, was its first input.
        called: every module that was called, in order of its first call.
    """

    feeder: dict[Module, Module] = field(default_factory=dict)
    called: dict[Module, None] = field(default_factory=dict)


def probe_inputs(model: Module) -> dict[str, Any]:
    """Model inputs for a probe: one row of token ids."""
    config: Any = getattr(model, "config", None)
    text = text_config(config)
    vocabulary = int(getattr(text, "vocab_size", None) or _TOKENS)
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    ids = (torch.arange(_TOKENS, device=device) * 7 + 3).remainder(vocabulary).unsqueeze(0)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return {"input_ids": ids, **({"use_cache": False} if takes_cache else {})}


def trace_flow(model: Module) -> Flow:
    """Run ``model`` on a few tokens and trace which leaf module feeds which module.

    Raises:
        TargetError: the model does not run on token ids alone.
    """
    trail = _Trail()
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(trail.before, with_kwargs=True))
        if not module._modules:
            handles.append(module.register_forward_hook(trail.after))
    was_training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad(), hollow_weights(model), trail:
            model.eval()
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
        for module in was_training:
            module.training = True
    return trail.flow


class _Trail(TorchFunctionMode):
    """Follows the outputs of leaf modules by their storage, through views and casts.

    Attributes:
        flow: the traced data flow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flow = Flow()
        self._source: dict[int, Module] = {}
        self._alive: list[Tensor] = []  # or a later tensor could reuse the same storage

    def before(self, module: Module, args: Any, kwargs: Any) -> None:
        """Record the call of a module and the leaf that feeds it."""
        tensor = first_tensor(args, kwargs)
        self.flow.called.setdefault(module)
        if tensor is not None and (feeder := self._source.get(_storage(tensor))) is not None:
            self.flow.feeder.setdefault(module, feeder)

    def after(self, module: Module, _: Any, output: Any) -> None:
        """Follow the output of a leaf."""
        if isinstance(output, Tensor):
            self._follow(output, module)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function; the cast of a followed tensor is followed."""
        result = _nothing(*args) if func is linear and not kwargs else None
        if result is None:
            result = func(*args, **(kwargs or {}))
        if func in _CASTS and isinstance(result, Tensor):
            feeder = self._source.get(_storage(args[0]))
            if feeder is not None:
                self._follow(result, feeder)
        return result

    def _follow(self, tensor: Tensor, feeder: Module) -> None:
        self._alive.append(tensor)
        self._source.setdefault(_storage(tensor), feeder)


def _nothing(input_XC: Any, weight_RC: Any = None, bias_R: Any = None) -> Tensor | None:
    """The product with a weight that is not loaded: zeros, without multiplying.

    ``None`` if the weight is another one.
    """
    if not isinstance(weight_RC, Tensor) or weight_RC.ndim != 2 or any(weight_RC.stride()):
        return None
    fits = input_XC.dtype == weight_RC.dtype and input_XC.shape[-1] == weight_RC.shape[1]
    if not fits or weight_RC[0, 0] != 0 or (bias_R is not None and any(bias_R.stride())):
        return None
    made: Tensor = input_XC.new_zeros(*input_XC.shape[:-1], weight_RC.shape[0])
    return made


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
