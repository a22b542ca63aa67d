# SPDX-License-Identifier: Apache-2.0
"""What a format holds, whatever the server: kinds, bits, groups, dimensions (C1, C4)."""

from __future__ import annotations

from collections.abc import Iterator

from llmcompressor.verification.expected import is_decodable, scale_shape
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.rules.base import CONFIG, Problem, Rule, View, joined
from llmcompressor.verification.scheme import FORMATS, Args

__all__ = ["RULES"]

_SCHEME = "Write the scheme that it was compressed with into config.json."


def schemes_fit_their_formats(view: View) -> Iterator[Problem]:
    """C4."""
    for group in view.groups:
        weights, form = group.scheme.weights, group.scheme.format
        if weights is None or form not in FORMATS or form == "dense":
            continue  # S2 and S7 speak of those
        if not scale_shape(weights, 1, 1):
            yield Problem(
                group.name, f"Nothing says what shares a scale: its weights are {weights}.", _SCHEME
            )
        elif not (is_decodable(group.scheme) or _is_wide(form, weights)):
            yield Problem(
                group.name, f"The format {form} holds no weights that are {weights}.", _SCHEME
            )
    yield from _overall(view)


def _is_wide(form: str, weights: Args) -> bool:
    """Whether these are integers of more than 8 bits, which compressed-tensors stores unpacked."""
    is_unpacked = form in ("int-quantized", "naive-quantized")
    return is_unpacked and weights.kind == "int" and weights.bits in range(9, 33)


def _overall(view: View) -> Iterator[Problem]:
    """The format of the whole, which readers may take for that of a group."""
    overall = view.settings.get("format")
    own = {group.scheme.format for group in view.groups if group.scheme.weights is not None}
    if overall in FORMATS and overall != "dense" and own and overall not in own:
        yield Problem(
            "quantization_config",
            f"Its format is {overall}, and that of its groups {joined(sorted(map(str, own)))}.",
            "Write the format of the groups, or mixed-precision where they differ.",
            Severity.WARNING,
        )


def codes_are_matrices(view: View) -> Iterator[Problem]:
    """C1, for codes without rows and columns: nothing else of them can be told."""
    for entry in view.quantized:
        for own in ("weight_packed", "weight"):
            info = entry.own.get(own)
            if info is None or (len(info.shape) == 3 and "experts" in entry.name):
                continue  # S69 speaks of stacks
            if len(info.shape) != 2:
                yield Problem(
                    entry.name,
                    f"Its {own} has the shape {list(info.shape)}, and codes have rows and columns.",
                    "Compress the model anew.",
                )


RULES = (
    Rule("C1", "codes are matrices", codes_are_matrices, server=""),
    Rule(
        "C4",
        "schemes are those that their formats hold",
        schemes_fit_their_formats,
        server="",
        needs=CONFIG,
    ),
)
