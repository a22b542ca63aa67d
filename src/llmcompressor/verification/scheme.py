# SPDX-License-Identifier: Apache-2.0
"""Schemes of the ``quantization_config``, and the group that each server gives to a module.

The configuration is read leniently: a broken one is described, not refused. Three procedures find
a group, each as its reader has it: vLLM 0.33 (names in the order of the file, then joined shards,
then classes as substrings of vLLM's own), SGLang 0.5 (classes before joined shards) and
compressed-tensors, so transformers (exact names, patterns, classes, each sorted).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from llmcompressor.errors import TargetError
from llmcompressor.runtime.limits import TimedPattern
from llmcompressor.verification.facts import TensorInfo
from llmcompressor.verification.modules import (
    CROSS,
    EXPERT,
    Entry,
    Family,
    mapped_name,
    served_name,
)

FORMATS = (
    "dense",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)
ACTIVATION_FORMATS = (
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
)


@dataclass(frozen=True)
class Args:
    """Quantization arguments of weights or activations, defaults filled in.

    Attributes:
        bits: bits of a value.
        kind: ``int`` or ``float``.
        symmetric: there is no zero point.
        strategy: what shares a scale.
        group: columns of a group, 0 if there are none.
        block: rows and columns of a block.
        dynamic: scales are found while serving: ``True``, ``False`` or ``"local"``.
        scale_dtype: the dtype of scales, as ``torch.uint8``.
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group: int = 0
    block: tuple[int, int] | None = None
    dynamic: bool | str = False
    scale_dtype: str | None = None

    @property
    def is_static(self) -> bool:
        """True if scales are stored."""
        return self.dynamic is False

    @property
    def small_float(self) -> str:
        """``nvfp4``, ``mxfp4``, ``mxfp6`` or ``mxfp8`` if these are such floats, else nothing."""
        if self.kind != "float" or not self.symmetric:
            return ""
        cells = (self.bits, self.strategy, self.group)
        if cells == (8, "group", 32) and self.scale_dtype != "torch.uint8":
            return ""
        return {
            (4, "tensor_group", 16): "nvfp4",
            (4, "group", 32): "mxfp4",
            (6, "group", 32): "mxfp6",
            (8, "group", 32): "mxfp8",
        }.get(cells, "")

    def __str__(self) -> str:
        cells = {"group": f" {self.group}", "tensor_group": f" {self.group}"}.get(self.strategy, "")
        if self.block:
            cells = f" {self.block[0]}x{self.block[1]}"
        words = [f"{self.bits}-bit {self.kind}", f"{self.strategy}{cells}"]
        words += [] if self.symmetric else ["asymmetric"]
        words += {True: ["dynamic"], "local": ["local dynamic"]}.get(self.dynamic, [])
        return ", ".join(words)


@dataclass(frozen=True)
class Scheme:
    """Scheme of a module: two of them are equal if servers cannot tell them apart."""

    weights: Args | None = None
    inputs: Args | None = None
    outputs: Args | None = None
    format: str | None = None

    def __str__(self) -> str:
        parts = {"weights": self.weights, "inputs": self.inputs, "outputs": self.outputs}
        said = "; ".join(f"{name} {args}" for name, args in parts.items() if args is not None)
        return f"{said or 'nothing'} ({self.format})"


