# SPDX-License-Identifier: Apache-2.0
"""Presence: missing, unexpected and misshapen tensors (S23 to S38, S66, S70, S71, C1, C2)."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor

from llmcompressor.verification.expected import expected_tensors
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import PLAIN_FLOATS, Entry, class_names
from llmcompressor.verification.rules.view import (
    TENSORS,
    Misfit,
    Problem,
    View,
    joined,
    rule,
)
from llmcompressor.verification.scheme import Scheme
from llmcompressor.verification.transformers_model import build

__all__ = [
    "KNOWN",
]

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
    """True if words hold whole values, as compressed-tensors packed before 0.18."""
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


@rule("C1", "tensors have the shapes of their scheme", server="")
def _shapes_fit(view: View) -> Iterator[Problem]:
    """Shapes that no rule of a server has a number for."""
    for one in view.misfits:
        is_shape = one.what == "shape" and _is_other(one) and not one.entry.is_expert
        if is_shape or (one.what == "missing" and one.own == "weight_shape"):
            yield Problem(one.entry.name, one.sentence, _COMPRESS)


@rule("S66", "tensors of experts have exact shapes")
def _experts_fit(view: View) -> Iterator[Problem]:
    """Each by its own scheme; that these differ within a mixture is S62."""
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
    for expert in experts.values():
        for name, entry in expert.items():
            codes = next((own for own in ("weight", "weight_packed") if own in entry.own), None)
            if codes is not None:
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


@rule("S23", "no tensor beyond those of the scheme")
def _no_strays(view: View) -> Iterator[Problem]:
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
    for entry, scheme in view.coded:
        inputs = scheme.inputs
        is_unread = inputs is not None and inputs.kind == "float" and not inputs.symmetric
        if is_unread and "input_zero_point" in entry.own:
            yield Problem(
                entry.name,
                "It has an input_zero_point, and there is no place for one beside 8-bit floats.",
                "Quantize inputs symmetrically, or dynamically.",
            )


def _kept_scales(view: View, entry: Entry) -> set[str]:
    """Tensors beside a dense weight whose scheme is written in the format dense."""
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


@rule("S26", "3, 5, 6 and 7 bits are packed densely")
def _old_packing(view: View) -> Iterator[Problem]:
    for one in view.misfits:
        if one.what == "shape" and _is_old_packing(one):
            yield Problem(
                one.entry.name,
                f"{one.sentence} Each word holds whole values, as compressed-tensors packed "
                "before 0.18.",
                "Compress the model with compressed-tensors 0.18 or later.",
            )


@rule("S28", "weight_shape is [2] and true")
def _shape_is_true(view: View) -> Iterator[Problem]:
    for entry, scheme in view.coded:
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
        columns, bits = stored[1], scheme.weights.bits
        widths = (ceil(columns * bits / 32), ceil(columns / (32 // max(bits, 1))))
        if stored[0] != rows or width not in widths:
            yield Problem(
                entry.name,
                f"Its weight_shape says {list(stored)}, its codes have {list(packed.shape)} words.",
                _COMPRESS,
            )


def _read(view: View, entry: Entry, own: str) -> Tensor | None:
    if view.tensors is None or own not in entry.own:
        return None
    return view.tensors(f"{entry.name}.{own}").to(torch.float32).reshape(-1)


@rule("S29", "global scales are divisors", needs=TENSORS)
def _divisors_are_plausible(view: View) -> Iterator[Problem]:
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


@rule("S30", "joined modules share global scales", needs=TENSORS)
def _global_scales_agree(view: View) -> Iterator[Problem]:
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


@rule("S32", "joined modules share static INT8 inputs", needs=TENSORS)
def _static_inputs_agree(view: View) -> Iterator[Problem]:
    """8-bit integers; of floats the largest is taken, which is sound."""
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


@rule("S33", "scales fit float16", needs=TENSORS)
def _scales_survive_float16(view: View) -> Iterator[Problem]:
    if view.dtype != "float16":
        return
    for entry, scheme in view.coded:
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


@rule("S35", "a bias is a float")
def _bias_is_plain(view: View) -> Iterator[Problem]:
    """A bias has one value for each output."""
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


@rule("S36", "blocks fit shards that are joined on disk")
def _fused_on_disk(view: View) -> Iterator[Problem]:
    """Blocks must not cross the shards of what is joined in the file."""
    heads = view.size("num_attention_heads")
    kv_heads = view.size("num_key_value_heads") or heads
    if heads is None or kv_heads is None:
        return
    shares = heads + 2 * kv_heads
    for entry, scheme in view.coded:
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


@rule("S37", "scales are named weight_scale")
def _scales_have_their_name(view: View) -> Iterator[Problem]:
    for entry in view.entries.values():
        for own in ("weight_scale_inv", "scale", "scales", "qweight", "qzeros"):
            if own in entry.own and ("weight" in entry.own or "weight_packed" in entry.own):
                yield Problem(
                    entry.name, f"It has a {own}; the name is weight_scale.", "Rename the tensor."
                )


rule("S24", "channel scales are [N, 1]")(_is("shape", _is_channel, "Store them as a column."))
rule("S25", "scales of a tensor are [1] or []")(_is("shape", _is_scalar, "Store one number."))
rule("S38", "dtypes are those of the scheme")(
    _is("dtype", lambda one: True, "Store it in that dtype: servers convert by value.")
)
rule("S70", "no tensor of a scheme is missing", server="")(
    _is("missing", lambda one: one.own != "weight_shape", _COMPRESS)
)

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?:layers|h|blocks|block))\.(?P<index>\d+)\.(?P<rest>.+)$")
_EXPERTS = re.compile(r"\.experts\.\d+\.")
_PARTS_OF_A_LAYER = 4
_MOST_SHOWN = 4
_REMOVE = "Remove the tensor."
_COPY = "Copy them from the original model."
_TOWERS = re.compile(r"vision|visual|audio|mtp|draft|eagle|speech|encoder")
# The layers of the language model itself, whatever holds them.
_MAIN = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|gpt_neox|backbone|decoder|rwkv)\.)*"
    r"(?:layers|h|blocks|block)"
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", "decoder_num_layers")
_ENCODERS = (*_DECODER_LAYERS, "encoder_layers", "num_encoder_layers")
_ANNOUNCES = re.compile(r"nextn|mtp|n_predict|draft")
_DRAFT = re.compile(
    r"eh_proj|enorm|hnorm|shared_head|embed_tokens|(?:token|hidden)_layernorm|input_proj|mtp|draft"
)
_FIRST_NORM = "word_embeddings_layernorm"
# Norms follow what they norm, or the last one is an option that is off.
_NO_LAST_NORM = frozenset(["bert", "marian", "openai-gpt", "opt", "roberta", "xlm", "xlnet"])
_QPARAM = re.compile(
    r"(?:weight|input|output|[qkv]|[qkv]_proj)_"
    r"(?:packed|scale|scale_inv|zero_point|global_scale|shape|g_idx)"
)
# Buffers that are calculated anew, and the bias of a head that is tied.
_KNOWN_LOOSE = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.\w+|inv_freq|position_ids|embed_scale|final_logits_bias)"
)
# The first layer of T5 and its like has what all of them use.
_SHARED_BY_ALL = "relative_attention_bias"
_HIDDEN_IN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj")
_HIDDEN_OUT = ("o_proj", "down_proj")
# Where hidden sizes are those of the configuration for every module of these names.
_PLAIN_TYPES = frozenset(
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "olmo2",
        "olmoe",
        "granite",
        "smollm3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "deepseek_v3",
        "glm4_moe",
    ]
)


def _stacks(view: View) -> dict[str, dict[int, set[str]]]:
    """Path of a stack of layers → index of a layer → what it holds: modules, and loose tensors."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, entry in view.entries.items():
        if entry.last in view.transforms:
            continue  # one of the layers that share it holds it
        loose = [own for own in entry.own if own != "weight" and not _QPARAM.fullmatch(own)]
        for each in (name, *(f"{name}.{own}" for own in loose)):
            match = _LAYER.match(each)
            if match is not None and not _TOWERS.search(match["stack"]):
                rest = _EXPERTS.sub(".experts.", f".{match['rest']}.")
                stacks[match["stack"]][int(match["index"])].add(rest.strip("."))
    return stacks


