# SPDX-License-Identifier: Apache-2.0
"""Statistics of inputs that are kept: the modifier that collects them, and a pipeline without data.

The collector runs in the sequential pipeline like a solver, and changes nothing. The pipeline goes
from block to block instead of running batches. In each block the modifiers work one after another,
on the sums of the original model's inputs; one that changes inputs changes their sums too, so that
a recipe takes one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from pydantic import PrivateAttr
from torch.nn import Embedding, Linear, Module

from llmcompressor.checkpoint.block_reader import REST
from llmcompressor.core.contract import (
    DataUse,
    Edits,
    Granularity,
    RecipeRules,
    Selection,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import Calibration, State
from llmcompressor.errors import ArgumentError, TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import CallOrder
from llmcompressor.modeling.names import named_modules
from llmcompressor.numerics.input_sums import InputSums
from llmcompressor.observers.column_statistics import SumCollector
from llmcompressor.observers.input_statistics import InputCollector
from llmcompressor.pipelines.batches import calibration_mode
from llmcompressor.pipelines.block_loading import BlockLoader
from llmcompressor.recipe import Recipe
from llmcompressor.runtime.progress import join_names, progress
from llmcompressor.session.functions import LifecycleCallbacks, active_session

if TYPE_CHECKING:
    from llmcompressor.args import DatasetArguments
    from llmcompressor.checkpoint.kept_statistics import KeptStatistics, StatisticsWriter
    from llmcompressor.session.session import CompressionSession


class SumCollectingModifier(Modifier):
    """Collects the sums of the inputs of all Linears, and has them written block by block.

    It is no technique of recipes: a run that keeps statistics makes one.
    """

    rules = RecipeRules(run_types=frozenset({"oneshot"}))

    _names: dict[Module, str] = PrivateAttr(default_factory=dict)
    _block_of: dict[Module, str] = PrivateAttr(default_factory=dict)
    _inputs: InputCollector[SumCollector] = PrivateAttr()
    _writer: StatisticsWriter = PrivateAttr()

    @classmethod
    def writing(cls, writer: StatisticsWriter) -> SumCollectingModifier:
        """Create one whose sums go into a folder."""
        made = cls()
        made._writer = writer
        return made

    @property
    def traits(self) -> Traits:
        """It observes single Linears."""
        return Traits(
            data=DataUse.STREAM,
            granularity=Granularity.LINEAR,
            edits=Edits.NONE,
            by_block=True,
        )

    def select(self, state: State) -> Selection:
        """All Linears; those that no token reaches have no sums."""
        return Selection(modules=list(self._names), accepts_unreached=lambda _: True)

    @property
    def observed(self) -> list[str]:
        """Names of the Linears; it is initialized."""
        return list(self._names.values())

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the Linears and the blocks that they are in."""
        every = named_modules(state.model)
        self._names = {module: name for name, module in every if isinstance(module, Linear)}
        self._block_of = {
            inner: name
            for block, name in find_blocks(state.model).items()
            for inner in block.modules()
        }
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Collect the sums, once for all Linears that share an input."""

        def create(module: Module, input_TC: torch.Tensor, twin: bool) -> SumCollector:
            return SumCollector(input_TC.shape[-1], input_TC.device, self._names[module])

        order = state.calibration.call_order
        self._inputs = InputCollector(create, self._names.__contains__, order)
        hook = self._inputs.hook(state)
        for leader in self._inputs.leaders(self._names):
            self.register_hook(leader, hook, "forward_pre", with_kwargs=True)

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Take the sums of modules that have seen all batches."""
        mine = [module for module in modules if module in self._names]
        groups: list[tuple[Sequence[str], InputSums]] = []
        for leader in self._inputs.leaders(mine):
            found = self._inputs.of(leader)
            if found is not None and found.tokens:
                names = [self._names[one] for one in self._inputs.sharing(leader)]
                groups.append((names, found.sums()))
        self._inputs.drop(mine)
        if groups:
            self._writer.add_stop(self._block_of.get(mine[0], REST), groups)

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Write the sums of a block, which all batches have left."""
        for block in dict.fromkeys(self._block_of.get(module, REST) for module in modules):
            self._writer.write_inputs(block)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Write the sums of all other modules."""
        self.remove_hooks()
        self.finish(state, self._names)


# --------------------
# The pipeline that feeds modifiers with kept statistics.


def check_statistics_suffice(modifiers: Sequence[Modifier]) -> None:
    """Refuse a recipe that needs more than kept statistics.

    Raises:
        ArgumentError: names the first modifier that does, and why.
    """
    for modifier in modifiers:
        if why := modifier.traits.refuses_statistics:
            raise ArgumentError(
                f"{type(modifier).__name__} cannot work from kept statistics: it {why}.",
                "Leave statistics out (--statistics), and give the dataset.",
            )


