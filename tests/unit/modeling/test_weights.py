# SPDX-License-Identifier: Apache-2.0
"""Weights: where they lie, whether they are finite, and norms folded into them."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Embedding, LayerNorm, Linear, Module
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmcompressor.errors import InputError
from llmcompressor.modeling import center_embeddings, fuse_norm_linears
from llmcompressor.modeling.weights import align_parameters, first_nonfinite
from llmcompressor.numerics.extremes import is_finite


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(dtype)
    assert first_nonfinite(model) is None
    model[1].weight.data[3, 5] = bad
    assert first_nonfinite(model) == "1.weight"
    assert first_nonfinite(model, ["0"]) is None
    model[0].bias.data[0] = bad
    assert first_nonfinite(model) == "0.bias"


def test_sums_that_overflow_are_no_infinities() -> None:
    assert is_finite(torch.full((1000,), 3e38))
    assert is_finite(torch.full((1000,), 3e38, dtype=torch.bfloat16))
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


def _told(place: tuple[int, str]) -> list[str | None]:
    """What one of two processes, each with half of every matrix, is told as they go bad."""
    rank, store = place
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(2)  # several are looked at at once, and do not meet on the way
    try:
        linears = (torch.nn.Linear(8, 8, bias=False) for _ in range(8))
        model = fully_shard(torch.nn.Sequential(*linears), mesh=init_device_mesh("cpu", (2,)))
        told = [first_nonfinite(model)]
        for number, holder in ((5, 1), (6, 0), (2, 0)):
            if rank == holder:
                model[number].weight.detach().to_local()[0, 0] = float("nan")
            told.append(first_nonfinite(model))
        return told
    finally:
        distributed.destroy_process_group()


def test_what_one_process_has_of_a_matrix_is_found_by_all(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, context) as workers:
        places = [(rank, str(tmp_path / "store")) for rank in range(2)]
        answers = list(workers.map(_told, places, timeout=120))
    assert answers == [[None, "5.weight", "5.weight", "2.weight"]] * 2


def test_a_centred_embedding_has_no_mean_but_its_differences() -> None:
    embedding = Embedding(5, 8)
    before = embedding.weight.detach().clone()
    center_embeddings(embedding)
    assert torch.allclose(embedding.weight.mean(dim=-1), torch.zeros(5), atol=1e-6)
    moved = before - embedding.weight
    assert torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-6)


@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm, LayerNorm, torch.nn.RMSNorm])
def test_a_norm_without_its_gain_gives_the_same_to_what_reads_it(make: type[Module]) -> None:
    torch.manual_seed(0)
    norm, linears = make(8), [Linear(8, 3), Linear(8, 4, bias=False)]
    for parameter in norm.parameters():
        parameter.data.normal_()
    x = torch.randn(6, 8)
    before = [linear(norm(x)) for linear in linears]
    fuse_norm_linears(norm, linears)
    gain = norm.weight + (1 if make is GemmaRMSNorm else 0)
    assert torch.equal(gain, torch.ones(8))
    for linear, expected in zip(linears, before, strict=True):
        assert torch.allclose(linear(norm(x)), expected, atol=1e-5)


def test_a_bias_that_no_gain_can_hold_is_refused() -> None:
    norm, linear = LayerNorm(4), Linear(4, 4)
    norm.weight.data[1], norm.bias.data[1] = 0.0, 1.0
    with pytest.raises(InputError, match="gain of LayerNorm is zero"):
        fuse_norm_linears(norm, [linear])
