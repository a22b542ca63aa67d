# SPDX-License-Identifier: Apache-2.0
"""View of a checkpoint that the rules read, and what a rule is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from llmcompressor.verification.expected import (
    Expected,
    columns_of,
    expected_tensors,
    is_stored_so,
    misfits,
)
from llmcompressor.verification.facts import Deployment, Severity, TensorInfo, Tensors
from llmcompressor.verification.modules import (
    EXPERT,
    Entry,
    Family,
    entries_of,
    family_of,
    is_doubtful,
    text_settings,
)
from llmcompressor.verification.scheme import (
    Choice,
    Group,
    Resolver,
    Scheme,
    compiled,
    parse_groups,
    settings_of,
)
from llmcompressor.verification.transformers_model import (
    Built,
    Own,
    build,
    module_classes,
    reader_config,
)
from llmcompressor.verification.trial_load import TrialLoad, trial_load

__all__ = [
    "CONFIG",
    "DEPLOYMENT",
    "FLOATS",
    "HEADERS",
    "TENSORS",
    "VERSIONS",
    "WRITTEN",
    "Misfit",
    "Problem",
    "Rule",
    "View",
    "joined",
    "place_of",
    "rule",
    "rules",
]

CONFIG, HEADERS, TENSORS, DEPLOYMENT = "config", "headers", "tensors", "deployment"
WRITTEN = "written"
VERSIONS = {"vllm": "0.33", "transformers": "5.22", "sglang": "0.5"}
"""The releases whose rules these are; a rule that holds for others as well says so itself."""
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_TOWER = re.compile(r".*vision|(?:.*\.)?(?:visual|(?:image|audio|speech)_(?:tower|encoder))\.")
"""Where images or sounds are read, all at once: there is no cache."""
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""How headers name a dtype → how a configuration does."""


@dataclass(frozen=True)
class Problem:
    """A breach of a rule.

    Attributes:
        module: what breaches it.
        message: how, one sentence.
        remedy: what to do about it, one sentence.
        severity: where it is not the rule's own.
    """

    module: str
    message: str
    remedy: str = ""
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """A rule of a server, as data.

    Attributes:
        number: its number in the specification, such as ``S30``.
        title: the rule in a few words.
        check: finds breaches.
        server: whose rule it is.
        versions: the releases that it holds for, where they are not :data:`VERSIONS`.
        needs: ``config``, ``headers``, ``tensors`` (small ones), ``deployment`` or ``written``: a
            checkpoint that is only planned is built by the class that its original was loaded by.
        severity: of a breach, unless the breach says otherwise.
        is_limit: the checkpoint is sound and this server alone cannot serve it; unless that
            server is asked about, a breach is a warning.
    """

    number: str
    title: str
    check: Callable[[View], Iterable[Problem]]
    server: str = "vllm"
    versions: str = ""
    needs: str = HEADERS
    severity: Severity = Severity.ERROR
    is_limit: bool = False

    @property
    def holds_for(self) -> str:
        """The releases of its server that it holds for, empty if it is about files as such."""
        return self.versions or VERSIONS.get(self.server, "")


Result = TypeVar("Result")
Check: TypeAlias = "Callable[[View], Iterable[Problem]]"
_TABLE: list[Rule] = []


def rule(number: str, title: str, **facts: Any) -> Callable[[Check], Check]:
    """Enter a check into the table of rules; ``facts`` are the other fields of :class:`Rule`."""

    def enter(check: Check) -> Check:
        _TABLE.append(Rule(number, title, check, **facts))
        return check

    return enter


def rules() -> tuple[Rule, ...]:
    """Every rule of the imported modules, by section and number."""
    return tuple(sorted(_TABLE, key=lambda one: place_of(one.number)))


def place_of(number: str) -> tuple[int, int, str]:
    """Sort key of a rule: files, consistency, values, reference, then servers.

    >>> sorted(["S18a", "T1", "S2", "F3", "S18"], key=place_of)
    ['F3', 'S2', 'S18', 'S18a', 'T1']
    """
    digits = "".join(each for each in number if each.isdigit())
    return "FCVRSTLG".index(number[0]), int(digits), number


