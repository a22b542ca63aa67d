# SPDX-License-Identifier: Apache-2.0
"""Section 5: divisibility, alone and split over devices (S39 to S43)."""

from __future__ import annotations

from collections.abc import Iterator

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.rules.base import DEPLOYMENT, Problem, Rule, View
from llmcompressor.verification.scheme import Args, Scheme

__all__ = ["RULES", "is_row_parallel", "parts_of"]

_ROW_PARALLEL = frozenset(
    {"o_proj", "down_proj", "out_proj", "dense", "fc2", "c_proj", "w2", "dense_4h_to_h", "wo"}
)
# Whole on every device: they map to and from the latent of all heads.
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"})
_FEWER = "Use fewer devices, or a group size that divides the shards."


def is_row_parallel(entry: Entry) -> bool:
    """Whether a module's inputs are split over devices, rather than its outputs."""
    return entry.last in _ROW_PARALLEL


def parts_of(view: View, entry: Entry, tp: int) -> int:
    """Into how many parts ``tp`` devices split a module: keys and values at most one per head."""
    if entry.last in _REPLICATED:
        return 1
    heads = view.size("num_key_value_heads")
    if entry.last in ("k_proj", "v_proj") and heads is not None and heads < tp:
        return heads
    return tp


def _split(view: View) -> Iterator[tuple[Entry, Scheme, Args, int]]:
    """Coded Linears outside mixtures, with the columns of their weights."""
    for entry, scheme in view.coded():
        columns = view.columns(entry, scheme)
        if scheme.weights is None or columns is None or entry.is_expert:
            continue
        if entry.kind in ("linear", "gate"):
            yield entry, scheme, scheme.weights, columns


def groups_divide(view: View) -> Iterator[Problem]:
    """S39."""
    for entry, _, weights, columns in _split(view):
        if weights.strategy != "group" or not weights.group or weights.kind != "int":
            continue
        for tp in view.deployment.tp:
            split = tp if is_row_parallel(entry) else 1
            if columns % split or (columns // split) % weights.group == 0:
                continue
            yield Problem(
                entry.name,
                f"{_share(columns, split)} are no whole number of groups of {weights.group}.",
                _FEWER,
                view.deployment.tp_severity(split),
            )
            break


def _share(size: int, split: int, what: str = "columns") -> str:
    if split == 1:
        return f"Its {size} {what}"
    return f"Its {size} {what} split over {split} devices"


def words_divide(view: View) -> Iterator[Problem]:
    """S40."""
    for entry, scheme, weights, columns in _split(view):
        if scheme.format != "pack-quantized":
            continue
        for tp in view.deployment.tp:
            misfit = _misfit_of_words(entry, weights, columns, parts_of(view, entry, tp))
            if misfit:
                yield Problem(entry.name, misfit, _FEWER, view.deployment.tp_severity(tp))
                break


def _misfit_of_words(entry: Entry, weights: Args, columns: int, tp: int) -> str:
    if is_row_parallel(entry):
        alone = tp == 1 or weights.strategy != "channel" or columns % tp
        if alone or columns // tp * weights.bits % 32 == 0:
            return ""
        return f"{_share(columns, tp)} do not end at a word of 32 bits."
    rows = entry.rows or 0
    if weights.symmetric or rows % tp or rows // tp * weights.bits % 32 == 0:
        return ""
    return f"{_share(rows, tp, 'rows')} have zero points that do not end at a word of 32 bits."


def blocks_divide(view: View) -> Iterator[Problem]:
    """S41."""
    last = {shards[-1].name for shards in view.joined.values()}
    merged = {shard.name for shards in view.joined.values() for shard in shards}
    for entry, _, weights, columns in _split(view):
        if weights.strategy != "block" or weights.block is None or weights.kind != "float":
            continue
        for tp in view.deployment.tp:
            in_the_middle = entry.name in merged and entry.name not in last
            parts = parts_of(view, entry, tp)
            misfit = _misfit_of_blocks(entry, weights.block, columns, parts, in_the_middle)
            if misfit:
                yield Problem(entry.name, misfit, _FEWER, view.deployment.tp_severity(tp))
                break


def _misfit_of_blocks(
    entry: Entry, block: tuple[int, int], columns: int, tp: int, in_the_middle: bool
) -> str:
    rows = entry.rows or 0
    if is_row_parallel(entry):
        if tp > 1 and columns % tp == 0 and (columns // tp) % max(block[1], 1):
            return f"{_share(columns, tp)} are no whole number of blocks of {block[1]}."
        return ""
    if (tp > 1 or in_the_middle) and rows % tp == 0 and (rows // tp) % max(block[0], 1):
        return f"{_share(rows, tp, 'rows')} are no whole number of blocks of {block[0]}."
    return ""


def float_groups_divide(view: View) -> Iterator[Problem]:
    """S42."""
    for entry, _, weights, columns in _split(view):
        if not (weights.is_nvfp4 or weights.is_mx):
            continue
        for tp in view.deployment.tp:
            split = tp if is_row_parallel(entry) else 1
            if columns % split == 0 and (columns // split) % weights.group:
                yield Problem(
                    entry.name,
                    f"{_share(columns, split)} are no whole number of groups of {weights.group}, "
                    "which vLLM does not notice.",
                    _FEWER,
                    view.deployment.tp_severity(split),
                )
                break


def _of_the_model(view: View) -> Severity | None:
    """A note where nobody asked: the model itself cannot be split so, quantized or not."""
    return None if view.deployment.is_tp_given else Severity.NOTE


def sizes_divide(view: View) -> Iterator[Problem]:
    """S43."""
    heads = view.size("num_attention_heads")
    for tp in view.deployment.tp:
        if heads is not None and heads % tp:
            yield Problem(
                "num_attention_heads",
                f"{heads} heads cannot be split over {tp} devices.",
                "Use a number of devices that divides the heads.",
                _of_the_model(view),
            )
    for entry in view.quantized:
        scheme = view.written(entry)
        columns = view.columns(entry, scheme) if scheme is not None else None
        size = columns if is_row_parallel(entry) else entry.rows
        if entry.kind != "linear" or size is None:
            continue
        for tp in view.deployment.tp:
            parts = parts_of(view, entry, tp)
            if size % parts:
                what = "columns" if is_row_parallel(entry) else "rows"
                yield Problem(
                    entry.name,
                    f"{_share(size, parts, what)} leave a remainder.",
                    "Use a number of devices that divides it.",
                    _of_the_model(view),
                )
                break


RULES = (
    Rule("S39", "shards hold whole groups", groups_divide, needs=DEPLOYMENT),
    Rule("S40", "shards end at whole words", words_divide, needs=DEPLOYMENT),
    Rule("S41", "shards hold whole blocks", blocks_divide, needs=DEPLOYMENT),
    Rule("S42", "shards hold whole groups of floats", float_groups_divide, needs=DEPLOYMENT),
    Rule("S43", "heads and sizes divide", sizes_divide, needs=DEPLOYMENT),
)
