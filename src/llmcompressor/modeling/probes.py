# SPDX-License-Identifier: Apache-2.0
"""Block probes: how a model calls each of its blocks, recorded in one run without weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from llmcompressor.logger import logger
from llmcompressor.modeling.alike_experts import form_of_module
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.hollow import hollow_weights
from llmcompressor.modeling.inputs import model_inputs, without_cache
from llmcompressor.modeling.modes import evaluating
from llmcompressor.modeling.repeated_calls import for_another_run
from llmcompressor.modeling.settings import text_config
from llmcompressor.modeling.structure import BlockProbe

__all__ = ["probes_of", "token_ids"]

_TOKENS = 8
_TEXT_KEYS = {"attention_mask", "input_ids", "labels", "loss_mask", "position_ids"}


class _Enough(BaseException):
    """Every awaited call was recorded; not an ``Exception``, which a model might catch."""


def probes_of(model: Module, batches: Iterable[Mapping[str, Any]] = ()) -> dict[str, BlockProbe]:
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
        forms.setdefault(form_of_module(block), []).append(block)
    firsts = [members[0] for members in forms.values()]
    calls: dict[Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    text_is_seen, unseen = False, ""
    for inputs in itertools.chain(token_ids(model), batches):
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


def token_ids(model: Module) -> list[dict[str, Any]]:
    """Model inputs of one row of token ids; empty for models that need other inputs."""
    config = getattr(model, "config", None)
    if config is None or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return []
    text = text_config(config)
    vocabulary = int(getattr(text, "vocab_size", None) or _TOKENS)
    ids = (torch.arange(_TOKENS) + 3).remainder(vocabulary).unsqueeze(0)
    more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    return [{"input_ids": ids, **more}]


def _first_calls(
    model: Module, blocks: Sequence[Module], inputs: Mapping[str, Any]
) -> dict[Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of the first call of each block; the forward ends once all are known."""
    calls: dict[Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:  # later code may write to its arguments
            calls[module] = for_another_run((args, kwargs))
        if len(calls) == len(blocks):
            raise _Enough

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        with (
            evaluating(model),
            torch.no_grad(),
            hollow_weights(model),
            without_cache(model),
            contextlib.suppress(_Enough),
        ):
            model(**model_inputs(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls
