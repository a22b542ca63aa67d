# SPDX-License-Identifier: Apache-2.0
r"""Learned rotations: minimize the loss of the quantized model over orthogonal matrices.

SpinQuant, arXiv:2405.16406, equation 2: over orthogonal R1 and R2,

.. math:: \min_{R_1, R_2}\; L\big(\text{model with rotated, rounded weights and activations}\big)

with L the cross entropy of the next token on calibration data, and the rounding that of the
schemes that subsequent modifiers of the recipe have attached to the modules. Gradients pass
straight through the rounding. The model's own parameters do not change: each step computes rotated
and rounded weights from them, runs one batch forward and backward, and takes a step of Cayley SGD.

A step takes the time of a training batch, plus computing each weight three times. Either all blocks
are in memory, or one at a time: the forward saves the inputs of each block, and the backward visits
the blocks in reverse order (:mod:`llmcompressor.modeling.recomputed`). If blocks are loaded on
demand, progress is saved in the run's journal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.errors import DatasetError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.inputs import model_device
from llmcompressor.modeling.recomputed import Arrive, Recomputed
from llmcompressor.modeling.spilled import Shelf, activation_budget, room_on
from llmcompressor.modeling.stubs import stubbed
from llmcompressor.modifiers.rotation.plan import Plan
from llmcompressor.modifiers.rotation.turned import Turned
from llmcompressor.numerics.cayley import cayley_step
from llmcompressor.numerics.rotation import Rotation
from llmcompressor.observers.tokens import token_mask
from llmcompressor.progress import progress
from llmcompressor.quantization.fake_activations import dynamic_fake_quantize
from llmcompressor.schemes.bridge import needs_global_scale
from llmcompressor.threads import short_waits

__all__ = ["COMPARED", "Learned", "check_predictable", "learn_rotations"]

_IGNORED = -100
COMPARED = 8
"""Batches, at most, on which the learned rotations are compared with those they began with."""
_PROGRESS = "rotations"
_SHARE_OF_KEEPING = 0.1
"""Of the time that learning takes: how much may go into keeping how far it is."""


@dataclass(frozen=True)
class Learned:
    """Result of learning rotations.

    Attributes:
        rotations: rotations by name; the initial ones if the loss did not decrease.
        loss_before: loss of the quantized model on the comparison batches, with the initial
            rotations.
        loss_after: the same with the learned ones.
    """

    rotations: dict[str, Rotation]
    loss_before: float
    loss_after: float


def learn_rotations(
    model: Any,
    plan: Plan,
    start: Mapping[str, Rotation],
    batches: Iterable[Mapping[str, Any]] | None,
    *,
    steps: int,
    rate: float,
    keeper: Any = None,
    budget: int | None = None,
    use_loss_mask: bool = False,
    device_memory: int | None = None,
) -> Learned:
    """Learn the rotations of ``start``; all other rotations stay fixed.

    Args:
        model: not rotated yet, except for online rotations.
        plan: the rotations that are fused into weights.
        start: name → the initial rotation, an object of the plan.
        batches: calibration batches, used in order, repeatedly if there are fewer than steps.
        steps: number of steps.
        rate: learning rate of the first step; it decays linearly to zero.
        keeper: loads the weights of the blocks; ``None`` if all are in memory.
        budget: bytes of activations that may wait in main memory; ``None``: half of the free
            memory.
        use_loss_mask: predict only tokens whose ``loss_mask`` is 1.
        device_memory: limit for bytes on an accelerator; ``None``: its free memory.

    Raises:
        DatasetError: there is no batch, or none with a token to predict.
        NonFiniteError: the loss is NaN or infinite.
    """
    data = _to_learn_from(model, list(batches or ()), use_loss_mask=use_loss_mask)
    compared = _to_compare_on(data, steps)
    record = _Record(keeper)
    shelf = Shelf(activation_budget(budget), room_on(model_device(model), device_memory))
    with (
        _arriving(keeper) as arrive,
        contextlib.closing(shelf),
        _rounded_inputs(model),
        short_waits(),
    ):
        learning = _Learning(model, plan, start, arrive, shelf)
        if not record.continues(learning):
            record.loss_before = learning.mean_loss(compared)
            record.keep(learning)
        with progress(steps - record.steps, "Learning rotations") as advance:
            for step in range(record.steps, steps):
                loss = learning.step(data[step % len(data)], rate * (1 - step / steps))
                record.steps = step + 1
                record.keep_at_times(learning, last=step + 1 == steps)
                advance(1, note=f"loss {loss:.4f}")
        if record.loss_after is None:
            record.loss_after = learning.mean_loss(compared)
            record.keep(learning)
    before, after = record.loss_before, record.loss_after
    told = f"Rotations learned in {steps} steps: loss {before:.4f} before, {after:.4f} after"
    if not _is_better(after, before):
        logger.warning(f"{told}. They are no better, so the first ones are kept.")
        return Learned(dict(start), before, after)
    logger.info(f"{told}.")
    return Learned(learning.rotations(), before, after)


def _to_compare_on(data: Sequence[Any], steps: int) -> Sequence[Any]:
    """Comparison batches, held out from the steps if there are enough batches.

    >>> list(_to_compare_on(range(104), steps=100)), len(_to_compare_on(range(60), steps=100))
    ([100, 101, 102, 103], 8)
    """
    return data[steps : steps + COMPARED] or data[:COMPARED]


def _is_better(after: float, before: float) -> bool:
    """Return True if the learned rotations are kept."""
    return after < before


class _Record:
    """Progress of the learning, saved in the run's journal.

    Args:
        keeper: saves it; ``None``: nothing is saved.

    Attributes:
        steps: number of completed steps.
        loss_before: initial loss on the comparison batches.
        loss_after: final loss on them; ``None`` while learning.
    """

    def __init__(self, keeper: Any) -> None:
        self._keeper = keeper
        self.steps = 0
        self.loss_before = 0.0
        self.loss_after: float | None = None
        self._took = 0.0
        self._since = time.monotonic()

    def continues(self, learning: _Learning) -> bool:
        """Resume an earlier run into ``learning``, if there is one; return True if so."""
        if self._keeper is None:
            return False
        found = self._keeper.recall(_PROGRESS)
        if found is None:
            self._keeper.forget()
            return False
        tensors, figures = found
        learning.load(tensors)
        self.steps, self.loss_before = figures["steps"], figures["before"]
        self.loss_after = figures["after"]
        if self.loss_after is None:
            logger.info(f"Learning goes on behind step {self.steps}.")
        return True

    def keep_at_times(self, learning: _Learning, *, last: bool) -> None:
        """Save the progress, unless saving would take a large share of the time."""
        if last or (time.monotonic() - self._since) * _SHARE_OF_KEEPING >= self._took:
            self.keep(learning)

    def keep(self, learning: _Learning) -> None:
        """Save the progress; it is durable on return."""
        if self._keeper is None:
            return
        began = time.monotonic()
        figures = {"steps": self.steps, "before": self.loss_before, "after": self.loss_after}
        self._keeper.remember(_PROGRESS, learning.tensors(), figures)
        self._since = time.monotonic()
        self._took = self._since - began


class _Learning:
    """Optimizer state of the learned rotations.

    Args:
        model: its parameters are not changed.
        plan: the rotations that are fused into weights.
        start: the initial rotations, by name.
        arrive: loads a block.
        shelf: stores the inputs of blocks.
    """

    def __init__(
        self, model: Any, plan: Plan, start: Mapping[str, Rotation], arrive: Arrive, shelf: Shelf
    ) -> None:
        device = model_device(model)
        self._model = model
        self._matrices = {name: one.matrix().contiguous().to(device) for name, one in start.items()}
        self._momenta = {name: torch.zeros_like(one) for name, one in self._matrices.items()}
        self._turned = Turned(plan, start)
        blocks = list(find_blocks(model))
        self._names = {block: self._turned.sources(block.modules()) for block in blocks}
        self._blocks = Recomputed(blocks, arrive, self._inside, shelf)
        self._others = _Others(model, plan, self._turned)

    def step(self, batch: Mapping[str, Any], rate: float) -> float:
        """Take one step on one batch; return the loss before it."""
        with torch.enable_grad():
            leaves = {name: one.float().requires_grad_() for name, one in self._matrices.items()}
            loss, gradients = self._loss(leaves, batch, descend=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is None:  # no module that it rotates was called
                continue
            moved = cayley_step(self._matrices[name], gradient, self._momenta[name], rate)
            # a solver returns column-major matrices, files hold row-major ones; their products are
            # not bitwise equal, but a resumed run has to give the same bits
            self._matrices[name], self._momenta[name] = (one.contiguous() for one in moved)
        return loss

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Mapping[str, Any]]) -> float:
        """Mean loss over several batches with the current matrices."""
        leaves = {name: one.float() for name, one in self._matrices.items()}
        return sum(self._loss(leaves, batch)[0] for batch in batches) / len(batches)

    def rotations(self) -> dict[str, Rotation]:
        """The current matrices as rotations."""
        return {name: Rotation.of_matrix(one.cpu()) for name, one in self._matrices.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All state that a later run needs to resume."""
        matrices = {f"matrix {name}": one for name, one in self._matrices.items()}
        return matrices | {f"momentum {name}": one for name, one in self._momenta.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from :meth:`tensors`."""
        for name, one in self._matrices.items():
            self._matrices[name] = tensors[f"matrix {name}"].to(one.device)
            self._momenta[name] = tensors[f"momentum {name}"].to(one.device)

    def _inside(self, block: Module, matrices: Sequence[Tensor]) -> AbstractContextManager[object]:
        leaves = dict(zip(self._names[block], matrices, strict=True))
        return self._turned.inside(block.modules(), leaves)

    def _loss(
        self, leaves: Mapping[str, Tensor], batch: Mapping[str, Any], *, descend: bool = False
    ) -> tuple[float, Sequence[Tensor | None]]:
        """The loss, and with ``descend`` its gradients by matrix."""
        made_of = {block: [leaves[one] for one in own] for block, own in self._names.items()}
        while True:
            with self._blocks.made_of(made_of), self._others.turned(leaves):
                loss = _loss(self._model, batch)
                if self._others.find_uncalled():
                    continue
                if not torch.isfinite(loss):
                    raise NonFiniteError("The loss of the rounded model is not finite.")
                if not descend:
                    return float(loss), ()
                wanted = list(leaves.values())
                return float(loss.detach()), torch.autograd.grad(loss, wanted, allow_unused=True)


class _Others:
    """Rotated parameters outside of blocks: swapped in while a module is called, or permanently.

    Args:
        model: loaded, except for its blocks.
        plan: the rotations that are fused into weights.
        turned: computes the rotated parameters.
    """

    def __init__(self, model: Module, plan: Plan, turned: Turned) -> None:
        inside = {part for block in find_blocks(model) for part in block.modules()}
        outside = [module for module in model.modules() if module not in inside]
        self._turned = turned
        self._calls = [module for module in outside if module in plan.fusions]
        self._standing = [module for module in outside if module not in plan.fusions]
        self._called: set[Module] = set()

    @contextlib.contextmanager
    def turned(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the parameters by rotated ones while the body runs.

        Args:
            leaves: name → the current rotation.
        """

        def stub(module: Module, forward: Any) -> Any:
            def turned(*args: Any, **kwargs: Any) -> Any:
                self._called.add(module)
                with self._turned.inside([module], leaves):
                    return forward(*args, **kwargs)

            return turned

        with stubbed(self._calls, stub), self._turned.inside(self._standing, leaves):
            yield

    def find_uncalled(self) -> bool:
        """Return True if a module was not called; its weight is swapped permanently from now on."""
        missed = [module for module in self._calls if module not in self._called]
        self._standing += missed
        self._calls = [module for module in self._calls if module in self._called]
        return bool(missed)


@contextlib.contextmanager
def _arriving(keeper: Any) -> Iterator[Arrive]:
    """Yield the function that loads a block; a no-op if all are in memory."""
    if keeper is None:
        yield lambda block, then: None
        return
    with keeper.visits() as visit:
        yield visit


@contextlib.contextmanager
def _rounded_inputs(model: Module) -> Iterator[None]:
    """Fake-quantize the inputs of quantized modules while the body runs."""
    quantized = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
    if not quantized:
        logger.warning(
            "No later modifier quantizes anything: rotations are learned for nothing to be rounded."
        )
    handles = [module.register_forward_pre_hook(_round_input) for module in quantized]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_predictable(batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool) -> None:
    """Refuse data without a next token to predict.

    Raises:
        DatasetError: there is no batch, one without token ids, or no next token to predict.
    """
    if not batches:
        raise DatasetError("Learned rotations need calibration data.", "Pass dataset=...")
    if not all(isinstance(batch.get("input_ids"), Tensor) for batch in batches):
        raise DatasetError(
            "Rotations are learned by predicting next tokens, and a sample has no input_ids.",
            "Give text, or tokens.",
        )
    if any(_has_next(_labels(batch, use_loss_mask=use_loss_mask)) for batch in batches):
        return
    raise DatasetError(
        "Rotations are learned by predicting next tokens, and no sample has one to predict.",
        "Give longer samples, or a loss_mask that is 1 somewhere behind the first token."
        if use_loss_mask
        else "Give longer samples.",
    )


def _has_next(labels: Tensor) -> bool:
    return bool((labels[:, 1:] != _IGNORED).any())


def _labels(batch: Mapping[str, Any], *, use_loss_mask: bool) -> Tensor:
    """The labels of a batch, with padding and masked tokens ignored."""
    labels: Tensor = batch["input_ids"]
    for one in (token_mask(batch), batch.get("loss_mask") if use_loss_mask else None):
        labels = labels if one is None else labels.masked_fill(one.to(labels.device) == 0, _IGNORED)
    return labels


def _to_learn_from(
    model: Any, batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool
) -> list[dict[str, Any]]:
    """The batches that have a token to predict.

    Raises:
        DatasetError: there is none.
    """
    check_predictable(batches, use_loss_mask=use_loss_mask)
    every = [_with_labels(model, batch, use_loss_mask=use_loss_mask) for batch in batches]
    data = [batch for batch in every if _has_next(batch["labels"])]
    if len(data) < len(batches):
        logger.warning(
            f"Rotations are learned without {len(batches) - len(data)} of {len(batches)} batches, "
            "in which there is nothing to predict."
        )
    return data


def _with_labels(
    model: Any, batch: Mapping[str, Any], *, use_loss_mask: bool = False
) -> dict[str, Any]:
    """The model inputs of a batch, with labels."""
    device = model_device(model)
    ids, mask = batch["input_ids"].to(device), batch.get("attention_mask")
    labels = _labels(batch, use_loss_mask=use_loss_mask).to(device)
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    return inputs if mask is None else {**inputs, "attention_mask": mask.to(device)}


def _loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    flat = model(**inputs).logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(
        flat, batch["labels"][:, 1:].flatten(), ignore_index=_IGNORED
    )


def _round_input(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Fake-quantize the input of a quantized module, with dynamic scales."""
    scheme: Any = module.quantization_scheme
    activations = scheme.input_activations
    if activations is None or not isinstance(module, Linear) or needs_global_scale(activations):
        return None
    return (dynamic_fake_quantize(args[0], activations), *args[1:])