@dataclass(frozen=True)
class Group:
    """A group of the configuration; its scheme has the format that counts for it."""

    name: str
    targets: tuple[str, ...]
    scheme: Scheme

    @property
    def is_attention(self) -> bool:
        """True if vLLM skips it: one target, an attention class, and no weights."""
        return (
            self.scheme.weights is None
            and len(self.targets) == 1
            and self.targets[0].endswith("Attention")
        )


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization settings within ``config.json``, in the order in which vLLM looks."""
    text = config.get("text_config")
    for holder, key in (
        (config, "quantization_config"),
        (text, "quantization_config"),
        (config, "compression_config"),
    ):
        if isinstance(holder, Mapping) and isinstance(holder.get(key), Mapping) and holder[key]:
            found: Mapping[str, Any] = holder[key]
            return found
    return None


OURS = "compressed-tensors"
"""The method of which the rules are."""
NAME_METHOD = 'Set quant_method to "compressed-tensors".'
_UNNAMED = "a method that it does not name"
_NARROW = re.compile(r"[IU](?:8|32)|F[48].*")
_SIGNS = {
    "bitsandbytes": r".*\.(?:weight\.(?:absmax|quant_map|quant_state\..+)|SCB)",
    "GPTQ": r".*\.g_idx",
    "AWQ or GPTQ": r".*\.(?:qweight|qzeros)",
    "MLX": r".*\.biases",
    "ModelOpt": r".*\.weight_scale_2",
    "FP8 in blocks": r".*\.weight_scale_inv",
    "MXFP4 as in gpt-oss": r".*_blocks",
    "HQQ": r".*\.W_q",
    "EXL2 or EXL3": r".*\.(?:q_weight|trellis)",
}
"""Method → names of tensors that it alone has."""
_SIDE_FILES = {
    "hf_quant_config.json": "ModelOpt",
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
}
"""File beside ``config.json`` → the method that it tells of."""


def method_of(
    config: Mapping[str, Any], headers: Mapping[str, TensorInfo], beside: Collection[str] = ()
) -> str:
    """The method that a checkpoint is quantized by: :data:`OURS`, another's name, or nothing.

    Args:
        config: the content of ``config.json``.
        headers: tensor name → dtype and shape.
        beside: names of the files in its folder.

    >>> words = {"up.weight": TensorInfo("U32", (4, 8)), "up.biases": TensorInfo("F16", (4, 1))}
    >>> method_of({"quantization": {"bits": 4}}, words)
    'MLX'
    """
    settings = settings_of(config) or {}
    named = str(settings.get("quant_method") or "")
    of_ours = isinstance(settings.get("config_groups"), Mapping) and settings.keys() & {
        *("format", "quantization_status")
    }
    if named.lower().replace("_", "-") == OURS or of_ours:
        return OURS
    if any(name.endswith(".weight_packed") for name in headers):
        return OURS if settings else ""
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    if named:
        return named
    coded = any(len(one.shape) > 1 and _NARROW.fullmatch(one.dtype) for one in headers.values())
    for method, sign in _SIGNS.items() if coded or settings else ():
        if any(map(re.compile(sign).fullmatch, headers)):
            return method
    told = (_SIDE_FILES[name] for name in _SIDE_FILES if name in beside and coded)
    return _UNNAMED if settings else next(told, "")


def _number(value: Any, default: int) -> int:
    return value if type(value) is int else default


def _coerced(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments with their values as compressed-tensors takes them, unchanged if it refuses them.

    >>> _coerced({"num_bits": "4", "group_size": 128.0, "symmetric": 0})
    {'num_bits': 4, 'group_size': 128, 'symmetric': False}
    """
    try:
        read = QuantizationArgs.model_validate({key: raw[key] for key in raw if key != "actorder"})
    except (ValueError, NotImplementedError, TypeError):
        return raw
    given = read.model_dump(include={*raw} - {"scale_dtype", "zp_dtype"})
    return {key: given.get(key, raw[key]) for key in raw}


def parse_args(raw: Any) -> Args | None:
    """Arguments as compressed-tensors would fill them in; ``None`` if there are none."""
    if not isinstance(raw, Mapping):
        return None
    raw = _coerced(raw)
    group, block, dtype = (raw.get(key) for key in ("group_size", "block_structure", "scale_dtype"))
    by_group = "tensor" if group is None else "channel" if group == -1 else "group"
    if isinstance(block, str):
        block = [int(part) if part.isdigit() else 0 for part in block.split("x")]
    fits = isinstance(block, Sequence) and len(block) == 2
    dynamic = raw.get("dynamic") or False
    return Args(
        bits=_number(raw.get("num_bits"), 8),
        kind=str(raw.get("type") or "int").lower(),
        symmetric=raw.get("symmetric") is not False,
        strategy=str(raw.get("strategy") or by_group).lower(),
        group=max(_number(group, 0), 0),
        block=(_number(block[0], 0), _number(block[1], 0)) if fits and block is not None else None,
        dynamic=dynamic if dynamic is True else str(dynamic).lower() if dynamic else False,
        scale_dtype=None if dtype is None else f"torch.{str(dtype).removeprefix('torch.')}",
    )


def parse_groups(settings: Mapping[str, Any]) -> list[Group]:
    """The groups that can be read, in the order of the file."""
    groups = settings.get("config_groups")
    overall = settings.get("format")
    found = []
    for name, written in groups.items() if isinstance(groups, Mapping) else ():
        raw = written
        if isinstance(raw, list):  # targets of the preset that the group is called after
            with suppress(KeyError, ValueError):
                raw = preset_name_to_scheme(str(name), raw).model_dump()
        if not isinstance(raw, Mapping):
            continue
        targets = raw.get("targets")
        scheme = Scheme(
            parse_args(raw.get("weights")),
            parse_args(raw.get("input_activations")),
            parse_args(raw.get("output_activations")),
            str(raw.get("format") or overall or "") or None,
        )
        texts = targets if isinstance(targets, list) else []
        found.append(Group(str(name), tuple(str(text) for text in texts), scheme))
    return found


