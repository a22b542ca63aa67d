# SPDX-License-Identifier: Apache-2.0
"""A run whose budget is a limit of the KL divergence: several are made and measured, one is kept.

::

    NAME.rounds/        beside the output NAME
        journal         what the candidates are expected to lose, and what each round has measured
        3.partial/      the work folder of a round: that of the best one, and of one that goes on

What the candidates lose is measured once. Each round is an ordinary run, of the recipe with one
choice in the place of the budget, whose output stays in its work folder. The best one becomes the
work folder of the run itself, which goes on from there as any run that was killed when its output
was whole: so gates, verification and reports are those of every run.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import Module

from llmcompressor.args.gates import SIZE
from llmcompressor.budget.rounds import Round, RoundSearch, best_round
from llmcompressor.budget.search import (
    Allowance,
    CurvePoint,
    SettledBudget,
    curve_of,
    figures_of,
    point_of_round,
    tell_choice,
)
from llmcompressor.checkpoint.atomic_output import (
    FILES,
    creation_errors,
    disk_errors,
    rounds_folder,
    work_folder,
)
from llmcompressor.checkpoint.journal import (
    RunIdentity,
    adopt_output,
    remove_rounds,
    reserve_output,
    resumable_run,
    rounds_of,
)
from llmcompressor.datasets.source import Source
from llmcompressor.datasets.text import rendered_at
from llmcompressor.entrypoints.arguments import MOMENT, Job
from llmcompressor.entrypoints.budget import (
    BUDGET,
    OpenBudget,
    losses_of,
    open_budget,
    recorded_budget,
    with_choice,
)
from llmcompressor.entrypoints.gates import Comparison, bytes_of_weights, prepare_comparison
from llmcompressor.entrypoints.run import (
    Blocks,
    MemoryLimits,
    compress,
    identity_with_budget,
    opened_model,
    run,
)
from llmcompressor.entrypoints.statistics import (
    check_statistics,
    keeping_statistics,
    statistics_identity,
)
from llmcompressor.errors import BudgetError, GateError, OutputError
from llmcompressor.logger import log_progress
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.recipe import Recipe
from llmcompressor.recipe.recipe import renew_recipe
from llmcompressor.runtime import durable
from llmcompressor.runtime.progress import join_names
from llmcompressor.runtime.run_record import CHECKING, phase
from llmcompressor.schemes.budget import KL

_LOSSES = "losses"


def run_to_budget(job: Job, data: Source | None) -> Module:
    """Run as :func:`~llmcompressor.entrypoints.run.run`, also where the budget is a divergence.

    Args:
        job: the arguments of the run.
        data: the raw calibration data.

    Raises:
        BudgetError: no choice was measured to keep the limit.
    """
    return run(job, data) if job.kl_budget is None else _MeasuredRun(job)(data)


@dataclass(frozen=True)
class _Ready:
    """What all rounds share.

    Attributes:
        processor: as loaded; ``None`` if nothing needs it.
        batches: of calibration.
        compare: measures an output.
        allowance: what there is to choose from, and how many bits its bytes are.
        modifier: that has the budget.
        key: of all that the choice depends on.
        losses: what each candidate of each set is expected to lose, in nats a token.
        curve: the best choices by size.
        chosen: the places that an interrupted run has chosen, whose output is whole.
    """

    processor: Any
    batches: Sequence[Any] | None
    compare: Comparison
    allowance: Allowance
    modifier: QuantizationMixin
    key: str
    losses: list[list[float]]
    curve: Sequence[CurvePoint]
    chosen: tuple[int, ...] | None


class _MeasuredRun:
    """The steps of a run whose budget is a limit of the divergence.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        assert job.output_dir is not None
        assert job.kl_budget is not None
        self._job, self._target, self._budget = job, job.output_dir, job.kl_budget
        self._recipe, self._resume = job.recipe, job.run_args.resume
        if self._resume == "never":
            with self._reserved():
                remove_rounds(self._target)
        self._journal = rounds_of(self._target)
        self._is_settled = BUDGET in resumable_run(self._target)[0]
        began = (self._journal.fingerprint or {}).get(MOMENT)
        if began is not None:
            job.moment = datetime.fromisoformat(began)

    def __call__(self, data: Source | None) -> Module:
        """Search, and give the best output its name."""
        with disk_errors(self._target):
            return self._run(data)

    def _run(self, data: Source | None) -> Module:
        made, limit = self._recorded(), self._budget.limit
        if self._is_settled:
            return self._finish(self._prepare(data), made)
        with self._reserved():
            ready = self._prepare(data)
            self._make_rounds(ready, made)
        best = best_round(made, limit)
        if not best.keeps(limit) and not self._job.run_args.keep_rejected:
            remove_rounds(self._target)
            raise BudgetError(limit, best.kl, best.size, str(self._target))
        adopt_output(self._place(made.index(best) + 1), self._target)
        return self._finish(ready, made)

    def _reserved(self) -> AbstractContextManager[None]:
        """Keep other runs from the output, and from the rounds."""
        overwrite = self._job.model_args.overwrite
        return reserve_output(self._target, resume=self._resume, overwrite=overwrite)

    def _prepare(self, data: Source | None) -> _Ready:
        """Load the data and the text, and measure what candidates lose, if that is not known."""
        job, opening = self._job, copy.copy(self._job)
        opening.output_dir = self._place(0)  # the output itself is reserved
        with opened_model(opening) as blocks:
            processor = job.load_processor()
            with rendered_at(job.moment):
                batches = job.pooled(job.load_data(blocks.model, processor, data))
            compare = prepare_comparison(job, blocks.model, processor, batches)
            identity = statistics_identity(job, blocks.model, batches)
            if job.statistics is not None:
                check_statistics(job.statistics, identity)
            blocks.load(check=batches is not None, tied=job.model_args.tie_word_embeddings)
            opened = open_budget(job, blocks, partial(identity_with_budget, job, blocks, batches))
            assert opened is not None
            chosen = recorded_budget(job, opened) if self._is_settled else None
            self._check_same(opened, goes_on=chosen is not None)
            losses = self._losses(opened, blocks, batches, identity)
            return _Ready(
                processor,
                batches,
                compare,
                opened.allowance,
                opened.modifier,
                opened.key,
                losses,
                curve_of(opened.finder, opened.allowance, losses),
                None if chosen is None else chosen.places,
            )

    def _check_same(self, opened: OpenBudget, *, goes_on: bool) -> None:
        """Refuse rounds of another run, and a run that must go on and has none."""
        recorded, folder = self._journal.fingerprint, rounds_folder(self._target)
        remedy = (
            "Repeat the call that was broken off, choose another output directory, or pass "
            'resume="never" (--resume never) to throw that away.'
        )
        if recorded is not None:
            differing = RunIdentity(opened.identity).differences(recorded)
            if differing:
                told = join_names(differing, most=4, separator="; ")
                raise OutputError(f"{folder} holds the rounds of another run: {told}.", remedy)
        elif self._resume == "must" and not goes_on:
            raise OutputError(
                f"There is nothing to resume: {folder} is not there.",
                'Start with resume="auto" (the default).',
            )
        if self._is_settled and not goes_on:
            raise OutputError(
                f"{work_folder(self._target)} holds the progress of another run.", remedy
            )

    def _losses(
        self,
        opened: OpenBudget,
        blocks: Blocks,
        batches: Sequence[Any] | None,
        identity: RunIdentity,
    ) -> list[list[float]]:
        """What the candidates lose, as it was recorded; it is recorded if not.

        Statistics that are asked for are kept here: later runs have no budget any more.
        """
        journal, job = self._journal, self._job
        limits = MemoryLimits(job.run_args.max_memory)
        room, device_memory = partial(blocks.activation_room, limits.room), limits.of(blocks.device)
        losses: list[list[float]] | None = journal.choices.get(_LOSSES)
        is_known = losses is not None
        with keeping_statistics(
            job, blocks, batches, identity, room, device_memory=device_memory
        ) as writer:
            if losses is None or writer is not None:
                losses = losses_of(
                    opened.options,
                    job,
                    blocks,
                    batches,
                    room,
                    device_memory=device_memory,
                    keep_in=writer,
                )
        if not is_known:
            with creation_errors(self._target):
                durable.make_folder(rounds_folder(self._target))
                journal.begin(opened.identity)
            journal.decide(_LOSSES, losses)
        return list(losses)

    def _place(self, number: int) -> Path:
        return rounds_folder(self._target) / str(number)

    def _recorded(self) -> list[Round]:
        """The rounds that an interrupted run has measured."""
        numbers = map(str, itertools.count(1))
        known = itertools.takewhile(self._journal.choices.__contains__, numbers)
        return [Round.from_json(self._journal.choices[number]) for number in known]

    def _make_rounds(self, ready: _Ready, made: list[Round]) -> None:
        """Make and measure rounds until the search is over, and keep the best one of them."""
        budget, options = self._budget, ready.allowance.options
        search = RoundSearch(options.sizes, ready.losses, budget.limit, budget.rounds)
        while (choice := search.following(made)) is not None:
            number = len(made) + 1
            folder = self._make(number, choice.options, ready)
            with phase(CHECKING):
                kl = ready.compare(folder)["kl"]
            kl = kl if kl is not None and math.isfinite(kl) else None
            one = Round(choice.options, choice.bytes, choice.loss, kl, bytes_of_weights(folder))
            self._journal.decide(str(number), one.as_json())
            made.append(one)
            told = "is kept" if one.keeps(budget.limit) else "is not kept"
            log_progress(
                f"Round {number} of at most {budget.rounds}: {one.size:,} bytes of weights, "
                f"expected {one.loss:.4g}, measured {one.divergence:.4g}: {budget.limit:g} {told}."
            )
            self._remove_all_but(made.index(best_round(made, budget.limit)) + 1, made)

    def _make(self, number: int, places: Sequence[int], ready: _Ready) -> Path:
        """Make the model of a choice, and return the folder of its files."""
        trial = copy.copy(self._job)
        trial.output_dir, trial.engine, trial.gates = self._place(number), None, {}
        trial.model_args = replace(trial.model_args, overwrite=True)
        of_run: dict[str, Any] = {"resume": self._resumes, "verify": False, "report": False}
        of_run["save_statistics"] = None  # the last run keeps them
        trial.run_args = replace(trial.run_args, **of_run)
        trial.recipe = self._chosen(ready, places)
        trial.settled, trial.is_held = SettledBudget(ready.key, tuple(places)), True
        with opened_model(trial) as blocks:
            compress(trial, blocks, ready.processor, ready.batches)
        held = work_folder(trial.output_dir) / FILES
        return held if held.is_dir() else trial.output_dir

    @property
    def _resumes(self) -> str:
        """How a round goes on: its progress is that of this run."""
        return "mixed" if self._resume == "mixed" else "auto"

    def _arguments(self) -> dict[str, Any]:
        """The arguments that make the output again, by the recipe without a budget."""
        found, gates = dict(self._job.call["arguments"]), self._job.gates
        if gates:
            found["gates"] = gates
        unused = () if gates.keys() - {SIZE} else ("gate_dataset", "gate_reference")
        return {name: one for name, one in found.items() if name not in unused}

    def _chosen(self, ready: _Ready, places: Sequence[int]) -> Recipe:
        options = ready.allowance.options
        return renew_recipe(with_choice(self._recipe, ready.modifier, options, places))

    def _remove_all_but(self, kept: int, made: Sequence[Round]) -> None:
        """Remove the outputs of rounds; of a run in memory none can become the output."""
        for number in range(1, len(made) + 1):
            place = self._place(number)
            for folder in (place, *([] if number == kept else [work_folder(place)])):
                if folder.exists():
                    durable.remove(folder)

    def _finish(self, ready: _Ready, made: Sequence[Round]) -> Module:
        """Give the best output its name, or that of what is rejected."""
        job, budget, allowance = self._job, self._budget, ready.allowance
        places, figures = ready.chosen, None
        if made:
            best = best_round(made, budget.limit)
            point = point_of_round(allowance, best)
            tell_choice(allowance.options, point)
            places, figures = best.places, figures_of(allowance.options, ready.curve, point, made)
            if not best.keeps(budget.limit):  # measured again, and rejected
                job.gates = {**job.gates, KL: budget.limit}
        assert places is not None
        job.settled = SettledBudget(ready.key, places, figures)
        job.recipe = self._chosen(ready, places)
        job.run_args = replace(job.run_args, resume=self._resumes)
        job.call = {**job.call, "arguments": self._arguments()}
        try:
            with opened_model(job) as blocks:
                model = compress(job, blocks, ready.processor, ready.batches)
        except GateError:
            remove_rounds(self._target)
            raise
        remove_rounds(self._target)
        return model
