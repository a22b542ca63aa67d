# SPDX-License-Identifier: Apache-2.0
"""The contract of a modifier: the values by which it declares what it needs and does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, Flag, StrEnum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

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

    @property
    def _rank(self) -> int:
        return list(Granularity).index(self)


# All four have to be overridden: those of str compare alphabetically.
for _compare in (operator.lt, operator.le, operator.gt, operator.ge):

    def _by_rank(one: Granularity, other: str, compare: Any = _compare) -> bool:
        return bool(compare(one._rank, Granularity(other)._rank))

    setattr(Granularity, f"__{_compare.__name__}__", _by_rank)


# --------------------
# Declarations that recipes and pipelines read.


@dataclass(frozen=True, kw_only=True)
class RecipeRules:
    """Rules of a modifier class for recipes and runs, known without an instance.

    Attributes:
        run_types: the kinds of run that it works in: ``oneshot``, ``train``, or both.
        idle_types: kinds of run in which it has nothing to do and is left out with a warning.
        must_precede: names of modifier classes that may not come before it in a recipe.
        needs_later: names of modifier classes, one of which has to come later in the recipe.
        renamed: field name of an earlier release → current name; both are accepted.
        moved: field of an earlier release without effect → its replacement, which a warning names.
        needs_time: it acts from its start to its end, which therefore has to be later.
        takes_quantized: in a training it works on a model that an earlier run has quantized, whose
            codes stay: the only modifier there that changes weights. All parameters of the model
            are frozen, and those that it adds are float32.
        uses_teacher: it learns from the session's teacher, so tokens without a label count too.
        changes_weights: it changes weights of the model. In a training each process's shard then
            has to be the weight itself, and the model may have no adapters.
    """

    run_types: frozenset[str] = frozenset({"oneshot", "train"})
    idle_types: frozenset[str] = frozenset()
    must_precede: frozenset[str] = frozenset()
    needs_later: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    needs_time: bool = False
    takes_quantized: bool = False
    uses_teacher: bool = False
    changes_weights: bool = False


class DataUse(StrEnum):
    """Use of the calibration data by a modifier.

    ``STREAM``: batches run through the model while it observes. ``SURVEY_FIRST``: a pass over all
    data that changes nothing comes before that. ``LEARN_FIRST``: it consumes the batches itself
    when its pass begins, and none run through the model for it.
    """

    NONE = "none"
    STREAM = "stream"
    SURVEY_FIRST = "survey_first"
    LEARN_FIRST = "learn_first"

    @property
    def collects(self) -> bool:
        """Return True if a pipeline has to run data through the model."""
        return self in (DataUse.STREAM, DataUse.SURVEY_FIRST)


class Solving(Enum):
    """Rank that works on a module when all samples have reached it, where ranks share a run.

    Attributes:
        ALONE: all, as each process needs all samples; without data each does the same.
        OWNER: the owner of the module, with what :meth:`.Modifier.sum_collected` has added there.
            The others get its weights.
        ALL: all ranks, with sums that all of them have. They may share the search for a value, and
            end with the same one.
    """

    ALONE = auto()
    OWNER = auto()
    ALL = auto()


class Edits(Flag):
    """Consequences of a modifier's changes for other modifiers and for the rest of its pass.

    Attributes:
        AT_ONCE: a pass continues with the changed module; without it the module stays as it was
            until all passes have left its block.
        INPUTS: inputs that others would collect in the same pass change, so that these run in a
            later pass.
        OPEN: modules may be changed further by a modifier that shares the pass; others without data
            run in a later pass.
        STRUCTURE: parts of the model are removed (:meth:`.Modifier.outline`).
    """

    NONE = 0
    AT_ONCE = auto()
    INPUTS = auto()
    OPEN = auto()
    STRUCTURE = auto()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a modifier that pipelines read, computed from its fields.

    Attributes:
        data: how it uses the calibration data.
        granularity: the smallest part of a model that it can work on at a time.
        whole_blocks: it works on the model's own blocks, whatever sequential targets are given:
            neither on parts of blocks nor on modules that hold several.
        edits: what its changes mean for the rest of the pass.
        begins_pass: it begins a pass after a calibration, so that it finds the model as all
            modifiers before it have left it.
        joins: names of modifier classes whose pass it shares, module by module, if it comes after
            them, although each needs data.
        twin: it needs the original model's inputs alongside the compressed one's.
        sees_original: it is shown the model and all batches before any modifier has changed
            anything (:meth:`.Modifier.see_original`).
        propagates_error: later modules are calibrated with its error in their inputs.
        by_block: :meth:`.Modifier.finish` completes single blocks; others need not be loaded.
        observing_steps: optimizer steps of a training that it only observes, from its start on.
        unservable: its fields explicitly request an output that no server loads.
        over_ranks: who works on a module where each of several ranks runs a part of the samples;
            :meth:`.Modifier.sum_collected` and :meth:`.Modifier.sum_observed` add what all have
            collected.
        divides_rows: all ranks may solve a group of modules together, each a part of the rows.
        devices: field → the device that it names, which the machine has to have.
        files: field → the file that it names, which is written in addition to the output.
        beyond_statistics: what it needs besides the kept sums of the inputs of Linears, or does
            to inputs so that kept sums do not fit any more, as the end of a sentence that begins
            with its name; empty if there is nothing. ``None``: it needs no data, or all of it.
    """

    data: DataUse = DataUse.NONE
    granularity: Granularity = Granularity.BLOCK
    whole_blocks: bool = False
    edits: Edits = Edits.AT_ONCE
    begins_pass: bool = False
    joins: frozenset[str] = frozenset()
    twin: bool = False
    sees_original: bool = False
    propagates_error: bool = True
    by_block: bool = False
    observing_steps: int = 0
    unservable: bool = False
    over_ranks: Solving = Solving.ALONE
    divides_rows: bool = False
    devices: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    beyond_statistics: str | None = None

    @property
    def needs_data(self) -> bool:
        """Return True if it needs calibration data."""
        return self.data is not DataUse.NONE

    @property
    def refuses_statistics(self) -> str:
        """Why it cannot work from kept statistics, as :attr:`beyond_statistics`."""
        if self.beyond_statistics is None and self.needs_data:
            return "works on the activations themselves"
        return self.beyond_statistics or ""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The modules that a modifier works on.

    Attributes:
        modules: those whose inputs or outputs it observes.
        undivided: those within which a forward may not be paused; only their boundaries can be
            stops.
        to_end: it observes modules up to the end of the model's forward.
        accepts_unreached: returns True if it can process a module of this name although no token
            reached it.
    """

    modules: Sequence[Module] = ()
    undivided: Sequence[Module] = ()
    to_end: bool = False
    accepts_unreached: Callable[[str], bool] = field(default=lambda name: False)


# --------------------
# Predictions and cost estimates, made before a run.

ELEMENTWISE = 16
"""Multiply-adds that take about as long as reading and writing one value of a large tensor."""


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Size of the calibration data, and the model's costs per token that depend on it.

    Attributes:
        tokens: tokens that reach the modules, including padding.
        real: tokens of all samples that are not padding.
        samples: number of samples.
        batch: tokens of one batch, as it is run.
        attention: multiply-adds per token of one layer's attention, without its Linears.
        expert_share: share of a layer's experts that a token is routed to.
        buffered: tokens that statistics buffer until there are enough to add.
        alike: groups of these shapes at the same stop; small ones are solved in one batch.
        on_device: an accelerator computes; a host works on parts of a matrix, one per thread.
    """

    tokens: int = 0
    real: int = 0
    samples: int = 0
    batch: int = 0
    attention: int = 0
    expert_share: float = 1.0
    buffered: int = 0
    alike: int = 1
    on_device: bool = False


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a modifier needs for some modules.

    Attributes:
        flops: multiply-adds; a pass over values that is no product counts :data:`ELEMENTWISE` each.
        held_bytes: bytes held from the first token until the modules are done.
        peak_bytes: further bytes at most while they are worked on.
        peak_data_bytes: those of them that are computed from the data, and go where the data goes.
        data_bytes: further bytes held of the data: on an accelerator within half of what its limit
            leaves, the rest in main memory.
        summed_bytes: bytes of what is summed over the ranks of a run, as one rank sends it: half of
            a symmetric matrix.
    """

    flops: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0
    peak_data_bytes: int = 0
    data_bytes: int = 0
    summed_bytes: int = 0

    @property
    def own_peak_bytes(self) -> int:
        """Bytes at the peak where all of the data lies elsewhere."""
        return self.peak_bytes - self.peak_data_bytes

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both, one after the other, with what they hold held at once."""
        peak = max(self.peak_bytes, other.peak_bytes)
        return Cost(
            flops=self.flops + other.flops,
            held_bytes=self.held_bytes + other.held_bytes,
            peak_bytes=peak,
            peak_data_bytes=peak - max(self.own_peak_bytes, other.own_peak_bytes),
            data_bytes=self.data_bytes + other.data_bytes,
            summed_bytes=self.summed_bytes + other.summed_bytes,
        )


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


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The planned output of an initialized modifier.

    Attributes:
        modules: the planned storage of modules, before anything was done to them.
        attached: a context in which the model holds the extra tensors that this will have written.
        registered: values registered for the model's class in place of fields, as JSON values.
            They determine the result as fields do, but are not part of the recipe.
    """

    modules: Sequence[PlannedModule] = ()
    attached: Callable[[], AbstractContextManager[None]] = nullcontext
    registered: Any = None


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


DampeningFraction: TypeAlias = Annotated[
    float,
    Field(ge=0.0, le=10.0),
    BeforeValidator(lambda given: DEFAULT_DAMPENING if given is None else given),
]
"""What is added to a Hessian's diagonal, as a fraction of its mean; the default for ``None``."""
