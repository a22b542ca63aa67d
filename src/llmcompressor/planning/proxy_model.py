# SPDX-License-Identifier: Apache-2.0
"""Proxy model: a small random model of the planned model's class, for trials without its weights.

It has the first blocks only, as many as contain each kind of block, and smaller widths. Widths
that the class derives from others are unknown, so the proxy model is compared with the large one:
it must have the same modules under the same names, or there is no proxy model. Widths that are
equal in the large model are equal in the proxy, and all have Hadamard matrices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from llmcompressor.checkpoint.load import untie_embeddings
from llmcompressor.checkpoint.meta_model import no_progress_bars
from llmcompressor.checkpoint.moe_names import unfuse_stored_experts
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import CompressorError, TargetError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.call_graph import trace_flow
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import config_value, has_tied_embeddings, text_config
from llmcompressor.numerics.hadamard import has_hadamard
from llmcompressor.pipelines.moe_selection import targeted_moes
from llmcompressor.transformers_internals import attention_of, build_from_config

__all__ = ["NoProxyModel", "ProxyBuilder", "ProxyTrials", "proxy_model_builder"]

_SMALL = 4_000_000
"""Parameters of a model that is small as it is."""
_MOST = 64_000_000
"""Parameters that a small model may have: 256 MB in float32."""
_HEADS, _GROUPS = (4, 6, 8), 2
_WIDTHS = (320, 384, 448, 640, 768, 896)
_INNER = (192, 224, 160, 288, 352)
_VOCABULARY = 272
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "n_group")
_INTERMEDIATE = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "ffn_hidden_size",
)
_DEPTHS = ("num_hidden_layers", "depth")
_OF_WIDTHS = ("dim", "size", "width")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")

Kind = tuple[Any, ...]


class NoProxyModel(Exception):  # noqa: N818  # a finding, not an error
    """Raised if there is no proxy model; the message is a clause with the reason."""


class ProxyTrials:
    """Runs the trials of modifiers on a proxy model instead of the real weights.

    Args:
        model: the large model, before any modifier was initialized on it.
        modifiers: of the recipe.
    """

    def __init__(self, model: PreTrainedModel, modifiers: Sequence[Modifier]) -> None:
        self._model = model
        self._unknown = ""
        if any(one.traits.trial is not None for one in modifiers):
            try:
                self._build = proxy_model_builder(model, modifiers)
            except (NoProxyModel, CompressorError) as finding:
                self._unknown = str(finding)

    def __call__(self, modifier: Modifier) -> str:
        """Check whether an initialized modifier would refuse the model.

        Returns:
            The reason why that is unknown; empty if the modifier accepts the model.

        Raises:
            TargetError: the modifier would refuse the model.
        """
        trial = modifier.traits.trial
        if trial is None or self._unknown:
            return "" if trial is None else self._unknown
        return trial(self._model, self._build)


class ProxyBuilder:
    """Builds models of the same class with another configuration, in float32.

    Args:
        model: the large model, before modifiers are initialized on it.
        config: the configuration of the built model.
        modifiers: of the recipe; the experts they target are unfused, as in ``model``.
    """

    def __init__(self, model: PreTrainedModel, config: Any, modifiers: Sequence[Modifier]) -> None:
        self._class = type(model)
        self._config = config
        self._attention = attention_of(model.config)
        self._tied = has_tied_embeddings(model)
        self._modifiers = modifiers

    def __call__(self, seed: int, device: str = "cpu") -> PreTrainedModel:
        """Build a model with the random values of a seed, or on the device ``meta``."""
        with torch.random.fork_rng(devices=[]), torch.device(device), no_progress_bars():
            torch.manual_seed(seed)
            built: PreTrainedModel = build_from_config(
                self._class,
                copy.deepcopy(self._config),
                dtype=torch.float32,
                attn_implementation=self._attention,
            )
        if not self._tied:
            untie_embeddings(built)
        unfuse_stored_experts(built, targeted_moes(built, self._modifiers))
        built.train(mode=False)
        return built


def proxy_model_builder(model: PreTrainedModel, modifiers: Sequence[Modifier] = ()) -> ProxyBuilder:
    """Return a builder of proxy models, from a seed.

    Args:
        model: the large model; its parameters may be on the meta device.
        modifiers: of the recipe.

    Raises:
        NoProxyModel: there is no proxy model for it.
    """
    if any("forward" in vars(module) for module in model.modules()):
        raise NoProxyModel("a module of it has a forward that its class has not")
    config = copy.deepcopy(model.config)
    if sum(one.numel() for one in model.parameters()) <= _SMALL:
        return ProxyBuilder(model, config, modifiers)
    reasons: list[str] = []
    for narrows_stream in (True, False):
        config = copy.deepcopy(model.config)
        try:
            _shrink(config, _block_kinds(model), narrows_stream=narrows_stream)
            build = ProxyBuilder(model, config, modifiers)
            _check_fit(model, build(0, "meta"), must_run=narrows_stream)
        except CompressorError:
            raise
        except NoProxyModel as finding:
            reasons.append(str(finding))
        except Exception as error:  # of a class with unexpected sizes
            what = f"{type(error).__name__}: {error}"
            reasons.append(f"a small model of its class cannot be built ({what})")
        else:
            return build
    raise NoProxyModel(reasons[0])


def _check_fit(model: PreTrainedModel, small: PreTrainedModel, *, must_run: bool) -> None:
    """Check that the small model has the large one's first blocks and other modules, and runs."""
    if sum(one.numel() for one in small.parameters()) > _MOST:
        raise NoProxyModel("a few blocks of it, narrowed as far as is known how, are large still")
    large_blocks, small_blocks = _block_kinds(model), _block_kinds(small)
    are_same = large_blocks.keys() == small_blocks.keys() and all(
        kinds == large_blocks[name][: len(kinds)] and set(kinds) == set(large_blocks[name])
        for name, kinds in small_blocks.items()
    )
    if not are_same or _structure(model) != _structure(small):
        raise NoProxyModel("a small model of its class has other modules")
    try:
        trace_flow(small)
    except TargetError:  # not on tokens alone: the large model is checked later
        if must_run:
            raise NoProxyModel("a small model of its class does not run") from None


