# SPDX-License-Identifier: Apache-2.0
"""Families whose weights are tied or written to in ways of their own, from a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.thinned import few, thinned
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    EncodecConfig,
    FunnelConfig,
    FunnelForMaskedLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RwkvConfig,
    RwkvForCausalLM,
    SpeechT5Config,
    SpeechT5ForTextToSpeech,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from llmcompressor import oneshot, plan, verify
from llmcompressor.errors import CheckpointError
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "pad_token_id": 0,
}
HEADS = ["re:lm_head.*", "re:cls.*", "decoder", "re:head.*"]
IDS = torch.arange(3, 35)[None]


def data() -> list[dict[str, list[int]]]:
    return [{"input_ids": list(range(first, first + 24))} for first in range(3, 9)]


def roberta() -> PreTrainedModel:
    return RobertaForMaskedLM(RobertaConfig(**SIZES))


def bert() -> PreTrainedModel:
    return BertLMHeadModel(BertConfig(**SIZES, is_decoder=True))


def modern_bert() -> PreTrainedModel:
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(**SIZES, **tokens))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.parametrize(
    ("build", "needs_data"), thinned([roberta, bert, modern_bert], [False, True])
)
def test_a_tied_masked_lm_head(build: Any, needs_data: bool, tmp_path: Path) -> None:
    """As transformers reads it, it computes what the same recipe makes of the model in memory."""
    torch.manual_seed(0)
    model = build()
    assert len(find_blocks(model)) == 2
    model.save_pretrained(tmp_path / "model")
    original = logits(model)

    def made(source: Any, output: str) -> Any:
        kind = GPTQModifier if needs_data else QuantizationModifier
        return oneshot(
            model=source,
            recipe=kind(targets="Linear", scheme="W8A16", ignore=HEADS),
            dataset=data() if needs_data else None,
            output_dir=str(tmp_path / output),
            # transformers' own ModernBERT cannot be built over codes
            save_compressed=build is not modern_bert,
            verify=output == "streamed",
        )

    returned = logits(made(str(tmp_path / "model"), "streamed"))
    made(model, "in_memory")
    read = [logits(type(model).from_pretrained(tmp_path / n)) for n in ("streamed", "in_memory")]
    assert torch.equal(read[0], read[1])
    torch.testing.assert_close(returned, read[0])
    assert not torch.equal(read[0], original)
    assert (read[0] - original).norm() < 0.01 * original.norm()


@pytest.fixture
def rescaling(tmp_path: Path) -> Path:
    """Its forward divides weights of every second block by two, where they are."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128}
    config = RwkvConfig(**sizes, num_hidden_layers=4, vocab_size=128, rescale_every=2)
    RwkvForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_forward_that_writes_to_weights_is_refused(rescaling: Path, tmp_path: Path) -> None:
    def run() -> None:
        oneshot(
            model=str(rescaling),
            recipe=GPTQModifier(targets="Linear", scheme="W8A16", ignore=["head"]),
            dataset=data(),
            output_dir=str(tmp_path / "output"),
            save_compressed=False,
        )

    with pytest.raises(CheckpointError, match="RwkvForCausalLM writes to its own weights") as found:
        run()
    assert "rescale_every 0" in str(found.value)
    model = RwkvForCausalLM.from_pretrained(rescaling)
    with pytest.raises(CheckpointError, match="RwkvForCausalLM writes to its own weights"):
        oneshot(
            model=model,
            recipe=GPTQModifier(targets="Linear", scheme="W8A16", ignore=["head"]),
            dataset=data(),
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]

    original = logits(RwkvForCausalLM.from_pretrained(rescaling))
    config = rescaling / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"rescale_every": 2', '"rescale_every": 0'))
    assert config.read_text() != text
    run()
    written = logits(RwkvForCausalLM.from_pretrained(tmp_path / "output"))
    assert (written - original).norm() < 0.01 * original.norm()


@pytest.mark.parametrize("needs_data", [False, True])
def test_a_configuration_that_differs_by_layer(needs_data: bool, tmp_path: Path) -> None:
    """Gemma 4's full layers have wider heads than the others: it has no one head_dim."""
    torch.manual_seed(0)
    wider = {"head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0}
    slices = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma4TextConfig(**SIZES, **wider, **slices, **kinds)
    Gemma4ForCausalLM(config).save_pretrained(tmp_path / "model")
    kind = GPTQModifier if needs_data else QuantizationModifier

    def recipe() -> Any:
        return kind(targets="Linear", ignore=["lm_head"], scheme="W8A16")

    given = {"dataset": data()} if needs_data else {}
    found = plan(tmp_path / "model", recipe(), measure=False, **given)
    model = oneshot(
        model=str(tmp_path / "model"), recipe=recipe(), output_dir=tmp_path / "out", **given
    )
    assert not found.problems
    assert found.sizes is not None
    assert found.sizes.weights == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert verify(tmp_path / "out").ok
    read = Gemma4ForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(read), logits(model))


def t5() -> PreTrainedModel:
    heads = {"num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}
    return T5ForConditionalGeneration(
        T5Config(d_model=64, d_kv=16, d_ff=128, vocab_size=128, decoder_start_token_id=0, **heads)
    )


def bart() -> PreTrainedModel:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(BartConfig(vocab_size=128, d_model=64, **sizes, **tokens))


def whisper() -> PreTrainedModel:
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=128, d_model=64, num_mel_bins=8, **sizes, **tokens)
    )


