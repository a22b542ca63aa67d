# SPDX-License-Identifier: Apache-2.0
"""A checkpoint beside its decoded weights, and beside the original, in an installed engine."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmcompressor.engines.compare import (
    Tolerance,
    divergence,
    is_far,
    module_errors,
    tolerance_of,
)
from llmcompressor.engines.decoded import (
    Source,
    UndecodableError,
    blocks_of_each_kind,
    check_room,
    write_cut,
    write_decoded,
)
from llmcompressor.engines.overruled import (
    as_notes,
    explained,
    overruled,
    refusals,
    warned,
)
from llmcompressor.engines.process import Answer, check_engine, run_job
from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.runtime.progress import join_names
from llmcompressor.runtime.temporary import temporary_folder
from llmcompressor.verification.facts import Deployment, Finding, Severity
from llmcompressor.verification.files import open_checkpoint
from llmcompressor.verification.report import EngineRun, VerificationReport
from llmcompressor.verification.rules.view import View
from llmcompressor.verification.scheme import Scheme, parse_args
from llmcompressor.verification.transformers_model import build, quiet_transformers

_ROWS = 32
"""Rows of inputs of a module: the norms of its outputs over them are alike within a factor of 2."""
_WHOLE = "Compare config.json with that of the original, or compress the model anew."
_ANEW = "Compress the model anew, or report it to the engine if transformers agrees with verify."
_TEXTS = (
    "The river rose three metres in one night. By morning the lower road was gone, and the people "
    "of the valley carried what they could to the school on the hill.",
    "import json\n\n\ndef read(path):\n    with open(path) as file:\n        data = json.load(file)"
    "\n    return {key: value for key, value in data.items() if value is not None}\n",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long does it take?\nAnswer: It "
    "takes two hours and twenty-five minutes, since",
    "Les mathématiques sont l'art de donner le même nom à des choses différentes. 1, 1, 2, 3, 5, "
    "8, 13, 21, 34, 55, 89,",
)
_MOST_TOKENS = 40
"""Tokens of a prompt."""
_LEAST_TOKENS = 4
_OF_PLATFORM = re.compile(r"\bkernels?\b|backend|capability|platform", re.IGNORECASE)
_LATE = (
    "Give it more time by --timeout (timeout=; of a run --verify-timeout, verify_timeout=), or see "
    "what else the machine does."
)
_KILLED = (
    "Leave it more memory, or verify where there is more; where memory was not short, see who "
    "ended it."
)
_AS_TOLD = "Do what those rules say, or serve it with another server."
_OF_MODEL = "Take a release of the engine that knows the model."
_CRASHED = "Take another release of the engine or another machine."
_CPU = "A device that the engine has a kernel for runs it."


@dataclass(frozen=True)
class Engine:
    """An engine and how it is started.

    Attributes:
        name: of :data:`~llmcompressor.engines.process.ENGINES`.
        python: the interpreter of its environment.
        timeout: seconds for a model; ``None`` for the usual limit.
    """

    name: str
    python: str
    timeout: float | None = None

    @classmethod
    def checked(
        cls, name: str, python: str | os.PathLike[str] | None = None, timeout: float | None = None
    ) -> Engine:
        """An engine that is there.

        Raises:
            ArgumentError: it is not, or the time limit is no positive number.
        """
        return cls(name, check_engine(name, python, timeout), timeout)


def verify_with(
    report: VerificationReport,
    engine: Engine,
    *,
    deployment: Deployment | None = None,
    is_trial: bool = False,
) -> VerificationReport:
    """Run a checkpoint in an engine, and add what came of it to its report.

    Where it runs and computes what its decoded weights do, rules of that server which say otherwise
    become notes, as far as such a run can tell.

    Args:
        report: of ``verify_files``; its reference is run as well.
        engine: the engine.
        deployment: that the report is of.
        is_trial: take only as many of the first blocks as hold one of each kind.

    Returns:
        The report with the engine's findings (E1 to E10) and figures.

    Raises:
        ArgumentError: the engine cannot be imported, or there is no room for the decoded model.
        CheckpointError: a folder cannot be read.
    """
    with (
        closing(open_checkpoint(report.checkpoint)) as files,
        temporary_folder("llmcompressor-engine") as work,
    ):
        headers = {name: one for name, one in files.headers.items() if name not in files.broken}
        view = View(files.config, headers, files.read)
        source = Source(files, view, blocks_of_each_kind(files, view) if is_trial else None)
        trial = _Trial(report, engine, source, work)
        trial.run()
        rules = trial.settled(deployment or Deployment())
        found = (*rules, *trial.findings)
        return replace(report, findings=found, engine=trial.told)


@dataclass
class _Trial:
    """A checkpoint in an engine.

    Attributes:
        report: what is known without the engine.
        engine: the engine.
        source: the checkpoint.
        work: an empty folder.
        findings: what was found.
        told: the figures.
    """

    report: VerificationReport
    engine: Engine
    source: Source
    work: Path
    findings: list[Finding] = field(default_factory=list)
    told: EngineRun = field(init=False)

    def __post_init__(self) -> None:
        self.told = EngineRun(self.engine.name, "refused", blocks=self.source.blocks)

    def run(self) -> None:
        """Do all of it, as far as the engine goes along."""
        if not self.source.view.is_foreign:
            check_room(self.source)
        folder = self._served()
        answer = self._ask(folder, "quantized")
        self.told = replace(self.told, versions=answer.versions)
        if answer.is_crash and answer.stage != "importing":
            self._tell_crash(answer)
            return
        if answer.may_lack_a_kernel and self.engine.name == "vllm":
            answer = self._with_stand_ins(folder, answer)
        if answer.error:
            if self.told.status != "not run":
                self._tell_failure(answer)
            return
        if self.told.status != "loaded, not run":
            self.told = replace(self.told, status="run")
        if broken := [name for name, one in answer.outputs.items() if one.isnan().any()]:
            kind, _, module = broken[0].partition("/")
            self._say("E5", module if kind == "module" else "", "It gives NaN.", _WHOLE)
        if drawn := self._lost(answer):
            self.told = replace(self.told, status="failed")
            said = f"It finds no values for {join_names(drawn)}, and draws them at random."
            self._say("E5", "", f"{said} {self._beside()}", _WHOLE)
            return
        self._compare(answer)

    def _served(self) -> Path:
        """The folder that the engine reads."""
        if self.source.blocks is None:
            return self.source.files.directory
        write_cut(self.source, self.work / "cut")
        return self.work / "cut"

    def _with_stand_ins(self, folder: Path, refused: Answer) -> Answer:
        """Try again without the engine's kernels, which tells the file from the platform."""
        again = self._ask(folder, "quantized", stand_ins=True)
        if again.error and again.is_refusal and _OF_PLATFORM.search(again.error):
            # of experts, which have no stand-ins
            self.told = replace(self.told, status="not run")
            said = f"This platform has no kernel for it, and nothing was loaded: {again.error}"
            self._say("E4", "", _sentence(said), _CPU, Severity.WARNING)
            return again
        if again.is_broken_off:
            return again
        if again.error and again.error != refused.error and _OF_PLATFORM.search(refused.error):
            first = _sentence(refused.error)
            said = f"{first} With products in place of its kernels: {again.error}"
            return replace(again, error=said)
        if again.error:
            return refused
        self.told = replace(self.told, status="loaded, not run")
        said = (
            f"This platform has no kernel for it: {_sentence(refused.error)} It was loaded by the "
            "engine's own loader, and the product with what was loaded was compared."
        )
        self._say("E4", "", said, _CPU, Severity.WARNING)
        return again

    def _tell_failure(self, answer: Answer) -> None:
        """E1 or E5, with the rules that have told it."""
        if answer.stage == "importing" and not (answer.signal and answer.is_broken_off):
            raise ArgumentError(
                f"{self.engine.name} cannot be used by {self.engine.python}: "
                f"{_sentence(answer.error)}",
                _remedy_of_end(answer) or "Mend that environment, or name another by --python.",
            )
        if answer.is_broken_off:
            self._tell_nothing(answer)
            return
        did = "refuses it" if answer.is_refusal else "has loaded it and failed"
        status = "refused" if answer.is_refusal else "failed"
        control = "" if self._rules else self._fails_alike(answer)
        self.told = replace(self.told, status=status, alike=control)
        said = f"The engine {did}: {_sentence(answer.error)}"
        if control:
            said += f" So it does with the {control} model: its codes are not the reason."
        elif answer.is_refusal:
            said += f" {self._beside()}"
        remedy = _OF_MODEL if control else _AS_TOLD if self._rules else _WHOLE
        self._say("E1" if answer.is_refusal else "E5", "", said, remedy)

    def _lost(self, answer: Answer) -> list[str]:
        """What an engine draws at random, but for what the file has no values for (S70)."""
        view = self.source.view
        plain = build(view.config, view.plain) if answer.drawn and view.plain else None
        lacking = () if plain is None else plain.missing
        return [name for name in answer.drawn if name not in lacking]

    def _tell_nothing(self, answer: Answer) -> None:
        """E10: the engine was ended from outside."""
        self.told = replace(self.told, status="not run")
        said = (
            f"The engine was ended while {answer.stage}: {answer.error}. That says nothing of the "
            "checkpoint."
        )
        self._say("E10", "", said, _remedy_of_end(answer), Severity.WARNING)

    def _tell_crash(self, answer: Answer) -> None:
        """E5, or E10 where another model makes it crash as well: it is not the codes then."""
        said = f"The engine crashes while {answer.stage}: {answer.error}."
        if control := self._fails_alike(answer):
            self.told = replace(self.told, status="not run", alike=control)
            said += f" So it does with the {control} model: that says nothing of the checkpoint."
            self._say("E10", "", said, _CRASHED, Severity.WARNING)
            return
        self.told = replace(self.told, status="failed")
        self._say("E5", "", said, _WHOLE)

    def _fails_alike(self, answer: Answer) -> str:
        """``original`` or ``decoded``, where that model fails in the same way; else empty."""
        if self.report.reference is not None:
            name, other = "original", self._ask_original()
        elif not self._write_decoded():
            name, other = "decoded", self._ask(self.work / "decoded", "decoded", rows=0)
        else:
            return ""
        is_alike = other.is_crash if answer.is_crash else other.stage == answer.stage
        return name if is_alike and other.error and not other.is_broken_off else ""

    def _beside(self) -> str:
        rules = ", ".join(self._rules)
        return f"So do its rules ({rules})." if rules else "No rule of verify has told it."

    @cached_property
    def _rules(self) -> tuple[str, ...]:
        """The rules that have told it: what refuses it here is a warning if no server was named."""
        name, findings = self.engine.name, self.report.findings
        told = [
            one for one in findings if one.severity is Severity.ERROR and one.server in ("", name)
        ]
        told += warned(findings, self.source, name)
        return tuple(dict.fromkeys(one.rule for one in told))

    # ------------------------------------------------------------------ what that says of rules

    def settled(self, deployment: Deployment) -> tuple[Finding, ...]:
        """The findings without the engine; what it has shown to be otherwise is a note (E6).

        Args:
            deployment: that they are of.
        """
        is_sound = not any(one.severity is Severity.ERROR for one in self.findings)
        told = refusals(self.report.findings, self.engine.name)
        if not (told and is_sound and self.told.status == "run"):
            return self.report.findings
        shown = overruled(told, self.source, self.engine.name, deployment)
        rules = tuple(dict.fromkeys(one.rule for one in shown))
        said = explained(rules, dict.fromkeys(one.rule for one in told if one not in shown))
        self._say("E6", "", said, "Go by what was compared.", Severity.NOTE)
        self.told = replace(self.told, overruled=rules)
        return as_notes(self.report.findings, shown)

    # ------------------------------------------------------------------ what it computes

    def _compare(self, answer: Answer) -> None:
        """The modules and the distributions, beside those of the decoded model."""
        reason, remedy = self._write_decoded(), ""
        if not reason:
            decoded = self._ask(self.work / "decoded", "decoded", amplitudes=answer.amplitudes)
            reason = f"The decoded model does not run: {decoded.error}" if decoded.error else ""
            if lost := self._lost(decoded):
                reason = f"Of the decoded model it finds no values for {join_names(lost)}."
            remedy = _remedy_of_end(decoded)
        if reason:
            said = f"Nothing was compared. {_sentence(reason)}"
            self._say("E7", "", said, remedy or "Measure it with evaluate.", Severity.WARNING)
            if self.told.status == "run":
                self.told = replace(self.told, status="run, not compared")
            return
        view = self.source.view
        cache = parse_args(view.settings.get("kv_cache_scheme"))
        schemes = [scheme for _, scheme in view.coded]
        tolerance = tolerance_of(schemes, cache, is_rounded=bool(answer.rounded))
        self._tell_rounding(answer, schemes)
        self._compare_modules(answer, decoded, tolerance)
        apart = divergence(answer.outputs, decoded.outputs)
        self.told = replace(self.told, decoded=apart)
        if not apart.kl <= tolerance.kl and not math.isnan(apart.kl):
            said = (
                f"What it computes is not what its decoded weights compute: {apart}; a KL of "
                f"{tolerance.kl} is allowed."
            )
            self._say("E3", "", said, _ANEW)
        self._compare_original(answer, decoded)

    def _tell_rounding(self, answer: Answer, schemes: Sequence[Scheme]) -> None:
        """E9: inputs are rounded that no scheme has in 8 bits."""
        packed = [one for one in schemes if one.weights is not None and one.weights.bits == 4]
        if answer.rounded and any(one.inputs is None or one.inputs.bits != 8 for one in packed):
            said = (
                f"On this processor the engine rounds the inputs of {len(answer.rounded)} modules "
                "to 8 bits, which is not what their scheme says."
            )
            remedy = "Measure the quality on the device that will serve it."
            self._say("E9", "", said, remedy, Severity.NOTE)

    def _write_decoded(self) -> str:
        """Why the decoded model cannot be written; empty if it was."""
        if self.source.view.is_foreign:
            return f"It is quantized by {self.source.view.method}, which verify does not decode."
        if self.source.files.findings:
            return "Its files are damaged."
        try:
            write_decoded(self.source, self.work / "decoded")
        except UndecodableError as error:
            return f"The codes of {error} cannot be decoded."
        return ""

    def _compare_modules(self, ours: Answer, theirs: Answer, tolerance: Tolerance) -> None:
        errors = module_errors(ours.outputs, theirs.outputs)
        if not errors:
            return
        worst = max(errors, key=lambda name: errors[name][0])
        self.told = replace(self.told, modules=len(errors), worst=worst, error=errors[worst][0])
        wrong = [name for name, (error, _) in errors.items() if not error <= tolerance.module]
        for name in wrong:
            error, output = errors[name]
            said = (
                f"Its output {output} is {error:.3g} of its size away from the product with the "
                f"decoded weight; {tolerance.module:.3g} is allowed."
            )
            self._say("E2", name, said, _ANEW)

    def _compare_original(self, ours: Answer, decoded: Answer) -> None:
        """Distances from the original, in the same engine."""
        if self.report.reference is None:
            return
        answer = self._ask_original()
        if answer.error:
            said = (
                f"The original does not run in the engine: {_sentence(answer.error)} Nothing was "
                "compared with it."
            )
            remedy = _remedy_of_end(answer) or "Compare it by evaluate."
            self._say("E7", "", said, remedy, Severity.WARNING)
            return
        apart = divergence(ours.outputs, answer.outputs)
        beside = divergence(decoded.outputs, answer.outputs)
        self.told = replace(self.told, original=apart, decoded_original=beside)
        if is_far(apart):
            said = f"It computes another model than the original: {apart}."
            self._say("E8", "", said, "Compress the model anew, or with more bits.")

    # ------------------------------------------------------------------ the engine's process

    def _ask_original(self) -> Answer:
        assert self.report.reference is not None
        with closing(open_checkpoint(self.report.reference)) as files:
            view = View(files.config, files.headers, files.read)
            original = Source(files, view, self.source.blocks)
            folder = files.directory
            if original.blocks is not None:
                folder = self.work / "original"
                write_cut(original, folder)
            return self._ask(folder, "original", rows=0)

    def _ask(self, model: Path, name: str, **further: Any) -> Answer:
        folder = self.work / f"job-{name}{'-stand-ins' if 'stand_ins' in further else ''}"
        folder.mkdir()
        logger.info(f"Running the {name} model in {self.engine.name}.")
        job = {
            "engine": self.engine.name,
            "model": str(model.resolve()),
            "dtype": self.source.dtype,
            "prompts": self._prompts,
            "vocabulary": self.source.view.size("vocab_size") or 2,
            "rows": _ROWS,
            "scales": self._input_scales,
            **further,
        }
        return run_job(job, folder, self.engine.python, self.engine.timeout)

    @cached_property
    def _prompts(self) -> list[list[int]]:
        view = self.source.view
        positions = view.size("max_position_embeddings")
        folder = self.source.files.directory
        return prompts_for(folder, view.size("vocab_size") or 2, positions)

    @cached_property
    def _input_scales(self) -> dict[str, float]:
        """Module → its static scale of inputs, where that is one number."""
        files, last = self.source.files, ".input_scale"
        return {
            name.removesuffix(last): float(files.read(name).float().reshape(()))
            for name in self.source.names
            if name.endswith(last)
            and files.places[name].info.numel == 1
            and name not in files.broken
        }

    def _say(
        self,
        rule: str,
        module: str,
        message: str,
        remedy: str,
        severity: Severity = Severity.ERROR,
    ) -> None:
        self.findings.append(Finding(rule, module, message, remedy, severity, self.engine.name))


