# SPDX-License-Identifier: Apache-2.0
"""Limits of transformers: the report of its trial load, and what shows in no load.

Numbers say which part of the report a finding is: the configuration (T1), a weight that the file
has none for (T4), codes that are not looked for (T5), experts (T6), a module that cannot be
initialized (L1, L2), states of attention (L7, L11), shapes (L9), conversions (L10). After the load
a quantized module is unpacked in the first forward: to another dtype than its inputs have (L4), or
not at all (L6).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from math import prod

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from llmcompressor.runtime.limits import SIMPLER
from llmcompressor.verification.expected import is_stored_so
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import Entry
from llmcompressor.verification.rules.serving import (
    FUSED,
    cache_of,
    in_the_forward,
    unturned_states,
)
from llmcompressor.verification.rules.structure import KNOWN
from llmcompressor.verification.rules.view import FLOATS, Problem, View, joined
from llmcompressor.verification.scheme import NAME_METHOD
from llmcompressor.verification.transformers_model import (
    Built,
    ModelNames,
    build,
    class_model,
    reader_config,
    text_class,
    unread_method,
)
from llmcompressor.verification.trial_load import Failure, TrialLoad, trial_load

_STATES = frozenset(f"{one}_{own}" for one in "qkv" for own in ("scale", "zero_point"))
_EXPERTS = re.compile(r"((?:.*\.)?experts)\.")
_ENCODER = re.compile(r"(?:.*\.)?encoder\.")
_SCHEME = "Write the scheme that it was compressed with into config.json."
_UNPACKED = "Load it with quantization_config=CompressedTensorsConfig(dequantize=True)"
_OTHER_RELEASE = "Serve it with vLLM, or load it with another release of transformers."
_ASYMMETRIC = "Compress it symmetrically (symmetric: true)"
_OF_CONFIG = ("ValidationError", "error:")
"""Names of exceptions that speak of the configuration, of pydantic and of patterns."""
_PLAIN_PARTS = (
    "Put a group of 8-bit floats first whose pattern says 'experts' and matches nothing, or serve "
    "it with vLLM."
)


def _loading(view: View) -> Iterator[Problem]:
    """T1 to T6, L1 to L11: the trial load, and that of the class of the text alone."""
    if said := unread_method(view.settings) if view.settings else "":
        yield Problem("T1", "quantization_config", said, NAME_METHOD)
    trial = view.trial
    for text, said in view.endless.items():
        yield Problem("T1", text, said, SIMPLER)
    if trial is None:
        yield from _unloaded(view, is_passed_over=False)
        return
    told = _Told(view, trial, reader_config(view.config), "transformers")
    told.tell()
    told.tell_dtypes()
    known = {(one.rule, one.module) for one in told.found}
    config = text_class(view.config)
    if config is not None:
        config["quantization_config"] = view.settings
        of_text = trial_load(config, view.headers, view.dtype)
        if of_text is not None:
            reader = f"{of_text.reader}, which AutoModelForCausalLM makes of it,"
            more = _Told(view, of_text, config, reader)
            more.tell_tensors()
            told.found += [one for one in more.found if (one.rule, one.module) not in known]
    yield from told.found
    yield from _unloaded(view, is_passed_over=any(one.rule == "L11" for one in told.found))


class _Told:
    """Findings of a trial load.

    Args:
        view: the checkpoint.
        trial: the report.
        config: the ``config.json`` of the class.
        reader: what the class is called.
    """

    def __init__(
        self, view: View, trial: TrialLoad, config: Mapping[str, object], reader: str
    ) -> None:
        self.view, self.trial, self.config, self.reader = view, trial, config, reader
        self.found: list[Problem] = []
        self._mixtures_told: set[str] = set()
        self.tied = frozenset(getattr(class_model(config), "all_tied_weights_keys", None) or ())
        self.lacking = {(one.entry.name, one.own) for one in view.misfits if one.what == "missing"}

    @cached_property
    def places(self) -> _Places:
        """Modules of the file, asked where there is anything to tell."""
        return _Places(self.view, self.config)

    @cached_property
    def plain(self) -> Built | None:
        """The class with plain weights in place of codes."""
        return build(self.config, self.view.plain) if self.view.plain else None

    @cached_property
    def wrong(self) -> set[str]:
        """What is wrong without any codes too, of which S70 and C2 speak."""
        plain = self.plain
        own = () if plain is None else (*plain.missing, *plain.wrong, *plain.unexpected)
        return {name.rpartition(".")[0] for name in own if _own(name) not in _STATES}

    def say(
        self, rule: str, module: str, said: str, remedy: str, severity: Severity | None = None
    ) -> None:
        """Enter a finding; one of each rule for a mixture."""
        is_known = rule == "T6" and module in self._mixtures_told
        if not self.view.is_draft(module) and not is_known:
            if rule == "T6":
                self._mixtures_told.add(module)
            self.found.append(Problem(rule, module, said, remedy, severity))

    def tell(self) -> None:
        """The whole report."""
        for failure in self.trial.failures:
            self._failure(failure)
        for name, why in self.trial.conversions.items():
            mixture = self.places.mixture(name)
            if mixture:
                self._expert(mixture, f"cannot be made of what is stored: {why}")
            else:
                module = self.places.module(name.rpartition(".")[0])
                said = f"{self.reader} cannot make its {name} of what is stored: {why}."
                self.say("L10", module, said, _OTHER_RELEASE)
        self.tell_tensors()
        cache, trial = cache_of(self.view), self.trial
        is_whole = trial.missing or trial.unexpected or not trial.failures
        if cache is not None and not cache.is_static and not trial.caches and is_whole:
            for path in self.view.attentions:  # their scales are found in the forward
                self._unrounded(path)

    def tell_tensors(self) -> None:
        """Tensors that have not found their place."""
        for module, names in _by_module(self.trial.missing):
            if module not in self.wrong:
                self._missing(module, names)
        for module, names in _by_module(self.trial.unexpected):
            if module not in self.wrong:
                self._unexpected(module, names)
        for name, (ours, theirs) in self.trial.mismatched.items():
            if name.rpartition(".")[0] not in self.wrong:
                self._mismatch(name, ours, theirs)

    def _failure(self, failure: Failure) -> None:
        said = f"{self.reader} fails to load it: {failure.message}."
        if not failure.is_quantized:
            rule = "T1" if failure.message.startswith(_OF_CONFIG) else "L10"
            parts = self.places.parts.values() if failure.is_of_tables else ()
            counts = Counter(path for own in parts for path in own)
            shared = [path for path, count in counts.items() if count > 1]
            for name in shared or ["quantization_config"]:
                self.say(rule, name, said, _OTHER_RELEASE)
            return
        entries = [self.view.entries.get(self.places.module(path)) for path in failure.modules]
        coded = [entry for entry in entries if entry is not None and entry.is_quantized]
        for entry in coded:
            is_embedding = entry.kind == "embedding"
            remedy = (
                "Give it a form that keeps the name weight (format: int-quantized, or 8-bit "
                "floats), ignore it, or serve it with vLLM."
                if is_embedding
                else "Ignore it, write 8-bit codes, or serve it with vLLM."
            )
            self.say("L1" if is_embedding else "L2", entry.name, said, remedy)
        for module in () if coded else failure.modules:
            if any(entries) or f"{module}.weight" in self.tied:  # else S70 says it is not there
                self.say("T4", module, said, f"Add {module} to ignore.")

    def _expert(self, path: str, what: str, severity: Severity | None = None) -> None:
        said = f"Its experts in {self.reader} {what}."
        self.say("T6", path, said, _of_experts(self.view, path), severity)

    def _missing(self, module: str, names: list[str]) -> None:
        mixture, path = self.places.mixture(f"{module}.{names[0]}"), self.places.module(module)
        entry, view = self.view.entries.get(path), self.view
        names = [name for name in names if name in KNOWN or name in _STATES or name == "weight"]
        if mixture:
            experts = view.experts(mixture)
            is_plain = bool(experts) and not any(one.is_quantized for one in experts)
            # a group of floats, put first, would have plain experts loaded
            severity = Severity.ERROR if is_plain else None
            self._expert(mixture, "are random: not all of their stacks are loaded", severity)
        elif _STATES.intersection(names):
            if view.is_linear_attention(path):
                return  # it keeps another state, which is not rounded
            said = f"{self.reader} quantizes its keys and values too, and the file holds no "
            remedy = "Leave kv_cache_scheme out, or serve it with vLLM."
            self.say("L7", path, f"{said}{joined(names)}: they are random there.", remedy)
        elif names and entry is not None and entry.is_quantized:
            self._without_codes(entry, names)
        elif names == ["weight"]:  # where plain weights are missed too, S70 says so
            said = f"It becomes a part of another weight in {self.reader}, which looks for codes"
            coded = any(one.is_expert for one in view.quantized)  # one group is for both
            remedy = (
                "Give the experts 8-bit floats, or serve it with vLLM." if coded else _PLAIN_PARTS
            )
            for one in self.places.parts[module] if self.plain is not None else ():
                self.say("L10", one, f"{said} there: it is not loaded.", remedy)
        elif names and (entry is not None or f"{module}.weight" in self.tied):
            said = (
                f"{self.reader} looks for its codes ({joined(names)}), and the file holds a plain "
            )
            remedy = f"Add {'it' if module == path else module} to ignore."
            self.say("T4", path, f"{said}weight.", remedy)

    def _without_codes(self, entry: Entry, names: list[str]) -> None:
        if "weight" in names:
            said = f"It is quantized, and {self.reader} looks for a plain weight: random there."
            remedy = "Give it a target in one group, and take it off ignore."
            self.say("T5", entry.name, said, remedy, self._severity(entry))
        elif not all((entry.name, name) in self.lacking for name in names):  # else S70 says so
            said = f"{self.reader} looks for its {joined(names)}, which the file has not: random."
            self.say("T4", entry.name, said, _SCHEME, self._severity(entry))

    def _severity(self, entry: Entry) -> Severity | None:
        """A warning where the configuration is right, and one reader loses codes all the same."""
        group = self.view.choice(entry, "transformers").group
        is_right = (
            group is not None
            and group.scheme == self.view.written(entry)
            and is_stored_so(entry, group.scheme)
        )
        is_asked = self.view.deployment.server == "transformers"
        return Severity.WARNING if is_right and not is_asked else None

    def _unexpected(self, module: str, names: list[str]) -> None:
        own = [name for name in names if name in KNOWN]
        mixture, path = self.places.mixture(f"{module}.{names[0]}"), self.places.module(module)
        entry = self.view.entries.get(path)
        if _STATES.intersection(names):
            # layers that share the keys and values of another one have scales for servers alone
            if module not in self.trial.caches and path not in self.view.sharing:
                self._unrounded(path)
        elif mixture:
            if any(name.startswith("weight") for name in own):
                self._expert(mixture, f"are read without {joined(own)}, which is left out")
        elif not own or entry is None or not entry.is_quantized:
            return
        elif f"{module}.weight" in self.trial.missing:
            return  # T5 says so
        elif entry.form == "coded" and "weight_scale" in own:
            said = f"It is quantized, and {self.reader} takes its codes for weights."
            remedy = f"Give {module} the target that the module has, and take it off ignore."
            self.say("T5", path, said, remedy, self._severity(entry))
        else:
            codes = any(name.startswith("weight") for name in own)
            said = f"It has a {joined(own)}, which {self.reader} leaves out."
            said += " Its codes are read wrong." if codes else ""
            self.say("T4", path, said, _SCHEME, None if codes else Severity.WARNING)

    def _unrounded(self, path: str) -> None:
        said = (
            "The installed transformers and compressed-tensors leave its keys and values as they "
            "are: the latter does not know its forward for that of attention with a cache."
        )
        remedy = (
            "Serve it with vLLM, or read it with a release whose attention takes past_key_values."
        )
        self.say("L11", path, said, remedy)

    def _mismatch(self, name: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
        module, _, own = name.rpartition(".")
        mixture, path = self.places.mixture(name), self.places.module(module)
        said = f"Its {own} has the shape {list(ours)}, not {list(theirs)} as in {self.reader}"
        if mixture:
            what = f"have another shape: {list(ours)} of what is stored, not {list(theirs)}"
            self._expert(mixture, what)
        elif prod(ours) == 1 or own == "weight_zero_point":
            way = _UNPACKED if _unpacks_alike(self.view) else _ASYMMETRIC
            remedy = "Store it as [1], or serve it with vLLM."
            remedy = remedy if prod(ours) == 1 else f"{way}, or serve it with vLLM."
            self.say("L9", path, f"{said}: it fails to load.", remedy)
        else:
            self.say("T4", path, f"{said}.", _SCHEME)

    def tell_dtypes(self) -> None:
        """L4: what is unpacked to another dtype than the model computes in."""
        view = self.view
        for path, dtype in self.trial.dtypes.items() if view.dtype in FLOATS.values() else ():
            mixture = self.places.mixture(path)
            load = f"load it with dtype=torch.{dtype}"
            anew = f'Compress the model in {dtype}, with precision="{dtype}" (--precision {dtype}).'
            said = f"transformers unpacks it to {dtype}, and the model computes in {view.dtype}: "
            if not mixture:
                is_choice = dtype != "bfloat16" or view.mixtures
                remedy = anew if is_choice else f"{load.capitalize()}. Or: {anew}"
                remedy = f"{load.capitalize()}." if dtype == "float16" else remedy
                module = self.places.module(path)
                self.say("L4", module, f"{said}the first forward fails.", remedy)
            elif not any((one.rule, one.module) == ("L4", mixture) for one in self.found):
                said += 'with experts_implementation="eager" the first forward fails.'
                remedy = f"Leave experts_implementation at its default, grouped_mm. Or: {load}."
                self.say("L4", mixture, said, remedy, Severity.WARNING)


class _Places:
    """Modules of the file for the names of a class, which has the given ``config.json``."""

    def __init__(self, view: View, config: Mapping[str, object]) -> None:
        self.parts: dict[str, list[str]] = defaultdict(list)
        self.stacks: dict[str, str] = {}
        model = class_model(config)
        if model is None:
            return
        names = ModelNames(model)
        for path, entry in view.entries.items():
            if not entry.is_expert and not view.is_draft(path):
                for name in names.every(f"{path}.weight"):
                    self.parts[name.rpartition(".")[0]].append(path)
        for path, experts in view.mixtures.items():
            index, own = next(iter(experts.items()))
            for one in own:
                for name in names.every(f"{path}.{index}.{one}.weight"):
                    self.stacks[name] = path
        self.of_stacks = {stack.rpartition(".")[0]: own for stack, own in self.stacks.items()}

    def module(self, path: str) -> str:
        """The module of the file that a module of the class has its weight from."""
        return self.parts[path][0] if path in self.parts else path

    def mixture(self, name: str) -> str:
        """The mixture that a tensor of the class belongs to, empty if to none."""
        found = _EXPERTS.match(name)
        path = found[1] if found is not None else name.rpartition(".")[0]
        own = self.stacks.get(name) or self.of_stacks.get(path, "")
        return own or (path if found is not None else "")


def _own(name: str) -> str:
    return name.rpartition(".")[2]


def _by_module(names: frozenset[str]) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        module, _, own = name.rpartition(".")
        found[module].append(own)
    yield from found.items()


def _of_experts(view: View, path: str) -> str:
    """Remedy for experts that are not restored."""
    schemes = [scheme.weights for scheme in view.expert_schemes.get(path, ())]
    if path not in view.mixtures:
        return "Quantize the experts too, or serve it with vLLM."
    if not any(entry.is_quantized for entry in view.experts(path)):
        return _PLAIN_PARTS
    if any(one is not None and not one.symmetric for one in schemes):
        return "Compress the experts symmetrically (symmetric: true), or serve it with vLLM."
    return (
        "Serve it with vLLM, or quantize all experts of a layer alike, in the first group that has "
        "a pattern with 'experts' in it."
    )


def _unpacks_alike(view: View) -> bool:
    """True if weights can be unpacked while they load, and nothing is lost by that.

    Since 5.23 one group is taken for all Linears then, and no inputs are rounded.
    """
    from transformers.integrations import compressed_tensors as loading  # noqa: PLC0415  # much

    if not hasattr(loading, "get_dense_scheme"):  # which came with it
        return True
    found = [group.scheme for group in view.groups if group.scheme.weights is not None]
    return len(found) == 1 and found[0].inputs is None and found[0].outputs is None


@lru_cache(maxsize=1)
def one_row_unpacks() -> bool:
    """True if compressed-tensors unpacks zero points of 4 bits whose words are one row.

    torch calls the transposed row contiguous, and some releases then fail to view it as bytes.
    """
    try:
        unpack_from_int32(torch.zeros(1, 2, dtype=torch.int32), 4, torch.Size((8, 2)), packed_dim=0)
    except RuntimeError:
        return False
    return True


def _unloaded(view: View, *, is_passed_over: bool) -> Iterator[Problem]:
    """L5 and S77: what the forward makes wrong."""
    named = [name for name in view.headers if name.endswith(".q_zero_point")]
    for name in named if view.dtype != "float16" and not is_passed_over else ():
        said = (
            "transformers rounds queries, keys and values with zero points to float16, and the "
            f"model computes in {view.dtype}: the first forward fails."
        )
        remedy = "Quantize attention symmetrically, or load it with dtype=torch.float16."
        yield Problem("L5", name.rpartition(".")[0], said, remedy)
    drops = "transformers drops transform_config, and"
    if online := in_the_forward(view):
        said = (
            f"{drops} its outputs are wrong: the weights are rotated for {joined(online)}, which "
        )
        yield Problem("S77", "transform_config", f"{said}it does not apply.", FUSED)
    for name, why in unturned_states(view, are_rounded=not is_passed_over).items():
        if why:
            said = f"{drops} does not turn queries and keys ({name}): {why}."
            remedy = "Leave the rotation of queries and keys out."
            yield Problem("S77", "transform_config", said, remedy)


def _unpacking(view: View) -> Iterator[Problem]:
    """L3, L6, L9: what fails where it is unpacked."""
    one = _unpacks_alike(view)
    call = "call the model once before generate."
    for entry, scheme in view.coded:
        args, columns = scheme.weights, view.columns(entry, scheme)
        if view.config.get("is_encoder_decoder") is True and _ENCODER.match(entry.name):
            said = (
                "transformers unpacks it at the first forward of the whole model, and generate "
                "calls the encoder before that and fails."
            )
            yield Problem(
                "L3", entry.name, said, f"{_UNPACKED}, or {call}" if one else call.capitalize()
            )
        if args is None or columns is None:
            continue
        if args.strategy in ("group", "tensor_group") and args.group and columns % args.group:
            said = f"Its {columns} columns are no whole number of groups of {args.group}: "
            remedy = "Use a group size that divides the columns."
            yield Problem("L6", entry.name, f"{said}transformers refuses to unpack it.", remedy)
        zero = entry.own.get("weight_zero_point")
        if zero is None or zero.dtype != "I32" or entry.is_expert or entry.rows == 1:
            continue
        if zero.shape[0] == 1 < zero.numel and args.bits == 4 and not one_row_unpacks():
            said = (
                f"Its {entry.rows} rows have their zero points in one row of {zero.numel} words, "
                "which this compressed-tensors fails to unpack: the first forward is an error."
            )
            yield Problem("L9", entry.name, said, f"{_ASYMMETRIC}, or ignore it.")


_AS_LINEARS = frozenset({"llama4", "llama4_text"})
"""Values of ``model_type`` whose stacks are replaced by Linears where anything is quantized."""


def _experts(view: View) -> Iterator[Problem]:
    """T6: what stacks of transformers lose without a word."""
    if {str(one.get("model_type") or "") for one in (view.config, view.text)} & _AS_LINEARS:
        return
    for path in (path for path in view.mixtures if not view.is_draft(path)):
        schemes = list(view.expert_schemes[path])
        forms: dict[str, set[bool]] = defaultdict(set)
        for entry in view.experts(path):
            forms[entry.last].add(entry.is_quantized)
        if torn := [name for name, found in forms.items() if len(found) > 1]:
            said = (
                f"The {joined(torn)} of some of its experts are quantized and of others not, and "
            )
            remedy = "Quantize all experts of a layer alike, or none."
            yield Problem("T6", path, f"{said}transformers stacks one kind alone.", remedy)
        said = "transformers does not round what {} its experts: it computes with weights alone."
        if any(scheme.inputs is not None for scheme in schemes):
            told = said.format("goes into")
            yield Problem("T6", path, told, "Serve it with vLLM.", Severity.NOTE)
        if any(scheme.outputs is not None for scheme in schemes):
            told, remedy = said.format("comes out of"), "Leave the outputs of experts unquantized."
            yield Problem("T6", path, told, remedy, Severity.WARNING)


def _tied(view: View) -> Iterator[Problem]:
    """L8."""
    weights = {f"{one.name}.weight": one.own.get("weight") for one in view.quantized}
    small = {name for name, info in weights.items() if info is not None and info.dtype == "F8_E4M3"}
    model = class_model(view.config) if small else None
    names = None if model is None else ModelNames(model)
    held = {} if names is None else {names.first(name): name for name in view.headers}
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():
        pair = [held[name] for name in (source, target) if name in held]
        if len(pair) > 1 and len(small.intersection(pair)) == 1:
            coded, other = sorted(pair, key=lambda name: name not in small)
            said = (
                f"transformers compares it with {other}, as of one tensor, and fails to load it: "
                "8-bit floats are compared with no others."
            )
            remedy = "Give it integers (format: int-quantized), or ignore it."
            yield Problem("L8", coded.removesuffix(".weight"), said, remedy)


LOADING = (_loading, _unpacking, _experts, _tied)
"""The checks of this file."""
