# SPDX-License-Identifier: Apache-2.0
"""What stands in for kernels decodes as the verifier does, though neither knows the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from tests.support.checkpoint_samples import Sample

from llmcompressor.engines.decoded import weight_of
from llmcompressor.engines.runner.stand_ins import decoded, six_bits
from llmcompressor.verification.check import codes_of_entry
from llmcompressor.verification.files import open_checkpoint
from llmcompressor.verification.rules.view import View

BASES = ["W4A16", "W4A16_ASYM", "W3A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4"]


@pytest.mark.parametrize("base", [*BASES, "MXFP4"])
def test_decoded_alike(base: str, good: Callable[[str], Sample], tmp_path: Path) -> None:
    sample = good(base)
    with closing(open_checkpoint(sample.write(tmp_path / "model"))) as files:
        view = View(files.config, files.headers, files.read)
        for entry, scheme in view.coded:
            codes = codes_of_entry(files, view, entry, scheme)
            assert codes is not None
            own = {name: SimpleNamespace(data=one) for name, one in sample.own(entry.name).items()}
            raw = next(iter(sample.groups.values()))["weights"]
            layer = SimpleNamespace(
                input_size_per_partition=codes.columns, logical_widths=[codes.rows]
            )
            found = decoded(own, QuantizationArgs.model_validate(raw), layer)
            torch.testing.assert_close(found, weight_of(codes))


def test_scales_of_joined_parts() -> None:
    own = {"weight": torch.ones(5, 2, dtype=torch.int8), "weight_scale": torch.tensor([2.0, 3.0])}
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    layer = SimpleNamespace(logical_widths=[1, 4])
    named = {name: SimpleNamespace(data=one) for name, one in own.items()}
    assert decoded(named, args, layer)[:, 0].tolist() == [2, 3, 3, 3, 3]


def test_six_bits() -> None:
    """As the verifier's own example."""
    assert six_bits(torch.tensor([[193, 15, 1]], dtype=torch.uint8)).tolist() == [
        [0.125, -7.5, 2.0, 0.0]
    ]