def _structure(block: Module) -> Kind:
    """Key of a module's structure, independent of widths and the number of experts."""
    parts = set()
    for name, module in named_modules(block):
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        present = (key for key, one in module._parameters.items() if one is not None)
        parts.add((pattern, type(module), frozenset(present)))
    return type(block), frozenset(parts)


def _block_kinds(model: Module) -> dict[str, list[Kind]]:
    """Structure keys of a model's blocks, by the name of their list."""
    found: dict[str, list[Kind]] = {}
    for block, name in find_blocks(model).items():
        found.setdefault(name.rpartition(".")[0], []).append(_structure(block))
    return found


# ---------------------------------------------------------------------- smaller sizes


def _shrink(config: Any, blocks: Mapping[str, Sequence[Kind]], *, narrows_stream: bool) -> None:
    text = text_config(config)
    depth = config_value(text, "num_hidden_layers")
    if type(depth) is not int:
        raise NoProxyModel("its configuration does not say how many blocks it has")
    lists = [one for one in vars(text).values() if isinstance(one, list) and len(one) == depth]
    needed = min(2, depth)  # so many first blocks that each kind is among them
    for kinds in blocks.values():
        if len(kinds) == depth:
            said = [(kind, *(str(one[place]) for one in lists)) for place, kind in enumerate(kinds)]
            needed = max(needed, *(said.index(one) + 1 for one in set(said)))
    _shorten(text, needed)
    for other in _other_configs(config, text):
        _shorten(other, 2)
    _narrow(text, narrows_stream=narrows_stream)


def _other_configs(config: Any, text: Any) -> Iterator[Any]:
    """Yield the nested configurations of other parts of a model (towers)."""
    for name in getattr(config, "sub_configs", None) or {}:
        inner = getattr(config, name, None)
        if inner is not None and inner is not text:
            yield inner
            yield from _other_configs(inner, text)


def _shorten(config: Any, depth: int) -> None:
    """Reduce the number of blocks in a configuration, and its lists with an entry per block."""
    for key in _DEPTHS:
        whole = config_value(config, key)
        if type(whole) is not int or whole <= depth:
            continue
        for name, one in list(vars(config).items()):
            if isinstance(one, list) and len(one) == whole:
                setattr(config, name, one[:depth])
            elif isinstance(one, list) and name.endswith(("indices", "indexes", "layers")):
                are_places = all(type(each) is int for each in one)
                setattr(config, name, [x for x in one if x < depth] if are_places else one)
        setattr(config, key, depth)


def _narrow(text: Any, *, narrows_stream: bool) -> None:
    taken = {one for one in vars(text).values() if type(one) is int}
    if narrows_stream:
        _narrow_stream(text, taken)
    inner = iter(one for one in _INNER if one not in taken)
    made: dict[int, int] = {}
    for key in _INTERMEDIATE:
        own = config_value(text, key)
        if type(own) is int and own > max(_INNER):
            if own not in made:
                made[own] = next(inner)
            setattr(text, key, made[own])
    if (config_value(text, "vocab_size") or 0) > _VOCABULARY:
        text.vocab_size = _VOCABULARY
        for key in filter(lambda key: hasattr(text, key), _TOKEN_IDS):
            setattr(text, key, None)
    chosen = [config_value(text, key) for key in _CHOSEN]
    least = max([4, *(2 * one for one in chosen if type(one) is int)])
    for key in _COUNTS:
        if type(config_value(text, key)) is int and config_value(text, key) > least:
            setattr(text, key, least)


def _narrow_stream(text: Any, taken: set[int]) -> None:
    """Reduce the number of heads of equal width, and the residual stream accordingly."""
    heads, hidden = config_value(text, "num_attention_heads"), config_value(text, "hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    width = config_value(text, "head_dim") or (hidden // heads if heads else 0)
    count = next((one for one in _HEADS if one < heads and one * width not in taken), heads)
    stream = count * width if hidden == heads * width else 0
    if not stream:  # some classes take hidden_size / heads as the width of a head
        asked = [count * (hidden // heads)] if hidden % heads == 0 else []
        others = {count * width, *taken}
        fitting = (one for one in [*asked, *_WIDTHS] if one < hidden and one not in others)
        stream = next((one for one in fitting if has_hadamard(one)), hidden)
    groups = config_value(text, "num_key_value_heads")
    if type(groups) is int and hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = count if groups == heads else min(groups, _GROUPS)
    text.num_attention_heads = count
    for name in [name for name, one in vars(text).items() if type(one) is int and one == hidden]:
        if name.endswith(_OF_WIDTHS):
            setattr(text, name, stream)
    text.hidden_size = stream
