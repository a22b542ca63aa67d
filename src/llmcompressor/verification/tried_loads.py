# SPDX-License-Identifier: Apache-2.0
"""What the installed transformers does with the tensors of a quantized module, found by trying.

Releases differ in what they refuse and in what dtype they give, and neither is in any interface: so
a model of one Linear is loaded, once in a process for each question.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llmcompressor.runtime.progress import hide_tqdm_bars
from llmcompressor.verification.config_changes import quiet_transformers

__all__ = [
    "fails_on_one_row_of_words",
    "refuses_other_shapes",
    "refuses_packed_zero_points",
    "renamed_keep_their_dtype",
    "small_float_experts_become",
    "why_untried",
]

_ROWS, _COLUMNS = 16, 32
_PACKED = {"num_bits": 4, "group_size": _COLUMNS, "symmetric": False}
_CODED = {"num_bits": 8, "strategy": "tensor"}
_FORMATS = {4: "pack-quantized", 8: "int-quantized"}


@lru_cache(maxsize=1)
def why_untried() -> str:
    """What keeps the model of one Linear from being loaded at all, empty if nothing does.

    The answers of this module are no then, and say nothing.
    """
    try:
        _load_or_fail(_CODED, _codes(_CODED))
    except Exception as error:  # a release that cannot be asked so
        return f"{type(error).__name__}: {error}"
    return ""


@lru_cache(maxsize=1)
def refuses_packed_zero_points() -> bool:
    """Whether zero points that are packed, as servers read them, have no place in the model.

    compressed-tensors packs those of data and not those of a model without, which transformers
    makes a place for each tensor by; it depends on transformers whether that matters.
    """
    return "linear.weight_zero_point" in _load(_PACKED, _codes(_PACKED))[1]


@lru_cache(maxsize=1)
def fails_on_one_row_of_words() -> bool:
    """Whether zero points of 4 bits cannot be unpacked where their words are one row of several.

    torch calls the turned row contiguous, and does not let it be viewed as bytes.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import (  # noqa: PLC0415
        unpack_from_int32,
    )

    try:
        unpack_from_int32(torch.zeros(1, 2, dtype=torch.int32), 4, torch.Size((8, 2)), packed_dim=0)
    except RuntimeError:
        return True
    return False


@lru_cache(maxsize=1)
def refuses_other_shapes() -> bool:
    """Whether a scale that is one number has to have the shape that transformers gives it."""
    codes = _codes(_CODED)
    return "linear.weight_scale" in _load(_CODED, codes | {"weight_scale": torch.tensor(1.0)})[1]


@lru_cache(maxsize=1)
def renamed_keep_their_dtype() -> bool:
    """Whether a scale that is renamed while it loads keeps the dtype of the file."""
    codes = _codes(_CODED)
    codes["weight_scale"] = codes["weight_scale"].half()
    found, _ = _load(_CODED, codes, "old", key_mapping={"^old": "linear"}, dtype=torch.float32)
    return found.get("weight_scale") is torch.float16


@lru_cache(maxsize=3)
def small_float_experts_become(dtype: str) -> str:
    """The dtype that experts of 8-bit floats are unpacked to, where a model computes in ``dtype``.

    Empty where it cannot be found out.
    """
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415
    from transformers.integrations import compressed_tensors as unpacking  # noqa: PLC0415

    scheme = QuantizationScheme(targets=["Linear"], weights={"num_bits": 8, "type": "float"})
    config = SimpleNamespace(config_groups={"group": scheme}, format="float-quantized")
    quantizer = SimpleNamespace(compressor=SimpleNamespace(quantization_config=config))
    name = "experts.*.proj.weight"
    codes = torch.zeros(_ROWS, _COLUMNS).to(torch.float8_e4m3fn)
    model: Any = torch.nn.Module()
    model.stack = torch.nn.Parameter(torch.zeros(1, dtype=getattr(torch, dtype)))
    operation: Any = unpacking.DecompressExperts
    try:
        found = operation(quantizer, scheme=scheme).convert(
            {name: [codes], f"{name}_scale": [torch.ones(1)]},
            source_patterns=[name, f"{name}_scale"],
            target_patterns=["stack"],
            full_layer_name="stack",
            model=model,
        )
        return str(found[name].dtype).removeprefix("torch.")
    except Exception:  # an operation of another release
        return ""


def _scheme(weights: Mapping[str, Any]) -> dict[str, Any]:
    form = _FORMATS[weights["num_bits"]]
    return {"targets": ["Linear"], "weights": dict(weights), "format": form}


def _codes(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a Linear as compressed-tensors writes them."""
    from compressed_tensors.compressors import compress_module  # noqa: PLC0415
    from compressed_tensors.quantization import (  # noqa: PLC0415
        QuantizationScheme,
        initialize_module_for_quantization,
    )

    made: Any = torch.nn.utils.skip_init  # no random number is taken from the run
    linear = made(torch.nn.Linear, _COLUMNS, _ROWS, bias=False, dtype=torch.float32)
    initialize_module_for_quantization(linear, QuantizationScheme(**_scheme(weights)))
    for own, tensor in linear.named_parameters():
        tensor.data.fill_(1 if own == "weight_scale" else 0)
    compress_module(linear)
    return dict(linear.state_dict())


def _load(
    weights: Mapping[str, Any], codes: Mapping[str, Tensor], path: str = "linear", **more: Any
) -> tuple[dict[str, torch.dtype], set[str]]:
    """What is loaded of a Linear with its dtypes, and what is refused for its shape."""
    try:
        return _load_or_fail(weights, codes, path, **more)
    except Exception:  # why_untried says it
        return {}, set()


def _load_or_fail(
    weights: Mapping[str, Any], codes: Mapping[str, Tensor], path: str = "linear", **more: Any
) -> tuple[dict[str, torch.dtype], set[str]]:
    from transformers import PretrainedConfig  # noqa: PLC0415  # loads much

    settings: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": _FORMATS[weights["num_bits"]],
        "config_groups": {"group_0": _scheme(weights)},
        "ignore": [],
    }
    config: Any = PretrainedConfig
    with quiet_transformers(), hide_tqdm_bars():
        model, info = _tiny_class().from_pretrained(
            None,
            config=config(quantization_config=settings),
            state_dict={f"{path}.{own}": each for own, each in codes.items()},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **more,
        )
    found = {own: each.dtype for own, each in model.linear.state_dict().items()}
    return found, {one[0] for one in info["mismatched_keys"]}


@lru_cache(maxsize=1)
def _tiny_class() -> Any:
    from transformers import PretrainedConfig, PreTrainedModel  # noqa: PLC0415  # loads much

    class OneLinear(PreTrainedModel):  # type: ignore[no-untyped-call]  # of its own making
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(_COLUMNS, _ROWS, bias=False)
            self.post_init()  # type: ignore[no-untyped-call]

        def _init_weights(self, module: torch.nn.Module) -> None:
            """Nothing: what is not loaded is not looked at."""

    return OneLinear
