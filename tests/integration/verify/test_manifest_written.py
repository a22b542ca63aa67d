# SPDX-License-Identifier: Apache-2.0
"""Every way of writing leaves a manifest that is true, and that two runs of one kind share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.support import small_models as small
from tests.support.killed_runs import KILLED, Job, run, write_model
from tests.support.manifests import check_written, decided
from transformers import AutoModelForCausalLM

from llmcompressor import model_free_ptq, oneshot, reset_session, run_stages, train, verify
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier

SCHEME: dict[str, Any] = {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}
Way = Callable[[Path, Path], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("written") / "model"
    small.llama().save_pretrained(folder, max_shard_size="300KB")
    return folder


def compress(model: Any, out: Path | None, **more: Any) -> Any:
    data = small.token_rows()
    return oneshot(
        model=model,
        recipe=GPTQModifier(**SCHEME),
        dataset=data,
        max_seq_length=16,
        output_dir=out,
        **more,
    )


def streamed(model: Path, out: Path) -> Path:
    compress(str(model), out)
    return out


def in_memory(model: Path, out: Path) -> Path:
    compress(str(model), out, pipeline="basic")
    return out


def of_an_object(model: Path, out: Path) -> Path:
    compress(AutoModelForCausalLM.from_pretrained(model), out)
    return out


def saved(model: Path, out: Path) -> Path:
    compress(str(model), None).save_pretrained(out, max_shard_size="200KB")
    return out


def without_class(model: Path, out: Path) -> Path:
    return model_free_ptq(model, out, "FP8_DYNAMIC", ignore=["lm_head"])


def trained(model: Path, out: Path) -> Path:
    given: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "output_dir": out}
    recipe = QuantizationModifier(**SCHEME)
    train(model=str(model), recipe=recipe, dataset={"train": small.token_rows()}, **given)
    return out


def stage(model: Path, out: Path) -> Path:
    recipe = (
        "first_stage: {first_modifiers: {WandaPruningModifier: {sparsity: 0.5}}}\n"
        "second_stage: {second_modifiers: {QuantizationModifier: "
        "{targets: Linear, scheme: W8A8, ignore: [lm_head]}}}\n"
    )
    run_stages(str(model), recipe, dataset=small.token_rows(), output_dir=out)
    check_written(out / "stage_first")
    return out / "stage_second"


WAYS: list[Way] = [streamed, in_memory, of_an_object, saved, without_class, trained, stage]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_true(way: Way, model: Path, tmp_path: Path) -> None:
    out = way(model, tmp_path / "out")
    held = check_written(out)
    report = verify(out)
    assert report.has_manifest
    assert not [one for one in report.findings if one.rule.startswith("M")]
    assert held["run"]["versions"]["torch"]
    assert held["run"]["recipe"]
    assert held["run"]["ranks"] == 1
    assert held["about"]["call"]["function"] in ("oneshot", "train", "model_free_ptq")
    assert "model-00001" in str(held["source"]) or way is stage


@pytest.mark.parametrize("way", [streamed, in_memory, without_class, trained])
def test_two_runs_have_one(way: Way, model: Path, tmp_path: Path) -> None:
    """All is the same but what is about one run."""
    first = way(model, tmp_path / "first")
    reset_session()
    assert decided(first) == decided(way(model, tmp_path / "second"))


def test_each_module_has_the_file_that_it_came_from(model: Path, tmp_path: Path) -> None:
    """By the names that source and output share, streamed and in memory alike."""
    homes: dict[str, str] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            homes |= {name.rpartition(".")[0]: path.name for name in file.keys()}  # noqa: SIM118  # no dict
    for way in (streamed, in_memory):
        held = decided(way(model, tmp_path / way.__name__))
        found = {module: file for file, own in held["source"]["modules"].items() for module in own}
        assert found == homes


def test_data_seed_and_arguments_are_in_it(model: Path, tmp_path: Path) -> None:
    first = decided(streamed(model, tmp_path / "first"))["run"]
    reset_session()
    compress(str(model), tmp_path / "second", seed=7, num_calibration_samples=4)
    second = decided(tmp_path / "second")["run"]
    assert {name for name in first if first[name] != second[name]} == {"data", "seed"}


@pytest.mark.parametrize("recipe", ["gptq", "two"])
def test_a_run_that_goes_on(recipe: str, tmp_path: Path) -> None:
    """Of one or of two passes: killed after two blocks, it ends with a whole run's manifest."""
    model = write_model(tmp_path / "model")
    whole, broken = (Job(model, recipe, tmp_path / name / "output") for name in ("whole", "broken"))
    assert run(whole).code == 0
    assert run(broken, die_at="append 4").code == KILLED
    assert run(broken).code == 0
    check_written(broken.output)
    assert decided(broken.output) == decided(whole.output)
