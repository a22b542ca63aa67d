# SPDX-License-Identifier: Apache-2.0
"""Evaluation results as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """The metrics of a model on a text; those that need a reference are ``None`` without one.

    Attributes:
        tokens: number of predicted tokens, without padding and the first of each window.
        windows: number of windows that the text was cut into.
        loss: mean negative log-likelihood of a token, in nats.
        reference_loss: the same for the reference.
        kl_divergence: mean over the tokens of KL(reference || model), in nats.
        top1_agreement: share of the tokens where both models' top-1 token is the same.
    """

    tokens: int
    windows: int
    loss: float
    reference_loss: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return _exp(self.loss)

    @property
    def reference_perplexity(self) -> float | None:
        """``exp(reference_loss)``."""
        return None if self.reference_loss is None else _exp(self.reference_loss)

    @property
    def loss_increase(self) -> float | None:
        """The loss minus the reference's loss."""
        return None if self.reference_loss is None else self.loss - self.reference_loss

    def as_dict(self) -> dict[str, float | int | None]:
        """Fields and derived metrics by name, ready for JSON."""
        return {
            **asdict(self),
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
            "loss_increase": self.loss_increase,
        }


def _exp(loss: float) -> float:
    """The exponential, infinite where it overflows.

    >>> _exp(1e9)
    inf
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
