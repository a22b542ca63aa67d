# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of packed weights, before they are unpacked and after (L1-L6, L9, L10).

It is that of the installed release: where releases differ, a tiny model is loaded to see.

After it has filled a model, transformers passes over every module to initialize what the file did
not hold. What is loaded is not touched, but many model classes name ``module.weight`` to see that,
and a packed module has no such tensor until the first forward: the load ends in an
``AttributeError``. Codes that are stored under the name ``weight`` (8 bits) are not concerned.

That first forward has to be the whole model's, and ``generate`` calls an encoder by itself (L3).

What it unpacks weights to is left to compressed-tensors: the dtype of their scales, and bfloat16
where scales are exponents or themselves 8-bit floats. Their inputs have the model's dtype, and
another one ends in a ``RuntimeError`` (L4). So does a buffer that the model casts to its own dtype
by assigning it anew: compressed-tensors copies the values into the old one. So does a scale that is
loaded as another dtype: as float32, where a class's list of what stays so matches it by mistake (as
``scale`` does ``weight_scale``); as that of the file before 5.21, where it is renamed on the way.

Queries, keys and values that are rounded with zero points come out in float16 whatever the model
computes in (L5). Columns that are no whole number of groups are refused in that forward too (L6).

Since 5.23 a tensor has to have the shape that the model without data has for it, quantized or not.
That of packed zero points is not packed there, by an oversight; one number is always ``[1]`` (L9).
And what becomes several weights, or a part of one, does not pass its tables any more (L10).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmcompressor.verification.cached_states import passed_over
from llmcompressor.verification.conversions import tables_quantized
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.module_classes import dtype_by_class, named_by_class
from llmcompressor.verification.rules.base import FLOATS, Problem, Rule, View
from llmcompressor.verification.rules.transformers import (
    experts_are_linears,
    is_small_float,
    loaded_mixtures,
    taken_for_experts,
)
from llmcompressor.verification.scheme import Scheme
from llmcompressor.verification.tried_loads import (
    fails_on_one_row_of_words,
    refuses_other_shapes,
    refuses_packed_zero_points,
    small_float_experts_become,
    why_untried,
)

__all__ = ["RULES"]

_ENCODER = re.compile(r"(?:.*\.)?encoder\.")
_TO_BFLOAT16 = frozenset(
    {
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp6-pack-quantized",
        "mxfp8-quantized",
    }
)
"""Formats that are unpacked to bfloat16, whatever the model's dtype is."""
_FLOAT32_BUFFERS = {"ctrl": "transformer.pos_encoding"}
"""``model_type`` → a buffer that is made in float32, and cast in the forward by assignment."""
_NOTHING = ("", "", "")
_UNPACKED = "Load it with quantization_config=CompressedTensorsConfig(dequantize=True)"
_ANEW = 'Compress the model in bfloat16, with precision="bfloat16" (--precision bfloat16)'


def embeddings_are_unpacked(view: View) -> Iterator[Problem]:
    """L1."""
    for entry in view.quantized:
        if entry.kind == "embedding" and entry.form == "packed":
            yield Problem(
                entry.name,
                "It is a packed embedding, and transformers fails to load it: its initialization "
                "reads a weight that is not there.",
                "Give it a form that keeps the name weight (format: int-quantized, or 8-bit "
                "floats), ignore it, or serve it with vLLM.",
            )


def named_weights_are_unpacked(view: View) -> Iterator[Problem]:
    """L2."""
    packed = [
        entry for entry in view.quantized if entry.form == "packed" and entry.kind != "embedding"
    ]
    named = named_by_class(view.config) if packed else {}
    for entry in packed if named else ():
        paths = [path for path, _ in view.own_modules(entry)] or [entry.name]
        owner = next((named[path] for path in paths if path in named), "")
        if owner:
            yield Problem(
                entry.name,
                f"It is packed, and transformers fails to load it: the initialization of {owner} "
                "reads a weight that is not there.",
                "Ignore it, write 8-bit codes, or serve it with vLLM.",
            )


