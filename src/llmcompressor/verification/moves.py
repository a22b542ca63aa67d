# SPDX-License-Identifier: Apache-2.0
r"""Weights that modifiers moved between layers, and what they must still be.

Smoothing and AWQ divide the output of one module by a scale and multiply the columns of its readers
by it. Rotations turn rows and columns. A weight W of the original has become

.. math:: W' = L \, \mathrm{diag}(a) \, W \, \mathrm{diag}(b) \, R

with orthogonal L and R. ``compression_report.json`` tells which modules were scaled. A norm tells
its readers' b: its gain was divided by it. Other scales are fitted by least squares, and the a of a
module is compared with the b of its readers. Rotations in the forward are stored. That of the
residual stream turns the original's embedding into the checkpoint's. One of heads is fitted: it is
the same for all of them.

Legend: R rows, C columns, N order of a rotation.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import exp, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.files import (
    Files,
    Run,
    layer_of,
    tensor_chunks,
    without_prefixes,
)
from llmcompressor.verification.modules import PLAIN_FLOATS, text_settings
from llmcompressor.verification.scheme import settings_of
from llmcompressor.verification.values import EMBEDDINGS, same_tensor

SCALING = frozenset({"AWQModifier", "LogarithmicEqualizationModifier", "SmoothQuantModifier"})
ROTATING = frozenset({"QuIPModifier", "SpinQuantModifier"})

_ONLINE = re.compile(r"(?P<module>.+)\.(?P<scheme>\w+)_(?P<side>input|output)\.weight$")
_CLOSE = 0.5
"""Relative error of a fit that is good enough to try no other rotation."""
_SAME = 0.05
"""Relative error that rounding to the dtype of a plain tensor does not reach."""
_TURNED = 0.3
"""The same of one that was rotated by a matrix that is not known exactly."""
_LEAST_SEEN, _MOST_UNSEEN = 1e-4, 0.01
"""Share of the mean below which a singular value is noise, and of those that may be."""
_FACTOR, _NOISY = 0.1, 0.4
"""Logarithm of a factor that a fit without noise does not reach, and one with much noise."""
_PATTERN = 0.15
"""Deviation of logarithms below which two sets of scales are one, up to a factor."""
_EVEN = 0.05
"""Deviation of logarithms of scales that are the same but for noise."""
_TINY = 1e-30
_PIECE = 1 << 22
"""Elements of embeddings that are read together."""


class Fit(NamedTuple):
    """Scales of rows and columns, what the original is with them, and the relative error."""

    rows: Tensor
    columns: Tensor
    weight: Tensor
    error: float


def fit_scales(
    weight_RC: Tensor,
    original_RC: Tensor,
    *,
    columns: Tensor | None = None,
    free_rows: bool = True,
) -> Fit:
    """The scales with which the original is nearest to a weight.

    Args:
        weight_RC: the weight.
        original_RC: what it was.
        columns: the scales of its columns, where they are known.
        free_rows: its rows have scales too, of a geometric mean of one if columns are fitted.
    """
    rows = torch.ones(len(weight_RC))
    scales = torch.ones(weight_RC.shape[1]) if columns is None else columns
    for _ in range(3 if free_rows and columns is None else 1):
        if columns is None:
            scales = _slopes(weight_RC, original_RC * rows[:, None], 0)
        if free_rows:
            rows = _slopes(weight_RC, original_RC * scales, 1)
        if free_rows and columns is None:
            mean = _logs(rows).mean().exp()
            rows, scales = rows / mean, scales * mean
    fitted = original_RC * scales * rows[:, None]
    return Fit(rows, scales, fitted, _distance(weight_RC, fitted))


@dataclass(frozen=True)
class _Scaled:
    """Scales of a module, which other modules are to undo.

    Attributes:
        module: its name.
        rows: scales of its rows.
        columns: scales of its columns.
        beyond: what its columns have beyond those, where they are not fitted.
        counted: columns that are large enough to tell their scale.
        error: relative error of the weight with them.
    """

    module: str
    rows: Tensor
    columns: Tensor
    beyond: Tensor
    counted: Tensor
    error: float


def _slopes(weight: Tensor, original: Tensor, dim: int) -> Tensor:
    """What to multiply rows or columns by: by one where they are zero."""
    square = original.square().sum(dim)
    found = (weight * original).sum(dim) / square.clamp_min(_TINY)
    return torch.where(square > _TINY, found, 1.0)


def _logs(scales: Tensor) -> Tensor:
    return scales.abs().clamp_min(_TINY).log()


def _distance(ours: Tensor, theirs: Tensor) -> float:
    size = float(torch.linalg.vector_norm(ours))
    return float(torch.linalg.vector_norm(ours - theirs)) / max(size, _TINY)


def nearest_rotation(product_NN: Tensor) -> tuple[Tensor, Tensor]:
    """The orthogonal Q for which the trace of ``Qᵀ P`` is largest (Procrustes).

    For P = ``Aᵀ B`` the error of ``A Q`` to B is least. The second result are the singular values
    of P; their sum is that trace.

    >>> nearest_rotation(torch.tensor([[0.0, 2], [-1, 0]]))[0] + 0.0
    tensor([[ 0.,  1.],
            [-1.,  0.]])
    """
    left, values, right = torch.linalg.svd(product_NN)
    return left @ right, values


def _turned(weight_RC: Tensor, turn_NN: Tensor) -> Tensor:
    """Each block of N columns times a rotation."""
    blocks = weight_RC.reshape(len(weight_RC), -1, len(turn_NN))
    return (blocks @ turn_NN).reshape(weight_RC.shape)


@dataclass(frozen=True)
class _Turn:
    """Rotations of rows and of columns, in the order in which they were done."""

    left: Sequence[Tensor] = ()
    right: Sequence[Tensor] = ()

    def redo(self, weight_RC: Tensor) -> Tensor:
        for one in self.left:
            weight_RC = _turned(weight_RC.T, one).T
        for one in self.right:
            weight_RC = _turned(weight_RC, one)
        return weight_RC

    def undo(self, weight_RC: Tensor) -> Tensor:
        left, right = ([one.T for one in reversed(each)] for each in (self.left, self.right))
        return _Turn(left, right).redo(weight_RC)


class Moves:
    """What was moved between two checkpoints.

    Args:
        files: the checkpoint.
        original: what it was made from.
        runs: those that made it.
        names: their modifiers.
    """

    def __init__(
        self, files: Files, original: Files, runs: Sequence[Run], names: Iterable[str]
    ) -> None:
        self._files, self._original = files, original
        names = set(names)
        self._rotates = not ROTATING.isdisjoint(names)
        self._readers = _recorded(runs)
        self._smooth_of = {key: smooth for smooth, own in self._readers.items() for key in own}
        scaling = {name for run in runs for name in run.records if name in SCALING}
        self._is_recorded = scaling.issuperset(SCALING & names) and bool(self._readers)
        self._places = {without_prefixes(name): name for name in files.places}
        self._sources = {without_prefixes(name): name for name in original.places}
        self._scaled: dict[str, _Scaled] = {}
        self._usual: dict[tuple[str, torch.Size], int] = {}
        self._one_at_a_time = threading.Lock()

    @property
    def is_recorded(self) -> bool:
        """True if it is known which modules have changed."""
        return self._is_recorded and not self._rotates

    @property
    def is_comparable(self) -> bool:
        """True unless the residual stream was rotated by a matrix that nothing tells."""
        return not self._rotates or self._stream is not None

    def may_change(self, module: str) -> bool:
        """True if a module may have been scaled or rotated."""
        key = without_prefixes(module)
        return not self.is_recorded or key in self._readers or key in self._smooth_of

    def expected(self, module: str, weight_RC: Tensor, original_RC: Tensor) -> Tensor:
        """What a weight would be without rounding."""
        if not self.may_change(module):
            return original_RC
        with self._one_at_a_time:  # several copies of it are held
            turn, fit = self._undone(module, weight_RC, original_RC)
            size_C = torch.linalg.vector_norm(original_RC, dim=0)
            beyond = _slopes(turn.undo(weight_RC), fit.weight, 0)
            counted = size_C > 0.3 * size_C.median()
            scaled = _Scaled(module, fit.rows, fit.columns, beyond, counted, fit.error)
            self._scaled[without_prefixes(module)] = scaled
            return turn.redo(fit.weight)

    def is_explained(self, name: str, tensor: Tensor, original: Tensor) -> bool:
        """True if a plain tensor may have become what it is.

        Of norms and biases only the place is looked at; what reads them tells what they must be.
        """
        module = name.rpartition(".")[0]
        if not self.may_change(module) or tensor.shape != original.shape:
            return False
        if tensor.ndim != 2 or not self.is_comparable:
            return True
        ours = tensor.float()
        most = _TURNED if self._rotates else _SAME
        return _distance(ours, self.expected(module, ours, original.float())) < most

    def _undone(self, module: str, weight_RC: Tensor, original_RC: Tensor) -> tuple[_Turn, Fit]:
        """The rotations and scales that fit best."""
        key, width = without_prefixes(module), weight_RC.shape[1]
        columns = self._columns(key, width) if self.is_recorded else [None]
        free_rows = key in self._readers if self._is_recorded else not self._rotates
        turns = self._turns(module, weight_RC, original_RC)
        usual, own = (self._usual, (key.rpartition(".")[2], weight_RC.shape))
        best = None
        for index in sorted(range(len(turns)), key=lambda index: index != usual.get(own, 0)):
            turn = turns[index]()
            undone = turn.undo(weight_RC)
            fits = [
                fit_scales(undone, original_RC, columns=one, free_rows=free_rows) for one in columns
            ]
            fit = min(fits, key=lambda fit: fit.error)
            if best is None or fit.error < best[1].error:
                best = turn, fit
            if fit.error < _CLOSE:
                usual[own] = index
                break
        assert best is not None  # not to turn it is the first try
        return best

    def _columns(self, key: str, width: int) -> list[Tensor | None]:
        """The scales that its columns may have; ``None`` for those that are to be fitted."""
        if key not in self._smooth_of:
            return [torch.ones(width)]
        return [*self._told_by(f"{self._smooth_of[key]}.weight", width)] or [None]

    def _told_by(self, norm: str, width: int) -> Iterator[Tensor]:
        """What a gain was divided by, if zero is added to it, and if one is (Gemma)."""
        ours, theirs = self._places.get(norm), self._sources.get(norm)
        if ours is None or theirs is None or ours in self._files.broken:
            return
        shapes = {self._files.places[ours].info.shape, self._original.places[theirs].info.shape}
        if shapes != {(width,)}:
            return
        before, after = self._original.read(theirs).float(), self._files.read(ours).float()
        for offset in (0.0, 1.0):
            found = (before + offset) / (after + offset)
            if bool((torch.isfinite(found) & (found > 0)).all()):
                yield found

    # ------------------------------------------------------------------ rotations

    def _turns(
        self, module: str, weight_RC: Tensor, original_RC: Tensor
    ) -> list[Callable[[], _Turn]]:
        """The rotations that a weight may have; that of heads takes a while to find."""
        if not self._rotates:
            return [_Turn]
        rows, columns = weight_RC.shape
        lefts = list(self._known(module, "output", rows))
        rights = list(self._known(module, "input", columns))
        turns: list[Callable[[], _Turn]] = [
            partial(_Turn, left, right) for left, right in product(lefts, rights)
        ]
        of_heads = partial(_of_heads, weight_RC, original_RC)
        for size in self._heads:
            if rows % size == 0:
                turns += [partial(of_heads, size, _Turn((), one), of_rows=True) for one in rights]
            if columns % size == 0:
                turns += [partial(of_heads, size, _Turn(one, ()), of_rows=False) for one in lefts]
        return turns

    def _known(self, module: str, side: str, width: int) -> Iterator[Sequence[Tensor]]:
        """Rotations that one side of a weight may have: of the stream, or in the forward."""
        stream = self._stream
        streams: list[tuple[Tensor, ...]] = [()]
        if stream is not None and len(stream) == width:
            streams.append((stream,))
        yield from streams
        for one in self._stored(module, side):
            if width % len(one) == 0:
                yield from ((*first, own) for own in (one, one.T) for first in streams)

    def _stored(self, module: str, side: str) -> Iterator[Tensor]:
        """Those in the forward; what several modules share is stored for one of them."""
        seen = set()
        for _, scheme, name in sorted(self._online[side], key=lambda one: one[0] != module):
            order = self._files.places[name].info.shape[0]
            if (scheme, order) not in seen:
                seen.add((scheme, order))
                yield self._files.read(name).float() / order**0.5

    @cached_property
    def _online(self) -> dict[str, list[tuple[str, str, str]]]:
        found: dict[str, list[tuple[str, str, str]]] = {"input": [], "output": []}
        for name, place in self._files.places.items():
            match = _ONLINE.match(name)
            if match is not None and place.info.dtype in PLAIN_FLOATS and place.info.shape:
                found[match["side"]].append((match["module"], match["scheme"], name))
        return found

    @cached_property
    def _heads(self) -> list[int]:
        """Widths of what a matrix may rotate that is not stored."""
        config = self._files.config
        transforms = (settings_of(config) or config).get("transform_config")
        groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
        schemes = groups.values() if isinstance(groups, Mapping) else ()
        sizes = [one.get("head_dim") for one in schemes if isinstance(one, Mapping)]
        sizes.append(text_settings(config).get("head_dim"))
        return [one for one in dict.fromkeys(sizes) if isinstance(one, int) and one > 1]

    @cached_property
    def _stream(self) -> Tensor | None:
        """What has rotated the rows of the embedding: of no size if nothing has.

        It is ``None`` if nothing tells.
        """
        for name, place in self._files.places.items():
            source = self._sources.get(without_prefixes(name))
            is_plain = place.info.dtype in PLAIN_FLOATS and len(place.info.shape) == 2
            if source is None or not is_plain or not name.endswith(EMBEDDINGS):
                continue
            if same_tensor(self._files, name, self._original, source):
                return torch.empty(0, 0)
            if self._original.places[source].info.shape == place.info.shape:
                return self._between(name, source)
        return None

    def _between(self, name: str, source: str) -> Tensor | None:
        """The rotation between two embeddings, of which a mean may have been taken off before."""
        width = self._files.places[name].info.shape[1]
        plain, centered = (torch.zeros(width, width) for _ in range(2))
        squares = [0.0, 0.0, 0.0]
        chunks = (
            tensor_chunks(self._files, name, _PIECE),
            tensor_chunks(self._original, source, _PIECE),
        )
        for after, before in zip(*chunks, strict=True):
            ours, theirs = after.float(), before.float()
            mean_free = theirs - theirs.mean(dim=1, keepdim=True)
            plain += theirs.T @ ours
            centered += mean_free.T @ ours
            for index, one in enumerate((ours, theirs, mean_free)):
                squares[index] += float(one.square().sum())
        for products, square in ((plain, squares[1]), (centered, squares[2])):
            found, values = nearest_rotation(products)
            is_near = squares[0] + square - 2 * float(values.sum()) < _SAME**2 * squares[0]
            unseen = int((values < _LEAST_SEEN * values.mean()).sum())
            if is_near and unseen <= _MOST_UNSEEN * width:
                return found
        return None

    # ------------------------------------------------------------------ several modules

    def disagreements(self) -> Iterator[Finding]:
        """R3: scales that other modules do not undo, after all modules were compared."""
        for key, one in self._scaled.items():
            smooth = self._scaled.get(self._smooth_of.get(key, ""))
            if smooth is not None and smooth.rows.shape == one.columns.shape:
                logs, told = _logs(smooth.rows) + _logs(one.columns), f"rows of {smooth.module}"
            elif not self._is_recorded:
                logs, told = self._off_a_norm(key, one), "the norm before it"
            else:
                logs, told = _logs(one.beyond), self._smooth_of.get(key, "the original")
            logs = logs[one.counted]
            if len(logs) < 2 or one.error >= 1:
                continue
            middle, spread = float(logs.median()), float(logs.std())
            # few codes round whole columns alike, beside the noise of each of their rows
            noise = _EVEN + 4 * one.error / sqrt(len(one.rows)) + one.error**2 / 2
            most = min(_FACTOR + one.error / 2, _NOISY)
            if abs(middle) > most or (self._is_recorded and spread > noise):
                said = (
                    f"Its columns are {exp(middle):.3g} times as large as {told} would have them, "
                    f"give or take {spread:.2g}: scales that were moved do not cancel."
                )
                remedy = "Compress the model anew."
                yield Finding("R3", one.module, said, remedy, Severity.ERROR)

    @cached_property
    def _by_layer(self) -> Mapping[str, list[str]]:
        """The original's tensors by their layer."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self._sources:
            found[layer_of(name)].append(name)
        return found

    def _off_a_norm(self, key: str, one: _Scaled) -> Tensor:
        """Logarithms of what its columns have beyond the scales of a norm of its layer.

        They are zero where no norm has the pattern of its columns, or its rows have one too.
        """
        logs, width = _logs(one.columns), len(one.columns)
        norms = (each.removesuffix(".weight") for each in self._by_layer[layer_of(key)])
        told = [scales for norm in norms for scales in self._told_by(f"{norm}.weight", width)]
        apart = [logs - _logs(scales) for scales in (torch.ones(width), *told)]
        best = min(apart, key=lambda each: float(each[one.counted].std()))
        is_one = float(best[one.counted].std()) < _PATTERN and float(_logs(one.rows).std()) < _EVEN
        return best if is_one else torch.zeros(width)


