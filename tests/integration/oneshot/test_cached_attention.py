# SPDX-License-Identifier: Apache-2.0
"""Quantized keys and values on attention that asks more of its cache, or has it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import small_models as small
from tests.support.caches import as_read, go_on
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    InklingForCausalLM,
    InklingTextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from llmcompressor import oneshot, plan
from llmcompressor.errors import TargetError
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier

SIZES: dict[str, Any] = {
    "vocab_size": small.VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
PER_HEAD = {**FP8, "strategy": "attn_head"}
ATTENTION = {"group_0": {"targets": ["re:.*attn$"], "input_activations": FP8}}


def made(model_class: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config)
    return model.eval()


def llama4() -> PreTrainedModel:
    """Its second layer has no rotary embedding, and asks the cache how much it holds."""
    config = Llama4TextConfig(
        **SIZES, intermediate_size_mlp=64, moe_layers=[], no_rope_layers=[1, 0]
    )
    return made(Llama4ForCausalLM, config)


def inkling() -> PreTrainedModel:
    """It keeps the last states before its convolutions in the cache."""
    config = InklingTextConfig(
        **SIZES,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        d_rel=16,
        mlp_layer_types=["dense", "dense"],
    )
    return made(InklingForCausalLM, config)


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}


def deepseek() -> PreTrainedModel:
    """It keeps one latent state for all heads."""
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 64, **LATENT, **experts}
    return made(
        DeepseekV3ForCausalLM, DeepseekV3Config(**sizes, v_head_dim=16, first_k_dense_replace=1)
    )


def deepseek_sparse() -> PreTrainedModel:
    """Its indexer asks the cache after the update."""
    sizes = {**SIZES, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "dense"], **LATENT}
    indexer = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 32}
    return made(DeepseekV32ForCausalLM, DeepseekV32Config(**sizes, **indexer, v_head_dim=16))


def gpt_oss() -> PreTrainedModel:
    """It has eager attention alone."""
    return made(GptOssForCausalLM, GptOssConfig(**SIZES, num_local_experts=4))


def gemma3n() -> PreTrainedModel:
    """Its last layer takes keys and values of another: that is no attention of its own."""
    slices = {"vocab_size_per_layer_input": small.VOCABULARY, "hidden_size_per_layer_input": 8}
    sizes = {**SIZES, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    more = {"num_kv_shared_layers": 2, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
    return made(Gemma3nForCausalLM, Gemma3nTextConfig(**{**sizes, **slices, **more}))


def decoded(model: PreTrainedModel) -> Tensor:
    """The last logits, where the last token comes alone, beside what is cached."""
    tokens = small.probe()
    with torch.no_grad():
        state = model.eval()(tokens[:, :-1], use_cache=True)
        logits: Tensor = go_on(model, tokens[:, -1:], state).logits
    return logits


def decoded_as_read(model: PreTrainedModel) -> Tensor:
    with as_read(model):
        return decoded(model)


def run(model: PreTrainedModel, modifier: Any, folder: Path) -> PreTrainedModel:
    written: PreTrainedModel = oneshot(model, modifier, small.token_rows(), output_dir=folder)
    return written


@pytest.mark.parametrize("make", [llama4, inkling])
@pytest.mark.parametrize(
    "modifier",
    [
        lambda: QuantizationModifier(kv_cache_scheme=PER_HEAD),
        lambda: QuantizationModifier(config_groups=ATTENTION),
        lambda: GPTQModifier(
            targets="Linear", scheme="FP8", ignore=["lm_head"], kv_cache_scheme=FP8
        ),
    ],
    ids=["cache", "attention", "paused"],
)
def test_attention_that_asks_its_cache_is_calibrated_without_one(
    make: Callable[[], PreTrainedModel], modifier: Callable[[], Any], tmp_path: Path
) -> None:
    original = decoded(make())
    model = run(make(), modifier(), tmp_path / "out")
    read = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(decoded(read), decoded_as_read(model))
    assert not torch.equal(decoded(model), original)
    with torch.no_grad():  # and it runs without a cache, in memory
        model(small.probe(), use_cache=False)


def refused(model: PreTrainedModel, folder: Path, **fields: Any) -> str:
    """What a run says that is refused; the model is as it was."""
    before = decoded(model)
    with pytest.raises(TargetError) as caught:
        run(model, QuantizationModifier(**fields), folder)
    assert not folder.exists()
    assert torch.equal(decoded(model), before)
    assert not any(hasattr(module, "kv_cache") for module in model.modules())
    return str(caught.value)


def test_attention_that_asks_after_the_update_is_refused(tmp_path: Path) -> None:
    message = refused(deepseek_sparse(), tmp_path / "out", kv_cache_scheme=FP8)
    assert "self_attn (DeepseekV32Attention) does not run as readers run attention" in message
    assert "has no attribute 'update_indexer'). Leave kv_cache_scheme out" in message


def test_attention_is_tried_out_where_no_data_is_needed(tmp_path: Path) -> None:
    dynamic = {**FP8, "strategy": "token", "dynamic": True}
    with pytest.raises(TargetError, match="does not run as readers run attention"):
        oneshot(deepseek_sparse(), QuantizationModifier(kv_cache_scheme=dynamic))
    modifier = QuantizationModifier(kv_cache_scheme=dynamic)
    model = oneshot(deepseek(), modifier, output_dir=tmp_path / "out")
    read = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(decoded(read), decoded_as_read(model))


def test_one_latent_state_has_a_scale_and_none_per_head(tmp_path: Path) -> None:
    message = refused(deepseek(), tmp_path / "heads", kv_cache_scheme=PER_HEAD)
    assert "the number of their heads is 1, and readers take 4 from DeepseekV3Config" in message
    model = run(deepseek(), QuantizationModifier(kv_cache_scheme=FP8), tmp_path / "out")
    read = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(decoded(read), decoded_as_read(model))


def test_attention_is_refused_before_any_pass_and_by_the_plan(
    tmp_path: Path, said: list[str]
) -> None:
    """Also where others are before the modifier that quantizes it."""
    deepseek().save_pretrained(tmp_path / "model")
    recipe = [
        SparseGPTModifier(sparsity=0.5, targets=["re:.*self_attn.*proj$"]),
        QuantizationModifier(kv_cache_scheme=PER_HEAD),
    ]
    call = {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / "out")}
    (problem,) = plan(**call, recipe=recipe, dataset=small.token_rows(), measure=False).problems
    with pytest.raises(TargetError) as caught:
        oneshot(**call, recipe=recipe, dataset=small.token_rows())
    assert not any("Pass 1 of" in line for line in said)
    assert problem.message == caught.value.problem
    assert (problem.where, problem.remedy) == ("QuantizationModifier", caught.value.remedy)


def test_queries_of_eager_attention_are_refused(tmp_path: Path) -> None:
    message = refused(gpt_oss(), tmp_path / "out", config_groups=ATTENTION)
    assert "GptOssForCausalLM cannot be quantized" in message
    assert "it runs 'eager'" in message
    run(gpt_oss(), QuantizationModifier(kv_cache_scheme=FP8), tmp_path / "cache")


class ClosedLlama(LlamaForCausalLM):
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


def test_queries_are_refused_without_an_attention_function(tmp_path: Path) -> None:
    model = small.llama()
    model.__class__ = ClosedLlama
    message = refused(model, tmp_path / "out", config_groups=ATTENTION)
    assert "ClosedLlama cannot be quantized" in message
    assert "it lets nobody set it" in message
