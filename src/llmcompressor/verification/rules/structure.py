# SPDX-License-Identifier: Apache-2.0
"""Structure: ``config.json``, the tensors of each module, and the class that takes them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from llmcompressor.runtime.limits import SIMPLER
from llmcompressor.verification.expected import is_decodable, scale_shape
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.modules import Entry, class_names, part_rows
from llmcompressor.verification.rules.view import Problem, View, joined
from llmcompressor.verification.scheme import (
    ACTIVATION_FORMATS,
    FORMATS,
    NAME_METHOD,
    OURS,
    compiled,
)
from llmcompressor.verification.transformers_model import (
    Built,
    is_known_type,
    readings_of_both,
    refusal,
    unread_method,
)

_ARGUMENTS = (
    "num_bits type symmetric group_size strategy block_structure dynamic actorder scale_dtype "
    "zp_dtype observer observer_kwargs"
)
CONVERTED = frozenset({"bitnet", "fp8", "gptq", "modelopt", "mxfp4"})
"""Methods of others that llama.cpp's converter takes."""
_PARTS = ("weights", "input_activations", "output_activations")
_GONE = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
_REWRITE = "Write the configuration anew."
_FORMAT = "Give the group its own format."
_SCHEME = "Write the scheme that it was compressed with into config.json."
_COMPRESS = "Compress the model anew."
_COPY = "Copy them from the original model."
WARNING = Severity.WARNING


def _groups(view: View) -> Iterator[tuple[str, Any]]:
    """Name and content of each group, as they stand in the file."""
    groups = view.settings.get("config_groups")
    if isinstance(groups, Mapping):
        yield from ((str(name), raw) for name, raw in groups.items())


def _head(view: View) -> Iterator[Problem]:
    """S1, S4, S5, T2: what stands beside the groups."""
    found, place = view.config.get("quantization_config"), "quantization_config"
    if found and not isinstance(found, Mapping):
        said = f"It is {found!r}, and no object that says how the model is quantized."
        yield Problem("S1", place, said, "Remove it if the weights are plain; else write it anew.")
    elif not view.settings and view.quantized:
        names = joined(entry.name for entry in view.quantized)
        said = f"The configuration does not say that {names} are quantized."
        yield Problem("S1", place, said, "Write the quantization_config into config.json.")
    elif view.settings and not view.named:
        said = "It names no quant_method: vLLM takes the model for a plain one, others refuse it."
        yield Problem("S1", place, said, NAME_METHOD)
    elif view.settings and view.named.lower().replace("_", "-") != OURS:
        said = f"Its quant_method is {view.named!r}, and what it says is compressed-tensors'."
        yield Problem("S1", place, said, NAME_METHOD)
    ignore, sparsity = view.settings.get("ignore", []), view.settings.get("sparsity_config")
    if not isinstance(ignore, list):
        said = f"It is {type(ignore).__name__}, and vLLM iterates over it."
        yield Problem("S4", "ignore", said, "Write a list, which may be empty.")
    if isinstance(sparsity, Mapping) and sparsity.get("targets"):
        said = "It has targets, and servers have removed sparse formats."
        remedy = "Write the pruned weights densely and leave sparsity_config empty."
        yield Problem("S5", "sparsity_config", said, remedy)
    elif isinstance(sparsity, Mapping) and sparsity and "format" not in sparsity:
        said = "It is not empty and has no format."
        yield Problem("S5", "sparsity_config", said, "Write an empty one.")
    status = view.settings.get("quantization_status")
    if view.settings and view.quantized and status != "compressed":
        said = (
            f"Its quantization_status is {status!r}, so packed weights are not looked for and "
            "weights are random."
        )
        yield Problem("T2", place, said, 'Set quantization_status to "compressed".')


def _foreign(view: View) -> Iterator[Problem]:
    """S1, T1: a checkpoint of another method, of which these rules do not speak."""
    place = "quantization_config" if view.settings else "config.json"
    said = (
        f"It is quantized by {view.method}, and the rules are those of compressed-tensors: its "
        "files were looked at, and whether its plain floats are finite; no codes were."
    )
    remedy = "Ask the tools of that method about the rest, and leave its configuration as it is."
    yield Problem("S1", place, said, remedy, Severity.NOTE)
    if view.named not in CONVERTED:
        said = f"convert_hf_to_gguf refuses the method {view.named or view.method!r}."
        yield Problem("Q1", place, said, "Convert the original.")
    if said := unread_method(view.settings):
        severity = None if view.deployment.server == "transformers" else WARNING
        remedy = "Read it with what it was made for."
        yield Problem("T1", place, said, remedy, severity)


