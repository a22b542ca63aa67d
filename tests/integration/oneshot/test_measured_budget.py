# SPDX-License-Identifier: Apache-2.0
"""A budget of a divergence: measured, the smallest that keeps it, and nothing is measured twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import gated
from tests.support import small_models as small
from typer.testing import CliRunner

from llmcompressor import evaluate, model_free_ptq, oneshot, plan, reproduce, run_stages
from llmcompressor.args import RecipeArguments
from llmcompressor.checkpoint import block_stream
from llmcompressor.checkpoint.journal import Journal
from llmcompressor.cli.app import app
from llmcompressor.entrypoints import budget as sensitivities
from llmcompressor.entrypoints import gates as measuring
from llmcompressor.entrypoints.arguments import Job
from llmcompressor.errors import (
    ArgumentError,
    BudgetError,
    DatasetError,
    GateError,
    InputError,
    OutputError,
    RecipeError,
)
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.reporting.report import write_page
from llmcompressor.runtime.processes import Processes

CANDIDATES = ["W3A16", "W4A16", "W8A16"]
LIMIT = 0.1
"""Nats a token: of the model below all 3 bits lose more, and all 8 bits less."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small.llama(initializer_range=0.1).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return gated.write_rows(tmp_path_factory.mktemp("text") / "held_out.jsonl", 1)


def recipe(**budget: Any) -> GPTQModifier:
    fields = {"targets": "Linear", "ignore": ["lm_head"], "candidates": CANDIDATES}
    return GPTQModifier(**fields, budget={"kl": LIMIT, **budget})


def run(model: Any, out: Path | None, text: str | None, how: Any = None, **given: Any) -> Any:
    data = {"dataset": small.token_rows(), "max_seq_length": 16, "gate_dataset": text}
    named = RecipeArguments.__dataclass_fields__.keys() & given.keys()
    how = None if named else how or recipe()
    return oneshot(model=model, recipe=how, output_dir=out, **{**data, **given})


def found_of(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "compression_report.json").read_text())
    found: dict[str, Any] = report["budget"]
    return found


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def bits_of(model: Any) -> set[int]:
    every = [getattr(one, "quantization_scheme", None) for one in model.modules()]
    return {one.weights.num_bits for one in every if one is not None}


