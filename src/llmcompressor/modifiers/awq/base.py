# SPDX-License-Identifier: Apache-2.0
"""AWQ: scale up the columns that get large inputs before weights are rounded.

Lin et al., arXiv:2306.00978; see :mod:`llmcompressor.numerics.awq` for the equations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.core.contract import (
    MOVED_TO_THE_RUN,
    Cost,
    DataSize,
    Granularity,
    Prediction,
    RecipeRules,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.modifier_registry import ModifierFactory
from llmcompressor.core.state import State
from llmcompressor.equalization.base import SmoothingMixin, quantized_modules
from llmcompressor.equalization.mappings import WRITTEN, Names, SmoothSet, find_smooth_sets
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.awq.parents import (
    ParentRuns,
    awq_cost,
    parent_of,
    rerun_cost,
)
from llmcompressor.numerics.awq import (
    Bounds,
    ErrorOf,
    Round,
    ScalesWithin,
    StackedLinears,
    candidates,
    choose_scale,
    clip_bounds,
    output_error_from_gram,
    relative_column_magnitude,
)
from llmcompressor.numerics.grid import Grid
from llmcompressor.numerics.hessian import fill_dead_diagonal
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.numerics.partition import fake_quantize_matrix
from llmcompressor.numerics.scales import global_scale_from_amax, parameter_dtype
from llmcompressor.observers.canonical import Range
from llmcompressor.observers.column_statistics import ColumnSizes
from llmcompressor.observers.input_statistics import InputStatistics
from llmcompressor.quantization.base import SAYING_HOW, QuantizationMixin
from llmcompressor.quantization.parameters import (
    min_max_parameters,
    range_parameters,
    weight_amax,
    weight_of,
)
from llmcompressor.runtime.collectives import Ranks
from llmcompressor.runtime.registry import UserOverrides
from llmcompressor.schemes.bridge import grid_of, needs_global_scale, partition_of

_Device = Annotated[
    str, BeforeValidator(lambda one: str(one) if isinstance(one, torch.device) else one)
]
"""The name of a ``torch.device``, as recipes store it."""
_FINE_BITS = 8
"""Bits from which there is nothing to gain by clipping."""
_STACKED = 16
"""Linears that are judged as one, in a copy; experts are too many for it."""


@dataclass(config=ConfigDict(extra="forbid"))
class AWQMapping:
    """A smooth layer and the layers that balance its scales.

    Attributes:
        smooth_layer: target of the norm or Linear whose output is divided by the scales.
        balance_layers: targets of all Linears that read its output.
        activation_hook_target: accepted, without effect: the inputs of the Linears themselves are
            observed.
    """

    smooth_layer: str
    balance_layers: list[str]
    activation_hook_target: str | None = None

    def __post_init__(self) -> None:
        """Refuse a mapping without balance layers."""
        if not self.balance_layers:
            raise RecipeError(
                f"The mapping of {self.smooth_layer!r} has no balance_layers",
                "Name all that reads it.",
            )


def _to_mappings(names: Sequence[Names]) -> list[AWQMapping]:
    return [AWQMapping(smooth, list(balance)) for smooth, balance in names]


default_mappings = _to_mappings(WRITTEN["LlamaForCausalLM"])
"""Those of Llama and of what is built as it is."""
AWQ_MAPPING_REGISTRY: UserOverrides[list[AWQMapping]] = UserOverrides(
    {name: partial(_to_mappings, names) for name, names in WRITTEN.items()}
)
"""Mappings that users add for a model's class, by its name. Those of known classes can be read;
unless some are added, they are found from the model."""


def get_layer_mappings_from_architecture(architecture: str) -> list[AWQMapping]:
    """The mappings registered for a model class, or those of Llama.

    Args:
        architecture: the name of the class, for instance ``"Qwen3ForCausalLM"``.
    """
    return AWQ_MAPPING_REGISTRY.get(architecture, default_mappings)


def get_layer_mappings_from_model(model: Module) -> list[AWQMapping]:
    """The mappings registered for a model's class, or those found in it, one for each place.

    Experts that are stored as one stack are no modules; they are only found in a run.

    Args:
        model: its weights may be on the meta device.
    """
    if (known := AWQ_MAPPING_REGISTRY.get(type(model).__name__)) is not None:
        return known
    return [AWQMapping(one.name, list(one.balance)) for one in find_smooth_sets(model)]


class _InputMoments:
    """Second moments and mean absolute values of the inputs."""

    def __init__(self, columns: int, device: torch.device | str, name: str) -> None:
        self._statistics = InputStatistics(columns, device, name=name)
        self._sizes = ColumnSizes(columns, device, name)
        self.columns = columns

    def update(self, input_TC: Tensor) -> None:
        """Accumulate the tokens of one batch, ``[T, C]``."""
        self._statistics.update(input_TC)
        self._sizes.update(input_TC)

    def include(self, sums: InputSums) -> None:
        """Accumulate kept sums."""
        self._statistics.include(sums)
        self._sizes.include(sums)

    def sum_over(self, ranks: Ranks, owner: int | None = None) -> None:
        """Add what all ranks have accumulated, on each of them."""
        self._statistics.sum_over(ranks)
        self._sizes.sum_over(ranks)

    @property
    def tokens(self) -> int:
        """Number of accumulated tokens."""
        return self._statistics.tokens

    @property
    def gram(self) -> Tensor:
        """The Gram matrix XᵀX."""
        return self._statistics.gram

    @property
    def sizes(self) -> Tensor:
        """Sum of the absolute values of each input column."""
        return self._sizes.sizes


def _quantization_fields() -> set[str]:
    return QuantizationMixin.model_fields.keys() - AWQModifier.model_fields.keys()


def _check_configures_quantization(fields: Mapping[str, Any]) -> None:
    """Refuse fields of the quantizing modifier that do not configure quantization."""
    if any(fields.get(name) is not None for name in SAYING_HOW):
        return
    given = " and ".join(fields)
    raise RecipeError(
        f"AWQModifier: {given} {'is a field' if len(fields) == 1 else 'are fields'} of the form in "
        f"which it quantizes too, and nothing says how: {', '.join(SAYING_HOW)} are all unset.",
        f"Leave {given} to the modifier that quantizes behind it, or give AWQModifier a scheme.",
    )


class AWQModifier(SmoothingMixin):
    """Scale, and where it helps clip, weights for a subsequent modifier that quantizes them.

    Attributes:
        mappings: smooth and balance layers; inferred from the model if there are none.
        offload_device: device for statistics (and with ``loss: output`` for activations): a
            ``torch.device`` or its name. ``None``: the device that they are computed on;
            activations move to main memory when they exceed half of the free memory there.
        duo_scaling: use inputs and weights (``True``), inputs alone (``False``), or try ``"both"``.
        n_grid: number of scales that are tried for each set.
        loss: the criterion for a scale: the error of the Linears' outputs, from second moments
            (``"statistics"``), or the error of their common parent's output, which is rerun for
            each candidate (``"output"``, the published form).
        clip: clip the weights of each group where that lowers its output error.
        sequential_targets: without effect, with a warning: give it to ``oneshot`` instead.
    """

    rules: ClassVar[RecipeRules] = replace(
        SmoothingMixin.rules,
        needs_later=frozenset({"QuantizationMixin"}),
        moved=MOVED_TO_THE_RUN,
    )

    mappings: list[AWQMapping] | None = None
    offload_device: _Device | None = None
    duo_scaling: bool | Literal["both"] = True
    n_grid: int = Field(default=20, ge=2, le=1000)
    loss: Literal["statistics", "output"] = "statistics"
    clip: bool = True
    sequential_targets: str | list[str] | None = None

    _settled: set[Module] = PrivateAttr(default_factory=set)
    _bounds: dict[Module, Bounds] = PrivateAttr(default_factory=dict)
    _to_clip: list[Module] = PrivateAttr(default_factory=list)
    _parents: ParentRuns | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_quantization_fields(cls, given: Any) -> Any:
        """Refuse fields of quantization: this class only scales; ``modifiers.awq`` does both."""
        theirs = _quantization_fields()
        if isinstance(given, Mapping) and (named := [name for name in given if name in theirs]):
            raise RecipeError(
                f"this class scales alone and takes no {' or '.join(named)}",
                "Give them to a QuantizationModifier behind it, or take AWQModifier from "
                "llmcompressor.modifiers.awq, which stands for both.",
            )
        return given

    @classmethod
    def from_fields(cls, **fields: Any) -> list[Modifier]:
        """Create this modifier, and a quantizing one if the fields configure quantization.

        Raises:
            RecipeError: some are of a modifier that quantizes, and none of them says how.
        """
        common = {key: fields.pop(key) for key in tuple(fields) if key in Modifier.model_fields}
        theirs = _quantization_fields()
        quantizing = {key: fields.pop(key) for key in tuple(fields) if key in theirs}
        own: list[Modifier] = [cls(**common, **fields)]
        if quantizing:
            _check_configures_quantization(quantizing)
            own.append(ModifierFactory.create("QuantizationModifier", **common, **quantizing))
        return own

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """Linears with statistics; blocks if their parents are rerun for each candidate."""
        device = self.offload_device
        return replace(
            super().traits,
            granularity=Granularity.LINEAR if self.loss == "statistics" else Granularity.BLOCK,
            devices={} if device is None else {"offload_device": device},
            beyond_statistics=""
            if self.loss == "statistics"
            else "runs parents of Linears on their inputs (loss: output)",
        )

    def named(self, model: Module) -> Sequence[Names] | None:
        """The mappings as smooth target and balance targets."""
        mappings = self.mappings
        if mappings is None:
            mappings = AWQ_MAPPING_REGISTRY.added(type(model).__name__)
        if mappings is None:
            return None
        return [(one.smooth_layer, tuple(one.balance_layers)) for one in mappings]

    def predict(self, state: State) -> Prediction:
        """Mappings registered for the class of the model, if they are used."""
        found = (
            None
            if self.mappings is not None
            else AWQ_MAPPING_REGISTRY.added(type(state.model).__name__)
        )
        return Prediction(registered=None if found is None else [asdict(one) for one in found])

    def sets_to_smooth(self) -> list[SmoothSet]:
        """Sets with a Linear that a subsequent modifier quantizes."""
        return [one for one in self._sets if any(map(_weight_args, one.balance.values()))]

    def observed_modules(self) -> list[Module]:
        """Linears that read a smoothed output, and those that are clipped."""
        return list(dict.fromkeys([*super().observed_modules(), *self._clippable()]))

    def _clippable(self) -> list[Module]:
        if not self.clip:
            return []
        own = (module for module in self._names if module not in self._settled)
        return [module for module in own if _clip_args(module)]

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Second moments, the search of each set, and clip attempts of the modules' groups.

        With ``loss: output`` the parent of a set is rerun on all data for every candidate.
        """
        inside, found = set(modules), super().cost(modules, data)
        sets = [one for one in self.sets_to_smooth() if next(iter(one.balance.values())) in inside]
        quantized = {each for one in self.sets_to_smooth() for each in one.balance.values()}
        smoothed = [weight_of(module) for module in modules if module in quantized]
        clipped = [module for module in modules if self.clip and _clip_args(module)]
        found += awq_cost(
            smoothed if self.loss == "statistics" else [],
            data,
            points=self._candidate_count,
            clipped=[weight_of(module) for module in clipped],
            group=_columns_per_scale(clipped[0]) if clipped else 0,
        )
        if self.loss == "output" and smoothed:
            parents = {name: module for module, name in self._names.items()}
            runs = self._candidate_count + 1
            found += rerun_cost([parent_of(one, parents) for one in sets], smoothed, runs, data)
        return found

    @property
    def _candidate_count(self) -> int:
        """Number of candidate scales of a set."""
        return 2 * max(self.n_grid // 2, 2) if self.duo_scaling == "both" else self.n_grid

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Note which weights are quantized already: these are not clipped."""
        self._settled = quantized_modules(state)
        return super().on_initialize(state, **kwargs)

    def on_all_initialized(self, state: State) -> None:
        """Check that subsequent modifiers quantize what this one scales.

        Raises:
            TargetError: they quantize nothing that this one scales.
            RecipeError: they quantize it in a way that the search cannot evaluate.
        """
        super().on_all_initialized(state)
        if not self.sets_to_smooth():
            raise TargetError(
                "AWQModifier has nothing to work for: no later modifier quantizes the weights of "
                "a Linear in its mappings.",
                "Put a QuantizationModifier behind it whose targets include them.",
            )
        self._check_strategies()

    # ------------------------------------------------------------------ while

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Observe the inputs; with ``loss: output`` also record the calls of the parents."""
        self._to_clip = self._clippable()
        super().on_calibration_start(state, event, **kwargs)
        if self.loss == "output":
            self._parents = ParentRuns(state, self._names, self.offload_device)
            for one in self.sets_to_smooth():
                parent = self._parents.watch(one)
                if parent is not None:
                    hook = self._parents.hook
                    self.register_hook(parent, hook, "forward_pre", with_kwargs=True)

    def _check_strategies(self) -> None:
        for one in self.sets_to_smooth():
            for name, module in one.balance.items():
                args = _weight_args(module)
                if args is not None and args.strategy == "tensor" and self.duo_scaling:
                    raise RecipeError(
                        f"AWQModifier: duo_scaling compares the weights of a group, and {name} "
                        "has one scale for all of them (strategy tensor).",
                        "Set duo_scaling: false.",
                    )

    def new_statistics(self, module: Module, input_TC: Tensor, twin: bool) -> _InputMoments:
        """Statistics with second moments of the inputs."""
        place = self.offload_device or input_TC.device
        return _InputMoments(input_TC.shape[-1], place, self._names[module])

    def compute_scale(self, one: SmoothSet, tallies: Mapping[Module, Any]) -> Tensor | None:
        """The best scale of the grid, evaluated on the Linears that are quantized."""
        members = [module for module in one.balance.values() if _weight_args(module)]
        weights = [weight_of(module).detach() for module in members]
        distinct = list(dict.fromkeys(tallies.values()))
        tokens = sum(tally.tokens for tally in distinct)
        sizes_C = torch.stack([tally.sizes for tally in distinct]).sum(dim=0)
        grid = candidates(
            sizes_C.to(weights[0].device) / tokens,
            relative_column_magnitude(weights, _columns_per_scale(members[0])),
            self.n_grid,
            self.duo_scaling,
        )
        ones_C = torch.ones(one.columns, device=weights[0].device)
        if self._parents is None:
            batches = list(_balance_batches(members, tallies))
            error_of, estimate_of = (
                self._shared_by_candidates(output_error_from_gram(some))
                for some in (batches, [one.sample() for one in batches])
            )
            found = choose_scale(error_of, grid, ones_C, estimate_of=estimate_of)
        else:
            rounds = {each: _rounding(each) for each in members}
            with self._parents.error_of(one, rounds) as error_of:
                found = choose_scale(self._shared_by_samples(error_of), grid, ones_C)
            self._parents.drop(one)
        # balance layers with separate inputs count the same tokens again; their parent does not
        judged = tokens
        if self._parents is not None:
            own = torch.tensor(self._parents.tokens)
            judged = int(self._ranks.sum_all(own, what="tokens of a parent"))
        self._records[one.name] = {
            "tokens": tokens,
            "readers": list(one.balance),
            "ratio": None if found.candidate is None else found.candidate.ratio,
            "duo": None if found.candidate is None else found.candidate.duo,
            "error": found.error / judged,
            "error_unscaled": found.before / judged,
        }
        return found.scale_C

    def _shared_by_candidates(self, error_of: ErrorOf) -> ErrorOf:
        """Evaluate on each rank, which all have the sums, a part of the candidates."""
        rank, count = self._ranks.rank, self._ranks.count

        def shared(scale_KC: Tensor) -> list[float]:
            own_KC = scale_KC[rank::count]
            own = error_of(own_KC) if len(own_KC) else []
            every = self._ranks.exchange(own, what="errors of candidates")
            return [every[k % count][k // count] for k in range(len(scale_KC))]

        return shared

    def _shared_by_samples(self, error_of: ErrorOf) -> ErrorOf:
        """Add the errors of the samples of all ranks."""

        def shared(scale_KC: Tensor) -> list[float]:
            own_K = torch.tensor(error_of(scale_KC), dtype=torch.float64)
            found: list[float] = self._ranks.sum_all(own_K, what="errors of candidates").tolist()
            return found

        return shared

    @torch.no_grad()
    def after_scales(self) -> None:
        """Find clip bounds for Linears whose scale is known, or that have none."""
        ready: dict[Any, list[Module]] = {}
        for module in [one for one in self._to_clip if one in self._seen]:
            args, one = _clip_args(module), next(reversed(self.sets_read_by(module)), None)
            if args is not None and (one is None or one.name in self._records):
                ready.setdefault(
                    (self._inputs.leader(module), one, args.model_dump_json()), []
                ).append(module)
        for (leader, one, _), members in ready.items():
            tally = self._inputs.of(leader)
            if tally is not None and tally.tokens:
                self._clip(members, tally, None if one is None else self._scales.get(one))
        done = {module for members in ready.values() for module in members}
        self._to_clip = [module for module in self._to_clip if module not in done]

    def _clip(
        self, members: Sequence[Module], tally: _InputMoments, scale_C: Tensor | None
    ) -> None:
        """Find clip bounds of Linears that share input, scale and rounding, stacked by rows."""
        weight_RC = torch.cat([weight_of(module).detach() for module in members])
        gram_CC = fill_dead_diagonal(tally.gram.to(weight_RC.device))
        if scale_C is not None:
            weight_RC = (weight_RC.float() * scale_C).to(weight_RC.dtype)
            gram_CC = gram_CC / scale_C / scale_C.unsqueeze(-1)
        group = _columns_per_scale(members[0]) or weight_RC.shape[-1]
        group = min(group, weight_RC.shape[-1])
        grid, scales_within = _rounding_within(members[0], weight_RC)
        own_RC = weight_RC.tensor_split(self._ranks.count)[self._ranks.rank]
        found = self._gathered(clip_bounds(own_RC, gram_CC, grid, scales_within, group))
        rows = [len(weight_of(module)) for module in members]
        parts = zip(torch.split(found.low_RN, rows), torch.split(found.high_RN, rows), strict=True)
        for module, (low_RN, high_RN) in zip(members, parts, strict=True):
            self._bounds[module] = Bounds(low_RN, high_RN)

    def _gathered(self, own: Bounds) -> Bounds:
        """The bounds of all rows, of which each rank has a part."""
        own_2RN, parts = torch.stack(own), []
        for rank in range(self._ranks.count):
            sent = {"bounds": own_2RN} if rank == self._ranks.rank else {}
            got = self._ranks.broadcast_from(rank, sent, what="bounds of clipping")
            parts.append(got["bounds"].to(own_2RN.device))
        return Bounds(*torch.cat(parts, dim=1))

    # ------------------------------------------------------------------ after

    def before_division(self, modules: set[Module]) -> None:
        """Clip the weights: their columns are scaled by now, their rows are not divided yet."""
        for module in [one for one in self._bounds if one in modules]:
            weight = weight_of(module)
            weight.data.copy_(self._bounds.pop(module).clamp(weight.data))

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Scale and clip what was not finished with its block."""
        super().on_calibration_end(state, event, **kwargs)
        self._parents = None
        gains = [
            record["error"] / record["error_unscaled"]
            for record in self._records.values()
            if record.get("error_unscaled")
        ]
        if gains:
            mean = sum(gains) / len(gains)
            logger.info(f"AWQModifier: errors are {mean:.3f} of those without scales, in the mean.")


def _weight_args(module: Module) -> QuantizationArgs | None:
    """Weight quantization arguments of a module, ``None`` if it is not quantized."""
    scheme = getattr(module, "quantization_scheme", None)
    return None if scheme is None else scheme.weights


def _rounding(module: Module) -> Round:
    """Rounding of a module's weight with min-max ranges, in float32.

    Scales are rounded to their stored dtype. Loaders divide in the weight's own dtype; that decides
    a few near ties differently, and takes several times as long.
    """
    args = _weight_args(module)
    assert args is not None
    stored = parameter_dtype(weight_of(module).dtype)
    grid, partition = grid_of(args), partition_of(args)

    def rounded(weight_RC: Tensor) -> Tensor:
        found = min_max_parameters(weight_RC, args, stored_in=stored)
        found = replace(found, scale=found.scale.float())
        if grid.kind != "int":
            return found.round(weight_RC)
        zero = None if grid.symmetric else found.zero_point
        return fake_quantize_matrix(weight_RC, found.scale, zero, grid, partition)

    return rounded


def _rounding_within(module: Module, whole_RC: Tensor) -> tuple[Grid, ScalesWithin]:
    """The grid of a weight, and scales of its groups, which share the weight's global scale."""
    args = _weight_args(module)
    assert args is not None
    shared = global_scale_from_amax(weight_amax(whole_RC)) if needs_global_scale(args) else None
    stored = parameter_dtype(weight_of(module).dtype)

    def scales_within(least: Tensor, greatest: Tensor) -> tuple[Tensor, Tensor]:
        ends = Range(least, greatest)
        found = range_parameters(ends, least, args, shared, stored_in=stored)
        return replace(found, scale=found.scale.float()).effective_scale, found.zero_point.float()

    return grid_of(args), scales_within


def _columns_per_scale(module: Module) -> int:
    """Number of columns that share a scale in a row; 0 for all."""
    args = _weight_args(module)
    assert args is not None
    return int(partition_of(args).columns)


def _clip_args(module: Module) -> QuantizationArgs | None:
    """Weight quantization arguments if clipping applies: few bits, rows rounded independently."""
    args = _weight_args(module) if isinstance(module, Linear) else None
    if args is None or args.num_bits >= _FINE_BITS:
        return None
    partition, columns = partition_of(args), int(weight_of(module).shape[-1])
    width = min(partition.columns or columns, columns)
    return args if partition.rows == 1 and columns % width == 0 else None


def _balance_batches(
    members: Sequence[Module], tallies: Mapping[Module, Any]
) -> Iterator[StackedLinears]:
    """Batch Linears that share inputs and rounding into one if rows are rounded independently."""
    alike: dict[Any, list[Module]] = {}
    for module in members:
        args = _weight_args(module)
        assert args is not None
        by_rows = partition_of(args).rows == 1 and not needs_global_scale(args)
        own = args.model_dump_json() if by_rows else module
        alike.setdefault((tallies[module], own), []).append(module)
    for (tally, own), modules in alike.items():
        gram_CC = tally.gram.to(weight_of(modules[0]).device)
        weights = [weight_of(module).detach() for module in modules]
        for weight_RC in weights if len(weights) > _STACKED else [torch.cat(weights)]:
            yield StackedLinears(weight_RC, gram_CC, _rounding(modules[0]), isinstance(own, str))
