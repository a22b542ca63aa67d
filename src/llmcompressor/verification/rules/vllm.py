# SPDX-License-Identifier: Apache-2.0
"""Limits of vLLM: schemes, kernels, parallelism, attention, experts, transforms (S21 to S77)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import EXPERT, Entry
from llmcompressor.verification.rules.server_table import Row, notes, served
from llmcompressor.verification.rules.view import (
    CONFIG,
    DEPLOYMENT,
    TENSORS,
    Problem,
    View,
    joined,
    rule,
)
from llmcompressor.verification.scheme import Args, Group, Scheme, compiled, parse_args
from llmcompressor.verification.transformers_model import module_classes

__all__ = ["in_the_forward", "unrotated_states"]


_OTHER_DEVICE = "Serve it on another device, or choose another scheme."
_ROW_PARALLEL = frozenset(
    {"o_proj", "down_proj", "out_proj", "dense", "fc2", "c_proj", "w2", "dense_4h_to_h", "wo"}
)
# Whole on every device: they map to and from the latent of all heads.
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"})
_FEWER = "Use fewer devices, or a group size that divides the shards."
_OF_KERNELS = {
    "S44": ("WNA16", "WNA8Int"),
    "S45": ("W8A8Fp8", "W8A16Fp8"),
    "S46": ("W8A8Int8",),
    "S47": ("NVFP4", "NVFP4A16", "MXFP4", "MXFP8"),
}
"""Rule → names of the rows of the table whose kernels it is about."""


def _schemes(view: View) -> Iterator[tuple[Group, Scheme, Row]]:
    """The groups that vLLM gives to some module, with the rows that they fit."""
    for group in view.used:
        if group.scheme.weights is not None:
            row = served(group.scheme, capability=view.deployment.capability)
            yield group, group.scheme, row


@rule("S21", "the scheme is one that vLLM serves")
def _schemes_are_served(view: View) -> Iterator[Problem]:
    for group, scheme, row in _schemes(view):
        if all("mbed" in target for target in group.targets) or scheme.format == "dense":
            continue
        static = scheme.outputs is not None and scheme.outputs.is_static
        if row.name and static and row.name != "WNA8O8Int":
            yield Problem(
                group.name,
                f"{row.name} takes no scales of outputs: they are unknown tensors.",
                "Leave outputs unquantized.",
            )
        if not row.name:
            yield Problem(group.name, f"{row.why(scheme)} It is {scheme}.", row.remedy)


def _noted(view: View, number: str) -> Iterator[Problem]:
    capability = view.deployment.capability
    for group, scheme, _ in _schemes(view):
        for note in notes(number, scheme, capability):
            is_error = note.is_error and capability is not None
            severity = None if is_error else Severity.NOTE
            yield Problem(group.name, note.text(scheme), note.remedy, severity)


@rule("S22", "what vLLM computes instead", needs=DEPLOYMENT, severity=Severity.NOTE)
def _substitutions(view: View) -> Iterator[Problem]:
    capability = view.deployment.capability
    for group, scheme, row in _schemes(view):
        is_below = row.native and (capability is None or capability < row.native)
        if is_below and scheme.inputs is not None:
            where = "below" if capability is None else f"at {capability}, below"
            yield Problem(
                group.name,
                f"On a device {where} capability {row.native}, {row.name} runs weight-only.",
                f"Serve it from capability {row.native} on.",
            )
    yield from _noted(view, "S22")


@rule("S34", "blocks are 128 by 128", needs=CONFIG, severity=Severity.NOTE)
def _blocks_are_128(view: View) -> Iterator[Problem]:
    yield from _noted(view, "S34")


def _kernels(number: str, view: View) -> Iterator[Problem]:
    """The least capability of a scheme against that of the device, and its notes."""
    capability = view.deployment.capability
    for group, _, row in _schemes(view):
        if row.name in _OF_KERNELS[number] and capability is not None and capability < row.least:
            yield Problem(
                group.name,
                f"{row.name} needs a device of capability {row.least}; this one has {capability}.",
                _OTHER_DEVICE,
            )
    yield from _noted(view, number)


rule("S44", "weight-only integers have a kernel", needs=DEPLOYMENT)(partial(_kernels, "S44"))
rule("S45", "8-bit floats have a kernel", needs=DEPLOYMENT)(partial(_kernels, "S45"))
rule("S46", "8-bit integers have a kernel", needs=DEPLOYMENT)(partial(_kernels, "S46"))
rule("S47", "4-bit floats have a kernel", needs=DEPLOYMENT)(partial(_kernels, "S47"))


@rule("S48", "4-bit integers with float inputs have a kernel", needs=DEPLOYMENT)
def _four_bit_integers_with_floats(view: View) -> Iterator[Problem]:
    is_known = view.deployment.capability is not None
    severity = None if is_known else Severity.NOTE
    for group, _, row in _schemes(view):
        if row.name != "W4A8Fp8":
            continue
        what = "4-bit integers with 8-bit float inputs"
        if not is_known:
            yield Problem(group.name, f"{what} run on SM90 alone.", _OTHER_DEVICE, severity)
        if view.dtype != "bfloat16":
            said = f"{what} give bfloat16, not {view.dtype}."
            yield Problem(group.name, said, "Serve it in bfloat16.", severity)
        for share in _shares(view):
            if view.choice(share.entry).group == group and (share.inner % 128 or share.outer % 128):
                said = (
                    f"Split over {share.parts} devices it is {share.outer} by {share.inner}; the "
                    "kernel takes multiples of 128."
                )
                remedy = "Use fewer devices, or choose another scheme."
                yield share.problem(view, said, remedy, Severity.NOTE if not is_known else None)


@dataclass(frozen=True)
class _Share:
    """A coded Linear as one of several devices has it.

    Attributes:
        entry: the module.
        scheme: its scheme.
        weights: the arguments of its weights.
        columns: of the whole.
        tp: how many devices there are.
        parts: into how many parts it is split: keys and values at most one for each head.
    """

    entry: Entry
    scheme: Scheme
    weights: Args
    columns: int
    tp: int
    parts: int

    @property
    def by_columns(self) -> bool:
        """True if its inputs are split, rather than its outputs."""
        return self.entry.last in _ROW_PARALLEL

    @property
    def rows(self) -> int:
        """Rows of the whole."""
        return self.entry.rows or 0

    @property
    def inner(self) -> int:
        """Columns of the share."""
        return self.columns // self.parts if self.by_columns else self.columns

    @property
    def outer(self) -> int:
        """Rows of the share."""
        return self.rows if self.by_columns else self.rows // self.parts

    @property
    def is_whole(self) -> bool:
        """True if the split leaves no remainder."""
        return (self.columns if self.by_columns else self.rows) % self.parts == 0

    def size(self, what: str = "columns") -> str:
        """The rows or columns that are split, for a message."""
        size = self.columns if what == "columns" else self.rows
        is_split = self.parts > 1 and (what == "columns") == self.by_columns
        return f"Its {size} {what}" + (f" split over {self.parts} devices" if is_split else "")

    def problem(
        self, view: View, said: str, remedy: str = _FEWER, severity: Severity | None = None
    ) -> Problem:
        """A breach; an error only if the split was asked for, or there is none."""
        split = self.parts if self.by_columns or self.parts == 1 else self.tp
        severity = severity or view.deployment.tp_severity(split)
        return Problem(self.entry.name, said, remedy, severity)


def _parts_of(view: View, entry: Entry, tp: int) -> int:
    heads = view.size("num_key_value_heads")
    if entry.last in _REPLICATED:
        return 1
    return heads if entry.last in ("k_proj", "v_proj") and heads is not None and heads < tp else tp


def _shares(view: View, *, with_experts: bool = False) -> Iterator[_Share]:
    """Coded Linears, split over each number of devices."""
    for entry, scheme in view.coded:
        columns = view.columns(entry, scheme)
        is_left_out = entry.is_expert and not with_experts
        if scheme.weights is None or columns is None or is_left_out:
            continue
        for tp in view.deployment.tp if entry.kind in ("linear", "gate") else ():
            yield _Share(entry, scheme, scheme.weights, columns, tp, _parts_of(view, entry, tp))


def _divide(view: View, misfit: Callable[[_Share], str]) -> Iterator[Problem]:
    """The first number of devices for each Linear that leaves a misfit."""
    told = set()
    for share in _shares(view):
        said = "" if share.entry.name in told else misfit(share)
        if said:
            told.add(share.entry.name)
            yield share.problem(view, said)


def _misfit_of_groups(share: _Share, *, of_floats: bool) -> str:
    """Columns that are no whole number of groups."""
    args = share.weights
    is_float = args.is_nvfp4 or args.is_mx
    is_meant = is_float if of_floats else (args.kind, args.strategy) == ("int", "group")
    whole = share.columns % share.parts == 0 or not share.by_columns
    if not is_meant or not args.group or not whole or share.inner % args.group == 0:
        return ""
    unseen = ", which vLLM does not notice" if of_floats else ""
    return f"{share.size()} are no whole number of groups of {args.group}{unseen}."


def _misfit_of_words(share: _Share) -> str:
    """Shares that end within a word of 32 bits."""
    args, bits = share.weights, share.weights.bits
    if share.scheme.format != "pack-quantized" or not share.is_whole:
        return ""
    if share.by_columns:
        is_torn = share.parts > 1 and args.strategy == "channel" and share.inner * bits % 32
        return f"{share.size()} do not end at a word of 32 bits." if is_torn else ""
    is_torn = not args.symmetric and share.outer * bits % 32
    what = "have zero points that do not end at a word of 32 bits"
    return f"{share.size('rows')} {what}." if is_torn else ""


def _misfit_of_blocks(share: _Share, inside: frozenset[str]) -> str:
    """Shares that end within a block of floats."""
    args = share.weights
    if (args.kind, args.strategy) != ("float", "block") or args.block is None or not share.is_whole:
        return ""
    what = "columns" if share.by_columns else "rows"
    size, own = (share.inner, args.block[1]) if share.by_columns else (share.outer, args.block[0])
    is_split = share.parts > 1 or (not share.by_columns and share.entry.name in inside)
    is_torn = is_split and size % max(own, 1)
    return f"{share.size(what)} are no whole number of blocks of {own}." if is_torn else ""


@rule("S39", "shards hold whole groups", needs=DEPLOYMENT)
def _groups_divide(view: View) -> Iterator[Problem]:
    yield from _divide(view, partial(_misfit_of_groups, of_floats=False))


@rule("S40", "shards end at whole words", needs=DEPLOYMENT)
def _words_divide(view: View) -> Iterator[Problem]:
    yield from _divide(view, _misfit_of_words)


@rule("S41", "shards hold whole blocks", needs=DEPLOYMENT)
def _blocks_divide(view: View) -> Iterator[Problem]:
    merged = {one.name for shards in view.joined.values() for one in shards[:-1]}
    yield from _divide(view, partial(_misfit_of_blocks, inside=frozenset(merged)))


@rule("S42", "shards hold whole groups of floats", needs=DEPLOYMENT)
def _float_groups_divide(view: View) -> Iterator[Problem]:
    yield from _divide(view, partial(_misfit_of_groups, of_floats=True))


@rule("S43", "heads and sizes divide", needs=DEPLOYMENT)
def _sizes_divide(view: View) -> Iterator[Problem]:
    # where nobody asked, it is the model itself that cannot be split so, quantized or not
    severity = None if view.deployment.is_tp_given else Severity.NOTE
    heads = view.size("num_attention_heads")
    for tp in view.deployment.tp if heads is not None else ():
        if heads and heads % tp:
            yield Problem(
                "num_attention_heads",
                f"{heads} heads cannot be split over {tp} devices.",
                "Use a number of devices that divides the heads.",
                severity,
            )
    told = set()
    for share in _shares(view, with_experts=True):
        entry = share.entry
        if entry.kind == "linear" and not share.is_whole and entry.name not in told:
            told.add(entry.name)
            what = share.size("columns" if share.by_columns else "rows")
            remedy = "Use a number of devices that divides it."
            yield Problem(entry.name, f"{what} leave a remainder.", remedy, severity)


_SCALES = re.compile(r"(?P<base>[qkv])_(?:scale|zero_point)$")
_ACCEPTED = re.compile(
    r".*self_attn\.[qkv]_(?:scale|zero_point)$"
    r"|.*\.self_attn\.(?:[kv]_proj|qkv_proj)\.[kv]_scale$"
    r"|.*\.mixer\.[kv]_proj\.[kv]_scale$|.*\.attn\.[qkv]_scale$|.*\.kv_scale$"
)
_OLD = re.compile(r".*\.[kv]_proj\.output_scale$")


def _cache(view: View) -> Args | None:
    return parse_args(view.settings.get("kv_cache_scheme"))


@rule("S49", "the cache's scheme is served", needs=CONFIG)
def _cache_scheme_is_served(view: View) -> Iterator[Problem]:
    scheme = Scheme(_cache(view))
    row = served(scheme, "cache")
    if scheme.weights is not None and not row.name:
        yield Problem("kv_cache_scheme", row.why(scheme), row.remedy)


@rule("S50", "stored scales of the cache have a scheme", severity=Severity.WARNING)
def _scales_have_a_scheme(view: View) -> Iterator[Problem]:
    if _cache(view) is not None or any(group.is_attention for group in view.groups):
        return
    found = [name for name in view.headers if _SCALES.fullmatch(name.rpartition(".")[2])]
    if found:
        yield Problem(
            "kv_cache_scheme",
            f"There is none, and {joined(found)} are stored: the cache is not quantized unless "
            "a server is told so.",
            "Write the kv_cache_scheme that they were calibrated for, or remove the scales.",
        )


@rule("S51", "scales of the cache have accepted names")
def _scales_have_names(view: View) -> Iterator[Problem]:
    args = _cache(view)
    for name in view.headers:
        if args is not None and _OLD.match(name):
            yield Problem(
                name,
                "Scales of the cache under this name are dropped; 1.0 is used.",
                "Name it k_scale or v_scale on the attention module.",
            )
        elif _SCALES.search(name.rpartition(".")[2]) and not _ACCEPTED.match(name):
            yield Problem(
                name,
                "No attention module of vLLM takes a scale from this path.",
                "Name it ...self_attn.k_scale.",
                Severity.WARNING,
            )


@rule("S52", "scales of the cache have accepted shapes")
def _scales_have_shapes(view: View) -> Iterator[Problem]:
    args = _cache(view)
    if args is None:
        return
    heads = {"q": view.size("num_attention_heads")}
    heads["k"] = heads["v"] = view.size("num_key_value_heads") or heads["q"]
    for name, info in view.headers.items():
        match = _SCALES.fullmatch(name.rpartition(".")[2])
        if match is None or not name.endswith("_scale"):
            continue
        count = heads[match["base"]]
        if args.strategy == "attn_head" and count is not None and info.numel != count:
            yield Problem(
                name, f"It has {info.numel} scales for {count} heads.", "Calibrate the cache anew."
            )
        elif args.strategy == "tensor" and info.shape not in ((1,), ()):
            yield Problem(
                name, f"It has the shape {list(info.shape)}, not [1].", "Calibrate the cache anew."
            )


@rule("S53", "scales per head", needs=DEPLOYMENT)
def _heads_need_groups(view: View) -> Iterator[Problem]:
    args = _cache(view)
    if args is None or args.strategy != "attn_head":
        return
    if "config_groups" not in view.settings:
        yield Problem(
            "kv_cache_scheme",
            "Scales per head need the key config_groups in the configuration.",
            'Write "config_groups": {}.',
        )
    yield Problem(
        "kv_cache_scheme",
        "Scales per head are served by the FlashAttention backend alone.",
        "Serve it with that backend.",
        Severity.NOTE,
    )


@rule("S54", "scales of the cache are there")
def _scales_are_there(view: View) -> Iterator[Problem]:
    args = _cache(view)
    if args is None or not args.is_static:
        return
    for path in view.attentions:
        if "mtp" in path or view.is_draft(path):
            continue
        missing = [own for own in ("k_scale", "v_scale") if not _has_scale(view, path, own)]
        if missing:
            yield Problem(
                path, f"It has no {joined(missing)}; 1.0 is used.", "Calibrate the cache anew."
            )
    if view.tensors is None:
        return
    yield from _other_than_read(view)
    for name in view.headers:
        own = name.rpartition(".")[2]
        if not (_SCALES.fullmatch(own) and own.endswith("_scale")):
            continue
        scale = view.tensors(name).to(torch.float32)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            yield Problem(
                name, "It is not finite and positive, and is used all the same.", "Calibrate anew."
            )
        elif bool((scale == 1).all()):
            yield Problem(
                name,
                "It is exactly 1, as if it had never been calibrated.",
                "Calibrate anew.",
                Severity.WARNING,
            )


def _has_scale(view: View, path: str, own: str) -> bool:
    base = own[0]
    places = (f"{path}.{own}", f"{path}.{base}_proj.{own}", f"{path}.qkv_proj.{own}")
    return any(place in view.headers for place in (*places, f"{path}.attn.{own}"))


def _other_than_read(view: View) -> Iterator[Problem]:
    """Scales of layers that share keys and values, beside those of the layers that make them."""
    assert view.tensors is not None
    for path, source in view.sharing.items():
        for own in ("k_scale", "v_scale"):
            name, other = f"{path}.{own}", f"{source}.{own}"
            if not {name, other} <= view.headers.keys():
                continue
            if not torch.equal(view.tensors(name).reshape(-1), view.tensors(other).reshape(-1)):
                yield Problem(
                    name,
                    f"The keys and values that it reads are those of {source}, whose {own} is "
                    "another one.",
                    "Store the same for both.",
                )


@rule("S55", "latent attention has no scales", severity=Severity.WARNING)
def _latent_attention(view: View) -> Iterator[Problem]:
    if _cache(view) is not None and view.family.is_mla:
        yield Problem(
            "kv_cache_scheme",
            "Attention with a latent cache takes no scales: it has no effect.",
            "Leave kv_cache_scheme out.",
        )


def _of_kind(view: View, kind: str) -> Iterator[Entry]:
    yield from (entry for entry in view.matrices if entry.kind == kind)


@rule("S57", "embeddings are packed integers")
def _embeddings_are_served(view: View) -> Iterator[Problem]:
    for entry in _of_kind(view, "embedding"):
        scheme = view.scheme(entry)
        if entry.is_quantized and not view.family.quantizes_embedding:
            said = "vLLM builds this embedding unquantized."
            yield Problem(entry.name, said, "Leave it unquantized.")
        elif entry.is_quantized and scheme is not None and scheme.weights is not None:
            row, columns = served(scheme, "embedding"), view.columns(entry, scheme) or 0
            bits, group = scheme.weights.bits, scheme.weights.group
            reason = "" if row.name else row.why(scheme)
            if row.name and (columns * bits % 32 or (group and columns % group)):
                reason = f"Its {columns} columns are no whole number of words or groups."
            if reason:
                remedy = (
                    "Quantize it to symmetric packed integers of 2, 4 or 8 bits, or not at all."
                )
                yield Problem(entry.name, reason, remedy)


@rule("S58", "router gates stay plain and ignored")
def _gates_are_plain(view: View) -> Iterator[Problem]:
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


@rule("S59", "a quantized head is served")
def _heads_are_served(view: View) -> Iterator[Problem]:
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
        elif scheme is not None and not (row := served(scheme, "head")).name:
            yield Problem(entry.name, row.reason, row.remedy)
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


@rule("S60", "tied embeddings stay plain")
def _tied_embeddings_are_plain(view: View) -> Iterator[Problem]:
    if not view.is_tied:
        return
    for entry in view.quantized:
        if entry.kind == "head" or (entry.kind == "embedding" and "position" not in entry.name):
            yield Problem(
                entry.name,
                "It is quantized, and the configuration ties input and output embeddings.",
                "Leave both unquantized, or write tie_word_embeddings: false and store both.",
            )


@rule("S61", "draft layers are there and ignored")
def _draft_layers(view: View) -> Iterator[Problem]:
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


_STACK = re.compile(r".*\.experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj)(?:[._].*)?$")
_OWN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj")
_CLOSE = 1e-5


@rule("S62", "experts of a layer have one scheme")
def _experts_are_alike(view: View) -> Iterator[Problem]:
    for path, experts in view.mixtures.items():
        every = [entry for own in experts.values() for entry in own.values()]
        forms = {entry.is_quantized for entry in every}
        if len(forms) > 1:
            plain = [entry.name for entry in every if not entry.is_quantized]
            coded = [entry.name for entry in every if entry.is_quantized]
            few, what = (
                (plain, "not quantized") if len(plain) <= len(coded) else (coded, "quantized")
            )
            yield Problem(
                path,
                f"{joined(few, 2)} are {what}, unlike the rest; expert 0 decides for all.",
                "Quantize all experts of a layer alike, or none.",
            )
        elif view.choice(every[0]).mixed:
            yield Problem(
                path,
                "Of expert 0's projections some are ignored and some are not.",
                "Ignore all experts of a layer or none.",
            )
        schemes = view.expert_schemes[path]
        if len(schemes) > 1:
            examples = [next(iter(having.values())).name for having in schemes.values()]
            yield Problem(
                path,
                f"Its projections have different schemes ({joined(examples, 2)}).",
                "Quantize all experts of a layer alike, in groups that divide the columns of each.",
            )


def _mixture_groups(view: View) -> Iterator[tuple[str, Entry, Group, Args]]:
    """A quantized projection of each mixture, with its group."""
    for path, experts in view.mixtures.items():
        for own in experts.values():
            entry = next(iter(own.values()))
            group = view.choice(entry).group
            if entry.is_quantized and group is not None and group.scheme.weights is not None:
                yield path, entry, group, group.scheme.weights
            break


@rule("S63", "experts have a scheme that is served")
def _expert_schemes(view: View) -> Iterator[Problem]:
    seen = set()
    for path, _, group, _ in _mixture_groups(view):
        row = served(group.scheme, "experts")
        is_unknown = row.name and view.deployment.capability is None  # it may be another device
        if row.reason and group.name not in seen:
            seen.add(group.name)
            said = f"{row.why(group.scheme)} {group.name} is {group.scheme}."
            severity = Severity.WARNING if is_unknown else None
            yield Problem(path, said, "Choose another.", severity)


def _sizes(view: View, path: str, entry: Entry, group: Group) -> tuple[int, int] | None:
    """Hidden and intermediate size of a mixture's experts."""
    columns, rows = view.columns(entry, view.written(entry) or group.scheme), entry.rows
    if columns is None or rows is None:
        return None
    is_down = entry.last in ("down_proj", "w2")
    return (rows, columns) if is_down else (columns, rows)


