# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.utils import (
    calculate_offload_device_map,
    custom_offload_device_map,
    dispatch_for_generation,
    load_context,
)
from llmcompressor.utils.loading import is_model_ct_quantized_from_path

PROJECTION = "model.layers.0.self_attn.q_proj.weight"
TINY = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(TINY).to(torch.bfloat16).save_pretrained(path)
    return path


def test_inside_the_context_the_file_decides_the_dtype(folder: Path) -> None:
    before = vars(AutoModelForCausalLM).get("from_pretrained")
    with load_context():
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto_offload")
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"
    assert wide.dtype == torch.float32
    assert vars(AutoModelForCausalLM).get("from_pretrained") is before


def test_the_context_is_left_also_when_the_body_raises(folder: Path) -> None:
    before = vars(AutoModelForCausalLM).get("from_pretrained")
    with pytest.raises(OSError, match="nothing"), load_context():
        AutoModelForCausalLM.from_pretrained(folder / "nothing", local_files_only=True)
    assert vars(AutoModelForCausalLM).get("from_pretrained") is before


INT4 = {"num_bits": 4, "strategy": "channel"}
INT8 = {"num_bits": 8, "strategy": "channel"}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # so the context does
@pytest.mark.parametrize(
    "weights", [[INT4], [INT4, INT8], [{**INT4, "symmetric": False}, INT8]], ids=len
)
def test_a_compressed_source_is_dequantized(
    weights: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    """Each weight by the scheme of its own group, and nothing else is left of them."""
    targets = [["Linear"]] if len(weights) == 1 else [["re:.*self_attn.*"], ["re:.*mlp.*"]]
    groups = {
        f"group_{index}": {"targets": names, "weights": args}
        for index, (names, args) in enumerate(zip(targets, weights, strict=True))
    }
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    made = oneshot(folder, recipe, output_dir=tmp_path / "out")
    with load_context():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    plain = LlamaForCausalLM.from_pretrained(folder)
    found, written = dict(model.named_parameters()), dict(made.named_parameters())
    assert found.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in found.items())
    assert not torch.equal(found[PROJECTION], plain.get_parameter(PROJECTION))
    assert getattr(model, "hf_quantizer", None) is None
    assert getattr(model.config, "quantization_config", None) is None
    assert not any(hasattr(each, "quantization_scheme") for each in model.modules())
    again = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    oneshot(model, again, output_dir=tmp_path / "again")


def test_a_dispatched_model_generates() -> None:
    model = LlamaForCausalLM(TINY).train()
    assert dispatch_for_generation(model) is model
    assert not model.training
    ids = torch.tensor([[1, 2, 3]], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0
    )
    assert out.shape == (1, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_fits_goes_to_the_device_whole(folder: Path) -> None:
    model = dispatch_for_generation(LlamaForCausalLM(TINY))
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    device_map = calculate_offload_device_map(str(folder), reserve_for_hessians=True)
    assert set(device_map.values()) == {0}


@pytest.mark.filterwarnings("ignore:Current model requires")  # of accelerate, on small limits
def test_a_limit_of_each_accelerator_needs_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named in bytes or in words; what is left lies with the processor."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    name = str(folder)
    assert custom_offload_device_map(name, "1GB", num_gpus=2) == {"": 0}
    # The embedding takes 1 KiB, and room is kept for one layer of 4 KiB that is to visit.
    cut = custom_offload_device_map(name, "5KB", model_cls=LlamaForCausalLM)
    assert cut["model.embed_tokens"] == 0
    assert cut["model.layers.0"] == "cpu"
    assert custom_offload_device_map(name, 5000, torch_dtype=torch.float32) == {"": "cpu"}
    assert set(custom_offload_device_map(name, 5000, num_gpus=9).values()) >= {0, 1}


def test_a_checkpoint_says_whether_it_is_quantized(folder: Path, tmp_path: Path) -> None:
    oneshot(
        model=str(folder),
        recipe=QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"]),
        output_dir=tmp_path / "small",
    )
    assert is_model_ct_quantized_from_path(str(tmp_path / "small"))
    assert not is_model_ct_quantized_from_path(str(folder))
