# SPDX-License-Identifier: Apache-2.0
"""Section 10: missing and unexpected tensors (S70, S71), and sizes against ``config.json`` (C2)."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from llmcompressor.verification.built import build
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.families import class_names
from llmcompressor.verification.layout import Entry
from llmcompressor.verification.rules.base import Problem, Rule, View, joined
from llmcompressor.verification.rules.tensors import KNOWN

__all__ = ["RULES"]

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?:layers|h|blocks|block))\.(?P<index>\d+)\.(?P<rest>.+)$")
_EXPERTS = re.compile(r"\.experts\.\d+\.")
_PARTS_OF_A_LAYER = 4
_MOST_SHOWN = 4
_REMOVE = "Remove the tensor."
_COPY = "Copy them from the original model."
_TOWERS = re.compile(r"vision|visual|audio|mtp|draft|eagle|speech|encoder")
# The layers of the language model itself, whatever holds them.
_MAIN = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|gpt_neox|backbone|decoder|rwkv)\.)*"
    r"(?:layers|h|blocks|block)"
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", "decoder_num_layers")
_ENCODERS = (*_DECODER_LAYERS, "encoder_layers", "num_encoder_layers")
_ANNOUNCES = re.compile(r"nextn|mtp|n_predict|draft")
_DRAFT = re.compile(
    r"eh_proj|enorm|hnorm|shared_head|embed_tokens|(?:token|hidden)_layernorm|input_proj|mtp|draft"
)
_FIRST_NORM = "word_embeddings_layernorm"
# Norms follow what they norm, or the last one is an option that is off.
_NO_LAST_NORM = frozenset(["bert", "marian", "openai-gpt", "opt", "roberta", "xlm", "xlnet"])
_QPARAM = re.compile(
    r"(?:weight|input|output|[qkv]|[qkv]_proj)_"
    r"(?:packed|scale|scale_inv|zero_point|global_scale|shape|g_idx)"
)
# Buffers that are calculated anew, and the bias of a head that is tied.
_KNOWN_LOOSE = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.\w+|inv_freq|position_ids|embed_scale|final_logits_bias)"
)
# The first layer of T5 and its like has what all of them use.
_SHARED_BY_ALL = "relative_attention_bias"
_HIDDEN_IN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj")
_HIDDEN_OUT = ("o_proj", "down_proj")
# Where hidden sizes are those of the configuration for every module of these names.
_PLAIN_TYPES = frozenset(
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "mixtral",
        "olmo2",
        "olmoe",
        "granite",
        "smollm3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "deepseek_v3",
        "glm4_moe",
    ]
)


def _stacks(view: View) -> dict[str, dict[int, set[str]]]:
    """Path of a stack of layers → index of a layer → what it holds: modules, and loose tensors."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, entry in view.entries.items():
        if entry.last in view.transforms:
            continue  # one of the layers that share it holds it
        loose = [own for own in entry.own if own != "weight" and not _QPARAM.fullmatch(own)]
        for each in (name, *(f"{name}.{own}" for own in loose)):
            match = _LAYER.match(each)
            if match is not None and not _TOWERS.search(match["stack"]):
                rest = _EXPERTS.sub(".experts.", f".{match['rest']}.")
                stacks[match["stack"]][int(match["index"])].add(rest.strip("."))
    return stacks


def layers_are_complete(view: View) -> Iterator[Problem]:
    """S70: a layer that lacks what its like have, and layers that are not there at all."""
    stacks = _stacks(view)
    for stack, layers in stacks.items():
        counts = _counts(view, stack)
        real = _real(view, stack, layers)
        yield from _incomplete(view, stack, real)
        count = min(counts, default=0)
        if len(stacks) == 1 and len(real) < count and not _has_all(view, count, len(real)):
            lacking = count - len(real)
            # the first of them are enough, and a wrong count may be any number
            missing = (str(index) for index in itertools.count() if index not in layers)
            shown = ", ".join(itertools.islice(missing, min(lacking, _MOST_SHOWN)))
            more = f" and {lacking - _MOST_SHOWN} more" if lacking > _MOST_SHOWN else ""
            yield Problem(stack, f"It lacks the layers {shown}{more} of {count}.", _COPY)


def _has_all(view: View, counted: int, stored: int) -> bool:
    """Whether the class finds everything: it may count layers otherwise than they are stored.

    A count that is many times as large is a mistake, and would take long to build.
    """
    if counted > _PARTS_OF_A_LAYER * stored:
        return False
    if view.tensors is not None:
        built = view.built
    else:  # it is only planned
        built = build(view.config, view.plain) if view.plain else None
    return built is not None and not built.missing


