# SPDX-License-Identifier: Apache-2.0
"""What is said of transformers is what it does: the same checkpoints are verified and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.releases import refuses_other_shapes, refuses_packed_zero_points
from tests.support.small_models import VOCABULARY
from tests.support.thinned import few, thinned
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CompressedTensorsConfig,
    FalconConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
    T5Config,
)

from llmcompressor import oneshot, plan, reset_session, verify
from llmcompressor.entrypoints.model_free import model_free_ptq
from llmcompressor.modifiers.quantization import QuantizationModifier

WHOLE = ["Linear", "re:.*embed_tokens"]
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
CONFIGS = {
    "llama": LlamaConfig(
        **TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    ),
    "t5": T5Config(
        **TOKENS, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2, decoder_start_token_id=0
    ),
    "mamba": MambaConfig(
        **TOKENS, hidden_size=64, state_size=8, num_hidden_layers=1, time_step_rank=32
    ),
    "falcon": FalconConfig(
        **TOKENS,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_hidden_size=128,
        tie_word_embeddings=False,
    ),
}


def weights(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": "channel", "symmetric": True, **more}


INT4, INT8 = weights(4, "int"), weights(8, "int")
FP8 = weights(8, "float")
NVFP4 = weights(4, "float", strategy="tensor_group", group_size=16)


def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(3, 15).reshape(2, 6)
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens, **more).logits
    return found


@pytest.mark.parametrize(
    ("name", "targets", "args", "rule"),
    [
        ("llama", ["Linear"], INT4, ""),
        ("llama", WHOLE, INT4, "L1"),
        ("llama", WHOLE, INT8, "L1"),
        ("llama", WHOLE, NVFP4, "L1"),
        ("llama", WHOLE, FP8, ""),
        ("t5", ["Linear"], INT4, "L2"),
        ("t5", ["re:.*DenseReluDense.wi"], NVFP4, "L2"),
        ("t5", ["Linear"], FP8, ""),
        ("mamba", ["Linear"], INT4, "L2"),
        ("mamba", ["re:.*in_proj"], INT4, ""),
        ("falcon", ["Linear"], INT4, "L2"),
        ("falcon", ["Linear"], FP8, ""),
    ],
)
def test_what_is_said_to_load_loads(
    name: str, targets: list[str], args: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(CONFIGS[name], dtype=torch.bfloat16)
    group = {"targets": targets, "weights": args}
    recipe = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    reset_session()
    oneshot(model=model, recipe=recipe, output_dir=str(tmp_path / "model"), verify=False)
    reset_session()
    before = logits(model)

    report = verify(tmp_path / "model", serve="transformers")
    errors = {one.rule for one in report.findings if one.severity == "error"}
    assert errors == ({rule} if rule else set())
    elsewhere = verify(tmp_path / "model", serve="vllm")
    assert not {"L1", "L2"} & {one.rule for one in elsewhere.findings}
    if rule:
        with pytest.raises(AttributeError, match="has no attribute 'weight'"):
            auto.from_pretrained(tmp_path / "model")
    else:
        assert torch.equal(logits(auto.from_pretrained(tmp_path / "model")), before)


@pytest.mark.parametrize("groups", [1, 2])
def test_an_encoder_that_is_said_to_generate_does(groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS["t5"], dtype=torch.bfloat16)
    first = {"targets": ["Linear"], "weights": FP8}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    named = {
        "targets": ["re:.*SelfAttention[.][qkvo]$"],
        "weights": FP8,
        "input_activations": inputs,
    }
    more = {"group_1": named} if groups > 1 else {}
    recipe = QuantizationModifier(config_groups={"group_0": first, **more}, ignore=["lm_head"])
    reset_session()
    oneshot(model=model, recipe=recipe, output_dir=str(tmp_path / "model"), verify=False)
    reset_session()
    said = [one for one in verify(tmp_path / "model").findings if one.rule == "L3"]
    is_for_all = not refuses_other_shapes()  # until 5.23
    assert {"dequantize=True" in one.remedy for one in said} == {groups == 1 or is_for_all}
    if groups == 1 or is_for_all:
        plain = CompressedTensorsConfig(dequantize=True)
        with pytest.warns(UserWarning, match="already has a `quantization_config`"):
            loaded = AutoModelForSeq2SeqLM.from_pretrained(
                tmp_path / "model", quantization_config=plain
            )
        loaded.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
        assert torch.equal(logits(loaded), logits(model))


def experts_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.get_parameter("model.layers.1.mlp.experts.down_proj").float()


@pytest.mark.parametrize(
    ("preset", "is_restored"),
    few(
        [
            ("W4A16", True),
            ("W4A16_ASYM", False),
            ("W3A16", True),
            ("W8A8", False),
            ("FP8_DYNAMIC", True),
            ("NVFP4A16", False),
            ("MXFP4", True),
            ("MXFP8", False),
        ],
        *(("W4A16_ASYM", False), ("W3A16", True), ("W8A8", False), ("FP8_DYNAMIC", True)),
    ),
)
def test_experts_that_are_said_to_be_restored_are(
    preset: str, is_restored: bool, mixtral_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model_free_ptq(mixtral_folder, folder, preset, ignore=["lm_head", "re:.*gate$"])
    report = verify(folder, serve="transformers")
    errors = {one.rule for one in report.findings if one.severity == "error"}
    if not preset.endswith("ASYM") or not refuses_packed_zero_points():
        assert "L9" not in errors  # of what is no expert
    assert errors - {"L9"} == (set() if is_restored else {"T6"})
    warned = [one for one in report.findings if "does not round what goes into" in one.message]
    assert bool(warned) == (preset in ("W8A8", "FP8_DYNAMIC", "MXFP4", "MXFP8"))
    original = experts_of(mixtral_folder)
    try:
        distance = (experts_of(folder) - original).norm() / original.norm()
    except RuntimeError:
        assert not is_restored
    else:
        assert (distance < 0.3) == is_restored


@pytest.mark.parametrize(
    ("preset", "runs", "dtype"),
    thinned(
        [
            ("NVFP4A16", False),
            ("MXFP4A16", False),
            ("MXFP8A16", False),
            ("FP8_DYNAMIC", True),
            ("W4A16", True),
            ("W8A8", True),
        ],
        ["float32", "float16"],
    ),
)
def test_what_is_said_to_run_runs(preset: str, runs: bool, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "hidden_size": 128})
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(
        tmp_path / "source"
    )
    recipe = QuantizationModifier(targets="Linear", scheme=preset, ignore=["lm_head"])
    reset_session()
    oneshot(model=tmp_path / "source", recipe=recipe, output_dir=str(tmp_path / "model"))
    reset_session()

    report = verify(tmp_path / "model", serve="transformers")
    said = {one.module for one in report.findings if one.rule == "L4"}
    assert len(said) == (0 if runs else 7)
    assert verify(tmp_path / "model").ok  # a limit of transformers alone
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    if runs:
        assert logits(loaded).isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="same dtype"):
            logits(loaded)
    assert verify(tmp_path / "model", serve="transformers", dtype="bfloat16").ok
    assert (
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16))
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_experts_of_small_floats_compute_in_is_said(dtype: str, tmp_path: Path) -> None:
    """Products of stacks take inputs of another dtype, those of one expert after another do not."""
    source = mixture("mixtral", tmp_path / "source", getattr(torch, dtype))
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    reset_session()
    oneshot(model=source, recipe=recipe, output_dir=str(tmp_path / "model"))
    reset_session()
    report = verify(tmp_path / "model", serve="transformers")
    said = [one.module for one in report.findings if one.rule == "L4"]
    assert report.ok
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    stack = loaded.get_parameter("model.layers.0.mlp.experts.down_proj")
    fits = stack.dtype == getattr(torch, dtype)
    assert fits or stack.dtype == torch.bfloat16, "it depends on the release"
    assert said == ([] if fits else ["model.layers.0.block_sparse_moe.experts"])
    assert logits(loaded).isfinite().all()
    eager = {"experts_implementation": "eager"}
    if not fits:
        with pytest.raises(RuntimeError, match="same dtype"):
            logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model", **eager))
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **eager)
        assert logits(loaded).isfinite().all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_of_small_floats_are_read_by_transformers(
    symmetric: bool, tmp_path: Path
) -> None:
    """They have the dtype of the codes; vLLM has no place for those of inputs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16)
    more = {"symmetric": symmetric, "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": {**FP8, "symmetric": symmetric}}
    group["input_activations"] = {"num_bits": 8, "type": "float", **more}
    rows = [{"input_ids": [5, 6, 7, 8, 9]}] * 2
    recipe = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    reset_session()
    oneshot(model=model, recipe=recipe, dataset=rows, output_dir=str(tmp_path / "model"))
    reset_session()
    assert verify(tmp_path / "model", serve="transformers").ok
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(model))
    elsewhere = verify(tmp_path / "model", serve="vllm").findings
    errors = {one.rule for one in elsewhere if one.severity == "error"}
    assert errors == (set() if symmetric else {"S21", "S23"})


