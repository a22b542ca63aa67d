# SPDX-License-Identifier: Apache-2.0
"""Attention that reads the keys and values of an earlier layer, as in Gemma 3n.

It makes none and rounds none: what it reads was rounded by the layer that made it. But servers
take the scales for that from the attention that reads, and 1.0 where it has none. So it is
written with those of the layer whose cache it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from torch import Tensor
from torch.nn import Module, Parameter

from llmcompressor.modifiers.demands import PlannedModule
from llmcompressor.names import named_modules
from llmcompressor.quantization.attach import cache_scheme
from llmcompressor.schemes.attention import source_layer

__all__ = ["SharedCaches"]

_STATES = frozenset(
    f"{base}_{part}" for base in ("k", "v") for part in ("scale", "zero_point", "global_scale")
)


class SharedCaches:
    """The attention modules that read the caches of others, and what is to be written of them.

    Args:
        model: the model; without one there are none.
        sources: attention whose keys and values are quantized → how.

    Attributes:
        names: attention that reads what other attention has cached → its name, in order.
    """

    def __init__(
        self, model: Module | None = None, sources: Mapping[Module, QuantizationArgs] | None = None
    ) -> None:
        self._args = dict(sources or {})
        self.names: dict[Module, str] = {}
        self._source: dict[Module, Module] = {}
        self._states: dict[Module, dict[str, Tensor]] = {}
        static = (one for one, args in self._args.items() if args.dynamic is not True)
        places = {_place(one): one for one in static}
        for name, module in named_modules(model) if model is not None and places else ():
            layer = source_layer(module)
            source = None if layer is None else places.get((*_place(module)[:2], layer))
            if source is not None:
                self.names[module], self._source[module] = name, source

    __hash__ = None  # type: ignore[assignment]  # modifiers are compared by what they hold

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedCaches) and vars(self) == vars(other)

    def planned(self, tensors: Mapping[Module, Mapping[str, Tensor]]) -> list[PlannedModule]:
        """How these modules will be stored.

        Args:
            tensors: of the attention that they read from, on the meta device.
        """
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
        """Remember the scales that ``sources`` have: their block may be let go of."""
        for source in set(sources) & set(self._source.values()):
            self._states[source] = _states_of(source)

    def attach(
        self, modules: Iterable[Module], adopt: Callable[[Module], None], keeper: Any = None
    ) -> None:
        """Give those of ``modules`` that are ours the scales of the attention they read from.

        Args:
            modules: of a block, or of the model.
            adopt: marks that attention as quantized, whose values an earlier run has written.
            keeper: who has the blocks of that run.
        """
        for module, source in self._ours(modules):
            if source not in self._states:
                adopt(source)
                _restore(keeper, source)
                self.keep([source])
            device = next((one.device for one in module.parameters() if not one.is_meta), None)
            kept = self._states[source].items()
            self._mark(module, source, {own: one.to(device, copy=True) for own, one in kept})

    def mark(self, modules: Iterable[Module], adopt: Callable[[Module], None]) -> None:
        """Mark those of ``modules`` as quantized that are ours; their values are on disk.

        Args:
            modules: of a block, or of the model.
            adopt: does that with the attention they read from.
        """
        for module, source in self._ours(modules):
            adopt(source)
            forms = _states_of(source)
            device = next(module.parameters()).device
            empty = {own: torch.empty_like(one, device=device) for own, one in forms.items()}
            self._mark(module, source, empty)

    def _ours(self, modules: Iterable[Module]) -> list[tuple[Module, Module]]:
        return [(one, self._source[one]) for one in modules if one in self._source]

    def _mark(self, module: Any, source: Module, states: Mapping[str, Tensor]) -> None:
        for own, value in states.items():
            module.register_parameter(own, Parameter(value, requires_grad=False))
        module.quantization_scheme = cache_scheme(self._args[source])
        module.quantization_status = QuantizationStatus.DECOMPRESSED


def _place(module: Any) -> tuple[type, int, Any]:
    """What tells an attention module of a model: its class, its configuration, its layer."""
    return type(module), id(getattr(module, "config", None)), getattr(module, "layer_idx", None)


def _states_of(source: Module) -> dict[str, Tensor]:
    found = ((own, source._parameters.get(own)) for own in sorted(_STATES))
    return {own: one.detach() for own, one in found if one is not None}


def _restore(keeper: Any, source: Module) -> None:
    """Have the scales of attention read that an earlier run has finished."""
    for block, name in keeper.names.items():
        if any(one is source for one in block.modules()):
            keeper.restore(name, {source})
