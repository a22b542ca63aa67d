# SPDX-License-Identifier: Apache-2.0
"""A run that goes on makes one model of one source, or says which weight is another one now."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.killed_runs import NEEDS_DATA, RECIPES, rows, tree, write_model

from llmcompressor import oneshot
from llmcompressor.checkpoint import journal
from llmcompressor.checkpoint.block_reader import BlockWeights
from llmcompressor.checkpoint.tensor_files import TensorReader
from llmcompressor.errors import CheckpointError, OutputError
from llmcompressor.modifiers.transform.awq import AWQ_MAPPING_REGISTRY, AWQMapping
from llmcompressor.modifiers.transform.spinquant.norm_mappings import (
    NORM_MAPPING_REGISTRY,
    NormMapping,
)

FIRST, LAST = "model.layers.0", "model.layers.2"


class InterruptError(Exception):
    """Stands for a kill."""


def call(recipe: str, folder: Path, output: str = "output", **arguments: Any) -> None:
    oneshot(
        model=str(folder / "model"),
        recipe=RECIPES[recipe](),
        dataset=rows() if recipe in NEEDS_DATA else None,
        output_dir=str(folder / output),
        verify=False,
        **arguments,
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model and the folder of a run over it that ended behind its first block, by recipe."""
    made: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp(recipe)
            write_model(made[recipe] / "model")
            add = journal.Journal.add

            def dying(self: journal.Journal, entry: journal.BlockEntry) -> None:
                if self.entries:
                    raise InterruptError
                add(self, entry)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(journal.Journal, "add", dying)
                with pytest.raises(InterruptError):
                    call(recipe, made[recipe])
            entries = journal.Journal(made[recipe] / "output.partial" / "journal").entries
            assert list(entries) == [(0, FIRST)]
        return made[recipe]

    return of


@pytest.fixture
def halfway(stopped: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A folder of one's own with the model, the very files, and the progress."""

    def of(recipe: str) -> Path:
        for name in ("model", "output.partial"):
            shutil.copytree(stopped(recipe) / name, tmp_path / name)
        return tmp_path

    return of


def change(model: Path, wanted: str) -> None:
    """Other values in the tensors that have ``wanted`` in their names, in files like before."""
    for file in sorted(model.glob("*.safetensors")):
        tensors = load_file(file)
        hit = [name for name in tensors if wanted in name]
        for name in hit:
            tensors[name] = -tensors[name]
        if hit:
            size = file.stat().st_size
            save_file(tensors, file, metadata={"format": "pt"})
            assert file.stat().st_size == size


@pytest.fixture
def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    read = TensorReader.read

    def watched(self: TensorReader, name: str, *args: Any, **how: Any) -> torch.Tensor:
        found.append(name)
        return read(self, name, *args, **how)

    monkeypatch.setattr(TensorReader, "read", watched)
    return found


@pytest.mark.parametrize(
    ("recipe", "changed", "named"),
    [
        ("gptq", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        pytest.param("gptq", f"{FIRST}.mlp.up_proj.weight", FIRST, marks=pytest.mark.slow),
        ("gptq", f"{LAST}.mlp.up_proj.weight", LAST),
        pytest.param(
            "rtn",
            "model.embed_tokens.weight",
            "model.embed_tokens.weight",
            marks=pytest.mark.slow,
        ),
        ("rtn", "lm_head.weight", "lm_head.weight"),
        pytest.param("rtn", f"{FIRST}.mlp.up_proj.weight", FIRST, marks=pytest.mark.slow),
        ("rtn", "model.", "model.norm.weight"),
    ],
)
def test_what_was_read_and_is_another_now_is_refused_by_name(
    recipe: str, changed: str, named: str, halfway: Callable[[str], Path]
) -> None:
    folder = halfway(recipe)
    shutil.copytree(folder / "model", folder / "kept")
    before = tree(folder / "output.partial")
    change(folder / "model", changed)
    with pytest.raises((CheckpointError, OutputError)) as caught:
        call(recipe, folder, resume="must")
    assert named in str(caught.value)
    assert 'resume="never"' in str(caught.value)
    assert not (folder / "output").exists()
    assert {**tree(folder / "output.partial"), "lock": ""} == {**before, "lock": ""}

    shutil.rmtree(folder / "model")
    (folder / "kept").rename(folder / "model")
    call(recipe, folder, resume="must")
    call(recipe, folder, "whole")
    assert tree(folder / "output") == tree(folder / "whole")


def test_finished_blocks_are_reread_only_if_files_were_touched(
    stopped: Callable[[str], Path],
    halfway: Callable[[str], Path],
    names_read: list[str],
) -> None:
    """A copy of the same bytes is gone on with; the very same files need no second look."""
    folder = halfway("rtn")  # other files
    call("rtn", folder, resume="must")
    again = [name for name in names_read if name.startswith(f"{FIRST}.")]
    assert len(again) == len(set(again)) == 9  # seven Linears and two norms, once

    shutil.rmtree(folder / "model")
    (folder / "model").symlink_to(stopped("rtn") / "model")  # the same files
    shutil.copytree(stopped("rtn") / "output.partial", folder / "second.partial")
    names_read.clear()
    call("rtn", folder, "second", resume="must")
    assert not [name for name in names_read if name.startswith(f"{FIRST}.")]
    assert tree(folder / "second") == tree(folder / "output")


def test_a_source_that_is_changed_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    release = BlockWeights.release

    def changing(self: BlockWeights, block: str) -> None:
        if block == FIRST:
            change(tmp_path / "model", f"{LAST}.mlp.up_proj.weight")
        release(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(BlockWeights, "release", changing)
        with pytest.raises(CheckpointError, match="while this run reads it"):
            call("rtn", tmp_path)
    assert not (tmp_path / "output").exists()
    call("rtn", tmp_path, resume="must")  # what it had read is the same still
    call("rtn", tmp_path, "whole")
    assert tree(tmp_path / "output") == tree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("recipe", "registry", "mappings"),
    [
        (
            "smoothed",
            AWQ_MAPPING_REGISTRY,
            [AWQMapping("re:.*post_attention_layernorm", ["re:.*(gate|up)_proj"])],
        ),
        (
            "rotated",
            NORM_MAPPING_REGISTRY,
            [
                NormMapping(norm="re:.*input_layernorm", linears=["re:.*[qkv]_proj"]),
                NormMapping(norm="re:.*post_attention_layernorm", linears=["re:.*(gate|up)_proj"]),
                NormMapping(norm="model.norm", linears=["lm_head"]),
            ],
        ),
    ],
)
def test_mappings_registered_meanwhile_make_it_another_run(
    recipe: str,
    registry: dict[str, Any],
    mappings: list[Any],
    halfway: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = halfway(recipe)
    monkeypatch.setitem(registry, "LlamaForCausalLM", mappings)
    with pytest.raises(OutputError, match="registered"):
        call(recipe, folder, resume="must")
    monkeypatch.delitem(registry, "LlamaForCausalLM")
    call(recipe, folder, resume="must")