def mixture(name: str, folder: Path, dtype: torch.dtype, **more: Any) -> Path:
    sizes = {
        **TOKENS,
        "hidden_size": 64,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 64,
        **more,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "scheme", "ignored", "is_read"),
    [
        ("gpt_oss", INT4, (), False),
        ("gpt_oss", INT4, ("re:.*experts.*",), True),
        ("granitemoe", INT4, (), False),
        ("llama4_text", INT8, (), True),
        ("llama4_text", NVFP4, (), True),
        ("llama4_text", INT8, ("re:.*experts.*",), False),
        ("mixtral", INT4, (), True),
        ("minimax_m3_vl_text", INT4, (), False),
        ("minimax_m3_vl_text", INT4, ("re:.*experts.*",), True),
        ("mixtral", INT4, ("re:.*experts.*",), True),
    ],
)
def test_mixtures_that_are_said_to_be_read_are(
    name: str, scheme: dict[str, Any], ignored: tuple[str, ...], is_read: bool, tmp_path: Path
) -> None:
    source = mixture(name, tmp_path / "source", torch.bfloat16)
    recipe = QuantizationModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": scheme}},
        ignore=["lm_head", *ignored],
    )
    reset_session()
    made = oneshot(model=source, recipe=recipe, output_dir=str(tmp_path / "model"))
    reset_session()
    errors = [
        one.rule
        for one in verify(tmp_path / "model", serve="transformers").findings
        if one.severity == "error"
    ]
    assert errors == ([] if is_read else ["T6"])
    has_biases = name == "gpt_oss" and not ignored  # where vLLM has no place for them
    assert {one.rule for one in verify(tmp_path / "model").findings if one.severity == "error"} == (
        {"S69"} if has_biases else set()
    )
    expected = logits(made).float()
    loaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")).float()
    assert (float((loaded - expected).norm() / expected.norm()) < 0.01) == is_read


