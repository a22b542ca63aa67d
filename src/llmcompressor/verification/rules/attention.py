# SPDX-License-Identifier: Apache-2.0
"""Section 7: attention and the cache of keys and values (S49 to S55; L7, L11 of transformers)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from llmcompressor.verification.cached_states import passed_over, without_scales
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.rules.base import (
    CONFIG,
    DEPLOYMENT,
    Problem,
    Rule,
    View,
    joined,
)
from llmcompressor.verification.scheme import Args, parse_args

__all__ = ["OF_TRANSFORMERS", "RULES"]

_SCALES = re.compile(r"(?P<base>[qkv])_(?:scale|zero_point)$")
_ACCEPTED = re.compile(
    r".*self_attn\.[qkv]_(?:scale|zero_point)$"
    r"|.*\.self_attn\.(?:[kv]_proj|qkv_proj)\.[kv]_scale$"
    r"|.*\.mixer\.[kv]_proj\.[kv]_scale$|.*\.attn\.[qkv]_scale$|.*\.kv_scale$"
)
_OLD = re.compile(r".*\.[kv]_proj\.output_scale$")


def _cache(view: View) -> Args | None:
    return parse_args(view.settings.get("kv_cache_scheme"))


def cache_scheme_is_served(view: View) -> Iterator[Problem]:
    """S49."""
    args = _cache(view)
    if args is None:
        return
    reasons = []
    if (args.kind, args.bits) != ("float", 8):
        reasons.append(f"{args.bits}-bit {args.kind}s; 8-bit floats are served")
    if args.strategy not in ("tensor", "attn_head"):
        reasons.append(f"the strategy {args.strategy}; tensor and attn_head are served")
    if not args.symmetric:
        reasons.append("zero points; symmetric scales are served")
    if reasons:
        yield Problem(
            "kv_cache_scheme",
            f"It has {', and '.join(reasons)}.",
            "Quantize the cache to symmetric 8-bit floats per tensor.",
        )


def scales_have_a_scheme(view: View) -> Iterator[Problem]:
    """S50."""
    if _cache(view) is not None or any(group.is_attention for group in view.groups):
        return
    found = [name for name in view.headers if _SCALES.fullmatch(name.rpartition(".")[2])]
    if found:
        yield Problem(
            "kv_cache_scheme",
            f"There is none, and {joined(found)} are stored: the cache is not quantized unless "
            "a server is told so.",
            "Write the kv_cache_scheme that they were calibrated for, or remove the scales.",
        )


def scales_have_names(view: View) -> Iterator[Problem]:
    """S51."""
    args = _cache(view)
    for name in view.headers:
        if args is not None and _OLD.match(name):
            yield Problem(
                name,
                "Scales of the cache under this name are dropped; 1.0 is used.",
                "Name it k_scale or v_scale on the attention module.",
            )
        elif _SCALES.search(name.rpartition(".")[2]) and not _ACCEPTED.match(name):
            yield Problem(
                name,
                "No attention module of vLLM takes a scale from this path.",
                "Name it ...self_attn.k_scale.",
                Severity.WARNING,
            )


def scales_have_shapes(view: View) -> Iterator[Problem]:
    """S52."""
    args = _cache(view)
    if args is None:
        return
    heads = {"q": view.size("num_attention_heads")}
    heads["k"] = heads["v"] = view.size("num_key_value_heads") or heads["q"]
    for name, info in view.headers.items():
        match = _SCALES.fullmatch(name.rpartition(".")[2])
        if match is None or not name.endswith("_scale"):
            continue
        count = heads[match["base"]]
        if args.strategy == "attn_head" and count is not None and info.numel != count:
            yield Problem(
                name, f"It has {info.numel} scales for {count} heads.", "Calibrate the cache anew."
            )
        elif args.strategy == "tensor" and info.shape not in ((1,), ()):
            yield Problem(
                name, f"It has the shape {list(info.shape)}, not [1].", "Calibrate the cache anew."
            )


def heads_need_groups(view: View) -> Iterator[Problem]:
    """S53."""
    args = _cache(view)
    if args is None or args.strategy != "attn_head":
        return
    if "config_groups" not in view.settings:
        yield Problem(
            "kv_cache_scheme",
            "Scales per head need the key config_groups in the configuration.",
            'Write "config_groups": {}.',
        )
    yield Problem(
        "kv_cache_scheme",
        "Scales per head are served by the FlashAttention backend alone.",
        "Serve it with that backend.",
        Severity.NOTE,
    )


def scales_are_there(view: View) -> Iterator[Problem]:
    """S54."""
    args = _cache(view)
    if args is None or not args.is_static:
        return
    for path in view.attentions:
        if "mtp" in path or view.is_draft(path):
            continue
        missing = [own for own in ("k_scale", "v_scale") if not _has_scale(view, path, own)]
        if missing:
            yield Problem(
                path, f"It has no {joined(missing)}; 1.0 is used.", "Calibrate the cache anew."
            )
    if view.tensors is None:
        return
    yield from _other_than_read(view)
    for name in view.headers:
        own = name.rpartition(".")[2]
        if not (_SCALES.fullmatch(own) and own.endswith("_scale")):
            continue
        scale = view.tensors(name).to(torch.float32)
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            yield Problem(
                name, "It is not finite and positive, and is used all the same.", "Calibrate anew."
            )
        elif bool((scale == 1).all()):
            yield Problem(
                name,
                "It is exactly 1, as if it had never been calibrated.",
                "Calibrate anew.",
                Severity.WARNING,
            )


def _has_scale(view: View, path: str, own: str) -> bool:
    base = own[0]
    places = (f"{path}.{own}", f"{path}.{base}_proj.{own}", f"{path}.qkv_proj.{own}")
    return any(place in view.headers for place in (*places, f"{path}.attn.{own}"))


def _other_than_read(view: View) -> Iterator[Problem]:
    """Scales of layers that share keys and values, beside those of the layers that make them."""
    assert view.tensors is not None
    for path, source in view.sharing.items():
        for own in ("k_scale", "v_scale"):
            name, other = f"{path}.{own}", f"{source}.{own}"
            if not {name, other} <= view.headers.keys():
                continue
            if not torch.equal(view.tensors(name).reshape(-1), view.tensors(other).reshape(-1)):
                yield Problem(
                    name,
                    f"The keys and values that it reads are those of {source}, whose {own} is "
                    "another one.",
                    "Store the same for both.",
                )


def latent_attention(view: View) -> Iterator[Problem]:
    """S55."""
    if _cache(view) is not None and view.family.is_mla:
        yield Problem(
            "kv_cache_scheme",
            "Attention with a latent cache takes no scales: it has no effect.",
            "Leave kv_cache_scheme out.",
        )


def rounded_states_have_scales(view: View) -> Iterator[Problem]:
    """L7."""
    args = _cache(view)
    if args is None or not args.is_static:
        return
    for path in without_scales(view.config, view.headers):
        yield Problem(
            path,
            "transformers quantizes its keys and values too, and the file holds no scales for "
            "that: they are random there.",
            "Leave kv_cache_scheme out, or serve it with vLLM.",
        )


def states_are_rounded(view: View) -> Iterator[Problem]:
    """L11."""
    states = [_cache(view), *(group.scheme.inputs for group in view.groups if group.is_attention)]
    found = [args for args in states if args is not None]
    if not found:
        return
    stored = all(args.is_static for args in found)
    for path in passed_over(view.config, view.headers, stored_scales=stored):
        yield Problem(
            path,
            "The installed transformers and compressed-tensors leave its keys and values as they "
            "are: the latter does not know its forward for that of attention with "
            "a cache.",
            "Serve it with vLLM, or read it with a transformers whose attention takes "
            "past_key_values.",
        )


RULES = (
    Rule("S49", "the cache's scheme is served", cache_scheme_is_served, needs=CONFIG),
    Rule(
        "S50",
        "stored scales of the cache have a scheme",
        scales_have_a_scheme,
        severity=Severity.WARNING,
    ),
    Rule("S51", "scales of the cache have accepted names", scales_have_names),
    Rule("S52", "scales of the cache have accepted shapes", scales_have_shapes),
    Rule("S53", "scales per head", heads_need_groups, needs=DEPLOYMENT),
    Rule("S54", "scales of the cache are there", scales_are_there),
    Rule("S55", "latent attention has no scales", latent_attention, severity=Severity.WARNING),
)
OF_TRANSFORMERS = (
    Rule(
        "L7",
        "keys and values that are rounded have scales",
        rounded_states_have_scales,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L11",
        "states that are to be rounded are",
        states_are_rounded,
        server="transformers",
        is_limit=True,
    ),
)
