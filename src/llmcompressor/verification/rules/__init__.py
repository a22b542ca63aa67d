# SPDX-License-Identifier: Apache-2.0
"""Rules of servers: their check against a checkpoint or a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcompressor.verification.catalogue import RULES
from llmcompressor.verification.facts import Deployment, Finding, Severity, TensorInfo, Tensors
from llmcompressor.verification.rules.serving import SERVING
from llmcompressor.verification.rules.structure import FOREIGN, STRUCTURE
from llmcompressor.verification.rules.transformers import LOADING
from llmcompressor.verification.rules.view import Problem, View

__all__ = ["check_serving", "check_view"]

_ORDER = list(RULES)


def check_serving(
    config: Mapping[str, Any],
    headers: Mapping[str, TensorInfo],
    *,
    tensors: Tensors | None = None,
    deployment: Deployment | None = None,
    kinds: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Findings about what servers would refuse or get wrong.

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
    checks = [*STRUCTURE, *SERVING]
    checks += LOADING if view.deployment.concerns("transformers") else ()
    checks = [*FOREIGN] if view.is_foreign else checks
    problems = (problem for check in checks for problem in check(view))
    found = _findings(view, problems)
    return sorted(found, key=lambda finding: _ORDER.index(finding.rule))


def _findings(view: View, problems: Iterator[Problem]) -> Iterator[Finding]:
    for one in problems:
        rule = RULES[one.rule]
        if view.deployment.concerns(rule.server):
            severity = one.severity or rule.severity
            if rule.is_limit and view.deployment.server is None and one.severity is None:
                severity = Severity.WARNING
            yield Finding(one.rule, one.module, one.message, one.remedy, severity, rule.server)
