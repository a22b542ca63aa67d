# SPDX-License-Identifier: Apache-2.0
"""Section 8: embeddings, output heads, router gates, draft layers (S57 to S61; L8)."""

from __future__ import annotations

from collections.abc import Iterator

from llmcompressor.verification.built import stored_names
from llmcompressor.verification.class_model import class_model
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.rules.base import Problem, Rule, View
from llmcompressor.verification.scheme import Args

__all__ = ["OF_TRANSFORMERS", "RULES"]


def _of_kind(view: View, kind: str) -> Iterator[Entry]:
    yield from (entry for entry in view.matrices if entry.kind == kind)


def embeddings_are_served(view: View) -> Iterator[Problem]:
    """S57."""
    for entry in _of_kind(view, "embedding"):
        if not entry.is_quantized:
            continue
        if not view.family.quantizes_embedding:
            yield Problem(
                entry.name, "vLLM builds this embedding unquantized.", "Leave it unquantized."
            )
            continue
        scheme = view.scheme(entry)
        weights = scheme.weights if scheme is not None else None
        if scheme is None or weights is None:
            continue
        reason = _refused(weights, entry, view.columns(entry, scheme))
        if scheme.inputs is not None:
            reason = "Its inputs are quantized too."
        if not reason and scheme.format != "pack-quantized":
            reason = f"It is stored as {scheme.format}, and packed codes are read alone."
        if reason:
            yield Problem(
                entry.name,
                reason,
                "Quantize it to symmetric packed integers of 2, 4 or 8 bits, or not at all.",
            )


def _refused(weights: Args, entry: Entry, columns: int | None) -> str:
    if weights.kind != "int" or weights.strategy not in ("channel", "group"):
        return f"Embeddings are served as integers per channel or group, not as {weights}."
    if not weights.symmetric:
        return "Embeddings are served without zero points."
    if weights.bits not in (2, 4, 8):
        return f"Embeddings are served in 2, 4 or 8 bits, not {weights.bits}."
    if columns is not None and (
        columns * weights.bits % 32 or (weights.group and columns % weights.group)
    ):
        return f"Its {columns} columns are no whole number of words or groups."
    return ""


def gates_are_plain(view: View) -> Iterator[Problem]:
    """S58."""
    for entry in _of_kind(view, "gate"):
        if entry.is_quantized:
            yield Problem(
                entry.name,
                "It is a router gate, and servers build gates unquantized.",
                "Leave it unquantized and list it in ignore.",
                Severity.WARNING if view.family.gate_is_quantizable else None,
            )
        elif view.family.gate_is_quantizable and view.choice(entry).group is not None:
            yield Problem(
                entry.name,
                "It is a router gate that a target reaches, since vLLM gives gates of this model "
                "a scheme.",
                "List it in ignore.",
            )


def heads_are_served(view: View) -> Iterator[Problem]:
    """S59."""
    for entry in _of_kind(view, "head"):
        if not entry.is_quantized:
            continue
        if not view.family.quantizes_head:
            yield Problem(
                entry.name, "vLLM builds this model's head unquantized.", "Leave it unquantized."
            )
            continue
        scheme = view.scheme(entry)
        weights = scheme.weights if scheme is not None else None
        if weights is None:
            yield Problem(
                entry.name,
                "It is quantized, and no target names it; Linear does not reach a head.",
                "Target it by name, as re:.*lm_head.",
            )
        elif weights.strategy == "block":
            yield Problem(entry.name, "Heads cannot be in blocks.", "Use channels or groups.")
        elif not weights.symmetric and (entry.rows or 0) * weights.bits % 32:
            yield Problem(
                entry.name,
                f"The zero points of its {entry.rows} rows do not end at a word.",
                "Quantize it symmetrically.",
            )
        vocabulary = view.size("vocab_size")
        if vocabulary is not None and entry.rows not in (None, vocabulary):
            yield Problem(
                entry.name,
                f"It has {entry.rows} rows for a vocabulary of {vocabulary}.",
                "Store exactly one row per token.",
            )


def tied_embeddings_are_plain(view: View) -> Iterator[Problem]:
    """S60."""
    if not view.is_tied:
        return
    for entry in view.quantized:
        if entry.kind == "head" or (entry.kind == "embedding" and "position" not in entry.name):
            yield Problem(
                entry.name,
                "It is quantized, and the configuration ties input and output embeddings.",
                "Leave both unquantized, or write tie_word_embeddings: false and store both.",
            )


def draft_layers(view: View) -> Iterator[Problem]:
    """S61."""
    draft = [entry for entry in view.matrices if view.is_draft(entry.name)]
    for entry in draft:
        choice = view.choice(entry)
        plain = view.is_plain(entry) or entry.kind != "linear"
        if not entry.is_quantized and choice.group is not None and not plain:
            yield Problem(
                entry.name,
                "It belongs to a draft layer, is not quantized, and is not ignored.",
                "Add the draft layer to ignore, as re:^mtp.*.",
            )
    count = _announced(view)
    if count and not draft:
        yield Problem(
            "",
            f"The configuration announces {count} draft layers, and the file holds none.",
            "Copy them from the original model.",
            Severity.WARNING,
        )


def _announced(view: View) -> int:
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        value = view.text.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return 0


def tied_are_alike(view: View) -> Iterator[Problem]:
    """L8."""
    small = {f"{one.name}.weight" for one in view.quantized if one.own.get("weight") is not None}
    small = {name for name in small if view.headers[name].dtype == "F8_E4M3"}
    model = class_model(view.config) if small else None
    if model is None:
        return
    stored = stored_names(model)
    held = {stored(name): name for name in view.headers}
    for target, source in model.all_tied_weights_keys.items():
        pair = [held[name] for name in (source, target) if name in held]
        if len(pair) > 1 and len(small.intersection(pair)) == 1:
            coded, other = sorted(pair, key=lambda name: name not in small)
            yield Problem(
                coded.removesuffix(".weight"),
                f"transformers compares it with {other}, as of one tensor, and fails to load it: "
                "8-bit floats are compared with no others.",
                "Give it integers (format: int-quantized), or ignore it.",
            )


RULES = (
    Rule("S57", "embeddings are packed integers", embeddings_are_served),
    Rule("S58", "router gates stay plain and ignored", gates_are_plain),
    Rule("S59", "a quantized head is served", heads_are_served),
    Rule("S60", "tied embeddings stay plain", tied_embeddings_are_plain),
    Rule("S61", "draft layers are there and ignored", draft_layers),
)
OF_TRANSFORMERS = (
    Rule(
        "L8",
        "what is tied is quantized alike",
        tied_are_alike,
        server="transformers",
        is_limit=True,
    ),
)
