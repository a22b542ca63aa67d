# SPDX-License-Identifier: Apache-2.0
"""A checkpoint gets its name only if it keeps its gates, whichever entrypoint makes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import gated, manifests
from tests.support import small_models as small
from tests.support.rank_group import Group, group_of
from typer.testing import CliRunner

from llmcompressor import evaluate, oneshot, plan, reproduce, run_stages, verify
from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.journal import Journal
from llmcompressor.cli.app import app
from llmcompressor.entrypoints import gates as gates_page
from llmcompressor.errors import (
    ArgumentError,
    CheckpointError,
    DatasetError,
    GateError,
    OutputError,
    RecipeError,
)
from llmcompressor.runtime.temporary import owner
from llmcompressor.training import Trainer

Way = Callable[..., None]
WAYS = [gated.streamed, gated.in_memory, gated.without_class, gated.trained, gated.staged]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small.one_block().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "stage_out"


@pytest.fixture
def held_out(tmp_path: Path) -> str:
    return gated.write_rows(tmp_path / "held_out.jsonl", 1)


def report_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "compression_report.json").read_text())
    gates: dict[str, Any] = found["gates"]
    return gates


def rejected(out: Path) -> Path:
    return out.with_name(f"{out.name}.rejected")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("way", WAYS)
def test_kept(way: Way, model: str, out: Path, held_out: str) -> None:
    way(model, out, gates=gated.LOOSE, gate_dataset=held_out)
    assert not rejected(out).exists()
    found = report_of(out)
    assert found["passed"]
    assert found["measured"].keys() == gated.LOOSE.keys()
    own = evaluate(out, reference=model, dataset=held_out, max_seq_length=64)
    assert found["measured"]["kl"]["value"] == own.kl_divergence
    assert found["measured"]["top1"]["value"] == own.top1_agreement
    assert found["tokens"] == own.tokens
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert found["measured"]["size"]["value"] == size
    assert manifests.check_written(out)["about"]["gates"] == found
    assert verify(out).ok


@pytest.mark.parametrize("way", WAYS)
def test_not_kept(way: Way, model: str, out: Path, held_out: str, tmp_path: Path) -> None:
    limits = {**gated.LOOSE, **gated.IMPOSSIBLE}
    with pytest.raises(GateError) as refused:
        way(model, out, gates=limits, gate_dataset=held_out)
    [reason] = refused.value.reasons
    assert reason.startswith("kl is 0.")
    assert refused.value.folder == str(rejected(out))
    assert str(rejected(out)) in str(refused.value)
    assert not out.exists()
    assert not [one for one in names(out.parent) if "partial" in one]
    found = report_of(rejected(out))
    assert not found["passed"]
    assert not found["measured"]["kl"]["passed"]
    assert found["measured"]["top1"]["passed"]
    manifests.check_written(rejected(out))
    assert verify(rejected(out)).ok
    # a repeated call replaces it, and what it holds is what a run without gates writes
    with pytest.raises(GateError):
        way(model, out, gates=limits, gate_dataset=held_out)
    way(model, out)
    for file in out.glob("*.safetensors"):
        assert file.read_bytes() == (rejected(out) / file.name).read_bytes()
    # nothing is left of it beside one that passes
    shutil.rmtree(out)
    shutil.rmtree(out.with_name("stage_first"), ignore_errors=True)
    way(model, out, gates=gated.LOOSE, gate_dataset=held_out)
    assert not rejected(out).exists()
    assert report_of(out)["passed"]
    assert not [one for one in names(out.parent) if one.startswith(f"{out.name}.")]


@pytest.mark.parametrize("way", [gated.streamed, gated.in_memory])
def test_a_rejected_one_of_another_model_stays(
    way: Way, model: str, out: Path, held_out: str, tmp_path: Path, log: list[tuple[str, str]]
) -> None:
    small.one_block(seed=7).save_pretrained(tmp_path / "other")
    with pytest.raises(GateError):
        way(str(tmp_path / "other"), out, gates=gated.IMPOSSIBLE, gate_dataset=held_out)
    before = small.tree(rejected(out))
    way(model, out, gates=gated.LOOSE, gate_dataset=held_out)
    assert small.tree(rejected(out)) == before
    assert [one for one in log if one[0] == "WARNING" and str(rejected(out)) in one[1]]


def test_the_output_of_before_stays(model: str, out: Path, held_out: str) -> None:
    gated.streamed(model, out)
    before = small.tree(out)
    given = {"gates": gated.IMPOSSIBLE, "gate_dataset": held_out, "overwrite": True}
    with pytest.raises(GateError):
        gated.streamed(model, out, **given)
    with pytest.raises(GateError):
        gated.in_memory(model, out, **given)
    assert small.tree(out) == before
    assert names(out.parent) == {out.name, rejected(out).name}


def test_a_model_object_is_compared_with_what_it_was(out: Path, held_out: str) -> None:
    """Without a copy the compressed model would be compared with itself."""
    given = {"recipe": gated.ROUNDED, "output_dir": out, "gate_dataset": held_out}
    with pytest.raises(GateError):
        oneshot(model=small.one_block(), gates={"kl": 1e-5}, **given)
    assert report_of(rejected(out))["measured"]["kl"]["value"] > 1e-5
    oneshot(model=small.one_block(), gates={"kl": 1.0}, **given)


def test_gates_of_a_recipe(
    model: str, out: Path, held_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_COMPRESSOR_REPORT", "1")
    recipe = {**gated.ROUNDED, "gates": {"kl": 1e-9, "size": "1GB"}}
    with pytest.raises(GateError):
        oneshot(model=model, recipe=recipe, output_dir=out, gate_dataset=held_out)
    pages = [(rejected(out) / "report.html").read_text()]
    oneshot(model=model, recipe=recipe, output_dir=out, gate_dataset=held_out, gates={"kl": 1.0})
    pages.append((out / "report.html").read_text())
    assert [page.count("NOT kept") for page in pages] == [2, 0]  # first of all, and in the table
    assert "vllm serve stage_out.rejected" in pages[0]
    assert report_of(out)["measured"]["kl"]["limit"] == 1.0
    assert report_of(out)["measured"].keys() == {"kl", "size"}
    assert "gates" not in (out / "recipe.yaml").read_text()


def test_the_last_stage_is_compared_with_the_first_model(
    model: str, out: Path, held_out: str
) -> None:
    gated.staged(model, out, gates={"kl": 50.0}, gate_dataset=held_out)
    own = evaluate(out, reference=model, dataset=held_out, max_seq_length=64)
    before = out.with_name("stage_first")
    near = evaluate(out, reference=before, dataset=held_out, max_seq_length=64)
    assert report_of(out)["measured"]["kl"]["value"] == own.kl_divergence != near.kl_divergence
    assert "gates" not in json.loads((before / "manifest.json").read_text())["about"]
    assert reproduce(out).same


def test_stages_of_an_object_need_the_original(out: Path, held_out: str) -> None:
    with pytest.raises(ArgumentError, match="gate_reference"):
        run_stages(
            small.one_block(),
            gated.STAGES,
            dataset=small.token_rows(),
            output_dir=out.parent,
            gates={"kl": 1.0},
            gate_dataset=held_out,
        )
    assert not out.parent.exists()


# --------------------
# Refused before any work.


@pytest.mark.parametrize(
    ("given", "kind", "named"),
    [
        ({"gates": {"kld": 1.0}}, ArgumentError, "Did you mean kl"),
        ({"gates": {"kl": 0}}, ArgumentError, "'kl' cannot be 0"),
        ({"gates": {"top1": 90}}, ArgumentError, "a share from 0 to 1"),
        ({"gates": {"perplexity": 12.3}}, ArgumentError, "a ratio"),
        ({"gates": {"size": "large"}}, ArgumentError, "5GB"),
        ({"gates": "kl"}, ArgumentError, "--gate kl=0.02"),
        ({"gates": {"kl": True}}, ArgumentError, "'kl' cannot be True"),
        ({"gates": {"size": 1000}}, ArgumentError, "the weight files will have"),
        ({"gates": {"size": "1GB"}, "gate_dataset": "x"}, ArgumentError, "gate_dataset"),
        ({"gate_reference": "x"}, ArgumentError, "gate_reference"),
        ({"gates": {"kl": 1}}, DatasetError, "no split"),
        ({"gates": {"kl": 1}, "gate_dataset": "gone.jsonl"}, DatasetError, "gone.jsonl"),
        ({"gates": {"kl": 1}, "gate_dataset": "rows"}, DatasetError, "not seen"),
        ({"gates": {"kl": 1}, "gate_dataset": [[999] * 8]}, DatasetError, "token 999"),
        ({"gates": {"kl": 1}, "gate_reference": "/gone"}, CheckpointError, "/gone"),
        ({"gates": {"kl": 1}, "output_dir": None}, ArgumentError, "output_dir"),
    ],
    ids=str,
)
def test_refused(
    given: dict[str, Any],
    kind: type[Exception],
    named: str,
    model: str,
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = gated.write_rows(tmp_path / "rows.jsonl", 0)
    if given.get("gate_dataset") == "rows":
        given = {**given, "gate_dataset": rows}
    monkeypatch.setattr(Journal, "add", lambda *_: pytest.fail("a block is finished"))
    with pytest.raises(kind, match=named):
        oneshot(
            **{
                "model": model,
                "recipe": gated.CALIBRATED,
                "dataset": rows,
                "output_dir": out,
                **given,
            }
        )
    assert names(tmp_path) == {"rows.jsonl"}


def test_a_wrong_gate_of_a_recipe(model: str, out: Path) -> None:
    with pytest.raises(RecipeError, match=r"wrong gate.*top1"):
        oneshot(model=model, recipe={**gated.ROUNDED, "gates": {"top1": 2}}, output_dir=out)


@pytest.mark.parametrize("way", [gated.streamed, gated.in_memory])
def test_an_empty_folder_of_that_name_holds_nothing_else(
    way: Way, model: str, out: Path, held_out: str
) -> None:
    rejected(out).mkdir(parents=True)
    with pytest.raises(GateError):
        way(model, out, gates=gated.IMPOSSIBLE, gate_dataset=held_out)
    assert verify(rejected(out)).verdict == "good"


def test_another_folder_of_that_name_stays(model: str, out: Path, held_out: str) -> None:
    gated.streamed(model, rejected(out))
    with pytest.raises(OutputError, match="something else"):
        gated.streamed(model, out, gates={"size": "1GB"})
    assert not out.exists()


def test_plan_tells_of_the_size(model: str) -> None:
    found = plan(model, gated.ROUNDED, measure=False)
    assert found.sizes is not None
    exact = found.sizes.weights
    assert plan(model, gated.ROUNDED, measure=False, gates={"size": exact}).ok
    [problem] = plan(model, gated.ROUNDED, measure=False, gates={"size": exact - 1}).problems
    assert (problem.where, problem.error) == ("gates", "ArgumentError")
    assert f"{exact:,}" in problem.message


# --------------------
# The text.


def test_the_test_split_is_measured_on(model: str, out: Path) -> None:
    data = {name: small.token_rows(8, 32, seed=seed) for seed, name in enumerate(("train", "test"))}
    oneshot(
        model=model,
        recipe=gated.CALIBRATED,
        dataset=data,
        output_dir=out,
        gates={"kl": 50.0},
    )
    own = evaluate(out, reference=model, dataset=data["test"], max_seq_length=64)
    assert report_of(out)["measured"]["kl"]["value"] == own.kl_divergence
    assert report_of(out)["text"] == "the split 'test' of the data"


@pytest.mark.parametrize("mix", ["python_stdlib", "default"])
def test_a_mix_stands_for_the_modules_that_are_held_out(mix: str) -> None:
    """Data without a split of its own can be measured on them."""
    for data in ("rows.jsonl", [[1, 2, 3]], mix):
        assert gates_page._source_of_text(DatasetArguments(dataset=data), mix) is None


def test_no_calibration_sample_is_measured_on(model: str, out: Path, tmp_path: Path) -> None:
    """Of the calibration data itself the rows are left that the run did not take."""
    rows = gated.write_rows(tmp_path / "rows.jsonl", 0)
    given = {"num_calibration_samples": 5, "max_seq_length": 24, "gates": {"kl": 50.0}}
    gated.streamed(model, out, gate_dataset=rows, shuffle_calibration_samples=False, **given)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    left = [json.loads(line)["input_ids"] for line in lines[5:]]
    own = evaluate(
        out, reference=model, dataset=[{"input_ids": one} for one in left], max_seq_length=64
    )
    assert report_of(out)["measured"]["kl"]["value"] == own.kl_divergence


# --------------------
# Broken off, over ranks, made again, from the command line.


@pytest.mark.parametrize("way", [gated.streamed, gated.trained])
def test_broken_off_while_it_is_measured(
    way: Way, model: str, out: Path, held_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    given = {"gates": gated.IMPOSSIBLE, "gate_dataset": held_out}
    with monkeypatch.context() as patch:
        patch.setattr(gates_page, "evaluate", broken_off)
        with pytest.raises(KeyboardInterrupt):
            way(model, out, **given)
    assert names(out.parent) == {f"{out.name}.partial"}
    monkeypatch.setattr(Journal, "add", lambda *_: pytest.fail("a block is done again"))
    monkeypatch.setattr(Trainer, "train", lambda *_, **__: pytest.fail("it is trained again"))
    with pytest.raises(GateError):
        way(model, out, **given)
    assert names(out.parent) == {rejected(out).name}


KILLED = """
import os, pathlib, signal, sys
from tests.support import gated
from llmcompressor.entrypoints import gates
way, model, out, held_out = sys.argv[1:]
def evaluate(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
gates.evaluate = evaluate
getattr(gated, way)(model, pathlib.Path(out), gates=gated.LOOSE, gate_dataset=held_out)
"""


@pytest.mark.parametrize("way", ["streamed", "in_memory"])
def test_killed_while_it_is_measured(way: str, model: str, out: Path, held_out: str) -> None:
    """The next run leaves nothing of it."""
    command = [sys.executable, "-c", KILLED, way, model, str(out), held_out]
    ended = subprocess.run(command, check=False, cwd=Path(__file__).parents[3], timeout=200)
    assert ended.returncode == -signal.SIGKILL
    assert names(out.parent)
    assert all(one.startswith(f"{out.name}.partial") for one in names(out.parent))
    getattr(gated, way)(model, out, gates=gated.LOOSE, gate_dataset=held_out)
    assert names(out.parent) == {out.name}


def test_a_rejected_one_that_was_moved_aside(model: str, out: Path, held_out: str) -> None:
    """A run was killed while it put a new one in its place."""
    given = {"gate_dataset": held_out, "gates": gated.IMPOSSIBLE}
    with pytest.raises(GateError):
        gated.streamed(model, out, **given)
    aside = f"{rejected(out).name}.old-{owner().rpartition('-')[0]}-4194305-0"
    rejected(out).rename(out.with_name(aside))
    gated.streamed(model, out, gates=gated.LOOSE, gate_dataset=held_out)
    assert names(out.parent) == {out.name}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two ranks."""
    with group_of(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.mark.slow
def test_all_processes_of_a_training_end_alike(
    model: str, out: Path, held_out: str, tmp_path: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--local-addr", "localhost", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *launcher, gated.__file__, model, str(out), held_out]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=os.environ, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert told[0].startswith("GateError: ")
    assert names(out.parent) == {rejected(out).name}


@pytest.mark.parametrize("way", ["streamed", "in_memory", "not_shared", "without_class"])
def test_all_ranks_end_alike(
    way: str, model: str, out: Path, held_out: str, two: Group, tmp_path: Path
) -> None:
    given = {"gates": gated.IMPOSSIBLE, "gate_dataset": held_out}
    told = two(gated.error_of_rank, way, model, str(out), **given)
    assert told[0] == told[1]
    assert told[0].startswith("GateError: ")
    assert names(out.parent) == {rejected(out).name}
    given["gates"] = gated.LOOSE
    assert two(gated.error_of_rank, way, model, str(out), **given) == ["none"] * 2
    assert report_of(out)["passed"]


@pytest.mark.parametrize("limits", [gated.LOOSE, gated.IMPOSSIBLE], ids=["kept", "not kept"])
def test_made_again(limits: dict[str, Any], model: str, out: Path, held_out: str) -> None:
    made = out
    try:
        gated.streamed(model, out, gates=limits, gate_dataset=held_out)
    except GateError as error:
        made = Path(error.folder)
    found = reproduce(made)
    assert found.same
    assert not found.reasons
    assert names(out.parent) == {made.name}
    kept = reproduce(made, gates={"kl": 1e-9 if made == out else 50.0})
    assert kept.same
    assert [line.partition(":")[0] for line in kept.reasons] == ["gates"]


def test_the_exit_code_is_three(model: str, out: Path, held_out: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(gated.ROUNDED))
    command = ["oneshot", model, "--recipe", str(tmp_path / "recipe.yaml"), "--output", str(out)]
    command += ["--gate-dataset", held_out]
    ended = CliRunner().invoke(app, [*command, "--gate", "kl=1e-9", "--gate", "size=1GB"])
    assert ended.exit_code == 3, ended.output
    assert "Rejected: " in ended.output
    assert report_of(rejected(out))["measured"].keys() == {"kl", "size"}
    assert CliRunner().invoke(app, [*command, "--gate", "top1=0.001"]).exit_code == 0
