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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.core.block_source import BlockSource
from llmcompressor.core.contract import ELEMENTWISE, Cost, DataSize
from llmcompressor.equalization.rescale import swapped_parameters
from llmcompressor.errors import DatasetError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import model_device
from llmcompressor.modeling.gradient_checkpointing import Arrive, CheckpointedBlocks
from llmcompressor.modeling.offload import TensorStore, activation_budget, device_activation_budget
from llmcompressor.modifiers.rotation.plan import Fusion, RotationPlan
from llmcompressor.modifiers.rotation.probe import swapped_while_running
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.numerics.rotation import Rotation, cayley_step
from llmcompressor.numerics.straight_through import fake_quantize_matrix
from llmcompressor.observers.tokens import token_mask
from llmcompressor.quantization.fake_quantize import dynamic_fake_quantize
from llmcompressor.quantization.parameters import min_max_parameters
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.durable import SavingPace
from llmcompressor.runtime.progress import progress
from llmcompressor.runtime.threads import short_spin_waits
from llmcompressor.schemes.bridge import grid_of, needs_global_scale, partition_of

# --------------------
# Rotated and fake-quantized weights as differentiable functions of the learned rotations.
#
# A weight is computed when it is used, and recomputed in float32 for its gradient: intermediate
# results are held for one weight at a time.

PIECE = 1 << 22
"""Elements of a weight that are made at once where its rows stand for themselves: 16 MiB."""
_VISITS, _ROUNDING_VISITS = 12, 27
"""Passes over a weight to compute it, and to compute and to round it."""
_FLOAT, _ROUNDING = 4, 9
"""Bytes per weight of a copy, and of rounding: before and after, and whether it was cut off."""

Leaves = Mapping[str, Tensor]
"""Name → the current matrix of a learned rotation, float32."""


