# SPDX-License-Identifier: Apache-2.0
"""Structure: ``config.json``, groups and targets, classes, formats (S1 to S20, C3 to C6)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from llmcompressor.verification.expected import is_decodable, is_stored_so, scale_shape
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import EXPERT, PLAIN_FLOATS, Entry, class_names
from llmcompressor.verification.rules.view import (
    CONFIG,
    DEPLOYMENT,
    WRITTEN,
    Problem,
    View,
    joined,
    rule,
)
from llmcompressor.verification.scheme import (
    ACTIVATION_FORMATS,
    FORMATS,
    Group,
    compiled,
    served_class,
)
from llmcompressor.verification.transformers_model import (
    Built,
    build_others,
    is_known_type,
    is_of_another_type,
    refusal,
)

__all__ = [
    "raw_groups",
    "sizes_are_positive",
    "where",
]

_KEYS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
        "observer",
        "observer_kwargs",
    ]
)
_PARTS = ("weights", "input_activations", "output_activations")
_GONE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
_REWRITE = "Write the configuration anew."


def raw_groups(view: View) -> Iterator[tuple[str, Any]]:
    """Name and content of each group, as they stand in the file."""
    groups = view.settings.get("config_groups")
    if isinstance(groups, Mapping):
        yield from ((str(name), raw) for name, raw in groups.items())


def raw_args(view: View) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and content of all arguments of all groups."""
    for name, raw in raw_groups(view):
        for part in _PARTS:
            if isinstance(raw, Mapping) and isinstance(raw.get(part), Mapping):
                yield f"{name}.{part}", raw[part]


@rule("S1", "the configuration is found and names its method")
def where(view: View) -> Iterator[Problem]:
    """Find the ``quantization_config`` and its method."""
    found = view.config.get("quantization_config")
    if found and not isinstance(found, Mapping):
        yield Problem(
            "quantization_config",
            f"It is {found!r}, and no object that says how the model is quantized.",
            "Remove it if the weights are plain; else write it anew.",
        )
        return
    if not view.settings:
        if view.quantized:
            names = joined(entry.name for entry in view.quantized)
            yield Problem(
                "quantization_config",
                f"The configuration does not say that {names} are quantized.",
                "Write the quantization_config into config.json.",
            )
        return
    method = str(view.settings.get("quant_method") or "")
    if not method:
        yield Problem(
            "quantization_config",
            "It has no quant_method, so it is read as not quantized.",
            'Set quant_method to "compressed-tensors".',
        )
    elif not view.is_compressed_tensors:
        yield Problem(
            "quantization_config",
            f"Its quant_method is {method!r}, not 'compressed-tensors'.",
            'Set quant_method to "compressed-tensors".',
        )


@rule("S2", "groups are dicts with targets and weights", needs=CONFIG)
def _groups_have_form(view: View) -> Iterator[Problem]:
    groups = view.settings.get("config_groups")
    if groups is not None and not isinstance(groups, Mapping):
        yield Problem("config_groups", "It is no dict of groups.", _REWRITE)
    for name, raw in raw_groups(view):
        if not isinstance(raw, Mapping):
            yield Problem(
                name,
                "The group is no dict; names of presets are not read by servers.",
                "Write the group's arguments in full.",
            )
            continue
        targets = raw.get("targets")
        if not isinstance(targets, list) or not targets:
            yield Problem(name, "The group has no list of targets.", "Give it targets.")
            continue
        skipped = len(targets) == 1 and str(targets[0]).endswith("Attention")
        if not isinstance(raw.get("weights"), Mapping) and not skipped:
            yield Problem(
                name,
                "The group has no arguments for weights.",
                "Leave the group out, or target one attention class alone.",
            )