def layers_are_complete(view: View) -> Iterator[Problem]:
    """S70: a layer that lacks what its like have, and layers that are not there at all."""
    stacks = _stacks(view)
    for stack, layers in stacks.items():
        counts = _counts(view, stack)
        real = _real(view, stack, layers)
        yield from _incomplete(view, stack, real)
        count = min(counts, default=0)
        if len(stacks) == 1 and len(real) < count and not _has_all(view, count, len(real)):
            lacking = count - len(real)
            # the first of them are enough, and a wrong count may be any number
            missing = (str(index) for index in itertools.count() if index not in layers)
            shown = ", ".join(itertools.islice(missing, min(lacking, _MOST_SHOWN)))
            more = f" and {lacking - _MOST_SHOWN} more" if lacking > _MOST_SHOWN else ""
            yield Problem(stack, f"It lacks the layers {shown}{more} of {count}.", _COPY)


def _has_all(view: View, counted: int, stored: int) -> bool:
    """True if the class finds everything: it may count layers otherwise than they are stored.

    A count that is many times as large is a mistake, and would take long to build.
    """
    if counted > _PARTS_OF_A_LAYER * stored:
        return False
    if view.tensors is not None:
        built = view.built
    else:  # it is only planned
        built = build(view.config, view.plain) if view.plain else None
    return built is not None and not built.missing


