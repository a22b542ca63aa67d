# SPDX-License-Identifier: Apache-2.0
"""Section 12: transformers (T1 to T6)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from llmcompressor.verification.built import text_class
from llmcompressor.verification.conversions import stacks_quantized
from llmcompressor.verification.expected import expected_tensors, is_stored_so, misfits
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.module_classes import (
    Own,
    led_astray,
    modules_by_class,
    takes_experts,
)
from llmcompressor.verification.resolve import Choice
from llmcompressor.verification.rules.base import Problem, Rule, View, joined
from llmcompressor.verification.rules.config import raw_groups, where
from llmcompressor.verification.rules.tensors import KNOWN
from llmcompressor.verification.scheme import Args, Group, Scheme

__all__ = [
    "RULES",
    "experts_are_linears",
    "is_small_float",
    "loaded_mixtures",
    "taken_for_experts",
]

_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_AS_LINEARS = frozenset({"llama4", "llama4_text"})
"""Values of ``model_type`` whose stacks are replaced by Linears where anything is quantized."""
_ANEW = "Compress the model anew."
_NO_ZERO_POINTS = (
    "transformers leaves the zero points of packed experts in the file, and fails to unpack the "
    "codes without them."
)
_NUMBER = re.compile(r"\d+")
_STACK = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?:gate_up_proj|down_proj)$")


def keys_are_known(view: View) -> Iterator[Problem]:
    """T1."""
    yield from where(view)
    if not view.settings:
        return
    if not view.settings.get("config_groups") and not view.settings.get("kv_cache_scheme"):
        yield Problem(
            "quantization_config",
            "It has neither config_groups nor kv_cache_scheme.",
            "Write the groups, or leave quantization_config out.",
        )
    for name, raw in raw_groups(view):
        unknown = sorted(set(raw) - _GROUP_KEYS) if isinstance(raw, Mapping) else []
        if unknown:
            yield Problem(
                name, f"The group has keys that are refused: {joined(unknown)}.", "Remove them."
            )


def status_is_compressed(view: View) -> Iterator[Problem]:
    """T2."""
    status = view.settings.get("quantization_status")
    if view.settings and view.quantized and status != "compressed":
        yield Problem(
            "quantization_config",
            f"Its quantization_status is {status!r}, so packed weights are not looked for and "
            "weights are random.",
            'Set quantization_status to "compressed".',
        )


def nothing_is_random(view: View) -> Iterator[Problem]:
    """T4: every module that is looked for compressed has its tensors, and no others."""
    yield from _plain_instead(view)
    for entry in view.quantized:
        group = view.choice(entry, "transformers").group
        if entry.is_expert or view.is_draft(entry.name) or group is None:
            continue  # T6 speaks of experts, T5 of what is not found
        if group.scheme.weights is not None:
            yield from _other_codes(view, entry, group)
    for entry, choice, own, reader in _by_text_class(view):
        if choice.group is not None and not entry.is_quantized and _has_codes(choice.group):
            yield Problem(
                entry.name,
                f"{reader} looks for its codes ({choice.group.name}), and the file holds a plain "
                "weight.",
                f"Add {own} to ignore.",
            )


def _has_codes(group: Group) -> bool:
    return group.scheme.weights is not None and group.scheme.format != "dense"


def _by_text_class(view: View) -> Iterator[tuple[Entry, Choice, str, str]]:
    """What becomes of modules in the class of the text alone, if that is what many load.

    The module, what the class makes of it, the class's name for it, and who reads it so. What
    becomes the same of it in the class that ``config.json`` names is left out.
    """
    config = text_class(view.config) if view.groups else None
    modules = modules_by_class(config) if config is not None else None
    if config is None or modules is None:
        return
    reader = f"{config['architectures'][0]}, which AutoModelForCausalLM makes of it,"
    for entry in view.matrices:
        own = () if entry.is_expert or view.is_draft(entry.name) else modules(entry.name)
        choice = view.resolver.transformers(entry, own) if own else None
        if choice is not None and choice.group != view.choice(entry, "transformers").group:
            yield entry, choice, _names(own), reader


def _names(own: Iterable[Own]) -> str:
    return joined(name for name, _ in own)


def _other_codes(view: View, entry: Entry, group: Group) -> Iterator[Problem]:
    """The codes that transformers looks for are not those that a module has."""
    scheme = group.scheme
    if not is_stored_so(entry, scheme):
        yield Problem(
            entry.name,
            f"transformers looks for codes of {group.name} ({scheme.format}), and they are not "
            "stored so: its weight is random there.",
            "Write the scheme that it was compressed with into config.json.",
        )
        return
    columns = view.columns(entry, scheme)
    if entry.rows is None or columns is None:
        return
    wanted = expected_tensors(scheme, entry.rows, columns)
    is_own = view.written(entry) == scheme
    for own, what, sentence in misfits(entry.own, wanted):
        # what its own scheme lacks, S70 and C1 say for every reader
        is_wide = what == "shape" and entry.own[own].numel > 1  # one number may lie in any shape
        if is_wide or (what == "missing" and not is_own):
            yield Problem(entry.name, f"{sentence} transformers looks for {scheme}.", _ANEW)
    for own in sorted((KNOWN & set(entry.own)) - set(wanted) - {"weight_g_idx"}):
        is_of_codes = own.startswith("weight")
        yield Problem(
            entry.name,
            f"It has a {own}, which transformers leaves out: {group.name} has none."
            + (" Its codes are read wrong." if is_of_codes else ""),
            "Write the scheme that it was compressed with into config.json.",
            None if is_of_codes else Severity.WARNING,
        )


def _plain_instead(view: View) -> Iterator[Problem]:
    yield from _tied_head(view)
    for entry in view.matrices:
        if entry.is_quantized or entry.is_expert or view.is_draft(entry.name):
            continue
        group = view.choice(entry, "transformers").group
        if group is None or not _has_codes(group):
            continue
        if entry.kind == "gate" and not view.own_modules(entry):
            continue  # often of a class of its own, which the target Linear does not reach
        own = view.own_modules(entry)
        # what is ignored by the name of the file alone is not ignored there
        is_renamed = entry.name not in (name for name, _ in own) and bool(own)
        yield Problem(
            entry.name,
            f"transformers looks for its codes ({group.name}), and the file holds a plain weight.",
            f"Add {_names(own) if is_renamed else 'it'} to ignore.",
        )


def _tied_head(view: View) -> Iterator[Problem]:
    """A head that takes the embedding for its weight is there for transformers all the same."""
    name = view.built.tied_head if view.built is not None else ""
    stored = view.entries.get(name)
    if not name or not view.settings or (stored is not None and stored in view.matrices):
        return  # a bias of its own may be all that is stored
    group = view.choice(Entry(name, {}, "head", "dense"), "transformers").group
    if group is not None and group.scheme.weights is not None and group.scheme.format != "dense":
        yield Problem(
            name,
            f"It is tied to the embedding, and transformers looks for its codes ({group.name}).",
            "Add it to ignore.",
        )


def selection_is_the_same(view: View) -> Iterator[Problem]:
    """T5."""
    if not view.settings:
        return  # S1 says so for all of them
    for entry in view.quantized:
        if entry.is_expert:
            continue
        choice = view.choice(entry, "transformers")
        if choice.group is None:
            why = "ignores it" if choice.ignored else "finds no target for it"
            yield Problem(
                entry.name,
                f"It is quantized, and transformers {why}: its weight is random there.",
                "Give it a target in one group, and take it off ignore.",
            )
    for entry, choice, own, reader in _by_text_class(view):
        if entry.is_quantized:
            why = "ignores" if choice.ignored else "finds no target, or another one, for"
            yield Problem(
                entry.name,
                f"It is quantized, and {reader} {why} {own}: its weight is random there.",
                f"Give {own} the target that the module has, and take it off ignore.",
            )
    yield from _astray(view)


def _astray(view: View) -> Iterator[Problem]:
    """Codes and scales whose names are not changed as that of a weight in their place would be."""
    first: dict[tuple[str, ...], str] = {}
    likeness = {}
    for entry in view.quantized:
        if not entry.is_expert and not view.is_draft(entry.name):
            own = sorted(set(entry.own) - {"weight", "bias"})
            form = (_NUMBER.sub("*", entry.name), *own)
            likeness[entry.name] = first.setdefault(form, entry.name)
    lost = led_astray(view.config, {path: own for (_, *own), path in first.items()})
    for name, like in likeness.items():
        if like in lost:
            yield Problem(
                name,
                f"transformers gives its {joined(lost[like])} to no module, since it has another "
                "name for that of a weight alone: they are random there.",
                "Ignore it, or serve it with vLLM.",
                None if view.deployment.server == "transformers" else Severity.WARNING,
            )


def taken_for_experts(view: View) -> Group | None:
    """The group that transformers takes for experts, ``None`` if there are no groups.

    It is named by a pattern, else by anything else, else it is the first in the file.
    """
    for group in view.groups:
        if any(text.startswith("re:") and "experts" in text for text in group.targets):
            return group
    for group in view.groups:
        if any(not text.startswith("re:") for text in group.targets):
            return group
    return view.groups[0] if view.groups else None


def _types(view: View) -> set[str]:
    return {str(holder.get("model_type") or "") for holder in (view.config, view.text)}


def experts_are_linears(view: View) -> bool:
    """Whether transformers makes Linears of quantized experts, instead of unpacking them."""
    return bool(_types(view) & _AS_LINEARS)


def experts_are_restored(view: View) -> Iterator[Problem]:
    """T6."""
    if experts_are_linears(view):
        yield from _left_in_stacks(view)
        return
    for path, expert in loaded_mixtures(view):
        if not all(takes_experts(view.config, entry.name) for entry in expert):
            yield Problem(
                path,
                "Its experts are stored one by one, and transformers has no table for them and "
                "looks for their stacks: they are random there.",
                "Ignore the experts, or serve it with vLLM.",
            )
        elif view.settings and not stacks_quantized(view.config):
            yield Problem(
                path,
                "transformers fails to stack these experts, plain or quantized, where anything is "
                "quantized: its table insists on tensors that are no part of a stack.",
                "Serve it with vLLM.",
            )
        elif view.settings:
            yield from _merged(view, path)


def _left_in_stacks(view: View) -> Iterator[Problem]:
    found = [_STACK.match(name) for name in view.headers] if view.settings else []
    paths = {match["experts"] for match in found if match is not None}
    for path in sorted(path for path in paths if not view.is_draft(path)):
        yield Problem(
            path,
            "Its experts lie in stacks, and transformers looks for them one by one where anything "
            "is quantized: they are random there.",
            "Quantize the experts too, or serve it with vLLM.",
        )


def loaded_mixtures(view: View) -> Iterator[tuple[str, list[Entry]]]:
    """Paths of the mixtures that transformers loads, with the projections of one expert."""
    for path, experts in view.mixtures.items():
        if not view.is_draft(path):
            yield path, list(next(iter(experts.values())).values())


def _merged(view: View, path: str) -> Iterator[Problem]:
    """Experts that transformers unpacks one by one and stacks, one stack for each projection."""
    taken = taken_for_experts(view)
    forms: dict[str, set[bool]] = {}
    for own in view.mixtures[path].values():
        for name, entry in own.items():
            forms.setdefault(name, set()).add(entry.is_quantized)
    torn = [name for name, found in forms.items() if len(found) > 1]
    if torn:
        yield Problem(
            path,
            f"The {joined(torn)} of some of its experts are quantized and of others not, and "
            "transformers makes one stack of those of one kind alone.",
            "Quantize all experts of a layer alike, or none.",
        )
        return
    plain = [name for name, found in forms.items() if not any(found)]
    if plain:
        what = "experts" if len(plain) == len(forms) else joined(plain)
        yield from _dense_experts(path, what, taken)
    yield from _coded_experts(view, path, taken)


def _coded_experts(view: View, path: str, taken: Group | None) -> Iterator[Problem]:
    schemes: list[Scheme] = []
    lost: list[str] = []
    is_read = True
    for scheme, having in view.expert_schemes[path].items():
        coded = [entry for entry in having.values() if entry.is_quantized]
        if coded and scheme.weights is not None:
            schemes.append(scheme)
            for entry in coded:
                lost += _lost(entry, scheme, scheme.weights)
            if taken is not None and not _is_read_alike(taken.scheme, scheme):
                is_read &= all(_has_whole_rows(view, each, scheme, taken.scheme) for each in coded)
    for reason in dict.fromkeys(lost):
        other = "Compress the experts symmetrically (symmetric: true), or serve"
        start = other if reason == _NO_ZERO_POINTS else "Serve"
        yield Problem(path, reason, f"{start} it with vLLM.")
    yield from _not_rounded(path, schemes)
    if taken is not None and not is_read and len(schemes) > 1:
        yield Problem(
            path,
            f"Its projections have different schemes, and transformers takes {taken.name} for all "
            "of them.",
            "Quantize all experts of a layer alike.",
        )
    elif taken is not None and not is_read:
        yield Problem(
            path,
            f"transformers takes {taken.name} for its experts, which have another scheme.",
            "Name the experts by a pattern with 'experts' in it, in the first group that has "
            "such a pattern.",
        )


def _not_rounded(path: str, schemes: Iterable[Scheme]) -> Iterator[Problem]:
    if any(scheme.inputs is not None for scheme in schemes):
        yield Problem(
            path,
            "transformers does not round what goes into its experts: it computes with their "
            "weights alone.",
            "Serve it with vLLM.",
            Severity.NOTE,
        )
    if any(scheme.outputs is not None for scheme in schemes):
        yield Problem(
            path,
            "transformers does not round what comes out of its experts: it computes with their "
            "weights alone.",
            "Leave the outputs of experts unquantized.",
            Severity.WARNING,
        )


def is_small_float(args: Args | None) -> bool:
    """Whether something is quantized to floats of 8 bits."""
    return args is not None and (args.kind, args.bits) == ("float", 8)


def _is_read_alike(one: Scheme, other: Scheme) -> bool:
    """Whether transformers makes the same weights of experts: how inputs are rounded is no matter.

    8-bit floats are multiplied with their scales, whatever these are shared by.
    """
    if is_small_float(one.weights) and is_small_float(other.weights):
        return True
    return (one.weights, one.format) == (other.weights, other.format)


def _has_whole_rows(view: View, entry: Entry, written: Scheme, taken: Scheme) -> bool:
    """Whether packed codes that have one scale for a row, or for all, are unpacked as they should.

    Such a scale stands for any group of the row, however wide: only that groups are whole is asked.
    """
    one, other, scale = written.weights, taken.weights, entry.own.get("weight_scale")
    if one is None or other is None or scale is None:
        return False
    if {written.format, taken.format} != {"pack-quantized"}:
        return False
    if (one.kind, one.bits, one.symmetric) != (other.kind, other.bits, other.symmetric):
        return False
    if scale.numel != 1 and scale.shape != (entry.rows, 1):
        return False
    columns = view.columns(entry, written)
    if other.strategy == "group":
        return columns is not None and other.group > 0 and columns % other.group == 0
    return other.strategy in ("channel", "tensor")


def _dense_experts(path: str, what: str, taken: Group | None) -> Iterator[Problem]:
    if taken is not None and is_small_float(taken.scheme.weights):
        return
    yield Problem(
        path,
        f"Its {what} are plain, and transformers looks for codes of {taken.name}: they are not "
        "loaded there."
        if taken is not None
        else f"Its {what} are plain, and without any group transformers fails to load them.",
        "Put a group of 8-bit floats first whose pattern says 'experts' and matches nothing.",
        Severity.ERROR,
    )


def _lost(entry: Entry, scheme: Scheme, weights: Args) -> Iterator[str]:
    if weights.is_nvfp4:
        yield "transformers loses the global scales of NVFP4 experts: they are scaled wrong."
    if not weights.symmetric and entry.form == "packed":
        yield _NO_ZERO_POINTS
    if scheme.format in ("int-quantized", "naive-quantized") and weights.kind == "int":
        yield "transformers does not find unpacked integer experts, and fails to load."
    strategy = weights.strategy
    if weights.kind == "float" and entry.form != "packed" and _has_parts(entry, strategy):
        yield f"transformers multiplies {strategy} scales of experts without expanding them."
    if weights.is_mxfp8:  # those of 4 bits are packed, and unpacked as they should be
        yield "transformers takes the exponents of MXFP8 experts for scales, and fails to load."
    is_odd = weights.kind == "int" and weights.bits in (3, 5, 6, 7)
    if is_odd and entry.form == "packed" and "weight_shape" not in entry.own:
        yield f"Without weight_shape the width of {weights.bits}-bit experts is not known."


def _has_parts(entry: Entry, strategy: str) -> bool:
    """Whether a scale is not as wide as what it is multiplied with there: a row, or all of it."""
    scale = entry.own.get("weight_scale")
    if strategy == "block":
        return scale is None or scale.numel != 1
    return strategy == "group" and (scale is None or scale.shape[-1] != 1)


RULES = (
    Rule(
        "T1",
        "the configuration is found, has groups, and known keys",
        keys_are_known,
        server="transformers",
    ),
    Rule(
        "T2",
        "quantization_status is compressed",
        status_is_compressed,
        server="transformers",
    ),
    Rule(
        "T4",
        "no weight is initialized at random",
        nothing_is_random,
        server="transformers",
    ),
    Rule(
        "T5",
        "quantized modules are found",
        selection_is_the_same,
        server="transformers",
    ),
    Rule(
        "T6",
        "experts are restored",
        experts_are_restored,
        server="transformers",
        is_limit=True,
    ),
)
