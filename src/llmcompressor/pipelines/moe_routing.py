# SPDX-License-Identifier: Apache-2.0
"""MoE calibration: the tokens with which each expert is calibrated, and counts of routed tokens.

With ``moe_calibrate_all_experts`` every expert is calibrated with all tokens of its layer. Without
it an expert gets the tokens routed to it, and the policy ``starved_experts`` applies to experts
that get too few. That is decided when all batches wait before the experts of a layer, so that all
its routes are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PrivateAttr
from torch.nn import Module

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import DatasetError
from llmcompressor.logger import logger
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.moe.expert_stops import ExpertStage, begin_calibration_stages
from llmcompressor.moe.linear_experts import LinearExperts, Shown
from llmcompressor.moe.module_list import expert_routing
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.state import State

# --------------------
# Starved experts: experts with too few calibration tokens, and the policies for them.

_SHOWN: Mapping[str, Shown] = {
    "all_tokens": "all_tokens",
    "neighbours": "neighbours",
    "rtn": "nothing",
}
_WORDS = {
    "all_tokens": "Their statistics are made of all tokens of their layer.",
    "neighbours": "Their statistics are those of the other experts of their layer.",
    "rtn": "Their weights are rounded to nearest, or pruned by magnitude.",
}


@dataclass(frozen=True)
class StarvationPolicy:
    """Threshold and policy for starved experts.

    Attributes:
        least: number of tokens below which an expert is starved.
        policy: ``all_tokens``, ``neighbours``, ``rtn`` or ``error``.
    """

    least: float = 1.0
    policy: str = "all_tokens"

    @classmethod
    def from_arguments(
        cls, args: DatasetArguments, batches: CalibrationBatches
    ) -> StarvationPolicy:
        """Create the policy from the arguments of a run."""
        least = max(1.0, (args.min_tokens_per_module or 0.0) * batches.real_tokens)
        return cls(least, args.starved_experts)

    @property
    def shown(self) -> Shown:
        """Calibration inputs of a starved expert; undefined for the policy ``error``."""
        return _SHOWN[self.policy]

    def told(self, counts: Mapping[str, int]) -> tuple[list[str], str]:
        """Return the starved experts, and a message about them.

        Args:
            counts: number of tokens by expert.
        """
        starved = [name for name, count in counts.items() if count < self.least]
        shown = join_names(f"{name} ({counts[name]})" for name in starved)
        return starved, (
            f"Fewer than {ceil(self.least)} calibration tokens reached {len(starved)} of "
            f"{len(counts)} experts: {shown}."
        )

    def settle(self, counts: Mapping[str, int]) -> list[str]:
        """Return the starved experts of a layer, and warn about the policy applied to them.

        Args:
            counts: number of tokens by expert.

        Raises:
            DatasetError: an expert is starved and the policy is ``error``.
        """
        starved, few = self.told(counts)
        if not starved:
            return []
        if self.policy == "error":
            raise DatasetError(
                few,
                "Calibrate with more data, set moe_calibrate_all_experts, or choose another policy "
                "for starved_experts.",
            )
        logger.warning(f"{few} {_WORDS[self.policy]}")
        return starved


# --------------------
# MoE calibration: the tokens with which each expert is calibrated, and counts of routed tokens.

_WORKSPACE = 2**32
"""Bytes that the statistics of a wave of experts, and what is solved for it, may take."""
_FLOAT = 4
_COPIES = 2
"""With twin streams there are two statistics of each input; a solver holds weights twice."""


class ExpertCalibration(HooksMixin):
    """Counts the tokens routed to experts and applies the policy for starved experts."""

    _names: dict[LinearExperts, str] = PrivateAttr(default_factory=dict)
    _undecided: set[LinearExperts] = PrivateAttr(default_factory=set)
    _counted: set[LinearExperts] = PrivateAttr(default_factory=set)
    _summed: set[LinearExperts] = PrivateAttr(default_factory=set)
    _ranks: Ranks = PrivateAttr(default_factory=Ranks)
    _starvation: StarvationPolicy = PrivateAttr(StarvationPolicy())

    def begin(
        self,
        model: Module,
        state: State,
        modifiers: Sequence[Modifier],
        batches: CalibrationBatches,
        args: DatasetArguments,
    ) -> None:
        """Hook the MoE layers of ``model`` with calibrated experts, and set up their stages."""
        self._ranks = state.run.ranks or Ranks()
        looked_at = _calibrated_modules(modifiers, state)
        self._names = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, LinearExperts)
            and (looked_at is None or not looked_at.isdisjoint(set(module.modules()) - {module}))
        }
        self._starvation = StarvationPolicy.from_arguments(args, batches)
        every = args.moe_calibrate_all_experts
        for mixture in self._names:
            begin_calibration_stages(mixture, experts_per_wave(mixture, every=every))
            if every:
                mixture.shown = ["all_tokens"] * mixture.num_experts
            else:
                self._undecided.add(mixture)
            self._hooks.add(mixture.register_forward_pre_hook(_padding_hook(state), prepend=True))
            self.register_hook(
                mixture, partial(self._count, state), "forward_pre", with_kwargs=True
            )

    def end(self) -> None:
        """Remove the hooks and log the counts, which stay on the MoE modules."""
        self.remove_hooks()
        for mixture in self._names:
            mixture.end()
        self._log_counts()

    # ------------------------------------------------------------------ for pipelines

    def undecided(self, modules: Iterable[Module]) -> list[LinearExperts]:
        """MoE modules among ``modules`` whose experts' calibration inputs are not decided yet."""
        mixtures = [one.mixture if isinstance(one, ExpertStage) else one for one in modules]
        return [
            one
            for one in dict.fromkeys(mixtures)
            if isinstance(one, LinearExperts) and one in self._undecided
        ]

    def survey(self, mixtures: Sequence[LinearExperts], run: Callable[[], None]) -> None:
        """Count the tokens routed in ``mixtures`` with all other hooks off, then decide.

        Args:
            mixtures: MoE modules whose tokens were not counted yet.
            run: runs all batches through them.
        """
        with HooksMixin.disable_hooks(keep=self._hooks):
            run()
        self._counted.update(mixtures)
        self.decide(mixtures)

    def decide(self, mixtures: Iterable[LinearExperts]) -> None:
        """Decide the calibration inputs of each expert, once all tokens were counted.

        Raises:
            DatasetError: an expert got too few tokens and the policy is ``error``.
        """
        self.sum_counts(mixtures)
        for mixture in mixtures:
            self._undecided.discard(mixture)
            counts = self._counts([mixture])
            names = list(counts)
            for one in map(names.index, self._starvation.settle(counts)):
                mixture.shown[one] = self._starvation.shown
                mixture.starved[one] = self._starvation.policy

    def sum_counts(self, modules: Iterable[Module]) -> None:
        """Sum the tokens of the experts among ``modules`` over ranks, once all were counted."""
        for mixture in modules:
            if isinstance(mixture, LinearExperts) and mixture in self._names:
                if mixture not in self._summed:
                    what = f"tokens of the experts of {self._names[mixture]}"
                    total = self._ranks.sum_all(torch.tensor(mixture.tokens), what=what)
                    mixture.tokens[:] = total.tolist()
                self._summed.add(mixture)
                self._counted.add(mixture)

    def report_starved(self) -> None:
        """Report starved experts after a run without pauses, in which no policy can be applied.

        Raises:
            DatasetError: an expert got too few tokens and the policy is ``error``.
        """
        undecided = [one for one in self._names if one in self._undecided]
        if self._starvation.policy == "error":
            self.decide(undecided)
            return
        starved, few = self._starvation.told(self._counts(undecided))
        if starved:
            logger.warning(
                f"{few} starved_experts={self._starvation.policy!r} has no "
                "effect here, as nothing waits until the routes are known: those without tokens "
                "are rounded to nearest or pruned by magnitude, the others are calibrated with "
                "what they got. Choose pipeline='sequential', or set moe_calibrate_all_experts."
            )

    # ------------------------------------------------------------------ helpers

    def _counts(self, mixtures: Iterable[LinearExperts]) -> dict[str, int]:
        """Number of tokens by expert of ``mixtures``."""
        return {
            f"{self._names[mixture]}.{expert}": count
            for mixture in mixtures
            for expert, count in enumerate(mixture.tokens)
        }

    def _count(
        self, state: State, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        assert isinstance(module, LinearExperts)
        is_trial = state.batch_data is None  # a modifier runs a trial forward
        if is_trial or module.calls_all or module in self._counted:
            return
        for expert, count in enumerate(module.counts(*args, **kwargs)):
            module.tokens[expert] += count

    def _log_counts(self) -> None:
        # blocks that an earlier run has finished are not counted again
        counted = [mixture.tokens for mixture in self._names if any(mixture.tokens)]
        counts = [count for tokens in counted for count in tokens]
        if not counts:
            return
        layers, never = len(counted), counts.count(0)
        logger.info(
            f"Tokens routed to each of {len(counts)} experts in {layers} layers: {min(counts)} to "
            f"{max(counts)}, {sum(counts) / len(counts):.0f} on average; {never} got none."
        )


@contextlib.contextmanager
def expert_calibration(
    model: Module,
    state: State,
    modifiers: Sequence[Modifier],
    batches: CalibrationBatches,
    args: DatasetArguments,
) -> Iterator[ExpertCalibration]:
    """Count the tokens of calibrated experts, and apply the policies, while the body runs."""
    watch = ExpertCalibration()
    try:
        watch.begin(model, state, modifiers, batches, args)
        yield watch
    finally:
        watch.end()


@contextlib.contextmanager
def call_all_experts(model: Module) -> Iterator[None]:
    """Call every expert in every forward while the body runs, so that all calls are recorded."""
    mixtures = [module for module in model.modules() if isinstance(module, LinearExperts)]
    try:
        for mixture in mixtures:
            mixture.calls_all = True
        yield
    finally:
        for mixture in mixtures:
            mixture.calls_all = False


def experts_report(model: Module, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Tokens of each expert in the last calibration, by MoE module; empty if none were counted.

    Args:
        model: the model.
        names: of modules that may be MoE modules; all of the model's if ``None``.
    """
    found: dict[str, Any] = {}
    modules: Iterable[tuple[str, Module]] = model.named_modules()
    if names is not None:
        modules = ((name, model.get_submodule(name)) for name in names)
    for name, module in modules:
        routing = expert_routing(module)
        if routing is not None and any(routing.tokens):
            starved = {"starved": dict(routing.starved)} if routing.starved else {}
            found[name] = {"tokens": list(routing.tokens), **starved}
    return found


def _calibrated_modules(modifiers: Sequence[Modifier], state: State) -> set[Module] | None:
    """Modules that modifiers calibrate; ``None`` if a modifier does not declare its modules."""
    found: set[Module] = set()
    for modifier in modifiers:
        if modifier.traits.needs_data:
            own = modifier.select(state)
            if own.to_end or not own.modules:
                return None
            found.update(own.modules)
    return found


def experts_per_wave(mixture: LinearExperts, *, every: bool) -> int:
    """Number of experts that are calibrated at once, limited by a memory budget.

    The budget covers their statistics and their weights in float32.

    Args:
        mixture: the MoE module.
        every: each expert gets all tokens, so that they share the statistics of their input.
    """
    form = mixture.form
    moments = form.intermediate**2 + (0 if every else form.hidden**2)
    weights = form.intermediate * form.hidden * len(mixture.input_roles)
    return max(1, _WORKSPACE // (_FLOAT * _COPIES * (moments + weights)))


def _padding_hook(state: State) -> Callable[..., None]:
    def tell(module: Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, LinearExperts)
        mask = state.calibration.token_mask
        module.real_T = None if mask is None else mask.flatten()

    return tell
