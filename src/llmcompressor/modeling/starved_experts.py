# SPDX-License-Identifier: Apache-2.0
"""Which modules belong to experts that too few calibration tokens have reached."""

from __future__ import annotations

from torch.nn import Module

from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.listed_experts import members_of
from llmcompressor.modeling.shown_lists import starved_of

__all__ = ["starved_modules"]


def starved_modules(block: Module) -> dict[Module, str]:
    """The parts of starved experts in ``block``, of stacks or of lists → the policy for them."""
    found: dict[Module, str] = {}
    for module in block.modules():
        if isinstance(module, LinearExperts):
            starved = module.starved
            members = [module.get_submodule(str(one)) for one in range(module.num_experts)]
        else:
            starved = starved_of(module)
            members = list(members_of(module).values()) if starved else []
        for place, policy in starved.items():
            found |= dict.fromkeys(members[place].modules(), policy)
    return found
