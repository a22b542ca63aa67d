# SPDX-License-Identifier: Apache-2.0
"""The site: its pages, their length and links. Without MkDocs, but for the last test."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import llmcompressor
from llmcompressor.core.modifier_registry import builtin_modifiers
from llmcompressor.observers.base import OBSERVERS
from llmcompressor.schemes.presets import preset_scheme

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
FENCES = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!cf)(?<!vs)(?<!et al)[.!?][)\"'*]*(?=\s|$)")
ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.)\s)")


def hook(name: str) -> ModuleType:
    """A module of docs/hooks, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINKS, GENERATED = hook("links"), hook("generated")


def pages_of(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in pages_of(value)]


NAV = pages_of(SITE["nav"])
GUIDE = next(pages_of(entry["Guide"]) for entry in SITE["nav"] if "Guide" in entry)
MANUALS = sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))
PAGES = [*MANUALS, "README.md", "CONTRIBUTING.md", "examples/README.md"]


def prose(path: str) -> list[str]:
    """Paragraphs and items of lists, each on one line; no code, tables or headings."""
    text = FENCES.sub("", (ROOT / path).read_text(encoding="utf-8"))
    blocks = re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    kept = [one for one in blocks if one.strip() and not one.lstrip().startswith(("|", "#", ":::"))]
    return [" ".join(item.split()) for one in kept for item in ITEM.split(one.strip("\n"))]


def sentences(paragraph: str) -> int:
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", paragraph))
    return len(SENTENCE.findall(re.sub(r"^(?:[-*]|\d+\.)\s+", "", plain)))


# --------------------------------------------------------------------------- pages


def test_every_page_is_in_the_navigation_once() -> None:
    """A new page needs a line in mkdocs.yml; so does one that another page links to."""
    brought = {LINKS.place(path) for path in LINKS.linked() if path.endswith(".md")}
    assert sorted(NAV) == sorted({*brought, *(LINKS.place(page) for page in MANUALS)})


