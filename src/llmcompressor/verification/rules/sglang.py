# SPDX-License-Identifier: Apache-2.0
"""Section 13: where SGLang differs (G1 to G7)."""

from __future__ import annotations

from collections.abc import Iterator

from llmcompressor.verification.rules.server_table import served
from llmcompressor.verification.rules.view import Problem, View, joined, rule
from llmcompressor.verification.rules.vllm import in_the_forward
from llmcompressor.verification.scheme import Scheme, parse_args

__all__: list[str] = []


@rule("G1", "classes before joined shards choose the same", server="sglang", is_limit=True)
def _orders_agree(view: View) -> Iterator[Problem]:
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


@rule("G2", "what is unquantized is ignored", server="sglang", is_limit=True)
def _everything_is_listed(view: View) -> Iterator[Problem]:
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


@rule("G3", "shards are ignored together", server="sglang", is_limit=True)
def _shards_are_ignored_together(view: View) -> Iterator[Problem]:
    for path, shards in view.joined.items():
        if view.choice(shards[0], "sglang").mixed:
            yield Problem(
                path,
                "Some of its shards are ignored and some are not, which SGLang refuses.",
                "Ignore all of its shards or none.",
            )


@rule("G4", "embeddings stay plain", server="sglang", is_limit=True)
def _embeddings_are_plain(view: View) -> Iterator[Problem]:
    for entry in view.quantized:
        if entry.kind == "embedding":
            yield Problem(
                entry.name,
                "SGLang skips the codes of embeddings and serves uninitialized memory.",
                "Leave embeddings unquantized.",
            )


@rule(
    "G5",
    "Linears have a scheme that is served, and no rotation in the forward",
    server="sglang",
    is_limit=True,
)
def _schemes_are_served(view: View) -> Iterator[Problem]:
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
    for group in (group for group in view.groups if group.name in linears and group.scheme.weights):
        row = served(group.scheme, server="sglang")
        if not row.name:
            said = f"{row.why(group.scheme)} It is {group.scheme}."
            yield Problem(group.name, said, "Serve it with vLLM.")
        elif capability is not None and capability < row.least:
            yield Problem(
                group.name,
                f"SGLang needs capability {row.least} for it; this device has {capability}.",
                "Serve it on another device.",
            )


@rule("G6", "experts have a scheme that is served", server="sglang", is_limit=True)
def _experts_are_served(view: View) -> Iterator[Problem]:
    for path, experts in view.mixtures.items():
        yield from _unlike(view, path)
        entry = next(iter(next(iter(experts.values())).values()))
        group = view.choice(entry).group
        if not entry.is_quantized or group is None or group.scheme.weights is None:
            continue
        row = served(group.scheme, "experts", "sglang")
        if not row.name:
            yield Problem(path, row.reason, row.remedy)
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


@rule("G7", "heads and caches are served", server="sglang", is_limit=True)
def _head_and_cache(view: View) -> Iterator[Problem]:
    heads = ((entry, view.scheme(entry)) for entry in view.quantized if entry.kind == "head")
    found = [(entry.name, "head", scheme) for entry, scheme in heads if scheme is not None]
    cache = Scheme(parse_args(view.settings.get("kv_cache_scheme")))
    for name, kind, scheme in [*found, ("kv_cache_scheme", "cache", cache)]:
        row = served(scheme, kind, "sglang")
        if scheme.weights is not None and not row.name:
            yield Problem(name, row.reason, row.remedy)
