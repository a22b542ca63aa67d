# SPDX-License-Identifier: Apache-2.0
"""Values of a module: scales, zero points, codes, plain floats, tied embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import frexp
from statistics import median
from typing import Any

import torch
from torch import Tensor

from llmcompressor.verification.expected import CHUNK, Codes
from llmcompressor.verification.facts import Finding, Severity
from llmcompressor.verification.files import Files, tensor_chunks
from llmcompressor.verification.modules import PLAIN_FLOATS, Entry, text_settings
from llmcompressor.verification.transformers_model import ModelNames, class_model

HEADS = ("lm_head", "embed_out", "proj_out", "decoder")
"""What output heads are called; the last two in Whisper, and in BERT and its kin."""

EMBEDDINGS = (
    "embed_tokens.weight",
    "embed_in.weight",
    "shared.weight",
    "tok_embeddings.weight",
    "word_embeddings.weight",
    "wte.weight",
)
"""What the weights of input embeddings are called."""
_UNTIE = "Write tie_word_embeddings: false into config.json."


def equal(ours: Tensor, theirs: Tensor) -> bool:
    """True if two tensors are the same, in the dtype of the first."""
    if ours.dtype != theirs.dtype:
        if torch.float4_e2m1fn_x2 in (ours.dtype, theirs.dtype):
            return False  # nothing converts pairs
        theirs = theirs.to(ours.dtype)
    # of one dimension at least: the bytes of a single number cannot be viewed
    bytes_of = [one.reshape(-1).contiguous().view(torch.uint8) for one in (ours, theirs)]
    if ours.shape == theirs.shape and torch.equal(*bytes_of):
        return True
    return ours.element_size() > 1 and torch.equal(ours, theirs)  # a zero has two signs


def same_tensor(files: Files, name: str, others: Files, other: str) -> bool:
    """True if two tensors of one or two checkpoints have the same values."""
    first, second = files.places[name].info, others.places[other].info
    if first.shape != second.shape or {name} & files.broken or {other} & others.broken:
        return False
    pairs = zip(tensor_chunks(files, name, CHUNK), tensor_chunks(others, other, CHUNK), strict=True)
    return all(equal(ours, theirs) for ours, theirs in pairs)


class Twins:
    """Ties of a class besides the head: blocks that share their weights, say.

    Args:
        files: the checkpoint, which may hold such weights once.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def find(self, name: str) -> str | None:
        """The tensor that is stored for another one; ``None`` if there is none."""
        tied, stored, places = self._tables
        own = stored(name)
        first = tied.get(own, own)
        group = [first, *(target for target, source in tied.items() if source == first)]
        return next((places[one] for one in group if one in places), None) if tied else None

    @cached_property
    def _tables(self) -> tuple[Mapping[str, str], Callable[[str], str], Mapping[str, str]]:
        """Tied tensor → the one it is tied to; how the file's names are changed; model → file."""
        model = class_model(self._files.config)
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        if not tied:
            return {}, str, {}
        # one that is split, as its parts are called by the class, is no twin of the first of them
        stored = ModelNames(model, converted=False).first
        return tied, stored, {stored(name): name for name in self._files.places}


def _said(config: Mapping[str, Any]) -> bool | None:
    """The tie in ``config.json``; ``None`` if it says nothing, or two things.

    >>> _said({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}})
    """
    holders = (config, text_settings(config))
    said = {bool(each["tie_word_embeddings"]) for each in holders if "tie_word_embeddings" in each}
    return said.pop() if len(said) == 1 else None


def _is_head(name: str) -> bool:
    return name.rpartition(".")[0].rpartition(".")[2] in HEADS


def _own_heads(files: Files) -> Iterator[str]:
    """Plain output heads with the shape of an embedding, and the content of none."""
    plain = {
        name: place.info.shape
        for name, place in files.places.items()
        if place.info.dtype in PLAIN_FLOATS and len(place.info.shape) == 2
    }
    plain = {name: shape for name, shape in plain.items() if name not in files.broken}
    for name, shape in plain.items():
        if not (_is_head(name) and name.endswith(".weight")):
            continue
        alike = [each for each in plain if each.endswith(EMBEDDINGS) and plain[each] == shape]
        if alike and not any(same_tensor(files, name, files, each) for each in alike):
            yield name


