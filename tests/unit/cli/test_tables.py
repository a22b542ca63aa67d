# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

from rich.console import Console

from llmcompressor.cli.demo import DemoResult, DemoRow
from llmcompressor.cli.tables import print_demo, print_report
from llmcompressor.evaluation.metrics import Report, TaskScore

REPORT = Report(100, 4, 2.0, reference_loss=1.5, kl_divergence=0.25, top1_agreement=0.875)


def test_the_demo_shows_every_figure() -> None:
    result = DemoResult(
        text="text",
        tokens=100,
        original_bytes=7_348_736,
        original_perplexity=14.7361,
        rows=(DemoRow("W4A16 GPTQ", 2_500_000, REPORT, 12.34, 812_000_000),),
        prompt="def ",
        completions={"original": "a[b]", "W4A16 GPTQ": "c"},
        folder=None,
    )
    text = io.StringIO()
    print_demo(result, Console(file=text, width=140))
    shown = ["7.3 MB", "14.736", "W4A16 GPTQ", "2.5 MB", "7.389", "0.2500", "87.5%", "12.3"]
    for figure in [*shown, "812.0 MB", "'def '", "'a[b]'", "'c'"]:
        assert figure in text.getvalue()


def test_scores_of_tasks_stand_beside_the_reference() -> None:
    def shown(report: Report) -> list[list[str]]:
        text = io.StringIO()
        print_report(report, Console(file=text, width=140))
        return [line.split() for line in text.getvalue().splitlines()]

    alone = TaskScore("gsm8k", "acc", 0.5, 0.0125, True, samples=40)
    assert shown(Report(tasks=(alone,))) == [
        ["Task", "Metric", "Better", "Samples", "Checkpoint"],
        ["gsm8k", "acc", "higher", "40", "0.5000", "±", "0.0125"],
    ]
    beside = TaskScore("wiki", "perplexity", 9.0, None, False, reference=8.5, reference_stderr=0.1)
    *of_text, heading, row = shown(Report(8, 2, 2.0, tasks=(beside,)))
    assert ["Loss", "2.0000"] in of_text
    assert heading[-1] == "Reference"
    assert row == ["wiki", "perplexity", "lower", "-", "9.0000", "8.5000", "±", "0.1000"]
