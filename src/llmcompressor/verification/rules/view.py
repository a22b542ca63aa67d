# SPDX-License-Identifier: Apache-2.0
"""View of a checkpoint that the rules read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    PLAIN_TABLE,
    Entry,
    Family,
    entries_of,
    family_of,
    is_doubtful,
    text_settings,
)
from llmcompressor.verification.rules.server_table import REORDERINGS, Reordering
from llmcompressor.verification.scheme import (
    OURS,
    Choice,
    Group,
    Resolver,
    Scheme,
    compiled,
    method_of,
    parse_groups,
    settings_of,
)
from llmcompressor.verification.transformers_model import (
    Built,
    build,
    module_classes,
    reader_config,
)
from llmcompressor.verification.trial_load import TrialLoad, trial_load

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_TOWER = re.compile(r".*vision|(?:.*\.)?(?:visual|(?:image|audio|speech)_(?:tower|encoder))\.")
"""Where images or sounds are read, all at once: there is no cache."""
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""How headers name a dtype → how a configuration does."""


@dataclass(frozen=True)
class Problem:
    """A breach of the rule with this number; its own severity where it is not the rule's."""

    rule: str
    module: str
    message: str
    remedy: str = ""
    severity: Severity | None = None


@dataclass(frozen=True)
class Misfit:
    """A tensor that is not as a scheme wants it: ``missing``, ``extra``, ``dtype`` or ``shape``."""

    entry: Entry
    own: str
    what: str
    sentence: str


@dataclass(frozen=True)
class Facts:
    """What limits of single modules depend on; a mixture's thousands of modules share it.

    Attributes:
        kind: as of :class:`~llmcompressor.verification.modules.Entry`.
        coded: it holds codes.
        expert: it is an expert's.
        beside_codes: it is an expert's, and experts of its mixture hold codes.
        draft: it is in a draft layer.
        plain: vLLM builds it without a scheme.
        tied: it is an input or output embedding, and the two are one tensor.
        selected: the scheme that vLLM gives it wants codes.
        stored_so: its codes lie in the file as that scheme has them.
        ignored: vLLM ignores it.
        mixed: vLLM ignores some of what it is joined with.
        group: the group that vLLM gives it.
        of_sglang: the one that SGLang does.
        left_to_sglang: SGLang neither has a target for it nor ignores it.
        selected_by_sglang: the scheme that SGLang gives it wants codes.
    """

    kind: str
    coded: bool
    expert: bool
    beside_codes: bool
    draft: bool
    plain: bool
    tied: bool
    selected: bool
    stored_so: bool
    ignored: bool
    mixed: bool
    group: Group | None
    of_sglang: Group | None
    left_to_sglang: bool
    selected_by_sglang: bool


