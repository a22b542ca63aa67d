# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in a good checkpoint, each with the rule that must name it.

A fault is a function that spoils a :class:`~checkpoint_samples.Sample`; ``FAULTS`` is the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from compressed_tensors.quantization.lifecycle import apply, initialize
from packaging.version import Version
from tests.support.checkpoint_samples import HIDDEN, INNER, Sample

from llmcompressor.schemes.attention import has_kv_cache_argument
from llmcompressor.verification import Deployment, Severity, trial_load

LAYER = "model.layers.0"
UP, DOWN = f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.down_proj"
Q, K, QKV = (f"{LAYER}.self_attn.{own}_proj" for own in ("q", "k", "qkv"))
GATE_UP = f"{LAYER}.mlp.gate_up_proj"
EXPERT = f"{LAYER}.mlp.experts.1"
ONE = Deployment(tp=(1,))
REFUSES_OTHER_SHAPES = Version(transformers.__version__) >= Version("5.23")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        rule: the rule that must find it.
        module: what the finding must name.
        plant: spoils a good checkpoint.
        base: the name of the good checkpoint.
        severity: of the finding.
        deployment: where the checkpoint is to be served.
        compared: the original is given as a reference.
        cache_is_known: whether compressed-tensors is to know attention by its cache; as the
            installed one does by default.
    """

    rule: str
    module: str
    plant: Callable[[Sample], None]
    base: str = "W4A16"
    severity: Severity = Severity.ERROR
    deployment: Deployment = ONE
    compared: bool = False
    cache_is_known: bool | None = None

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.plant.__name__}"

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have what transformers asks answer as ``cache_is_known`` says."""
        if self.cache_is_known is not None:
            answer = has_kv_cache_argument if self.cache_is_known else lambda module: False
            for module in (apply, initialize):
                monkeypatch.setattr(module, "is_cached_attention_module", answer)
            trial_load._tried.cache_clear()


FAULTS: list[Fault] = []
Plant = Callable[[Sample], None]


def fault(rule: str, module: str, **more: object) -> Callable[[Plant], Plant]:
    """Enter a fault into the table."""

    def enter(plant: Plant) -> Plant:
        FAULTS.append(Fault(rule, module, plant, **more))
        return plant

    return enter


WARNING, NOTE = Severity.WARNING, Severity.NOTE
BY_TRANSFORMERS = Deployment(server="transformers", tp=(1,))
SGLANG = Deployment(tp=(1,), server="sglang")
LLAMA_CPP = Deployment(tp=(1,), server="llama.cpp")

# ------------------------------------------------------------------ the configuration (S1 to S10)


@fault("S1", "quantization_config")
def configuration_lost(sample: Sample) -> None:
    del sample.config["quantization_config"]


@fault("S1", "quantization_config")
def configuration_is_a_text(sample: Sample) -> None:
    sample.config["quantization_config"] = "compressed-tensors"


@fault("S1", "quantization_config")
def method_lost(sample: Sample) -> None:
    del sample.settings["quant_method"]


@fault("S1", "quantization_config")
def another_method(sample: Sample) -> None:
    sample.settings["quant_method"] = "gptq"


@fault("S2", "W4A16")
def group_is_a_preset(sample: Sample) -> None:
    sample.settings["config_groups"] = {"W4A16": ["Linear"]}


@fault("S2", "group_0")
def group_without_targets(sample: Sample) -> None:
    sample.group["targets"] = None


@fault("S2", "group_1")
def group_without_weights(sample: Sample) -> None:
    sample.groups["group_1"] = {"targets": ["A", "B"], "weights": None}


@fault("S3", "group_0.weights")
def unknown_argument(sample: Sample) -> None:
    sample.group["weights"]["rounding"] = "nearest"


@fault("S3", "group_0.weights")
def block_structure_without_blocks(sample: Sample) -> None:
    sample.group["weights"]["block_structure"] = [128, 128]


@fault("S4", "ignore")
def ignore_is_null(sample: Sample) -> None:
    sample.settings["ignore"] = None


@fault("S5", "sparsity_config")
def sparsity_with_targets(sample: Sample) -> None:
    sample.settings["sparsity_config"] = {"format": "dense", "targets": ["Linear"]}


@fault("S6", "group_0.weights")
def order_of_activations(sample: Sample) -> None:
    sample.group["weights"]["actorder"] = "group"


