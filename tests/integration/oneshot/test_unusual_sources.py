# SPDX-License-Identifier: Apache-2.0
"""Sources with tensors that no index names, and of rare dtypes: all of them are in the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import small_models
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmcompressor import model_free_ptq, oneshot
from llmcompressor.errors import CheckpointError
from llmcompressor.verification import Severity, verify_files

RECIPE = "modifiers: {QuantizationModifier: {scheme: W8A16, targets: Linear, ignore: [lm_head]}}"


def rare(dtype: torch.dtype, *, columns: int = 8) -> Tensor:
    return torch.arange(2 * columns, dtype=torch.uint8).reshape(2, columns).view(dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with an index that names neither a norm of the model nor a draft's tensors."""
    folder = tmp_path_factory.mktemp("source") / "model"
    model = small_models.one_block(hidden_size=32, intermediate_size=32, vocab_size=64)
    model.save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"model.norm.weight"', '"model.rotary_emb.inv_freq"')
    )
    (shard,) = folder.glob("model-00002-*")
    draft = {
        "mtp.frequencies": torch.randn(4, dtype=torch.complex64),
        "mtp.table": rare(torch.float4_e2m1fn_x2),
    }
    save_file(load_file(shard) | draft, shard, {"format": "pt"})
    further = {
        "mtp.fc.weight": torch.randn(8, 32, dtype=torch.bfloat16),
        "mtp.one": rare(torch.float8_e4m3fnuz),
        "mtp.other": rare(torch.float8_e5m2fnuz),
    }
    save_file(further, folder / "mtp.safetensors", {"format": "pt"})
    return folder


def kept(source: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        found |= load_file(file)
    return {name: one for name, one in found.items() if name.startswith(("mtp", "model.norm"))}


def check(source: Path, output: Path) -> None:
    written = load_file(output / "model.safetensors")
    for name, one in kept(source).items():
        assert written[name].dtype is one.dtype
        assert written[name].shape == one.shape
        assert torch.equal(written[name].view(torch.uint8), one.view(torch.uint8))
    report = verify_files(output, source)
    assert not [one for one in report.findings if one.severity is Severity.ERROR]
    assert not [one for one in report.findings if one.rule.startswith("R")]


def report_of(folder: Path) -> Any:
    return json.loads((folder / "compression_report.json").read_text())


def streamed(source: Path, output: Path) -> None:
    oneshot(model=str(source), recipe=RECIPE, output_dir=str(output))


def in_memory(source: Path, output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    oneshot(model=model, recipe=RECIPE, output_dir=str(output))


@pytest.mark.parametrize("run", [streamed, in_memory])
def test_oneshot_keeps_what_no_index_names(
    run: Any, source: Path, tmp_path: Path, warned: list[str]
) -> None:
    run(source, tmp_path / "out")
    check(source, tmp_path / "out")
    assert report_of(tmp_path / "out")["left_behind"] == []
    told = "".join(warned)
    assert "does not name" in told
    assert "Nothing names mtp.safetensors" in told


def left_in(folder: Path) -> Path:
    """A model beside weights in another format, with two tensors under a second name."""
    model = small_models.one_block(hidden_size=32, intermediate_size=32, vocab_size=64)
    model.save_pretrained(folder)
    (folder / "pytorch_model.bin").write_text("weights")
    file = folder / "model.safetensors"
    others = {
        "norm.weight": torch.full((32,), 7.0, dtype=torch.bfloat16),
        "embed_tokens.weight": torch.full((64, 32), 0.5, dtype=torch.bfloat16),
    }
    save_file(load_file(file) | others, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("run", [streamed, in_memory])
def test_a_run_tells_what_it_leaves_behind(run: Any, tmp_path: Path, warned: list[str]) -> None:
    source = left_in(tmp_path / "model")
    run(source, tmp_path / "out")
    left = ["pytorch_model.bin", "model.embed_tokens.weight", "norm.weight"]
    assert sorted(report_of(tmp_path / "out")["left_behind"]) == sorted(left)
    assert any("Left behind" in line and all(one in line for one in left) for line in warned)
    embedding = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert bool((embedding == 0.5).all())  # as in transformers
    assert verify_files(tmp_path / "out", source).ok


@pytest.mark.parametrize("run", [streamed, in_memory])
def test_verify_knows_what_the_run_left_behind(run: Any, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    small_models.one_block(hidden_size=32, intermediate_size=32, vocab_size=64).save_pretrained(
        source
    )
    file, bias = source / "model.safetensors", "model.layers.0.mlp.down_proj.bias"
    save_file(load_file(file) | {bias: torch.ones(32)}, file, {"format": "pt"})
    run(source, out)
    told = verify_files(out, source)
    assert told.ok
    assert [(one.rule, one.severity) for one in told.findings if one.module == bias] == [
        ("R1", Severity.WARNING)
    ]
    (out / "compression_report.json").unlink()
    assert not verify_files(out, source).ok  # nobody says that it was meant


def test_model_free_ptq_tells_what_it_leaves_behind(tmp_path: Path) -> None:
    source = left_in(tmp_path / "model")
    model_free_ptq(source, tmp_path / "out", "W8A16", ignore=["re:.*embed", "lm_head"])
    assert report_of(tmp_path / "out")["left_behind"] == ["pytorch_model.bin"]
    assert verify_files(tmp_path / "out", source).ok


def test_model_free_ptq_keeps_what_no_index_names(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none holds it"):
        model_free_ptq(source, tmp_path / "out", "W8A16")
    assert not list(tmp_path.iterdir())
    whole = tmp_path / "model"
    whole.mkdir()
    for file in source.iterdir():
        text = file.read_bytes()
        (whole / file.name).write_bytes(
            text.replace(b'"model.rotary_emb.inv_freq"', b'"model.norm.weight"')
        )
    model_free_ptq(whole, tmp_path / "out", "W8A16", ignore=["re:mtp", "lm_head"])
    check(whole, tmp_path / "out")


def test_a_dtype_that_torch_lacks_is_refused_at_once(source: Path, tmp_path: Path) -> None:
    whole = tmp_path / "model"
    whole.mkdir()
    for file in source.iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    held = bytes(12)
    header = b'{"mtp.six":{"dtype":"F6_E2M3","shape":[16],"data_offsets":[0,12]}}'
    (whole / "six.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + held)
    for run in (streamed, in_memory):
        with pytest.raises(CheckpointError, match=r"mtp\.six .* F6_E2M3"):
            run(whole, tmp_path / "out")
    assert not (tmp_path / "out").exists()
