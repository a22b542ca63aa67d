# SPDX-License-Identifier: Apache-2.0
"""Section 9: mixtures of experts (S62 to S69)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import EXPERT, Entry
from llmcompressor.verification.module_classes import experts_by_class
from llmcompressor.verification.rules.base import DEPLOYMENT, TENSORS, Problem, Rule, View, joined
from llmcompressor.verification.scheme import Args, Group, Scheme

__all__ = ["RULES", "experts_served", "number_of_experts"]

_STACK = re.compile(r".*\.experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj)(?:[._].*)?$")
_OWN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj")
_CLOSE = 1e-5
_ARM_METHOD = "W4A8Int8"
_ARM = "4-bit integer experts with 8-bit integer inputs run on Arm alone."


def number_of_experts(view: View) -> int | None:
    """How many experts the configuration says each mixture has."""
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        value = view.text.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None


def experts_are_alike(view: View) -> Iterator[Problem]:
    """S62."""
    for path, experts in view.mixtures.items():
        every = [entry for own in experts.values() for entry in own.values()]
        forms = {entry.is_quantized for entry in every}
        if len(forms) > 1:
            plain = [entry.name for entry in every if not entry.is_quantized]
            coded = [entry.name for entry in every if entry.is_quantized]
            few, what = (
                (plain, "not quantized") if len(plain) <= len(coded) else (coded, "quantized")
            )
            yield Problem(
                path,
                f"{joined(few, 2)} are {what}, unlike the rest; expert 0 decides for all.",
                "Quantize all experts of a layer alike, or none.",
            )
        elif view.choice(every[0]).mixed:
            yield Problem(
                path,
                "Of expert 0's projections some are ignored and some are not.",
                "Ignore all experts of a layer or none.",
            )
        schemes = view.expert_schemes[path]
        if len(schemes) > 1:
            examples = [next(iter(having.values())).name for having in schemes.values()]
            yield Problem(
                path,
                f"Its projections have different schemes ({joined(examples, 2)}).",
                "Quantize all experts of a layer alike, in groups that divide the columns of each.",
            )


def _mixture_groups(view: View) -> Iterator[tuple[str, Entry, Group, Args]]:
    """One quantized projection of each mixture, with its group."""
    for path, experts in view.mixtures.items():
        for own in experts.values():
            entry = next(iter(own.values()))
            group = view.choice(entry).group
            if entry.is_quantized and group is not None and group.scheme.weights is not None:
                yield path, entry, group, group.scheme.weights
            break


_NO_MXFP6 = "vLLM has no experts of 6-bit floats, in the releases known here."


def experts_served(scheme: Scheme) -> tuple[str, str]:
    """The method that vLLM runs experts of a scheme with, and else why there is none."""
    weights, inputs = scheme.weights, scheme.inputs
    if weights is None:
        return "", "It has no weights."
    if weights.is_mx:
        return ("", _NO_MXFP6) if weights.is_mxfp6 else ("MX", "")
    if weights.is_nvfp4:
        fits = inputs is None or inputs.is_nvfp4
        return ("NVFP4", "") if fits else ("", "Inputs must be NVFP4 too.")
    if inputs is None:
        return _weight_only(scheme, weights)
    if weights.kind == "float":
        return _floats(weights, inputs)
    return _integers(scheme, weights, inputs)


def _weight_only(scheme: Scheme, weights: Args) -> tuple[str, str]:
    if weights.strategy not in ("channel", "group") or weights.kind == "float":
        return "", "Experts with quantized weights alone must be packed integers."
    if scheme.format != "pack-quantized":
        return "", f"Experts are read from pack-quantized, not {scheme.format}."
    if weights.bits == 8 and not weights.symmetric:
        return "", "8-bit experts with zero points have no kernel."
    return "WNA16", ""


def _floats(weights: Args, inputs: Args) -> tuple[str, str]:
    by_token = inputs.strategy == "token" and inputs.dynamic is True
    pairs = {
        "tensor": inputs.strategy == "tensor",
        "channel": by_token,
        "block": bool(inputs.dynamic),
    }
    if inputs.kind == "float" and pairs.get(weights.strategy, False):
        return "FP8", ""
    return "", "8-bit float experts take tensor with tensor, channel with token, or blocks."


def _integers(scheme: Scheme, weights: Args, inputs: Args) -> tuple[str, str]:
    by_token = inputs.strategy == "token" and inputs.dynamic is True
    if weights.bits == 8 and weights.strategy == "channel" and by_token and weights.symmetric:
        return "INT8", ""
    if weights.bits == 4 and by_token and inputs.kind == "float" and weights.group == 128:
        return "W4A8Fp8", ""
    if weights.bits == 4 and by_token and inputs.kind == "int" and inputs.bits == 8:
        if weights.symmetric and scheme.format == "int-quantized":
            return _ARM_METHOD, ""
        return "", f"{_ARM} And there they are read from int-quantized, symmetric, alone."
    return "", "8-bit integer experts need channel scales and dynamic inputs per token."


def expert_schemes(view: View) -> Iterator[Problem]:
    """S63."""
    seen = set()
    for path, _, group, _ in _mixture_groups(view):
        method, reason = experts_served(group.scheme)
        severity = None
        if method == _ARM_METHOD:
            reason = _ARM
            severity = Severity.WARNING if view.deployment.capability is None else None
        if reason and group.name not in seen:
            seen.add(group.name)
            said = f"{reason} {group.name} is {group.scheme}."
            yield Problem(path, said, "Choose another.", severity)


def _sizes(view: View, path: str, entry: Entry, group: Group) -> tuple[int, int] | None:
    """Hidden and intermediate size of a mixture's experts."""
    columns, rows = view.columns(entry, view.written(entry) or group.scheme), entry.rows
    if columns is None or rows is None:
        return None
    is_down = entry.last in ("down_proj", "w2")
    return (rows, columns) if is_down else (columns, rows)


