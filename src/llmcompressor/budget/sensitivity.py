# SPDX-License-Identifier: Apache-2.0
"""What rounding costs: the expected rise of the loss of each set of modules for each candidate.

The estimate is that of :mod:`llmcompressor.numerics.sensitivity`. Its two factors come from one
forward and one backward of a few samples, block by block
(:mod:`llmcompressor.pipelines.block_gradients`); the labels of the loss are drawn from what the
model predicts. Without data all inputs and gradients count as 1: then it is the error of weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.budget.options import BudgetOptions
from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.checkpoint.kept_statistics import KeptStatistics, StatisticsWriter
from llmcompressor.core.block_source import BlockSource
from llmcompressor.errors import ArgumentError, DatasetError, NonFiniteError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import model_device
from llmcompressor.modeling.fused import fused_sets
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.offload import TensorStore, activation_budget, device_activation_budget
from llmcompressor.numerics.gram import (
    add_column_squares,
    add_upper_product,
    mirror_upper_,
    packed_upper,
    unpacked_upper,
)
from llmcompressor.numerics.sensitivity import compensated_columns, loss_rise
from llmcompressor.pipelines.batches import CalibrationBatches, calibration_mode
from llmcompressor.pipelines.block_gradients import watch_gradients
from llmcompressor.quantization.parameters import observe_weight, weight_of
from llmcompressor.runtime.progress import join_names, progress
from llmcompressor.runtime.threads import short_spin_waits

_ROWS = 512
"""Tokens whose logits are in float32 at once."""
_SEED = 20170


def measure_losses(
    model: Module,
    options: BudgetOptions,
    batches: Sequence[Mapping[str, Any]],
    *,
    source: BlockSource,
    budget: int | str | None = None,
    device_memory: int | None = None,
    use_loss_mask: bool = False,
    keep_in: StatisticsWriter | None = None,
) -> list[list[float]]:
    """Measure the expected rise of the mean loss of a token, in nats, for each set and candidate.

    Args:
        model: the model, unquantized; its blocks may have no weights.
        options: the sets and candidates.
        batches: calibration batches, of which the first samples are used.
        source: loads the blocks.
        budget: bytes of activations that may wait in main memory; ``None``: half of what is free.
        device_memory: limit for bytes on an accelerator; ``None``: its free memory.
        use_loss_mask: only tokens whose ``loss_mask`` is 1 count.
        keep_in: statistics to which all is added that other candidates need.

    Raises:
        DatasetError: there is no batch.
        TargetError: the model returns no logits.
        NonFiniteError: the loss is NaN or infinite.
    """
    data = CalibrationBatches(
        model, first_samples(batches, options.budget.samples), use_loss_mask=use_loss_mask
    )
    names = {module: name for name, module in named_modules(model)}
    wanted = {name for own in options.sets for name in own}
    linears = [module for module, name in names.items() if name in wanted]
    errors = RoundingErrors(model, options, names, keep_in=keep_in)
    blocks = find_blocks(model)
    shelf = TensorStore(
        activation_budget(budget), device_activation_budget(model_device(model), device_memory)
    )

    def leave(block: Module) -> None:
        errors.settle(block.modules(), blocks[block])

    with contextlib.closing(shelf), calibration_mode(model), short_spin_waits():
        losses = watch_gradients(
            model,
            linears,
            data,
            _SampledLoss(data),
            errors.watch,
            source=source,
            shelf=shelf,
            leave=leave,
        )
        inside = {inner for block in blocks for inner in block.modules()}
        errors.settle(one for one in linears if one not in inside)
    if not all(map(torch.isfinite, torch.tensor(losses))):
        raise NonFiniteError("The loss of the model is not finite on the calibration samples.")
    if keep_in is not None:
        samples = options.budget.samples
        keep_in.contents.loss_of = {"samples": samples, "tokens": data.real_tokens}
    return errors.by_set(data.real_tokens)


def kept_losses(
    model: Module, options: BudgetOptions, source: BlockSource, statistics: KeptStatistics
) -> list[list[float]]:
    """What :func:`measure_losses` has found, for any candidates, from what it has kept.

    Args:
        model: the model, unquantized; its blocks may have no weights.
        options: the sets and candidates.
        source: loads the blocks.
        statistics: of this model.

    Raises:
        ArgumentError: they have nothing for a budget, or not for all modules or as many samples.
    """
    known, asked = statistics.modules_with_loss, options.budget.samples
    lacking = [name for own in options.sets for name in own if name not in known]
    if lacking or statistics.loss_of.get("samples") != asked:
        why = f"of {asked} samples, but of {statistics.loss_of.get('samples')}"
        if lacking:
            why = f"of {join_names(lacking)}" if known else "for a budget"
        raise ArgumentError(
            f"The statistics in {statistics.folder} have no gradients {why}.",
            "Collect them in a run with this budget: save_statistics=... (--save-statistics), into "
            "another folder.",
        )
    names = {module: name for name, module in named_modules(model)}
    errors = RoundingErrors(model, options, names, kept=statistics)
    _settle_all(errors, source)
    return errors.by_set(statistics.loss_of["tokens"])


def weight_errors(model: Module, options: BudgetOptions, source: BlockSource) -> list[list[float]]:
    """Half the squared error of all weights, for each set and candidate, without any data.

    Args:
        model: the model, unquantized; its blocks may have no weights.
        options: the sets and candidates.
        source: loads the blocks.
    """
    names = {module: name for name, module in named_modules(model)}
    errors = RoundingErrors(model, options, names, without_data=True)
    _settle_all(errors, source)
    return errors.by_set(1)


def _settle_all(errors: RoundingErrors, source: BlockSource) -> None:
    """Settle block by block, each with its weights, and then all outside of blocks."""
    blocks = list(source.names)
    inside = {inner for block in blocks for inner in block.modules()}
    following = [*blocks[1:], None]
    with source.visits() as visit, progress(len(blocks), "Measuring errors") as advance:
        for block, then in zip(blocks, following, strict=False):
            visit(block, then)
            errors.settle(block.modules(), source.names[block])
            advance(1, note=source.names[block])
    errors.settle(one for one in errors.names if one not in inside)


def first_samples(batches: Iterable[Mapping[str, Any]], samples: int) -> list[dict[str, Any]]:
    """The first batches, up to a number of samples; of the last one the first rows."""
    found: list[dict[str, Any]] = []
    left = samples
    for batch in batches:
        ids = batch.get("input_ids")
        rows = len(ids) if isinstance(ids, Tensor) and ids.ndim > 1 else 1
        if rows > left:
            own = {
                name: one[:left]
                if isinstance(one, Tensor) and one.ndim and len(one) == rows
                else one
                for name, one in batch.items()
            }
            found.append(own)
            break
        found.append(dict(batch))
        left -= rows
        if left == 0:
            break
    if not found:
        raise DatasetError("The calibration data holds no batch.", "Give at least one sample.")
    return found


class _SampledLoss:
    """Sum of the losses of a batch's tokens, with labels that are drawn from the predictions."""

    def __init__(self, batches: CalibrationBatches) -> None:
        self._batches = batches

    def __call__(self, index: int, returned: Any) -> Tensor:
        logits = getattr(returned, "logits", None)
        if not isinstance(logits, Tensor):
            raise TargetError(
                "A budget weighs modules by what the model's predictions lose, and the model "
                "returns no logits.",
                "Give schemes instead of a budget.",
            )
        mask = self._batches.mask(index)
        is_alike = mask is not None and mask.shape == logits.shape[:-1]
        flat_TV = logits[mask.to(logits.device)] if is_alike else logits.flatten(0, -2)  # type: ignore[union-attr]  # is_alike says so
        dice = torch.Generator(device=flat_TV.device).manual_seed(_SEED + index)
        total = flat_TV.new_zeros((), dtype=torch.float32)
        for part in torch.split(flat_TV, _ROWS):
            wide_TV = part.float()
            drawn = torch.multinomial(wide_TV.detach().softmax(dim=-1), 1, generator=dice)[:, 0]
            total = total + torch.nn.functional.cross_entropy(wide_TV, drawn, reduction="sum")
        return total


