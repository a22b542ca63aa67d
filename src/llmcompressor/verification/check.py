# SPDX-License-Identifier: Apache-2.0
"""A whole checkpoint: files, rules, then the data of one module after another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from llmcompressor.errors import CheckpointError
from llmcompressor.runtime.progress import progress
from llmcompressor.verification.closeness import WeightError
from llmcompressor.verification.expected import Codes, codes_of, expected_tensors, misfits
from llmcompressor.verification.facts import Deployment, Finding, Severity
from llmcompressor.verification.files import Files, open_checkpoint
from llmcompressor.verification.manifest import ReadHashes, check_manifest, read_manifest
from llmcompressor.verification.modules import Entry
from llmcompressor.verification.reference import Reference
from llmcompressor.verification.report import VerificationReport
from llmcompressor.verification.rules import check_view
from llmcompressor.verification.rules.view import View
from llmcompressor.verification.scheme import Scheme, settings_of
from llmcompressor.verification.transformers_model import doubles
from llmcompressor.verification.values import (
    check_codes,
    check_plain,
    check_scales,
    check_static,
    check_tie,
    unexplained,
)

_MOST_WORKERS = 4


@dataclass
class _Done:
    """Result of reading the data of one module."""

    findings: list[Finding] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    error: WeightError | None = None


def verify_files(
    checkpoint: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    *,
    deployment: Deployment | None = None,
    workers: int | None = None,
    kinds: Mapping[str, str] | None = None,
    source: str | os.PathLike[str] | None = None,
) -> VerificationReport:
    """Read a checkpoint as its readers will and say what is wrong with it.

    Each module's data is read once, in slices of rows; the memory does not grow with the model.

    Args:
        checkpoint: its folder.
        reference: the folder of the model that it was made from.
        deployment: where it is to be served.
        workers: threads that read; as many as there are cores by default, four at most.
        kinds: path of a module → ``linear`` or ``embedding``, where the model itself is at hand.
        source: as ``reference``, where only its structure is looked at.

    Returns:
        The report.

    Raises:
        CheckpointError: a folder is not there or holds no model.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        files = stack.enter_context(closing(open_checkpoint(checkpoint)))
        original, before = None, None
        if reference is not None:
            original = _reference(reference, files)
            before = stack.enter_context(closing(original.files))
        elif source is not None:
            before = stack.enter_context(closing(open_checkpoint(source)))
        report = _verify(files, original, deployment, workers, start, kinds)
        return report if before is None else replace(report, findings=_own(report, before))


def _verify(
    files: Files,
    original: Reference | None,
    deployment: Deployment | None,
    workers: int | None,
    start: float,
    kinds: Mapping[str, str] | None,
) -> VerificationReport:
    headers = {name: info for name, info in files.headers.items() if name not in files.broken}
    beside = [path.name for path in files.directory.iterdir()]
    view = View(files.config, headers, files.read, deployment, kinds, beside)
    manifest = read_manifest(files)
    findings = [*files.findings, *check_view(view)]
    if view.is_foreign:
        said = f"It is quantized by {view.method}: nothing was compared with the original."
        remedy = "Measure it beside the original with evaluate, where transformers reads it."
        told = [Finding("R1", "", said, remedy, Severity.WARNING)]
        findings += [] if original is None else told
        original = None
    else:
        findings += [*check_tie(files), *check_static(files)]
    hashes = ReadHashes(() if manifest is None else manifest.tensors)
    files.listener = None if manifest is None else hashes.take
    done = list(_read_all(files, view, original, workers))
    for one in done:
        findings += one.findings
    if manifest is not None:
        with ThreadPoolExecutor(_count(workers)) as pool:
            findings += check_manifest(files, manifest, hashes, pool.map)
    if original is not None:
        used = {name for one in done for name in one.used}
        findings += [*original.unlike(), *original.missing(used), *original.beside()]
    return VerificationReport(
        checkpoint=str(files.directory),
        reference=None if original is None else str(original.files.directory),
        findings=tuple(findings),
        tensors=len(files.places),
        modules=len(view.matrices),
        quantized=len(view.quantized),
        bytes=files.size,
        seconds=time.perf_counter() - start,
        work=original.work.value if original is not None else "",
        errors=tuple(one.error for one in done if one.error is not None),
        has_manifest=manifest is not None,
    )


_OF_CLASS = ("S70", "C2")
"""What is missing or has another size than the class, or other layers, say."""
_GRAVE = (Severity.ERROR, Severity.WARNING)
_SO_BEFORE = "So it is in the original."
_OF_INDEX = ("F5", "F6", "F7", "F8")
"""What an index lists otherwise than files hold: readers go by the files, and so did the run."""


