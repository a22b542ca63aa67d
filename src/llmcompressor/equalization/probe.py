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
from functools import cached_property
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
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import (
    copy_arguments,
    first_tensor,
    model_inputs,
    token_id_inputs,
    without_cache,
)
from llmcompressor.modeling.fused import parse_expert_name
from llmcompressor.modeling.matching import group_matches, matches
from llmcompressor.modeling.meta_weights import zero_weights
from llmcompressor.modeling.names import NameForms, TargetIndex, named_modules
from llmcompressor.modeling.patches import eval_mode
from llmcompressor.moe.linear_experts import LinearExperts
from llmcompressor.moe.similar_experts import (
    RepresentativeExperts,
    module_structure_key,
    route_to_representatives,
)
from llmcompressor.runtime.progress import join_names

__all__ = [
    "BlockProbe",
    "BlockRun",
    "BlockRuns",
    "Call",
    "ChannelLink",
    "MappingMatch",
    "MappingMatches",
    "MappingValidator",
    "Names",
    "SmoothSet",
    "ValidationOutcome",
    "ValidationResult",
    "block_probes",
    "format_mapping",
    "format_names",
    "tensor_storage_key",
]


# --------------------
# Runs of one block on random hidden states with stand-in weights, to probe its structure.

_HIDDEN_DIMS = 3
_SEED = 20


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a leaf module or MoE of the block, with its output.

    Calls never compare equal, as comparing their tensors has no single result.
    """

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
class BlockRun:
    """A run of the unmodified block: the calls of its leaves and MoEs, and its output.

    Attributes:
        leaves: calls of its leaves, in order.
        mixtures: calls of its MoEs, in order.
        output: the floating tensors that it returned.
        failed: the block failed to run; nothing is known of it.
    """

    leaves: list[Call]
    mixtures: list[Call]
    output: list[Tensor]
    failed: bool = False


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

    def watch(self) -> BlockRun:
        """Run the block and record the calls of its leaves and MoEs, in order."""
        leaves: list[Call] = []
        mixtures: list[Call] = []
        names = {module: name for name, module in self.modules.items()}

        def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = mixtures if isinstance(module, LinearExperts) else leaves
            calls.append(Call(names[module], module, args, kwargs, output))

        watched = [
            module
            for module in names
            if isinstance(module, LinearExperts | Linear)
            or (module is not self._block and module._parameters and not module._modules)
            or input_channels(module) is not None  # a router may hold its correction in a part
        ]
        handles = [one.register_forward_hook(note, with_kwargs=True) for one in watched]
        try:
            return BlockRun(leaves, mixtures, self._run())
        except Exception as error:  # the model's own code, on stand-ins
            shown = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning(
                f"The structure of {type(self._block).__name__} was not seen: it does not run on "
                f"random states in float32 ({shown:.200})."
            )
            return BlockRun([], [], [], failed=True)
        finally:
            for handle in handles:
                handle.remove()

    def _run(self) -> list[Tensor]:
        args, kwargs = copy_arguments((self._args, self._kwargs))
        return list(_floating_tensors(self._block(*args, **kwargs)))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Use stand-in weights, eval mode and no gradients in the body; restore all afterwards."""
        stand_ins = {
            module: {
                name: self._random_stand_in(parameter)
                for name, parameter in dict.items(module._parameters)
                if parameter is not None and parameter.is_floating_point()
            }
            for module in self.modules.values()
        }
        with (
            eval_mode(self._block),
            torch.no_grad(),
            swapped_parameters(stand_ins),
            self._filled_buffers(),
            route_to_representatives(self.modules.values()),
        ):
            yield

    @contextlib.contextmanager
    def _filled_buffers(self) -> Iterator[None]:
        """Fill buffers that are not loaded (a router's bias, say) with stand-ins in the body."""
        unread = [
            (module, name, buffer)
            for module in self.modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        try:
            for module, name, buffer in unread:
                module._buffers[name] = (
                    self._random_stand_in(buffer)
                    if buffer.is_floating_point()
                    else torch.zeros_like(buffer, device=self.device)
                )
            yield
        finally:
            for module, name, buffer in unread:
                module._buffers[name] = buffer

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
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floating_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _floating_tensors(item)


def tensor_storage_key(value: Any) -> tuple[int, int] | None:
    """Return a key that is equal for a tensor and a view of all of it."""
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
        rows: how many rows several columns share.
    """

    outcome: ValidationOutcome
    offset: float = 0.0
    others: tuple[str, ...] = ()
    rows: int = 0


@dataclass
class _InputGroup:
    """The modules that get one tensor: those that take scales, and MoEs."""

    takers: list[Call] = field(default_factory=list)
    mixtures: list[Call] = field(default_factory=list)

    @property
    def first(self) -> Call:
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
        links: list[ChannelLink] = []
        searched: set[tuple[str, ...]] = set()
        with self._runs.running():
            run = self._runs.watch()
            for group in _input_groups(run):
                key = tuple(self._experts.equivalent_names(group.first.name))
                if key in searched:
                    continue
                searched.add(key)
                if link := self._find_link(group, run, norms_only=norms_only, mixtures=mixtures):
                    links.append(link)
        return list(dict.fromkeys(copy for link in links for copy in self._expand_to_experts(link)))

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
            self._known[places[0]] = self._validate_places(places)
        return self._known[places[0]]

    def _validate_places(self, places: Sequence[tuple[str, ...]]) -> ValidationResult:
        """The verdict on the first of several equivalent places whose modules were all called."""
        with self._runs.running():
            run = self._runs.watch()
            if run.failed:
                return ValidationResult(ValidationOutcome.UNTRIED)
            called = {call.name for call in run.leaves}
            names = next((one for one in places if not self._uncalled(one, called)), None)
            if names is None:
                return ValidationResult(
                    ValidationOutcome.UNTRIED, others=tuple(self._uncalled(places[0], called)[:1])
                )
            own = next(call for call in run.leaves if call.name == names[0])
            readers = [call for call in run.leaves if call.name in set(names[1:])]
            if link := self._tried(own, readers, run):
                return ValidationResult(ValidationOutcome.HOLDS, link.offset)
            if rows := self._shared_rows(own, readers, run):
                return ValidationResult(ValidationOutcome.SHARES, rows=rows)
            return ValidationResult(
                ValidationOutcome.CHANGES, others=self._other_readers(own, names, run)
            )

    def _uncalled(self, names: Sequence[str], called: Collection[str]) -> list[str]:
        """Names of modules that were neither called nor represented by another named module."""
        if self._experts.is_within_one_expert(names):
            return [name for name in names if name not in called]
        seen = {
            other
            for name in names
            if name in called
            for other in self._experts.equivalent_names(name)
        }
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
        self, group: _InputGroup, run: BlockRun, *, norms_only: bool, mixtures: bool
    ) -> ChannelLink | None:
        """The link that ends in the modules of a group."""
        for source in self._sources(group, run):
            if norms_only and isinstance(source.module, Linear):
                continue
            is_direct = tensor_storage_key(source.output) == tensor_storage_key(group.first.input)
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

    def _sources(self, group: _InputGroup, run: BlockRun) -> list[Call]:
        """Candidates that may feed a group: by tensor, else the Linears that ran before it."""
        key = tensor_storage_key(group.first.input)
        if sources := [call for call in run.leaves if tensor_storage_key(call.output) == key]:
            return sources
        if not group.takers:
            return []
        begin = run.leaves.index(group.takers[0])
        place = self._experts.expert_of(group.takers[0].name)
        return [
            call
            for call in reversed(run.leaves[:begin])
            if isinstance(call.module, Linear) and self._experts.expert_of(call.name) == place
        ]

    def _readers(
        self, group: _InputGroup, run: BlockRun, *, mixtures: bool
    ) -> Iterator[list[Call]]:
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

    def _tried(self, source: Call, readers: Sequence[Call], run: BlockRun) -> ChannelLink | None:
        """Scale a candidate, and verify that the block's output is unchanged."""
        columns = input_channels(readers[0].module)
        if columns is None or any(input_channels(one.module) != columns for one in readers):
            return None
        offset = 0.0
        if isinstance(source.module, Linear):
            if source.module.out_features < columns:
                return None  # grouped heads: several columns read one row
        else:
            found = norm_offset(source.module, source.args, source.kwargs)
            weight = source.module._parameters.get("weight")
            if found is None or weight is None or len(weight) != columns:
                return None
            offset = found
        exponents = torch.randint(-1, 2, (columns,), generator=self._runs.generator)
        scale_C = torch.exp2(exponents.float()).to(self._runs.device)
        if not self._is_output_invariant(source, readers, run, (scale_C, scale_C, offset)):
            return None
        names = dict.fromkeys(reader.name for reader in readers)
        return ChannelLink(source.name, tuple(names), offset)

    def _other_readers(
        self, source: Call, names: Collection[str], run: BlockRun
    ) -> tuple[str, ...]:
        """Modules that get the output of ``source`` and are not among ``names``."""
        key = tensor_storage_key(source.output)
        given = [
            call for call in (*run.leaves, *run.mixtures) if tensor_storage_key(call.input) == key
        ]
        parts = {part.experts for part in map(self._experts.parse_name, names) if part is not None}
        others = [call.name for call in given if call.name not in names]
        return tuple(one for one in others if key and one not in parts)

    def _shared_rows(self, source: Call, readers: Sequence[Call], run: BlockRun) -> int:
        """Number of rows of a fused Linear that all columns of its readers share; 0 if none.

        With grouped heads these are the last rows, after as many rows for the keys: one scale for
        all of them is tried.
        """
        columns = input_channels(readers[0].module)
        if columns is None or not isinstance(source.module, Linear):
            return 0
        rows, odd = divmod(source.module.out_features - columns, 2)
        if odd or not 0 < rows < columns or columns % rows:
            return 0
        two_C = torch.full((columns,), 2.0, device=self._runs.device)
        found = self._is_output_invariant(source, readers, run, (two_C[:rows], two_C, 0.0))
        return rows if found else 0

    def _is_output_invariant(
        self,
        source: Call,
        readers: Sequence[Call],
        run: BlockRun,
        scales: tuple[Tensor, Tensor, float],
    ) -> bool:
        """Return True if divided outputs cancel multiplied inputs, which alone matter.

        Args:
            source: the call of the module whose outputs are divided.
            readers: calls of the modules whose inputs are multiplied.
            run: of the unmodified block.
            scales: of the outputs, of the inputs, and the norm's offset.
        """
        divisor_R, factor_C, offset = scales
        modules = {reader.module for reader in readers}
        if source.module in modules:
            return False
        inputs = {module: multiplied_inputs(module, factor_C) for module in modules}
        outputs = {source.module: divided_outputs(source.module, divisor_R, offset)}
        matters = self._runs.change(run.output, inputs) > _INVARIANT
        return matters and self._runs.change(run.output, {**inputs, **outputs}) <= _INVARIANT


def _input_groups(run: BlockRun) -> Iterator[_InputGroup]:
    """Group calls by the tensor that they get, in the order of the first call."""
    groups: dict[tuple[int, int] | None, _InputGroup] = {}
    for call in run.leaves:
        if call.takes_scales:
            groups.setdefault(tensor_storage_key(call.input), _InputGroup()).takers.append(call)
    for call in run.mixtures:
        groups.setdefault(tensor_storage_key(call.input), _InputGroup()).mixtures.append(call)
    yield from groups.values()


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


# --------------------
# Matches of smoothing mappings: named modules that are smoothed together, block by block.
#
# A smooth module and the modules that read it belong to one block. A norm without readers in its
# block, or readers without a norm, are no match. So a mapping may cover some of the layers, and
# layers need not be alike: where a dense layer has no router, its gate and up are all that reads
# the norm.

Names = tuple[str, tuple[str, ...]]
"""A target for the smooth module, and targets for those that read it."""

_SHOWN = 8
"""Names that are written out."""


@dataclass(frozen=True, eq=False)
class SmoothSet:
    """A smooth module and the modules that balance it.

    Attributes:
        name: of the smooth module.
        smooth: the module whose output channels are divided: a norm or a Linear.
        balance: name → Linear, or router, whose input columns are multiplied.
        offset: what a norm adds to its weight.
    """

    name: str
    smooth: Module
    balance: Mapping[str, Module]
    offset: float = 0.0

    @property
    def is_norm(self) -> bool:
        """Return True if the smooth module is a norm, not a Linear."""
        return not isinstance(self.smooth, Linear)

    @property
    def columns(self) -> int:
        """Number of channels, C."""
        columns = input_channels(next(iter(self.balance.values())))
        assert columns is not None
        return columns

    @cached_property
    def linears(self) -> dict[str, Module]:
        """The members of ``balance`` whose inputs are observed: all but routers."""
        return {name: one for name, one in self.balance.items() if isinstance(one, Linear)}

    def __str__(self) -> str:
        return f"{self.name} -> {format_names(self.balance)}"


@dataclass(frozen=True, eq=False)
class MappingMatch:
    """A match of a mapping: a smooth module and the modules that read it.

    Attributes:
        block: that holds it all; ``None`` for what lies in no block.
        name: of the smooth module.
        smooth: that module.
        readers: name → module.
    """

    block: str | None
    name: str
    smooth: Module
    readers: Mapping[str, Module]

    def to_smooth_set(self, offset: float) -> SmoothSet:
        """The smoothing set of this place."""
        return SmoothSet(self.name, self.smooth, self.readers, offset)

    def __str__(self) -> str:
        return f"{self.name} -> {format_names(self.readers)}"


def format_mapping(names: Names) -> str:
    """Format a mapping as a recipe has it; of many targets only the first ones."""
    return f"{names[0]!r} -> [{join_names(map(repr, names[1]), most=_SHOWN)}]"


def format_names(names: Iterable[str]) -> str:
    """Format names for a message: those of all experts as one, and only the first of many.

    >>> format_names(f"mlp.experts.{number}.{own}" for number in range(128) for own in ("w1", "w3"))
    'mlp.experts.*.w1, mlp.experts.*.w3'
    """
    parts = ((name, parse_expert_name(name)) for name in names)
    every = [name if part is None else f"{part.experts}.*.{part.own}" for name, part in parts]
    every = list(dict.fromkeys(every))
    return join_names(every, most=_SHOWN)


class MappingMatches:
    """Finds the matches of all mappings in one traversal of the model.

    Recipes may name each expert of each layer, and have as many mappings as the model has modules.

    Args:
        model: where to look.
        mappings: names of all that will be asked for.
    """

    def __init__(self, model: Module, mappings: Sequence[Names]) -> None:
        targets = list(dict.fromkeys(one for names in mappings for one in _mapping_targets(names)))
        blocks = set(find_blocks(model).values())
        forms, possible, known = NameForms(targets), TargetIndex(targets), dict[object, list[str]]()
        self._hits: dict[str, list[int]] = {target: [] for target in targets}
        self._modules: list[tuple[str, Module, str | None]] = []
        for name, module, block in _modules_with_blocks(model, blocks):
            form = (type(module), forms.of(name))
            if form not in known:
                meant = possible.of(name, module)
                known[form] = [target for target in meant if matches(name, module, target)]
            for target in known[form]:
                self._hits[target].append(len(self._modules))
            if known[form]:
                self._modules.append((name, module, block))

    def unmatched(self, names: Names) -> list[str]:
        """Targets of a mapping that match no module."""
        return [target for target in _mapping_targets(names) if not self._hits[target]]

    def matched(self, target: str) -> list[str]:
        """Names of the modules that a target matches."""
        return [self._modules[place][0] for place in self._hits[target]]

    def of(self, names: Names) -> Iterator[MappingMatch]:
        """The matches of a mapping, in model order.

        Raises:
            TargetError: several modules are to be smoothed in one place, or a reader cannot take
                scales.
        """
        targets, hits = _mapping_targets(names), dict[int, list[str]]()
        for target in targets:
            for place in self._hits[target]:
                hits.setdefault(place, []).append(target)
        found: dict[str | None, list[tuple[str, Module, list[str]]]] = {}
        for place in sorted(hits):
            name, module, block = self._modules[place]
            found.setdefault(block, []).append((name, module, hits[place]))
        for block, members in found.items():
            there = {target for _, _, own in members for target in own}
            if names[0] not in there or len(there) == 1:
                continue
            for first, *others in group_matches(members, [one for one in targets if one in there]):
                yield _checked_match(
                    names, block, first, {n: m for pairs in others for n, m in pairs}
                )


def _mapping_targets(names: Names) -> list[str]:
    return [names[0], *names[1]]


def _modules_with_blocks(
    model: Module, blocks: set[str]
) -> Iterator[tuple[str, Module, str | None]]:
    """Every module with its name and that of its block."""
    block: str | None = None
    for name, module in named_modules(model):
        if name in blocks:
            block = name
        elif block is not None and not name.startswith(f"{block}."):
            block = None
        yield name, module, block


def _checked_match(
    names: Names, block: str | None, first: list[tuple[str, Module]], readers: dict[str, Module]
) -> MappingMatch:
    if len(first) > 1:
        raise TargetError(
            f"The mapping {format_mapping(names)} has more than one module to smooth in one place: "
            f"{format_names(name for name, _ in first)}.",
            "Make its target match one of them.",
        )
    wrong = [name for name, module in readers.items() if input_channels(module) is None]
    if wrong:
        raise TargetError(
            f"{wrong[0]} is a {type(readers[wrong[0]]).__name__}; only Linears, and routers with "
            "one matrix, can take the scales that smoothing moves.",
            "Correct the mapping.",
        )
    return MappingMatch(block, first[0][0], first[0][1], readers)


# --------------------
# Validation of smoothing mappings: named modules are tried on a run of their block.


class MappingValidator:
    """Validates places by running their block, once per structure of block.

    Args:
        probes: block name → probe.
    """

    def __init__(self, probes: Mapping[str, BlockProbe]) -> None:
        self._probes = probes
        self._links: dict[BlockProbe, dict[str, ChannelLink]] = {}

    def validate_match(self, place: MappingMatch) -> ValidationResult:
        """The verdict on a place, from a run of its block."""
        if rows := _grouped_head_rows(place):
            return ValidationResult(ValidationOutcome.SHARES, rows=rows)
        probe = self._probes.get(place.block or "")
        if probe is None or place.block is None:
            return ValidationResult(ValidationOutcome.UNTRIED)
        own = [name.removeprefix(f"{place.block}.") for name in (place.name, *place.readers)]
        return probe.verify(own[0], own[1:])

    def readers(self, place: MappingMatch) -> tuple[str, ...]:
        """All modules that read the smooth module of a place; empty if they were not found."""
        probe = self._probes.get(place.block or "")
        if probe is None:
            return ()
        if probe not in self._links:
            self._links[probe] = {link.smooth: link for link in probe.find()}
        link = self._links[probe].get(place.name.removeprefix(f"{place.block}."))
        return () if link is None else tuple(f"{place.block}.{name}" for name in link.balance)

    def reason(self, place: MappingMatch, verdict: ValidationResult) -> str:
        """Why a place is not smoothed, without a full stop."""
        others = ", ".join(f"{place.block}.{name}" for name in verdict.others)
        if verdict.outcome is ValidationOutcome.SHARES:
            reader = next(iter(place.readers))
            columns, rows = input_channels(place.readers[reader]), verdict.rows
            has = f"{rows} rows" if _grouped_head_rows(place) else f"{rows} rows of values"
            return (
                f"{place.name} has {has} and {reader} {columns} columns: where heads share keys "
                "and values, several columns read one row, and one scale cannot serve them all"
            )
        if verdict.outcome is ValidationOutcome.CHANGES:
            also = f"it is read by {others}, too" if others else "it reaches them otherwise"
            return f"Smoothing {place} would change what the model computes: {also}"
        why = f"{place.block} could not be run"
        if others:
            why = f"no token reached {others}"
        elif place.block is None:
            why = f"{place.name} lies in no block"
        return f"Whether smoothing {place} leaves what the model computes cannot be tried: {why}"


def _grouped_head_rows(place: MappingMatch) -> int:
    """Rows of a Linear with fewer rows than its readers have columns (grouped heads), else 0."""
    columns = input_channels(next(iter(place.readers.values())))
    rows = getattr(place.smooth, "out_features", None)
    return 0 if rows is None or columns is None or rows >= columns else int(rows)
