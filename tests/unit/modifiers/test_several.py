# SPDX-License-Identifier: Apache-2.0
"""Several modifiers of one recipe that smooth and quantize: which modules are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny_llama as tiny
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader

from llmcompressor import callbacks, create_session, oneshot
from llmcompressor.checkpoint.packing import loading_compressed
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import TargetError
from llmcompressor.modifiers import awq as one_class
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

ATTENTION = r"re:.*self_attn\.[qkvo]_proj$"
MLP = r"re:.*mlp\.(gate|up|down)_proj$"
WEIGHTS: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
GATE = AWQMapping("re:.*post_attention_layernorm$", ["re:.*gate_proj$", "re:.*up_proj$"])
DOWN = AWQMapping("re:.*up_proj$", ["re:.*down_proj$"])
QUERY = "model.layers.0.self_attn.q_proj.weight"
CACHE: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def solving(*targets: str, **fields: Any) -> GPTQModifier:
    groups = {"all": {"targets": list(targets) or ["Linear"], "weights": WEIGHTS}}
    return GPTQModifier(**{"config_groups": groups, "ignore": ["lm_head"], **fields})


def rounding(*targets: str, **fields: Any) -> QuantizationModifier:
    groups = {"all": {"targets": list(targets) or ["Linear"], "weights": WEIGHTS}}
    return QuantizationModifier(**{"config_groups": groups, "ignore": ["lm_head"], **fields})


def weights_of(model: Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def changed(model: Module, before: dict[str, Tensor]) -> set[str]:
    return {
        n for n, p in weights_of(model).items() if n in before and not torch.equal(p, before[n])
    }


@pytest.mark.parametrize("mappings", [[GATE, DOWN], None])
@pytest.mark.parametrize("pipeline", ["independent", "sequential"])
def test_what_is_quantized_stays_where_others_are_smoothed(mappings: Any, pipeline: str) -> None:
    """Neither scaled nor clipped: attention is as if GPTQ had been alone."""
    before = weights_of(tiny.llama())
    alone = weights_of(tiny.run(tiny.llama(), solving(ATTENTION)))
    recipe = [solving(ATTENTION), AWQModifier(mappings=mappings), rounding(MLP)]
    model = tiny.run(tiny.llama(), *recipe, pipeline=pipeline)
    first = {n for n in alone if "layers.0.self_attn" in n}  # what nothing smoothed stands before
    assert not changed(model, {n: alone[n] for n in first})
    assert not torch.equal(alone[QUERY], before[QUERY])
    smoothed = {n for n in changed(model, before) if n.endswith("layernorm.weight")}
    assert smoothed == {f"model.layers.{n}.post_attention_layernorm.weight" for n in (0, 1)}


def test_a_checkpoint_is_compressed_as_a_model_is(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "in")

    def recipe() -> list[Modifier]:
        return [solving(ATTENTION), AWQModifier(), rounding(MLP)]

    oneshot(
        model=tmp_path / "in",
        recipe=recipe(),
        dataset=DataLoader(tiny.batches(), batch_size=None),
        output_dir=tmp_path / "out",
    )
    model = tiny.run(tiny.llama(), *recipe())
    with loading_compressed():
        read = type(model).from_pretrained(tmp_path / "out")
    given = tiny.batches()
    assert torch.allclose(tiny.logits(read, given), tiny.logits(model, given), atol=1e-4)


SMOOTHED_BEHIND: dict[str, tuple[list[Modifier], str]] = {
    "a reader": (
        [solving("re:.*gate_proj$"), AWQModifier(mappings=[GATE]), rounding("re:.*up_proj$")],
        r"cannot be smoothed: .*GPTQModifier quantizes model\.layers\.0\.mlp\.gate_proj",
    ),
    "a reader of a mapping that was found": (
        [solving("re:.*k_proj$"), AWQModifier(), rounding("re:.*[qvoe]_proj$")],
        r"cannot be smoothed: .*GPTQModifier quantizes model\.layers\.0\.self_attn\.k_proj",
    ),
    "what is smoothed": (
        [solving("re:.*up_proj$"), AWQModifier(mappings=[DOWN]), rounding("re:.*down_proj$")],
        r"cannot be smoothed: .*GPTQModifier quantizes model\.layers\.0\.mlp\.up_proj",
    ),
    "everything": (
        [rounding(), SmoothQuantModifier()],
        r"SmoothQuantModifier has nothing to smooth: QuantizationModifier quantizes",
    ),
    "values of a cache": (
        [
            QuantizationModifier(kv_cache_scheme=CACHE),
            AWQModifier(mappings=[AWQMapping("re:.*v_proj$", ["re:.*o_proj$"])]),
            rounding(),
        ],
        r"cannot be smoothed: .*QuantizationModifier quantizes model\.layers\.0\.self_attn\.v_proj",
    ),
}


@pytest.mark.parametrize("case", SMOOTHED_BEHIND)
def test_what_is_quantized_before_may_not_be_smoothed(case: str) -> None:
    recipe, said = SMOOTHED_BEHIND[case]
    model = tiny.llama(num_key_value_heads=4)
    before = weights_of(model)
    with pytest.raises(TargetError, match=said) as caught:
        tiny.run(model, *recipe)
    assert caught.value.remedy.startswith(f"Put {type(recipe[1]).__name__} before")
    assert not changed(model, before)
    assert tiny.traces(model) == {}


def test_norms_before_a_quantized_cache_may_be_smoothed() -> None:
    """Keys and values stay what they are: their weights take up what the norm is divided by."""
    norms = [AWQMapping("re:.*input_layernorm$", ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"])]
    recipe = [QuantizationModifier(kv_cache_scheme=CACHE), AWQModifier(mappings=norms), rounding()]
    model = tiny.run(tiny.llama(), *recipe)
    plain = tiny.llama().model.layers[0].input_layernorm.weight
    assert not torch.equal(model.model.layers[0].input_layernorm.weight, plain)


def test_what_solves_takes_modules_from_what_rounds() -> None:
    """AWQ in its form of one class, then GPTQ with the same scheme: both have their part."""
    groups = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
    both: Any = one_class.AWQModifier(config_groups=groups, ignore=["lm_head"])
    given = tiny.batches()
    found = tiny.logits(tiny.run(tiny.llama(), *both, solving()), given)
    assert torch.equal(found, tiny.logits(tiny.run(tiny.llama(), AWQModifier(), solving()), given))
    assert not torch.equal(found, tiny.logits(tiny.run(tiny.llama(), *both), given))


@pytest.mark.parametrize("changes", [{}, {"input_activations": CACHE}])
def test_what_rounds_keeps_the_others(changes: dict[str, Any]) -> None:
    """The later modifier's part is what it would be if the first had been given the rest alone."""

    def group(*targets: str) -> dict[str, Any]:
        return {"a": {"targets": list(targets), "weights": WEIGHTS, **changes}}

    def first(*targets: str) -> QuantizationModifier:
        return QuantizationModifier(config_groups=group(*targets), ignore=["lm_head"])

    def later() -> GPTQModifier:
        return GPTQModifier(config_groups=group("re:.*down_proj$"))

    given = tiny.batches()
    shared = tiny.run(tiny.llama(), first("Linear"), later())
    apart = tiny.run(tiny.llama(), first(r"re:.*(q|k|v|o|gate|up)_proj$"), later())
    assert torch.equal(tiny.logits(shared, given), tiny.logits(apart, given))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ([rounding(), GPTQModifier(scheme="W8A16")], "by QuantizationModifier, .* another scheme"),
        ([solving(), rounding()], r"by GPTQModifier, which stands before QuantizationModifier\."),
        ([rounding(), rounding()], r"by QuantizationModifier, which stands before"),
    ],
)
def test_any_other_pair_is_refused(recipe: list[Modifier], said: str) -> None:
    model = tiny.llama()
    with pytest.raises(TargetError, match=f"q_proj is quantized already, {said}"):
        tiny.run(model, *recipe)
    assert tiny.traces(model) == {}


def by_hand(model: Any, *recipe: Modifier) -> Any:
    """The events of a calibration, sent by whoever runs the model."""
    given = tiny.batches()
    with create_session() as session, torch.no_grad():
        session.initialize(recipe=list(recipe), model=model, calib_data=given, start=-1)
        callbacks.calibration_epoch_start()
        for batch in given:
            model(**batch, use_cache=False)
        callbacks.sequential_epoch_end(list(model.modules()))
        callbacks.calibration_epoch_end()
        session.finalize()
    return model
