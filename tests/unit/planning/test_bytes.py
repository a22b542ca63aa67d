# SPDX-License-Identifier: Apache-2.0
"""What a plan says of the output is what a run writes, to the byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tests.support import published_models as published
from tests.support.thinned import thinned
from transformers import AutoModelForCausalLM, LlamaConfig

from llmcompressor import oneshot, plan, verify
from llmcompressor.checkpoint import source as source_module
from llmcompressor.checkpoint.journal import Workspace
from llmcompressor.checkpoint.tensor_files import TensorReader
from llmcompressor.modifiers.pruning import REAPPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.runtime.progress import format_bytes
from llmcompressor.schemes import presets

PRESETS = ["W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16"]
PRESETS += [name for name in ("MXFP6A16",) if name in presets.PRESETS]
MODELS = {
    "llama": published.LLAMA_3_8B,
    "mixtral": published.MIXTRAL_8X7B,
    "qwen3-moe": published.QWEN3_30B_A3B,
    "deepseek-v3": published.DEEPSEEK_V3,
}


def written(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}


def is_wrong(finding: Any) -> bool:
    return finding.severity == "error"


def recipe(preset: str, **more: Any) -> QuantizationModifier:
    return QuantizationModifier(targets=["Linear"], scheme=preset, ignore=["lm_head"], **more)


@pytest.mark.parametrize(("preset", "model"), thinned(PRESETS, MODELS))
def test_the_planned_size_is_the_written_size(model: str, preset: str, tmp_path: Path) -> None:
    source = published.write_weights(tmp_path / "source", published.small(MODELS[model]))
    found = plan(source, recipe(preset), measure=False)
    assert found.sizes is not None
    assert not found.problems

    oneshot(model=str(source), recipe=recipe(preset), output_dir=tmp_path / "out")

    assert dict(found.sizes.files) == written(tmp_path / "out")
    assert found.sizes.weights == sum(written(tmp_path / "out").values())


@pytest.mark.parametrize("dense", [False, True])
def test_of_a_model_object_too(llama_folder: Path, tmp_path: Path, dense: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype="auto")
    found = plan(model, recipe("W4A16"), save_compressed=not dense, measure=False)
    before = model.lm_head.weight.clone()

    oneshot(
        model=model, recipe=recipe("W4A16"), output_dir=tmp_path / "out", save_compressed=not dense
    )

    assert found.sizes is not None
    assert dict(found.sizes.files) == written(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, before)


def test_with_calibration_an_untied_head_and_static_scales(
    llama_folder: Path, tmp_path: Path
) -> None:
    def modifiers() -> list[Any]:
        return [
            GPTQModifier(targets=["re:.*self_attn.*proj$"], scheme="W4A16"),
            QuantizationModifier(
                config_groups={
                    "static": {
                        "targets": ["re:.*mlp.*proj$", "lm_head"],
                        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                    }
                },
                kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"},
            ),
        ]

    rows = Dataset.from_dict({"input_ids": torch.randint(3, 160, (4, 16)).tolist()})
    found = plan(llama_folder, modifiers(), rows, measure=False)

    oneshot(model=str(llama_folder), recipe=modifiers(), dataset=rows, output_dir=tmp_path / "out")

    assert found.sizes is not None
    assert dict(found.sizes.files) == written(tmp_path / "out")
    assert len(found.passes) == 2
    assert found.tokens is not None
    assert (found.tokens.samples, found.tokens.tokens, found.tokens.longest) == (4, 64, 16)


def _tied(folder: Path, head: str) -> Path:
    """A tiny Llama whose configuration ties its embeddings, and what its file holds of a head."""
    torch.manual_seed(0)
    config = published.small(published.LLAMA_3_8B) | {"tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    weight = tensors["model.embed_tokens.weight"]
    stored = {"none": {}, "equal": {"lm_head.weight": weight.clone()}}
    stored["another"] = {"lm_head.weight": weight * 2}
    stored["another at the end"] = {"lm_head.weight": weight.clone()}
    stored["another at the end"]["lm_head.weight"][-1, -1] += 1
    save_file(tensors | stored[head], folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("target", ["lm_head", "Embedding"])
@pytest.mark.parametrize("head", ["none", "equal"])
def test_of_embeddings_that_the_recipe_unties(head: str, target: str, tmp_path: Path) -> None:
    source = _tied(tmp_path / "source", head)

    def untying() -> QuantizationModifier:
        return QuantizationModifier(targets=[target], scheme="W8A16")

    found = plan(source, untying(), measure=False)
    oneshot(model=source, recipe=untying(), output_dir=tmp_path / "out")
    assert (found.problems, found.notes) == ([], [])
    assert found.sizes is not None
    assert dict(found.sizes.files) == written(tmp_path / "out")
    assert not [one for one in verify(tmp_path / "out", reference=source).findings if is_wrong(one)]


HEADS = [
    ("none", True),
    ("equal", False),
    ("equal", True),
    ("another", True),
    ("another at the end", False),
    ("another at the end", True),
    ("none", False),
    ("another", False),
]


@pytest.mark.parametrize(("head", "tie", "as_object"), thinned(HEADS, [False, True]))
def test_of_tied_embeddings(head: str, tie: bool, as_object: bool, tmp_path: Path) -> None:
    """Who asks for a head of its own gets one; else the configuration says which it is."""
    source = _tied(tmp_path / "source", head)

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(source, dtype="auto") if as_object else source

    given = {"tie_word_embeddings": tie}
    found = plan(model(), recipe("W4A16"), measure=False, **given)
    oneshot(model=model(), recipe=recipe("W4A16"), output_dir=tmp_path / "out", **given)

    assert found.sizes is not None
    is_one = tie and not head.startswith("another")
    is_believed = tie and head != "none" and not as_object
    assert [note for note in found.notes if "the files hold both" in note] == list(
        found.notes if is_believed else []
    )
    assert len(found.notes) == is_believed
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    if is_one or not is_believed:
        assert dict(found.sizes.files) == written(tmp_path / "out")
    else:  # what the note says comes to it
        more = tensors["lm_head.weight"].nbytes
        beyond = sum(written(tmp_path / "out").values()) - found.sizes.weights - more
        assert 0 < beyond < 256  # what the header says of it
        assert f"({format_bytes(more)} more" in found.notes[0]
    assert ("lm_head.weight" in tensors) == (not is_one)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_one
    findings = verify(tmp_path / "out", reference=source).findings
    assert not [one for one in findings if one.severity == "error"]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == is_one


@pytest.mark.parametrize(("head", "data"), thinned(["none", "equal", "another"], [None, "rows"]))
def test_a_plan_reads_nothing_behind_the_headers(
    head: str, data: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for whole files, whose readers are out of order, and for files that end there."""
    source = _tied(tmp_path / "source", head)
    given = () if data is None else (Dataset.from_dict({"input_ids": [list(range(3, 19))] * 4}),)
    make = recipe("W4A16") if data is None else GPTQModifier(targets=["Linear"], scheme="W4A16")

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were to be read")

    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "read", refuse)
        for name, module in list(sys.modules.items()):
            is_reader = name.startswith(("llmcompressor.", "transformers."))
            if name != source_module.__name__ and is_reader and "safe_open" in vars(module):
                patch.setattr(module, "safe_open", refuse)  # that module checks headers alone
        whole = plan(source, make, *given, measure=False)
        with pytest.raises(AssertionError, match="to be read"):
            oneshot(source, make, *given, output_dir=tmp_path / "out")
    assert whole.ok, whole.problems

    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    hollow = plan(source, make, *given, measure=False)
    assert hollow.ok, hollow.problems
    assert [note for note in hollow.notes if "no data" not in note] == list(whole.notes)
    assert len(hollow.notes) == len(whole.notes) + 1
    for name in ("sizes", "modules", "schemes", "matches", "scheme_bytes", "dense", "serving"):
        assert getattr(hollow, name) == getattr(whole, name), name
    assert [one.disk for one in hollow.phases] == [one.disk for one in whole.phases]


