# SPDX-License-Identifier: Apache-2.0
"""What the search of a bit budget takes, beside one forward and one backward of 16 samples.

benchmarks/budget_search.py [--model smollm2] [--rounds 3] [--output benchmarks/results/FILE.md]

The search is timed inside ``oneshot``, which is ended when it is done. Beside it transformers alone
computes the loss of 16 samples, among them those of the search, and its gradients: those of the
activations, which the search needs, and those of the weights too, as training does. All run in
turn, in several rounds, in one process on one thread; processor seconds count, the least of the
rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from budget import BITS, GRADIENTS, SUBJECTS, budgets
from tables import publish, table
from transformers import AutoModelForCausalLM

from llmcompressor import oneshot
from llmcompressor.entrypoints import budget
from llmcompressor.modifiers.quantization import GPTQModifier
from llmcompressor.schemes.budget import DEFAULT_SAMPLES

BATCH = 1


class SearchDoneError(Exception):
    """The search has ended; the run needs not go on."""


@contextmanager
def ended_after_search(spent: list[float]) -> Iterator[None]:
    """Runs inside end when their losses are measured; the processor seconds are appended."""
    plain = budget.measure_losses

    def timed(*args, **fields) -> None:
        started = time.process_time()
        plain(*args, **fields)
        spent.append(time.process_time() - started)
        raise SearchDoneError

    budget.measure_losses = timed
    try:
        yield
    except SearchDoneError:
        pass
    finally:
        budget.measure_losses = plain


def search(model: Path, fields: dict, tokens: list[list[int]]) -> float:
    """Processor seconds of our search."""
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ended_after_search(spent):
        oneshot(
            model=str(model),
            recipe=GPTQModifier(ignore=["lm_head"], **fields),
            dataset=[{"input_ids": one} for one in tokens],
            num_calibration_samples=len(tokens),
            max_seq_length=len(tokens[0]),
            output_dir=Path(folder) / "out",
        )
    return spent[0]


def passes(model: torch.nn.Module, tokens: list[list[int]], *, weights: bool) -> float:
    """Processor seconds of a forward and a backward of each sample."""
    embedding = model.get_input_embeddings()
    model.requires_grad_(weights)
    started = time.process_time()
    for at in range(0, len(tokens), BATCH):
        ids_BT = torch.tensor(tokens[at : at + BATCH])
        inputs_BTC = embedding(ids_BT).detach().requires_grad_()
        model(inputs_embeds=inputs_BTC, labels=ids_BT, use_cache=False).loss.backward()
    spent = time.process_time() - started
    model.zero_grad(set_to_none=True)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SUBJECTS), default="embedded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    subject = SUBJECTS[given.model]
    folder = subject.model()
    tokens = json.loads(subject.calibration([0])[0].read_text())
    tokens = tokens[:: len(tokens) // GRADIENTS][:GRADIENTS]
    fields = next(iter(budgets(subject, [4.25]).values()))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ways: dict[str, Callable[[], float]] = {
        "forward and backward, gradients of activations": lambda: passes(
            model, tokens, weights=False
        ),
        "forward and backward, gradients of weights too": lambda: passes(
            model, tokens, weights=True
        ),
        f"search, of {DEFAULT_SAMPLES} of them": lambda: search(folder, fields, tokens),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, way in ways.items():
            found[name].append(way())
            print(f"{name}: {found[name][-1]:.2f}", flush=True)
    rows = [[name, f"{min(all_):.2f}"] for name, all_ in found.items()]
    bits = ", ".join(map(str, BITS))
    body = (
        f"{subject.title}, {GRADIENTS} x {subject.length} tokens, candidates of {bits} bits, "
        f"groups of {subject.group}; the least of {given.rounds} rounds. Written by "
        f"`benchmarks/budget_search.py`.\n\n{table(['', 'processor seconds, one thread'], rows)}"
    )
    publish("The search of a bit budget", body, given.output)


if __name__ == "__main__":
    main()