@fault("S23", UP)
def index_of_groups(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_g_idx"] = torch.zeros(HIDDEN, dtype=torch.int32)


@fault("S7", "group_0")
def mixed_precision_without_format(sample: Sample) -> None:
    sample.settings["format"], sample.group["format"] = "mixed-precision", None


@fault("S7", "group_0")
def format_that_is_none(sample: Sample) -> None:
    sample.group["format"] = "pack-quantised"


@fault("S8", "group_0")
def wrong_format(sample: Sample) -> None:
    sample.group["format"] = "int-quantized"


@fault("S9", "Linear")
def target_in_two_groups(sample: Sample) -> None:
    sample.groups["group_1"] = {**sample.group, "targets": ["Linear"]}


@fault("S10", "", deployment=Deployment(tp=(1,), gpu="sm60"))
def old_device(sample: Sample) -> None:
    """Nothing is spoilt but the device."""


@fault("S10", "")
def dtype_of_the_model(sample: Sample) -> None:
    sample.config["dtype"] = "float64"


# ----------------------------------------------------------- how a scheme is found (S11 to S20)


@fault("S12", "re:(")
def broken_pattern(sample: Sample) -> None:
    sample.settings["ignore"].append("re:(")


@fault("S12", "re:(.+)+!")
def endless_pattern(sample: Sample) -> None:
    sample.settings["ignore"].append("re:(.+)+!")


@fault("S13", Q)
def two_groups_for_one_module(sample: Sample) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    targets = [rf"re:.*\.{own}_proj$" for own in "qkv"]
    sample.groups["group_1"] = {**sample.group, "input_activations": inputs, "targets": targets}
    sample.groups["group_0"]["targets"] = ["Linear", rf"re:{LAYER}\.self_attn\.[qkv]_proj"]


@fault("S14", QKV)
def q_and_k_of_different_groups(sample: Sample) -> None:
    group = {**sample.group, "weights": {**sample.group["weights"], "group_size": 64}}
    sample.groups["group_1"] = {**group, "targets": [Q]}
    name = f"{Q}.weight_scale"
    sample.tensors[name] = sample.tensors[name].repeat_interleave(2, dim=1)


@fault("S16", QKV)
def one_shard_is_ignored(sample: Sample) -> None:
    sample.settings["ignore"].append(Q)


@fault("S19", "model.language_model.layers.0.self_attn.q_proj", base="tower")
def anchored_pattern(sample: Sample) -> None:
    sample.group["targets"] = [r"re:model\.language_model\.layers\..*"]


@fault("S19", f"{LAYER}.block_sparse_moe.experts.0.w1", base="minimax")
def path_of_the_file(sample: Sample) -> None:
    sample.group["targets"] = [r"re:.*block_sparse_moe\.experts.*", r"re:.*self_attn.*"]


@fault("S19", DOWN)
def ignored_module_is_packed(sample: Sample) -> None:
    sample.settings["ignore"].append(DOWN)


@fault("S19", f"{LAYER}.mlp.experts", base="qwen3_moe")
def experts_are_left_dense_in_stacks(sample: Sample) -> None:
    sample.drop(f"{LAYER}.mlp.experts.")
    for own, shape in {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
        stack = torch.randn(3, *shape, dtype=torch.bfloat16)
        sample.tensors[f"{LAYER}.mlp.experts.{own}"] = stack


@fault("S19", DOWN)
def module_is_left_dense(sample: Sample) -> None:
    sample.drop(f"{DOWN}.")
    sample.tensors[f"{DOWN}.weight"] = torch.randn(HIDDEN, INNER, dtype=torch.bfloat16)


@fault("S20", f"{LAYER}.mlp.shared_expert_gate", base="qwen2_moe")
def gate_of_the_shared_expert(sample: Sample) -> None:
    for name, tensor in sample.own(f"{LAYER}.self_attn.q_proj").items():
        for index in range(2):
            path = f"model.layers.{index}.mlp.shared_expert_gate"
            sample.tensors[f"{path}.{name}"] = tensor.clone()


# -------------------------------------------------------------- schemes and tensors (S21 to S38)


@fault("S21", "group_0", base="FP8_DYNAMIC")
def floats_in_the_wrong_format(sample: Sample) -> None:
    sample.group["format"] = "pack-quantized"


@fault("S21", "group_0", base="FP8_DYNAMIC")
def asymmetric_floats(sample: Sample) -> None:
    sample.group["weights"]["symmetric"] = False


@fault("S22", "group_0", base="FP8", severity=NOTE)
def static_asymmetric_inputs(sample: Sample) -> None:
    sample.group["input_activations"]["symmetric"] = False


@fault("S23", UP, base="FP8")
def zero_point_of_a_float(sample: Sample) -> None:
    sample.group["input_activations"]["symmetric"] = False
    zero = torch.zeros(1).to(torch.float8_e4m3fn)
    sample.tensors[f"{UP}.input_zero_point"] = zero


@fault("S38", UP, base="FP8")
def zero_point_in_another_type(sample: Sample) -> None:
    sample.group["input_activations"]["symmetric"] = False
    sample.tensors[f"{UP}.input_zero_point"] = torch.zeros(1, dtype=torch.int8)


@fault("S23", UP)
def zero_point_of_a_symmetric_weight(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_zero_point"] = torch.zeros(32, 1, dtype=torch.int32)


@fault("S23", f"{LAYER}.input_layernorm")
def scale_of_nothing(sample: Sample) -> None:
    sample.tensors[f"{LAYER}.input_layernorm.weight_scale"] = torch.ones(1)


@fault("C1", UP, base="W8A8")
def scales_in_a_row(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"] = sample.tensors[f"{UP}.weight_scale"].reshape(-1)


@fault("C1", UP, base="FP8")
def scale_is_a_matrix(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"] = sample.tensors[f"{UP}.weight_scale"].reshape(1, 1)


@fault("C1", UP, base="W3A16")
def words_of_whole_values(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"] = torch.ones(INNER, 13, dtype=torch.int32)


@fault("S27", UP, severity=WARNING)
def codes_without_offset(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"] ^= -0x77777778  # 8 in each four bits


@fault("C1", UP)
def shape_of_three(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_shape"] = torch.tensor([INNER, HIDDEN, 1])


@fault("S28", UP)
def shape_that_is_not_true(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_shape"] = torch.tensor([INNER, 2 * HIDDEN])


@fault("S29", UP, base="NVFP4")
def global_scale_is_a_factor(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_global_scale"].reciprocal_()


@fault("S30", QKV, base="NVFP4")
def unequal_global_scales(sample: Sample) -> None:
    sample.tensors[f"{Q}.weight_global_scale"] *= 2


@fault("S32", QKV, base="W8A8-static")
def unequal_static_inputs(sample: Sample) -> None:
    sample.tensors[f"{Q}.input_scale"] *= 2


@fault("S32", QKV, base="W8A8-static")
def small_static_inputs_that_differ(sample: Sample) -> None:
    for own, scale in zip("qkv", (1e-6, 2e-6, 1e-6), strict=True):
        sample.tensors[f"{LAYER}.self_attn.{own}_proj.input_scale"].fill_(scale)


@fault("S33", UP, deployment=Deployment(tp=(1,), dtype="float16"))
def scale_beyond_float16(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"][3] = 1e-9


@fault("S34", "group_0", base="FP8_BLOCK", severity=NOTE)
def small_blocks(sample: Sample) -> None:
    sample.group["weights"]["block_structure"] = [64, 64]
    for name in [name for name in sample.tensors if name.endswith("weight_scale")]:
        scale = sample.tensors[name]
        sample.tensors[name] = scale.repeat_interleave(2, dim=0).repeat_interleave(2, dim=1)


@fault("S38", UP)
def bias_of_integers(sample: Sample) -> None:
    sample.tensors[f"{UP}.bias"] = torch.zeros(INNER, dtype=torch.int8)


@fault("S36", f"{LAYER}.self_attn.qkv_proj", base="phi3")
def blocks_across_shards(sample: Sample) -> None:
    sample.config |= {"num_attention_heads": 4, "num_key_value_heads": 1}


@fault("S70", UP, base="FP8_DYNAMIC")
def scale_of_another_name(sample: Sample) -> None:
    scale = sample.tensors.pop(f"{UP}.weight_scale")
    sample.tensors[f"{UP}.weight_scale_inv"] = scale


@fault("S38", UP, base="MXFP4")
def exponents_as_floats(sample: Sample) -> None:
    scale = sample.tensors[f"{UP}.weight_scale"]
    sample.tensors[f"{UP}.weight_scale"] = scale.view(torch.float8_e8m0fnu)


@fault("S38", UP)
def flipped_dtype(sample: Sample) -> None:
    packed = sample.tensors[f"{UP}.weight_packed"]
    sample.tensors[f"{UP}.weight_packed"] = packed.view(torch.uint32)


# -------------------------------------------------- devices: tensor parallel, kernels (S39 to S48)

FOUR = Deployment(tp=(4,), server="vllm")


def _on(gpu: str, tp: int = 1) -> Deployment:
    return Deployment(tp=(tp,), server="vllm", gpu=gpu)


@fault("S39", DOWN, deployment=FOUR)
def groups_over_four_devices(sample: Sample) -> None:
    """Nothing is spoilt: 256 columns over 4 devices are half a group each."""


@fault("S40", DOWN, base="odd", deployment=FOUR)
def words_over_four_devices(sample: Sample) -> None:
    """Nothing is spoilt: 100 columns of 4 bits over 4 devices end within a word."""


@fault("S41", UP, base="FP8_BLOCK", deployment=FOUR)
def blocks_over_four_devices(sample: Sample) -> None:
    """Nothing is spoilt: 256 rows over 4 devices are half a block each."""


@fault("S42", f"{LAYER}.self_attn.o_proj", base="MXFP4", deployment=Deployment(tp=(8,)))
def float_groups_over_eight_devices(sample: Sample) -> None:
    """Nothing is spoilt: 128 columns over 8 devices are half a group each."""


@fault("S43", "num_attention_heads", deployment=Deployment(tp=(3,)))
def heads_over_three_devices(sample: Sample) -> None:
    """Nothing is spoilt: 4 heads do not divide by 3."""


@fault("S44", "group_0", deployment=_on("sm70"))
def packed_integers_on_an_old_device(sample: Sample) -> None:
    """Nothing is spoilt but the device."""


@fault("S45", "group_0", base="FP8_DYNAMIC", deployment=_on("sm70"))
def floats_on_an_old_device(sample: Sample) -> None:
    """Nothing is spoilt but the device."""


@fault("S46", "group_0", base="W8A8", deployment=_on("b200"))
def integers_on_a_new_device(sample: Sample) -> None:
    """Nothing is spoilt but the device."""


@fault("S47", "group_0", base="MXFP4", deployment=_on("t4"))
def small_floats_on_an_old_device(sample: Sample) -> None:
    """Nothing is spoilt but the device."""


@fault("S48", UP, base="W4AFP8", deployment=_on("h100", tp=4))
def odd_sizes_for_the_kernel(sample: Sample) -> None:
    """Nothing is spoilt: 256 rows over 4 devices are no multiple of 128."""


# ----------------------------------------------------------------------- the cache (S49 to S55)


@fault("S49", "kv_cache_scheme", base="cache")
def cache_of_integers(sample: Sample) -> None:
    sample.settings["kv_cache_scheme"]["type"] = "int"


@fault("S50", "kv_cache_scheme", base="cache", severity=WARNING)
def scales_of_a_cache_without_a_scheme(sample: Sample) -> None:
    sample.settings["kv_cache_scheme"] = None


@fault("S51", f"{K}.output_scale", base="cache")
def old_name_of_the_scale(sample: Sample) -> None:
    scale = sample.tensors.pop(f"{LAYER}.self_attn.k_scale")
    sample.tensors[f"{K}.output_scale"] = scale


@fault("S52", f"{LAYER}.self_attn.k_scale", base="cache")
def scales_for_heads(sample: Sample) -> None:
    sample.tensors[f"{LAYER}.self_attn.k_scale"] = torch.full((4, 1, 1), 0.03)


@fault("S53", "kv_cache_scheme", base="cache")
def heads_without_groups(sample: Sample) -> None:
    sample.settings["kv_cache_scheme"]["strategy"] = "attn_head"
    del sample.settings["config_groups"]


@fault("S54", f"{LAYER}.self_attn", base="cache")
@fault(
    "L7",
    f"{LAYER}.self_attn",
    base="cache",
    deployment=BY_TRANSFORMERS,
    cache_is_known=True,
)
def scale_of_the_cache_is_missing(sample: Sample) -> None:
    sample.drop(f"{LAYER}.self_attn.k_scale")


@fault("S54", f"{LAYER}.self_attn.v_scale", base="cache")
def scale_of_the_cache_is_zero(sample: Sample) -> None:
    sample.tensors[f"{LAYER}.self_attn.v_scale"].zero_()


@fault("S55", "kv_cache_scheme", base="cache", severity=WARNING)
def cache_of_a_latent(sample: Sample) -> None:
    sample.config["model_type"] = "deepseek_v3"


# ----------------------------------------------- embeddings, heads, gates, drafts (S57 to S61)


def _pack_like(sample: Sample, name: str, like: str) -> None:
    sample.drop(f"{name}.")
    for own, tensor in sample.own(like).items():
        sample.tensors[f"{name}.{own}"] = tensor.clone()


@fault("S57", "model.embed_tokens", base="W8A8")
def embedding_of_bytes(sample: Sample) -> None:
    _pack_like(sample, "model.embed_tokens", Q)
    sample.group["targets"].append("Embedding")


@fault("S58", f"{LAYER}.mlp.gate", base="qwen3_moe")
def gate_is_not_ignored(sample: Sample) -> None:
    sample.settings["ignore"].remove(f"{LAYER}.mlp.gate")


@fault("S58", f"{LAYER}.mlp.gate", base="qwen2_moe")
def gate_is_quantized(sample: Sample) -> None:
    _pack_like(sample, f"{LAYER}.mlp.gate", Q)


@fault("S59", "lm_head")
def head_without_a_name(sample: Sample) -> None:
    _pack_like(sample, "lm_head", Q)
    sample.settings["ignore"].remove("lm_head")


@fault("S60", "lm_head", base="head")
def tied_head_is_quantized(sample: Sample) -> None:
    sample.config["tie_word_embeddings"] = True


@fault("S61", "mtp.fc", base="draft")
def draft_layer_is_not_ignored(sample: Sample) -> None:
    sample.settings["ignore"] = [text for text in sample.settings["ignore"] if "mtp" not in text]


@fault("S61", "", base="draft", severity=WARNING)
def draft_head_is_dropped(sample: Sample) -> None:
    sample.drop("mtp.")


# ---------------------------------------------------------------------- experts (S62 to S69)


@fault("S62", f"{LAYER}.mlp.experts", base="qwen3_moe")
@fault("T6", f"{LAYER}.mlp.experts", base="qwen3_moe", deployment=BY_TRANSFORMERS)
@fault("G6", f"{LAYER}.mlp.experts", base="qwen3_moe", deployment=SGLANG)
def one_expert_is_dense(sample: Sample) -> None:
    sample.drop(f"{EXPERT}.up_proj.")
    sample.tensors[f"{EXPERT}.up_proj.weight"] = torch.randn(INNER, HIDDEN, dtype=torch.bfloat16)


@fault("S62", f"{LAYER}.mlp.experts", base="qwen3_moe")
@fault("T6", f"{LAYER}.mlp.experts", base="qwen3_moe", deployment=BY_TRANSFORMERS)
@fault("G6", f"{LAYER}.mlp.experts", base="qwen3_moe", deployment=SGLANG)
def experts_of_two_schemes(sample: Sample) -> None:
    other = {**sample.group, "weights": {**sample.group["weights"], "group_size": 64}}
    sample.groups["group_1"] = {**other, "targets": [r"re:.*layers\.0\.mlp\.experts\.1\..*"]}


@fault("S63", f"{LAYER}.mlp.experts", base="W8A8-moe")
def experts_with_static_inputs(sample: Sample) -> None:
    sample.group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}


@fault("S64", f"{LAYER}.mlp.experts", base="qwen3_moe", deployment=FOUR)
def experts_over_four_devices(sample: Sample) -> None:
    """Nothing is spoilt: 256 over 4 devices are half a group each."""


@fault("S65", f"{LAYER}.mlp.experts", base="FP8_BLOCK-moe", deployment=FOUR)
def blocks_of_experts_over_four_devices(sample: Sample) -> None:
    """Nothing is spoilt: 256 over 4 devices are half a block each."""


@fault("C1", f"{EXPERT}.down_proj", base="qwen3_moe")
def too_few_scales(sample: Sample) -> None:
    name = f"{EXPERT}.down_proj.weight_scale"
    sample.tensors[name] = sample.tensors[name][:, :1]


@fault("S67", EXPERT, base="NVFP4-moe")
def gate_and_up_differ(sample: Sample) -> None:
    sample.tensors[f"{EXPERT}.up_proj.weight_global_scale"] *= 2


@fault("S68", f"{LAYER}.mlp.experts", base="qwen3_moe")
def missing_expert(sample: Sample) -> None:
    sample.drop(f"{EXPERT}.")


@fault("S68", EXPERT, base="qwen3_moe")
def missing_projection(sample: Sample) -> None:
    sample.drop(f"{EXPERT}.up_proj.")


@fault("S69", f"{LAYER}.mlp.experts.gate_up_proj.weight_packed", base="qwen3_moe")
def experts_in_one_stack(sample: Sample) -> None:
    for index in range(2):
        name = f"model.layers.{index}.mlp.experts.gate_up_proj.weight_packed"
        sample.tensors[name] = torch.ones(3, 2 * INNER, 16, dtype=torch.int32)


# ------------------------------------------------------------- missing, extra, bad (S70 to S72)


@fault("S70", UP)
def scale_is_missing(sample: Sample) -> None:
    sample.drop(f"{UP}.weight_scale")


@fault("S70", "model.layers.1.mlp.up_proj")
def module_is_missing(sample: Sample) -> None:
    sample.drop("model.layers.1.mlp.up_proj.")


@fault("S70", "model.layers.1.mlp.up_proj")
def layer_is_missing(sample: Sample) -> None:
    sample.drop("model.layers.1.")


@fault("S70", "lm_head")
def head_is_missing(sample: Sample) -> None:
    sample.drop("lm_head.")


@fault("S23", UP)
def unknown_tensor(sample: Sample) -> None:
    sample.tensors[f"{UP}.smooth"] = torch.ones(HIDDEN)


@fault("S72", UP)
def scale_is_not_a_number(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"][7] = float("nan")


@fault("S72", UP)
def zeroed_scales(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"].zero_()


@fault("S72", UP, severity=WARNING)
def negative_scale(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"][7] *= -1


@fault("S72", UP, base="FP8")
def input_scale_is_infinite(sample: Sample) -> None:
    sample.tensors[f"{UP}.input_scale"].fill_(float("inf"))


@fault("S72", UP, base="MXFP4")
def exponent_is_not_a_number(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"][7, 1] = 255


@fault("S72", UP, base="NVFP4")
def zero_scale_of_codes(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"].view(torch.uint8)[7, 1] = 0


# ----------------------------------------------------------------- transforms (S73 to S77)


def _transform(sample: Sample, **apply: object) -> None:
    one = {"targets": ["re:.*down_proj$"], "location": "input", **apply}
    sample.settings["transform_config"] = {
        "config_groups": {"R": {"type": "hadamard", "apply": [one]}}
    }


def _matrices(sample: Sample) -> None:
    for index in range(2):
        name = f"model.layers.{index}.mlp.down_proj.R_input.weight"
        sample.tensors[name] = torch.eye(INNER, dtype=torch.bfloat16)


@fault("S73", "R")
def rotation_of_keys(sample: Sample) -> None:
    _transform(sample, location="k_cache", targets=["LlamaAttention"])


def _turned(sample: Sample, **keys: object) -> None:
    both = [
        {"targets": ["re:.*self_attn$"], "location": location, "inverse": False}
        for location in ("q_attn", "k_cache")
    ]
    both[1] |= keys
    scheme = {"type": "hadamard", "apply": both, "head_dim": 32}
    sample.settings["transform_config"] = {"config_groups": {"R3": scheme}}


@fault("S73", "R3", severity=NOTE)
def rotation_of_queries_and_keys(sample: Sample) -> None:
    """Left out, it changes nothing: q Q (k Q)^T is q k^T."""
    _turned(sample)


@fault("S73", "R3")
def matrices_of_queries_and_keys(sample: Sample) -> None:
    """Left out it would change nothing, but vLLM refuses a tensor that it has no place for."""
    _turned(sample)
    for location in ("q_attn", "k_cache"):
        sample.tensors[f"{LAYER}.self_attn.R3_{location}.weight"] = torch.eye(32).bfloat16()


@fault("S73", "R3")
def keys_are_turned_otherwise(sample: Sample) -> None:
    _turned(sample, inverse=True)


@fault("S73", "R3", base="cache")
def turned_keys_are_cached(sample: Sample) -> None:
    _turned(sample)


@fault("S73", "R3")
def turned_keys_are_quantized(sample: Sample) -> None:
    _turned(sample)
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": inputs}
    sample.groups["group_1"] = attention


@fault("S69", "model.layers.0.mlp.experts", base="qwen3_moe")
def biases_of_experts(sample: Sample) -> None:
    sample.tensors["model.layers.0.mlp.experts.0.up_proj.bias"] = torch.zeros(INNER).bfloat16()


@fault("S74", "R", base="qwen3_moe")
def rotation_of_experts(sample: Sample) -> None:
    _transform(sample)


@fault("S74", "R", base="qwen2_moe")
def rotation_of_routers(sample: Sample) -> None:
    _transform(sample, targets=["re:.*mlp[.]gate$"])


@fault("S74", "R", base="qwen2_moe")
def rotation_of_what_is_never_quantized(sample: Sample) -> None:
    for index in range(2):
        name = f"model.layers.{index}.mlp.shared_expert_gate"
        sample.tensors[f"{name}.weight"] = torch.ones(1, HIDDEN).bfloat16()
        sample.settings["ignore"].append(name)
    _transform(sample, targets=["re:.*shared_expert_gate$"])


@fault("S76", f"{LAYER}.mlp.gate", base="qwen3_moe")
def rotation_of_routers_that_are_built_as_linears(sample: Sample) -> None:
    _transform(sample, targets=["re:.*mlp[.]gate$"])


@fault("S75", "R", deployment=Deployment(tp=(2,), server="vllm"))
def rotation_over_two_devices(sample: Sample) -> None:
    _transform(sample)
    _matrices(sample)


@fault("S76", DOWN)
def rotation_without_its_matrix(sample: Sample) -> None:
    _transform(sample)


@fault("S77", "transform_config", deployment=Deployment(tp=(1,), server="transformers"))
def rotation_in_transformers(sample: Sample) -> None:
    _transform(sample)
    _matrices(sample)


@fault(
    "S77",
    "transform_config",
    base="cache",
    deployment=Deployment(tp=(1,), server="transformers"),
    cache_is_known=True,
)
def turned_keys_in_transformers(sample: Sample) -> None:
    _turned(sample)


# ---------------------------------------------------------------------- transformers (T1 to T6)


@fault("T1", "quantization_config")
def unknown_key_of_a_group(sample: Sample) -> None:
    sample.group["comment"] = "none"


@fault("T2", "quantization_config")
def status_is_not_compressed(sample: Sample) -> None:
    sample.settings["quantization_status"] = "frozen"


# with its rules alone
@fault("S1", "quantization_config", deployment=BY_TRANSFORMERS)
def configuration_is_nowhere(sample: Sample) -> None:
    del sample.config["quantization_config"]


@fault("S1", "quantization_config", deployment=BY_TRANSFORMERS)
def method_is_empty(sample: Sample) -> None:
    sample.settings["quant_method"] = ""


@fault("T4", UP, base="W4A16_ASYM", deployment=BY_TRANSFORMERS)
def symmetric_with_zero_points(sample: Sample) -> None:
    sample.group["weights"]["symmetric"] = True


@fault("L10", "quantization_config", deployment=BY_TRANSFORMERS)
def packed_codes_in_a_format_of_bytes(sample: Sample) -> None:
    sample.settings["format"] = sample.group["format"] = "int-quantized"


@fault("T4", UP, severity=WARNING, deployment=BY_TRANSFORMERS)
def scale_of_inputs_that_are_plain(sample: Sample) -> None:
    sample.tensors[f"{UP}.input_scale"] = torch.ones(1)


@fault("S70", UP, base="W4A16", deployment=BY_TRANSFORMERS)
def asymmetric_without_zero_points(sample: Sample) -> None:
    sample.group["weights"]["symmetric"] = False


@fault("S70", "model.norm", deployment=BY_TRANSFORMERS)
def last_norm_lost_for_transformers(sample: Sample) -> None:
    sample.drop("model.norm.")


@fault("T4", "lm_head")
def head_by_class(sample: Sample) -> None:
    sample.settings["ignore"].remove("lm_head")


@fault("T4", "lm_head", compared=True)
def tied_head_by_class(sample: Sample) -> None:
    sample.drop("lm_head.")
    sample.config["tie_word_embeddings"] = True
    sample.settings["ignore"] = []


@fault("T5", "lm_head", base="head")
def head_is_ignored_by_class(sample: Sample) -> None:
    sample.settings["ignore"].append("Linear")


@fault("T6", f"{LAYER}.mlp.experts", base="NVFP4-moe", deployment=Deployment(server="transformers"))
def global_scales_of_experts(sample: Sample) -> None:
    """Nothing is spoilt: transformers loses these scales."""


@fault("T6", f"{LAYER}.mlp.experts", base="qwen3_moe", deployment=Deployment(server="transformers"))
def experts_that_are_looked_for_in_stacks(sample: Sample) -> None:
    sample.config["model_type"] = "gpt_oss"


@fault(
    "T6",
    f"{LAYER}.feed_forward.experts",
    deployment=Deployment(server="transformers"),
)
def experts_that_are_looked_for_one_by_one(sample: Sample) -> None:
    sample.config["model_type"] = "llama4_text"
    for own, shape in {"gate_up_proj": (HIDDEN, 2 * INNER), "down_proj": (INNER, HIDDEN)}.items():
        stack = torch.zeros(2, *shape, dtype=torch.bfloat16)
        sample.tensors[f"{LAYER}.feed_forward.experts.{own}"] = stack


@fault("L1", "model.embed_tokens", base="embedding", deployment=Deployment(server="transformers"))
def packed_embedding(sample: Sample) -> None:
    """Nothing is spoilt: transformers cannot load it."""


@fault(
    "L2",
    "encoder.block.0.layer.1.DenseReluDense.wo",
    base="t5",
    deployment=Deployment(server="transformers"),
)
def packed_weights_that_are_named(sample: Sample) -> None:
    """Nothing is spoilt: the initialization of T5 reads the weight."""


@fault(
    "L3",
    "encoder.block.0.layer.1.DenseReluDense.wo",
    base="t5",
    severity=WARNING,
    deployment=Deployment(server="transformers"),
)
def encoder_that_generate_calls(sample: Sample) -> None:
    sample.config["is_encoder_decoder"] = True


@fault("L2", f"{LAYER}.self_attn.o_proj", deployment=Deployment(server="transformers"))
def packed_weights_of_another_type(sample: Sample) -> None:
    sample.config["model_type"] = "nanochat"


@fault("L4", DOWN, base="NVFP4", deployment=Deployment(server="transformers"))
def model_in_float32(sample: Sample) -> None:
    sample.config["dtype"] = "float32"


@fault(
    "L5",
    f"{LAYER}.self_attn",
    base="cache",
    deployment=Deployment(server="transformers"),
    cache_is_known=True,
)
def queries_with_zero_points(sample: Sample) -> None:
    sample.tensors[f"{LAYER}.self_attn.q_zero_point"] = torch.zeros(1, dtype=torch.int8)


@fault("L11", f"{LAYER}.self_attn", base="cache", deployment=BY_TRANSFORMERS, cache_is_known=False)
def cache_by_another_name(sample: Sample) -> None:
    """Nothing is rounded: neither turned keys nor queries with zero points do harm."""
    _turned(sample)
    sample.tensors[f"{LAYER}.self_attn.q_zero_point"] = torch.zeros(1, dtype=torch.int8)


@fault("L11", f"{LAYER}.self_attn", base="cache", deployment=BY_TRANSFORMERS, cache_is_known=False)
def attention_by_another_name_without_scales(sample: Sample) -> None:
    """Their scales are found in the forward."""
    sample.settings["kv_cache_scheme"] |= {"dynamic": True, "strategy": "token"}
    for name in [name for name in sample.tensors if name.endswith(("k_scale", "v_scale"))]:
        sample.drop(name)


@fault("L11", f"{LAYER}.self_attn", severity=WARNING, base="cache", cache_is_known=False)
def cache_by_another_name_without_a_server(sample: Sample) -> None:
    """A limit of one server alone."""


@fault("L6", DOWN, deployment=Deployment(server="transformers"))
def ragged_groups(sample: Sample) -> None:
    sample.group["weights"]["group_size"] = 96


if REFUSES_OTHER_SHAPES:  # where a single number may have any shape, nothing breaches it

    @fault("L9", DOWN, base="FP8", deployment=BY_TRANSFORMERS)
    def static_scale_without_dimensions(sample: Sample) -> None:
        name = f"{DOWN}.input_scale"
        sample.tensors[name] = sample.tensors[name].reshape(())


@fault("L8", "lm_head", base="FP8_DYNAMIC", deployment=BY_TRANSFORMERS)
def head_of_small_floats_beside_a_tied_embedding(sample: Sample) -> None:
    sample.config["tie_word_embeddings"] = True
    sample.settings["ignore"].remove("lm_head")
    weight = sample.tensors["lm_head.weight"]
    sample.tensors["lm_head.weight_scale"] = weight.abs().amax(1, keepdim=True) / 448
    codes = weight / sample.tensors["lm_head.weight_scale"]
    sample.tensors["lm_head.weight"] = codes.to(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------ SGLang (G1 to G7)


@fault("G1", Q, deployment=SGLANG)
def class_before_shards(sample: Sample) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    targets = [rf"re:.*\.{own}_proj$" for own in "qkv"]
    sample.groups["group_1"] = {**sample.group, "input_activations": inputs, "targets": targets}


@fault("G2", f"{LAYER}.self_attn.o_proj", deployment=SGLANG)
def neither_targeted_nor_ignored(sample: Sample) -> None:
    name = f"{LAYER}.self_attn.o_proj"
    sample.drop(f"{name}.")
    sample.tensors[f"{name}.weight"] = torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16)
    sample.group["targets"] = ["re:.*[qkv]_proj", "re:.*mlp.*"]


@fault("G3", QKV, deployment=SGLANG)
def a_suffix_is_ignored(sample: Sample) -> None:
    sample.settings["ignore"].append("q_proj")


@fault("G4", "model.embed_tokens", deployment=SGLANG)
def embedding_is_packed(sample: Sample) -> None:
    _pack_like(sample, "model.embed_tokens", Q)


@fault("G5", "group_0", base="W3A16", deployment=SGLANG)
def three_bits(sample: Sample) -> None:
    """Nothing is spoilt: SGLang reads 4 and 8 bits."""


@fault("G6", f"{LAYER}.mlp.experts", base="W8A8-moe", deployment=SGLANG)
def integer_experts(sample: Sample) -> None:
    """Nothing is spoilt: SGLang serves them on other devices alone."""


@fault("G7", "kv_cache_scheme", base="cache", deployment=SGLANG)
def scales_per_head(sample: Sample) -> None:
    sample.settings["kv_cache_scheme"]["strategy"] = "attn_head"


# ----------------------------------------------------- consistency (C), values (V)


@fault("C1", UP)
def scales_of_another_group_size(sample: Sample) -> None:
    sample.group["weights"]["group_size"] = 64


def _flat(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"] = sample.tensors[f"{UP}.weight_packed"].reshape(-1)


@fault("C1", UP)
def flat_codes(sample: Sample) -> None:
    _flat(sample)


@fault("C1", UP, base="W3A16", compared=True)
def flat_codes_of_three_bits(sample: Sample) -> None:
    _flat(sample)


@fault("C1", UP, base="NVFP4")
def flat_codes_of_floats(sample: Sample) -> None:
    _flat(sample)


@fault("C1", UP, base="MXFP4", compared=True)
def flat_codes_of_powers(sample: Sample) -> None:
    _flat(sample)


@fault("C2", UP, base="FP8", compared=True)
def no_rows(sample: Sample) -> None:
    for name in (f"{UP}.weight", f"{LAYER}.mlp.gate_proj.weight"):
        sample.tensors[name] = sample.tensors[name][:0]


@fault("C4", "group_0", compared=True)
def integers_said_to_be_floats(sample: Sample) -> None:
    sample.group["weights"]["type"] = "float"


@fault("C4", "group_0", compared=True)
def groups_of_no_size(sample: Sample) -> None:
    sample.group["weights"]["group_size"] = None


@fault("C4", "group_0", base="FP8_DYNAMIC")
def small_floats_of_four_bits(sample: Sample) -> None:
    sample.group["weights"]["num_bits"] = 4


@fault("C4", "group_0", base="FP8_DYNAMIC")
def floats_in_the_format_of_integers(sample: Sample) -> None:
    sample.group["format"] = "int-quantized"


@fault("C4", "group_0", base="MXFP4", compared=True)
def powers_of_eight_bits(sample: Sample) -> None:
    sample.group["weights"]["num_bits"] = 8


@fault("C4", "quantization_config", severity=WARNING)
def another_format_of_the_whole(sample: Sample) -> None:
    sample.settings["format"] = "float-quantized"


@fault("C2", "lm_head")
def another_vocabulary(sample: Sample) -> None:
    sample.config["vocab_size"] += 1


@fault("C5", "config.json")
def no_heads(sample: Sample) -> None:
    sample.config["num_attention_heads"] = 0


@fault("C5", "config.json")
def fewer_than_no_heads_of_keys(sample: Sample) -> None:
    sample.config["num_key_value_heads"] = -2


@fault("C5", "config.json")
def broken_hidden_size(sample: Sample) -> None:
    sample.config["hidden_size"] = 127.5


@fault("C5", "config.json")
def layers_as_text(sample: Sample) -> None:
    sample.config["num_hidden_layers"] = "2"


@fault("C5", "config.json")
def vocabulary_is_a_truth(sample: Sample) -> None:
    sample.config["vocab_size"] = True


@fault("C5", "config.json", compared=True)
def class_of_another_model(sample: Sample) -> None:
    sample.config["architectures"] = ["GPT2LMHeadModel"]


@fault("C5", "config.json", severity=WARNING)
def class_that_is_built_alike(sample: Sample) -> None:
    sample.config["architectures"] = ["MistralForCausalLM"]


@fault("C5", "config.json")
def another_model_type(sample: Sample) -> None:
    sample.config["model_type"] = "gpt2"


@fault("C5", "config.json", compared=True)
def model_type_that_has_more(sample: Sample) -> None:
    sample.config["model_type"] = "qwen3"


@fault("C5", "model_type", deployment=BY_TRANSFORMERS)
def model_type_that_is_none(sample: Sample) -> None:
    sample.config["model_type"] = "lama"


@fault("C5", "model_type", severity=WARNING)
def model_type_that_vllm_may_have(sample: Sample) -> None:
    sample.config["model_type"] = "lama"


@fault("C5", "model_type")
def model_type_lost(sample: Sample) -> None:
    del sample.config["model_type"]


@fault("C5", "model_type")
def model_type_in_a_list(sample: Sample) -> None:
    sample.config["model_type"] = ["llama"]


@fault("C5", "architectures", severity=WARNING)
def class_lost(sample: Sample) -> None:
    del sample.config["architectures"]


@fault("C5", "architectures", deployment=Deployment(tp=(1,), server="vllm"))
def class_lost_for_vllm(sample: Sample) -> None:
    del sample.config["architectures"]


@fault("C5", "architectures")
def class_is_a_number(sample: Sample) -> None:
    sample.config["architectures"] = 3


@fault("C5", "config.json")
def activation_that_is_none(sample: Sample) -> None:
    sample.config["hidden_act"] = "no_such"


@fault("C5", "config.json")
def heads_that_do_not_divide(sample: Sample) -> None:
    sample.config |= {"num_attention_heads": 5, "head_dim": None}


def _biases(sample: Sample, value: float) -> None:
    """Biases of attention, which the configuration does not say to be there."""
    for index in range(2):
        for own in "qkvo":
            name = f"model.layers.{index}.self_attn.{own}_proj.bias"
            sample.tensors[name] = torch.full((HIDDEN,), value, dtype=torch.bfloat16)


@fault("C6", Q)
def biases_that_are_left_out(sample: Sample) -> None:
    _biases(sample, 0.5)


@fault("C6", Q, severity=NOTE)
def biases_of_zero(sample: Sample) -> None:
    _biases(sample, 0)


@fault("C6", f"{LAYER}.mlp.middle", severity=WARNING)
def module_that_is_left_out(sample: Sample) -> None:
    for index in range(2):
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
        sample.tensors[f"model.layers.{index}.mlp.middle.weight"] = weight


@fault("V1", UP)
def untouched_scales(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"].fill_(1)


@fault("V1", UP, severity=WARNING)
def equal_scales(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"].fill_(0.25)


@fault("V1", UP, base="FP8", severity=WARNING)
def input_scale_of_one(sample: Sample) -> None:
    sample.tensors[f"{UP}.input_scale"].fill_(1)


@fault("V2", UP, base="W4A8-bytes")
def code_beyond_four_bits(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight"][3, 5] = 8


@fault("V2", UP, base="W4A16_ASYM", severity=WARNING)
def untouched_zero_points(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_zero_point"].zero_()


@fault("V3", DOWN, base="odd")
def bits_behind_the_last_code(sample: Sample) -> None:
    sample.tensors[f"{DOWN}.weight_packed"][3, -1] |= 1 << 20


@fault("V4", UP)
def codes_never_written(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"].zero_()


@fault("V4", UP)
def row_never_written(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"][9] = 0


@fault("V5", UP, base="W8A8", severity=WARNING)
def scales_too_large(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight"] //= 16
    sample.tensors[f"{UP}.weight_scale"] *= 16


@fault("V6", "model.norm.weight")
def norm_is_not_a_number(sample: Sample) -> None:
    sample.tensors["model.norm.weight"][3] = float("nan")


@fault("V7", "lm_head.weight", severity=WARNING)
def head_of_zeros(sample: Sample) -> None:
    sample.tensors["lm_head.weight"].zero_()


@fault("V7", "model.embed_tokens.weight", compared=True)
def embedding_of_zeros(sample: Sample) -> None:
    sample.tensors["model.embed_tokens.weight"].zero_()


@fault("V7", f"{LAYER}.input_layernorm.weight", severity=WARNING)
def norm_of_zeros(sample: Sample) -> None:
    sample.tensors[f"{LAYER}.input_layernorm.weight"].zero_()


@fault("V7", "model.norm.weight", compared=True)
def norm_of_zeros_after_smoothing(sample: Sample) -> None:
    """What moves values between layers changes norms, and leaves none of zeros."""
    sample.tensors["model.norm.weight"].zero_()
    sample.files["recipe.yaml"] = b"quant_stage:\n  quant_modifiers:\n    SmoothQuantModifier: {}\n"


@fault("V6", UP, base="FP8_DYNAMIC")
def code_is_not_a_number(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight"].view(torch.uint8)[3, 5] = 127


# -------------------------------------------------------------------- against the original (R)


@fault("R1", "model.norm.weight", compared=True)
def norm_is_lost(sample: Sample) -> None:
    sample.drop("model.norm.")


@fault("R2", f"{LAYER}.mlp.up_proj.bias", compared=True, severity=WARNING)
def bias_from_nowhere(sample: Sample) -> None:
    sample.tensors[f"{UP}.bias"] = torch.zeros(INNER, dtype=torch.bfloat16)


@fault("R3", UP, compared=True)
def swapped_nibbles(sample: Sample) -> None:
    packed = sample.tensors[f"{UP}.weight_packed"].view(torch.uint8)
    swapped = (packed >> 4) | (packed << 4)
    sample.tensors[f"{UP}.weight_packed"] = swapped.view(torch.int32)


@fault("R3", UP, compared=True)
def swapped_rows(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_packed"][[3, 4]] = sample.tensors[f"{UP}.weight_packed"][[4, 3]]


@fault("R3", UP, compared=True)
def code_one_off(sample: Sample) -> None:
    packed = sample.tensors[f"{UP}.weight_packed"]
    packed[3, 5] ^= 1


@fault("R3", UP, compared=True)
def scales_of_another_module(sample: Sample) -> None:
    sample.tensors[f"{UP}.weight_scale"] *= 1.25


@fault("R4", f"{LAYER}.input_layernorm.weight", compared=True)
def norm_is_changed(sample: Sample) -> None:
    sample.tensors[f"{LAYER}.input_layernorm.weight"][3] += 0.5


@fault("R5", "lm_head.weight", compared=True)
def head_is_tied(sample: Sample) -> None:
    sample.drop("lm_head.")
    sample.config["tie_word_embeddings"] = True


@fault("R6", "config.json", compared=True, severity=WARNING)
def setting_is_changed(sample: Sample) -> None:
    sample.config["rms_norm_eps"] = 0.5


@fault("R6", "tokenizer.json", compared=True, severity=WARNING)
def tokenizer_is_missing(sample: Sample) -> None:
    del sample.files["tokenizer.json"]


# ------------------------------------------------------------------------ the manifest (M1 to M4)


def manifest(sample: Sample, **parts: object) -> None:
    """Give it a manifest of nothing but these parts."""
    content = {"manifest": 1, "weights": {}, "files": {}, "source": {}, "about": {"files": {}}}
    sample.files["manifest.json"] = json.dumps(content | parts).encode()


@fault("M1", "manifest.json")
def manifest_of_another_release(sample: Sample) -> None:
    manifest(sample, manifest=99)


@fault("M2", f"{UP}.weight_packed")
def tensor_of_another_hash(sample: Sample) -> None:
    held = {f"{UP}.weight_packed": "0" * 64}
    file = {"header": "", "bytes": 0, "tensors": held}
    manifest(sample, weights={"model-00001-of-00002.safetensors": file})


@fault("M3", "model-00001-of-00001.safetensors")
def weight_file_is_another(sample: Sample) -> None:
    file = {"header": "", "bytes": 0, "tensors": {}}
    manifest(sample, weights={"model-00001-of-00001.safetensors": file})


@fault("M4", "generation_config.json", severity=WARNING)
def side_file_is_missing(sample: Sample) -> None:
    sample.files.pop("generation_config.json", None)
    manifest(sample, files={"generation_config.json": "0" * 64})


# ------------------------------------------------------------------------- llama.cpp (Q1 to Q5)


@fault("C7", "rope_parameters", severity=NOTE)
def base_of_positions_in_rope_parameters_alone(sample: Sample) -> None:
    sample.config.pop("rope_theta", None)
    sample.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}


@fault("Q1", "config_groups", deployment=LLAMA_CPP)
def two_groups(sample: Sample) -> None:
    sample.groups["another"] = {**sample.group, "targets": ["re:nothing"]}


@fault("Q1", "config_groups", deployment=LLAMA_CPP)
def number_that_is_no_integer(sample: Sample) -> None:
    sample.group["weights"]["num_bits"] = 4.0


@fault("Q1", "quantization_config", deployment=LLAMA_CPP)
def underscore_for_the_converter(sample: Sample) -> None:
    sample.settings["quant_method"] = "compressed_tensors"


@fault("Q2", "group_0", base="W3A16", deployment=LLAMA_CPP)
def three_bits_for_the_converter(sample: Sample) -> None:
    assert sample.group["weights"]["num_bits"] == 3


@fault("Q3", f"{LAYER}.self_attn", base="cache", deployment=LLAMA_CPP)
def cache_with_scales(sample: Sample) -> None:
    assert f"{LAYER}.self_attn.k_scale" in sample.tensors


@fault("Q4", UP, deployment=LLAMA_CPP)
def torn_groups(sample: Sample) -> None:
    sample.group["weights"]["group_size"] = 96


@fault("Q5", "group_0", base="FP8_DYNAMIC", severity=NOTE, deployment=LLAMA_CPP)
def rounded_inputs(sample: Sample) -> None:
    assert sample.group["input_activations"]
