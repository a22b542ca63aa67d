# SPDX-License-Identifier: Apache-2.0
"""Section 1: the ``quantization_config`` as such (S1 to S10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.rules.base import CONFIG, DEPLOYMENT, Problem, Rule, View, joined
from llmcompressor.verification.scheme import ACTIVATION_FORMATS, FORMATS

__all__ = ["RULES", "raw_groups", "where"]

_KEYS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
        "observer",
        "observer_kwargs",
    ]
)
_PARTS = ("weights", "input_activations", "output_activations")
_GONE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
_REWRITE = "Write the configuration anew."


def raw_groups(view: View) -> Iterator[tuple[str, Any]]:
    """Name and content of each group, as they stand in the file."""
    groups = view.settings.get("config_groups")
    if isinstance(groups, Mapping):
        yield from ((str(name), raw) for name, raw in groups.items())


def raw_args(view: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and content of all arguments of all groups."""
    for name, raw in raw_groups(view):
        for part in _PARTS:
            if isinstance(raw, Mapping) and isinstance(raw.get(part), Mapping):
                yield f"{name}.{part}", raw[part]


def where(view: View) -> Iterator[Problem]:
    """S1."""
    found = view.config.get("quantization_config")
    if found and not isinstance(found, Mapping):
        yield Problem(
            "quantization_config",
            f"It is {found!r}, and no object that says how the model is quantized.",
            "Remove it if the weights are plain; else write it anew.",
        )
        return
    if not view.settings:
        if view.quantized:
            names = joined(entry.name for entry in view.quantized)
            yield Problem(
                "quantization_config",
                f"The configuration does not say that {names} are quantized.",
                "Write the quantization_config into config.json.",
            )
        return
    method = str(view.settings.get("quant_method") or "")
    if not method:
        yield Problem(
            "quantization_config",
            "It has no quant_method, so it is read as not quantized.",
            'Set quant_method to "compressed-tensors".',
        )
    elif not view.is_compressed_tensors:
        yield Problem(
            "quantization_config",
            f"Its quant_method is {method!r}, not 'compressed-tensors'.",
            'Set quant_method to "compressed-tensors".',
        )


def groups_have_form(view: View) -> Iterator[Problem]:
    """S2."""
    groups = view.settings.get("config_groups")
    if groups is not None and not isinstance(groups, Mapping):
        yield Problem("config_groups", "It is no dict of groups.", _REWRITE)
    for name, raw in raw_groups(view):
        if not isinstance(raw, Mapping):
            yield Problem(
                name,
                "The group is no dict; names of presets are not read by servers.",
                "Write the group's arguments in full.",
            )
            continue
        targets = raw.get("targets")
        if not isinstance(targets, list) or not targets:
            yield Problem(name, "The group has no list of targets.", "Give it targets.")
            continue
        skipped = len(targets) == 1 and str(targets[0]).endswith("Attention")
        if not isinstance(raw.get("weights"), Mapping) and not skipped:
            yield Problem(
                name,
                "The group has no arguments for weights.",
                "Leave the group out, or target one attention class alone.",
            )


def arguments_are_valid(view: View) -> Iterator[Problem]:
    """S3."""
    for place, raw in raw_args(view):
        unknown = sorted(set(raw) - _KEYS)
        if unknown:
            yield Problem(
                place,
                f"It has keys that servers refuse: {joined(unknown)}.",
                "Remove them: the pinned compressed-tensors 0.17 forbids unknown keys.",
            )
            continue
        try:
            QuantizationArgs.model_validate(
                {key: value for key, value in raw.items() if key != "actorder"}
            )
        except (ValueError, NotImplementedError, TypeError) as error:
            reason = str(error).strip().splitlines()
            said = reason[2] if len(reason) > 2 else reason[0] if reason else "no reason given"
            yield Problem(place, f"Its arguments are refused: {said.strip()}.", _REWRITE)


def ignore_is_a_list(view: View) -> Iterator[Problem]:
    """S4."""
    if "ignore" in view.settings and not isinstance(view.settings["ignore"], list):
        yield Problem(
            "ignore",
            f"It is {type(view.settings['ignore']).__name__}, and vLLM iterates over it.",
            "Write a list, which may be empty.",
        )


