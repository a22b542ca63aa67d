# SPDX-License-Identifier: Apache-2.0
"""What rounding costs: the expected rise of the loss of each set of modules for each candidate.

The estimate is that of :mod:`llmcompressor.numerics.sensitivity`. Its two factors come from one
forward and one backward of a few samples, block by block
(:mod:`llmcompressor.pipelines.sampled_gradients`). Without data all inputs and gradients count as
1: then it is the error of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.budget.moments import MomentCollector, read_moments, write_moments
from llmcompressor.budget.options import BudgetOptions
from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.checkpoint.kept_statistics import KeptStatistics, StatisticsWriter
from llmcompressor.core.block_source import BlockSource
from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.fused import JOINED_QKV, MLP_INPUTS
from llmcompressor.modeling.names import named_modules
from llmcompressor.numerics.gram import limit_long_gradients
from llmcompressor.numerics.sensitivity import loss_rise
from llmcompressor.pipelines.sampled_gradients import SampledGradients
from llmcompressor.quantization.parameters import (
    WeightParameters,
    WeightRanges,
    observe_weight,
    weight_of,
)
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names, progress

_LEFT_OF_ATTENTION, _LEFT_OF_MLP = 0.7, 0.8
"""Share of the loss of q, k, v and of gate, up that is left where the Linears behind them make up
for errors. Measured, beside what the same estimate means for ``down_proj``: 0.52 and 0.80 on
SmolLM2, 0.86 and 0.93 on the embedded model; gradients above 20 medians, which then were not
shortened, made up a sixth of what q, k, v of SmolLM2 were expected to lose."""
_SEARCHED_ROWS = 64
"""Rows of a Linear whose scales are searched for: the share of the loss that is left is alike in
all of them."""
_WITHOUT_LOGITS = (
    "A budget weighs modules by what the model's predictions lose, and the model returns no "
    "logits.",
    "Give schemes instead of a budget.",
)


def measure_losses(
    model: Module,
    options: BudgetOptions,
    batches: Sequence[Mapping[str, Any]],
    *,
    source: BlockSource,
    budget: int | str | None = None,
    device_memory: int | None = None,
    use_loss_mask: bool = False,
    propagates: bool = True,
    keep_in: StatisticsWriter | None = None,
    ranks: Ranks | None = None,
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
        propagates: the run calibrates each block on what the compressed ones before it return.
        keep_in: statistics to which all is added that other candidates need.
        ranks: the ranks of the run, which share samples of plain text; each runs all others.

    Raises:
        DatasetError: there is no batch.
        TargetError: the model returns no logits.
        NonFiniteError: the loss is NaN or infinite.
    """
    run = SampledGradients(
        model,
        batches,
        options.budget.samples,
        use_loss_mask=use_loss_mask,
        ranks=ranks,
        without_logits=_WITHOUT_LOGITS,
    )
    names = {module: name for name, module in named_modules(model)}
    wanted = {name for own in options.sets for name in own}
    linears = [module for module, name in names.items() if name in wanted]
    errors = RoundingErrors(
        model,
        options,
        names,
        batches=run.batches,
        corrects=propagates and options.corrects_errors,
        keep_in=keep_in,
        ranks=run.ranks,
    )
    blocks = find_blocks(model)

    def leave(block: Module) -> None:
        errors.settle(block.modules(), blocks[block])

    run(
        linears,
        errors.watch,
        source=source,
        leave=leave,
        budget=budget,
        device_memory=device_memory,
    )
    errors.settle(one for one in linears if not errors.has(one))  # no block was called with it
    if keep_in is not None:
        asked = options.budget.samples
        keep_in.contents.loss_of = {"samples": asked, "tokens": run.tokens}
    return errors.by_set(run.tokens)


