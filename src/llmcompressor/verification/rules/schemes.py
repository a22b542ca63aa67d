# SPDX-License-Identifier: Apache-2.0
"""Section 3: which scheme vLLM runs, and what raises (S21, S22)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.rules.base import DEPLOYMENT, Problem, Rule, View
from llmcompressor.verification.scheme import ACTIVATION_FORMATS, Args, Scheme

__all__ = ["RULES", "Served", "served_scheme"]


@dataclass(frozen=True)
class Served:
    """What vLLM runs a scheme with.

    Attributes:
        name: its scheme class; empty if there is none.
        least: the least compute capability.
        native: from which capability activations are computed as the scheme says; 0 if from
            ``least``.
        reason: why there is none.
        remedy: what to do then.
    """

    name: str
    least: int = 0
    native: int = 0
    reason: str = ""
    remedy: str = "Choose another scheme."


_NO_MXFP6 = Served(
    "",
    reason="vLLM has no scheme for 6-bit floats of compressed-tensors, in the releases known here.",
    remedy="Take MXFP4 or MXFP8, or read it with transformers, in bfloat16.",
)


def _none(reason: str) -> Served:
    return Served("", reason=reason)


def served_scheme(scheme: Scheme, capability: int | None = None) -> Served:
    """The first row of vLLM's table that a scheme fits, in vLLM's order.

    Args:
        scheme: the scheme, with weights.
        capability: of the device, if it is known; an unknown one is taken to fit.
    """
    weights = scheme.weights
    if weights is None:
        return _none("It has no weights.")
    if weights.dynamic:
        return _none("Its weights are dynamic.")
    for row in _ROWS:
        found = row(scheme, weights, capability)
        if found is not None:
            return found
    return _none("No scheme of vLLM fits it.")


Row = Callable[[Scheme, Args, int | None], Served | None]


def _nvfp4(scheme: Scheme, weights: Args, _: int | None) -> Served | None:
    if not weights.is_nvfp4:
        return None
    if scheme.inputs is None:
        return Served("NVFP4A16", 75)
    if scheme.inputs.is_nvfp4:
        return Served("NVFP4", 75, native=100)
    return _none("Inputs of NVFP4 weights must be NVFP4 too, or left alone.")


def _mx(scheme: Scheme, weights: Args, _: int | None) -> Served | None:
    if weights.is_mxfp4:
        return Served("MXFP4", 80, native=100)
    if weights.is_mxfp8:
        return Served("MXFP8", 75, native=100)
    return _NO_MXFP6 if weights.is_mxfp6 else None


def _int4_fp8(scheme: Scheme, weights: Args, capability: int | None) -> Served | None:
    inputs = scheme.inputs
    is_int4 = (weights.kind, weights.bits, weights.strategy) == ("int", 4, "group")
    if not (is_int4 and weights.symmetric and inputs is not None and inputs.kind == "float"):
        return None
    if (inputs.bits, inputs.strategy, inputs.dynamic) != (8, "token", True):
        return None
    if capability not in (None, 90):
        return _none("4-bit integers with 8-bit float inputs run on devices of SM90 alone.")
    if weights.group != 128:
        return _none("4-bit integers with 8-bit float inputs need groups of 128.")
    return Served("W4A8Fp8", 90)


def _integers(scheme: Scheme, weights: Args, _: int | None) -> Served | None:
    inputs, outputs, form = scheme.inputs, scheme.outputs, scheme.format
    if weights.strategy not in ("channel", "group"):
        return None
    if _is_static_int8(inputs) and _is_static_int8(outputs) and weights.kind == "int":
        if form in ("pack-quantized", "int-quantized") and weights.bits in (2, 4, 8):
            return Served("WNA8O8Int", 70)
        return None
    if form != "pack-quantized":
        return None
    if inputs is None:
        return _weight_only(weights)
    dynamic = inputs.dynamic is True and inputs.strategy in ("token", "group")
    fits = inputs.kind == "int" and inputs.bits in (4, 8) and inputs.symmetric and dynamic
    return Served("WNA8Int", 75) if weights.kind == "int" and fits else None


def _weight_only(weights: Args) -> Served:
    if weights.kind != "int":
        return _none("pack-quantized holds integers, and its weights are floats.")
    if not 2 <= weights.bits <= 8:
        return _none(f"{weights.bits}-bit integers are not read; 2 to 8 bits are.")
    return Served("WNA16", 75)


def _is_static_int8(args: Args | None) -> bool:
    return args is not None and (
        (args.kind, args.bits, args.strategy, args.dynamic) == ("int", 8, "tensor", False)
    )


def _floats(scheme: Scheme, weights: Args, _: int | None) -> Served | None:
    inputs = scheme.inputs
    fits = weights.kind == "float" and weights.symmetric
    if not (fits and weights.strategy in ("tensor", "channel", "block")):
        return None
    if scheme.format not in ACTIVATION_FORMATS:
        return _none(f"8-bit floats are not read from the format {scheme.format}.")
    if inputs is None or inputs.kind != "float":
        return Served("W8A16Fp8", 75)
    is_static = inputs.is_static and inputs.symmetric and inputs.strategy == "tensor"
    if is_static and weights.strategy == "block":
        return _none("8-bit float blocks cannot have static inputs.")
    if inputs.dynamic or is_static:
        return Served("W8A8Fp8", 75, native=89)
    return Served("W8A16Fp8", 75)


def _int8(scheme: Scheme, weights: Args, _: int | None) -> Served | None:
    inputs = scheme.inputs
    if scheme.format not in ACTIVATION_FORMATS or inputs is None:
        return None
    eight = weights.bits == 8 and inputs.bits == 8 and weights.symmetric
    if eight and weights.kind == "int" and weights.strategy in ("tensor", "channel"):
        static = inputs.is_static and inputs.strategy == "tensor"
        if static or (inputs.dynamic is True and inputs.strategy == "token"):
            return Served("W8A8Int8", 75)
    four = weights.bits == 4 and weights.kind == "int" and weights.symmetric
    dynamic = inputs.dynamic is True and inputs.strategy == "token" and inputs.kind == "int"
    if four and weights.strategy in ("group", "channel") and inputs.bits == 8 and dynamic:
        return Served("W4A8Int", 1)
    return None


def _reasons(scheme: Scheme, weights: Args, _: int | None) -> Served | None:
    if scheme.inputs is None:
        reason = _of_weights_alone(scheme, weights)
    elif not weights.symmetric:
        reason = "Asymmetric weights are not served with quantized inputs."
    elif weights.kind == "int" and scheme.format == "pack-quantized":
        reason = "Packed integers are served with inputs like those of W4A8 or W4AFP8."
    elif weights.kind == "int" and weights.strategy in ("group", "block"):
        reason = "8-bit integers with quantized inputs need channel or tensor scales."
    else:
        reason = _of_floats(weights)
    return _none(reason) if reason else None


def _of_weights_alone(scheme: Scheme, weights: Args) -> str:
    if weights.kind != "int":
        return _of_floats(weights)
    if scheme.format == "pack-quantized":
        return "Integer weights alone need scales for groups or channels."
    return f"Integer weights alone are not read from the format {scheme.format}."


def _of_floats(weights: Args) -> str:
    if weights.kind == "float" and weights.strategy == "group":
        return "Groups of 8-bit floats need a scale_dtype of torch.uint8."
    return ""


_ROWS: tuple[Row, ...] = (_nvfp4, _mx, _int4_fp8, _integers, _floats, _int8, _reasons)


def schemes_are_served(view: View) -> Iterator[Problem]:
    """S21."""
    for group in view.used:
        if group.scheme.weights is None or _is_embedding(group.targets):
            continue
        if group.scheme.format == "dense":
            continue
        found = served_scheme(group.scheme, view.deployment.capability)
        static = group.scheme.outputs is not None and group.scheme.outputs.is_static
        if found.name and static and found.name != "WNA8O8Int":
            yield Problem(
                group.name,
                f"{found.name} takes no scales of outputs: they are unknown tensors.",
                "Leave outputs unquantized.",
            )
        if not found.name:
            yield Problem(group.name, f"{found.reason} It is {group.scheme}.", found.remedy)


def _is_embedding(targets: tuple[str, ...]) -> bool:
    return all("mbed" in target for target in targets)


def substitutions(view: View) -> Iterator[Problem]:
    """S22: where vLLM computes otherwise than the scheme says."""
    capability = view.deployment.capability
    for group in view.used:
        if group.scheme.weights is None:
            continue
        found = served_scheme(group.scheme, capability)
        for message, remedy in _substituted(group.scheme, found, capability):
            yield Problem(group.name, message, remedy)


def _substituted(
    scheme: Scheme, found: Served, capability: int | None
) -> Iterator[tuple[str, str]]:
    inputs = scheme.inputs
    if found.native and inputs is not None and (capability is None or capability < found.native):
        where = "below" if capability is None else f"at {capability}, below"
        yield (
            f"On a device {where} capability {found.native}, {found.name} runs weight-only.",
            f"Serve it from capability {found.native} on.",
        )
    if found.name.endswith("Fp8") and inputs is not None:
        if inputs.dynamic and inputs.strategy == "tensor":
            yield "Inputs that are dynamic per tensor are quantized per token.", "Expect that."
        if inputs.is_static and not inputs.symmetric:
            yield "Static asymmetric float inputs are left alone.", "Make them symmetric."
    blackwell = capability is None or capability >= 100
    if found.name == "MXFP4" and inputs is not None and not inputs.is_mxfp4:
        yield (
            f"Inputs of MXFP4 weights are rounded to MXFP4 or left alone, not to {inputs}.",
            "Measure the quality there.",
        )
    if found.name == "MXFP4" and inputs is None and blackwell:
        yield (
            "From capability 100 on, inputs of MXFP4 weights may be quantized all the same.",
            "Measure the quality there.",
        )
    if found.name == "WNA8Int":
        yield (
            "Only the Humming kernels quantize the inputs; Machete and Marlin leave them alone.",
            "Expect weight-only speed elsewhere.",
        )


RULES = (
    Rule("S21", "the scheme is one that vLLM serves", schemes_are_served),
    Rule(
        "S22",
        "what vLLM computes instead",
        substitutions,
        needs=DEPLOYMENT,
        severity=Severity.NOTE,
    ),
)