def encoders_are_unpacked(view: View) -> Iterator[Problem]:
    """L3."""
    if view.config.get("is_encoder_decoder") is not True:
        return
    for entry in view.quantized:
        if _ENCODER.match(entry.name):
            yield Problem(
                entry.name,
                "transformers unpacks it at the first forward of the whole model, and generate "
                "calls the encoder before that and fails.",
                f"{_UNPACKED}, or call the model once before generate."
                if _is_weights_of_one_group(view)
                else "Call the model once before generate.",
            )


def _is_weights_of_one_group(view: View) -> bool:
    """Whether weights can be unpacked while they load, and no more is lost by that.

    Since 5.21 one group is taken for all Linears then, and no inputs are rounded.
    """
    found = [group.scheme for group in view.groups if group.scheme.weights is not None]
    return len(found) == 1 and found[0].inputs is None and found[0].outputs is None


def dtypes_meet(view: View) -> Iterator[Problem]:
    """L4."""
    yield from _unpacked_to_bfloat16(view)
    yield from _left_in_float32(view)
    yield from _unpacked_to_that_of_scales(view)
    yield from _experts_of_another_dtype(view)


def _experts_of_another_dtype(view: View) -> Iterator[Problem]:
    if view.dtype not in FLOATS.values() or experts_are_linears(view):
        return
    for path, _ in loaded_mixtures(view):
        coded = (
            (entry, scheme)
            for scheme, having in view.expert_schemes[path].items()
            for entry in having.values()
            if entry.is_quantized
        )
        made = (_made_of(entry, scheme, view.dtype) for entry, scheme in coded)
        what, dtype, remedy = next(
            (one for one in made if one[1] not in ("", view.dtype)), _NOTHING
        )
        if dtype:
            yield Problem(
                path,
                f"transformers unpacks experts of {what} to {dtype}, and the model computes "
                f'in {view.dtype}: with experts_implementation="eager" the first forward fails.',
                f"Leave experts_implementation at its default, grouped_mm. Or: {remedy}.",
                Severity.WARNING,
            )


def _made_of(entry: Entry, scheme: Scheme, dtype: str) -> tuple[str, str, str]:
    """What an expert is of, the dtype that it is unpacked to, and what else helps.

    Those of packed integers get that of their scales, which keep that of the file. Those of 8-bit
    floats are multiplied with their scales, and it depends on the release.
    """
    args = scheme.weights
    if is_small_float(args):
        return "8-bit floats", small_float_experts_become(dtype), _ANEW
    if scheme.format in _TO_BFLOAT16:
        return scheme.format, "bfloat16", _ANEW
    scale = entry.own.get("weight_scale")
    if args is None or args.kind != "int" or entry.form != "packed" or scale is None:
        return _NOTHING
    if not args.symmetric:
        return _NOTHING  # they are not loaded at all (T6)
    stored = FLOATS.get(scale.dtype, "")
    return f"{args.bits}-bit integers", stored, f"load it with dtype=torch.{stored}"


def _unpacked_to_that_of_scales(view: View) -> Iterator[Problem]:
    loaded = dtype_by_class(view.config, view.dtype) if view.quantized else None
    if loaded is None:
        return
    as_linears = experts_are_linears(view)
    for entry, scheme in view.coded():
        if scheme.format in _TO_BFLOAT16 or (entry.is_expert and not as_linears):
            continue
        scale = entry.own.get("weight_scale")
        stored = FLOATS.get(scale.dtype, "") if scale is not None else ""
        found = loaded(f"{entry.name}.weight_scale") or stored
        # one that is float32 without codes too is given what it takes by its model
        if found and found not in (view.dtype, loaded(f"{entry.name}.weight")):
            yield Problem(
                entry.name,
                f"transformers loads its scale as {found} and unpacks its weight to that, and the "
                f"model computes in {view.dtype}: the first forward fails.",
                'Compress the model in float32, with precision="float32" (--precision float32).'
                if found == "float32"
                else f"Load it with dtype=torch.{found}.",
            )


