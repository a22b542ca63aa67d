# SPDX-License-Identifier: Apache-2.0
"""The verifier's decoding is that of compressed-tensors, of every format and width."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from tests.support.checkpoint_samples import Sample, coded, made
from tests.support.pairs import each
from torch import Tensor

from llmcompressor.schemes.presets import PRESETS, format_of, preset_scheme
from llmcompressor.verification.expected import Codes, codes_of
from llmcompressor.verification.files import open_checkpoint
from llmcompressor.verification.rules.view import View

NAME = "model.layers.0.mlp.up_proj"
QUANTIZED = sorted(set(PRESETS) - {"UNQUANTIZED"})


def codes(sample: Sample, folder: Path) -> Codes:
    files = open_checkpoint(sample.write(folder, shards=1))
    view = View(files.config, files.headers, files.read)
    entry = view.entries[NAME]
    scheme = view.scheme(entry)
    assert scheme is not None
    columns = view.columns(entry, scheme)
    assert columns is not None
    found = codes_of(files, entry, scheme, columns)
    assert found is not None
    return found


def decoded(found: Codes) -> Tensor:
    parts = [(part.units * part.scale).flatten(1) for part in found.parts()]
    return torch.cat(parts)


def by_compressed_tensors(sample: Sample, scheme: QuantizationScheme) -> Tensor:
    own = sample.own(NAME)
    scale = own["weight_scale"]
    # in float32, so that the product is not rounded
    if scale.dtype in (torch.bfloat16, torch.float16):
        own["weight_scale"] = scale.float()
    compressor = BaseCompressor.get_value_from_registry(format_of(scheme))
    found: Tensor = compressor.decompress(own, scheme)["weight"].float()
    return found


@pytest.mark.parametrize("preset", QUANTIZED)
def test_every_preset(preset: str, tmp_path: Path) -> None:
    sample = made({NAME: (200, 384)}, preset)
    expected = by_compressed_tensors(sample, preset_scheme(preset))
    # MX formats are decoded to bfloat16 there
    torch.testing.assert_close(decoded(codes(sample, tmp_path)), expected, rtol=2**-7, atol=0)


@each(bits=range(2, 9), columns=[96, 100])
def test_rows_that_end_within_a_word(bits: int, columns: int, tmp_path: Path) -> None:
    scheme = preset_scheme(f"W{bits}A16_ASYM")
    weights = scheme.weights.model_copy(update={"strategy": "channel", "group_size": None})
    scheme = scheme.model_copy(update={"weights": weights})
    sample = made({NAME: (70, columns)}, scheme)
    found = codes(sample, tmp_path)
    assert torch.equal(decoded(found), by_compressed_tensors(sample, scheme))


@pytest.mark.parametrize("shape", [(130, 100), (128, 256), (1, 129)])
def test_blocks_that_are_not_whole(shape: tuple[int, int], tmp_path: Path) -> None:
    sample = made({NAME: shape}, "FP8_BLOCK")
    expected = by_compressed_tensors(sample, preset_scheme("FP8_BLOCK"))
    torch.testing.assert_close(decoded(codes(sample, tmp_path)), expected)


def test_many_parts_are_one_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = made({NAME: (333, 256)}, "W4A16_ASYM")
    found = codes(sample, tmp_path)
    whole = decoded(found)
    monkeypatch.setattr("llmcompressor.verification.expected.CHUNK", 1)
    assert len(list(found.parts())) == 11
    assert torch.equal(decoded(found), whole)


def test_every_code_of_eight_bit_floats(tmp_path: Path) -> None:
    sample = made({NAME: (2, 128)}, "FP8_DYNAMIC")
    every = torch.arange(256, dtype=torch.uint8)
    every[[127, 255]] = 0
    sample.tensors[f"{NAME}.weight"] = every.view(torch.float8_e4m3fn).reshape(2, 128)
    sample.tensors[f"{NAME}.weight_scale"].fill_(1)
    expected = every.view(torch.float8_e4m3fn).float().reshape(2, 128)
    assert torch.equal(decoded(codes(sample, tmp_path)), expected)


def test_every_pair_of_four_bit_floats(tmp_path: Path) -> None:
    sample = made({NAME: (1, 512)}, "MXFP4")
    sample.tensors[f"{NAME}.weight_packed"] = torch.arange(256, dtype=torch.uint8)[None]
    exponents = torch.arange(16, dtype=torch.uint8)[None] * 16
    sample.tensors[f"{NAME}.weight_scale"] = exponents
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    octets = torch.arange(256)
    pairs = torch.stack([values[octets & 15], values[octets >> 4]], 1).reshape(16, 32)
    expected = pairs.double() * 2.0 ** (exponents.double().reshape(16, 1) - 127)
    assert torch.equal(decoded(codes(sample, tmp_path)).double(), expected.reshape(1, 512))


@pytest.mark.skipif("MXFP6A16" not in PRESETS, reason="compressed-tensors has no 6-bit floats")
def test_every_pair_of_six_bit_floats(tmp_path: Path) -> None:
    """Each of the 64 codes beside each other one, first and last of four."""
    sample = made({NAME: (64, 256)}, "MXFP6A16")
    low, high = torch.arange(64).repeat_interleave(64).reshape(64, 64), torch.arange(64)
    word = low | (low << 6) | (high << 12) | (high << 18)
    octets = torch.stack([word, word >> 8, word >> 16], -1).bitwise_and(255).to(torch.uint8)
    sample.tensors[f"{NAME}.weight_packed"] = octets.reshape(64, 192)
    sample.tensors[f"{NAME}.weight_scale"] = torch.full((64, 8), 126, dtype=torch.uint8)
    sizes = (
        [k / 8 for k in range(16)] + [2 + k / 4 for k in range(8)] + [4 + k / 2 for k in range(8)]
    )
    values = torch.tensor([*sizes, *(-size for size in sizes)])
    expected = torch.stack([values[code.expand(64, 64)] for code in (low, low, high, high)], -1)
    assert torch.equal(decoded(codes(sample, tmp_path)), expected.reshape(64, 256) / 2)


def test_a_made_sample_is_near_its_weight() -> None:
    """The packing of these tests is what it says: nearest rounding."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    scheme = preset_scheme("W8A16")
    own = coded(weight, scheme)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    again = compressor.decompress(own, scheme)["weight"].float()
    assert float((again - weight).norm() / weight.norm()) < 0.01
