# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that ``serving.py`` runs in servers: presets, techniques and architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_HEAD = ["lm_head"]
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
CALIBRATED = ("FP8", "NVFP4")
"""Presets with static scales of inputs."""
PRESETS = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A16_ASYM", "W2A16", "W3A16", "W5A16", "W6A16", "W7A16"),
    *("W3A16_ASYM", "W8A8", "INT8", "W4A8", "W3A8", "W6A8", "W4A4", "W4AFP8"),
    *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16", "MXFP4", "MXFP4XFP8"),
    *("MXFP8A16", "MXFP8", "MXFP6A16", "MXFP6A8"),
)
SCHEMES = ("W4A16", "W8A8", "FP8_DYNAMIC")
"""Presets that every architecture is tried with."""


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        table: ``presets``, ``techniques``, ``architectures`` or ``held out``.
        model: ``embedded``, or a name of ``serving_models.py``.
        name: the preset or technique; unique for its model.
        recipe: class name → fields of each modifier, in order.
        data: whether it is calibrated.
        arguments: of ``oneshot``, besides.
    """

    table: str
    model: str
    name: str
    recipe: dict[str, dict[str, Any]]
    data: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Its name in the file of rows."""
        return self.model, self.name


def _rounded(scheme: str = "W4A16", kind: str = "QuantizationModifier", **fields: Any) -> Any:
    given = {"targets": ["Linear"], "scheme": scheme, "ignore": _HEAD, **fields}
    if "config_groups" in fields:
        del given["scheme"], given["targets"]
    return {kind: given}


def _grid(bits: int, strategy: str = "group", size: int | None = None, **more: Any) -> Any:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy}
    group = {"weights": weights | ({} if size is None else {"group_size": size}) | more}
    return {"config_groups": {"group_0": {"targets": ["Linear"], **group}}}


def _sparse(kind: str, structure: str) -> Any:
    pruned = {"sparsity": 0.5, "mask_structure": structure, "targets": ["Linear"]}
    return {kind: {**pruned, "ignore": _HEAD}}