def _left_in_float32(view: View) -> Iterator[Problem]:
    buffer = _FLOAT32_BUFFERS.get(str(view.text.get("model_type") or ""))
    if buffer and view.settings and view.dtype != "float32":
        yield Problem(
            buffer,
            "It stays float32 where anything is quantized, and the model computes in "
            f"{view.dtype}: the first forward fails.",
            "Load it with dtype=torch.float32.",
        )


def _unpacked_to_bfloat16(view: View) -> Iterator[Problem]:
    if view.dtype == "bfloat16":
        return
    as_linears = experts_are_linears(view)
    # what is renamed while it loads, as experts and their gates are, keeps the dtype of the file
    is_kept = view.mixtures and not as_linears
    remedy = f"{_ANEW}." if is_kept else f"Load it with dtype=torch.bfloat16. Or: {_ANEW}."
    for entry, scheme in view.coded():
        if entry.is_expert and not as_linears:
            continue  # in stacks, whose products take inputs of another dtype
        if scheme.format in _TO_BFLOAT16:
            yield Problem(
                entry.name,
                f"transformers unpacks {scheme.format} to bfloat16, and the model computes in "
                f"{view.dtype}: the first forward fails.",
                remedy,
            )


def rounded_states_keep_their_dtype(view: View) -> Iterator[Problem]:
    """L5."""
    if view.dtype == "float16":
        return
    named = [name for name in view.headers if name.endswith(".q_zero_point")]
    if named and passed_over(view.config, view.headers):
        return  # what is not rounded stays what it is (L11)
    for name in named:
        yield Problem(
            name.rpartition(".")[0],
            "transformers rounds queries, keys and values with zero points to float16, and the "
            f"model computes in {view.dtype}: the first forward fails.",
            "Quantize attention symmetrically, or load it with dtype=torch.float16.",
        )


def groups_are_whole(view: View) -> Iterator[Problem]:
    """L6."""
    in_stacks = not experts_are_linears(view)
    taken = taken_for_experts(view)
    for entry, scheme in view.coded():
        args, columns = scheme.weights, view.columns(entry, scheme)
        is_stacked = entry.is_expert and in_stacks
        if is_stacked and taken is not None and taken.scheme.weights != args:
            continue  # it is unpacked in other groups (T6)
        if args is None or columns is None or args.strategy not in ("group", "tensor_group"):
            continue
        if args.group and args.group > 0 and columns % args.group:
            yield Problem(
                entry.name,
                f"Its {columns} columns are no whole number of groups of {args.group}: where it is "
                f"unpacked, {'while it loads' if is_stacked else 'at the first forward'}, "
                "transformers refuses it.",
                "Use a group size that divides the columns.",
            )


def tensors_have_their_place(view: View) -> Iterator[Problem]:
    """L9."""
    yield from _packed_zero_points(view)
    yield from _single_numbers(view)


def _packed_zero_points(view: View) -> Iterator[Problem]:
    as_linears = experts_are_linears(view)
    for entry, scheme in view.coded():
        if scheme.weights is None or scheme.weights.symmetric:
            continue  # they are left out (T4)
        zero = entry.own.get("weight_zero_point")
        if zero is None or zero.dtype != "I32" or (entry.is_expert and not as_linears):
            continue  # T6 speaks of experts
        if zero.shape[:1] == (entry.rows,):
            continue
        is_one_row = zero.shape[0] == 1 and zero.numel > 1 and scheme.weights.bits == 4
        if is_one_row and fails_on_one_row_of_words():
            yield Problem(
                entry.name,
                f"Its {entry.rows} rows have their zero points in one row of {zero.numel} words, "
                "which this compressed-tensors fails to unpack: the first forward is an error.",
                "Compress it symmetrically (symmetric: true), or ignore it.",
            )
            continue
        if not refuses_packed_zero_points():
            yield from _untried(entry, "weight_zero_point")
            continue
        yield Problem(
            entry.name,
            f"Its zero points are packed ({list(zero.shape)}), as servers take them, and this "
            f"transformers has a place for {[entry.rows, *zero.shape[1:]]}: it fails to load.",
            f"{_UNPACKED}, or serve it with vLLM."
            if _is_weights_of_one_group(view)
            else "Compress it symmetrically (symmetric: true), or serve it with vLLM.",
        )


