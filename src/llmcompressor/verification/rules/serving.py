# SPDX-License-Identifier: Apache-2.0
"""Limits of vLLM and SGLang: the rows of :mod:`server_table`, asked about a checkpoint.

Schemes and kernels, shares of several devices, the cache, experts, transforms. What is no row here
compares several modules with each other, or reads a tensor.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import (
    EXPERT,
    PLAIN_FLOATS,
    Entry,
    family_of,
    part_rows,
)
from llmcompressor.verification.rules.server_table import (
    LIMITS,
    SPLITS,
    Row,
    Split,
    notes,
    served,
)
from llmcompressor.verification.rules.view import Problem, View, joined
from llmcompressor.verification.scheme import (
    NAME_METHOD,
    OURS,
    Args,
    Group,
    Scheme,
    compiled,
    parse_args,
)
from llmcompressor.verification.transformers_model import module_classes

NOTE, WARNING = Severity.NOTE, Severity.WARNING
_OTHER_DEVICE = "Serve it on another device, or choose another scheme."
_ON_SM90 = "Name the device if it is one (--gpu sm90); else choose another scheme."
_FEWER = "Use fewer devices, or a group size that divides the shards."
_ALIKE = "Quantize all experts of a layer alike, or none."
_ALL_ALIKE = "Quantize the experts of all layers, or none."
_PLAIN_EXPERTS = "Ignore the experts by a pattern such as re:.*experts.*: plain stacks are read."
_CALIBRATE = "Calibrate the cache anew."
_KERNELS = {
    **dict.fromkeys(("WNA16", "WNA8Int"), "S44"),
    **dict.fromkeys(("W8A8Fp8", "W8A16Fp8"), "S45"),
    "W8A8Int8": "S46",
    **dict.fromkeys(("NVFP4", "NVFP4A16", "MXFP4", "MXFP8"), "S47"),
}
"""Name of a row of the table → the rule about its kernels."""


def _modules(view: View) -> Iterator[Problem]:
    """The limits of single modules."""
    for facts, entries in view.facts.items():
        for limit in LIMITS:
            if limit.concerns(facts):
                said = limit.message.format(scheme=facts.group and facts.group.scheme)
                for entry in entries:
                    yield Problem(limit.rule, entry.name, said, limit.remedy, limit.severity)


def _schemes(view: View) -> Iterator[Problem]:
    """S21, S22, S34, S44 to S48: each group that vLLM gives to some module."""
    capability = view.deployment.capability
    for group in view.used:
        scheme = group.scheme
        if scheme.weights is None:
            continue
        row = served(scheme, capability=capability)
        if not all("mbed" in target for target in group.targets) and scheme.format != "dense":
            yield from _served(group, row)
        if row.name in _KERNELS and capability is not None and capability < row.least:
            said = (
                f"{row.name} needs a device of capability {row.least}; this one has {capability}."
            )
            yield Problem(_KERNELS[row.name], group.name, said, _OTHER_DEVICE)
        if row.native and (capability or 0) < row.native and scheme.inputs is not None:
            where = "below" if capability is None else f"at {capability}, below"
            said = f"On a device {where} capability {row.native}, {row.name} runs weight-only."
            yield Problem("S22", group.name, said, f"Serve it from capability {row.native} on.")
        for note in notes(scheme, capability):
            said = note.message.format(weights=scheme.weights, inputs=scheme.inputs)
            severity = None if note.fails and capability is not None else NOTE
            yield Problem(note.rule, group.name, said, note.remedy, severity)


def _served(group: Group, row: Row) -> Iterator[Problem]:
    scheme = group.scheme
    if not row.name:
        rule = "S48" if served(scheme).name else "S21"  # another device takes it
        yield Problem(rule, group.name, f"{row.why(scheme)} It is {scheme}.", row.remedy)
    elif scheme.outputs is not None and scheme.outputs.is_static and row.name != "WNA8O8Int":
        said = f"{row.name} takes no scales of outputs: they are unknown tensors."
        yield Problem("S21", group.name, said, "Leave outputs unquantized.")


_BY_COLUMNS = frozenset(
    {"o_proj", "down_proj", "out_proj", "dense", "fc2", "c_proj", "w2", "dense_4h_to_h", "wo"}
)
"""Own names of Linears whose inputs are split, rather than their outputs."""
_WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"})
"""Whole on every device: they map to and from the latent of all heads."""


@dataclass(frozen=True)
class _Share:
    """A coded Linear as one of several devices has it.

    Attributes:
        entry: the module.
        scheme: its scheme.
        columns: of the whole.
        tp: how many devices there are.
        parts: into how many parts it is split: keys and values at most one for each head.
    """

    entry: Entry
    scheme: Scheme
    columns: int
    tp: int
    parts: int

    @property
    def split(self) -> str:
        """The size that is split."""
        return "columns" if self.entry.last in _BY_COLUMNS else "rows"

    def whole(self, size: str) -> int:
        """``rows`` or ``columns`` of the whole."""
        return self.columns if size == "columns" else self.entry.rows or 0

    def size(self, size: str) -> int:
        """Those of the share."""
        return self.whole(size) // (self.parts if size == self.split else 1)

    @property
    def remainder(self) -> int:
        """What the split leaves."""
        return self.whole(self.split) % self.parts

    def said(self, size: str) -> str:
        """The size for a message."""
        is_split = self.parts > 1 and size == self.split
        return f"Its {self.whole(size)} {size}" + (
            f" split over {self.parts} devices" if is_split else ""
        )


def _shares(view: View) -> Iterator[_Share]:
    """Coded Linears over each number of devices; of experts one of each kind in a mixture."""
    heads, seen = view.size("num_key_value_heads"), set()
    for entry, scheme in view.coded:
        columns, expert = view.columns(entry, scheme), EXPERT.match(entry.name)
        if columns is None or entry.kind not in ("linear", "gate"):
            continue
        if expert is not None:
            kind = (expert["experts"], expert["own"], id(scheme), entry.rows, columns)
            if kind in seen:
                continue
            seen.add(kind)
        for tp in view.deployment.tp:
            few = entry.last in ("k_proj", "v_proj") and heads is not None
            parts = 1 if entry.last in _WHOLE else min(heads or tp, tp) if few else tp
            yield _Share(entry, scheme, columns, tp, parts)


def _splits(view: View) -> Iterator[Problem]:
    """S39 to S43, S48, S64, S65: the first number of devices that leaves a misfit."""
    merged = {one.name for shards in view.joined.values() for one in shards[:-1]}
    told = set()
    for share in _shares(view):
        expert = EXPERT.match(share.entry.name)
        place = share.entry.name if expert is None else expert["experts"]
        for rule, said, is_asked in _misfits(share, expert is not None, merged):
            if (rule, place) not in told:
                told.add((rule, place))
                devices = share.parts if share.split == "columns" or share.parts == 1 else share.tp
                severity = view.deployment.tp_severity(devices) if is_asked else None
                yield Problem(rule, place, said, _FEWER, severity)
        if share.remainder and ("S43", share.entry.name) not in told:
            told.add(("S43", share.entry.name))
            yield _remainder(
                view, share.entry.name, f"{share.said(share.split)} leave a remainder."
            )
    heads = view.size("num_attention_heads")
    for tp in view.deployment.tp if heads is not None else ():
        if heads and heads % tp:
            said = f"{heads} heads cannot be split over {tp} devices."
            yield _remainder(view, "num_attention_heads", said)


def _remainder(view: View, module: str, said: str) -> Problem:
    """S43; where nobody asked, it is the model itself that cannot be split so."""
    severity = None if view.deployment.is_tp_given else NOTE
    return Problem("S43", module, said, "Use a number of devices that divides it.", severity)


def _misfits(share: _Share, is_expert: bool, merged: set[str]) -> Iterator[tuple[str, str, bool]]:
    """Rule, sentence, and whether it depends on the number of devices."""
    for split in SPLITS:
        length = split.length(share.scheme)
        if (
            length
            and _is_meant(split, share, is_expert, merged)
            and share.size(split.size) % length
        ):
            rule = split.of_experts if is_expert else split.rule
            yield rule, f"{share.said(split.size)} {split.message.format(length)}", True


def _is_meant(split: Split, share: _Share, is_expert: bool, merged: set[str]) -> bool:
    is_split = split.size == share.split
    if is_split and share.remainder:
        return False  # S43
    if split.where == "always":
        return is_split or split.size == "columns"
    is_joined = split.where == "joined" and (is_expert or share.entry.name in merged)
    return is_split and (share.parts > 1 or is_joined)


def _small_integers_with_floats(view: View) -> Iterator[Problem]:
    """S48."""
    capability, server = view.deployment.capability, view.deployment.server
    severity = None if capability is not None else NOTE
    what = "4-bit integers with 8-bit float inputs"
    used = [one for one in view.used if served(one.scheme, capability=capability).name]
    groups = [one for one in used if served(one.scheme).name == "W4A8Fp8"]
    for group in groups:
        if capability is None:
            said = f"{what} run on SM90 alone; on every other device vLLM has no scheme for them."
            of_any = None if server == "vllm" else WARNING
            yield Problem("S48", group.name, said, _ON_SM90, of_any)
        if view.dtype != "bfloat16":
            said = f"{what} give bfloat16, not {view.dtype}."
            yield Problem("S48", group.name, said, "Serve it in bfloat16.", severity)
    for share in _shares(view) if groups else ():
        rows, columns = share.size("rows"), share.size("columns")
        if share.scheme in [group.scheme for group in groups] and (rows % 128 or columns % 128):
            said = f"Split over {share.parts} devices it is {rows} by {columns}; the kernel takes "
            of_size = view.deployment.tp_severity(share.parts) if capability is not None else NOTE
            yield Problem("S48", share.entry.name, f"{said}multiples of 128.", _FEWER, of_size)


def _device(view: View) -> Iterator[Problem]:
    """S10, and S46 of latent attention, which takes apart what a CPU's kernel has consumed."""
    capability = view.deployment.capability
    for entry, scheme in view.coded if view.family.is_mla and capability is None else ():
        if entry.last == "kv_b_proj" and served(scheme).name == "W8A8Int8":
            said = "On a CPU vLLM fails to take it apart: the kernel leaves no weight of it."
            yield Problem("S46", entry.name, said, "Ignore it, or serve it elsewhere.", NOTE)
    if view.settings and capability is not None and capability < 70:
        said = f"The device has capability {capability}; 70 is the least."
        yield Problem("S10", "", said, "Use a newer device.")
    if view.settings and view.dtype not in ("float32", "float16", "bfloat16"):
        said = f"The model's dtype is {view.dtype}."
        yield Problem("S10", "", said, "Use float32, float16 or bfloat16.")