_MIXED = {
    "first": {"targets": ["re:.*(q|k|v)_proj$"], "weights": _ROWS, "input_activations": None},
    "second": {
        "targets": ["re:.*down_proj$"],
        "weights": {**_FLOAT8, "strategy": "channel"},
        "input_activations": {**_FLOAT8, "strategy": "token", "dynamic": True},
    },
    "third": {
        "targets": ["re:.*(gate|up)_proj$"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
    },
}
_MIXED["first"]["input_activations"] = {**_STATIC, "strategy": "token", "dynamic": True}
_STATIC_W8A8 = {"static": {"targets": ["Linear"], "weights": _ROWS, "input_activations": _STATIC}}
_TECHNIQUES: dict[str, tuple[dict[str, dict[str, Any]], bool]] = {
    "GPTQ W4A16": (_rounded(kind="GPTQModifier"), True),
    "GPTQ W4A16, activation order": (_rounded(kind="GPTQModifier", actorder="static"), True),
    "GPTQ W4A16, columns in order": (_rounded(kind="GPTQModifier", actorder=None), True),
    "GPTQ W8A8, static inputs": (
        _rounded(kind="GPTQModifier", config_groups=_STATIC_W8A8),
        True,
    ),
    "AWQ W4A16_ASYM": ({"AWQModifier": {}, **_rounded("W4A16_ASYM")}, True),
    "AutoRound W4A16": (_rounded(kind="AutoRoundModifier", iters=10), True),
    "HQQ W4A16_ASYM": (_rounded("W4A16_ASYM", "HQQModifier"), False),
    "SmoothQuant, GPTQ W8A8": (
        {"SmoothQuantModifier": {"smoothing_strength": 0.8}, **_rounded("W8A8", "GPTQModifier")},
        True,
    ),
    "SpinQuant R1 R2, W4A16": (
        {"SpinQuantModifier": {"rotations": ["R1", "R2"]}, **_rounded()},
        False,
    ),
    "SpinQuant R1 R2 R4, W4A16": (
        {"SpinQuantModifier": {"rotations": ["R1", "R2", "R4"]}, **_rounded()},
        False,
    ),
    "SpinQuant R1 R3, W4A16": (
        {"SpinQuantModifier": {"rotations": ["R1", "R3"]}, **_rounded()},
        False,
    ),
    "QuIP v, W4A16": ({"QuIPModifier": {"rotations": ["v"]}, **_rounded()}, False),
    "QuIP u v, W4A16": ({"QuIPModifier": {"rotations": ["u", "v"]}, **_rounded()}, False),
    "SparseGPT 2:4": (_sparse("SparseGPTModifier", "2:4"), True),
    "Wanda 50 %": (_sparse("WandaPruningModifier", "0:0"), True),
    "SparseGPT 2:4, GPTQ W4A16": (
        {**_sparse("SparseGPTModifier", "2:4"), **_rounded(kind="GPTQModifier")},
        True,
    ),
    "W4A16, FP8 cache": (_rounded(kv_cache_scheme=_FLOAT8), True),
    "FP8_DYNAMIC, FP8 cache": (_rounded("FP8_DYNAMIC", kv_cache_scheme=_FLOAT8), True),
    "FP8_DYNAMIC, FP8 cache per head": (
        _rounded("FP8_DYNAMIC", kv_cache_scheme={**_FLOAT8, "strategy": "attn_head"}),
        True,
    ),
    "int8 cache": (_rounded(kv_cache_scheme={**_FLOAT8, "type": "int"}), True),
    "W8A8, FP8 and 4 bits": (_rounded(config_groups=_MIXED), False),
    "4 bits, groups of 32": (_rounded(**_grid(4, size=32)), False),
    "4 bits, groups of 64": (_rounded(**_grid(4, size=64)), False),
    "4 bits, groups of 256": (_rounded(**_grid(4, size=256)), False),
    "4 bits per channel": (_rounded(**_grid(4, "channel")), False),
    "8 bits per channel": (_rounded(**_grid(8, "channel")), False),
    "W4A16, head in 4 bits": (
        {"QuantizationModifier": {"targets": ["Linear", "lm_head"], "scheme": "W4A16"}},
        False,
    ),
    "W8A16, embedding in 8 bits": (
        {
            "QuantizationModifier": {
                "targets": ["Linear", "Embedding"],
                "scheme": "W8A16",
                "ignore": _HEAD,
            }
        },
        False,
    ),
}
"""Name → recipe, and whether it takes data; of the embedded model."""


def _held_out() -> list[Case]:
    """Combinations that no other table has: named targets, odd groups, heads, tied or not."""
    named = {"targets": ["re:.*self_attn.*", "model.layers.1.mlp.down_proj"], "scheme": "W4A16"}
    one_layer = {"targets": ["re:.*layers.1.*"], "scheme": "FP8_DYNAMIC", "ignore": _HEAD}
    head = {"targets": ["lm_head"], "scheme": "W4A16"}
    q_alone = {"targets": ["re:.*q_proj"], "scheme": "W8A8"}
    asymmetric = _rounded("W4A16_ASYM")
    joined = {"targets": ["re:.*(qkv|o)_proj", "re:.*down_proj"], "scheme": "FP8_DYNAMIC"}
    eight = _rounded(**_grid(4, size=16))
    experts = {"targets": ["re:.*experts.*"], "scheme": "W4A16"}
    block = _rounded("FP8_BLOCK")
    quip = {"QuIPModifier": {"rotations": ["v"]}, **_rounded("W8A8")}
    turned = {"SpinQuantModifier": {"rotations": ["R1", "R2"]}, **_rounded("W8A8")}
    listed = [
        ("Qwen 3", "W4A16 of attention and one down_proj", {"QuantizationModifier": named}),
        ("SmolLM 3", "FP8_DYNAMIC of the second layer", {"QuantizationModifier": one_layer}),
        ("Cohere 2", "W4A16 of the tied head alone", {"QuantizationModifier": head}),
        ("Gemma 3", "W4A16 of the tied head alone", {"QuantizationModifier": head}),
        ("Seed-OSS", "W4A16 of the head alone", {"QuantizationModifier": head}),
        ("Llama", "W8A8 of q_proj alone", {"QuantizationModifier": q_alone}),
        ("StarCoder 2", "W4A16_ASYM", asymmetric),
        ("GPT-NeoX", "W4A16_ASYM", asymmetric),
        ("Falcon", "W4A16_ASYM", asymmetric),
        ("Phi-3", "FP8_DYNAMIC of all but gate and up", {"QuantizationModifier": joined}),
        ("Nemotron", "4 bits, groups of 16", eight),
        ("EXAONE 4", "4 bits, groups of 16", eight),
        ("Granite MoE", "W4A16 of the experts alone", {"QuantizationModifier": experts}),
        ("OLMo 3", "FP8_BLOCK", block),
        ("GLM 4", "FP8_BLOCK", block),
        ("Mistral", "QuIP v, W8A8", quip),
        ("OLMo 2", "QuIP v, W8A8", quip),
        ("Qwen 2", "SpinQuant R1 R2, W8A8", turned),
        ("Granite", "SpinQuant R1 R2, W8A8", turned),
        ("ERNIE 4.5", "NVFP4A16", _rounded("NVFP4A16")),
        ("Bamba", "W4A16_ASYM", asymmetric),
        ("Falcon-H1", "W8A16", _rounded("W8A16")),
        ("Mamba 2", "MXFP8A16", _rounded("MXFP8A16")),
        ("Gemma", "W3A16", _rounded("W3A16")),
    ]
    return [Case("held out", model, name, recipe) for model, name, recipe in listed]


def all_cases(architectures: list[str]) -> list[Case]:
    """Every checkpoint, presets first."""
    return [
        *(
            Case("presets", "embedded", name, _rounded(name), name in CALIBRATED)
            for name in PRESETS
        ),
        *(
            Case("techniques", "embedded", name, recipe, data)
            for name, (recipe, data) in _TECHNIQUES.items()
        ),
        *(
            Case("architectures", model, scheme, _rounded(scheme))
            for model in architectures
            for scheme in SCHEMES
        ),
        *_held_out(),
    ]