def check_tie(files: Files) -> list[Finding]:
    """R5 by the checkpoint alone: a head of its own that readers may not use.

    No error: there are models whose own files are like that, and a run keeps them.
    """
    if not _said(files.config):
        return []
    said = (
        "It is not the input embedding, and config.json ties the two: vLLM takes the embedding, "
        "transformers the head."
    )
    return [
        Finding("R5", name, said, f"{_UNTIE[:-1]}, or remove the head.", Severity.WARNING)
        for name in _own_heads(files)
    ]


def compare_tie(files: Files, original: Files) -> Iterator[Finding]:
    """R5 against the original: what is said has changed, and what is stored does not explain it.

    A run may give the head a matrix of its own, and then writes both and says so.
    """
    ours, theirs = _said(files.config), _said(original.config)
    is_apart = any(True for _ in _own_heads(original))
    if ours and is_apart and not theirs:
        said = "It ties the embeddings, and the original's head is a matrix of its own."
        yield Finding("R5", "config.json", said, _UNTIE, Severity.ERROR)
    if ours is False and theirs and not any(_is_head(name) for name in files.places):
        said = "It does not tie the embeddings, as the original does, and there is no head."
        yield Finding(
            "R5",
            "config.json",
            said,
            "Write tie_word_embeddings: true into config.json.",
            Severity.ERROR,
        )


_AGAIN = "Compress the model anew."
_SCALES = ("weight_scale", "input_scale", "output_scale")
_GLOBAL = ("weight_global_scale", "input_global_scale")
_FEW = 8
_CHUNK = 1 << 22
_SAMPLE_ROWS = 16
_OUTER = 0.65
_LEAST_FIT = 0.5
_TINY = 1e-9
_NEVER = "All of its codes are equal: they were never written."
_LEAST_ZERO = (
    "All of its zero points are the least code: none of its weights is negative, or they were "
    "never calculated."
)
_EXPONENTS = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}
"""Dtype → integers of its size, and the bits of its infinity."""


@dataclass
class _Say:
    """Collects findings about one module."""

    module: str
    findings: list[Finding]

    def __call__(
        self,
        rule: str,
        message: str,
        remedy: str = _AGAIN,
        severity: Severity = Severity.ERROR,
    ) -> None:
        server = "vllm" if rule.startswith("S") else ""
        self.findings.append(Finding(rule, self.module, message, remedy, severity, server))


def check_scales(files: Files, entry: Entry) -> list[Finding]:
    """Scales of a quantized module by themselves (S72)."""
    say = _Say(entry.name, [])
    for own in (*_SCALES, *_GLOBAL):
        name = f"{entry.name}.{own}"
        if own not in entry.own or name in files.broken:
            continue
        raw = files.read(name)
        if raw.dtype is torch.uint8:
            count = int((raw == 255).sum())
            said = f"{count} exponents that mean NaN" if count else ""
        elif raw.dtype is torch.float8_e4m3fn:
            said = _bad_small_scale(raw.view(torch.uint8))
        elif raw.dtype.is_floating_point:
            said = _bad_scale(raw.float(), own)
        else:
            continue
        if said:
            say("S72", f"Its {own} has {said}.")
        elif own == "weight_scale" and (negative := int((raw.float() < 0).sum())):
            _say_of_negative(say, negative, raw.numel())
        elif own == "input_scale" and raw.numel() == 1 and float(raw.reshape(())) == 1.0:
            say(
                "V1",
                "Its input_scale is exactly 1, as if it had never been calibrated.",
                severity=Severity.WARNING,
            )
    return say.findings


def _say_of_negative(say: _Say, negative: int, count: int) -> None:
    """Codes times a negative scale are a weight like any other; auto-round writes them."""
    say(
        "S72",
        f"{negative} of its {count} scales are negative: transformers reads such weights, and "
        "kernels of servers may take scales for positive numbers.",
        "Negate them and their codes, or compare what the server gives with transformers.",
        Severity.WARNING,
    )


def _bad_small_scale(bits: Tensor) -> str:
    """The fault of scales that are 8-bit floats, by their bits.

    They may be zero for groups of zeros, but not all of them.
    """
    least, most = (int(each) for each in bits.aminmax()) if bits.numel() else (1, 1)
    if most >= 127:
        count = int((bits & 127 == 127).sum())
        if count:
            return f"{count} of {bits.numel()} values that are not finite"
        return f"{int((bits > 127).sum())} negative values"
    return f"{bits.numel()} values of zero" if least == most == 0 else ""