def _own(report: VerificationReport, before: Files) -> tuple[Finding, ...]:
    """The findings; what the model that a checkpoint was made of lacks too is no fault of it."""
    told = [one for one in report.findings if one.rule in _OF_CLASS and one.severity in _GRAVE]
    if not told or any(one.rule not in _OF_INDEX for one in before.findings):
        return report.findings
    theirs = check_view(View(before.config, before.headers, before.read))
    known = {(one.rule, one.module, one.message) for one in theirs}
    return tuple(
        replace(one, message=f"{one.message} {_SO_BEFORE}", severity=Severity.NOTE)
        if one in told and (one.rule, one.module, one.message) in known
        else one
        for one in report.findings
    )


def _reference(reference: str | os.PathLike[str], files: Files) -> Reference:
    original = open_checkpoint(reference)
    unreadable = [one for one in original.findings if one.rule not in _OF_INDEX]
    if unreadable:
        first = unreadable[0]
        raise CheckpointError(
            f"The reference {reference} is damaged: {first.module}: {first.message}", first.remedy
        )
    if settings_of(original.config):
        raise CheckpointError(
            f"The reference {reference} is quantized itself.", "Give the model before it."
        )
    for same in doubles(original.config, original.places):
        if not all(name in files.places for name in same):  # else all were kept
            for name in same[1:]:
                del original.places[name]
    return Reference(original, files)


def _read_all(
    files: Files, view: View, original: Reference | None, workers: int | None
) -> Iterator[_Done]:
    """Every module's data, in the order in which it lies in the files."""
    entries = sorted(view.entries.values(), key=lambda entry: _position(files, entry))
    schemes = {entry.name: scheme for entry, scheme in view.coded}

    def work(entry: Entry) -> _Done:
        return _read(files, view, original, entry, schemes.get(entry.name))

    with (
        progress(len(entries), "Verifying") as advance,
        ThreadPoolExecutor(_count(workers)) as pool,
    ):
        for one in _ordered(pool, work, entries):
            advance()
            yield one


def _count(workers: int | None) -> int:
    return workers or min(os.cpu_count() or 1, _MOST_WORKERS)


def _ordered(
    pool: ThreadPoolExecutor, work: Callable[[Entry], _Done], entries: list[Entry]
) -> Iterator[_Done]:
    try:
        yield from pool.map(work, entries)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _position(files: Files, entry: Entry) -> tuple[str, int]:
    name = next(iter(entry.own))
    place = files.places[f"{entry.name}.{name}" if entry.name else name]
    return str(place.file), place.start


def _read(
    files: Files, view: View, original: Reference | None, entry: Entry, scheme: Scheme | None
) -> _Done:
    done = _Done()
    is_ours = entry.is_quantized and not view.is_foreign
    if is_ours:
        done.findings += [
            one
            for one in check_scales(files, entry)
            if one.severity is Severity.ERROR or view.deployment.concerns(one.server)
        ]
        codes = codes_of_entry(files, view, entry, scheme)
        if codes is not None:
            suspected = check_codes(codes)
            if original is not None:
                found, done.error = original.compare_codes(codes, done.used)
                error = None if found or done.error is None else done.error.relative
                suspected = unexplained(suspected, error)
                done.findings += found
            done.findings += suspected
        elif original is not None:
            # what cannot be decoded has findings already; its original is accounted for
            done.used |= original.account(f"{entry.name}.weight", (entry.rows or 0, 0))
    kept = view.kept_scales(entry) if original is not None else set()
    unpacked = codes_of_entry(files, view, entry, scheme or view.written(entry)) if kept else None
    if original is not None and unpacked is not None:
        told, done.error = original.compare_codes(unpacked, done.used)
        done.findings += told
    for own in entry.own:
        name = f"{entry.name}.{own}" if entry.name else own
        if is_ours and own != "bias":
            continue
        found = list(check_plain(files, name, may_be_zero=not _says_something(view, entry, own)))
        if original is not None and not (unpacked is not None and own == "weight"):
            compared = original.compare_plain(name, done.used)
            # zeros that the original has too are meant; those that it has not are an error
            found = [
                replace(one, severity=Severity.ERROR) if one.rule == "V7" else one
                for one in found
                if compared or one.rule != "V7"
            ]
            found += compared
        done.findings += found
    return done


def _says_something(view: View, entry: Entry, own: str) -> bool:
    """True if nothing comes through where a plain tensor is zero."""
    if own != "weight":
        return False
    if entry.kind in ("embedding", "head"):
        return entry.rows is not None and entry.rows == view.size("vocab_size")
    return view.built is not None and f"{entry.name}.weight" in view.built.silencing


def codes_of_entry(files: Files, view: View, entry: Entry, scheme: Scheme | None) -> Codes | None:
    """The codes of a module whose tensors are all there and fit."""
    columns = view.columns(entry, scheme) if scheme is not None else None
    if scheme is None or not columns or not entry.rows:
        return None
    needed = {
        own: wanted
        for own, wanted in expected_tensors(scheme, entry.rows, columns).items()
        if own.startswith("weight")
    }
    is_whole = all(what == "extra" for _, what, _ in misfits(entry.own, needed))
    if not is_whole and not view.kept_scales(entry):
        return None
    return codes_of(files, entry, scheme, columns)
