# SPDX-License-Identifier: Apache-2.0
"""Observers that remember a histogram."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from llmcompressor.observers import Observer

ARGS = QuantizationArgs(num_bits=8, strategy="tensor")


@pytest.fixture
def batches() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(8, 50, 32)
    x[3, 7, 5] = 30.0
    return x


def make(name: str, args: QuantizationArgs = ARGS, base_name: str = "input", **options):
    return Observer.load_from_registry(name, base_name=base_name, args=args, **options)


def high(observer, batches: torch.Tensor) -> float:
    for batch in batches:
        observer.observe(batch)
    return observer.range()[1].item()


def test_names_choose_the_method():
    assert make("histogram").options.method == "mse"
    assert make("percentile").options.method == "percentile"
    assert make("entropy").options.method == "entropy"
    assert make("histogram", method="percentile", percentile=90).options.percentile == 90


@pytest.mark.parametrize("name", ["histogram", "percentile", "entropy"])
def test_one_outlier_does_not_set_the_scale(name, batches):
    assert high(make("static_minmax"), batches) == 30
    assert 2 < high(make(name), batches) < 29


@pytest.mark.parametrize("method", ["mse", "entropy", "percentile"])
def test_the_order_of_batches_does_not_matter(method, batches):
    forth = high(make("histogram", method=method), batches)
    back = high(make("histogram", method=method), batches.flip(0))
    assert forth == back


@pytest.mark.parametrize(
    ("base_name", "options", "bins"),
    [("weight", {}, 256), ("weight", {"bins": 2048}, 2048), ("input", {}, 2048)],
    ids=["a weight", "asked for", "inputs"],
)
def test_a_weight_has_no_more_bins_than_values_of_a_scale(base_name, options, bins):
    """Unless they are asked for: a number that somebody gives is the one that is used."""
    observer = make("histogram", base_name=base_name, **options)
    observer(torch.randn(4, 50))  # 200 values, one scale
    assert observer._histogram.bins == bins
