# SPDX-License-Identifier: Apache-2.0
"""Second moments of the inputs of a Linear, shared by all solvers.

They are additive: the statistics of two halves of the data, or of two ranks, sum to those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.errors import InputError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import CallOrder, first_tensor
from llmcompressor.numerics.gram import (
    CHUNK_TOKENS,
    TokenBuffer,
    add_cross_product,
    add_residual_product,
    add_upper_product,
    fast_operand,
    limit_massive_tokens,
    mirror_upper_,
)
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.numerics.int8_products import Int8Columns
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.runtime.collectives import Ranks

_WIDE_RANGE = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that hold whatever an output may lack; float16 ends at 65504."""

_FEW_COLUMNS, _FEW_SHARE = 3, 0.01
"""Columns without inputs that are no warning: single dead channels are common."""


def warn_of_dead_columns(name: str, dead: int, columns: int, consequence: str) -> None:
    """Warn of columns whose inputs were zero in every token, where they are more than a few.

    Args:
        name: name of the module.
        dead: number of those columns.
        columns: number of all columns.
        consequence: what becomes of their weights, as "these are rounded to nearest".
    """
    if dead > max(_FEW_COLUMNS, _FEW_SHARE * columns):
        logger.warning(
            f"{name}: the inputs of {dead} of its {columns} columns were zero in every calibration "
            f"token; {consequence}. If such inputs occur in use, add data that has them."
        )


