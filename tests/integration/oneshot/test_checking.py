# SPDX-License-Identifier: Apache-2.0
"""What is said before the work of an output that its readers would refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from tests.support import small_models as small
from tests.support.caches import as_read, is_passed_over
from tests.support.releases import refuses_packed_zero_points
from torch.nn.utils.parametrize import register_parametrization
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from llmcompressor import oneshot
from llmcompressor.errors import RecipeError
from llmcompressor.modifiers.quantization import QuantizationModifier

ATTENTION = "transformer.h.0.self_attention.query_key_value"


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose initialization reads the weights of all its Linears."""
    folder = tmp_path_factory.mktemp("source") / "falcon"
    sizes = {"vocab_size": small.VOCABULARY, "hidden_size": 128, "num_attention_heads": 4}
    FalconForCausalLM(FalconConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("scheme", "is_read"), [("W4A16", False), ("W8A8", True)])
def test_what_transformers_cannot_load_is_said_before_the_work(
    scheme: str, is_read: bool, falcon: Path, tmp_path: Path, warned: list[str]
) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(falcon, recipe, output_dir=tmp_path / "out")
    said = [line for line in warned if "transformers would not load" in line]
    if is_read:
        assert not said
        FalconForCausalLM.from_pretrained(tmp_path / "out")
        return
    assert len(said) == 1, "one for all modules with one reason"
    for word in (ATTENTION, "L2", "Ignore these modules", "W8A8", "vLLM"):
        assert word in said[0]
    with pytest.raises(AttributeError, match="weight"):
        FalconForCausalLM.from_pretrained(tmp_path / "out")


def test_what_a_script_may_save_is_warned_of_and_not_refused(
    one_block: Path, tmp_path: Path, warned: list[str]
) -> None:
    """Without an output directory nothing tells that the model is for its readers."""
    model = AutoModelForCausalLM.from_pretrained(one_block)
    oneshot(model, unservable(), ROWS)
    said = [line for line in warned if "would not" in line]
    for word in ("vllm", "(S49)", "transformers", "(L1)", "model.embed_tokens"):
        assert any(word in line for line in said)
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_could_not_be_written_serves_in_memory(one_block: Path, warned: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(one_block)
    register_parametrization(model.model.layers[0].mlp.up_proj, "weight", torch.nn.Identity())
    recipe = QuantizationModifier(targets="re:.*down_proj", scheme="FP8")
    oneshot(model, recipe, ROWS)
    assert len([line for line in warned if "save_pretrained would fail" in line]) == 1
    assert model.model.layers[0].mlp.down_proj.quantization_scheme is not None


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_checked", [False, True])
def test_what_save_pretrained_writes_is_read_again(
    is_checked: bool, is_streamed: bool, one_block: Path, tmp_path: Path, warned: list[str]
) -> None:
    """What is wrong is told; the model would be lost with the script that holds it."""
    recipe = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
    if is_streamed:
        model = oneshot(one_block, recipe, output_dir=tmp_path / "run", verify=is_checked)
    else:
        model = AutoModelForCausalLM.from_pretrained(one_block)
        oneshot(model, recipe, verify=is_checked)
    model.save_pretrained(tmp_path / "good")
    report = json.loads((tmp_path / "good" / "compression_report.json").read_text())
    assert ("verification" in report) == is_checked
    if is_checked:
        assert report["verification"]["counts"]["error"] == 0
    assert not [line for line in warned if "is not good" in line]
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()
    said = [line for line in warned if "What save_pretrained has written is not good" in line]
    assert len(said) == is_checked
    assert all("model.norm" in line for line in said)


ZERO_POINTS = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
ROWS = [{"input_ids": list(range(3, 19))}] * 2


def attention() -> QuantizationModifier:
    """What vLLM and SGLang do not serve, and transformers in float16 alone."""
    group = {"targets": ["LlamaAttention"], "input_activations": ZERO_POINTS}
    return QuantizationModifier(config_groups={"attention": group})


def unservable() -> QuantizationModifier:
    """A cache that vLLM and SGLang do not serve, and an embedding that transformers does not."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    group = {"targets": ["Embedding"], "weights": weights}
    return QuantizationModifier(config_groups={"words": group}, kv_cache_scheme=ZERO_POINTS)


@pytest.mark.parametrize("is_object", [False, True])
def test_what_no_server_takes_is_refused_before_the_work(
    is_object: bool, one_block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(one_block) if is_object else one_block
    calibrated: list[object] = []
    monkeypatch.setattr(
        "llmcompressor.pipelines.sequential.SequentialPipeline.__call__",
        lambda *args: calibrated.append(args),
    )
    with pytest.raises(RecipeError) as error:
        oneshot(model, unservable(), ROWS, output_dir=tmp_path / "out")
    for word in ("vllm (S49, ", "transformers (L1, ", "sglang (G", "No server"):
        assert word in error.value.problem
    assert "symmetric" in error.value.remedy
    assert "verify=False" in error.value.remedy
    assert not calibrated
    assert list(tmp_path.iterdir()) == []


def test_what_is_meant_is_written_with_a_warning(
    one_block: Path, tmp_path: Path, warned: list[str]
) -> None:
    oneshot(one_block, attention(), ROWS, output_dir=tmp_path / "out", verify=False)
    assert len([line for line in warned if "vllm would not serve" in line]) == 1
    assert len([line for line in warned if "transformers would not" in line]) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if is_passed_over(model.model.layers[0].self_attn):
        assert [line for line in warned if "(L11)" in line]
        model(torch.arange(3, 9)[None])
        return
    assert [line for line in warned if "(L5)" in line]
    with pytest.raises(RuntimeError, match="same dtype"):  # as the rule says
        model(torch.arange(3, 9)[None])


def test_ragged_groups_are_meant_where_the_recipe_says_so(
    one_block: Path, tmp_path: Path, warned: list[str]
) -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 48}
    recipe = QuantizationModifier(
        config_groups={"ragged": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        bypass_divisibility_checks=True,
    )
    oneshot(one_block, recipe, output_dir=tmp_path / "out")
    assert len([line for line in warned if "(S39)" in line]) == 1
    assert len([line for line in warned if "(L6)" in line]) == 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="divisble"):  # as the rule says
        model(torch.arange(3, 9)[None])


@pytest.fixture(scope="module")
def normal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with heads of 128 channels, as usual."""
    folder = tmp_path_factory.mktemp("source") / "normal"
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 256}
    config = LlamaConfig(vocab_size=small.VOCABULARY, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


UNSERVED = {name for name in PRESET_SCHEMES if name.startswith("MXFP6")}


SERVED = sorted(PRESET_SCHEMES.keys() - UNSERVED - {"UNQUANTIZED"})
ALIKE = {
    one for one in SERVED if one.startswith(("W2", "W5", "W6", "W7")) or one in ("INT8", "W8A16")
}


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(one, marks=[pytest.mark.slow] if one in ALIKE else []) for one in SERVED],
)
def test_no_preset_is_warned_of(
    scheme: str, normal: Path, tmp_path: Path, warned: list[str]
) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(normal, recipe, ROWS, output_dir=tmp_path / "out")
    said = [line for line in warned if "would not" in line]
    if scheme.endswith("_ASYM") and refuses_packed_zero_points():
        assert len(said) == 1
        assert "transformers would not load or run this (L9)" in said[0]
        assert "dequantize=True" in said[0]
        return
    assert not said


