# SPDX-License-Identifier: Apache-2.0
"""Any changed bit of a checkpoint is told by its manifest alone, where it lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support import small_models as small
from tests.support.manifests import check_written

from llmcompressor import oneshot, verify
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.verification import Finding, Severity

INDEX = "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj"
NORM = "model.layers.0.input_layernorm.weight"
OTHER_NORM = "model.layers.1.input_layernorm.weight"


def compressed(folder: Path, *, seed: int = 0) -> Path:
    """Shards of a model with codes, scales and zero points."""
    source = folder / f"source-{seed}"
    dense = small.llama(seed=seed)
    for name, weight in dense.named_parameters():
        if "norm" in name:  # which are all ones
            weight.data.uniform_(0.5, 2)
    dense.save_pretrained(source, max_shard_size="300KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    recipe = GPTQModifier(targets="Linear", scheme="W4A16_ASYM", ignore=["lm_head"])
    model = oneshot(model=str(source), recipe=recipe, dataset=small.token_rows(), max_seq_length=16)
    model.save_pretrained(folder / f"made-{seed}", max_shard_size="150KB")
    return folder / f"made-{seed}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def told(folder: Path) -> list[Finding]:
    """What the manifest tells."""
    return [one for one in verify(folder, workers=1).findings if one.rule.startswith("M")]


def named(folder: Path) -> set[tuple[str, str]]:
    return {(one.rule, one.module) for one in told(folder)}


def home(folder: Path, tensor: str) -> Path:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / weight_map[tensor]


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def span(folder: Path, tensor: str) -> tuple[Path, int, int]:
    """The file of a tensor, and its first byte and the one behind its last."""
    path = home(folder, tensor)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    first, last = json.loads(data[8:start])[tensor]["data_offsets"]
    return path, start + first, start + last


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict


# ------------------------------------------------------------------ flips of single bits

KINDS = {
    "codes": f"{UP}.weight_packed",
    "scales": f"{UP}.weight_scale",
    "zero points": f"{UP}.weight_zero_point",
    "shape": f"{UP}.weight_shape",
    "embedding": "model.embed_tokens.weight",
    "norm": NORM,
    "head": "lm_head.weight",
}
FLIPS = [(kind, where) for kind in KINDS for where in (0.0, 0.5, 1.0)]


@pytest.mark.parametrize(("kind", "where"), FLIPS)
def test_a_flipped_bit(kind: str, where: float, folder: Path) -> None:
    tensor = KINDS[kind]
    path, first, last = span(folder, tensor)
    flip(path, first + round(where * (last - first - 1)), bit=round(where * 7))
    [found] = told(folder)
    assert (found.rule, found.module) == ("M2", tensor)
    assert found.severity is Severity.ERROR
    source = json.loads((folder / "manifest.json").read_text())["source"]["modules"]
    [made_of] = [file for file, held in source.items() if tensor.rpartition(".")[0] in held]
    assert made_of in found.message


# ------------------------------------------------------------------ files

Plant = Callable[[Path, Path], set[tuple[str, str]]]
"""Spoils a folder, with the help of another run's; returns what has to be told."""