@dataclass(frozen=True)
class _RotatedParameters:
    """The parameters of a model under the rotations that are being learned.

    Attributes:
        plan: the rotations that are fused into weights.
        names: id of a learned rotation → its name.
    """

    plan: RotationPlan
    names: Mapping[int, str]

    def learned_in(self, rotations: Iterable[Rotation]) -> list[str]:
        """Names of the learned rotations among ``rotations``."""
        return list(
            dict.fromkeys(self.names[id(one)] for one in rotations if id(one) in self.names)
        )

    def sources(self, modules: Iterable[Module]) -> list[str]:
        """Names of the learned rotations that affect parameters of ``modules``."""
        fusions = (self.plan.fusions[one] for one in modules if one in self.plan.fusions)
        return self.learned_in(r for one in fusions for r in (*one.inputs, *one.outputs))

    def values(self, module: Module, leaves: Leaves) -> dict[str, Tensor]:
        """Parameters of a loaded module, in the graph of ``leaves``; none is trained."""
        own = {name: one.detach() for name, one in module._parameters.items() if one is not None}
        fusion, norm = self.plan.fusions.get(module), self.plan.norms.get(module)
        if norm is not None and "weight" in own:
            own["weight"] = torch.full_like(own["weight"], 1.0 - norm.offset)
        if fusion is None:
            return own
        factor_C = None if fusion.norm is None else self.plan.factor_of(fusion.norm)
        scheme: Any = getattr(module, "quantization_scheme", None)
        args = None if scheme is None else scheme.weights

        def weight_rows(rows: slice, using: Leaves) -> Tensor:
            weight = own_weight[rows].float()
            if factor_C is not None:
                weight = weight * factor_C.to(weight)
            weight = self._rotate(weight, fusion.inputs, using)
            if fusion.outputs:
                weight = self._rotate(weight.T, fusion.outputs, using).T
            return (weight if args is None else _rounded(weight, args)).to(own_weight.dtype)

        own_weight, own_bias = own["weight"], own.get("bias", torch.empty(0))
        rows, columns = own_weight.shape
        apart = not fusion.outputs and args is None  # else scales or rotations span rows
        step = max(1, PIECE // columns) if apart else rows
        chunks = [slice(low, min(low + step, rows)) for low in range(0, rows, step)]
        names = self.learned_in((*fusion.inputs, *fusion.outputs))
        own["weight"] = _recomputed(weight_rows, own_weight, chunks, names, leaves)
        if "bias" in own and isinstance(module, Linear) and fusion.outputs:
            turning = self.learned_in(fusion.outputs)  # input rotations do not affect it
            own["bias"] = _recomputed(
                lambda _, using: self._rotate(own_bias.float(), fusion.outputs, using).to(own_bias),
                own_bias,
                [slice(None)],
                turning,
                leaves,
            )
        return own

    def _rotate(self, x: Tensor, rotations: Iterable[Rotation], leaves: Leaves) -> Tensor:
        for one in rotations:
            leaf = leaves.get(self.names.get(id(one), ""))
            if leaf is None:
                x = one(x)
            else:
                x = (x.reshape(*x.shape[:-1], -1, one.order) @ leaf).flatten(-2)
        return x

    def inside(self, modules: Iterable[Module], leaves: Leaves) -> AbstractContextManager[None]:
        """Give ``modules`` their rotated parameters in a context."""
        return swapped_parameters({module: self.values(module, leaves) for module in modules})


def _rounded(weight: Tensor, args: Any) -> Tensor:
    parameters = min_max_parameters(weight, args)
    return fake_quantize_matrix(
        weight,
        parameters.effective_scale,
        None if args.symmetric else parameters.zero_point,
        grid_of(args),
        partition_of(args),
        through=parameters.through,
    )


ComputeRows = Callable[[slice, Leaves], Tensor]


def _recomputed(
    compute: ComputeRows, own: Tensor, chunks: list[slice], names: list[str], leaves: Leaves
) -> Tensor:
    """A parameter computed from the leaves of ``names``, in chunks of rows."""
    used = [leaves[name] for name in names]
    made: Tensor = _RecomputedParameter.apply(compute, own, chunks, names, *used)  # type: ignore[no-untyped-call]
    return made


class _RecomputedParameter(torch.autograd.Function):
    """Autograd function that computes a parameter in chunks, and recomputes it for its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: ComputeRows,
        own: Tensor,
        chunks: list[slice],
        names: list[str],
        *leaves: Tensor,
    ) -> Tensor:
        ctx.saved = (compute, chunks, names, leaves)
        using = dict(zip(names, leaves, strict=True))
        if len(chunks) == 1:
            return compute(chunks[0], using)
        made = torch.empty_like(own)
        for chunk in chunks:
            made[chunk] = compute(chunk, using)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        compute, chunks, names, leaves = ctx.saved
        sums: list[Tensor] = []
        for chunk in chunks:
            with torch.enable_grad():
                fresh = [one.detach().requires_grad_() for one in leaves]
                made = compute(chunk, dict(zip(names, fresh, strict=True)))
                found = torch.autograd.grad(made, fresh, gradient[chunk])
            if not sums:
                sums = list(found)
                continue
            for total, one in zip(sums, found, strict=True):
                total.add_(one)
        return None, None, None, None, *sums


# --------------------
# The loop: steps of Cayley SGD, progress in the journal, comparison with the first rotations.

_IGNORED = -100
COMPARED = 8
"""Batches, at most, on which the learned rotations are compared with those they began with."""
_PROGRESS = "rotations"


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
            rotations, own, more = _recomputation(module, plan.fusions[module])
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


def _recomputation(module: Module, fusion: Fusion) -> tuple[int, int, int]:
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
    blocks: BlockSource,
    budget: int | None = None,
    use_loss_mask: bool = False,
    device_memory: int | None = None,
    ranks: Ranks | None = None,
) -> LearningResult:
    """Learn the rotations of ``start``; all other rotations stay fixed.

    Several ranks share the samples of each batch, and add their gradients before a step.

    Args:
        model: not rotated yet, except for online rotations.
        plan: the rotations that are fused into weights.
        start: name → the initial rotation, an object of the plan.
        batches: calibration batches, used in order, repeatedly if there are fewer than steps.
        steps: number of steps.
        rate: learning rate of the first step; it decays linearly to zero.
        blocks: loads the weights of the blocks, and keeps the progress.
        budget: bytes of activations that may wait in main memory; ``None``: half of the free
            memory.
        use_loss_mask: predict only tokens whose ``loss_mask`` is 1.
        device_memory: limit for bytes on an accelerator; ``None``: its free memory.
        ranks: the ranks of the run, which all have all batches.

    Raises:
        DatasetError: there is no batch, or none with a token to predict.
        NonFiniteError: the loss is NaN or infinite.
    """
    data = _training_batches(model, list(batches or ()), use_loss_mask=use_loss_mask)
    # held out from the steps if there are enough batches
    compared = data[steps : steps + COMPARED] or data[:COMPARED]
    shelf = TensorStore(
        activation_budget(budget), device_activation_budget(model_device(model), device_memory)
    )
    with (
        blocks.visits() as arrive,
        contextlib.closing(shelf),
        _fake_quantized_inputs(model),
        short_spin_waits(),
    ):
        learning = _RotationOptimizer(model, plan, start, arrive, shelf, blocks, ranks)
        if not learning.resume():
            learning.loss_before = learning.mean_loss(compared)
            learning.keep()
        with progress(steps - learning.steps, "Learning rotations") as advance:
            for step in range(learning.steps, steps):
                loss = learning.step(data[step % len(data)], rate * (1 - step / steps))
                learning.keep_if_due(last=step + 1 == steps)
                advance(1, note=f"loss {loss:.4f}")
        if learning.loss_after is None:
            learning.loss_after = learning.mean_loss(compared)
            learning.keep()
    before, after = learning.loss_before, learning.loss_after
    told = f"Rotations learned in {steps} steps: loss {before:.4f} before, {after:.4f} after"
    if after >= before:
        logger.warning(f"{told}. They are no better, so the first ones are kept.")
        return LearningResult(dict(start), before, after)
    logger.info(f"{told}.")
    return LearningResult(learning.rotations(), before, after)


class _RotationOptimizer:
    """Optimizer of the learned rotations, with its progress.

    Args:
        model: its parameters are not changed.
        plan: the rotations that are fused into weights.
        start: the initial rotations, by name.
        arrive: loads a block.
        shelf: stores the inputs of blocks.
        source: keeps the progress, where the run can be continued.
        ranks: the ranks of the run.

    Attributes:
        steps: number of completed steps.
        loss_before: initial loss on the comparison batches.
        loss_after: final loss on them; ``None`` while learning.
    """

    def __init__(
        self,
        model: Any,
        plan: RotationPlan,
        start: Mapping[str, Rotation],
        arrive: Arrive,
        shelf: TensorStore,
        source: BlockSource,
        ranks: Ranks | None = None,
    ) -> None:
        device = model_device(model)
        self._model, self._source, self._ranks = model, source, ranks or Ranks()
        self._matrices = {name: one.matrix().contiguous().to(device) for name, one in start.items()}
        self._momenta = {name: torch.zeros_like(one) for name, one in self._matrices.items()}
        self._rotated = _RotatedParameters(plan, {id(one): name for name, one in start.items()})
        plan.read_factors()  # before norms are replaced by ones
        blocks = {block: list(block.modules()) for block in find_blocks(model)}
        self._sources = {block: self._rotated.sources(parts) for block, parts in blocks.items()}
        self._blocks = CheckpointedBlocks(list(blocks), arrive, self._inside, shelf)
        inside = {part for parts in blocks.values() for part in parts}
        self._outside = {
            one: [one] for one in model.modules() if one._parameters and one not in inside
        }
        self.steps, self.loss_before = 0, 0.0
        self.loss_after: float | None = None
        self._pace = SavingPace()

    def step(self, batch: Mapping[str, Any], rate: float) -> float:
        """Take one step on one batch of all ranks; return the loss before it."""
        loss, gradients = self._gradients(batch)
        told = [loss, *(float(name in gradients) for name in self._matrices)]
        loss, *has = self._sum_all(told)
        for name, number in zip(list(self._matrices), has, strict=True):
            if not number:  # no module that it rotates was called
                continue
            none = torch.zeros_like(self._matrices[name], dtype=torch.float32)
            gradient = gradients.get(name, none)
            gradient = self._ranks.sum_all(gradient, what=f"gradient of {name}")
            moved = cayley_step(self._matrices[name], gradient, self._momenta[name], rate)
            # a solver returns column-major matrices, files hold row-major ones; their products are
            # not bitwise equal, but a resumed run has to give the same bits
            self._matrices[name], self._momenta[name] = (one.contiguous() for one in moved)
        self.steps += 1
        return loss

    def _gradients(self, batch: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
        """The loss of the samples of this rank, and its gradients by rotation."""
        own, share = _part_of(batch, self._ranks)
        if not share:
            return 0.0, {}
        with torch.enable_grad():
            leaves = {name: one.float().requires_grad_() for name, one in self._matrices.items()}
            with self._rotating(leaves):
                loss = _loss(self._model, own) * share
                wanted = list(leaves.values())
                found = torch.autograd.grad(loss, wanted, allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        return float(loss.detach()), {name: one for name, one in pairs if one is not None}

    def _sum_all(self, values: Sequence[float]) -> list[float]:
        own = torch.tensor(values, dtype=torch.float64)
        found: list[float] = self._ranks.sum_all(own, what="losses").tolist()
        return found

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Mapping[str, Any]]) -> float:
        """Mean loss over several batches with the current matrices."""
        leaves = {name: one.float() for name, one in self._matrices.items()}
        with self._rotating(leaves):
            mine = batches[self._ranks.rank :: self._ranks.count]
            own = sum(float(_loss(self._model, batch)) for batch in mine)
        return self._sum_all([own])[0] / len(batches)

    def rotations(self) -> dict[str, Rotation]:
        """The current matrices as rotations; those of the first rank for all."""
        own = self._matrices if self._ranks.rank == 0 else {}
        found = self._ranks.broadcast_from(0, own, what="learned rotations")
        return {name: Rotation.of_matrix(one.cpu()) for name, one in found.items()}

    @contextlib.contextmanager
    def _rotating(self, leaves: Leaves) -> Iterator[None]:
        sources = {block: [leaves[one] for one in own] for block, own in self._sources.items()}
        with (
            self._blocks.checkpointing(sources),
            swapped_while_running(self._outside, lambda one: self._rotated.values(one, leaves)),
        ):
            yield

    def _inside(self, block: Module, matrices: Sequence[Tensor]) -> AbstractContextManager[object]:
        leaves = dict(zip(self._sources[block], matrices, strict=True))
        return self._rotated.inside(block.modules(), leaves)

    # ------------------------------------------------------------------ progress

    def resume(self) -> bool:
        """Resume an earlier run, if there is one; return True if so."""
        is_first = self._ranks.rank == 0
        own, told = (self._source.recall(_PROGRESS) if is_first else None) or ({}, None)
        figures = self._ranks.exchange(told, what="progress of learning")[0]
        if figures is None:
            self._source.forget()
            return False
        tensors = self._ranks.broadcast_from(0, own, what="progress of learning")
        for name, one in self._matrices.items():
            self._matrices[name] = tensors[f"matrix {name}"].to(one.device)
            self._momenta[name] = tensors[f"momentum {name}"].to(one.device)
        self.steps, self.loss_before = figures["steps"], figures["before"]
        self.loss_after = figures["after"]
        if self.loss_after is None:
            logger.info(f"Learning goes on behind step {self.steps}.")
        return True

    def keep_if_due(self, *, last: bool) -> None:
        """Keep the progress, unless that would take a large share of the time."""
        if last or self._pace.is_due():
            self.keep()

    def keep(self) -> None:
        """Keep the progress; it is durable on return. One rank does so for all."""
        if self._ranks.rank != 0:
            return
        tensors = {f"matrix {name}": one for name, one in self._matrices.items()}
        tensors |= {f"momentum {name}": one for name, one in self._momenta.items()}
        figures = {"steps": self.steps, "before": self.loss_before, "after": self.loss_after}
        with self._pace.saving():
            self._source.remember(_PROGRESS, tensors, figures)


# --------------------
# The loss: cross entropy of the next token, with fake-quantized inputs.


def _part_of(batch: Mapping[str, Any], ranks: Ranks) -> tuple[dict[str, Any], float]:
    """The samples of a batch that a rank runs, and their share of the tokens to predict."""
    rows, part = len(batch["labels"]), slice(ranks.rank, None, ranks.count)
    own = {
        name: one[part] if isinstance(one, Tensor) and len(one) == rows else one
        for name, one in batch.items()
    }
    wanted = [int((one["labels"][:, 1:] != _IGNORED).sum()) for one in (own, batch)]
    return own, wanted[0] / wanted[1]


def _loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    flat = model(**inputs).logits[:, :-1].flatten(0, 1).float()
    loss = torch.nn.functional.cross_entropy(
        flat, batch["labels"][:, 1:].flatten(), ignore_index=_IGNORED
    )
    if not torch.isfinite(loss):
        raise NonFiniteError("The loss of the rounded model is not finite.")
    return loss


@contextlib.contextmanager
def _fake_quantized_inputs(model: Module) -> Iterator[None]:
    """Fake-quantize the inputs of quantized Linears, with dynamic scales, while the body runs."""
    quantized = [m for m in model.modules() if getattr(m, "quantization_scheme", None) is not None]
    if not quantized:
        logger.warning(
            "No later modifier quantizes anything: rotations are learned for nothing to be rounded."
        )

    def quantize(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        scheme: Any = module.quantization_scheme
        activations = scheme.input_activations
        if activations is None or needs_global_scale(activations):
            return None
        return (dynamic_fake_quantize(args[0], activations), *args[1:])

    linears = (one for one in quantized if isinstance(one, Linear))
    handles = [module.register_forward_pre_hook(quantize) for module in linears]
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
    labels = (_labels(batch, use_loss_mask=use_loss_mask) for batch in batches)
    if any(bool((one[:, 1:] != _IGNORED).any()) for one in labels):
        return
    mask = ", or a loss_mask that is 1 somewhere behind the first token" if use_loss_mask else ""
    raise DatasetError(
        "Rotations are learned by predicting next tokens, and no sample has one to predict.",
        f"Give longer samples{mask}.",
    )


def _labels(batch: Mapping[str, Any], *, use_loss_mask: bool) -> Tensor:
    """The labels of a batch, with padding and masked tokens ignored."""
    labels: Tensor = batch["input_ids"]
    for one in (token_mask(batch), batch.get("loss_mask") if use_loss_mask else None):
        labels = labels if one is None else labels.masked_fill(one.to(labels.device) == 0, _IGNORED)
    return labels


def _training_batches(
    model: Any, batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool
) -> list[dict[str, Any]]:
    """The model inputs, with labels, of the batches that have a token to predict.

    Raises:
        DatasetError: there is none.
    """
    check_next_tokens(batches, use_loss_mask=use_loss_mask)
    device, data = model_device(model), []
    for batch in batches:
        labels = _labels(batch, use_loss_mask=use_loss_mask)
        if bool((labels[:, 1:] != _IGNORED).any()):
            inputs = {"input_ids": batch["input_ids"], "labels": labels}
            if batch.get("attention_mask") is not None:
                inputs["attention_mask"] = batch["attention_mask"]
            moved = {name: one.to(device) for name, one in inputs.items()}
            data.append({**moved, "use_cache": False})
    if len(data) < len(batches):
        logger.warning(
            f"Rotations are learned without {len(batches) - len(data)} of {len(batches)} batches, "
            "in which there is nothing to predict."
        )
    return data
