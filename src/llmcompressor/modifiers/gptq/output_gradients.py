# SPDX-License-Identifier: Apache-2.0
"""Second moments of the gradients at the outputs of Linears, collected before a run begins.

They are those of :mod:`llmcompressor.numerics.output_hessian`, from one forward and one backward of
a few samples (:mod:`llmcompressor.pipelines.sampled_gradients`). What a block has is recorded when
the backward leaves it; a run that goes on takes all of it, and measures nothing again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.state import State
from llmcompressor.modeling.call_graph import model_device
from llmcompressor.modeling.offload import TensorStore
from llmcompressor.numerics.gram import limit_exploded_gradients
from llmcompressor.numerics.output_hessian import (
    add_output_products,
    damp_packed_,
    empty_blocks,
    packed_blocks,
    unpacked_blocks,
)
from llmcompressor.pipelines.sampled_gradients import SampledGradients
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.runtime.collectives import Ranks

_IN_MEMORY = 2**26
"""Bytes that stay in main memory, whatever the model; the rest lies in files until it is used."""
_WITHOUT_LOGITS = (
    "GPTQModifier weighs outputs by gradients of what the model predicts, and the model returns no "
    "logits.",
    "Set gradient_samples: 0.",
)


class OutputGradients:
    """Sums of the products of gradients, by the names of Linears.

    Args:
        state: of the run.
        linears: Linear → its name.
    """

    def __init__(self, state: State, linears: Mapping[Module, str]) -> None:
        self._state, self._linears = state, linears
        self._store = TensorStore(_IN_MEMORY)
        self._sums: dict[str, Tensor] = {}
        self._tokens: Counter[str] = Counter()
        self._places: dict[str, tuple[int, int, int]] = {}
        """Linear → the ticket of its part, and the first and last of its blocks there."""
        self._parts = 0
        own = xxhash.xxh3_64_hexdigest("\n".join(linears.values()).encode())
        self._record = f"output-gradients-{own}"  # a recipe may have several modifiers with some

    @torch.no_grad()
    def measure(self, samples: int) -> None:
        """Run samples of the calibration data forward and backward, unless that is recorded.

        Args:
            samples: how many.

        Raises:
            TargetError: the model returns no logits.
            NonFiniteError: the loss is NaN or infinite.
        """
        state = self._state
        ranks = state.run.ranks or Ranks()
        if self._recall(ranks):
            return
        run = SampledGradients(
            state.model,
            state.data.calib,
            samples,
            use_loss_mask=state.run.use_loss_mask,
            ranks=state.run.ranks,
            without_logits=_WITHOUT_LOGITS,
        )
        summing = run.ranks or Ranks()
        run(
            list(self._linears),
            self._add,
            source=state.run.block_source,
            leave=lambda block: self._keep(block.modules(), summing, ranks),
            budget=state.run.activation_budget,
            device_memory=state.run.device_memory,
        )
        left = [one for one, name in self._linears.items() if name not in self._places]
        self._keep(left, summing, ranks)
        if ranks.rank == 0:
            state.run.block_source.remember(self._record, {}, {"parts": self._parts})

    def of(self, names: Sequence[str], device: torch.device) -> list[Tensor]:
        """The blocks of some Linears, float32 ``[N_i, B, B]``; none where one was not measured."""
        if not all(name in self._places for name in names):
            return []
        return [unpacked_blocks(self._packed(name).to(device)) for name in names]

    def _packed(self, name: str) -> Tensor:
        ticket, begin, end = self._places[name]
        return self._store.peek(ticket, torch.device("cpu"))[begin:end]

    def close(self) -> None:
        """Free everything."""
        self._store.close()
        self._places.clear()

    def _add(self, linear: Module, given: Tensor, gradient: Tensor) -> None:
        name = self._linears[linear]
        if name not in self._sums:
            self._sums[name] = empty_blocks(gradient.shape[-1], gradient.device)
        gradient_TR = limit_exploded_gradients(gradient).flatten(0, -2)
        add_output_products(self._sums[name], gradient_TR)
        self._tokens[name] += int((gradient_TR != 0).any(dim=-1).sum())

    def _keep(self, modules: Iterable[Module], summing: Ranks, ranks: Ranks) -> None:
        """Add up what all ranks have of some modules; put it into the store, and record it."""
        own: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for module in (one for one in modules if one in self._linears):
            name, rows = self._linears[module], len(weight_of(module))
            sums = self._sums.pop(name, None)
            if sums is None:  # no token reached it
                sums = empty_blocks(rows, model_device(self._state.model))
            own[name], counts[name] = packed_blocks(sums), rows
        if not own:
            return
        what = "gradients of outputs"
        joined = summing.sum_all(torch.cat(list(own.values())), what=what).cpu()
        tokens = summing.sum_all(torch.tensor([self._tokens[name] for name in own]), what=what)
        each = torch.split(joined, [len(one) for one in own.values()])
        for one, name, count in zip(each, own, tokens.tolist(), strict=True):
            damp_packed_(one, counts[name], count)
        packed = dict(zip(own, each, strict=True))
        if ranks.rank == 0:
            self._state.run.block_source.remember(f"{self._record}-{self._parts}", packed, {})
        self._parts += 1
        self._put(packed)

    def _put(self, packed: Mapping[str, Tensor]) -> None:
        ticket, begin = self._store.put(torch.cat(list(packed.values()))), 0
        for name, one in packed.items():
            self._places[name] = ticket, begin, begin + len(one)
            begin += len(one)

    def _recall(self, ranks: Ranks) -> bool:
        """Take what an earlier run has recorded; False if something is missing."""
        source, found = self._state.run.block_source, None
        if ranks.rank == 0 and (whole := source.recall(self._record)) is not None:
            found = whole[1]["parts"]
        parts = ranks.exchange(found, what="recorded gradients")[0]
        for place in range(parts or 0):
            part = source.recall(f"{self._record}-{place}") if ranks.rank == 0 else None
            is_whole = ranks.exchange(part is not None, what="recorded gradients")[0]
            if not is_whole:
                self.close()
                return False
            tensors = {} if part is None else part[0]
            self._put(ranks.broadcast_from(0, tensors, what="recorded gradients"))
        return parts is not None
