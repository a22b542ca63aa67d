# SPDX-License-Identifier: Apache-2.0
"""Attention layers that share the KV cache of an earlier layer, as in Gemma 3n.

Such a layer computes and rounds no keys and values: it reads those that the earlier layer rounded.
But servers take their scales from the reading layer, and use 1.0 if it has none. So it is written
with the scales of the layer whose cache it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.core.block_source import BlockSource
from llmcompressor.core.contract import PlannedModule
from llmcompressor.modeling.names import named_modules
from llmcompressor.quantization.attach import cache_scheme
from llmcompressor.schemes.attention import kv_source_layer

_STATES = frozenset(
    f"{base}_{part}" for base in ("k", "v") for part in ("scale", "zero_point", "global_scale")
)


class SharedKVCaches:
    """The attention modules that read the caches of others, and their parameters in the checkpoint.

    Args:
        model: the model; without one there are none.
        sources: attention whose keys and values are quantized → their arguments.

    Attributes:
        names: attention that reads the cache of other attention → its name, in order.
    """

    def __init__(
        self, model: Module | None = None, sources: Mapping[Module, QuantizationArgs] | None = None
    ) -> None:
        self._args = dict(sources or {})
        self.names: dict[Module, str] = {}
        self._source: dict[Module, Module] = {}
        self._states: dict[Module, dict[str, Tensor]] = {}
        static = (one for one, args in self._args.items() if args.dynamic is not True)
        places = {_attention_key(one): one for one in static}
        for name, module in named_modules(model) if model is not None and places else ():
            layer = kv_source_layer(module)
            source = None if layer is None else places.get((*_attention_key(module)[:2], layer))
            if source is not None:
                self.names[module], self._source[module] = name, source

    __hash__ = None  # type: ignore[assignment]  # modifiers are compared by their fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedKVCaches) and vars(self) == vars(other)

    def planned(self, tensors: Mapping[Module, Mapping[str, Tensor]]) -> list[PlannedModule]:
        """The entries in the checkpoint, from the meta tensors of their sources."""
        return [
            PlannedModule(
                name,
                module,
                cache_scheme(self._args[self._source[module]]),
                {own: one for own, one in tensors[self._source[module]].items() if own in _STATES},
                is_attention=True,
                has_group=False,
            )
            for module, name in self.names.items()
        ]

    def keep(self, sources: Iterable[Module]) -> None:
        """Keep the scales of ``sources``, whose block may be freed."""
        for source in set(sources) & set(self._source.values()):
            self._states[source] = _states_of(source)

    def attach(
        self, modules: Iterable[Module], adopt: Callable[[Module], None], blocks: BlockSource
    ) -> None:
        """Give modules that share a cache the scales of the attention that they read from.

        ``adopt`` marks that attention as quantized if its values were written by an earlier run,
        whose finished ones ``blocks`` are.
        """
        for module, source in self._shared_pairs(modules):
            if source not in self._states:
                adopt(source)
                _restore(blocks, source)
                self.keep([source])
            device = next((one.device for one in module.parameters() if not one.is_meta), None)
            kept = self._states[source].items()
            self._mark(module, source, {own: one.to(device, copy=True) for own, one in kept})

    def mark(self, modules: Iterable[Module], adopt: Callable[[Module], None]) -> None:
        """Mark modules that share a cache, after their sources; the values are already on disk."""
        for module, source in self._shared_pairs(modules):
            adopt(source)
            forms = _states_of(source)
            device = next(module.parameters()).device
            empty = {own: torch.empty_like(one, device=device) for own, one in forms.items()}
            self._mark(module, source, empty)

    def _shared_pairs(self, modules: Iterable[Module]) -> list[tuple[Module, Module]]:
        return [(one, self._source[one]) for one in modules if one in self._source]

    def _mark(self, module: Any, source: Module, states: Mapping[str, Tensor]) -> None:
        for own, value in states.items():
            module.register_parameter(own, Parameter(value, requires_grad=False))
        module.quantization_scheme = cache_scheme(self._args[source])
        module.quantization_status = QuantizationStatus.DECOMPRESSED


def _attention_key(module: Any) -> tuple[type, int, Any]:
    """A key that identifies an attention module in a model: class, configuration and layer."""
    return type(module), id(getattr(module, "config", None)), getattr(module, "layer_idx", None)


def _states_of(source: Module) -> dict[str, Tensor]:
    found = ((own, source._parameters.get(own)) for own in sorted(_STATES))
    return {own: one.detach() for own, one in found if one is not None}


def _restore(blocks: BlockSource, source: Module) -> None:
    """Load the scales of attention that an earlier run has finished."""
    for block, name in blocks.names.items():
        if any(one is source for one in block.modules()):
            blocks.restore(name, {source})
