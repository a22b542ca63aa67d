# SPDX-License-Identifier: Apache-2.0
"""Where one expert's weight lies within a stack of all experts of a layer.

Models store the experts of a layer in two stacks, one of gate and up together and one of down, and
quantized checkpoints store each expert by itself. How a stack lies depends on the model: rows
first or columns first, gate above up or row by row in turn. What the shapes leave open is known
for the model types of :data:`LAID`; for others every way is tried, and the nearest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import local
from typing import Any

from torch import Tensor

from llmcompressor.verification.families import text_settings
from llmcompressor.verification.files import Files
from llmcompressor.verification.layout import EXPERT

__all__ = ["LAID", "USUAL", "ExpertRows", "Source", "sources_in", "stacks_of"]

USUAL: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ROWS_FIRST = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "glm4_moe",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "jetmoe",
    "minimax",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
LAID: Mapping[str, tuple[bool, bool]] = {
    "gpt_oss": (True, True),
    "openai_privacy_filter": (True, False),
    "llama4": (True, False),
    "llama4_text": (True, False),
    **dict.fromkeys(_ROWS_FIRST, (False, False)),
}
"""Model type → whether its stacks hold [columns, rows], and gate and up row by row in turn."""


@dataclass(frozen=True)
class Source:
    """Where the original of a tensor is.

    Attributes:
        name: the tensor.
        expert: the index within a stack, ``None`` if the tensor is what is looked for itself.
        half: which half of a stack's matrix: 0, 1 or ``None``.
        turned: the stack holds [columns, rows].
        in_turn: the halves lie row by row in turn, not one above the other.
    """

    name: str
    expert: int | None = None
    half: int | None = None
    turned: bool = False
    in_turn: bool = False

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is looked for, in a tensor of the shape ``stored``."""
        if self.expert is None:
            return tuple(stored)
        rows, *columns = reversed(stored[1:]) if self.turned else stored[1:]
        return (rows if self.half is None else rows // 2, *columns)


def stacks_of(name: str) -> Iterator[str]:
    """The names that a stack may have which holds a tensor of one expert.

    >>> list(stacks_of("mlp.experts.3.w2.weight"))
    ['mlp.experts.down_proj', 'mlp.output_linear.weight']
    >>> list(stacks_of("mlp.experts.3.up_proj.bias"))
    ['mlp.experts.gate_up_proj_bias']
    """
    module, _, own = name.rpartition(".")
    match = EXPERT.match(module)
    if match is None or own not in ("weight", "bias"):
        return
    is_down = USUAL.get(match["own"], match["own"]) == "down_proj"
    stack = f"{match['experts']}.{'down_proj' if is_down else 'gate_up_proj'}"
    if own == "bias":
        yield f"{stack}_bias"
        return
    yield stack
    # Granite's experts are Linears of three dimensions
    parent = match["experts"].removesuffix("experts")
    yield f"{parent}{'output_linear' if is_down else 'input_linear'}.weight"


def sources_in(
    files: Files, stack: str, name: str, shape: Sequence[int], config: Mapping[str, Any]
) -> list[Source]:
    """Every way in which a stack may hold a tensor of one expert; one if only one is possible.

    Args:
        files: the original.
        stack: the name of a stack that is there.
        name: the tensor of one expert, as the checkpoint names it.
        shape: its shape.
        config: the original's ``config.json``.
    """
    match = EXPERT.match(name.rpartition(".")[0])
    stored = files.places[stack].info.shape
    if match is None or len(stored) != len(shape) + 1 or int(match["index"]) >= stored[0]:
        return []
    own = USUAL.get(match["own"], match["own"])
    half = None if own == "down_proj" else int(own == "up_proj")
    turns = (False, True) if len(shape) > 1 else (False,)
    every = [
        Source(stack, int(match["index"]), half, turned, in_turn)
        for turned in turns
        for in_turn in ((False,) if half is None else (False, True))
    ]
    # what does not fit at all is compared by the shape alone
    fitting = [each for each in every if each.shape(stored) == tuple(shape)] or every[:1]
    return _known(fitting, config)


def _known(fitting: list[Source], config: Mapping[str, Any]) -> list[Source]:
    """Those that are left once the model type has been asked."""
    types = (str(part.get("model_type") or "") for part in (text_settings(config), config))
    laid = next((LAID[name] for name in types if name in LAID), None)
    if laid is None:
        return fitting
    turned, in_turn = laid
    # a model may be stored the other way round than its class holds it, if the shape says so
    found = [each for each in fitting if each.turned == turned] or fitting
    return [each for each in found if each.half is None or each.in_turn == in_turn] or found


class ExpertRows:
    """Reads rows of one expert's weight out of a stack.

    A stack that holds [columns, rows] has to be read as a whole expert; the last one is kept.

    Args:
        files: the original.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._last = local()

    def read(self, source: Source, start: int, stop: int) -> Tensor:
        """Rows of what ``source`` points to, or values if it is a vector."""
        stored = self.files.places[source.name].info.shape
        expert = source.expert or 0
        if source.turned or len(stored) < 3:
            whole = self._whole(source.name, expert)
            whole = whole.T if source.turned else whole
            return _rows_of(lambda first, last: whole[first:last], source, len(whole), start, stop)
        base = expert * stored[1]

        def flat(first: int, last: int) -> Tensor:
            return self.files.read(source.name, base + first, base + last, flat=True)

        return _rows_of(flat, source, stored[1], start, stop)

    def _whole(self, name: str, expert: int) -> Tensor:
        key = (name, expert)
        if getattr(self._last, "key", None) != key:
            self._last.matrix = self.files.read(name, expert, expert + 1)[0]
            self._last.key = key
        matrix: Tensor = self._last.matrix
        return matrix


def _rows_of(
    read: Callable[[int, int], Tensor], source: Source, rows: int, start: int, stop: int
) -> Tensor:
    """The rows of a half, by what reads rows of the whole."""
    if source.half is None:
        return read(start, stop)
    if source.in_turn:
        return read(2 * start, 2 * stop)[source.half :: 2]
    shift = source.half * (rows // 2)
    return read(shift + start, shift + stop)
