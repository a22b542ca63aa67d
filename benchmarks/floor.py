# SPDX-License-Identifier: Apache-2.0
"""The least time that a job needs on this machine.

GPTQ: its matrix products at the measured rates.

One forward through the decoder layers (two with twin streams), half the products of one Gram
matrix per distinct input (it is symmetric), and with twin streams a full cross product per
distinct input, or what its Linears' outputs lack.  Not in it: reading and writing files,
factorizations, the sweep over the columns.

What needs no data: a process that imports what it stands on, and does nothing.

T tokens, C columns (input width), R rows (output width).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from models import ModelSize

TOKENS = 4096
REPEATS = 5
NOTHING_BUT_IMPORTS = """
import gc
gc.disable()
import torch, compressed_tensors
from transformers import LlamaForCausalLM
gc.freeze()
"""
"""What has to be imported to write the format, and to return a model; Python's searches for
unreachable cycles, which would go over all of it, left out."""


@dataclass(frozen=True)
class Floor:
    """Seconds of one model's products.

    Attributes:
        forward: One forward of all calibration tokens through the decoder layers, in bfloat16.
        gram: One Gram matrix per distinct input, half of it, summed in float32.
        cross: One cross product per distinct input, in the faster of float32 and bfloat16; of few
            rows what they lack.
    """

    forward: float
    gram: float
    cross: float

    @property
    def one_forward(self) -> float:
        """What calibration with one stream needs."""
        return self.forward + self.gram

    @property
    def twin_streams(self) -> float:
        """What calibration with twin streams needs."""
        return 2 * self.forward + self.gram + self.cross


def floor(size: ModelSize) -> Floor:
    """Measure the rates at the model's shapes and add up its products."""
    linears = size.linears()
    inputs: dict[tuple[str, int], int] = {}
    for source, columns, rows in linears:
        inputs[source, columns] = inputs.get((source, columns), 0) + rows
    tokens = size.samples * size.length
    per_token = sum(linear_seconds(columns, rows) for _, columns, rows in linears)
    per_token += attention_seconds(size.hidden, size.length)
    scale = size.layers * tokens
    return Floor(
        forward=scale * per_token,
        gram=scale * sum(gram_seconds(columns) for _, columns in inputs),
        cross=scale * sum(compared(columns, rows) for (_, columns), rows in inputs.items()),
    )


def compared(columns: int, rows: int) -> float:
    """Seconds per token to compare two streams, of Linears with so many rows in all.

    All inputs with all, or outputs with all inputs; for the latter the outputs are made first.
    """
    whole = cross_seconds(columns)
    return min(whole, linear_seconds(columns, rows) + whole * rows / columns)


def import_seconds() -> float:
    """Seconds of a whole process that imports torch, compressed-tensors and the model's class."""

    def imports() -> None:
        subprocess.run([sys.executable, "-c", NOTHING_BUT_IMPORTS], check=True)

    return _best(imports)


@cache
def linear_seconds(columns: int, rows: int) -> float:
    """Seconds per token of a bfloat16 Linear, multiplied in float32 where that is faster."""
    import torch  # noqa: PLC0415

    from llmcompressor.pipelines.batches import float32_linears  # noqa: PLC0415

    x_TC = torch.randn(TOKENS, columns).bfloat16()
    weight_RC = torch.randn(rows, columns).bfloat16()
    with torch.no_grad(), float32_linears():
        return _best(lambda: torch.nn.functional.linear(x_TC, weight_RC)) / TOKENS


def attention_seconds(hidden: int, length: int) -> float:
    """Seconds per token of causal attention's two products at the rate of a square Linear.

    Every token meets half of the sequence on average, twice: for its scores and its values.
    """
    seconds_per_product = linear_seconds(hidden, hidden) / hidden**2
    return seconds_per_product * 2 * hidden * length / 2


@cache
def gram_seconds(columns: int) -> float:
    """Seconds per token of ``x.T @ x`` with a float32 result, in the fastest way known here.

    numpy computes the upper half of a float32 product; torch multiplies blocks of the upper
    triangle, with bfloat16 operands where those of the model are.
    """
    import numpy  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from llmcompressor.numerics.gram import add_upper_product  # noqa: PLC0415

    x_TC = numpy.random.default_rng(0).standard_normal((TOKENS, columns), dtype=numpy.float32)
    low_x_TC, gram_CC = torch.from_numpy(x_TC).bfloat16(), torch.zeros(columns, columns)
    by_torch = _best(lambda: add_upper_product(gram_CC, low_x_TC))
    return min(by_torch, _best(lambda: x_TC.T @ x_TC)) / TOKENS


@cache
def cross_seconds(columns: int) -> float:
    """Seconds per token of ``y.T @ x`` in the faster of float32 and bfloat16."""
    import torch  # noqa: PLC0415

    x_TC, y_TC = torch.randn(TOKENS, columns), torch.randn(TOKENS, columns)
    low_x_TC, low_y_TC = x_TC.bfloat16(), y_TC.bfloat16()
    exact = _best(lambda: y_TC.T @ x_TC)
    return min(exact, _best(lambda: low_y_TC.T @ low_x_TC)) / TOKENS


def rates(size: ModelSize) -> dict[str, float]:
    """Rates in 10^9 multiplications with addition per second, for the table.

    That of the Gram matrix counts only the half that has to be computed.
    """
    hidden = size.hidden
    return {
        "bfloat16 Linear": hidden**2 / linear_seconds(hidden, hidden) / 1e9,
        "float32 Gram, half": hidden**2 / 2 / gram_seconds(hidden) / 1e9,
        "cross product": hidden**2 / cross_seconds(hidden) / 1e9,
    }


def _best(work: Callable[[], object]) -> float:
    """Least seconds of several runs: other processes can only add to it."""
    work()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
