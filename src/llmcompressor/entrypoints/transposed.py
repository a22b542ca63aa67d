# SPDX-License-Identifier: Apache-2.0
"""Detection of transposed weights (``Conv1D``), which cannot be quantized like those of a Linear.

``Conv1D`` of transformers stores ``[in, out]`` where a Linear stores ``[out, in]``. Quantized like
a Linear, its groups and channels would run along the wrong dimension, and loaders support only
quantized Linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from llmcompressor.checkpoint.source import SourceInfo, TensorHeader
from llmcompressor.errors import TargetError
from llmcompressor.modeling.matching import matches
from llmcompressor.wording import listed

__all__ = ["CONV1D_NAMES", "CONV1D_TYPES", "refuse_transposed"]

CONV1D_TYPES = frozenset({"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
"""Values of ``model_type`` whose classes in transformers use ``Conv1D``; a test reads them."""

CONV1D_NAMES = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})
"""What these classes call their ``Conv1D`` modules."""

_MATRIX = 2


def refuse_transposed(
    source: SourceInfo, model: nn.Module, ignore: Sequence[str], targets: Sequence[str]
) -> None:
    """Refuse to quantize modules whose weights are stored transposed.

    They are recognized by the configuration's ``model_type``, or by a bias whose length equals
    the weight's number of columns but not of rows.

    Args:
        source: the checkpoint.
        model: the tree of its modules.
        ignore: ignored modules.
        targets: targeted modules.

    Raises:
        TargetError: a targeted module has a transposed weight.
    """
    found = [
        name
        for name in _transposed(source)
        if (module := _submodule(model, name)) is not None
        and _matches_any(name, module, targets)
        and not _matches_any(name, module, ignore)
    ]
    if not found:
        return
    last = sorted({name.rpartition(".")[2] for name in found})
    pattern = f"re:.*\\.({'|'.join(last)})$" if last[1:] else f"re:.*\\.{last[0]}$"
    raise TargetError(
        f"{listed(found)} of this checkpoint (model_type {source.config.get('model_type')!r}) "
        "hold their weights transposed, [in, out], as Conv1D of transformers does: rounding would "
        "run along the wrong dimension, and no reader knows a quantized Conv1D.",
        f'Ignore them with "{pattern}", or convert them to Linears first.',
    )


def _transposed(source: SourceInfo) -> Iterator[str]:
    """Yield the names of modules with a transposed weight."""
    known = bool(CONV1D_TYPES.intersection(_model_types(source.config)))
    for name, header in source.tensors.items():
        path, _, own = name.rpartition(".")
        if own != "weight" or len(header.shape) != _MATRIX:
            continue
        is_called_so = known and path.rpartition(".")[2] in CONV1D_NAMES
        if is_called_so or _has_bias_of_columns(header, source.tensors.get(f"{path}.bias")):
            yield path


def _has_bias_of_columns(weight: TensorHeader, bias: TensorHeader | None) -> bool:
    rows, columns = weight.shape
    return bias is not None and rows != columns and tuple(bias.shape) == (columns,)


def _model_types(config: Any) -> Iterator[str]:
    """Yield every ``model_type`` in a configuration, including nested ones."""
    if isinstance(config, Mapping):
        if isinstance(config.get("model_type"), str):
            yield config["model_type"]
        for value in config.values():
            yield from _model_types(value)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # an unfused part has another name here
        return None


def _matches_any(name: str, module: nn.Module, entries: Iterable[str]) -> bool:
    return any(matches(name, module, entry) for entry in entries)
