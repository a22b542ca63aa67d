# SPDX-License-Identifier: Apache-2.0
"""Rules about a server, and what its engine has shown of them by running a checkpoint.

A rule is read from the sources of a release. Where the engine at hand runs a checkpoint and
computes what its decoded weights do, a rule that says otherwise is about another release, unless it
is about something that such a run does not show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from llmcompressor.engines.decoded import Source
from llmcompressor.verification.catalogue import RULES
from llmcompressor.verification.facts import Deployment, Finding, Severity
from llmcompressor.verification.rules import check_view
from llmcompressor.verification.rules.view import View

_STATES = "A model with decoded weights rounds neither cache nor states: it has nothing to compare."
UNSEEN = {
    **dict.fromkeys(("S49", "S50", "S51", "S52", "S53", "S54", "S55", "L7", "L11"), _STATES),
    "S61": "No prompt runs the draft layers.",
    "S68": "What a file lacks its decoded model lacks as well.",
}
"""Number of a server's rule → why a checkpoint that runs in it may breach the rule all the same."""
_RUNS = "The engine has run it all the same."
_OF_DATA = "all data"


def refusals(findings: Iterable[Finding], server: str) -> list[Finding]:
    """The findings by which a server refuses a checkpoint or gets it wrong.

    Args:
        findings: of ``verify``.
        server: its name.
    """
    grave = {Severity.ERROR, Severity.WARNING}
    return [
        one
        for one in findings
        if one.server == server
        and one.rule in RULES
        and one.severity in (grave if RULES[one.rule].is_limit else {Severity.ERROR})
    ]


def warned(findings: Iterable[Finding], source: Source, server: str) -> list[Finding]:
    """Warnings that are errors where that server alone is asked about, on one device.

    Args:
        findings: of ``verify``.
        source: the checkpoint, and the blocks that run.
        server: its name.
    """
    told = [one for one in findings if one.server == server and one.severity is Severity.WARNING]
    if not told:
        return []
    refused = {
        (one.rule, one.message)
        for one in _of_one_device(source, server)
        if one.severity is Severity.ERROR
    }
    return [
        one
        for one in told
        if (one.rule, one.message) in refused and source.counts(f"{one.module}.")
    ]


def _of_one_device(source: Source, server: str) -> list[Finding]:
    tried = Deployment(server, tp=(1,), dtype=source.dtype)
    return check_view(View(source.files.config, source.view.headers, source.files.read, tried))


def overruled(
    told: Collection[Finding], source: Source, server: str, deployment: Deployment
) -> list[Finding]:
    """Those of a server's findings that are about what its engine has run.

    It has run on one device, the one at hand, in the dtype of the checkpoint, and perhaps with a
    part of the blocks. What is told of that by the same words is about it.

    Args:
        told: what :func:`refusals` gives.
        source: the checkpoint, and the blocks that have run.
        server: its name.
        deployment: that the findings are of.
    """
    if deployment.gpu is not None:
        return []
    known = {(one.rule, one.message) for one in _of_one_device(source, server)}
    known &= {(one.rule, one.message) for one in told if source.counts(f"{one.module}.")}

    def is_of_it(one: Finding) -> bool:
        if RULES[one.rule].decided == _OF_DATA:  # of this module's, and of no other's
            return source.counts(f"{one.module}.")
        return (one.rule, one.message) in known

    return [one for one in told if one.rule not in UNSEEN and is_of_it(one)]


def as_notes(findings: Iterable[Finding], shown: Collection[Finding]) -> tuple[Finding, ...]:
    """The findings, with those that an engine has shown to be otherwise as notes."""
    return tuple(
        replace(one, message=f"{one.message} {_RUNS}", severity=Severity.NOTE)
        if one in shown
        else one
        for one in findings
    )


def explained(rules: Iterable[str], left: Iterable[str]) -> str:
    """What E6 says.

    Args:
        rules: that are overruled.
        left: that are not.

    >>> explained([], ["S49"])
    'The engine runs it, and computes what its decoded weights do. Such a run does not show: S49.'
    """
    said = ["The engine runs it, and computes what its decoded weights do."]
    if named := ", ".join(rules):
        said.append(
            f"{named} would have it refused or wrong: this release or device differs from the one "
            "that the rules are of."
        )
    if named := ", ".join(left):
        said.append(f"Such a run does not show: {named}.")
    return " ".join(said)