# --------------------
# The cache.

_STATE = re.compile(r"([qkv])_(?:scale|zero_point)$")
_ACCEPTED = re.compile(
    r".*self_attn\.[qkv]_(?:scale|zero_point)$"
    r"|.*\.self_attn\.(?:[kv]_proj|qkv_proj)\.[kv]_scale$"
    r"|.*\.mixer\.[kv]_proj\.[kv]_scale$|.*\.attn\.[qkv]_scale$|.*\.kv_scale$"
)
_OLD = re.compile(r".*\.[kv]_proj\.output_scale$")
_STRAY = re.compile(
    r"(?:weight|input|output|[qkv])_(?:\w+_)?(?:scale|zero_point|shape|g_idx|packed)"
)


def cache_of(view: View) -> Args | None:
    """The arguments of keys and values in the cache."""
    return parse_args(view.settings.get("kv_cache_scheme"))


def _cache(view: View) -> Iterator[Problem]:
    """S49 to S55."""
    args, place = cache_of(view), "kv_cache_scheme"
    stored = {name: own[1] for name in view.headers if (own := _STATE.fullmatch(_last(name)))}
    yield from _cache_names(view, stored, has_scheme=args is not None)
    if args is None:
        return
    row = served(Scheme(args), "cache")
    if not row.name:
        yield Problem("S49", place, row.why(Scheme(args)), row.remedy)
    if args.strategy == "attn_head":
        if "config_groups" not in view.settings:
            said = "Scales per head need the key config_groups in the configuration."
            yield Problem("S53", place, said, 'Write "config_groups": {}.')
        said = "Scales per head are served by the FlashAttention backend alone."
        yield Problem("S53", place, said, "Serve it with that backend.", NOTE)
    if view.family.is_mla:
        said = "Attention with a latent cache takes no scales: it has no effect."
        yield Problem("S55", place, said, "Leave kv_cache_scheme out.")
    yield from _cache_shapes(view, args, stored)
    if args.is_static:
        yield from _cache_values(view, [name for name in stored if name.endswith("_scale")])