@rule("S64", "integer experts divide", needs=DEPLOYMENT)
def _integer_experts_divide(view: View) -> Iterator[Problem]:
    for path, entry, group, weights in _mixture_groups(view):
        sizes = _sizes(view, path, entry, group)
        if weights.kind != "int" or sizes is None or group.scheme.format != "pack-quantized":
            continue
        hidden, inner = sizes
        if weights.group and hidden % weights.group:
            yield Problem(
                path, f"Its {hidden} inputs are no whole number of groups.", "Use another group."
            )
        for tp in view.deployment.tp:
            word = max(32 // max(weights.bits, 1), 1)
            crossing = weights.group and inner % tp == 0 and (inner // tp) % weights.group
            torn = not weights.symmetric and (2 * inner // tp % word or hidden % word)
            if crossing or torn:
                yield Problem(
                    path,
                    f"Experts of {inner} split over {tp} devices hold no whole groups or words.",
                    "Use fewer devices, or expert parallelism.",
                    view.deployment.tp_severity(tp),
                )
                break


@rule("S65", "float experts divide", needs=DEPLOYMENT)
def _float_experts_divide(view: View) -> Iterator[Problem]:
    for path, entry, group, weights in _mixture_groups(view):
        sizes = _sizes(view, path, entry, group)
        is_fp4 = weights.is_nvfp4 or weights.is_mx
        if sizes is None or not (is_fp4 or (weights.block and weights.kind == "float")):
            continue
        hidden, inner = sizes
        for tp in view.deployment.tp:
            rows, columns = weights.block or (weights.group, weights.group)
            share = inner // tp
            misfit = share % max(rows, 1) or (tp > 1 and share % max(columns, 1))
            if misfit or (is_fp4 and hidden % weights.group):
                yield Problem(
                    path,
                    f"Experts of {inner} split over {tp} devices hold no whole groups or blocks.",
                    "Use fewer devices, or another scheme.",
                    view.deployment.tp_severity(tp),
                )
                break


@rule("S67", "gate and up share scales", needs=TENSORS)
def _gate_and_up_agree(view: View) -> Iterator[Problem]:
    tensors = view.tensors
    if tensors is None:
        return
    for path, gate, up in view.expert_pairs:
        for own in ("weight_global_scale", "input_global_scale", "input_scale"):
            if own not in gate.own or own not in up.own:
                continue
            first = tensors(f"{gate.name}.{own}").to(torch.float32).reshape(-1)
            second = tensors(f"{up.name}.{own}").to(torch.float32).reshape(-1)
            if first.shape == second.shape and bool(((first - second).abs() <= _CLOSE).all()):
                continue
            yield Problem(
                path,
                f"Its gate and up have different {own} ({_one(first)} and {_one(second)}).",
                "Let them share one.",
            )


def _one(value: torch.Tensor) -> str:
    return f"{float(value[0]):.6g}" if value.numel() else "nothing"


@rule("S68", "all experts are there")
def _experts_are_named(view: View) -> Iterator[Problem]:
    for path, experts in view.mixtures.items():
        fewest, most = _numbers(view, path, experts)
        last = max(experts)
        count = max(fewest or 0, last + 1) if most is None or last >= most else fewest
        missing = [index for index in range(count or 0) if index not in experts]
        if missing:
            yield Problem(
                path,
                f"It lacks the experts {joined(map(str, missing))} of {count}; servers do not "
                "notice.",
                "Copy them from the original model.",
            )
        elif most is not None and last >= most:
            yield Problem(
                path, f"It holds {last + 1} experts, the configuration says {most}.", "Correct it."
            )
        sets = sorted((set(own) for own in experts.values()), key=len)
        usual = sets[-1]
        for index, own in experts.items():
            if set(own) < usual and (fewest is None or index < fewest):
                yield Problem(
                    f"{path}.{index}",
                    f"It has no {joined(sorted(usual - set(own)))}.",
                    "Copy it from the original model.",
                )
        strange = sorted(usual - set(_OWN))
        if strange:
            yield Problem(
                path,
                f"Its projections are named {joined(strange)}, which servers do not know.",
                "Name them gate_proj, up_proj and down_proj.",
                Severity.WARNING,
            )


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _numbers(
    view: View, path: str, experts: Mapping[int, Mapping[str, Entry]]
) -> tuple[int | None, int | None]:
    """Number of experts that a list must have, and that it may have.

    Several mixtures may share one list, and only some of its places be whole experts, as where
    others pass on what they get. The class knows, and else there is what the configuration says.
    """
    owns = {own for each in experts.values() for own in each}
    classes = module_classes(view.config)
    found = [classes.experts(f"{path}.0.{own}") for own in owns] if classes is not None else []
    numbers = [number for number in found if number is not None]
    if not numbers or len(numbers) < len(owns):
        said = map(view.text.get, _EXPERTS)
        count = next((one for one in said if isinstance(one, int) and one > 0), None)
        return count, count
    return min(numbers), max(numbers)


@rule("S69", "quantized experts are stored one by one")
def _no_quantized_stacks(view: View) -> Iterator[Problem]:
    for name, info in view.headers.items():
        if not _STACK.match(name) or len(info.shape) < 2 or EXPERT.match(name.rpartition(".")[0]):
            continue
        is_coded = info.dtype in ("I8", "U8", "I32", "F8_E4M3") or name.endswith("_scale")
        if is_coded and "scale" not in name.rpartition(".")[2][:5]:
            yield Problem(
                name,
                "Quantized experts are stored as one stack, which servers do not take.",
                "Store each expert by itself.",
            )
    for path, experts in view.mixtures.items():
        fused = [own["gate_up_proj"] for own in experts.values() if "gate_up_proj" in own]
        if fused and fused[0].is_quantized and "weight_global_scale" in fused[0].own:
            yield Problem(
                path,
                "Its experts hold gate and up in one matrix with one global scale.",
                "Store gate and up by themselves.",
            )


_KEYS = frozenset({"type", "apply", "randomize", "requires_grad", "block_size", "head_dim"})
_KEYS_MORE = frozenset({"precision"})
_APPLY_KEYS = frozenset({"targets", "location", "inverse", "ignore"})
_ONLINE = ("input", "output")
_CACHE = ("k_cache", "q_attn")


def _transforms(view: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    settings = view.settings.get("transform_config")
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    for name, raw in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(raw, Mapping):
            yield str(name), raw


def _applied(view: View) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for name, raw in _transforms(view):
        applied = raw.get("apply")
        for one in applied if isinstance(applied, list) else ():
            if isinstance(one, Mapping):
                yield name, raw, one


def _reached(view: View, one: Mapping[str, Any]) -> list[Entry]:
    """The matrices that an application names."""
    targets = one.get("targets")
    texts = [targets] if isinstance(targets, str) else list(targets or ())
    ignored = one.get("ignore")
    left_out = [ignored] if isinstance(ignored, str) else list(ignored or ())
    return [
        entry
        for entry in view.matrices
        if any(_names(text, entry) for text in texts)
        and not any(_names(text, entry) for text in left_out)
    ]


def _names(text: str, entry: Entry) -> bool:
    expression = compiled(text)
    if expression is not None:
        return expression.match(entry.name) is not None
    return text == entry.name or (text == "Linear" and entry.kind in ("linear", "head"))


@rule("S73", "transforms have known keys and places", needs=CONFIG)
def _transforms_are_read(view: View) -> Iterator[Problem]:
    for name, raw in _transforms(view):
        unknown = sorted(set(raw) - _KEYS - _KEYS_MORE)
        if unknown:
            yield Problem(name, f"It has keys that are refused: {joined(unknown)}.", "Remove them.")
    for name, _, one in _applied(view):
        unknown = sorted(set(one) - _APPLY_KEYS)
        if unknown:
            yield Problem(name, f"It has keys that are refused: {joined(unknown)}.", "Remove them.")
        location = str(one.get("location"))
        if location in _CACHE and _reached(view, one):
            yield Problem(
                name,
                f"The location {location} raises for Linear modules.",
                "Leave the rotation of queries and keys out.",
            )
    yield from _never_applied(view)


def _never_applied(view: View) -> Iterator[Problem]:
    """Queries and keys that are turned in the forward; all servers leave them as they are."""
    missed = unrotated_states(view)
    for name, raw in _transforms(view):
        places = [str(one.get("location")) for one in _of_cache(raw) if not _reached(view, one)]
        if name in missed:
            yield Problem(
                name,
                f"Its locations ({joined(places)}) are never applied, silently: {missed[name]}.",
                "Leave the rotation of queries and keys out.",
            )
        elif places:
            yield Problem(
                name,
                f"Its locations ({joined(places)}) are never applied. That changes nothing: "
                "queries and keys are turned alike, and keys are not quantized.",
                "Leave the rotation of queries and keys out.",
                Severity.NOTE,
            )


def unrotated_states(view: View, *, are_rounded: bool = True) -> dict[str, str]:
    """Transforms of queries and keys without which outputs are others, each with the reason.

    Args:
        view: the checkpoint.
        are_rounded: the server rounds the states that the configuration names.
    """
    found = {}
    attention = [group.scheme for group in view.groups if group.scheme.weights is None]
    keys_are_rounded = are_rounded and (
        bool(view.settings.get("kv_cache_scheme"))
        or any(scheme.inputs is not None for scheme in attention)
    )
    for name, raw in _transforms(view):
        turned = [one for one in _of_cache(raw) if not _reached(view, one)]
        if turned and (raw.get("randomize") or not _are_alike(turned)):
            found[name] = "queries and keys are not turned alike, so outputs are wrong"
        elif turned and keys_are_rounded:
            found[name] = "keys are quantized with the scales of turned ones"
    return found


def _of_cache(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    applied = raw.get("apply")
    each = applied if isinstance(applied, list) else ()
    return [one for one in each if isinstance(one, Mapping) and one.get("location") in _CACHE]


def _are_alike(turned: list[Mapping[str, Any]]) -> bool:
    """True if q and k have the same matrix at the same places, so that q k^T is what it was."""
    forms = [[one.get(key) or None for key in ("targets", "ignore", "inverse")] for one in turned]
    both = sorted(str(one.get("location")) for one in turned) == sorted(_CACHE)
    return both and forms[0] == forms[1]


@rule("S74", "online transforms are on plain Linears")
def _transforms_reach_linears(view: View) -> Iterator[Problem]:
    for name, _, one in _applied(view):
        if one.get("location") not in _ONLINE:
            continue
        lost = [
            entry.name
            for entry in _reached(view, one)
            if entry.is_expert or entry.kind in ("head", "embedding") or view.is_plain(entry)
        ]
        if lost:
            yield Problem(
                name,
                f"It is online on {joined(lost)}, where it is silently not applied.",
                "Fuse it into the weights, or leave these modules out.",
            )


@rule("S75", "one device, no bias, whole inputs", needs=DEPLOYMENT)
def _transforms_restrict(view: View) -> Iterator[Problem]:
    online = [each for each in _applied(view) if each[2].get("location") in _ONLINE]
    for tp in view.deployment.tp:
        if online and tp > 1:
            yield Problem(
                online[0][0],
                f"Online transforms are not served over {tp} devices.",
                "Serve it on one device.",
                view.deployment.tp_severity(tp),
            )
            break
    for name, _, one in online:
        reached = _reached(view, one)
        biased = [entry.name for entry in reached if "bias" in entry.own]
        if biased:
            yield Problem(
                name,
                f"It is online on {joined(biased)}, which have a bias.",
                "Leave these modules out.",
            )
        if one.get("location") == "input":
            yield from _partly(view, name, reached)


def _partly(view: View, name: str, reached: list[Entry]) -> Iterator[Problem]:
    names = {entry.name for entry in reached}
    for path, shards in view.joined.items():
        with_it = [shard for shard in shards if shard.name in names]
        if with_it and len(with_it) < len(shards):
            yield Problem(
                path,
                f"Only some of its shards have the input transform {name}.",
                "Transform the input of all of them.",
            )


@rule("S76", "transforms have their tensors")
def _transforms_have_tensors(view: View) -> Iterator[Problem]:
    """Modules with one matrix share it, so that one of them may hold it for all."""
    for name, raw, one in _applied(view):
        location = str(one.get("location"))
        if location not in _ONLINE:
            continue
        size = raw.get("head_dim") or raw.get("block_size")
        stored = [
            (entry, view.headers.get(f"{entry.name}.{name}_{location}.weight"))
            for entry in _reached(view, one)
        ]
        held = {_channels(view, entry, location) for entry, info in stored if info is not None}
        for entry, info in stored:
            if info is None and (held if size else _channels(view, entry, location) in held):
                continue
            if info is None:
                yield Problem(
                    entry.name, f"It has no {name}_{location}.weight.", "Compress it anew."
                )
            elif len(info.shape) != 2 or (size and info.shape != (size, size)):
                yield Problem(
                    entry.name,
                    f"Its {name}_{location}.weight has the shape {list(info.shape)}.",
                    "Compress it anew.",
                )


def _channels(view: View, entry: Entry, location: str) -> int | None:
    """Width of a module's input or output, however its weight is stored."""
    if location == "output":
        return entry.rows
    scheme = view.written(entry) if entry.is_quantized else None
    if scheme is not None:
        return view.columns(entry, scheme)
    weight = entry.own.get("weight")
    return None if weight is None or len(weight.shape) != 2 else weight.shape[1]


def in_the_forward(view: View) -> list[str]:
    """The rotations that a server has to make while it runs."""
    online = (name for name, _, one in _applied(view) if one.get("location") in _ONLINE)
    return list(dict.fromkeys(online))
