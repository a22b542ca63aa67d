# SPDX-License-Identifier: Apache-2.0
"""Section 2: how a scheme is found for a module (S11 to S20)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmcompressor.verification.expected import is_stored_so
from llmcompressor.verification.facts import Severity, TensorInfo
from llmcompressor.verification.layout import EXPERT, PLAIN_FLOATS, Entry
from llmcompressor.verification.resolve import compiled, served_class
from llmcompressor.verification.rules.base import CONFIG, Problem, Rule, View, joined
from llmcompressor.verification.scheme import Group

__all__ = ["RULES"]

_CLASSES = (
    "QKVParallelLinear",
    "MergedColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
    "GateLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
)
_STACK = re.compile(
    r"(?P<experts>(?:.*\.)?experts)\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?$"
)
_WRITE_NAMES = "Write exact names of modules, or patterns that begin with re:.*"


def _is_class(text: str) -> bool:
    """Whether a text looks like the name of a class rather than of a module.

    >>> _is_class("Linear"), _is_class("lm_head"), _is_class("model.layers.0"), _is_class("re:A")
    (True, False, False, False)
    """
    return text[:1].isupper() and "." not in text


def classes_are_known(view: View) -> Iterator[Problem]:
    """S11."""
    for group in view.groups:
        for target in group.targets:
            if not _is_class(target) or target.endswith("Attention"):
                continue
            if not any(target.lower() in name.lower() for name in _CLASSES):
                yield Problem(
                    target,
                    "No class of vLLM has this name within its own, so it selects nothing there.",
                    _WRITE_NAMES,
                    Severity.WARNING,
                )


def patterns_reach_what_they_say(view: View) -> Iterator[Problem]:
    """S12."""
    for text, is_target in _texts(view):
        if not text.startswith("re:"):
            continue
        expression = compiled(text)
        if expression is None:
            yield Problem(text, "It is no regular expression.", "Correct it.")
        elif is_target and _matches_classes_only(view, expression):
            yield Problem(
                text,
                "It matches names of vLLM's classes, so it selects modules that it does not name.",
                "Begin it so that it matches no class, such as re:.*layers.",
                Severity.WARNING,
            )


def _matches_classes_only(view: View, expression: re.Pattern[str]) -> bool:
    """Whether a pattern gets a module by class that it does not match by name."""
    return any(
        expression.match(served_class(entry.kind, view.resolver.unit(entry.name)[0]))
        and not expression.match(entry.name)
        and not expression.match(view.resolver.served(entry.name))
        and not view.choice(entry).ignored
        for entry in view.matrices
    )


def _texts(view: View) -> Iterator[tuple[str, bool]]:
    for group in view.groups:
        yield from ((target, True) for target in group.targets)
    yield from ((text, False) for text in view.ignore)


def orders_agree(view: View) -> Iterator[Problem]:
    """S13."""
    for entry in view.matrices:
        if view.is_plain(entry) or entry.is_expert:
            continue  # experts have rules of their own: S62, T6
        served, written = view.choice(entry), view.choice(entry, "transformers")
        if served.group is None or written.group is None:
            continue
        alone = view.resolver.alone(entry).group
        by_joining = alone is not None and alone.scheme == written.group.scheme  # S14 says so
        if served.group.scheme != written.group.scheme and not by_joining:
            yield Problem(
                entry.name,
                f"vLLM takes {served.group.name} and compressed-tensors {written.group.name}, "
                "which differ.",
                "Let each module match the targets of one group.",
            )


def shards_agree(view: View) -> Iterator[Problem]:
    """S14."""
    for path, shards in view.joined.items():
        groups = {shard.name: view.resolver.alone(shard).group for shard in shards}
        choices = [view.choice(shard) for shard in shards]
        if any(one.ignored or one.mixed for one in choices) or _fused_is_named(view, path):
            continue
        if len({_scheme(group) for group in groups.values()}) > 1:
            said = ", ".join(
                f"{name.rpartition('.')[2]}: {group.name if group else 'none'}"
                for name, group in groups.items()
            )
            yield Problem(
                path,
                f"Its shards have different schemes ({said}); the first one's is used for all.",
                "Quantize all of them alike.",
            )


def _fused_is_named(view: View, path: str) -> bool:
    fused = view.resolver.served(path)
    return any(fused in group.targets for group in view.groups)


def _scheme(group: Group | None) -> object:
    return group.scheme if group is not None else None


def keys_occur_once(view: View) -> Iterator[Problem]:
    """S15."""
    for path in view.joined:
        key = path.rpartition(".")[2]
        if path.count(key) > 1:
            yield Problem(
                path,
                f"{key} occurs more than once in the path, and vLLM replaces every occurrence.",
                "Target it by the class of its modules.",
                Severity.WARNING,
            )


def ignore_is_understood(view: View) -> Iterator[Problem]:
    """S16."""
    for path, shards in view.joined.items():
        if view.choice(shards[0]).mixed:
            flags = {shard.last: view.resolver.alone(shard).ignored for shard in shards}
            said = ", ".join(name for name, flag in flags.items() if flag)
            yield Problem(
                path,
                f"Of its shards only {said} is ignored, and vLLM refuses a mixture.",
                "Ignore all of its shards or none.",
            )
    names = set(view.entries)
    parents = {parent for name in names for parent in _parents(name)}
    for text in view.ignore:
        if _is_class(text):
            yield Problem(
                text,
                "It is a class in ignore; vLLM compares names only.",
                "List the modules by name.",
                Severity.WARNING,
            )
        elif text in parents - names and "." in text and not _all_ignored(view, text):
            yield Problem(
                text,
                "It is a parent of modules; nothing below it is ignored.",
                f"Write re:{re.escape(text)}.* instead.",
                Severity.WARNING,
            )


def _all_ignored(view: View, parent: str) -> bool:
    """Whether other entries ignore every matrix below, as where a router and its matrix are."""
    below = [entry for name, entry in view.entries.items() if name.startswith(f"{parent}.")]
    return all(view.resolver.alone(one).ignored for one in below if one.kind != "other")


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts)))


def patterns_survive_renaming(view: View) -> Iterator[Problem]:
    """S18 and S18a: patterns are compared with vLLM's own paths."""
    renamed = {
        entry.name: view.resolver.served(entry.name)
        for entry in view.matrices
        if view.resolver.served(entry.name) != entry.name
    }
    if not renamed:
        return
    for text, is_target in _texts(view):
        expression = compiled(text)
        if expression is None:
            continue
        missed = [
            name
            for name, served in renamed.items()
            if expression.match(name) and not expression.match(served)
        ]
        missed = [name for name in missed if _matters(view, view.entries[name], is_target)]
        if missed:
            yield Problem(
                text,
                f"It matches {joined(missed, 1)} in the checkpoint, but not "
                f"{renamed[missed[0]]}, as vLLM calls it.",
                _WRITE_NAMES,
            )


