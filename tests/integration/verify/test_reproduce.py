# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is made again by its manifest: the same bytes, or what differs and why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import small_models as small

from llmcompressor import model_free_ptq, oneshot, reproduce, reset_session, run_stages, train
from llmcompressor.cli import main
from llmcompressor.errors import ArgumentError, CheckpointError
from llmcompressor.logger import logger
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

SCHEME: dict[str, Any] = {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small.llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"input_ids": one}) for one in small.token_rows()["input_ids"]]
    file.write_text("\n".join(rows))
    return file


def calibrated(model: Path, dataset: Any, **changes: Any) -> Path:
    out = model.with_name("out")
    recipe = GPTQModifier(**SCHEME)
    oneshot(model=str(model), recipe=recipe, dataset=dataset, output_dir=out, **changes)
    reset_session()
    return out


def streamed(model: Path, data: Path) -> Path:
    return calibrated(model, str(data), num_calibration_samples=6, max_seq_length=12)


def in_memory(model: Path, data: Path) -> Path:
    return calibrated(model, str(data), max_seq_length=16, pipeline="basic")


def without_class(model: Path, data: Path) -> Path:
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}}
    return model_free_ptq(model, model.with_name("out"), config=groups, ignore=["lm_head"])


def stage(model: Path, data: Path) -> Path:
    recipe = (
        "pruning_stage: {pruning_modifiers: {WandaPruningModifier: {sparsity: 0.5}}}\n"
        "quant_stage: {quant_modifiers: {QuantizationModifier: "
        "{targets: Linear, scheme: FP8_DYNAMIC, ignore: [lm_head]}}}\n"
    )
    run_stages(str(model), recipe, dataset=str(data), output_dir=model.with_name("stages"))
    return model.with_name("stages") / "stage_quant"


def trained(model: Path, data: Path) -> Path:
    out = model.with_name("out")
    recipe = QuantizationModifier(**SCHEME)
    train(
        model=str(model),
        recipe=recipe,
        dataset={"train": small.token_rows()},
        output_dir=out,
        max_steps=1,
        use_cpu=True,
    )
    return out


@pytest.mark.parametrize("way", [streamed, in_memory, without_class, stage])
def test_the_same_bytes(
    way: Callable[[Path, Path], Path], model: Path, data: Path, tmp_path: Path
) -> None:
    out = way(model, data)
    before = small.tree(tmp_path)
    found = reproduce(out)
    assert found.same
    assert not found.reasons
    assert str(found).endswith(": same bytes")
    assert small.tree(tmp_path) == before, "something is left"


def test_a_training(model: Path, data: Path) -> None:
    out = trained(model, data)
    with pytest.raises(ArgumentError, match="dataset") as refused:
        reproduce(out)
    assert "dataset=..." in str(refused.value)
    assert reproduce(out, dataset={"train": small.token_rows()}).same


def test_it_is_kept(model: Path, data: Path, tmp_path: Path) -> None:
    out = streamed(model, data)
    found = reproduce(out, output_dir=tmp_path / "again")
    assert found.output_dir == tmp_path / "again"
    manifests = [
        json.loads((one / "manifest.json").read_text()) for one in (out, tmp_path / "again")
    ]
    for one in manifests:
        one["about"].pop("files")
    assert manifests[0] == manifests[1]


def test_other_data(model: Path, data: Path) -> None:
    out = streamed(model, data)
    lines = data.read_text().splitlines()
    data.write_text("\n".join([lines[0].replace("[", "[5, "), *lines[1:]]))
    found = reproduce(out)
    assert not found.same
    assert found.tensors
    assert all("q_proj" in one or "layers" in one for one in found.tensors)
    assert any(line.startswith("run.data") for line in found.reasons)
    assert "NOT the same bytes" in str(found)


def test_another_model(model: Path, data: Path, warned: list[str]) -> None:
    out = streamed(model, data)
    small.llama(seed=1).save_pretrained(model)
    found = reproduce(out)
    assert not found.same
    assert any(line.startswith("source.files.model.safetensors") for line in found.reasons)
    small.llama(intermediate_size=384).save_pretrained(model)
    reproduce(out)
    assert any("model.safetensors of the model" in line for line in warned)


