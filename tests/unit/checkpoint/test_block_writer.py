# SPDX-License-Identifier: Apache-2.0
"""Blocks are written one at a time: while one is, the next is made, and nothing else waits."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from llmcompressor.checkpoint.block_writer import BlockWriter
from llmcompressor.checkpoint.tensor_files import StoredTensor, layout_files


def test_a_block_is_taken_when_the_one_before_is_durable(tmp_path: Path) -> None:
    names = ["a", "b"]
    layout = layout_files([StoredTensor(name, "F32", (4,)) for name in names], 2**20)
    writer = BlockWriter(tmp_path, layout)
    may_end, done = threading.Event(), []

    def commit(name: str) -> None:
        may_end.wait()
        done.append(name)

    writer.write({"a": torch.ones(4)}, lambda digest: commit("a"))  # does not wait for itself
    second = threading.Thread(
        target=lambda: writer.write({"b": torch.ones(4)}, lambda digest: commit("b"))
    )
    second.start()
    second.join(0.2)
    waited = second.is_alive()
    may_end.set()
    second.join()
    writer.flush()
    writer.close()
    assert waited
    assert done == names
