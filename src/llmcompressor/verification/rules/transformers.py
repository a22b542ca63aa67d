# SPDX-License-Identifier: Apache-2.0
"""Limits of transformers: the report of its trial load, and what shows in no load.

Numbers say which part of the report a finding is: a weight that the file has none for (T4), codes
that are not looked for (T5), experts (T6), a module that cannot be initialized (L1, L2), states of
attention (L7, L11), shapes (L9), conversions (L10). After the load a quantized module is unpacked
in the first forward: to another dtype than its inputs have (L4), or not at all (L6).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from llmcompressor.verification.expected import is_stored_so
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import Entry
from llmcompressor.verification.rules.presence import KNOWN
from llmcompressor.verification.rules.structure import raw_groups, where
from llmcompressor.verification.rules.view import FLOATS, Problem, View, joined, rule
from llmcompressor.verification.rules.vllm import in_the_forward, unrotated_states
from llmcompressor.verification.scheme import parse_args
from llmcompressor.verification.transformers_model import (
    ModelNames,
    build,
    class_model,
    reader_config,
    text_class,
)
from llmcompressor.verification.trial_load import Failure, TrialLoad, trial_load

__all__ = ["one_row_unpacks"]

_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_AS_LINEARS = frozenset({"llama4", "llama4_text"})
"""Values of ``model_type`` whose stacks are replaced by Linears where anything is quantized."""
_STATES = frozenset(f"{one}_{own}" for one in "qkv" for own in ("scale", "zero_point"))
_SCALES = tuple(_STATES)
_EXPERTS = re.compile(r"((?:.*\.)?experts)\.")
_ENCODER = re.compile(r"(?:.*\.)?encoder\.")
_FLOAT32_BUFFERS = {"ctrl": "transformer.pos_encoding"}
"""``model_type`` → a buffer that is made in float32, and cast in the forward by assignment."""
_SCHEME = "Write the scheme that it was compressed with into config.json."
_UNPACKED = "Load it with quantization_config=CompressedTensorsConfig(dequantize=True)"
_ANEW = 'Compress the model in bfloat16, with precision="bfloat16" (--precision bfloat16)'
_OTHER_RELEASE = "Serve it with vLLM, or load it with another release of transformers."
_OF_CONFIG = ("ValidationError", "error:")
"""Names of exceptions that speak of the configuration, of pydantic and of patterns."""
_TOLD = {
    "T4": "no weight is initialized at random",
    "T5": "quantized modules are found",
    "T6": "experts are restored",
    "L1": "embeddings are not packed",
    "L2": "weights that initialization names are not packed",
    "L4": "weights and buffers have the dtype of the model",
    "L7": "keys and values that are rounded have scales",
    "L9": "tensors have the shape of their place",
    "L10": "tables of the class convert what is stored",
    "L11": "states that are to be rounded are",
}
"""Parts of the trial load's report."""


