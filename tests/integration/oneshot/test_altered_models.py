# SPDX-License-Identifier: Apache-2.0
"""Models that are not what their folder holds: cut, set up otherwise, compiled, tied elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload, disk_offload
from compressed_tensors.offload import (
    dispatch_model,
    load_offloaded_model,
    set_onload_device,
)
from safetensors.torch import load_file
from tests.support.thinned import thinned
from torch.utils.data import DataLoader, TensorDataset

from llmcompressor import oneshot, plan, verify
from llmcompressor.checkpoint import load
from llmcompressor.errors import ArgumentError, CheckpointError, DatasetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
IDS = torch.arange(3, 35)[None]


def fp8() -> QuantizationModifier:
    return QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["re:.*lm_head.*"])


def rows() -> list[dict[str, list[int]]]:
    """Every token, so that routers send some to each expert."""
    return [{"input_ids": list(range(first, first + 30))} for first in range(3, 130, 9)]


@pytest.fixture
def source(tmp_path):
    """The folder of a tiny Llama."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).bfloat16()
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def tied(tmp_path):
    """The folder of a tiny Llama whose embedding is its head, too."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, tie_word_embeddings=True)
    hf.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def loaded(folder: Path, **changes: Any) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **changes)


@torch.no_grad()
def assert_reads_as(model: Any, folder: Path, kind: Any = hf.AutoModelForCausalLM) -> None:
    read = kind.from_pretrained(folder, dtype="auto")
    given = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = IDS
    expected, found = (one.eval()(**given).logits for one in (model, read))
    assert torch.equal(expected, found)


def names_in(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("cut", ["when read", "afterwards"])
def test_layers_that_were_cut_off_do_not_come_back(source, tmp_path, cut):
    if cut == "when read":
        model = loaded(source, num_hidden_layers=1)
    else:
        model = loaded(source)
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
    oneshot(model=model, recipe=fp8(), output_dir=tmp_path / "output")
    assert not [name for name in names_in(tmp_path / "output") if "layers.1." in name]
    assert_reads_as(model, tmp_path / "output")
    model.save_pretrained(tmp_path / "saved")
    assert names_in(tmp_path / "saved") == names_in(tmp_path / "output")


def test_what_was_set_on_a_model_is_written(source, tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = loaded(source, rope_parameters=rope)
    model.config.eos_token_id = [2, 3]
    model.generation_config.max_new_tokens = 9
    oneshot(model=model, recipe=fp8(), output_dir=tmp_path / "output")
    assert_reads_as(model, tmp_path / "output")
    read = loaded(tmp_path / "output")
    assert read.config.eos_token_id == [2, 3]
    assert read.generation_config.max_new_tokens == 9


def test_another_class_than_the_folder_names(source, tmp_path):
    model = hf.LlamaForSequenceClassification.from_pretrained(source, dtype="auto", num_labels=5)
    model.config.pad_token_id = 0
    oneshot(model=model, recipe=fp8(), output_dir=tmp_path / "output")
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert_reads_as(model, tmp_path / "output", hf.AutoModelForSequenceClassification)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own compiler
def test_a_compiled_model_is_written_as_what_it_wraps(source, tmp_path):
    oneshot(model=torch.compile(loaded(source)), recipe=fp8(), output_dir=tmp_path / "compiled")
    oneshot(model=loaded(source), recipe=fp8(), output_dir=tmp_path / "plain")
    files = [tmp_path / name / "model.safetensors" for name in ("compiled", "plain")]
    assert files[0].read_bytes() == files[1].read_bytes()


def t5_gemma() -> Any:
    own = {**SIZES, "head_dim": 16, "num_hidden_layers": 1}
    decoder = {**own, "cross_attention_hidden_size": 64}
    config = hf.T5GemmaConfig(encoder=own, decoder=decoder, vocab_size=160)
    return hf.T5GemmaForConditionalGeneration(config), hf.T5GemmaForConditionalGeneration


def marian() -> Any:
    config = hf.MarianConfig(
        vocab_size=160,
        decoder_vocab_size=160,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=128,
        pad_token_id=0,
        decoder_start_token_id=0,
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=True,
    )
    return hf.MarianMTModel(config), hf.MarianMTModel


@pytest.mark.parametrize("made", [t5_gemma, marian])
@pytest.mark.parametrize("by_path", [True, False])
def test_a_head_that_is_tied_to_the_decoder_stays_so(made, by_path, tmp_path):
    torch.manual_seed(0)
    model, kind = made()
    model.bfloat16().save_pretrained(tmp_path / "source")
    given = str(tmp_path / "source") if by_path else kind.from_pretrained(tmp_path / "source")
    found = oneshot(model=given, recipe=fp8(), output_dir=tmp_path / "output")
    assert_reads_as(found, tmp_path / "output", kind)
    assert verify(tmp_path / "output", reference=tmp_path / "source").ok


@pytest.mark.parametrize("by_path", [True, False])
def test_batches_without_names(source, tmp_path, by_path):
    model = str(source) if by_path else loaded(source)
    recipe = QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"])
    batches = DataLoader(TensorDataset(torch.randint(3, 150, (4, 16))), batch_size=2)
    with pytest.raises(DatasetError, match="batches of type"):
        oneshot(model=model, recipe=recipe, dataset=batches, output_dir=tmp_path / "output")
    ids = DataLoader([torch.arange(3, 19), torch.arange(5, 21)], batch_size=2)  # type: ignore[arg-type]
    oneshot(model=model, recipe=recipe, dataset=ids, output_dir=tmp_path / "output")


def test_settings_for_generation_that_cannot_be_read(source, tmp_path):
    (source / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        oneshot(model=str(source), recipe=fp8(), output_dir=tmp_path / "output")


def partly_on_disk(folder: Path, offload: Path) -> Any:
    """What ``device_map`` makes of a model that does not fit."""
    parts = ("embed_tokens", "norm", "rotary_emb", "layers.1")
    places = {**{f"model.{part}": "cpu" for part in parts}, "lm_head": "cpu"}
    places["model.layers.0"] = "disk"
    return loaded(folder, device_map=places, offload_folder=str(offload))


DISPATCHED = {
    "device_map": partly_on_disk,
    "cpu_offload": lambda folder, offload: cpu_offload(loaded(folder), torch.device("cpu")),
    "disk_offload": lambda folder, offload: disk_offload(
        loaded(folder), offload, torch.device("cpu")
    ),
}


@pytest.mark.parametrize(
    ("algorithm", "how"), thinned([QuantizationModifier, GPTQModifier], DISPATCHED)
)
def test_weights_that_accelerate_keeps_elsewhere(tied, tmp_path, how, algorithm):
    """They stay there, with other values; what is written is what the model itself would give."""

    def run(model: Any, output: str) -> Any:
        group = {"num_bits": 4, "group_size": 32, "strategy": "group"}
        recipe = algorithm(
            config_groups={"group_0": {"targets": ["Linear"], "weights": group}},
            ignore=["lm_head"],
        )
        return oneshot(model=model, recipe=recipe, dataset=rows(), output_dir=tmp_path / output)

    run(loaded(tied), "whole")
    model = DISPATCHED[how](tied, tmp_path / "offload")
    assert any(one.is_meta for one in model.parameters())
    returned = run(model, "dispatched")
    assert returned is model
    assert any(one.is_meta for one in model.parameters())
    written = [(tmp_path / one / "model.safetensors") for one in ("whole", "dispatched")]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert_reads_as(returned, tmp_path / "dispatched")


def test_weights_on_the_disk_that_memory_has_no_room_for(source, tmp_path, monkeypatch):
    model = partly_on_disk(source, tmp_path / "offload")
    monkeypatch.setattr(load, "free_host_memory", lambda: 1000)
    with pytest.raises(ArgumentError, match=r"9 weights.*1 kB left.*Give the folder"):
        oneshot(
            model=model,
            recipe=GPTQModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"]),
            dataset=rows(),
            pipeline="basic",  # which needs the whole model
            output_dir=str(tmp_path / "out"),
        )
    assert any(one.is_meta for one in model.parameters())
    assert not (tmp_path / "out").exists()


@pytest.fixture
def informed():
    """What is logged, warnings or not."""
    heard: list[str] = []
    sink = logger.add(lambda text: heard.append(str(text)), level="INFO", format="{message}")
    yield heard
    logger.remove(sink)


def on_disk(folder: Path, place: Path) -> Any:
    place.mkdir()
    with load_offloaded_model():
        return loaded(
            folder,
            device_map="auto_offload",
            max_memory={"cpu": 6 * 10**4},
            offload_folder=str(place),
        )


def in_main_memory(folder: Path, place: Path) -> Any:
    with load_offloaded_model():
        return loaded(folder, device_map="auto_offload")


def with_caches(folder: Path, place: Path) -> Any:
    model = loaded(folder)
    set_onload_device(model, "cpu")
    return model


def that_has_generated(folder: Path, place: Path) -> Any:
    model = loaded(folder)
    dispatch_model(model, device_memory={torch.device("cpu"): 10**10}, extra_memory=0)
    model.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
    return model


CACHED = {one.__name__: one for one in (on_disk, in_main_memory, with_caches, that_has_generated)}


@pytest.mark.parametrize(("kind", "how"), thinned(["source", "tied"], CACHED))
def test_weights_that_compressed_tensors_keeps_elsewhere(kind, how, tmp_path, request, informed):
    """They are taken out of its caches; what is written is what the model itself would give."""
    folder = request.getfixturevalue(kind)
    recipe = {"scheme": "W8A8", "targets": "Linear", "ignore": ["lm_head"]}
    whole = loaded(folder)
    oneshot(whole, QuantizationModifier(**recipe), output_dir=tmp_path / "whole")
    model = CACHED[how](folder, tmp_path / "offload")
    assert any(map(load._caches_of, model.modules()))
    assert not plan(model, QuantizationModifier(**recipe), measure=False).problems
    assert any(map(load._caches_of, model.modules()))
    assert not [line for line in informed if "brought into memory" in line]
    assert oneshot(model, QuantizationModifier(**recipe), output_dir=tmp_path / "out") is model
    assert len([line for line in informed if "brought into memory" in line]) == 1
    assert not any(map(load._caches_of, model.modules()))
    written = [tmp_path / one / "model.safetensors" for one in ("whole", "out")]
    assert written[0].read_bytes() == written[1].read_bytes()
    assert_reads_as(model, tmp_path / "out")