def test_other_versions_are_told_before(model: Path, data: Path, warned: list[str]) -> None:
    out = streamed(model, data)
    file = out / "manifest.json"
    held = json.loads(file.read_text())
    held["run"]["versions"]["torch"], held["run"]["ranks"] = "1.0", 4
    held["run"]["processor"]["machine"] = "z80"
    file.write_text(json.dumps(held))
    found = reproduce(out)
    assert found.same
    assert len(found.reasons) == 3
    for what in ("versions.torch: 1.0 then", "ranks: 4 then", "machine: z80 then"):
        assert any(what in line for line in warned), what


def test_what_is_gone_is_named(model: Path, data: Path, tmp_path: Path) -> None:
    out = streamed(model, data)
    moved = shutil.move(model, tmp_path / "moved")
    with pytest.raises(ArgumentError, match="--model"):
        reproduce(out)
    assert reproduce(out, model=str(moved)).same
    data.rename(tmp_path / "others.jsonl")
    with pytest.raises(ArgumentError, match="--dataset"):
        reproduce(out, model=str(moved))
    given = ["--model", str(moved), "--dataset", str(tmp_path / "others.jsonl")]
    for arguments, code in ((given[:2], 2), (given, 0)):
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", str(out), *arguments])
        assert (ended.value.code or 0) == code


def test_a_model_that_is_gone_and_whose_path_could_be_of_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    oneshot(model="model", recipe=QuantizationModifier(**SCHEME), output_dir="out")
    reset_session()
    model.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="--model"):
        reproduce("out")
    assert reproduce("out", model="moved").same


def test_a_manifest_cannot_allow_or_send_anything(model: Path, data: Path) -> None:
    """A manifest may come from others: it neither trusts their code nor publishes a result."""
    out = streamed(model, data)
    file = out / "manifest.json"
    held = json.loads(file.read_text())
    arguments = held["about"]["call"]["arguments"]
    arguments |= {"trust_remote_code_model": True, "push_to_hub": True, "output_dir": "elsewhere"}
    file.write_text(json.dumps(held))
    with pytest.raises(ArgumentError, match="If you trust that code, give it"):
        reproduce(out)
    assert reproduce(out, trust_remote_code_model=False).same  # the others are not passed on
    assert not (out.parent / "elsewhere").exists()


def test_a_summary_names_no_folder_that_is_removed(model: Path, data: Path, tmp_path: Path) -> None:
    out = streamed(model, data)
    told: list[str] = []
    sink = logger.add(told.append, level="SUCCESS", format="{message}")
    try:
        reproduce(out)
        assert not any("vllm serve" in one for one in told)
        reproduce(out, output_dir=tmp_path / "again")
        assert sum("vllm serve" in one for one in told) == 1
    finally:
        logger.remove(sink)


def test_where_results_are_sent_is_not_recorded(model: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "report_to": "none"}
    data = {"train": small.token_rows()}
    recipe = QuantizationModifier(**SCHEME)
    train(model=str(model), recipe=recipe, dataset=data, output_dir=tmp_path / "out", **given)
    call = json.loads((tmp_path / "out" / "manifest.json").read_text())["about"]["call"]
    assert call["arguments"]["max_steps"] == 1
    assert not call["arguments"].keys() & {"report_to", "output_dir"}


def test_an_object_is_named(model: Path) -> None:
    out = calibrated(model, small.token_rows(), max_seq_length=16)
    with pytest.raises(ArgumentError, match="Dataset of 8"):
        reproduce(out)
    assert reproduce(out, dataset=small.token_rows()).same


def test_no_manifest(model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no manifest\.json"):
        reproduce(model)
    stages = stage(model, data).parent
    with pytest.raises(CheckpointError, match="stage_pruning, stage_quant"):
        reproduce(stages)
    (stages / "stage_quant" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        reproduce(stages / "stage_quant")


@pytest.mark.parametrize("name", ["recipe", "verify", "overwrite"])
def test_what_a_manifest_alone_says_is_not_given(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"does not take '{name}'"):
        reproduce(tmp_path, **{name: True})
