# SPDX-License-Identifier: Apache-2.0
"""What transformers 5.17 reads of a model before its weights are unpacked (L1 to L3).

After it has filled a model, transformers passes over every module to initialize what the file did
not hold. What is loaded is not touched, but many model classes name ``module.weight`` to see that,
and a packed module has no such tensor until the first forward: the load ends in an
``AttributeError``. Codes that are stored under the name ``weight`` (8 bits) are not concerned.

That first forward has to be the whole model's, and ``generate`` calls an encoder by itself (L3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmcompressor.verification.facts import Severity
from llmcompressor.verification.initialization import named_weights
from llmcompressor.verification.rules.base import Problem, Rule, View

__all__ = ["RULES"]

_ENCODER = re.compile(r"(?:.*\.)?encoder\.")


def embeddings_are_unpacked(view: View) -> Iterator[Problem]:
    """L1."""
    for entry in view.quantized:
        if entry.kind == "embedding" and entry.form == "packed":
            yield Problem(
                entry.name,
                "It is a packed embedding, and transformers fails to load it: its initialization "
                "reads a weight that is not there.",
                "Ignore it, or serve it with vLLM.",
            )


def named_weights_are_unpacked(view: View) -> Iterator[Problem]:
    """L2."""
    rows = named_weights(view.config)
    for entry in view.quantized if rows else ():
        if entry.form != "packed" or entry.kind == "embedding":
            continue
        owner = next((name for name, path in rows if path.fullmatch(entry.name)), "")
        if owner:
            yield Problem(
                entry.name,
                f"It is packed, and transformers fails to load it: the initialization of {owner} "
                "reads a weight that is not there.",
                "Ignore it, write 8-bit codes, or serve it with vLLM.",
            )


def encoders_are_unpacked(view: View) -> Iterator[Problem]:
    """L3."""
    if view.config.get("is_encoder_decoder") is not True:
        return
    for entry in view.quantized:
        if _ENCODER.match(entry.name):
            yield Problem(
                entry.name,
                "transformers unpacks it at the first forward of the whole model, and generate "
                "calls the encoder before that and fails.",
                "Load it with quantization_config=CompressedTensorsConfig(dequantize=True), or "
                "call the model once before generate.",
            )


RULES = (
    Rule(
        "L1",
        "embeddings are not packed",
        embeddings_are_unpacked,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L2",
        "weights that initialization names are not packed",
        named_weights_are_unpacked,
        server="transformers",
        is_limit=True,
    ),
    Rule(
        "L3",
        "encoders are unpacked before they run",
        encoders_are_unpacked,
        server="transformers",
        severity=Severity.WARNING,
    ),
)
