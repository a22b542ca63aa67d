# SPDX-License-Identifier: Apache-2.0
"""Sums over tokens for the evaluation metrics, computed for a bounded number of rows at a time.

``B`` batch, ``T`` tokens, ``V`` vocabulary, ``N`` tokens predicted. All probabilities are those
of a float32 log-softmax, whatever the logits' dtype, and sums are kept in float64.
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

# Float32 elements of one chunk of log-probabilities: 32 MiB, and a few such at a time.
_CHUNK_ELEMENTS = 8 * 2**20


@dataclass(frozen=True)
class MetricSums:
    """Sums over predicted tokens; adding two gives those of both sets of tokens.

    Attributes:
        tokens: number of predicted tokens.
        nll: negative log-likelihood of the model.
        reference_nll: negative log-likelihood of the reference, 0 without one.
        kl: KL(reference || model), 0 without a reference.
        agreed: tokens where both models' top-1 is the same, 0 without a reference.
    """

    tokens: int = 0
    nll: float = 0.0
    reference_nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def __add__(self, other: MetricSums) -> MetricSums:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return MetricSums(*(own + others for own, others in pairs))


def predicted_positions(mask_BT: Tensor) -> Tensor:
    """Flat positions that predict a real token from a real token.

    Args:
        mask_BT: bool ``[B, T]``, true where a real token is.

    Returns:
        long ``[N]``, indices into the ``B * T`` rows of logits.
    """
    predicts_BT = torch.zeros_like(mask_BT)
    predicts_BT[:, :-1] = mask_BT[:, :-1] & mask_BT[:, 1:]
    return predicts_BT.flatten().nonzero().squeeze(1)


def batch_sums(
    logits_BTV: Tensor,
    ids_BT: Tensor,
    mask_BT: Tensor,
    reference_BTV: Tensor | None = None,
) -> MetricSums:
    """Compute the sums of one batch over the tokens that :func:`predicted_positions` gives.

    With ``p`` the reference's and ``q`` the model's distribution of the next token, a token adds
    ``-log q(token)`` to ``nll`` and ``sum_v p_v (log p_v - log q_v)`` to ``kl``.

    Args:
        logits_BTV: the model's logits, any float dtype.
        ids_BT: token ids, long.
        mask_BT: bool, true where a real token is.
        reference_BTV: the reference's logits.
    """
    vocabulary = logits_BTV.shape[-1]
    positions_N = predicted_positions(mask_BT)
    next_N = ids_BT.flatten()[positions_N + 1]
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    total = MetricSums()
    for start in range(0, len(positions_N), rows):
        chunk = positions_N[start : start + rows]
        target = next_N[start : start + rows]
        log_q = _log_probabilities(logits_BTV, chunk)
        log_p = None if reference_BTV is None else _log_probabilities(reference_BTV, chunk)
        total += _row_sums(log_q, log_p, target)
    return total


def _log_probabilities(logits_BTV: Tensor, rows_N: Tensor) -> Tensor:
    """Log-probabilities of the chosen rows, float32 ``[N, V]``."""
    rows_NV = logits_BTV.flatten(0, 1).index_select(0, rows_N.to(logits_BTV.device))
    return torch.log_softmax(rows_NV.float(), dim=-1)


def _row_sums(log_q_NV: Tensor, log_p_NV: Tensor | None, target_N: Tensor) -> MetricSums:
    target_N1 = target_N.to(log_q_NV.device)[:, None]
    nll = -log_q_NV.gather(1, target_N1).sum(dtype=torch.float64).item()
    if log_p_NV is None:
        return MetricSums(len(target_N), nll)
    log_p_NV = log_p_NV.to(log_q_NV.device)
    p_NV = log_p_NV.exp()
    # A token that the reference excludes (p = 0) adds nothing, also where q excludes it too.
    terms_NV = torch.where(p_NV > 0, p_NV * (log_p_NV - log_q_NV), 0.0)
    return MetricSums(
        len(target_N),
        nll,
        -log_p_NV.gather(1, target_N1).sum(dtype=torch.float64).item(),
        terms_NV.sum(dtype=torch.float64).item(),
        int((log_p_NV.argmax(-1) == log_q_NV.argmax(-1)).sum()),
    )


# --------------------
# Evaluation results as data.


@dataclass(frozen=True)
class Passage:
    """A window of the text, where the model does badly.

    Attributes:
        window: its number.
        value: mean KL divergence of its tokens from the reference, without one their mean loss, in
            nats.
        text: its text, if the tokenizer is known.
    """

    window: int
    value: float
    text: str = ""


@dataclass(frozen=True)
class TaskScore:
    """A metric of a model on a task of lm-eval.

    Attributes:
        task: the task, or a group of tasks.
        metric: its name, with the filter of answers in parentheses if there is one.
        value: as lm-eval has it: a share from 0 to 1 for ``acc`` and ``exact_match``.
        stderr: standard error of the value, ``None`` where lm-eval gives none.
        higher_is_better: whether a larger value is better, ``None`` where lm-eval does not say.
        samples: number of samples measured.
        num_fewshot: examples before each question.
        reference: the value of the reference, ``None`` without one.
        reference_stderr: its standard error.
    """

    task: str
    metric: str
    value: float
    stderr: float | None = None
    higher_is_better: bool | None = None
    samples: int | None = None
    num_fewshot: int | None = None
    reference: float | None = None
    reference_stderr: float | None = None


@dataclass(frozen=True)
class Report:
    """The metrics of a model on a text and on tasks.

    Those that need a reference are ``None`` without one, those of a text where none was measured.

    Attributes:
        tokens: number of predicted tokens, without padding and the first of each window.
        windows: number of windows that the text was cut into.
        loss: mean negative log-likelihood of a token, in nats.
        reference_loss: the same for the reference.
        kl_divergence: mean over the tokens of KL(reference || model), in nats.
        top1_agreement: share of the tokens where both models' top-1 token is the same.
        worst: the windows where the model is furthest from the reference, or without one has the
            largest loss, the worst first.
        tasks: the scores of lm-eval's tasks.
    """

    tokens: int = 0
    windows: int = 0
    loss: float | None = None
    reference_loss: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    worst: tuple[Passage, ...] = ()
    tasks: tuple[TaskScore, ...] = ()

    @property
    def perplexity(self) -> float | None:
        """``exp(loss)``."""
        return _exp(self.loss)

    @property
    def reference_perplexity(self) -> float | None:
        """``exp(reference_loss)``."""
        return _exp(self.reference_loss)

    @property
    def loss_increase(self) -> float | None:
        """The loss minus the reference's loss."""
        if self.loss is None or self.reference_loss is None:
            return None
        return self.loss - self.reference_loss

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived metrics by name, ready for JSON."""
        derived = ("perplexity", "reference_perplexity", "loss_increase")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def _exp(loss: float | None) -> float | None:
    """The exponential, infinite where it overflows.

    >>> _exp(1e9)
    inf
    """
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
