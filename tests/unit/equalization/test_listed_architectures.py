# SPDX-License-Identifier: Apache-2.0
"""What is found in the architectures that llm-compressor lists is what its lists mean."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support import listed_architectures as listed
from torch import Tensor

from llmcompressor.checkpoint.moe_names import unfuse_stored_experts
from llmcompressor.equalization import mappings
from llmcompressor.equalization.mappings import find_smooth_sets
from llmcompressor.equalization.probe import SmoothSet, format_names
from llmcompressor.equalization.rescale import divide_outputs, multiply_inputs
from llmcompressor.moe.linear_experts import find_stacked_moes

_ROUNDING = 2e-5
"""Share of the logits; norms and some routers compute in float32 whatever they are given."""


def build(name: str) -> Any:
    """A model of random weights, its experts taken apart."""
    model_class, config_class = listed.classes_of(name)
    torch.manual_seed(0)
    model = model_class(config_class(**listed.CONFIGS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
            else:
                parameter.normal_(std=0.2)
    unfuse_stored_experts(model, find_stacked_moes(model))
    return model


def inputs_of(model: Any) -> dict[str, Tensor]:
    ids = torch.arange(3, 51).reshape(2, 24)
    if model.main_input_name == "input_ids":
        return {"input_ids": ids}
    frames = 2 * model.config.max_source_positions
    features = torch.randn(2, model.config.num_mel_bins, frames, generator=torch.manual_seed(5))
    return {"input_features": features, "decoder_input_ids": ids}


def by_form_of_layer(found: list[SmoothSet]) -> list[dict[str, set[str]]]:
    """Smooth module → its readers, those of all experts as one, for each form of layer."""
    layers: dict[str, dict[str, set[str]]] = {}
    for one in found:
        parts = re.fullmatch(r"(.*?(?:layers|h)\.\d+)\.(.*)", one.name)
        assert parts is not None
        block, own = parts.groups()
        readers = {format_names([name.removeprefix(f"{block}.")]) for name in one.balance}
        layers.setdefault(block, {})[format_names([own])] = readers
    forms: list[dict[str, set[str]]] = []
    for layer in layers.values():
        if layer not in forms:
            forms.append(layer)
    return forms


@pytest.mark.parametrize("name", listed.LINKS)
def test_listed_links_are_found_and_scaling_them_is_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    with monkeypatch.context() as patched:  # the structure, whatever is listed in the library
        patched.setattr(mappings, "architecture_mappings", lambda _: None)
        found = find_smooth_sets(model, [inputs_of(model)])
    expected = [
        {smooth: set(readers.split()) for smooth, readers in layer.items()}
        for layer in listed.LINKS[name]
    ]
    assert by_form_of_layer(found) == expected
    check_norms_without_mixtures(name, model, found)
    check_scaling(model, found)


def is_of_mixture(one: SmoothSet) -> bool:
    return any(".experts." in reader for reader in one.balance)


def check_norms_without_mixtures(name: str, model: Any, found: list[SmoothSet]) -> None:
    """As SmoothQuant has it. Where attention reads that norm too, it is taken all the same."""
    norms = [one.name for one in found if one.is_norm and not is_of_mixture(one)]
    parallel = [
        one.name for one in found if is_of_mixture(one) and any(".q_proj" in r for r in one.balance)
    ]
    assert bool(parallel) == (name == "Cohere2Moe")
    fewer = find_smooth_sets(model, [inputs_of(model)], norms_only=True, mixtures=False)
    assert {one.name for one in fewer} == {*norms, *parallel}


def check_scaling(model: Any, found: list[SmoothSet]) -> None:
    """In float64, so that no near tie of a router is decided otherwise."""
    model.double()
    inputs = {
        key: one.double() if one.is_floating_point() else one
        for key, one in inputs_of(model).items()
    }
    scales = [
        torch.rand(one.columns, generator=torch.manual_seed(3), dtype=torch.float64) * 4 + 0.25
        for one in found
    ]
    with torch.no_grad():
        before = model(**inputs).logits
        for one, scale in zip(found, scales, strict=True):
            for module in one.balance.values():
                multiply_inputs(module, scale)
        assert moved(before, model(**inputs).logits) > 1e-3
        for one, scale in zip(found, scales, strict=True):
            divide_outputs(one.smooth, scale, one.offset)
        assert moved(before, model(**inputs).logits) < _ROUNDING


def moved(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max())
