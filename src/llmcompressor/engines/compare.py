# SPDX-License-Identifier: Apache-2.0
"""What an engine computes with a quantized model, beside what it computes with the decoded one.

Both were run by the same engine, so that its own order of sums cancels. T tokens, V vocabulary, R
rows of inputs, N outputs of a module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmcompressor.verification.report import Divergence
from llmcompressor.verification.scheme import Args, Scheme

_FULL_INPUTS = 2.0**-6
"""Of a module whose inputs keep 8 bits or more. bfloat16 rounds the decoded weight, a product and
what is stored by 2^-9 each at most; a grid of 8 bits ends half a step before or behind the largest
input, 2^-8. The rest is room for factors and for outputs that cancel."""
_FEW_BITS = 2.0**-3
"""Of inputs with fewer bits: half a step at the end of a 4-bit grid, or a scale in 8 bits, 2^-4."""
_KL_WEIGHTS = 0.02
_KL_8_BITS = 0.1
_KL_FEW_BITS = 1.0
"""Nats for a token, where weights alone are rounded, inputs or cache to 8 bits, inputs to fewer.
Roundings that fall the other way are carried on through the blocks."""
_FAR = 1.0
"""Nats for a token from the original, beyond which it is another model."""
_LEAST = 0.01
"""The part of a module's median output that an output of zero is taken for."""


@dataclass(frozen=True)
class Tolerance:
    """What a sound checkpoint may differ by.

    Attributes:
        module: relative difference of an output of a module.
        kl: mean KL divergence of a token, in nats.
    """

    module: float
    kl: float


def tolerance_of(
    schemes: list[Scheme], cache: Args | None, *, is_rounded: bool = False
) -> Tolerance:
    """The tolerance for a checkpoint with these schemes and this scheme of its cache.

    Args:
        schemes: of its modules.
        cache: of keys and values.
        is_rounded: the engine rounds inputs to 8 bits, whatever the schemes are.

    >>> tolerance_of([Scheme(Args(4, "int", True, "group", 128))], None)
    Tolerance(module=0.015625, kl=0.02)
    """
    bits = [one.inputs.bits for one in schemes if one.inputs is not None]
    bits += [one.outputs.bits for one in schemes if one.outputs is not None]
    module = _FEW_BITS if bits and min(bits) < 8 else _FULL_INPUTS
    bits += [cache.bits] if cache is not None else []
    bits += [8] if is_rounded else []
    if not bits:
        return Tolerance(module, _KL_WEIGHTS)
    return Tolerance(module, _KL_8_BITS if min(bits) >= 8 else _KL_FEW_BITS)


def is_far(divergence: Divergence) -> bool:
    """True if two models have nothing in common but their form."""
    return not divergence.kl <= _FAR


def module_errors(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> dict[str, tuple[float, int]]:
    """Module → the largest relative difference of an output, and which one.

    Of an output the norm over all rows of inputs is taken: a single row of a matrix that is not
    right shows, however many there are.

    Args:
        ours: outputs of the quantized model.
        theirs: outputs of the decoded one.
    """
    found = {}
    for name, given_RN in ours.items():
        wanted_RN = theirs.get(name)
        if not name.startswith("module/") or wanted_RN is None:
            continue
        found[name.removeprefix("module/")] = _largest(given_RN, wanted_RN)
    return found


def _largest(given_RN: Tensor, wanted_RN: Tensor) -> tuple[float, int]:
    if given_RN.shape != wanted_RN.shape or not given_RN.isfinite().all():
        return float("inf"), 0
    norms_N = torch.linalg.vector_norm(wanted_RN, dim=0)
    apart_N = torch.linalg.vector_norm(given_RN - wanted_RN, dim=0)
    least = _LEAST * float(norms_N.median())
    relative_N = torch.where(apart_N == 0, 0.0, apart_N / norms_N.clamp(min=least))
    at = int(relative_N.argmax())
    return float(relative_N[at]), at


def divergence(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Divergence:
    """How far the distributions of the next token are apart, over all prompts.

    Args:
        ours: outputs of the model that is judged.
        theirs: outputs of the one that it is compared with.
    """
    names = [name for name in theirs if name.startswith("logits/") and name in ours]
    agreed = tokens = 0
    kl = differences = largest = 0.0
    for name in names:
        count = min(len(ours[name]), len(theirs[name]))
        width = min(ours[name].shape[1], theirs[name].shape[1])
        log_q, log_p = (
            torch.log_softmax(one[:count, :width].double(), -1)
            for one in (ours[name], theirs[name])
        )
        known = log_p.isfinite() & log_q.isfinite()
        apart = torch.where(known, log_p - log_q, 0.0)
        if log_q.isnan().any() or log_p.isnan().any():
            return Divergence(tokens=count, kl=float("nan"), largest=float("nan"))
        likely = log_p.argmax(-1, keepdim=True)
        told = apart.gather(1, likely).abs()  # of rare tokens differences say little
        kl += float((log_p.exp() * apart).sum())
        differences += float(told.sum())
        largest = max(largest, float(told.max()))
        agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
        tokens += count
    share = max(tokens, 1)
    return Divergence(tokens, agreed / share, kl / share, differences / share, largest)
