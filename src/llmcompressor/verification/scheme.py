# SPDX-License-Identifier: Apache-2.0
"""The ``quantization_config`` as data, read leniently: a broken one is described, not refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ACTIVATION_FORMATS",
    "FORMATS",
    "Args",
    "Group",
    "Scheme",
    "parse_args",
    "parse_groups",
    "settings_of",
]

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
        """Whether scales are stored."""
        return self.dynamic is False

    @property
    def is_nvfp4(self) -> bool:
        """Whether these are 4-bit floats in two-level groups of 16."""
        return self._is("float", 4, "tensor_group", 16)

    @property
    def is_mxfp4(self) -> bool:
        """Whether these are 4-bit floats with a power of two per 32."""
        return self._is("float", 4, "group", 32)

    @property
    def is_mxfp6(self) -> bool:
        """Whether these are 6-bit floats with a power of two per 32."""
        return self._is("float", 6, "group", 32)

    @property
    def is_mxfp8(self) -> bool:
        """Whether these are 8-bit floats with a power of two per 32."""
        return self._is("float", 8, "group", 32) and self.scale_dtype == "torch.uint8"

    @property
    def is_mx(self) -> bool:
        """Whether these are floats of any width with a power of two per 32."""
        return self.is_mxfp4 or self.is_mxfp6 or self.is_mxfp8

    def _is(self, kind: str, bits: int, strategy: str, group: int) -> bool:
        found = (self.kind, self.bits, self.strategy, self.group)
        return self.symmetric and found == (kind, bits, strategy, group)

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
    """How a module is quantized: two of them are equal if servers cannot tell them apart."""

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
        """Whether vLLM skips it: one target, an attention class, and no weights."""
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


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def parse_args(raw: Any) -> Args | None:
    """Arguments as compressed-tensors would fill them in; ``None`` if there are none."""
    if not isinstance(raw, Mapping):
        return None
    group = raw.get("group_size")
    by_group = "tensor" if group is None else "channel" if group == -1 else "group"
    block = raw.get("block_structure")
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
        scale_dtype=_dtype(raw.get("scale_dtype")),
    )


def _dtype(name: Any) -> str | None:
    if name is None:
        return None
    return f"torch.{str(name).removeprefix('torch.')}"


def parse_groups(settings: Mapping[str, Any]) -> list[Group]:
    """The groups that can be read, in the order of the file."""
    groups = settings.get("config_groups")
    overall = settings.get("format")
    found = []
    for name, raw in groups.items() if isinstance(groups, Mapping) else ():
        if not isinstance(raw, Mapping):
            continue
        targets = raw.get("targets")
        scheme = Scheme(
            parse_args(raw.get("weights")),
            parse_args(raw.get("input_activations")),
            parse_args(raw.get("output_activations")),
            _text(raw.get("format")) or _text(overall),
        )
        texts = targets if isinstance(targets, list) else []
        found.append(Group(str(name), tuple(str(text) for text in texts), scheme))
    return found


def _text(value: Any) -> str | None:
    return str(value) if value else None
