# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
)
from tests.support import tiny_checkpoints as tiny
from torch import Tensor

from llmcompressor.checkpoint.packing import (
    QuantizedModule,
    compress,
    parse_format,
    quantized_modules,
)
from llmcompressor.errors import ArgumentError, LifecycleError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.schemes.bridge import compatible_formats
from llmcompressor.schemes.presets import PRESETS, format_of, preset_scheme

ASYMMETRIC = {"symmetric": False}
PRESET_NAMES = [name for name in PRESETS if name != "UNQUANTIZED"]


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Warnings while a test runs."""
    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(str(message)), level="WARNING")
    yield messages
    logger.remove(sink)


def own_tensors(entry: QuantizedModule) -> dict[str, Tensor]:
    return {name: tensor.data for name, tensor in entry.module.named_parameters(recurse=False)}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_packed_tensors_decode_to_the_weights_in_memory(name: str) -> None:
    model = tiny.quantize_model(tiny.qwen2(), {"g": preset_scheme(name, ["Linear"])})
    entries = quantized_modules(model)
    assert len(entries) == 14
    for entry in entries:
        own = own_tensors(entry)
        before = {key: tensor.clone() for key, tensor in own.items()}
        packed = compress(entry, own)
        reader = BaseCompressor.get_value_from_registry(entry.scheme.format)
        assert torch.equal(reader.decompress(packed, entry.scheme)["weight"], before["weight"])
        assert all(torch.equal(tensor, before[key]) for key, tensor in own.items())
        assert ("bias" in packed) == ("bias" in own)


@pytest.mark.parametrize(
    ("dtype", "bits", "symmetric"),
    [
        (torch.bfloat16, 4, True),
        (torch.bfloat16, 8, False),
        (torch.float16, 8, True),
        (torch.float16, 7, False),
        (torch.float32, 7, True),
        (torch.float32, 4, False),
    ],
)
def test_no_code_is_lost_to_rounding(dtype: torch.dtype, bits: int, symmetric: bool) -> None:
    """All codes of many scales, decoded in the model's dtype, survive being encoded again."""
    torch.manual_seed(bits)
    args = QuantizationArgs(num_bits=bits, strategy="channel", symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).expand(256, -1).contiguous()
    scale = (torch.rand(256, 1) * 0.1 + 1e-3).to(dtype)
    zero = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (256, 1), dtype=torch.int8)
    shifted = codes.to(dtype) - (0 if symmetric else zero.to(dtype))
    own = {"weight": shifted * scale, "weight_scale": scale, "weight_zero_point": zero}
    entry = QuantizedModule("m", torch.nn.Linear(1, 1), scheme)
    reader = BaseCompressor.get_value_from_registry("pack-quantized")
    decoded = reader.decompress(compress(entry, own), scheme)["weight"]
    assert torch.equal(decoded, own["weight"])


_BF16, _FP8, _FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
_PACKED = {"weight_packed": torch.int32, "weight_scale": _BF16, "weight_shape": torch.int64}
_FP4 = {"weight_packed": torch.uint8, "weight_scale": _FP8, "weight_global_scale": _FP32}
EXPECTED = {
    "W4A16": _PACKED,
    "W4A16_ASYM": {**_PACKED, "weight_zero_point": torch.int32},
    "W4A8": _PACKED,
    "W4AFP8": _PACKED,
    "W8A8": {"weight": torch.int8, "weight_scale": _BF16},
    "FP8": {"weight": _FP8, "weight_scale": _BF16, "input_scale": _BF16},
    "FP8_DYNAMIC": {"weight": _FP8, "weight_scale": _BF16},
    "FP8_BLOCK": {"weight": _FP8, "weight_scale": _BF16},
    "NVFP4A16": _FP4,
    "NVFP4": {**_FP4, "input_global_scale": _FP32},
    "MXFP4": {"weight_packed": torch.uint8, "weight_scale": torch.uint8},
    "MXFP8": {"weight": _FP8, "weight_scale": torch.uint8},
}
OF_6_BITS = [name for name in ("MXFP6A16", "MXFP6A8") if name in PRESETS]
NEWER = [name for name in ("MXFP4XFP8", *OF_6_BITS) if name in PRESETS]
EXPECTED |= dict.fromkeys(NEWER, EXPECTED["MXFP4"])


BITS = {**dict.fromkeys(("W4A16", "W4A8", "W4AFP8"), 4), "NVFP4": 4.5, "MXFP4": 4.25}
BITS |= dict.fromkeys(OF_6_BITS, 6.25)