def _single_numbers(view: View) -> Iterator[Problem]:
    for entry in view.quantized:
        if entry.is_expert and not experts_are_linears(view):
            continue
        for own, info in entry.own.items():
            is_one = own.endswith("_scale") and info.numel == 1
            if not is_one or len(info.shape) == 1:
                continue
            if own == "weight_scale" and len(info.shape) > 1 and not _is_shared(view, entry):
                continue
            if not refuses_other_shapes():
                yield from _untried(entry, own)
                continue
            yield Problem(
                entry.name,
                f"Its {own} has the shape {list(info.shape)}, and transformers takes [1] alone: it "
                "fails to load.",
                "Store it as [1], or serve it with vLLM.",
            )


def _untried(entry: Entry, own: str) -> Iterator[Problem]:
    if why := why_untried():
        yield Problem(
            entry.name,
            f"Whether the installed transformers has a place for its {own} could not be tried: "
            f"{why}.",
            "Load it with transformers before it is served.",
            Severity.WARNING,
        )


def tables_work(view: View) -> Iterator[Problem]:
    """L10."""
    tables = tables_quantized(view.config) if view.quantized else None
    if tables is None:
        return
    if not tables.are_built:
        split = [name for name, one in view.entries.items() if len(view.own_modules(one)) > 1]
        for name in split or ["quantization_config"]:
            yield Problem(
                name,
                "transformers fails to load the model where anything is quantized: this weight "
                "becomes several there, and its table does not allow for codes."
                if split
                else "transformers fails to build the tables of this class where anything is "
                "quantized.",
                "Serve it with vLLM, or load it with a transformers before 5.21.",
            )
        return
    has_experts = any(entry.is_expert for entry in view.quantized)  # one group is for both
    way = "Put a group of 8-bit floats first whose pattern says 'experts' and matches nothing, or "
    for name, entry in view.entries.items():
        is_plain = "weight" in entry.own and not entry.is_quantized
        if is_plain and not view.is_draft(name) and tables.lose(f"{name}.weight"):
            yield Problem(
                name,
                "It is plain and becomes a part of another weight in transformers, which looks for "
                "codes there where anything is quantized: it is not loaded.",
                "Give the experts 8-bit floats, or serve it with vLLM."
                if has_experts
                else f"{way}serve it with vLLM.",
            )


def _is_shared(view: View, entry: Entry) -> bool:
    """Whether a module has one scale by its scheme, and not by its size."""
    scheme = view.written(entry)
    return scheme is not None and scheme.weights is not None and scheme.weights.strategy == "tensor"


RULES = (
    Rule(
        "L1",
        "embeddings are not packed",
        embeddings_are_unpacked,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L2",
        "weights that initialization names are not packed",
        named_weights_are_unpacked,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L3",
        "encoders are unpacked before they run",
        encoders_are_unpacked,
        server="transformers",
        severity=Severity.WARNING,
    ),
    Rule(
        "L4",
        "weights and buffers have the dtype of the model",
        dtypes_meet,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L5",
        "attention that is rounded with zero points computes in float16",
        rounded_states_keep_their_dtype,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L6",
        "columns are whole groups",
        groups_are_whole,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L9",
        "tensors have the shape of their place",
        tensors_have_their_place,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L10",
        "tables of the class convert what is stored",
        tables_work,
        server="transformers",
        is_limit=True,
    ),
)