@pytest.mark.parametrize("as_object", [False, True])
def test_experts_that_are_dropped(tmp_path: Path, as_object: bool) -> None:
    """The plan of an object leaves it as it is."""
    small = published.small(published.QWEN3_30B_A3B)
    source = published.write_weights(tmp_path / "source", small)
    rows = Dataset.from_dict({"input_ids": torch.randint(3, 100, (4, 16)).tolist()})
    model: Any = AutoModelForCausalLM.from_pretrained(source) if as_object else str(source)
    found = plan(model, REAPPruningModifier(sparsity=0.5), rows, measure=False)
    oneshot(
        model=model,
        recipe=REAPPruningModifier(sparsity=0.5),
        dataset=rows,
        output_dir=tmp_path / "out",
    )
    assert found.sizes is not None
    assert dict(found.sizes.files) == written(tmp_path / "out")
    assert found.sizes.weights < 0.8 * sum(written(source).values())
    assert ("one block at a time" in found.residency) == (not as_object)
    assert not [note for note in found.notes if "stay as they are" in note]


@pytest.mark.parametrize(("model", "as_object"), thinned(["mixtral", "qwen3-moe"], [False, True]))
def test_experts_that_are_dropped_and_quantized(
    model: str, as_object: bool, tmp_path: Path
) -> None:
    """Of what is left the targets match, and so much is written, as a run finds it."""
    small = published.small(MODELS[model])
    source = published.write_weights(tmp_path / "source", small)
    rows = Dataset.from_dict({"input_ids": torch.randint(3, 100, (4, 16)).tolist()})

    def recipe() -> list[Any]:
        experts = [r"re:.*experts\.\d+\..*"]
        return [REAPPruningModifier(sparsity=0.5), GPTQModifier(targets=experts, scheme="W4A16")]

    given: Any = AutoModelForCausalLM.from_pretrained(source) if as_object else str(source)
    found = plan(given, recipe(), rows, measure=False)
    made = oneshot(model=given, recipe=recipe(), dataset=rows, output_dir=tmp_path / "out")
    assert found.sizes is not None
    assert dict(found.sizes.files) == written(tmp_path / "out")
    [match] = found.matches
    quantized = [one for one in made.modules() if hasattr(one, "quantization_scheme")]
    assert match.matched == match.decided == len(quantized) > 0
    assert [one.modifiers for one in found.passes] == [["REAPPruningModifier"], ["GPTQModifier"]]


def test_every_pass_but_the_last_leaves_its_blocks_on_the_disk(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def modifiers() -> list[Any]:
        return [
            SmoothQuantModifier(),
            GPTQModifier(targets=["re:.*mlp.*proj$"], scheme="W8A8"),
            QuantizationModifier(targets=["re:.*self_attn.*proj$"], scheme="FP8"),
        ]

    held = []
    publish = Workspace.publish

    def measured(self: Workspace, *, replace: bool, **further: Any) -> None:
        held.append(sum(one.stat().st_size for one in self.folder.rglob("*") if one.is_file()))
        publish(self, replace=replace, **further)

    monkeypatch.setattr(Workspace, "publish", measured)
    rows = Dataset.from_dict({"input_ids": torch.randint(3, 160, (4, 16)).tolist()})
    found = plan(llama_folder, modifiers(), rows, measure=False)
    assert len(found.passes) == 3
    oneshot(model=str(llama_folder), recipe=modifiers(), dataset=rows, output_dir=tmp_path / "out")
    assert found.peak_disk == pytest.approx(held[0], rel=0.1)