def integer_experts_divide(view: View) -> Iterator[Problem]:
    """S64."""
    for path, entry, group, weights in _mixture_groups(view):
        sizes = _sizes(view, path, entry, group)
        if weights.kind != "int" or sizes is None or group.scheme.format != "pack-quantized":
            continue
        hidden, inner = sizes
        if weights.group and hidden % weights.group:
            yield Problem(
                path, f"Its {hidden} inputs are no whole number of groups.", "Use another group."
            )
        for tp in view.deployment.tp:
            word = max(32 // max(weights.bits, 1), 1)
            crossing = weights.group and inner % tp == 0 and (inner // tp) % weights.group
            torn = not weights.symmetric and (2 * inner // tp % word or hidden % word)
            if crossing or torn:
                yield Problem(
                    path,
                    f"Experts of {inner} split over {tp} devices hold no whole groups or words.",
                    "Use fewer devices, or expert parallelism.",
                    view.deployment.tp_severity(tp),
                )
                break


def float_experts_divide(view: View) -> Iterator[Problem]:
    """S65."""
    for path, entry, group, weights in _mixture_groups(view):
        sizes = _sizes(view, path, entry, group)
        is_fp4 = weights.is_nvfp4 or weights.is_mx
        if sizes is None or not (is_fp4 or (weights.block and weights.kind == "float")):
            continue
        hidden, inner = sizes
        for tp in view.deployment.tp:
            rows, columns = weights.block or (weights.group, weights.group)
            share = inner // tp
            misfit = share % max(rows, 1) or (tp > 1 and share % max(columns, 1))
            if misfit or (is_fp4 and hidden % weights.group):
                yield Problem(
                    path,
                    f"Experts of {inner} split over {tp} devices hold no whole groups or blocks.",
                    "Use fewer devices, or another scheme.",
                    view.deployment.tp_severity(tp),
                )
                break


def gate_and_up_agree(view: View) -> Iterator[Problem]:
    """S67."""
    tensors = view.tensors
    if tensors is None:
        return
    for path, gate, up in view.expert_pairs:
        for own in ("weight_global_scale", "input_global_scale", "input_scale"):
            if own not in gate.own or own not in up.own:
                continue
            first = tensors(f"{gate.name}.{own}").to(torch.float32).reshape(-1)
            second = tensors(f"{up.name}.{own}").to(torch.float32).reshape(-1)
            if first.shape == second.shape and bool(((first - second).abs() <= _CLOSE).all()):
                continue
            yield Problem(
                path,
                f"Its gate and up have different {own} ({_one(first)} and {_one(second)}).",
                "Let them share one.",
            )


def _one(value: torch.Tensor) -> str:
    return f"{float(value[0]):.6g}" if value.numel() else "nothing"


def experts_are_named(view: View) -> Iterator[Problem]:
    """S68."""
    for path, experts in view.mixtures.items():
        fewest, most = _numbers(view, path, experts)
        last = max(experts)
        count = max(fewest or 0, last + 1) if most is None or last >= most else fewest
        missing = [index for index in range(count or 0) if index not in experts]
        if missing:
            yield Problem(
                path,
                f"It lacks the experts {joined(map(str, missing))} of {count}; servers do not "
                "notice.",
                "Copy them from the original model.",
            )
        elif most is not None and last >= most:
            yield Problem(
                path, f"It holds {last + 1} experts, the configuration says {most}.", "Correct it."
            )
        sets = sorted((set(own) for own in experts.values()), key=len)
        usual = sets[-1]
        for index, own in experts.items():
            if set(own) < usual and (fewest is None or index < fewest):
                yield Problem(
                    f"{path}.{index}",
                    f"It has no {joined(sorted(usual - set(own)))}.",
                    "Copy it from the original model.",
                )
        strange = sorted(usual - set(_OWN))
        if strange:
            yield Problem(
                path,
                f"Its projections are named {joined(strange)}, which servers do not know.",
                "Name them gate_proj, up_proj and down_proj.",
                Severity.WARNING,
            )


def _numbers(
    view: View, path: str, experts: Mapping[int, Mapping[str, Entry]]
) -> tuple[int | None, int | None]:
    """How many experts a list of them must have, and how many it may have.

    Several mixtures may share one list, and only some of its places be whole experts, as where
    others pass on what they get. The class knows, and else there is what the configuration says.
    """
    owns = {own for each in experts.values() for own in each}
    found = [experts_by_class(view.config, f"{path}.0.{own}") for own in owns]
    numbers = [number for number in found if number is not None]
    if not numbers or len(numbers) < len(owns):
        count = number_of_experts(view)
        return count, count
    return min(numbers), max(numbers)


def no_quantized_stacks(view: View) -> Iterator[Problem]:
    """S69."""
    for name, info in view.headers.items():
        if not _STACK.match(name) or len(info.shape) < 2 or EXPERT.match(name.rpartition(".")[0]):
            continue
        is_coded = info.dtype in ("I8", "U8", "I32", "F8_E4M3") or name.endswith("_scale")
        if is_coded and "scale" not in name.rpartition(".")[2][:5]:
            yield Problem(
                name,
                "Quantized experts are stored as one stack, which servers do not take.",
                "Store each expert by itself.",
            )
    for path, experts in view.mixtures.items():
        fused = [own["gate_up_proj"] for own in experts.values() if "gate_up_proj" in own]
        if fused and fused[0].is_quantized and "weight_global_scale" in fused[0].own:
            yield Problem(
                path,
                "Its experts hold gate and up in one matrix with one global scale.",
                "Store gate and up by themselves.",
            )


RULES = (
    Rule("S62", "experts of a layer have one scheme", experts_are_alike),
    Rule("S63", "experts have a scheme that is served", expert_schemes),
    Rule("S64", "integer experts divide", integer_experts_divide, needs=DEPLOYMENT),
    Rule("S65", "float experts divide", float_experts_divide, needs=DEPLOYMENT),
    Rule("S67", "gate and up share scales", gate_and_up_agree, needs=TENSORS),
    Rule("S68", "all experts are there", experts_are_named),
    Rule("S69", "quantized experts are stored one by one", no_quantized_stacks),
)
