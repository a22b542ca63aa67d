# SPDX-License-Identifier: Apache-2.0
"""The quantization parameters of a weight: computed by observers, used by solvers and writers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from compressed_tensors.quantization import DynamicType, QuantizationArgs
from torch import Tensor
from torch.nn import Module

from llmcompressor.errors import InputError, NonFiniteError, RecipeError
from llmcompressor.numerics.extremes import is_finite
from llmcompressor.numerics.gptq import ColumnScales
from llmcompressor.numerics.hessian import fill_dead_columns
from llmcompressor.numerics.partition import dequantize_matrix, quantize_matrix
from llmcompressor.numerics.scales import (
    effective_scale,
    global_scale_from_amax,
    parameter_dtype,
    scales_from_range,
)
from llmcompressor.numerics.weighted_scales import weighted_scales
from llmcompressor.observers.base import OBSERVERS, Observer
from llmcompressor.observers.canonical import Range, to_canonical
from llmcompressor.observers.min_max import RangeObserver
from llmcompressor.runtime.memory import release_clean_pages
from llmcompressor.schemes.bridge import (
    default_observer,
    grid_of,
    needs_global_scale,
    partition_of,
    scale_dtype_of,
    scale_format_of,
    zero_dtype_of,
)
from llmcompressor.schemes.resolve import BASE_NAMES, ResolvedSchemes

_FROM_EXTREMES = ("observe", "measure", "qparams")
"""What an observer must not do in a way of its own."""


_SAMPLED = 32
"""Rows at least, and the share of them, on which the error of rounding is measured."""


@dataclass(frozen=True)
class WeightRounding:
    """What rounding loses of a weight.

    Attributes:
        weight_error: ``‖W - Q‖ / ‖W‖``, Frobenius norms, W the weight as it was before, with the
            scales and rotations of earlier modifiers, Q as it is decoded; 0 for a weight of zeros.
        scales: the least, the median and the largest magnitude of its scales.
    """

    weight_error: float
    scales: list[float]


@dataclass(frozen=True)
class WeightParameters:
    """Scale, zero point and global scale of a weight, as they will be stored.

    Attributes:
        args: how the weight is quantized.
        scale: in the shape of the strategy and the weight's dtype.
        zero_point: same shape, integer; all zero on symmetric grids.
        global_scale: float32 ``[1]``, or ``None`` if the format has none.
    """

    args: QuantizationArgs
    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None = None

    @property
    def _zero(self) -> Tensor | None:
        return None if self.args.symmetric else self.zero_point

    @property
    def effective_scale(self) -> Tensor:
        """The scale that values are divided by, including the global scale."""
        return effective_scale(self.scale, self.global_scale)

    @property
    def through(self) -> torch.dtype | None:
        """The intermediate dtype to which loaders decode before the weight's own dtype, if any."""
        grid = grid_of(self.args)
        return torch.bfloat16 if grid.kind == "float" and grid.bits < 8 else None

    def round(self, weight_RC: Tensor) -> Tensor:
        """The weight as a loader of the checkpoint will decode it, in the weight's dtype.

        Bit for bit the values that compressed-tensors decodes from the packed file, so that the
        model in memory equals the model on disk.
        """
        grid, partition = grid_of(self.args), partition_of(self.args)
        scale = self.effective_scale
        codes = quantize_matrix(weight_RC, scale, self._zero, grid, partition)
        if grid.kind == "float" and grid.bits == 8 and scale.dtype != weight_RC.dtype:
            codes = codes.to(weight_RC.dtype)
        values = dequantize_matrix(codes, scale, self._zero, grid, partition)
        if self.through is not None:
            values = values.to(self.through)
        return values.to(weight_RC.dtype)

    def searched(self, weight_RC: Tensor, curvature_C: Tensor) -> WeightParameters:
        """The scales of the least weighted error of an integer grid, in the place of these.

        Args:
            weight_RC: the weight.
            curvature_C: what the square of each column's error counts, float32, not negative.
        """
        groups = self.scale.shape[-1]
        if weight_RC.shape[-1] % groups:
            return self
        curvature_C = fill_dead_columns(curvature_C)
        scale_RG, zero_RG = weighted_scales(
            weight_RC.float(), curvature_C, groups, grid_of(self.args), self.scale.dtype
        )
        zero_point = self.zero_point if zero_RG is None else zero_RG.to(self.zero_point.dtype)
        return replace(self, scale=scale_RG.to(self.scale.dtype), zero_point=zero_point)

    def of_rows(self, weight_RC: Tensor, count: int) -> tuple[Tensor, WeightParameters]:
        """Rows spread evenly over the weight, in whole cells, and the parameters of these.

        Args:
            weight_RC: the weight.
            count: how many rows at least; all, if there are fewer.

        Returns:
            int64 indices of the rows, and their parameters.
        """
        partition = partition_of(self.args)
        rows, cells = (one.to(weight_RC.device) for one in partition.sample(len(weight_RC), count))
        if partition.rows == 0:  # one row of scales holds for all
            return rows, self
        return rows, replace(self, scale=self.scale[cells], zero_point=self.zero_point[cells])

    def rounding(self, weight_RC: Tensor, values_RC: Tensor | None = None) -> WeightRounding:
        """What rounding loses of a weight, measured on rows spread over it.

        Args:
            weight_RC: the weight, floating dtype.
            values_RC: what is rounded in its place, if a solver found something better.
        """
        rows, own = self.of_rows(weight_RC, max(_SAMPLED, len(weight_RC) // _SAMPLED))
        original = weight_RC[rows]
        rounded = own.round(original if values_RC is None else values_RC[rows])
        original = original.float()
        norm = float(torch.linalg.vector_norm(original))
        error = float(torch.linalg.vector_norm(original - rounded.float()))
        scale = self.effective_scale.float().abs()
        least, greatest = scale.aminmax()
        return WeightRounding(
            error / norm if norm > 0 else 0.0,
            [float(least), float(scale.median()), float(greatest)],
        )

    def columns(self, rows: int, columns: int) -> ColumnScales:
        """The scales for a column sweep over a ``rows`` by ``columns`` weight."""
        partition = partition_of(self.args)
        scale_RG, group_of_column_C = partition.per_column(self.effective_scale, rows, columns)
        zero_RG = None
        if self._zero is not None:
            zero_RG = partition.per_column(self._zero, rows, columns)[0].float()
        return ColumnScales(scale_RG.float(), zero_RG, group_of_column_C)


def activation_parameters(observer: Observer, dtype: torch.dtype) -> dict[str, Tensor]:
    """The global scale, scale and zero point of an activation, as far as they are stored.

    ``dtype`` is that of the module's weight.
    """
    found, global_scale = {}, observer.global_scale()
    if global_scale is not None:
        found["global_scale"] = global_scale
    if observer.args.dynamic != DynamicType.LOCAL:
        found["scale"], zero_point = observer.qparams(global_scale, dtype=dtype)
        if not observer.args.symmetric:
            found["zero_point"] = zero_point
    return found


def weight_of(module: Module) -> Tensor:
    """The weight of a module that has one."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def replace_weight(module: Module, values: Tensor) -> None:
    """Give the weight of a module new values.

    A weight that lies in a file mapped by safetensors takes over the storage of ``values``: in
    its own, each page would be copied when it is first written to, which takes longer than rounding
    does.

    Args:
        module: the module.
        values: of the weight's shape, not referred to by anything else.
    """
    weight: Any = weight_of(module).data  # torch annotates no is_shared
    is_own = weight.device.type == "cpu" and not weight.is_shared() and type(weight) is Tensor
    sizes = {each.untyped_storage().nbytes() for each in (weight, values)}
    is_alike = values.dtype == weight.dtype and values.stride() == weight.stride()
    is_swappable = is_own and is_alike and sizes == {weight.nbytes}
    if is_swappable and release_clean_pages(weight.data_ptr(), weight.nbytes):
        module.weight.data = values
    else:
        weight.copy_(values)


def weight_amax(weight_RC: Tensor) -> Tensor:
    """The absolute maximum of a weight, float32 ``[1]``."""
    least, greatest = weight_RC.aminmax()
    return torch.maximum(-least, greatest).float().reshape(1)


def weight_amax_with_headroom(weight_RC: Tensor, args: QuantizationArgs) -> Tensor:
    """The largest absolute value that the scales of a weight have to cover, float32 ``[1]``.

    Its absolute maximum; more if the observer also tries ranges beyond the extremes: a global scale
    without headroom would clip such scales (arXiv:2512.02010, which leaves 448/256).
    """
    options = _weight_observer(args).options
    return weight_amax(weight_RC) * max(1.0, float(getattr(options, "expand", 1.0)))


def _weight_observer(args: QuantizationArgs) -> Observer:
    name = default_observer(args, "weight")
    assert name is not None, "weights are never quantized dynamically"
    return Observer.load_from_registry(name, base_name="weight", args=args)


def check_observers(resolved: ResolvedSchemes, modifier: str = "") -> None:
    """Construct every observer that will be needed, which checks its name and options.

    Raises:
        RecipeError: an observer is unknown, or it does not have one of its options. It begins with
            the modifier's name if that is given.
    """
    wanted = [("kv_cache_scheme", "k", resolved.kv_cache_scheme)]
    for (group, argument), where in resolved.observer_fields.items():
        wanted.append((where, BASE_NAMES[argument], getattr(resolved.groups[group], argument)))
    for where, base_name, args in wanted:
        name = None if args is None else default_observer(args, base_name)
        if name is None:
            continue
        try:
            Observer.load_from_registry(name, base_name=base_name, args=args)
        except InputError as error:
            owner = f"{modifier}: " if modifier else ""
            raise RecipeError(f"{owner}field {where!r}: {error.problem}", error.remedy) from error


def needs_input_importance(args: QuantizationArgs | None) -> bool:
    """Return True if the observer of a weight uses input importance, which requires data."""
    if args is None:
        return False
    name = default_observer(args, "weight")
    return name is not None and bool(OBSERVERS.load(name).uses_importance)


def observe_weight(
    weight_RC: Tensor,
    args: QuantizationArgs,
    *,
    global_scale: Tensor | None = None,
    importance_C: Tensor | None = None,
    found: Range | None = None,
) -> WeightParameters:
    """Compute the parameters of a weight, ``[R, C]``, with the observer named in its arguments.

    Args:
        weight_RC: the weight.
        args: how to quantize it.
        global_scale: global scale of its fused set; its own if ``None``.
        importance_C: mean square of the inputs per column, for importance-weighted observers.
        found: its range from :func:`weight_range`, if already known.

    Raises:
        NonFiniteError: the weight holds NaN or infinity, or a scale does not fit its dtype.
    """
    found = weight_range(weight_RC, args) if found is None else found
    if found is not None:
        if not all(map(is_finite, found)):
            raise NonFiniteError("NaN or infinity in the weight that was observed.")
        parameters = range_parameters(found, weight_RC, args, global_scale)
        if not is_finite(parameters.scale):
            raise NonFiniteError(f"A scale of the weight does not fit {parameters.scale.dtype}.")
        return parameters
    observer = _weight_observer(args)
    observer.importance = importance_C
    observer.observe(weight_RC)
    if needs_global_scale(args) and global_scale is None:
        global_scale = global_scale_from_amax(weight_amax_with_headroom(weight_RC, args))
    scale, zero_point = observer.qparams(global_scale, dtype=weight_RC.dtype)
    return WeightParameters(args, scale, zero_point, global_scale)


def weight_range(weight_RC: Tensor, args: QuantizationArgs) -> Range | None:
    """Minimum and maximum of each cell of a weight, in the shape of its scales.

    ``None`` if its observer uses more than the extremes (:func:`uses_only_extremes`). On symmetric
    grids both bounds have the largest absolute value.
    """
    if not uses_only_extremes(args):
        return None
    return to_canonical(weight_RC.detach(), "weight", args).range_for_scales


class WeightRanges:
    """The ranges of a weight for several schemes: those of the same cells are found once.

    Args:
        weight_RC: the weight.
    """

    def __init__(self, weight_RC: Tensor) -> None:
        self._weight_RC = weight_RC
        self._found: dict[tuple[Any, ...], Range] = {}

    def __call__(self, args: QuantizationArgs) -> Range | None:
        """Return what :func:`weight_range` does."""
        key = (partition_of(args), args.symmetric)
        if key not in self._found or not uses_only_extremes(args):
            found = weight_range(self._weight_RC, args)
            if found is None:
                return None
            self._found[key] = found
        return self._found[key]


def uses_only_extremes(args: QuantizationArgs) -> bool:
    """Return True if the observer of a weight uses its extremes alone: one cheap pass over it."""
    name = default_observer(args, "weight")
    observer = None if name is None else OBSERVERS.load(name)
    return (
        isinstance(observer, type)
        and issubclass(observer, RangeObserver)
        and all(getattr(observer, one) is getattr(RangeObserver, one) for one in _FROM_EXTREMES)
    )


@torch.no_grad()
def min_max_parameters(
    weight_RC: Tensor,
    args: QuantizationArgs,
    global_scale: Tensor | None = None,
    *,
    stored_in: torch.dtype | None = None,
) -> WeightParameters:
    """The same as :func:`observe_weight` for min-max observers, without its checks.

    Nothing here synchronizes with an accelerator, so that it can run in every forward.
    ``stored_in`` is the dtype of the scales, if ``weight_RC`` is temporarily in another one.
    """
    weight_RC = weight_RC.detach()
    found = to_canonical(weight_RC, "weight", args).range_for_scales
    return range_parameters(found, weight_RC, args, global_scale, stored_in=stored_in)


def range_parameters(
    found: Range,
    weight_RC: Tensor,
    args: QuantizationArgs,
    global_scale: Tensor | None,
    *,
    stored_in: torch.dtype | None = None,
) -> WeightParameters:
    """The parameters of a weight whose cells have these extremes."""
    if needs_global_scale(args) and global_scale is None:
        amax = torch.maximum(-found.minimum.amin(), found.maximum.amax())
        global_scale = global_scale_from_amax(amax.float())
    scale, zero_point = scales_from_range(
        *found,
        grid_of(args),
        scale_format=scale_format_of(args),
        global_scale=global_scale,
        scale_dtype=scale_dtype_of(args),
        zero_dtype=zero_dtype_of(args),
        stored_in=stored_in or parameter_dtype(weight_RC.dtype),
    )
    return WeightParameters(args, scale, zero_point, global_scale)
