# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant: migrate the range of activations into the weights that read them.

Xiao et al., arXiv:2211.10438; see :mod:`llmcompressor.numerics.smoothing` for the equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import Module

from llmcompressor.core.contract import Traits
from llmcompressor.core.state import State
from llmcompressor.equalization.base import SmoothingMixin
from llmcompressor.equalization.mappings import (
    WRITTEN,
    Names,
    SmoothSet,
    find_smooth_sets,
    norm_mappings,
)
from llmcompressor.errors import RecipeError
from llmcompressor.modeling.call_graph import first_tensor
from llmcompressor.numerics.smoothing import (
    column_range,
    log_equalization_scales,
    smoothquant_scales,
)
from llmcompressor.observers.column_statistics import ColumnExtremes
from llmcompressor.observers.tokens import split_batches
from llmcompressor.quantization.parameters import weight_of
from llmcompressor.runtime.registry import UserOverrides

_Names = Annotated[
    list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)
]
_FORM = "Write each as [[targets of the Linears], target of the norm]."


@dataclass(config=ConfigDict(extra="forbid"))
class SmoothQuantMapping:
    """A smooth layer and its balance layers; equal to ``[balance_layers, smooth_layer]``.

    Attributes:
        smooth_layer: target of the norm (or Linear) whose output is divided by the scales.
        balance_layers: targets of all Linears that read its output.
    """

    smooth_layer: str
    balance_layers: list[str]

    @property
    def smooth_layers(self) -> str:
        """Alias of ``smooth_layer``."""
        return self.smooth_layer


class LayerMap(NamedTuple):
    """A mapping as a named tuple, the form of earlier releases."""

    balance_layers: list[str] | str
    smooth_layers: str


def _to_mappings(names: Sequence[Names]) -> list[SmoothQuantMapping]:
    return [SmoothQuantMapping(smooth, list(balance)) for smooth, balance in norm_mappings(names)]


DEFAULT_SMOOTHQUANT_MAPPINGS = _to_mappings(WRITTEN["LlamaForCausalLM"])
"""Those of Llama and of what is built as it is."""
MAPPINGS_REGISTRY: UserOverrides[Sequence[Any]] = UserOverrides(
    {name: partial(_to_mappings, names) for name, names in WRITTEN.items()}
)
"""Mappings that users add for a model's class, by its name. Those of known classes can be read;
unless some are added, they are found from the model."""


def get_layer_mappings_from_architecture(architecture: str) -> Sequence[Any]:
    """The mappings registered for a model class, or those of Llama.

    Args:
        architecture: the name of the class, for instance ``"Qwen3ForCausalLM"``.
    """
    return MAPPINGS_REGISTRY.get(architecture, DEFAULT_SMOOTHQUANT_MAPPINGS)


def get_layer_mappings_from_model(model: Module) -> Sequence[Any]:
    """The mappings registered for a model's class, or one for each norm found in it.

    Args:
        model: its weights may be on the meta device.
    """
    if (known := MAPPINGS_REGISTRY.get(type(model).__name__)) is not None:
        return known
    found = find_smooth_sets(model, norms_only=True, mixtures=False)
    return [SmoothQuantMapping(one.name, list(one.balance)) for one in found]