def _bad_scale(scale: Tensor, own: str) -> str:
    """The fault of a scale."""
    bad = int((~torch.isfinite(scale)).sum())
    if bad:
        return f"{bad} of {scale.numel()} values that are not finite"
    negative = int((scale < 0).sum())
    if negative and own != "weight_scale":
        return f"{negative} negative values"
    zeros = int((scale == 0).sum())
    return f"{zeros} values of zero" if zeros and own != "output_scale" else ""


_STATIC = re.compile(r".+\.(?:input|[kv])_(?:global_)?scale$")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_APART = 200.0
"""Outliers of single layers make ranges of inputs larger, but by less."""


def check_static(files: Files) -> Iterator[Finding]:
    """V5 for scales of inputs, keys and values: beside those of other layers."""
    places: dict[str, dict[str, float]] = {}
    for name in files.places:
        is_read = _STATIC.match(name) and name not in files.broken
        if is_read and files.places[name].info.numel == 1:
            value = float(files.read(name).float().reshape(()))
            places.setdefault(_NUMBER.sub("*", name), {})[name] = value
    for values in places.values():
        for name, value in values.items():
            others = [other for each, other in values.items() if each != name and other > 0]
            usual = median(others) if others else value
            if value > 0 and not usual / _APART < value < usual * _APART:
                said = (
                    f"It is {value / usual:.3g} times that of other layers: the range of what it "
                    "rounds would be too."
                )
                remedy = "Calibrate the model anew, or check that this layer is like that."
                yield Finding("V5", name, said, remedy, Severity.WARNING)


def check_codes(codes: Codes) -> list[Finding]:
    """Codes against their scales and zero points, in one pass over the codes."""
    say = _Say(codes.entry.name, [])
    seen = _Pass(codes)
    for start, stop in codes.spans():
        seen.look(codes.raw(start, stop), start)
    _say_of_codes(say, codes, seen)
    scale = codes.own("weight_scale")
    if scale is not None:
        _check_untouched(say, codes, scale, seen)
        _check_used(say, codes, scale, seen)
    zero = None if codes.args.symmetric else codes.zero_points()
    if zero is not None:
        _check_zero_points(say, codes, zero, seen)
    if codes.stored == "weight_packed" and codes.args.kind == "int":
        _check_packing(say, codes)
    return say.findings


def unexplained(findings: list[Finding], error: float | None) -> list[Finding]:
    """Findings about codes that a comparison with the original leaves.

    Args:
        findings: of :func:`check_codes`.
        error: the relative error of the decoded weight, ``None`` if it is not as it should be.
    """
    if error is None or error > _LEAST_FIT:
        return findings
    # codes that decode to the original were written, however odd they look
    return [one for one in findings if one.rule != "V4" and one.message != _LEAST_ZERO]


class _Pass:
    """Pass over the codes of a module.

    Args:
        codes: the codes.
    """

    def __init__(self, codes: Codes) -> None:
        self.codes = codes
        self.rows_unwritten: list[int] = []
        self.is_constant = True
        self.not_a_number = 0
        self.out_of_range = 0
        self.largest = torch.zeros(codes.rows)
        self._first: int | None = None

    @property
    def is_blank(self) -> bool:
        """True if every bit of the codes is zero, as in a buffer that nobody wrote to."""
        return self.is_constant and self._first == 0

    def look(self, raw: Tensor, start: int) -> None:
        """Take in some rows."""
        plain = raw.view(torch.uint8) if raw.dtype is torch.float8_e4m3fn else raw
        if plain.numel() == 0:
            return
        low, high = plain.aminmax()
        first = int(plain.reshape(-1)[0])
        self._first = first if self._first is None else self._first
        self.is_constant &= int(low) == int(high) == self._first
        if raw.dtype is torch.int32:
            dead = (plain == 0).all(dim=1)
            self.rows_unwritten += [start + int(row) for row in dead.nonzero()[:8]]
        elif raw.dtype is torch.float8_e4m3fn:
            # without the sign the bits of floats are in the order of their values
            magnitude = plain & 127
            largest = magnitude.amax(1)
            if bool((largest == 127).any()):
                self.not_a_number += int((magnitude == 127).sum())
            self.largest[start : start + len(raw)] = largest.view(torch.float8_e4m3fn).float()
        elif raw.dtype is torch.int8:
            limit = 2 ** (self.codes.args.bits - 1)
            if int(high) >= limit or int(low) < -limit:
                wide = plain.to(torch.int16)
                self.out_of_range += int(((wide >= limit) | (wide < -limit)).sum())
            self.largest[start : start + len(raw)] = torch.maximum(
                plain.amax(1).float(), -plain.amin(1).float()
            )


