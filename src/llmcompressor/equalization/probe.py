# SPDX-License-Identifier: Apache-2.0
"""Channel links in a block: whose output channels are whose input channels, found by a run.

A norm feeds the Linears that get its output tensor: that is seen. The output of ``up_proj``
reaches ``down_proj`` multiplied by the gate's, that of ``v_proj`` reaches ``o_proj`` averaged
over positions: that is tried. A block is run on a few random states with stand-in weights, then
again with the outputs of a candidate divided and the inputs of its readers multiplied by powers
of two; a candidate is right if that leaves the block's output as it was. So nothing has to be
known of an architecture, no weight is read, and a module that feeds more than it seems to (a
second branch, an expert that is not named) is never taken.

A router whose weight is ``[experts, C]`` takes scales as a Linear does: the norm before an MoE
feeds it and the first Linears of the experts. All experts of an MoE get a link or none; two of them
are run (:mod:`llmcompressor.moe.similar_experts`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.equalization.rescale import (
    divided_outputs,
    input_channels,
    multiplied_inputs,
    norm_offset,
    swapped_parameters,
)
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import (
    copy_arguments,
    first_tensor,
    model_inputs,
    token_id_inputs,
    without_cache,
)
from llmcompressor.modeling.meta_weights import zero_weights
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.patches import eval_mode
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.moe.similar_experts import (
    RepresentativeExperts,
    module_structure_key,
    route_to_representatives,
)

# --------------------
# Runs of one block on random hidden states with stand-in weights, to probe its structure.

_HIDDEN_DIMS = 3
_SEED = 20


@dataclass(frozen=True, eq=False)  # comparing tensors has no single result
class _Call:
    """A call of a leaf module or MoE of the block, with its output."""

    name: str
    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> Tensor | None:
        """The first tensor argument."""
        return first_tensor(self.args, self.kwargs)

    @property
    def takes_scales(self) -> bool:
        """Return True if the columns of the module's weight are the channels of its input."""
        columns, given = input_channels(self.module), self.input
        if columns is None or given is None or not given.is_floating_point():
            return False
        return given.shape[-1] == columns


@dataclass(frozen=True)
class _BlockRun:
    """A run of the unmodified block: calls of its leaves and MoEs in order, and its output.

    The output is ``None`` if the block failed to run: nothing is known of it.
    """

    leaves: list[_Call]
    mixtures: list[_Call]
    output: list[Tensor] | None