def kept_losses(
    model: Module,
    options: BudgetOptions,
    source: BlockSource,
    statistics: KeptStatistics,
    *,
    ranks: Ranks | None = None,
) -> list[list[float]]:
    """What :func:`measure_losses` has found, for any candidates, from what it has kept.

    Args:
        model: the model, unquantized; its blocks may have no weights.
        options: the sets and candidates.
        source: loads the blocks.
        statistics: of this model.
        ranks: the ranks of the run, which share the modules.

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
    errors = RoundingErrors(model, options, names, kept=statistics, ranks=ranks)
    _settle_all(errors, source)
    return errors.by_set(statistics.loss_of["tokens"])


def weight_errors(
    model: Module, options: BudgetOptions, source: BlockSource, *, ranks: Ranks | None = None
) -> list[list[float]]:
    """Half the squared error of all weights, for each set and candidate, without any data.

    Args:
        model: the model, unquantized; its blocks may have no weights.
        options: the sets and candidates.
        source: loads the blocks.
        ranks: the ranks of the run, which share the modules.
    """
    names = {module: name for name, module in named_modules(model)}
    errors = RoundingErrors(model, options, names, without_data=True, ranks=ranks)
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


def _loss_of(own: WeightParameters, weight_RC: Tensor, row_R: Tensor, column_C: Tensor) -> float:
    return loss_rise(weight_RC.float() - own.round(weight_RC), row_R, column_C)


def _left_by_search(
    own: WeightParameters,
    weight_RC: Tensor,
    row_R: Tensor,
    column_C: Tensor,
    curvature_C: Tensor,
) -> float:
    """The share of a loss that is left with searched scales, of rows spread over the weight."""
    rows, own = own.of_rows(weight_RC, _SEARCHED_ROWS)
    some_RC, row_R = weight_RC[rows], row_R[rows]
    before = _loss_of(own, some_RC, row_R, column_C)
    after = _loss_of(own.searched(some_RC, curvature_C), some_RC, row_R, column_C)
    return after / before if before > 0 else 1.0


class RoundingErrors:
    """Collects moments, and makes losses of them when the weights of a block are at hand.

    Args:
        model: the model.
        options: the sets and candidates.
        names: of the modules.
        batches: how many batches there are, of all ranks.
        corrects: each Linear makes up for errors of those before it.
        without_data: all inputs and gradients count as 1.
        keep_in: statistics to which all is added that other candidates need.
        kept: statistics in the place of batches.
        ranks: the ranks that run the batches, each a part of them.
    """

    def __init__(
        self,
        model: Module,
        options: BudgetOptions,
        names: Mapping[Module, str],
        *,
        batches: int = 1,
        corrects: bool = False,
        without_data: bool = False,
        keep_in: StatisticsWriter | None = None,
        kept: KeptStatistics | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.options, self.names = options, names
        self._without_data, self._keep_in, self._kept = without_data, keep_in, kept
        self._ranks, self._corrects = ranks or Ranks(), corrects
        modifier = options.modifier
        self._orders: tuple[bool, ...] = ()
        if modifier.compensates and not without_data:
            self._orders = (getattr(modifier, "actorder", None) is not None,)
        self._collector = MomentCollector(
            model,
            [name for own in options.sets for name in own],
            batches=batches,
            orders=self._orders if keep_in is None or corrects else (False, True),
            skips_massive=corrects,
        )
        self._for_others = self._collector
        if keep_in is not None and corrects:  # runs from statistics do not correct errors
            self._for_others = MomentCollector(
                model, self._collector.leaders, batches=batches, orders=(False, True)
            )
        self._collectors = list(dict.fromkeys((self._collector, self._for_others)))
        self._losses: dict[str, list[float]] = {}
        self._settled: set[str] = set()

    def has(self, module: Module) -> bool:
        """Return True if the losses of a module are computed, here or on another rank."""
        return self.names[module] in self._settled

    def watch(self, module: Module, given: Tensor, gradient: Tensor) -> None:
        """Add the tokens of a call, with no gradient far longer than others."""
        limited = limit_long_gradients(gradient)
        for one in self._collectors:
            one.add(self.names[module], given, limited)

    @torch.no_grad()
    def settle(self, modules: Iterable[Module], block: str = REST) -> None:
        """Compute the losses of those of ``modules`` that are to be quantized; free the moments.

        Args:
            modules: all of a block.
            block: its name.
        """
        found, leaders = self._collector, self._collector.leaders
        own = {self.names[one]: one for one in modules if self.names.get(one) in leaders}
        if self._kept is not None:
            found.moments = read_moments(self._kept, block)
        # of ranks each has the losses of its own inputs, which are put together at the end
        mine = list(dict.fromkeys(leaders[one] for one in own))[
            self._ranks.rank :: self._ranks.count
        ]
        for one in self._collectors if self._kept is None and not self._without_data else ():
            one.finish()
            one.add_up(own, self._ranks)
            for leader in mine:
                one.compensate(leader)
        if self._keep_in is not None:
            others = self._for_others
            kept = {name: others.begun(name, weight_of(one)) for name, one in own.items()}
            write_moments(self._keep_in, block, kept)
        for name, module in own.items():
            if leaders[name] in mine:
                self._losses[name] = self._losses_of(name, module)
        self._settled.update(own)
        for one in self._collectors:
            one.free(own)

    def _losses_of(self, name: str, module: Module) -> list[float]:
        weight_RC, moments = weight_of(module).detach(), self._collector.moments.get(name)
        row_R, column_C = (
            weight_RC.new_ones(size, dtype=torch.float32) for size in weight_RC.shape
        )
        importance_C = curvature_C = None
        if not self._without_data:
            if moments is None or not moments.tokens:
                return [0.0] * len(self.options.candidates)
            moments = moments.to(weight_RC.device)
            importance_C, curvature_C = moments.input_C / moments.tokens, moments.curvature
            row_R, column_C = moments.gradient_R, moments.felt_mean
            for ordered in self._orders:
                column_C = column_C * moments.shares[ordered]
        found, ranges = [], WeightRanges(weight_RC)
        for one in self.options.candidates:
            args = self.options.schemes[one][name].weights
            assert args is not None
            own = observe_weight(weight_RC, args, importance_C=importance_C, found=ranges(args))
            loss = self._left_by_correction(name) * _loss_of(own, weight_RC, row_R, column_C)
            if curvature_C is not None and self.options.searches_scales(args):
                loss *= _left_by_search(own, weight_RC, row_R, column_C, curvature_C)
            found.append(loss)
        return found

    def _left_by_correction(self, name: str) -> float:
        """The share of a loss that Linears behind this one in its block do not make up for."""
        found, last = self._collector, name.rpartition(".")[2]
        is_of_mlp = last in MLP_INPUTS
        is_joined = len(found.joined[found.leaders[name]]) > 1 or last in JOINED_QKV
        if not self._corrects or not (is_of_mlp or is_joined):
            return 1.0
        return _LEFT_OF_MLP if is_of_mlp else _LEFT_OF_ATTENTION

    def by_set(self, tokens: int) -> list[list[float]]:
        """The losses of each set and candidate, as a mean over ``tokens``."""
        for found in self._ranks.exchange(self._losses, what="losses of a budget's candidates"):
            self._losses |= found
        missed = (
            []
            if self._without_data
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
