# SPDX-License-Identifier: Apache-2.0
"""What is found out of the installed transformers by loading a model of one Linear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor, compress_module
from compressed_tensors.quantization import (
    QuantizationScheme,
    initialize_module_for_quantization,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.packing import patch_packed_zero_points
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.verification import Severity, tried_loads

QUESTIONS = (
    tried_loads.refuses_packed_zero_points,
    tried_loads.refuses_other_shapes,
    tried_loads.renamed_keep_their_dtype,
    lambda: tried_loads.small_float_experts_become("float32"),
    tried_loads.fails_on_one_row_of_words,
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_asking_takes_no_random_number_and_says_nothing(
    question: Callable[[], object], capfd: pytest.CaptureFixture[str]
) -> None:
    tried_loads.refuses_packed_zero_points.cache_clear()
    tried_loads.refuses_other_shapes.cache_clear()
    tried_loads.renamed_keep_their_dtype.cache_clear()
    before = torch.get_rng_state()
    first = question()
    assert question() == first
    assert torch.equal(torch.get_rng_state(), before)
    assert "".join(capfd.readouterr()) == ""


def test_where_the_place_fits_nothing_is_refused() -> None:
    tried_loads.refuses_packed_zero_points.cache_clear()
    with patch_packed_zero_points():
        assert not tried_loads.refuses_packed_zero_points()
    tried_loads.refuses_packed_zero_points.cache_clear()


@pytest.mark.parametrize(("bits", "rows"), [(2, 3), (3, 5), (4, 6), (8, 12)])
def test_the_place_of_packed_zero_points(bits: int, rows: int) -> None:
    """That of what is packed: 45 of them, along the rows."""
    weights = {"num_bits": bits, "group_size": 32, "symmetric": False}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")
    before = vars(PackedQuantizationCompressor)["compress"]
    shapes = []
    for device in ("meta", "cpu"):
        with torch.device(device), patch_packed_zero_points():
            linear = torch.nn.Linear(64, 45, bias=False)
            initialize_module_for_quantization(linear, scheme)
            for name, each in linear.named_parameters():
                each.data.fill_(1 if name == "weight_scale" else 0)
            compress_module(linear)
        shapes.append((linear.weight_zero_point.shape, linear.weight_zero_point.dtype))
    assert shapes == [((rows, 2), torch.int32)] * 2
    assert vars(PackedQuantizationCompressor)["compress"] is before


def test_what_cannot_be_tried_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A release that cannot be asked is not taken for one that refuses nothing."""
    settings = {"num_bits": 4, "group_size": 32, "symmetric": False}
    group = {"targets": ["Linear"], "weights": settings}
    recipe = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    oneshot(tiny_llama(), recipe, output_dir=tmp_path / "out")
    assert not tried_loads.why_untried()

    def fail() -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(tried_loads, "_tiny_class", fail)
    asked = (tried_loads.why_untried, tried_loads.refuses_packed_zero_points)
    for question in asked:
        question.cache_clear()
    try:
        found = verify(tmp_path / "out", serve="transformers").findings
    finally:
        for question in asked:
            question.cache_clear()
    told = [one for one in found if one.rule == "L9"]
    assert told
    assert all("could not be tried: TypeError: no such argument" in one.message for one in told)
    assert {one.severity for one in told} == {Severity.WARNING}


def tiny_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=1, **sizes))


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
    fails = rows == 8 and tried_loads.fails_on_one_row_of_words()
    (told,) = [number for number, line in enumerate(said) if "one row of 2 words" in line] or [-1]
    begun = next(number for number, line in enumerate(said) if "pipeline" in line)
    assert (told >= 0) == fails
    assert told < begun
    with patch_packed_zero_points():
        read = LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    read.config.pad_token_id = 0
    tokens = torch.arange(4)[None]
    if fails:
        with pytest.raises(RuntimeError, match="stride"):
            read(tokens)
    else:
        assert bool(read(tokens).logits.isfinite().all())
