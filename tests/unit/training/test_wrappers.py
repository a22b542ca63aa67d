# SPDX-License-Identifier: Apache-2.0
"""Wrappers of activation checkpointing are taken off a trained model."""

from __future__ import annotations

import torch
from tests.support import tiny_training as tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)

from llmcompressor.training.driver import remove_checkpoint_wrappers


def test_modules_have_their_own_names_again() -> None:
    model = tiny.tiny_model()
    names = [name for name, _ in model.named_modules()]
    batch = {key: value[None] for key, value in tiny.row(0).items()}
    expected = model(**batch).loss
    for number, layer in enumerate(model.model.layers):
        wrapped = checkpoint_wrapper(layer)
        model.model.layers[number] = offload_wrapper(wrapped) if number else wrapped
    assert [name for name, _ in model.named_modules()] != names
    remove_checkpoint_wrappers(model)
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(model(**batch).loss, expected)
