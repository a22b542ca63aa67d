# SPDX-License-Identifier: Apache-2.0
"""Blocks and their parts, found from a model's structure."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from llmcompressor.errors import TargetError
from llmcompressor.modeling.blocks import find_blocks, sub_blocks


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(4, 4), nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Listed(nn.Module):
    """A block that keeps its parts in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(), nn.ModuleDict({"up": nn.Linear(4, 4)})])


class Model(nn.Module):
    def __init__(self, layers: int = 3, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(4, 8)


def test_classes_that_are_kept_together_are_the_blocks() -> None:
    model = Model()
    model._no_split_modules = {"Attention"}
    assert list(find_blocks(model).values()) == [f"body.layers.{i}.attention" for i in range(3)]


def test_of_nested_classes_the_outermost_are_the_blocks() -> None:
    model = Model(12)
    model._no_split_modules = ["Layer", "Attention"]
    assert list(find_blocks(model).values()) == [f"body.layers.{i}" for i in range(12)]


def test_without_usable_classes_the_blocks_are_lists() -> None:
    model, expected = Model(), ["body.layers.0", "body.layers.1", "body.layers.2"]
    for declared in (None, [], ["NotThere"], ["Linear"]):
        model._no_split_modules = declared
        assert list(find_blocks(model).values()) == expected


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)


def test_embeddings_are_a_block_only_where_they_are_repeated() -> None:
    """A head may share their weight, and is there before any block."""
    model = Model(2)
    model.body.embeddings = Embeddings()
    model._no_split_modules = ["Embeddings", "Layer"]
    assert list(find_blocks(model).values()) == ["body.layers.0", "body.layers.1"]
    model.body.layers.append(Embeddings())
    assert list(find_blocks(model).values())[2:] == ["body.layers.2"]


class Named(nn.ModuleDict):
    """A block whose parts have names, with a forward of its own."""

    def __init__(self) -> None:
        super().__init__({"first": Attention(), "second": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_without_repeated_blocks_has_none() -> None:
    assert find_blocks(nn.Sequential(nn.Linear(2, 2))) == {}


def test_targets_may_name_the_blocks() -> None:
    for targets, expected in (
        (["Layer"], ["body.layers.0", "body.layers.1"]),
        (["body.layers.1"], ["body.layers.1"]),
        (["re:.*attention$"], ["body.layers.0.attention", "body.layers.1.attention"]),
        (["Layer", "head"], ["body.layers.0", "body.layers.1", "head"]),
    ):
        assert list(find_blocks(Model(2), targets).values()) == expected
    with pytest.raises(TargetError, match=r"Layr.*match no module.*Layer"):
        find_blocks(Model(), ["Layr"])


def test_parts_are_the_children_that_hold_what_is_wanted() -> None:
    layer = Layer()
    wanted = {layer.attention.q, layer.mlp[0]}
    assert list(sub_blocks(layer, "l", wanted).values()) == ["l.attention", "l.mlp"]
    assert list(sub_blocks(layer, "l", {layer.mlp[1]}).values()) == ["l.mlp"]


def test_a_list_is_never_called_so_its_entries_are_the_parts() -> None:
    layer = Listed()
    wanted = set(layer.modules())
    assert list(sub_blocks(layer, "l", wanted).values()) == ["l.parts.0", "l.parts.1.up"]
