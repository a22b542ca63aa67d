# SPDX-License-Identifier: Apache-2.0
"""AutoRound: learn the rounding of weights block by block by signed gradient descent.

Cheng et al., *Optimize Weight RoundingParameters via Signed Gradient Descent for the Quantization
of LLMs*,
arXiv:2309.05516; see :mod:`llmcompressor.numerics.autoround` for the equations. The objective is
the distance between each block's output, given the output of the tuned blocks before it, and the
output of the original model at that block.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.core.contract import (
    ELEMENTWISE,
    MOVED_TO_THE_RUN,
    Cost,
    DataSize,
    Granularity,
    RecipeRules,
    Solving,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import RecordedMixin
from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError, RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import CallOrder, copy_arguments, first_tensor
from llmcompressor.modifiers.autoround.begin import (
    REFINEMENTS,
    InitialRounding,
    has_learnable_scales,
    nearest_initialization,
    solve_block,
    solve_experts,
    solve_last_linear,
)
from llmcompressor.modifiers.autoround.tune import (
    BlockRunner,
    Call,
    ExpertInputs,
    Options,
    TuningResult,
    expert_input_bytes,
    rounded_errors,
    tune_block,
)
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.moe.module_list import ExpertPosition, expert_positions
from llmcompressor.numerics.autoround import Rounded, RoundingParameters, RoundingStart
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.quantization.column_solver import gptq_cost
from llmcompressor.quantization.parameters import (
    WeightParameters,
    check_observers,
    needs_input_importance,
    observe_weight,
    uses_only_extremes,
    weight_of,
)
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.bridge import grid_of

_NONE_SHOWN = ExpertInputs({}, None)
"""One for all modifiers that have not begun: they are equal if their fields are."""
_SHRUNK_TO = 0.5
"""The least part of a weight's range that tuning may begin with."""
TOKENS_PER_COLUMN = 16
"""Calibration tokens for each column of the widest Linear, from which on a block is solved."""
_RANGE_SHARE = 0.1
"""Of the rate, that ranges are learned with where GPTQ has fitted them: a whole step of offsets
would move a scale by more than what it is stored to."""
_TUNED = {False: 37, True: 31}
"""Bytes per weight, on the host and on an accelerator: three offsets, and of the rounded weight its
codes, quotients, scales (float32 all) and whether it was cut off; what the block computes with, and
its gradient (on the host float32, beside what the others of the block compute with)."""
_SOLVED = 4
"""The same of what is rounded, where that is a solution and not the weight itself."""
_SUMMED = {False: 0, True: 6}
"""The same where a step has several calls, whose gradients are added up in float32."""
_RUNS = 8
"""Forwards of the block over all tokens, to solve its Linears: two for each of four inputs."""
_SAVED = 1.5
"""Elements that a backward reads, over those that go into Linears and come out of them."""
_STEP_TOKENS = 2048
"""About what a step runs on: short samples are run together up to this."""


@dataclass(frozen=True)
class TuneRecord:
    """Result of tuning the block of a module.

    Attributes:
        block: name of the block.
        samples: calibration rows that it was tuned on.
        iteration: number of steps after which the rounding was found; 0 is the initial rounding.
        error: mean squared change of the block's output.
        error_begun: the same with the initial rounding.
        error_nearest: the same with rounding to nearest.
        moved: share of the weights whose code differs from rounding to nearest.
    """

    block: str
    samples: int
    iteration: int
    error: float
    error_begun: float
    error_nearest: float
    moved: float


