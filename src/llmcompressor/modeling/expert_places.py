# SPDX-License-Identifier: Apache-2.0
"""Which modules belong to which expert, and how many calibration tokens have reached that."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.listed_experts import members_of
from llmcompressor.modeling.shown_lists import is_shown_more, starved_of, tokens_of

__all__ = ["ExpertPlace", "expert_places"]


@dataclass(frozen=True)
class ExpertPlace:
    """Where a module stands in a mixture, whose experts are a stack or a list."""

    mixture: Module
    expert: int
    path: str
    """Its name in the expert: the same in all of them."""

    @property
    def tokens(self) -> int:
        """How many tokens were routed to the expert in this calibration so far."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.tokens[self.expert]
        counted = tokens_of(self.mixture)
        return counted[self.expert] if counted else 0

    @property
    def policy(self) -> str | None:
        """What is done about it where too few tokens have reached it; ``None``: enough have."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.starved.get(self.expert)
        return starved_of(self.mixture).get(self.expert)

    @property
    def is_shown_more(self) -> bool:
        """Whether it is called with other tokens than those routed to it, too."""
        if isinstance(self.mixture, LinearExperts):
            return self.mixture.shown[self.expert] in ("all_tokens", "neighbours")
        return is_shown_more(self.mixture, self.expert)


def expert_places(block: Module) -> dict[Module, ExpertPlace]:
    """The parts of experts in ``block``; of experts in experts, of the inner ones.

    What stands in a list may be experts: whether any of them is shown more than it is called with,
    or has too few tokens, is known when calibration has come to them.
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
