# SPDX-License-Identifier: Apache-2.0
"""Which module's output channels another module's input channels are, found by running a block.

A norm feeds the Linears that get its output tensor: that is seen. The output of ``up_proj``
reaches ``down_proj`` multiplied by the gate's, that of ``v_proj`` reaches ``o_proj`` averaged
over positions: that is tried. A block is run on a few random states with stand-in weights, then
again with the outputs of a candidate divided and the inputs of its readers multiplied by powers
of two; a candidate is right if that leaves the block's output as it was. So nothing has to be
known of an architecture, no weight is read, and a module that feeds more than it seems to (a
router, a second branch) is never taken.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_order import first_tensor
from llmcompressor.modeling.hollow import hollow_weights
from llmcompressor.modeling.inputs import model_inputs, without_cache
from llmcompressor.modeling.scaling import divided_outputs, multiplied_inputs, norm_offset, swapped
from llmcompressor.names import named_modules

__all__ = ["BlockProbe", "Link", "probes_of"]

_TOKENS = 8
_HIDDEN_DIMS = 3
_INVARIANT = 1e-4
"""Relative change of a block's float32 output that is taken for rounding; others are near one."""
_SEED = 20
_TEXT_KEYS = {"attention_mask", "input_ids", "labels", "loss_mask", "position_ids"}
_EXPERT = re.compile(r"(?:.*\.)?experts\.\d+")


@dataclass(frozen=True)
class Link:
    """A smooth module and what reads its output, by their names within a block.

    Attributes:
        smooth: the norm or Linear whose output channels are divided.
        balance: the Linears whose input channels are multiplied; all that read that output.
        offset: what the norm adds to its weight.
    """

    smooth: str
    balance: tuple[str, ...]
    offset: float = 0.0


class _Enough(BaseException):
    """Every call that was waited for has come; not an ``Exception``, which a model might catch."""


@dataclass(frozen=True)
class _Call:
    """How a leaf of the block was called, and what it returned."""

    name: str
    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> Tensor | None:
        return first_tensor(self.args, self.kwargs)


