# SPDX-License-Identifier: Apache-2.0
"""Pages: what runs write, what is made anew, and what a browser makes of them."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import mixtures

from llmcompressor import compare, evaluate, model_free_ptq, oneshot, report
from llmcompressor.datasets.stdlib_text import calibration_passages
from llmcompressor.errors import ArgumentError, CheckpointError, OutputError
from llmcompressor.evaluation.metrics import Report, TaskScore
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.reporting.cards import depth_chart
from llmcompressor.reporting.charts import Dot, along_sizes, over_depth
from llmcompressor.reporting.contents import Matrix, contents_of
from llmcompressor.reporting.page import Card, Figure, data_of, render
from llmcompressor.reporting.report import write_page
from llmcompressor.verification.check import verify_files

_MOST_BYTES = 1_000_000
_OUTSIDE = re.compile(
    r"""(?:src|href)\s*=\s*["'](?!data:|\#)|url\(|@import|<script(?! type="application/json")"""
)


@pytest.fixture(scope="module")
def made(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint by GPTQ and one by rounding, each with its page."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LLM_COMPRESSOR_REPORT", raising=False)
        oneshot(
            model=pico,
            recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
            dataset=calibration_passages(8, seed=0, characters=300),
            max_seq_length=64,
            output_dir=folder / "gptq",
        )
        model_free_ptq(pico, folder / "fp8", "FP8_DYNAMIC", ["lm_head"])
    return {"gptq": folder / "gptq", "fp8": folder / "fp8"}


@pytest.fixture(autouse=True)
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLM_COMPRESSOR_REPORT", raising=False)