def _counts(view: View, stack: str) -> set[int]:
    """The numbers of layers that the configuration may mean by what it says of a stack."""
    is_second = "decoder" in stack and any(key in view.text for key in _ENCODERS)
    keys = _DECODER_LAYERS if is_second else _LAYERS
    return {count for count in map(view.size, keys) if count is not None}


def _is_draft(view: View, stack: str, index: int, own: set[str]) -> bool:
    """True if a layer further on than the configuration counts is one that drafts tokens.

    The configuration announces such layers, or they hold what no ordinary layer does. (What is
    merely not loaded, :meth:`View.is_draft` says: a count that is wrong is not found there.)
    """
    count = max(_counts(view, stack), default=None)
    if count is None or index < count:
        return False
    return index < count + _announced(view) or any(map(_DRAFT.search, own))


def _real(view: View, stack: str, layers: dict[int, set[str]]) -> dict[int, set[str]]:
    """Without the draft layers."""
    return {index: own for index, own in layers.items() if not _is_draft(view, stack, index, own)}


def _announced(view: View) -> int:
    """Number of draft layers that the configuration announces at most."""
    values = [
        value
        for holder in (view.text, view.config)
        for key, value in holder.items()
        if _ANNOUNCES.search(key) and value
    ]
    counts = (value if _is_number(value) else sys.maxsize for value in values)
    return max(counts, default=0)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def layers_are_counted(view: View) -> Iterator[Problem]:
    """C2: no layer beyond those that the configuration counts."""
    for stack, layers in _stacks(view).items():
        counts = _counts(view, stack)
        if not counts or not _MAIN.fullmatch(stack):
            continue
        count = max(counts)
        beyond = sorted(index for index in _real(view, stack, layers) if index >= count)
        if beyond:
            yield Problem(
                stack,
                f"It holds the layers {joined(map(str, beyond))}, and config.json counts {count}.",
                "Correct the count, or remove the layers.",
            )


def _incomplete(view: View, stack: str, layers: dict[int, set[str]]) -> Iterator[Problem]:
    if view.config.get("block_configs"):
        return
    kinds = Counter(frozenset(own) for own in layers.values())
    for index, own in layers.items():
        fuller = [kind for kind in kinds if own < kind]
        if kinds[frozenset(own)] > 1 or not fuller:
            continue
        lacking = _not_built(view, f"{stack}.{index}", min(fuller, key=len) - own, stack)
        if not lacking:
            continue
        having = sum(set(lacking) <= other for other in layers.values())
        # one layer against one: a bias may be too many there as well as missing here
        is_unclear = having < 2 and all(each.rpartition(".")[0] in own for each in lacking)
        yield Problem(
            f"{stack}.{index}",
            f"It lacks {joined(lacking)}, which other layers have.",
            _COPY,
            # layers of other architectures may differ by intention
            None if _is_plain_type(view) and not is_unclear else Severity.WARNING,
        )


def _not_built(view: View, layer: str, lacking: Iterable[str], stack: str) -> list[str]:
    """Without what the class has in other layers and not in this one, and what one layer shares."""
    every = sorted(each for each in lacking if not each.endswith(_SHARED_BY_ALL))
    built = view.built
    if built is None or not built.has_module(layer):
        return every
    return [
        each
        for each in every
        if built.has_module(f"{layer}.{each}")
        or not any(
            name.startswith(f"{stack}.") and f".{each}." in f"{name}." for name in built.shapes
        )
    ]


def _is_plain_type(view: View) -> bool:
    return str(view.text.get("model_type") or "") in _PLAIN_TYPES


