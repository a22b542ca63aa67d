# SPDX-License-Identifier: Apache-2.0
"""Measure checkpoints on token ids with transformers alone, in a process of its own.

The checkpoint is read the way a user reads it.  Nothing that wrote it is imported, so what is
measured is what was saved.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from run_one import serve
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM
from wide import multiply_in_float32


def load(path: str) -> torch.nn.Module:
    """The model in the data type of its checkpoint, ready to evaluate."""
    multiply_in_float32()
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def log_probabilities(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """``[B, T - 1, V]`` float32: of each token but the first, given those before it."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    return logits_BTV.float().log_softmax(-1)


def evaluate(checkpoint: str, dense: str | None, ids_NT: torch.Tensor, batch: int) -> dict:
    """What a checkpoint loses, read as a user reads it."""
    return lost(load(checkpoint), load(dense) if dense else None, ids_NT, batch)


@torch.no_grad()
def lost(
    model: torch.nn.Module, reference: torch.nn.Module | None, ids_NT: torch.Tensor, batch: int
) -> dict:
    """Loss, and where the dense model is given the distance from it, per predicted token.

    Losses of each window stand beside the mean: two checkpoints are compared window by window.
    """
    divergence = agreed = 0.0
    losses_N = torch.zeros(len(ids_NT), dtype=torch.float64)
    for start in range(0, len(ids_NT), batch):
        ids_BT = ids_NT[start : start + batch]
        target_B = ids_BT[:, 1:].flatten()
        found_BV = log_probabilities(model, ids_BT).flatten(0, 1)
        losses_BT = cross_entropy(found_BV, target_B, reduction="none").view(len(ids_BT), -1)
        losses_N[start : start + batch] = losses_BT.double().mean(1)
        if reference is not None:
            right_BV = log_probabilities(reference, ids_BT).flatten(0, 1)
            divergence += kl_div(found_BV, right_BV, reduction="sum", log_target=True).item()
            agreed += (found_BV.argmax(-1) == right_BV.argmax(-1)).sum().item()
    tokens, loss = ids_NT[:, 1:].numel(), losses_N.mean().item()
    result = {"tokens": tokens, "loss": loss, "perplexity": math.exp(loss)}
    result["windows"] = [round(each, 5) for each in losses_N.tolist()]
    if reference is not None:
        result |= {"divergence": divergence / tokens, "agreement": agreed / tokens}
    return result


def read(file: Path | str) -> torch.Tensor:
    """``[N, T]``: the token ids of a file."""
    return torch.tensor(json.loads(Path(file).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("tokens", type=Path, nargs="?", help="JSON file with lists of token ids")
    parser.add_argument("report", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--serve", action="store_true", help="take jobs from standard input")
    parser.add_argument("--dense", help="the original, to compare with")
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()
    if given.serve:
        serve(lambda job: evaluate(job["checkpoint"], job["dense"], read(job["tokens"]), 4))
        return
    report = evaluate(given.checkpoint, given.dense, read(given.tokens), given.batch)
    given.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