_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
}
_CLASS_OF = {"embedding": "VocabParallelEmbedding", "head": "ParallelLMHead", "gate": "GateLinear"}
_PLAIN_CLASS = {"linear": "Linear", "head": "Linear", "embedding": "Embedding"}


@dataclass(frozen=True)
class Choice:
    """Choice of a server for a module.

    Attributes:
        group: the group it gets, ``None`` if it stays unquantized.
        ignored: it is on the list of what to ignore.
        mixed: some of the shards it is joined from are ignored, others not.
    """

    group: Group | None = None
    ignored: bool = False
    mixed: bool = False


class _Pattern(TimedPattern):
    """A pattern of a checkpoint: what takes too long matches nothing, and rule S12 tells."""

    def match(self, name: str) -> bool:
        with suppress(TargetError):
            return super().match(name)
        return False


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> TimedPattern | None:
    """The expression behind ``re:``, ``None`` if it is none or cannot be read."""
    if not pattern.startswith("re:"):
        return None
    try:
        return _Pattern(pattern[3:])
    except re.error:
        return None


_SIMPLE = re.compile(r"(?:\(\?:\.\*\\\.\)\?)?(?P<body>(?:\w|\\\W|\.\*?|[\^$])+)")


def _needed(pattern: str) -> str:
    r"""A part of every name that a pattern matches; empty unless the pattern is a simple one.

    A mixture of experts has a pattern for each of its layers, and ten thousands of names.

    >>> _needed(r"(?:.*\.)?layers\.3\.experts\..*"), _needed("lm_head|.*gate"), _needed(".*up?")
    ('layers.3.experts.', '', '')
    """
    simple = _SIMPLE.fullmatch(pattern)
    parts = re.findall(r"(?:\w|\\\W)+", simple["body"]) if simple else []
    return max((re.sub(r"\\(\W)", r"\1", part) for part in parts), key=len, default="")


