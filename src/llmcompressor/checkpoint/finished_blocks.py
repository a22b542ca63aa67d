# SPDX-License-Identifier: Apache-2.0
"""Restoring of blocks from a written checkpoint into the model that they were made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
)
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from llmcompressor.checkpoint.block_weights import REST, BlockWeights
from llmcompressor.checkpoint.compress import QuantizedModule
from llmcompressor.checkpoint.layout import checkpoint_names, loaded_names
from llmcompressor.checkpoint.on_demand import load_on_demand
from llmcompressor.checkpoint.output_layout import OutputLayout
from llmcompressor.checkpoint.reading import TensorReader
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.names import named_modules

__all__ = ["FinishedBlocks", "headers_of"]


def headers_of(layout: OutputLayout, folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of an output's tensors."""
    return {
        name: TensorHeader(
            place.stored.dtype,
            place.stored.shape,
            folder / place.file,
            place.offset,
            place.stored.nbytes,
        )
        for name, place in layout.places.items()
    }


class FinishedBlocks:
    """Restores blocks of a written checkpoint into the model, dense as they were in memory.

    Args:
        model: its modules are marked as quantized.
        quantized: its quantized modules.
        layout: the places of the checkpoint's tensors.
        weights: the loader of the source's blocks.
        device: the device to load weights to.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quantized: Sequence[QuantizedModule],
        layout: OutputLayout,
        weights: BlockWeights,
        device: torch.device | str,
    ) -> None:
        self._model = model
        self._entries = {entry.name: entry for entry in quantized}
        self._places = checkpoint_names(model, list(self._entries))
        self._by_place = {place: name for name, place in self._places.items()}
        self._names = {module: name for name, module in named_modules(model)}
        self._layout = layout
        self._weights = weights
        self._device = torch.device(device)
        self._plain = loaded_names(model, self._plain_names(), model.state_dict())

    def names_of(self, block: str) -> list[str]:
        """Return the stored tensors of a block; for :data:`REST` those outside all blocks."""
        if block == REST:
            inside_any = {name for one in self._weights.blocks for name in self.names_of(one)}
            return [name for name in self._layout.places if name not in inside_any]
        inside = f"{block}."
        names = [name for name, own in self._plain.items() if own.target.startswith(inside)]
        for name in self._layout.places:
            module = self._module_of(name)
            if module is not None and module.startswith(inside):
                names.append(name)
        return names

    def restore(self, block: str, folder: Path, modules: Collection[Module] | None = None) -> None:
        """Load a block from the written checkpoint into the model.

        Args:
            block: its name.
            folder: the folder of the files.
            modules: the modules to restore; the whole block if ``None``.
        """
        reader = self.reader(folder)
        try:
            self.restore_from(reader, block, modules)
        finally:
            reader.close()

    def hand_over(self, folder: Path, blocks: Mapping[Module, str]) -> None:
        """Make blocks load lazily from the written checkpoint.

        Args:
            folder: the checkpoint's present folder; it may be moved, replaced or removed later.
            blocks: module of each → its name.
        """
        reader = self.reader(folder)
        reader.open_all()
        for module, name in blocks.items():
            load_on_demand(module, partial(self.restore_from, reader, name))

    def reader(self, folder: Path) -> TensorReader:
        """Return a reader of the checkpoint in ``folder``."""
        return TensorReader(headers_of(self._layout, folder))

    @torch.no_grad()
    def restore_from(
        self, reader: TensorReader, block: str, modules: Collection[Module] | None = None
    ) -> None:
        """Restore a block as :meth:`restore` does, with an open reader."""
        packed: dict[str, dict[str, Tensor]] = {}
        plain = {}
        wanted = None if modules is None else {self._names[module] for module in modules}
        for name in self.names_of(block):
            module = self._module_of(name)
            if module is None:
                if wanted is None or self._plain[name].target.rpartition(".")[0] in wanted:
                    plain[name] = reader.read(name)
            elif modules is None or self._entries[module].module in modules:
                packed.setdefault(module, {})[name.rpartition(".")[2]] = reader.read(name)
        self._weights.put(plain, self._plain)
        for module, tensors in packed.items():
            self._unpack(self._entries[module], tensors)
        self._weights.settle(block)

    def _plain_names(self) -> Iterable[str]:
        for name in self._layout.places:
            if self._module_of(name) is None:
                yield name

    def _module_of(self, stored: str) -> str | None:
        """Return the quantized module that a stored tensor belongs to, or ``None``."""
        place, _, own = stored.rpartition(".")
        module = self._by_place.get(place)
        return module if module is not None and self._entries[module].holds(own) else None

    def _unpack(self, entry: QuantizedModule, tensors: Mapping[str, Tensor]) -> None:
        module, scheme = entry.module, entry.scheme
        values: dict[str, Tensor] = dict(tensors)
        dense = entry.is_attention or scheme.weights is None
        if not dense and scheme.format != CompressionFormat.dense.value:
            scale, own = tensors.get("weight_scale"), module._parameters.get("weight_scale")
            if scale is not None and own is not None and scale.dtype is torch.float32:
                values["weight_scale"] = scale.to(own.dtype)  # as loaders do
            values |= _decompressed(values, scheme, module._parameters["weight"])
        for name, present in list(module._parameters.items()):
            if present is not None and name in values:
                value = values[name].to(self._device, present.dtype).reshape(present.shape)
                module._parameters[name] = Parameter(value, requires_grad=present.requires_grad)


def _decompressed(
    tensors: Mapping[str, Tensor], scheme: QuantizationScheme, weight: Tensor | None
) -> dict[str, Tensor]:
    """Return a module's tensors with its dense weight in place of the codes.

    compressed-tensors decompresses whole groups only. Where the last group is incomplete, the codes
    are padded to its end and the padding is cut off again.

    Args:
        tensors: own name → tensor, as stored.
        scheme: the module's scheme, with its format.
        weight: a weight of the dense shape.
    """
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    assert weight is not None
    assert scheme.weights is not None
    columns, missing = weight.shape[-1], _missing_columns(scheme.weights, weight.shape[-1])
    values = dict(tensors)
    if missing:
        name = "weight_packed" if "weight_packed" in values else "weight"
        stored = values[name]
        wider = -(-stored.shape[-1] * (columns + missing) // columns)
        values[name] = F.pad(stored, (0, wider - stored.shape[-1]))
        if "weight_shape" in values:
            rows = int(values["weight_shape"][0])
            values["weight_shape"] = torch.tensor([rows, columns + missing])
    found: dict[str, Tensor] = compressor.decompress(values, scheme)
    if missing:
        found["weight"] = found["weight"][..., :columns].contiguous()
    return found


def _missing_columns(weights: QuantizationArgs, columns: int) -> int:
    """Number of columns that a row's last group lacks."""
    if weights.strategy not in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        return 0
    return -columns % int(weights.group_size)