def _cache_names(view: View, stored: Mapping[str, str], *, has_scheme: bool) -> Iterator[Problem]:
    for name in view.headers:
        if has_scheme and _OLD.match(name):
            said = "Scales of the cache under this name are dropped; 1.0 is used."
            yield Problem("S51", name, said, "Name it k_scale or v_scale on the attention module.")
        elif name in stored and not _ACCEPTED.match(name):
            said = "No attention module of vLLM takes a scale from this path."
            yield Problem("S51", name, said, "Name it ...self_attn.k_scale.", WARNING)
    if stored and not has_scheme and not any(group.is_attention for group in view.groups):
        said = f"There is none, and {joined(stored)} are stored: the cache is not quantized "
        remedy = "Write the kv_cache_scheme that they were calibrated for, or remove the scales."
        yield Problem("S50", "kv_cache_scheme", f"{said}unless a server is told so.", remedy)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _cache_shapes(view: View, args: Args, stored: Mapping[str, str]) -> Iterator[Problem]:
    queries = view.size("num_attention_heads")
    keys = view.size("num_key_value_heads") or queries
    for name, base in stored.items():
        info, count = view.headers[name], queries if base == "q" else keys
        if not name.endswith("_scale"):
            continue
        if args.strategy == "attn_head" and count is not None and info.numel != count:
            said = f"It has {info.numel} scales for {count} heads."
            yield Problem("S52", name, said, _CALIBRATE)
        elif args.strategy == "tensor" and info.shape not in ((1,), ()):
            said = f"It has the shape {list(info.shape)}, not [1]."
            yield Problem("S52", name, said, _CALIBRATE)


def _cache_values(view: View, scales: list[str]) -> Iterator[Problem]:
    """S54: scales are there, were calculated, and are those of the layer that is read."""
    for path in view.attentions:
        is_draft = "mtp" in path or view.is_draft(path)
        owns = () if is_draft else ("k_scale", "v_scale")
        parts = ("", "{}_proj.", "qkv_proj.", "attn.")
        missing = [
            own
            for own in owns
            if not any(f"{path}.{part.format(own[0])}{own}" in view.headers for part in parts)
        ]
        if missing:
            said = f"It has no {joined(missing)}; 1.0 is used."
            yield Problem("S54", path, said, _CALIBRATE)
    read = view.tensors
    for name in scales if read is not None else ():
        assert read is not None
        scale = read(name).to(torch.float32)
        source = view.sharing.get(name.rpartition(".")[0])
        other = f"{source}.{_last(name)}"
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            said = "It is not finite and positive, and is used all the same."
            yield Problem("S54", name, said, _CALIBRATE)
        elif bool((scale == 1).all()):
            said = "It is exactly 1, as if it had never been calibrated."
            yield Problem("S54", name, said, _CALIBRATE, WARNING)
        if other in view.headers and not torch.equal(
            scale.reshape(-1), read(other).to(torch.float32).reshape(-1)
        ):
            said = f"The keys and values that it reads are those of {source}, whose scale differs."
            yield Problem("S54", name, said, "Store the same for both.")