def _counts(view: View, stack: str) -> set[int]:
    """The numbers of layers that the configuration may mean by what it says of a stack."""
    is_second = "decoder" in stack and any(key in view.text for key in _ENCODERS)
    keys = _DECODER_LAYERS if is_second else _LAYERS
    return {count for count in map(view.size, keys) if count is not None}


def _is_draft(view: View, stack: str, index: int, own: set[str]) -> bool:
    """Whether a layer further on than the configuration counts is one that drafts tokens.

    The configuration announces such layers, or they hold what no ordinary layer does. (What is
    merely not loaded, :meth:`View.is_draft` says: a count that is wrong is not found there.)
    """
    count = max(_counts(view, stack), default=None)
    if count is None or index < count:
        return False
    return index < count + _announced(view) or any(map(_DRAFT.search, own))


def _real(view: View, stack: str, layers: dict[int, set[str]]) -> dict[int, set[str]]:
    """Without the draft layers."""
    return {index: own for index, own in layers.items() if not _is_draft(view, stack, index, own)}


def _announced(view: View) -> int:
    """How many draft layers the configuration announces at most."""
    values = [
        value
        for holder in (view.text, view.config)
        for key, value in holder.items()
        if _ANNOUNCES.search(key) and value
    ]
    counts = (value if _is_number(value) else sys.maxsize for value in values)
    return max(counts, default=0)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def layers_are_counted(view: View) -> Iterator[Problem]:
    """C2: no layer beyond those that the configuration counts."""
    for stack, layers in _stacks(view).items():
        counts = _counts(view, stack)
        if not counts or not _MAIN.fullmatch(stack):
            continue
        count = max(counts)
        beyond = sorted(index for index in _real(view, stack, layers) if index >= count)
        if beyond:
            yield Problem(
                stack,
                f"It holds the layers {joined(map(str, beyond))}, and config.json counts {count}.",
                "Correct the count, or remove the layers.",
            )


def _incomplete(view: View, stack: str, layers: dict[int, set[str]]) -> Iterator[Problem]:
    if view.config.get("block_configs"):
        return
    kinds = Counter(frozenset(own) for own in layers.values())
    for index, own in layers.items():
        fuller = [kind for kind in kinds if own < kind]
        if kinds[frozenset(own)] > 1 or not fuller:
            continue
        lacking = _not_built(view, f"{stack}.{index}", min(fuller, key=len) - own, stack)
        if not lacking:
            continue
        having = sum(set(lacking) <= other for other in layers.values())
        # one layer against one: a bias may be too many there as well as missing here
        is_unclear = having < 2 and all(each.rpartition(".")[0] in own for each in lacking)
        yield Problem(
            f"{stack}.{index}",
            f"It lacks {joined(lacking)}, which other layers have.",
            _COPY,
            # layers of other architectures may differ by intention
            None if _is_plain_type(view) and not is_unclear else Severity.WARNING,
        )


def _not_built(view: View, layer: str, lacking: Iterable[str], stack: str) -> list[str]:
    """Without what the class has in other layers and not in this one, and what one layer shares."""
    every = sorted(each for each in lacking if not each.endswith(_SHARED_BY_ALL))
    built = view.built
    if built is None or not built.has_module(layer):
        return every
    return [
        each
        for each in every
        if built.has_module(f"{layer}.{each}")
        or not any(
            name.startswith(f"{stack}.") and f".{each}." in f"{name}." for name in built.shapes
        )
    ]


def _is_plain_type(view: View) -> bool:
    return str(view.text.get("model_type") or "") in _PLAIN_TYPES


def all_is_there(view: View) -> Iterator[Problem]:
    """S70."""
    found = [*layers_are_complete(view), *_ends(view), *_last_norms(view)]
    yield from found
    yield from _missing(view, found)


def _missing(view: View, known: list[Problem]) -> Iterator[Problem]:
    """What the class of transformers has, and nothing was loaded into."""
    built = view.built
    if built is None:
        return
    lacking: dict[str, list[str]] = defaultdict(list)
    for name in built.missing:
        module, _, own = name.rpartition(".")
        lacking[module].append(own)
    said = [problem.module for problem in known]
    for module, names in lacking.items():
        if not any(module == each or module.startswith(f"{each}.") for each in said):
            yield Problem(
                module,
                f"It has no {joined(names)}, and {built.name} has.",
                _COPY,
                _of_foreign_code(view),
            )


