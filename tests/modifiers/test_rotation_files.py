# SPDX-License-Identifier: Apache-2.0
"""Rotated checkpoints, read by transformers and compressed-tensors in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_rotation import lively
from tiny_llama import batches, llama
from torch.utils.data import DataLoader

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import QuIPModifier, SpinQuantModifier

pytestmark = pytest.mark.slow

# The part between the marks is what docs/modifiers/spinquant.md shows.
READER = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM

# begin
from compressed_tensors.transform import TransformConfig, TransformFactory
from safetensors.torch import load_file


def with_rotations(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    written = config.get("quantization_config", {}).get("transform_config")
    if not written:
        return model
    for name, scheme in TransformConfig(**written).config_groups.items():
        # what stays in the forward; the rest is in the weights already
        scheme.apply = [one for one in scheme.apply if one.is_online()]
        TransformFactory.from_scheme(scheme, name=name).apply_to_model(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    for file in Path(folder).glob("*.safetensors"):
        for key, value in load_file(file).items():
            if key.endswith(("_input.weight", "_output.weight", "_attn.weight", "_cache.weight")):
                own[key].data.copy_(value)
    return model
# end

found = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    alone = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = with_rotations(folder).eval()
    with torch.no_grad():
        ids = torch.load(sys.argv[2])
        found[folder.name] = model(ids).logits, alone(ids).logits
assert not any(name.partition(".")[0] == "llmcompressor" for name in sys.modules)
torch.save(found, sys.argv[3])
"""

ALL = ["R1", "R2", "R3", "R4"]
INT8: Any = {"targets": "Linear", "ignore": ["lm_head"], "scheme": "W8A8"}
INT4: Any = {
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        }
    },
}
ATTENTION: Any = {
    "config_groups": {
        "group_0": {
            "targets": ["LlamaAttention"],
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    }
}
FUSED = {
    "stream": ([SpinQuantModifier()], {}),
    "stream-int4": ([SpinQuantModifier(), QuantizationModifier(**INT4)], {}),
}
ONLINE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "all": ([SpinQuantModifier(rotations=ALL)], {}),
    "all-int8": ([SpinQuantModifier(rotations=ALL), QuantizationModifier(**INT8)], {}),
    "all-int4": (
        [
            SpinQuantModifier(rotations=ALL, transform_type="random-matrix"),
            QuantizationModifier(**INT4),
        ],
        {},
    ),
    "attention": ([SpinQuantModifier(rotations=["R3"]), QuantizationModifier(**ATTENTION)], {}),
    "odd-size": (
        [SpinQuantModifier(rotations=["R4"]), QuantizationModifier(**INT8)],
        {"intermediate_size": 160},
    ),
    "apart": (
        [SpinQuantModifier(rotations=["R2", "R4"], randomize=True), QuantizationModifier(**INT8)],
        {},
    ),
    "quip": ([QuIPModifier(rotations=["u", "v"])], {}),
    "quip-int8": ([QuIPModifier(rotations=["u", "v"]), QuantizationModifier(**INT8)], {}),
    "quip-blocks": (
        [QuIPModifier(transform_block_size=16, randomize=True), QuantizationModifier(**INT4)],
        {"attention_bias": True},
    ),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, ...]]:
    """Case → logits of the returned model, of a reader with rotations, of one without."""
    place = tmp_path_factory.mktemp("rotated")
    data: Any = batches(number=1)
    ids, expected = data[0]["input_ids"], {}
    loader = DataLoader(data, batch_size=None)
    for name, (recipe, changes) in {**FUSED, **ONLINE}.items():
        source = place / "sources" / name
        lively(llama(tie_word_embeddings=True, **changes)).save_pretrained(source)
        model = oneshot(
            model=str(source),
            recipe=recipe,
            output_dir=place / "outputs" / name,
            dataset=loader if name == "attention" else None,
        )
        with torch.no_grad():
            expected[name] = model(ids).logits
    torch.save(ids, place / "ids.pt")
    arguments = [str(place / one) for one in ("outputs", "ids.pt", "found.pt")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", READER, *arguments], check=True)
    found = torch.load(place / "found.pt")
    read_back = {name: (expected[name], *found[name]) for name in expected}
    read_back["place"] = (place,)  # type: ignore[assignment]  # for the tests of files
    return read_back


@pytest.mark.parametrize("name", FUSED)
def test_transformers_alone_reads_what_is_in_the_weights(name: str, read: Any) -> None:
    expected, _, alone = read[name]
    assert torch.equal(alone, expected)


@pytest.mark.parametrize("name", ONLINE)
def test_readers_that_apply_transforms_agree(name: str, read: Any) -> None:
    expected, rotated, alone = read[name]
    assert torch.equal(rotated, expected)
    if name != "attention":  # q and k turned alike are the same to each other
        assert not torch.allclose(alone, expected, atol=0.1)


def config_of(read: Any, name: str) -> Any:
    return json.loads((read["place"][0] / "outputs" / name / "config.json").read_text())


def test_only_what_stays_in_the_forward_needs_a_config(read: Any) -> None:
    assert "quantization_config" not in config_of(read, "stream")
    alone = config_of(read, "all")["quantization_config"]
    assert set(alone["transform_config"]["config_groups"]) == set(ALL)
    assert alone["ignore"] == ["re:.*"]
    assert config_of(read, "stream")["tie_word_embeddings"] is False
    assert config_of(read, "attention")["tie_word_embeddings"] is True


def test_a_matrix_is_stored_once(read: Any) -> None:
    def stored(name: str) -> list[str]:
        file = read["place"][0] / "outputs" / name / "model.safetensors"
        with safe_open(file, "pt") as opened:
            return [key for key in opened.keys() if "_input" in key]  # noqa: SIM118 - no mapping

    assert stored("all") == ["model.layers.0.mlp.down_proj.R4_input.weight"]
    assert len(stored("apart")) == 2
    assert len(stored("quip-int8")) == 2  # one per size


def test_types_are_those_that_readers_make(read: Any) -> None:
    def types(name: str) -> dict[str, str]:
        groups = config_of(read, name)["quantization_config"]["transform_config"]["config_groups"]
        return {key: group["type"] for key, group in groups.items()}

    assert set(types("all").values()) == {"hadamard"}
    assert types("odd-size") == {"R4": "random-hadamard"}  # 160 = 8 * 20 is not Sylvester's
    assert types("all-int4") == {
        "R1": "random-matrix",
        "R2": "random-matrix",
        "R3": "random-hadamard",
        "R4": "random-hadamard",
    }


@pytest.mark.parametrize("name", ["stream-int4", "odd-size", "apart", "quip-int8"])
def test_servers_take_it(name: str, read: Any) -> None:
    report = verify(read["place"][0] / "outputs" / name, serve="vllm", tp=1)
    assert [one for one in report.findings if one.severity.name == "ERROR"] == []


def test_rotations_of_cached_keys_are_told_of(read: Any) -> None:
    report = verify(read["place"][0] / "outputs" / "attention", serve="vllm", tp=1)
    assert {one.rule for one in report.findings if one.severity.name == "ERROR"} == {"S73"}


def test_the_page_shows_the_reader() -> None:
    page = Path(__file__).parents[2] / "docs" / "modifiers" / "spinquant.md"
    code = READER.partition("# begin\n")[2].partition("# end")[0].strip()
    assert code in page.read_text(encoding="utf-8")
