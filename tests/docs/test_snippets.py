# SPDX-License-Identifier: Apache-2.0
"""The pages tell the truth: their code runs, their tables are those of the code, links lead on.

A line before a fenced block says what becomes of the block:

- ``<!-- run -->``: it is run, in the order of the page, in a folder that holds ``my-model`` (the
  beginning of the embedded model) and ``calibration.jsonl``. Python blocks of a page share their
  names; shell blocks hold calls of ``llmcompressor``.
- ``<!-- file: NAME -->``: it is written to that folder as NAME.
- ``<!-- recipe -->``: it is read as a recipe.
- ``<!-- not run: WHY -->``: nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests import house
from tests.support.short_pico import write_short_pico

from llmcompressor.args import DatasetArguments, ModelArguments, RecipeArguments
from llmcompressor.cli import main
from llmcompressor.core.modifier import Modifier
from llmcompressor.datasets import rows as dataset_table
from llmcompressor.datasets.default_mix import ORDER, PARTS
from llmcompressor.datasets.rows import DATASETS
from llmcompressor.datasets.stdlib_text import calibration_passages
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.distillation import OutputDistillationModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.hqq import HQQModifier
from llmcompressor.modifiers.pruning import ConstantPruningModifier, MagnitudePruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.reap import REAPPruningModifier
from llmcompressor.modifiers.rotation import QuIPModifier, SpinQuantModifier
from llmcompressor.modifiers.scale_tuning import ScaleTuningModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.sparsity import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.observers.base import OBSERVERS
from llmcompressor.pipelines import PIPELINES
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.grammar import METADATA_KEYS
from llmcompressor.schemes.presets import PRESETS, format_of, is_preset, preset_scheme

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES.append(ROOT / "examples" / "README.md")
PAGES += sorted(DOCS.rglob("*.md"))
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    mark: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            match["language"],
            match["text"],
            match["mark"] or "",
            text.count("\n", 0, match.start("language")) + 1,
        )
        for match in _FENCE.finditer(text)
    ]


def code_of(page: Path) -> list[Block]:
    """The blocks that a test has something to do with."""
    return [block for block in blocks(page) if block.mark and not block.mark.startswith("not run")]


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table after a line that begins with ``heading``; no code marks."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(heading))
    rows: list[list[str]] = []
    for line in lines[start + 1 :]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


@pytest.fixture(scope="module")
def calibration_text() -> str:
    return "\n".join(json.dumps({"text": text}) for text in calibration_passages(16))


BLOCKS = {"CONTRIBUTING.md": 4}
"""Of the model of a page that counts them; others get one."""


@pytest.fixture(scope="module")
def models(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Number of blocks → the folder of a model with as many."""
    root = tmp_path_factory.mktemp("source")
    return {
        blocks: write_short_pico(pico, root / str(blocks), blocks=blocks)
        for blocks in {1, *BLOCKS.values()}
    }