@rule("S70", "no module is missing", server="")
def _all_is_there(view: View) -> Iterator[Problem]:
    found = [*layers_are_complete(view), *_ends(view), *_last_norms(view)]
    yield from found
    yield from _missing(view, found)


def _missing(view: View, known: list[Problem]) -> Iterator[Problem]:
    """Tensors of the class of transformers that nothing was loaded into."""
    built = view.built
    if built is None:
        return
    lacking: dict[str, list[str]] = defaultdict(list)
    for name in built.missing:
        module, _, own = name.rpartition(".")
        lacking[module].append(own)
    said = [problem.module for problem in known]
    for module, names in lacking.items():
        if not any(module == each or module.startswith(f"{each}.") for each in said):
            yield Problem(
                module,
                f"It has no {joined(names)}, and {built.name} has.",
                _COPY,
                _of_foreign_code(view),
            )


def _of_foreign_code(view: View) -> Severity | None:
    """A checkpoint with code of its own may be built otherwise than transformers' class."""
    return Severity.WARNING if view.config.get("auto_map") else None


def _is_norm(entry: Entry) -> bool:
    weight = entry.own.get("weight")
    return weight is not None and len(weight.shape) == 1


def _last_norms(view: View) -> Iterator[Problem]:
    """The norm behind the last layer, where layers have norms of their own."""
    is_plain = _is_plain_type(view)
    if not (is_plain or _is_decoder(view)) or str(view.text.get("model_type")) in _NO_LAST_NORM:
        return
    norms = [entry.name for entry in view.entries.values() if _is_norm(entry)]
    for stack in _stacks(view):
        within = any(name.startswith(f"{stack}.") for name in norms)
        parent = stack.rpartition(".")[0]
        beside = {name for name in norms if name.rpartition(".")[0] == parent} - {
            f"{parent}.{_FIRST_NORM}".lstrip(".")
        }
        if _MAIN.fullmatch(stack) and within and not beside:
            yield Problem(
                f"{parent}.norm".lstrip(".") if is_plain else parent,
                "The layers have norms, and behind the last of them there is none.",
                _COPY,
                # others may be built without one
                None if is_plain else Severity.WARNING,
            )


def _is_decoder(view: View) -> bool:
    return any("CausalLM" in name for name in class_names(view.config))


def _ends(view: View) -> Iterator[Problem]:
    """Embeddings and head."""
    kinds = {entry.kind for entry in view.matrices}
    if not view.matrices or view.text.get("vocab_size") is None or not _is_decoder(view):
        return
    says_untied = any("tie_word_embeddings" in holder for holder in (view.text, view.config))
    lacks_head = "head" not in kinds and not view.is_tied and says_untied
    # both may have any name: they are matrices outside of the layers with a row for each token
    rows = view.size("vocab_size")
    tall = sum(
        entry.rows == rows and entry.kind == "linear" and not _LAYER.match(entry.name)
        for entry in view.matrices
    )
    if "embedding" not in kinds and tall <= lacks_head:  # one is the head
        yield Problem("", "The file holds no embedding.", _COPY)
    if lacks_head and not tall:
        yield Problem(
            "lm_head", "The file holds no output head, and embeddings are not tied.", _COPY
        )


@rule("S71", "no tensor is unexpected")
def _nothing_is_strange(view: View) -> Iterator[Problem]:
    for one in view.misfits:
        if one.what == "extra" and one.own not in KNOWN:
            yield Problem(one.entry.name, one.sentence, _REMOVE)
    yield from _loose(view)
    for stack, layers in _stacks(view).items():
        if _MAIN.fullmatch(stack):
            yield from _only_in_one(view, stack, _real(view, stack, layers))


def _loose(view: View) -> Iterator[Problem]:
    """Tensors outside of the layers that no known part of a decoder explains.

    An original may hold such a tensor, so it is an error only for a server that refuses it; and
    architectures that are not known may have some of their own.
    """
    severity = None if view.deployment.server == "vllm" else Severity.WARNING
    severity = severity if _is_plain_type(view) else Severity.NOTE
    for stack in _stacks(view):
        parent = stack.rpartition(".")[0]
        if not _MAIN.fullmatch(stack):
            continue
        holders = {parent}
        if view.text is view.config and _is_decoder(view):  # no towers, no classifier
            holders |= {parent[: match.start()] for match in re.finditer(r"\.|^", parent)}
        for entry in view.entries.values():
            if not holders & {entry.parent, entry.name}:
                continue
            for name in _unexplained(view, entry, is_parent=entry.name in holders):
                said = "Neither the layers nor what stands beside them explains this tensor."
                yield Problem(name, said, _REMOVE, severity)