class _Names:
    """Names and patterns, asked by name."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = list(texts)
        self.position: dict[str, int] = {}
        self.patterns: list[tuple[int, str, TimedPattern]] = []
        for index, text in enumerate(self.texts):
            expression = compiled(text)
            if expression is not None:
                self.patterns.append((index, _needed(expression.pattern), expression))
            else:
                self.position.setdefault(text, index)

    def first(self, name: str) -> int | None:
        """Position of the first text that equals or matches ``name``."""
        best = self.position.get(name)
        for index, needed, expression in self.patterns:
            if best is not None and index > best:
                break
            if needed in name and expression.match(name):
                return index
        return best


class Resolver:
    """Answers for one configuration.

    Args:
        config: the whole ``config.json``.
        groups: its groups, in order.
        ignore: names and patterns to ignore.
        family: how vLLM builds the architecture.
        present: paths of the checkpoint's modules; one that none of the others is beside that it
            would be joined with is joined with nothing, as a gate of attention.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        groups: Sequence[Group],
        ignore: Sequence[str],
        family: Family,
        present: Collection[str] = (),
    ) -> None:
        self.config = config
        self.ignore = ignore
        self.family = family
        self.shards = frozenset(shard for shards in family.fused.values() for shard in shards)
        """Own names of modules that vLLM joins with others."""
        self._experts: dict[str, Choice] = {}
        self._of_class: dict[str, Group | None] = {}
        shards = [name for name in present if name.rpartition(".")[2] in self.shards]
        self._present = frozenset([*shards, *map(self.served, shards)])
        # as a dict of vLLM: a later group takes a target, its place stays
        self._targets: dict[str, Group] = {}
        for group in groups:
            if not group.is_attention:
                self._targets.update(dict.fromkeys(group.targets, group))
        self._in_order = list(self._targets.values())
        self._sorted = sorted(self._targets, key=lambda text: ("re:" in text, text))
        self._served_targets = _Names(self._renamed(self._targets))
        self._served_ignore = _Names(self._renamed(ignore))
        self._plain_targets, self._plain_ignore = _Names(self._sorted), _Names(ignore)

    def _renamed(self, texts: Iterable[str]) -> list[str]:
        """Only entries with a dot that are no patterns are renamed (S18), none as by S18a."""
        return [
            text
            if text.startswith("re:") or "." not in text
            else mapped_name(text, self.config, self.family)
            for text in texts
        ]

    def served(self, name: str) -> str:
        """The path under which vLLM looks ``name`` up."""
        return served_name(name, self.config, self.family)

    def unit(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The joined module that ``name`` is part of and its shards; itself if there is none."""
        parent, dot, last = name.rpartition(".")
        fused = CROSS.get(parent.rpartition(".")[2], self.family.fused)
        key = next((key for key, shards in fused.items() if last in shards), None)
        if key is None or EXPERT.match(name):
            return name, ()
        shards = tuple(f"{parent}{dot}{shard}" for shard in fused[key])
        if name in self._present and not self._present & (set(shards) - {name}):
            return name, ()
        return f"{parent}{dot}{key}", shards

    def vllm(self, entry: Entry) -> Choice:
        """Choice of vLLM 0.33 for a module."""
        found = EXPERT.match(entry.name)
        if found is not None:
            return self._of_experts(found["experts"])
        path, shards = self.unit(self.served(entry.name))
        named = shards if self.family.names_shards else ()
        return self._joined(path, named, entry.kind, class_first=False)

    def sglang(self, entry: Entry) -> Choice:
        """Choice of SGLang 0.5 for a module."""
        path, shards = self.unit(self.served(entry.name))
        return self._joined(path, shards, entry.kind, class_first=True)

    def alone(self, entry: Entry) -> Choice:
        """Choice of vLLM for a shard if it were joined with nothing."""
        return self._joined(self.served(entry.name), (), entry.kind, class_first=False)

    def _of_experts(self, experts: str) -> Choice:
        """The choice for a whole mixture: expert 0 stands for all (S62)."""
        if experts not in self._experts:
            served = self.served(f"{experts}.0.gate_proj").rpartition(".0.")[0]
            each = [
                self._joined(f"{served}.0.{own}", (), "linear", class_first=False)
                for own in self.family.experts
            ]
            first = each[0]
            mixed = any(other.ignored != first.ignored for other in each[1:])
            self._experts[experts] = Choice(first.group, first.ignored, mixed)
        return self._experts[experts]

    def _joined(
        self, path: str, shards: tuple[str, ...], kind: str, *, class_first: bool
    ) -> Choice:
        flags = [self._ignores(shard, suffixes=class_first) for shard in shards]
        mixed = any(flags) and not all(flags)
        if self._ignores(path, suffixes=class_first):
            return Choice(ignored=True)
        if flags and all(flags):
            return Choice(ignored=True)
        name = self._named(path)
        if name is not None:
            return Choice(name, mixed=mixed)
        of_shards = [self._named(shard) for shard in shards]
        are_named = of_shards and all(group is not None for group in of_shards)
        by_shards = of_shards[0] if are_named else None
        by_class = self._by_class(path, kind)
        first, second = (by_class, by_shards) if class_first else (by_shards, by_class)
        return Choice(first or second, mixed=mixed)

    def _ignores(self, path: str, *, suffixes: bool) -> bool:
        if self._served_ignore.first(path) is not None:
            return True
        if not suffixes:
            return False
        tails = path.split(".")
        known = self._served_ignore.position
        return any(".".join(tails[index:]) in known for index in range(1, len(tails)))

    def _named(self, path: str) -> Group | None:
        position = self._served_targets.first(path)
        return None if position is None else self._in_order[position]

    def _by_class(self, path: str, kind: str) -> Group | None:
        cls = _CLASS_OF.get(kind) or _CLASSES.get(path.rpartition(".")[2], "ColumnParallelLinear")
        if cls not in self._of_class:
            found = (
                group
                for target, group in self._targets.items()
                if ((pattern := compiled(target)) and pattern.match(cls))
                or (pattern is None and target.lower() in cls.lower())
            )
            self._of_class[cls] = next(found, None)
        return self._of_class[cls]

    def transformers(self, entry: Entry) -> Choice:
        """Choice of compressed-tensors, and so of transformers, for a module."""
        names, cls = (entry.name, self.served(entry.name)), _PLAIN_CLASS.get(entry.kind, "")
        if cls in self.ignore or any(self._plain_ignore.first(name) is not None for name in names):
            return Choice(ignored=True)
        found = (self._plain_targets.first(name) for name in names)
        position = next((one for one in found if one is not None), None)
        return Choice(self._targets.get(cls if position is None else self._sorted[position]))
