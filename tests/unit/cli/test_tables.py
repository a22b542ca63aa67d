# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

from rich.console import Console

from llmcompressor.cli.demo import DemoResult, DemoRow
from llmcompressor.cli.tables import print_demo
from llmcompressor.evaluation.metrics import Report

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