@pytest.fixture
def workplace(tmp_path: Path, calibration_text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data; registries and the log are as before afterwards."""
    (tmp_path / "calibration.jsonl").write_text(calibration_text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # dataset="default" is of this machine
    monkeypatch.setattr("llmcompressor.logger.configure_logger", lambda *_: None)
    monkeypatch.setattr("llmcompressor.planning.workload._SECONDS", 0.01)  # of a measurement
    for registry in (DATASETS, OBSERVERS, PIPELINES):
        monkeypatch.setattr(registry, "_added", dict(registry._added))
    monkeypatch.setattr(dataset_table, "_registered", dict(dataset_table._registered))
    return tmp_path


@pytest.mark.parametrize("name", [name for name in PAGE_NAMES if code_of(ROOT / name)])
def test_code_of_a_page_runs(name: str, models: dict[int, Path], workplace: Path) -> None:
    shutil.copytree(models[BLOCKS.get(name, 1)], workplace / "my-model")
    names: dict[str, Any] = {"__name__": "snippets"}
    for block in code_of(ROOT / name):
        if block.mark.startswith("file: "):
            (workplace / block.mark.removeprefix("file: ")).write_text(block.text, "utf-8")
        elif block.mark == "recipe":
            assert Recipe.create_instance(block.text).modifiers, f"{name}:{block.line}"
        elif block.mark == "run" and block.language == "python":
            # Blank lines before it, so that a traceback shows the line of the page.
            source = "\n" * block.line + block.text
            exec(compile(source, name, "exec", dont_inherit=True), names)
        elif block.mark == "run":
            run_commands(block.text)


def run_commands(text: str) -> None:
    for command in text.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(command, comments=True) or [""]
        if not program:
            continue
        assert program == "llmcompressor", command
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert not end.value.code, command


def _imports(code: str) -> list[str]:
    """Statements of a text that import of this package, also where the rest is no Python."""
    found = re.findall(
        r"^[ \t>.$]*((?:from|import) llmcompressor[\w.]*(?: import (?:\([^)]*\)|[^\n]*))?)",
        code,
        re.M,
    )
    return [" ".join(one.split("#")[0].split()) for one in found]


@pytest.mark.parametrize("name", ["docstrings", *PAGE_NAMES])
def test_import_lines_of_every_snippet_work(name: str) -> None:
    if name == "docstrings":
        texts = [text for file in house.contents().values() for _, text in file.docstrings]
    else:
        texts = [block.text for block in blocks(ROOT / name)]
        texts += re.findall(r"`((?:from|import) llmcompressor[^`]*)`", (ROOT / name).read_text())
    for line in dict.fromkeys(line for text in texts for line in _imports(text)):
        exec(line, {})


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_every_block_says_whether_it_runs(name: str) -> None:
    for block in blocks(ROOT / name):
        known = block.mark.startswith(("file: ", "not run: ")) or block.mark in {"run", "recipe"}
        is_code = block.language not in {"", "text"}
        assert known or not is_code, f"{name}:{block.line}"


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_links_lead_to_files(name: str) -> None:
    page = ROOT / name
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize(
    "page", ["architecture.md", "sequential.md", "moe.md", "streaming.md", "verify.md"]
)
def test_files_named_in_a_page_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+/\w+\.py)`", (DOCS / page).read_text(encoding="utf-8"))
    roots = [ROOT, ROOT / "src", ROOT / "src" / "llmcompressor"]
    assert [one for one in named if not any((root / one).is_file() for root in roots)] == []


def test_every_page_is_reached_from_the_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in seen:
            continue
        seen.add(page)
        targets = _LINK.findall(page.read_text(encoding="utf-8"))
        waiting += [page.parent / target for target in targets if target.endswith(".md")]
    assert {page.resolve() for page in PAGES} <= seen


# ---------------------------------------------------------------------- tables


def constant(name: str) -> Any:
    """A table of the architecture tests, by reading it."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def test_floors_are_those_that_the_imports_are_held_to() -> None:
    rows = table_rows(DOCS / "architecture.md", "## Floors")
    told = {
        package.strip().removesuffix("/"): int(floor)
        for floor, packages, *_ in rows
        for package in packages.split(",")
    }
    assert told == constant("FLOORS")


def test_presets_are_those_of_the_code() -> None:
    rows = table_rows(DOCS / "schemes.md", "# Preset schemes")
    told = {name: row[-1] for row in rows for name in re.split(r",\s*", row[0])}
    known = {name: form for name, form in told.items() if name in PRESETS}
    assert known == {name: format_of(preset_scheme(name)) for name in PRESETS}
    assert all(is_preset(name) for name in told)  # of a newer compressed-tensors too


@pytest.mark.parametrize(
    ("page", "modifier"),
    [
        ("quantization.md", QuantizationModifier),
        ("gptq.md", GPTQModifier),
        ("hqq.md", HQQModifier),
        ("autoround.md", AutoRoundModifier),
        ("magnitude_pruning.md", MagnitudePruningModifier),
        ("constant_pruning.md", ConstantPruningModifier),
        ("distillation.md", OutputDistillationModifier),
        ("smoothquant.md", SmoothQuantModifier),
        ("awq.md", AWQModifier),
        ("sparsegpt.md", SparseGPTModifier),
        ("wanda.md", WandaPruningModifier),
        ("reap.md", REAPPruningModifier),
        ("scale_tuning.md", ScaleTuningModifier),
        ("spinquant.md", SpinQuantModifier),
        ("quip.md", QuIPModifier),
    ],
)
def test_fields_and_defaults_are_those_of_the_class(page: str, modifier: type[Modifier]) -> None:
    rows = table_rows(DOCS / "modifiers" / page, "## Fields")
    told = {row[0]: row[1] for row in rows}
    shown = {
        name: "required"
        if info.is_required()
        else repr(info.get_default(call_default_factory=True)).replace("'", '"')
        for name, info in modifier.model_fields.items()
    }
    if page in {"gptq.md", "hqq.md", "autoround.md"}:  # the page of the shared ones has the others
        shared = QuantizationModifier.model_fields.keys() - told.keys()
        shown = {name: default for name, default in shown.items() if name not in shared}
    assert told == shown


def test_a_budget_is_found_from_where_a_scheme_is_chosen() -> None:
    for page, heading in (("README.md", "## Which one"), ("docs/choosing.md", "## By what you")):
        choices = " ".join(cell for row in table_rows(ROOT / page, heading) for cell in row)
        assert re.search(r"\((docs/)?budget.md\)", choices), page
        assert set(re.findall(r"budget: {(\w+):", choices)) == {"size", "kl"}, page
    for page in ("quantization", "gptq", "hqq", "autoround", "awq"):
        text = (DOCS / "modifiers" / f"{page}.md").read_text()
        assert "(../budget.md)" in text, page
        assert "`candidates`" in text, page


def test_observers_are_those_of_the_registry() -> None:
    told = {row[0] for row in table_rows(DOCS / "observers.md", "## The observers")}
    assert told == set(OBSERVERS)


def test_observer_options_are_those_of_the_classes() -> None:
    rows = table_rows(DOCS / "observers.md", "## Options")
    told = {(name, option): default for names, option, default, *_ in rows for name in split(names)}
    options = {
        (name, option): info.default
        for name in OBSERVERS
        for option, info in OBSERVERS.load(name).Options.model_fields.items()
    }
    assert told.keys() == options.keys()
    for key, value in options.items():
        number = isinstance(value, float)
        assert told[key] == (f"{value:.4g}" if number else str(value)), key


def split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def test_dependencies_are_those_that_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"]
    for extra in project["optional-dependencies"].values():
        wanted = [*wanted, *extra]
    named = {re.split(r"[<>=!~ ]", requirement)[0] for requirement in wanted}
    page = DOCS / "dependencies.md"
    told = {
        name
        for heading in ("## Required", "## Optional", "## For development")
        for row in table_rows(page, heading)
        for name in split(row[0])
    }
    assert told == named


def test_data_sets_are_those_of_the_table() -> None:
    told = {row[0] for row in table_rows(DOCS / "data.md", "## Named data sets")}
    assert told == set(DATASETS)


def test_the_default_mix_is_that_of_the_table() -> None:
    told = {row[0]: row[1:] for row in table_rows(DOCS / "data.md", "## The default mix")}
    assert told.keys() == PARTS.keys()
    for name, (share, source, terms) in told.items():
        assert (int(share), terms) == (ORDER.count(name), PARTS[name].license)
        assert source.startswith(PARTS[name].hub_id)


def test_arguments_named_in_the_data_page_exist() -> None:
    fields = {
        field.name
        for arguments in (DatasetArguments, ModelArguments, RecipeArguments)
        for field in dataclasses.fields(arguments)
    }
    told = {row[0] for row in table_rows(DOCS / "data.md", "## Arguments")}
    assert told
    assert told <= fields


def test_arguments_without_effect_are_read_nowhere() -> None:
    page = (DOCS / "data_details.md").read_text(encoding="utf-8")
    section = page.split("## Accepted without effect")[1]
    told = re.findall(r"`(\w+)`", section.split("##")[0])
    sources = [path for path in (ROOT / "src").rglob("*.py") if path.parent.name != "args"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert told
    assert [name for name in told if re.search(rf"args\.{name}\b", text)] == []


def test_pipelines_are_those_of_the_registry() -> None:
    rows = table_rows(DOCS / "sequential.md", "## The pipelines")
    assert {row[0] for row in rows} == {str(name) for name in PIPELINES} - {"data_free"}


def test_metadata_keys_are_those_of_the_grammar() -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("Metadata keys: "))
    assert set(re.findall(r"`(\w+)`", line)) == METADATA_KEYS


def test_members_of_a_modifier_are_those_of_the_base_class() -> None:
    rows = table_rows(ROOT / "CONTRIBUTING.md", "## A modifier")
    told = {row[0] for row in rows}
    members = house.LISTS["members to override"]()
    assert told == {name for name in members if not name.startswith("on_")}


def test_the_technique_of_the_page_has_40_lines() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = text.split("## A modifier")[1].split("```python")[1].split("```")[0]
    body = code[code.index("class ") :].splitlines()
    assert sum(bool(line.strip()) for line in body) <= 40
