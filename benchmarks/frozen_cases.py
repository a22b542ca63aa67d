# SPDX-License-Identifier: Apache-2.0
"""What ``freeze.py`` runs: small models, recipes, trainings, and which goes with which.

A job is named by a path, such as ``dense/streamed/gptq``; the name says all that there is to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def words(text: str) -> list[str]:
    """Its words."""
    return text.split()


VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_VISION_LANGUAGE = {
    "vision_config": _CLIP,
    "text_config": {"model_type": "llama", **SIZES},
    "image_token_index": VOCABULARY - 1,
    "vision_feature_layer": -1,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("llama", {"num_hidden_layers": 3}),
    "moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "opt": ("opt", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "mixtral": ("mixtral", EXPERTS),
    "half-moe": (
        "qwen3_moe",
        {**EXPERTS, "moe_intermediate_size": 128, "mlp_only_layers": [0]},
    ),
    "deepseek": (
        "deepseek_v3",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1,
        },
    ),
    "granite": ("granitemoe", EXPERTS),
    "gpt-oss": (
        "gpt_oss",
        {
            **EXPERTS,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llava": ("llava", _VISION_LANGUAGE),
}
"""Name → type of the configuration, and what of it differs from ``SIZES``."""

_LINEARS = (
    "targets: Linear, ignore: [lm_head, 're:.*(gate|router)$', 're:.*vision.*', 're:.*projector.*']"
)


def quantized(scheme: str, modifier: str = "QuantizationModifier", more: str = "") -> str:
    """A modifier with a preset on all Linears but the head."""
    return f"{modifier}: {{{_LINEARS}, scheme: {scheme}{', ' + more if more else ''}}}"


def of_bits(bits: int, modifier: str = "QuantizationModifier", more: str = "", **args: Any) -> str:
    """A modifier with a scheme of its own for weights."""
    weights = {"num_bits": bits, "type": "int", **args}
    shown = ", ".join(f"{key}: {str(value).lower()}" for key, value in weights.items())
    ignore = _LINEARS.partition(", ")[2]
    groups = f"config_groups: {{own: {{targets: [Linear], weights: {{{shown}}}}}}}"
    return f"{modifier}: {{{ignore}, {groups}{', ' + more if more else ''}}}"


def _pruned(modifier: str, structure: str = "2:4", more: str = "") -> str:
    head = f"sparsity: 0.5, mask_structure: '{structure}', ignore: [lm_head]"
    return f"{modifier}: {{{head}{', ' + more if more else ''}}}"


_OWL = "sparsity_profile: owl, owl_m: 3, owl_lmbda: 0.1, targets: {}"
_CACHE = (
    "kv_cache_scheme: {num_bits: 8, type: float, strategy: tensor, dynamic: false, symmetric: true}"
)
_MIXED = (
    "QuantizationModifier: {ignore: [lm_head], config_groups: {"
    "wide: {targets: ['re:.*self_attn.*_proj'], weights: {num_bits: 8, strategy: channel}}, "
    "narrow: {targets: ['re:.*mlp.*_proj'], weights: {num_bits: 4, strategy: group, "
    "group_size: 32, symmetric: false}}}}"
)
_IMATRIX = of_bits(4, strategy="group", group_size=32, observer="imatrix_mse")

NEEDS_NO_DATA: dict[str, list[str]] = {
    "rtn": [quantized("W4A16")],
    "rtn-group-32": [of_bits(3, strategy="group", group_size=32)],
    "rtn-mse": [quantized("W4A16", more="weight_observer: mse")],
    "mixed": [_MIXED],
    "fp8-dynamic": [quantized("FP8_DYNAMIC")],
    "fp8-block": [quantized("FP8_BLOCK")],
    "nvfp4a16": [quantized("NVFP4A16")],
    "nvfp4a16-expanded": [quantized("NVFP4A16", more="weight_observer: nvfp4_expanded_mse")],
    "mxfp4": [quantized("MXFP4")],
    "hqq": [quantized("W4A16_ASYM", "HQQModifier")],
    "spinquant-r1r2": [
        "SpinQuantModifier: {rotations: [R1, R2], transform_type: hadamard}",
        quantized("W4A16"),
    ],
    "spinquant-r1r2r4": ["SpinQuantModifier: {rotations: [R1, R2, R4]}", quantized("W4A16")],
    "spinquant-random": [
        "SpinQuantModifier: {rotations: [R1], transform_type: random-hadamard, randomize: true}"
    ],
    "quip": [
        "QuIPModifier: {targets: Linear, ignore: [lm_head], rotations: [v, u]}",
        quantized("W4A16"),
    ],
    "constant-pruning": ["ConstantPruningModifier: {targets: ['re:.*_proj.weight']}"],
    "magnitude-pruning": [
        "MagnitudePruningModifier: {start: 0, end: 1, init_sparsity: 0.5, final_sparsity: 0.5, "
        "targets: ['re:.*_proj.weight']}"
    ],
}
NEEDS_DATA: dict[str, list[str]] = {
    "gptq": [quantized("W4A16", "GPTQModifier")],
    "gptq-one-forward": [quantized("W4A16", "GPTQModifier", "asymmetric: false")],
    "gptq-no-order": [quantized("W4A16", "GPTQModifier", "actorder: null, block_size: 64")],
    "gptq-group-order": [
        of_bits(4, "GPTQModifier", strategy="group", group_size=32, actorder="group")
    ],
    "gptq-group-32": [of_bits(3, "GPTQModifier", strategy="group", group_size=32)],
    "gptq-channel": [of_bits(4, "GPTQModifier", strategy="channel", actorder="weight")],
    "gptq-asym": [quantized("W4A16_ASYM", "GPTQModifier", "refit_scales: false")],
    "gptq-mse": [quantized("W3A16", "GPTQModifier", "weight_observer: mse")],
    "gptq-nvfp4": [quantized("NVFP4A16", "GPTQModifier")],
    "smoothquant-gptq-w8a8": [
        "SmoothQuantModifier: {smoothing_strength: 0.8}",
        quantized("W8A8", "GPTQModifier"),
    ],
    "equalized-w8a8": ["LogarithmicEqualizationModifier: {}", quantized("W8A8")],
    "fp8-static": [quantized("FP8")],
    "nvfp4": [quantized("NVFP4")],
    "kv-cache": [quantized("FP8_DYNAMIC", more=_CACHE)],
    "kv-cache-alone": [f"QuantizationModifier: {{{_CACHE}}}"],
    "awq": ["AWQModifier: {}", quantized("W4A16_ASYM")],
    "awq-output": ["AWQModifier: {loss: output, clip: false}", quantized("W4A16_ASYM")],
    "awq-gptq": ["AWQModifier: {duo_scaling: false}", quantized("W4A16_ASYM", "GPTQModifier")],
    "imatrix": [_IMATRIX],
    "imatrix-gatherer": ["IMatrixGatherer: {ignore: [lm_head]}", _IMATRIX],
    "imatrix-awq": ["IMatrixGatherer: {ignore: [lm_head]}", "AWQModifier: {}", _IMATRIX],
    "sparsegpt": [_pruned("SparseGPTModifier")],
    "sparsegpt-plain": [_pruned("SparseGPTModifier", "0:0", "refinements: 0, asymmetric: true")],
    "sparsegpt-owl": [
        _pruned("SparseGPTModifier", "0:0", _OWL.format("['re:.*layers.[0-9]+$']")),
        quantized("W8A16", "GPTQModifier"),
    ],
    "sparsegpt-gptq": [_pruned("SparseGPTModifier"), quantized("W4A16", "GPTQModifier")],
    "wanda": [_pruned("WandaPruningModifier")],
    "wanda-rtn": [_pruned("WandaPruningModifier"), quantized("W4A16")],
    "autoround": [quantized("W4A16", "AutoRoundModifier", "iters: 3")],
    "spinquant-learned": [
        "SpinQuantModifier: {rotations: [R1, R2], learnable: true, learning_steps: 2}",
        quantized("W4A16"),
    ],
    "spinquant-gptq": [
        "SpinQuantModifier: {rotations: [R1, R2, R4]}",
        quantized("W4A16", "GPTQModifier"),
    ],
    "two-passes": [
        "GPTQModifier: {targets: ['re:.*mlp.*_proj'], scheme: W4A16}",
        "QuantizationModifier: {targets: ['re:.*self_attn.*_proj'], scheme: FP8}",
    ],
    "reap": ["REAPPruningModifier: {sparsity: 0.25}"],
    "reap-gptq": ["REAPPruningModifier: {sparsity: 0.25}", quantized("W4A16", "GPTQModifier")],
}
RECIPES = {**NEEDS_NO_DATA, **NEEDS_DATA}
WAYS = ("streamed", "in-memory", "saved")
"""A folder in, a folder out; a model object in, a folder out; ``save_pretrained`` afterwards."""
FAMILY_RECIPES = ("gptq", "fp8-dynamic", "smoothquant-gptq-w8a8", "awq", "spinquant-r1r2")

PRESETS = words(
    "UNQUANTIZED W8A8 W2A16 W3A16_ASYM W5A16 W6A16 W7A16 W8A16 W8A16_ASYM W4A8 W4A4 W4AFP8 FP8 "
    "FP8_DYNAMIC FP8_BLOCK NVFP4A16 NVFP4 MXFP4A16 MXFP4 MXFP8A16 MXFP8 MXFP4XFP8 MXFP6A16 "
    "MXFP6A8 NVFP8"
)
OPTIONS: dict[str, dict[str, Any]] = {
    "basic": {"pipeline": "basic"},
    "independent": {"pipeline": "independent"},
    "datafree": {"pipeline": "datafree"},
    "by-block": {"sequential_targets": ["LlamaDecoderLayer"]},
    "batches": {"batch_size": 3},
    "ragged": {"batch_size": 4, "dataset": "ragged"},
    "text": {"dataset": "text"},
    "file": {"dataset": "file", "text_column": "text"},
    "shuffled": {"shuffle_calibration_samples": True, "num_calibration_samples": 5, "seed": 3},
    "in-float32": {"precision": "float32"},
    "uncompressed": {"save_compressed": False},
    "some-experts": {"moe_calibrate_all_experts": False},
    "no-recipe": {"recipe": None},
    "bounded": {"max_memory": "4GiB"},
    "tied-apart": {"tie_word_embeddings": False},
    "unknown-argument": {"num_calibration_sample": 3},
}
"""Arguments of ``oneshot`` beside the usual ones, for the recipe ``gptq``."""

_MASKED = "start: 0, end: 3, init_sparsity: 0.1, final_sparsity: 0.5, update: 1"
_MATRICES = "targets: ['re:.*_proj.weight']"
TRAININGS: dict[str, list[str]] = {
    "pruned": [f"MagnitudePruningModifier: {{{_MASKED}, {_MATRICES}}}"],
    "pruned-held": [
        f"MagnitudePruningModifier: {{{_MASKED}, {_MATRICES}, mask_structure: '2:4'}}",
        f"ConstantPruningModifier: {{start: 3, {_MATRICES}}}",
    ],
    "quantized": ["QuantizationModifier: {start: 0, end: 3, " + _LINEARS + ", scheme: W8A8}"],
    "learned-scales": [
        "QuantizationModifier: {start: 0, end: 3, "
        + _LINEARS
        + ", scheme: W4A16, learned_scales: true}"
    ],
    "distilled": ["OutputDistillationModifier: {}"],
    "gptq": [quantized("W4A16", "GPTQModifier")],
}
STAGES: dict[str, str] = {
    "prune-quantize": (
        "sparse_stage:\n  run_type: oneshot\n  sparse_modifiers:\n"
        f"    {_pruned('SparseGPTModifier')}\n"
        "quant_stage:\n  run_type: oneshot\n  quant_modifiers:\n"
        f"    {quantized('W4A16', 'GPTQModifier')}\n"
    ),
    "train-quantize": (
        "fine_stage:\n  run_type: train\n  fine_modifiers:\n"
        f"    MagnitudePruningModifier: {{{_MASKED}, {_MATRICES}}}\n"
        "quant_stage:\n  run_type: oneshot\n  quant_modifiers:\n"
        f"    {quantized('FP8_DYNAMIC')}\n"
    ),
    "quantize-prune": (
        "quant_stage:\n  run_type: oneshot\n  quant_modifiers:\n"
        f"    {quantized('FP8_DYNAMIC')}\n"
        "sparse_stage:\n  run_type: oneshot\n  sparse_modifiers:\n"
        f"    {_pruned('SparseGPTModifier')}\n"
    ),
}
MODEL_FREE = ("FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "NVFP4A16", "MXFP4A16", "W8A8", "FP8")
KILLED = ("gptq", "awq", "train")
"""Runs that are killed, and called again."""
COMMANDS: dict[str, list[str]] = {
    "oneshot": words(
        "oneshot models/dense --recipe gptq.yaml --dataset texts.jsonl --max-seq-length 24 "
        "--num-calibration-samples 6 --output OUTPUT"
    ),
    "model-free": words("model-free-ptq models/moe --scheme FP8_DYNAMIC --output OUTPUT"),
    "plan": words(
        "plan models/dense --recipe gptq.yaml --dataset texts.jsonl --max-seq-length 24 "
        "--num-calibration-samples 6 --no-measure --json"
    ),
    "verify": words("verify models/dense --json"),
    "evaluate": words(
        "evaluate models/dense --reference models/tied --dataset texts.jsonl "
        "--max-seq-length 24 --precision float32 --json"
    ),
    "wrong-option": words("oneshot models/dense --recipe gptq.yaml --datasets x --output OUTPUT"),
    "wrong-recipe": words("oneshot models/dense --recipe nothing.yaml --output OUTPUT"),
}
NATIVE = ("gptq", "fp8-static", "awq", "sparsegpt-gptq")
"""Also run with all that the processor has."""

PLANNED = ("dense", "moe", "deepseek", "gpt-oss", "llava", "gemma3", "phi3")
PLANNED_RECIPES = ("gptq", "fp8-dynamic", "awq", "sparsegpt-gptq", "spinquant-r1r2", "autoround")


def yaml(modifiers: list[str]) -> str:
    """A recipe of these modifiers."""
    return "modifiers:\n" + "".join(f"  {one}\n" for one in modifiers)


def output_jobs() -> list[str]:
    """Names of all runs that write; the slow ones come first."""
    jobs = [f"killed/{name}" for name in KILLED]
    jobs += [f"command/{name}" for name in COMMANDS]
    jobs += [
        f"{model}/{way}/{recipe}"
        for model in ("moe", "dense")
        for recipe in RECIPES
        for way in WAYS
    ]
    jobs += [
        f"{model}/{way}/{recipe}"
        for model in MODELS
        if model not in ("dense", "moe")
        for recipe in FAMILY_RECIPES
        for way in WAYS[:2]
    ]
    jobs += [f"dense/preset/{name}" for name in PRESETS]
    jobs += [f"{model}/option/{name}" for name in OPTIONS for model in ("dense", "moe")]
    jobs += [f"{model}/model-free/{name}" for name in MODEL_FREE for model in ("dense", "moe")]
    jobs += [f"{model}/train/{name}" for name in TRAININGS for model in ("dense", "moe")]
    jobs += [f"dense/stages/{name}" for name in STAGES]
    return jobs


def native_jobs() -> list[str]:
    """Names of runs with all that the processor has."""
    return [f"native/{model}/streamed/{name}" for name in NATIVE for model in ("dense", "moe")]


def plan_jobs() -> list[str]:
    """Names of all plans."""
    return [f"plan/{model}/{recipe}" for model in PLANNED for recipe in PLANNED_RECIPES]
