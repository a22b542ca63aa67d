# SPDX-License-Identifier: Apache-2.0
"""What configuration and headers alone decide, and what a deployment changes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.checkpoint_samples import HIDDEN, INNER, Sample, dense, made, mixture, sparse
from tests.support.faults import FAULTS, Fault
from tests.support.sample_bases import MADE
from tests.support.thinned import thinned

from llmcompressor.errors import ArgumentError
from llmcompressor.schemes.presets import PRESETS
from llmcompressor.verification import Deployment, Finding, Severity, check_serving
from llmcompressor.verification.catalogue import RULES
from llmcompressor.verification.rules.server_table import served as served_row
from llmcompressor.verification.scheme import parse_groups

BY_HEADERS = {
    number
    for number, rule in RULES.items()
    if rule.decided in ("configuration", "headers", "deployment", "trial load")
}
# These faults lie in the content of a small tensor, or in what the class has.
BY_CONTENT = {
    "shape_that_is_not_true",
    "scale_of_the_cache_is_zero",
    "tied_head_by_class",
    "no_rows",
    "module_is_missing",
    "layer_is_missing",
    "head_is_missing",
    "last_norm_lost_for_transformers",
}
HEADER_FAULTS = [
    fault for fault in FAULTS if fault.rule in BY_HEADERS and fault.plant.__name__ not in BY_CONTENT
]


@pytest.mark.parametrize("fault", HEADER_FAULTS, ids=lambda fault: fault.name)
def test_no_data_is_needed(
    fault: Fault,
    good: Callable[[str], Sample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault.stand_in(monkeypatch)
    sample = good(fault.base)
    fault.plant(sample)
    headers = sample.headers(tmp_path)
    found = check_serving(sample.config, headers, deployment=fault.deployment)
    assert (fault.rule, fault.module) in {(one.rule, one.module) for one in found}


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"UNQUANTIZED"}))
def test_good_headers_have_no_finding(preset: str, tmp_path: Path) -> None:
    sample = made(dense(), preset)
    one = Deployment(server="vllm", tp=(1,), gpu="h100" if preset == "W4AFP8" else None)
    found = check_serving(sample.config, sample.headers(tmp_path), deployment=one)
    said = [each.rule for each in found if each.severity is not Severity.NOTE]
    assert said == (["S21"] if preset.startswith("MXFP6") else [])


def test_a_plain_model_has_no_finding(tmp_path: Path) -> None:
    sample = made(sparse(), only=lambda name: False, model_type="qwen3_moe")
    del sample.config["quantization_config"]
    found = check_serving(sample.config, sample.headers(tmp_path))
    assert {(one.rule, one.severity) for one in found} == {("S43", Severity.NOTE)}


def severity(sample: Sample, folder: Path, rule: str, **facts: object) -> set[Severity]:
    deployment = Deployment(**facts)
    found = check_serving(sample.config, sample.headers(folder), deployment=deployment)
    return {one.severity for one in found if one.rule == rule}


def test_vllm_computes_mxfp4_weights_without_8_bit_inputs(tmp_path: Path) -> None:
    sample = made(dense(), "MXFP4")
    b200 = Deployment(server="vllm", gpu="b200", tp=(1,))

    def said() -> list[str]:
        found = check_serving(sample.config, sample.headers(tmp_path), deployment=b200)
        return [one.message for one in found if one.rule == "S22"]

    assert not said()
    inputs = sample.settings["config_groups"]["group_0"]["input_activations"]
    inputs.update(num_bits=8, group_size=128, scale_dtype=None)
    (message,) = said()
    assert "not to 8-bit float, group 128, dynamic" in message


def test_a_split_that_was_not_asked_for_is_a_warning(tmp_path: Path) -> None:
    sample = made(dense(), "W4A16")
    assert severity(sample, tmp_path, "S39") == {Severity.WARNING}
    assert severity(sample, tmp_path, "S39", tp=(4,)) == {Severity.ERROR}
    assert severity(sample, tmp_path, "S39", tp=(1,)) == set()


def test_limits_of_a_server_are_errors_where_it_is_asked_for(tmp_path: Path) -> None:
    sample = made(dense(), "W3A16")
    assert severity(sample, tmp_path, "G5") == {Severity.WARNING}
    assert severity(sample, tmp_path, "G5", server="sglang") == {Severity.ERROR}
    assert severity(sample, tmp_path, "G5", server="vllm") == set()


@pytest.mark.parametrize(
    ("preset", "gpu", "rules"),
    [
        ("W8A8", "h100", set()),
        ("W8A8", "b200", {"S46"}),
        ("W4AFP8", "h100", set()),
        ("W4AFP8", "sm100", {"S48"}),
        ("MXFP4", "sm80", set()),
        ("MXFP4", "sm75", {"S47"}),
        ("FP8", "sm89", set()),
        ("FP8", "sm70", {"S45"}),
        ("W4A16", "t4", set()),
        ("W4A16", "v100", {"S44"}),
    ],
)
def test_devices(preset: str, gpu: str, rules: set[str], tmp_path: Path) -> None:
    sample = made(dense(), preset)
    deployment = Deployment(server="vllm", tp=(1,), gpu=gpu)
    found = check_serving(sample.config, sample.headers(tmp_path), deployment=deployment)
    assert {one.rule for one in found if one.severity is Severity.ERROR} == rules


def test_a_scheme_of_one_device_is_refused_for_any_other(tmp_path: Path) -> None:
    sample = made(dense(), "W4AFP8")
    found = partial(severity, sample, tmp_path, "S48", tp=(1,))
    assert found() == {Severity.WARNING}
    assert found(server="vllm") == found(server="vllm", gpu="a100") == {Severity.ERROR}
    assert found(server="vllm", gpu="sm90") == found(server="sglang") == set()


JOINED = {"transformer.h.0.self_attention.query_key_value": (3 * HIDDEN, HIDDEN)}
QUERIES = dense() | {"model.layers.0.self_attn.q_proj": (2 * HIDDEN, HIDDEN)}
REORDERED = {
    "bloom": (JOINED, {"n_head": 4}, {"W4A16", "W4A16_ASYM", "FP8", "FP8_BLOCK", "NVFP4A16"}),
    "falcon": (
        JOINED,
        {"num_attention_heads": 4, "num_kv_heads": 4, "new_decoder_architecture": True},
        {"FP8_BLOCK"},
    ),
    "llama4_text": (QUERIES, {}, {"W4A16_ASYM", "FP8_BLOCK"}),
    "llama": (dense(), {}, set()),
}
"""Family whose rows vLLM reorders → modules, settings, presets whose tensors do not follow."""


@pytest.mark.parametrize("family", REORDERED)
def test_what_does_not_follow_reordered_rows(family: str, tmp_path: Path) -> None:
    shapes, settings, refused = REORDERED[family]
    found = set()
    presets = ("W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16")
    for preset in presets:
        sample = made(shapes, preset, model_type=family, **settings)
        if severity(sample, tmp_path, "S36", server="vllm") == {Severity.ERROR}:
            found.add(preset)
    assert found == refused


@pytest.mark.parametrize("holder", ["q_proj", "v_proj"])
@pytest.mark.parametrize("location", ["input", "output"])
@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
def test_rotations_of_reordered_rows(holder: str, location: str, kind: str, tmp_path: Path) -> None:
    """vLLM makes Hadamard matrices by itself, and one module may hold a matrix for all."""
    sample = made(dense(), model_type="llama4_text")
    one = {"targets": ["re:.*self_attn.[qkv]_proj$"], "location": location}
    group = {"type": kind, "apply": [one]}
    sample.settings["transform_config"] = {"config_groups": {"v": group}}
    name = f"model.layers.0.self_attn.{holder}.v_{location}.weight"
    sample.tensors[name] = torch.eye(HIDDEN).bfloat16()
    is_wrong = location == "output" or (holder == "q_proj" and kind != "hadamard")
    assert severity(sample, tmp_path, "S74") == ({Severity.ERROR} if is_wrong else set())


@pytest.mark.parametrize(("stacked", "apart", "found"), [(0, 1, {Severity.ERROR}), (1, 0, set())])
def test_a_llama_4_is_read_in_stacks_behind_the_first(
    stacked: int, apart: int, found: set[Severity], tmp_path: Path
) -> None:
    path = "model.layers.{}.feed_forward"
    own = f"{path.format(stacked)}.experts"
    shapes = dense() | mixture(path.format(apart))
    sample = made(shapes, model_type="llama4_text", ignore=(f"re:.*{own}.*",))
    sample.tensors[f"{own}.gate_up_proj"] = torch.ones(3, HIDDEN, 2 * INNER).bfloat16()
    assert severity(sample, tmp_path, "S69") == found


INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
FP8_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
GROUPS = {**INT4, "strategy": "group", "group_size": 64}
INT8_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "inputs", "form", "says"),
    [
        ({**INT4, "strategy": "tensor"}, None, "pack-quantized", "need scales for groups"),
        ({**INT4, "strategy": "channel"}, None, "int-quantized", "not read from the format int-"),
        ({**INT4, "strategy": "channel"}, None, "pack-quantized", ""),
        (GROUPS, FP8_STATIC, "pack-quantized", "inputs like those of W4A8"),
        (GROUPS, INT8_DYNAMIC, "pack-quantized", ""),
        ({**GROUPS, "num_bits": 8}, INT8_DYNAMIC, "int-quantized", "need channel or tensor scales"),
    ],
)
def test_the_reason_is_that_of_the_scheme(
    weights: dict[str, object], inputs: dict[str, object] | None, form: str, says: str
) -> None:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    (parsed,) = parse_groups({"config_groups": {"group_0": group}, "format": form})
    served = served_row(parsed.scheme)
    assert bool(served.name) == (not says)
    assert says in served.why(parsed.scheme)


@pytest.mark.parametrize("preset", ["W4A16_ASYM", "FP8", "NVFP4"])
def test_an_uncompressed_checkpoint_is_one_finding(preset: str, tmp_path: Path) -> None:
    sample = made(dense(), preset)
    plain = made(dense(), only=lambda name: False).tensors
    kept = {name: one for name, one in sample.tensors.items() if not name.endswith("_packed")}
    kept = {name: one for name, one in kept.items() if not name.endswith("_shape")}
    sample.tensors = kept | plain
    found = strays(sample, tmp_path)
    assert all(one.message.startswith("It has a ") for one in found), "its format holds codes"
    assert len(found) >= 14
    sample.settings["format"] = sample.group["format"] = "dense"
    (one,) = strays(sample, tmp_path)
    assert one.message.startswith("It is not compressed: 14 modules")
    assert "save_compressed=True" in one.remedy
    sample.tensors["model.layers.0.mlp.up_proj.weight_g"] = torch.ones(1)
    sample.tensors["model.layers.0.input_layernorm.weight_scale"] = torch.ones(1)
    sample.tensors["model.layers.0.mlp.up_proj.output_scale"] = torch.ones(1)
    modules = [one.module for one in strays(sample, tmp_path)]
    assert modules.count("quantization_config") == 1
    assert set(modules[:-1]) == {"model.layers.0.mlp.up_proj", "model.layers.0.input_layernorm"}


def strays(sample: Sample, folder: Path) -> list[Finding]:
    deployment = Deployment(server="vllm", tp=(1,))
    found = check_serving(sample.config, sample.headers(folder), deployment=deployment)
    return [one for one in found if one.rule == "S23"]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"server": "vlm"}, "Did you mean vllm"),
        ({"tp": (0,)}, "positive"),
        ({"tp": ()}, "positive"),
        ({"gpu": "h10"}, "Did you mean"),
        ({"gpu": "sm9"}, "compute capability"),
    ],
)
def test_unknown_facts_are_refused(facts: dict[str, object], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Deployment(**facts)


SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")


STRANGE = [0, -1, -(10**12), 2.5, "4", True, {}, [], None, 10**12]


@pytest.mark.parametrize(
    ("value", "key", "base"),
    thinned(
        itertools.product(STRANGE, [*SIZES, "vocab_size"]),
        ["phi3", "FP8_BLOCK-moe", "tower", "W4A8-bytes"],
    ),
)
def test_no_size_is_too_strange_to_be_read(
    base: str, key: str, value: object, tmp_path: Path
) -> None:
    sample = MADE[base]()
    sample.config[key] = value
    if "text_config" in sample.config:
        sample.config["text_config"][key] = value
    check_serving(sample.config, sample.headers(tmp_path))


def rules(sample: Sample, folder: Path, **facts: object) -> set[str]:
    found = check_serving(
        sample.config, sample.headers(folder), deployment=Deployment(tp=(1,), **facts)
    )
    return {one.rule for one in found}


@pytest.mark.parametrize(("length", "fits"), [(INNER, True), (HIDDEN, False)])
def test_codes_lie_in_rows_of_outputs(length: int, fits: bool, tmp_path: Path) -> None:
    sample = made({"transformer.h.0.mlp.c_fc": (INNER, HIDDEN)}, model_type="gpt2")
    sample.tensors["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(length)
    assert ("C1" in rules(sample, tmp_path)) == (not fits)


def test_without_a_stated_dtype_that_of_the_weights_counts(tmp_path: Path) -> None:
    sample = made(dense(), "NVFP4")
    del sample.config["dtype"]
    assert "L4" not in rules(sample, tmp_path)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        sample.tensors[name] = sample.tensors[name].half()
    assert "L4" in rules(sample, tmp_path)
    assert "L4" not in rules(sample, tmp_path, dtype="bfloat16")


def test_rotations_left_out_are_a_limit_of_transformers(tmp_path: Path) -> None:
    sample = made(dense(), "W8A8")
    online = {"targets": ["re:.*down_proj$"], "location": "input"}
    sample.settings["transform_config"] = {
        "config_groups": {"R4": {"type": "hadamard", "apply": [online]}}
    }
    assert severity(sample, tmp_path, "S77") == {Severity.WARNING}
    assert severity(sample, tmp_path, "S77", server="transformers") == {Severity.ERROR}
    assert severity(sample, tmp_path, "S77", server="vllm") == set()


def test_a_rotation_may_be_shared_by_weights_in_several_forms(tmp_path: Path) -> None:
    """Codes of 4 and of 8 bits, and weights as they were: inputs of one width have one matrix."""
    sample = made(dense(), "W4A16", only=lambda name: "mlp" in name)
    everywhere = {"targets": ["Linear"], "location": "input", "ignore": ["lm_head"]}
    sample.settings["transform_config"] = {
        "config_groups": {"v": {"type": "random-hadamard", "apply": [everywhere]}}
    }
    first = "model.layers.0.self_attn.q_proj"
    inner = "model.layers.0.mlp.down_proj"
    for name, size in ((first, HIDDEN), (inner, INNER)):
        sample.tensors[f"{name}.v_input.weight"] = torch.eye(size)
    assert "S76" not in rules(sample, tmp_path, server="vllm")
    del sample.tensors[f"{first}.v_input.weight"]
    found = check_serving(sample.config, sample.headers(tmp_path), deployment=Deployment())
    missing = {one.module for one in found if one.rule == "S76"}
    assert first in missing
    assert "model.layers.0.mlp.gate_proj" in missing
    assert not [name for name in missing if name.endswith("down_proj")]


def test_experts_with_groups_of_two_sizes_are_one_finding(tmp_path: Path) -> None:
    """Narrow matrices get narrow groups; each has the shapes of its own scheme."""
    sample = made(sparse(), "W4A16", model_type="qwen3_moe")
    [(name, group)] = sample.settings["config_groups"].items()
    narrow = copy.deepcopy(group)
    narrow["weights"]["group_size"] = 64
    narrow["targets"] = [r"re:.*experts\.\d+\.down_proj$"]
    sample.settings["config_groups"] = {"group_0": narrow, name + "_rest": group}
    for expert in [each for each in sample.tensors if each.endswith("down_proj.weight_scale")]:
        if ".experts." in expert:
            sample.tensors[expert] = sample.tensors[expert].repeat_interleave(2, dim=1)
    found = rules(sample, tmp_path, server="vllm")
    assert "S62" in found
    assert not found & {"S66", "C1"}