def no_sparse_formats(view: View) -> Iterator[Problem]:
    """S5."""
    sparsity = view.settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        yield Problem(
            "sparsity_config",
            "It has targets, and servers have removed sparse formats.",
            "Write the pruned weights densely and leave sparsity_config empty.",
        )
    elif isinstance(sparsity, Mapping) and sparsity and "format" not in sparsity:
        yield Problem(
            "sparsity_config", "It is not empty and has no format.", "Write an empty one."
        )
    places = [("quantization_config", view.settings.get("format"))]
    places += [(name, raw.get("format")) for name, raw in raw_groups(view) if _is_map(raw)]
    for place, name in places:
        if name in _GONE:
            yield Problem(
                place, f"Its format {name} is no longer read.", "Write a format that is read."
            )


def _is_map(raw: Any) -> bool:
    return isinstance(raw, Mapping)


def no_activation_order(view: View) -> Iterator[Problem]:
    """S6."""
    for place, raw in raw_args(view):
        order = raw.get("actorder")
        if order is True or str(order).lower() in ("group", "dynamic"):
            yield Problem(
                place,
                f"Its actorder {order} needs a permuted weight, which servers no longer take.",
                'Quantize with actorder="static".',
            )
    for entry in view.entries.values():
        for own in ("weight_g_idx", "g_idx"):
            if own in entry.own:
                yield Problem(
                    entry.name, f"It has a {own}, an unknown tensor.", "Quantize without it."
                )


def formats_are_given(view: View) -> Iterator[Problem]:
    """S7."""
    overall = view.settings.get("format")
    for name, raw in raw_groups(view):
        if not _is_map(raw) or not _is_map(raw.get("weights")):
            continue
        own = raw.get("format")
        if own == "mixed-precision":
            yield Problem(
                name, "mixed-precision is no format of a group.", "Give the group its own format."
            )
        elif not own and overall == "mixed-precision":
            yield Problem(
                name,
                "The whole is mixed-precision and the group has no format of its own.",
                "Give the group its own format.",
            )
        elif not own and not overall:
            yield Problem(name, "Neither the group nor the whole has a format.", _REWRITE)
        elif (own or overall) not in (*FORMATS, *_GONE, "mixed-precision"):
            yield Problem(name, f"There is no format {own or overall!r}.", _REWRITE)


def integers_alone_are_packed(view: View) -> Iterator[Problem]:
    """S8."""
    for group in view.groups:
        scheme = group.scheme
        if scheme.weights is None or scheme.inputs is not None or scheme.outputs is not None:
            continue
        if scheme.format in ACTIVATION_FORMATS and scheme.weights.kind == "int":
            only_embedding = all("mbed" in target for target in group.targets)
            yield Problem(
                group.name,
                f"It quantizes weights alone to integers in the format {scheme.format}.",
                "Write pack-quantized.",
                Severity.WARNING if only_embedding else None,
            )


def targets_are_distinct(view: View) -> Iterator[Problem]:
    """S9."""
    counts = Counter(target for group in view.groups for target in dict.fromkeys(group.targets))
    for target, count in counts.items():
        if count > 1:
            yield Problem(
                target,
                f"It is a target of {count} groups; the last one silently wins.",
                "Let each target stand in one group.",
            )


def device_and_dtype(view: View) -> Iterator[Problem]:
    """S10."""
    capability = view.deployment.capability
    if view.settings and capability is not None and capability < 70:
        yield Problem(
            "", f"The device has capability {capability}; 70 is the least.", "Use a newer device."
        )
    if view.settings and view.dtype not in ("float32", "float16", "bfloat16"):
        yield Problem(
            "", f"The model's dtype is {view.dtype}.", "Use float32, float16 or bfloat16."
        )


RULES = (
    Rule("S1", "the configuration is found and names its method", where),
    Rule("S2", "groups are dicts with targets and weights", groups_have_form, needs=CONFIG),
    Rule("S3", "arguments are those of compressed-tensors", arguments_are_valid, needs=CONFIG),
    Rule("S4", "ignore is a list", ignore_is_a_list, needs=CONFIG),
    Rule("S5", "no sparse format", no_sparse_formats, needs=CONFIG),
    Rule("S6", "no stored activation order", no_activation_order),
    Rule("S7", "each group has its format", formats_are_given, needs=CONFIG),
    Rule("S8", "integer weights alone are packed", integers_alone_are_packed, needs=CONFIG),
    Rule("S9", "a target stands in one group", targets_are_distinct, needs=CONFIG),
    Rule("S10", "device and dtype can be served", device_and_dtype, needs=DEPLOYMENT),
)