# Models that mlx-lm's classes of the same name read without rope_parameters → their base there.
_BASES = {**dict.fromkeys(("llama", "mistral", "phi3", "smollm3"), 10_000.0), "qwen2": 1_000_000.0}


def _positions(view: View) -> Iterator[Problem]:
    """C7."""
    found, usual = view.text.get("rope_parameters"), _BASES.get(str(view.text.get("model_type")))
    if not isinstance(found, Mapping) or usual is None or view.deployment.server is not None:
        return
    base, kind = found.get("rope_theta"), found.get("rope_type", "default")
    if view.text.get("rope_theta") is None and (base not in (None, usual) or kind != "default"):
        said = (
            f"The base {base} and the scaling ({kind}) stand in rope_parameters alone: mlx-lm "
            f"computes with the base {usual:g} and none, silently, and mistralrs refuses it."
        )
        remedy = "For those two write rope_theta and rope_scaling beside it, with the same values."
        yield Problem("C7", "rope_parameters", said, remedy)


def _raw_groups(view: View) -> Iterator[Problem]:
    """S2, S3, S5, S6, S7: groups as they stand in the file."""
    groups, overall = view.settings.get("config_groups"), view.settings.get("format")
    if groups is not None and not isinstance(groups, Mapping):
        yield Problem("S2", "config_groups", "It is no dict of groups.", _REWRITE)
    if overall in _GONE:
        said = f"Its format {overall} is no longer read."
        yield Problem("S5", "quantization_config", said, "Write a format that is read.")
    for name, raw in _groups(view):
        if not isinstance(raw, Mapping):
            said = "The group is no dict; names of presets are not read by servers."
            remedy = "Write the group's arguments in full."
            yield from (Problem(rule, name, said, remedy) for rule in ("S2", "G5"))
            continue
        targets = raw.get("targets")
        if not isinstance(targets, list) or not targets:
            yield Problem("S2", name, "The group has no list of targets.", "Give it targets.")
        elif isinstance(raw.get("weights"), Mapping):
            yield from _format(name, raw.get("format"), overall)
        elif len(targets) > 1 or not str(targets[0]).endswith("Attention"):
            said = "The group has no arguments for weights."
            remedy = "Leave the group out, or target one attention class alone."
            yield Problem("S2", name, said, remedy)
        for part in _PARTS:
            if isinstance(raw.get(part), Mapping):
                yield from _arguments(f"{name}.{part}", raw[part])


def _format(name: str, own: Any, overall: Any) -> Iterator[Problem]:
    if own in _GONE:
        said = f"Its format {own} is no longer read."
        yield Problem("S5", name, said, "Write a format that is read.")
    elif own == "mixed-precision" or (not own and overall == "mixed-precision"):
        yield Problem("S7", name, "mixed-precision is no format of a group.", _FORMAT)
    elif not own and not overall:
        yield Problem("S7", name, "Neither the group nor the whole has a format.", _REWRITE)
    elif (own or overall) not in (*FORMATS, *_GONE):
        yield Problem("S7", name, f"There is no format {own or overall!r}.", _REWRITE)


def _arguments(place: str, raw: Mapping[str, Any]) -> Iterator[Problem]:
    order = raw.get("actorder")
    if order is True or str(order).lower() in ("group", "dynamic"):
        said = f"Its actorder {order} needs a permuted weight, which servers no longer take."
        yield Problem("S6", place, said, 'Quantize with actorder="static".')
    if unknown := sorted(set(raw) - set(_ARGUMENTS.split())):
        said = f"It has keys that servers refuse: {joined(unknown)}."
        remedy = "Remove them: the pinned compressed-tensors 0.17 forbids unknown keys."
        yield Problem("S3", place, said, remedy)
        return
    try:
        QuantizationArgs.model_validate({key: raw[key] for key in raw if key != "actorder"})
    except (ValueError, NotImplementedError, TypeError) as error:
        lines = [*str(error).strip().splitlines(), "no reason given"]
        reason = lines[2 if len(lines) > 3 else 0].strip()
        yield Problem("S3", place, f"Its arguments are refused: {reason}.", _REWRITE)