def with_draft_layer(source: Path) -> None:
    """Let a mixture have one more layer, which its configuration announces for drafts."""
    tensors = load_file(source / "model.safetensors")
    layer, draft = "model.layers.0.", "model.layers.1."
    for name in [name for name in tensors if name.startswith(layer)]:
        tensors[name.replace(layer, draft)] = tensors[name].clone()
    tensors[f"{draft}eh_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def test_a_mixture_with_a_draft_layer_is_read(tmp_path: Path) -> None:
    more = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
    more |= {"moe_intermediate_size": 64, "first_k_dense_replace": 0}
    source = mixture("glm4_moe", tmp_path / "source", torch.bfloat16, **more)
    with_draft_layer(source)
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    reset_session()
    assert plan(source, recipe, measure=False).ok
    made = oneshot(model=source, recipe=recipe, output_dir=str(tmp_path / "model"))
    reset_session()
    assert verify(tmp_path / "model", serve="transformers").ok
    expected = logits(made).float()
    loaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")).float()
    assert float((loaded - expected).norm() / expected.norm()) < 0.01


ONE = {"num_hidden_layers": 1}


@pytest.mark.parametrize("groups", [1, 2])
def test_packed_zero_points_are_unpacked_while_they_load(groups: int, tmp_path: Path) -> None:
    """As the remedy says, where there is one group; with two of them it says something else."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.bfloat16)
    asymmetric = {**INT4, "symmetric": False}
    named = {"targets": ["Linear"] if groups == 1 else ["re:.*mlp.*"], "weights": asymmetric}
    other = {"group_1": {"targets": ["re:.*self_attn.*"], "weights": INT8}} if groups > 1 else {}
    recipe = QuantizationModifier(config_groups={"group_0": named, **other}, ignore=["lm_head"])
    reset_session()
    oneshot(model=model, recipe=recipe, output_dir=str(tmp_path / "model"))
    reset_session()
    found = verify(tmp_path / "model", serve="transformers").findings
    said = [one for one in found if one.rule == "L9"]
    assert bool(said) == refuses_packed_zero_points()
    assert all(("dequantize=True" in one.remedy) == (groups == 1) for one in said)
    if groups == 1:
        plain = CompressedTensorsConfig(dequantize=True)
        with pytest.warns(UserWarning, match="already has a `quantization_config`"):
            loaded = AutoModelForCausalLM.from_pretrained(
                tmp_path / "model", quantization_config=plain
            )
        assert torch.equal(logits(loaded), logits(model))


IN_GROUPS = {"strategy": "group", "group_size": 32}
IN_BLOCKS = {"strategy": "block", "block_structure": [64, 32]}


@pytest.mark.parametrize(
    ("hidden", "inner", "cells", "is_read"),
    [
        (64, 64, IN_GROUPS, False),
        (32, 32, IN_GROUPS, True),
        (64, 32, IN_GROUPS, False),
        (32, 64, IN_GROUPS, False),
        (32, 64, IN_BLOCKS, False),
        (32, 32, IN_BLOCKS, True),
    ],
)
def test_float_experts_are_read_with_one_scale_for_a_row(
    hidden: int, inner: int, cells: dict[str, Any], is_read: bool, tmp_path: Path
) -> None:
    """In all projections: what is one group wide in some may be two in the others."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    source = mixture("mixtral", tmp_path / "source", torch.bfloat16, **sizes)
    scheme = {"num_bits": 8, "type": "float", **cells}
    recipe = QuantizationModifier(
        config_groups={"group_0": {"targets": ["re:.*experts.*"], "weights": scheme}}
    )
    reset_session()
    oneshot(model=source, recipe=recipe, output_dir=str(tmp_path / "model"), verify=False)
    findings = verify(tmp_path / "model", serve="transformers").findings
    assert ("T6" in {one.rule for one in findings if one.severity == "error"}) is not is_read
    if is_read:
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


UP, DOWN = r"re:.*experts.*\.(gate|up)_proj$", r"re:.*experts.*\.down_proj$"
ROWS, ALL = INT4, {**INT4, "strategy": "tensor"}


def in_groups_of(size: int, **more: Any) -> dict[str, Any]:
    return {**INT4, "strategy": "group", "group_size": size, **more}


@pytest.mark.parametrize(
    ("sizes", "up", "down", "is_read"),
    [
        ((64, 128), in_groups_of(64), in_groups_of(128), True),
        ((128, 64), in_groups_of(128), in_groups_of(64), False),
        ((64, 128), in_groups_of(64), in_groups_of(32), False),
        ((64, 96), in_groups_of(64), in_groups_of(96), False),
        ((64, 128), in_groups_of(32), in_groups_of(128), True),
        ((64, 128), in_groups_of(32), ROWS, True),
        ((64, 128), ROWS, in_groups_of(128), True),
        ((64, 128), ROWS, in_groups_of(64), False),
        ((64, 128), ROWS, ALL, True),
        ((64, 128), ALL, in_groups_of(128), True),
        ((64, 128), in_groups_of(64), in_groups_of(128, num_bits=8), False),
    ],
)
def test_experts_in_different_groups_are_read_where_a_row_is_one(
    sizes: tuple[int, int],
    up: dict[str, Any],
    down: dict[str, Any],
    is_read: bool,
    tmp_path: Path,
) -> None:
    """A scale for a row fits each group of it; the first group of the file is taken for all."""
    hidden, inner = sizes
    more = {"hidden_size": hidden, "intermediate_size": inner}
    source = mixture("mixtral", tmp_path / "source", torch.float32, **more)
    groups = {
        "group_0": {"targets": [UP], "weights": up},
        "group_1": {"targets": [DOWN], "weights": down},
    }
    recipe = QuantizationModifier(config_groups=groups)
    reset_session()
    made = oneshot(source, recipe, output_dir=str(tmp_path / "model"), verify=False)
    reset_session()
    findings = verify(tmp_path / "model", serve="transformers").findings
    assert {one.rule for one in findings if one.severity == "error"} == (
        set() if is_read else {"T6"}
    )
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    except RuntimeError:
        assert not is_read
    else:
        assert torch.allclose(logits(loaded), logits(made), atol=1e-4) == is_read


DTYPES = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "float16"),
    ("float16", "bfloat16"),
    ("float32", "bfloat16"),
]
KINDS = [
    ("mixtral", INT4),
    ("llama4_text", in_groups_of(32, num_bits=8)),
    ("mixtral", in_groups_of(32, num_bits=8)),
    ("llama4_text", INT4),
]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_zero_points_of_packed_experts_have_a_remedy(family: str, tmp_path: Path) -> None:
    """vLLM reads them, so that it is an error for transformers alone."""
    source = mixture(family, tmp_path / "source", torch.float32, moe_intermediate_size=64)
    for name, symmetric in (("zeros", False), ("model", True)):
        weights = in_groups_of(32, symmetric=symmetric)
        groups = {"group_0": {"targets": ["re:.*experts.*"], "weights": weights}}
        reset_session()
        recipe = QuantizationModifier(config_groups=groups)
        made = oneshot(source, recipe, output_dir=str(tmp_path / name))
    reset_session()
    assert verify(tmp_path / "zeros").ok
    [one] = verify(tmp_path / "zeros", serve="transformers").findings
    assert (one.rule, one.severity) == ("T6", "error")
    assert "symmetric: true" in one.remedy
    with pytest.raises(RuntimeError, match="conversion"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "zeros")
    assert verify(tmp_path / "model", serve="transformers").ok
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(logits(loaded), logits(made), atol=1e-4)
