# SPDX-License-Identifier: Apache-2.0
"""Packed zero points: their place in a model without data, and their unpacking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor, compress_module
from compressed_tensors.quantization import (
    QuantizationScheme,
    initialize_module_for_quantization,
)
from transformers import LlamaConfig, LlamaForSequenceClassification

from llmcompressor import oneshot
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification.rules.transformers import one_row_unpacks


@pytest.mark.parametrize(("bits", "rows"), [(2, 3), (3, 5), (4, 6), (8, 12)])
def test_the_place_of_packed_zero_points(bits: int, rows: int) -> None:
    """That of what is packed: 45 of them, along the rows."""
    weights = {"num_bits": bits, "group_size": 32, "symmetric": False}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    before = vars(PackedQuantizationCompressor)["compress"]
    shapes = []
    for device in ("meta", "cpu"):
        with torch.device(device), loading_compressed():
            linear = torch.nn.Linear(64, 45, bias=False)
            initialize_module_for_quantization(linear, scheme)
            for name, each in linear.named_parameters():
                each.data.fill_(1 if name == "weight_scale" else 0)
            compress_module(linear)
        shapes.append((linear.weight_zero_point.shape, linear.weight_zero_point.dtype))
    assert shapes == [((rows, 2), torch.int32)] * 2
    assert vars(PackedQuantizationCompressor)["compress"] is before


@pytest.mark.parametrize("rows", [8, 16])
def test_zero_points_in_one_row_of_words(rows: int, tmp_path: Path, said: list[str]) -> None:
    """It is said before the work, the check reads them, and what reads them is known by trying."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(num_labels=rows, num_hidden_layers=1, vocab_size=32, **sizes)
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    group = {"targets": ["re:.*score"], "weights": weights}
    recipe = QuantizationModifier(config_groups={"group_0": group})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    oneshot(tmp_path / "model", recipe, output_dir=tmp_path / "out")
    fails = rows == 8 and not one_row_unpacks()
    (told,) = [number for number, line in enumerate(said) if "one row of 2 words" in line] or [-1]
    begun = next(number for number, line in enumerate(said) if "pipeline" in line)
    assert (told >= 0) == fails
    assert told < begun
    with loading_compressed():
        read = LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    read.config.pad_token_id = 0
    tokens = torch.arange(4)[None]
    if fails:
        with pytest.raises(RuntimeError, match="stride"):
            read(tokens)
    else:
        assert bool(read(tokens).logits.isfinite().all())