@pytest.fixture(scope="module")
def whole(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    made = run(model, out, text)
    assert len(bits_of(made)) > 1
    assert sum(one.numel() for one in made.parameters())  # its blocks are read from the output
    return out


def test_the_output_is_measured_to_keep_the_limit(whole: Path, model: str, text: str) -> None:
    found = found_of(whole)
    rounds = found["rounds"]
    assert [one.name for one in whole.parent.iterdir()] == [whole.name]
    assert found["chosen"]["bytes"] == sum(map(len, weights(whole).values()))
    (kept,) = (one for one in rounds if one["bytes"] == found["chosen"]["bytes"])
    assert kept["kept"]
    own = evaluate(whole, reference=model, dataset=text, max_seq_length=64)
    assert own.kl_divergence == kept["kl"] <= LIMIT
    for one in rounds:
        assert one["kept"] == (one["kl"] <= LIMIT)
        assert not one["kept"] or one["bytes"] >= kept["bytes"]
    assert any(not one["kept"] for one in rounds)
    assert 2 <= len(rounds) <= 6


def test_the_recipe_makes_the_same_bytes_without_a_search(
    whole: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = yaml.safe_load((whole / "recipe.yaml").read_text()).values()
    (modifiers,) = stage.values()
    (fields,) = modifiers.values()
    assert "budget" not in fields
    assert len(fields["config_groups"]) > 1
    monkeypatch.setattr(sensitivities, "measure_losses", lambda *_, **__: pytest.fail("measured"))
    run(model, tmp_path / "again", None, whole / "recipe.yaml")
    assert weights(tmp_path / "again") == weights(whole)
    assert reproduce(whole, dataset=small.token_rows()).same


def test_the_curve_is_drawn_with_the_rounds(whole: Path) -> None:
    page = write_page(whole).read_text()
    _, _, card = page.partition('id="budget"')
    card = card.partition("</section>")[0]
    for number, one in enumerate(found_of(whole)["rounds"], 1):
        assert f"round {number}, {one['bytes']:,} bytes" in card
    assert f"the choice, {found_of(whole)['chosen']['bytes']:,} bytes" in card


def test_a_model_that_is_loaded_as_a_whole(
    whole: Path, model: str, text: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(model, out, text, pipeline="basic")
    assert found_of(out)["chosen"]["bytes"] <= 1.05 * found_of(whole)["chosen"]["bytes"]
    assert any(one["kept"] for one in found_of(out)["rounds"])
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


class _KilledError(BaseException):
    """Ends a run as a kill would: nothing of the package handles it."""


def _killed_in_block(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        left, count = block_stream.StreamedBlocks.leave, iter(range(100))

        def leave(self: Any, block: str) -> None:
            left(self, block)
            if next(count) == number:
                raise _KilledError

        patch.setattr(block_stream.StreamedBlocks, "leave", leave)

    return plant


def _killed_while_measuring(patch: pytest.MonkeyPatch) -> None:
    own, count = measuring.evaluate, iter(range(100))

    def broken(*args: Any, **given: Any) -> Any:
        if next(count) == 1:
            raise _KilledError
        return own(*args, **given)

    patch.setattr(measuring, "evaluate", broken)


def _killed_at(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def broken(self: Any, *args: Any, **given: Any) -> Any:
            raise _KilledError

        patch.setattr(f"llmcompressor.{name}", broken)

    return plant


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(_killed_in_block(3), id="in the second round"),
        pytest.param(_killed_while_measuring, id="while it measures the second round"),
        pytest.param(
            _killed_at("entrypoints.measured_budget.adopt_output"), id="when all are made"
        ),
        pytest.param(
            _killed_at("checkpoint.journal.Workspace.publish"), id="before it has its name"
        ),
        pytest.param(
            _killed_at("checkpoint.journal.remove_work_folder"), id="when it has its name"
        ),
    ],
)
def test_a_run_that_is_killed_goes_on(
    kill: Callable[[pytest.MonkeyPatch], None],
    whole: Path,
    model: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, rounds = tmp_path / "out", len(found_of(whole)["rounds"])
    with monkeypatch.context() as patched:
        kill(patched)
        with pytest.raises(_KilledError):
            run(model, out, text)
    file = tmp_path / "out.rounds" / "journal"
    known = Journal(file).choices.keys() - {"losses"} if file.exists() else set(range(rounds))
    measured: list[Any] = []
    own = measuring.evaluate
    with monkeypatch.context() as patched:
        patched.setattr(sensitivities, "measure_losses", lambda *_, **__: pytest.fail("again"))
        patched.setattr(
            measuring, "evaluate", lambda *args, **given: measured.append(1) or own(*args, **given)
        )
        run(model, out, text, resume="must")
    assert len(known) > 0
    assert len(measured) == rounds - len(known)
    assert weights(out) == weights(whole)
    for name in ("compression_report.json", "recipe.yaml"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_run_in_memory_keeps_its_rounds(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"pipeline": "basic", "model": model, "text": text}
    run(out=tmp_path / "whole", **given)
    with monkeypatch.context() as patched:
        _killed_while_measuring(patched)
        with pytest.raises(_KilledError):
            run(out=tmp_path / "out", **given)
    monkeypatch.setattr(sensitivities, "measure_losses", lambda *_, **__: pytest.fail("again"))
    run(out=tmp_path / "out", **given)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert found_of(tmp_path / "out") == found_of(tmp_path / "whole")
    assert {one.name for one in tmp_path.iterdir()} == {"out", "whole"}


def test_a_second_run_on_the_output_is_refused(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, own = tmp_path / "out", measuring.evaluate
    refused: list[str] = []

    def evaluate_beside(*args: Any, **given: Any) -> Any:
        before = sorted(one.name for one in (tmp_path / "out.rounds").iterdir())
        for resume in ("auto", "never"):
            with pytest.raises(OutputError) as error:
                run(model, out, text, resume=resume)
            refused.append(str(error.value))
        assert sorted(one.name for one in (tmp_path / "out.rounds").iterdir()) == before
        return own(*args, **given)

    monkeypatch.setattr(measuring, "evaluate", evaluate_beside)
    run(model, out, text, recipe(kl=50.0))
    assert len(refused) == 2
    assert all("another run" in one.lower() for one in refused), refused


def test_rounds_of_another_run_are_kept(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        _killed_while_measuring(patched)
        with pytest.raises(_KilledError):
            run(model, out, text)
    with pytest.raises(OutputError, match=r"rounds of another run.*0\.1.*0\.2"):
        run(model, out, text, recipe(kl=0.2))
    before = sorted(tmp_path.rglob("*"))
    run(model, out, text, recipe(kl=50.0), resume="never")
    assert before
    assert len(found_of(out)["rounds"]) == 1  # the smallest keeps it
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_reached_is_told_with_the_best(
    model: str, text: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(BudgetError, match="The best that was found has") as caught:
        run(model, out, text, recipe(kl=1e-9, rounds=2))
    assert not list(tmp_path.iterdir())
    with pytest.raises(GateError, match="kl is") as rejected:
        run(model, out, text, recipe(kl=1e-9, rounds=2), keep_rejected=True)
    (folder,) = tmp_path.iterdir()
    assert str(folder) == rejected.value.folder
    assert found_of(folder)["chosen"]["bytes"] == caught.value.size
    assert min(one["kl"] for one in found_of(folder)["rounds"]) == caught.value.kl


def test_the_command_ends_as_for_gates(model: str, text: str, tmp_path: Path) -> None:
    data = ["--dataset", text, "--gate-dataset", text, "--num-calibration-samples", "4"]
    given = ["oneshot", model, "--output", str(tmp_path / "out"), *data]
    ended = CliRunner().invoke(app, [*given, "--max-kl", "1e-9"])
    assert ended.exit_code == 3, ended.output
    assert not list(tmp_path.iterdir())
    assert CliRunner().invoke(app, [*given, "--max-kl", "50"]).exit_code == 0
    assert found_of(tmp_path / "out")["chosen"]["sets"]["W8A16"] == 0


def test_other_gates_are_measured_on_the_best(model: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(GateError, match="top1"):
        run(model, tmp_path / "out", text, recipe(kl=50.0), gates={"top1": 1.0})
    assert [one.name for one in tmp_path.iterdir()] == ["out.rejected"]


def test_a_size_that_is_missed_is_rejected(model: str, text: str, tmp_path: Path) -> None:
    limit = {"size": 190_000}  # the smallest candidates take less
    with pytest.raises(GateError, match=r"size is .* at most 190,000 bytes is allowed"):
        run(model, tmp_path / "out", text, gates=limit)
    assert [one.name for one in tmp_path.iterdir()] == ["out.rejected"]


def test_statistics_of_a_run_serve_other_budgets(
    whole: Path, model: str, text: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    run(model, tmp_path / "out", text, save_statistics=kept)
    assert weights(tmp_path / "out") == weights(whole)
    fields = {"targets": "Linear", "ignore": ["lm_head"], "candidates": CANDIDATES}
    for number, budget in enumerate(({"kl": 50.0}, {"bits": 5})):
        out = tmp_path / str(number)
        modifier = GPTQModifier(**fields, budget=budget)
        held_out = text if "kl" in budget else None
        oneshot(model, modifier, statistics=kept, output_dir=out, gate_dataset=held_out)
        assert found_of(out)["chosen"]["loss"] > 0


def test_a_stage_compares_with_the_first_model(model: str, text: str, tmp_path: Path) -> None:
    fields = {"targets": "Linear", "ignore": ["lm_head"], "candidates": CANDIDATES}
    stages = {
        "first_stage": {"first_modifiers": {"WandaPruningModifier": {"sparsity": 0.05}}},
        "last_stage": {"last_modifiers": {"GPTQModifier": {**fields, "budget": {"kl": LIMIT}}}},
    }
    run_stages(
        model,
        yaml.safe_dump(stages),
        dataset=small.token_rows(),
        max_seq_length=16,
        output_dir=tmp_path / "out",
        gate_dataset=text,
    )
    found = found_of(tmp_path / "out" / "stage_last")
    own = evaluate(tmp_path / "out" / "stage_last", reference=model, dataset=text)
    assert own.kl_divergence in {one["kl"] for one in found["rounds"]}


def test_a_plan_says_where_the_estimate_puts_the_limit(model: str, text: str) -> None:
    data = {"dataset": small.token_rows(), "max_seq_length": 16}
    found = plan(model, recipe(), **data)
    assert found.ok, found.problems
    (chosen,) = (one for one in found.budget if one.is_chosen)
    assert chosen.loss is not None
    assert chosen.loss <= LIMIT
    assert all(one.loss > LIMIT for one in found.budget if one.bytes < chosen.bytes)
    assert f"{LIMIT:g} is expected of {chosen.bytes:,} bytes" in " ".join(found.notes)
    unknown = plan(model, recipe(), data["dataset"], measure=False)
    assert "not known without data" in " ".join(unknown.notes)


MIXED = ["W4A16", "W8A8"]
PLAIN = {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], type[InputError], str]] = {
    "no text": (lambda: {"text": None}, DatasetError, "gate_dataset"),
    "no output": (lambda: {"out": None}, ArgumentError, "no output_dir"),
    "object": (lambda: {"model": small.llama()}, ArgumentError, "the model is an object"),
    "activations": (lambda: {"max_kl": 0.1, "candidates": MIXED}, RecipeError, "differently"),
    "with bits": (lambda: {"max_kl": 0.1, "bits": 4}, ArgumentError, "both given"),
    "of bits": (lambda: {"how": recipe(bits=4)}, RecipeError, "both bits and kl"),
    "none": (lambda: {"max_kl": 0}, ArgumentError, "max_kl.*above 0"),
    "below none": (lambda: {"how": recipe(kl=-1)}, RecipeError, "budget.kl.*above 0"),
    "no rounds": (lambda: {"how": recipe(rounds=1)}, RecipeError, "budget.rounds"),
    "rounds of bits": (
        lambda: {"how": recipe(kl=None, bits=4, rounds=3)},
        RecipeError,
        "nothing is measured",
    ),
    "size": (lambda: {"gates": {"size": "9kB"}}, ArgumentError, "gate 'size' allows 9,000"),
    "nothing to keep": (
        lambda: {"how": GPTQModifier(**PLAIN), "keep_rejected": True, "text": None},
        ArgumentError,
        "keep_rejected",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_error_before_any_work(
    case: str, model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivities, "measure_losses", lambda *_, **__: pytest.fail("measured"))
    given, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        run(**{"model": model, "out": tmp_path / "out", "text": text, **given()})
    assert not list(tmp_path.iterdir())


def test_another_folder_of_the_name_stays(model: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "out.rounds").mkdir()
    (tmp_path / "out.rounds" / "notes").write_text("mine")
    with pytest.raises(OutputError, match="holds something else"):
        run(model, tmp_path / "out", text)
    run(model, tmp_path / "out", None, GPTQModifier(targets="Linear", scheme="W4A16"))
    assert (tmp_path / "out.rounds" / "notes").read_text() == "mine"


def test_several_processes_are_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "processes", Processes(0, 2))
    with pytest.raises(ArgumentError, match="which one process does"):
        Job(tmp_path / "out", model=model, recipe=recipe(), dataset=small.token_rows())


def test_without_a_model_class_nothing_is_measured(model: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="running the model"):
        model_free_ptq(model, tmp_path / "out", budget={"kl": 0.1}, ignore="lm_head")
    assert not list(tmp_path.iterdir())