def _say_of_codes(say: _Say, codes: Codes, seen: _Pass) -> None:
    if seen.not_a_number:
        say("V6", f"Its weight has {seen.not_a_number} codes that mean NaN.")
    if seen.out_of_range:
        say("V2", f"Its weight has {seen.out_of_range} codes beyond {codes.args.bits} bits.")
    if seen.is_constant and codes.rows * codes.columns > 1:
        _say_of_one_code(say, codes, seen)
    elif seen.rows_unwritten and codes.args.symmetric:
        _say_of_blank_rows(say, codes, seen.rows_unwritten)


def _say_of_one_code(say: _Say, codes: Codes, seen: _Pass) -> None:
    """V4, where all codes are equal.

    So are those of a weight that is one number, and its scales are equal too. A buffer that nobody
    wrote to holds zero, and the scales beside it are those of a weight that varies, or untouched.
    """
    scale = codes.own("weight_scale")
    is_even = scale is None or _is_constant(scale)
    is_zero = not any(bool(part.units.any()) for part in codes.parts())
    first = 0.0 if scale is None or not scale.numel() else float(scale.reshape(-1)[0].float())
    is_unset = seen.is_blank and scale is not None and _is_unset(scale, first, is_zero)
    if is_unset or (not is_even and (is_zero or seen.is_blank)):
        say("V4", _NEVER)
    elif not is_zero:
        what = "its weight is one number" if is_even else "each group of it is one number"
        say(
            "V4",
            f"All of its codes are equal: {what}, or they were never written.",
            "Compare it with the original by --reference.",
            Severity.WARNING,
        )


def _say_of_blank_rows(say: _Say, codes: Codes, rows: list[int]) -> None:
    """V4, where all bits of some rows are zero: so they are in a row of one negative number."""
    scale = codes.own("weight_scale")
    if scale is not None and scale.ndim == 2 and scale.shape[1] > 1:
        rows = [row for row in rows if not _is_constant(scale[row])]
    if rows:
        say(
            "V4",
            f"Some of its rows hold zero words, such as row {rows[0]}: they were never written.",
        )


def _is_unset(scale: Tensor, first: float, is_zero: bool) -> bool:
    """True if equal scales beside codes of zero bits are none that a weight gave.

    They are an untouched buffer; or the codes mean zero, there is one scale for all, and it is
    neither tiny nor one of the powers of two that stand in for a scale of zero.
    """
    if scale.dtype is torch.uint8:
        return first == 127
    is_substitute = frexp(first)[0] == 0.5 or first < _TINY
    return first == 1 or (is_zero and scale.numel() == 1 and not is_substitute)


def _check_untouched(say: _Say, codes: Codes, scale: Tensor, seen: _Pass) -> None:
    """Untouched scales (V1), and S72 for zero scales of groups that are not zero."""
    if seen.is_constant:
        return
    first = float(scale.reshape(-1)[0].float()) if scale.numel() else 0.0
    if scale.numel() >= _FEW and _is_constant(scale):
        is_exponent = scale.dtype is torch.uint8
        if first in ((127.0, 0.0) if is_exponent else (1.0,)):
            what = "They are all 1" if first else "They are all zero"
            say("V1", f"{what} for a weight that varies: its scales were never calculated.")
        elif first != 0 and not is_exponent:
            say(
                "V1",
                f"All of its {scale.numel()} scales are {first:.6g}.",
                severity=Severity.WARNING,
            )
    elif scale.dtype is torch.float8_e4m3fn and _has_codes_without_scale(codes, scale):
        say("S72", "Its weight_scale is zero for groups whose codes are not.")


def _is_constant(scale: Tensor) -> bool:
    flat = scale.reshape(-1)
    flat = flat.view(torch.uint8) if flat.dtype is torch.float8_e4m3fn else flat
    return bool((flat == flat[:1]).all())


