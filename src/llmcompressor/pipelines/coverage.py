# SPDX-License-Identifier: Apache-2.0
"""How many calibration tokens each module saw, and a word on those that saw too few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Module

from llmcompressor.logger import logger
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.observers.tokens import count_tokens
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.schemes.assign import listed

if TYPE_CHECKING:
    from llmcompressor.core.state import State

__all__ = ["scarcity_reported"]


@contextlib.contextmanager
def scarcity_reported(
    model: Module,
    modules: Iterable[Module],
    batches: CalibrationBatches,
    state: State,
    share: float | None,
) -> Iterator[None]:
    """Warn, after a calibration, of the modules that saw less than a share of its tokens.

    Args:
        model: what is calibrated.
        modules: the parts of it that are.
        batches: what it is calibrated with.
        state: tells which positions of the current batch are real tokens.
        share: of the real tokens of all batches, between 0 and 1; ``None``: nothing is counted.
    """
    if share is None:
        yield
        return
    counter = _Counter()
    counter.watch(modules, state)
    try:
        yield
    finally:
        counter.remove_hooks()
    total = batches.real_tokens
    names = {module: name for name, module in model.named_modules()}
    found = [
        (seen, names.get(module, "?"))
        for module, seen in counter.seen.items()
        if seen < share * total
    ]
    if found:
        shown = listed(f"{name} ({seen})" for seen, name in sorted(found))
        logger.warning(
            f"{len(found)} of {len(counter.seen)} modules saw less than {share:.4g} of the "
            f"{total} calibration tokens: {shown}. Calibrate with more data, or with data that "
            "reaches them."
        )


class _Counter(HooksMixin):
    """Counts tokens where modifiers see them: their hooks are switched off and on together."""

    _seen: dict[Module, int] = PrivateAttr(default_factory=dict)

    @property
    def seen(self) -> dict[Module, int]:
        """Module → its tokens, for modules that get activations."""
        return self._seen

    def watch(self, modules: Iterable[Module], state: State) -> None:
        """Count what ``modules`` get; look-up tables get numbers of rows, and are left out."""

        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if isinstance(tensor, Tensor) and module in self._seen:
                self._seen[module] += count_tokens(tensor, state.token_mask)

        for module in modules:
            if hasattr(module, "in_features"):
                self._seen[module] = 0
                self.register_hook(module, count, "forward_pre", with_kwargs=True)
