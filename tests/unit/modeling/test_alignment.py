# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from llmcompressor.modeling.weights import align_parameters


def shifted(values: Tensor) -> nn.Parameter:
    """The same values one element behind where torch would begin."""
    memory = torch.empty(values.numel() + 1, dtype=values.dtype)
    memory[1:] = values.flatten()
    return nn.Parameter(memory[1:].view(values.shape), requires_grad=False)


def linear(seed: int = 0, outputs: int = 1) -> nn.Linear:
    made = nn.Linear(129, outputs, bias=False)
    values = torch.randn(outputs, 129, generator=torch.Generator().manual_seed(seed))
    made.weight = shifted(values)
    return made


@pytest.mark.parametrize(("rows", "outputs"), [(18, 1), (1, 16), (5, 1)])
def test_what_lies_elsewhere_computes_the_same_afterwards(rows: int, outputs: int) -> None:
    found = []
    given = torch.randn(rows, 129, generator=torch.Generator().manual_seed(1))
    for make in (lambda one: one, lambda one: nn.Parameter(one.clone(), requires_grad=False)):
        model = nn.Sequential(linear(outputs=outputs))
        model[0].weight = make(model[0].weight)
        align_parameters(model)
        assert model[0].weight.data_ptr() % 64 == 0
        found.append(model(given))
    assert torch.equal(*found)


def test_parameters_that_share_memory_go_on_to_do_so() -> None:
    model = nn.Sequential(linear(), linear(), linear(seed=1))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    before = [one.clone() for one in model.parameters()]
    align_parameters(model)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr() != model[2].weight.data_ptr()
    assert all(map(torch.equal, before, model.parameters()))
