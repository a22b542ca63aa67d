# SPDX-License-Identifier: Apache-2.0
"""Section 4: the tensors of a module (S23 to S38)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor

from llmcompressor.verification.expected import expected_tensors
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import PLAIN_FLOATS, Entry
from llmcompressor.verification.rules.base import (
    CONFIG,
    TENSORS,
    Misfit,
    Problem,
    Rule,
    View,
    joined,
)
from llmcompressor.verification.scheme import Scheme

__all__ = ["KNOWN", "RULES"]

_COMPRESS = "Compress the model anew."
_BASES = ("weight", "input", "output")
_SUFFIXES = ("_scale", "_zero_point", "_global_scale", "_shape", "_g_idx", "_scale_inv", "_packed")
KNOWN = frozenset(f"{base}{suffix}" for base in _BASES for suffix in _SUFFIXES)
_OTHERS = frozenset({"weight_g_idx", "weight_scale_inv"})  # S6 and S37 speak of them
_LEAST_DIVISOR = 1.0
_FLOAT16 = 65504.0


def _is(what: str, fits: Callable[[Misfit], bool], remedy: str) -> Callable[[View], list[Problem]]:
    """A check that reports one kind of misfit."""

    def check(view: View) -> list[Problem]:
        return [
            Problem(one.entry.name, one.sentence, remedy)
            for one in view.misfits
            if one.what == what and fits(one)
        ]

    return check


def _is_scalar(one: Misfit) -> bool:
    args = one.scheme.weights
    is_tensor = args is not None and args.strategy == "tensor"
    return one.own.endswith("_global_scale") or (
        one.own.partition("_")[0] != "weight" or (is_tensor and one.own == "weight_scale")
    )


def _is_channel(one: Misfit) -> bool:
    args = one.scheme.weights
    return one.own == "weight_scale" and args is not None and args.strategy == "channel"


def _is_old_packing(one: Misfit) -> bool:
    """Whether words hold whole values, as compressed-tensors packed before 0.18."""
    args = one.scheme.weights
    if one.own != "weight_packed" or args is None or args.kind != "int":
        return False
    if args.bits not in (3, 5, 6, 7):
        return False
    width = one.entry.own["weight_packed"].shape[-1]
    return width == ceil(one.columns / (32 // args.bits))


def _is_other(one: Misfit) -> bool:
    known = _is_scalar(one) or _is_channel(one) or _is_old_packing(one)
    return not known and one.own != "weight_shape"


def shapes_fit(view: View) -> Iterator[Problem]:
    """C1: shapes that no rule of a server has a number for."""
    for one in view.misfits:
        is_shape = one.what == "shape" and _is_other(one) and not one.entry.is_expert
        if is_shape or (one.what == "missing" and one.own == "weight_shape"):
            yield Problem(one.entry.name, one.sentence, _COMPRESS)


def experts_fit(view: View) -> Iterator[Problem]:
    """S66: each by its own scheme; that these differ within a mixture is S62."""
    for one in view.misfits:
        if one.entry.is_expert and one.what == "shape" and _is_other(one):
            yield Problem(one.entry.name, one.sentence, _COMPRESS)
    for experts in view.mixtures.values():
        yield from _of_another_size(view, experts)


def _of_another_size(view: View, experts: Mapping[int, Mapping[str, Entry]]) -> Iterator[Problem]:
    """Matrices that are smaller or larger than those of most experts of their mixture.

    Each by itself may be whole. vLLM copies what there is of it into a stack, and says nothing.
    """
    alike: dict[tuple[str, str, Scheme | None], list[Entry]] = defaultdict(list)
    for own in experts.values():
        for name, entry in own.items():
            if (codes := _codes_of(entry)) is not None:
                scheme = view.written(entry) if entry.is_quantized else None
                alike[name, codes, scheme].append(entry)
    for (_, codes, _), entries in alike.items():
        counts = Counter(entry.own[codes].shape for entry in entries)
        usual, count = counts.most_common(1)[0]
        if 2 * count <= len(entries):
            continue  # experts of two kinds in one list
        for entry in entries:
            found = entry.own[codes].shape
            if found != usual:
                yield Problem(
                    entry.name,
                    f"Its {codes} has the shape {list(found)}, and that of other experts "
                    f"{list(usual)}: it is read in part, or over what is not its own.",
                    _COMPRESS,
                )


def _codes_of(entry: Entry) -> str | None:
    return next((own for own in ("weight", "weight_packed") if own in entry.own), None)


def no_strays(view: View) -> Iterator[Problem]:
    """S23, for modules that hold no codes: scales of nothing, or of weights left uncompressed."""
    yield from _is("extra", lambda one: one.own in KNOWN - _OTHERS, _STRAY)(view)
    yield from _zero_points_of_floats(view)
    uncompressed = []
    for entry in view.entries.values():
        if entry.is_quantized:
            continue
        kept = _kept_scales(view, entry)
        if kept:
            uncompressed.append(entry.name)
        for own in sorted(KNOWN & set(entry.own) - _OTHERS - kept):
            if not (own.endswith("put_scale") and entry.form == "none"):
                yield Problem(entry.name, f"It has a {own} and no codes.", _STRAY)
    if uncompressed:
        yield Problem(
            "quantization_config",
            f"It is not compressed: {len(uncompressed)} modules ({joined(uncompressed, 1)}) are "
            "stored dense beside their scales, for transformers alone: servers do not read that.",
            "To serve it, write it with save_compressed=True and without format: dense.",
        )


def _zero_points_of_floats(view: View) -> Iterator[Problem]:
    """Zero points of inputs that vLLM leaves alone (S22), so that it has no place for them."""
    for entry, scheme in view.coded():
        inputs = scheme.inputs
        is_unread = inputs is not None and inputs.kind == "float" and not inputs.symmetric
        if is_unread and "input_zero_point" in entry.own:
            yield Problem(
                entry.name,
                "It has an input_zero_point, and there is no place for one beside 8-bit floats.",
                "Quantize inputs symmetrically, or dynamically.",
            )


def _kept_scales(view: View, entry: Entry) -> set[str]:
    """What a dense weight has beside it if its scheme is written in the format dense."""
    if entry.form != "dense" or entry.kind == "other" or "weight_scale" not in entry.own:
        return set()
    scheme = view.written(entry)
    if scheme is None or scheme.weights is None or scheme.format != "dense":
        return set()
    names = {"weight_scale", *expected_tensors(scheme, 1, 1)}
    if scheme.weights.strategy == "tensor_group":
        names.add("weight_global_scale")
    if not scheme.weights.symmetric:
        names.add("weight_zero_point")
    return names & KNOWN


_STRAY = "Remove the tensor."


def old_packing(view: View) -> Iterator[Problem]:
    """S26."""
    for one in view.misfits:
        if one.what == "shape" and _is_old_packing(one):
            yield Problem(
                one.entry.name,
                f"{one.sentence} Each word holds whole values, as compressed-tensors packed "
                "before 0.18.",
                "Compress the model with compressed-tensors 0.18 or later.",
            )


def shape_is_true(view: View) -> Iterator[Problem]:
    """S28."""
    for entry, scheme in view.coded():
        info = entry.own.get("weight_shape")
        if info is None or scheme.weights is None:
            continue
        if info.shape != (2,):
            yield Problem(
                entry.name, f"Its weight_shape has the shape {list(info.shape)}.", _COMPRESS
            )
            continue
        stored = view.stored_shape(entry)
        packed = entry.own.get("weight_packed")
        if stored is None or packed is None or len(packed.shape) != 2:
            continue
        rows, width = packed.shape
        if stored[0] != rows or not _width_fits(stored[1], width, scheme.weights.bits):
            yield Problem(
                entry.name,
                f"Its weight_shape says {list(stored)}, its codes have {list(packed.shape)} words.",
                _COMPRESS,
            )


def _width_fits(columns: int, width: int, bits: int) -> bool:
    return width in (ceil(columns * bits / 32), ceil(columns / (32 // max(bits, 1))))


def _read(view: View, entry: Entry, own: str) -> Tensor | None:
    if view.tensors is None or own not in entry.own:
        return None
    return view.tensors(f"{entry.name}.{own}").to(torch.float32).reshape(-1)


def divisors_are_plausible(view: View) -> Iterator[Problem]:
    """S29."""
    for entry in view.quantized:
        scale = _read(view, entry, "weight_global_scale")
        if scale is None or not scale.numel():
            continue
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            continue
        if float(scale.min()) < _LEAST_DIVISOR:
            yield Problem(
                entry.name,
                f"Its weight_global_scale is {float(scale.min()):.3g}: it seems to be stored as a "
                "factor, and servers divide by it.",
                "Store 448 * 6 / amax.",
            )


def _values(view: View, shards: Sequence[Entry], own: str) -> dict[str, float]:
    found = {}
    for shard in shards:
        value = _read(view, shard, own)
        if value is not None and value.numel() == 1:
            found[shard.last] = float(value)
    return found


def _said(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def global_scales_agree(view: View) -> Iterator[Problem]:
    """S30."""
    for path, shards in view.joined.items():
        for own in ("weight_global_scale", "input_global_scale"):
            values = _values(view, shards, own)
            if len(set(values.values())) > 1:
                yield Problem(
                    path,
                    f"Its shards have different {own} ({_said(values)}); the largest is used "
                    "for all.",
                    "Let them share one.",
                )


def static_inputs_agree(view: View) -> Iterator[Problem]:
    """S32: 8-bit integers; of floats the largest is taken, which is sound."""
    for path, shards in view.joined.items():
        for own in ("input_scale", "input_zero_point"):
            args = [scheme.inputs for shard in shards if (scheme := view.scheme(shard))]
            if not any(each is not None and each.kind == "int" for each in args):
                continue
            values = _values(view, shards, own)
            if len(set(values.values())) > 1:
                yield Problem(
                    path,
                    f"Its shards have different {own} ({_said(values)}); the last one is used "
                    "for all.",
                    "Let them share one: they have the same input.",
                )


def scales_survive_float16(view: View) -> Iterator[Problem]:
    """S33."""
    if view.dtype != "float16":
        return
    for entry, scheme in view.coded():
        if scheme.format != "pack-quantized":
            continue
        scale = _read(view, entry, "weight_scale")
        if scale is None or scale.numel() == 0:
            continue
        cast = scale.to(torch.float16)
        if bool((cast.isinf() & scale.isfinite()).any()) or bool(
            ((cast == 0) & (scale != 0)).any()
        ):
            yield Problem(
                entry.name,
                f"Its scales, {float(scale.min()):.3g} to {float(scale.max()):.3g}, do not fit "
                f"float16 (up to {_FLOAT16:.0f}).",
                "Serve it in bfloat16.",
            )


def blocks_are_128(view: View) -> Iterator[Problem]:
    """S34."""
    for group in view.used:
        weights = group.scheme.weights
        if weights is None or weights.strategy != "block" or weights.kind != "float":
            continue
        if weights.block != (128, 128):
            yield Problem(
                group.name,
                f"Its blocks are {list(weights.block or ())}; fast kernels take [128, 128] alone.",
                "Quantize in blocks of [128, 128].",
            )


def bias_is_plain(view: View) -> Iterator[Problem]:
    """S35: a bias has one value for each output."""
    for entry in view.entries.values():
        bias = entry.own.get("bias")
        if bias is None:
            continue
        if bias.dtype not in PLAIN_FLOATS:
            yield Problem(entry.name, f"Its bias is stored as {bias.dtype}.", "Keep biases floats.")
            continue
        weight = entry.own.get("weight")
        like_weight = weight is not None and bias.shape == weight.shape
        if entry.kind == "other" or like_weight:  # a norm of heads has a row for each of them
            continue
        is_turned = view.is_transposed(entry)
        outputs = entry.own["weight"].shape[1] if is_turned else entry.rows
        if outputs is not None and bias.shape != (outputs,):
            yield Problem(
                entry.name,
                f"Its bias has the shape {list(bias.shape)} and its weight {outputs} "
                f"{'columns, which are its outputs' if is_turned else 'rows'}.",
                _COMPRESS,
            )


def fused_on_disk(view: View) -> Iterator[Problem]:
    """S36: blocks must not cross the shards of what is joined in the file."""
    heads = view.size("num_attention_heads")
    kv_heads = view.size("num_key_value_heads") or heads
    if heads is None or kv_heads is None:
        return
    shares = heads + 2 * kv_heads
    for entry, scheme in view.coded():
        weights = scheme.weights
        if weights is None or weights.block is None or entry.last != "qkv_proj":
            continue
        for count in {heads, kv_heads}:
            rows = (entry.rows or 0) * count // shares
            if rows % max(weights.block[0], 1):
                yield Problem(
                    entry.name,
                    f"A shard of {rows} rows is no whole number of blocks of {weights.block[0]}.",
                    "Choose blocks that divide the rows of query, key and value.",
                )
                break


def scales_have_their_name(view: View) -> Iterator[Problem]:
    """S37."""
    for entry in view.entries.values():
        for own in ("weight_scale_inv", "scale", "scales", "qweight", "qzeros"):
            if own in entry.own and ("weight" in entry.own or "weight_packed" in entry.own):
                yield Problem(
                    entry.name, f"It has a {own}; the name is weight_scale.", "Rename the tensor."
                )


RULES = (
    Rule("C1", "tensors have the shapes of their scheme", shapes_fit, server=""),
    Rule("S23", "no tensor beyond those of the scheme", no_strays),
    Rule(
        "S24",
        "channel scales are [N, 1]",
        _is("shape", _is_channel, "Store them as a column."),
    ),
    Rule(
        "S25",
        "scales of a tensor are [1] or []",
        _is("shape", _is_scalar, "Store one number."),
    ),
    Rule("S26", "3, 5, 6 and 7 bits are packed densely", old_packing),
    Rule("S28", "weight_shape is [2] and true", shape_is_true),
    Rule("S29", "global scales are divisors", divisors_are_plausible, needs=TENSORS),
    Rule("S30", "joined modules share global scales", global_scales_agree, needs=TENSORS),
    Rule("S32", "joined modules share static INT8 inputs", static_inputs_agree, needs=TENSORS),
    Rule("S33", "scales fit float16", scales_survive_float16, needs=TENSORS),
    Rule(
        "S34",
        "blocks are 128 by 128",
        blocks_are_128,
        needs=CONFIG,
        severity=Severity.NOTE,
    ),
    Rule("S35", "a bias is a float", bias_is_plain),
    Rule("S36", "blocks fit shards that are joined on disk", fused_on_disk),
    Rule("S37", "scales are named weight_scale", scales_have_their_name),
    Rule(
        "S38",
        "dtypes are those of the scheme",
        _is("dtype", lambda one: True, "Store it in that dtype: servers convert by value."),
    ),
    Rule(
        "S66",
        "tensors of experts have exact shapes",
        experts_fit,
    ),
    Rule(
        "S70",
        "no tensor of a scheme is missing",
        _is("missing", lambda one: one.own != "weight_shape", _COMPRESS),
        server="",  # transformers too begins with whatever stands where nothing was loaded
    ),
)
