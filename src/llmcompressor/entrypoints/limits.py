# SPDX-License-Identifier: Apache-2.0
"""Memory limits of a run, by device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import psutil
import torch

from llmcompressor.args import DatasetArguments
from llmcompressor.checkpoint.block_weights import REST, BlockWeights
from llmcompressor.device_memory import free_device_memory, give_back_device_memory
from llmcompressor.entrypoints.devices import named_device
from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.memory import give_back_freed

__all__ = ["Limits"]

_SHARE_FOR_WEIGHTS = 0.6
"""Of an accelerator's free memory: the rest is for activations and solvers."""
_SHARE_FOR_ACTIVATIONS = 0.5
"""Of the host memory that blocks leave: the rest is for solvers and what is packed."""
_BLOCKS_AT_ONCE = 2
"""One that is worked on, and one that is read or written meanwhile."""


class Limits:
    """Memory limits by device.

    Args:
        given: device → bytes, ``"cpu"`` for the host; other devices are limited by free memory.
    """

    def __init__(self, given: Mapping[str | int, int] | None) -> None:
        self._given = dict(given or {})

    def choose_device(self, weights: BlockWeights, asked: str | None) -> torch.device:
        """Choose the device to compute on: as given, else an accelerator if the blocks fit.

        Args:
            weights: the blocks.
            asked: a device's name.

        Raises:
            ArgumentError: the device does not exist, or its limit is too small for one block.
        """
        if asked is not None:
            device = named_device(asked)
            self._check_room(device, weights)
            return device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", torch.cuda.current_device())
        give_back_device_memory()
        free = free_device_memory(device)
        allowed = min(free, self._given.get(device.index, free))
        needed = self._needed(weights)
        if needed <= allowed * _SHARE_FOR_WEIGHTS:
            return device
        logger.warning(
            f"Two blocks and the embeddings take {needed / 2**30:.1f} GiB and the accelerator has "
            f"{allowed / 2**30:.1f} GiB: the model computes on the CPU."
        )
        return torch.device("cpu")

    @property
    def host(self) -> int | None:
        """Limit of main memory; ``None`` if not given."""
        return self._given.get("cpu")

    def of(self, device: torch.device) -> int | None:
        """Limit of an accelerator; ``None`` if not given, and for the host."""
        return None if device.type == "cpu" else self._given.get(device.index or 0)

    def _check_room(self, device: torch.device, weights: BlockWeights) -> None:
        limit = self.of(device)
        block = max(map(weights.source_bytes, weights.blocks), default=0)
        rest = weights.source_bytes(REST)
        if limit is not None and limit < rest + 2 * block:
            raise ArgumentError(
                f"max_memory allows {_gib(limit)} on {device}; embeddings and head take "
                f"{_gib(rest)} there, and a block of this model {_gib(block)}, once as it is and "
                "once while it is worked on.",
                f"Allow at least {_gib(rest + 2 * block)}, or compute on the CPU.",
            )

    def bound(self, dataset_args: DatasetArguments, weights: BlockWeights) -> DatasetArguments:
        """Return arguments with an activation budget that keeps the host within its limit.

        Args:
            dataset_args: the user's arguments; a budget given there is kept.
            weights: the blocks; everything else is loaded.

        Raises:
            ArgumentError: the limit is too small for one block.
        """
        give_back_freed(at_least=0)
        used = psutil.Process().memory_info().rss
        block = max(map(weights.source_bytes, weights.blocks), default=0)
        activations, weights.reads_ahead = self.room(used, block)
        if activations is None or dataset_args.activation_budget is not None:
            return dataset_args
        return replace(dataset_args, activation_budget=activations)

    def room(self, used: int, block: int) -> tuple[int | None, bool]:
        """Return the bytes for activations (``None``: no limit), and whether to prefetch blocks.

        Args:
            used: bytes of main memory in use before any block is loaded.
            block: bytes of the largest block.

        Raises:
            ArgumentError: the limit is too small for one block.
        """
        limit = self.host
        if limit is None:
            return None, True
        reads_ahead = limit >= used + block * _BLOCKS_AT_ONCE
        left = limit - used - block * (_BLOCKS_AT_ONCE if reads_ahead else 1)
        if left < block:
            raise ArgumentError(
                f"max_memory allows {_gib(limit)} on the host; {_gib(used)} are in use (libraries "
                f"and embeddings), and a block of this model takes {_gib(block)}, once as it is "
                "and once compressed.",
                f"Allow at least {_gib(used + 2 * block)}.",
            )
        return int(left * _SHARE_FOR_ACTIVATIONS), reads_ahead

    @staticmethod
    def _needed(weights: BlockWeights) -> int:
        blocks = sorted(map(weights.source_bytes, weights.blocks), reverse=True)
        return weights.source_bytes(REST) + sum(blocks[:_BLOCKS_AT_ONCE])


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