def _patterns(view: View) -> Iterator[Problem]:
    """S9, S12: what groups are found by."""
    counts = Counter(target for group in view.groups for target in dict.fromkeys(group.targets))
    for text, said in view.endless.items():
        yield Problem("S12", text, said, SIMPLER)
    for text in (*counts, *view.ignore):
        if text.startswith("re:") and compiled(text) is None:
            yield Problem("S12", text, "It is no regular expression.", "Correct it.")
        if counts[text] > 1:
            said = f"It is a target of {counts[text]} groups; the last one silently wins."
            yield Problem("S9", text, said, "Let each target stand in one group.")


def _schemes(view: View) -> Iterator[Problem]:
    """C4, S8: groups as they are understood."""
    for group in view.groups:
        scheme, weights, form = group.scheme, group.scheme.weights, group.scheme.format
        if weights is None or form not in FORMATS or form == "dense":
            continue  # S2 and S7 speak of those
        is_alone = scheme.inputs is None and scheme.outputs is None
        if is_alone and form in ACTIVATION_FORMATS and weights.kind == "int":
            said = f"It quantizes weights alone to integers in the format {form}."
            only_embedding = all("mbed" in target for target in group.targets)
            severity = WARNING if only_embedding else None
            yield Problem("S8", group.name, said, "Write pack-quantized.", severity)
        # compressed-tensors stores integers of more than 8 bits unpacked
        is_unpacked = form in ("int-quantized", "naive-quantized") and weights.kind == "int"
        if not scale_shape(weights, 1, 1):
            said = f"Nothing says what shares a scale: its weights are {weights}."
            yield Problem("C4", group.name, said, _SCHEME)
        elif not (is_decodable(scheme) or (is_unpacked and 8 < weights.bits <= 32)):
            said = f"The format {form} holds no weights that are {weights}."
            yield Problem("C4", group.name, said, _SCHEME)
    overall = view.settings.get("format")
    own = {group.scheme.format for group in view.groups if group.scheme.weights is not None}
    if overall in FORMATS and overall != "dense" and own and overall not in own:
        said = f"Its format is {overall}, and that of its groups {joined(sorted(map(str, own)))}."
        remedy = "Write the format of the groups, or mixed-precision where they differ."
        yield Problem("C4", "quantization_config", said, remedy, WARNING)


# --------------------
# What is joined.


def _orders(view: View) -> Iterator[Problem]:
    """S13: vLLM and compressed-tensors choose one scheme."""
    for facts, entries in view.facts.items():
        served = facts.group
        if facts.plain or facts.expert or served is None:
            continue
        for entry in entries:
            written, alone = (view.choice(entry, one).group for one in ("transformers", "alone"))
            if written is None or served.scheme == written.scheme:
                continue
            if alone is None or alone.scheme != written.scheme:  # else S14 says so
                said = f"vLLM takes {served.name} and compressed-tensors {written.name}, which "
                remedy = "Let each module match the targets of one group."
                yield Problem("S13", entry.name, f"{said}differ.", remedy)


def _shards(view: View) -> Iterator[Problem]:
    """S14, S16, S36: what vLLM makes one matrix of has one scheme."""
    targets = {target for group in view.groups for target in group.targets}
    for path, shards in view.joined.items():
        alone = {shard.last: view.choice(shard, "alone") for shard in shards}
        choices = [view.choice(shard) for shard in shards]
        schemes = {one.group.scheme if one.group else None for one in alone.values()}
        if any(one.mixed for one in choices):
            ignored = ", ".join(name for name, one in alone.items() if one.ignored)
            said = f"Of its shards only {ignored} is ignored, and vLLM refuses a mixture."
            yield Problem("S16", path, said, "Ignore all of its shards or none.")
        elif any(one.ignored for one in choices) or view.resolver.served(path) in targets:
            continue
        elif len(schemes) > 1:
            names = ", ".join(
                f"{name}: {one.group.name if one.group else 'none'}" for name, one in alone.items()
            )
            said = f"Its shards have different schemes ({names}); the first one's is used for all."
            yield Problem("S14", path, said, "Quantize all of them alike.")
    for entry, scheme in view.coded:
        block = scheme.weights.block if scheme.weights is not None else None
        parts = part_rows(entry, view.config, view.family) if block is not None else ()
        torn = [rows for rows in parts[:-1] if block is not None and rows % max(block[0], 1)]
        if torn and block is not None:
            said = (
                f"vLLM cuts it into parts of {', '.join(map(str, parts))} rows, and {torn[0]} are "
                f"no whole number of blocks of {block[0]}."
            )
            remedy = "Choose blocks that divide the rows of each part, or ignore it."
            yield Problem("S36", entry.name, said, remedy)


