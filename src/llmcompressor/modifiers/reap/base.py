# SPDX-License-Identifier: Apache-2.0
"""REAP: drop the experts of an MoE that contribute least to its output.

Lasby et al., *REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression*,
arXiv:2510.13999; see :mod:`llmcompressor.numerics.reap` for the equations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import (
    ELEMENTWISE,
    Cost,
    DataSize,
    DataUse,
    Edits,
    Granularity,
    RecipeRules,
    Selection,
    Solving,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier, select_records
from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.matching import as_targets, check_targets, matches
from llmcompressor.modifiers.reap.layers import (
    MoeLayer,
    expert_count_attributes,
    find_moe_layers,
    prune_experts,
    run_experts,
)
from llmcompressor.numerics.reap import Saliency, dropped_experts
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names

_LOOKS = 40
"""At each value that an expert gets: gathered, ordered by experts, masked, its norm taken."""
_PLACES = 10_000
"""A share that is proposed is rounded up to a multiple of 1 / 10000."""


class REAPPruningModifier(Modifier):
    """Drop the least salient experts of each MoE layer, based on calibration data.

    MoE layers are pruned one after the other, each calibrated on the outputs of the pruned ones
    before it. With ``propagate_error=False``, and in the basic pipeline, all are calibrated on the
    original model, as in the paper. The rows of the router are dropped with the experts; at the end
    the number of experts in the configuration is changed. Subsequent modifiers in a recipe see a
    model with the remaining experts.

    Attributes:
        sparsity: share of experts to drop, above 0 and below 1; rounded down.
        ignore: MoE layers to leave unpruned, by name, class or ``re:`` pattern.
        report_path: a ``.json`` file for the remaining experts: name of the module that holds the
            experts' module → their original indices.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(
        run_types=frozenset({"oneshot"}), changes_weights=True
    )

    sparsity: float = Field(gt=0.0, lt=1.0)
    ignore: str | list[str] = Field(default_factory=list)
    report_path: str | None = None

    _layers: dict[Module, MoeLayer] = PrivateAttr(default_factory=dict)
    _in_blocks: bool = PrivateAttr(default=False)
    """Whether a block itself holds router and experts, and not a part of it."""
    _found: dict[Module, Saliency] = PrivateAttr(default_factory=dict)
    _summed: set[Module] = PrivateAttr(default_factory=set)
    _kept: dict[Module, Sequence[int]] = PrivateAttr(default_factory=dict)
    _records: dict[str, dict[str, Any]] = PrivateAttr(default_factory=dict)

    @field_validator("report_path")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is not None and not value.endswith(".json"):
            raise RecipeError(f"report_path is {value!r}.", "Give a name that ends in .json.")
        return value

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """The saliency of an expert depends on its tokens, and is complete with its block.

        The MoE is rerun with its router, to route anew after its experts are dropped. All ranks
        drop them.
        """
        return Traits(
            data=DataUse.STREAM,
            granularity=Granularity.BLOCK if self._in_blocks else Granularity.SUB_BLOCK,
            edits=Edits.AT_ONCE | Edits.INPUTS | Edits.STRUCTURE,
            by_block=True,
            over_ranks=Solving.ALL,
            files={} if self.report_path is None else {"report_path": self.report_path},
        )

    def select(self, state: State) -> Selection:
        """The modules that hold the experts.

        A pause between router and experts would keep stale routes.
        """
        return Selection(
            modules=list(self._layers), undivided=[one.parent for one in self._layers.values()]
        )

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of computing the output of each routed expert separately."""
        layers = [self._layers[one] for one in modules if one in self._layers]
        looks = 0
        for layer in layers:
            width = next(one.shape[-1] for one in layer.router.parameters() if one.ndim > 1)
            looks += _LOOKS * (layer.top_k or 1) * width
        products = sum(layer.products for layer in layers)
        return Cost(flops=data.tokens * (products + ELEMENTWISE * looks))

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """Saliency and token count of every expert, and the dropped experts."""
        return select_records(self._records, names)

    # ------------------------------------------------------------------ before

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the MoE layers, and refuse those that could not be written or run when pruned."""
        every = find_moe_layers(state.model)
        ignored = as_targets(self.ignore)
        check_targets(state.model, None, ignored)
        mine = [
            layer
            for layer in every
            if not any(
                matches(layer.name, layer.experts, one)
                or matches(layer.name.rpartition(".")[0], layer.parent, one)
                for one in ignored
            )
        ]
        if not mine:
            raise TargetError(
                "REAPPruningModifier found no mixture of experts that it can prune in "
                f"{type(state.model).__name__}"
                + (" beside those it is to ignore." if every else "."),
                "Leave it out: it needs stacked experts whose forward is given the experts and "
                "weights of each token (that of Llama 4 is given neither).",
            )
        self._check_counts(state.model, every, mine)
        for layer in mine:
            self._check_remaining(layer, layer.top_k)
            _check_unmodified(layer, state.facts.rotated_by)
        self._layers = {layer.experts: layer for layer in mine}
        blocks = find_blocks(state.model)
        self._in_blocks = any(layer.parent in blocks for layer in mine)
        state.facts.outputs_changed_by.add(type(self).__name__)
        return True

    def outline(self, state: State) -> None:
        """Reduce each MoE to the number of remaining experts, whichever these are."""
        for layer in self._layers.values():
            prune_experts(
                state.model, layer, range(len(self._left(layer, torch.zeros(layer.count))))
            )
        self._tell(state.model)

    def _check_counts(
        self, model: Module, every: Sequence[MoeLayer], mine: Sequence[MoeLayer]
    ) -> None:
        """Refuse differing numbers of experts: the configuration has one for all layers."""
        counts = {layer.count for layer in mine}
        others = [layer for layer in every if layer not in mine and layer.count in counts]
        if others or len(counts) > 1:
            raise TargetError(
                "A configuration has one number of experts for all mixtures, and "
                + (
                    f"{join_names(one.name for one in others)} would keep theirs."
                    if others
                    else f"this model's have {sorted(counts)}."
                ),
                "Prune all mixtures that have as many experts, or none.",
            )
        if hasattr(model, "config") and not expert_count_attributes(model, counts.pop()):
            raise TargetError(
                f"The configuration of {type(model).__name__} does not tell how many experts its "
                "mixtures have: the number could not be changed.",
                "Leave REAPPruningModifier out.",
            )

    def _check_remaining(self, layer: MoeLayer, top_k: int | None) -> None:
        """Refuse a sparsity that drops nothing, or leaves too few experts to route a token to."""
        size = layer.count // layer.groups
        gone = len(dropped_experts(torch.zeros(layer.count), self.sparsity, layer.groups))
        left = size - gone // layer.groups
        of_group = f" in each of {layer.groups} groups" if layer.groups > 1 else ""
        if not gone:
            raise TargetError(
                f"sparsity {self.sparsity:g} drops none of the {size} experts{of_group} of "
                f"{layer.name}.",
                f"Give at least {math.ceil(_PLACES / size) / _PLACES:g}.",
            )
        reachable = left * (min(layer.chosen_groups, layer.groups) if layer.groups > 1 else 1)
        if top_k is not None and top_k > reachable:
            raise TargetError(
                f"{layer.name}: a token goes to {top_k} experts, and of {size}{of_group} only "
                f"{left} would remain with sparsity {self.sparsity:g}.",
                "Give a lower sparsity.",
            )
        if layer.groups > 1 and left < min(2, size):  # a group's score is the sum of its two best
            raise TargetError(
                f"{layer.name}: of {size} experts{of_group} only {left} would remain with sparsity "
                f"{self.sparsity:g}, and routers score a group by two.",
                "Give a lower sparsity.",
            )

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Observe the inputs of the experts, except in finished blocks."""
        done = tuple(f"{name}." for name in state.run.block_source.finished)
        for module, layer in self._layers.items():
            if not layer.name.startswith(done):
                self._found[module] = Saliency.of(layer.count)
                self.register_hook(module, self._hook(state), "forward_pre", with_kwargs=True)

    def _hook(self, state: State) -> Any:
        @torch.no_grad()
        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            layer = self._layers[module]
            hidden_TH, index_TK, weight_TK = _parse_routing(layer.name, args, kwargs)
            self._check_remaining(layer, index_TK.shape[-1])
            mask = state.calibration.token_mask
            if mask is not None and mask.numel() == len(hidden_TH):
                real_T = mask.flatten().to(hidden_TH.device)
                hidden_TH, index_TK, weight_TK = (
                    one[real_T] for one in (hidden_TH, index_TK, weight_TK)
                )

            def run(*routed: Tensor) -> Tensor:
                with HooksMixin.disable_hooks():
                    return run_experts(module, *routed)

            self._found[module].add(run, hidden_TH, index_TK, weight_TK)

        return count

    def sum_collected(
        self,
        state: State,
        ranks: Ranks,
        modules: Sequence[Module],
        owner_of: Callable[[Module], int | None],
    ) -> None:
        """Sum saliencies, on all ranks."""
        for layer in self._mine(modules):
            found = self._found.get(layer.experts)
            if found is not None and layer.experts not in self._summed:
                self._summed.add(layer.experts)
                what = f"saliencies of the experts of {layer.name}"
                found.sum_E = ranks.sum_all(found.sum_E, what=what)
                found.count_E = ranks.sum_all(found.count_E, what=what)

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Drop experts of finished layers, unless the error is not propagated."""
        if state.calibration.propagates_error:
            self.finish(state, modules)

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Drop experts of the MoE layers among ``modules``."""
        for layer in self._mine(modules):
            if layer.experts in self._found:
                record = self._choose_experts(layer)
                record = state.run.block_source.decide(f"experts of {layer.name}", record)
                self._take(state.model, layer, record)

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Apply the choice of experts of an earlier run."""
        for layer in self._mine(modules):
            record = state.run.block_source.decide(f"experts of {layer.name}", None)
            assert record is not None, "it was written before its block was"
            self._take(state.model, layer, record)

    def _mine(self, modules: Iterable[Module]) -> list[MoeLayer]:
        """The MoE layers among ``modules`` that are not pruned yet."""
        return [
            self._layers[one] for one in modules if one in self._layers and one not in self._kept
        ]

    def _take(self, model: Module, layer: MoeLayer, record: Mapping[str, Any]) -> None:
        prune_experts(model, layer, record["kept"])
        self._kept[layer.experts] = record["kept"]
        self._records[layer.name] = dict(record)
        self._found.pop(layer.experts, None)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Drop the experts that are left to drop, and update the configuration."""
        self.remove_hooks()
        self.finish(state, list(self._layers))
        self._tell(state.model)
        is_first = state.run.ranks is None or state.run.ranks.rank == 0
        if self.report_path is not None and is_first:
            left = {
                layer.name.rpartition(".")[0]: list(self._kept[layer.experts])
                for layer in self._layers.values()
            }
            path = Path(self.report_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{json.dumps(left)}\n", encoding="utf-8")
        first = next(iter(self._layers.values()))
        logger.info(
            f"REAPPruningModifier: {len(self._kept[first.experts])} of {first.count} experts are "
            f"left in each of {len(self._layers)} mixtures."
        )

    def _tell(self, model: Module) -> None:
        """Set the number of experts in the configuration."""
        first = next(iter(self._layers.values()))
        for config, name in expert_count_attributes(model, first.count):
            setattr(config, name, len(self._left(first, torch.zeros(first.count))))

    def _left(self, layer: MoeLayer, saliency_E: Tensor) -> list[int]:
        gone = set(dropped_experts(saliency_E, self.sparsity, layer.groups))
        return [number for number in range(layer.count) if number not in gone]

    def _choose_experts(self, layer: MoeLayer) -> dict[str, Any]:
        """The record of an MoE layer: saliencies, tokens, and kept and dropped experts."""
        found = self._found[layer.experts]
        saliency_E = found.mean()
        if not bool(saliency_E.isfinite().all()):
            raise NonFiniteError(
                f"What the experts of {layer.name} return holds NaN or infinity. Look for a bad "
                "weight upstream, or load the model with precision='float32'."
            )
        kept = self._left(layer, saliency_E)
        return {
            "experts": layer.count,
            "kept": kept,
            "dropped": sorted(set(range(layer.count)) - set(kept)),
            "saliency": saliency_E.tolist(),
            "tokens": found.count_E.tolist(),
        }


def _check_unmodified(layer: MoeLayer, turned: Mapping[Module, str]) -> None:
    """Refuse experts for which an earlier modifier has prepared something per expert.

    Args:
        layer: the MoE layer.
        turned: modules with a rotation in their forward → the modifier that adds it.
    """
    inside = list(layer.experts.modules())
    problem = ""
    if any(hasattr(one, "quantization_scheme") for one in inside):
        problem = "would be quantized before they are dropped"
    elif owner := next((turned[one] for one in inside if one in turned), ""):
        problem = f"would have rotations from {owner} in their forward, each its own"
    if problem:
        raise RecipeError(
            f"The experts of {layer.name} {problem}: what does so stands before "
            "REAPPruningModifier.",
            "Put REAPPruningModifier before it.",
        )


def _parse_routing(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``[T, H]``, expert indices ``[T, K]`` and weights ``[T, K]`` of a call."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    whole = [one for one in tensors if not one.is_floating_point()]
    if len(tensors) == 3 and len(whole) == 1:  # tokens, experts, weights
        index = whole[0]
        hidden, weight = (one for one in tensors if one is not index)
        if weight.shape == index.shape:
            hidden_TH = hidden.reshape(-1, hidden.shape[-1])
            index_TK, weight_TK = (one.reshape(-1, one.shape[-1]) for one in (index, weight))
            if len(hidden_TH) == len(index_TK):
                return hidden_TH, index_TK, weight_TK
    shapes = [tuple(one.shape) for one in tensors]
    raise TargetError(
        f"{name} was called with tensors of the shapes {shapes}: which tokens go to which experts "
        "cannot be told.",
        "Put it on the ignore list, or leave REAPPruningModifier out.",
    )
