# SPDX-License-Identifier: Apache-2.0
"""Section 13: where SGLang differs (G1 to G7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from llmcompressor.verification.rules.base import Problem, Rule, View, joined
from llmcompressor.verification.rules.transforms import in_the_forward
from llmcompressor.verification.scheme import Scheme, parse_args

__all__ = ["RULES"]


def orders_agree(view: View) -> Iterator[Problem]:
    """G1."""
    for entry in view.matrices:
        if entry.is_expert or view.is_plain(entry):
            continue
        here, there = view.choice(entry), view.choice(entry, "sglang")
        if here.group is None or there.group is None:
            continue
        if here.group.scheme != there.group.scheme:
            yield Problem(
                entry.name,
                f"SGLang takes {there.group.name} and vLLM {here.group.name}, which differ.",
                "Name the joined module, or avoid class targets beside names.",
            )


def everything_is_listed(view: View) -> Iterator[Problem]:
    """G2."""
    if not any(group.scheme.weights is not None for group in view.groups):
        return
    for entry in view.matrices:
        if entry.kind != "linear" or entry.is_quantized or entry.is_expert:
            continue
        if view.is_plain(entry):
            continue
        choice = view.choice(entry, "sglang")
        if choice.group is None and not choice.ignored and not choice.mixed:
            yield Problem(
                entry.name,
                "No target matches it and it is not ignored, which SGLang refuses.",
                "Add it to ignore.",
            )


def shards_are_ignored_together(view: View) -> Iterator[Problem]:
    """G3."""
    for path, shards in view.joined.items():
        if view.choice(shards[0], "sglang").mixed:
            yield Problem(
                path,
                "Some of its shards are ignored and some are not, which SGLang refuses.",
                "Ignore all of its shards or none.",
            )


def embeddings_are_plain(view: View) -> Iterator[Problem]:
    """G4."""
    for entry in view.quantized:
        if entry.kind == "embedding":
            yield Problem(
                entry.name,
                "SGLang skips the codes of embeddings and serves uninitialized memory.",
                "Leave embeddings unquantized.",
            )


def schemes_are_served(view: View) -> Iterator[Problem]:
    """G5."""
    if online := in_the_forward(view):
        yield Problem(
            "transform_config",
            "SGLang reads no transform_config, and its outputs are wrong: the weights are rotated "
            f"for {joined(online)}, which it does not apply.",
            "Serve it with vLLM, which applies it, or use rotations that are multiplied into the "
            "weights alone (R1, R2).",
        )
    capability = view.deployment.capability
    linears = {
        choice.group.name
        for entry in view.quantized
        if entry.kind == "linear" and not entry.is_expert
        for choice in [view.choice(entry)]
        if choice.group is not None
    }
    for group in view.groups:
        if group.name not in linears:
            continue
        least, reason = _linear(group.scheme)
        if reason:
            yield Problem(group.name, f"{reason} It is {group.scheme}.", "Serve it with vLLM.")
        elif capability is not None and capability < least:
            yield Problem(
                group.name,
                f"SGLang needs capability {least} for it; this device has {capability}.",
                "Serve it on another device.",
            )


def _linear(scheme: Scheme) -> tuple[int, str]:
    """The least capability, or why SGLang has no scheme for Linears."""
    weights, inputs = scheme.weights, scheme.inputs
    if weights is None:
        return 0, ""
    if weights.is_mx:
        return 0, "SGLang has no MX schemes for Linears."
    if weights.kind == "float":
        full = 100 if weights.is_nvfp4 else 89
        return (80 if inputs is None else full), ""
    reason = ""
    if inputs is None and not (scheme.format == "pack-quantized" and weights.bits in (4, 8)):
        reason = "SGLang reads packed integers of 4 and 8 bits alone."
    elif inputs is not None and (weights.bits != 8 or scheme.outputs is not None):
        reason = "SGLang has no integer schemes with quantized inputs but W8A8."
    return 80, reason


def experts_are_served(view: View) -> Iterator[Problem]:
    """G6."""
    for path, experts in view.mixtures.items():
        yield from _unlike(view, path)
        entry = next(iter(next(iter(experts.values())).values()))
        group = view.choice(entry).group
        if not entry.is_quantized or group is None or group.scheme.weights is None:
            continue
        weights, inputs = group.scheme.weights, group.scheme.inputs
        if weights.kind == "int" and inputs is not None and inputs.kind == "int":
            yield Problem(
                path, "SGLang serves integer experts with integer inputs on NPUs alone.", "Use FP8."
            )
        elif entry.last in ("w1", "w2", "w3") and view.choice(entry, "sglang").group is None:
            yield Problem(
                path,
                "SGLang looks experts up as gate_proj, up_proj and down_proj.",
                "Target them by class.",
            )


def _unlike(view: View, path: str) -> Iterator[Problem]:
    every = [entry for own in view.mixtures[path].values() for entry in own.values()]
    if len({entry.is_quantized for entry in every}) > 1 or len(view.expert_schemes[path]) > 1:
        yield Problem(
            path,
            "Its experts are quantized differently, and SGLang goes by expert 0 for all of them.",
            "Quantize all experts of a layer alike, or none.",
        )


def head_and_cache(view: View) -> Iterator[Problem]:
    """G7."""
    for entry in view.quantized:
        scheme = view.scheme(entry)
        weights = scheme.weights if scheme is not None else None
        if entry.kind == "head" and weights is not None and weights.strategy == "block":
            yield Problem(entry.name, "SGLang refuses a head in blocks.", "Leave it unquantized.")
    cache = parse_args(view.settings.get("kv_cache_scheme"))
    if cache is None:
        return
    fits = (cache.kind, cache.bits, cache.strategy, cache.dynamic) == ("float", 8, "tensor", False)
    if not (fits and cache.symmetric):
        yield Problem(
            "kv_cache_scheme",
            "SGLang ignores caches but of static symmetric 8-bit floats per tensor.",
            "Quantize the cache in that way.",
        )


def _rule(number: str, title: str, check: Callable[[View], Iterable[Problem]]) -> Rule:
    return Rule(
        number,
        title,
        check,
        server="sglang",
        is_limit=True,
    )


RULES = (
    _rule("G1", "classes before joined shards choose the same", orders_agree),
    _rule("G2", "what is unquantized is ignored", everything_is_listed),
    _rule("G3", "shards are ignored together", shards_are_ignored_together),
    _rule("G4", "embeddings stay plain", embeddings_are_plain),
    _rule(
        "G5",
        "Linears have a scheme that is served, and no rotation in the forward",
        schemes_are_served,
    ),
    _rule("G6", "experts have a scheme that is served", experts_are_served),
    _rule("G7", "heads and caches are served", head_and_cache),
)
