# SPDX-License-Identifier: Apache-2.0
"""The decoded model is an ordinary one, and the first blocks of a model are a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.checkpoint_samples import Sample
from transformers import AutoConfig, AutoModelForCausalLM

from llmcompressor.engines import decoded as module
from llmcompressor.engines.decoded import (
    Source,
    blocks_of_each_kind,
    check_room,
    decoded_bytes,
    write_cut,
    write_decoded,
)
from llmcompressor.errors import ArgumentError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import QuIPModifier
from llmcompressor.verification.files import open_checkpoint
from llmcompressor.verification.rules.view import View

Good = Callable[[str], Sample]


@contextmanager
def opened(folder: Path, blocks: int | None = None) -> Iterator[Source]:
    with closing(open_checkpoint(folder)) as files:
        yield Source(files, View(files.config, files.headers, files.read), blocks)


def test_the_decoded_model_is_ordinary(good: Good, source: Path, tmp_path: Path) -> None:
    folder = good("W8A8").write(tmp_path / "model")
    with opened(folder) as one:
        write_decoded(one, tmp_path / "decoded")
        size = decoded_bytes(one)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "decoded"), "quantization_config")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    theirs = dict(original.named_parameters())
    for name, weight in model.named_parameters():
        assert weight.dtype is torch.bfloat16
        apart = (weight - theirs[name]).float().norm() / theirs[name].float().norm()
        assert apart < 0.02, name
    matrices = sum(one.nbytes for one in model.state_dict().values() if one.ndim == 2)
    assert size == matrices


@pytest.mark.parametrize("inputs", [True, False])
def test_rotations_are_in_the_weights(
    inputs: bool, source: Path, compressed: Callable[..., Path], tmp_path: Path
) -> None:
    """Random signs make them unlike their transposes."""
    quip = QuIPModifier(rotations=["v" if inputs else "u"], randomize=True)
    rounded = QuantizationModifier(targets="Linear", scheme="W8A16", ignore=["lm_head"])
    with opened(compressed(source, [quip, rounded], verify=False)) as one:
        write_decoded(one, tmp_path / "decoded")
    for name, weight in load_file(tmp_path / "decoded" / "model-00001.safetensors").items():
        theirs = load_file(source / "model.safetensors")[name].float()
        assert (weight.float() - theirs).norm() < 0.02 * theirs.norm(), name


def test_scales_of_a_cache_are_left_out(good: Good, tmp_path: Path) -> None:
    with opened(good("cache").write(tmp_path / "model")) as one:
        write_decoded(one, tmp_path / "decoded")
    names = {n for file in (tmp_path / "decoded").glob("*.safetensors") for n in load_file(file)}
    assert names
    assert all(name.endswith(".weight") for name in names)


def test_as_many_blocks_as_hold_each_kind(good: Good, tmp_path: Path) -> None:
    sample = good("W4A16")
    with opened(sample.write(tmp_path / "same")) as one:
        assert blocks_of_each_kind(one.files, one.view) == 1
    sample.config["layer_types"] = ["full_attention", "sliding_attention"]
    with opened(sample.write(tmp_path / "types")) as one:
        assert blocks_of_each_kind(one.files, one.view) is None


def test_the_first_blocks_are_a_model(good: Good, tmp_path: Path) -> None:
    folder = good("W4A16").write(tmp_path / "model")
    with opened(folder, 1) as one:
        write_cut(one, tmp_path / "cut")
        write_decoded(one, tmp_path / "decoded")
    for cut in ("cut", "decoded"):
        model, told = AutoModelForCausalLM.from_pretrained(
            tmp_path / cut, dtype="auto", output_loading_info=True
        )
        assert model.config.num_hidden_layers == 1
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]


def test_no_room_is_told_before(
    good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = good("W4A16").write(tmp_path / "model")
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda place: usage)
    with opened(folder) as one, pytest.raises(ArgumentError, match="TMPDIR"):
        check_room(one)