class SmoothQuantModifier(SmoothingMixin):
    """Make activations easier to quantize, without changing the function of the model.

    It precedes the modifier that quantizes, in recipes whose schemes quantize activations.

    Attributes:
        smoothing_strength: from 0 to 1, how much of the range is moved into the weights.
        mappings: ``[[targets of the Linears], target of the norm]`` for each kind of place;
            inferred from the model if there are none.
        ignore: modules that are not smoothed.
        num_calibration_steps: number of batches that are observed; default: all.
        calibration_function: not supported: calibration runs the model's own forward.
        algorithm: ``"smoothquant"``, or ``"log_equalization"``, which uses activations alone.
    """

    smoothing_strength: float = Field(default=0.5, ge=0.0, le=1.0)
    mappings: list[tuple[list[str], str]] | None = None
    ignore: _Names | None = None
    num_calibration_steps: int | None = Field(default=None, ge=1)
    calibration_function: Any = None
    algorithm: Literal["smoothquant", "log_equalization"] = "smoothquant"

    @field_validator("mappings", mode="before")
    @classmethod
    def _parse_mappings(cls, value: Any) -> Any:
        return [_parse_mapping(one) for one in value] if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _check_fields(self) -> SmoothQuantModifier:
        if self.calibration_function is not None:
            raise RecipeError(
                "calibration_function is not supported: calibration runs the model's own forward",
                "Give your data to oneshot as dataset=..., a DataLoader for instance.",
            )
        for name in ("start", "end"):
            if getattr(self, name) not in (None, -1):
                raise RecipeError(
                    f"{name} is {getattr(self, name)!r}, and smoothing is done once",
                    f"Leave {name} out.",
                )
        return self

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """Extremes of the inputs are all that it observes, of all batches unless some are asked."""
        some = self.num_calibration_steps is not None
        lack = "observes some of the batches (num_calibration_steps)" if some else ""
        return replace(super().traits, beyond_statistics=lack)

    @property
    def norms_only(self) -> bool:
        """Always True: Linears are only smoothed if the recipe names them."""
        return True

    @property
    def includes_moe(self) -> bool:
        """Always False: a scale shared by all experts widens their weights' ranges."""
        return False

    def named(self, model: Module) -> Sequence[Names] | None:
        """The mappings as smooth target and balance targets."""
        mappings = self.mappings
        added = MAPPINGS_REGISTRY.added(type(model).__name__)
        if mappings is None and added is not None:
            mappings = [_parse_mapping(one) for one in added]
        if mappings is None:
            return None
        return [(smooth, tuple(balance)) for balance, smooth in mappings]

    def ignored(self) -> Sequence[str]:
        """Targets of modules that are not smoothed."""
        return self.ignore or ()

    # ------------------------------------------------------------------ while

    def new_statistics(self, module: Module, input_TC: Tensor, twin: bool) -> ColumnExtremes:
        """Statistics with the extremes of every channel."""
        return ColumnExtremes(input_TC.shape[-1], input_TC.device, self._names[module])

    def _hook(self, state: State) -> Any:
        limit = self.num_calibration_steps
        if limit is None:
            return super()._hook(state)
        seen: dict[Module, int] = {}

        @torch.no_grad()
        def collect_some(module: Module, args: Any, kwargs: Any) -> None:
            tensor = first_tensor(args, kwargs)
            if tensor is None:
                return
            sizes = state.calibration.batch_sizes
            parts = list(split_batches(tensor, state.calibration.token_mask, sizes))
            each = len(sizes) if sizes is not None and len(parts) == 1 else 1
            for part, mask in parts:
                if seen.get(module, 0) * self._ranks.count + self._ranks.rank < limit:
                    self._inputs.add(module, part, mask)
                seen[module] = seen.get(module, 0) + each

        return collect_some

    def compute_scale(self, one: SmoothSet, tallies: Mapping[Module, Any]) -> Tensor | None:
        """Scales by equation 4 of the paper, or its logarithmic variant."""
        distinct = list(dict.fromkeys(tallies.values()))
        range_C = torch.stack([tally.range for tally in distinct]).amax(dim=0)
        if self.algorithm == "log_equalization":
            scale_C = log_equalization_scales(range_C)
        else:
            weights = [weight_of(module) for module in one.linears.values()]
            scale_C = smoothquant_scales(
                range_C, column_range(weights).to(range_C.device), self.smoothing_strength
            )
        self._records[one.name] = {
            "tokens": sum(tally.tokens for tally in distinct),
            "readers": list(one.balance),
            "least": float(scale_C.min()),
            "greatest": float(scale_C.max()),
        }
        return scale_C


class LogarithmicEqualizationModifier(SmoothQuantModifier):
    """``SmoothQuantModifier`` with ``algorithm: log_equalization``; the former name."""

    algorithm: Literal["smoothquant", "log_equalization"] = "log_equalization"


def _parse_mapping(value: Any) -> Any:
    """Convert a mapping of any accepted form to ``(balance targets, smooth target)``."""
    if isinstance(value, SmoothQuantMapping):
        return _parse_mapping([value.balance_layers, value.smooth_layer])
    if isinstance(value, Mapping):
        return _parse_mapping(SmoothQuantMapping(**value))
    if isinstance(value, list | tuple) and len(value) == 2:
        balance, smooth = value
        if isinstance(smooth, list | tuple) and len(smooth) == 1:
            smooth = smooth[0]
        if isinstance(smooth, str) and balance:
            return ([balance] if isinstance(balance, str) else list(balance)), smooth
    raise RecipeError(f"{value!r:.80} is no mapping", _FORM)