class _Told:
    """Findings of the trial load of a checkpoint, by their number.

    Args:
        view: the checkpoint.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.found: dict[str, list[Problem]] = defaultdict(list)
        self.trial = view.trial
        if self.trial is not None:
            self._tell(self.trial, reader_config(view.config), "transformers")
            self._caches(self.trial)
            self._dtypes(self.trial)
            self._text_class()

    def _text_class(self) -> None:
        """The class of the text alone, which ``AutoModelForCausalLM`` makes of a larger model."""
        config = text_class(self.view.config)
        if config is None:
            return
        config["quantization_config"] = self.view.settings
        trial = trial_load(config, self.view.headers, self.view.dtype)
        if trial is not None:
            known = {number: {one.module for one in each} for number, each in self.found.items()}
            before = {number: len(each) for number, each in self.found.items()}
            self._tell(
                replace(trial, failures=(), conversions={}),
                config,
                f"{trial.reader}, which AutoModelForCausalLM makes of it,",
            )
            for number, each in self.found.items():
                start = before.get(number, 0)
                each[start:] = [
                    one for one in each[start:] if one.module not in known.get(number, ())
                ]

    def _tell(self, trial: TrialLoad, config: Mapping[str, object], reader: str) -> None:
        if trial.is_clean:
            return
        self.reader, self.places, self.caches = reader, _Places(self.view, config), trial.caches
        plain = build(config, self.view.plain) if self.view.plain else None
        self.is_plain_whole = plain is not None
        own = (*plain.missing, *plain.wrong, *plain.unexpected) if plain else ()
        self.wrong = {name.rpartition(".")[0] for name in own if not name.endswith(_SCALES)}
        self.tied = frozenset(getattr(class_model(config), "all_tied_weights_keys", None) or ())
        for failure in trial.failures:
            self._failure(failure)
        for name, said in trial.conversions.items():
            self._conversion(name, said)
        for module, names in _by_module(trial.missing):
            if module not in self.wrong:
                self._missing(module, names)
        for module, names in _by_module(trial.unexpected):
            if module not in self.wrong:
                self._unexpected(module, names, is_random=f"{module}.weight" in trial.missing)
        for name, (ours, theirs) in trial.mismatched.items():
            if name.rpartition(".")[0] not in self.wrong:
                self._mismatch(name, ours, theirs)

    def _say(
        self, number: str, module: str, message: str, remedy: str, severity: Severity | None = None
    ) -> None:
        if not self.view.is_draft(module):
            self.found[number].append(Problem(module, message, remedy, severity))

    def _failure(self, failure: Failure) -> None:
        said = f"{self.reader} fails to load it: {failure.message}."
        paths = map(self.places.module, failure.modules)
        entries = [self.view.entries[path] for path in paths if path in self.view.entries]
        coded = [entry for entry in entries if entry.is_quantized]
        for module in () if coded or not failure.is_quantized else failure.modules:
            if entries or f"{module}.weight" in self.tied:  # else S70 says that it is not there
                self._say("T4", module, said, f"Add {module} to ignore.")
        if not failure.is_quantized:
            every = self.view.entries.items() if failure.is_of_tables else ()
            split = [name for name, one in every if len(self.view.own_modules(one)) > 1]
            for name in split or ["quantization_config"]:
                number = "T1" if failure.message.startswith(_OF_CONFIG) else "L10"
                self._say(number, name, said, _OTHER_RELEASE)
        for entry in coded:
            if entry.kind == "embedding":
                remedy = (
                    "Give it a form that keeps the name weight (format: int-quantized, or 8-bit "
                    "floats), ignore it, or serve it with vLLM."
                )
                self._say("L1", entry.name, said, remedy)
            else:
                remedy = "Ignore it, write 8-bit codes, or serve it with vLLM."
                self._say("L2", entry.name, said, remedy)

    def _conversion(self, name: str, said: str) -> None:
        mixture = self.places.mixture(name)
        if mixture:
            self._expert(mixture, f"cannot be made of what is stored: {said}")
        else:
            module = self.places.module(name.rpartition(".")[0])
            said = f"{self.reader} cannot make its {name} of what is stored: {said}."
            self._say("L10", module, said, _OTHER_RELEASE)

    def _expert(self, path: str, what: str, severity: Severity | None = None) -> None:
        known = {one.module for one in self.found["T6"]}
        if path not in known:
            self._say(
                "T6",
                path,
                f"Its experts in {self.reader} {what}.",
                _of_experts(self.view, path),
                severity,
            )

    def _missing(self, module: str, names: list[str]) -> None:
        mixture, path = self.places.mixture(f"{module}.{names[0]}"), self.places.module(module)
        entry = self.view.entries.get(path)
        names = [name for name in names if name in KNOWN or name in _STATES or name == "weight"]
        if mixture:
            experts = self.view.mixtures.get(mixture, {}).values()
            is_plain = bool(experts) and not any(
                entry.is_quantized for own in experts for entry in own.values()
            )
            # a group of floats, put first, would have plain experts loaded
            self._expert(
                mixture,
                "are random: not all of their stacks are loaded",
                Severity.ERROR if is_plain else None,
            )
        elif _STATES.intersection(names):
            self._without_scales(path, names)
        elif names and entry is not None and entry.is_quantized:
            self._without_codes(entry, names)
        elif names == ["weight"]:  # where plain weights are missed too, S70 says so
            said = f"It becomes a part of another weight in {self.reader}, which looks for codes"
            for one in self.places.parts[module] if self.is_plain_whole else ():
                self._say("L10", one, f"{said} there: it is not loaded.", _of_parts(self.view))
        elif names and (entry is not None or f"{module}.weight" in self.tied):
            self._say(
                "T4",
                path,
                f"{self.reader} looks for its codes ({joined(names)}), and the file holds a plain "
                "weight.",
                f"Add {'it' if module == path else module} to ignore.",
            )

    def _without_scales(self, path: str, names: list[str]) -> None:
        if self.view.is_linear_attention(path):
            return  # it keeps another state, which is not rounded
        said = f"the file holds no {joined(names)}: they are random there."
        self._say(
            "L7",
            path,
            f"{self.reader} quantizes its keys and values too, and {said}",
            "Leave kv_cache_scheme out, or serve it with vLLM.",
        )

    def _without_codes(self, entry: Entry, names: list[str]) -> None:
        misfits = (one for one in self.view.misfits if one.entry.name == entry.name)
        lacking = {one.own for one in misfits if one.what == "missing"}
        severity = self._severity(entry)
        if "weight" in names:
            said = f"It is quantized, and {self.reader} looks for a plain weight: random there."
            remedy = "Give it a target in one group, and take it off ignore."
            self._say("T5", entry.name, said, remedy, severity)
        elif not lacking.issuperset(names):  # S70 says so for every reader
            said = f"{self.reader} looks for its {joined(names)}, which the file has not"
            self._say("T4", entry.name, f"{said}: it is random there.", _SCHEME, severity)

    def _severity(self, entry: Entry) -> Severity | None:
        """A warning where the configuration is right, and one reader loses codes all the same."""
        if self.view.deployment.server == "transformers":
            return None
        group = self.view.choice(entry, "transformers").group
        is_right = (
            group is not None
            and group.scheme == self.view.written(entry)
            and is_stored_so(entry, group.scheme)
        )
        return Severity.WARNING if is_right else None

    def _unexpected(self, module: str, names: list[str], *, is_random: bool) -> None:
        own = [name for name in names if name in KNOWN]
        mixture = self.places.mixture(f"{module}.{names[0]}")
        path = self.places.module(module)
        if _STATES.intersection(names):
            # layers that share the keys and values of another one have scales for servers alone
            if module not in self.caches and path not in self.view.sharing:
                self._unrounded(path)
        elif mixture and any(name.startswith("weight") for name in own):
            self._expert(mixture, f"are read without {joined(own)}, which is left out")
        elif mixture or not own or is_random or not self._is_coded(path):
            return
        elif self.view.entries[path].form == "coded" and "weight_scale" in own:
            said = f"It is quantized, and {self.reader} takes its codes for weights."
            remedy = f"Give {module} the target that the module has, and take it off ignore."
            self._say("T5", path, said, remedy, self._severity(self.view.entries[path]))
        else:
            codes = any(name.startswith("weight") for name in own)
            said = f"It has a {joined(own)}, which {self.reader} leaves out."
            said += " Its codes are read wrong." if codes else ""
            self._say("T4", path, said, _SCHEME, None if codes else Severity.WARNING)

    def _is_coded(self, path: str) -> bool:
        entry = self.view.entries.get(path)
        return entry is not None and entry.is_quantized

    def _unrounded(self, path: str) -> None:
        said = (
            "The installed transformers and compressed-tensors leave its keys and values as they "
            "are: the latter does not know its forward for that of attention with a cache."
        )
        remedy = (
            "Serve it with vLLM, or read it with a transformers whose attention takes "
            "past_key_values."
        )
        self._say("L11", path, said, remedy)

    def _caches(self, trial: TrialLoad) -> None:
        """Keys and values whose scales are found in the forward, so that none is unexpected."""
        cache = parse_args(self.view.settings.get("kv_cache_scheme"))
        is_whole = trial.missing or trial.unexpected or not trial.failures
        if cache is not None and not cache.is_static and not trial.caches and is_whole:
            for path in self.view.attentions:
                self._unrounded(path)

    def _mismatch(self, name: str, ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
        module, _, own = name.rpartition(".")
        mixture, path = self.places.mixture(name), self.places.module(module)
        said = f"Its {own} has the shape {list(ours)}, not {list(theirs)} as in {self.reader}"
        if mixture:
            self._expert(
                mixture, f"have another shape: {list(ours)} of what is stored, not {list(theirs)}"
            )
        elif prod(ours) == 1:
            self._say(
                "L9", path, f"{said}: it fails to load.", "Store it as [1], or serve it with vLLM."
            )
        elif own == "weight_zero_point":
            one = _is_weights_of_one_group(self.view)
            way = _UNPACKED if one else "Compress it symmetrically (symmetric: true)"
            self._say("L9", path, f"{said}: it fails to load.", f"{way}, or serve it with vLLM.")
        else:
            self._say("T4", path, f"{said}.", _SCHEME)

    def _dtypes(self, trial: TrialLoad) -> None:
        view = self.view
        if not trial.dtypes or view.dtype not in FLOATS.values():
            return
        places = _Places(view, reader_config(view.config))
        for path, dtype in trial.dtypes.items():
            mixture = places.mixture(path)
            anew = f"{_ANEW}." if dtype == "bfloat16" else f"Load it with dtype=torch.{dtype}."
            said = f"transformers unpacks it to {dtype}, and the model computes in {view.dtype}: "
            if mixture:
                said += 'with experts_implementation="eager" the first forward fails.'
                other = f"load it with dtype=torch.{dtype}"
                remedy = f"Leave experts_implementation at its default, grouped_mm. Or: {other}."
                if mixture not in {one.module for one in self.found["L4"]}:
                    self._say("L4", mixture, said, remedy, Severity.WARNING)
                continue
            if dtype == "bfloat16" and not view.mixtures:
                anew = f"Load it with dtype=torch.bfloat16. Or: {anew}"
            if dtype == "float32":
                anew = (
                    'Compress the model in float32, with precision="float32" (--precision float32).'
                )
            self._say("L4", places.module(path), f"{said}the first forward fails.", anew)


class _Places:
    """Modules of the file for the names of a class.

    Args:
        view: the checkpoint.
        config: the ``config.json`` of the class.
    """

    def __init__(self, view: View, config: Mapping[str, object]) -> None:
        self.modules: dict[str, str] = {}
        self.parts: dict[str, list[str]] = defaultdict(list)
        self.stacks: dict[str, str] = {}
        model = class_model(config)
        if model is None:
            return
        names = ModelNames(model)
        for path, entry in view.entries.items():
            if not entry.is_expert and not view.is_draft(path):
                for name in names.every(f"{path}.weight"):
                    self.modules.setdefault(name.rpartition(".")[0], path)
                    self.parts[name.rpartition(".")[0]].append(path)
        for path, experts in view.mixtures.items():
            index, own = next(iter(experts.items()))
            for one in own:
                for name in names.every(f"{path}.{index}.{one}.weight"):
                    self.stacks[name] = path

    def module(self, path: str) -> str:
        """The module of the file that a module of the class has its weight from."""
        return self.modules.get(path, path)

    def mixture(self, name: str) -> str:
        """The mixture that a tensor of the class belongs to, empty if to none."""
        if name in self.stacks:
            return self.stacks[name]
        found = _EXPERTS.match(name)
        path = found[1] if found is not None else name.rpartition(".")[0]
        of_stacks = {stack.rpartition(".")[0]: own for stack, own in self.stacks.items()}
        return of_stacks.get(path, path if found is not None else "")


def _by_module(names: frozenset[str]) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        module, _, own = name.rpartition(".")
        found[module].append(own)
    yield from found.items()


def _of_parts(view: View) -> str:
    """Remedy for plain weights that are joined where anything is quantized."""
    if any(entry.is_expert for entry in view.quantized):  # one group is for both
        return "Give the experts 8-bit floats, or serve it with vLLM."
    return (
        "Put a group of 8-bit floats first whose pattern says 'experts' and matches nothing, or "
        "serve it with vLLM."
    )


def _of_experts(view: View, path: str) -> str:
    """Remedy for experts that are not restored."""
    if path not in view.mixtures:
        return "Quantize the experts too, or serve it with vLLM."
    entries = [entry for own in view.mixtures[path].values() for entry in own.values()]
    schemes = [scheme.weights for scheme in view.expert_schemes[path]]
    if not any(entry.is_quantized for entry in entries):
        return "Put a group of 8-bit floats first whose pattern says 'experts' and matches nothing."
    if any(one is not None and not one.symmetric for one in schemes):
        return "Compress the experts symmetrically (symmetric: true), or serve it with vLLM."
    return (
        "Serve it with vLLM, or quantize all experts of a layer alike, in the first group that has "
        "a pattern with 'experts' in it."
    )


def _told_as(number: str, view: View) -> list[Problem]:
    return view.once(_Told).found.get(number, [])


for _number, _title in _TOLD.items():
    if _number not in ("L4", "L9"):
        _is_limit = _number not in ("T4", "T5")
        rule(_number, _title, server="transformers", is_limit=_is_limit)(partial(_told_as, _number))


@rule("L4", _TOLD["L4"], server="transformers", is_limit=True)
def _dtypes_meet(view: View) -> Iterator[Problem]:
    yield from _told_as("L4", view)
    buffer = _FLOAT32_BUFFERS.get(str(view.text.get("model_type") or ""))
    if buffer and view.settings and view.dtype != "float32":
        yield Problem(
            buffer,
            "It stays float32 where anything is quantized, and the model computes in "
            f"{view.dtype}: the first forward fails.",
            "Load it with dtype=torch.float32.",
        )


@rule("L9", _TOLD["L9"], server="transformers", is_limit=True)
def _zero_points_are_unpacked(view: View) -> Iterator[Problem]:
    yield from _told_as("L9", view)
    for entry, scheme in view.coded:
        zero = entry.own.get("weight_zero_point")
        if zero is None or zero.dtype != "I32" or entry.is_expert or scheme.weights is None:
            continue
        is_one_row = zero.shape[0] == 1 < zero.numel and entry.rows != 1
        if is_one_row and scheme.weights.bits == 4 and not one_row_unpacks():
            yield Problem(
                entry.name,
                f"Its {entry.rows} rows have their zero points in one row of {zero.numel} words, "
                "which this compressed-tensors fails to unpack: the first forward is an error.",
                "Compress it symmetrically (symmetric: true), or ignore it.",
            )


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


@rule("T1", "the configuration is found, has groups, and known keys", server="transformers")
def _keys_are_known(view: View) -> Iterator[Problem]:
    yield from where(view)
    if not view.settings:
        return
    if not view.settings.get("config_groups") and not view.settings.get("kv_cache_scheme"):
        yield Problem(
            "quantization_config",
            "It has neither config_groups nor kv_cache_scheme.",
            "Write the groups, or leave quantization_config out.",
        )
    refused = False
    for name, raw in raw_groups(view):
        unknown = sorted(set(raw) - _GROUP_KEYS) if isinstance(raw, Mapping) else []
        refused |= bool(unknown)
        if unknown:
            yield Problem(
                name, f"The group has keys that are refused: {joined(unknown)}.", "Remove them."
            )
    if not refused:
        yield from _told_as("T1", view)


@rule("T2", "quantization_status is compressed", server="transformers")
def _status_is_compressed(view: View) -> Iterator[Problem]:
    status = view.settings.get("quantization_status")
    if view.settings and view.quantized and status != "compressed":
        yield Problem(
            "quantization_config",
            f"Its quantization_status is {status!r}, so packed weights are not looked for and "
            "weights are random.",
            'Set quantization_status to "compressed".',
        )


@rule("T6", _TOLD["T6"], server="transformers", is_limit=True)
def _experts_are_rounded(view: View) -> Iterator[Problem]:
    if {str(one.get("model_type") or "") for one in (view.config, view.text)} & _AS_LINEARS:
        return
    for path in (path for path in view.mixtures if not view.is_draft(path)):
        schemes = list(view.expert_schemes[path])
        forms: dict[str, set[bool]] = defaultdict(set)
        for name, entry in (one for own in view.mixtures[path].values() for one in own.items()):
            forms[name].add(entry.is_quantized)
        if torn := [name for name, found in forms.items() if len(found) > 1]:
            yield Problem(
                path,
                f"The {joined(torn)} of some of its experts are quantized and of others not, and "
                "transformers makes one stack of those of one kind alone.",
                "Quantize all experts of a layer alike, or none.",
            )
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


@rule(
    "L3",
    "encoders are unpacked before they run",
    server="transformers",
    severity=Severity.WARNING,
)
def _encoders_are_unpacked(view: View) -> Iterator[Problem]:
    if view.config.get("is_encoder_decoder") is not True:
        return
    for entry in view.quantized:
        if _ENCODER.match(entry.name):
            yield Problem(
                entry.name,
                "transformers unpacks it at the first forward of the whole model, and generate "
                "calls the encoder before that and fails.",
                f"{_UNPACKED}, or call the model once before generate."
                if _is_weights_of_one_group(view)
                else "Call the model once before generate.",
            )


def _is_weights_of_one_group(view: View) -> bool:
    """True if weights can be unpacked while they load, and no more is lost by that.

    Since 5.21 one group is taken for all Linears then, and no inputs are rounded.
    """
    found = [group.scheme for group in view.groups if group.scheme.weights is not None]
    return len(found) == 1 and found[0].inputs is None and found[0].outputs is None


def _passes_over_states(view: View) -> bool:
    return bool(_told_as("L11", view))


@rule(
    "L5",
    "attention that is rounded with zero points computes in float16",
    server="transformers",
    is_limit=True,
)
def _rounded_states_keep_their_dtype(view: View) -> Iterator[Problem]:
    named = [name for name in view.headers if name.endswith(".q_zero_point")]
    if view.dtype == "float16" or (named and _passes_over_states(view)):
        return
    for name in named:
        yield Problem(
            name.rpartition(".")[0],
            "transformers rounds queries, keys and values with zero points to float16, and the "
            f"model computes in {view.dtype}: the first forward fails.",
            "Quantize attention symmetrically, or load it with dtype=torch.float16.",
        )


@rule("L6", "columns are whole groups", server="transformers", is_limit=True)
def _groups_are_whole(view: View) -> Iterator[Problem]:
    for entry, scheme in view.coded:
        args, columns = scheme.weights, view.columns(entry, scheme)
        if args is None or columns is None or args.strategy not in ("group", "tensor_group"):
            continue
        if args.group and columns % args.group:
            yield Problem(
                entry.name,
                f"Its {columns} columns are no whole number of groups of {args.group}: "
                "transformers refuses it where it is unpacked.",
                "Use a group size that divides the columns.",
            )


@rule("L8", "what is tied is quantized alike", server="transformers", is_limit=True)
def _tied_are_alike(view: View) -> Iterator[Problem]:
    small = {f"{one.name}.weight" for one in view.quantized if one.own.get("weight") is not None}
    small = {name for name in small if view.headers[name].dtype == "F8_E4M3"}
    model = class_model(view.config) if small else None
    if model is None:
        return
    names = ModelNames(model)
    held = {names.first(name): name for name in view.headers}
    for target, source in model.all_tied_weights_keys.items():
        pair = [held[name] for name in (source, target) if name in held]
        if len(pair) > 1 and len(small.intersection(pair)) == 1:
            coded, other = sorted(pair, key=lambda name: name not in small)
            yield Problem(
                coded.removesuffix(".weight"),
                f"transformers compares it with {other}, as of one tensor, and fails to load it: "
                "8-bit floats are compared with no others.",
                "Give it integers (format: int-quantized), or ignore it.",
            )


@rule("S77", "transformers applies no transforms", server="transformers", is_limit=True)
def _transforms_are_applied(view: View) -> Iterator[Problem]:
    online = in_the_forward(view)
    if online:
        yield Problem(
            "transform_config",
            "transformers drops transform_config, and its outputs are wrong: the weights are "
            f"rotated for {joined(online)}, which it does not apply.",
            "Serve it with vLLM, which applies it, or use rotations that are multiplied into the "
            "weights alone (R1, R2).",
        )
    missed = unrotated_states(view, are_rounded=not _passes_over_states(view))
    if missed:
        yield Problem(
            "transform_config",
            "transformers drops transform_config, and does not turn queries and keys "
            f"({joined(missed)}): {next(iter(missed.values()))}.",
            "Leave the rotation of queries and keys out.",
        )
