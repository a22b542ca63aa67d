# SPDX-License-Identifier: Apache-2.0
"""What a plan says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Dense",
    "Estimate",
    "LearningPlan",
    "Match",
    "ModuleRow",
    "Operations",
    "PassPlan",
    "Phase",
    "Plan",
    "Problem",
    "Rates",
    "SchemeBytes",
    "ServingNote",
    "Sizes",
    "Tokens",
]


@dataclass(frozen=True)
class Match:
    """What one pattern of the recipe matches.

    Attributes:
        modifier: the class of the modifier that it stands in.
        role: ``target`` or ``ignore``.
        pattern: as it stands in the recipe.
        matched: how many modules it matches, of any class.
        decided: how many modules it decides about: those that get their scheme by it, that are
            pruned or hold what is, or that are quantized but for this entry of ``ignore``.
        first: the first few of these, or of those that it matches if there are none.
        hint: what a pattern that matches nothing may have meant.
    """

    modifier: str
    role: str
    pattern: str
    matched: int
    decided: int
    first: Sequence[str] = ()
    hint: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """Modules that differ in the numbers of their names only, and are treated alike.

    Attributes:
        pattern: their names, with ``*`` for the numbers.
        scheme: what they become, in a few words.
        format: of the stored tensors; empty for what stays dense.
        modules: how many there are.
        weights: how many weights they have together.
        why: of what stays dense, the reason.
    """

    pattern: str
    scheme: str
    format: str
    modules: int
    weights: int
    why: str = ""


@dataclass(frozen=True)
class SchemeBytes:
    """What one scheme makes of its modules.

    Attributes:
        scheme: in a few words.
        format: of the stored tensors.
        modules: how many it applies to.
        weights: how many weights they have.
        bytes_before: of their tensors in the model's dtype.
        bytes_after: of their tensors as stored.
    """

    scheme: str
    format: str
    modules: int
    weights: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Dense:
    """What stays as it is.

    Attributes:
        pattern: names of the tensors' modules, with ``*`` for numbers.
        bytes: of their tensors as stored.
        why: the reason.
    """

    pattern: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Sizes:
    """Bytes of the input and of the output.

    Attributes:
        source: of the source's weight files; of the model's parameters if it is in memory.
        weights: of the weight files that will be written, exact.
        files: name → bytes, for each of these.
        others: of configuration, index, recipe, tokenizer and so on, without the run's report.
    """

    source: int
    weights: int
    files: Mapping[str, int]
    others: int

    @property
    def ratio(self) -> float:
        """How many times smaller the weight files become."""
        return self.source / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class Phase:
    """The demands of one phase of the run.

    Attributes:
        name: ``load``, ``learn``, ``calibrate``, ``solve`` or ``save``.
        host: most bytes resident in main memory, Python and its libraries included.
        device: most bytes on the accelerator, 0 without one.
        disk: most bytes on disk: output, scratch, and activations that exceed their budget.
        seconds: how long it is the one that is waited for.
    """

    name: str
    host: int
    device: int
    disk: int
    seconds: float


@dataclass(frozen=True)
class Operations:
    """Multiply-adds.

    Attributes:
        forward: of all runs of the model over the calibration data.
        gram: of the second moments of inputs.
        cross: of the products between inputs and original inputs.
        solve: of the solvers.
        learn: of all that is learned before passes.
        rounded: weights that are rounded and packed.
    """

    forward: int = 0
    gram: int = 0
    cross: int = 0
    solve: int = 0
    rounded: int = 0
    learn: int = 0

    @property
    def total(self) -> int:
        """All multiply-adds."""
        return self.forward + self.gram + self.cross + self.solve + self.learn


@dataclass(frozen=True)
class Rates:
    """What the machine was measured to do, and within which factor the measurements agree.

    Attributes:
        device: where the model computes.
        model_products: multiply-adds per second in the model's dtype.
        float32_products: multiply-adds per second in float32.
        memory: bytes per second that one pass over a large tensor reads and writes.
        disk_read: bytes per second.
        disk_write: bytes per second, until they are durable.
        spread: largest over smallest rate that was seen.
        attention: multiply-adds per second between tokens; 0 for that of other products.
        statistics: multiply-adds per second of second moments; 0 for that of other products.
    """

    device: str
    model_products: float
    float32_products: float
    memory: float
    disk_read: float
    disk_write: float
    spread: float
    attention: float = 0.0
    statistics: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """Seconds, and the range that they are expected to lie in."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Tokens:
    """The calibration data.

    Attributes:
        samples: how many.
        tokens: positions of all of them, padding included.
        real: those that count.
        longest: of one sample.
        how: where these numbers come from.
        is_exact: whether they were counted.
    """

    samples: int
    tokens: int
    real: int
    longest: int
    how: str
    is_exact: bool