# --------------------
# Embeddings, heads, draft layers.


def _ends(view: View) -> Iterator[Problem]:
    """S57, S59 and G7: what tables say of embeddings, heads and caches, and their sizes."""
    cache = Scheme(cache_of(view))
    if cache.weights is not None and not (row := served(cache, "cache", "sglang")).name:
        yield Problem("G7", "kv_cache_scheme", row.reason, row.remedy)
    for entry in view.quantized:
        scheme = view.scheme(entry)
        weights = None if scheme is None else scheme.weights
        if scheme is None or weights is None or view.is_plain(entry):
            continue
        if entry.kind == "embedding":
            row, columns = served(scheme, "embedding"), view.columns(entry, scheme) or 0
            is_torn = columns * weights.bits % 32 or (weights.group and columns % weights.group)
            if not row.name or is_torn:
                said = f"Its {columns} columns are no whole number of words or groups."
                remedy = (
                    "Quantize it to symmetric packed integers of 2, 4 or 8 bits, or not at all."
                )
                yield Problem("S57", entry.name, said if row.name else row.why(scheme), remedy)
        elif entry.kind == "head":
            yield from _head(view, entry, scheme, weights)


def _head(view: View, entry: Entry, scheme: Scheme, weights: Args) -> Iterator[Problem]:
    for rule, server in (("S59", "vllm"), ("G7", "sglang")):
        if not (row := served(scheme, "head", server)).name:
            yield Problem(rule, entry.name, row.reason, row.remedy)
    if not weights.symmetric and (entry.rows or 0) * weights.bits % 32:
        said = f"The zero points of its {entry.rows} rows do not end at a word."
        yield Problem("S59", entry.name, said, "Quantize it symmetrically.")
    vocabulary = view.size("vocab_size")
    if vocabulary is not None and entry.rows not in (None, vocabulary):
        said = f"It has {entry.rows} rows for a vocabulary of {vocabulary}."
        yield Problem("S59", entry.name, said, "Store exactly one row per token.")


def _drafts(view: View) -> Iterator[Problem]:
    """S61: draft layers that are announced are there."""
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    count = next(filter(None, map(view.size, keys)), 0)
    if count and not any(facts.draft for facts in view.facts):
        said = f"The configuration announces {count} draft layers, and the file holds none."
        yield Problem("S61", "", said, "Copy them from the original model.", WARNING)


# --------------------
# Experts.

_STACK = re.compile(r".*\.experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj)(?:[._].*)?$")
_PLAIN_STACK = re.compile(
    r"(?P<experts>.*\.experts)(?P<rows>\.mlp)?\.(?:(?:gate_up|gate|up|down)_proj|fc[12]|[vw][12])"
    r"(?:\.weight)?"
    r"|(?P<beside>.*\.(?:block_sparse_)?moe)\.(?:(?:gate|up|down)_proj|(?:in|out)put_linear)\.weight"
)
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _experts(view: View) -> Iterator[Problem]:
    """S62, S63, S68, S69 and G6."""
    told = set()
    for path, experts in view.mixtures.items():
        every, schemes = view.experts(path), view.expert_schemes[path]
        yield from _alike(view, path, every, list(schemes.values()))
        yield from _complete(view, path, experts)
        first = every[0]
        group = view.choice(first).group
        if not first.is_quantized or group is None or group.scheme.weights is None:
            continue
        row = served(group.scheme, "experts")
        if row.reason and group.name not in told:
            told.add(group.name)
            said = f"{row.why(group.scheme)} {group.name} is {group.scheme}."
            is_elsewhere = row.name and view.deployment.capability is None  # another device may
            severity = WARNING if is_elsewhere else None
            yield Problem("S63", path, said, "Choose another.", severity)
        if not (row := served(group.scheme, "experts", "sglang")).name:
            yield Problem("G6", path, row.reason, row.remedy)
        elif first.last in ("w1", "w2", "w3") and view.choice(first, "sglang").group is None:
            said = "SGLang looks experts up as gate_proj, up_proj and down_proj."
            yield Problem("G6", path, said, "Target them by class.")
        if any("bias" in entry.own for entry in every):
            said = (
                "Its experts have biases. vLLM reads gate and up of such experts (GPT-OSS) from "
                "one matrix, their rows in turn, and refuses these or leaves them out."
            )
            yield Problem("S69", path, said, _PLAIN_EXPERTS)
        if first.last == "gate_up_proj" and "weight_global_scale" in first.own:
            said = "Its experts hold gate and up in one matrix with one global scale."
            yield Problem("S69", path, said, "Store gate and up by themselves.")


