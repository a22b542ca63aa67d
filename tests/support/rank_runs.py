# SPDX-License-Identifier: Apache-2.0
"""Whole runs over ranks, and how much their outputs differ; each rank calls the functions here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tests.support.rank_group import Group
from tests.support.small_models import token_rows, tree
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmcompressor import oneshot
from llmcompressor.logger import logger

LINEARS = {"targets": "Linear", "ignore": ["lm_head"]}
_NIBBLES = 8
"""Codes of four bits in a word."""
_QUALITY = 0.05
"""By how much the errors of logits may differ, as a share."""


def compress(
    model: str, output: Path, modifiers: dict[str, Any], **given: Any
) -> tuple[list[str], Tensor]:
    """Compress a folder to another one.

    Returns:
        Warnings that the work is not shared, and the logits of the model that was returned.
    """
    told: list[Any] = []
    handler = logger.add(told.append, level="WARNING")
    try:
        compressed = oneshot(
            model=model,
            recipe={"modifiers": modifiers},
            dataset=token_rows(16, 64),
            output_dir=str(output),
            verify=False,
            report=False,
            **given,
        )
    finally:
        logger.remove(handler)
    return [str(line) for line in told if "do not share" in line], _logits(compressed)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """The model's logits ``[16, 64, vocabulary]``, float32, on tokens that no run calibrates with.

    Of a few tokens in bfloat16 the errors of two equally good runs differ by 7 %.
    """
    ids = torch.tensor(token_rows(16, 64, seed=1)["input_ids"])
    found: Tensor = model(ids.to(model.device)).logits
    return found.float()


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint; packed codes of four bits one by one."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            packed = tensor.dtype == torch.int32 and name.endswith("weight_packed")
            found[name] = _unpacked(tensor) if packed else tensor
    return found


def _unpacked(words: Tensor) -> Tensor:
    shifts = 4 * torch.arange(_NIBBLES, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1).to(torch.int8)


def share_differing(one: Path, other: Path) -> float:
    """The share of codes that differ; without codes, of weights that are zero in one alone."""
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    codes = [name for name, tensor in ours.items() if tensor.dtype == torch.int8]
    if not codes:
        ours, theirs = ({k: v == 0 for k, v in each.items()} for each in (ours, theirs))
    compared = codes or [name for name, tensor in ours.items() if bool(tensor.any())]
    differing = sum(int((ours[name] != theirs[name]).sum()) for name in compared)
    return differing / sum(ours[name].numel() for name in compared)


class _Ended(NamedTuple):
    """A run's output folder, and what :func:`compress` returned on each rank."""

    output: Path
    found: list[tuple[list[str], Tensor]]


class Runs:
    """Runs of recipes, each once with every number of ranks.

    Args:
        groups: number of ranks → a function that runs another one on all of them.
        model: the folder to compress.
        work: a folder that all ranks see.
    """

    def __init__(self, groups: dict[int, Group], model: Path, work: Path) -> None:
        self._groups, self._model, self._work = groups, model, work

    def check(self, modifiers: dict[str, Any], *, most: float = 0.001, **given: Any) -> None:
        """Compare what 1, 2 and 4 ranks write of a recipe.

        Without error propagation a module sees the same inputs in all runs, so that only the order
        of sums differs. With it, a single code that differs changes all later modules a little.

        Args:
            modifiers: of the recipe.
            most: the share of codes that may differ.
            **given: further arguments of the runs.
        """
        alike = {
            count: self._run(count, modifiers, f"alike{count}", propagate_error=False, **given)
            for count in self._groups
        }
        for count in (2, 4):
            assert (share := share_differing(alike[count][0], alike[1][0])) <= most, share
        first, again, alone = (
            self._run(count, modifiers, name, **given)
            for count, name in ((2, "first"), (2, "again"), (1, "alone"))
        )
        assert tree(first[0]) == tree(again[0])
        original = _logits(AutoModelForCausalLM.from_pretrained(self._model))
        errors = [float((one[1] - original).norm()) for one in (first, alone)]
        assert errors[0] == pytest.approx(errors[1], rel=_QUALITY)

    def check_undivided(self, modifiers: dict[str, Any]) -> None:
        """The first of two ranks does what one process does, byte for byte, and says so.

        Args:
            modifiers: of the recipe; the last one needs all samples in one process.
        """
        alone, pair = (self._ended(count, modifiers, f"undivided{count}") for count in (1, 2))
        assert [len(told) for told, _ in pair.found] == [1, 0]
        assert all(f"{list(modifiers)[-1]} needs all samples" in one for one in pair.found[0][0])
        assert tree(alone.output) == tree(pair.output)
        assert all(torch.equal(of_model, alone.found[0][1]) for _, of_model in pair.found)

    def _run(
        self, count: int, modifiers: dict[str, Any], name: str, **given: Any
    ) -> tuple[Path, Tensor]:
        ended = self._ended(count, modifiers, name, **given)
        told, of_model = zip(*ended.found, strict=True)
        assert list(told) == [[]] * count
        assert all(torch.equal(one, of_model[0]) for one in of_model)
        return ended.output, of_model[0]

    def _ended(self, count: int, modifiers: dict[str, Any], name: str, **given: Any) -> _Ended:
        output = self._work / f"{len(list(self._work.iterdir())):03}-{name}"
        found = self._groups[count](compress, str(self._model), output, modifiers, **given)
        assert all(isinstance(one, tuple) for one in found), found
        return _Ended(output, found)
