# SPDX-License-Identifier: Apache-2.0
"""Rotation mappings: names of the model's parts, for models where they are not inferred."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from llmcompressor.registry import Additions

__all__ = [
    "NORM_MAPPING_REGISTRY",
    "SAY_PARTS",
    "SPINQUANT_MAPPING_REGISTRY",
    "NormMapping",
    "SpinQuantMapping",
]

SAY_PARTS = "Say what its parts are with the fields mappings and norm_mappings."


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpinQuantMapping(_Mapping):
    """Targets (names, ``re:`` patterns or classes) of the parts that rotations act on.

    Attributes:
        embedding: writes the initial residual stream.
        attn: the attention modules, whose queries and keys R3 rotates.
        attn_q: reads the residual stream.
        attn_k: reads the residual stream.
        attn_v: reads the residual stream; R2 rotates its output.
        attn_o: writes to the residual stream; R2 rotates its input.
        attn_head_dim: head dimension, if it is not in the configuration.
        mlp_in: read the residual stream: gate, up, routers.
        mlp_out: write to the residual stream: down; R4 rotates their input.
        lm_head: reads the final residual stream.
    """

    embedding: str
    attn: str
    attn_q: str
    attn_k: str
    attn_v: str
    attn_o: str
    attn_head_dim: int | None = Field(default=None, gt=0)
    mlp_in: list[str]
    mlp_out: list[str]
    lm_head: str

    @field_validator("mlp_in", "mlp_out", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class NormMapping(_Mapping):
    """A norm and the Linears that read its output.

    Attributes:
        norm: target of the norms.
        linears: targets of the Linears; each belongs to the norm with the same parent.
    """

    norm: str
    linears: list[str]

    @field_validator("linears", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


def _llama() -> SpinQuantMapping:
    return SpinQuantMapping(
        embedding="re:.*embed_tokens$",
        attn="re:.*self_attn$",
        attn_q="re:.*q_proj$",
        attn_k="re:.*k_proj$",
        attn_v="re:.*v_proj$",
        attn_o="re:.*o_proj$",
        mlp_in=["re:.*up_proj$", "re:.*gate_proj$"],
        mlp_out=["re:.*down_proj$"],
        lm_head="lm_head",
    )


def _norms_of_llama() -> list[NormMapping]:
    qkv = ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]
    return [
        NormMapping(norm="re:.*input_layernorm$", linears=qkv),
        NormMapping(
            norm="re:.*post_attention_layernorm$", linears=["re:.*up_proj$", "re:.*gate_proj$"]
        ),
        NormMapping(norm="model.norm", linears=["lm_head"]),
    ]


SPINQUANT_MAPPING_REGISTRY: Additions[SpinQuantMapping] = Additions({"LlamaForCausalLM": _llama})
"""The parts of models that users add by class name. Llama's can be read; unless some are added,
they are found."""
NORM_MAPPING_REGISTRY: Additions[list[NormMapping]] = Additions(
    {"LlamaForCausalLM": _norms_of_llama}
)
"""Likewise, which norm feeds which Linears."""
