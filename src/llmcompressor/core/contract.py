# SPDX-License-Identifier: Apache-2.0
"""Cost estimates of modifiers, and the modules they plan to store, known before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = [
    "DEFAULT_DAMPENING",
    "EARLIER_DAMPENING",
    "MOVED_TO_THE_RUN",
    "CalibrationCost",
    "ComputeCost",
    "DampeningFraction",
    "DataSize",
    "Granularity",
    "LearningCost",
    "PlannedModule",
]


@dataclass(frozen=True)
class CalibrationCost:
    """Cost of calibrating and solving modules that share one input.

    Attributes:
        gram: multiply-adds per token, for second moments of the input.
        cross: multiply-adds per token, for products with the original model's input.
        watch: values per token read by other statistics, such as extremes.
        solve: multiply-adds after all tokens were seen.
        visits: passes over the weights that are not products, for example column by column.
        statistics: bytes held from the first token until the modules are solved.
        buffered: bytes of tokens that are buffered until there are enough to accumulate.
        workspace: further bytes while the modules are solved.
        on_device: ``workspace`` on an accelerator; ``None`` if it is the same. Rows that the host
            processes in parts, one thread each, are processed at once there.
        at_once: number of similar modules of the same stop that are solved in one batch.
        kept: bytes per token of the data that are held from capture until the modules are solved:
            on an accelerator within half of what its memory limit leaves, else in main memory.
        scaled: bytes of weights while modules are rerun to measure the change of their outputs.
        scaled_on_device: ``scaled`` on an accelerator; ``None`` if it is the same.
        outputs: bytes per token of the outputs held during these reruns, in the same places.
        running: bytes per token of the batch that is rerun.
        offloads: ``kept`` and ``outputs`` always lie in main memory, however much room there is.
        together: all modules of a stop are rerun together; the workspace before that is of one
            module at a time.
    """

    gram: int = 0
    cross: int = 0
    watch: int = 0
    solve: int = 0
    visits: int = 0
    statistics: int = 0
    buffered: int = 0
    workspace: int = 0
    on_device: int | None = None
    at_once: int = 1
    kept: int = 0
    scaled: int = 0
    scaled_on_device: int | None = None
    outputs: int = 0
    running: int = 0
    offloads: bool = False
    together: bool = False

    def workspace_on(self, *, device: bool) -> int:
        """``workspace`` on the host or on an accelerator."""
        return self.workspace if self.on_device is None or not device else self.on_device

    def scaled_on(self, *, device: bool) -> int:
        """``scaled`` on the host or on an accelerator."""
        return self.scaled if self.scaled_on_device is None or not device else self.scaled_on_device


@dataclass(frozen=True)
class DataSize:
    """Size of the calibration data, and the model's costs per token that depend on it.

    Attributes:
        tokens: tokens of all samples, including padding.
        real: tokens that are not padding.
        samples: number of samples.
        batch: tokens of one batch, as it is run.
        attention: multiply-adds per token of one layer's attention, without its Linears.
        expert_share: share of a layer's experts that a token is routed to.
    """

    tokens: int = 0
    real: int = 0
    samples: int = 0
    batch: int = 0
    attention: int = 0
    expert_share: float = 1.0


@dataclass(frozen=True)
class ComputeCost:
    """Compute spent on a part of a model in addition to the calibration of its modules.

    Attributes:
        forward: multiply-adds in the model's dtype.
        solve: multiply-adds in float32; one in float64 counts twice.
        visits: passes over single weights that are not products.
        readings: number of times that the part is read from its file again, if it is not in memory.
        attention: the share of ``forward`` that is products between tokens.
    """

    forward: int = 0
    solve: int = 0
    visits: int = 0
    readings: int = 0
    attention: int = 0

    def __add__(self, other: ComputeCost) -> ComputeCost:
        return ComputeCost(
            self.forward + other.forward,
            self.solve + other.solve,
            self.visits + other.visits,
            self.readings + other.readings,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class LearningCost:
    """Cost of a modifier that learns before its pass.

    Attributes:
        steps: optimizer steps, one batch forward and backward each.
        compared: at most this many batches run forward before the first step and after the last.
        held: bytes held from the first step to the last.
        kept: bytes of the file from which a later run can resume.
        stepping: further bytes during a step.
        products: multiply-adds of a step, without those of the model and of making its weights.
    """

    steps: int
    compared: int = 0
    held: int = 0
    kept: int = 0
    stepping: int = 0
    products: int = 0


@dataclass(frozen=True)
class PlannedModule:
    """The planned storage of a module.

    Attributes:
        name: name of the module.
        module: the module.
        scheme: its quantization (``compressed_tensors``' ``QuantizationScheme``).
        tensors: its own tensors as they will be in memory, on the meta device.
        is_attention: its queries, keys or values are quantized; it has no weight of its own.
        has_group: a scheme of the recipe targets it.
    """

    name: str
    module: Module
    scheme: Any
    tensors: Mapping[str, Tensor]
    is_attention: bool = False
    has_group: bool = True


# --------------------
# Pydantic fields shared by several techniques.

DEFAULT_DAMPENING = 0.01
EARLIER_DAMPENING: Mapping[str, str] = MappingProxyType({"percdamp": "dampening_frac"})
"""What the fraction was called."""
MOVED_TO_THE_RUN: Mapping[str, str] = MappingProxyType(
    {
        "sequential_update": 'calibration is sequential unless oneshot is given pipeline="basic".',
        "sequential_targets": "give sequential_targets to oneshot (--sequential-targets).",
    }
)
"""Fields of earlier releases that say how a run goes, and what does that now."""


def _default_for_none(given: Any) -> Any:
    return DEFAULT_DAMPENING if given is None else given


DampeningFraction: TypeAlias = Annotated[
    float, Field(ge=0.0, le=10.0), BeforeValidator(_default_for_none)
]
"""What is added to a Hessian's diagonal, as a fraction of its mean; the default for ``None``."""


# --------------------
# Granularity of calibration: how much of a model is processed at once.


class Granularity(StrEnum):
    """The part of a model that a modifier has to see at once, from fine to coarse.

    >>> max(Granularity.BLOCK, Granularity.LINEAR)
    <Granularity.BLOCK: 'block'>
    """

    LINEAR = "linear"
    SUB_BLOCK = "sub_block"
    BLOCK = "block"

    # All four have to be overridden: those of str compare alphabetically.
    def __lt__(self, other: str) -> bool:
        return self._rank < Granularity(other)._rank

    def __le__(self, other: str) -> bool:
        return self._rank <= Granularity(other)._rank

    def __gt__(self, other: str) -> bool:
        return self._rank > Granularity(other)._rank

    def __ge__(self, other: str) -> bool:
        return self._rank >= Granularity(other)._rank

    @property
    def _rank(self) -> int:
        return list(Granularity).index(self)
