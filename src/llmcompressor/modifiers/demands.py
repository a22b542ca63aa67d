# SPDX-License-Identifier: Apache-2.0
"""What a modifier says that it takes, and makes of modules, before any of it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["DataSize", "Effort", "Learning", "PlannedModule", "Work"]


@dataclass(frozen=True)
class Effort:
    """What calibrating and solving modules with one input takes.

    Attributes:
        gram: multiply-adds per token, for second moments of the input.
        cross: multiply-adds per token, for products with the original model's input.
        watch: values per token that are looked at in other ways, for extremes for instance.
        solve: multiply-adds once all tokens were seen.
        visits: passes over the weights that are not products, column by column for instance.
        statistics: bytes that are held from the first token until the modules are solved.
        buffered: bytes of tokens that wait for others, where those that run at once are too few to
            be counted.
        workspace: further bytes while they are solved.
        on_device: the same on an accelerator; ``None`` where it is no other. Rows that the host
            works on in parts, a thread on each, are worked on at once there.
        at_once: where others at the same stop are alike, how many are solved in one batch.
        kept: bytes per token of the data that are held from when it is seen until they are solved:
            on an accelerator within half of what a limit leaves of it, else in main memory.
        scaled: bytes of weights while modules are run again, to see what becomes of their outputs.
        scaled_on_device: the same on an accelerator; ``None`` where it is no other.
        outputs: bytes per token of the data meanwhile, in the same places.
        running: bytes per token of those that run at once, meanwhile.
        offloads: what is kept, and outputs, lie in main memory however much room there is.
        together: they run again together with all others that are calibrated at the same stop;
            the workspace before that is of one at a time.
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
        """``workspace``, on the host or on an accelerator."""
        return self.workspace if self.on_device is None or not device else self.on_device

    def scaled_on(self, *, device: bool) -> int:
        """``scaled``, on the host or on an accelerator."""
        return self.scaled if self.scaled_on_device is None or not device else self.scaled_on_device


@dataclass(frozen=True)
class DataSize:
    """How much calibration data there is, and what a model makes of a token of it.

    Attributes:
        tokens: of all samples, padding included.
        real: those that count.
        samples: how many samples that are.
        batch: tokens of one batch, as it is run.
        attention: multiply-adds per token of one layer's attention, its Linears left aside.
        expert_share: the share of a layer's experts that a token is routed to.
    """

    tokens: int = 0
    real: int = 0
    samples: int = 0
    batch: int = 0
    attention: int = 0
    expert_share: float = 1.0


@dataclass(frozen=True)
class Work:
    """What is computed of a part of a model beside the calibration of its modules.

    Attributes:
        forward: multiply-adds in the model's dtype.
        solve: multiply-adds in float32; one in float64 counts twice.
        visits: passes over single weights that are not products.
        readings: times that the part is read from its file once more, where it is not in memory.
        attention: of ``forward``, products between tokens.
    """

    forward: int = 0
    solve: int = 0
    visits: int = 0
    readings: int = 0
    attention: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward + other.forward,
            self.solve + other.solve,
            self.visits + other.visits,
            self.readings + other.readings,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class Learning:
    """What a modifier takes that learns before its pass.

    Attributes:
        steps: batches that run forward and backward, one after another.
        compared: batches at most that run forward before the first step, and after the last.
        held: bytes from the first step to the last.
        kept: bytes of a file from which a later run can go on.
        stepping: further bytes while a step is taken.
        products: multiply-adds of a step, beside those of the model and of its weights.
    """

    steps: int
    compared: int = 0
    held: int = 0
    kept: int = 0
    stepping: int = 0
    products: int = 0


@dataclass(frozen=True)
class PlannedModule:
    """How a module will be stored.

    Attributes:
        name: its name.
        module: the module.
        scheme: how it is quantized (``compressed_tensors``' ``QuantizationScheme``).
        tensors: its own tensors as they will be in memory, on the meta device.
        is_attention: its queries, keys or values are quantized, it has no weight of its own.
        has_group: a scheme of the recipe targets it.
    """

    name: str
    module: Module
    scheme: Any
    tensors: Mapping[str, Tensor]
    is_attention: bool = False
    has_group: bool = True
