# SPDX-License-Identifier: Apache-2.0
"""Section 11: ``transform_config`` (S73 to S77)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcompressor.verification.cached_states import passed_over
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.resolve import compiled
from llmcompressor.verification.rules.base import CONFIG, DEPLOYMENT, Problem, Rule, View, joined

__all__ = ["RULES", "in_the_forward"]

_KEYS = frozenset({"type", "apply", "randomize", "requires_grad", "block_size", "head_dim"})
_KEYS_MORE = frozenset({"precision"})
_APPLY_KEYS = frozenset({"targets", "location", "inverse", "ignore"})
_ONLINE = ("input", "output")
_CACHE = ("k_cache", "q_attn")


def _transforms(view: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    settings = view.settings.get("transform_config")
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    for name, raw in groups.items() if isinstance(groups, Mapping) else ():
        if isinstance(raw, Mapping):
            yield str(name), raw


def _applied(view: View) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    for name, raw in _transforms(view):
        applied = raw.get("apply")
        for one in applied if isinstance(applied, list) else ():
            if isinstance(one, Mapping):
                yield name, raw, one


def _reached(view: View, one: Mapping[str, Any]) -> list[Entry]:
    """The matrices that an application names."""
    targets = one.get("targets")
    texts = [targets] if isinstance(targets, str) else list(targets or ())
    ignored = one.get("ignore")
    left_out = [ignored] if isinstance(ignored, str) else list(ignored or ())
    return [
        entry
        for entry in view.matrices
        if any(_names(text, entry) for text in texts)
        and not any(_names(text, entry) for text in left_out)
    ]


def _names(text: str, entry: Entry) -> bool:
    expression = compiled(text)
    if expression is not None:
        return expression.match(entry.name) is not None
    return text == entry.name or (text == "Linear" and entry.kind in ("linear", "head"))


def transforms_are_read(view: View) -> Iterator[Problem]:
    """S73."""
    for name, raw in _transforms(view):
        unknown = sorted(set(raw) - _KEYS - _KEYS_MORE)
        if unknown:
            yield Problem(name, f"It has keys that are refused: {joined(unknown)}.", "Remove them.")
    for name, _, one in _applied(view):
        unknown = sorted(set(one) - _APPLY_KEYS)
        if unknown:
            yield Problem(name, f"It has keys that are refused: {joined(unknown)}.", "Remove them.")
        location = str(one.get("location"))
        if location in _CACHE and _reached(view, one):
            yield Problem(
                name,
                f"The location {location} raises for Linear modules.",
                "Leave the rotation of queries and keys out.",
            )
    yield from _never_applied(view)


def _never_applied(view: View) -> Iterator[Problem]:
    """Queries and keys that are turned in the forward; all servers leave them as they are."""
    missed = _missed(view, keys_are_rounded=_keys_are_quantized(view))
    for name, raw in _transforms(view):
        places = [str(one.get("location")) for one in _of_cache(raw) if not _reached(view, one)]
        if name in missed:
            yield Problem(
                name,
                f"Its locations ({joined(places)}) are never applied, silently: {missed[name]}.",
                "Leave the rotation of queries and keys out.",
            )
        elif places:
            yield Problem(
                name,
                f"Its locations ({joined(places)}) are never applied. That changes nothing: "
                "queries and keys are turned alike, and keys are not quantized.",
                "Leave the rotation of queries and keys out.",
                Severity.NOTE,
            )


def _missed(view: View, *, keys_are_rounded: bool) -> dict[str, str]:
    """Transforms of queries and keys without which outputs are others, each with the reason."""
    found = {}
    for name, raw in _transforms(view):
        turned = [one for one in _of_cache(raw) if not _reached(view, one)]
        if turned and (raw.get("randomize") or not _are_alike(turned)):
            found[name] = "queries and keys are not turned alike, so outputs are wrong"
        elif turned and keys_are_rounded:
            found[name] = "keys are quantized with the scales of turned ones"
    return found


def _of_cache(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    applied = raw.get("apply")
    each = applied if isinstance(applied, list) else ()
    return [one for one in each if isinstance(one, Mapping) and one.get("location") in _CACHE]


def _are_alike(turned: list[Mapping[str, Any]]) -> bool:
    """Whether q and k have the same matrix at the same places, so that q k^T is what it was."""
    forms = [[one.get(key) or None for key in ("targets", "ignore", "inverse")] for one in turned]
    both = sorted(str(one.get("location")) for one in turned) == sorted(_CACHE)
    return both and forms[0] == forms[1]


def _keys_are_quantized(view: View) -> bool:
    attention = (group.scheme for group in view.groups if group.scheme.weights is None)
    return bool(view.settings.get("kv_cache_scheme")) or any(
        scheme.inputs is not None for scheme in attention
    )


def transforms_reach_linears(view: View) -> Iterator[Problem]:
    """S74."""
    for name, _, one in _applied(view):
        if one.get("location") not in _ONLINE:
            continue
        lost = [
            entry.name
            for entry in _reached(view, one)
            if entry.is_expert or entry.kind in ("head", "embedding") or view.is_plain(entry)
        ]
        if lost:
            yield Problem(
                name,
                f"It is online on {joined(lost)}, where it is silently not applied.",
                "Fuse it into the weights, or leave these modules out.",
            )


def transforms_restrict(view: View) -> Iterator[Problem]:
    """S75."""
    online = [each for each in _applied(view) if each[2].get("location") in _ONLINE]
    for tp in view.deployment.tp:
        if online and tp > 1:
            yield Problem(
                online[0][0],
                f"Online transforms are not served over {tp} devices.",
                "Serve it on one device.",
                view.deployment.tp_severity(tp),
            )
            break
    for name, _, one in online:
        reached = _reached(view, one)
        biased = [entry.name for entry in reached if "bias" in entry.own]
        if biased:
            yield Problem(
                name,
                f"It is online on {joined(biased)}, which have a bias.",
                "Leave these modules out.",
            )
        if one.get("location") == "input":
            yield from _partly(view, name, reached)


def _partly(view: View, name: str, reached: list[Entry]) -> Iterator[Problem]:
    names = {entry.name for entry in reached}
    for path, shards in view.joined.items():
        with_it = [shard for shard in shards if shard.name in names]
        if with_it and len(with_it) < len(shards):
            yield Problem(
                path,
                f"Only some of its shards have the input transform {name}.",
                "Transform the input of all of them.",
            )


def transforms_have_tensors(view: View) -> Iterator[Problem]:
    """S76: modules with one matrix share it, so that one of them may hold it for all."""
    for name, raw, one in _applied(view):
        location = str(one.get("location"))
        if location not in _ONLINE:
            continue
        size = raw.get("head_dim") or raw.get("block_size")
        stored = [
            (entry, view.headers.get(f"{entry.name}.{name}_{location}.weight"))
            for entry in _reached(view, one)
        ]
        held = {_channels(view, entry, location) for entry, info in stored if info is not None}
        for entry, info in stored:
            if info is None and (held if size else _channels(view, entry, location) in held):
                continue
            if info is None:
                yield Problem(
                    entry.name, f"It has no {name}_{location}.weight.", "Compress it anew."
                )
            elif len(info.shape) != 2 or (size and info.shape != (size, size)):
                yield Problem(
                    entry.name,
                    f"Its {name}_{location}.weight has the shape {list(info.shape)}.",
                    "Compress it anew.",
                )


def _channels(view: View, entry: Entry, location: str) -> int | None:
    """How wide a module's input or output is, however its weight is stored."""
    if location == "output":
        return entry.rows
    scheme = view.written(entry) if entry.is_quantized else None
    if scheme is not None:
        return view.columns(entry, scheme)
    weight = entry.own.get("weight")
    return None if weight is None or len(weight.shape) != 2 else weight.shape[1]