def test_exact_set_of_tensors_and_dtypes() -> None:
    """A weight takes its bits, and its share of the scales of its group."""
    for name, tensors in EXPECTED.items():
        model = tiny.quantize_model(tiny.llama(), {"g": preset_scheme(name, ["Linear"])})
        entry = quantized_modules(model)[0]
        packed = compress(entry, own_tensors(entry))
        assert {key: tensor.dtype for key, tensor in packed.items()} == tensors, name
        for key, tensor in packed.items():
            if key in {"input_scale", "input_global_scale", "weight_global_scale"}:
                assert tensor.shape == (1,)
        if name in BITS:
            scales = 0 if "weight_shape" in packed else packed["weight_scale"].nbytes
            size = packed["weight_packed"].nbytes + scales
            assert size * 8 == entry.module.weight.numel() * BITS[name], name


FORMATS = sorted(
    form.value
    for form in CompressionFormat
    if form.value not in {"dense", "marlin-24", "mixed-precision"} and "sparse" not in form.value
)


@pytest.mark.parametrize(
    "name", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_BLOCK", "NVFP4", "MXFP8", *OF_6_BITS[:1]]
)
def test_a_forced_format_holds_the_weights_or_is_refused(name: str) -> None:
    model = tiny.quantize_model(tiny.llama(), {"g": preset_scheme(name, ["Linear"])})
    scheme = preset_scheme(name)
    for form in FORMATS:
        if form not in compatible_formats(scheme):
            with pytest.raises(ArgumentError, match=f"{form} holds no .*: {format_of(scheme)}"):
                quantized_modules(model, forced_format=parse_format(form))
            continue
        entry = quantized_modules(model, forced_format=parse_format(form))[0]
        own = own_tensors(entry)
        reader = BaseCompressor.get_value_from_registry(form)
        decoded = reader.decompress(compress(entry, own), entry.scheme)["weight"]
        assert torch.equal(decoded, own["weight"]), form


def test_unknown_and_retired_formats() -> None:
    with pytest.raises(ArgumentError, match="Did you mean pack-quantized"):
        parse_format("packquantized")
    with pytest.raises(ArgumentError, match="readers take"):
        parse_format("marlin-24")


def test_a_broken_scale_is_named() -> None:
    model = tiny.quantize_model(tiny.llama(), {"g": preset_scheme("FP8", ["Linear"])})
    entry = quantized_modules(model)[3]
    entry.module.weight_scale.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=entry.name):
        compress(entry, own_tensors(entry))
    del entry.module.input_scale
    with pytest.raises(LifecycleError, match="input_scale"):
        compress(entry, own_tensors(entry))


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.bfloat16, {"num_bits": 9}),
        (torch.float32, {"num_bits": 12, "strategy": "channel", "symmetric": False}),
        (torch.float16, {"num_bits": 16, "strategy": "channel"}),
        (torch.bfloat16, {"num_bits": 16, "strategy": "group", "group_size": 32} | ASYMMETRIC),
        (torch.float16, {"num_bits": 8, "strategy": "group", "group_size": 16} | ASYMMETRIC),
        (torch.float32, {"num_bits": 8, "strategy": "group", "group_size": 48} | ASYMMETRIC),
        (torch.bfloat16, {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        (torch.float32, {"num_bits": 8, "type": "float", "strategy": "channel"} | ASYMMETRIC),
        (torch.float16, {"num_bits": 8, "type": "float", "strategy": "tensor"} | ASYMMETRIC),
    ],
    ids=str,
)
def test_codes_are_the_same_whenever_the_weight_is_rounded(
    fields: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rounded while it is written or before: one file, which decodes to the rounded weight."""
    torch.manual_seed(0)
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="naive-quantized")
    weight = (torch.randn(256, 96) * 0.02 + 0.01).to(dtype)
    found = observe_weight(weight, args)
    own = {"weight": weight, "weight_scale": found.scale, "weight_zero_point": found.zero_point}
    raw = QuantizedModule("m", torch.nn.Linear(1, 1), scheme)
    vars(raw.module)["quantization_status"] = QuantizationStatus.FROZEN
    written = compress(raw, own)

    rounded = found.round(weight)
    later = compress(
        QuantizedModule("m", torch.nn.Linear(1, 1), scheme), {**own, "weight": rounded}
    )
    assert written.keys() == later.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor.view(torch.uint8), later[name].view(torch.uint8))
    reader = BaseCompressor.get_value_from_registry("naive-quantized")
    decoded = reader.decompress(dict(written), scheme)["weight"]
    assert torch.equal(decoded, rounded)
    if dtype is torch.float16:  # some of these scales have few bits there
        return
    step = found.scale.float().amax() * (32 if args.type == "float" else 0.5)
    assert (rounded.float() - weight.float()).abs().amax() <= step + weight.abs().amax() / 64