def test_what_an_earlier_run_has_quantized_is_known(tmp_path: Path, warned: list[str]) -> None:
    floats = QuantizationModifier(targets=["re:.*self_attn.*"], scheme="FP8_DYNAMIC")
    packed = QuantizationModifier(targets=["re:.*mlp.*"], scheme="W4A16")
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    model = small.one_block()
    for recipe in (floats, packed, QuantizationModifier(targets=[], kv_cache_scheme=cache)):
        oneshot(model, recipe, small.token_rows(), output_dir=tmp_path / "out", overwrite=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    unknown = is_passed_over(read.model.layers[0].self_attn)
    said = [line for line in warned if "would not" in line]
    assert [line for line in said if "(L11)" not in line] == []
    assert len(said) == unknown
    with torch.no_grad(), as_read(model):
        assert torch.equal(read(small.probe()).logits, model.eval()(small.probe()).logits)


INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
INT8 = {**INT4, "num_bits": 8}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}
UP, DOWN = r"re:.*experts\..*(gate|up)_proj", r"re:.*experts\..*down_proj"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of eight experts, in stacks."""
    folder = tmp_path_factory.mktemp("source") / "mixture"
    small.mixture(blocks=1).save_pretrained(folder)
    return folder


def groups(*pairs: tuple[str, dict[str, object]], **more: object) -> QuantizationModifier:
    config = {
        f"group_{index}": {"targets": [target], "weights": weights, **more}
        for index, (target, weights) in enumerate(pairs)
    }
    return QuantizationModifier(config_groups=config, ignore=["lm_head"])


@pytest.mark.parametrize(
    "pairs",
    [
        [(UP, INT4), (DOWN, INT8)],
        [(r"re:.*experts\.0\..*", INT4), (r"re:.*experts\.[1-7]\..*", INT8)],
        [(r"re:.*experts\.[02]\..*", INT4)],
        [(r"re:.*experts\.[02]\..*", FLOATS)],
        [(UP, INT4)],
    ],
)
def test_experts_that_differ_are_refused_before_the_work(
    pairs: list[tuple[str, dict[str, object]]], mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="No server") as error:
        oneshot(mixture, groups(*pairs), output_dir=tmp_path / "out")
    for word in ("vllm (S62, model.layers.0", "transformers (T6, model.layers.0", "sglang (G6, "):
        assert word in error.value.problem
    assert "Quantize all experts of a layer alike" in error.value.remedy
    assert list(tmp_path.iterdir()) == []
