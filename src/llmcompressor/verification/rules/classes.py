# SPDX-License-Identifier: Apache-2.0
"""The class that ``config.json`` names: whether it can be built, and takes what is stored (C5, C6).

transformers chooses a class by ``model_type``, vLLM by ``architectures``. Both leave out a bias
that the class has no place for, so that another model is computed; nobody says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from llmcompressor.verification.built import (
    Built,
    build_others,
    is_known_type,
    is_of_another_type,
    refusal,
)
from llmcompressor.verification.facts import Severity
from llmcompressor.verification.families import class_names
from llmcompressor.verification.rules.base import WRITTEN, Problem, Rule, View, joined
from llmcompressor.verification.rules.sizes import sizes_are_positive

__all__ = ["RULES"]

_ORIGINAL = "Take config.json from the original model, and its quantization_config from this one."
_NAME = "Write the class of the original model into architectures."
# Buffers that are calculated anew, what drafts tokens, towers that a class may leave out, and what
# belongs to a scheme.
_LEFT_OUT = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.\w+|inv_freq|position_ids|embed_scale|final_logits_bias"
    r"|masked_bias|attn\.bias)$|.*(?:vision|visual|audio|mtp|draft|eagle|speech).*"
    r"|.*[._](?:packed|scale|scale_inv|zero_point|global_scale|shape|g_idx)$"
)


def class_can_be_built(view: View) -> Iterator[Problem]:
    """C5."""
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
        yield Problem("config.json", f"{said}, and {_misfit(one, name)}.", _NAME)


def _misfit(built: Built | None, name: str) -> str:
    if built is None:
        return f"{name} cannot be built of it"
    found = [*built.missing, *built.wrong]
    return f"{built.name} does not find {joined(found)} in the file"


def nothing_is_left_out(view: View) -> Iterator[Problem]:
    """C6."""
    built = view.built
    if built is None:
        return
    of_modules: dict[str, list[str]] = defaultdict(list)
    for name in built.unexpected:
        if not (_LEFT_OUT.match(name) or view.is_draft(name) or _is_of_transform(view, name)):
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


def _is_of_transform(view: View, name: str) -> bool:
    return any(part in view.transforms for part in name.split("."))


RULES = (
    Rule(
        "C5",
        "the class of config.json can be built",
        class_can_be_built,
        server="",
        needs=WRITTEN,
    ),
    Rule("C6", "the class takes what is stored", nothing_is_left_out, server="", needs=WRITTEN),
)