def _has_codes_without_scale(codes: Codes, scale: Tensor) -> bool:
    """True if a group with a scale of zero has a code other than zero (4-bit floats)."""
    if codes.stored != "weight_packed" or scale.ndim != 2 or not codes.args.group:
        return False
    zero = scale.view(torch.uint8) & 127 == 0
    rows = zero.any(dim=1).nonzero().reshape(-1)[:_SAMPLE_ROWS]
    width = codes.args.group // 2
    for row in rows.tolist():
        magnitudes = codes.raw(row, row + 1).reshape(-1) & 0x77
        groups = magnitudes[: scale.shape[1] * width].reshape(-1, width)
        if bool((groups.amax(dim=1)[zero[row]] != 0).any()):
            return True
    return False


def _check_used(say: _Say, codes: Codes, scale: Tensor, seen: _Pass) -> None:
    """V5, for codes of 8 bits with a scale per row or tensor."""
    if codes.stored != "weight" or codes.args.strategy not in ("tensor", "channel"):
        return
    top = 448.0 if codes.args.kind == "float" else float(2 ** (codes.args.bits - 1) - 1)
    largest = seen.largest.amax() if codes.args.strategy == "tensor" else seen.largest.median()
    if 0 < float(largest) < top / 8 and codes.args.symmetric:
        say(
            "V5",
            f"Its codes reach {float(largest):.3g} of {top:.0f}: its scales are too large.",
            severity=Severity.WARNING,
        )


def _check_zero_points(say: _Say, codes: Codes, zero: Tensor, seen: _Pass) -> None:
    """Zero points in range and calculated (V2)."""
    limit = 2 ** (codes.args.bits - 1)
    wide = zero.to(torch.int16) if zero.dtype is torch.int8 else zero
    if zero.dtype is torch.int8 and bool(((wide >= limit) | (wide < -limit)).any()):
        say("V2", f"Its zero points are not all within {codes.args.bits} bits.")
    elif zero.numel() >= _FEW and not seen.is_constant and bool((wide == -limit).all()):
        say("V2", _LEAST_ZERO, severity=Severity.WARNING)


def _check_packing(say: _Say, codes: Codes) -> None:
    """V3 and S27."""
    bits = codes.args.bits
    used = codes.columns * bits % 32
    if used:
        for start, stop in codes.spans():
            # the words are unsigned; shifted as 64-bit integers no sign is carried along
            last = codes.raw(start, stop)[:, -1].to(torch.int64) & 0xFFFFFFFF
            if bool((last >> used).any()):
                say("V3", "Unused bits at the end of its rows are not zero.")
                break
    if bits < 3 or not codes.args.symmetric:
        return
    middle = min(codes.rows, _SAMPLE_ROWS)
    start = (codes.rows - middle) // 2
    sample = codes.integers(start, start + middle).float().abs()
    if float((sample >= 2 ** (bits - 2)).float().mean()) > _OUTER:
        say(
            "S27",
            "Most of its codes are at the ends of their range, as if they were stored without the "
            "offset.",
            "Store each code plus half the range.",
            Severity.WARNING,
        )


def _is_finite(values: Tensor) -> bool:
    """True if all of them are, by their bits: an exponent of ones is infinity or no number."""
    integers, ones = _EXPONENTS[values.dtype]
    bits = values.contiguous().view(integers)
    return not values.numel() or int((bits & torch.iinfo(integers).max).amax()) < ones


def check_plain(files: Files, name: str, *, may_be_zero: bool = True) -> Iterator[Finding]:
    """V6 and V7, for a tensor of plain floats.

    Args:
        files: the checkpoint.
        name: the tensor.
        may_be_zero: nothing is wrong with it if it is zero throughout.
    """
    if name in files.broken or files.places[name].info.dtype not in PLAIN_FLOATS:
        return
    bad = 0
    is_zero = not may_be_zero and files.places[name].info.numel > 0
    for chunk in tensor_chunks(files, name, _CHUNK):
        if not _is_finite(chunk):
            bad += int((~torch.isfinite(chunk)).sum())
        is_zero = is_zero and not bool(chunk.any())
    say = _Say(name, [])
    if bad:
        say("V6", f"It has {bad} values that are not finite.", "Compress a sound model.")
    if is_zero:
        say(
            "V7",
            "All of it is zero: it was never written, or the model says nothing.",
            "Compare it with the original by --reference.",
            Severity.WARNING,
        )
    yield from say.findings
