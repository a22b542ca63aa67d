# SPDX-License-Identifier: Apache-2.0
"""Exact sizes of the predicted output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmcompressor.checkpoint.copied_files import side_files
from llmcompressor.checkpoint.model_config import json_text
from llmcompressor.checkpoint.moe_names import dense_experts_fused
from llmcompressor.checkpoint.names import LoadedName, NameMap
from llmcompressor.checkpoint.planned_tensors import PlannedTensors, plan_tensors
from llmcompressor.checkpoint.save import planned_config
from llmcompressor.checkpoint.tensor_files import OutputLayout, layout_files
from llmcompressor.core.contract import PlannedModule
from llmcompressor.modeling.names import own_parameters
from llmcompressor.planning.matching import descriptions, name_pattern
from llmcompressor.planning.result import Dense, ModuleRow, SchemeBytes, ServingNote, Sizes
from llmcompressor.planning.subject import PlannedModel
from llmcompressor.planning.workload import matrix_elements
from llmcompressor.verification import Deployment, TensorInfo, check_serving


@dataclass(frozen=True)
class Output:
    """The predicted checkpoint.

    Attributes:
        prediction: its tensors.
        layout: its weight files.
        config: its ``config.json``.
        places: quantized module → the name under which its tensors are stored.
    """

    prediction: PlannedTensors
    layout: OutputLayout
    config: Mapping[str, Any]
    places: Mapping[str, str]

    def sizes(self, subject: PlannedModel, recipe: str) -> Sizes:
        """Return the bytes of the input and of the output's files."""
        own = (self.layout.index() or "", json_text(self.config), recipe)
        others = sum(len(text.encode()) for text in own)
        if subject.directory is not None:
            others += sum(path.stat().st_size for path in side_files(subject.directory))
        files = {file.name: file.size for file in self.layout.files}
        return Sizes(subject.source_bytes, self.layout.file_size, files, others)

    @cached_property
    def stored_bytes(self) -> Mapping[str, int]:
        """Bytes of tensors by name of the stored module."""
        sizes: dict[str, int] = {}
        for name, place in self.layout.places.items():
            owner = name.rpartition(".")[0]
            sizes[owner] = sizes.get(owner, 0) + place.nbytes
        return sizes

    @cached_property
    def written_units(self) -> Mapping[str, int]:
        """Bytes of what is packed and written at once: a quantized module, or another tensor."""
        places, sizes = frozenset(self.places.values()), dict[str, int]()
        for stored in self.prediction.stored:
            owner = stored.name.rpartition(".")[0]
            unit = owner if owner in places else stored.name
            sizes[unit] = sizes.get(unit, 0) + stored.nbytes
        return sizes

    def by_scheme(self, planned: Sequence[PlannedModule]) -> list[SchemeBytes]:
        """Return the bytes before and after, by scheme."""
        stored = self.stored_bytes
        formats = {entry.name: entry.scheme.format for entry in self.prediction.quantized}
        words = descriptions(planned)
        rows: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        for one in planned:
            if one.name in formats:
                key = (words[id(one.scheme)], str(formats[one.name]))
                after = stored.get(self.places[one.name], 0)
                before = sum(each.nbytes for each in own_parameters(one.module))
                rows.setdefault(key, []).append((matrix_elements(one.module), before, after))
        return [
            SchemeBytes(
                scheme, form, len(each), *(sum(column) for column in zip(*each, strict=True))
            )
            for (scheme, form), each in rows.items()
        ]

    def dense(self, rows: Sequence[ModuleRow], names: Mapping[str, LoadedName]) -> list[Dense]:
        """Return the bytes of dense tensors, grouped by name pattern.

        Args:
            rows: schemes of the model's matrices.
            names: tensor of the source → its name in the model.
        """
        reasons = {row.pattern: row.why for row in rows if row.why}
        quantized = set(self.places.values())
        extras = set(self.prediction.extras)
        sizes: dict[str, int] = {}
        whys: dict[str, str] = {}
        for stored in self.prediction.stored:
            owner = stored.name.rpartition(".")[0]
            if owner in quantized:
                continue
            key = name_pattern(owner)
            sizes[key] = sizes.get(key, 0) + stored.nbytes
            if key not in whys:
                target = names[stored.name].target if stored.name in names else stored.name
                own = _reason(name_pattern(target.rpartition(".")[0]), reasons)
                whys[key] = _COPIED if stored.name in extras else own
        return [Dense(key, size, whys[key]) for key, size in sizes.items()]


_COPIED = "no part of the model class: copied"


def _reason(place: str, reasons: Mapping[str, str]) -> str:
    """Return the reason why a stored module is dense, or that of its stack of experts."""
    while place and place not in reasons:
        place = place.rpartition(".")[0]
    return reasons.get(place, "")


def predict_output(
    subject: PlannedModel,
    planned: Sequence[PlannedModule],
    *,
    is_streamed: bool,
    save_compressed: bool = True,
) -> Output:
    """Predict the checkpoint that a run would write.

    Args:
        subject: the model.
        planned: the modules that modifiers will quantize.
        is_streamed: blocks are written one by one.
        save_compressed: weights are packed, not written dense.
    """
    model = subject.model
    with nullcontext() if is_streamed else dense_experts_fused(model):
        prediction = plan_tensors(model, planned, subject.headers, save_compressed=save_compressed)
        config = planned_config(model, subject.directory, prediction, compressed=save_compressed)
    layout = layout_files(prediction.stored)
    names = [entry.name for entry in prediction.quantized]
    return Output(prediction, layout, config, NameMap(model).stored(names))


# --------------------
# Serving rules applied to a predicted checkpoint.


def serving_notes(output: Output, deployment: Deployment | None = None) -> list[ServingNote]:
    """Check the predicted configuration and headers against the serving rules.

    Args:
        output: the predicted checkpoint.
        deployment: serving environment, as far as known.
    """
    headers = {one.name: TensorInfo(one.dtype, one.shape) for one in output.prediction.stored}
    return [
        ServingNote(one.rule, one.severity.value, one.server, one.module, one.message, one.remedy)
        for one in check_serving(
            output.config, headers, deployment=deployment, kinds=output.prediction.kinds
        )
    ]
