# SPDX-License-Identifier: Apache-2.0
"""The page on the verifier says what the rules are, and every rule is tried."""

from __future__ import annotations

import re

from tests.house import ROOT
from tests.support.faults import FAULTS, REFUSES_OTHER_SHAPES
from tests.unit.verification.test_files import DAMAGES

from llmcompressor.verification.catalogue import CATALOGUE, markdown
from llmcompressor.verification.rules import NOT_CHECKED, RULES

PAGE = ROOT / "docs" / "verify.md"
# The numbers of the specification of servers.
SPECIFIED = {
    *(f"S{number}" for number in range(1, 78)),
    "S18a",
    *(f"T{number}" for number in range(1, 8)),
    *(f"G{number}" for number in range(1, 9)),
}


def test_the_page_has_the_table() -> None:
    """``python -m llmcompressor.verification.catalogue`` prints what has to stand there."""
    assert markdown() in PAGE.read_text(encoding="utf-8")


def test_every_number_is_checked_or_its_absence_explained() -> None:
    checked = {line.number for line in CATALOGUE}
    assert not checked & set(NOT_CHECKED)
    served = {number for number in checked if number[0] in "STG"}
    assert served | set(NOT_CHECKED) == SPECIFIED


def test_every_rule_has_a_fault_that_it_finds() -> None:
    tried = {fault.rule for fault in FAULTS} | {rule for rule, _, _ in DAMAGES}
    tried.add("L10")  # it takes classes of their own: test_own_modules.py, test_conversions.py
    if not REFUSES_OTHER_SHAPES:
        tried.add("L9")  # the installed transformers does not ask for it
    assert {line.number for line in CATALOGUE} == tried
    assert len(FAULTS) + len(DAMAGES) >= 30


def test_the_severity_of_the_table_is_that_of_a_fault() -> None:
    found: dict[str, set[str]] = {}
    for fault in FAULTS:
        found.setdefault(fault.rule, set()).add(fault.severity.value)
    for line in CATALOGUE:
        if line.number in found:
            assert line.severity.split()[0] in found[line.number], line.number


def test_rules_have_a_server_and_a_release() -> None:
    letters = {
        "S": {"vllm", "transformers", ""},  # S70: what is missing, every reader lacks
        "T": {"transformers"},
        "G": {"sglang"},
        "C": {""},
        "L": {"transformers"},
    }
    for rule in RULES:
        assert rule.server in letters[rule.number[0]], rule.number
        assert bool(rule.holds_for) == bool(rule.server)
        assert re.fullmatch(r"[a-zA-Z0-9].{5,70}", rule.title), rule.title
