# SPDX-License-Identifier: Apache-2.0
"""What experts are shown while a model is calibrated, and how many tokens were routed to each.

With ``moe_calibrate_all_experts`` every expert is shown every token of its layer. Without it an
expert is shown what is routed to it, and one that gets too little is dealt with as
``starved_experts`` says. That is decided when all batches wait before the experts of a layer, so
that all its routes are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr
from torch.nn import Module

from llmcompressor.logger import logger
from llmcompressor.modeling.expert_stages import ExpertStage, begin_stages
from llmcompressor.modeling.experts import LinearExperts
from llmcompressor.modeling.hooks import HooksMixin
from llmcompressor.modeling.shown_lists import starved_of, tokens_of
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.pipelines.batches import CalibrationBatches
from llmcompressor.pipelines.starvation import Starvation

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments
    from llmcompressor.core.state import State

__all__ = ["ExpertWatch", "every_expert_called", "experts_report", "experts_watched", "wave_of"]

_WORKSPACE = 2**32
"""Bytes that the statistics of a wave of experts, and what is solved for it, may take."""
_FLOAT = 4
_COPIES = 2
"""With twin streams there are two statistics of each input; a solver holds weights twice."""


class ExpertWatch(HooksMixin):
    """Counts the tokens of experts, and decides what those are shown that get too few."""

    _names: dict[LinearExperts, str] = PrivateAttr(default_factory=dict)
    _undecided: set[LinearExperts] = PrivateAttr(default_factory=set)
    _counted: set[LinearExperts] = PrivateAttr(default_factory=set)
    _starvation: Starvation = PrivateAttr(Starvation())

    def begin(
        self,
        model: Module,
        state: State,
        modifiers: Sequence[Modifier],
        batches: CalibrationBatches,
        args: DatasetArguments,
    ) -> None:
        """Watch those mixtures of ``model`` whose experts modifiers calibrate, in stages."""
        looked_at = _calibrated(modifiers, state)
        self._names = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, LinearExperts)
            and (looked_at is None or not looked_at.isdisjoint(set(module.modules()) - {module}))
        }
        self._starvation = Starvation.asked_for(args, batches)
        every = args.moe_calibrate_all_experts
        for mixture in self._names:
            begin_stages(mixture, wave_of(mixture, every=every))
            if every:
                mixture.shown = ["all_tokens"] * mixture.num_experts
            else:
                self._undecided.add(mixture)
            self._hooks.add(mixture.register_forward_pre_hook(_tell_padding(state), prepend=True))
            self.register_hook(
                mixture, partial(self._count, state), "forward_pre", with_kwargs=True
            )

    def end(self) -> None:
        """Stop watching; the counts stay with the mixtures."""
        self.remove_hooks()
        for mixture in self._names:
            mixture.end()
        self._say_counts()

    # ------------------------------------------------------------------ for pipelines

    def undecided(self, modules: Iterable[Module]) -> list[LinearExperts]:
        """Those of ``modules`` that are mixtures, of which it is not decided what is shown."""
        mixtures = [one.mixture if isinstance(one, ExpertStage) else one for one in modules]
        return [
            one
            for one in dict.fromkeys(mixtures)
            if isinstance(one, LinearExperts) and one in self._undecided
        ]

    def survey(self, mixtures: Sequence[LinearExperts], run: Callable[[], None]) -> None:
        """Count the routes of ``mixtures`` alone.

        Args:
            mixtures: no token of which was counted yet.
            run: runs all batches through them.
        """
        with HooksMixin.disable_hooks(keep=self._hooks):
            run()
        self._counted.update(mixtures)
        self.decide(mixtures)

    def decide(self, mixtures: Iterable[LinearExperts]) -> None:
        """All tokens of ``mixtures`` were counted: settle what each expert is shown.

        Raises:
            DatasetError: an expert got too few, and that is to be an error.
        """
        for mixture in mixtures:
            self._undecided.discard(mixture)
            counts = self._counts([mixture])
            names = list(counts)
            for one in map(names.index, self._starvation.settle(counts)):
                mixture.shown[one] = self._starvation.shown
                mixture.starved[one] = self._starvation.policy

    def all_ran(self) -> None:
        """All batches have run and none waited: experts were shown what was routed to them.

        Raises:
            DatasetError: an expert got too few, and that is to be an error.
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
        """Expert of ``mixtures`` → its tokens."""
        return {
            f"{self._names[mixture]}.{expert}": count
            for mixture in mixtures
            for expert, count in enumerate(mixture.tokens)
        }

    def _count(
        self, state: State, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        assert isinstance(module, LinearExperts)
        is_trial = state.batch_data is None  # a modifier tries something out
        if is_trial or module.calls_all or module in self._counted:
            return
        for expert, count in enumerate(module.counts(*args, **kwargs)):
            module.tokens[expert] += count

    def _say_counts(self) -> None:
        # what an earlier run has finished is not counted again
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
def experts_watched(
    model: Module,
    state: State,
    modifiers: Sequence[Modifier],
    batches: CalibrationBatches,
    args: DatasetArguments,
) -> Iterator[ExpertWatch]:
    """Show tokens to experts that are calibrated, and count them, while the body runs."""
    watch = ExpertWatch()
    try:
        watch.begin(model, state, modifiers, batches, args)
        yield watch
    finally:
        watch.end()


@contextlib.contextmanager
def every_expert_called(model: Module) -> Iterator[None]:
    """Have every expert called in every forward, for those who watch what is called."""
    mixtures = [module for module in model.modules() if isinstance(module, LinearExperts)]
    try:
        for mixture in mixtures:
            mixture.calls_all = True
        yield
    finally:
        for mixture in mixtures:
            mixture.calls_all = False


def experts_report(model: Module, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Tokens of each expert in the last calibration, by mixture; empty where none were counted.

    Args:
        model: the model.
        names: of modules that may be mixtures; all of the model's if ``None``.
    """
    found: dict[str, Any] = {}
    modules: Iterable[tuple[str, Module]] = model.named_modules()
    if names is not None:
        modules = ((name, model.get_submodule(name)) for name in names)
    for name, module in modules:
        if isinstance(module, LinearExperts):
            tokens, starved = list(module.tokens), dict(module.starved)
        else:
            tokens, starved = tokens_of(module), starved_of(module)
        if any(tokens):
            found[name] = {"tokens": tokens, **({"starved": starved} if starved else {})}
    return found


def _calibrated(modifiers: Sequence[Modifier], state: State) -> set[Module] | None:
    """What modifiers look at in a calibration; ``None`` where it may be anything."""
    found: set[Module] = set()
    for modifier in modifiers:
        if modifier.requires_calibration_data:
            own = modifier.calibrated_modules(state)
            if modifier.runs_to_end or not own:
                return None
            found.update(own)
    return found


def wave_of(mixture: LinearExperts, *, every: bool) -> int:
    """How many experts' statistics and weights in float32 may be held at once.

    Args:
        mixture: whose.
        every: each of them sees all tokens, so that they share the statistics of their input.
    """
    form = mixture.form
    moments = form.intermediate**2 + (0 if every else form.hidden**2)
    weights = form.intermediate * form.hidden * len(mixture.entrances)
    return max(1, _WORKSPACE // (_FLOAT * _COPIES * (moments + weights)))


def _tell_padding(state: State) -> Callable[..., None]:
    def tell(module: Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, LinearExperts)
        mask = state.token_mask
        module.real_T = None if mask is None else mask.flatten()

    return tell