@rule("S3", "arguments are those of compressed-tensors", needs=CONFIG)
def _arguments_are_valid(view: View) -> Iterator[Problem]:
    for place, raw in raw_args(view):
        unknown = sorted(set(raw) - _KEYS)
        if unknown:
            yield Problem(
                place,
                f"It has keys that servers refuse: {joined(unknown)}.",
                "Remove them: the pinned compressed-tensors 0.17 forbids unknown keys.",
            )
            continue
        try:
            QuantizationArgs.model_validate(
                {key: value for key, value in raw.items() if key != "actorder"}
            )
        except (ValueError, NotImplementedError, TypeError) as error:
            reason = str(error).strip().splitlines()
            said = reason[2] if len(reason) > 2 else reason[0] if reason else "no reason given"
            yield Problem(place, f"Its arguments are refused: {said.strip()}.", _REWRITE)


@rule("S4", "ignore is a list", needs=CONFIG)
def _ignore_is_a_list(view: View) -> Iterator[Problem]:
    if "ignore" in view.settings and not isinstance(view.settings["ignore"], list):
        yield Problem(
            "ignore",
            f"It is {type(view.settings['ignore']).__name__}, and vLLM iterates over it.",
            "Write a list, which may be empty.",
        )


@rule("S5", "no sparse format", needs=CONFIG)
def _no_sparse_formats(view: View) -> Iterator[Problem]:
    sparsity = view.settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        yield Problem(
            "sparsity_config",
            "It has targets, and servers have removed sparse formats.",
            "Write the pruned weights densely and leave sparsity_config empty.",
        )
    elif isinstance(sparsity, Mapping) and sparsity and "format" not in sparsity:
        yield Problem(
            "sparsity_config", "It is not empty and has no format.", "Write an empty one."
        )
    places = [("quantization_config", view.settings.get("format"))]
    places += [(name, raw.get("format")) for name, raw in raw_groups(view) if _is_map(raw)]
    for place, name in places:
        if name in _GONE:
            yield Problem(
                place, f"Its format {name} is no longer read.", "Write a format that is read."
            )


def _is_map(raw: Any) -> bool:
    return isinstance(raw, Mapping)


@rule("S6", "no stored activation order")
def _no_activation_order(view: View) -> Iterator[Problem]:
    for place, raw in raw_args(view):
        order = raw.get("actorder")
        if order is True or str(order).lower() in ("group", "dynamic"):
            yield Problem(
                place,
                f"Its actorder {order} needs a permuted weight, which servers no longer take.",
                'Quantize with actorder="static".',
            )
    for entry in view.entries.values():
        for own in ("weight_g_idx", "g_idx"):
            if own in entry.own:
                yield Problem(
                    entry.name, f"It has a {own}, an unknown tensor.", "Quantize without it."
                )


@rule("S7", "each group has its format", needs=CONFIG)
def _formats_are_given(view: View) -> Iterator[Problem]:
    overall = view.settings.get("format")
    for name, raw in raw_groups(view):
        if not _is_map(raw) or not _is_map(raw.get("weights")):
            continue
        own = raw.get("format")
        if own == "mixed-precision":
            yield Problem(
                name, "mixed-precision is no format of a group.", "Give the group its own format."
            )
        elif not own and overall == "mixed-precision":
            yield Problem(
                name,
                "The whole is mixed-precision and the group has no format of its own.",
                "Give the group its own format.",
            )
        elif not own and not overall:
            yield Problem(name, "Neither the group nor the whole has a format.", _REWRITE)
        elif (own or overall) not in (*FORMATS, *_GONE, "mixed-precision"):
            yield Problem(name, f"There is no format {own or overall!r}.", _REWRITE)


@rule("S8", "integer weights alone are packed", needs=CONFIG)
def _integers_alone_are_packed(view: View) -> Iterator[Problem]:
    for group in view.groups:
        scheme = group.scheme
        if scheme.weights is None or scheme.inputs is not None or scheme.outputs is not None:
            continue
        if scheme.format in ACTIVATION_FORMATS and scheme.weights.kind == "int":
            only_embedding = all("mbed" in target for target in group.targets)
            yield Problem(
                group.name,
                f"It quantizes weights alone to integers in the format {scheme.format}.",
                "Write pack-quantized.",
                Severity.WARNING if only_embedding else None,
            )


