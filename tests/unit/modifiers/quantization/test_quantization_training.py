# SPDX-License-Identifier: Apache-2.0
"""Training with fake quantization: what the forward computes, and what is left of it."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import quantization_loop as loop
from tests.support import tiny_llama as tiny
from tests.support.caches import as_read
from tests.support.thinned import thinned
from torch import Tensor
from torch.nn import Linear
from transformers import AutoModelForCausalLM

from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.checkpoint.save import save_checkpoint
from llmcompressor.core import EventType
from llmcompressor.errors import NonFiniteError, RecipeError, TargetError
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.quantization.parameters import observe_weight
from llmcompressor.schemes.presets import PRESETS

NEWER = [name for name in ("MXFP6A8", "MXFP6A16", "MXFP4XFP8") if name in PRESETS]
INT8: dict[str, Any] = {"num_bits": 8, "strategy": "tensor"}
ASYMMETRIC: dict[str, Any] = {"num_bits": 8, "strategy": "tensor", "symmetric": False}
INT4: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
LINEAR = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
COUNTED = {**INT8, "observer": "histogram", "observer_kwargs": {"bins": 128}}
SCHEMES: dict[str, dict[str, Any]] = {
    **{
        name: {"scheme": name}
        for name in (
            "W4A16",
            "W8A8",
            "W4A16_ASYM",
            "W4A8",
            "W4A4",
            "FP8",
            "FP8_DYNAMIC",
            "FP8_BLOCK",
            "NVFP4",
            "NVFP4A16",
            "MXFP4",
            "MXFP8",
            *NEWER,
        )
    },
    "static int8": {"config_groups": {"a": {**LINEAR, "input_activations": INT8}}},
    "static asymmetric": {"config_groups": {"a": {**LINEAR, "input_activations": ASYMMETRIC}}},
    "outputs": {
        "config_groups": {"a": {**LINEAR, "input_activations": INT8, "output_activations": INT8}}
    },
    "cache": {"scheme": "W8A8", "kv_cache_scheme": FP8},
    "cache by head": {"scheme": "W8A8", "kv_cache_scheme": {**INT8, "strategy": "attn_head"}},
    "attention": {
        "config_groups": {
            "a": {**LINEAR},
            "states": {"targets": ["LlamaAttention"], "input_activations": FP8},
        }
    },
    "embedding": {"config_groups": {"a": {"targets": ["Embedding"], "weights": INT4}}},
    "search": {"scheme": "W4A16", "weight_observer": "memoryless_mse"},
    "histogram": {
        "config_groups": {
            "a": {**LINEAR, "targets": ["re:.*down_proj"], "input_activations": COUNTED}
        },
    },
}
LEARNED = [
    "W4A16",
    "W4A16_ASYM",
    "W8A8",
    "FP8",
    "FP8_BLOCK",
    "NVFP4",
    "MXFP4",
    *NEWER[:1],
    "static asymmetric",
    "outputs",
    "embedding",
    "cache",
]
ONE = {"num_hidden_layers": 1}
CASES = [(name, False) for name in SCHEMES] + [(name, True) for name in LEARNED]


def aware(**fields: Any) -> QuantizationModifier:
    return QuantizationModifier(**{"ignore": ["lm_head"], **fields})


def trained(modifier: QuantizationModifier, steps: int = 3, **sizes: Any) -> tuple[Any, Any]:
    """A session in the middle of a training, and its model."""
    model = tiny.llama(**sizes)
    session = loop.begin(model, modifier)
    loop.train(session, model, loop.optimizer_of(model), tiny.batches(number=steps))
    return session, model


def snapshot(model: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize(("name", "learned"), CASES)
def test_what_is_left_computes_what_fake_quantization_did(name: str, learned: bool) -> None:
    session, model = trained(aware(learned_scales=learned, **SCHEMES[name]), **ONE)
    data = tiny.batches(number=1, seed=5)
    before, plain = tiny.logits(model, data), tiny.logits(_plain(model, **ONE), data)
    session.finalize()
    assert torch.equal(tiny.logits(model, data), before)
    assert not torch.equal(before, plain)
    left = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert not any("log_step" in one for one in left)


def _plain(model: Any, **shape: Any) -> Any:
    """The model with its present weights, without any quantization."""
    twin: Any = tiny.llama(**shape)
    twin.load_state_dict(model.state_dict(), strict=False)
    return twin


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("W4A16", False),
        ("W4A16_ASYM", True),
        ("W8A8", False),
        ("FP8", True),
        ("FP8_BLOCK", False),
        ("NVFP4", False),
        ("NVFP4", True),
        ("MXFP4", False),
        ("outputs", True),
        ("cache", False),
    ],
)
def test_transformers_reads_the_same_logits(name: str, learned: bool, tmp_path: Path) -> None:
    session, model = trained(aware(learned_scales=learned, **SCHEMES[name]), **ONE)
    data = tiny.batches(number=1, seed=5)
    before = tiny.logits(model, data)
    session.finalize()
    if name == "cache":  # which readers may not know by its name
        with as_read(model):
            before = tiny.logits(model, data)
    dtype, bound = torch.float32, 1e-5
    if "FP4" in name:  # which readers decode to bfloat16, whatever the rest is in
        dtype, bound = torch.bfloat16, 0.01
        for key, parameter in model.named_parameters():
            if "global" not in key:
                parameter.data = parameter.data.to(dtype)
        before = tiny.logits(model, data)
    save_checkpoint(model, tmp_path / "out")
    with loading_compressed():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    found = tiny.logits(again.eval(), data)
    assert float((found - before).norm() / before.norm()) < bound


@pytest.mark.parametrize("name", ["W4A16", "NVFP4", "search"])
def test_the_scales_follow_the_weights(name: str) -> None:
    modifier = aware(**SCHEMES[name], update=1 if name == "search" else None)
    session, model = trained(modifier)
    present = {n: m.weight.detach().clone() for n, m in tiny.linears(model).items()}
    session.finalize()
    for n, module in tiny.linears(model).items():
        shared = getattr(module, "weight_global_scale", None)
        expected = observe_weight(
            present[n], module.quantization_scheme.weights, global_scale=shared
        )
        assert torch.equal(module.weight_scale, expected.scale)
        assert torch.equal(module.weight, expected.round(present[n]))
    if name == "NVFP4":
        attention = model.model.layers[0].self_attn
        assert torch.equal(
            attention.q_proj.weight_global_scale, attention.v_proj.weight_global_scale
        )


@pytest.mark.parametrize("implementation", ["loop", "checkpointing"])
@pytest.mark.parametrize("scheme", ["W8A8", "FP8"])
def test_earlier_layers_train_through_quantized_activations(
    scheme: str, implementation: str
) -> None:
    model = tiny.llama()
    if implementation == "checkpointing":
        model.train()
        tiny.recompute(model, reentrant=False)
    first = model.model.layers[0].self_attn.q_proj.weight
    before = first.detach().clone()
    session = loop.begin(model, aware(scheme=scheme))
    batch = tiny.batches(number=1)
    losses = loop.train(session, model, loop.optimizer_of(model, 0.02), batch * 8)
    assert losses[-1] < 0.9 * losses[1]
    assert first.grad is not None
    assert float(first.grad.norm()) > 0
    assert float((first.detach() - before).norm()) > 1e-3


def test_a_weight_gets_the_gradient_of_its_rounded_twin() -> None:
    """dL/dw = dL/dw' inside: compared with a model whose weights are the rounded ones."""
    model = tiny.llama()
    session = loop.begin(model, aware(scheme="FP8_DYNAMIC"))
    batch = tiny.batches(number=1)[0]
    session.event(EventType.BATCH_START, batch_data=batch)
    loop.loss_of(model, batch).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    # In the reference rounding is a difference that is held constant.
    twin = tiny.llama()
    for module in tiny.linears(twin).values():
        module.register_forward_pre_hook(_surrogate_hook)
        module.register_forward_hook(_uncover)
    loop.loss_of(twin, batch).backward()
    for name, parameter in twin.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def _uncover(module: Any, args: Any, output: Any) -> None:
    del module.__dict__["weight"]