def _matters(view: View, entry: Entry, is_target: bool) -> bool:
    """Whether vLLM then does otherwise than the checkpoint's author meant."""
    choice = view.choice(entry)
    if is_target:
        return entry.is_quantized and choice.group is None
    return not entry.is_quantized and choice.group is not None and not view.is_plain(entry)


def renaming(view: View) -> Iterator[Problem]:
    """S18: the prefixes of multimodal models."""
    if not view.family.lookup:
        yield from patterns_survive_renaming(view)


def lookup_paths(view: View) -> Iterator[Problem]:
    """S18a: families that look up under other paths."""
    if view.family.lookup:
        yield from patterns_survive_renaming(view)


def selection_is_complete(view: View) -> Iterator[Problem]:
    """S19."""
    if not view.settings:
        return  # S1 says so for all of them
    yield from _plain_stacks(view)
    for entry in view.matrices:
        if view.is_plain(entry) or (entry.kind == "head" and view.is_tied):
            continue
        choice = view.choice(entry)
        if choice.mixed:
            continue
        scheme = choice.group.scheme if choice.group is not None else None
        wants = scheme is not None and scheme.weights is not None and scheme.format != "dense"
        if wants and not entry.is_quantized:
            # S58 speaks of gates, and S62 of experts of which some are quantized
            if entry.kind != "gate" and not _is_beside_codes(view, entry):
                yield _left_dense(entry, str(scheme))
        elif entry.is_quantized and not wants:
            yield _left_out(view, entry, choice.ignored)
        elif scheme is not None and entry.is_quantized and not is_stored_so(entry, scheme):
            yield Problem(
                entry.name,
                f"Its codes are stored {'packed' if entry.form == 'packed' else 'one by one'}, and "
                f"the format {scheme.format} has them otherwise.",
                "Write the format in which it is stored.",
            )


