# SPDX-License-Identifier: Apache-2.0
"""Section 10: missing and unexpected tensors (S70, S71), and sizes against ``config.json`` (C2)."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.rules.base import Problem, Rule, View, joined
from llmcompressor.verification.rules.tensors import KNOWN

__all__ = ["RULES"]

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?:layers|h|blocks|block))\.(?P<index>\d+)\.(?P<rest>.+)$")
_EXPERTS = re.compile(r"\.experts\.\d+\.")
_MOST_SHOWN = 4
_COPY = "Copy them from the original model."
_TOWERS = re.compile(r"vision|visual|audio|mtp|draft|eagle|speech|encoder")
_HIDDEN_IN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj")
_HIDDEN_OUT = ("o_proj", "down_proj")
# Where hidden sizes are those of the configuration for every module of these names.
_PLAIN_TYPES = frozenset(
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "olmo2",
        "olmoe",
        "granite",
        "smollm3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "deepseek_v3",
        "glm4_moe",
    ]
)


def layers_are_complete(view: View) -> Iterator[Problem]:
    """S70: a layer that lacks what its like have, and layers that are not there at all."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, entry in view.entries.items():
        if entry.last in view.transforms:
            continue  # one of the layers that share it holds it
        match = _LAYER.match(name)
        if match is not None and not _TOWERS.search(match["stack"]):
            rest = _EXPERTS.sub(".experts.", f".{match['rest']}.")
            stacks[match["stack"]][int(match["index"])].add(rest.strip("."))
    count = view.size("num_hidden_layers")
    for stack, layers in stacks.items():
        # a layer further on is a draft layer, whatever it holds
        real = {index: own for index, own in layers.items() if not _is_draft(index, count)}
        yield from _incomplete(view, stack, real)
        if count is not None and len(stacks) == 1:
            lacking = count - len(real)
            if lacking:
                # the first of them are enough, and a wrong count may be any number
                missing = (str(index) for index in itertools.count() if index not in layers)
                shown = ", ".join(itertools.islice(missing, min(lacking, _MOST_SHOWN)))
                more = f" and {lacking - _MOST_SHOWN} more" if lacking > _MOST_SHOWN else ""
                yield Problem(stack, f"It lacks the layers {shown}{more} of {count}.", _COPY)


def _is_draft(index: int, count: int | None) -> bool:
    return count is not None and index >= count


def _incomplete(view: View, stack: str, layers: dict[int, set[str]]) -> Iterator[Problem]:
    if view.config.get("block_configs"):
        return
    kinds = Counter(frozenset(own) for own in layers.values())
    for index, own in layers.items():
        fuller = [kind for kind in kinds if own < kind]
        if kinds[frozenset(own)] > 1 or not fuller:
            continue
        lacking = sorted(min(fuller, key=len) - own)
        yield Problem(
            f"{stack}.{index}",
            f"It lacks {joined(lacking)}, which other layers have.",
            _COPY,
            # layers of other architectures may differ by intention
            None if _is_plain_type(view) else Severity.WARNING,
        )


def _is_plain_type(view: View) -> bool:
    return str(view.text.get("model_type") or "") in _PLAIN_TYPES


def all_is_there(view: View) -> Iterator[Problem]:
    """S70."""
    yield from layers_are_complete(view)
    yield from _ends(view)


def _ends(view: View) -> Iterator[Problem]:
    """Embeddings and head."""
    kinds = {entry.kind for entry in view.matrices}
    if not view.matrices or view.text.get("vocab_size") is None:
        return
    is_decoder = any("CausalLM" in str(name) for name in view.config.get("architectures") or ())
    if "embedding" not in kinds and is_decoder:
        yield Problem("", "The file holds no embedding.", _COPY)
    if "head" not in kinds and is_decoder and not view.is_tied and _says_untied(view):
        yield Problem(
            "lm_head", "The file holds no output head, and embeddings are not tied.", _COPY
        )


def _says_untied(view: View) -> bool:
    return any("tie_word_embeddings" in holder for holder in (view.text, view.config))


def nothing_is_strange(view: View) -> Iterator[Problem]:
    """S71."""
    for one in view.misfits:
        if one.what == "extra" and one.own not in KNOWN:
            yield Problem(one.entry.name, one.sentence, "Remove the tensor.")


def sizes_are_those_of_the_config(view: View) -> Iterator[Problem]:
    """C2."""
    if not _is_plain_type(view):
        return
    for entry in view.matrices:
        if _TOWERS.search(entry.name):
            continue
        if not entry.is_quantized and "weight" in entry.own:
            columns: int | None = entry.own["weight"].shape[1]
        else:
            scheme = view.written(entry)
            columns = view.columns(entry, scheme) if scheme is not None else None
        yield from _wrong_size(view, entry, columns)


def _wrong_size(view: View, entry: Entry, columns: int | None) -> Iterator[Problem]:
    hidden, vocabulary = view.size("hidden_size"), view.size("vocab_size")
    rows = inner = None
    if entry.kind == "head" or entry.last == "embed_tokens":
        rows, inner = vocabulary, hidden
    elif entry.last in _HIDDEN_IN:
        inner = hidden
    elif entry.last in _HIDDEN_OUT:
        rows = hidden
    for what, found, wanted in (("rows", entry.rows, rows), ("columns", columns, inner)):
        if wanted is not None and found is not None and found != wanted:
            yield Problem(
                entry.name,
                f"It has {found} {what}, and config.json says {wanted}.",
                "Correct config.json, or compress the model anew.",
            )


RULES = (
    Rule(
        "C2",
        "sizes are those of config.json",
        sizes_are_those_of_the_config,
        server="",
    ),
    Rule("S70", "no module is missing", all_is_there),
    Rule("S71", "no tensor is unexpected", nothing_is_strange),
)