def in_the_forward(view: View) -> list[str]:
    """The rotations that a server has to make while it runs."""
    online = (name for name, _, one in _applied(view) if one.get("location") in _ONLINE)
    return list(dict.fromkeys(online))


def transformers_applies_none(view: View) -> Iterator[Problem]:
    """S77."""
    online = in_the_forward(view)
    if online:
        yield Problem(
            "transform_config",
            "transformers drops transform_config, and its outputs are wrong: the weights are "
            f"rotated for {joined(online)}, which it does not apply.",
            "Serve it with vLLM, which applies it, or use rotations that are multiplied into the "
            "weights alone (R1, R2).",
        )
    rounded = not passed_over(view.config, view.headers)
    missed = _missed(view, keys_are_rounded=rounded and _keys_are_quantized(view))
    if missed:
        yield Problem(
            "transform_config",
            "transformers drops transform_config, and does not turn queries and keys "
            f"({joined(missed)}): {next(iter(missed.values()))}.",
            "Leave the rotation of queries and keys out.",
        )


RULES = (
    Rule("S73", "transforms have known keys and places", transforms_are_read, needs=CONFIG),
    Rule("S74", "online transforms are on plain Linears", transforms_reach_linears),
    Rule("S75", "one device, no bias, whole inputs", transforms_restrict, needs=DEPLOYMENT),
    Rule("S76", "transforms have their tensors", transforms_have_tensors),
    Rule(
        "S77",
        "transformers applies no transforms",
        transformers_applies_none,
        server="transformers",
        is_limit=True,
    ),
)