def _is_stack(info: TensorInfo) -> bool:
    return len(info.shape) == 3 and info.dtype in PLAIN_FLOATS


def _plain_stacks(view: View) -> Iterator[Problem]:
    """Mixtures whose experts are plain, in one tensor, and have a scheme in vLLM."""
    named = (_STACK.match(name) for name, info in view.headers.items() if _is_stack(info))
    for path in dict.fromkeys(found["experts"] for found in named if found is not None):
        first = Entry(f"{path}.0.gate_proj", {}, "linear", "dense")
        choice = view.choice(first)
        scheme = choice.group.scheme if choice.group is not None else None
        wants = scheme is not None and scheme.weights is not None and scheme.format != "dense"
        if wants and not view.is_draft(path) and not view.is_plain(first):
            yield Problem(
                path,
                f"The configuration quantizes its experts to {scheme}, and the file holds plain "
                "ones, in stacks.",
                "Ignore them by a pattern such as re:.*experts.*, or quantize them.",
            )


def _is_beside_codes(view: View, entry: Entry) -> bool:
    found = EXPERT.match(entry.name)
    experts = view.mixtures.get(found["experts"], {}) if found is not None else {}
    return any(each.is_quantized for own in experts.values() for each in own.values())


def _left_dense(entry: Entry, scheme: str) -> Problem:
    return Problem(
        entry.name,
        f"The configuration quantizes it to {scheme}, and the file holds a plain weight.",
        "Add it to ignore, or quantize it.",
    )


def _left_out(view: View, entry: Entry, ignored: bool) -> Problem:
    why = "ignores it" if ignored else "has no target for it"
    silent = entry.form == "coded" and view.family.drops_scales
    return Problem(
        entry.name,
        f"It is quantized, and the configuration {why}"
        + (" (served as if its codes were weights)." if silent else "."),
        "Take it off ignore, or give it a target." if ignored else "Give it a target.",
    )


def plain_modules_are_plain(view: View) -> Iterator[Problem]:
    """S20."""
    for entry in view.quantized:
        if entry.kind not in ("gate", "head") and view.is_plain(entry):
            yield Problem(
                entry.name,
                "vLLM builds this module unquantized in every case.",
                "Ignore it when quantizing.",
            )


RULES = (
    Rule(
        "S11",
        "class targets are parts of vLLM's class names",
        classes_are_known,
        needs=CONFIG,
        severity=Severity.WARNING,
    ),
    Rule("S12", "patterns match at the start, names and classes", patterns_reach_what_they_say),
    Rule("S13", "both orders of precedence choose one scheme", orders_agree),
    Rule("S14", "shards of a joined module have one scheme", shards_agree),
    Rule(
        "S15",
        "a joined module's name occurs once in its path",
        keys_occur_once,
        severity=Severity.WARNING,
    ),
    Rule("S16", "ignore holds names, and all shards or none", ignore_is_understood),
    Rule("S18", "patterns match vLLM's paths", renaming),
    Rule("S18a", "patterns match the paths of lookup", lookup_paths),
    Rule("S19", "selected modules are quantized, no others", selection_is_complete),
    Rule("S20", "what vLLM builds plain is plain", plain_modules_are_plain),
)
