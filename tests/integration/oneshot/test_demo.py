# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from llmcompressor.cli import demo as page


@pytest.mark.slow
def test_the_demo_compresses_and_keeps_the_quality() -> None:
    result = page.demo(num_calibration_samples=16, num_windows=16)
    gptq, fp8 = result.rows
    assert gptq.size_bytes < 0.6 * result.original_bytes
    assert fp8.size_bytes < 0.75 * result.original_bytes
    for row in result.rows:
        assert row.report.kl_divergence is not None
        assert row.report.loss_increase is not None
        assert 0 < row.report.kl_divergence < 0.15
        assert row.report.loss_increase < 0.1
