# SPDX-License-Identifier: Apache-2.0
"""Which headers tell that weights are quantized, and which only look like it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmcompressor.checkpoint.source import SIDE_FILES, TensorHeader, code_tensors, inspect_source
from llmcompressor.errors import CheckpointError


def headers(**given: tuple[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    """Headers by name; two underscores stand for a point."""
    return {
        name.replace("__", "."): TensorHeader(dtype, shape, Path("model.safetensors"))
        for name, (dtype, shape) in given.items()
    }


TOLD: list[tuple[dict[str, tuple[str, tuple[int, ...]]], str | None]] = [
    ({"q__weight": ("F8_E4M3", (4, 4)), "q__weight_scale_inv": ("F32", (1, 1))}, "q.weight"),
    ({"q__weight": ("F8_E4M3", (4, 4))}, "q.weight"),
    ({"q__weight": ("I8", (4, 4)), "q__SCB": ("F32", (4,))}, "q.weight"),
    ({"q__weight": ("U8", (8, 1)), "q__weight__absmax": ("F32", (1,))}, "q.weight"),
    ({"weight": ("F8_E5M2", (4, 4)), "weight_scale": ("F32", (4,))}, "weight"),
    ({"q__qweight": ("I32", (1, 4)), "q__scales": ("F16", (1, 4))}, "q.qweight"),
    ({"q__weight_packed": ("U8", (4, 2))}, "q.weight_packed"),
    ({"x__up_blocks": ("U8", (2, 4, 4)), "x__up_scales": ("U8", (2, 4))}, "x.up_blocks"),
    ({"x__up": ("F8_E4M3", (2, 4, 4)), "x__up_scale_inv": ("F32", (2, 1))}, "x.up"),
    ({"wte__weight": ("I8", (9, 4)), "wte__weight_scale": ("F32", (9, 1))}, "wte.weight"),
    ({"embed_tokens__weight": ("F8_E4M3", (9, 4))}, None),
    ({"embed_per_layer__weight": ("F8_E4M3", (9, 4))}, None),
    ({"wte__weight": ("I8", (9, 4))}, None),
    ({"embed_proj__weight": ("F8_E4M3", (4, 4))}, "embed_proj.weight"),
    ({"q__weight": ("BF16", (4, 4)), "q__weight_scale": ("F32", (4, 1))}, None),
    ({"attn__bias": ("U8", (1, 1, 8, 8)), "attn__masked_bias": ("F32", ())}, None),
    ({"q__qweight": ("F16", (4, 4))}, None),
    ({"table": ("U8", (4, 4)), "scale": ("F32", (1,))}, None),
    ({"mtp__fc__weight": ("F8_E4M3", (4, 4))}, None),
    ({"mtp__fc__weight": ("F8_E4M3", (4, 4)), "mtp__fc__scale": ("F32", ())}, "mtp.fc.weight"),
    ({"norm__weight": ("F8_E4M3", (4,))}, None),
    ({"table__weight": ("BOOL", (4, 4))}, None),
]


def test_codes_are_told_by_dtype_name_and_scales() -> None:
    for tensors, codes in TOLD:
        assert next(code_tensors(headers(**tensors)), None) == codes, tensors


@pytest.mark.parametrize("said", [None, SIDE_FILES[0]])
def test_a_folder_of_undeclared_codes_is_refused(tmp_path: Path, said: str | None) -> None:
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    tensors = {"q.weight": codes, "q.weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if said:
        (tmp_path / said).write_text("{}")
    told = rf" \({said} beside it does\)" if said else ""
    expected = rf"q\.weight .*F8_E4M3.* config\.json does not say so{told}\. Compress the original"
    with pytest.raises(CheckpointError, match=expected):
        inspect_source(tmp_path)
    assert inspect_source(tmp_path, allow_quantized=True).tensors.keys() == tensors.keys()
