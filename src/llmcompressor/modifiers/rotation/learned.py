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
the blocks in reverse order (:mod:`llmcompressor.modeling.gradient_checkpointing`). If blocks are
loaded on demand, progress is saved in the run's journal.
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

from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.errors import DatasetError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import model_device
from llmcompressor.modeling.gradient_checkpointing import Arrive, CheckpointedBlocks
from llmcompressor.modeling.offload import TensorStore, activation_budget, device_activation_budget
from llmcompressor.modeling.patches import forward_overridden
from llmcompressor.modifiers.rotation.plan import Fusion, RotationPlan, cached_gain
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.numerics.rotation import Rotation, cayley_step
from llmcompressor.numerics.straight_through import fake_quantize_matrix
from llmcompressor.observers.tokens import token_mask
from llmcompressor.quantization.fake_quantize import dynamic_fake_quantize
from llmcompressor.quantization.parameters import min_max_parameters
from llmcompressor.runtime.progress import progress
from llmcompressor.runtime.threads import short_spin_waits
from llmcompressor.schemes.bridge import grid_of, needs_global_scale, partition_of

__all__ = [
    "COMPARED",
    "PIECE",
    "LearningResult",
    "RotatedParameters",
    "check_next_tokens",
    "learn_rotations",
    "learning_cost",
]


# --------------------
# Rotated and fake-quantized weights as differentiable functions of the learned rotations.
#
# A weight is computed when it is used, and recomputed in float32 for its gradient: intermediate
# results are held for one weight at a time.

PIECE = 1 << 22
"""Elements of a weight that are made at once where its rows stand for themselves: 16 MiB."""
_NORM = "weight"
_VISITS, _ROUNDING_VISITS = 12, 27
"""Passes over a weight to compute it, and to compute and to round it."""
_FLOAT, _ROUNDING = 4, 9
"""Bytes per weight of a copy, and of rounding: before and after, and whether it was cut off."""


