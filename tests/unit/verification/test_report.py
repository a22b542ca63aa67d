# SPDX-License-Identifier: Apache-2.0
"""What is made of findings: merged lines, counts, JSON; and that reading is streamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.checkpoint_samples import dense, made
from torch import Tensor

from llmcompressor import verify
from llmcompressor.verification import Finding, Severity, VerificationReport
from llmcompressor.verification.files import Files


def report(*findings: Finding) -> VerificationReport:
    return VerificationReport("folder", None, findings, 10, 5, 3, 1000, 0.5)


def finding(rule: str, module: str, severity: Severity, message: str = "It is bad.") -> Finding:
    return Finding(rule, module, message, "Mend it.", severity)


def test_only_errors_make_a_checkpoint_bad() -> None:
    note, warning = finding("A", "x", Severity.NOTE), finding("B", "x", Severity.WARNING)
    assert report(note, warning).ok
    assert not report(note, finding("C", "x", Severity.ERROR)).ok
    assert report(note, note, warning).counts == {"error": 0, "warning": 1, "note": 2}


def test_equal_words_are_one_row_and_errors_come_first() -> None:
    made_of = report(
        finding("S1", "a", Severity.NOTE),
        finding("S2", "b", Severity.ERROR),
        finding("S2", "c", Severity.ERROR),
        finding("S2", "", Severity.ERROR, "Other words."),
    )
    rows = [(row.severity, row.rule, row.where) for row in made_of.rows()]
    assert rows == [
        ("error", "S2", "b and 1 more"),
        ("error", "S2", "the model"),
        ("note", "S1", "a"),
    ]
    assert "error S2 b and 1 more: It is bad. Mend it." in str(made_of)


def test_a_rule_with_many_rows_is_cut_and_json_is_not() -> None:
    many = report(*(finding("S2", f"m{i}", Severity.ERROR, f"It is {i}.") for i in range(700)))
    rows = many.rows(most=3)
    assert len(rows) == 4
    assert rows[-1].text.startswith("697 more")
    assert len(many.as_dict()["findings"]) == 700


def test_json_is_data(tmp_path: Path) -> None:
    sample = made(dense(), "W4A16")
    sample.drop("model.layers.0.mlp.up_proj.weight_scale")
    folder = sample.write(tmp_path / "checkpoint")
    content = json.loads(json.dumps(verify(folder, tp=1).as_dict()))
    assert content["ok"] is False
    assert content["quantized"] == 14
    [lost] = [one for one in content["findings"] if one["rule"] == "S70"]
    assert lost["severity"] == "error"
    assert lost["modules"] == ["model.layers.0.mlp.up_proj"]
    assert lost["remedy"]


def test_two_readers_find_what_one_finds(tmp_path: Path) -> None:
    sample = made(dense(), "W4A16")
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        sample.tensors[f"{name}.weight_scale"].fill_(float("nan"))
    folder = sample.write(tmp_path / "checkpoint")
    assert verify(folder, workers=1).findings == verify(folder, workers=4).findings


def test_no_tensor_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are bounded whatever the size of a tensor, with and without the original."""
    shapes = {"model.embed_tokens": (40000, 256), "model.layers.0.mlp.up_proj": (40000, 256)}
    sample = made(shapes, "W8A8", model_type="other", num_hidden_layers=1, architectures=[])
    source = made(
        shapes, only=lambda name: False, model_type="other", num_hidden_layers=1, architectures=[]
    )
    del source.config["quantization_config"]
    sizes: list[int] = []
    plain = Files.read

    def counted(self: Files, name: str, *arguments: int, **more: bool) -> Tensor:
        tensor = plain(self, name, *arguments, **more)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Files, "read", counted)
    folder = sample.write(tmp_path / "checkpoint")
    report = verify(folder, source.write(tmp_path / "source"), tp=1)
    assert report.ok, str(report)
    largest = max(tensor.nbytes for tensor in sample.tensors.values())
    assert largest == 40000 * 256 * 2
    assert max(sizes) <= 8 << 20 < largest
    assert torch.tensor(sizes).sum() >= sum(each.nbytes for each in sample.tensors.values())