class BlockProbe:
    """One block, stand-in weights for it, and states to run it on.

    Args:
        block: the block; its own weights are not looked at, and stay what they are.
        args: how the model calls it.
        kwargs: the same, by name.
    """

    def __init__(self, block: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._block = block
        self._generator = torch.Generator().manual_seed(_SEED)
        self._args = tuple(self._prepared(value) for value in args)
        self._kwargs = {name: self._prepared(value) for name, value in kwargs.items()}
        tensor = first_tensor(self._args, self._kwargs)
        self._device = torch.device("cpu") if tensor is None else tensor.device
        self._modules = dict(named_modules(block))

    def find(self) -> list[Link]:
        """Every link of the block, norms and Linears, in the order in which they are read."""
        with self._running():
            calls = self._watch()
            links = [link for group in _readers(calls) if (link := self._link_of(group, calls))]
        return list(dict.fromkeys(copy for link in links for copy in self._in_all_experts(link)))

    def verify(self, smooth: str, balance: Sequence[str]) -> Link | None:
        """The link between named modules, if scaling it leaves the block's output unchanged.

        Raises:
            LookupError: one of them was not called (an expert that no token went to), so that
                nothing can be said.
        """
        with self._running():
            calls = self._watch()
            missing = {smooth, *balance} - {call.name for call in calls}
            if missing:
                raise LookupError(sorted(missing)[0])
            own = next(call for call in calls if call.name == smooth)
            return self._tried(own, [call for call in calls if call.name in balance])

    def _in_all_experts(self, link: Link) -> Iterator[Link]:
        """A link within one expert holds in all of them, also where no token went."""
        parents = {_EXPERT.match(name) for name in (link.smooth, *link.balance)}
        prefixes = {found and found[0] for found in parents}
        if len(prefixes) > 1 or None in prefixes:
            yield link
            return
        own = prefixes.pop()
        assert own is not None
        experts = own.rpartition(".")[0]
        for index in self._modules[experts]._modules:
            names = [
                f"{experts}.{index}{name.removeprefix(own)}"
                for name in (link.smooth, *link.balance)
            ]
            if all(name in self._modules for name in names):
                yield Link(names[0], tuple(names[1:]), link.offset)

    def _link_of(self, readers: Sequence[_Call], calls: Sequence[_Call]) -> Link | None:
        """The link that ends in ``readers``, which get one tensor."""
        key = _place(readers[0].input)
        sources = [call for call in calls if _place(call.output) == key]
        if not sources:
            begin = calls.index(readers[0])
            sources = [call for call in reversed(calls[:begin]) if isinstance(call.module, Linear)]
        for source in sources:
            if link := self._tried(source, readers):
                return link
        return None

    def _tried(self, source: _Call, readers: Sequence[_Call]) -> Link | None:
        """Scale a candidate, and see whether the block returns what it did."""
        columns = _columns(readers[0].module)
        if any(_columns(reader.module) != columns for reader in readers) or columns is None:
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
        exponents = torch.randint(-1, 2, (columns,), generator=self._generator)
        scale_C = torch.exp2(exponents.float()).to(self._device)
        inputs = {
            reader.module: multiplied_inputs(reader.module, scale_C)
            for reader in readers
            if reader.module is not source.module
        }
        if len(inputs) < len({reader.module for reader in readers}):
            return None
        outputs = {source.module: divided_outputs(source.module, scale_C, offset)}
        plain = self._run()
        matters = self._change(plain, inputs) > _INVARIANT
        if not matters or not self._change(plain, {**inputs, **outputs}) <= _INVARIANT:
            return None
        names = dict.fromkeys(reader.name for reader in readers)
        return Link(source.name, tuple(names), offset)

    def _change(
        self, plain: Sequence[Tensor], changes: Mapping[Module, Mapping[str, Tensor]]
    ) -> float:
        """How far the block's output moves with other parameters, as a share of its size."""
        with swapped(changes):
            moved = self._run()
        shares = [
            float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))
            for one, other in zip(plain, moved, strict=True)
            if one.shape == other.shape and one.numel()
        ]
        return max(shares, default=float("nan"))

    def _run(self) -> list[Tensor]:
        return list(_tensors(self._block(*self._args, **self._kwargs)))

    def _watch(self) -> list[_Call]:
        """Run the block and note the calls of its Linears and norms, in order."""
        calls: list[_Call] = []
        names = {module: name for name, module in self._modules.items()}

        def note(module: Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(_Call(names[module], module, args, kwargs, output))

        leaves = [
            module
            for module in names
            if module is not self._block and module._parameters and not module._modules
        ]
        handles = [leaf.register_forward_hook(note, with_kwargs=True) for leaf in leaves]
        try:
            self._run()
        finally:
            for handle in handles:
                handle.remove()
        return calls

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Stand-in weights, evaluation mode, no gradients; all as it was afterwards."""
        training = [(module, module.training) for module in self._modules.values()]
        stand_ins = {
            module: {
                name: self._stand_in(parameter)
                for name, parameter in dict.items(module._parameters)
                if parameter is not None and parameter.is_floating_point()
            }
            for module in self._modules.values()
        }
        try:
            self._block.eval()
            with torch.no_grad(), swapped(stand_ins), self._filled_buffers():
                yield
        finally:
            for module, was_training in training:
                module.training = was_training

    @contextlib.contextmanager
    def _filled_buffers(self) -> Iterator[None]:
        """Stand-ins for buffers that are read with the block's weights: a router's bias, say."""
        unread = [
            (module, name, buffer)
            for module in self._modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ]
        try:
            for module, name, buffer in unread:
                module._buffers[name] = (
                    self._stand_in(buffer)
                    if buffer.is_floating_point()
                    else torch.zeros_like(buffer, device=self._device)
                )
            yield
        finally:
            for module, name, buffer in unread:
                module._buffers[name] = buffer

    def _stand_in(self, parameter: Tensor) -> Tensor:
        """Random values of a parameter's shape; a matrix has one per diagonal, and no more."""
        shape = tuple(parameter.shape)
        if len(shape) <= 1:
            values = torch.rand(shape, generator=self._generator) + 0.5
            return values.to(self._device)
        rows, columns = shape[-2:]
        values = torch.randn(rows + columns - 1, generator=self._generator) / columns**0.5
        matrix: Tensor = values.to(self._device).as_strided((rows, columns), (1, 1))
        return matrix if len(shape) == 2 else matrix.contiguous().expand(shape)

    def _prepared(self, value: Any) -> Any:
        """An argument with hidden states made random, and every floating tensor float32."""
        if isinstance(value, Tensor) and value.is_floating_point():
            if value.ndim == _HIDDEN_DIMS:
                states = torch.randn(value.shape, generator=self._generator)
                return states.to(value.device)
            return value.detach().float()
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(_wide(item) for item in value)
        return value


def _wide(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().float() if floating else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.float()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _columns(module: Module) -> int | None:
    return module.in_features if isinstance(module, Linear) else None


def _place(value: Any) -> tuple[int, int] | None:
    """Equal for a tensor and a view of all of it."""
    return (value.data_ptr(), value.numel()) if isinstance(value, Tensor) else None


def _readers(calls: Sequence[_Call]) -> Iterator[list[_Call]]:
    """Linears that get one tensor, in the order of the first of them."""
    groups: dict[tuple[int, int] | None, list[_Call]] = {}
    for call in calls:
        if isinstance(call.module, Linear) and call.input is not None:
            groups.setdefault(_place(call.input), []).append(call)
    yield from groups.values()


def probes_of(model: Module, batches: Iterable[Mapping[str, Any]] = ()) -> dict[str, BlockProbe]:
    """A probe for each block that is called; blocks of one form share one.

    Args:
        model: its weights may be on the meta device.
        batches: model inputs to try where a row of token ids alone does not do.

    Returns:
        Block name → probe, in the model's order; blocks that the inputs do not reach are left out.
    """
    blocks = find_blocks(model)
    forms: dict[Any, list[Module]] = {}
    for block in blocks:
        forms.setdefault(_form(block), []).append(block)
    firsts = [members[0] for members in forms.values()]
    calls: dict[Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    text_is_seen, unseen = False, ""
    for inputs in itertools.chain(_token_ids(model), batches):
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


def _form(block: Module) -> Any:
    """Equal for blocks of the same parts and shapes."""
    return tuple(
        (name, type(module), tuple((key, p.shape) for key, p in _own(module)))
        for name, module in named_modules(block)
    )


def _own(module: Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p) for name, p in dict.items(module._parameters) if p is not None)


def _token_ids(model: Module) -> list[dict[str, Any]]:
    """A row of token ids, for models that need no more than that."""
    config = getattr(model, "config", None)
    if config is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", None) or _TOKENS)
    ids = (torch.arange(_TOKENS) + 3).remainder(vocabulary).unsqueeze(0)
    more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    return [{"input_ids": ids, **more}]


def _first_calls(
    model: Module, blocks: Sequence[Module], inputs: Mapping[str, Any]
) -> dict[Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """How each of ``blocks`` is called first; the forward ends when all were."""
    calls: dict[Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))
        if len(calls) == len(blocks):
            raise _Enough

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with (
            torch.no_grad(),
            hollow_weights(model),
            without_cache(model),
            contextlib.suppress(_Enough),
        ):
            model(**model_inputs(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
        for module, was_training in training:
            module.training = was_training
    return calls