def _remedy_of_end(answer: Answer) -> str:
    """What to do about a process that was ended; empty if it ended by itself."""
    return _LATE if answer.is_late else _KILLED if answer.is_broken_off else ""


def _sentence(text: str) -> str:
    """A text with a mark at its end.

    >>> _sentence("KeyError: 'up'"), _sentence("No.")
    ("KeyError: 'up'.", 'No.')
    """
    return text if text.endswith((".", "!", "?")) else f"{text}."


def prompts_for(folder: Path, vocabulary: int, positions: int | None) -> list[list[int]]:
    """Token ids of a few prompts.

    Args:
        folder: the checkpoint. Without a tokenizer that can be read ids are drawn at random.
        vocabulary: tokens that the model has.
        positions: the longest text that it takes.
    """
    most = min(_MOST_TOKENS, positions or _MOST_TOKENS)
    found = [ids[:most] for ids in _tokenized(folder)]
    if all(len(ids) >= _LEAST_TOKENS and max(ids) < vocabulary for ids in found) and found:
        return found
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(most)] for _ in _TEXTS]


def _tokenized(folder: Path) -> list[list[int]]:
    from transformers import AutoTokenizer  # noqa: PLC0415  # loads much

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
            return [list(tokenizer(text)["input_ids"]) for text in _TEXTS]
    except Exception:  # a tokenizer of any kind, which is not what is looked at
        return []
