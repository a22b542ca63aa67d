# SPDX-License-Identifier: Apache-2.0
"""Hooks that modifiers register on modules, and the switch that disables them.

Each hook is a small callable object rather than a closure, so that it can be found again in torch's
own tables: a pipeline that never runs a module can still pass its inputs to the hooks that wait for
them (:func:`run_input_hooks`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel, PrivateAttr
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from llmcompressor.errors import InputError, LifecycleError, did_you_mean

# Thread → the hooks that stay on in it; no entry while all hooks are on. It is keyed by thread
# and not a context variable for two reasons. The pipelines run models in greenlets, which share
# their thread's switch but have contexts of their own. And on an accelerator backward hooks are
# called from autograd's threads, which have to see the switch of the thread that waits for them.
_kept_by_thread: dict[int, frozenset[RemovableHandle]] = {}

_TAPS = {"query": "impl", "key": "kv_cache", "value": "kv_cache"}


class _Hook:
    """A modifier's function as a torch hook, which does nothing while it is disabled."""

    __slots__ = ("function", "handle", "in_backward", "kind")

    def __init__(self, function: Callable[..., Any], kind: str, *, in_backward: bool) -> None:
        self.function = function
        self.kind = kind
        self.in_backward = in_backward
        self.handle: RemovableHandle | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _kept_by_thread and not self.enabled:
            return None
        if torch.is_inference_mode_enabled():
            # inference tensors cannot be changed outside of it, where statistics are updated
            with torch.inference_mode(mode=False), torch.no_grad():
                return self.function(*args, **kwargs)
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        # A plain function on a module is shared by the module's copies. Copying a bound method
        # would copy the modifier and everything it has collected.
        return self

    @property
    def enabled(self) -> bool:
        """Return True if the hook runs when it is called now, from this thread."""
        if not _kept_by_thread:
            return True
        kept = _kept_by_thread.get(threading.get_ident())
        if kept is not None:
            return self.handle in kept
        # autograd's threads are started outside of Python
        if self.in_backward and isinstance(threading.current_thread(), threading._DummyThread):
            return all(self.handle in kept for kept in list(_kept_by_thread.values()))
        return True


class HooksMixin(BaseModel):
    """Registers hooks, keeps track of them, and removes them.

    >>> import torch
    >>> class Counter(HooksMixin):
    ...     calls: int = 0
    ...     def watch(self, module):
    ...         self.register_hook(module, self.count, "forward_pre")
    ...     def count(self, module, args):
    ...         self.calls += 1
    >>> counter, relu = Counter(), torch.nn.ReLU()
    >>> counter.watch(relu)
    >>> _ = relu(torch.ones(1))
    >>> with HooksMixin.disable_hooks():
    ...     _ = relu(torch.ones(1))
    >>> counter.calls
    1
    """

    _hooks: set[RemovableHandle] = PrivateAttr(default_factory=set)

    @property
    def hook_ids(self) -> frozenset[int]:
        """Ids of the registered hooks: a key that changes whenever hooks are added or removed."""
        return frozenset(handle.id for handle in self._hooks)

    def register_hook(
        self, target: Module | Tensor, function: Callable[..., Any], kind: str, **kwargs: Any
    ) -> RemovableHandle:
        """Register ``function`` as a hook of ``target``.

        Args:
            target: the module or the parameter.
            function: what to call; it gets what torch gives to a hook of this kind.
            kind: the part of torch's ``register_…_hook`` that varies, such as ``"forward"``,
                ``"forward_pre"``, ``"full_backward"``, or for parameters ``"hook"`` and
                ``"post_accumulate_grad"``; also ``"query"``, ``"key"`` and ``"value"``, which
                tap a prepared attention module: ``function(module, states)`` with states
                ``[batch, heads, tokens, head_dim]``.
            **kwargs: options that torch has for hooks of this kind, such as ``with_kwargs``.

        Returns:
            The handle, to be given to :meth:`remove_hooks` or :meth:`disable_hooks`.

        Raises:
            InputError: ``target`` has no hooks of this kind.
            LifecycleError: the attention module is not prepared for taps.
        """
        in_backward = isinstance(target, Tensor) or "backward" in kind
        hook = _Hook(function, kind, in_backward=in_backward)
        handle: RemovableHandle = _register_function(target, kind)(hook, **kwargs)
        hook.handle = handle
        self._hooks.add(handle)
        return handle

    def move_pre_hooks_last(self) -> None:
        """Move this object's pre-forward hooks after those that others registered since."""
        for handle in sorted(self._hooks, key=lambda one: one.id):
            table: Any = handle.hooks_dict_ref()
            hook = None if table is None else table.get(handle.id)
            if isinstance(hook, _Hook) and hook.kind == "forward_pre":
                table.move_to_end(handle.id)

    def remove_hooks(self, handles: Iterable[RemovableHandle] | None = None) -> None:
        """Remove the given hooks, or all that were registered through this object."""
        gone = set(self._hooks if handles is None else handles)
        for handle in gone:
            handle.remove()
        self._hooks -= gone

    @classmethod
    @contextmanager
    def disable_hooks(
        cls, keep: RemovableHandle | Iterable[RemovableHandle] = frozenset()
    ) -> Iterator[None]:
        """Disable the hooks of all modifiers in this thread, except those kept.

        Contexts nest: what an outer context keeps stays enabled inside an inner one, and leaving
        the inner one restores the outer one.

        Args:
            keep: the handle, or handles, of the hooks that stay enabled.
        """
        keep = (keep,) if isinstance(keep, RemovableHandle) else keep
        thread = threading.get_ident()
        before = _kept_by_thread.get(thread)
        _kept_by_thread[thread] = frozenset(keep) | (before or frozenset())
        try:
            yield
        finally:
            if before is None:
                del _kept_by_thread[thread]
            else:
                _kept_by_thread[thread] = before


