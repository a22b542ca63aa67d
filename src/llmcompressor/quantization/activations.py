# SPDX-License-Identifier: Apache-2.0
"""Observers of activations: inputs and outputs of modules, and the states of attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import Calibration, State
from llmcompressor.errors import NonFiniteError, TargetError
from llmcompressor.modeling.call_graph import first_tensor
from llmcompressor.modeling.fused import is_expert
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.observers.base import OBSERVERS, Observer
from llmcompressor.observers.canonical import Range
from llmcompressor.observers.min_max import RangeObserver
from llmcompressor.observers.tokens import (
    num_equal_batches,
    real_states,
    real_tokens,
    split_batches,
)
from llmcompressor.quantization.parameters import activation_parameters
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.schemes.bridge import default_observer, needs_global_scale

_STATE_KINDS = {"q": "query", "k": "key", "v": "value"}
_NOTHING = 1e-35


class ActivationObservers:
    """The activation observers of one modifier, by module and kind of activation.

    Args:
        modifier: the modifier whose hooks feed them.
        state: the session's state, with the token mask of the current batch.
    """

    def __init__(self, modifier: Modifier, state: State) -> None:
        self._modifier = modifier
        self._state = state
        self._observers: dict[Module, dict[str, Observer]] = {}
        self._names: dict[Module, str] = {}
        self._inputs: dict[Module, list[Observer]] = {}
        self._numbers: dict[RangeObserver, list[int]] = {}
        """Where ranks share the samples: the place of the batch of each range that counts."""

    def watch_linear(
        self, module: Module, name: str, scheme: QuantizationScheme, *, source: Module | None = None
    ) -> None:
        """Observe the inputs and outputs of a Linear that need a static parameter.

        The input is observed at ``source``, a module that runs earlier with the same input, once
        for all modules with equal arguments.
        """
        self._names[module] = name
        if observer := self._observer(scheme.input_activations, "input"):
            self._keep(module, "input", self._watch_input(module, source or module, observer))
        if observer := self._observer(scheme.output_activations, "output"):
            self._keep(module, "output", observer)
            self._modifier.register_hook(
                module, lambda module, _, output: self._observe(module, "output", output), "forward"
            )

    def _watch_input(self, module: Module, source: Module, observer: Observer) -> Observer:
        """An existing observer of the same input with the same arguments, else ``observer``."""
        others = self._inputs.setdefault(source, [])
        for other in others:
            if other.args == observer.args:
                return other
        others.append(observer)
        self._modifier.register_hook(
            source,
            lambda _, args, kwargs: self._observe(module, "input", first_tensor(args, kwargs)),
            "forward_pre",
            with_kwargs=True,
        )
        return observer

    def watch_attention(
        self, module: Module, name: str, args: QuantizationArgs, bases: Iterable[str]
    ) -> None:
        """Observe the states of an attention module: ``bases`` of ``"q"``, ``"k"``, ``"v"``."""
        self._names[module] = name
        for base in bases:
            if observer := self._observer(args, base):
                self._keep(module, base, observer)
                observe = partial(self._observe_states, base)
                self._modifier.register_hook(module, observe, _STATE_KINDS[base])

    def parameters(self, module: Module) -> dict[str, Tensor]:
        """The static parameters of ``module``, by their names in the checkpoint."""
        found: dict[str, Tensor] = {}
        for base, observer in self._observers.get(module, {}).items():
            if base == "input":
                self._take_kept(module, observer)
            self._check_observed(module, base, observer)
            own = activation_parameters(observer, next(module.parameters()).dtype)
            found |= {f"{base}_{name}": value for name, value in own.items()}
        return found

    def _take_kept(self, module: Module, observer: Observer) -> None:
        """Observe the extremes that an earlier run has kept of an input, where no data is run."""
        sums = (self._state.run.kept_inputs or {}).get(module)
        if sums is not None and not observer.observations:
            extremes_2C = torch.stack([sums.least_C, sums.greatest_C])
            self._feed(module, "input", extremes_2C.to(next(module.parameters())), None)

    def merge_over(self, ranks: Ranks, modules: Iterable[Module]) -> None:
        """Merge what all ranks have observed of ``modules``, once for observers that these share.

        All ranks call it with the same modules in the same order. A moving average is that of all
        batches in the order which they have in one process.
        """
        every = [one for module in modules for one in self._observers.get(module, {}).values()]
        for observer in dict.fromkeys(every):
            if observer in self._numbers:
                self._replay_over(ranks, observer)
            else:
                observer.merge_over(ranks)

    def _replay_over(self, ranks: Ranks, observer: RangeObserver) -> None:
        what = f"ranges of the {observer.base_name}"
        numbers = ranks.exchange(self._numbers.pop(observer), what=what)
        history, observer.history = observer.history or [], None
        found: list[tuple[int, Range]] = []
        for rank, own in enumerate(numbers):
            if own:
                sent = {}
                if rank == ranks.rank:
                    both = zip(*history, strict=True)
                    sent = {str(end): torch.stack(bounds) for end, bounds in enumerate(both)}
                got = ranks.broadcast_from(rank, sent, what=what)
                bounds = zip(got["0"], got["1"], strict=True)
                found += [(one, Range(*ends)) for one, ends in zip(own, bounds, strict=True)]
        observer.replay(one for _, one in sorted(found, key=lambda pair: pair[0]))

    def forget(self, modules: Iterable[Module]) -> None:
        """Discard the observers of ``modules``, whose parameters are now stored in the modules."""
        for module in modules:
            self._observers.pop(module, None)
            self._inputs.pop(module, None)

    @staticmethod
    def _observer(args: QuantizationArgs | None, base: str) -> Observer | None:
        name = None if args is None else default_observer(args, base)
        if args is None or name is None:
            return None
        return Observer.load_from_registry(name, base_name=base, args=args)

    def _keep(self, module: Module, base: str, observer: Observer) -> None:
        self._observers.setdefault(module, {})[base] = observer
        if self._state.run.ranks is None or not isinstance(observer, RangeObserver):
            return
        if observer.depends_on_order and observer not in self._numbers:
            observer.history, self._numbers[observer] = [], []

    @torch.no_grad()
    def _observe(self, module: Module, base: str, activation: Tensor | None) -> None:
        if activation is None:
            return
        of = self._state.calibration
        mask, sizes = of.token_mask, of.batch_sizes
        alike = num_equal_batches(activation, mask, sizes)
        if alike > 1:
            self._feed(module, base, real_tokens(activation, None), of.batch_numbers, alike)
            return
        parts = split_batches(activation, mask, sizes)
        for place, (part, part_mask) in enumerate(parts):
            self._feed(module, base, real_tokens(part, part_mask), _number(of, place))

    @torch.no_grad()
    def _observe_states(self, base: str, module: Module, states_BHTD: Tensor) -> None:
        """Observe the real tokens of a batch as one sequence, whether padded or not."""
        of = self._state.calibration
        parts = split_batches(states_BHTD, of.token_mask, of.batch_sizes)
        for place, (part_BHTD, mask_BT) in enumerate(parts):
            self._feed(module, base, real_states(part_BHTD, mask_BT), _number(of, place))

    def _feed(
        self,
        module: Module,
        base: str,
        values: Tensor,
        numbers: Sequence[int] | None,
        batches: int = 1,
    ) -> None:
        observer = self._observers[module][base]
        try:
            if batches == 1:
                observer.observe(values)
            else:
                observer.observe_each(values, batches)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"The {base} activations of {self._names[module]} hold NaN or infinity. Look for "
                "a bad weight upstream, or load the model with precision='float32'."
            ) from error
        if isinstance(observer, RangeObserver) and observer in self._numbers:
            known = self._numbers[observer]
            new = len(observer.history or ()) - len(known)  # none if there was no real token
            known += list(numbers or [0] * new)[:new]

    def _check_observed(self, module: Module, base: str, observer: Observer) -> None:
        """Refuse a static scale without tokens, and a shared one of an expert without values.

        Engines use the smallest scale of an MoE for the inputs of all its experts, so a meaningless
        scale must not be smaller than those of the others.
        """
        name = self._names[module]
        if observer.observations:
            is_shared = base == "input" and is_expert(name) and needs_global_scale(observer.args)
            if is_shared and max(float(end.abs().max()) for end in observer.range()) <= _NOTHING:
                raise TargetError(
                    f"All inputs of {name} were zero in calibration, and its input scale, which "
                    "engines share among all experts, is static.",
                    "Put this expert on the recipe's ignore list, or prune it with REAP.",
                )
            return
        remedy = "Add data that uses it"
        parts = name.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts)))
        holders = (self._state.model.get_submodule(one) for one in names)
        if is_expert(name) and any(isinstance(holder, LinearExperts) for holder in holders):
            remedy = (
                "Set moe_calibrate_all_experts, or choose all_tokens or neighbours for "
                "starved_experts (rtn shows a starved expert nothing)"
            )
        elif is_expert(name):
            remedy = (
                "The model's own code calls this expert, with its tokens alone: "
                "moe_calibrate_all_experts and starved_experts have no effect on it. Add data "
                "that reaches it"
            )
        raise TargetError(
            f"No calibration token was shown to {name}, whose {base} scale is static.",
            f"{remedy}, or put it on the recipe's ignore list.",
        )


def works_from_extremes(args: QuantizationArgs | None) -> bool:
    """Return True if the scale of an input is dynamic, or needs only the extremes of its columns.

    Extremes over the columns of a group are extremes of the group.
    """
    name = None if args is None else default_observer(args, "input")
    return name is None or bool(OBSERVERS.load(name).needs_extremes_only())


def _number(calibration: Calibration, place: int) -> tuple[int, ...]:
    """The place of a part of the current batch among the batches of all ranks."""
    numbers = calibration.batch_numbers or ()
    return numbers[place : place + 1] or numbers[:1] or (0,)
