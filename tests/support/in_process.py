# SPDX-License-Identifier: Apache-2.0
"""transformers as an engine in the process of the test, which has imported it already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmcompressor.engines import check
from llmcompressor.engines.check import Engine
from llmcompressor.engines.process import Answer
from llmcompressor.engines.runner import of_transformers

HERE = Engine("transformers", "python")


def answer(job: Mapping[str, Any], *_: Any) -> Answer:
    """What a process of its own would give."""
    stage, versions = "loading", of_transformers.prepare(job)
    try:
        model = of_transformers.load(job)
        stage = "running"
        outputs, facts = of_transformers.run(model, job)
    except Exception as error:
        return Answer(stage, f"{type(error).__name__}: {error}", versions)
    plain = {name: one.detach().float() for name, one in outputs.items()}
    return Answer("done", "", versions, plain, facts["amplitudes"], drawn=facts["drawn"])


def run_here(monkeypatch: pytest.MonkeyPatch, reads: Path | None = None) -> None:
    """Let jobs run here; that of the quantized model reads another folder, if one is given."""

    def run_job(job: Mapping[str, Any], folder: Path, *_: Any) -> Answer:
        is_ours = folder.name == "job-quantized" and reads is not None
        return answer({**job, "model": str(reads)} if is_ours else job)

    monkeypatch.setattr(check, "run_job", run_job)
