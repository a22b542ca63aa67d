# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, by kind of layer: the figures of its report."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmcompressor.checkpoint.model_config import REPORT_FILE
from llmcompressor.errors import CheckpointError
from llmcompressor.logger import logger
from llmcompressor.runtime.limits import parse_json
from llmcompressor.verification.files import OF_EXPERT, Files, open_checkpoint
from llmcompressor.verification.rules.view import View

_OWN = re.compile(r"\.(?:weight|bias|[a-z]+_(?:packed|scale|zero_point|global_scale|shape|g_idx))$")
"""The end of a tensor's name, behind that of its module."""
_OF_INDEX = ("F5", "F6", "F7", "F8")
"""What an index lists otherwise than files hold: readers go by the files."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_EXPERTS = re.compile(r"(.*\bexperts)\b.*")


def module_of(tensor: str) -> str:
    """Return the module of a tensor, by its name.

    >>> module_of("model.layers.0.mlp.up_proj.weight_packed"), module_of("model.A_log")
    ('model.layers.0.mlp.up_proj', 'model.A_log')
    """
    return _OWN.sub("", tensor)


def kind_of(module: str) -> str:
    """Return the kind of a layer: its name without its place; all experts of a layer are one.

    >>> kind_of("model.layers.12.mlp.up_proj"), kind_of("model.layers.3.mlp.experts.7.down_proj")
    ('model.layers.*.mlp.up_proj', 'model.layers.*.mlp.experts')
    """
    return _EXPERTS.sub(r"\1", _NUMBER.sub("*", module))


def depth_of(module: str) -> int | None:
    """Return the number of the layer that a module is in; ``None`` outside of layers.

    >>> depth_of("model.layers.12.mlp.experts.3.up_proj"), depth_of("lm_head")
    (12, None)
    """
    found = _NUMBER.search(module)
    return int(found.group()) if found else None


@dataclass(frozen=True)
class Matrix:
    """A quantized module.

    Attributes:
        module: its name in the files.
        scheme: how it is quantized, in words.
        error: ``‖W - Q‖ / ‖W‖``; ``None`` if it is not known.
        scales: the least, the median and the largest of its scales, if they are known.
    """

    module: str
    scheme: str
    error: float | None = None
    scales: tuple[float, float, float] | None = None

    @property
    def snr(self) -> float | None:
        """Signal to noise in decibels, ``-20 log10`` of the error."""
        return -20 * math.log10(self.error) if self.error else None

    @property
    def spread(self) -> float | None:
        """The largest scale over the least; ``None`` if that is not known."""
        return None if not self.scales or self.scales[0] <= 0 else self.scales[2] / self.scales[0]


@dataclass
class Kind:
    """Layers of one kind.

    Attributes:
        name: :func:`kind_of` their modules.
        modules: their names.
        bytes: of their tensors.
        schemes: the schemes of those that are quantized.
    """

    name: str
    modules: set[str] = field(default_factory=set)
    bytes: int = 0
    schemes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        folder: the folder.
        config: the content of its ``config.json``.
        kinds: by name, in the order of the model.
        matrices: quantized modules by name.
        report: the content of its ``compression_report.json``; empty without one.
        files: names of its weight files, with their bytes on disk.
    """

    folder: Path
    config: Mapping[str, Any]
    kinds: Mapping[str, Kind]
    matrices: Mapping[str, Matrix]
    report: Mapping[str, Any]
    files: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(kind.bytes for kind in self.kinds.values())

    @property
    def file_bytes(self) -> int:
        """Bytes of all weight files, which a plan predicts and a budget limits."""
        return sum(self.files.values())

    @property
    def sizes(self) -> dict[str, dict[str, int]]:
        """Kind of layer → how many ``modules``, and the ``bytes`` of their tensors."""
        kinds = self.kinds.values()
        return {one.name: {"modules": len(one.modules), "bytes": one.bytes} for one in kinds}

    def schemes_of(self, kind: str) -> set[str]:
        """Return the schemes of the layers of a kind."""
        return self.kinds[kind].schemes if kind in self.kinds else set()

    @property
    def architecture(self) -> str:
        """The class of the model, or else its type."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        return str(first or self.config.get("model_type") or "a model")


def contents_of(folder: str | os.PathLike[str]) -> Contents:
    """Read what a checkpoint holds from its configuration and the headers of its files.

    Args:
        folder: its folder.

    Raises:
        CheckpointError: the folder is not there, holds no model, or half of one.
    """
    with closing(open_checkpoint(folder)) as files:
        broken = [one for one in files.findings if one.rule not in _OF_INDEX]
        if not files.places or not files.config or files.broken or broken:
            first = "it has no weights, or no config.json"
            if broken:
                first = f"{broken[0].module}: {broken[0].message}"
            raise CheckpointError(
                f"The folder {folder} holds no whole checkpoint: {first.rstrip('.')}.",
                "Give the folder of a checkpoint; `llmcompressor verify` says all that is wrong.",
            )
        return _read(files)


def _read(files: Files) -> Contents:
    report = _json(files.directory / REPORT_FILE)
    view = View(files.config, files.headers)
    schemes = {entry.name: str(scheme) for entry, scheme in view.coded}
    kinds: dict[str, Kind] = {}
    for name in sorted(files.places, key=_natural):
        module = module_of(name)
        kind = kinds.setdefault(kind_of(module), Kind(kind_of(module)))
        kind.modules.add(module)
        kind.bytes += files.places[name].size
        if module in schemes:
            kind.schemes.add(schemes[module])
    weights = {one.file for one in files.places.values()}
    sizes = {file.name: file.stat().st_size for file in sorted(weights)}
    matrices = _matrices(report, schemes)
    return Contents(files.directory, files.config, kinds, matrices, report, sizes)


def _natural(name: str) -> list[tuple[int, str]]:
    """Key for sorting names with numbers in them."""
    parts = name.split(".")
    return [(int(one), "") if one.isdigit() else (-1, one) for one in parts]


def _matrices(report: Mapping[str, Any], schemes: Mapping[str, str]) -> dict[str, Matrix]:
    records: dict[str, Mapping[str, Any]] = {}
    for found in (report.get("modifiers") or {}).values():
        for module, record in found.items():
            if "weight_error" in record:
                names = _stored_names(module, report.get("stored_as") or {})
                records.update(dict.fromkeys(names, record))
    found = {}
    for module in sorted(schemes, key=_natural):
        record = records.get(module, {})
        error, scales = record.get("weight_error"), record.get("scales")
        found[module] = Matrix(
            module,
            schemes[module],
            float(error) if isinstance(error, int | float) else None,
            _three(scales),
        )
    return found


def _stored_names(module: str, stored_as: Mapping[str, list[str]]) -> list[str]:
    """Return what the files call a module, by the names of all experts for one of them.

    >>> _stored_names("h.0.mlp.experts.3.w1", {"h.0.mlp.experts": ["h.0.moe.experts"]})
    ['h.0.moe.experts.3.w1']
    """
    if module in stored_as:
        return stored_as[module]
    expert = OF_EXPERT.match(module)
    if expert is None or expert["experts"] not in stored_as:
        return [module]
    rest = module.removeprefix(expert["experts"])
    return [f"{name}{rest}" for name in stored_as[expert["experts"]]]


def _three(given: Any) -> tuple[float, float, float] | None:
    if not isinstance(given, Collection) or len(given) != 3:
        return None
    least, median, largest = (float(one) for one in given)
    return least, median, largest


def _json(file: Path) -> dict[str, Any]:
    """Return what a run has reported; empty, with a warning, where that is damaged."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    logger.warning(
        f"The file {file} is damaged: what the run has measured is not shown. "
        "`llmcompressor report OUT --reference ORIGINAL` measures the errors anew."
    )
    return {}
