# SPDX-License-Identifier: Apache-2.0
"""Section 6: kernels and compute capability (S44 to S48).

Where the device is not known its facts are notes.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.rules.base import DEPLOYMENT, Problem, Rule, View
from llmcompressor.verification.rules.parallel import is_row_parallel, parts_of
from llmcompressor.verification.rules.schemes import Served, served_scheme
from llmcompressor.verification.scheme import Args, Group

__all__ = ["RULES"]

_OTHER_DEVICE = "Serve it on another device, or choose another scheme."


def _served(view: View) -> Iterator[tuple[Group, Args, Served]]:
    for group in view.used:
        if group.scheme.weights is not None:
            found = served_scheme(group.scheme, view.deployment.capability)
            yield group, group.scheme.weights, found


def _below(view: View, group: Group, found: Served) -> Iterator[Problem]:
    """The least capability of a scheme, against that of the device."""
    capability = view.deployment.capability
    if capability is not None and found.name and capability < found.least:
        yield Problem(
            group.name,
            f"{found.name} needs a device of capability {found.least}; this one has {capability}.",
            _OTHER_DEVICE,
        )


def weight_only_integers(view: View) -> Iterator[Problem]:
    """S44."""
    capability = view.deployment.capability
    for group, weights, found in _served(view):
        if found.name not in ("WNA16", "WNA8Int"):
            continue
        yield from _below(view, group, found)
        usual = weights.bits in (4, 8) and weights.group in (0, 32, 64, 128)
        machete = weights.bits == 8 and capability == 90 and weights.group in (0, 64, 128)
        asymmetric = not weights.symmetric and weights.bits != 4
        if usual and (not asymmetric or machete):
            continue
        yield Problem(
            group.name,
            f"{weights} is served by the Humming kernels alone, or by Machete on SM90.",
            "Make sure that they are installed.",
            Severity.NOTE,
        )


def eight_bit_floats(view: View) -> Iterator[Problem]:
    """S45."""
    capability = view.deployment.capability
    for group, weights, found in _served(view):
        if not found.name.endswith("Fp8") or found.name == "W4A8Fp8":
            continue
        yield from _below(view, group, found)
        slow = weights.strategy == "block" and (capability is None or capability < 90)
        if slow:
            yield Problem(
                group.name,
                "Below capability 90, blocks of 8-bit floats run weight-only.",
                "Serve it from capability 90 on.",
                Severity.NOTE,
            )


def eight_bit_integers(view: View) -> Iterator[Problem]:
    """S46."""
    capability = view.deployment.capability
    for group, _, found in _served(view):
        if found.name != "W8A8Int8":
            continue
        yield from _below(view, group, found)
        if capability is None or capability >= 100:
            yield Problem(
                group.name,
                "From capability 100 on, 8-bit integer inputs have no kernel by default.",
                "Serve it with --linear-backend triton there, or use FP8.",
                Severity.NOTE if capability is None else None,
            )


def four_bit_floats(view: View) -> Iterator[Problem]:
    """S47."""
    for group, _, found in _served(view):
        if found.name in ("NVFP4", "NVFP4A16", "MXFP4", "MXFP8"):
            yield from _below(view, group, found)


def four_bit_integers_with_floats(view: View) -> Iterator[Problem]:
    """S48."""
    for group, _, found in _served(view):
        if found.name != "W4A8Fp8":
            continue
        if view.deployment.capability is None:
            yield Problem(
                group.name,
                "4-bit integers with 8-bit float inputs run on devices of SM90 alone.",
                _OTHER_DEVICE,
                Severity.NOTE,
            )
        if view.dtype != "bfloat16":
            yield Problem(
                group.name,
                f"4-bit integers with 8-bit float inputs give bfloat16, not {view.dtype}.",
                "Serve it in bfloat16.",
                None if view.deployment.capability else Severity.NOTE,
            )
        yield from _odd_sizes(view, group)


def _odd_sizes(view: View, group: Group) -> Iterator[Problem]:
    for entry in view.quantized:
        if view.choice(entry).group != group or entry.is_expert:
            continue
        columns, rows = view.columns(entry, group.scheme), entry.rows
        if columns is None or rows is None:
            continue
        for tp in view.deployment.tp:
            by_rows = is_row_parallel(entry)
            parts = parts_of(view, entry, tp)
            inner, outer = (columns // parts, rows) if by_rows else (columns, rows // parts)
            if inner % 128 or outer % 128:
                yield Problem(
                    entry.name,
                    f"Split over {parts} devices it is {outer} by {inner}; the kernel takes "
                    "multiples of 128.",
                    "Use fewer devices, or choose another scheme.",
                    view.deployment.tp_severity(tp)
                    if view.deployment.capability
                    else Severity.NOTE,
                )
                break


RULES = (
    Rule("S44", "weight-only integers have a kernel", weight_only_integers, needs=DEPLOYMENT),
    Rule("S45", "8-bit floats have a kernel", eight_bit_floats, needs=DEPLOYMENT),
    Rule("S46", "8-bit integers have a kernel", eight_bit_integers, needs=DEPLOYMENT),
    Rule("S47", "4-bit floats have a kernel", four_bit_floats, needs=DEPLOYMENT),
    Rule(
        "S48",
        "4-bit integers with float inputs have a kernel",
        four_bit_integers_with_floats,
        needs=DEPLOYMENT,
    ),
)
