# SPDX-License-Identifier: Apache-2.0
"""How many calibration tokens each module saw, and a word on those that saw too few or none."""

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
            if is_matrix(module):
                self._seen[module] = 0
                self.register_hook(module, count, "forward_pre", with_kwargs=True)


def check_called(calibrated: Calibrated, blocks: Mapping[Module, str]) -> None:
    """Refuse a model that runs the forward of a block and does not call the block.

    Args:
        calibrated: what a first small forward has called.
        blocks: those whose weights are loaded when they are called.

    Raises:
        TargetError: it does; its weights would not be there.
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
    """Tell at the beginning what may turn out at the end to be reached by no batch.

    Args:
        calibrated: what a first small forward has called.
        modifiers: of the pass; some have a policy for what no batch reaches.
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
