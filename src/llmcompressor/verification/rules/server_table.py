# SPDX-License-Identifier: Apache-2.0
"""Table of the schemes that servers take, read in vLLM 0.33.0, SGLang 0.5.23 and llama.cpp.

A row names the weights, inputs, outputs and formats that it is about, and what they are served as,
or why not; the first row of a server and kind of module that fits a scheme decides.
Rows of :data:`NOTES` say what vLLM does with a scheme that it takes (:func:`notes`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any, TypeAlias

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.scheme import ACTIVATION_FORMATS, Args, Scheme

Match: TypeAlias = "Mapping[str, Any] | None"
"""Field of :class:`~llmcompressor.verification.scheme.Args` → its value, or several in a tuple.

``None`` stands for nothing that is quantized.
"""
ANY: Mapping[str, Any] = {"any": True}
"""Quantized in any way, or not at all."""
NOTHING: Mapping[str, Any] = {"kind": ()}
"""Matches no arguments."""
_TOKEN = {"strategy": "token", "dynamic": True}
_ONE_OR_ROW, _ROW_OR_GROUP = ("tensor", "channel"), ("channel", "group")
_FLOAT = {"kind": "float", "strategy": (*_ONE_OR_ROW, "block"), "symmetric": True}
_STATIC = {"kind": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_INT = {"kind": "int", "strategy": _ROW_OR_GROUP}
_MX = {"kind": "float", "strategy": "group", "group": 32, "symmetric": True}
_DYNAMIC = (True, "local")
PATTERNS: Mapping[str, Match] = {
    "*": ANY,
    "none": None,
    "nothing": NOTHING,
    "some": {},
    "dynamic": {"dynamic": _DYNAMIC},
    "dynamic tensor": {"dynamic": _DYNAMIC, "strategy": "tensor"},
    "static asymmetric": {"dynamic": False, "symmetric": False},
    "asymmetric": {"symmetric": False},
    "rows or blocks": {"strategy": ("channel", "block")},
    "groups": {"strategy": _ROW_OR_GROUP},
    "blocks": {"strategy": "block"},
    "blocks of 128": {"block": ((128, 128),)},
    "nvfp4": {**_MX, "bits": 4, "strategy": "tensor_group", "group": 16},
    "mxfp4": {**_MX, "bits": 4},
    "mxfp6": {**_MX, "bits": 6},
    "mxfp8": {**_MX, "bits": 8, "scale_dtype": "torch.uint8"},
    "float": {"kind": "float"},
    "float tensor": {"kind": "float", "strategy": "tensor"},
    "float channel": {"kind": "float", "strategy": "channel"},
    "float blocks": {"kind": "float", "strategy": "block"},
    "float groups": {"kind": "float", "strategy": "group"},
    "float cells": {"kind": "float", "strategy": ("group", "tensor_group")},
    "float symmetric": _FLOAT,
    "float symmetric blocks": {**_FLOAT, "strategy": "block"},
    "float dynamic": {"kind": "float", "dynamic": _DYNAMIC},
    "float static": _STATIC,
    "float token": {"kind": "float", **_TOKEN},
    "float8 token": {"kind": "float", "bits": 8, **_TOKEN},
    "float8 cache": {**_FLOAT, "bits": 8, "strategy": ("tensor", "attn_head")},
    "float8 static": {**_STATIC, "bits": 8},
    "int": {"kind": "int"},
    "int groups": _INT,
    "int group": {"kind": "int", "strategy": "group"},
    "int 2 to 8": {**_INT, "bits": tuple(range(2, 9))},
    "int group 2 4 8": {**_INT, "bits": (2, 4, 8), "strategy": "group"},
    "int 2 4 8": {**_INT, "bits": (2, 4, 8)},
    "int 2 4 8 symmetric": {**_INT, "bits": (2, 4, 8), "symmetric": True},
    "int4 symmetric": {**_INT, "bits": 4, "symmetric": True},
    "int4 groups": {**_INT, "bits": 4, "strategy": "group", "symmetric": True},
    "int4 128": {**_INT, "bits": 4, "strategy": "group", "symmetric": True, "group": 128},
    "int8 asymmetric": {**_INT, "bits": 8, "symmetric": False},
    "int8 rows": {"kind": "int", "bits": 8, "strategy": _ONE_OR_ROW, "symmetric": True},
    "int8 tensor": {"kind": "int", "bits": 8, "strategy": "tensor", "dynamic": False},
    "int8 token": {"kind": "int", "bits": 8, **_TOKEN},
    "int 4 8 token": {
        **_TOKEN,
        "kind": "int",
        "bits": (4, 8),
        "strategy": ("token", "group"),
        "symmetric": True,
    },
    "int cells": {"kind": "int", "strategy": ("group", "block")},
    "8 tensor": {"bits": 8, "strategy": "tensor", "dynamic": False},
    "8 token": {"bits": 8, **_TOKEN},
    "8 channel symmetric": {"bits": 8, "strategy": "channel", "symmetric": True},
    "token": _TOKEN,
    "channel": {"strategy": "channel"},
    "4 symmetric": {"bits": 4, "symmetric": True},
    "4 of 128": {"bits": 4, "group": 128},
    "4": {"bits": 4},
    "8": {"bits": 8},
    "4 8": {"bits": (4, 8)},
    "2 3 5 6 7": {"bits": (2, 3, 5, 6, 7)},
    "usual groups": {"group": (0, 32, 64, 128)},
    "8 asymmetric of 32": {"bits": 8, "symmetric": False, "group": 32},
    "8 asymmetric": {"bits": 8, "symmetric": False, "group": (0, 64, 128)},
}
"""Words of the table → the arguments that they mean."""
FORMATS: Mapping[str, Collection[str]] = {
    "*": (),
    "packed": ("pack-quantized",),
    "unpacked": ACTIVATION_FORMATS,
    "integers": ("pack-quantized", "int-quantized"),
    "bytes": ("int-quantized",),
    "numbers": ("naive-quantized", "int-quantized", "float-quantized"),
    "nvfp4": ("nvfp4-pack-quantized",),
}
"""Words of the table → formats."""


@dataclass(frozen=True)
class Row:
    """Schemes that a server takes for a kind of module, or refuses.

    Attributes:
        weights: arguments of weights (of states, in a cache).
        inputs: arguments of inputs.
        outputs: arguments of outputs.
        formats: of the scheme; all of them if empty.
        devices: compute capabilities; all of them if empty, and where the device is not known.
        name: the server's own class or method for it; empty where it refuses the scheme.
        least: the least compute capability.
        native: the capability from which inputs are computed as the scheme says; 0 for ``least``.
        reason: why it is refused, with places for the scheme's fields.
        remedy: what to do about it.
    """

    weights: Match = field(default_factory=lambda: ANY)
    inputs: Match = field(default_factory=lambda: ANY)
    outputs: Match = field(default_factory=lambda: ANY)
    formats: Collection[str] = ()
    devices: Collection[int] = ()
    name: str = ""
    least: int = 0
    native: int = 0
    reason: str = ""
    remedy: str = "Choose another scheme."

    def fits(self, scheme: Scheme, capability: int | None) -> bool:
        """True if a scheme is one of these."""
        parts = ((self.weights, scheme.weights), (self.inputs, scheme.inputs))
        return (
            all(_fits(wanted, args) for wanted, args in (*parts, (self.outputs, scheme.outputs)))
            and (not self.formats or scheme.format in self.formats)
            and (not self.devices or capability is None or capability in self.devices)
        )

    def why(self, scheme: Scheme) -> str:
        """The reason for a refusal, in terms of the scheme."""
        return self.reason.format(weights=scheme.weights, format=scheme.format)


def _fits(wanted: Match, args: Args | None) -> bool:
    """True if arguments are as wanted.

    >>> _fits({"bits": (4, 8)}, Args(8, "int", True, "tensor")), _fits(None, None), _fits(ANY, None)
    (True, True, True)
    """
    if wanted is ANY:
        return True
    if wanted is None or args is None:
        return wanted is None and args is None
    found = ((getattr(args, name), value) for name, value in wanted.items())
    return all(
        own in value if isinstance(value, tuple) else own == value and type(own) is type(value)
        for own, value in found
    )


def _rows(text: str) -> tuple[Row, ...]:
    """Rows of a text: weights | inputs | outputs | formats | devices | name, least, native.

    A row is followed by why it is refused and by the remedy, each after an exclamation mark.
    """
    return tuple(map(_row, _lines(text)))


def _lines(text: str) -> Iterator[str]:
    joined = text.replace("\n            + ", " ").replace("\n            !", " !")
    yield from filter(None, map(str.strip, joined.splitlines()))


def _row(line: str) -> Row:
    place, *said = (part.strip() for part in line.split("!"))
    weights, inputs, outputs, formats, devices, answer = (cell.strip() for cell in place.split("|"))
    name, least, native = [*answer.split(), *(["", "0", "0"][len(answer.split()) :])]
    return Row(
        PATTERNS[weights],
        PATTERNS[inputs],
        PATTERNS[outputs],
        FORMATS[formats],
        () if devices == "*" else (int(devices),),
        name,
        int(least),
        int(native),
        *said,
    )


TABLE: Mapping[tuple[str, str], tuple[Row, ...]] = {
    ("vllm", "linear"): _rows(  # in the order in which it looks (S21)
        """
        dynamic | * | * | * | * |
            ! Its weights are dynamic.
        nvfp4 | none | * | * | * | NVFP4A16 75
        nvfp4 | nvfp4 | * | * | * | NVFP4 75 100
        nvfp4 | * | * | * | * |
            ! Inputs of NVFP4 weights must be NVFP4 too, or left alone.
        mxfp4 | * | * | * | * | MXFP4 80 100
        mxfp8 | * | * | * | * | MXFP8 75 100
        mxfp6 | * | * | * | * |
            ! vLLM has no scheme for 6-bit floats of compressed-tensors, in the releases known
            + here.
            ! Take MXFP4 or MXFP8, or read it with transformers, in bfloat16.
        int4 128 | float8 token | * | * | 90 | W4A8Fp8 90
        int4 groups | float8 token | * | * | 90 |
            ! 4-bit integers with 8-bit float inputs need groups of 128.
        int4 groups | float8 token | * | * | * |
            ! 4-bit integers with 8-bit float inputs run on devices of SM90 alone.
        int 2 4 8 | int8 tensor | int8 tensor | integers | * | WNA8O8Int 70
        int 2 to 8 | none | * | packed | * | WNA16 75
        int groups | none | * | packed | * |
            ! {weights.bits}-bit integers are not read; 2 to 8 bits are.
        groups | none | * | packed | * |
            ! pack-quantized holds integers, and its weights are floats.
        int groups | int 4 8 token | * | packed | * | WNA8Int 75
        float symmetric blocks | float static | * | unpacked | * |
            ! 8-bit float blocks cannot have static inputs.
        float symmetric | float static | * | unpacked | * | W8A8Fp8 75 89
        float symmetric | float dynamic | * | unpacked | * | W8A8Fp8 75 89
        float symmetric | * | * | unpacked | * | W8A16Fp8 75
        float symmetric | * | * | * | * |
            ! 8-bit floats are not read from the format {format}.
        int8 rows | 8 tensor | * | unpacked | * | W8A8Int8 75
        int8 rows | 8 token | * | unpacked | * | W8A8Int8 75
        int4 symmetric | int8 token | * | unpacked | * | W4A8Int 1
        int | none | * | packed | * |
            ! Integer weights alone need scales for groups or channels.
        int | none | * | * | * |
            ! Integer weights alone are not read from the format {format}.
        float groups | none | * | * | * |
            ! Groups of 8-bit floats need a scale_dtype of torch.uint8.
        * | none | * | * | * |
            ! No scheme of vLLM fits it.
        asymmetric | * | * | * | * |
            ! Asymmetric weights are not served with quantized inputs.
        int | * | * | packed | * |
            ! Packed integers are served with inputs like those of W4A8 or W4AFP8.
        int cells | * | * | * | * |
            ! 8-bit integers with quantized inputs need channel or tensor scales.
        float groups | * | * | * | * |
            ! Groups of 8-bit floats need a scale_dtype of torch.uint8.
        * | * | * | * | * |
            ! No scheme of vLLM fits it.
        """
    ),
    ("vllm", "experts"): _rows(  # S63
        """
        mxfp6 | * | * | * | * |
            ! vLLM has no experts of 6-bit floats, in the releases known here.
        mxfp4 | * | * | * | * | MX
        mxfp8 | * | * | * | * | MX
        nvfp4 | none | * | * | * | NVFP4
        nvfp4 | nvfp4 | * | * | * | NVFP4
        nvfp4 | * | * | * | * |
            ! Inputs must be NVFP4 too.
        int8 asymmetric | none | * | packed | * |
            ! 8-bit experts with zero points have no kernel.
        int groups | none | * | packed | * | WNA16
        int groups | none | * | * | * |
            ! Experts are read from pack-quantized, not {format}.
        * | none | * | * | * |
            ! Experts with quantized weights alone must be packed integers.
        float tensor | float tensor | * | * | * | FP8
        float channel | float token | * | * | * | FP8
        float blocks | float dynamic | * | * | * | FP8
        float | * | * | * | * |
            ! 8-bit float experts take tensor with tensor, channel with token, or blocks.
        8 channel symmetric | token | * | * | * | INT8
        4 of 128 | float token | * | * | * | W4A8Fp8
        4 symmetric | int8 token | * | bytes | * | W4A8Int8
            ! 4-bit integer experts with 8-bit integer inputs run on Arm alone.
        4 | int8 token | * | * | * |
            ! 4-bit integer experts with 8-bit integer inputs run on Arm alone. And there they are
            + read from int-quantized, symmetric, alone.
        * | * | * | * | * |
            ! 8-bit integer experts need channel scales and dynamic inputs per token.
        """
    ),
    ("vllm", "embedding"): _rows(  # S57
        """
        int 2 4 8 symmetric | none | * | packed | * | packed
        int 2 4 8 symmetric | none | * | * | * |
            ! It is stored as {format}, and packed codes are read alone.
        int 2 4 8 symmetric | * | * | * | * |
            ! Its inputs are quantized too.
        int 2 4 8 | * | * | * | * |
            ! Embeddings are served without zero points.
        int groups | * | * | * | * |
            ! Embeddings are served in 2, 4 or 8 bits, not {weights.bits}.
        * | * | * | * | * |
            ! Embeddings are served as integers per channel or group, not as {weights}.
        """
    ),
    ("vllm", "head"): _rows(  # S59
        """
        blocks | * | * | * | * |
            ! Heads cannot be in blocks.
            ! Use channels or groups.
        * | * | * | * | * | head
        """
    ),
    ("vllm", "cache"): _rows(  # S49
        """
        float8 cache | * | * | * | * | fp8
        * | * | * | * | * |
            ! It has {weights}: symmetric 8-bit floats, per tensor or head, are served.
            ! Quantize the cache to symmetric 8-bit floats per tensor.
        """
    ),
    ("sglang", "linear"): _rows(  # G5
        """
        mxfp4 | * | * | * | * |
            ! SGLang has no MX schemes for Linears.
        mxfp6 | * | * | * | * |
            ! SGLang has no MX schemes for Linears.
        mxfp8 | * | * | * | * |
            ! SGLang has no MX schemes for Linears.
        float | none | * | * | * | float 80
        nvfp4 | * | * | * | * | float 100
        float | * | * | * | * | float 89
        4 8 | none | * | packed | * | int 80
        * | none | * | * | * |
            ! SGLang reads packed integers of 4 and 8 bits alone.
        8 | * | none | * | * | int 80
        * | * | * | * | * |
            ! SGLang has no integer schemes with quantized inputs but W8A8.
        """
    ),
    ("sglang", "experts"): _rows(  # G6
        """
        int | int | * | * | * |
            ! SGLang serves integer experts with integer inputs on NPUs alone.
            ! Use FP8.
        * | * | * | * | * | experts
        """
    ),
    ("llama.cpp", "linear"): _rows(  # convert_hf_to_gguf of August 2026 (Q2)
        """
        nvfp4 | * | * | nvfp4 | * | nvfp4
        int group 2 4 8 | * | * | packed | * | packed
        int group | * | * | packed | * |
            ! Packed integers are read of 2, 4 and 8 bits, not of {weights.bits}.
        * | * | * | packed | * |
            ! Packed integers are read in groups alone.
            ! Quantize in groups (W4A16).
        asymmetric | * | * | numbers | * |
            ! Zero points have no place there.
            ! Quantize symmetrically.
        rows or blocks | * | * | numbers | * | numbers
        * | * | * | numbers | * |
            ! Numbers are read with scales per channel or in blocks alone.
            ! Quantize per channel (FP8_DYNAMIC).
        * | * | * | * | * |
            ! The format {format} is not read.
        """
    ),
    ("sglang", "head"): _rows(  # G7
        """
        blocks | * | * | * | * |
            ! SGLang refuses a head in blocks.
            ! Leave it unquantized.
        * | * | * | * | * | head
        """
    ),
    ("sglang", "cache"): _rows(  # G7
        """
        float8 static | * | * | * | * | fp8
        * | * | * | * | * |
            ! SGLang ignores caches but of static symmetric 8-bit floats per tensor.
            ! Quantize the cache in that way.
        """
    ),
}


def served(
    scheme: Scheme, of: str = "linear", server: str = "vllm", capability: int | None = None
) -> Row:
    """The first row that a scheme with weights fits.

    Args:
        scheme: the scheme, with weights.
        of: the kind of module.
        server: ``vllm``, ``sglang`` or ``llama.cpp``.
        capability: of the device; one that is not known is taken to fit.

    >>> served(Scheme(Args(4, "int", True, "group", 128), format="pack-quantized")).name
    'WNA16'
    """
    if scheme.weights is None:
        return Row(reason="It has no weights.")
    return next(row for row in TABLE[server, of] if row.fits(scheme, capability))


@dataclass(frozen=True)
class Note:
    """What vLLM does with a scheme that it takes.

    Attributes:
        rule: the rule (S22, S34, S44 to S46).
        names: names of the rows of :data:`TABLE` that it is about; of all of them if empty.
        weights: arguments of weights.
        inputs: arguments of inputs.
        but: arguments of weights that it is not about.
        but_inputs: arguments of inputs that it is not about.
        begin: the least capability of a device that it is about.
        end: the capability from which on it is not.
        message: what vLLM does, with places for the scheme's fields.
        remedy: what to do about it.
        fails: on a device that is known it fails.
    """

    rule: str
    names: Collection[str]
    weights: Match
    inputs: Match
    but: Match
    but_inputs: Match
    begin: int
    end: int
    message: str
    remedy: str
    fails: bool = False

    def concerns(self, scheme: Scheme, name: str, capability: int | None) -> bool:
        """True if it is about a scheme that is served as ``name``."""
        return (
            (capability is None or self.begin <= capability < self.end)
            and (not self.names or name in self.names)
            and _fits(self.weights, scheme.weights)
            and _fits(self.inputs, scheme.inputs)
            and not _fits(self.but, scheme.weights)
            and not _fits(self.but_inputs, scheme.inputs)
        )


def _note(line: str) -> Note:
    place, *said = (part.strip() for part in line.split("!"))
    rule, names, *patterns, begin, end = (cell.strip() for cell in place.split("|"))
    weights, inputs, but, but_inputs = (PATTERNS[one] for one in patterns)
    every = said[0], said[1], len(said) > 2
    return Note(rule, names.split(), weights, inputs, but, but_inputs, int(begin), int(end), *every)


_HUMMING = """
            ! {weights} is served by the Humming kernels alone, or by Machete on SM90.
            ! Make sure that they are installed."""
NOTES: tuple[Note, ...] = tuple(
    map(
        _note,
        _lines(
            f"""
        S22 | W8A8Fp8 W8A16Fp8 | * | dynamic tensor | nothing | nothing | 0 | 999
            ! Inputs that are dynamic per tensor are quantized per token.
            ! Expect that.
        S22 | W8A8Fp8 W8A16Fp8 | * | static asymmetric | nothing | nothing | 0 | 999
            ! Static asymmetric float inputs are left alone.
            ! Make them symmetric.
        S22 | MXFP4 | * | some | nothing | mxfp4 | 0 | 999
            ! Inputs of MXFP4 weights are rounded to MXFP4 or left alone, not to {{inputs}}.
            ! Measure the quality there.
        S22 | MXFP4 | * | none | nothing | nothing | 100 | 999
            ! From capability 100 on, inputs of MXFP4 weights may be quantized all the same.
            ! Measure the quality there.
        S22 | WNA8Int | * | * | nothing | nothing | 0 | 999
            ! Only the Humming kernels quantize the inputs; Machete and Marlin leave them alone.
            ! Expect weight-only speed elsewhere.
        S34 | | float blocks | * | blocks of 128 | nothing | 0 | 999
            ! Its blocks are {{weights.block}}; fast kernels take (128, 128) alone.
            ! Quantize in blocks of 128 by 128.
        S44 | WNA16 WNA8Int | 2 3 5 6 7 | * | nothing | nothing | 0 | 999 {_HUMMING}
        S44 | WNA16 WNA8Int | 4 8 | * | usual groups | nothing | 0 | 999 {_HUMMING}
        S44 | WNA16 WNA8Int | 8 asymmetric of 32 | * | nothing | nothing | 0 | 999 {_HUMMING}
        S44 | WNA16 WNA8Int | 8 asymmetric | * | nothing | nothing | 0 | 90 {_HUMMING}
        S44 | WNA16 WNA8Int | 8 asymmetric | * | nothing | nothing | 91 | 999 {_HUMMING}
        S45 | W8A8Fp8 W8A16Fp8 | blocks | * | nothing | nothing | 0 | 90
            ! Below capability 90, blocks of 8-bit floats run weight-only.
            ! Serve it from capability 90 on.
        S46 | W8A8Int8 | * | * | nothing | nothing | 100 | 999
            ! From capability 100 on, 8-bit integer inputs have no kernel by default.
            ! Serve it with --linear-backend triton there, or use FP8.
            ! fails
        """
        ),
    )
)


def notes(scheme: Scheme, capability: int | None) -> Iterator[Note]:
    """The notes about a scheme, each text once."""
    name = served(scheme, capability=capability).name
    found = (note for note in NOTES if note.concerns(scheme, name, capability))
    yield from {note.message: note for note in found}.values()


@dataclass(frozen=True)
class Limit:
    """Modules that a server refuses or gets wrong.

    Attributes:
        rule: the rule.
        where: fact of a module (:class:`~llmcompressor.verification.rules.view.Facts`) → its
            value, or several in a tuple.
        message: what is wrong, with a place for the scheme.
        remedy: what to do about it.
        severity: where it is not the rule's.
    """

    rule: str
    where: Mapping[str, Any]
    message: str
    remedy: str
    severity: Severity | None = None

    def concerns(self, facts: object) -> bool:
        """True if modules of these facts are meant."""
        found = ((getattr(facts, name), value) for name, value in self.where.items())
        return all(
            own in value if isinstance(value, tuple) else own == value for own, value in found
        )


_DENSE = {"selected": True, "coded": False, "plain": False, "mixed": False}
_CODED = {"coded": True, "plain": False, "mixed": False}
_ADD = "Add it to ignore, or quantize it."
_TARGET = "Give it a target that matches its path in vLLM, as re:.*name, and take it off ignore."
_PLAIN_WEIGHT = "The configuration quantizes it to {scheme}, and the file holds a plain weight."
_GATE = "It is a router gate, and servers build gates unquantized."
_UNQUANTIZED = "Leave it unquantized and list it in ignore."
LIMITS: tuple[Limit, ...] = (
    Limit(
        "S19",
        {**_DENSE, "kind": ("linear", "embedding"), "beside_codes": False},
        _PLAIN_WEIGHT,
        _ADD,
    ),
    Limit("S19", {**_DENSE, "kind": "head", "tied": False}, _PLAIN_WEIGHT, _ADD),
    Limit(
        "S19",
        {**_CODED, "selected": False, "ignored": True},
        "It is quantized, and the configuration ignores it.",
        _TARGET,
    ),
    Limit(
        "S19",
        {**_CODED, "selected": False, "ignored": False},
        "It is quantized, and the configuration has no target for it.",
        _TARGET,
    ),
    Limit(
        "S19",
        {**_CODED, "selected": True, "stored_so": False},
        "Its codes lie in the file otherwise than the format of its scheme, {scheme}, has them.",
        "Write the format in which it is stored.",
    ),
    Limit(
        "S20",
        {"kind": "linear", "coded": True, "plain": True},
        "vLLM builds this module unquantized in every case.",
        _UNQUANTIZED,
    ),
    Limit(
        "S57",
        {"kind": "embedding", "coded": True, "plain": True},
        "vLLM builds this embedding unquantized.",
        _UNQUANTIZED,
    ),
    Limit("S58", {"kind": "gate", "coded": True, "plain": True}, _GATE, _UNQUANTIZED),
    Limit(
        "S58",
        {"kind": "gate", "coded": True, "plain": False},
        _GATE,
        _UNQUANTIZED,
        Severity.WARNING,
    ),
    Limit(
        "S58",
        {**_DENSE, "kind": "gate"},
        "It is a router gate that a target reaches, since vLLM gives gates of this model a scheme.",
        "List it in ignore.",
    ),
    Limit(
        "S59",
        {"kind": "head", "coded": True, "plain": True},
        "vLLM builds this model's head unquantized.",
        _UNQUANTIZED,
    ),
    Limit(
        "S59",
        {"kind": "head", "coded": True, "plain": False, "selected": False},
        "It is quantized, and no target names it; Linear does not reach a head.",
        "Target it by name, as re:.*lm_head.",
    ),
    Limit(
        "S60",
        {"coded": True, "tied": True},
        "It is quantized, and the configuration ties input and output embeddings.",
        "Leave both unquantized, or write tie_word_embeddings: false and store both.",
    ),
    Limit(
        "S61",
        {**_DENSE, "kind": "linear", "draft": True},
        "It belongs to a draft layer, is not quantized, and is not ignored.",
        "Add the draft layer to ignore, as re:^mtp.*.",
    ),
    Limit(
        "G2",
        {"kind": "linear", "coded": False, "plain": False, "expert": False, "left_to_sglang": True},
        "No target matches it and it is not ignored, which SGLang refuses.",
        "Add it to ignore.",
    ),
    Limit(
        "G2",
        {
            **{"kind": "linear", "coded": False, "plain": False, "expert": False},
            **{"mixed": False, "selected_by_sglang": True},
        },
        "The configuration quantizes it, and the file holds a plain weight: SGLang serves "
        "uninitialized memory, or codes that are none.",
        _ADD,
    ),
    Limit(
        "G4",
        {"kind": "embedding", "coded": True},
        "SGLang skips the codes of embeddings and serves uninitialized memory.",
        "Leave embeddings unquantized.",
    ),
)


@dataclass(frozen=True)
class Split:
    """A size of a Linear that has to be a whole number of units on each device.

    Attributes:
        rule: the rule.
        of_experts: the rule for experts.
        weights: arguments of the weights that it is about.
        formats: their formats; all if empty.
        size: ``rows`` or ``columns``.
        unit: ``group``, ``block``, or ``word`` of 32 bits.
        where: ``always``, ``split`` (this size is split), or ``joined``: that, or others follow in
            one matrix.
        message: what is wrong, with a place for the unit.
    """

    rule: str
    of_experts: str
    weights: Match
    formats: Collection[str]
    size: str
    unit: str
    where: str
    message: str

    def length(self, scheme: Scheme) -> int:
        """Length of the unit; 0 if none is meant."""
        args = scheme.weights
        if args is None or not _fits(self.weights, args):
            return 0
        if self.formats and scheme.format not in self.formats:
            return 0
        if self.unit == "word":
            return 32 // gcd(32, args.bits)
        if self.unit == "group":
            return args.group
        return 0 if args.block is None else args.block[self.size == "columns"]


def _split(line: str) -> Split:
    rule, experts, weights, formats, size, unit, where, message = map(str.strip, line.split("|"))
    return Split(rule, experts, PATTERNS[weights], FORMATS[formats], size, unit, where, message)


SPLITS = tuple(
    map(
        _split,
        _lines(
            """
        S39 | S64 | int group | * | columns | group | always | are no whole number of groups of {}.
        S42 | S65 | float cells | * | columns | group | always | hold a part of a group of {},
            + which vLLM does not notice.
        S40 | S64 | channel | packed | columns | word | split | do not end at a word of 32 bits.
        S40 | S64 | asymmetric | packed | rows | word | always | have zero points that do not end
            + at a word of 32 bits.
        S41 | S65 | float blocks | * | columns | block | split | are no whole number of blocks of
            + {}.
        S41 | S65 | float blocks | * | rows | block | joined | are no whole number of blocks of
            + {}.
        """
        ),
    )
)
"""What shares of Linears have to hold (S39 to S42, S64, S65)."""


@dataclass(frozen=True)
class Reordering:
    """Modules whose rows a class of vLLM puts into another order as it loads them (S36).

    Attributes:
        types: the values of ``model_type`` in ``config.json``.
        modules: a pattern of their own names.
        parts: settings of the language model → into how many parts the rows are cut, each of which
            stays as it is; 0 where every row moves by itself.
        tensors: a pattern of the own names of the tensors that are reordered; all if empty, also
            those that are no rows and single numbers.
        cells: so is the scale of a single block.
    """

    types: frozenset[str]
    modules: str
    parts: Callable[[Mapping[str, Any]], int]
    tensors: str = ""
    cells: bool = True

    def is_torn(self, own: str, shape: tuple[int, ...], rows: int, parts: int) -> bool:
        """True if a tensor of a module with ``rows`` does not follow them.

        >>> one = Reordering(frozenset(), "", lambda _: 12)
        >>> one.is_torn("weight_scale", (96, 1), 96, 12), one.is_torn("weight_shape", (2,), 96, 12)
        (False, True)
        """
        first = shape[0] if shape else 0
        is_number = set(shape) <= {1} and not (self.cells and len(shape) > 1)
        if self.tensors and (is_number or re.fullmatch(self.tensors, own) is None):
            return own == "weight_zero_point" and first > 1  # its rows stay where they are
        return not first or first % (parts or rows) > 0 or rows % first > 0


def _heads(settings: Mapping[str, Any], *keys: str) -> int:
    found = (settings.get(key) for key in (*keys, "num_attention_heads", "n_head"))
    return next((one for one in found if isinstance(one, int) and one), 1)


_ROWS = r"weight(?:_packed|_scale)?"
REORDERINGS = (
    Reordering(frozenset({"bloom"}), "query_key_value", lambda one: 3 * _heads(one)),
    Reordering(frozenset({"new", "gte"}), "up_gate_proj", lambda _: 2),
    Reordering(
        frozenset({"falcon", "RefinedWeb", "RefinedWebModel"}),
        "query_key_value",
        lambda one: (
            _heads(one)
            + 2
            * (
                _heads(one, "num_kv_heads")
                if one.get("new_decoder_architecture")
                else 1
                if one.get("multi_query", True)
                else _heads(one)
            )
        ),
        rf"{_ROWS}|weight_zero_point",
    ),
    Reordering(frozenset({"llama4", "llama4_text"}), "[qk]_proj", lambda _: 0, _ROWS, cells=False),
)
"""What vLLM 0.32 reorders."""