def _alike(view: View, path: str, every: list[Entry], of_schemes: list[Entry]) -> Iterator[Problem]:
    plain = [entry.name for entry in every if not entry.is_quantized]
    coded = [entry.name for entry in every if entry.is_quantized]
    if plain and coded:
        few, what = (plain, "not quantized") if len(plain) <= len(coded) else (coded, "quantized")
        said = f"{joined(few, 2)} are {what}, unlike the rest; expert 0 decides for all."
        yield Problem("S62", path, said, _ALIKE)
    elif view.choice(every[0]).mixed:
        said = "Of expert 0's projections some are ignored and some are not."
        yield Problem("S62", path, said, _ALIKE)
    if len(of_schemes) > 1:
        examples = joined((entry.name for entry in of_schemes), 2)
        said = f"Its projections have different schemes ({examples})."
        remedy = "Quantize all experts of a layer alike, in groups that divide the columns of each."
        yield Problem("S62", path, said, remedy)
    if (plain and coded) or len(of_schemes) > 1:
        said = "Its experts are quantized differently, and SGLang goes by expert 0 for all of them."
        yield Problem("G6", path, said, _ALIKE)


def _complete(
    view: View, path: str, experts: Mapping[int, Mapping[str, Entry]]
) -> Iterator[Problem]:
    """S68."""
    fewest, most = _counts(view, path, experts)
    last = max(experts)
    count = max(fewest or 0, last + 1) if most is None or last >= most else fewest
    missing = [index for index in range(count or 0) if index not in experts]
    if missing:
        said = (
            f"It lacks the experts {joined(map(str, missing))} of {count}; servers do not notice."
        )
        yield Problem("S68", path, said, "Copy them from the original model.")
    elif most is not None and last >= most:
        said = f"It holds {last + 1} experts, the configuration says {most}."
        yield Problem("S68", path, said, "Correct it.")
    usual = max((set(own) for own in experts.values()), key=len)
    for index, own in experts.items():
        if set(own) < usual and (fewest is None or index < fewest):
            said = f"It has no {joined(sorted(usual - set(own)))}."
            yield Problem("S68", f"{path}.{index}", said, "Copy it from the original model.")
    if strange := sorted(usual - set(_EXPERT_NAMES)):
        said = f"Its projections are named {joined(strange)}, which servers do not know."
        yield Problem("S68", path, said, "Name them gate_proj, up_proj and down_proj.", WARNING)
    yield from _sizes(view, experts)


def _sizes(view: View, experts: Mapping[int, Mapping[str, Entry]]) -> Iterator[Problem]:
    """Matrices of another size than most of their kind: vLLM copies what there is of them."""
    alike: dict[tuple[str, str, Scheme | None], list[Entry]] = defaultdict(list)
    for name, entry in (each for own in experts.values() for each in own.items()):
        codes = "weight_packed" if entry.form == "packed" else "weight"
        alike[name, codes, view.written(entry) if entry.is_quantized else None].append(entry)
    for (_, codes, _), entries in alike.items():
        shapes = Counter(entry.own[codes].shape for entry in entries)
        usual, count = shapes.most_common(1)[0]
        if len(shapes) == 1 or 2 * count <= len(entries):
            continue  # experts of two kinds in one list
        for entry in (one for one in entries if one.own[codes].shape != usual):
            said = (
                f"Its {codes} has the shape {list(entry.own[codes].shape)}, and that of other "
                f"experts {list(usual)}: it is read in part, or over what is not its own."
            )
            yield Problem("S68", entry.name, said, "Compress the model anew.")


def _counts(
    view: View, path: str, experts: Mapping[int, Mapping[str, Entry]]
) -> tuple[int | None, int | None]:
    """Number of experts that a list must have, and that it may have.

    Several mixtures may share one list, and only some of its places be whole experts. The class
    knows, and else there is what the configuration says.
    """
    owns = {own for each in experts.values() for own in each}
    classes = module_classes(view.config)
    found = [classes.experts(f"{path}.0.{own}") for own in owns] if classes is not None else []
    numbers = [number for number in found if number is not None]
    if not numbers or len(numbers) < len(owns):
        count = next(filter(None, map(view.size, _COUNTS)), None)
        return count, count
    return min(numbers), max(numbers)


def _stacks(view: View) -> Iterator[Problem]:
    """S69 and S19: stacks of codes, and plain stacks that a scheme is looked up for."""
    plain = dict[str, None]()
    for name, info in view.headers.items():
        module, stack = name.rpartition(".")[0], _PLAIN_STACK.fullmatch(name)
        if len(info.shape) < 2 or EXPERT.match(module):
            continue
        is_coded = info.dtype in ("I8", "U8", "I32", "F8_E4M3")
        if is_coded and _STACK.match(name) and not _last(name).startswith("scale"):
            said = "Quantized experts are stored as one stack, which servers do not take."
            yield Problem("S69", name, said, "Store each expert by itself.")
        is_deep = stack is not None and (len(info.shape) == 3 or stack["rows"])
        if stack is not None and is_deep and info.dtype in PLAIN_FLOATS:
            plain[stack["experts"] or f"{stack['beside']}.experts"] = None
    for path in plain:
        first = Entry(f"{path}.0.gate_proj", {}, "linear", "dense")
        scheme = view.scheme(first)
        wants = scheme is not None and scheme.weights is not None and scheme.format != "dense"
        if wants and not view.is_draft(path) and not view.is_plain(first):
            said = f"The configuration quantizes its experts to {scheme}, and the file holds plain "
            remedy = "Ignore them by a pattern such as re:.*experts.*, or quantize them."
            yield Problem("S19", path, f"{said}ones, in stacks.", remedy)
        behind = [one for one in view.mixtures if _layer(one) > _layer(path)]
        if behind and str(view.text.get("model_type")).startswith("llama4"):
            said = f"It holds stacks, behind which vLLM takes those of {joined(behind, 1)} for "
            yield Problem("S69", path, f"{said}stacks too.", _ALL_ALIKE)