def _reordered(view: View) -> Iterator[Problem]:
    """S36: tensors of modules whose rows vLLM reorders."""
    for entry in view.quantized:
        order, rows = view.reordering(entry), entry.rows or 0
        if order is None:
            continue
        parts = order.parts(view.text)
        torn = [
            f"{own} {list(info.shape)}"
            for own, info in entry.own.items()
            if own != "bias" and order.is_torn(own, info.shape, rows, parts)
        ]
        if torn:
            said = f"vLLM reorders its {rows} rows as it loads them, and {joined(torn)} cannot "
            remedy = "Ignore it, or take 8 bits with a scale for each row (FP8_DYNAMIC, W8A8)."
            yield Problem("S36", entry.name, f"{said}follow.", remedy)


_CLOSE = 1e-5


def _shared_values(view: View) -> Iterator[Problem]:
    """S30, S32, S67: what is joined shares its global scales and static integer inputs."""
    if view.tensors is None:
        return
    for path, shards in view.joined.items():
        for own in ("weight_global_scale", "input_global_scale"):
            yield from _differ(view, "S30", path, shards, own, "the largest is used for all")
        args = [scheme.inputs for shard in shards if (scheme := view.scheme(shard))]
        for own in ("input_scale", "input_zero_point"):  # of floats the largest is taken: sound
            if any(each is not None and each.kind == "int" for each in args):
                yield from _differ(view, "S32", path, shards, own, "the last is used for all")
    for path, experts in view.mixtures.items():
        for index, every in experts.items():
            for names in (("gate_proj", "up_proj"), ("w1", "w3")):
                pair = [every[name] for name in names if name in every]
                for own in ("weight_global_scale", "input_global_scale", "input_scale"):
                    why = "gate's is used for both"
                    yield from _differ(view, "S67", f"{path}.{index}", pair, own, why)


def _differ(
    view: View, rule: str, path: str, modules: Sequence[Entry], own: str, why: str
) -> Iterator[Problem]:
    values = {}
    for entry in modules:
        value = _read(view, entry, own)
        if value is not None and value.numel() == 1:
            values[entry.last] = float(value)
    close = _CLOSE if rule == "S67" else 0.0  # vLLM compares those of experts so
    if values and not max(values.values()) - min(values.values()) <= close:
        said = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        said = f"Its parts have different {own} ({said}); {why}."
        yield Problem(rule, path, said, "Let them share one: they have the same input.")


def _read(view: View, entry: Entry, own: str) -> Tensor | None:
    if view.tensors is None or own not in entry.own:
        return None
    return view.tensors(f"{entry.name}.{own}").to(torch.float32).reshape(-1)


def _small_values(view: View) -> Iterator[Problem]:
    """S28, S29, S33: what small tensors say by themselves."""
    for entry, scheme in view.coded if view.tensors is not None else ():
        stored, packed = view.stored_shape(entry), entry.own.get("weight_packed")
        if stored is not None and packed is not None and scheme.weights is not None:
            widths = ceil(stored[1] * scheme.weights.bits / 32)
            if packed.shape != (stored[0], widths) and len(packed.shape) == 2:
                said = f"Its weight_shape says {list(stored)}, its codes have {list(packed.shape)} "
                yield Problem("S28", entry.name, f"{said}words.", _COMPRESS)
        divisor = _read(view, entry, "weight_global_scale")
        if divisor is not None and divisor.numel() and 0 < float(divisor.min()) < 1:
            said = (
                f"Its weight_global_scale is {float(divisor.min()):.3g}: it seems to be stored as "
                "a factor, and servers divide by it."
            )
            yield Problem("S29", entry.name, said, "Store 448 * 6 / amax.")
        if view.dtype == "float16" and scheme.format == "pack-quantized":
            scale = _read(view, entry, "weight_scale")
            cast = torch.zeros(0) if scale is None else scale.to(torch.float16).float()
            if scale is not None and bool(
                ((cast.isinf() & scale.isfinite()) | ((cast == 0) & (scale != 0))).any()
            ):
                said = (
                    f"Its scales, {float(scale.min()):.3g} to {float(scale.max()):.3g}, do not fit "
                )
                yield Problem("S33", entry.name, f"{said}float16.", "Serve it in bfloat16.")


# --------------------
# The tensors of each module.