@pytest.mark.parametrize("page", GUIDE)
def test_guide_pages_are_short(page: str) -> None:
    assert len((DOCS / page).read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("page", PAGES)
def test_paragraphs_have_at_most_four_sentences(page: str) -> None:
    assert [one[:80] for one in prose(page) if sentences(one) > 4] == []


@pytest.mark.parametrize("page", PAGES)
def test_lists_are_read_alike(page: str) -> None:
    """MkDocs wants a blank line behind an item of several paragraphs, and before a list."""
    text = FENCES.sub("", (ROOT / page).read_text(encoding="utf-8"))
    item = r"(?:[-*]|\d+\.) "
    joined = rf"\n\n    \S.*(?:\n    .*)*\n{item}|\n(?!{item}|[ \n|#]).*\n{item}"
    assert re.findall(joined, text) == []


def test_readme_is_one_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("page", [one for one in MANUALS if one != "docs/log.md"])
def test_manuals_are_no_release_notes(page: str) -> None:
    """What was otherwise once stands in CHANGELOG.md and in the log."""
    news = r"new in|what's new|as of version|(?:was|were|has been|have been) (?:added|renamed) in"
    news += r"|previously|formerly|used to be|we (?:have )?(?:added|changed|fixed|removed)"
    assert [one[:80] for one in prose(page) if re.search(rf"\b(?:{news})\b", one, re.I)] == []


# --------------------------------------------------------------------------- links


@cache
def anchors(path: str) -> set[str]:
    text = FENCES.sub("", (ROOT / path).read_text(encoding="utf-8"))
    return {LINKS.slug(one) for one in re.findall(r"^#+ +(.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_to_headings(page: str) -> None:
    text = LINKS.CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for link, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", text):
        target = LINKS.target(page, link) if link else page
        assert anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize(
    ("page", "link", "rewritten"),
    [
        ("README.md", "docs/moe.md#calibration", "moe.md#calibration"),
        ("docs/measured.md", "../benchmarks/results/memory.md", "benchmarks/results/memory.md"),
        ("docs/modifiers/gptq.md", "../../CONTRIBUTING.md", "../CONTRIBUTING.md"),
        ("benchmarks/results/compare.md", "../../docs/log.md", "../../log.md"),
    ],
)
def test_links_are_rewritten_for_the_site(page: str, link: str, rewritten: str) -> None:
    class File:
        src_uri = LINKS.place(page)
        abs_src_path = str(ROOT / page)

    class Page:
        file = File

    text = f"[a]({link}), `[a]({link})`, [b](https://example.org/x.md) and [c](#here)"
    expected = text.replace(f"[a]({link}),", f"[a]({rewritten}),")
    assert LINKS.on_page_markdown(text, page=Page, files=None) == expected


# ----------------------------------------------------------------- made of the code


def test_reference_has_all_public_names() -> None:
    listed = re.findall(
        r"^::: (\S+)$", "".join(page.read_text() for page in DOCS.glob("api/*.md")), re.MULTILINE
    )
    found = [getattr(importlib.import_module(one[0]), one[2]) for one in map(split, listed)]
    wanted = [getattr(llmcompressor, name) for name in llmcompressor.__all__]
    wanted = [one for one in wanted if callable(one) or isinstance(one, type)]
    wanted += builtin_modifiers().values()
    wanted += [OBSERVERS.load(name) for name in OBSERVERS]
    assert [one for one in wanted if one not in found] == []


def split(path: str) -> tuple[str, str, str]:
    return path.rpartition(".")


def test_every_field_has_a_meaning() -> None:
    rows = re.findall(r"^\| `\w+` \|.*\|$", GENERATED.fields(), re.MULTILINE)
    assert len(rows) > 150
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_command_is_listed() -> None:
    text = GENERATED.commands()
    for name in ("oneshot", "train", "run", "plan", "verify", "evaluate", "report", "demo"):
        assert f"\n## llmcompressor {name}\n" in f"\n{text}"
    assert "`--num-calibration-samples <" in text


# --------------------------------------------------------------------------- facts


def told(node: ast.AST) -> str:
    """A text of the code; what is put in at run time is "…"."""
    if isinstance(node, ast.JoinedStr):
        return "".join(told(part) for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "…"


@cache
def texts_of_the_code() -> set[str]:
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found |= {told(one) for one in nodes if isinstance(one, ast.JoinedStr | ast.Constant)}
    return {text for text in found if len(text.replace("…", "")) >= 12}


def is_said(quoted: str) -> bool:
    """Part of a text of the code, or one with something put in for its "…"."""
    if any(quoted in text for text in texts_of_the_code()):
        return True
    likely = [one for one in texts_of_the_code() if quoted.startswith(one.partition("…")[0])]
    patterns = [".+".join(map(re.escape, text.split("…"))) for text in likely]
    return any(re.fullmatch(pattern, quoted) for pattern in patterns)


def test_errors_of_the_page_are_those_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    of_others = {"torch.OutOfMemoryError", "expected m1 and m2 to have the same dtype"}
    assert len(quoted) >= 25
    assert [one for one in quoted if one not in of_others and not is_said(one)] == []


def test_sizes_of_the_page_are_those_of_the_formats() -> None:
    llama = [(32, 4096, 4096, 1024, 14336, 128256), (80, 8192, 8192, 1024, 28672, 128256)]
    shapes = [llama[0], (64, 5120, 8192, 1024, 25600, 151936), llama[1]]
    section = (DOCS / "choosing.md").read_text(encoding="utf-8").split("## How large")[1]
    rows = re.findall(r"^\| (`.*?) \| ([\d.]+) \| (.*) \|$", section.split("\n## ")[0], re.M)
    assert len(rows) >= 8
    for names, bits, sizes in rows:
        for name in re.findall(r"`(\w+)`", names):
            exact = bits_of(name)
            assert float(bits) == pytest.approx(exact, abs=6e-4)
            expected = [
                (
                    layers * (2 * width * (heads + cached) + 3 * width * inner) * exact / 8
                    + 2 * 2 * vocabulary * width
                )
                / 1e9
                for layers, width, heads, cached, inner, vocabulary in shapes
            ]
            assert list(map(float, sizes.split(" | "))) == pytest.approx(expected, abs=0.06), name


def bits_of(name: str) -> float:
    """Stored bits of a weight in a matrix of many columns."""
    weights: Any = preset_scheme(name).weights
    scale = 8 if weights.type == "float" and weights.group_size in {16, 32} else 16
    cells = weights.group_size if weights.strategy in {"group", "tensor_group"} else 2**20
    zero = 0 if weights.symmetric else weights.num_bits
    return float(weights.num_bits + (scale + zero) / cells)


def test_extras_of_the_page_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| (`\w.*?`) \|", (DOCS / "install.md").read_text("utf-8"), re.MULTILINE)
    told = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(told) == sorted(extras["project"]["optional-dependencies"])


# ----------------------------------------------------------------------- the build


@pytest.mark.slow
def test_site_is_built_strictly_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    foreign = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?https?://[^>]*")
    for page in tmp_path.rglob("*.html"):
        assert foreign.findall(page.read_text(encoding="utf-8")) == [], page.name
    options = (tmp_path / "command_line.html").read_text(encoding="utf-8")
    assert "--num-calibration-samples" in options
    assert "dampening_frac" in (tmp_path / "recipe_fields.html").read_text(encoding="utf-8")
