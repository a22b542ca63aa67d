# SPDX-License-Identifier: Apache-2.0
"""Trial forward of attention with quantized states (KV cache), before the first pass.

Loaders of quantized checkpoints wrap the KV cache and the attention function of a module. Some
models read attributes of the updated cache that the wrapper does not pass on, and some call
attention in a way that cannot be wrapped. Loaders also take the number of heads from the
configuration, which may differ from what a layer caches: one latent state for all heads, or
another number of heads in some layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.modeling import (
    IMPL_ATTR,
    KV_CACHE_ATTR,
    register_key_hook,
    register_query_hook,
    register_value_hook,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.utils import get_num_attn_heads, get_num_kv_heads
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import model_inputs, token_id_inputs
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.meta_weights import skip_zero_products, zero_weights
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.patches import rotations_suspended
from llmcompressor.pipelines.batches import calibration_mode, small_batch
from llmcompressor.quantization.attach import disable_attention_hooks, enable_attention_hooks
from llmcompressor.quantization.kv_cache import without_empty_caches

if TYPE_CHECKING:
    from llmcompressor.core.state import State

_States = Mapping[Module, tuple[QuantizationArgs, bool]]
"""Attention module → how its states are quantized, and whether its queries are."""


def check_attention_forward(
    model: Module,
    batches: Sequence[Mapping[str, Any]] | None,
    modifiers: Sequence[Modifier],
    state: State,
    *,
    tell: Callable[[str], object] = logger.warning,
) -> None:
    """Run a small forward with quantized attention states, wrapped as loaders wrap them.

    Args:
        model: its weights are not read; they may be on the meta device.
        batches: a slice of the first one is run, or token ids if there is none. If the unquantized
            model fails on it too, nothing is reported.
        modifiers: of the run, initialized.
        state: holds the attention modules that are quantized.
        tell: called with a warning for a limitation that does not rule the model out.

    Raises:
        TargetError: the forward fails, or the number of heads differs from the configuration.
    """
    states = {
        module: how
        for module, how in state.facts.kv_cache.items()
        if state.facts.quantizer.get(module) in modifiers
        and getattr(module, "quantization_status", None) is None
    }
    given = (batches or token_id_inputs(model)) if states else ()
    if not given:
        return
    trial = _AttentionTrial(model, small_batch(given[0]), states)
    with contextlib.ExitStack() as written:
        for modifier in modifiers:  # including rotations of the states themselves
            written.enter_context(modifier.predict(state).attached())
        written.enter_context(calibration_mode(model))
        written.enter_context(zero_weights(model, skips_experts=True))
        with HooksMixin.disable_hooks(), skip_zero_products(), rotations_suspended(model):
            for use_cache in (True, False):  # as in generation, and as in calibration
                trial.run(use_cache=use_cache)
            if needed := trial.cache_warning():
                tell(needed)


class _AttentionTrial:
    def __init__(self, model: Module, batch: Mapping[str, Any], states: _States) -> None:
        self._model = model
        self._batch = batch
        self._states = states
        self._names = {module: name for name, module in named_modules(model) if module in states}
        self._running: Module | None = None

    def run(self, *, use_cache: bool) -> None:
        error = self._error(self._states, use_cache=use_cache)
        if error is None:
            return
        running = self._running
        plain = self._error({}, use_cache=use_cache)
        if plain is None:
            raise self._refusal(error, running, use_cache=use_cache) from error
        logger.debug(f"{type(self._model).__name__} was not tried out: {plain!r:.200}")

    def cache_warning(self) -> str:
        """Return a warning for a model that loaders can run with a cache only, else ``""``.

        Calibration gives attention without a cache an empty one; loaders give it a quantized cache
        that wraps nothing.
        """
        error = self._error(self._states, use_cache=False, helped=False)
        if error is None or self._error({}, use_cache=False) is not None:
            return ""
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        return (
            f"transformers will run what is written with use_cache=True alone: without a cache "
            f"{type(self._model).__name__} asks the quantized one for what it has not "
            f"({shown:.200})."
        )

    def _error(self, states: _States, *, use_cache: bool, helped: bool = True) -> Exception | None:
        """Run the model with hooks on ``states`` and return the exception that its code raises."""
        self._running = None
        batch = {**self._batch, "use_cache": use_cache}
        helping = contextlib.nullcontext() if helped else without_empty_caches(states)
        with _attention_hooks(self._model, states), helping, self._watched(states):
            try:
                self._model(**model_inputs(self._model, batch))
            except (CompressorError, torch.OutOfMemoryError):  # the latter is not the model's fault
                raise
            except Exception as error:  # whatever the model's own code raises
                return error
        return None

    def _refusal(self, error: Exception, running: Module | None, *, use_cache: bool) -> TargetError:
        queries = any(has_queries for _, has_queries in self._states.values())
        where = type(self._model).__name__
        if running is not None:
            where = f"{self._names[running]} ({type(running).__name__})"
        shown = " ".join(f"{type(error).__name__}: {error}".split())
        remedy = "Leave kv_cache_scheme out, and attention modules out of the targets."
        if queries:
            without = {one: (args, False) for one, (args, _) in self._states.items()}
            if self._error(without, use_cache=use_cache) is None:
                remedy = (
                    "Quantize keys and values alone, with kv_cache_scheme, and leave attention "
                    "modules out of the targets."
                )
        return TargetError(
            f"{where} does not run as readers run attention whose "
            f"{'queries, ' if queries else ''}keys and values are quantized ({shown:.200}).",
            remedy,
        )

    @contextlib.contextmanager
    def _watched(self, states: _States) -> Iterator[None]:
        handles = []

        def enter(module: Module, *_: Any) -> None:
            self._running = module

        def leave(*_: Any) -> None:
            self._running = None

        for module, (args, queries) in states.items():
            handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave),
            ]
            if args.strategy == QuantizationStrategy.ATTN_HEAD:
                handles += [
                    register_key_hook(module, self._heads("keys", get_num_kv_heads)),
                    register_value_hook(module, self._heads("values", get_num_kv_heads)),
                ]
                if queries:
                    hook = self._heads("queries", get_num_attn_heads)
                    handles.append(register_query_hook(module, hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _heads(self, what: str, number_of: Callable[[Any], int]) -> Any:
        """Return a hook that compares the states' number of heads with the configuration's."""

        def check(module: Module, states_BHTD: Tensor) -> None:
            config = getattr(module, KV_CACHE_ATTR).config
            told, found = number_of(config), states_BHTD.shape[1]
            if found == told:
                return
            raise TargetError(
                f"The {what} of {self._names[module]} cannot have scales per head: the number of "
                f"their heads is {found}, and readers take {told} from {type(config).__name__}.",
                "Quantize them with strategy: tensor.",
            )

        return check


@contextlib.contextmanager
def _attention_hooks(model: Module, states: _States) -> Iterator[None]:
    """Install the attention hooks while the body runs, where rotations have not installed them."""
    own = [
        module
        for module, (_, queries) in states.items()
        if not hasattr(module, IMPL_ATTR if queries else KV_CACHE_ATTR)
    ]
    try:
        for module in own:
            enable_attention_hooks(model, module, queries=states[module][1])
        yield
    finally:
        for module in own:
            disable_attention_hooks(model, module)
