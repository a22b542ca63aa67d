# SPDX-License-Identifier: Apache-2.0
"""AutoRound on whole models: better than rounding, the same wherever it runs, wrong use ends."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from datasets import Dataset
from safetensors.torch import load_file
from tests.support import embedded
from tests.support import tiny_llama as tiny
from tests.support import tiny_mixtures as mixtures
from tests.support.thinned import few
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot, verify
from llmcompressor.checkpoint.packing import compress, quantized_modules
from llmcompressor.core.state import State
from llmcompressor.errors import NonFiniteError, RecipeError
from llmcompressor.modifiers.autoround import AutoRoundModifier, tune
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.schemes.presets import PRESETS

WEIGHTS: dict[str, Any] = {"num_bits": 3, "strategy": "group", "group_size": 32}
GROUPS: dict[str, Any] = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}


def autoround(**fields: Any) -> AutoRoundModifier:
    """Three bits in groups of 32, everything but the head, few steps."""
    given = {"ignore": ["lm_head"], "iters": 12, **fields}
    if "scheme" not in given:
        given.setdefault("config_groups", GROUPS)
    return AutoRoundModifier(**given)


@cache
def plain_run() -> tuple[Any, AutoRoundModifier]:
    """The model, in whatever order its blocks are usually tuned, and what has tuned it."""
    modifier = autoround()
    return tiny.run(tiny.llama(), modifier), modifier


def error(model: Any, reference: Tensor) -> float:
    change = tiny.logits(model, tiny.batches()) - reference
    return float(change.square().mean() / reference.square().mean())


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@cache
def embedded_losses(folder: Path) -> tuple[Tensor, float]:
    ids = embedded.held_out(folder, 16)
    return ids, embedded.loss(embedded.model(folder), ids)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(3, 64, True), (4, 128, False)])
def test_it_beats_rounding(bits: int, group: int, symmetric: bool, pico: Path) -> None:
    """Half of what rounding loses, from 4 samples of 128 tokens."""
    ids, dense = embedded_losses(pico)
    weights = {**WEIGHTS, "num_bits": bits, "group_size": group, "symmetric": symmetric}
    fields = {"config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
    data = [{key: one[:, :128] for key, one in b.items()} for b in embedded.calibration(pico, 4)]
    lost = {}
    for modifier in (
        QuantizationModifier(ignore=["lm_head"], **fields),
        autoround(iters=20, **fields),
    ):
        model = tiny.run(embedded.model(pico), modifier, data=data)
        lost[type(modifier)] = embedded.loss(model, ids) - dense
    assert lost[AutoRoundModifier] < 0.55 * lost[QuantizationModifier]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "NVFP4A16"])
def test_the_file_holds_the_weights_that_are_in_memory(scheme: str, dtype: torch.dtype) -> None:
    modifier = autoround(scheme=scheme, iters=2, lr=0.003)
    model = tiny.run(tiny.llama(dtype, num_hidden_layers=1), modifier, data=tiny.batches(number=1))
    assert all(record.iteration for record in modifier.records.values())
    entries = quantized_modules(model)
    assert len(entries) == 7
    for entry in entries:
        own = {key: tensor.data for key, tensor in entry.module.named_parameters(recurse=False)}
        reader = BaseCompressor.get_value_from_registry(entry.scheme.format)
        decoded = reader.decompress(compress(entry, own), entry.scheme)["weight"]
        assert torch.equal(decoded.to(dtype), entry.module.weight)


@pytest.mark.parametrize(
    "scheme",
    ["FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"] + [name for name in ("MXFP6A16",) if name in PRESETS],
)
def test_floats_are_learned_too(scheme: str) -> None:
    modifier = autoround(scheme=scheme, iters=20)
    tiny.run(tiny.llama(num_hidden_layers=1), modifier)
    shares = [record.error / record.error_nearest for record in modifier.records.values()]
    assert max(shares) < 0.9


def test_each_block_comes_closer_and_says_so() -> None:
    model, modifier = plain_run()
    reference = tiny.logits(tiny.llama(), tiny.batches())
    nearest = QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])
    assert error(model, reference) < 0.8 * error(tiny.run(tiny.llama(), nearest), reference)
    assert list(modifier.records) == list(tiny.linears(model))
    for name, record in modifier.records.items():
        assert name.startswith(record.block)
        assert record.samples == 16
        assert 0 < record.error < 0.9 * record.error_nearest
        assert 0 < record.moved < 0.5
    assert json.loads(json.dumps(modifier.report(), allow_nan=False)) == modifier.report()
    assert not modifier._calls


def test_the_seed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcompressor.pipelines.batches.RUN_TOKENS", 48)
    first, again, other = (
        tiny.run(tiny.llama(num_hidden_layers=1), autoround(seed=seed, batch_size=2))
        for seed in (1, 1, 2)
    )
    assert same(first, again)
    assert not same(first, other)


def test_steps_take_calls_in_turn() -> None:
    options = tune.Options(iters=1, rate=1.0, samples=4, seed=0)
    picks = tune._step_batches([2, 2, 2, 2, 2, 2], options)
    rounds = [[next(picks) for _ in range(3)] for _ in range(2)]
    for one in rounds:
        assert [len(picked) for picked in one] == [2, 2, 2]
        assert sorted(index for picked in one for index in picked) == list(range(6))
    assert next(tune._step_batches([2, 2], tune.Options(1, 1.0, 9, 0))) in ([0, 1], [1, 0])


def test_a_block_makes_up_for_those_before_it() -> None:
    """Run as a whole, the model gives each block what the original one does: that leaves more."""
    reference = tiny.logits(tiny.llama(), tiny.batches())
    errors = {
        pipeline: float(
            (
                tiny.logits(
                    tiny.run(tiny.llama(), autoround(iters=20), pipeline=pipeline), tiny.batches()
                )
                - reference
            )
            .square()
            .mean()
        )
        for pipeline in ("sequential", "basic")
    }
    assert errors["sequential"] < 0.9 * errors["basic"]


@pytest.mark.parametrize("pipeline", ["sequential", "layer_sequential"])
def test_every_pipeline_gives_the_same_model(pipeline: str) -> None:
    found = tiny.run(tiny.llama(), autoround(), pipeline=pipeline)
    assert same(found, plain_run()[0])


def test_padding_does_not_count() -> None:
    plain, _ = plain_run()
    padded = tiny.run(tiny.llama(), autoround(), data=tiny.padded(tiny.batches(), by=9))
    pairs = list(zip(plain.parameters(), padded.parameters(), strict=True))
    alike = sum(int(torch.isclose(one, other, rtol=1e-3).sum()) for one, other in pairs)
    # signs of gradients near zero depend on the order of summation, and so do fitted scales
    assert alike > 0.97 * sum(one.numel() for one, _ in pairs)


@pytest.mark.parametrize("family", few(mixtures.FAMILIES, "mixtral"))
def test_experts_are_learned_with_their_block(family: str) -> None:
    weights = {**WEIGHTS, "group_size": 8}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    original, same_one, another = (mixtures.mixture(family, mixtures=1) for _ in range(3))
    reference = tiny.logits(original, tiny.batches())
    modifier = autoround(config_groups=groups)
    model = tiny.run(same_one, modifier)
    nearest = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    rounded = tiny.run(another, nearest)
    assert error(model, reference) < 0.8 * error(rounded, reference)
    experts = [one for name, one in modifier.records.items() if ".experts." in name]
    assert len(experts) == 3 * mixtures.EXPERTS
    assert sum(one.moved > 0 for one in experts) > 0.9 * len(experts)


def rows(number: int = 6) -> Dataset:
    ids = tiny.batches(number=number)
    return Dataset.from_dict({"input_ids": [row.tolist() for b in ids for row in b["input_ids"]]})


def test_streamed_and_in_memory_are_the_same(tmp_path: Path) -> None:
    tiny.llama(torch.bfloat16).save_pretrained(tmp_path / "model")
    data: dict[str, Any] = {"dataset": rows(), "shuffle_calibration_samples": False}

    def run(model: Any, name: str) -> Any:
        modifier = autoround(scheme="W4A16", iters=2, lr=0.03)
        return oneshot(model=model, recipe=modifier, output_dir=tmp_path / name, **data)

    streamed = run(str(tmp_path / "model"), "streamed")
    run(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto"), "whole")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "whole")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())
    assert verify(tmp_path / "streamed").ok
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed").eval()
    assert torch.equal(
        tiny.logits(read, tiny.batches()), tiny.logits(streamed.eval(), tiny.batches())
    )
    report = json.loads((tmp_path / "streamed" / "compression_report.json").read_text())
    assert "model.layers.1.mlp.up_proj" in json.dumps(report)


def test_a_broken_off_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.llama(torch.bfloat16, num_hidden_layers=3).save_pretrained(tmp_path / "model")
    data: dict[str, Any] = {"dataset": rows(3), "shuffle_calibration_samples": False}
    data["verify"] = False

    def run(name: str) -> None:
        modifier = autoround(scheme="W4A16", iters=2, lr=0.03)
        oneshot(model=str(tmp_path / "model"), recipe=modifier, output_dir=tmp_path / name, **data)

    run("whole")
    tuned: list[str] = []
    write = AutoRoundModifier._tune

    def fail_at_last(self: AutoRoundModifier, block: Any, members: Any) -> None:
        name = self._blocks[block]
        if name.endswith("2") and tuned.count(name) == 0 and not resumed:
            raise KeyboardInterrupt
        tuned.append(name)
        write(self, block, members)

    resumed = False
    monkeypatch.setattr(AutoRoundModifier, "_tune", fail_at_last)
    with pytest.raises(KeyboardInterrupt):
        run("parts")
    resumed, before = True, list(tuned)
    run("parts")
    assert before == ["model.layers.0", "model.layers.1"]
    assert "model.layers.0" not in tuned[len(before) :]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())


def test_that_a_model_has_no_blocks_is_told(warned: list[str]) -> None:
    groups = {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}}
    for layers, is_told in (([torch.nn.Linear(8, 8)], True), ([torch.nn.Identity()], False)):
        model = torch.nn.Sequential(*layers)
        modifier = AutoRoundModifier(config_groups=groups, iters=2, allow_unmatched=True)
        modifier.initialize(State(model=model))
        told = [line for line in warned if "has no blocks" in line and "1 modules" in line]
        assert bool(told) == is_told
        warned.clear()


def test_what_no_gradient_reaches_is_told(warned: list[str]) -> None:
    """As where a model's own code is for inference alone."""
    for mode, called in ((torch.inference_mode, "mlp"), (torch.no_grad, "self_attn")):
        model = tiny.llama()
        part = getattr(model.model.layers[1], called)
        part.forward = mode()(part.forward)
        tiny.run(model, autoround(iters=1))
        (told,) = (text for text in warned if "No gradient" in text)
        assert told.count("model.layers.1.") == len(list(part.children())) - (called == "mlp")
        assert f"model.layers.1.{called}." in told
        warned.clear()


PARTS = ["LlamaMLP", "LlamaAttention"]


@pytest.mark.parametrize(
    "targets",
    few([PARTS, ["re:.*mlp$"], ["model.layers.1"], ["Linear"]], PARTS, ["Linear"]),
    ids=["parts", "mlp", "one block", "linears"],
)
def test_whole_blocks_are_tuned_whatever_is_named(targets: list[str], said: list[str]) -> None:
    """It is said, and what comes out is what comes out without names."""
    model, plain = plain_run()
    expected, named = model.state_dict(), autoround()
    said.clear()
    found = tiny.run(tiny.llama(), named, sequential_targets=targets).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert named.records == plain.records
    (told,) = [line for line in said if "Sequential calibration" in line]
    assert "2 stops at block level (the finest that the recipe allows is block)" in told


def test_wrong_use_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^AutoRoundModifier: the weight observer .* weighs"):
        autoround(scheme="W4A16", weight_observer="imatrix_mse")
    with pytest.raises(RecipeError, match="lr"):
        autoround(lr=-1.0)
    model = tiny.llama()
    model.model.layers[1].input_layernorm.weight.data[:] = 3e38
    with pytest.raises(NonFiniteError):
        tiny.run(model, autoround())
