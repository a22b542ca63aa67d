# SPDX-License-Identifier: Apache-2.0
"""Rotated checkpoints, read by transformers and compressed-tensors in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.house import ROOT
from tests.support.tiny_llama import batches, llama
from tests.unit.modifiers.rotation.test_rotation import lively
from torch.utils.data import DataLoader

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.rotation import QuIPModifier, SpinQuantModifier

# The part between the marks is what docs/modifiers/spinquant.md shows.
READER = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM

# begin
from compressed_tensors.quantization import is_cached_attention_module
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
        if not any(is_cached_attention_module(module) for module in model.modules()):
            of_states = ("q_attn", "k_cache")
            scheme.apply = [one for one in scheme.apply if one.location not in of_states]
        TransformFactory.from_scheme(scheme, name=name).apply_to_model(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    for file in Path(folder).glob("*.safetensors"):
        for key, value in load_file(file).items():
            if key.endswith(("_input.weight", "_output.weight", "_attn.weight", "_cache.weight")):
                if key in own:
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


QUICK = ["stream", "all-int8", "quip-int8"]
REFUSED = {"quip-blocks"}
"""No server applies rotations to what Linears with a bias read."""


def cases(names: Iterable[str]) -> list[Any]:
    """Those that always run, and those of the whole suite alone."""
    return [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in names]


@dataclass(frozen=True)
class Read:
    """What was made of some cases: a folder, and by case the logits."""

    place: Path
    logits: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def config_of(self, name: str) -> Any:
        return json.loads((self.place / "outputs" / name / "config.json").read_text())


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return read_back(QUICK, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Read:
    names = [name for name in (*FUSED, *ONLINE) if name not in QUICK]
    return read_back(names, tmp_path_factory.mktemp("others"))


@pytest.fixture
def read(name: str, request: pytest.FixtureRequest) -> Read:
    found: Read = request.getfixturevalue("few" if name in QUICK else "others")
    return found


def read_back(names: Iterable[str], place: Path) -> Read:
    """Compress, and have all be read by one process."""
    data: Any = batches(number=1)
    ids, expected = data[0]["input_ids"], {}
    loader = DataLoader(data, batch_size=None)
    for name in names:
        recipe, changes = {**FUSED, **ONLINE}[name]
        source = place / "sources" / name
        lively(llama(tie_word_embeddings=True, **changes)).save_pretrained(source)
        model = oneshot(
            model=str(source),
            recipe=recipe,
            output_dir=place / "outputs" / name,
            dataset=loader if name == "attention" else None,
            verify=name not in REFUSED,
        )
        with torch.no_grad():
            expected[name] = model(ids).logits
    torch.save(ids, place / "ids.pt")
    arguments = [str(place / one) for one in ("outputs", "ids.pt", "found.pt")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", READER, *arguments], check=True)
    found = torch.load(place / "found.pt")
    return Read(place, {name: (expected[name], *found[name]) for name in expected})


@pytest.mark.parametrize("name", cases(FUSED))
def test_transformers_alone_reads_what_is_in_the_weights(name: str, read: Read) -> None:
    expected, _, alone = read.logits[name]
    assert torch.equal(alone, expected)


@pytest.mark.parametrize("name", cases(ONLINE))
def test_readers_that_apply_transforms_agree(name: str, read: Read) -> None:
    expected, rotated, alone = read.logits[name]
    assert torch.equal(rotated, expected)
    if name != "attention":  # q and k turned alike are the same to each other
        assert not torch.allclose(alone, expected, atol=0.1)


def groups_of(found: Read, name: str) -> dict[str, Any]:
    groups: dict[str, Any] = found.config_of(name)["quantization_config"]["transform_config"]
    return dict(groups["config_groups"])


def test_what_is_in_the_weights_needs_no_config(few: Read) -> None:
    assert "quantization_config" not in few.config_of("stream")
    assert few.config_of("stream")["tie_word_embeddings"] is False
    assert set(groups_of(few, "all-int8")) == set(ALL)


@pytest.mark.slow
def test_only_what_stays_in_the_forward_needs_a_config(others: Read) -> None:
    assert set(groups_of(others, "all")) == set(ALL)
    assert others.config_of("all")["quantization_config"]["ignore"] == ["re:.*"]
    assert others.config_of("attention")["tie_word_embeddings"] is True


def stored_inputs(found: Read, name: str) -> list[str]:
    file = found.place / "outputs" / name / "model.safetensors"
    with safe_open(file, "pt") as opened:
        return [key for key in opened.keys() if "_input" in key]  # noqa: SIM118 - no mapping


def test_a_matrix_is_stored_once(few: Read) -> None:
    assert stored_inputs(few, "all-int8") == ["model.layers.0.mlp.down_proj.R4_input.weight"]
    stored = stored_inputs(few, "quip-int8")
    assert len(stored) == 2  # one per size
    # vLLM reorders what is stored with queries or keys in a Llama 4, also the matrix
    assert not [name for name in stored if "q_proj" in name or "k_proj" in name]


def types_of(found: Read, name: str) -> dict[str, str]:
    return {key: group["type"] for key, group in groups_of(found, name).items()}


@pytest.mark.slow
def test_what_is_not_sylvesters_is_called_random(others: Read) -> None:
    assert types_of(others, "odd-size") == {"R4": "random-hadamard"}  # 160 = 8 * 20
    assert types_of(others, "all-int4") == {
        "R1": "random-matrix",
        "R2": "random-matrix",
        "R3": "random-hadamard",
        "R4": "random-hadamard",
    }


def errors_of(found: Read, name: str) -> set[str]:
    report = verify(found.place / "outputs" / name, serve="vllm", tp=1)
    return {one.rule for one in report.findings if one.severity.name == "ERROR"}


@pytest.mark.parametrize("name", cases(["stream-int4", "odd-size", "apart", "quip-int8"]))
def test_servers_take_it(name: str, read: Read) -> None:
    assert errors_of(read, name) == set()


def test_the_page_shows_the_reader() -> None:
    page = ROOT / "docs" / "modifiers" / "spinquant.md"
    code = READER.partition("# begin\n")[2].partition("# end")[0].strip()
    assert code in page.read_text(encoding="utf-8")