_BART = (("layers", 1), ("ffn_dim", 128), ("attention_heads", 4))


@pytest.mark.parametrize("build", few([t5, bart, whisper, bert], t5, whisper))
def test_what_is_tied_besides_the_head_gets_its_own_too(build: Any, tmp_path: Path) -> None:
    """An untied configuration makes readers look for each of the tables, and for biases."""
    torch.manual_seed(0)
    made = build().to(torch.bfloat16)
    made.save_pretrained(tmp_path / "model")
    tied = set(made.all_tied_weights_keys)
    assert tied
    recipe = QuantizationModifier(targets=["Linear"], scheme="W8A8", ignore=[*HEADS, "proj_out"])
    given: dict[str, Any] = {"recipe": recipe, "tie_word_embeddings": False}
    planned = plan(tmp_path / "model", measure=False, **given)
    oneshot(model=str(tmp_path / "model"), output_dir=tmp_path / "out", **given)
    weights = tmp_path / "out" / "model.safetensors"
    assert planned.sizes is not None
    assert planned.sizes.weights == weights.stat().st_size
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    read, info = type(made).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    before, after = made.state_dict(), read.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in tied)
    findings = verify(tmp_path / "out", reference=tmp_path / "model").findings
    assert not [one for one in findings if one.severity == "error"]


STEP: dict[str, Any] = {
    "vision_config": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "image_size": 32, "patch_size": 16},
        **{"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}, "mlp_ratio": 2.0},
    },
    "text_config": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96},
        **{"num_attention_heads": 4, "num_sliding_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]},
        **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"share_expert_dim": 64, "mtp_layer_types": None, "num_nextn_predict_layers": 0},
    },
}


def test_stacks_put_below_each_other_are_cut_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has a stack of gates and one of ups, and its class one of both."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("step3p7", **STEP)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])
    reasons: list[str] = []
    monkeypatch.setattr("llmcompressor.entrypoints.run._warn_in_memory", reasons.append)
    written = {}
    for name, source in (("streamed", str(tmp_path / "model")), ("in_memory", model)):
        oneshot(model=source, recipe=recipe, output_dir=str(tmp_path / name), verify=False)
        written[name] = load_file(tmp_path / name / "model.safetensors")
    assert not reasons
    assert {name for name in written["streamed"] if ".experts.3.up_proj." in name}
    assert written["streamed"].keys() == written["in_memory"].keys()
    for name, tensor in written["in_memory"].items():
        assert torch.equal(tensor, written["streamed"][name]), name
    assert verify(tmp_path / "streamed", str(tmp_path / "model")).ok


def music() -> PreTrainedModel:
    """Two texts: that of an encoder, and what a decoder makes of it, whose tokens are sounds."""
    text = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4}
    sound = {"hidden_size": 32, "num_filters": 8, "codebook_dim": 32}
    decoder = {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MusicgenConfig(
        text_encoder=T5Config(**text, vocab_size=128).to_dict(),
        audio_encoder=EncodecConfig(**sound).to_dict(),
        decoder=MusicgenDecoderConfig(**decoder, vocab_size=128).to_dict(),
    )
    return MusicgenForConditionalGeneration(config)


def speech() -> PreTrainedModel:
    """A list of its decoder holds single Linears, which are no blocks."""
    sizes = {"hidden_size": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "speech_decoder_prenet_units": 32}
    return SpeechT5ForTextToSpeech(SpeechT5Config(**sizes, **heads, **widths))


def funnel() -> PreTrainedModel:
    """Its layers stand in lists of a list."""
    sizes = {"d_model": 64, "d_inner": 128, "n_head": 4, "d_head": 16, "vocab_size": 128}
    return FunnelForMaskedLM(FunnelConfig(block_sizes=[1, 2], **sizes, num_decoder_layers=1))


@pytest.mark.parametrize(
    ("build", "blocks", "needs_data"),
    few(
        [(music, None, False), (speech, None, False), (funnel, 4, False), (funnel, 4, True)],
        *((speech, None, False), (funnel, 4, True)),
    ),
)
def test_whatever_is_in_lists_is_found(
    build: Any, blocks: int | None, needs_data: bool, tmp_path: Path
) -> None:
    """From a folder as from memory: the same files."""
    torch.manual_seed(0)
    model = build().eval()
    found = find_blocks(model)
    assert blocks is None or len(found) == blocks
    assert all(any(True for _ in block.children()) for block in found)
    model.save_pretrained(tmp_path / "model")
    for source, output in ((str(tmp_path / "model"), "streamed"), (model, "in_memory")):
        kind = GPTQModifier if needs_data else QuantizationModifier
        scheme = "W8A16" if needs_data else "FP8_DYNAMIC"
        oneshot(
            model=source,
            recipe=kind(targets="Linear", scheme=scheme, ignore=["lm_head"]),
            dataset=data() if needs_data else None,
            pipeline="layer_sequential" if needs_data else None,
            output_dir=str(tmp_path / output),
            verify=output == "streamed",  # the files are the same
        )
    streamed, in_memory = (
        load_file(tmp_path / one / "model.safetensors") for one in ("streamed", "in_memory")
    )
    assert streamed.keys() == in_memory.keys()
    assert sum(key.endswith("weight_scale") for key in streamed) > 8
    assert all(torch.equal(value, in_memory[key]) for key, value in streamed.items())