def prefers_output_residual(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return True if the output residual costs less to accumulate than the cross product.

    The residual has ``rows`` columns. It then needs no more multiplications and, including the copy
    of the weight, less memory in 16 bits.

    >>> [prefers_output_residual(4096, columns, torch.bfloat16) for columns in (14336, 4096)]
    [True, False]
    """
    return 2 * rows <= columns and dtype in _WIDE_RANGE


class InputStatistics:
    """Second moments of the inputs of a Linear, accumulated batch by batch.

    Massive tokens count less (:func:`~llmcompressor.numerics.gram.limit_massive_tokens`).

    Args:
        columns: C, the number of input features.
        device: device of the sums and products.
        twin: also accumulate the cross product with the inputs of the original model.
        weights: weights of the Linears with this input, ``[R_i, C]``: the output residual is
            accumulated in place of the cross product if :func:`prefers_output_residual`. They are
            copied: the residual is that of the present weights.
        name: name of the module, for errors.

    Attributes:
        tokens: number of tokens accumulated.
        gram: ``YᵀY``, float32 ``[C, C]``, exactly symmetric.
        is_twin: whether inputs of the original model are accumulated too.
        cross: ``Yᵀ(X − Y)``, float32 ``[C, C]``; ``None`` without twin streams, and if the output
            residual is accumulated in its place.
        missing: the output residual ``Yᵀ(X − Y)Wᵀ``, float32 ``[C, R]`` with the rows of all
            weights, in that case.
    """

    def __init__(
        self,
        columns: int,
        device: torch.device | str,
        *,
        twin: bool = False,
        weights: Sequence[Tensor] = (),
        name: str = "",
    ) -> None:
        self.tokens = 0
        self.name = name
        self.is_twin = twin
        self._gram_CC = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self._weight_RC: Tensor | None = None
        self._missing_RC: Tensor | None = None
        self._cross_CC: Tensor | None = None
        if (
            twin
            and weights
            and not any(weight.is_meta for weight in weights)
            and prefers_output_residual(sum(map(len, weights)), columns, weights[0].dtype)
        ):
            self._weight_RC = torch.cat([weight.detach() for weight in weights]).to(device)
            self._missing_RC = torch.zeros_like(self._weight_RC, dtype=torch.float32)
        elif twin:
            self._cross_CC = torch.zeros_like(self._gram_CC)
        self._buffer = TokenBuffer(2 if twin else 1)
        self._symmetric = True

    def update(self, input_TC: Tensor, reference_TC: Tensor | None = None) -> None:
        """Accumulate the tokens of one batch, without padding: ``[T, C]``.

        ``reference_TC`` is the input in the original model for the same tokens.
        """
        self.tokens += len(input_TC)
        if not self.is_twin:
            chunk = self._buffer.add(input_TC)
        else:
            chunk = self._buffer.add(input_TC, input_TC if reference_TC is None else reference_TC)
        self._accumulate_chunk(chunk)

    @property
    def columns(self) -> int:
        """C, the number of input features."""
        return len(self._gram_CC)

    @property
    def gram(self) -> Tensor:
        """``YᵀY``."""
        self._flush()
        return self._gram_CC

    @property
    def cross(self) -> Tensor | None:
        """``Yᵀ(X − Y)``."""
        self._flush()
        return self._cross_CC

    @property
    def missing(self) -> Tensor | None:
        """``Yᵀ(X − Y)Wᵀ``."""
        self._flush()
        return None if self._missing_RC is None else self._missing_RC.mT

    def merge(self, other: InputStatistics) -> None:
        """Add the sums of ``other``, of Linears with the same weights.

        Raises:
            InputError: it has accumulated other statistics.
        """
        if (self.is_twin, self._missing_RC is None) != (other.is_twin, other._missing_RC is None):
            raise InputError(
                f"The statistics of {self.name or 'a module'} are not of one kind.",
                "Begin all of them with the same streams and weights.",
            )
        self._gram_CC += other.gram.to(self._gram_CC.device)
        if self._cross_CC is not None and other.cross is not None:
            self._cross_CC += other.cross.to(self._cross_CC.device)
        if self._missing_RC is not None and other.missing is not None:
            self._missing_RC += other.missing.mT.to(self._missing_RC.device)
        self.tokens += other.tokens

    def include(self, sums: InputSums) -> None:
        """Add kept sums, which have no inputs of an original model besides."""
        self._gram_CC += sums.gram_CC.to(self._gram_CC.device)
        self.tokens += sums.tokens

    def sum_over(self, ranks: Ranks, owner: int | None = None) -> None:
        """Add what all ranks have accumulated, in the order of the ranks.

        All ranks call it for the same Linears, with the same streams.

        Args:
            ranks: the ranks of the run.
            owner: the rank that gets the sums; all ranks if ``None``. The others keep their own.
        """
        what = f"second moments of the inputs of {self.name or 'a module'}"

        def summed(tensor: Tensor, *, symmetric: bool = False) -> Tensor:
            if owner is None:
                return ranks.sum_all(tensor, what=what, symmetric=symmetric)
            total = ranks.sum_to(owner, tensor, what=what, symmetric=symmetric)
            return tensor if total is None else total

        if ranks.count == 1:
            return
        self._flush()
        self.tokens = int(ranks.sum_all(torch.tensor(self.tokens), what=what))
        self._gram_CC = summed(self._gram_CC, symmetric=True)
        if self._cross_CC is not None:
            self._cross_CC = summed(self._cross_CC)
        if self._missing_RC is not None:
            self._missing_RC = summed(self._missing_RC)

    def _flush(self) -> None:
        self._accumulate_chunk(self._buffer.drain())
        if not self._symmetric:
            mirror_upper_(self._gram_CC)
            self._symmetric = True

    def _accumulate_chunk(self, chunk: list[Tensor] | None) -> None:
        if chunk is None:
            return
        device = self._gram_CC.device
        for pieces in zip(*(torch.split(one, CHUNK_TOKENS) for one in chunk), strict=True):
            input_TC = pieces[0].to(device)
            changes_TC = [one.to(device) - input_TC for one in pieces[1:]]
            input_TC, *changes_TC = limit_massive_tokens(input_TC, *changes_TC)
            operand = fast_operand(input_TC, self._gram_CC.dtype)
            add_upper_product(self._gram_CC, operand)
            for change_TC in changes_TC:
                self._compare(operand, change_TC)
        self._symmetric = False
        if not bool(torch.isfinite(self._gram_CC.diagonal().sum())):
            raise NonFiniteError(
                f"The activations that go into {self.name or 'a module'} hold NaN or infinity. "
                "Look for a bad weight upstream, or load the model with precision='float32'."
            )

    def _compare(self, input_TC: Tensor | Int8Columns, difference_TC: Tensor) -> None:
        if self._cross_CC is not None:
            add_cross_product(self._cross_CC, input_TC, difference_TC)
        elif self._missing_RC is not None and self._weight_RC is not None:
            weight_RC = self._weight_RC.to(difference_TC.dtype)
            add_residual_product(self._missing_RC, weight_RC, input_TC, difference_TC)


# --------------------
# Statistics of the inputs of many modules, one for all that share an input.

Statistics = TypeVar("Statistics")


class InputCollector(Generic[Statistics]):
    """Statistics of the inputs of modules, one for all modules that share an input.

    Args:
        create: makes the statistics of a module that represents others, given a batch ``[T, C]``
            and whether there are inputs of the original model.
        observes: returns True for the modules that statistics are collected for.
        order: which modules share an input; ``None``: none do.
        rows: the tokens of an input, without padding.
        kept: sums of inputs, by module, from which the statistics are made if no input is observed.
    """

    def __init__(
        self,
        create: Callable[[Module, Tensor, bool], Statistics],
        observes: Callable[[Module], bool],
        order: CallOrder | None,
        rows: Callable[[Module, Tensor, Tensor | None], Tensor] = lambda _, *given: real_tokens(
            *given
        ),
        kept: Mapping[Module, InputSums] | None = None,
    ) -> None:
        self._create, self._observes, self._order, self._rows = create, observes, order, rows
        self._kept = {} if kept is None else kept
        self._found: dict[Module, Statistics] = {}

    def sharing(self, module: Module) -> Sequence[Module]:
        """The observed modules that share the input of ``module``, itself included."""
        if self._order is None or not self._observes(module):
            return [module]
        return [one for one in self._order.group_of(module) if self._observes(one)]

    def leader(self, module: Module) -> Module:
        """The first of the modules that share the input of ``module``: its input is observed."""
        if self._order is None or not self._observes(module):
            return module
        return next(filter(self._observes, self._order.group_of(module)))

    def leaders(self, modules: Iterable[Module]) -> list[Module]:
        """The modules to hook, so that the inputs of all ``modules`` are observed once."""
        return list(dict.fromkeys(map(self.leader, modules)))

    def of(self, module: Module) -> Statistics | None:
        """The statistics of the input of ``module``; ``None`` if there was none."""
        leader = self.leader(module)
        if leader not in self._found and leader in self._kept:
            sums = self._kept[leader]
            found: Any = self._of_no_token(leader, sums.columns)
            found.include(sums)
            self._found[leader] = found
        return self._found.get(leader)

    def _of_no_token(self, leader: Module, columns: int, *, twin: bool = False) -> Statistics:
        """New statistics, on the device of the weight."""
        return self._create(leader, next(leader.parameters()).new_empty(0, columns), twin)

    def drop(self, modules: Iterable[Module]) -> None:
        """Free the statistics of the inputs of ``modules``."""
        for module in modules:
            self._found.pop(self.leader(module), None)

    def add(
        self,
        module: Module,
        tensor: Tensor,
        token_mask: Tensor | None,
        reference: Tensor | None = None,
    ) -> None:
        """Add an input of a leader, and that of the original model."""
        input_TC = self._rows(module, tensor, token_mask)
        if module not in self._found:
            self._found[module] = self._create(module, input_TC, reference is not None)
        statistics: Any = self._found[module]
        if reference is None:
            statistics.update(input_TC)
        else:
            statistics.update(input_TC, self._rows(module, reference, token_mask))

    def sum_over(
        self,
        ranks: Ranks,
        modules: Iterable[Module],
        names: Mapping[Module, str],
        owner_of: Callable[[Module], int | None] = lambda _: None,
    ) -> None:
        """Add what all ranks have collected of the inputs of ``modules``.

        A rank without a token of an input, such as that of an expert, adds nothing to its sums.

        Args:
            ranks: the ranks of the run; all call it with the same modules in the same order.
            modules: the modules; those that are not observed do not count.
            names: of observed modules.
            owner_of: the rank that gets the sums of a leader, and alone keeps any; ``None``: all
                do.
        """
        if ranks.count == 1:
            return
        for leader in self.leaders(filter(self._observes, modules)):
            found: Any = self._found.get(leader)
            own = [0, 0] if found is None else [found.columns, int(getattr(found, "is_twin", 0))]
            what = f"inputs of {names[leader]}"
            columns, twin = ranks.max_all(torch.tensor(own), what=what).tolist()
            if columns == 0:
                continue  # no rank has a token of it
            if found is None:
                found = self._of_no_token(leader, columns, twin=bool(twin))
                self._found[leader] = found
            owner = owner_of(leader)
            found.sum_over(ranks, owner)
            if owner not in (None, ranks.rank):
                del self._found[leader]

    def hook(
        self,
        state: State,
        reference: Callable[[Module, Tensor, State], Tensor | None] = lambda *_: None,
    ) -> Any:
        """A forward hook for the leaders, to be called with the arguments of a module.

        Args:
            state: of the run.
            reference: finds the input of a module in the original model.
        """

        @torch.no_grad()
        def collect(module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            tensor = first_tensor(args, kwargs)
            if tensor is not None:
                other = reference(module, tensor, state)
                self.add(module, tensor, state.calibration.token_mask, other)

        return collect