def _register_function(target: Module | Tensor, kind: str) -> Callable[..., RemovableHandle]:
    if kind in _TAPS and isinstance(target, Module):
        return _tap_function(target, kind)
    name = "register_hook" if kind == "hook" else f"register_{kind}_hook"
    register: Callable[..., RemovableHandle] | None = getattr(target, name, None)
    if register is None:
        raise InputError(
            f"There are no hooks of the kind {kind!r} on a {type(target).__name__}.",
            did_you_mean(kind, _kinds_of(target)),
        )
    return register


def _tap_function(module: Module, kind: str) -> Callable[..., RemovableHandle]:
    # Only attention needs these, and loading them takes transformers with them.
    from compressed_tensors import modeling  # noqa: PLC0415

    if not hasattr(module, _TAPS[kind]):
        raise LifecycleError(
            f"The {kind} states of this {type(module).__name__} cannot be tapped yet. Where it is "
            "attention, call tap_attention(model, module, queries=True) of "
            "llmcompressor.quantization.attach before, for each attention module of the model."
        )
    register = getattr(modeling, f"register_{kind}_hook")
    return lambda hook, **kwargs: register(module, hook, **kwargs)


def _kinds_of(target: Module | Tensor) -> list[str]:
    """The kinds of hooks that torch offers on ``target``, and the taps on a module."""
    names = (name for name in dir(target) if name.startswith("register_"))
    kinds = [name[len("register_") : -len("_hook")] for name in names if name.endswith("_hook")]
    extra = _TAPS if isinstance(target, Module) else ["hook"]
    return [kind for kind in kinds if kind] + list(extra)


def run_input_hooks(
    module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the ``"forward_pre"`` hooks of modifiers without running the module.

    Disabled hooks, and hooks that are not modifiers', are skipped. The order is that of
    registration, as in torch.

    Args:
        module: the module whose hooks are called.
        args: the positional arguments that it would be called with.
        kwargs: the keyword arguments that it would be called with.

    Returns:
        The arguments as the hooks left them: a hook may return new ones, as in torch.
    """
    named = dict(kwargs or {})
    for key, hook in list(module._forward_pre_hooks.items()):
        if not isinstance(hook, _Hook) or not hook.enabled:
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, named)
            if changed is not None:
                args, named = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return args, named


def hooks_enabled() -> bool:
    """Return True if the hooks of modifiers are enabled in this thread."""
    return threading.get_ident() not in _kept_by_thread


def has_output_hooks(module: Module) -> bool:
    """Return True if ``module`` has an enabled ``"forward"`` hook of a modifier."""
    hooks = module._forward_hooks.values()
    return any(isinstance(hook, _Hook) and hook.enabled for hook in hooks)