def _surrogate_hook(module: Any, args: tuple[Any, ...]) -> tuple[Tensor]:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    from llmcompressor.schemes.presets import preset_scheme

    scheme, x, weight = preset_scheme("FP8_DYNAMIC"), args[0], module._parameters["weight"]
    for_x = calculate_qparams(x.amin(-1, True), x.amax(-1, True), scheme.input_activations)
    for_w = calculate_qparams(weight.amin(-1, True), weight.amax(-1, True), scheme.weights)
    rounded_x = fake_quantize(x, for_x[0], None, scheme.input_activations)
    rounded_w = fake_quantize(weight, for_w[0], None, scheme.weights)
    module.__dict__["weight"] = weight + (rounded_w - weight).detach()
    return (x + (rounded_x - x).detach(),)


def test_learned_scales_are_learned_and_reduce_the_loss() -> None:
    """With weights that are frozen, scales alone can still adapt."""
    model, batch = tiny.llama(), tiny.batches(number=1)
    session = loop.begin(model, aware(scheme="W3A16", learned_scales=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("log_step"))
    before = snapshot(model)
    learned = [p for p in model.parameters() if p.requires_grad]
    assert learned
    losses = loop.train(session, model, torch.optim.Adam(learned, lr=0.01), batch * 12)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.endswith("log_step")


def test_mixed_precision() -> None:
    model, data = tiny.llama(), tiny.batches(number=4)
    session = loop.begin(model, aware(scheme="FP8"))
    optimizer = loop.optimizer_of(model)
    for batch in data:
        with torch.autocast("cpu", torch.bfloat16):
            loop.step(session, model, optimizer, batch)
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        before = tiny.logits(model, data)
    session.finalize()
    with torch.autocast("cpu", torch.bfloat16):
        after = tiny.logits(model, data)
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "FP8", "NVFP4", "MXFP4"])
def test_zeros_of_a_mask_survive(name: str) -> None:
    model, seen = tiny.llama(num_hidden_layers=1), []
    session = loop.begin(model, aware(scheme=name))
    masks = {
        module: torch.rand_like(module.weight) < 0.5 for module in tiny.linears(model).values()
    }
    for module, mask in masks.items():
        module.weight.data[mask] = 0
    loop.train(session, model, loop.optimizer_of(model, 0.0), tiny.batches(number=2))
    for module, mask in masks.items():  # after the hook that puts the rounded weight there
        module.register_forward_pre_hook(
            lambda module, _, mask=mask: seen.append(module.weight.detach()[mask])
        )
    tiny.logits(model, tiny.batches(number=1))
    assert len(seen) == len(masks)
    session.finalize()
    for zeros in (*seen, *(module.weight[mask] for module, mask in masks.items())):
        assert (zeros == 0).all()