def _of_foreign_code(view: View) -> Severity | None:
    """A checkpoint with code of its own may be built otherwise than transformers' class."""
    return Severity.WARNING if view.config.get("auto_map") else None


def _is_norm(entry: Entry) -> bool:
    weight = entry.own.get("weight")
    return weight is not None and len(weight.shape) == 1


def _last_norms(view: View) -> Iterator[Problem]:
    """The norm behind the last layer, where layers have norms of their own."""
    is_plain = _is_plain_type(view)
    if not (is_plain or _is_decoder(view)) or str(view.text.get("model_type")) in _NO_LAST_NORM:
        return
    norms = [entry.name for entry in view.entries.values() if _is_norm(entry)]
    for stack in _stacks(view):
        within = any(name.startswith(f"{stack}.") for name in norms)
        parent = stack.rpartition(".")[0]
        beside = {name for name in norms if name.rpartition(".")[0] == parent} - {
            f"{parent}.{_FIRST_NORM}".lstrip(".")
        }
        if _MAIN.fullmatch(stack) and within and not beside:
            yield Problem(
                f"{parent}.norm".lstrip(".") if is_plain else parent,
                "The layers have norms, and behind the last of them there is none.",
                _COPY,
                # others may be built without one
                None if is_plain else Severity.WARNING,
            )


def _is_decoder(view: View) -> bool:
    return any("CausalLM" in name for name in class_names(view.config))


def _ends(view: View) -> Iterator[Problem]:
    """Embeddings and head."""
    kinds = {entry.kind for entry in view.matrices}
    if not view.matrices or view.text.get("vocab_size") is None:
        return
    is_decoder = _is_decoder(view)
    if "embedding" not in kinds and is_decoder and not _has_other_embedding(view):
        yield Problem("", "The file holds no embedding.", _COPY)
    has_head = "head" in kinds or _has_other_head(view)
    if not has_head and is_decoder and not view.is_tied and _says_untied(view):
        yield Problem(
            "lm_head", "The file holds no output head, and embeddings are not tied.", _COPY
        )


def _has_other_head(view: View) -> bool:
    """Whether a matrix outside of the layers has a row for each token, whatever it is called."""
    return _tall(view) > 0


def _has_other_embedding(view: View) -> bool:
    """Whether there is such a matrix beside the head, which may be of another name as well."""
    has_own_head = not view.is_tied and _says_untied(view)
    is_among = has_own_head and not any(entry.kind == "head" for entry in view.matrices)
    return _tall(view) > is_among


def _tall(view: View) -> int:
    rows = view.size("vocab_size")
    return sum(
        entry.rows == rows and entry.kind == "linear" and not _LAYER.match(entry.name)
        for entry in view.matrices
    )


def _says_untied(view: View) -> bool:
    return any("tie_word_embeddings" in holder for holder in (view.text, view.config))


def nothing_is_strange(view: View) -> Iterator[Problem]:
    """S71."""
    for one in view.misfits:
        if one.what == "extra" and one.own not in KNOWN:
            yield Problem(one.entry.name, one.sentence, _REMOVE)
    yield from _loose(view)
    for stack, layers in _stacks(view).items():
        if _MAIN.fullmatch(stack):
            yield from _only_in_one(view, stack, _real(view, stack, layers))


def _loose(view: View) -> Iterator[Problem]:
    """Tensors outside of the layers that no known part of a decoder explains.

    An original may hold such a tensor, so it is an error only for a server that refuses it; and
    architectures that are not known may have some of their own.
    """
    severity = None if view.deployment.server == "vllm" else Severity.WARNING
    severity = severity if _is_plain_type(view) else Severity.NOTE
    for stack in _stacks(view):
        parent = stack.rpartition(".")[0]
        if not _MAIN.fullmatch(stack):
            continue
        holders = {parent}
        if view.text is view.config and _is_decoder(view):  # no towers, no classifier
            holders |= {parent[: match.start()] for match in re.finditer(r"\.|^", parent)}
        for entry in view.entries.values():
            if not holders & {entry.parent, entry.name}:
                continue
            for name in _unexplained(view, entry, is_parent=entry.name in holders):
                said = "Neither the layers nor what stands beside them explains this tensor."
                yield Problem(name, said, _REMOVE, severity)


