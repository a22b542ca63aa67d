# SPDX-License-Identifier: Apache-2.0
"""Faults of one module and of distributions are told, and roundings of an engine are not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmcompressor.engines.compare import (
    divergence,
    is_far,
    module_errors,
    tolerance_of,
)
from llmcompressor.engines.runner import signs
from llmcompressor.verification.report import Divergence
from llmcompressor.verification.scheme import Args, Scheme

WEIGHTS = Args(4, "int", True, "group", 128)


def outputs(weight_NC: Tensor) -> dict[str, Tensor]:
    rows = signs("up", 32, weight_NC.shape[1])
    return {"module/up": (rows.bfloat16() @ weight_NC.bfloat16().T).float()}


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))


def error(weight: Tensor, spoilt: Tensor) -> float:
    return module_errors(outputs(spoilt), outputs(weight))["up"][0]


def test_what_an_engine_rounds_is_allowed(weight: Tensor) -> None:
    """Weights and products in bfloat16 twice over, and a scale half a step off."""
    rounded = weight.bfloat16().float() * (1 - 2.0**-8)
    assert 0 < error(weight, rounded) < tolerance_of([Scheme(WEIGHTS)], None).module


@pytest.mark.parametrize("fault", ["two rows", "a scale", "a rotation", "columns", "sign"])
def test_a_fault_of_one_row_shows_among_thousands(weight: Tensor, fault: str) -> None:
    spoilt = weight.clone()
    if fault == "two rows":
        spoilt[[7, 4000]] = weight[[4000, 7]]
    elif fault == "a scale":  # of one group of one row
        spoilt[9, :64] *= 2
    elif fault == "a rotation":
        turn = torch.linalg.qr(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)))
        spoilt = weight @ turn.Q
    elif fault == "columns":
        spoilt = weight.roll(1, dims=1)
    else:
        spoilt[11] = -weight[11]
    assert error(weight, spoilt) > 10 * tolerance_of([Scheme(WEIGHTS)], None).module


def test_zeros_of_both_are_equal(weight: Tensor) -> None:
    weight[3] = 0
    assert error(weight, weight.clone()) == 0
    spoilt = weight.clone()
    spoilt[3, 0] = 1e-3
    assert error(weight, spoilt) > 0


def test_what_is_not_finite_or_of_another_shape_is_apart(weight: Tensor) -> None:
    spoilt = weight.clone()
    spoilt[0, 0] = math.nan
    assert error(weight, spoilt) == math.inf
    assert error(weight, weight[:-1]) == math.inf


def test_divergence_is_that_of_the_textbook() -> None:
    ours, theirs = (torch.randn(9, 50, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    log_q, log_p = ours.log_softmax(-1), theirs.log_softmax(-1)
    found = divergence({"logits/0": ours}, {"logits/0": theirs})
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(kl), rel=1e-5)
    assert found.tokens == 9
    at = log_p.argmax(-1)
    rows = torch.arange(9)
    assert found.largest == pytest.approx(float((log_q - log_p)[rows, at].abs().max()), rel=1e-5)
    assert found.agreement == int((log_q.argmax(-1) == at).sum()) / 9


def test_tokens_that_are_not_known_are_left_out() -> None:
    whole = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    top = whole.topk(8).indices
    few = torch.full_like(whole, -math.inf).scatter(1, top, whole.gather(1, top))
    assert divergence({"logits/0": few}, {"logits/0": few}).kl == 0


def test_equal_models_are_not_apart_and_nan_is_far() -> None:
    logits = {"logits/0": torch.randn(4, 50)}
    assert divergence(logits, logits).kl == 0
    assert not is_far(divergence(logits, logits))
    assert is_far(divergence({"logits/0": logits["logits/0"] * math.nan}, logits))
    assert is_far(Divergence(kl=2.0))


@pytest.mark.parametrize(
    ("inputs", "cache", "module", "kl"),
    [
        (None, None, 2**-6, 0.02),
        (8, None, 2**-6, 0.1),
        (None, 8, 2**-6, 0.1),
        (4, None, 2**-3, 1.0),
        (8, 4, 2**-6, 1.0),
    ],
)
def test_tolerances(inputs: int | None, cache: int | None, module: float, kl: float) -> None:
    def args(bits: int | None) -> Args | None:
        return None if bits is None else Args(bits, "int", True, "token")

    found = tolerance_of([Scheme(WEIGHTS, args(inputs))], args(cache))
    assert (found.module, found.kl) == (module, kl)


def test_inputs_that_an_engine_rounds_by_itself() -> None:
    """Their roundings are carried on, and a module by itself is as exact as before."""
    plain, rounded = (
        tolerance_of([Scheme(WEIGHTS)], None, is_rounded=one) for one in (False, True)
    )
    assert rounded == tolerance_of([Scheme(WEIGHTS, Args(8, "int", True, "token"))], None)
    assert plain.kl < rounded.kl
    assert plain.module == rounded.module