def test_static_activations_are_observed_for_a_step_first() -> None:
    model, data = tiny.llama(), tiny.batches(number=6)
    plain = tiny.logits(model, data)
    session = loop.begin(model, aware(scheme="FP8", num_calibration_steps=2))
    optimizer = loop.optimizer_of(model, 0.0)
    for index in range(4):
        rounded = not torch.equal(tiny.logits(model, data), plain)
        assert rounded == (index >= 2), index
        loop.step(session, model, optimizer, data[index])


@pytest.mark.parametrize("per_epoch", [None, 4])
def test_start_in_steps_and_epochs(per_epoch: int | None) -> None:
    model, data = tiny.llama(), tiny.batches(number=8)
    start = 3 if per_epoch is None else 0.75
    session = loop.begin(model, aware(scheme="W4A16", start=start), steps_per_epoch=per_epoch)
    optimizer = loop.optimizer_of(model, 0.0)
    plain = [float(loop.loss_of(model, batch).detach()) for batch in data]
    found = loop.train(session, model, optimizer, data)
    assert [a != b for a, b in zip(plain, found, strict=True)] == [i >= 3 for i in range(8)]


def test_the_observed_range_is_that_of_real_training_tokens() -> None:
    model, data = tiny.llama(), tiny.padded(tiny.batches(number=1, tokens=6), 10)
    modifier = aware(scheme="FP8", num_calibration_steps=1)
    expected = tiny.inputs_of(model, "model.layers.0.self_attn.q_proj", data)
    session = loop.begin(model, modifier)
    loop.train(session, model, loop.optimizer_of(model, 0.0), data)
    tiny.logits(model, tiny.batches(number=2, seed=9))  # an evaluation is not observed
    loop.step(session, model, loop.optimizer_of(model, 0.0), data[0])
    figures = modifier.figures(session.state)
    tag = "quantization/model.layers.0.self_attn.q_proj.input"
    assert figures[f"{tag}.min"] == float(expected.min())
    assert figures[f"{tag}.max"] == float(expected.max())


