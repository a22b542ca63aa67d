# SPDX-License-Identifier: Apache-2.0
"""The embedded model in real vLLM: ``make test-vllm PYTHON_VLLM=…``; each load takes 10 to 30 s."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.checkpoint_samples import Sample

from llmcompressor import oneshot, reset_session, verify
from llmcompressor.engines import check
from llmcompressor.modifiers.quantization import QuantizationModifier

PYTHON = os.environ.get("PYTHON_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="PYTHON_VLLM names no Python with vLLM"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def made(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The embedded model in a preset that needs no data."""
    root, known = tmp_path_factory.mktemp("vllm"), dict[str, Path]()

    def make(preset: str) -> Path:
        if preset not in known:
            reset_session()
            recipe = QuantizationModifier(targets="Linear", scheme=preset, ignore=["lm_head"])
            oneshot(model=str(pico), recipe=recipe, output_dir=str(root / preset))
            known[preset] = root / preset
        return known[preset]

    return make


@pytest.mark.parametrize("preset", ["W4A16", "W8A8", "FP8_DYNAMIC"])
def test_good_ones_run(preset: str, made: Callable[[str], Path], pico: Path) -> None:
    report = verify(made(preset), pico, engine="vllm", python=PYTHON)
    assert report.verdict == "good", str(report)
    assert report.engine is not None
    assert report.engine.modules >= 4 * 4  # qkv, o, gate_up and down of each block
    assert report.engine.original is not None


def test_what_a_cpu_has_no_kernel_for_is_loaded(made: Callable[[str], Path]) -> None:
    """Of a device that has one it is good."""
    report = verify(made("NVFP4A16"), engine="vllm", python=PYTHON)
    assert report.verdict in ("loaded, not run", "good"), str(report)
    assert report.engine is not None
    assert report.engine.modules >= 4 * 4


def test_faults_on_the_way_into_it(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One load for a fault in each block, which is told with its module and no other."""
    folder = made("W4A16")
    sample = Sample.read(folder)
    _spoil(sample)
    spoilt = sample.write(tmp_path / "spoilt")
    monkeypatch.setattr(check._Trial, "_served", lambda trial: spoilt)
    report = verify(folder, engine="vllm", python=PYTHON)
    wrong = sorted(one.module for one in report.findings if one.rule == "E2")
    layers = "model.layers"
    assert wrong == [
        f"{layers}.0.self_attn.o_proj",
        f"{layers}.1.mlp.gate_up_proj",
        f"{layers}.2.self_attn.qkv_proj",
        f"{layers}.3.mlp.down_proj",
    ]


def _spoil(sample: Sample) -> None:
    """Rows, a scale, q and k as far as they are alike, and a rotation of the inputs."""
    layers, tensors = "model.layers", sample.tensors
    rows = tensors[f"{layers}.0.self_attn.o_proj.weight_packed"]
    rows[[3, 4]] = rows[[4, 3]]
    tensors[f"{layers}.1.mlp.up_proj.weight_scale"][5] *= 2
    for name in ("weight_packed", "weight_scale"):
        q, k = (tensors[f"{layers}.2.self_attn.{one}_proj.{name}"] for one in "qk")
        q[: len(k)], k[:] = k.clone(), q[: len(k)].clone()
    turned = tensors[f"{layers}.3.mlp.down_proj.weight_packed"]
    tensors[f"{layers}.3.mlp.down_proj.weight_packed"] = turned.roll(16, dims=1)
