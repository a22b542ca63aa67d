# SPDX-License-Identifier: Apache-2.0
"""OWL: sparsity per layer by its share of outliers, from a pass over the unpruned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from llmcompressor.logger import logger
from llmcompressor.modifiers.sparsity.matrices import matrix_of
from llmcompressor.modifiers.sparsity.targets import Layers
from llmcompressor.numerics.owl import outlier_count, sparsities
from llmcompressor.numerics.wanda import wanda_score

__all__ = ["Profile"]


class Profile:
    """Outlier counts of layers, and the sparsities derived from them.

    The scores of a layer are compared with the mean over all of its modules. The counts of an
    interrupted run are kept in its journal.

    Args:
        layers: the layers that are pruned.
        target: mean sparsity.
        multiple: multiple of the mean above which a score is an outlier.
        spread: maximum distance of a layer's sparsity from ``target``.
    """

    def __init__(self, layers: Layers, target: float, multiple: float, spread: float) -> None:
        self._layers = layers
        self._target, self._multiple, self._spread = target, multiple, spread
        self._squares: dict[Module, Tensor] = {}
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}
        self.is_decided = False

    def note(self, module: Module, mean_square_C: Tensor) -> None:
        """Keep the input statistics of a module until its layer is surveyed."""
        self._squares[module] = mean_square_C

    def survey(self, modules: Sequence[Module], keeper: Any) -> None:
        """Count the outliers of modules with input statistics and loaded weights."""
        known = [module for module in modules if module in self._squares]
        by_layer: dict[str, list[Module]] = {}
        for module in known:
            by_layer.setdefault(self._layers.layer[module], []).append(module)
        counts = {layer: self._count(members) for layer, members in by_layer.items()}
        if not counts:
            return
        key = self._key(modules)
        if keeper is not None:
            counts = keeper.decide(key, counts)
        self._counts[key] = {layer: (one[0], one[1]) for layer, one in counts.items()}
        for module in known:
            del self._squares[module]

    def adopt(self, modules: Sequence[Module], keeper: Any) -> None:
        """Restore the counts of an earlier run."""
        if modules:
            key = self._key(modules)
            self._counts[key] = {
                layer: (one[0], one[1]) for layer, one in keeper.decide(key, {}).items()
            }

    def decide(self) -> Mapping[str, float]:
        """The sparsity of every layer; a layer without tokens gets the target."""
        self.is_decided = True
        sums: dict[str, list[int]] = {}
        for counts in self._counts.values():
            for layer, (outliers, weights) in counts.items():
                total = sums.setdefault(layer, [0, 0])
                total[0] += outliers
                total[1] += weights
        if not sums:
            return {}
        found = sparsities(
            [outliers / weights for outliers, weights in sums.values()],
            [weights for _, weights in sums.values()],
            self._target,
            self._spread,
        )
        decided = dict(zip(sums, found, strict=True))
        shown = ", ".join(f"{layer} {sparsity:.3f}" for layer, sparsity in decided.items())
        logger.info(f"Sparsities by outliers: {shown}.")
        return decided

    def _key(self, modules: Sequence[Module]) -> str:
        return f"outliers.{self._layers.names[modules[0]]}"

    def _count(self, modules: Sequence[Module]) -> tuple[int, int]:
        scores = [self._score(module).flatten() for module in modules]
        weights = sum(one.numel() for one in scores)
        mean = float(sum(float(one.sum()) for one in scores)) / weights
        return sum(outlier_count(one, self._multiple, mean) for one in scores), weights

    def _score(self, module: Module) -> Tensor:
        return wanda_score(matrix_of(module), self._squares[module])
