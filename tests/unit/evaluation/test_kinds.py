# SPDX-License-Identifier: Apache-2.0
"""What cannot be measured is refused, not measured with weights drawn at random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from llmcompressor import evaluate
from llmcompressor.cli import main
from llmcompressor.errors import ArgumentError, CheckpointError

ROWS = [{"input_ids": [5, 6, 7, 8, 9, 10, 11, 12]}, {"input_ids": [30, 31, 5, 6, 40, 41, 42, 43]}]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TWO_SIDED: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def _built(cls: type[PreTrainedModel], **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = TWO_SIDED if cls.config_class is hf.BartConfig else SIZES
    return cls(cls.config_class(**sizes, **changes)).eval()


def _folder(model: PreTrainedModel, place: Path) -> Path:
    model.save_pretrained(place)
    return place


REFUSED = [
    (hf.LlamaForSequenceClassification, "makes logits .* of tokens"),
    (hf.BertForSequenceClassification, "makes logits .* of tokens|reads a text in both directions"),
    (hf.BertForMaskedLM, "reads a text in both directions"),
    (hf.DistilBertForMaskedLM, "reads a text in both directions"),
    (hf.ModernBertForMaskedLM, "reads a text in both directions"),
    (hf.AlbertForMaskedLM, "reads a text in both directions"),
    (hf.LlamaModel, "makes no logits of tokens"),
    (hf.BartForConditionalGeneration, "is an encoder with a decoder"),
]


@pytest.mark.parametrize("form", ["object", "folder"])
@pytest.mark.parametrize(("cls", "said"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_models_of_other_tasks(cls: Any, said: str, form: str, tmp_path: Path) -> None:
    model = _built(cls)
    given = model if form == "object" else _folder(model, tmp_path / "model")
    with pytest.raises((CheckpointError, ArgumentError), match=said):
        evaluate(given, dataset=ROWS)


@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (hf.GPTNeoXForCausalLM, {}),
        (hf.BertLMHeadModel, {"is_decoder": True}),
        (hf.BartForCausalLM, {"is_decoder": True, "is_encoder_decoder": False}),
    ],
    ids=["says that it is none", "made one", "half of another"],
)
def test_decoders_are_measured(cls: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    model = _built(cls, **changes)
    found = evaluate(_folder(model, tmp_path / "model"), reference=model, dataset=ROWS)
    assert found.loss == evaluate(model, dataset=ROWS).loss
    assert found.kl_divergence == 0


def test_a_folder_has_the_class_that_it_names(tmp_path: Path) -> None:
    """A model with a vision tower is loaded by another auto class than a plain one."""
    text = hf.LlamaConfig(**SIZES)
    vision = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    torch.manual_seed(0)
    model = hf.LlavaForConditionalGeneration(config).eval()
    found = evaluate(_folder(model, tmp_path / "model"), dataset=ROWS)
    assert found.loss == evaluate(model, dataset=ROWS).loss


def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(_built(hf.LlamaForCausalLM), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    gone = weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 .* random: model\.layers\.0\.mlp\.up_proj"):
        evaluate(folder, dataset=ROWS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(SystemExit) as left:
        main(["evaluate", str(folder), "--dataset", str(rows)])
    assert left.value.code == 2
    assert "which would be random" in capsys.readouterr().err
    weights["model.layers.0.mlp.up_proj.weight"] = gone[:-1].contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is \[47, 32\], and the model .* has \[48, 32\]"):
        evaluate(folder, dataset=ROWS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"quant_method": "compressed-tensors", "config_groups": 7}, "cannot be loaded|cannot run"),
    ],
)
def test_what_a_configuration_says_of_quantization(
    settings: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    """Nothing, which is no method; or what transformers refuses by an error of its own."""
    folder = _folder(_built(hf.LlamaForCausalLM), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    if said is None:
        assert evaluate(folder, dataset=ROWS).loss > 0
        return
    with pytest.raises(CheckpointError, match=said):
        evaluate(folder, dataset=ROWS)