def check_statistics_cover(
    statistics: KeptStatistics, modifiers: Sequence[Modifier], state: State
) -> None:
    """Refuse statistics that lack modules which initialized modifiers need them of.

    Raises:
        ArgumentError: a module was not observed.
        TargetError: no token reached a module.
    """
    names = {module: name for name, module in named_modules(state.model)}
    stops = (stop for block in statistics.blocks.values() for stop in block.stops)
    reached = {name for stop in stops for group in stop for name in group.modules}
    for modifier in (one for one in modifiers if one.traits.needs_data):
        selection = modifier.select(state)
        observed = [one for one in selection.modules if not isinstance(one, Embedding)]
        own = [names[one] for one in observed]
        if unknown := [name for name in own if name not in statistics.modules]:
            remedy = "Collect them with this recipe: save_statistics=... (--save-statistics)."
            if not all(isinstance(one, Linear) for one in observed):
                remedy = "Statistics are of Linears alone: give the dataset in place of them."
            raise ArgumentError(
                f"The statistics in {statistics.folder} have none of {join_names(unknown)}, which "
                f"{type(modifier).__name__} needs.",
                remedy,
            )
        missed = [n for n in own if n not in reached and not selection.accepts_unreached(n)]
        if missed:
            raise TargetError(
                f"No token of the kept statistics reached {join_names(missed, most=8)}.",
                "Collect them with data that uses these modules, or put them on the recipe's "
                "ignore list.",
            )


class KeptPipeline:
    """Lets modifiers work from kept statistics, block by block; the model is never run."""

    def __call__(
        self, model: Module, statistics: KeptStatistics, dataset_args: DatasetArguments
    ) -> None:
        """Run all modifiers of the active session.

        Args:
            model: the model to compress in place.
            statistics: of this model.
            dataset_args: without effect.

        Raises:
            CheckpointError: a file of the statistics is damaged.
        """
        session = active_session()
        state = session.state
        work = _KeptRun(model, statistics, session)
        state.run.kept_inputs = work.inputs
        try:
            with calibration_mode(model):
                state.calibration.call_order = work.call_order()
                work()
        finally:
            state.run.kept_inputs = None
            state.calibration = Calibration()


class _KeptRun:
    """One run over the blocks of a model; ``inputs`` has the sums of the modules at work."""

    def __init__(
        self, model: Module, statistics: KeptStatistics, session: CompressionSession
    ) -> None:
        self.inputs: dict[Module, InputSums] = {}
        self._statistics, self._lifecycle = statistics, session.lifecycle
        self._state = session.state
        self._modules = dict(model.named_modules())
        self._modifiers = list(session.lifecycle.recipe.modifiers)
        self._alone = [Recipe.from_modifiers([one]) for one in self._modifiers]
        self._loader = BlockLoader(session.state, self._modifiers)

    def call_order(self) -> CallOrder:
        """The groups of Linears that share an input, as they were observed."""
        stops = (stop for block in self._statistics.blocks.values() for stop in block.stops)
        groups = [self._members(group.modules) for stop in stops for group in stop]
        called = {module: 1 for group in groups for module in group}
        return CallOrder(tuple(filter(None, groups)), called)

    def _members(self, names: Iterable[str]) -> tuple[Module, ...]:
        return tuple(self._modules[name] for name in names if name in self._modules)

    def __call__(self) -> None:
        """Calibrate and finish all blocks, then everything outside of them."""
        loader = self._loader
        self._tell_each(LifecycleCallbacks.calibration_epoch_start)
        blocks = loader.unfinished
        with progress(len(blocks), "Compressing") as advance:
            for name in blocks:
                advance(0, note=name)
                loader.enter(name)
                self._work(loader.modules_of(name), [name])
                loader.leave(name)
                advance(1)
        loader.finish_unvisited()
        if not self._state.run.block_source.rest_is_finished:
            streamed = set(self._state.run.block_source.names.values())
            others = [name for name in self._statistics.blocks if name not in streamed]
            self._work(loader.others(), others)
        self._tell_each(LifecycleCallbacks.calibration_epoch_end)

    def _work(self, modules: Sequence[Module], blocks: Sequence[str]) -> None:
        """Let one modifier after another work on modules, whose statistics are of ``blocks``."""
        kept = [self._statistics.blocks[one] for one in blocks if one in self._statistics.blocks]
        for block in blocks:
            sums = self._statistics.inputs(block).items()
            self.inputs |= {self._modules[k]: one for k, one in sums if k in self._modules}
        stops = [
            [module for group in stop for module in self._members(group.modules)]
            for block in kept
            for stop in block.stops
        ]
        told = {module for stop in stops for module in stop}
        stops.append([module for module in modules if module not in told])
        for modifier, alone in zip(self._modifiers, self._alone, strict=True):
            with self._only(alone):
                for stop in stops:
                    LifecycleCallbacks.sequential_epoch_end(stop)
            written = self._state.run.block_source.rounds
            modifier.finish(self._state, modules, written=written)
        self.inputs.clear()

    def _tell_each(self, tell: Callable[[], object]) -> None:
        for alone in self._alone:
            with self._only(alone):
                tell()

    @contextmanager
    def _only(self, alone: Recipe) -> Iterator[None]:
        """Send events to one modifier: each works on what those before it have left."""
        whole = self._lifecycle.recipe
        self._lifecycle.recipe = alone
        try:
            yield
        finally:
            self._lifecycle.recipe = whole