def header_bit(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    data = path.read_bytes()
    flip(path, data.index(b"format") + 3)
    return {("M3", path.name)}


def padding_of_the_header(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    save_file(tensors_of(path), path, {"format": "pt", "more": "text"})
    return {("M3", path.name)}


def truncated(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    path.write_bytes(path.read_bytes()[:-1])
    return {("F3", path.name)}


def longer(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    path.write_bytes(path.read_bytes() + b"\0")
    return {("F4", path.name)}


def swap(folder: Path, one: str, another: str) -> None:
    """Exchange the bytes of two tensors of one size."""
    places = [span(folder, name) for name in (one, another)]
    held = [path.read_bytes()[first:last] for path, first, last in places]
    assert len(held[0]) == len(held[1])
    assert held[0] != held[1]
    for (path, first, last), content in zip(places, reversed(held), strict=True):
        data = bytearray(path.read_bytes())
        data[first:last] = content
        path.write_bytes(data)


def swapped_norms(folder: Path, other: Path) -> set[tuple[str, str]]:
    swap(folder, NORM, OTHER_NORM)
    return {("M2", NORM), ("M2", OTHER_NORM)}


def swapped_codes(folder: Path, other: Path) -> set[tuple[str, str]]:
    names = [f"model.layers.0.mlp.{own}_proj.weight_packed" for own in ("gate", "up")]
    swap(folder, *names)
    return {("M2", name) for name in names}


def swapped_shards(folder: Path, other: Path) -> set[tuple[str, str]]:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    aside = first.rename(folder / "aside")
    second.rename(first)
    aside.rename(second)
    return {("M3", first.name), ("M3", second.name)}


def shard_of_another_run(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, f"{UP}.weight_packed")
    shutil.copyfile(other / path.name, path)
    return {("M2", path.name)}


def shard_renamed(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    path.rename(folder / "weights.safetensors")
    text = (folder / INDEX).read_text().replace(path.name, "weights.safetensors")
    (folder / INDEX).write_text(text)
    return {("M3", path.name), ("M3", "weights.safetensors"), ("M4", INDEX)}


def shard_lost(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    path.unlink()
    return {("M3", path.name), ("M2", NORM)}


def tensor_lost(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    save_file({k: v for k, v in tensors_of(path).items() if k != NORM}, path, {"format": "pt"})
    return {("M3", path.name), ("M2", NORM)}


def tensor_added(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = home(folder, NORM)
    save_file({**tensors_of(path), "extra": torch.ones(1)}, path, {"format": "pt"})
    return {("M3", path.name), ("M2", "extra")}


def another_dtype(folder: Path, other: Path) -> set[tuple[str, str]]:
    """The same bytes, read as other numbers."""
    path = home(folder, NORM)
    held = tensors_of(path)
    save_file(held | {NORM: held[NORM].view(torch.float16)}, path, {"format": "pt"})
    return {("M3", path.name)}


def all_of_another_run(folder: Path, other: Path) -> set[tuple[str, str]]:
    for path in folder.glob("*.safetensors"):
        shutil.copyfile(other / path.name, path)
    return {("M2", path.name) for path in folder.glob("*.safetensors")}


def manifest_of_another_run(folder: Path, other: Path) -> set[tuple[str, str]]:
    shutil.copyfile(other / "manifest.json", folder / "manifest.json")
    return {("M2", path.name) for path in folder.glob("*.safetensors")}


def manifest_damaged(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-3])
    return {("M1", "manifest.json")}


def manifest_bit(folder: Path, other: Path) -> set[tuple[str, str]]:
    path = folder / "manifest.json"
    text = path.read_text()
    place = text.index('"', text.index(f'"{NORM}"') + len(NORM) + 2) + 1
    flip(path, place)
    return {("M2", NORM)}


def code_added(folder: Path, other: Path) -> set[tuple[str, str]]:
    (folder / "modeling_own.py").write_text("x = 1\n")
    return {("M4", "modeling_own.py")}


def tokenizer_added(folder: Path, other: Path) -> set[tuple[str, str]]:
    (folder / "added_tokens.json").write_text("{}")
    return {("M4", "added_tokens.json")}


def edited(name: str) -> Plant:
    """A space at the end of a file."""

    def plant(folder: Path, other: Path) -> set[tuple[str, str]]:
        with (folder / name).open("a") as file:
            file.write(" ")
        return {("M4", name)}

    plant.__name__ = f"edited {name}"
    return plant


def removed(name: str) -> Plant:
    def plant(folder: Path, other: Path) -> set[tuple[str, str]]:
        (folder / name).unlink()
        return {("M4", name)}

    plant.__name__ = f"removed {name}"
    return plant


BESIDE = (
    *("config.json", INDEX, "tokenizer.json", "generation_config.json", "chat_template.jinja"),
    *("recipe.yaml", "compression_report.json"),
)
FAULTS: list[Plant] = [
    *(header_bit, padding_of_the_header, truncated, longer, swapped_norms, swapped_codes),
    *(
        swapped_shards,
        shard_of_another_run,
        shard_renamed,
        shard_lost,
        tensor_lost,
        tensor_added,
        another_dtype,
    ),
    *(all_of_another_run, manifest_of_another_run, manifest_damaged, manifest_bit),
    *(code_added, tokenizer_added),
    *map(edited, BESIDE),
    *map(removed, ("tokenizer.json", "generation_config.json", "chat_template.jinja")),
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_fault_of_files(plant: Plant, folder: Path, other: Path) -> None:
    wanted = plant(folder, other)
    report = verify(folder, workers=1)
    assert wanted <= {(one.rule, one.module) for one in report.findings}
    assert report.ok == all(rule == "M4" for rule, _ in wanted)
    assert "as it was written" not in "\n".join(report.figures())


def test_there_are_forty_faults() -> None:
    assert len(FLIPS) + len(FAULTS) >= 40


# ------------------------------------------------------------------ what is no fault


def test_a_good_checkpoint(made: Path) -> None:
    report = verify(made)
    assert report.has_manifest
    assert not told(made)
    assert "every tensor and file is as it was written" in str(report)
    check_written(made)


def test_pieces_that_are_read_in_any_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order and threads tensors are read in, their hashes are those of their bytes."""
    for pieces in (64, 1000):
        monkeypatch.setattr("llmcompressor.verification.expected.CHUNK", pieces)
        monkeypatch.setattr("llmcompressor.verification.values._CHUNK", pieces)
        for workers in (1, 4):
            assert not [one for one in verify(folder, workers=workers).findings if one.rule == "M2"]


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", "report.html", "picture.png"])
def test_files_for_people(name: str, folder: Path) -> None:
    (folder / name).write_text("something")
    assert not told(folder)


def test_a_swap_names_the_other(folder: Path) -> None:
    swap(folder, NORM, OTHER_NORM)
    assert any(OTHER_NORM in one.message for one in told(folder) if one.module == NORM)


@pytest.mark.parametrize("text", ['{"files": []}', "[1]"])
def test_a_manifest_of_another_tool(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    assert not told(folder)
    assert not verify(folder).has_manifest


def test_without_a_manifest(folder: Path, made: Path) -> None:
    """All else is told as before."""
    (folder / "manifest.json").unlink()
    plain: Any = [(one.rule, one.module) for one in verify(made).findings]
    report = verify(folder)
    assert not report.has_manifest
    assert [(one.rule, one.module) for one in report.findings] == plain
