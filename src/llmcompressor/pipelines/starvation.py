# SPDX-License-Identifier: Apache-2.0
"""Starved experts: experts with too few calibration tokens, and the policies for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.modeling.experts import Shown
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.wording import listed

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments

__all__ = ["Starvation"]

_SHOWN: Mapping[str, Shown] = {
    "all_tokens": "all_tokens",
    "neighbours": "neighbours",
    "rtn": "nothing",
}
_WORDS = {
    "all_tokens": "Their statistics are made of all tokens of their layer.",
    "neighbours": "Their statistics are those of the other experts of their layer.",
    "rtn": "Their weights are rounded to nearest, or pruned by magnitude.",
}


@dataclass(frozen=True)
class Starvation:
    """Threshold and policy for starved experts.

    Attributes:
        least: number of tokens below which an expert is starved.
        policy: ``all_tokens``, ``neighbours``, ``rtn`` or ``error``.
    """

    least: float = 1.0
    policy: str = "all_tokens"

    @classmethod
    def asked_for(cls, args: DatasetArguments, batches: CalibrationBatches) -> Starvation:
        """Create the policy from the arguments of a run."""
        least = max(1.0, (args.min_tokens_per_module or 0.0) * batches.real_tokens)
        return cls(least, args.starved_experts)

    @property
    def shown(self) -> Shown:
        """Calibration inputs of a starved expert; undefined for the policy ``error``."""
        return _SHOWN[self.policy]

    def told(self, counts: Mapping[str, int]) -> tuple[list[str], str]:
        """Return the starved experts, and a message about them.

        Args:
            counts: number of tokens by expert.
        """
        starved = [name for name, count in counts.items() if count < self.least]
        shown = listed(f"{name} ({counts[name]})" for name in starved)
        return starved, (
            f"Fewer than {ceil(self.least)} calibration tokens reached {len(starved)} of "
            f"{len(counts)} experts: {shown}."
        )

    def settle(self, counts: Mapping[str, int]) -> list[str]:
        """Return the starved experts of a layer, and warn about the policy applied to them.

        Args:
            counts: number of tokens by expert.

        Raises:
            DatasetError: an expert is starved and the policy is ``error``.
        """
        starved, few = self.told(counts)
        if not starved:
            return []
        if self.policy == "error":
            raise DatasetError(
                few,
                "Calibrate with more data, set moe_calibrate_all_experts, or choose another policy "
                "for starved_experts.",
            )
        logger.warning(f"{few} {_WORDS[self.policy]}")
        return starved