class View:
    """A checkpoint as rules see it: nothing here reads a file.

    Args:
        config: the content of ``config.json``.
        headers: tensor name → dtype and shape.
        tensors: reads a small tensor, ``None`` if data is out of reach.
        deployment: where it is to be served.
        kinds: path of a module → ``linear`` or ``embedding``, as far as its class is known without
            asking the configuration's.
        beside: names of the files in its folder.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        headers: Mapping[str, TensorInfo],
        tensors: Tensors | None = None,
        deployment: Deployment | None = None,
        kinds: Mapping[str, str] | None = None,
        beside: Collection[str] = (),
    ) -> None:
        self.config = config
        self.headers = headers
        self.tensors = tensors
        self.deployment = deployment or Deployment()
        self.settings: Mapping[str, Any] = settings_of(config) or {}
        """The ``quantization_config``, empty if there is none."""
        self.text = text_settings(config)
        """The settings of the language model."""
        self.groups = parse_groups(self.settings)
        ignore = self.settings.get("ignore")
        self.ignore = [str(text) for text in ignore] if isinstance(ignore, list) else []
        self.method = method_of(config, headers, beside)
        """What quantized it: this format, another, or nothing."""
        self.named = str(self.settings.get("quant_method") or "")
        """The ``quant_method``: readers go by it, however odd."""
        said = [one for one in (self.text, config) if "tie_word_embeddings" in one]
        self.is_tied = bool(said) and bool(said[0]["tie_word_embeddings"])
        """True if input and output embeddings are one tensor."""
        self._kinds = kinds or {}
        self._choices: dict[tuple[str, str], Choice] = {}
        self._columns: dict[tuple[str, int], int | None] = {}
        self._stored_shapes: dict[str, tuple[int, ...]] = {}

    def size(self, key: str) -> int | None:
        """A size of the language model, ``None`` if it is not given or cannot be one."""
        found = self.text.get(key)
        is_size = isinstance(found, int) and not isinstance(found, bool) and found > 0
        return found if is_size else None

    @property
    def is_foreign(self) -> bool:
        """True if another method quantized it, and no rule of this format applies."""
        return self.method not in ("", OURS)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The checkpoint's modules; classes are asked where names leave open what one is."""
        named = entries_of(self.headers)
        doubtful = [entry for entry in named.values() if is_doubtful(entry)]
        if not self.groups or not doubtful:
            return named
        kinds = dict(self._kinds)
        if any(entry.name not in kinds for entry in doubtful):
            classes = module_classes(self.config)
            for entry in doubtful:
                asked = "" if classes is None else classes.kind(entry.name)
                selected = "linear" if self._is_selected_as_linear(entry) else ""
                kinds.setdefault(entry.name, asked or selected or self._kind_by_rows(entry))
        return entries_of(self.headers, kinds)

    def _kind_by_rows(self, entry: Entry) -> str:
        """``embedding`` for a plain table outside all blocks with a row for each token, or empty.

        So is one called in code that comes with a model, where no class can be asked.
        """
        is_inside = any(part.isdecimal() for part in entry.name.split("."))
        shape, table = (
            entry.own["weight"].shape,
            (self.size("vocab_size"), self.size("hidden_size")),
        )
        is_table = entry.form == "dense" and shape == table and shape[0] != shape[1]
        return "embedding" if is_table and not is_inside else ""

    def _is_selected_as_linear(self, entry: Entry) -> bool:
        """True if a module that holds codes can have been selected as a Linear alone."""
        targets = {target for group in self.groups for target in group.targets}
        if not entry.is_quantized or "Linear" not in targets or "Embedding" in targets:
            return False
        patterns = filter(None, map(compiled, targets))
        return entry.name not in targets and not any(one.match(entry.name) for one in patterns)

    @cached_property
    def resolver(self) -> Resolver:
        """Who gives which group to a module, with the architecture as vLLM builds it."""
        owns = {entry.last for entry in self.entries.values()}
        experts = {entry.last for entry in self.entries.values() if entry.is_expert}
        family = family_of(self.config, owns, experts)
        return Resolver(self.config, self.groups, self.ignore, family, self.entries)

    @property
    def family(self) -> Family:
        """The architecture as vLLM builds it."""
        return self.resolver.family

    @cached_property
    def matrices(self) -> list[Entry]:
        """Modules with a weight of two dimensions, quantized or not; no matrices of transforms."""
        every = (entry for entry in self.entries.values() if entry.kind != "other")
        return [entry for entry in every if entry.last not in self.transforms]

    @cached_property
    def transforms(self) -> frozenset[str]:
        """Own names of the modules that hold the matrices of online transforms."""
        settings = self.settings.get("transform_config")
        groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
        names = groups if isinstance(groups, Mapping) else ()
        places = ("input", "output", "q_attn", "k_cache")
        return frozenset(f"{name}_{place}" for name in names for place in places)

    def reordering(self, entry: Entry) -> Reordering | None:
        """How vLLM reorders the rows of a module as it loads them; ``None`` if it does not."""
        types = {str(each.get("model_type")) for each in (self.config, self.text)}
        own = [one for one in REORDERINGS if types & one.types and not _TOWER.match(entry.name)]
        return next((one for one in own if re.fullmatch(one.modules, entry.last)), None)

    @cached_property
    def quantized(self) -> list[Entry]:
        """Modules that hold codes."""
        return [entry for entry in self.matrices if entry.is_quantized]

    @cached_property
    def dtype(self) -> str:
        """The dtype in which the model is to run: of its weights, if nothing says which."""
        own = self.config.get("dtype") or self.config.get("torch_dtype") or self.text.get("dtype")
        if not own:
            stored = (entry.own["weight"].dtype for entry in self.matrices if entry.form == "dense")
            own = FLOATS.get(next(stored, ""), "bfloat16")
        return self.deployment.plain_dtype or str(own).removeprefix("torch.")

    def choice(self, entry: Entry, server: str = "vllm") -> Choice:
        """Choice of a server for a module; ``alone``: of vLLM if it were joined with nothing."""
        key = (server, entry.name)
        if key not in self._choices:
            self._choices[key] = getattr(self.resolver, server)(entry)
        return self._choices[key]

    def scheme(self, entry: Entry) -> Scheme | None:
        """The scheme that vLLM looks up for a module."""
        group = self.choice(entry).group
        return group.scheme if group is not None else None

    @cached_property
    def facts(self) -> dict[Facts, list[Entry]]:
        """What limits of single modules depend on → the modules."""
        found: dict[Facts, list[Entry]] = {}
        asks_sglang = self.deployment.concerns("sglang") and any(
            group.scheme.weights is not None for group in self.groups
        )
        matches = (EXPERT.match(entry.name) for entry in self.quantized)
        mixtures = {match["experts"] for match in matches if match is not None}
        for entry in self.matrices:
            mixture, choice = EXPERT.match(entry.name), self.choice(entry)
            is_word = entry.kind == "embedding" and "position" not in entry.name
            scheme = None if choice.group is None else choice.group.scheme
            is_asked = asks_sglang and mixture is None
            sglang = self.choice(entry, "sglang") if is_asked else Choice(ignored=True)
            facts = Facts(
                kind=entry.kind,
                coded=entry.is_quantized,
                expert=mixture is not None,
                beside_codes=mixture is not None and mixture["experts"] in mixtures,
                draft=self.is_draft(entry.name),
                plain=self.is_plain(entry),
                tied=self.is_tied and (is_word or entry.kind == "head"),
                selected=scheme is not None
                and scheme.weights is not None
                and scheme.format != "dense"
                and not self.kept_scales(entry),
                stored_so=scheme is None or is_stored_so(entry, scheme),
                ignored=choice.ignored,
                mixed=choice.mixed,
                group=choice.group,
                of_sglang=sglang.group,
                left_to_sglang=sglang == Choice(),
                selected_by_sglang=sglang.group is not None
                and sglang.group.scheme.weights is not None
                and sglang.group.scheme.format != "dense"
                and not self.kept_scales(entry),
            )
            found.setdefault(facts, []).append(entry)
        return found

    @cached_property
    def coded(self) -> Sequence[tuple[Entry, Scheme]]:
        """Quantized modules with the schemes that they were written in."""
        pairs = ((entry, self.written(entry)) for entry in self.quantized)
        return [(entry, one) for entry, one in pairs if one is not None and one.weights is not None]

    def written(self, entry: Entry) -> Scheme | None:
        """The scheme that a module was written in: its own, though another may be used.

        That of what it is joined with (S14), or of expert 0 (S62).
        """
        is_joined = entry.is_expert or entry.last in self.resolver.shards
        asked = ["alone", "vllm", "transformers"] if is_joined else ["vllm", "transformers"]
        found = (self.choice(entry, server).group for server in asked)
        return next((group.scheme for group in found if group is not None), None)

    def kept_scales(self, entry: Entry) -> set[str]:
        """Tensors beside a dense weight that is rounded: of the format dense, or unpacked."""
        scheme = self.written(entry) if entry.form == "dense" and entry.kind != "other" else None
        if scheme is None or scheme.weights is None or "weight_scale" not in entry.own:
            return set()
        if scheme.format != "dense":  # transformers saves so what a forward has unpacked
            is_packed = self.settings.get("quantization_status") == "compressed"
            return set() if is_packed else set(entry.own) - {"weight", "bias"}
        names = {"weight_scale", "weight_global_scale", *expected_tensors(scheme, 1, 1)}
        names |= set() if scheme.weights.symmetric else {"weight_zero_point"}
        return names - {"weight", "bias"}

    def is_plain(self, entry: Entry) -> bool:
        """True if vLLM builds a module without a scheme, whatever the configuration says."""
        if entry.kind == "gate":
            return not self.family.gate_is_quantizable
        if entry.kind == "head":
            return not self.family.quantizes_head
        if entry.kind == "embedding" and PLAIN_TABLE.fullmatch(entry.name):
            return True
        if entry.kind == "embedding" and not self.family.quantizes_embedding:
            return True
        return any(re.fullmatch(pattern, entry.name) for pattern in self.family.plain)

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
        if self.tensors is None or self.is_foreign:
            return None
        if not self.plain:
            return None
        trial = self.trial if self.deployment.concerns("transformers") else None
        return build(self.config, self.plain, is_clean=trial is not None and trial.is_clean)

    @cached_property
    def endless(self) -> dict[str, str]:
        """Patterns that take without end to match a name, and what to say of each."""
        every = (text for group in self.groups for text in group.targets)
        found = {text: compiled(text) for text in (*every, *self.ignore)}
        return {
            text: f"To match {one.slow_on[:80]!r} with it takes without end: readers would hang."
            for text, one in found.items()
            if one is not None and one.is_slow_on(self.entries)
        }

    @cached_property
    def trial(self) -> TrialLoad | None:
        """The report of transformers' trial load; ``None`` where there is nothing to try."""
        if self.endless:
            return None
        if self.named != OURS if self.settings else not self.mixtures:
            return None
        return trial_load(reader_config(self.config), self.headers, self.dtype, self.plain)

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

    def columns(self, entry: Entry, scheme: Scheme) -> int | None:
        """Columns of a module's weight."""
        key = (entry.name, id(scheme))
        if key not in self._columns:
            self._columns[key] = columns_of(entry, scheme, self.stored_shape(entry))
        return self._columns[key]

    def stored_shape(self, entry: Entry) -> tuple[int, ...] | None:
        """The content of ``weight_shape``, where data may be read."""
        info = entry.own.get("weight_shape")
        if self.tensors is None or info is None or info.shape != (2,):
            return None
        if entry.name not in self._stored_shapes:
            stored = self.tensors(f"{entry.name}.weight_shape")
            self._stored_shapes[entry.name] = tuple(int(size) for size in stored.tolist())
        return self._stored_shapes[entry.name]

    @cached_property
    def used(self) -> list[Group]:
        """The groups that vLLM gives to some module."""
        names = {facts.group.name for facts in self.facts if facts.group is not None}
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
            found += [Misfit(entry, *one) for one in misfits(entry.own, known[key])]
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

    def experts(self, path: str) -> list[Entry]:
        """All projections of a mixture."""
        return [entry for own in self.mixtures.get(path, {}).values() for entry in own.values()]

    @cached_property
    def expert_schemes(self) -> dict[str, dict[Scheme, Entry]]:
        """Path of a mixture → its schemes, each with the first projection that has it."""
        found: dict[str, dict[Scheme, Entry]] = {}
        for path in self.mixtures:
            schemes = found.setdefault(path, {})
            for entry in self.experts(path):
                group = self.choice(entry, "alone").group
                if group is not None:
                    schemes.setdefault(group.scheme, entry)
        return found

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
            alike = [one for one in range(first) if index < count and types[one] == types[index]]
            if first <= index and alike:
                start, end = layer.span(1)
                found[entry.parent] = f"{entry.parent[:start]}{alike[-1]}{entry.parent[end:]}"
        return found

    def is_linear_attention(self, path: str) -> bool:
        """True if the configuration says that a layer keeps one state, not keys and values."""
        layer, types = _LAYER.match(path), self.text.get("layer_types")
        if layer is None or not isinstance(types, list):
            return False
        return "linear_attention" in types[int(layer[1]) :][:1]


def joined(names: Iterable[str], most: int = 4) -> str:
    """Some names for a message.

    >>> joined(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown


Check = Callable[[View], Iterable[Problem]]
"""Finds breaches of one rule or of several."""