class BlockRuns:
    """Runs a block with stand-in weights on random hidden states.

    All tokens of an MoE are routed to a few of its experts.

    Args:
        block: the block; its own weights are neither read nor changed.
        args: how the model calls it.
        kwargs: the same, by name.

    Attributes:
        modules: of the block, by name.
        generator: of all random values.
        device: on which it runs.
    """

    def __init__(self, block: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._block = block
        self.generator = torch.Generator().manual_seed(_SEED)
        self._args = tuple(self._randomize_argument(value) for value in args)
        self._kwargs = {name: self._randomize_argument(value) for name, value in kwargs.items()}
        tensor = first_tensor(self._args, self._kwargs)
        self.device = torch.device("cpu") if tensor is None else tensor.device
        self.modules = dict(named_modules(block))

    def change(
        self, plain: Sequence[Tensor], changes: Mapping[Module, Mapping[str, Tensor]]
    ) -> float:
        """Relative change of the block's output with other parameters; NaN if it fails to run."""
        try:
            with swapped_parameters(changes):
                moved = self._run()
        except Exception as error:  # the model's own code, on stand-ins
            logger.debug(f"{type(self._block).__name__} with other parameters: {error!r:.200}")
            return float("nan")
        shares = [
            float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
            for one, other in zip(plain, moved, strict=True)
            if one.shape == other.shape and one.numel()
        ]
        return max(shares, default=float("nan"))

    def watch(self) -> _BlockRun:
        """Run the block and record the calls of its leaves and MoEs, in order."""
        leaves: list[_Call] = []
        mixtures: list[_Call] = []
        names = {module: name for name, module in self.modules.items()}

        def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = mixtures if isinstance(module, LinearExperts) else leaves
            calls.append(_Call(names[module], module, args, kwargs, output))

        watched = [
            module
            for module in names
            if isinstance(module, LinearExperts | Linear)
            or (module is not self._block and module._parameters and not module._modules)
            or input_channels(module) is not None  # a router may hold its correction in a part
        ]
        handles = [one.register_forward_hook(note, with_kwargs=True) for one in watched]
        try:
            return _BlockRun(leaves, mixtures, self._run())
        except Exception as error:  # the model's own code, on stand-ins
            shown = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning(
                f"The structure of {type(self._block).__name__} was not seen: it does not run on "
                f"random states in float32 ({shown:.200})."
            )
            return _BlockRun([], [], None)
        finally:
            for handle in handles:
                handle.remove()

    def _run(self) -> list[Tensor]:
        args, kwargs = copy_arguments((self._args, self._kwargs))
        return list(_floating_tensors(self._block(*args, **kwargs)))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Use stand-in weights, eval mode and no gradients in the body; restore all afterwards."""
        stand_ins: dict[Module, dict[str, Tensor]] = {
            module: {} for module in self.modules.values()
        }
        for module, own in stand_ins.items():
            for name, parameter in dict.items(module._parameters):
                if parameter is not None and parameter.is_floating_point():
                    own[name] = self._random_stand_in(parameter)
        for module, own in stand_ins.items():
            for name, buffer in module._buffers.items():  # a router's bias, say
                if buffer is not None and buffer.is_meta:
                    own[name] = (
                        self._random_stand_in(buffer)
                        if buffer.is_floating_point()
                        else torch.zeros_like(buffer, device=self.device)
                    )
        with (
            eval_mode(self._block),
            torch.no_grad(),
            swapped_parameters(stand_ins),
            route_to_representatives(self.modules.values()),
        ):
            yield

    def _random_stand_in(self, parameter: Tensor) -> Tensor:
        """Random values of a parameter's shape; a matrix is constant along its anti-diagonals."""
        shape = tuple(parameter.shape)
        if len(shape) <= 1:
            values = torch.rand(shape, generator=self.generator) + 0.5
            return values.to(self.device)
        rows, columns = shape[-2:]
        values = torch.randn(rows + columns - 1, generator=self.generator) / columns**0.5
        matrix: Tensor = values.to(self.device).as_strided((rows, columns), (1, 1))
        return matrix if len(shape) == 2 else matrix.contiguous().expand(shape)

    def _randomize_argument(self, value: Any) -> Any:
        """Replace hidden states by random ones, and cast other floating tensors to float32."""
        is_states = isinstance(value, Tensor) and value.ndim == _HIDDEN_DIMS
        if is_states and value.is_floating_point():
            states = torch.randn(value.shape, generator=self.generator)
            return states.to(value.device)
        return copy_arguments(
            value, lambda one: one.detach().float() if one.is_floating_point() else one
        )


def _floating_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.float()
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _floating_tensors(item)


def _storage_key(value: Any) -> tuple[int, int] | None:
    """A key that is equal for a tensor and a view of all of it."""
    return (value.data_ptr(), value.numel()) if isinstance(value, Tensor) else None


# --------------------
# Channel links in a block: whose output channels are whose input channels, found by a run.

_INVARIANT = 1e-4
"""Relative change of a block's float32 output that is taken for rounding; others are near one."""


@dataclass(frozen=True)
class ChannelLink:
    """A smooth module and the modules that read its output, by their names within a block.

    Attributes:
        smooth: the norm or Linear whose output channels are divided.
        balance: the Linears, and routers, whose input channels are multiplied; all that read
            that output.
        offset: what the norm adds to its weight.
    """

    smooth: str
    balance: tuple[str, ...]
    offset: float = 0.0


class ValidationOutcome(Enum):
    """The outcome of validating named modules."""

    HOLDS = "the block's output stays as it was"
    CHANGES = "the block's output changes"
    SHARES = "several columns of the readers read one row"
    UNTRIED = "nothing was seen of one of them, or the block did not run"


@dataclass(frozen=True)
class ValidationResult:
    """The result of validating named modules.

    Attributes:
        outcome: whether they are a link.
        offset: if so, what the norm adds to its weight; 0 for a Linear.
        others: modules that seem to read the output too, or that were not called; names
            within the block.
    """

    outcome: ValidationOutcome
    offset: float = 0.0
    others: tuple[str, ...] = ()


@dataclass
class _InputGroup:
    """The modules that get one tensor: those that take scales, and MoEs."""

    takers: list[_Call] = field(default_factory=list)
    mixtures: list[_Call] = field(default_factory=list)

    @property
    def first(self) -> _Call:
        return (self.takers or self.mixtures)[0]


class BlockProbe:
    """Finds and validates the channel links of one block.

    Args:
        block: the block; its own weights are neither read nor changed.
        args: how the model calls it.
        kwargs: the same, by name.
    """

    def __init__(self, block: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._runs = BlockRuns(block, args, kwargs)
        self._experts = RepresentativeExperts(self._runs.modules)
        self._known: dict[tuple[str, ...], ValidationResult] = {}

    def find(self, *, norms_only: bool = False, mixtures: bool = True) -> list[ChannelLink]:
        """Every link of the block, in the order of the first reader's call.

        Args:
            norms_only: leave out those that begin with a Linear.
            mixtures: also those from a module to the first Linears of the experts of an MoE. One
                that feeds attention as well, in a parallel block, is found in any case.
        """
        links: dict[ChannelLink, None] = {}
        searched: set[tuple[str, ...]] = set()
        with self._runs.running():
            run = self._runs.watch()
            for group in _input_groups(run):
                key = tuple(self._experts.equivalent_names(group.first.name))
                if key not in searched:
                    searched.add(key)
                    link = self._find_link(group, run, norms_only=norms_only, mixtures=mixtures)
                    links |= dict.fromkeys(self._expand_to_experts(link)) if link else {}
        return list(links)

    def verify(self, smooth: str, balance: Sequence[str]) -> ValidationResult:
        """Validate that scaling named modules leaves the block's output unchanged.

        A module of one expert has to be named in all of them, unless all named modules are one
        expert's own. Experts of equal structure represent each other.
        """
        places = [(smooth, *balance)]
        if self._experts.is_within_one_expert(places[0]):
            places = self._experts.copies_in_all_experts(places[0])
        elif left_out := self._experts.left_out(balance):
            return ValidationResult(ValidationOutcome.CHANGES, others=(left_out,))
        if places[0] not in self._known:
            with self._runs.running():
                self._known[places[0]] = self._validate_places(places, self._runs.watch())
        return self._known[places[0]]

    def _validate_places(
        self, places: Sequence[tuple[str, ...]], run: _BlockRun
    ) -> ValidationResult:
        """The verdict on the first of several equivalent places whose modules were all called."""
        called = {call.name for call in run.leaves}
        names = next((one for one in places if not self._uncalled(one, called)), None)
        if names is None or run.output is None:
            others = () if run.output is None else tuple(self._uncalled(places[0], called)[:1])
            return ValidationResult(ValidationOutcome.UNTRIED, others=others)
        source = next(call for call in run.leaves if call.name == names[0])
        readers = [call for call in run.leaves if call.name in set(names[1:])]
        if link := self._tried(source, readers, run):
            return ValidationResult(ValidationOutcome.HOLDS, link.offset)
        key = _storage_key(source.output)
        parts = {part.experts for part in map(self._experts.parse_name, names) if part is not None}
        others = tuple(
            call.name
            for call in (*run.leaves, *run.mixtures)
            if key and _storage_key(call.input) == key and call.name not in {*names, *parts}
        )
        return ValidationResult(ValidationOutcome.CHANGES, others=others)

    def _uncalled(self, names: Sequence[str], called: Collection[str]) -> list[str]:
        """Names of modules that were neither called nor represented by another named module."""
        if self._experts.is_within_one_expert(names):
            return [name for name in names if name not in called]
        reached = (name for name in names if name in called)
        seen = {other for name in reached for other in self._experts.equivalent_names(name)}
        return [name for name in names if name not in seen]

    def _expand_to_experts(self, link: ChannelLink) -> Iterator[ChannelLink]:
        """Repeat a link within one expert for every expert; extend others to all experts."""
        names = (link.smooth, *link.balance)
        if self._experts.is_within_one_expert(names):
            for copy in self._experts.copies_in_all_experts(names):
                yield ChannelLink(copy[0], copy[1:], link.offset)
            return
        every = [other for name in link.balance for other in self._experts.equivalent_names(name)]
        if self._experts.left_out(every) is None:
            yield ChannelLink(link.smooth, tuple(dict.fromkeys(every)), link.offset)

    def _find_link(
        self, group: _InputGroup, run: _BlockRun, *, norms_only: bool, mixtures: bool
    ) -> ChannelLink | None:
        """The link that ends in the modules of a group."""
        for source in self._sources(group, run):
            if norms_only and isinstance(source.module, Linear):
                continue
            is_direct = _storage_key(source.output) == _storage_key(group.first.input)
            into = is_direct and (mixtures or self._feeds_outside_moe(group))
            for readers in self._readers(group, run, mixtures=into):
                if link := self._tried(source, readers, run):
                    return link
        return None

    def _feeds_outside_moe(self, group: _InputGroup) -> bool:
        """Return True if the tensor of an MoE also feeds modules outside of the MoE block."""
        parts = filter(None, (self._experts.parse_name(call.name) for call in group.takers))
        experts = {call.name for call in group.mixtures} | {part.experts for part in parts}
        homes = {name.rpartition(".")[0] for name in experts}
        return any(
            home and not call.name.startswith(f"{home}.") for home in homes for call in group.takers
        )

    def _sources(self, group: _InputGroup, run: _BlockRun) -> list[_Call]:
        """Candidates that may feed a group: by tensor, else the Linears that ran before it."""
        key = _storage_key(group.first.input)
        if sources := [call for call in run.leaves if _storage_key(call.output) == key]:
            return sources
        if not group.takers:
            return []
        before = run.leaves[: run.leaves.index(group.takers[0])]
        place = self._experts.expert_of(group.takers[0].name)
        return [
            call
            for call in reversed(before)
            if isinstance(call.module, Linear) and self._experts.expert_of(call.name) == place
        ]

    def _readers(
        self, group: _InputGroup, run: _BlockRun, *, mixtures: bool
    ) -> Iterator[list[_Call]]:
        """Candidate readers of a group's tensor: the modules that get it, alone or with experts.

        Rows that are ordered by expert and weighted are another tensor than the norm's output; an
        MoE of the block may read it then, too.
        """
        within = [self._experts.expert_of(call.name) is not None for call in group.takers]
        if group.takers and not group.mixtures and (mixtures or all(within) or not any(within)):
            yield group.takers
        if not mixtures or any(within):
            return
        entrances = {
            mixture.linear(expert, role)
            for call in group.mixtures or run.mixtures
            if isinstance(mixture := call.module, LinearExperts)
            for expert in range(mixture.num_experts)
            for role in mixture.input_roles
        }
        if found := [call for call in run.leaves if call.module in entrances]:
            yield [*group.takers, *found]

    def _tried(self, source: _Call, readers: Sequence[_Call], run: _BlockRun) -> ChannelLink | None:
        """Scale a candidate: the multiplied inputs have to matter, divided outputs cancel them."""
        modules = {reader.module for reader in readers}
        columns = input_channels(readers[0].module)
        if columns is None or any(input_channels(one) != columns for one in modules):
            return None
        offset: float | None = None
        weight = source.module._parameters.get("weight")
        if isinstance(source.module, Linear):  # with grouped heads several columns read one row
            offset = 0.0 if source.module.out_features >= columns else None
        elif weight is not None and len(weight) == columns:
            offset = norm_offset(source.module, source.args, source.kwargs)
        if offset is None or source.module in modules or run.output is None:
            return None
        exponents = torch.randint(-1, 2, (columns,), generator=self._runs.generator)
        scale_C = torch.exp2(exponents.float()).to(self._runs.device)
        inputs = {module: multiplied_inputs(module, scale_C) for module in modules}
        outputs = {source.module: divided_outputs(source.module, scale_C, offset)}
        matters = self._runs.change(run.output, inputs) > _INVARIANT
        if matters and self._runs.change(run.output, {**inputs, **outputs}) <= _INVARIANT:
            names = dict.fromkeys(reader.name for reader in readers)
            return ChannelLink(source.name, tuple(names), offset)
        return None


def _input_groups(run: _BlockRun) -> Iterable[_InputGroup]:
    """Group calls by the tensor that they get, in the order of the first call."""
    groups: dict[tuple[int, int] | None, _InputGroup] = {}
    for call in run.leaves:
        if call.takes_scales:
            groups.setdefault(_storage_key(call.input), _InputGroup()).takers.append(call)
    for call in run.mixtures:
        groups.setdefault(_storage_key(call.input), _InputGroup()).mixtures.append(call)
    return groups.values()


# --------------------
# Block probes: how a model calls each of its blocks, recorded in one run without weights.

_TEXT_KEYS = {"attention_mask", "input_ids", "labels", "loss_mask", "position_ids"}


class _AllCallsSeen(BaseException):
    """Every awaited call was recorded; not an ``Exception``, which a model might catch."""


def block_probes(model: Module, batches: Iterable[Mapping[str, Any]] = ()) -> dict[str, BlockProbe]:
    """A probe for each block that is called; blocks of equal structure share one.

    Args:
        model: its weights may be on the meta device.
        batches: model inputs to try where a row of token ids alone does not do.

    Returns:
        Block name → probe, in the model's order; blocks that the inputs do not reach are left out.
    """
    blocks = find_blocks(model)
    forms: dict[Any, list[Module]] = {}
    for block in blocks:
        forms.setdefault(module_structure_key(block), []).append(block)
    firsts = [members[0] for members in forms.values()]
    calls: dict[Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    text_is_seen, unseen = False, ""
    for inputs in itertools.chain(token_id_inputs(model), batches):
        wanted = [block for block in firsts if block not in calls]
        if not wanted:
            break
        if text_is_seen and not set(inputs) - _TEXT_KEYS:
            continue
        try:
            calls |= _first_calls(model, wanted, inputs)
            text_is_seen = True
        except Exception as error:  # the model's own code, on inputs that it may not be made for
            unseen = f"The structure of {type(model).__name__} was not seen: {error!r:.200}"
            logger.debug(unseen)
    if unseen and not calls:
        logger.warning(unseen)
    probes = {block: BlockProbe(block, *call) for block, call in calls.items()}
    return {
        blocks[block]: probes[members[0]]
        for members in forms.values()
        for block in members
        if members[0] in probes
    }


def _first_calls(
    model: Module, blocks: Sequence[Module], inputs: Mapping[str, Any]
) -> dict[Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the first call of each block; the forward ends once all are known."""
    calls: dict[Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:  # later code may write to its arguments
            calls[module] = copy_arguments((args, kwargs))
        if len(calls) == len(blocks):
            raise _AllCallsSeen

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        with (
            eval_mode(model),
            torch.no_grad(),
            zero_weights(model),
            without_cache(model),
            contextlib.suppress(_AllCallsSeen),
        ):
            model(**model_inputs(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls
