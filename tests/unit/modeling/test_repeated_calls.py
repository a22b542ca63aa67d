# SPDX-License-Identifier: Apache-2.0
"""Arguments for a run that leaves no trace in what the model's own run gets."""

from __future__ import annotations

import threading
from collections import UserDict

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from llmcompressor.modeling.call_graph import copy_arguments

STATES = torch.ones(1, 2, 3, 4)


def test_what_a_forward_writes_to_caches_is_not_seen() -> None:
    cache = DynamicCache()
    cache.update(STATES, STATES, 0)
    own = ({"past": cache, "shared": UserDict(a=STATES)}, [STATES])
    twin = copy_arguments(own)
    twin[0]["past"].update(STATES, STATES, 0)
    twin[0]["shared"]["b"] = STATES
    twin[1].append(STATES)
    assert cache.get_seq_length() == 3
    assert twin[0]["past"].get_seq_length() == 6
    assert list(own[0]["shared"]) == ["a"]
    assert len(own[1]) == 1


def test_what_a_cache_changes_in_place_is_its_own() -> None:
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
    cache = StaticCache(config=config, max_cache_len=8)
    cache.update(STATES, STATES, 0)
    twin = copy_arguments(cache)
    twin.update(2 * STATES, 2 * STATES, 0)
    assert cache.get_seq_length() == 3
    assert float(cache.layers[0].keys.max()) == 1.0
    assert float(twin.layers[0].keys.max()) == 2.0


def test_all_else_is_the_same() -> None:
    """Tensors are large, and modules are told apart by what they are."""
    module, lock = nn.Linear(2, 2), threading.Lock()
    output = BaseModelOutput(last_hidden_state=STATES)
    own = {"states": STATES, "module": module, "lock": lock, "flag": True, "output": output}
    twin = copy_arguments(own)
    assert twin is not own
    assert all(twin[name] is own[name] for name in ("states", "module", "lock", "flag"))
    assert twin["output"].last_hidden_state is STATES
