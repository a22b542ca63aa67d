# SPDX-License-Identifier: Apache-2.0
"""Rules of servers: the table of all, and their check against a checkpoint or a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from llmcompressor.verification.facts import Deployment, Finding, Severity, TensorInfo, Tensors
from llmcompressor.verification.rules import presence, sglang, structure, transformers, vllm
from llmcompressor.verification.rules.view import TENSORS, WRITTEN, Rule, View, rules

__all__ = ["NOT_CHECKED", "RULES", "check_serving", "check_view"]

_SECTIONS = (presence, sglang, structure, transformers, vllm)
"""Their import enters the rules into the table."""
RULES: tuple[Rule, ...] = rules()

NOT_CHECKED = MappingProxyType(
    {
        "S17": "Data for others: the table of families that S14, S15, S16 and S68 use.",
        "S31": "Servers handle it: shards of FP8 tensors are requantized to the largest scale.",
        "S56": "Says what is left out: attention groups are skipped, which S2 allows for.",
        "T3": "Says when transformers decompresses; nothing in a checkpoint can breach it.",
        "T7": "The same facts as S77 and S5, which are checked.",
        "G8": "The same settings as S5 and S6, which are checked.",
    }
)


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