class AutoRoundModifier(RecordedMixin, QuantizationMixin):
    """Quantize weights with learned rounding.

    Attributes:
        iters: steps for each block; 0 rounds to nearest.
        batch_size: calibration samples of a step. Samples that the pipeline runs as one batch are
            not split, so short ones make larger steps.
        lr: learning rate of the first step, which decays linearly to zero; ``None``: 1 / iters.
        seed: seed of the order in which samples are drawn.
        enable_torch_compile: accepted, without effect.
        device_ids: without effect, with a warning: blocks are tuned on the device that they are on.
        sequential_targets: without effect, with a warning: give it to ``oneshot`` instead.
        disable_opt_rtn: start from the min-max range instead of the shrunk range with the least
            rounding error. Ranges of other observers are used unchanged.
    """

    rules: ClassVar[RecipeRules] = replace(
        QuantizationMixin.rules,
        run_types=frozenset({"oneshot"}),
        moved={
            **MOVED_TO_THE_RUN,
            "device_ids": "blocks are tuned where they lie; give device to oneshot.",
        },
    )

    iters: int = Field(default=200, ge=0, le=100_000)
    enable_torch_compile: bool = True
    batch_size: int = Field(default=8, ge=1)
    lr: float | None = Field(default=None, gt=0.0, le=1.0)
    device_ids: str | None = None
    sequential_targets: str | list[str] | None = None
    disable_opt_rtn: bool = False
    seed: int = Field(default=0, ge=0, lt=2**32)

    _blocks: dict[Module, str] = PrivateAttr(default_factory=dict)
    _block_of: dict[Module, Module] = PrivateAttr(default_factory=dict)
    _calls: dict[Module, list[Call]] = PrivateAttr(default_factory=dict)
    _records: dict[str, TuneRecord] = PrivateAttr(default_factory=dict)
    _order: CallOrder | None = PrivateAttr(None)
    _widest: dict[Module, int] = PrivateAttr(default_factory=dict)
    _experts: dict[Module, int] = PrivateAttr(default_factory=dict)
    """Linear of an expert → how many experts its block has."""
    _shown: ExpertInputs = PrivateAttr(default_factory=lambda: _NONE_SHOWN)
    _ranks: Ranks | None = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse weight observers that need to see inputs first."""
        super().model_post_init(context)
        resolved = self.resolve_quantization_config()
        check_observers(resolved)
        for name, scheme in resolved.groups.items():
            if needs_input_importance(scheme.weights):
                raise RecipeError(
                    f"the weight observer of {name} weighs errors by inputs, and ranges are "
                    "learned here",
                    "Leave the observer out, or take another (memoryless_mse).",
                )

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """The objective is the output of whole blocks, compared with the original model's.

        All ranks tune a block, with the gradients of all samples.
        """
        return replace(
            super().traits,
            granularity=Granularity.BLOCK,
            whole_blocks=True,
            twin=True,
            over_ranks=Solving.ALL,
        )

    def _needs_data(self) -> bool:
        """Return True whatever the schemes are."""
        return True

    @property
    def records(self) -> dict[str, TuneRecord]:
        """Tuning records by module name."""
        return dict(self._records)

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of solving a block's Linears, if there are tokens for it, and of tuning them.

        Each step takes one forward and two backward products, and the bytes that the backward
        reads. Linears are solved in less memory than they are tuned in, except narrow ones with
        many inputs.
        """
        weights = {one: weight_of(one) for one in modules if self._is_tuned(one)}
        if not weights:
            return super().cost(modules, data)
        elements = sum(one.numel() for one in weights.values())
        widths = sum(sum(one.shape) for one in weights.values())
        itemsize = max(one.element_size() for one in weights.values())
        per_weight, alone, shown, summed = _TUNED[data.on_device], 0, 0, 0
        flops = (3 * _STEP_TOKENS + 16 * ELEMENTWISE) * self.iters * elements
        if self._initializes_with_gptq(data.real, max(self._widest.get(one, 0) for one in weights)):
            every = [
                gptq_cost([one], data, twin=True, refinements=REFINEMENTS, batch=1)
                for one in weights.values()
            ]
            per_weight += _SOLVED
            alone = max(one.held_bytes + one.peak_bytes for one in every)
            flops += data.tokens * _RUNS * elements + sum(one.flops for one in every)
            summed = sum(one.summed_bytes for one in every)
            kinds = {
                (one.shape[-1], self._experts[module])
                for module, one in weights.items()
                if module in self._experts
            }
            shown = sum(experts * expert_input_bytes(width, experts) for width, experts in kinds)
        # a step may need more than one call of the block for its samples
        if data.batch < data.tokens and data.samples * data.batch < self.batch_size * data.tokens:
            per_weight += _SUMMED[data.on_device]
        running = int(data.batch * _SAVED * itemsize * widths)
        return super().cost(modules, data) + Cost(
            flops=flops,
            held_bytes=shown,
            peak_bytes=max(alone, per_weight * elements + running),
            summed_bytes=summed,
        )

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Initialize as every quantizing modifier does; warn if there are no blocks to tune."""
        super().on_initialize(state, **kwargs)
        for block in find_blocks(state.model):
            inside = [module for module in block.modules() if self._is_tuned(module)]
            widest = max((weight_of(one).shape[-1] for one in inside), default=0)
            self._widest |= dict.fromkeys(inside, widest)
            places = expert_positions(block)
            self._experts |= {
                one: len({(place.mixture, place.expert) for place in places.values()})
                for one in inside
                if one in places and isinstance(places[one].mixture, LinearExperts)
            }
        outside = [one for one in state.model.modules() if self._is_tuned(one)]
        if self.iters and outside and not self._widest:
            logger.warning(
                f"{type(state.model).__name__} has no blocks that AutoRoundModifier could learn "
                f"from: its {len(outside)} modules are rounded to nearest."
            )
        return True

    def _initializes_with_gptq(self, tokens: int, columns: int) -> bool:
        """Return True if there are enough tokens to initialize with GPTQ."""
        return self.iters > 0 and tokens >= TOKENS_PER_COLUMN * columns

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Record the calls of blocks, except those that an earlier run has finished."""
        super().on_calibration_start(state, event, **kwargs)

        @torch.no_grad()
        def count(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = first_tensor(args, kwargs)
            if given is not None:
                self._shown.add(module, real_tokens(given, state.calibration.token_mask))

        self._order, self._ranks = state.calibration.call_order, state.run.ranks
        finished = state.run.block_source.finished
        places: dict[Module, ExpertPosition] = {}
        for block, name in find_blocks(state.model).items():
            inside = [module for module in block.modules() if self._is_tuned(module)]
            if inside and name not in finished:
                self._blocks[block] = name
                self._block_of |= dict.fromkeys(inside, block)
                self.register_hook(block, self._hook(state), "forward", with_kwargs=True)
                found = expert_positions(block)
                places |= {one: found[one] for one in inside if one in found}
        self._shown = ExpertInputs(places if self.iters else {}, self._order)
        for leader in self._shown.leaders:
            self.register_hook(leader, count, "forward_pre", with_kwargs=True)

    def _is_tuned(self, module: Module) -> bool:
        return self._has_weight_scheme(module) and isinstance(module, Linear)

    def _hook(self, state: State) -> Any:
        @torch.no_grad()
        def keep_call(
            module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            own = first_tensor(args, kwargs)
            other = (state.calibration.reference_inputs or {}).get(module)
            same = other is None or own is None or other.shape != own.shape
            reference = None if same else _detached_on_cpu(other)
            call = Call(
                _detached_on_cpu(args),
                _detached_on_cpu(kwargs),
                state.calibration.token_mask,
                reference,
                (state.calibration.batch_numbers or (0,))[0],
            )
            self._calls.setdefault(module, []).append(call)

        return keep_call

    def quantize_weights(self, state: State, modules: list[Module]) -> None:
        """Tune the modules of each block together; round the others to nearest."""
        by_block: dict[Module, list[Module]] = {}
        for module in modules:
            block = self._block_of.get(module)
            if block is None:
                self.keep(module, self.observe(module))
            else:
                by_block.setdefault(block, []).append(module)
        for block, members in by_block.items():
            self._tune(block, members)

    def _tune(self, block: Module, members: Sequence[Module]) -> None:
        name, calls = self._blocks[block], self._calls.pop(block, [])
        if not calls:
            raise TargetError(
                f"AutoRoundModifier works on whole blocks, and parts of {name} were calibrated "
                "before it had returned anything.",
                "Put its modules on the ignore list.",
            )
        names = {module: f"{inner}.weight" for inner, module in block.named_modules()}
        runner = BlockRunner(block, calls, self._ranks)
        self._shown.sum_over(runner.ranks, members)
        nearest = {
            names[one]: nearest_initialization(
                one,
                self.observe(one) if runner.is_nearest_expert(names[one]) else self._nearest(one),
            )
            for one in members
        }
        error_nearest = sum(rounded_errors(runner, _starts_by_name(nearest))) / runner.values
        if not error_nearest < float("inf"):
            raise NonFiniteError(
                f"What {name} returns holds NaN or infinity. Look for a bad weight upstream, or "
                "load the model with precision='float32'."
            )
        held = self._hold(name, runner, nearest)
        learned = {key: one for key, one in nearest.items() if key not in held}
        begun, before = self._begin(runner, learned)
        options = Options(
            self.iters,
            self.lr or 1 / max(1, self.iters),
            self.batch_size,
            self.seed ^ zlib.crc32(name.encode()),
            _RANGE_SHARE if begun is not learned else 1.0,
        )
        tuned = tune_block(runner, _starts_by_name(begun), before, options)
        _warn_of_missing_gradients(name, tuned.unreached)
        if begun is not learned:
            begun, tuned = self._refine_last_linear(runner, learned, begun, tuned)
        rows, error_begun = sum(runner.rows), sum(before) / runner.values
        for module in members:
            key = names[module]
            if key in held:
                start, rounding, iteration = held[key], RoundingParameters.of(held[key].start), 0
            else:
                start, rounding, iteration = begun[key], tuned.roundings[key], tuned.iteration
            rounded = rounding.apply(start.start)
            moved = self._write(module, start, rounded, _initially_rounded(nearest[key]).level_RC)
            self._records[self._names[module]] = TuneRecord(
                name, rows, iteration, tuned.error, error_begun, error_nearest, moved
            )
        share = tuned.error / error_nearest if error_nearest else 1.0
        logger.info(
            f"{name}: the error of its output is {share:.3f} of that of rounding to nearest "
            f"(step {tuned.iteration})."
        )

    def _hold(
        self, name: str, runner: BlockRunner, nearest: Mapping[str, InitialRounding]
    ) -> dict[str, InitialRounding]:
        """Weights of experts with too few routed tokens, rounded as they will be written.

        They are solved for all tokens that calibration gave them, or rounded to nearest if that is
        the policy. The block uses these values from here on: they are not learned.
        """
        modules = {runner.block.get_submodule(key.removesuffix(".weight")): key for key in nearest}
        few = self._shown.held(modules)
        shown = [([modules[one] for one in own], seen) for own, seen in self._shown.of(few)]
        held = solve_experts(runner, {modules[one]: nearest[modules[one]] for one in few}, shown)
        _warn_of_nearest_experts(
            name,
            no_room=len(self._shown.over_budget(few)),
            too_little=sum(held[key] is nearest[key] for key in held),
        )
        held |= {key: one for key, one in nearest.items() if runner.is_nearest_expert(key)}
        self._shown.drop(modules)
        runner.held = {
            key: runner.weight(key, _initially_rounded(one).values) for key, one in held.items()
        }
        return held

    def _begin(
        self, runner: BlockRunner, nearest: Mapping[str, InitialRounding]
    ) -> tuple[Mapping[str, InitialRounding], list[float]]:
        """The initial rounding of the weights, and its squared error for each call.

        This is GPTQ's solution, unless its error at the block's output is larger than that of
        rounding to nearest, or there are so few tokens that it would overfit them.
        """
        plain = rounded_errors(runner, _starts_by_name(nearest))
        widest = max((one.start.weight_RC.shape[-1] for one in nearest.values()), default=0)
        if not self._initializes_with_gptq(runner.seen, widest):
            return nearest, plain
        solved = solve_block(runner, nearest, self._order)
        before = rounded_errors(runner, _starts_by_name(solved))
        return (solved, before) if sum(before) < sum(plain) else (nearest, plain)

    def _refine_last_linear(
        self,
        runner: BlockRunner,
        nearest: Mapping[str, InitialRounding],
        begun: Mapping[str, InitialRounding],
        tuned: TuningResult,
    ) -> tuple[Mapping[str, InitialRounding], TuningResult]:
        """Solve the last Linear again for the learned weights of the others, if that is better."""
        weights = {
            key: runner.weight(key, rounding.apply(begun[key].start).values)
            for key, rounding in tuned.roundings.items()
        }
        again = {**begun, **solve_last_linear(runner, nearest, self._order, weights)}
        roundings = {
            key: rounding if again[key] is begun[key] else RoundingParameters.of(again[key].start)
            for key, rounding in tuned.roundings.items()
        }
        error = sum(rounded_errors(runner, _starts_by_name(again), roundings)) / runner.values
        if not error < tuned.error:
            return begun, tuned
        return again, replace(tuned, roundings=roundings, error=error)

    def _nearest(self, module: Module) -> WeightParameters:
        """Initial parameters in a range of low rounding error; factors only shrink it further.

        For a symmetric grid, which has one code fewer above zero than below, the search starts at
        the range that does not clamp the largest weight.
        """
        found = self.observe(module)
        args = found.args
        if self.disable_opt_rtn or not uses_only_extremes(args) or not has_learnable_scales(found):
            return found
        grid = grid_of(args)
        widest = (grid.qmax - grid.qmin) / (2 * grid.qmax) if args.symmetric else 1.0
        search = {"norm": 2.0, "maxshrink": 1 - _SHRUNK_TO / widest, "expand": widest}
        searching = args.model_copy(
            update={"observer": "memoryless_mse", "observer_kwargs": search}
        )
        return replace(observe_weight(weight_of(module).detach(), searching), args=args)

    @torch.no_grad()
    def _write(
        self, module: Module, begun: InitialRounding, rounded: Rounded, nearest_RC: Tensor
    ) -> float:
        """Write the learned weight; return the share of codes that differ from nearest rounding."""
        found = begun.parameters
        scale, zero = found.scale, found.zero_point
        if begun.start.scale_dtype is not None:
            scale = rounded.scale.to(scale.dtype).reshape(scale.shape)
        if rounded.zero is not None:
            zero = rounded.zero.to(zero.dtype).reshape(zero.shape)
        parameters = WeightParameters(found.args, scale, zero, found.global_scale)
        self.keep(module, parameters, rounded.values)
        return float((nearest_RC != rounded.level_RC).float().mean())

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Quantize what is left, and free the captured calls."""
        super().on_calibration_end(state, event, **kwargs)
        self._calls.clear()
        self._blocks.clear()
        self._block_of.clear()
        self._shown = _NONE_SHOWN
        self._order = self._ranks = None


def _starts_by_name(begun: Mapping[str, InitialRounding]) -> dict[str, RoundingStart]:
    return {key: one.start for key, one in begun.items()}


@torch.no_grad()
def _initially_rounded(begun: InitialRounding) -> Rounded:
    """A weight with its initial rounding applied."""
    return RoundingParameters.of(begun.start).apply(begun.start)


def _detached_on_cpu(value: Any) -> Any:
    """Detach the tensors of call arguments; offload floating-point ones to main memory."""

    def put_away(tensor: Tensor) -> Tensor:
        kept = tensor.detach().cpu() if tensor.is_floating_point() else tensor.detach()
        # tensors made in inference mode cannot take part in autograd
        return kept.clone() if kept.is_inference() else kept

    return copy_arguments(value, put_away)


def _warn_of_nearest_experts(block: str, *, no_room: int, too_little: int) -> None:
    """Warn that Linears of experts are rounded to nearest although their policy is another one."""
    if no_room:
        logger.warning(
            f"Second moments of what starved experts of {block} are shown would take more than "
            f"4 GiB: {no_room} of its Linears are rounded to nearest."
        )
    if too_little > no_room:
        logger.warning(
            f"{too_little - no_room} Linears of experts of {block} are shown fewer tokens than "
            "they have columns, and are rounded to nearest. Calibrate with more data."
        )


def _warn_of_missing_gradients(block: str, weights: Sequence[str]) -> None:
    """Warn about weights that no gradient has reached."""
    if weights:
        names = (f"{block}.{one.removesuffix('.weight')}" for one in weights)
        logger.warning(
            f"No gradient reaches {join_names(names)}, which stay rounded as they began: the "
            "model's "
            "own code computes them in torch.no_grad() or torch.inference_mode(), or the block's "
            "output does not depend on them. GPTQModifier learns nothing by gradients."
        )