def _layer(path: str) -> int:
    """Index of the layer that a path lies in; 0 if there is none."""
    return next((int(part) for part in path.split(".") if part.isdigit()), 0)


# --------------------
# Transforms.

_KEYS = frozenset(
    {"type", "apply", "randomize", "requires_grad", "block_size", "head_dim", "precision"}
)
_APPLY_KEYS = frozenset({"targets", "location", "inverse", "ignore"})
_ONLINE, _CACHED = ("input", "output"), ("k_cache", "q_attn")
FUSED = (
    "Serve it with vLLM, which applies it, or use rotations that are multiplied into the weights "
    "alone (R1, R2)."
)
_LEAVE_OUT = "Leave the rotation of queries and keys out."


@dataclass(frozen=True)
class _Transform:
    """An application of a transform: its name and settings, the place, and the matrices there."""

    name: str
    scheme: Mapping[str, Any]
    settings: Mapping[str, Any]
    location: str
    reached: tuple[Entry, ...]


def _transform_groups(view: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    settings = view.settings.get("transform_config")
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    for name, raw in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(raw, Mapping):
            yield str(name), raw


def _transforms(view: View) -> Iterator[_Transform]:
    for name, raw in _transform_groups(view):
        applied = raw.get("apply")
        for one in applied if isinstance(applied, list) else ():
            if isinstance(one, Mapping):
                reached = tuple(entry for entry in view.matrices if _is_meant_by(one, entry))
                yield _Transform(name, raw, one, str(one.get("location")), reached)


def _is_meant_by(settings: Mapping[str, Any], entry: Entry) -> bool:
    """True if an application of a transform targets a module, and does not ignore it."""
    targets, ignored = (
        [value] if isinstance(value := settings.get(key), str) else list(value or ())
        for key in ("targets", "ignore")
    )
    return any(_names(text, entry) for text in targets) and not any(
        _names(text, entry) for text in ignored
    )


def _names(text: str, entry: Entry) -> bool:
    expression = compiled(text)
    if expression is not None:
        return expression.match(entry.name)
    return text == entry.name or (text == "Linear" and entry.kind in ("linear", "head"))


def in_the_forward(view: View) -> list[str]:
    """The rotations that a server has to make while it runs."""
    online = (one.name for one in _transforms(view) if one.location in _ONLINE)
    return list(dict.fromkeys(online))


def unturned_states(view: View, *, are_rounded: bool = True) -> dict[str, str]:
    """Transforms of queries and keys, which no server applies → what that makes wrong, if anything.

    Args:
        view: the checkpoint.
        are_rounded: the server rounds the states that the configuration names.
    """
    attention = [group.scheme for group in view.groups if group.scheme.weights is None]
    is_rounded = are_rounded and (
        cache_of(view) is not None or any(scheme.inputs is not None for scheme in attention)
    )
    every: dict[str, list[_Transform]] = defaultdict(list)
    for one in _transforms(view):
        if one.location in _CACHED and not one.reached:
            every[one.name].append(one)
    found = {}
    for name, both in every.items():
        forms = [
            [one.settings.get(key) or None for key in _APPLY_KEYS - {"location"}] for one in both
        ]
        is_pair = sorted(one.location for one in both) == sorted(_CACHED)
        found[name] = "keys are quantized with the scales of turned ones" if is_rounded else ""
        if both[0].scheme.get("randomize") or not is_pair or forms[0] != forms[1]:
            found[name] = "queries and keys are not turned alike, so outputs are wrong"
    return found


def _transform_limits(view: View) -> Iterator[Problem]:
    """S73 to S76, and G5 for SGLang, which reads none."""
    for name, raw in _transform_groups(view):
        yield from _known_keys(name, raw, _KEYS)
    for name, why in unturned_states(view).items():
        said = "It turns queries and keys, which is never applied"
        nothing = "That changes nothing: both are turned alike, and keys are not quantized."
        said = f"{said}, silently: {why}." if why else f"{said}. {nothing}"
        yield Problem("S73", name, said, _LEAVE_OUT, None if why else NOTE)
        places = tuple(f".{name}_{location}.weight" for location in _CACHED)
        if held := [each for each in view.headers if each.endswith(places)]:
            said = f"Its matrices ({joined(held, 1)}) are stored where vLLM has no place for any."
            yield Problem("S73", name, said, _LEAVE_OUT)
    if online := in_the_forward(view):
        yield Problem(
            "G5",
            "transform_config",
            "SGLang reads no transform_config, and its outputs are wrong: the weights are rotated "
            f"for {joined(online)}, which it does not apply.",
            FUSED,
        )
        if split := [tp for tp in view.deployment.tp if tp > 1]:
            said = f"Online transforms are not served over {split[0]} devices."
            severity = view.deployment.tp_severity(split[0])
            yield Problem("S75", online[0], said, "Serve it on one device.", severity)
    outputs: dict[str, str] = {}
    for one in _transforms(view):
        yield from _known_keys(one.name, one.settings, _APPLY_KEYS)
        if one.location in _CACHED and one.reached:
            said = f"The location {one.location} raises for Linear modules."
            yield Problem("S73", one.name, said, _LEAVE_OUT)
        elif one.location in _ONLINE:
            yield from _online(view, one, outputs)


def _known_keys(name: str, settings: Mapping[str, Any], known: frozenset[str]) -> Iterator[Problem]:
    if unknown := sorted(set(settings) - known):
        said = f"It has keys that are refused: {joined(unknown)}."
        yield Problem("S73", name, said, "Remove them.")


def _online(view: View, one: _Transform, outputs: dict[str, str]) -> Iterator[Problem]:
    lost = [
        entry.name
        for entry in one.reached
        if entry.is_expert or entry.kind in ("head", "embedding") or view.is_plain(entry)
    ]
    if lost:
        said = f"It is online on {joined(lost)}, where it is silently not applied."
        remedy = "Fuse it into the weights, or leave these modules out."
        yield Problem("S74", one.name, said, remedy)
    own = f"{one.name}_{one.location}.weight"
    is_input = one.location == "input"
    is_made = is_input and one.scheme.get("type") == "hadamard"  # by vLLM, whatever is stored
    of_rows = [  # of inputs one module may hold the matrix for all
        entry.name
        for entry in one.reached
        if view.reordering(entry) is not None and not is_made
        if not is_input or f"{entry.name}.{own}" in view.headers
    ]
    if of_rows:
        said = f"It is online on {joined(of_rows)}, whose rows vLLM reorders, and those of its "
        remedy = "Leave these modules, and those that are joined with them, out."
        yield Problem("S74", one.name, f"{said}matrix with them: outputs are noise.", remedy)
    if biased := [entry.name for entry in one.reached if "bias" in entry.own]:
        said = f"It is online on {joined(biased)}, which have a bias."
        yield Problem("S75", one.name, said, "Leave these modules out.")
    yield from _in_joined(view, one, outputs)
    size = one.scheme.get("head_dim") or one.scheme.get("block_size")
    stored = [(entry, view.headers.get(f"{entry.name}.{own}")) for entry in one.reached]
    widths = [size or _channels(view, entry, one.location) for entry in one.reached]
    # modules with one matrix share it, so that one of them may hold it for all
    held = {width for (_, info), width in zip(stored, widths, strict=True) if info is not None}
    for (entry, info), width in zip(stored, widths, strict=True):
        if info is None and width not in held:
            yield Problem("S76", entry.name, f"It has no {own}.", "Compress it anew.")
        elif info is not None and (len(info.shape) != 2 or (size and info.shape != (size, size))):
            said = f"Its {own} has the shape {list(info.shape)}."
            yield Problem("S76", entry.name, said, "Compress it anew.")


_NOT_JOINED = "Leave it out of the rotation, or use one that is multiplied into the weights."


def _in_joined(view: View, one: _Transform, outputs: dict[str, str]) -> Iterator[Problem]:
    """S75: rotations of matrices that vLLM joins, or that it cuts into parts.

    ``outputs`` are modules whose outputs were seen to be rotated → by what.
    """
    names = {entry.name for entry in one.reached}
    outputs |= dict.fromkeys(names if one.location == "output" else (), one.name)
    for path, shards in view.joined.items():
        meant = [shard for shard in shards if shard.name in names]
        if not meant:
            continue
        if not view.family.names_shards:
            said = f"vLLM joins {joined(own.last for own in shards)} here, and looks for the "
            said += f"rotation {one.name} under the name of the whole."
            yield Problem("S75", path, said, _NOT_JOINED)
        elif one.location == "input" and len(meant) < len(shards):
            said = f"Only some of its shards have the input transform {one.name}."
            yield Problem("S75", path, said, "Transform the input of all of them.")
        elif (
            one.location == "output"
            and len({outputs.get(own.name, one.name) for own in shards}) > 1
        ):
            said = f"The outputs of its shards have several rotations, of which {one.name} is one."
            yield Problem("S75", path, said, "Give them one, or leave them out of it.")
    known = family_of(view.config).fused  # also where the file holds the whole
    for entry in one.reached:
        if entry.is_expert or entry.kind != "linear" or view.is_plain(entry):
            continue  # S74
        parts = part_rows(entry, view.config, view.family)
        served_as = view.resolver.served(entry.name)
        if len(parts) > 1 and entry.last not in known:
            said = f"vLLM cuts it into {len(parts)} parts, and finds the rotation {one.name} for "
            yield Problem("S75", entry.name, f"{said}the first alone.", _NOT_JOINED)
        elif not _is_meant_by(one.settings, Entry(served_as, entry.own, entry.kind, entry.form)):
            said = f"vLLM builds it as {served_as or 'a module without a name'}, and no target of "
            said += f"the rotation {one.name} matches that."
            yield Problem("S75", entry.name, said, _NOT_JOINED)


def _channels(view: View, entry: Entry, location: str) -> int | None:
    """Width of a module's input or output, however its weight is stored."""
    if location == "output":
        return entry.rows
    scheme = view.written(entry) if entry.is_quantized else None
    if scheme is not None:
        return view.columns(entry, scheme)
    weight = entry.own.get("weight")
    return None if weight is None or len(weight.shape) != 2 else weight.shape[1]


# --------------------
# SGLang alone.


def _sglang(view: View) -> Iterator[Problem]:
    """G1, G3, G5."""
    capability, groups = view.deployment.capability, {}
    for facts, entries in view.facts.items():
        here, there = facts.group, facts.of_sglang
        if facts.expert or here is None:
            continue
        if there is not None and not facts.plain and here.scheme != there.scheme:
            said = f"SGLang takes {there.name} and vLLM {here.name}, which differ."
            remedy = "Name the joined module, or avoid class targets beside names."
            yield from (Problem("G1", entry.name, said, remedy) for entry in entries)
        if facts.coded and facts.kind == "linear" and here.scheme.weights is not None:
            groups[here.name] = here
    for path, shards in view.joined.items():
        if view.choice(shards[0], "sglang").mixed:
            said = "Some of its shards are ignored and some are not, which SGLang refuses."
            yield Problem("G3", path, said, "Ignore all of its shards or none.")
    for name, group in groups.items():
        row = served(group.scheme, server="sglang")
        if not row.name:
            said = f"{row.why(group.scheme)} It is {group.scheme}."
            yield Problem("G5", name, said, "Serve it with vLLM.")
        elif capability is not None and capability < row.least:
            said = f"SGLang needs capability {row.least} for it; this device has {capability}."
            yield Problem("G5", name, said, "Serve it on another device.")


# --------------------
# llama.cpp alone, which reads what its convert_hf_to_gguf makes.

_NVFP4 = "nvfp4-pack-quantized"
_SUPER = 64
"""Columns of the converter's blocks of NVFP4."""
_SCALES = {_NVFP4: {"weight_scale", "weight_global_scale", "input_global_scale", "weight_packed"}}
_USED = {"weight_scale", "weight_packed", "weight_shape", "weight_zero_point"}


def _llama_cpp(view: View) -> Iterator[Problem]:
    """Q1 to Q5."""
    if view.deployment.server != "llama.cpp" or not view.settings:
        return
    place, raw = "quantization_config", view.settings.get("config_groups")
    groups = list(raw.values()) if isinstance(raw, Mapping) else []
    formats = {group.scheme.format for group in view.groups}
    if view.named != OURS:
        said = f"Its quant_method is {view.named!r}: the converter knows {OURS!r} alone."
        yield Problem("Q1", place, said, NAME_METHOD)
    if len(groups) != 1 and formats != {_NVFP4}:
        said = f"It has {len(groups)} groups, and the converter takes one."
        yield Problem(
            "Q1", "config_groups", said, "Quantize all modules alike, and no cache alone."
        )
    weights = groups[0].get("weights") if groups and isinstance(groups[0], Mapping) else None
    is_in_full = isinstance(weights, Mapping) and (
        isinstance(weights.get("strategy"), str)
        and all(isinstance(weights.get(key), int | None) for key in ("num_bits", "group_size"))
    )
    if formats != {_NVFP4} and not is_in_full:
        said = "The converter takes num_bits, group_size and strategy as they stand, as numbers."
        yield Problem("Q1", "config_groups", said, "Write the group's arguments in full.")
    for group in (group for group in view.groups if group.scheme.weights is not None):
        row = served(group.scheme, server="llama.cpp")
        if not row.name:
            said = f"{row.why(group.scheme)} It is {group.scheme}."
            yield Problem("Q2", group.name, said, row.remedy)
        elif group.scheme.inputs is not None:
            said = "It computes with weights alone: inputs are not rounded."
            yield Problem("Q5", group.name, said, "Measure the quality there.")
    yield from _places_in_gguf(view)


def _places_in_gguf(view: View) -> Iterator[Problem]:
    for entry in view.entries.values():
        scheme = view.written(entry) if entry.kind != "other" else None
        used = _SCALES.get(str(scheme.format), _USED) if scheme is not None else set()
        stray = [own for own in entry.own if own not in used and _STRAY.fullmatch(own)]
        stray += sorted({"weight_scale"} & set(view.kept_scales(entry)))
        if stray:
            said = f"Its {joined(stray)} cannot be mapped, or is applied twice."
            remedy = "Leave out scales of caches, inputs and outputs, and what is not compressed."
            yield Problem("Q3", entry.name, said, remedy)
    for entry, scheme in view.coded:
        args, columns = scheme.weights, view.columns(entry, scheme)
        unit = _SUPER if scheme.format == _NVFP4 else args.group if args is not None else 0
        if unit and columns and columns % unit:
            said = f"Its {columns} columns are no multiple of {unit}."
            yield Problem("Q4", entry.name, said, "Leave it unquantized, or take other groups.")
    if online := in_the_forward(view):
        said = f"llama.cpp reads no transform_config: {joined(online)} is not applied."
        yield Problem("Q3", "transform_config", said, FUSED)


SERVING = (
    _device,
    _modules,
    _schemes,
    _splits,
    _small_integers_with_floats,
    _cache,
    _ends,
    _drafts,
    _experts,
    _stacks,
    _transform_limits,
    _sglang,
    _llama_cpp,
)
"""The checks of this file."""