@pytest.mark.parametrize("learned", [False, True])
def test_the_state_of_a_step_before_the_start_undoes_it(learned: bool, warned: list[str]) -> None:
    """As when the best model of a training is that of an early step."""
    data = tiny.batches(number=3, tokens=8)
    model = tiny.llama(num_hidden_layers=1)
    modifier = aware(scheme="FP8", start=2, learned_scales=learned)
    session = loop.begin(model, modifier, resumes=True)
    optimizer = loop.optimizer_of(model)
    loop.train(session, model, optimizer, data[:1])
    early = copy.deepcopy([session.lifecycle.state_dict(), model.state_dict()])
    loop.train(session, model, optimizer, data[1:])
    rounded = tiny.logits(model, data[:1])
    session.lifecycle.load_state_dict(early[0])
    model.load_state_dict(early[1])
    plain = tiny.logits(_plain(model, num_hidden_layers=1), data[:1])
    assert torch.equal(tiny.logits(model, data[:1]), plain)
    assert not torch.equal(rounded, plain)
    session.finalize()
    assert tiny.traces(model) == {}
    assert torch.equal(tiny.logits(model, data[:1]), plain)
    assert "has not come to its start" in warned[-1]


def test_a_calibrating_observer_is_refused_before_the_first_step() -> None:
    model = tiny.llama()
    session = loop.begin(model, aware(scheme="W4A16", weight_observer="imatrix_mse", start=5))
    with pytest.raises(RecipeError, match="calibration data"):
        session.event(EventType.BATCH_START)
    session.reset()
    assert tiny.traces(model) == {}


def test_diverged_weights_are_named_and_left_as_they_are() -> None:
    session, model = trained(aware(scheme="W4A16"))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data[0, 0] = torch.nan
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.up_proj"):
        session.finalize()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
    assert tiny.traces(model) == {}


def test_a_static_scale_that_nothing_reached_is_an_error(warned: list[str]) -> None:
    model = tiny.llama()
    model.aside = Linear(8, 8)
    session = loop.begin(model, aware(scheme="FP8"))
    loop.train(session, model, loop.optimizer_of(model), tiny.batches(number=2))
    assert "aside (input)" in warned[0]
    with pytest.raises(TargetError, match="aside"):
        session.finalize()


@pytest.mark.parametrize(
    ("name", "learned", "stop"),
    thinned(
        [
            ("FP8", False),
            ("outputs", True),
            ("search", False),
            ("NVFP4", True),
            ("histogram", False),
            ("cache", False),
        ],
        [1, 2, 5],
    ),
)
def test_a_resumed_training_ends_in_the_same_weights(name: str, learned: bool, stop: int) -> None:
    data = tiny.batches(number=7, tokens=8)
    fields = {**SCHEMES[name], "learned_scales": learned, "end": 6, "num_calibration_steps": 2}
    model = tiny.llama(num_hidden_layers=1)
    session = loop.begin(model, aware(**fields))
    optimizer = loop.optimizer_of(model)
    loop.train(session, model, optimizer, data[:stop])
    file = io.BytesIO()
    torch.save([session.lifecycle.state_dict(), model.state_dict(), optimizer.state_dict()], file)
    loop.train(session, model, optimizer, data[stop:])
    session.finalize()

    file.seek(0)
    run, weights, moments = torch.load(file, weights_only=True)
    resumed = tiny.llama(num_hidden_layers=1)
    again = loop.begin(resumed, aware(**fields), resumes=True)
    resumed.load_state_dict(weights)
    optimizer = loop.optimizer_of(resumed)
    optimizer.load_state_dict(moments)
    again.lifecycle.load_state_dict(run)
    loop.train(again, resumed, optimizer, data[stop:])
    again.finalize()
    for (key, one), (_, other) in zip(
        model.state_dict().items(), resumed.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), key