KNOWN = frozenset(
    f"{base}{suffix}"
    for base in ("weight", "input", "output")
    for suffix in (
        *("_scale", "_zero_point", "_global_scale", "_shape", "_g_idx", "_scale_inv", "_packed"),
    )
)
"""Own names of tensors beside a weight, of this format and of others."""
_OF_MISFITS = {"missing": "S70", "dtype": "S38", "shape": "C1", "extra": "S23"}
_REMOVE = "Remove the tensor."
_REMEDIES = {
    "S38": "Store it in that dtype: servers convert by value.",
    "S23": _REMOVE,
}


def _tensors(view: View) -> Iterator[Problem]:
    """C1, S23, S38, S70: the tensors of quantized modules are those of their schemes."""
    for one in view.misfits:
        rule = _OF_MISFITS[one.what]
        yield Problem(rule, one.entry.name, one.sentence, _REMEDIES.get(rule, _COMPRESS))
    for entry in view.quantized:
        info = entry.own.get("weight_packed") or entry.own["weight"]
        if len(info.shape) != 2 and "experts" not in entry.name:
            said = f"Its codes have the shape {list(info.shape)}, and codes have rows and columns."
            yield Problem("C1", entry.name, said, _COMPRESS)
    for entry, scheme in view.coded:
        inputs = scheme.inputs
        is_unread = inputs is not None and inputs.kind == "float" and not inputs.symmetric
        if is_unread and "input_zero_point" in entry.own:  # vLLM leaves such inputs alone (S22)
            said = "It has an input_zero_point, and there is no place for one beside 8-bit floats."
            yield Problem("S23", entry.name, said, "Quantize inputs symmetrically, or dynamically.")
    yield from _strays(view)


def _strays(view: View) -> Iterator[Problem]:
    """S23, for modules that hold no codes."""
    uncompressed = []
    for entry in view.entries.values():
        found = set() if entry.is_quantized else KNOWN & set(entry.own)
        kept = view.kept_scales(entry) & found
        if kept:
            uncompressed.append(entry.name)
        for own in sorted(found - kept):
            if not (own.endswith("put_scale") and entry.form == "none"):
                yield Problem("S23", entry.name, f"It has a {own} and no codes.", _REMOVE)
    for rule in ("S23", "G2") if uncompressed else ():
        yield Problem(
            rule,
            "quantization_config",
            f"It is not compressed: {len(uncompressed)} modules ({joined(uncompressed, 1)}) are "
            "stored dense beside their scales, for transformers alone: servers do not read that.",
            "To serve it, write it with save_compressed=True and without format: dense, or take "
            "the compressed model that it was loaded from.",
        )


# --------------------
# The class of transformers.

_LAYER = re.compile(r"(?P<stack>(?:.*\.)?(?:layers|h|blocks|block))\.(?P<index>\d+)\.(?P<rest>.+)$")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
_TOWERS = re.compile(r"vision|visual|audio|mtp|draft|eagle|speech|encoder")
_ORIGINAL = "Take config.json from the original model, and its quantization_config from this one."
_NAME = "Write the class of the original model into architectures."
_RIGHT = "Correct config.json, or compress the model anew."
# Buffers that are calculated anew, what drafts tokens, towers that a class may leave out, and what
# belongs to a scheme.
_LEFT_OUT = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.\w+|inv_freq|position_ids|embed_scale|final_logits_bias"
    r"|masked_bias|attn\.bias)$|.*(?:vision|visual|audio|mtp|draft|eagle|speech).*"
    r"|.*[._](?:packed|scale|scale_inv|zero_point|global_scale|shape|g_idx)$"
)


def _class(view: View) -> Iterator[Problem]:
    """C2, C5, C6, S70: what the class of config.json makes of plain weights in place of codes."""
    is_planned = view.tensors is None  # what it is made from was built
    if not is_planned:
        yield from _named(view)
    built = view.built
    if built is not None:
        yield from _of_class(view, built)
        return
    if not is_planned and (reason := refusal(view.config)):
        said = f"transformers cannot build a model of it: {reason}."
        yield Problem("C5", "config.json", said, _ORIGINAL)
    readings = list(readings_of_both(view.config, view.plain or {}))
    wrong = [said for said in readings if said]
    if readings:
        name, kind = next(iter(class_names(view.config)), ""), view.config.get("model_type")
        said = f"Its class {name} is not one of the model type {kind}"
        severity = None if wrong else WARNING
        yield Problem("C5", "config.json", f"{'; '.join([said, *wrong])}.", _NAME, severity)
    if not is_planned:
        yield from _layers(view)


