# SPDX-License-Identifier: Apache-2.0
"""Which modules of a class transformers quantizes keys and values of, where a cache is quantized.

compressed-tensors, which transformers asks, goes by names and arguments. Towers that see or hear
may have attention of such a form too: what stands for the cache is given to it like to any other.
And where transformers calls the cache by a name that the installed compressed-tensors does not
know, no attention has that form, and scales in the file are unexpected, no error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from compressed_tensors.quantization import is_cached_attention_module
from torch.nn import Module

from llmcompressor.verification.built import stored_names
from llmcompressor.verification.class_model import class_model

__all__ = ["passed_over", "without_scales"]

_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")
_OF_STATES = (".q_scale", ".k_scale", ".v_scale")


def without_scales(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Attention of the class whose keys and values are rounded with scales that no file holds.

    Args:
        config: the content of ``config.json``.
        names: of the tensors in the file.

    Returns:
        Paths in the class; none where it cannot be built.
    """
    stored, modules = _of_class(config)
    held = {stored(name) for name in names if name.endswith((".k_scale", ".v_scale"))}
    return [
        path
        for path, module in modules
        if is_cached_attention_module(module)
        and _updates(module)
        and not {f"{path}.k_scale", f"{path}.v_scale"} <= held
    ]


def passed_over(
    config: Mapping[str, Any], names: Iterable[str], *, stored_scales: bool = True
) -> list[str]:
    """Attention of the class whose states are to be rounded, and are not when it is read.

    Args:
        config: the content of ``config.json``.
        names: of the tensors in the file.
        stored_scales: what is to be rounded has scales in the file; else all that has a cache.
            Attention that reads the cache of another may have scales too, and makes no states.

    Returns:
        Paths in the class; none where it cannot be built.
    """
    stored, modules = _of_class(config)
    scaled = {stored(name).rpartition(".")[0] for name in names if name.endswith(_OF_STATES)}
    return [
        path
        for path, module in modules
        if (path in scaled and _makes_states(module) if stored_scales else _has_cache(module))
        and not is_cached_attention_module(module)
    ]


def _of_class(config: Mapping[str, Any]) -> tuple[Callable[[str], str], list[tuple[str, Module]]]:
    """What the class calls a tensor of the file, and its modules; none where it cannot be built."""
    model = class_model(config)
    if model is None:
        return str, []
    return stored_names(model), list(model.named_modules())


def _has_cache(module: Module) -> bool:
    """Whether its form is that of attention that keeps keys and values, whatever it calls them."""
    is_attention = "attention" in type(module).__name__.lower()
    return is_attention and _makes_states(module) and _updates(module)


def _makes_states(module: Module) -> bool:
    return any(hasattr(module, one) for one in _PROJECTIONS)


def _updates(module: Module) -> bool:
    """Whether its class hands keys and values to a cache; linear attention keeps another state."""
    kind = type(module)
    own = kind.__mro__[: kind.__mro__.index(Module)]
    methods = (inspect.unwrap(each) for one in own for each in vars(one).values() if callable(each))
    codes = (getattr(method, "__code__", None) for method in methods)
    return any("update" in _names(code) for code in codes if code is not None)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function uses, also in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