def _of_heads(
    weight_RC: Tensor, original_RC: Tensor, size: int, turn: _Turn, *, of_rows: bool
) -> _Turn:
    """A turn, and the rotation of all heads that fits best beside it.

    What fits best depends on the scales of the columns, and these on what is undone.
    """
    scaled, undone = original_RC, turn.undo(weight_RC)
    found = turn
    for _ in range(2):
        pair = (scaled.T, undone.T) if of_rows else (scaled, undone)
        before, after = (one.reshape(-1, size) for one in pair)
        own = (nearest_rotation(before.T @ after)[0],)
        found = _Turn(own, turn.right) if of_rows else _Turn(turn.left, own)
        scaled = fit_scales(found.undo(weight_RC), original_RC, free_rows=False).weight
    return found


def _recorded(runs: Iterable[Run]) -> dict[str, set[str]]:
    """Module whose outputs were divided → those whose inputs were multiplied, by short names."""
    found: dict[str, set[str]] = {}
    for run in runs:
        records = (run.records.get(name) for name in SCALING)
        for smooth, record in (
            each for one in records if isinstance(one, Mapping) for each in one.items()
        ):
            readers = record.get("readers") if isinstance(record, Mapping) else None
            if not isinstance(readers, list):
                continue
            keys = {without_prefixes(name) for each in readers for name in run.names_of(str(each))}
            for name in run.names_of(str(smooth)):
                found.setdefault(without_prefixes(name), set()).update(keys)
    return found