@dataclass(frozen=True)
class LearningPlan:
    """What is learned before a pass, with forwards and backwards through all blocks.

    Attributes:
        steps: batches that run forward and backward.
        compared: batches that run forward alone.
        tokens: of one batch.
        activations: bytes of what goes into blocks and waits for the backward.
        budget: bytes of them that may stay in memory.
        spilled: bytes that go to files.
        held: bytes of what is learned, all the time.
        stepping: further bytes while a step is taken.
        kept: bytes on the disk of how far it is.
        read: bytes of weights that are read for it.
        forwards: multiply-adds of the model, backwards among them.
        products: multiply-adds in float32, of the weights that are made and of the steps.
        visits: passes over single weights that are not products.
    """

    steps: int
    compared: int
    tokens: int
    activations: int
    budget: int
    spilled: int
    held: int
    stepping: int
    kept: int
    read: int
    forwards: int
    products: int
    visits: int


@dataclass(frozen=True)
class PassPlan:
    """One pass over the model.

    Attributes:
        modifiers: which take part.
        pipeline: its name.
        level: where forwards are paused; empty where there are none.
        reason: why there.
        streams: 1, or 2 where the original model runs beside the compressed one.
        forwards: how often every block runs on every token.
        activations: bytes that waiting forwards hold.
        budget: bytes of them that may stay in memory.
        spilled: bytes that go to files at once.
        learning: what is learned before it; ``None`` for nothing.
    """

    modifiers: Sequence[str]
    pipeline: str
    level: str = ""
    reason: str = ""
    streams: int = 1
    forwards: int = 0
    activations: int = 0
    budget: int = 0
    spilled: int = 0
    learning: LearningPlan | None = None


@dataclass(frozen=True)
class Problem:
    """Why the run would fail.

    Attributes:
        where: the modifier or the argument.
        error: the class of the error that the run would raise.
        message: the problem.
        remedy: what to do about it.
    """

    where: str
    error: str
    message: str
    remedy: str


@dataclass(frozen=True)
class ServingNote:
    """One finding of the serving rules about the checkpoint that would be written.

    Attributes:
        rule: its number.
        severity: ``error``, ``warning`` or ``note``.
        server: whose rule it is.
        module: what it is about.
        message: what is wrong.
        remedy: what to do about it.
    """

    rule: str
    severity: str
    server: str
    module: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Plan:
    """What a run would do, need and write; made without reading a weight.

    Attributes:
        model: where the model comes from.
        architecture: the class of the model.
        parameters: how many weights it has.
        blocks: how many blocks.
        recipe: the recipe as YAML.
        residency: what is in memory when.
        problems: why the run would fail; empty if it would not.
        serving: what the serving rules say.
        matches: what each target and ignore entry matches.
        modules: what becomes of the matrices, by the pattern of their names.
        schemes: module → its scheme, for each that is quantized.
        scheme_bytes: bytes by scheme.
        dense: bytes of what stays as it is.
        sizes: bytes of the output; ``None`` where the run would fail before.
        tokens: the calibration data; ``None`` if none is needed.
        passes: over the model, in order.
        phases: memory, disk and time by phase.
        operations: multiply-adds.
        rates: what this machine does in a second.
        time: how long the run would take.
        notes: what else is worth knowing.
    """

    model: str
    architecture: str
    parameters: int
    blocks: int
    recipe: str
    residency: str = ""
    problems: Sequence[Problem] = ()
    serving: Sequence[ServingNote] = ()
    matches: Sequence[Match] = ()
    modules: Sequence[ModuleRow] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    scheme_bytes: Sequence[SchemeBytes] = ()
    dense: Sequence[Dense] = ()
    sizes: Sizes | None = None
    tokens: Tokens | None = None
    passes: Sequence[PassPlan] = ()
    phases: Sequence[Phase] = ()
    operations: Operations = Operations()
    rates: Rates | None = None
    time: Estimate | None = None
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether the run would succeed and its output could be served."""
        return not self.problems and not any(one.severity == "error" for one in self.serving)

    @property
    def peak_host(self) -> int:
        """Most bytes of main memory in any phase."""
        return max((phase.host for phase in self.phases), default=0)

    @property
    def peak_device(self) -> int:
        """Most bytes of the accelerator's memory in any phase."""
        return max((phase.device for phase in self.phases), default=0)

    @property
    def peak_disk(self) -> int:
        """Most bytes on disk in any phase."""
        return max((phase.disk for phase in self.phases), default=0)

    def __str__(self) -> str:
        """Tables for a person."""
        from llmcompressor.planning.tables import plan_text  # noqa: PLC0415  # it imports this page

        return plan_text(self)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        content: dict[str, Any] = {"ok": self.ok, **_plain(self)}
        if self.sizes is not None:
            content["sizes"]["ratio"] = round(self.sizes.ratio, 4)
        content["peak"] = {
            "host": self.peak_host,
            "device": self.peak_device,
            "disk": self.peak_disk,
        }
        return content


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
