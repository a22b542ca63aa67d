# SPDX-License-Identifier: Apache-2.0
"""Presets against compressed-tensors' own, and the format each scheme is written in."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.base import compress_module, decompress_module
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStatus,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from torch import nn

from llmcompressor.errors import InputError
from llmcompressor.schemes.presets import (
    PRESETS,
    format_of,
    is_preset,
    preset_scheme,
)

FORMATS = {
    "UNQUANTIZED": "dense",
    "W8A8": "int-quantized",
    "INT8": "int-quantized",
    "FP8": "float-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
    "NVFP4": "nvfp4-pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8": "mxfp8-quantized",
    "MXFP8A16": "mxfp8-quantized",
}
NEWER = {
    "MXFP4XFP8": "mxfp4-pack-quantized",
    "MXFP6A16": "mxfp6-pack-quantized",
    "MXFP6A8": "mxfp6-pack-quantized",
}
FORMATS |= {name: form for name, form in NEWER.items() if name in PRESET_SCHEMES}
INT_GROUPS = [
    *(f"W{bits}A16{suffix}" for bits in range(2, 9) for suffix in ("", "_ASYM")),
    *(f"W{bits}A8" for bits in range(2, 8)),
    *(f"W{bits}A4" for bits in range(2, 5)),
    "W4AFP8",
]
PACKED_WITH_ACTIVATIONS = [name for name in INT_GROUPS if "A16" not in name]


def test_these_are_the_presets() -> None:
    assert set(PRESETS) == {*FORMATS, *INT_GROUPS}


@pytest.mark.parametrize("name", sorted(PRESET_SCHEMES))
def test_arguments_equal_the_library_s_where_it_has_the_name(name: str) -> None:
    ours, theirs = preset_scheme(name, ["Linear"]), preset_name_to_scheme(name, ["Linear"])
    assert ours.weights == theirs.weights
    assert ours.input_activations == theirs.input_activations
    assert ours.output_activations is None
    assert ours.targets == theirs.targets


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_format_written(name: str) -> None:
    assert format_of(preset_scheme(name)) == FORMATS.get(name, "pack-quantized")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_scheme_states_its_format_only_where_needed(name: str) -> None:
    scheme = preset_scheme(name)
    inferred = infer_module_format(nn.Linear, scheme).value
    assert (scheme.format is not None) == (inferred != format_of(scheme))
    assert (name in PACKED_WITH_ACTIVATIONS) == (scheme.format is not None)


ARGS = [
    None,
    *(
        QuantizationArgs(num_bits=bits, group_size=size)
        for bits in (1, 3, 4, 8)
        for size in (16, 32, 128, -1)
    ),
    QuantizationArgs(num_bits=16, group_size=-1),
    QuantizationArgs(num_bits=8, type="float", strategy="channel"),
    QuantizationArgs(num_bits=8, type="float", group_size=32),
    QuantizationArgs(num_bits=8, type="float", group_size=32, scale_dtype=torch.uint8),
    QuantizationArgs(num_bits=4, type="float", group_size=32, scale_dtype=torch.uint8),
    QuantizationArgs(num_bits=4, type="float", group_size=16, strategy="tensor_group"),
    QuantizationArgs(num_bits=4, type="float", group_size=64),
    *(preset_scheme(name).weights for name in NEWER if name in PRESETS),
]
INPUTS = [
    None,
    QuantizationArgs(num_bits=8, strategy="token", dynamic=True),
    QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
]


@pytest.mark.parametrize("name", PACKED_WITH_ACTIVATIONS)
def test_packed_weights_with_activations_survive_the_file(name: str) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 32, bias=False)
    scheme = preset_scheme(name)
    bits = scheme.weights.num_bits
    initialize_module_for_quantization(linear, scheme)
    linear.weight_scale.data.fill_(0.05 / 2**bits)
    linear.quantization_status = QuantizationStatus.FROZEN
    inputs = torch.randn(2, 5, 256)
    before = linear(inputs)

    compress_module(linear)
    stored = linear.state_dict()
    assert stored["weight_packed"].dtype == torch.int32
    assert stored["weight_packed"].shape == (32, 256 * bits // 32)
    assert set(stored) == {"weight_packed", "weight_scale", "weight_shape"}

    decompress_module(linear)
    assert torch.equal(linear(inputs), before)


def test_names_are_read_in_any_case_and_schemes_are_not_shared() -> None:
    assert is_preset("nvfp4a16")
    first, second = preset_scheme("fp8_block", "Linear"), preset_scheme("FP8_BLOCK", ["Linear"])
    assert first == second
    first.weights.block_structure[0] = 64
    assert preset_scheme("FP8_BLOCK").weights.block_structure == [128, 128]


@pytest.mark.parametrize("name", NEWER)
def test_a_preset_of_a_newer_library_says_what_it_needs(name: str) -> None:
    """It is not an unknown name where the installed one has it not."""
    assert is_preset(name.lower())
    assert (name in PRESETS) == (name in PRESET_SCHEMES)
    if name in PRESETS:
        assert preset_scheme(name.lower()) == preset_scheme(name)
        return
    with pytest.raises(InputError, match=r"compressed-tensors 0\.20 or newer"):
        preset_scheme(name)


def test_an_unknown_name_lists_every_preset() -> None:
    with pytest.raises(InputError, match="Did you mean W4A16") as caught:
        preset_scheme("W4A61")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(InputError, match="The presets are"):
        preset_scheme("quantise")