@dataclass(frozen=True)
class Misfit:
    """A tensor that is not as a scheme wants it.

    Attributes:
        entry: the module.
        scheme: its scheme.
        columns: columns of its weight.
        own: the tensor's own name.
        what: ``missing``, ``extra``, ``dtype`` or ``shape``.
        sentence: how it differs.
    """

    entry: Entry
    scheme: Scheme
    columns: int
    own: str
    what: str
    sentence: str


class View:
    """A checkpoint as rules see it: nothing here reads a file.

    Args:
        config: the content of ``config.json``.
        headers: tensor name → dtype and shape.
        tensors: reads a small tensor, ``None`` if data is out of reach.
        deployment: where it is to be served.
        kinds: path of a module → ``linear`` or ``embedding``, as far as its class is known without
            asking the configuration's.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        headers: Mapping[str, TensorInfo],
        tensors: Tensors | None = None,
        deployment: Deployment | None = None,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.headers = headers
        self.tensors = tensors
        self.deployment = deployment or Deployment()
        self._kinds = kinds or {}
        self._once: dict[Callable[[View], Any], Any] = {}
        self._choices: dict[tuple[str, str], Choice] = {}
        self._columns: dict[str, tuple[Scheme, int | None]] = {}
        self._stored_shapes: dict[str, tuple[int, ...]] = {}

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The ``quantization_config``, empty if there is none."""
        return settings_of(self.config) or {}

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The settings of the language model."""
        return text_settings(self.config)

    def size(self, key: str) -> int | None:
        """A size of the language model, ``None`` if it is not given or cannot be one (C3)."""
        found = self.text.get(key)
        is_size = isinstance(found, int) and not isinstance(found, bool) and found > 0
        return found if is_size else None

    @cached_property
    def family(self) -> Family:
        """The architecture as vLLM builds it."""
        experts = {entry.last for entry in self.entries.values() if entry.is_expert}
        return family_of(self.config, {entry.last for entry in self.entries.values()}, experts)

    @cached_property
    def groups(self) -> list[Group]:
        """The configuration's groups."""
        return parse_groups(self.settings)

    @cached_property
    def ignore(self) -> list[str]:
        """The texts of ``ignore``."""
        found = self.settings.get("ignore")
        return [str(text) for text in found] if isinstance(found, list) else []

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The checkpoint's modules; classes are asked where names leave open what one is."""
        named = entries_of(self.headers)
        doubtful = [entry for entry in named.values() if is_doubtful(entry)]
        if not self.groups or not doubtful:
            return named
        by_class = None
        if not all(entry.name in self._kinds for entry in doubtful):
            classes = module_classes(self.config)
            by_class = None if classes is None else classes.kind
        selected = {
            entry.name: "linear" for entry in doubtful if self._is_selected_as_linear(entry)
        }

        def kind(name: str) -> str:
            asked = by_class(name) if by_class is not None and name not in self._kinds else ""
            return self._kinds.get(name, asked) or selected.get(name, "")

        return entries_of(self.headers, kind)

    def _is_selected_as_linear(self, entry: Entry) -> bool:
        """True if a module that holds codes can have been selected as a Linear alone.

        Neither its name is a target nor ``Embedding``, and ``Linear`` is.
        """
        targets = {target for group in self.groups for target in group.targets}
        if not entry.is_quantized or "Linear" not in targets or "Embedding" in targets:
            return False
        patterns = filter(None, map(compiled, targets))
        return entry.name not in targets and not any(one.match(entry.name) for one in patterns)

    @cached_property
    def resolver(self) -> Resolver:
        """Who gives which group to a module."""
        return Resolver(self.config, self.groups, self.ignore, self.family, self.entries)

    @cached_property
    def matrices(self) -> list[Entry]:
        """Modules with a weight of two dimensions, quantized or not; no matrices of transforms."""
        return [
            entry
            for entry in self.entries.values()
            if entry.kind != "other" and entry.last not in self.transforms
        ]

    @cached_property
    def transforms(self) -> frozenset[str]:
        """Own names of the modules that hold the matrices of online transforms."""
        settings = self.settings.get("transform_config")
        groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
        names = groups if isinstance(groups, Mapping) else ()
        places = ("input", "output", "q_attn", "k_cache")
        return frozenset(f"{name}_{place}" for name in names for place in places)

    @cached_property
    def quantized(self) -> list[Entry]:
        """Modules that hold codes."""
        return [entry for entry in self.matrices if entry.is_quantized]

    @cached_property
    def is_tied(self) -> bool:
        """True if input and output embeddings are one tensor."""
        for holder in (self.text, self.config):
            if "tie_word_embeddings" in holder:
                return bool(holder["tie_word_embeddings"])
        return False

    @cached_property
    def dtype(self) -> str:
        """The dtype in which the model is to run: of its weights, if nothing says which."""
        own = self.config.get("dtype") or self.config.get("torch_dtype") or self.text.get("dtype")
        if not own:
            stored = (entry.own["weight"].dtype for entry in self.matrices if entry.form == "dense")
            own = FLOATS.get(next(stored, ""), "bfloat16")
        return self.deployment.plain_dtype or str(own).removeprefix("torch.")

    def choice(self, entry: Entry, server: str = "vllm") -> Choice:
        """Choice of a server for a module."""
        key = (server, entry.name)
        if key not in self._choices:
            more = (self.own_modules(entry),) if server == "transformers" else ()
            self._choices[key] = getattr(self.resolver, server)(entry, *more)
        return self._choices[key]

    def own_modules(self, entry: Entry) -> tuple[Own, ...]:
        """The modules of transformers' class that have their weight from a module of the file.

        None where nothing is known of them: the class cannot be built, or has no such module.
        """
        if self._modules_of is None or entry.is_expert:
            return ()
        return self._modules_of(entry.name)

    @cached_property
    def _modules_of(self) -> Callable[[str], tuple[Own, ...]] | None:
        classes = module_classes(self.config) if self.groups else None
        return None if classes is None else classes.modules

    def scheme(self, entry: Entry) -> Scheme | None:
        """The scheme that vLLM looks up for a module."""
        group = self.choice(entry).group
        return group.scheme if group is not None else None

    @cached_property
    def coded(self) -> Sequence[tuple[Entry, Scheme]]:
        """Quantized modules with the schemes that they were written in."""
        pairs = ((entry, self.written(entry)) for entry in self.quantized)
        return [
            (entry, scheme)
            for entry, scheme in pairs
            if scheme is not None and scheme.weights is not None
        ]

    def written(self, entry: Entry) -> Scheme | None:
        """The scheme that a module was written in: its own, though another may be used.

        That of what it is joined with (S14), or of expert 0 (S62).
        """
        if entry.is_expert or entry.last in self.resolver.shards:
            group = self._alone(entry)
            if group is not None:
                return group.scheme
        scheme = self.scheme(entry)
        if scheme is None:
            group = self.choice(entry, "transformers").group
            scheme = group.scheme if group is not None else None
        return scheme

    def _alone(self, entry: Entry) -> Group | None:
        """The group that vLLM would give a module that is joined with nothing."""
        return self.choice(entry, "alone").group

    def is_plain(self, entry: Entry) -> bool:
        """True if vLLM builds a module without a scheme, whatever the configuration says."""
        if entry.kind == "gate":
            return not self.family.gate_is_quantizable
        if entry.kind == "head":
            return not self.family.quantizes_head
        return any(pattern.fullmatch(entry.name) for pattern in self._plain_patterns)

    def is_draft(self, name: str) -> bool:
        """True if a module or tensor lies in a draft layer, which transformers does not load."""
        if self.family.draft and re.match(self.family.draft, name):
            return True
        layer, count = _LAYER.match(name), self.size("num_hidden_layers")
        return layer is not None and count is not None and int(layer[1]) >= count

    @cached_property
    def built(self) -> Built | None:
        """The class of transformers with the headers; ``None`` where it cannot be built.

        A checkpoint that is only planned is not asked about: what it is made from was loaded so.
        """
        if self.tensors is None or (self.settings and not self.is_compressed_tensors):
            return None
        if not self.plain:
            return None
        trial = self.trial if self.deployment.concerns("transformers") else None
        is_clean = trial is not None and trial.is_clean
        return build(self.config, self.plain, is_clean=is_clean)

    @cached_property
    def trial(self) -> TrialLoad | None:
        """The report of transformers' trial load; ``None`` where there is nothing to try."""
        if not self.is_compressed_tensors if self.settings else not self.mixtures:
            return None
        return trial_load(reader_config(self.config), self.headers, self.dtype, self.plain)

    def once(self, compute: Callable[[View], Result]) -> Result:
        """Compute what several rules need of the checkpoint, once."""
        if compute not in self._once:
            self._once[compute] = compute(self)
        found: Result = self._once[compute]
        return found

    @cached_property
    def plain(self) -> dict[str, TensorInfo] | None:
        """The tensors of the model before it was quantized; ``None`` if a size is not known."""
        found = {}
        for name, entry in self.entries.items():
            plain = dict(entry.own)
            if entry.is_quantized and entry.kind != "other":
                scheme = self.written(entry)
                columns = self.columns(entry, scheme) if scheme is not None else None
                if entry.rows is None or columns is None:
                    return None
                plain = {own: info for own, info in plain.items() if own == "bias"}
                plain["weight"] = TensorInfo("BF16", (entry.rows, columns))
            found.update({f"{name}.{own}" if name else own: each for own, each in plain.items()})
        return found

    def is_transposed(self, entry: Entry) -> bool:
        """True if a module's weight is stored ``[in, out]``; codes are ``[out, in]`` always."""
        is_named = entry.form == "dense" and entry.last in self.family.transposed
        return is_named and entry.kind == "linear"

    @cached_property
    def _plain_patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern) for pattern in self.family.plain]

    def columns(self, entry: Entry, scheme: Scheme) -> int | None:
        """Columns of a module's weight."""
        known = self._columns.get(entry.name)
        if known is None or known[0] is not scheme:
            known = (scheme, columns_of(entry, scheme, self.stored_shape(entry)))
            self._columns[entry.name] = known
        return known[1]

    def stored_shape(self, entry: Entry) -> tuple[int, ...] | None:
        """The content of ``weight_shape``, where data may be read."""
        if self.tensors is None or "weight_shape" not in entry.own:
            return None
        if entry.own["weight_shape"].shape != (2,):
            return None
        if entry.name not in self._stored_shapes:
            stored = self.tensors(f"{entry.name}.weight_shape")
            self._stored_shapes[entry.name] = tuple(int(size) for size in stored.tolist())
        return self._stored_shapes[entry.name]

    @cached_property
    def used(self) -> list[Group]:
        """The groups that vLLM gives to some module."""
        names = {
            choice.group.name
            for choice in (self.choice(entry) for entry in self.matrices)
            if choice.group is not None
        }
        return [group for group in self.groups if group.name in names]

    @cached_property
    def misfits(self) -> list[Misfit]:
        """Tensors of quantized modules that are not those of their schemes."""
        found = []
        # a large mixture has thousands of modules of a few shapes
        known: dict[tuple[int, int, int], dict[str, Expected]] = {}
        for entry, scheme in self.coded:
            columns = self.columns(entry, scheme)
            if entry.rows is None or columns is None or not is_stored_so(entry, scheme):
                continue
            key = (id(scheme), entry.rows, columns)
            if key not in known:
                known[key] = expected_tensors(scheme, entry.rows, columns)
            wanted = known[key]
            found += [
                Misfit(entry, scheme, columns, own, what, sentence)
                for own, what, sentence in misfits(entry.own, wanted)
            ]
            found += [
                Misfit(entry, scheme, columns, own, "extra", f"It has a {own}, which is not read.")
                for own in entry.own
                if own not in wanted and own != "bias"
            ]
        return found

    @cached_property
    def joined(self) -> dict[str, list[Entry]]:
        """Joined module (by its path in the checkpoint) → its shards, of two or more."""
        found: dict[str, list[Entry]] = {}
        for entry in self.matrices:
            if entry.kind == "linear" and not entry.is_expert:
                path, shards = self.resolver.unit(entry.name)
                if shards:
                    found.setdefault(path, []).append(entry)
        return {path: shards for path, shards in found.items() if len(shards) > 1}

    @cached_property
    def mixtures(self) -> dict[str, dict[int, dict[str, Entry]]]:
        """Path of a mixture → index of an expert → projection → module."""
        found: dict[str, dict[int, dict[str, Entry]]] = {}
        for entry in self.matrices:
            match = EXPERT.match(entry.name)
            if match is not None:
                experts = found.setdefault(match["experts"], {})
                experts.setdefault(int(match["index"]), {})[match["own"]] = entry
        return found

    @cached_property
    def expert_schemes(self) -> dict[str, dict[Scheme, dict[str, Entry]]]:
        """Path of a mixture → its schemes → the projections that have it, each of one expert.

        Projections of one scheme differ in their shapes, so in what becomes of their scales.
        """
        found: dict[str, dict[Scheme, dict[str, Entry]]] = {}
        for path, experts in self.mixtures.items():
            schemes = found.setdefault(path, {})
            for name, entry in (each for own in experts.values() for each in own.items()):
                group = self._alone(entry)
                if group is not None:
                    schemes.setdefault(group.scheme, {}).setdefault(name, entry)
        return found

    @cached_property
    def expert_pairs(self) -> list[tuple[str, Entry, Entry]]:
        """Gate and up of each expert, with the expert's path."""
        pairs = []
        for path, experts in self.mixtures.items():
            for index, own in experts.items():
                for gate, up in (("gate_proj", "up_proj"), ("w1", "w3")):
                    if gate in own and up in own:
                        pairs.append((f"{path}.{index}", own[gate], own[up]))
        return pairs

    @cached_property
    def attentions(self) -> list[str]:
        """Paths of the modules that hold keys and values, or read those of an earlier layer."""
        parents = {
            entry.parent
            for entry in self.matrices
            if entry.last in ("k_proj", "qkv_proj") and not _TOWER.match(entry.name)
        }
        own = sorted(path for path in parents if not self.is_linear_attention(path))
        return sorted({*own, *self.sharing})

    @cached_property
    def sharing(self) -> dict[str, str]:
        """Attention that reads the keys and values of an earlier layer → that one's attention.

        The layers at the end share: each reads those of the last before them of its own type.
        """
        count, shared = self.size("num_hidden_layers"), self.size("num_kv_shared_layers")
        types = self.text.get("layer_types")
        if not count or not shared or not isinstance(types, list) or len(types) < count:
            return {}
        first, found = count - shared, dict[str, str]()
        for entry in self.matrices:
            layer = _LAYER.match(entry.name)
            if entry.last != "q_proj" or layer is None or _TOWER.match(entry.name):
                continue
            index = int(layer[1])
            if not first <= index < count:
                continue
            alike = [one for one in range(first) if types[one] == types[index]]
            if alike:
                start, end = layer.span(1)
                found[entry.parent] = f"{entry.parent[:start]}{alike[-1]}{entry.parent[end:]}"
        return found

    def is_linear_attention(self, path: str) -> bool:
        """True if the configuration says that a layer keeps one state, not keys and values."""
        layer, types = _LAYER.match(path), self.text.get("layer_types")
        if layer is None or not isinstance(types, list):
            return False
        return "linear_attention" in types[int(layer[1]) :][:1]

    @property
    def is_compressed_tensors(self) -> bool:
        """True if the configuration says that the checkpoint is quantized in this format."""
        method = str(self.settings.get("quant_method") or "").lower().replace("_", "-")
        return method == "compressed-tensors"


def joined(names: Iterable[str], most: int = 4) -> str:
    """Some names for a message.

    >>> joined(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown
