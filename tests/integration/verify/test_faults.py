# SPDX-License-Identifier: Apache-2.0
"""Each fault, planted alone in a good checkpoint, is reported under its rule, for its module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.checkpoint_samples import Sample
from tests.support.faults import FAULTS, Fault
from tests.support.sample_bases import MADE

from llmcompressor import verify
from llmcompressor.verification import Finding, Severity
from llmcompressor.verification.check import verify_files


def found(sample: Sample, folder: Path, fault: Fault, source: Path) -> list[Finding]:
    report = verify_files(
        sample.write(folder),
        source if fault.compared else None,
        deployment=fault.deployment,
        workers=1,
    )
    return list(report.findings)


@pytest.mark.parametrize("base", sorted({fault.base for fault in FAULTS}))
def test_the_base_is_good(
    base: str, good: Callable[[str], Sample], tmp_path: Path, source: Path
) -> None:
    reference = source if base not in MADE else None
    folder = good(base).write(tmp_path / "checkpoint")
    report = verify(folder, reference, serve="vllm", tp=1, gpu="h100")
    bad = [finding for finding in report.findings if finding.severity is not Severity.NOTE]
    assert not bad


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(
    fault: Fault,
    good: Callable[[str], Sample],
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault.stand_in(monkeypatch)
    sample = good(fault.base)
    fault.plant(sample)
    findings = found(sample, tmp_path / "checkpoint", fault, source)
    named = [
        finding
        for finding in findings
        if (finding.rule, finding.module) == (fault.rule, fault.module)
        and finding.severity is fault.severity
    ]
    said = [f"{each.severity.value} {each.rule} {each.module}: {each.message}" for each in findings]
    assert named, "\n".join(said)
    assert all(finding.message and finding.remedy for finding in findings)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
