# SPDX-License-Identifier: Apache-2.0
"""A tiny model, its data, and modifiers that write down what they see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import PrivateAttr
from torch.nn import Parameter
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from llmcompressor.core import EventType
from llmcompressor.modifiers import Modifier

VOCABULARY = 32
TOKENS = 8


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def row(index: int, ignored: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=generator)
    labels = ids.clone()
    labels[:ignored] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


class Rows(Dataset):
    """``uneven`` rows have different numbers of targets."""

    def __init__(self, length: int, *, uneven: bool = False) -> None:
        self.length, self.uneven = length, uneven

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return row(index, ignored=index % 6 if self.uneven else 0)


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (row(index) for index in range(self.length))


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": False,
        "seed": 7,
    }
    return TrainingArguments(output_dir=str(folder), **{**given, **changed})


class Recorder(Modifier):
    """Writes down each event: its kind, the step and the batch."""

    seen: ClassVar[list[tuple[str, int, int]]] = []
    begun: ClassVar[list[Any]] = []

    def on_initialize(self, state, **kwargs):
        self.begun.append((state.model, state.optimizer, state.hardware))
        return True

    def on_event(self, state, event, **kwargs):
        self.seen.append((event.type_.value, event.global_step, event.global_batch))


class ScaledMask(Modifier):
    """Learns a scale per layer, keeps a mask, and counts: all that a checkpoint has to hold.

    The mask grows at every update; it is kept by a hook that ``on_start`` puts, and its scale is
    in the loss, so that a resumed run goes wrong when any of these is lost.
    """

    growth: float = 0.02

    _masks: dict[str, torch.Tensor] = PrivateAttr(default_factory=dict)
    _updates: int = PrivateAttr(0)
    _starts: int = PrivateAttr(0)

    def on_initialize(self, state, **kwargs):
        for name, module in self._layers(state):
            module.extra_scale = Parameter(torch.ones(1))
            self._masks[name] = torch.ones_like(module.weight, dtype=torch.bool)
        return True

    def _layers(self, state):
        return [
            (name, module)
            for name, module in state.model.named_modules()
            if name.endswith("down_proj")
        ]

    def on_start(self, state, event, **kwargs):
        self._starts += 1
        self._put_hooks(state)

    def _put_hooks(self, state):
        for _, module in self._layers(state):
            self.register_hook(module, lambda m, _, output: output * m.extra_scale, "forward")

    def on_update(self, state, event, **kwargs):
        if event.type_ is EventType.LOSS_CALCULATED:
            scales = [module.extra_scale for _, module in self._layers(state)]
            state.loss = state.loss + 0.1 * sum((scale - 2).square().sum() for scale in scales)
        if event.type_ is not EventType.OPTIM_POST_STEP:
            return
        self._updates += 1
        for name, module in self._layers(state):
            weight = module.weight.detach()
            kept = 1 - min(0.9, self.growth * self._updates)
            # What is masked stays so, unlike what the weights alone would say.
            shown = weight.abs() + self._masks[name]
            order = shown.flatten().argsort(descending=True)
            mask = torch.zeros(weight.numel(), dtype=torch.bool)
            mask[order[: int(kept * weight.numel())]] = True
            self._masks[name] = mask.view_as(weight) & self._masks[name]
            weight.mul_(self._masks[name])

    def on_end(self, state, event, **kwargs):
        self.remove_hooks()

    def figures(self, state):
        return {"masked": 1 - sum(m.float().mean().item() for m in self._masks.values()) / 2}

    def state_dict(self):
        return {"masks": self._masks, "updates": self._updates}

    def load_state_dict(self, state, saved):
        self._masks, self._updates = dict(saved["masks"]), saved["updates"]
        if self.started and not self.ended:
            self._put_hooks(state)