@rule("S9", "a target stands in one group", needs=CONFIG)
def _targets_are_distinct(view: View) -> Iterator[Problem]:
    counts = Counter(target for group in view.groups for target in dict.fromkeys(group.targets))
    for target, count in counts.items():
        if count > 1:
            yield Problem(
                target,
                f"It is a target of {count} groups; the last one silently wins.",
                "Let each target stand in one group.",
            )


@rule("S10", "device and dtype can be served", needs=DEPLOYMENT)
def _device_and_dtype(view: View) -> Iterator[Problem]:
    capability = view.deployment.capability
    if view.settings and capability is not None and capability < 70:
        yield Problem(
            "", f"The device has capability {capability}; 70 is the least.", "Use a newer device."
        )
    if view.settings and view.dtype not in ("float32", "float16", "bfloat16"):
        yield Problem(
            "", f"The model's dtype is {view.dtype}.", "Use float32, float16 or bfloat16."
        )


_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
_REMEDY = "Take it from the config.json of the original model."


@rule("C3", "sizes of config.json are positive", server="", needs=CONFIG)
def sizes_are_positive(view: View) -> Iterator[Problem]:
    """Sizes that are no positive whole numbers."""
    for place, part in _parts(view.config):
        for key in _SIZES:
            reason = _reason(part[key]) if key in part else ""
            if reason:
                yield Problem(f"{place}{key}", reason, _REMEDY)


