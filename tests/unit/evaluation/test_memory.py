# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import psutil

from llmcompressor.evaluation.measure import PeakMemory


def test_memory_that_was_given_back_still_shows() -> None:
    before = psutil.Process().memory_info().rss
    with PeakMemory() as peak:
        held = bytearray(b"x") * (200 * 2**20)
        time.sleep(0.1)
        del held
    assert peak.bytes - before > 150 * 2**20
    assert psutil.Process().memory_info().rss < peak.bytes