def _named(view: View) -> Iterator[Problem]:
    kind, names = view.config.get("model_type"), view.config.get("architectures")
    server = view.deployment.server
    if not (isinstance(kind, str) and kind) and not view.config.get("auto_map"):
        said = f"It is {kind!r}, and readers find a model by it."
        yield Problem("C5", "model_type", said, _ORIGINAL)
    elif not is_known_type(view.config) and view.deployment.concerns("transformers"):
        said = f"transformers has no model type {kind!r}."
        remedy = "Check that it is spelt right, or load the model with a release that has it."
        severity = None if server == "transformers" else WARNING
        yield Problem("C5", "model_type", said, remedy, severity)
    if names is not None and names != class_names(view.config):
        said = f"It is {names!r}, and no list of classes."
        yield Problem("C5", "architectures", said, _NAME)
    elif not names and view.deployment.concerns("vllm"):
        said = "There are none, and vLLM finds the class of a model by them."
        severity = None if server == "vllm" else WARNING
        yield Problem("C5", "architectures", said, _NAME, severity)


def _of_class(view: View, built: Built) -> Iterator[Problem]:
    # a checkpoint with code of its own may be built otherwise than transformers' class
    severity = WARNING if view.config.get("auto_map") else None
    for module, names in _by_module(built.missing):
        said = f"It has no {joined(names)}, and {built.name} has."
        yield Problem("S70", module, said, _COPY, severity)
    for name, (ours, theirs) in built.wrong.items():
        module, _, own = name.rpartition(".")
        entry = view.entries.get(module)
        if entry is not None and entry.is_quantized and ours == theirs[::-1]:
            continue  # codes are [out, in] whatever the class has
        said = (
            f"Its {own} has the shape {list(ours)}, and {built.name} has {list(theirs)} there by "
        )
        yield Problem("C2", module, f"{said}config.json.", _RIGHT, severity)
    for name in built.not_floats:
        module, _, own = name.rpartition(".")
        said = (
            f"Its {own} is stored as {view.headers[name].dtype}, without a scale, and is a float "
        )
        yield Problem("C2", module, f"{said}in {built.name}.", _COPY, severity)
    left_out = (
        name
        for name in built.unexpected
        if not (_LEFT_OUT.match(name) or view.is_draft(name))
        and view.transforms.isdisjoint(name.split("."))
    )
    for module, names in _by_module(left_out):
        severity = _of_left_out(view, built, module, names)
        if severity is not None:
            said = f"Its {joined(names)} is left out: {built.name} has none by config.json."
            remedy = "Correct config.json, or remove the tensor if it is meant to be unused."
            yield Problem("C6", module, said, remedy, severity)


def _by_module(names: Any) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        module, _, own = name.rpartition(".")
        found[module].append(own)
    yield from found.items()


def _of_left_out(view: View, built: Built, module: str, names: list[str]) -> Severity | None:
    """An error is what computes another model: a bias that is not zero, of a module that is there.

    What other modules hold, the original may hold in vain too.
    """
    if names != ["bias"] or f"{module}.weight" not in built.shapes:
        return None if built.missing else WARNING
    name = f"{module}.bias"
    if view.tensors is None or name not in view.headers or view.config.get("auto_map"):
        return WARNING
    return Severity.ERROR if bool(view.tensors(name).float().any()) else Severity.NOTE


def _layers(view: View) -> Iterator[Problem]:
    """S70, for a class that nobody knows: a layer that lacks what all others of it have."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in view.entries:
        match = _LAYER.match(name)
        if match is not None and not _TOWERS.search(match["stack"]):
            rest = _ONE_EXPERT.sub(".experts.", f".{match['rest']}.").strip(".")
            stacks[match["stack"]][int(match["index"])].add(rest)
    count = view.size("num_hidden_layers")
    for stack, layers in stacks.items():
        usual = max(layers.values(), key=len)
        if len(stacks) == 1 and count is not None and len(layers) < count:
            said = f"It holds {len(layers)} layers, and config.json counts {count}."
            yield Problem("S70", stack, said, _COPY)
        odd = [index for index, own in layers.items() if own < usual]
        for index in odd if len(odd) == 1 else ():  # layers may differ by intention
            said = f"It lacks {joined(sorted(usual - layers[index]))}, which other layers have."
            yield Problem("S70", f"{stack}.{index}", said, _COPY)


STRUCTURE = (
    _head,
    _positions,
    _raw_groups,
    _patterns,
    _schemes,
    _orders,
    _shards,
    _reordered,
    _shared_values,
    _small_values,
    _tensors,
    _class,
)
"""The checks of this file."""
FOREIGN = (_foreign, _named)
"""Those of a checkpoint that another method has quantized."""
