# SPDX-License-Identifier: Apache-2.0
"""A checkpoint against the model that it was made from."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

import torch
import yaml
from torch import Tensor

from llmcompressor.runtime.limits import copy_values, parse_json
from llmcompressor.verification.closeness import Closeness, WeightError, apart, outliers
from llmcompressor.verification.expected import CHUNK, Codes
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.files import (
    DROPS,
    DTYPES,
    Changed,
    Files,
    Run,
    left_by_run,
    runs_since,
    tensor_chunks,
    without_prefixes,
)
from llmcompressor.verification.modules import PLAIN_FLOATS, text_settings
from llmcompressor.verification.moves import ROTATING, SCALING, Moves
from llmcompressor.verification.stacked_tensors import (
    USUAL,
    Converted,
    DroppedExperts,
    ExpertRows,
    Made,
    Source,
    sources_in,
    stacks_of,
)
from llmcompressor.verification.transformers_model import ABSENT, config_changes, passes_over
from llmcompressor.verification.values import HEADS, Twins, compare_tie, equal, same_tensor

_COPY = "Copy it from the original model."
_AGAIN = "Compress the model anew."
_RECOMPUTED = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.inv_freq|rotary_emb\.(?:cos|sin)_cached|position_ids"
    r"|attn\.(?:bias|masked_bias))$"
)
_QPARAM = re.compile(
    r"(?:.*\.)?(?:weight|input|output|q|k|v)_(?:packed|scale|zero_point|global_scale|shape)$"
)
_STACK = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<own>gate_up_proj|down_proj)$")
_OTHER_NAMES = {usual: short for short, usual in USUAL.items()}
_MODIFIER = re.compile(r"\b([A-Z]\w*Modifier)\b")
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "chat_template.jinja",
)


_REWRITTEN = {
    "generation_config.json": frozenset({"transformers_version", "_from_model_config"}),
    "tokenizer.json": frozenset({"truncation", "padding", "version"}),
}
"""Keys that whoever saves such a file again may change."""
_MOST_KEYS = 5


class Work(Enum):
    """Kind of change to the weights, by the recipe that lies beside them."""

    NEAREST = "rounded to the nearest"
    SOLVED = "solved for"
    MOVED = "moved between layers"
    UNKNOWN = "not known"


_WORK = {
    "QuantizationModifier": Work.NEAREST,
    "AutoRoundModifier": Work.SOLVED,
    "GPTQModifier": Work.SOLVED,
    "HQQModifier": Work.SOLVED,
}
_MOVES = SCALING | ROTATING


def work_of(files: Files, runs: Sequence[Run] = (), original: Files | None = None) -> Work:
    """The kind of change to a checkpoint's weights since the original.

    Args:
        files: the checkpoint; the recipe in its folder has the stages of all runs or, where the
            file of a run before could not be read, of the latest.
        runs: those that made it, the latest first.
        original: what it is compared with; stages that its recipe has too are true of both.
    """
    return _kind_of(_modifiers_of(files, runs, original))


def _modifiers_of(files: Files, runs: Sequence[Run], original: Files | None) -> set[str]:
    stages = _stages_of(files)
    shared = [] if original is None else _stages_of(original)
    if len(shared) < len(stages) and stages[: len(shared)] == shared:
        stages = stages[len(shared) :]
    names = {name for _, found in stages for name in found}
    if not names:
        return names
    if runs and DROPS not in runs[0].records and any(DROPS in run.records for run in runs[1:]):
        names.discard(DROPS)
    names.update(name for run in runs[1:] for name in run.records if name != DROPS)
    return names


def _kind_of(names: Collection[str]) -> Work:
    if not _MOVES.isdisjoint(names):
        return Work.MOVED
    found = {_WORK.get(name, Work.UNKNOWN) for name in names} or {Work.UNKNOWN}
    if Work.UNKNOWN in found:
        return Work.UNKNOWN
    return Work.NEAREST if found == {Work.NEAREST} else Work.SOLVED


def _stages_of(files: Files) -> list[tuple[str, list[str]]]:
    """The stages of the recipe beside a checkpoint: the name of each and its modifiers."""
    try:
        text = (files.directory / "recipe.yaml").read_text(encoding="utf-8")
        document = copy_values(yaml.safe_load(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    if not isinstance(document, Mapping):
        return [("", _MODIFIER.findall(text))]
    stages = ((str(key), _MODIFIER.findall(str(value))) for key, value in document.items())
    return [(key, found) for key, found in stages if found]


class Reference:
    """The original model's files, and what of them has been found again.

    Args:
        files: the original.
        checkpoint: what was made of it.
    """

    def __init__(self, files: Files, checkpoint: Files) -> None:
        self.files = files
        self.checkpoint = checkpoint
        runs = runs_since(checkpoint, files)
        names = _modifiers_of(checkpoint, runs, files)
        self.work = _kind_of(names)
        is_told = self.work is not Work.UNKNOWN and names <= _WORK.keys() | _MOVES
        self._is_known = is_told and not any(run.trained for run in runs)
        self._moves = Moves(checkpoint, files, runs, names)
        self._close: dict[str, Closeness] = {}
        self._meant = Changed(runs)
        self._experts = ExpertRows(files)
        self._converted = Converted(files)
        self._twins = Twins(files)
        self._changes = config_changes(checkpoint.config, files.config)
        self._dropped = DroppedExperts(checkpoint, self._changes, runs)
        self._by_tail: dict[str, list[str]] = {}
        for name in files.places:
            self._by_tail.setdefault(without_prefixes(name), []).append(name)

    def find(self, name: str, shape: Sequence[int] | None = None) -> list[Source]:
        """Places of the original of a tensor; more than one only within a stack.

        Args:
            name: the tensor's name in the checkpoint, for a module's weight ``….weight``.
            shape: the shape that it must have there.
        """
        before = self._dropped.before(name)
        return [] if before is None else self._find(before, shape)

    def account(self, name: str, shape: Sequence[int]) -> set[str]:
        """The originals of a tensor that is not compared; in parts they are kept in mind here."""
        sources = self.find(name, shape)
        if not sources:
            self._converted.find(name)
        return {source.name for source in sources}

    def _find(self, name: str, shape: Sequence[int] | None) -> list[Source]:
        for candidate in _candidates(name):
            if candidate in self.files.places:
                return [Source(candidate)]
        stacks = list(stacks_of(name)) if shape is not None else []
        for stack in stacks:
            found = stack if stack in self.files.places else self._near(stack)
            found = found or self._converted.renamed(stack)
            if found is not None and shape is not None:
                return sources_in(self.files, found, name, shape, self.files.config)
        near = None if stacks and name.endswith(".weight") else self._near(name)
        return [] if near is None else [Source(near)]

    def _near(self, name: str) -> str | None:
        """The one tensor of the original whose name differs in its prefixes alone."""
        near = self._by_tail.get(without_prefixes(name), [])
        return near[0] if len(near) == 1 else None

    def _nearest(self, sources: list[Source], start: int, ours: Tensor) -> Source | None:
        """The source that some rows are nearest to."""
        if len(sources) < 2:
            return sources[0] if sources else None

        def distance(source: Source) -> float:
            theirs = self.rows(source, start, start + len(ours)).float()
            return float(torch.linalg.vector_norm(ours - theirs))

        return min(sources, key=distance)

    def rows(self, source: Source, start: int, stop: int) -> Tensor:
        """Rows of the original of a weight."""
        if isinstance(source, Made):
            return source.values[start:stop]
        if source.expert is None:
            return self.files.read(source.name, start, stop)
        return self._experts.read(source, start, stop)

    def shape(self, source: Source) -> tuple[int, ...]:
        """The shape of the original of a weight."""
        return source.shape(self.files.places[source.name].info.shape)

    def compare_codes(
        self, codes: Codes, used: set[str]
    ) -> tuple[list[Finding], WeightError | None]:
        """A quantized weight against its original.

        Args:
            codes: the codes.
            used: takes the names of tensors of the original that were found.
        """
        name = codes.entry.name
        if self._dropped.is_unknown(f"{name}.weight"):
            return [], None
        source = self._source_of(codes) or self._tied(f"{name}.weight")
        if source is None:
            source = self._made(f"{name}.weight", (codes.rows, codes.columns))
        if source is None or source.name in self.files.broken:
            return [_finding("R2", name, "The original has no such weight.", _AGAIN)], None
        if not isinstance(source, Made):  # one of which a part is found may lack another
            used.add(source.name)
        shape = self.shape(source)
        if shape != (codes.rows, codes.columns):
            said = f"Its shape is {[codes.rows, codes.columns]} and was {list(shape)}."
            return [_finding("R3", name, said, _AGAIN)], None
        close = Closeness(codes.args, with_slopes=self._is_known and self.work is not Work.NEAREST)
        self._compare_parts(close, codes, source)
        return list(self._judge(name, close)), close.of(name)

    def _compare_parts(self, close: Closeness, codes: Codes, source: Source) -> None:
        dtype = self._computed(codes)
        unit = self._roundoff(source, codes, dtype)
        least = apart(dtype) if codes.args.kind == "float" else 0.0
        whole = self._moved(codes, source) if self.work is Work.MOVED else None
        for part in codes.parts():
            stop = part.start + len(part.units)
            theirs = (
                self.rows(source, part.start, stop) if whole is None else whole[part.start : stop]
            )
            original = theirs.float().reshape(part.units.shape)
            close.add(part, original)
            if self.work is Work.NEAREST and not codes.is_unpacked:
                rounded = original if dtype is None else original.to(dtype).float()
                close.bound(part, rounded, unit, least)

    def _moved(self, codes: Codes, source: Source) -> Tensor:
        """What a weight would be without rounding, as a whole."""
        decoded = torch.cat([(part.units * part.scale).flatten(1) for part in codes.parts()])
        original = self.rows(source, 0, codes.rows).float()
        return self._moves.expected(codes.entry.name, decoded, original)

    def _made(self, name: str, shape: Sequence[int]) -> Source | None:
        """A tensor that transformers makes of the original's, or a part of it."""
        found = self._converted.find(name)
        stacks = stacks_of(name) if found is None else ()
        made = (self._converted.find_expert(stack, name, shape) for stack in stacks)
        return found or next(filter(None, made), None)

    def _source_of(self, codes: Codes) -> Source | None:
        sources = self.find(f"{codes.entry.name}.weight", (codes.rows, codes.columns))
        first = next(codes.parts(), None) if len(sources) > 1 else None
        if first is None:
            return sources[0] if sources else None
        return self._nearest(sources, first.start, (first.units * first.scale).flatten(1))

    def _computed(self, codes: Codes) -> torch.dtype | None:
        """The dtype of the weight that was rounded: a run may have converted the original to it.

        Scales have it, or where they are no plain floats what ``config.json`` says.
        """
        stored = codes.entry.own["weight_scale"].dtype
        if stored in PLAIN_FLOATS:
            return DTYPES[stored]
        config = self.checkpoint.config
        said = (
            str(holder.get(key) or "").removeprefix("torch.")
            for holder in (config, text_settings(config))
            for key in ("dtype", "torch_dtype")
        )
        plain = {str(DTYPES[name]).removeprefix("torch."): DTYPES[name] for name in PLAIN_FLOATS}
        return next((plain[name] for name in said if name in plain), None)

    def _roundoff(self, source: Source, codes: Codes, dtype: torch.dtype | None) -> float:
        """The relative error of one rounding in the dtype that was calculated in."""
        names = [self.files.places[source.name].info.dtype, codes.entry.own["weight_scale"].dtype]
        kinds = {DTYPES[name] for name in names if name in PLAIN_FLOATS} | {dtype} - {None}
        return max((torch.finfo(kind).eps / 2 for kind in kinds if kind), default=0.0)

    def _tied(self, name: str) -> Source | None:
        """The original under another name: for a head the input embedding, say."""
        if name.rpartition(".")[0].endswith(HEADS):
            for each, place in self.files.places.items():
                is_embedding = each.endswith(("embed_tokens.weight", "wte.weight"))
                if is_embedding and len(place.info.shape) == 2:
                    return Source(each)
        found = self._twins.find(name)
        return None if found is None else Source(found)

    def _judge(self, name: str, close: Closeness) -> Iterator[Finding]:
        if self.work is Work.MOVED and not self._moves.is_comparable:
            return
        # what is not known may have been scaled
        said = close.complaint(name, may_be_scaled=self.work is Work.UNKNOWN)
        if not said and close.beyond:
            said = (
                f"{close.beyond} of its values are not rounded to the nearest: the worst is "
                f"{close.worst:.3g} times as far off as {close.args} allows."
            )
        if said:
            yield _finding("R3", name, said, _AGAIN)
        elif close.with_slopes:
            self._close[name] = close

    def unlike(self) -> Iterator[Finding]:
        """R3: what shows only beside other modules, after all were compared."""
        for name, said, is_error in outliers(self._close):
            severity = Severity.ERROR if is_error else Severity.WARNING
            yield _finding("R3", name, said, _AGAIN, severity)
        if self.work is Work.MOVED and self._is_known:
            yield from self._moves.disagreements()

    def compare_plain(self, name: str, used: set[str]) -> list[Finding]:
        """A tensor that is not quantized against its original."""
        place = self.checkpoint.places[name]
        if _QPARAM.match(name) and place.info.numel <= 1 << 16 and not self.find(name):
            return []
        if self._dropped.is_unknown(name):
            return []
        sources = self.find(name, place.info.shape)
        if not sources:
            found = self._from_single_experts(name, used)
            found = self._from_converted(name) if found is None else found
            return self._added(name) if found is None else found
        source = sources[0]
        used.add(source.name)
        if source.name in self.files.broken or name in self.checkpoint.broken:
            return []
        shape = self.shape(source)
        if shape != place.info.shape:
            return self._of_another_shape(name, source, shape)
        if source.expert is not None:
            ours = self.checkpoint.read(name)
            # one of an expert's own, so that it may be compared in each way
            same = any(equal(ours, self.rows(each, 0, len(ours))) for each in sources)
        else:
            same = all(
                equal(ours, theirs)
                for ours, theirs in zip(
                    tensor_chunks(self.checkpoint, name, CHUNK),
                    tensor_chunks(self.files, source.name, CHUNK),
                    strict=True,
                )
            )
        return [] if same else [self._changed(name, source)]

    def _of_another_shape(self, name: str, source: Source, shape: tuple[int, ...]) -> list[Finding]:
        """A tensor with an entry per expert may have lost those of the experts that are gone."""
        ours = self.checkpoint.places[name].info.shape
        if self._dropped.is_unknown(name, shape, ours):
            return []
        kept = self._dropped.of(name)
        dimension = self._dropped.entries(name, shape, ours)
        if kept is None or dimension is None or source.expert is not None:
            said = f"Its shape is {list(ours)} and was {list(shape)}."
            return [_finding("R4", name, said, _COPY)]
        if dimension:
            theirs = self.files.read(source.name)[:, list(kept.kept)]
            same = equal(self.checkpoint.read(name), theirs)
        else:
            same = all(
                equal(
                    self.checkpoint.read(name, now, now + 1),
                    self.files.read(source.name, before, before + 1),
                )
                for now, before in enumerate(kept.kept)
            )
        return [] if same else [self._changed(name)]

    def _changed(self, name: str, source: Source | None = None) -> Finding:
        may_be = self.work in (Work.MOVED, Work.UNKNOWN)
        meant = self.work is Work.MOVED or name.rpartition(".")[0] in self._meant
        if self.work is Work.MOVED and self._is_known and source is not None:
            ours = self.checkpoint.read(name)
            theirs = self.rows(source, 0, len(ours)) if ours.ndim else self.files.read(source.name)
            meant = self._moves.is_explained(name, ours, theirs)
        return _finding(
            "R4",
            name,
            "It is not quantized, and differs from the original.",
            "Check that a modifier was meant to change it." if may_be else _COPY,
            Severity.NOTE if meant else Severity.ERROR,
        )

    def _added(self, name: str) -> list[Finding]:
        tied = self._tied(name)
        if tied is not None:
            same = same_tensor(self.checkpoint, name, self.files, tied.name)
            return [] if same else [self._changed(name, tied)]
        said = "The original has no such tensor."
        return [_finding("R2", name, said, "Check where it comes from.", Severity.WARNING)]

    def _from_single_experts(self, name: str, used: set[str]) -> list[Finding] | None:
        """A stack of experts whose originals were stored one by one."""
        match = _STACK.match(name)
        shape = self.checkpoint.places[name].info.shape
        if match is None or len(shape) != 3:
            return None
        owns = ("down_proj",) if match["own"] == "down_proj" else ("gate_proj", "up_proj")
        for index in range(shape[0]):
            pieces = []
            for own in owns:
                sources = self.find(f"{match['experts']}.{index}.{own}.weight")
                if not sources:
                    return None
                used.add(sources[0].name)
                pieces.append(self.files.read(sources[0].name))
            ours = self.checkpoint.read(name, index, index + 1)[0]
            if not equal(ours, torch.cat(pieces)):
                return [self._changed(name)]
        return []

    def _from_converted(self, name: str) -> list[Finding] | None:
        """A tensor of a module whose original has another partition."""
        made = self._converted.find(name)
        if made is None or made.name in self.files.broken:
            return None
        ours = self.checkpoint.places[name].info.shape
        if made.values.shape != ours:
            said = f"Its shape is {list(ours)} and was {list(made.values.shape)}."
            return [_finding("R4", name, said, _COPY)]
        same = equal(self.checkpoint.read(name), made.values)
        return [] if same else [self._changed(name)]

    def missing(self, used: set[str]) -> Iterator[Finding]:
        """R1 and R5: what of the original was not found in the checkpoint."""
        used, left = used | self._converted.whole(), left_by_run(self.checkpoint)
        yield from compare_tie(self.checkpoint, self.files)
        yield from self._unrecorded()
        for name in self.files.places:
            if name in used or _RECOMPUTED.match(name) or self._dropped.is_gone(name):
                continue
            twin = self._twin(name, used)
            if twin is not None:
                continue
            if passes_over(self.checkpoint.config, name):
                said = "Its layer takes no such tensor: the class passes over it."
                remedy = "Nothing; model_free_ptq keeps every tensor."
                yield _finding("R1", name, said, remedy, Severity.NOTE)
                continue
            if name in left:
                said = "The run left it behind, as its report says: the class does not read it."
                remedy = "Nothing, if no server reads it; model_free_ptq keeps every tensor."
                yield _finding("R1", name, said, remedy, Severity.WARNING)
                continue
            head = name.endswith(("lm_head.weight", "embed_out.weight"))
            yield _finding(
                "R5" if head else "R1",
                name,
                "The original has its own output head, and the checkpoint has none."
                if head
                else "The original has this tensor, and the checkpoint has not.",
                _COPY,
            )

    def _unrecorded(self) -> Iterator[Finding]:
        """Experts were dropped, and none that is left can be told from the others."""
        if self._dropped.is_unrecorded:
            theirs, ours = next(iter(self._dropped.changed.values()))
            yield _finding(
                "R1",
                "config.json",
                f"Of {theirs} experts {ours} are left, and no compression_report.json says which: "
                "they and their routers are not compared.",
                "Put the report of the run that dropped them beside the checkpoint, or compare it "
                "with the model that has them dropped.",
            )

    def _twin(self, name: str, used: set[str]) -> str | None:
        """Another matrix of the original with the same content, which was found.

        Vectors do not count: norms of ones are alike and still not one tensor.
        """
        info = self.files.places[name].info
        alike = (
            other
            for other in used
            if other != name and self.files.places[other].info == info and len(info.shape) > 1
        )
        return next(
            (other for other in alike if same_tensor(self.files, name, self.files, other)), None
        )

    def beside(self) -> Iterator[Finding]:
        """R6: the configuration and what lies beside the weights."""
        for change in self._changes:
            if not self._dropped.expects(change.path):
                remedy = _COPY if change.before is not ABSENT else "Remove it."
                yield _finding("R6", "config.json", change.sentence, remedy, Severity.WARNING)
        for name in _SIDE_FILES:
            theirs, ours = (one.directory / name for one in (self.files, self.checkpoint))
            if theirs.is_file() and not ours.is_file():
                said = "The original has this file, and the checkpoint has not."
                yield _finding("R6", name, said, _COPY, Severity.WARNING)
            elif theirs.is_file():
                yield from _compare_beside(name, ours, theirs)


