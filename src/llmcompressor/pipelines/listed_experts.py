# SPDX-License-Identifier: Apache-2.0
"""Experts that are modules in a list, each called by the model's own code for its own tokens.

Experts in stacks are taken apart and called by code of this package, which can show each of them
all tokens. How a model's own code calls the members of a list is not known: they are calibrated
with what they get. Such a list is known by that alone: alike modules that get different numbers of
tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList

from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.modeling.alike_experts import form_of_module
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.observers.tokens import count_tokens
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.schemes.assign import listed

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.state import State
    from llmcompressor.modifiers.modifier import Modifier

__all__ = ["listed_experts_counted"]


@contextlib.contextmanager
def listed_experts_counted(
    model: Module,
    state: State,
    modifiers: Sequence[Modifier],
    batches: CalibrationBatches,
    args: DatasetArguments,
) -> Iterator[None]:
    """Count the tokens of such experts while the body runs, and say then what they got.

    Raises:
        DatasetError: an expert got too few, and that is to be an error.
    """
    calibrated: set[Module] = set()
    for modifier in modifiers:
        if modifier.requires_calibration_data:
            calibrated.update(modifier.calibrated_modules(state))
    counter = _Counter()
    counter.watch(model, state, calibrated)
    try:
        yield
    finally:
        counter.remove_hooks()
    counts = {name: own for name, own in counter.counts().items() if len(set(own.values())) > 1}
    if counts:
        least = max(1.0, (args.min_tokens_per_module or 0.0) * batches.real_tokens)
        _report(counts, least, args)


class _Counter(HooksMixin):
    """Counts tokens where modifiers see them: their hooks are switched off and on together."""

    _seen: dict[Module, int] = PrivateAttr(default_factory=dict)
    _members: dict[str, dict[str, list[Module]]] = PrivateAttr(default_factory=dict)

    def watch(self, model: Module, state: State, calibrated: set[Module]) -> None:
        """Count what the calibrated modules of lists of alike modules get."""

        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if isinstance(tensor, Tensor):
                self._seen[module] += count_tokens(tensor, state.token_mask)

        for name, members in _lists(model):
            own = {
                f"{name}.{key}": [
                    one
                    for one in member.modules()
                    if one in calibrated and hasattr(one, "in_features")
                ]
                for key, member in members.items()
            }
            if all(own.values()):
                self._members[name] = own
        for module in {one for own in self._members.values() for of in own.values() for one in of}:
            self._seen[module] = 0
            self.register_hook(module, count, "forward_pre", with_kwargs=True)

    def counts(self) -> dict[str, dict[str, int]]:
        """List → member → the tokens of that of its modules that got most."""
        return {
            name: {member: max(self._seen[one] for one in of) for member, of in own.items()}
            for name, own in self._members.items()
        }


def _lists(model: Module) -> Iterator[tuple[str, dict[str, Module]]]:
    """The lists of alike modules inside a block; those of the blocks themselves lie in no other."""
    for name, module in model.named_modules():
        if not isinstance(module, ModuleList | ModuleDict):
            continue
        members = {key: one for key, one in module._modules.items() if one is not None}
        inside = any(part.isdecimal() for part in name.split("."))
        if inside and len(members) > 1 and len(set(map(form_of_module, members.values()))) == 1:
            yield name, members


def _report(counts: dict[str, dict[str, int]], least: float, args: DatasetArguments) -> None:
    every = {member: count for own in counts.values() for member, count in own.items()}
    starved = [f"{member} ({count})" for member, count in every.items() if count < least]
    policy = args.starved_experts
    few = (
        f"Fewer than {ceil(least)} calibration tokens reached {len(starved)} of {len(every)} "
        f"experts: {listed(starved)}."
    )
    if starved and policy == "error":
        raise DatasetError(
            few, "Calibrate with more data, or choose another policy for starved_experts."
        )
    if not starved and not args.moe_calibrate_all_experts:
        return
    fewest, most = min(every.values()), max(every.values())
    without = "Those without tokens are rounded to nearest or pruned by magnitude. "
    asked = "moe_calibrate_all_experts" if args.moe_calibrate_all_experts else "starved_experts"
    logger.warning(
        f"The experts in {listed(counts)} are modules that the model's own code calls, each with "
        f"its tokens alone ({fewest} to {most}): {asked}={getattr(args, asked)!r} has no effect on "
        f"them. They were calibrated with what they got. {'' if fewest else without}"
        f"{few + ' ' if starved else ''}Calibrate with more data if that is too little."
    )
