# SPDX-License-Identifier: Apache-2.0
"""Calibration coverage: tokens seen by each module, and warnings for modules that saw too few."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.alike_matrices import is_matrix
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.observers.tokens import count_tokens
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.wording import listed

if TYPE_CHECKING:
    from llmcompressor.core.state import State
    from llmcompressor.modifiers.modifier import Modifier
    from llmcompressor.pipelines.calibrated import Calibrated

__all__ = ["check_called", "scarcity_reported", "warn_uncalled"]


@contextlib.contextmanager
def scarcity_reported(
    model: Module,
    modules: Iterable[Module],
    batches: CalibrationBatches,
    state: State,
    share: float | None,
) -> Iterator[None]:
    """Warn after a calibration about modules that saw less than a share of the tokens.

    Args:
        model: the model being calibrated.
        modules: its calibrated modules.
        batches: the calibration batches.
        state: holds the token mask of the current batch.
        share: required share of all real tokens, between 0 and 1; ``None`` disables counting.
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
    """Counts tokens with hooks that are switched on and off together with those of modifiers."""

    _seen: dict[Module, int] = PrivateAttr(default_factory=dict)

    @property
    def seen(self) -> dict[Module, int]:
        """Number of tokens by module, for modules that get activations."""
        return self._seen

    def watch(self, modules: Iterable[Module], state: State) -> None:
        """Count the tokens of ``modules``, except embeddings, whose inputs are row numbers."""

        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if isinstance(tensor, Tensor) and module in self._seen:
                self._seen[module] += count_tokens(tensor, state.token_mask)

        for module in modules:
            if is_matrix(module):
                self._seen[module] = 0
                self.register_hook(module, count, "forward_pre", with_kwargs=True)


def check_called(calibrated: Calibrated, blocks: Mapping[Module, str]) -> None:
    """Refuse a model that runs the forward of a block without calling the module.

    Args:
        calibrated: result of the dry-run forward.
        blocks: blocks whose weights are loaded when they are called.

    Raises:
        TargetError: a block is not called, so its weights would not be loaded.
    """
    calls = calibrated.order.calls
    for block, name in blocks.items():
        if block not in calls and any(inner in calls for inner in block.modules()):
            raise TargetError(
                f"The model's code runs the forward of {name} without calling the module, so that "
                "its weights cannot be loaded for the time that it runs.",
                "Load the model, and give oneshot that in place of its folder.",
            )


def warn_uncalled(calibrated: Calibrated, modifiers: Sequence[Modifier]) -> None:
    """Warn early about modules that may not be reached by any batch.

    Args:
        calibrated: result of the dry-run forward.
        modifiers: of the pass; some have a policy for unreached modules.
    """
    missed = [
        name
        for module, name in calibrated.names.items()
        if module not in calibrated.order.calls
        and not all(modifier.accepts_unreached(name) for modifier in modifiers)
    ]
    if not missed:
        return
    ends = {name.rpartition(".")[2]: None for name in missed}
    patterns = ", ".join(f"re:.*{end}$" for end in ends if not end.isdecimal())
    logger.warning(
        f"A first forward, of a few tokens of the first batch, did not call {listed(missed)}. If "
        "no batch does, the run will be refused after the last one. Where a model multiplies by "
        "a weight without calling its module, put that on the ignore list"
        f"{f' ({patterns})' if patterns else ''}."
    )
