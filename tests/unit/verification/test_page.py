# SPDX-License-Identifier: Apache-2.0
"""The page on the verifier says what the rules are, and every rule is tried."""

from __future__ import annotations

from tests.house import ROOT
from tests.support.faults import FAULTS, REFUSES_OTHER_SHAPES
from tests.unit.verification.test_files import DAMAGES

from llmcompressor.verification.catalogue import NOT_CHECKED, RULES, markdown

PAGE = ROOT / "docs" / "verify_rules.md"
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
    checked = set(RULES)
    assert not checked & set(NOT_CHECKED)
    served = {number for number in checked if number[0] in "STG"}
    assert served | set(NOT_CHECKED) == SPECIFIED


def test_every_rule_has_a_fault_that_it_finds() -> None:
    tried = {fault.rule for fault in FAULTS} | {rule for rule, _, _ in DAMAGES}
    tried.add("L10")  # it takes classes of their own: test_own_modules.py, test_conversions.py
    if not REFUSES_OTHER_SHAPES:
        tried.add("L9")  # the installed transformers does not ask for it
    assert set(RULES) == tried
    assert len(FAULTS) + len(DAMAGES) >= 30


def test_the_severity_of_the_table_is_that_of_a_fault() -> None:
    found: dict[str, set[str]] = {}
    for fault in FAULTS:
        found.setdefault(fault.rule, set()).add(fault.severity.value)
    for number, rule in RULES.items():
        if number in found:
            assert rule.severity.value in found[number], number