@pytest.fixture
def copied(made: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(made["gptq"], tmp_path / "gptq")


def cells(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [html.unescape(one) for one in re.findall(r"<td[^>]*>(.*?)</td>", text, re.S)]


@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_a_run_writes_one_file_that_needs_nothing_else(made: dict[str, Path], name: str) -> None:
    page = made[name] / "report.html"
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < _MOST_BYTES
    assert not _OUTSIDE.search(text.replace('href="data:,"', ""))
    data = data_of(page)
    assert data["phases"]["reading the model"]["seconds"] > 0
    assert data["phases"]["checking the output"]["bytes"] > 0
    assert data["name"] == name


def test_sizes_and_errors_are_those_of_the_files(made: dict[str, Path], pico: Path) -> None:
    found = contents_of(made["gptq"])
    exact = {one.module: one.relative for one in verify_files(made["gptq"], pico).errors}
    assert found.matrices.keys() == exact.keys()
    for module, one in found.matrices.items():
        assert one.error == pytest.approx(exact[module], rel=0.1)  # of a share of the rows
        assert one.scheme == "weights 4-bit int, group 128 (pack-quantized)"
    mean = sum(exact.values()) / len(exact)
    assert sum(one.error or 0 for one in found.matrices.values()) / len(exact) == pytest.approx(
        mean, rel=0.02
    )
    before = data_of(made["gptq"] / "report.html")["before"]
    assert before == contents_of(pico).sizes


def test_what_is_made_anew_is_the_same_page(copied: Path) -> None:
    page = copied / "report.html"
    before = page.read_bytes()
    assert report(copied) == page
    assert page.read_bytes() == before


def test_errors_can_be_measured_anew(copied: Path, pico: Path) -> None:
    report(copied, pico)
    exact = {one.module: one.relative for one in verify_files(copied, pico).errors}
    shown = cells(copied / "report.html")
    for module, error in exact.items():
        place = shown.index(module)
        assert shown[place + 2] == f"{error:.4f}"


def test_a_page_without_a_run_before_it(copied: Path, pico: Path) -> None:
    (copied / "report.html").unlink()
    (copied / "compression_report.json").unlink()
    report(copied)
    text = (copied / "report.html").read_text(encoding="utf-8")
    assert "was not verified" in text
    assert "Time and memory" not in text


def test_an_evaluation_is_shown_with_the_worst_passages(copied: Path, pico: Path) -> None:
    text = calibration_passages(2, seed=1, characters=400)
    found = evaluate(copied, reference=pico, dataset=text, max_seq_length=64)
    assert [one.value for one in found.worst] == sorted(
        (one.value for one in found.worst), reverse=True
    )
    assert all(one.text for one in found.worst)
    shown = cells(copied / "report.html")
    assert f"{found.perplexity:.5g}" in shown
    assert any(found.worst[0].text[:40] in cell for cell in shown)
    assert data_of(copied / "report.html")["phases"]  # the run's figures stay


def test_scores_of_tasks_stand_beside_figures_of_a_text(copied: Path) -> None:
    """Whichever was measured first."""
    of_text = Report(8, 2, loss=2.0).as_dict()
    score = TaskScore("gsm8k", "exact_match", 0.375, 0.0125, True, 40, 5, reference=0.4375)
    of_tasks = Report(tasks=(score,)).as_dict()
    for first, second in ((of_text, of_tasks), (of_tasks, of_text)):
        write_page(copied, evaluation=first)
        write_page(copied, evaluation=second)
        shown = cells(copied / "report.html")
        place = shown.index("gsm8k")
        expected = ["exact_match", "higher", "5", "40", "0.375", "0.0125", "0.4375", ""]
        assert shown[place + 1 : place + 9] == expected
        assert f"{math.exp(2):.5g}" in shown
    assert data_of(copied / "report.html")["phases"]  # the run's figures stay


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_shows_the_tokens_and_errors_of_its_experts(family: str, tmp_path: Path) -> None:
    mixtures.saved(family, tmp_path / "model")
    oneshot(
        model=tmp_path / "model",
        recipe=GPTQModifier(targets="Linear", scheme="W8A16", ignore=["lm_head", "re:.*gate$"]),
        dataset=mixtures.rows(4),
        output_dir=tmp_path / "out",
    )
    told = json.loads((tmp_path / "out" / "compression_report.json").read_text())["experts"]
    shown = cells(tmp_path / "out" / "report.html")
    for module, record in told.items():
        place = shown.index(module)
        tokens = record["tokens"]
        assert shown[place + 1 : place + 4] == [str(f(tokens)) for f in (len, min, max)]
    found = contents_of(tmp_path / "out")
    exact = {
        one.module: one.relative
        for one in verify_files(tmp_path / "out", tmp_path / "model").errors
    }
    assert found.matrices.keys() == exact.keys()
    for module, one in found.matrices.items():
        assert one.error == pytest.approx(exact[module], rel=0.15)


def test_a_page_that_fails_costs_no_checkpoint(
    pico: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> str:
        raise KeyError("a fault of the page")

    monkeypatch.setattr("llmcompressor.reporting.report.page_of", fail)
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    oneshot(model=pico, recipe=recipe, output_dir=tmp_path / "out")
    assert verify_files(tmp_path / "out", pico).ok
    assert not (tmp_path / "out" / "report.html").exists()


def test_no_page_if_not_wanted(pico: Path, tmp_path: Path) -> None:
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    oneshot(model=pico, recipe=recipe, output_dir=tmp_path / "out", report=False)
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_page_of_the_source_is_not_copied(
    made: dict[str, Path], pico: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(pico, tmp_path / "source")
    shutil.copy(made["gptq"] / "report.html", source)
    recipe = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    oneshot(model=source, recipe=recipe, output_dir=tmp_path / "out", report=False)
    assert not (tmp_path / "out" / "report.html").exists()


def test_two_checkpoints_side_by_side(made: dict[str, Path], pico: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    text = calibration_passages(1, seed=1, characters=300)
    found = compare(
        made["gptq"], made["fp8"], reference=pico, output=page, dataset=text, max_seq_length=64
    )
    assert list(found.contents) == ["gptq", "fp8"]
    assert len(found.different_schemes()) == 28
    for name, folder in made.items():
        exact = {one.module: one.relative for one in verify_files(folder, pico).errors}
        assert found.errors[name] == exact
        assert 0 < found.evaluations[name]["kl_divergence"] < 1
    assert page.stat().st_size < _MOST_BYTES
    shown = cells(page)
    assert "model.layers.3.mlp.down_proj" in shown
    assert json.dumps(found.as_dict())


def test_a_comparison_leaves_the_pages_of_both_as_they_are(
    made: dict[str, Path], copied: Path, tmp_path: Path
) -> None:
    pages = [one / "report.html" for one in (copied, made["fp8"])]
    before = [one.read_bytes() for one in pages]
    text = calibration_passages(1, seed=1, characters=300)
    out = tmp_path / "both.html"
    found = compare(copied, made["fp8"], output=out, dataset=text, max_seq_length=64)
    assert found.evaluations["fp8"]["kl_divergence"] > 0
    assert [one.read_bytes() for one in pages] == before


@pytest.mark.parametrize(
    ("given", "said"), [(".", "is a folder"), ("absent/a.html", "there is no folder")]
)
def test_the_place_of_a_comparison_is_checked_first(
    made: dict[str, Path], tmp_path: Path, given: str, said: str
) -> None:
    with pytest.raises(OutputError, match=said):  # and not that the second is another model
        compare(made["gptq"], made["gptq"], output=tmp_path / given)
    assert not list(tmp_path.iterdir())


def test_labels_of_an_axis_differ() -> None:
    dots = [Dot(depth, 31.4 + 0.1 * depth, "") for depth in range(4)]
    labels = re.findall(r">(3\d\.?\d*)</text>", over_depth({"a": dots}, "dB"))
    assert len(labels) > 2
    assert len(labels) == len(set(labels))


def test_a_copy_differs_in_nothing(made: dict[str, Path], copied: Path, tmp_path: Path) -> None:
    found = compare(made["gptq"], copied, output=tmp_path / "both.html")
    assert not found.different_schemes()
    assert "All modules have the same scheme" in (tmp_path / "both.html").read_text()


def test_different_models_are_one_error(
    made: dict[str, Path], copied: Path, tmp_path: Path
) -> None:
    config = json.loads((copied / "config.json").read_text())
    for changed in ({"architectures": ["Qwen3ForCausalLM"]}, {"hidden_size": 64}):
        (copied / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ArgumentError, match="are different models"):
            compare(made["gptq"], copied, output=tmp_path / "both.html")
    with pytest.raises(ArgumentError, match="Both checkpoints are"):
        compare(copied, copied)
    with pytest.raises(CheckpointError, match="There is no checkpoint folder '"):
        compare(copied, tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config.json' is a file"):
        compare(copied, copied / "config.json")
    assert not (tmp_path / "both.html").exists()


def test_every_text_is_escaped_and_data_comes_back() -> None:
    evil = "<script>alert(1)</script> & </script>"
    card = Card("a", evil, lines=[evil], code=evil, head=(evil,), rows=[(evil,)], note=evil)
    data = {"warnings": [evil], "number": 1.5, "nothing": None}
    text = render(evil, evil, [Figure(evil, evil)], [card], data)
    assert "<script>alert" not in text
    assert text.count("</script>") == 1
    place = Path("page.html")
    assert data_of(place) == {}


def test_data_comes_back(tmp_path: Path) -> None:
    data = {"warnings": ["<b> & </script> \u2028"], "number": 1.5, "nothing": None}
    page = tmp_path / "page.html"
    page.write_text(render("a", "b", [], [], data), encoding="utf-8")
    assert data_of(page) == data


def test_the_page_of_a_large_model_is_small() -> None:
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    matrices = [
        Matrix(f"model.layers.{depth}.mlp.experts.{expert}.{kind}", "", 0.1 + depth / 1000)
        for depth in range(94)
        for expert in range(16)
        for kind in kinds[4:]
    ] + [Matrix(f"model.layers.{d}.self_attn.{k}", "", 0.1) for d in range(94) for k in kinds[:4]]
    chart = depth_chart(matrices, lambda one: one.error, "error")
    assert len(chart) < _MOST_BYTES / 6
    assert chart.count("<title>") >= 94 * 5


@pytest.mark.parametrize("strategy", ["channel", "group", "tensor", "block"])
def test_the_error_of_a_share_of_rows_is_close_to_that_of_all(strategy: str) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    from llmcompressor.quantization.parameters import observe_weight

    own: dict[str, Any] = {"group": {"group_size": 32}, "block": {"block_structure": [48, 64]}}
    args = QuantizationArgs(num_bits=4, strategy=strategy, symmetric=True, **own.get(strategy, {}))
    generator = torch.Generator().manual_seed(0)
    for rows in (8, 500):
        weight_RC = torch.randn(rows, 192, generator=generator)
        parameters = observe_weight(weight_RC, args)
        change_RC = weight_RC - parameters.round(weight_RC)
        exact = float(change_RC.norm() / weight_RC.norm())
        found = parameters.rounding(weight_RC)
        assert found.weight_error == pytest.approx(exact, rel=1e-5 if rows < 32 else 0.05)
        scale = parameters.effective_scale
        assert found.scales[0] == float(scale.min())
        assert found.scales[2] == float(scale.max())


# --------------------
# In a browser.


def test_only_the_curve_of_sizes_is_a_line() -> None:
    curve = [Dot(1.0 + place, 0.1 / 4**place, f"point {place}") for place in range(4)]
    measured = [Dot(2.5, 0.02, "round 1"), Dot(1.5, 0.05, "round 2"), Dot(3.0, 0.0, "round 3")]
    drawn = along_sizes(curve, {"chosen": curve[1:2], "measured": measured}, "nats", name="curve")
    assert drawn.count('class="line reactive') == 1
    titles = re.findall(r"<title>((?:point|round) \d)[^<]*</title>", drawn)
    assert sorted(titles) == [
        *("point 0", "point 1", "point 1", "point 2", "point 3"),
        *("round 1", "round 2"),  # what is not positive has no place on a logarithmic axis
    ]


_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--allow-file-access-from-files", "--enable-logging=stderr", "--window-size=1700,1000"),
)
_LOOK = Path(__file__).parents[2] / "support" / "look.html"


@pytest.mark.skipif(_CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_a_browser_draws_it(
    made: dict[str, Path], pico: Path, tmp_path: Path, kind: str, width: int
) -> None:
    page = made["gptq"] / "report.html"
    if kind == "comparison":
        page = tmp_path / "both.html"
        compare(made["gptq"], made["fp8"], reference=pico, output=page)
    look = tmp_path / "look.html"
    text = _LOOK.read_text().replace("PAGE", page.as_uri()).replace("WIDTH", str(width))
    look.write_text(text)
    command = [str(_CHROMIUM), *_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, look.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console
    found = json.loads(html.unescape(re.search(r'data-found="([^"]*)"', done.stdout)[1]))  # type: ignore[index]
    assert found["overflow"] <= 0  # nothing but tables is scrolled sideways
    assert found["drawn"] == found["charts"] >= 3
    assert found["height"] >= 9  # pixels of the smallest text of a chart
    assert not found["outside"]
    assert found["titles"] > 28
