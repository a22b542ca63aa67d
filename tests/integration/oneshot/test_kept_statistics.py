# SPDX-License-Identifier: Apache-2.0
"""Statistics that are kept: the same bytes without the data, and refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import embedded
from tests.support import small_models as small
from tests.support import tiny_models as tiny
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from llmcompressor import active_session, oneshot, plan, reproduce, run_stages, train
from llmcompressor.args import RunArguments
from llmcompressor.checkpoint.kept_statistics import KeptStatistics, StatisticsWriter
from llmcompressor.entrypoints.arguments import check_statistics_arguments
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    CompressorError,
    DatasetError,
    OutputError,
)
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform import SpinQuantModifier

LENGTH = 16
TARGETS: dict[str, Any] = {"targets": "Linear", "ignore": ["lm_head", "re:.*mlp[.]gate$"]}
BUDGET = {"budget": {"bits": 5.0}, "candidates": ["W3A16", "W4A16", "W8A16"]}
HALF = {"sparsity": 0.5, "mask_structure": "2:4", **TARGETS}


def gptq(**fields: Any) -> GPTQModifier:
    return GPTQModifier(**{"scheme": "W4A16", **TARGETS, **fields})


def rounding(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"scheme": "W4A16", **TARGETS, **fields})


def budgeted(cls: Any, **fields: Any) -> Any:
    return cls(**BUDGET, **TARGETS, **fields)


# A recipe, given the fields with which GPTQ does in a run with data what it does without.
RECIPES: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "gptq": lambda alone: [gptq(**alone)],
    "gptq nvfp4": lambda alone: [gptq(scheme="NVFP4", **alone)],
    "imatrix": lambda _: [rounding(weight_observer="imatrix_mse")],
    "static extremes": lambda _: [rounding(scheme="FP8", input_observer="static_minmax")],
    "awq": lambda _: [AWQModifier(), rounding()],
    "smoothquant": lambda _: [SmoothQuantModifier(), rounding(scheme="W8A8")],
    "wanda": lambda _: [WandaPruningModifier(**HALF)],
    "profile": lambda _: [
        WandaPruningModifier(
            sparsity=0.5, sparsity_profile="owl", owl_m=3, owl_lmbda=0.2, **TARGETS
        ),
    ],
    "sparsegpt": lambda _: [SparseGPTModifier(**HALF)],
    "pruned gptq": lambda alone: [SparseGPTModifier(**HALF), gptq(**alone)],
    "budget": lambda alone: [budgeted(GPTQModifier, **alone)],
    "rounded budget": lambda _: [budgeted(QuantizationModifier)],
}


def data(seed: int = 0) -> dict[str, Any]:
    return {"dataset": small.token_rows(seed=seed), "max_seq_length": LENGTH}


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


@contextmanager
def block_calls() -> Iterator[list[Module]]:
    """The blocks that ran with their weights; what looks for norms puts others there."""
    calls: list[Module] = []

    def note(module: Module, _: Any) -> None:
        if isinstance(module, LlamaDecoderLayer):
            weight: Any = module.mlp.down_proj.weight
            is_own = weight.dtype is torch.bfloat16 and not weight.is_meta
            calls.extend([module] if is_own and bool(weight.any()) else [])

    handle = register_module_forward_pre_hook(note)
    try:
        yield calls
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("statistics")
    small.llama().save_pretrained(made / "model")
    return made


@pytest.fixture(scope="module")
def statistics(folder: Path) -> Path:
    """Those of a run with a budget, on the first call."""
    kept = folder / "kept"
    with block_calls() as calls:
        oneshot(
            model=folder / "model",
            recipe=budgeted(GPTQModifier),
            output_dir=folder / "first",
            save_statistics=kept,
            **data(),
        )
    assert calls
    return kept


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_without_data_writes_what_one_with_data_does(
    name: str, folder: Path, statistics: Path, tmp_path: Path
) -> None:
    model, make = folder / "model", RECIPES[name]
    alone = {"asymmetric": False, "gradient_samples": 0}
    recipe = make(alone)
    oneshot(model=model, recipe=recipe, output_dir=tmp_path / "d", propagate_error=False, **data())
    with block_calls() as calls:
        oneshot(
            model=model,
            recipe=make({}),
            output_dir=tmp_path / "kept",
            statistics=statistics,
            verify=False,
        )
    assert not calls
    assert weights(tmp_path / "kept") == weights(tmp_path / "d")
    assert weights(tmp_path / "kept") != weights(model)


def test_experts_have_statistics_too(tmp_path: Path) -> None:
    small.mixture().save_pretrained(tmp_path / "model")
    model, kept = tmp_path / "model", tmp_path / "kept"
    oneshot(model=model, recipe=rounding(), save_statistics=kept, **data())
    recipe = gptq(asymmetric=False)
    oneshot(model=model, recipe=recipe, output_dir=tmp_path / "d", propagate_error=False, **data())
    oneshot(model=model, recipe=gptq(), output_dir=tmp_path / "k", statistics=kept)
    assert weights(tmp_path / "k") == weights(tmp_path / "d")


def test_experts_without_tokens_have_those_of_none(tmp_path: Path) -> None:
    """One token runs two of eight experts."""
    small.mixture().save_pretrained(tmp_path / "model")
    model, kept = tmp_path / "model", tmp_path / "kept"
    token = {"dataset": small.token_rows(1, 1), "max_seq_length": 1}
    oneshot(model=model, recipe=budgeted(GPTQModifier), save_statistics=kept, **token)
    recipe = gptq(asymmetric=False)
    oneshot(model=model, recipe=recipe, output_dir=tmp_path / "d", propagate_error=False, **token)
    oneshot(model=model, recipe=gptq(), output_dir=tmp_path / "k", statistics=kept)
    assert weights(tmp_path / "k") == weights(tmp_path / "d")


@pytest.mark.parametrize("name", ["t5", "llava", "whisper", "recurrent_gemma"])
def test_other_architectures_have_them_too(name: str, tmp_path: Path) -> None:
    made = tiny.ARCHITECTURES[name]
    model, kept = tmp_path / "model", tmp_path / "kept"
    tiny.build(name).save_pretrained(model)
    loader = DataLoader(made.batches(), batch_size=None)  # type: ignore[arg-type]  # a list will do
    recipe = {"recipe": WandaPruningModifier(sparsity=0.5, targets="Linear", ignore=made.ignore)}
    oneshot(model=model, dataset=loader, save_statistics=kept)
    direct = {"dataset": loader, "propagate_error": False}
    oneshot(model=model, output_dir=tmp_path / "d", **recipe, **direct)
    oneshot(model=model, output_dir=tmp_path / "k", **recipe, statistics=kept)
    assert weights(tmp_path / "k") == weights(tmp_path / "d")
    assert weights(tmp_path / "k") != weights(model)


def test_only_linears_have_them(tmp_path: Path) -> None:
    tiny.build("gpt2").save_pretrained(tmp_path / "model")
    loader = DataLoader(tiny.text_batches(), batch_size=None)  # type: ignore[arg-type]  # a list will do
    oneshot(model=tmp_path / "model", dataset=loader, save_statistics=tmp_path / "kept")
    recipe = WandaPruningModifier(sparsity=0.5, targets="re:.*c_fc")
    error = _refused(tmp_path, tmp_path, recipe=recipe, statistics=tmp_path / "kept")
    assert "c_fc" in str(error)
    assert "of Linears alone" in str(error)


def test_a_model_object_has_them_too(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    oneshot(model=small.llama(), save_statistics=kept, **data())
    recipe = gptq(asymmetric=False)
    direct = oneshot(model=small.llama(), recipe=recipe, propagate_error=False, **data())
    found = oneshot(model=small.llama(), recipe=gptq(), statistics=kept)
    own, other = direct.state_dict(), found.state_dict()
    assert all(torch.equal(one, other[name]) for name, one in own.items())
    with pytest.raises(ArgumentError, match="another model"):
        oneshot(model=small.llama(seed=1), recipe=gptq(), statistics=kept)


def test_collecting_alone_changes_and_writes_nothing_else(
    folder: Path, statistics: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    model = oneshot(model=folder / "model", save_statistics=kept, **data())
    assert torch.equal(small.logits(model), small.logits(small.llama()))
    names = {path.name for path in kept.glob("inputs-*")}
    assert names == {path.name for path in statistics.glob("inputs-*")}
    assert all((kept / one).read_bytes() == (statistics / one).read_bytes() for one in names)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("first", "scheme"), [(SmoothQuantModifier, "W8A8"), (AWQModifier, "W4A16")]
)
def test_sums_follow_what_smoothing_does_to_inputs(
    first: Any, scheme: str, folder: Path, statistics: Path, tmp_path: Path
) -> None:
    model, losses = folder / "model", []
    for output, given in (
        (tmp_path / "d", {"propagate_error": False, **data()}),
        (tmp_path / "k", {"statistics": statistics}),
    ):
        recipe = [first(), gptq(scheme=scheme, asymmetric=False if "dataset" in given else None)]
        oneshot(model=model, recipe=recipe, output_dir=output, **given)
        report = json.loads((output / "compression_report.json").read_text())["modifiers"]
        losses.append({k: one["loss"] for k, one in report["GPTQModifier"].items()})
    direct, kept = losses  # inputs that were computed again are rounded to 16 bits again
    assert kept == pytest.approx(direct, rel=0.1)
    plain = oneshot(model=model, recipe=gptq(scheme=scheme), statistics=statistics)
    found = small.logits(plain) - small.logits(small.llama())
    assert found.norm() < 0.5 * small.logits(small.llama()).norm()


def test_gptq_from_statistics_loses_less_than_rounding(pico: Path, tmp_path: Path) -> None:
    batches, ids_BT = embedded.calibration(pico, 16), embedded.held_out(pico, 8)
    loader, kept = DataLoader(batches, batch_size=None), tmp_path / "kept"  # type: ignore[arg-type]  # a list is a data set
    oneshot(model=str(pico), dataset=loader, save_statistics=kept)
    three = {"targets": "Linear", "ignore": ["lm_head"], "scheme": "W3A16"}
    losses = [
        embedded.loss(oneshot(model=str(pico), recipe=one, **given), ids_BT)
        for one, given in (
            (QuantizationModifier(**three), {}),
            (QuantizationModifier(weight_observer="imatrix_mse", **three), {"statistics": kept}),
            (GPTQModifier(**three), {"statistics": kept}),
        )
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05


# --------------------
# What is refused, before anything is written.


def _refused(folder: Path, tmp_path: Path, **given: Any) -> CompressorError:
    output = tmp_path / "out"
    with block_calls() as calls, pytest.raises(CompressorError) as caught:
        oneshot(**{"model": folder / "model", "output_dir": output, **given})
    assert not calls
    assert not output.exists()
    assert not output.with_name("out.partial").exists()
    return caught.value


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (lambda: gptq(asymmetric=True), "compares the inputs of two models"),
        (lambda: SparseGPTModifier(**HALF, asymmetric=True), "compares the inputs of two models"),
        (lambda: rounding(scheme="FP8", input_observer="minmax"), "static_minmax needs extremes"),
        (
            lambda: rounding(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
            "outputs or of a cache",
        ),
        (lambda: AutoRoundModifier(scheme="W4A16", **TARGETS), "the activations themselves"),
        (lambda: [SpinQuantModifier(rotations=["R1", "R2"]), gptq()], "rotates inputs"),
        (lambda: [AWQModifier(loss="output"), rounding()], "runs parents of Linears"),
        (
            lambda: [SmoothQuantModifier(num_calibration_steps=2), rounding(scheme="W8A8")],
            "some of the batches",
        ),
    ],
)
def test_techniques_that_need_more_are_refused(
    recipe: Callable[[], Any], why: str, folder: Path, statistics: Path, tmp_path: Path
) -> None:
    error = _refused(folder, tmp_path, recipe=recipe(), statistics=statistics)
    assert isinstance(error, ArgumentError)
    assert why in str(error)


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"dataset": small.token_rows(seed=3), "max_seq_length": LENGTH}, "data: "),
        ({"precision": "float32"}, "dtype: bfloat16 then, float32 now"),
        ({"use_loss_mask": True}, "calibration.use_loss_mask: False then, True now"),
    ],
)
def test_other_statistics_are_refused_with_what_differs(
    given: dict[str, Any], differs: str, folder: Path, statistics: Path, tmp_path: Path
) -> None:
    error = _refused(folder, tmp_path, recipe=gptq(), statistics=statistics, **given)
    assert "another model, of other data or settings" in str(error)
    assert differs in str(error)


def test_model_and_given_data_are_compared(folder: Path, statistics: Path, tmp_path: Path) -> None:
    small.llama(seed=1).save_pretrained(tmp_path / "other")
    other = tmp_path / "other"
    error = _refused(folder, tmp_path, model=other, recipe=gptq(), statistics=statistics)
    assert "model.weights" in str(error)
    oneshot(model=folder / "model", recipe=gptq(), statistics=statistics, **data())


def test_a_budget_needs_the_gradients_of_as_many_samples(
    folder: Path, statistics: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    oneshot(model=folder / "model", save_statistics=kept, **data())
    error = _refused(folder, tmp_path, recipe=budgeted(GPTQModifier), statistics=kept)
    assert "no gradients for a budget" in str(error)
    fewer = GPTQModifier(**{**BUDGET, "budget": {"bits": 5.0, "samples": 4}}, **TARGETS)
    error = _refused(folder, tmp_path, recipe=fewer, statistics=statistics)
    assert "no gradients of 4 samples" in str(error)
    wider = GPTQModifier(**BUDGET, targets="Linear")
    error = _refused(folder, tmp_path, recipe=wider, statistics=statistics)
    assert "no gradients of lm_head" in str(error)


def test_arguments_that_do_not_go_together_are_refused(
    folder: Path, statistics: Path, tmp_path: Path
) -> None:
    for given, why in (
        ({"statistics": statistics, "save_statistics": tmp_path / "x"}, "both given"),
        ({"statistics": statistics, "pipeline": "basic"}, "runs data through the model"),
        ({"statistics": tmp_path / "nothing"}, "nothing, which does not exist"),
        ({"statistics": statistics / "statistics.json"}, "which is a file"),
        ({"statistics": folder / "model"}, "has no statistics.json"),
        ({"statistics": statistics, "recipe": None}, "no recipe that could use them"),
    ):
        error = _refused(folder, tmp_path, **{"recipe": gptq(), **given})
        assert isinstance(error, ArgumentError)
        assert why in str(error)
    error = _refused(folder, tmp_path, recipe=gptq(), save_statistics=tmp_path / "x")
    assert isinstance(error, DatasetError)
    for place in (folder / "model", tmp_path / "out" / "kept"):
        error = _refused(folder, tmp_path, recipe=gptq(), save_statistics=place, **data())
        assert isinstance(error, OutputError)
    for place in (statistics, tmp_path / "kept"):
        for call in (train, run_stages):
            with pytest.raises(ArgumentError, match="'statistics'"):
                call(
                    model=str(folder / "model"),
                    recipe=rounding(),
                    output_dir=tmp_path / "out",
                    statistics=place,
                    **data(),
                )


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_wish_that_errors_propagate_is_answered(
    asked: bool | None, folder: Path, statistics: Path, warned: list[str]
) -> None:
    given = {} if asked is None else {"propagate_error": asked}
    plan(folder / "model", gptq(), statistics=statistics, measure=False, **given)
    assert any("propagate_error has no effect" in one for one in warned) is (asked is True)


@pytest.mark.parametrize("name", ["save_statistics", "statistics"])
def test_they_are_for_one_process(name: str, tmp_path: Path) -> None:
    args = RunArguments(**{name: str(tmp_path)})
    check_statistics_arguments(args, 1, "independent", None)
    with pytest.raises(ArgumentError, match=f"'{name}' is of runs in one process"):
        check_statistics_arguments(args, 2, "independent", None)


def test_a_folder_of_other_data_is_not_written_over(
    folder: Path, statistics: Path, tmp_path: Path
) -> None:
    before = small.tree(statistics)
    error = _refused(folder, tmp_path, recipe=gptq(), save_statistics=statistics, **data(seed=3))
    assert "other data" in str(error)
    assert small.tree(statistics) == before


# --------------------
# Interruptions and damage.


def test_an_interrupted_collection_is_begun_again(
    folder: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, model, write = tmp_path / "kept", folder / "model", StatisticsWriter.write_inputs

    def stop_at_the_second(self: StatisticsWriter, block: str) -> None:
        if self.contents.blocks:
            raise KeyboardInterrupt
        write(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(StatisticsWriter, "write_inputs", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            oneshot(model=model, save_statistics=kept, **data())
    (kept / "inputs-strange.safetensors.new").write_bytes(b"half")
    assert (kept / "inputs-model.layers.0.safetensors").is_file()
    error = _refused(folder, tmp_path, recipe=gptq(), statistics=kept)
    assert "their collection was interrupted" in str(error)
    assert "into the same folder" in str(error)
    oneshot(model=model, save_statistics=kept, **data())
    names = {path.name for path in statistics.glob("inputs-*")}
    assert {path.name for path in kept.glob("inputs-*")} == names
    assert all((kept / one).read_bytes() == (statistics / one).read_bytes() for one in names)


@pytest.mark.parametrize("recipe", ["gptq", "awq", "smoothed"])
def test_a_run_goes_on_with_the_same_statistics(
    recipe: str,
    folder: Path,
    statistics: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(output: Path) -> None:
        modifiers = {
            "gptq": lambda: [gptq()],
            "awq": lambda: [AWQModifier(), rounding()],
            "smoothed": lambda: [SmoothQuantModifier(), gptq(scheme="W8A8")],
        }[recipe]()
        oneshot(model=folder / "model", recipe=modifiers, output_dir=output, statistics=statistics)

    run(tmp_path / "whole")
    read, asked = KeptStatistics.inputs, list[str]()

    def stop(self: KeptStatistics, block: str) -> Any:
        if block.endswith("1"):
            raise KeyboardInterrupt
        return read(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(KeptStatistics, "inputs", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out")

    def note(self: KeptStatistics, block: str) -> Any:
        asked.append(block)
        return read(self, block)

    monkeypatch.setattr(KeptStatistics, "inputs", note)
    run(tmp_path / "out")
    assert "model.layers.0" not in asked  # it was finished
    assert small.tree(tmp_path / "out") == small.tree(tmp_path / "whole")


def test_one_block_of_statistics_is_in_memory_at_a_time(
    folder: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, held = KeptStatistics.inputs, list[int]()

    def note(self: KeptStatistics, block: str) -> Any:
        held.append(len(active_session().state.run.kept_inputs or ()))
        return read(self, block)

    monkeypatch.setattr(KeptStatistics, "inputs", note)
    oneshot(
        model=folder / "model", recipe=gptq(), output_dir=tmp_path / "out", statistics=statistics
    )
    assert held == [0, 0, 0]  # two blocks, and what lies outside


def test_damage_is_told(folder: Path, statistics: Path, tmp_path: Path) -> None:
    kept = shutil.copytree(statistics, tmp_path / "kept")
    file = kept / "inputs-model.layers.1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="not as it was written"):
        oneshot(
            model=folder / "model",
            recipe=gptq(),
            output_dir=tmp_path / "other",
            statistics=kept,
        )
    assert not (tmp_path / "other").exists()
    file.write_bytes(content[:-1])
    error = _refused(folder, tmp_path, recipe=gptq(), statistics=kept)
    assert "missing or has another size" in str(error)
    index = kept / "statistics.json"
    index.write_text(index.read_text().replace('"format": 2', '"format": 3'))
    error = _refused(folder, tmp_path, recipe=gptq(), statistics=kept)
    assert "have format 3" in str(error)
    index.write_text("{")
    error = _refused(folder, tmp_path, recipe=gptq(), statistics=kept)
    assert "cannot be read" in str(error)


# --------------------
# Plans and manifests.


def test_a_plan_needs_no_data_and_tells_what_is_wrong(
    folder: Path, statistics: Path, tmp_path: Path
) -> None:
    model = folder / "model"
    found = plan(model, gptq(), statistics=statistics, measure=False)
    assert found.ok
    assert not found.problems
    assert [one.forwards for one in found.passes] == [0]
    assert found.operations.solve > 0
    assert found.operations.forward == 0
    assert not plan(model, gptq(), measure=False).ok  # without data
    curve = plan(model, budgeted(GPTQModifier), statistics=statistics).budget
    losses = [one.loss for one in curve]
    assert None not in losses
    assert losses == sorted(losses, reverse=True)
    for given in ({"recipe": gptq(asymmetric=True)}, {"statistics": tmp_path / "nothing"}):
        refused = plan(
            model, **{"recipe": gptq(), "statistics": statistics, **given}, measure=False
        )
        assert "statistics" in [one.where for one in refused.problems]


def test_the_manifest_makes_the_run_again(folder: Path, statistics: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    oneshot(model=folder / "model", recipe=gptq(), output_dir=output, statistics=statistics)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["run"]["statistics"]
    assert manifest["about"]["call"]["arguments"]["statistics"] == str(statistics)
    assert reproduce(output).same