def _compare_beside(name: str, ours: Path, theirs: Path) -> Iterator[Finding]:
    """A file beside the weights, as readers take it: of JSON by its values."""
    if ours.read_bytes() == theirs.read_bytes():
        return
    if not name.endswith(".json"):
        yield _finding("R6", name, "It is not the original's.", _COPY, Severity.WARNING)
        return
    try:
        before = parse_json(theirs.read_text(encoding="utf-8"))
    except ValueError:
        return  # whatever became of it, nobody could read it before
    try:
        after = parse_json(ours.read_text(encoding="utf-8"))
    except ValueError as error:
        said = f"It is no JSON, as the original's is: {error}."
        yield _finding("R6", name, said, _COPY)
        return
    kept = _REWRITTEN.get(name, frozenset())
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted({*before, *after} - kept)
        changed = [key for key in keys if before.get(key) != after.get(key)]
    else:
        changed = [] if before == after else ["its content"]
    if changed:
        said = f"It is not the original's: {', '.join(changed[:_MOST_KEYS])} differ."
        yield _finding("R6", name, said, _COPY, Severity.WARNING)


def _finding(
    rule: str, module: str, message: str, remedy: str, severity: Severity = Severity.ERROR
) -> Finding:
    return Finding(rule, module, message, remedy, severity)


def _candidates(name: str) -> Iterator[str]:
    yield name
    parent, _, own = name.rpartition(".")
    base, _, last = parent.rpartition(".")
    other = USUAL.get(last) or _OTHER_NAMES.get(last)
    if other is not None:
        yield f"{base}.{other}.{own}"