class RotatedParameters:
    """The parameters of a model under the rotations that are being learned.

    Args:
        plan: the rotations that are fused into weights.
        learned: name → a learned rotation of the plan.
    """

    def __init__(self, plan: RotationPlan, learned: Mapping[str, Rotation]) -> None:
        self._plan = plan
        self._gains = plan.gains()  # before norms are replaced by ones
        self._names = {id(rotation): name for name, rotation in learned.items()}
        self._offsets = {norm.module: norm.offset for norm in plan.norms}

    def sources(self, modules: Iterable[Module]) -> list[str]:
        """Names of the learned rotations that affect parameters of ``modules``."""
        found: dict[str, None] = {}
        for module in modules:
            fusion = self._plan.fusions.get(module)
            if fusion is not None:
                found |= dict.fromkeys(self._learned_names_in(fusion))
        return list(found)

    @contextlib.contextmanager
    def inside(self, modules: Iterable[Module], leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """Give ``modules`` their rotated parameters while the body runs; none is trained.

        Args:
            modules: their own parameters are loaded.
            leaves: name → the current rotation, float32.
        """
        changes = [(module, self._values(module, leaves)) for module in modules]
        before = [(module, dict(module._parameters)) for module, _ in changes]
        try:
            for module, values in changes:
                for name, value in values.items():
                    module._parameters[name] = value  # type: ignore[assignment]  # in the graph
            yield
        finally:
            for module, own in before:
                module._parameters.update(own)

    def _learned_names_in(self, fusion: Fusion) -> list[str]:
        return self._learned_names_of((*fusion.inputs, *fusion.outputs))

    def _learned_names_of(self, rotations: Iterable[Rotation]) -> list[str]:
        names = (self._names.get(id(one)) for one in rotations)
        return list(dict.fromkeys(name for name in names if name is not None))

    def _values(self, module: Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: one for name, one in module._parameters.items() if one is not None}
        found = {name: one.detach() for name, one in own.items()}
        if module in self._offsets and _NORM in own:
            found[_NORM] = torch.full_like(found[_NORM], 1.0 - self._offsets[module])
        fusion = self._plan.fusions.get(module)
        if fusion is None:
            return found
        names = self._learned_names_in(fusion)
        scheme: Any = getattr(module, "quantization_scheme", None)
        args = None if scheme is None else scheme.weights
        gain = None if fusion.norm is None else cached_gain(fusion.norm, self._gains)
        makers: dict[str, _RotatedParameter] = {
            "weight": _RotatedWeight(found["weight"], fusion, self._names, names, gain, args)
        }
        if "bias" in own and isinstance(module, Linear) and fusion.outputs:
            turning = self._learned_names_of(fusion.outputs)  # input rotations do not affect it
            makers["bias"] = _RotatedBias(found["bias"], fusion, self._names, turning)
        for name, maker in makers.items():
            found[name] = _RecomputedParameter.apply(maker, *(leaves[one] for one in maker.names))  # type: ignore[no-untyped-call]
        return found


@dataclass(frozen=True)
class _RotatedParameter:
    """Computation of one rotated parameter.

    Attributes:
        own: the original parameter.
        fusion: its factors.
        names_of: rotation's id → the name that it is learned by.
        names: names of the learned rotations that are passed as leaves.
    """

    own: Tensor
    fusion: Fusion
    names_of: Mapping[int, str]
    names: Sequence[str]

    @property
    def row_chunks(self) -> list[slice]:
        """Slices of rows that can be computed independently, in order."""
        return [slice(None)]

    def compute_rows(self, rows: slice, leaves: Sequence[Tensor]) -> Tensor:
        """Compute some rows, in the parameter's dtype."""
        raise NotImplementedError

    def apply_rotation(self, x: Tensor, rotation: Rotation, leaves: Sequence[Tensor]) -> Tensor:
        """Rotate ``x``, by the learned matrix if the rotation is learned."""
        name = self.names_of.get(id(rotation))
        if name is None:
            return rotation(x)
        leaf = leaves[self.names.index(name)]
        return (x.reshape(*x.shape[:-1], -1, rotation.order) @ leaf).flatten(-2)


@dataclass(frozen=True)
class _RotatedBias(_RotatedParameter):
    """A bias under rotations of the output."""

    def compute_rows(self, rows: slice, leaves: Sequence[Tensor]) -> Tensor:
        """Compute the bias, in its dtype."""
        value = self.own.float()
        for rotation in self.fusion.outputs:
            value = self.apply_rotation(value, rotation, leaves)
        return value.to(self.own.dtype)


@dataclass(frozen=True)
class _RotatedWeight(_RotatedParameter):
    """A weight under its norm's gain, rotations and fake quantization.

    Attributes:
        gain: fused factor of the norm before it, ``[C]``.
        args: its quantization arguments; ``None`` if it is not quantized.
    """

    gain: Tensor | None
    args: Any

    @property
    def row_chunks(self) -> list[slice]:
        """All rows together if outputs are rotated, or scales span several rows; else chunks."""
        rows, columns = self.own.shape
        if self.fusion.outputs or self.args is not None:
            return [slice(None)]
        step = max(1, PIECE // columns)
        return [slice(low, min(low + step, rows)) for low in range(0, rows, step)]

    def compute_rows(self, rows: slice, leaves: Sequence[Tensor]) -> Tensor:
        """Compute some rows of the weight, rotated and fake-quantized."""
        weight = self.own[rows].float()
        if self.gain is not None:
            weight = weight * self.gain.to(weight)
        for rotation in self.fusion.inputs:
            weight = self.apply_rotation(weight, rotation, leaves)
        for rotation in self.fusion.outputs:
            weight = self.apply_rotation(weight.T, rotation, leaves).T
        return self._rounded(weight).to(self.own.dtype)

    def _rounded(self, weight: Tensor) -> Tensor:
        if self.args is None:
            return weight
        parameters = min_max_parameters(weight, self.args)
        return fake_quantize_matrix(
            weight,
            parameters.effective_scale,
            None if self.args.symmetric else parameters.zero_point,
            grid_of(self.args),
            partition_of(self.args),
            through=parameters.through,
        )


class _RecomputedParameter(torch.autograd.Function):
    """Autograd function that computes a parameter in chunks, and recomputes it for its gradient."""

    @staticmethod
    def forward(ctx: Any, maker: _RotatedParameter, *leaves: Tensor) -> Tensor:
        ctx.maker, ctx.leaves = maker, leaves
        pieces = maker.row_chunks
        if len(pieces) == 1:
            return maker.compute_rows(pieces[0], leaves)
        made = torch.empty_like(maker.own)
        for piece in pieces:
            made[piece] = maker.compute_rows(piece, leaves)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        sums: list[Tensor] = []
        for piece in ctx.maker.row_chunks:
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in ctx.leaves]
                made = ctx.maker.compute_rows(piece, leaves)
                found = torch.autograd.grad(made, leaves, gradient[piece])
            if not sums:
                sums = list(found)
                continue
            for total, one in zip(sums, found, strict=True):
                total.add_(one)
        return None, *sums


# --------------------
# Learned rotations: minimize the loss of the quantized model over orthogonal matrices.

_IGNORED = -100
COMPARED = 8
"""Batches, at most, on which the learned rotations are compared with those they began with."""
_PROGRESS = "rotations"
_SHARE_OF_KEEPING = 0.1
"""Of the time that learning takes: how much may go into keeping how far it is."""


@dataclass(frozen=True)
class LearningResult:
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


_FORWARDS = 4
"""Of a step, in products: forward, forward again, and a backward to inputs and to weights."""
_RECOMPUTED = 4
"""Of each weight in a step: three times the weight, once its gradient."""
_SAVED = 1.5
"""Elements that a backward reads, over those that go into Linears and come out of them."""
_LOGIT_BYTES, _LOGIT_COPIES = 8, 2
"""A logit in float32, its logarithm and its gradient; beside two in the model's dtype."""


def learning_cost(
    plan: RotationPlan, modules: Sequence[Module], orders: Iterable[int], steps: int, data: DataSize
) -> Cost:
    """Cost of all steps through some modules, and of the learned matrices.

    Held are the matrices (with momentum in float64, leaf and gradient in float32); in a block all
    of its computed weights, the activations that its backward reads, then what one weight and its
    gradient take.

    Args:
        plan: the rotations that are fused into weights.
        modules: all of a block, or one outside of blocks; their weights may be on the meta device.
        orders: sizes of all learned matrices.
        steps: number of steps.
        data: size of the calibration data.
    """
    sizes = list(orders)
    experts = {
        inner for one in modules if isinstance(one, LinearExperts) for inner in one.modules()
    }
    elements = widths = visits = weights = workspace = itemsize = 0
    for module in modules:
        share = data.expert_share if module in experts else 1
        if isinstance(module, Linear):
            elements += int(share * module.weight.numel())
            widths += int(share * (module.in_features + module.out_features))
            itemsize = module.weight.itemsize
        if module in plan.fusions:
            weight = module.get_parameter("weight")
            rotations, own, more = _recomputed(module, plan.fusions[module])
            visits += weight.numel() * (rotations + ELEMENTWISE * own)
            weights += weight.nbytes
            workspace = max(workspace, more)
    saved = int(data.batch * _SAVED * widths * itemsize)
    step = _FORWARDS * data.batch * elements + _RECOMPUTED * visits
    if len(modules) == 1 and isinstance(modules[0], Linear):  # the head
        logit = _LOGIT_BYTES + _LOGIT_COPIES * itemsize
        saved = data.batch * modules[0].out_features * logit
        step += 8 * sum(size**3 for size in sizes)
    together = max(saved, workspace) if data.on_device else saved + workspace
    return Cost(
        flops=steps * step,
        held_bytes=24 * sum(size**2 for size in sizes),
        # eight matrices in float64 while one moves
        peak_bytes=max(weights + together, 64 * max(sizes, default=0) ** 2),
    )


def _recomputed(module: Module, fusion: Fusion) -> tuple[int, int, int]:
    """Multiply-adds and passes per value of a computed weight, and bytes besides it."""
    weight, rotations = module.get_parameter("weight"), (*fusion.inputs, *fusion.outputs)
    scheme: Any = getattr(module, "quantization_scheme", None)
    is_rounded = scheme is not None and scheme.weights is not None
    at_once = weight.numel() if is_rounded or fusion.outputs else min(weight.numel(), PIECE)
    making = _ROUNDING if is_rounded else weight.itemsize + _FLOAT * bool(fusion.outputs)
    held = at_once * (_FLOAT * (len(rotations) + 1) + making) + weight.nbytes
    passes = _ROUNDING_VISITS if is_rounded else _VISITS
    return sum(one.order for one in rotations), passes, held


def learn_rotations(
    model: Any,
    plan: RotationPlan,
    start: Mapping[str, Rotation],
    batches: Iterable[Mapping[str, Any]] | None,
    *,
    steps: int,
    rate: float,
    keeper: Any = None,
    budget: int | None = None,
    use_loss_mask: bool = False,
    device_memory: int | None = None,
) -> LearningResult:
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
    data = _training_batches(model, list(batches or ()), use_loss_mask=use_loss_mask)
    # held out from the steps if there are enough batches
    compared = data[steps : steps + COMPARED] or data[:COMPARED]
    record = _LearningProgress(keeper)
    shelf = TensorStore(
        activation_budget(budget), device_activation_budget(model_device(model), device_memory)
    )
    with (
        _block_visits(keeper) as arrive,
        contextlib.closing(shelf),
        _fake_quantized_inputs(model),
        short_spin_waits(),
    ):
        learning = _RotationOptimizer(model, plan, start, arrive, shelf)
        if not record.resume_into(learning):
            record.loss_before = learning.mean_loss(compared)
            record.keep(learning)
        with progress(steps - record.steps, "Learning rotations") as advance:
            for step in range(record.steps, steps):
                loss = learning.step(data[step % len(data)], rate * (1 - step / steps))
                record.steps = step + 1
                record.save_if_due(learning, last=step + 1 == steps)
                advance(1, note=f"loss {loss:.4f}")
        if record.loss_after is None:
            record.loss_after = learning.mean_loss(compared)
            record.keep(learning)
    before, after = record.loss_before, record.loss_after
    told = f"Rotations learned in {steps} steps: loss {before:.4f} before, {after:.4f} after"
    if not _is_better(after, before):
        logger.warning(f"{told}. They are no better, so the first ones are kept.")
        return LearningResult(dict(start), before, after)
    logger.info(f"{told}.")
    return LearningResult(learning.rotations(), before, after)


def _is_better(after: float, before: float) -> bool:
    """Return True if the learned rotations are kept."""
    return after < before


class _LearningProgress:
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

    def resume_into(self, learning: _RotationOptimizer) -> bool:
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

    def save_if_due(self, learning: _RotationOptimizer, *, last: bool) -> None:
        """Save the progress, unless saving would take a large share of the time."""
        if last or (time.monotonic() - self._since) * _SHARE_OF_KEEPING >= self._took:
            self.keep(learning)

    def keep(self, learning: _RotationOptimizer) -> None:
        """Save the progress; it is durable on return."""
        if self._keeper is None:
            return
        began = time.monotonic()
        figures = {"steps": self.steps, "before": self.loss_before, "after": self.loss_after}
        self._keeper.remember(_PROGRESS, learning.tensors(), figures)
        self._since = time.monotonic()
        self._took = self._since - began


class _RotationOptimizer:
    """Optimizer state of the learned rotations.

    Args:
        model: its parameters are not changed.
        plan: the rotations that are fused into weights.
        start: the initial rotations, by name.
        arrive: loads a block.
        shelf: stores the inputs of blocks.
    """

    def __init__(
        self,
        model: Any,
        plan: RotationPlan,
        start: Mapping[str, Rotation],
        arrive: Arrive,
        shelf: TensorStore,
    ) -> None:
        device = model_device(model)
        self._model = model
        self._matrices = {name: one.matrix().contiguous().to(device) for name, one in start.items()}
        self._momenta = {name: torch.zeros_like(one) for name, one in self._matrices.items()}
        self._turned = RotatedParameters(plan, start)
        blocks = list(find_blocks(model))
        self._names = {block: self._turned.sources(block.modules()) for block in blocks}
        self._blocks = CheckpointedBlocks(blocks, arrive, self._inside, shelf)
        self._others = _NonBlockModules(model, plan, self._turned)

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
            with self._blocks.checkpointing(made_of), self._others.turned(leaves):
                loss = _loss(self._model, batch)
                if self._others.find_uncalled():
                    continue
                if not torch.isfinite(loss):
                    raise NonFiniteError("The loss of the rounded model is not finite.")
                if not descend:
                    return float(loss), ()
                wanted = list(leaves.values())
                return float(loss.detach()), torch.autograd.grad(loss, wanted, allow_unused=True)


class _NonBlockModules:
    """Rotated parameters outside of blocks: swapped in while a module is called, or permanently.

    Args:
        model: loaded, except for its blocks.
        plan: the rotations that are fused into weights.
        turned: computes the rotated parameters.
    """

    def __init__(self, model: Module, plan: RotationPlan, turned: RotatedParameters) -> None:
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

        with forward_overridden(self._calls, stub), self._turned.inside(self._standing, leaves):
            yield

    def find_uncalled(self) -> bool:
        """Return True if a module was not called; its weight is swapped permanently from now on."""
        missed = [module for module in self._calls if module not in self._called]
        self._standing += missed
        self._calls = [module for module in self._calls if module in self._called]
        return bool(missed)


@contextlib.contextmanager
def _block_visits(keeper: Any) -> Iterator[Arrive]:
    """Yield the function that loads a block; a no-op if all are in memory."""
    if keeper is None:
        yield lambda block, then: None
        return
    with keeper.visits() as visit:
        yield visit


@contextlib.contextmanager
def _fake_quantized_inputs(model: Module) -> Iterator[None]:
    """Fake-quantize the inputs of quantized modules while the body runs."""
    quantized = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
    if not quantized:
        logger.warning(
            "No later modifier quantizes anything: rotations are learned for nothing to be rounded."
        )
    handles = [module.register_forward_pre_hook(_fake_quantize_input) for module in quantized]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_next_tokens(batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool) -> None:
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
    if any(_has_target(_labels(batch, use_loss_mask=use_loss_mask)) for batch in batches):
        return
    raise DatasetError(
        "Rotations are learned by predicting next tokens, and no sample has one to predict.",
        "Give longer samples, or a loss_mask that is 1 somewhere behind the first token."
        if use_loss_mask
        else "Give longer samples.",
    )


def _has_target(labels: Tensor) -> bool:
    return bool((labels[:, 1:] != _IGNORED).any())


def _labels(batch: Mapping[str, Any], *, use_loss_mask: bool) -> Tensor:
    """The labels of a batch, with padding and masked tokens ignored."""
    labels: Tensor = batch["input_ids"]
    for one in (token_mask(batch), batch.get("loss_mask") if use_loss_mask else None):
        labels = labels if one is None else labels.masked_fill(one.to(labels.device) == 0, _IGNORED)
    return labels


def _training_batches(
    model: Any, batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool
) -> list[dict[str, Any]]:
    """The batches that have a token to predict.

    Raises:
        DatasetError: there is none.
    """
    check_next_tokens(batches, use_loss_mask=use_loss_mask)
    every = [_with_labels(model, batch, use_loss_mask=use_loss_mask) for batch in batches]
    data = [batch for batch in every if _has_target(batch["labels"])]
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


def _fake_quantize_input(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Fake-quantize the input of a quantized module, with dynamic scales."""
    scheme: Any = module.quantization_scheme
    activations = scheme.input_activations
    if activations is None or not isinstance(module, Linear) or needs_global_scale(activations):
        return None
    return (dynamic_fake_quantize(args[0], activations), *args[1:])
