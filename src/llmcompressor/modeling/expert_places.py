# SPDX-License-Identifier: Apache-2.0
"""Position of modules in MoE experts, with the calibration tokens of each expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.listed_experts import members_of
from llmcompressor.modeling.shown_lists import is_shown_more, starved_of, tokens_of

__all__ = ["ExpertPlace", "expert_places"]


@dataclass(frozen=True)
class ExpertPlace:
    """The position of a module in an MoE, whose experts are stacked or in a list."""

    mixture: Module
    expert: int
    path: str
    """Its name in the expert: the same in all of them."""

    @property
    def tokens(self) -> int:
        """Number of tokens routed to the expert in this calibration so far."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.tokens[self.expert]
        counted = tokens_of(self.mixture)
        return counted[self.expert] if counted else 0

    @property
    def policy(self) -> str | None:
        """The policy for an expert with too few tokens; ``None`` if it has enough."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.starved.get(self.expert)
        return starved_of(self.mixture).get(self.expert)

    @property
    def is_shown_more(self) -> bool:
        """Return True if the expert is also calibrated with tokens not routed to it."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.shown[self.expert] in ("all_tokens", "neighbours")
        return is_shown_more(self.mixture, self.expert)


def expert_places(block: Module) -> dict[Module, ExpertPlace]:
    """Map each module of an expert in ``block`` to its place; for nested experts, the inner one.

    The members of any list may be experts. Whether they are shown further tokens, or have too few,
    is known only once calibration has reached them.
    """
    found: dict[Module, ExpertPlace] = {}
    for module in block.modules():
        for number, member in enumerate(_members(module)):
            for path, part in member.named_modules():
                found[part] = ExpertPlace(module, number, path)
    return found


def _members(module: Module) -> list[Module]:
    if isinstance(module, LinearExperts):
        return [module.get_submodule(str(one)) for one in range(module.num_experts)]
    is_list = isinstance(module, ModuleList | ModuleDict)
    members = list(members_of(module).values()) if is_list else []
    return members if len(members) > 1 else []
