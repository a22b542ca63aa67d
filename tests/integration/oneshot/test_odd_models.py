# SPDX-License-Identifier: Apache-2.0
"""Models that are stored or built in ways of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tests.support import small_models as small
from tests.support.small_models import VOCABULARY, probe
from tests.support.thinned import thinned
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput

from llmcompressor import oneshot, plan, verify
from llmcompressor.logger import logger
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier


class NamedConfig(PreTrainedConfig):
    """Of a type that transformers does not know."""

    model_type = "named_otherwise"

    def __init__(self, table: str = "wte", joint: str = "common", **more: Any) -> None:
        self.table, self.joint, self.vocab_size = table, joint, VOCABULARY
        super().__init__(**more)


class NamedForCausalLM(PreTrainedModel):
    """An embedding, a Linear of any name for each layer, and a head."""

    config_class = NamedConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, config: NamedConfig) -> None:
        super().__init__(config)
        setattr(self, config.table, nn.Embedding(VOCABULARY, 64))
        setattr(self, config.joint, nn.Linear(64, 64))
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.lm_head = nn.Linear(64, VOCABULARY, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return getattr(self, self.config.table)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.get_input_embeddings()(input_ids)
        for layer in self.layers:
            hidden = hidden + getattr(self, self.config.joint)(layer(hidden))
        return CausalLMOutput(logits=self.lm_head(hidden))


def quantized(folder: Path, scheme: str = "W8A16", **names: str) -> NamedForCausalLM:
    torch.manual_seed(0)
    model = NamedForCausalLM(NamedConfig(tie_word_embeddings=False, **names)).bfloat16()
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model, recipe, output_dir=folder)
    return model.eval()


@pytest.mark.parametrize(
    "names", [{"joint": "shared"}, {"joint": "patch_embed"}, {"table": "rows"}]
)
def test_a_module_is_what_its_class_is(
    names: dict[str, str], tmp_path: Path, warned: list[str]
) -> None:
    model = quantized(tmp_path / "out", **names)
    assert not [line for line in warned if "would not" in line or "with a limit" in line]
    read = NamedForCausalLM.from_pretrained(tmp_path / "out").eval()
    joint = getattr(read, read.config.joint)
    assert isinstance(joint, nn.Linear)
    assert joint.weight_packed.dtype is torch.int32
    with torch.no_grad():
        assert torch.equal(read(probe()).logits, model(probe()).logits)


TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 3, 3],
        "rope_theta": 10000.0,
    },
    "pad_token_id": 0,
    "dtype": torch.bfloat16,
}


def omni() -> Qwen2_5OmniForConditionalGeneration:
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 16,
        "max_source_positions": 20,
        "n_window": 10,
        "output_dim": 32,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    vision |= {"patch_size": 4, "out_hidden_size": 32}
    tokens = {"image_token_index": 4, "audio_token_index": 5, "video_token_index": 6}
    config = Qwen2_5OmniConfig(
        thinker_config={
            "audio_config": audio,
            "vision_config": vision,
            "text_config": TEXT,
            **tokens,
        },
        enable_audio_output=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    return Qwen2_5OmniForConditionalGeneration(config).to(torch.bfloat16)


def test_voices_are_read_and_copied(tmp_path: Path) -> None:
    source, place = tmp_path / "model", tmp_path / "out"
    omni().save_pretrained(source)
    torch.save({"Somebody": {"bos_token": torch.tensor(1)}}, source / "spk_dict.pt")
    recipe = {"targets": ["re:thinker.model.language_model.layers.*proj"], "scheme": "FP8_DYNAMIC"}
    model = oneshot(
        model=str(source),
        recipe={"modifiers": {"QuantizationModifier": recipe}},
        output_dir=str(place),
    )
    assert "Somebody" in model.speaker_map
    assert (place / "spk_dict.pt").read_bytes() == (source / "spk_dict.pt").read_bytes()


NAME = "model.layers.0.mlp.up_proj"


INT8 = {"num_bits": 8, "type": "int"}


FLOAT8 = {"num_bits": 8, "type": "float"}


GROUPS = {"strategy": "group", "group_size": 32}


ARGUMENTS = {
    "int8 channel": {**INT8, "strategy": "channel"},
    "int4 group": {"num_bits": 4, **GROUPS},
    "int4 group asymmetric": {"num_bits": 4, **GROUPS, "symmetric": False},
    "int8 group asymmetric": {**INT8, **GROUPS, "symmetric": False},
    "float8 channel": {**FLOAT8, "strategy": "channel"},
    "float8 block": {**FLOAT8, "strategy": "block", "block_structure": [16, 32]},
}


def model() -> PreTrainedModel:
    """The rows of one Linear begin at four times the smallest number of float16."""
    found = small.llama(num_hidden_layers=1)
    for parameter in found.parameters():
        parameter.data = parameter.data.half()
    found.config.dtype = torch.float16
    weight_RC = found.get_submodule(NAME).weight
    size_R1 = torch.logspace(-22, -6, len(weight_RC), base=2).unsqueeze(-1)
    generator = torch.Generator().manual_seed(1)
    weight_RC.data = ((torch.rand(weight_RC.shape, generator=generator) * 2 - 1) * size_R1).half()
    return found


def readable(tensors: dict[str, Tensor], key: str) -> Tensor:
    """A tensor; floats of 8 bits as what they stand for: several may be one in float16."""
    tensor = tensors[key]
    if tensor.dtype is not torch.float8_e4m3fn:
        return tensor
    scale = tensors[f"{key}_scale"]
    rows, columns = (of // by for of, by in zip(tensor.shape, scale.shape, strict=True))
    return tensor.half() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@pytest.mark.parametrize(
    ("name", "modifier"), thinned(ARGUMENTS, [QuantizationModifier, GPTQModifier])
)
def test_tiny_weights_in_float16_are_kept_in_memory_and_on_disk(
    name: str, modifier: Any, tmp_path: Path, warned: list[str]
) -> None:
    arguments: dict[str, Any] = ARGUMENTS[name]
    exact, rounded = model(), model()
    exact.save_pretrained(tmp_path / "source")
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    run: dict[str, Any] = {"dataset": small.token_rows(), "max_seq_length": 16}
    for start, output in ((rounded, "memory"), (str(tmp_path / "source"), "streamed")):
        oneshot(
            model=start,
            recipe=modifier(config_groups=groups, ignore=["lm_head"]),
            output_dir=tmp_path / output,
            verify=False,  # which the next line does, beside the source
            **run,
        )
        found = verify(tmp_path / output, reference=tmp_path / "source").findings
        assert not [one for one in found if one.severity == "error"], found
    assert not [one for one in warned if "changed the weights" in one]
    own, other = (load_file(tmp_path / f / "model.safetensors") for f in ("memory", "streamed"))
    assert own.keys() == other.keys()
    for key in own:
        assert torch.equal(readable(own, key), readable(other, key)), key
    assert bool((own[f"{NAME}.weight_scale"].float() > 0).all())
    was_RC, is_RC = (each.get_submodule(NAME).weight.double() for each in (exact, rounded))
    size_R = was_RC.norm(dim=1)
    if "block" not in name:
        assert bool(((is_RC - was_RC).norm(dim=1) < 0.25 * size_R).all())


RTN = "modifiers: {QuantizationModifier: {targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}"


INDEXER = "model.layers.0.self_attn.indexer.wk.weight"


SINKS = "model.layers.0.self_attn.sinks"


BIAS = "model.layers.0.mlp.up_proj.bias"


DRAFT = "model.layers.1.eh_proj.weight"


LORA = "model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level="WARNING", format="{message}")
    yield lines
    logger.remove(sink)


def with_tensors(source: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.ones(2, 2) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantized_folder(folder: Path, kind: str, place: Path) -> set[str]:
    model = str(folder) if kind == "folder" else AutoModelForCausalLM.from_pretrained(folder)
    oneshot(model=model, recipe=RTN, output_dir=str(place), verify=False)
    return {name for file in place.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("kind", ["folder", "object"])
def test_what_stays_behind_is_named_once(
    one_block: Path, tmp_path: Path, said: list[str], kind: str
) -> None:
    cache = "model.layers.0.self_attn.rotary_emb.inv_freq"
    names = (INDEXER, SINKS, BIAS, DRAFT, cache, "mtp.fc.weight")
    folder = with_tensors(one_block, tmp_path / "model", *names)
    written = quantized_folder(folder, kind, tmp_path / "out")
    assert {DRAFT, "mtp.fc.weight"} == written & {*names}
    (line,) = [one for one in said if "Left out" in one]
    assert all(name in line for name in (INDEXER, SINKS, BIAS, "model_free_ptq"))
    assert not any(name in line for name in (DRAFT, cache, "mtp"))


def test_an_adapter_among_the_weights_is_told_of(
    one_block: Path, tmp_path: Path, said: list[str]
) -> None:
    folder = with_tensors(one_block, tmp_path / "model", LORA, LORA.replace("_A", "_B"))
    quantized_folder(folder, "folder", tmp_path / "out")
    (line,) = [one for one in said if "tensors of an adapter" in one]
    assert LORA in line
    assert "merge it into the weights" in line
    assert not [one for one in said if "Left out" in one]


IMAGE = 5


SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


def whisper() -> torch.nn.Module:
    ends = ("encoder", "decoder")
    sizes = {f"{end}_layers": 1 for end in ends}
    sizes |= {f"{end}_ffn_dim": 32 for end in ends}
    sizes |= {f"{end}_attention_heads": 2 for end in ends}
    config = hf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        decoder_start_token_id=1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **sizes,
    )
    return hf.WhisperForConditionalGeneration(config)


def llava() -> torch.nn.Module:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(
            **SIZES, num_hidden_layers=1, num_key_value_heads=2, vocab_size=64
        ),
        vision_config=hf.CLIPVisionConfig(**SIZES, num_hidden_layers=2, image_size=8, patch_size=4),
        image_token_id=IMAGE,
    )
    return hf.LlavaForConditionalGeneration(config)


def speech(targets: str) -> list[dict[str, Any]]:
    sound = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    return [{"input_features": each.tolist(), targets: list(range(10, 30))} for each in sound]


def images() -> list[dict[str, torch.Tensor]]:
    """A text, and then one with an image."""
    text = torch.arange(10, 30).unsqueeze(0)
    picture = torch.full((1, 4), IMAGE)
    return [
        {"input_ids": text},
        {"input_ids": torch.cat([picture, text], 1), "pixel_values": torch.rand(1, 3, 8, 8)},
    ]


CASES = {
    "speech": (whisper, speech("decoder_input_ids"), {"model.encoder", "model.decoder"}),
    "targets as labels": (whisper, speech("labels"), {"model.encoder", "model.decoder"}),
    "images behind text": (
        llava,
        torch.utils.data.DataLoader(images(), batch_size=None),
        {"model.vision_tower", "model.language_model"},
    ),
}


def recipe() -> list[Any]:
    quantized = QuantizationModifier(scheme="W4A16", targets="Linear", ignore=["re:.*(head|out)$"])
    return [*AWQModifier(n_grid=2, clip=False), quantized]


@pytest.mark.parametrize(("case", "dtype"), thinned(CASES, [torch.float32, torch.bfloat16]))
def test_both_find_every_part(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, data, parts = CASES[case]
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(tmp_path / "model")
    found = plan(tmp_path / "model", recipe(), data, measure=False)
    assert not found.problems
    modifiers = recipe()
    oneshot(tmp_path / "model", recipe=modifiers, dataset=data)
    smoothed = modifiers[0].report()
    assert {part for part in parts if any(name.startswith(part) for name in smoothed)} == parts