@dataclass
class _Moments:
    """Sums over the tokens of a Linear.

    Attributes:
        gradient_R: squares of the output's gradients, float32.
        input_C: squares of the inputs, float32.
        felt_C: the same, of each token times the squares of its gradient, float32.
        gram_CC: their products, of the first of the Linears that share an input, if asked for.
        tokens: number of tokens.
    """

    gradient_R: Tensor
    input_C: Tensor
    felt_C: Tensor
    gram_CC: Tensor | None = None
    tokens: int = 0

    @property
    def felt_mean(self) -> Tensor:
        """The mean square of each input, of tokens weighted by the squares of their gradients."""
        return self.felt_C / self.gradient_R.sum().clamp(min=torch.finfo(torch.float32).tiny)


@dataclass
class RoundingErrors:
    """Collects moments, and makes losses of them when the weights of a block are at hand."""

    model: Module
    options: BudgetOptions
    names: Mapping[Module, str]
    without_data: bool = False
    keep_in: StatisticsWriter | None = None
    kept: KeptStatistics | None = None
    _moments: dict[str, _Moments] = field(default_factory=dict)
    _losses: dict[str, list[float]] = field(default_factory=dict)
    _leaders: dict[str, str] = field(default_factory=dict)
    _joined: dict[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = {name for own in self.options.sets for name in own}
        self._leaders = {name: name for name in wanted}
        self._joined = {name: (name,) for name in wanted}
        for joined in fused_sets(self.model):  # they read one input
            own = [name for name in joined if name in wanted]
            self._leaders |= dict.fromkeys(own, own[0] if own else "")
            self._joined |= {name: joined for name in own[:1]}

    @torch.no_grad()
    def watch(self, module: Module, given: Tensor, gradient: Tensor) -> None:
        """Add the tokens of a call."""
        name = self.names[module]
        input_TC, gradient_TR = given.flatten(0, -2), gradient.flatten(0, -2)
        seen = gradient_TR.any(dim=-1)  # the others are padding, or what nothing is made of
        if not bool(seen.all()):
            input_TC, gradient_TR = input_TC[seen], gradient_TR[seen]
        moments = self._moments.get(name)
        if moments is None:
            rows, columns = gradient_TR.shape[-1], input_TC.shape[-1]
            empty = torch.zeros(rows + 2 * columns, dtype=torch.float32, device=input_TC.device)
            gradient_R, input_C, felt_C = torch.split(empty, [rows, columns, columns])
            moments = self._moments[name] = _Moments(gradient_R, input_C, felt_C)
            is_used = self.options.modifier.compensates or self.keep_in is not None
            if is_used and self._leaders[name] == name:
                moments.gram_CC = empty.new_zeros(columns, columns)
        moments.tokens += len(input_TC)
        add_column_squares(moments.gradient_R, gradient_TR)
        add_column_squares(moments.input_C, input_TC)
        energy_T = torch.linalg.vector_norm(gradient_TR, dim=-1, dtype=torch.float32).square_()
        add_column_squares(moments.felt_C, input_TC, energy_T)
        if moments.gram_CC is not None:
            add_upper_product(moments.gram_CC, input_TC)

    @torch.no_grad()
    def settle(self, modules: Iterable[Module], block: str = REST) -> None:
        """Compute the losses of those of ``modules`` that are to be quantized; free the moments.

        Args:
            modules: all of a block.
            block: its name.
        """
        own = {self.names[one]: one for one in modules if self.names.get(one) in self._leaders}
        if self.kept is not None:
            self._moments = _read_moments(self.kept, block, self._joined)
        if self.keep_in is not None:
            found = {name: self._moments[name] for name in own if name in self._moments}
            _write_moments(self.keep_in, block, found)
        shares: dict[str, Tensor] = {}
        for name, module in own.items():
            self._losses[name] = self._losses_of(name, module, shares)
        for name in own:
            self._moments.pop(name, None)

    def _losses_of(self, name: str, module: Module, shares: dict[str, Tensor]) -> list[float]:
        weight_RC, moments = weight_of(module).detach(), self._moments.get(name)
        if self.without_data:
            gradient_R, column_C = (
                weight_RC.new_ones(size, dtype=torch.float32) for size in weight_RC.shape
            )
            importance_C = None
        elif moments is None or not moments.tokens:
            return [0.0] * len(self.options.candidates)
        else:
            gradient_R, importance_C = moments.gradient_R, moments.input_C / moments.tokens
            column_C = moments.felt_mean
            if (left_C := self._left_by_compensation(name, shares)) is not None:
                column_C = column_C * left_C
        found = []
        for one in self.options.candidates:
            args = self.options.schemes[one][name].weights
            assert args is not None
            rounded = observe_weight(weight_RC, args, importance_C=importance_C).round(weight_RC)
            found.append(loss_rise(weight_RC.float() - rounded.float(), gradient_R, column_C))
        return found

    def _left_by_compensation(self, name: str, shares: dict[str, Tensor]) -> Tensor | None:
        """The share of each column's error that later columns do not make up for, if any do."""
        leader = self._leaders[name]
        first = self._moments.get(leader)
        if not self.options.modifier.compensates or first is None or first.gram_CC is None:
            return None
        if leader not in shares:
            ordered = getattr(self.options.modifier, "actorder", None) is not None
            gram_CC = mirror_upper_(first.gram_CC).div_(first.tokens)
            pivots_C = compensated_columns(gram_CC, ordered=ordered)
            shares[leader] = (pivots_C / gram_CC.diagonal()).nan_to_num_(0, 0, 0)
        return shares[leader]

    def by_set(self, tokens: int) -> list[list[float]]:
        """The losses of each set and candidate, as a mean over ``tokens``."""
        missed = (
            []
            if self.without_data
            else [
                names[0]
                for names in self.options.sets
                if not any(any(self._losses[one]) for one in names)
            ]
        )
        if missed:
            logger.warning(
                f"The loss does not depend on {join_names(missed, most=4)} in these samples: the "
                "budget counts their errors as nothing."
            )
        places = range(len(self.options.candidates))
        return [
            [sum(self._losses[name][place] for name in names) / tokens for place in places]
            for names in self.options.sets
        ]


# --------------------
# Moments that are kept for other candidates.


def _write_moments(writer: StatisticsWriter, block: str, moments: Mapping[str, _Moments]) -> None:
    tensors: dict[str, Tensor] = {}
    for name, one in moments.items():
        tensors[f"{name}.gradient"], tensors[f"{name}.input"] = one.gradient_R, one.input_C
        tensors[f"{name}.felt"] = one.felt_C
        if one.gram_CC is not None:
            tensors[f"{name}.gram"] = packed_upper(one.gram_CC)
    if moments:
        writer.write_loss(block, tensors, {name: one.tokens for name, one in moments.items()})


def _read_moments(
    statistics: KeptStatistics, block: str, joined: Mapping[str, Sequence[str]]
) -> dict[str, _Moments]:
    """The moments of a block; ``joined`` has the Linears with the same input, by the first."""
    tensors, tokens = statistics.loss(block)
    found = {
        name: _Moments(
            tensors[f"{name}.gradient"],
            tensors[f"{name}.input"],
            tensors[f"{name}.felt"],
            tokens=count,
        )
        for name, count in tokens.items()
    }
    for first, names in joined.items():
        packed = next((p for name in names if (p := tensors.get(f"{name}.gram")) is not None), None)
        if packed is not None and first in found:
            found[first].gram_CC = unpacked_upper(packed, len(found[first].input_C))
    return found
