# SPDX-License-Identifier: Apache-2.0
"""All serving rules against a checkpoint, written or only planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcompressor.verification.facts import Deployment, Finding, Severity, TensorInfo, Tensors
from llmcompressor.verification.rules import RULES
from llmcompressor.verification.rules.base import TENSORS, WRITTEN, Rule, View

__all__ = ["check_serving", "check_view"]


def check_serving(
    config: Mapping[str, Any],
    headers: Mapping[str, TensorInfo],
    *,
    tensors: Tensors | None = None,
    deployment: Deployment | None = None,
    kinds: Mapping[str, str] | None = None,
) -> list[Finding]:
    """What servers would refuse or get wrong.

    Args:
        config: the content of ``config.json``, with its ``quantization_config``.
        headers: every tensor's name, dtype and shape.
        tensors: reads a small tensor by name; without it rules about values are left out.
        deployment: where it is to be served; every server and 1, 2, 4 and 8 devices otherwise.
        kinds: path of a module → ``linear`` or ``embedding``, where the model itself is at hand.
            Otherwise the class that the configuration names is asked, then the names.

    Returns:
        The findings, rule by rule.

    >>> check_serving({"model_type": "llama"}, {"lm_head.weight": TensorInfo("BF16", (8, 4))})
    []
    """
    return check_view(View(config, headers, tensors, deployment, kinds))


def check_view(view: View) -> list[Finding]:
    """As :func:`check_serving`, for a view that has been made."""
    return [finding for rule in RULES for finding in _findings(rule, view)]


def _findings(rule: Rule, view: View) -> Iterator[Finding]:
    if not view.deployment.concerns(rule.server):
        return
    if rule.needs in (TENSORS, WRITTEN) and view.tensors is None:
        return
    for problem in rule.check(view):
        severity = problem.severity or rule.severity
        aside = rule.is_limit and view.deployment.server is None
        if aside and severity is Severity.ERROR and problem.severity is None:
            severity = Severity.WARNING
        yield Finding(
            rule.number, problem.module, problem.message, problem.remedy, severity, rule.server
        )