def _unexplained(view: View, entry: Entry, *, is_parent: bool) -> Iterator[str]:
    for own in entry.own:
        name = f"{entry.name}.{own}" if entry.name else own
        if _TOWERS.search(name) or _QPARAM.fullmatch(own) or _KNOWN_LOOSE.fullmatch(name):
            continue
        if own not in ("weight", "bias"):
            # a parameter by itself; modules other than the plain ones may have any
            strange = is_parent or _is_plain_type(view)
        else:
            is_known = entry.kind in ("embedding", "head") or _is_norm(entry)
            strange = _is_plain_type(view) and not is_known and entry.last not in view.transforms
        if strange:
            yield name


def _only_in_one(view: View, stack: str, layers: dict[int, set[str]]) -> Iterator[Problem]:
    """Tensors of one layer beyond those of all others, which are alike."""
    kinds = Counter(frozenset(own) for own in layers.values())
    if len(kinds) != 2 or min(kinds.values()) > 1 or len(layers) < 3:
        return
    usual, odd = (kind for kind, _ in kinds.most_common())
    for index, own in layers.items():
        # the first or the last layer of some architectures has what serves all
        may_differ = index in (min(layers), max(layers)) and not _is_plain_type(view)
        if own == odd and usual < odd and not may_differ:
            said = f"It has {joined(sorted(odd - usual))}, which no other layer has."
            yield Problem(f"{stack}.{index}", said, _REMOVE, Severity.WARNING)


@rule("C2", "sizes are those of config.json", server="")
def _sizes_are_those_of_the_config(view: View) -> Iterator[Problem]:
    yield from layers_are_counted(view)
    found = list(_wrong_sizes(view))
    yield from found
    yield from _unlike_the_class(view, {problem.module for problem in found})


def _unlike_the_class(view: View, known: set[str]) -> Iterator[Problem]:
    """Shapes that the class of transformers does not take, and numbers that are no floats."""
    built = view.built
    if built is None:
        return
    severity = _of_foreign_code(view)
    for name, (ours, theirs) in built.wrong.items():
        module, _, own = name.rpartition(".")
        if module in known or (_is_coded(view, module) and ours == theirs[::-1]):
            continue  # codes are [out, in] whatever the class has
        yield Problem(
            module,
            f"Its {own} has the shape {list(ours)}, and {built.name} has {list(theirs)} there by "
            "config.json.",
            "Correct config.json, or compress the model anew.",
            severity,
        )
    for name in built.not_floats:
        module, _, own = name.rpartition(".")
        yield Problem(
            module,
            f"Its {own} is stored as {view.headers[name].dtype}, without a scale, and is a float "
            f"in {built.name}.",
            _COPY,
            severity,
        )


def _is_coded(view: View, module: str) -> bool:
    entry = view.entries.get(module)
    return entry is not None and entry.is_quantized


def _wrong_sizes(view: View) -> Iterator[Problem]:
    if not _is_plain_type(view):
        return
    for entry in view.matrices:
        if _TOWERS.search(entry.name):
            continue
        if not entry.is_quantized and "weight" in entry.own:
            columns: int | None = entry.own["weight"].shape[1]
        else:
            scheme = view.written(entry)
            columns = view.columns(entry, scheme) if scheme is not None else None
            if "weight_shape" in entry.own and view.stored_shape(entry) is None:
                columns = None  # words that are not full do not tell, and their content is to come
        yield from _wrong_size(view, entry, columns)


def _wrong_size(view: View, entry: Entry, columns: int | None) -> Iterator[Problem]:
    hidden, vocabulary = view.size("hidden_size"), view.size("vocab_size")
    rows = inner = None
    layer = _LAYER.match(entry.name)
    if entry.kind == "head" or entry.last == "embed_tokens":
        rows, inner = vocabulary, hidden
    elif layer is None or _MAIN.fullmatch(layer["stack"]) is None:
        return
    elif entry.last in _HIDDEN_IN:
        inner = hidden
    elif entry.last in _HIDDEN_OUT:
        rows = hidden
    for what, found, wanted in (("rows", entry.rows, rows), ("columns", columns, inner)):
        if wanted is not None and found is not None and found != wanted:
            yield Problem(
                entry.name,
                f"It has {found} {what}, and config.json says {wanted}.",
                "Correct config.json, or compress the model anew.",
            )
