# SPDX-License-Identifier: Apache-2.0
"""Deployment, headers and findings: the input of the rules and their output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from llmcompressor.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

SERVERS = ("vllm", "transformers", "sglang")
READERS = (*SERVERS, "llama.cpp")
"""Servers, and what is asked about by name alone."""
DEFAULT_TP = (1, 2, 4, 8)
_DEVICES = {
    "v100": 70,
    "t4": 75,
    "a100": 80,
    "a10": 86,
    "rtx3090": 86,
    "l4": 89,
    "l40": 89,
    "l40s": 89,
    "rtx4090": 89,
    "h100": 90,
    "h200": 90,
    "gh200": 90,
    "b200": 100,
    "gb200": 100,
    "b300": 103,
    "rtx5090": 120,
}
_FLOATS = ("auto", "bfloat16", "float16", "float32", "float64")
_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}

Tensors: TypeAlias = "Callable[[str], Tensor]"
"""Gives a small tensor of the checkpoint by its name."""


class Severity(StrEnum):
    """Severity of a finding.

    An error: what was checked is refused or goes wrong. A warning: it does so somewhere that was
    not asked about, or it may be meant. A note: it is slow, or good to know.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header of a safetensors file describes it.

    Attributes:
        dtype: the header's word, such as ``BF16``, ``F8_E4M3`` or ``I32``.
        shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Finding:
    """Finding: a thing that is wrong.

    Attributes:
        rule: the rule's number: ``S30`` as in the serving rules, or ``F``, ``M``, ``C``, ``V``,
            ``R``, ``L`` for files, the manifest, consistency, values, the reference and loading.
        module: the module, tensor or file it is about; empty for the whole.
        message: what is wrong, one sentence.
        remedy: what to do about it, one sentence.
        severity: how bad it is.
        server: the server that the rule is about; empty if it is about the files as such.
    """

    rule: str
    module: str
    message: str
    remedy: str
    severity: Severity
    server: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as plain data."""
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "server": self.server,
            "module": self.module,
            "message": self.message,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Deployment:
    """Deployment of a checkpoint, as far as it is known.

    Attributes:
        server: ``vllm``, ``transformers`` or ``sglang``, all of them if ``None``; or ``llama.cpp``.
        tp: sizes of tensor parallelism. With the default a misfit above 1 is a warning, sizes
            that are given count in full.
        gpu: the device's capability as ``sm90``, or its name as ``h100``.
        dtype: the dtype of activations, the model's own if ``None`` or ``auto``.

    Raises:
        ArgumentError: there is no such server, device or dtype, or a size is not positive.
    """

    server: str | None = None
    tp: tuple[int, ...] = DEFAULT_TP
    gpu: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.server is not None and self.server not in READERS:
            raise ArgumentError(
                f"There are no rules for a server named {self.server!r}.",
                did_you_mean(self.server, READERS),
            )
        if not self.tp or any(size < 1 for size in self.tp):
            raise ArgumentError(
                f"The size of tensor parallelism is {self.tp}.", "Give positive whole numbers."
            )
        if self.gpu is not None and self.capability is None:
            raise ArgumentError(
                f"There is no device named {self.gpu!r}.",
                f"Give its compute capability as sm90. {did_you_mean(self.gpu, _DEVICES)}",
            )
        if self.dtype is not None and self._dtype_name not in _FLOATS:
            raise ArgumentError(
                f"There is no dtype of activations named {self.dtype!r}.",
                did_you_mean(self._dtype_name, (*_FLOATS, *_DTYPES)),
            )

    @property
    def capability(self) -> int | None:
        """The compute capability: 90 for ``sm90``; ``None`` if it is not known.

        >>> Deployment(gpu="sm90a").capability, Deployment(gpu="L40S").capability
        (90, 89)
        """
        if self.gpu is None:
            return None
        name = self.gpu.lower().replace("-", "").replace(" ", "").replace(".", "")
        if name in _DEVICES:
            return _DEVICES[name]
        digits = name.removeprefix("sm").removeprefix("_").rstrip("af")
        return int(digits) if digits.isdigit() and 50 <= int(digits) < 200 else None

    @property
    def is_tp_given(self) -> bool:
        """True if the sizes were chosen."""
        return self.tp != DEFAULT_TP

    def concerns(self, server: str) -> bool:
        """True if the rules of ``server`` are checked."""
        return not server or self.server == server or (self.server is None and server in SERVERS)

    def tp_severity(self, tp: int) -> Severity:
        """Severity of a checkpoint that cannot be split ``tp`` ways."""
        return Severity.ERROR if tp == 1 or self.is_tp_given else Severity.WARNING

    @property
    def _dtype_name(self) -> str:
        name = str(self.dtype).lower().removeprefix("torch.")
        return _DTYPES.get(name, name)

    @property
    def plain_dtype(self) -> str | None:
        """``float16`` for ``half``, ``torch.float16`` and so on; ``None`` for the model's own."""
        return None if self.dtype is None or self._dtype_name == "auto" else self._dtype_name
