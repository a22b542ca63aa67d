# SPDX-License-Identifier: Apache-2.0
"""Whether input embedding and output head are one matrix: what is said, and what is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmcompressor.verification.built import renamed_names
from llmcompressor.verification.class_model import class_model
from llmcompressor.verification.decode import CHUNK
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.families import text_settings
from llmcompressor.verification.files import Files, tensor_chunks
from llmcompressor.verification.layout import PLAIN_FLOATS

__all__ = ["HEADS", "Twins", "check_tie", "compare_tie", "equal", "same_tensor"]

HEADS = ("lm_head", "embed_out", "proj_out", "decoder")
"""What output heads are called; the last two in Whisper, and in BERT and its kin."""

_EMBEDDINGS = (
    "embed_tokens.weight",
    "embed_in.weight",
    "shared.weight",
    "tok_embeddings.weight",
    "word_embeddings.weight",
    "wte.weight",
)
_UNTIE = "Write tie_word_embeddings: false into config.json."


def equal(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are the same, in the dtype of the first."""
    if ours.dtype != theirs.dtype:
        theirs = theirs.to(ours.dtype)
    # of one dimension at least: the bytes of a single number cannot be viewed
    bytes_of = [one.reshape(-1).contiguous().view(torch.uint8) for one in (ours, theirs)]
    return (ours.shape == theirs.shape and torch.equal(*bytes_of)) or torch.equal(ours, theirs)


def same_tensor(files: Files, name: str, others: Files, other: str) -> bool:
    """Whether two tensors of one or two checkpoints have the same values."""
    first, second = files.places[name].info, others.places[other].info
    if first.shape != second.shape or {name} & files.broken or {other} & others.broken:
        return False
    pairs = zip(tensor_chunks(files, name, CHUNK), tensor_chunks(others, other, CHUNK), strict=True)
    return all(equal(ours, theirs) for ours, theirs in pairs)


class Twins:
    """What the class of a checkpoint ties besides the head: blocks that share their weights, say.

    Args:
        files: the checkpoint, which may hold such weights once.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def find(self, name: str) -> str | None:
        """The tensor that is stored for another one; ``None`` if there is none."""
        tied, stored, places = self._tables
        own = stored(name)
        first = tied.get(own, own)
        group = [first, *(target for target, source in tied.items() if source == first)]
        return next((places[one] for one in group if one in places), None) if tied else None

    @cached_property
    def _tables(self) -> tuple[Mapping[str, str], Callable[[str], str], Mapping[str, str]]:
        """Tied tensor → the one it is tied to; how the file's names are changed; model → file."""
        model = class_model(self._files.config)
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        if not tied:
            return {}, str, {}
        # one that is split, as its parts are called by the class, is no twin of the first of them
        stored = renamed_names(model)
        return tied, stored, {stored(name): name for name in self._files.places}


def _said(config: Mapping[str, Any]) -> bool | None:
    """What ``config.json`` says; ``None`` if it says nothing, or two things.

    >>> _said({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}})
    """
    holders = (config, text_settings(config))
    said = {bool(each["tie_word_embeddings"]) for each in holders if "tie_word_embeddings" in each}
    return said.pop() if len(said) == 1 else None


def _is_head(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in HEADS


def _own_heads(files: Files) -> Iterator[str]:
    """Plain output heads with the shape of an embedding, and the content of none."""
    plain = {
        name: place.info.shape
        for name, place in files.places.items()
        if place.info.dtype in PLAIN_FLOATS and len(place.info.shape) == 2
    }
    plain = {name: shape for name, shape in plain.items() if name not in files.broken}
    for name, shape in plain.items():
        if not (_is_head(name) and name.endswith(".weight")):
            continue
        alike = [each for each in plain if each.endswith(_EMBEDDINGS) and plain[each] == shape]
        if alike and not any(same_tensor(files, name, files, each) for each in alike):
            yield name


def check_tie(files: Files) -> list[Finding]:
    """R5 by the checkpoint alone: a head of its own that readers may not use.

    No error: there are models whose own files are like that, and a run keeps them.
    """
    if not _said(files.config):
        return []
    said = (
        "It is not the input embedding, and config.json ties the two: vLLM takes the embedding, "
        "transformers the head."
    )
    return [
        Finding("R5", name, said, f"{_UNTIE[:-1]}, or remove the head.", Severity.WARNING)
        for name in _own_heads(files)
    ]


def compare_tie(files: Files, original: Files) -> Iterator[Finding]:
    """R5 against the original: what is said has changed, and what is stored does not explain it.

    A run may give the head a matrix of its own, and then writes both and says so.
    """
    ours, theirs = _said(files.config), _said(original.config)
    is_apart = any(True for _ in _own_heads(original))
    if ours and is_apart and not theirs:
        said = "It ties the embeddings, and the original's head is a matrix of its own."
        yield Finding("R5", "config.json", said, _UNTIE, Severity.ERROR)
    if ours is False and theirs and not any(_is_head(name) for name in files.places):
        said = "It does not tie the embeddings, as the original does, and there is no head."
        yield Finding(
            "R5",
            "config.json",
            said,
            "Write tie_word_embeddings: true into config.json.",
            Severity.ERROR,
        )