def _parts(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and those of the models within it, which name a ``model_type`` too."""
    yield place, config
    for key, value in config.items():
        if isinstance(value, Mapping) and ("model_type" in value or key == "text_config"):
            yield from _parts(value, f"{place}{key}.")


def _reason(value: object) -> str:
    """The fault of a size: empty if there is none, or it is given layer by layer."""
    if value is None or isinstance(value, (list, Mapping)):
        return ""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"It is {value!r}, and no whole number."
    if value < 1:
        return f"It is {value}, and a model has one at least."
    return ""


_ORIGINAL = "Take config.json from the original model, and its quantization_config from this one."
_NAME = "Write the class of the original model into architectures."
# Buffers that are calculated anew, what drafts tokens, towers that a class may leave out, and what
# belongs to a scheme.
_LEFT_OUT = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.\w+|inv_freq|position_ids|embed_scale|final_logits_bias"
    r"|masked_bias|attn\.bias)$|.*(?:vision|visual|audio|mtp|draft|eagle|speech).*"
    r"|.*[._](?:packed|scale|scale_inv|zero_point|global_scale|shape|g_idx)$"
)


@rule("C5", "the class of config.json can be built", server="", needs=WRITTEN)
def _class_can_be_built(view: View) -> Iterator[Problem]:
    yield from _named(view)
    if view.built is not None or any(sizes_are_positive(view)):
        return  # C3 says why it cannot
    reason = refusal(view.config)
    if reason:
        yield Problem(
            "config.json", f"transformers cannot build a model of it: {reason}.", _ORIGINAL
        )
    elif is_of_another_type(view.config):
        yield from _of_another_type(view)


def _named(view: View) -> Iterator[Problem]:
    kind, names = view.config.get("model_type"), view.config.get("architectures")
    if not (isinstance(kind, str) and kind) and not view.config.get("auto_map"):
        yield Problem("model_type", f"It is {kind!r}, and readers find a model by it.", _ORIGINAL)
    elif not is_known_type(view.config) and view.deployment.concerns("transformers"):
        yield Problem(
            "model_type",
            f"transformers has no model type {kind!r}.",
            "Check that it is spelt right, or load the model with a release that has it.",
            None if view.deployment.server == "transformers" else Severity.WARNING,
        )
    if names is not None and names != class_names(view.config):
        yield Problem("architectures", f"It is {names!r}, and no list of classes.", _NAME)
    elif not names and view.deployment.concerns("vllm"):
        is_asked = view.deployment.server == "vllm"
        yield Problem(
            "architectures",
            "There are none, and vLLM finds the class of a model by them.",
            _NAME,
            None if is_asked else Severity.WARNING,
        )


def _of_another_type(view: View) -> Iterator[Problem]:
    name, kind = next(iter(class_names(view.config)), ""), view.config.get("model_type")
    said = f"Its class {name} is not one of the model type {kind}"
    misfits = [
        one for one in build_others(view.config, view.plain or {}) if one is None or not one.fits
    ]
    if not misfits:
        yield Problem("config.json", f"{said}.", _NAME, Severity.WARNING)
        return
    for one in misfits:
        if one is None:
            why = f"{name} cannot be built of it"
        else:
            why = f"{one.name} does not find {joined([*one.missing, *one.wrong])} in the file"
        yield Problem("config.json", f"{said}, and {why}.", _NAME)


@rule("C6", "the class takes what is stored", server="", needs=WRITTEN)
def _nothing_is_left_out(view: View) -> Iterator[Problem]:
    built = view.built
    if built is None:
        return
    of_modules: dict[str, list[str]] = defaultdict(list)
    for name in built.unexpected:
        is_of_transform = any(part in view.transforms for part in name.split("."))
        if not (_LEFT_OUT.match(name) or view.is_draft(name) or is_of_transform):
            module, _, own = name.rpartition(".")
            of_modules[module].append(own)
    for module, names in of_modules.items():
        severity = _severity(view, built, module, names)
        if severity is not None:
            yield Problem(
                module,
                f"Its {joined(names)} is left out: {built.name} has none by config.json.",
                "Correct config.json, or remove the tensor if it is meant to be unused.",
                severity,
            )


def _severity(view: View, built: Built, module: str, names: list[str]) -> Severity | None:
    """An error is what computes another model: a bias that is not zero, of a module that is there.

    What other modules hold, the original may hold in vain too.
    """
    if names != ["bias"] or f"{module}.weight" not in built.shapes:
        return None if built.missing else Severity.WARNING
    name = f"{module}.bias"
    if view.tensors is None or name not in view.headers or view.config.get("auto_map"):
        return Severity.WARNING
    return Severity.ERROR if bool(view.tensors(name).float().any()) else Severity.NOTE


_CLASSES = (
    "QKVParallelLinear",
    "MergedColumnParallelLinear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
    "GateLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
)
_STACK = re.compile(
    r"(?P<experts>(?:.*\.)?experts)\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?$"
)
_WRITE_NAMES = "Write exact names of modules, or patterns that begin with re:.*"


def _is_class(text: str) -> bool:
    """True if a text looks like the name of a class rather than of a module.

    >>> _is_class("Linear"), _is_class("lm_head"), _is_class("model.layers.0"), _is_class("re:A")
    (True, False, False, False)
    """
    return text[:1].isupper() and "." not in text


@rule(
    "S11", "class targets are parts of vLLM's class names", needs=CONFIG, severity=Severity.WARNING
)
def _classes_are_known(view: View) -> Iterator[Problem]:
    for group in view.groups:
        for target in group.targets:
            if not _is_class(target) or target.endswith("Attention"):
                continue
            if not any(target.lower() in name.lower() for name in _CLASSES):
                yield Problem(
                    target,
                    "No class of vLLM has this name within its own, so it selects nothing there.",
                    _WRITE_NAMES,
                    Severity.WARNING,
                )


@rule("S12", "patterns match at the start, names and classes")
def _patterns_reach_what_they_say(view: View) -> Iterator[Problem]:
    for text, is_target in _texts(view):
        if not text.startswith("re:"):
            continue
        expression = compiled(text)
        if expression is None:
            yield Problem(text, "It is no regular expression.", "Correct it.")
        elif is_target and _matches_classes_only(view, expression):
            yield Problem(
                text,
                "It matches names of vLLM's classes, so it selects modules that it does not name.",
                "Begin it so that it matches no class, such as re:.*layers.",
                Severity.WARNING,
            )


def _matches_classes_only(view: View, expression: re.Pattern[str]) -> bool:
    """True if a pattern gets a module by class that it does not match by name."""
    return any(
        expression.match(served_class(entry.kind, view.resolver.unit(entry.name)[0]))
        and not expression.match(entry.name)
        and not expression.match(view.resolver.served(entry.name))
        and not view.choice(entry).ignored
        for entry in view.matrices
    )


def _texts(view: View) -> Iterator[tuple[str, bool]]:
    for group in view.groups:
        yield from ((target, True) for target in group.targets)
    yield from ((text, False) for text in view.ignore)


@rule("S13", "both orders of precedence choose one scheme")
def _orders_agree(view: View) -> Iterator[Problem]:
    for entry in view.matrices:
        if view.is_plain(entry) or entry.is_expert:
            continue  # experts have rules of their own: S62, T6
        served, written = view.choice(entry), view.choice(entry, "transformers")
        if served.group is None or written.group is None:
            continue
        alone = view.resolver.alone(entry).group
        by_joining = alone is not None and alone.scheme == written.group.scheme  # S14 says so
        if served.group.scheme != written.group.scheme and not by_joining:
            yield Problem(
                entry.name,
                f"vLLM takes {served.group.name} and compressed-tensors {written.group.name}, "
                "which differ.",
                "Let each module match the targets of one group.",
            )


@rule("S14", "shards of a joined module have one scheme")
def _shards_agree(view: View) -> Iterator[Problem]:
    for path, shards in view.joined.items():
        groups = {shard.name: view.resolver.alone(shard).group for shard in shards}
        choices = [view.choice(shard) for shard in shards]
        served = view.resolver.served(path)
        is_named = any(served in group.targets for group in view.groups)
        if is_named or any(one.ignored or one.mixed for one in choices):
            continue
        if len({_scheme(group) for group in groups.values()}) > 1:
            said = ", ".join(
                f"{name.rpartition('.')[2]}: {group.name if group else 'none'}"
                for name, group in groups.items()
            )
            yield Problem(
                path,
                f"Its shards have different schemes ({said}); the first one's is used for all.",
                "Quantize all of them alike.",
            )


def _scheme(group: Group | None) -> object:
    return group.scheme if group is not None else None


@rule("S15", "a joined module's name occurs once in its path", severity=Severity.WARNING)
def _keys_occur_once(view: View) -> Iterator[Problem]:
    for path in view.joined:
        key = path.rpartition(".")[2]
        if path.count(key) > 1:
            yield Problem(
                path,
                f"{key} occurs more than once in the path, and vLLM replaces every occurrence.",
                "Target it by the class of its modules.",
                Severity.WARNING,
            )


@rule("S16", "ignore holds names, and all shards or none")
def _ignore_is_understood(view: View) -> Iterator[Problem]:
    for path, shards in view.joined.items():
        if view.choice(shards[0]).mixed:
            flags = {shard.last: view.resolver.alone(shard).ignored for shard in shards}
            said = ", ".join(name for name, flag in flags.items() if flag)
            yield Problem(
                path,
                f"Of its shards only {said} is ignored, and vLLM refuses a mixture.",
                "Ignore all of its shards or none.",
            )
    names = set(view.entries)
    parents = {parent for name in names for parent in _parents(name)}
    for text in view.ignore:
        if _is_class(text):
            yield Problem(
                text,
                "It is a class in ignore; vLLM compares names only.",
                "List the modules by name.",
                Severity.WARNING,
            )
        elif text in parents - names and "." in text and not _all_ignored(view, text):
            yield Problem(
                text,
                "It is a parent of modules; nothing below it is ignored.",
                f"Write re:{re.escape(text)}.* instead.",
                Severity.WARNING,
            )


def _all_ignored(view: View, parent: str) -> bool:
    """True if other entries ignore every matrix below, as where a router and its matrix are."""
    below = [entry for name, entry in view.entries.items() if name.startswith(f"{parent}.")]
    return all(view.resolver.alone(one).ignored for one in below if one.kind != "other")


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts)))


def patterns_survive_renaming(view: View) -> Iterator[Problem]:
    """S18 and S18a: patterns are compared with vLLM's own paths."""
    renamed = {
        entry.name: view.resolver.served(entry.name)
        for entry in view.matrices
        if view.resolver.served(entry.name) != entry.name
    }
    if not renamed:
        return
    for text, is_target in _texts(view):
        expression = compiled(text)
        if expression is None:
            continue
        missed = [
            name
            for name, served in renamed.items()
            if expression.match(name) and not expression.match(served)
        ]
        missed = [name for name in missed if _matters(view, view.entries[name], is_target)]
        if missed:
            yield Problem(
                text,
                f"It matches {joined(missed, 1)} in the checkpoint, but not "
                f"{renamed[missed[0]]}, as vLLM calls it.",
                _WRITE_NAMES,
            )


def _matters(view: View, entry: Entry, is_target: bool) -> bool:
    """True if vLLM then does otherwise than the checkpoint's author meant."""
    choice = view.choice(entry)
    if is_target:
        return entry.is_quantized and choice.group is None
    return not entry.is_quantized and choice.group is not None and not view.is_plain(entry)


@rule("S18", "patterns match vLLM's paths")
def _renaming(view: View) -> Iterator[Problem]:
    """The prefixes of multimodal models."""
    if not view.family.lookup:
        yield from patterns_survive_renaming(view)


@rule("S18a", "patterns match the paths of lookup")
def _lookup_paths(view: View) -> Iterator[Problem]:
    """Families that look up under other paths."""
    if view.family.lookup:
        yield from patterns_survive_renaming(view)


@rule("S19", "selected modules are quantized, no others")
def _selection_is_complete(view: View) -> Iterator[Problem]:
    if not view.settings:
        return  # S1 says so for all of them
    yield from _plain_stacks(view)
    for entry in view.matrices:
        if view.is_plain(entry) or (entry.kind == "head" and view.is_tied):
            continue
        choice = view.choice(entry)
        if choice.mixed:
            continue
        scheme = choice.group.scheme if choice.group is not None else None
        wants = scheme is not None and scheme.weights is not None and scheme.format != "dense"
        if wants and not entry.is_quantized:
            # S58 speaks of gates, and S62 of experts of which some are quantized
            if entry.kind != "gate" and not _is_beside_codes(view, entry):
                yield _left_dense(entry, str(scheme))
        elif entry.is_quantized and not wants:
            yield _left_out(view, entry, choice.ignored)
        elif scheme is not None and entry.is_quantized and not is_stored_so(entry, scheme):
            yield Problem(
                entry.name,
                f"Its codes are stored {'packed' if entry.form == 'packed' else 'one by one'}, and "
                f"the format {scheme.format} has them otherwise.",
                "Write the format in which it is stored.",
            )


def _plain_stacks(view: View) -> Iterator[Problem]:
    """Mixtures whose experts are plain, in one tensor, and have a scheme in vLLM."""
    named = (
        _STACK.match(name)
        for name, info in view.headers.items()
        if len(info.shape) == 3 and info.dtype in PLAIN_FLOATS
    )
    for path in dict.fromkeys(found["experts"] for found in named if found is not None):
        first = Entry(f"{path}.0.gate_proj", {}, "linear", "dense")
        choice = view.choice(first)
        scheme = choice.group.scheme if choice.group is not None else None
        wants = scheme is not None and scheme.weights is not None and scheme.format != "dense"
        if wants and not view.is_draft(path) and not view.is_plain(first):
            yield Problem(
                path,
                f"The configuration quantizes its experts to {scheme}, and the file holds plain "
                "ones, in stacks.",
                "Ignore them by a pattern such as re:.*experts.*, or quantize them.",
            )


def _is_beside_codes(view: View, entry: Entry) -> bool:
    found = EXPERT.match(entry.name)
    experts = view.mixtures.get(found["experts"], {}) if found is not None else {}
    return any(each.is_quantized for own in experts.values() for each in own.values())


def _left_dense(entry: Entry, scheme: str) -> Problem:
    return Problem(
        entry.name,
        f"The configuration quantizes it to {scheme}, and the file holds a plain weight.",
        "Add it to ignore, or quantize it.",
    )


def _left_out(view: View, entry: Entry, ignored: bool) -> Problem:
    why = "ignores it" if ignored else "has no target for it"
    silent = entry.form == "coded" and view.family.drops_scales
    return Problem(
        entry.name,
        f"It is quantized, and the configuration {why}"
        + (" (served as if its codes were weights)." if silent else "."),
        "Take it off ignore, or give it a target." if ignored else "Give it a target.",
    )


@rule("S20", "what vLLM builds plain is plain")
def _plain_modules_are_plain(view: View) -> Iterator[Problem]:
    for entry in view.quantized:
        if entry.kind not in ("gate", "head") and view.is_plain(entry):
            yield Problem(
                entry.name,
                "vLLM builds this module unquantized in every case.",
                "Ignore it when quantizing.",
            )


_SCHEME = "Write the scheme that it was compressed with into config.json."


@rule("C4", "schemes are those that their formats hold", server="", needs=CONFIG)
def _schemes_fit_their_formats(view: View) -> Iterator[Problem]:
    for group in view.groups:
        weights, form = group.scheme.weights, group.scheme.format
        if weights is None or form not in FORMATS or form == "dense":
            continue  # S2 and S7 speak of those
        # compressed-tensors stores integers of more than 8 bits unpacked
        is_unpacked = form in ("int-quantized", "naive-quantized")
        is_wide = is_unpacked and weights.kind == "int" and weights.bits in range(9, 33)
        if not scale_shape(weights, 1, 1):
            yield Problem(
                group.name, f"Nothing says what shares a scale: its weights are {weights}.", _SCHEME
            )
        elif not (is_decodable(group.scheme) or is_wide):
            yield Problem(
                group.name, f"The format {form} holds no weights that are {weights}.", _SCHEME
            )
    yield from _overall(view)


def _overall(view: View) -> Iterator[Problem]:
    """The format of the whole, which readers may take for that of a group."""
    overall = view.settings.get("format")
    own = {group.scheme.format for group in view.groups if group.scheme.weights is not None}
    if overall in FORMATS and overall != "dense" and own and overall not in own:
        yield Problem(
            "quantization_config",
            f"Its format is {overall}, and that of its groups {joined(sorted(map(str, own)))}.",
            "Write the format of the groups, or mixed-precision where they differ.",
            Severity.WARNING,
        )


@rule("C1", "codes are matrices", server="")
def _codes_are_matrices(view: View) -> Iterator[Problem]:
    for entry in view.quantized:
        for own in ("weight_packed", "weight"):
            info = entry.own.get(own)
            if info is None or (len(info.shape) == 3 and "experts" in entry.name):
                continue  # S69 speaks of stacks
            if len(info.shape) != 2:
                yield Problem(
                    entry.name,
                    f"Its {own} has the shape {list(info.shape)}, and codes have rows and columns.",
                    "Compress the model anew.",
                )