def _unexplained(view: View, entry: Entry, *, is_parent: bool) -> Iterator[str]:
    for own in entry.own:
        name = f"{entry.name}.{own}" if entry.name else own
        if _TOWERS.search(name) or _QPARAM.fullmatch(own) or _KNOWN_LOOSE.fullmatch(name):
            continue
        if own not in ("weight", "bias"):
            # a parameter by itself; modules other than the plain ones may have any
            strange = is_parent or _is_plain_type(view)
        else:
            is_known = entry.kind in ("embedding", "head") or _is_norm(entry)
            strange = _is_plain_type(view) and not is_known and entry.last not in view.transforms
        if strange:
            yield name


def _only_in_one(view: View, stack: str, layers: dict[int, set[str]]) -> Iterator[Problem]:
    """What one layer has beyond what all others, which are alike, have."""
    kinds = Counter(frozenset(own) for own in layers.values())
    if len(kinds) != 2 or min(kinds.values()) > 1 or len(layers) < 3:
        return
    usual, odd = (kind for kind, _ in kinds.most_common())
    for index, own in layers.items():
        # the first or the last layer of some architectures has what serves all
        may_differ = index in (min(layers), max(layers)) and not _is_plain_type(view)
        if own == odd and usual < odd and not may_differ:
            said = f"It has {joined(sorted(odd - usual))}, which no other layer has."
            yield Problem(f"{stack}.{index}", said, _REMOVE, Severity.WARNING)


def sizes_are_those_of_the_config(view: View) -> Iterator[Problem]:
    """C2."""
    yield from layers_are_counted(view)
    found = list(_wrong_sizes(view))
    yield from found
    yield from _unlike_the_class(view, {problem.module for problem in found})


def _unlike_the_class(view: View, known: set[str]) -> Iterator[Problem]:
    """Shapes that the class of transformers does not take, and numbers that are no floats."""
    built = view.built
    if built is None:
        return
    severity = _of_foreign_code(view)
    for name, (ours, theirs) in built.wrong.items():
        module, _, own = name.rpartition(".")
        if module in known or (_is_coded(view, module) and ours == theirs[::-1]):
            continue  # codes are [out, in] whatever the class has
        yield Problem(
            module,
            f"Its {own} has the shape {list(ours)}, and {built.name} has {list(theirs)} there by "
            "config.json.",
            "Correct config.json, or compress the model anew.",
            severity,
        )
    for name in built.not_floats:
        module, _, own = name.rpartition(".")
        yield Problem(
            module,
            f"Its {own} is stored as {view.headers[name].dtype}, without a scale, and is a float "
            f"in {built.name}.",
            _COPY,
            severity,
        )


def _is_coded(view: View, module: str) -> bool:
    entry = view.entries.get(module)
    return entry is not None and entry.is_quantized


def _wrong_sizes(view: View) -> Iterator[Problem]:
    if not _is_plain_type(view):
        return
    for entry in view.matrices:
        if _TOWERS.search(entry.name):
            continue
        if not entry.is_quantized and "weight" in entry.own:
            columns: int | None = entry.own["weight"].shape[1]
        else:
            scheme = view.written(entry)
            columns = view.columns(entry, scheme) if scheme is not None else None
            if "weight_shape" in entry.own and view.stored_shape(entry) is None:
                columns = None  # words that are not full do not tell, and their content is to come
        yield from _wrong_size(view, entry, columns)


def _is_in_layers(entry: Entry) -> bool:
    match = _LAYER.match(entry.name)
    return match is not None and _MAIN.fullmatch(match["stack"]) is not None


def _wrong_size(view: View, entry: Entry, columns: int | None) -> Iterator[Problem]:
    hidden, vocabulary = view.size("hidden_size"), view.size("vocab_size")
    rows = inner = None
    if entry.kind == "head" or entry.last == "embed_tokens":
        rows, inner = vocabulary, hidden
    elif not _is_in_layers(entry):
        return
    elif entry.last in _HIDDEN_IN:
        inner = hidden
    elif entry.last in _HIDDEN_OUT:
        rows = hidden
    for what, found, wanted in (("rows", entry.rows, rows), ("columns", columns, inner)):
        if wanted is not None and found is not None and found != wanted:
            yield Problem(
                entry.name,
                f"It has {found} {what}, and config.json says {wanted}.",
                "Correct config.json, or compress the model anew.",
            )


RULES = (
    Rule(
        "C2",
        "sizes are those of config.json",
        sizes_are_those_of_the_config,
        server="",
    ),
    Rule("S70", "no module is missing", all_is_there, server=""),
    Rule("S71", "no tensor is unexpected", nothing_is_strange),
)
