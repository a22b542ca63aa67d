# SPDX-License-Identifier: Apache-2.0
"""Mappings of known architectures, for code that reads them to write its own.

A run finds mappings from a model's structure (:mod:`llmcompressor.modeling.mappings`), regardless
of this table. Mappings that are read here, changed and passed to a modifier are the user's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmcompressor.modeling.mapped_places import Names
from llmcompressor.modeling.mappings import LISTED

__all__ = ["WRITTEN", "norms_of"]

_ROUTED = ("re:.*mlp.gate$", "re:.*mlp.experts.*.gate_proj$", "re:.*mlp.experts.*.up_proj$")
_MIXTURE: tuple[Names, ...] = (
    ("re:.*input_layernorm$", ("re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$")),
    ("re:.*v_proj$", ("re:.*o_proj$",)),
    ("re:.*post_attention_layernorm$", _ROUTED),
    ("re:.*up_proj$", ("re:.*down_proj$",)),
)
_LATENT: tuple[Names, ...] = (
    ("re:.*input_layernorm$", ("re:.*(q|q_a)_proj$", "re:.*kv_a_proj_with_mqa$")),
    ("re:.*q_a_layernorm$", ("re:.*q_b_proj$",)),
    ("re:.*kv_a_layernorm$", ("re:.*kv_b_proj$",)),
    ("re:.*post_attention_layernorm$", ("re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$")),
    ("re:.*up_proj$", ("re:.*down_proj$",)),
)


def _within(part: str, names: tuple[Names, ...]) -> tuple[Names, ...]:
    """The same names, restricted to a part of the model."""

    def placed(name: str) -> str:
        return name.replace("re:.*", f"re:.*{part}.*", 1)

    return tuple((placed(smooth), tuple(map(placed, readers))) for smooth, readers in names)


WRITTEN: dict[str, tuple[Names, ...]] = {
    **LISTED,
    "DeepseekV3ForCausalLM": _LATENT,
    "Gemma3ForConditionalGeneration": _within("language_model", LISTED["Gemma3ForCausalLM"]),
    "Mistral3ForConditionalGeneration": _within("language_model", LISTED["MistralForCausalLM"]),
    "Qwen2_5_VLForConditionalGeneration": _within("language_model", LISTED["Qwen2ForCausalLM"]),
    "Qwen3MoeForCausalLM": _MIXTURE,
}
"""Smooth targets with those that read them, by the name of the model's class."""


def norms_of(names: Sequence[Names]) -> tuple[Names, ...]:
    """The mappings that begin with a norm."""
    return tuple(one for one in names if "norm" in one[0])
