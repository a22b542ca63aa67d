# SPDX-License-Identifier: Apache-2.0
"""Rotation plan: the rotations of every weight and forward, and their application."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from compressed_tensors.transform import TransformArgs, TransformLocation, TransformScheme
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import ELEMENTWISE
from llmcompressor.equalization.mappings import find_norm_sets
from llmcompressor.equalization.rescale import input_channels, write_parameters
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import DataFlow, trace_flow
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.modeling.weights import text_config
from llmcompressor.modifiers.rotation.online import (
    AttachedTransform,
    add_schemes,
    attach_transform,
    stored_weight,
    tie_transforms,
)
from llmcompressor.numerics.hadamard import split_order
from llmcompressor.numerics.rotation import (
    Rotation,
    channel_rescaling,
    column_squares,
    rotated_bias,
    rotated_weight,
)
from llmcompressor.runtime.registry import UserOverrides

__all__ = [
    "ATTENTION_WRITERS",
    "MLP_WRITERS",
    "NORM_MAPPING_REGISTRY",
    "SAY_PARTS",
    "SPINQUANT_MAPPING_REGISTRY",
    "Fusion",
    "Heads",
    "Norm",
    "NormMapping",
    "OnlineRotation",
    "RescaledNorm",
    "RotationPlan",
    "SpinQuantMapping",
    "cached_gain",
    "down_projections",
    "find_heads",
    "fusion_flops",
    "norms_feeding",
    "short_targets",
    "trial_flops",
]


# --------------------
# Fusion of norm gains into the Linears that read them, before these are rotated.
#
# With g the gain of a norm n, b its bias, d the fused factor, and W a Linear that reads it
#
# .. math:: W (g \odot n(x) + b) = (W\,\mathrm{diag}(d))\, ((g / d) \odot n(x) + b / d)
#
# A rotation of the residual stream needs the whole gain fused (d = g). A rotation between a norm
# and its readers works best on channels of similar size (:mod:`.rescaling`).


@dataclass(frozen=True)
class Norm:
    """A norm without bias whose gain is fused into the modules that read it.

    Attributes:
        module: the norm.
        offset: constant that it adds to its weight: 0, or 1 as in Gemma.
        readers: modules that read its output, by name.
    """

    module: Module
    offset: float
    readers: dict[Module, str]

    def gain(self) -> Tensor | None:
        """Factor fused into its readers, float64 ``[C]``; ``None`` for a norm without weight."""
        weight_C = self.module._parameters.get("weight")
        return None if weight_C is None else weight_C.detach().double() + self.offset

    def without(self, gain_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters after ``gain_C``, float64 ``[C]``, was fused into its readers."""
        if gain_C is None:
            return {}
        return {"weight": gain_C.new_full(gain_C.shape, 1.0 - self.offset)}


@dataclass(frozen=True)
class RescaledNorm(Norm):
    """A norm, possibly with bias, whose channels are rescaled for the rotations after it.

    Attributes:
        turned: the readers whose inputs are rotated.
    """

    turned: tuple[Module, ...] = ()

    def gain(self) -> Tensor | None:
        """The part of its gain that is fused into its readers: powers of two, float64 ``[C]``."""
        gain_C = super().gain()
        if gain_C is None:
            return None
        square_C, bias_C = gain_C.square(), self.module._parameters.get("bias")
        if bias_C is not None:  # without gain and bias, channels have mean square one on average
            square_C += bias_C.detach().double().square()
        weights = [one._parameters["weight"] for one in self.turned]
        return channel_rescaling(
            square_C, column_squares(one for one in weights if one is not None)
        )

    def without(self, gain_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters after ``gain_C``, float64 ``[C]``, was fused into its readers."""
        whole_C, bias_C = super().gain(), self.module._parameters.get("bias")
        if gain_C is None or whole_C is None:
            return {}
        found = {"weight": whole_C / gain_C - self.offset}
        return found if bias_C is None else {**found, "bias": bias_C.detach().double() / gain_C}


def cached_gain(norm: Norm, gains: dict[Module, Tensor | None]) -> Tensor | None:
    """The fused factor of ``norm``, cached in ``gains``."""
    if norm.module not in gains:
        gains[norm.module] = norm.gain()
    return gains[norm.module]


def norms_feeding(
    model: Any, turned: Container[Module], smoothed: Container[str]
) -> Iterator[RescaledNorm]:
    """Norms that feed modules of ``turned``, by the structure of the blocks.

    Blocks of one class are assumed to be alike, although they may call different children: a norm
    that feeds more modules in a traced forward than the structure shows is left out.

    Args:
        model: its weights may be on the meta device.
        turned: modules whose inputs are rotated.
        smoothed: names of norms that are not rescaled.
    """
    sets = find_norm_sets(model)
    try:
        flow = trace_flow(model) if sets else DataFlow()
    except TargetError as error:  # the trial of the rotations reports it, if they are affected
        logger.debug(f"No norm of {type(model).__name__} is rescaled: {error!r:.200}")
        return
    fed: dict[Module, set[Module]] = {}
    for module, norm in flow.feeder.items():
        if input_channels(module) is not None:
            fed.setdefault(norm, set()).add(module)
    for one in sets:
        readers = {module: name for name, module in one.balance.items()}
        own = tuple(module for module in readers if module in turned)
        known = fed.get(one.smooth, set()) <= readers.keys()
        if own and known and one.name not in smoothed:
            yield RescaledNorm(one.smooth, one.offset, readers, own)


# --------------------
# Rotation plan: the rotations of every weight and forward, and their application.

_NOTHING = object()


@dataclass
class Fusion:
    """Factors that are multiplied into one weight.

    Attributes:
        norm: the norm before it, whose gain or part of it is fused.
        inputs: rotations of its input, in the order in which they act.
        outputs: rotations of its output.
    """

    norm: Norm | None = None
    inputs: list[Rotation] = field(default_factory=list)
    outputs: list[Rotation] = field(default_factory=list)


@dataclass(frozen=True)
class OnlineRotation:
    """A rotation that stays in the forward of a module.

    Attributes:
        module: the module.
        module_name: its name.
        scheme: name of its scheme.
        location: location in the forward.
        rotation: the matrix; modules with the same object share its storage.
        inverse: apply the transpose.
    """

    module: Module
    module_name: str
    scheme: str
    location: TransformLocation
    rotation: Rotation
    inverse: bool = False


@dataclass
class RotationPlan:
    """All changes that rotations make to a model.

    Attributes:
        precision: dtype in which rotations are multiplied into weights.
        fusions: module → factors of its weight.
        norms: norms whose gain, or part of it, is fused into the Linears after them.
        online: rotations that stay in the forward.
        schemes: their form in ``transform_config``.
        standing: rotations that :meth:`attach_resting` has attached.
    """

    precision: torch.dtype
    fusions: dict[Module, Fusion] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)
    online: list[OnlineRotation] = field(default_factory=list)
    schemes: dict[str, TransformScheme] = field(default_factory=dict)
    standing: list[AttachedTransform] = field(default_factory=list)

    def of(self, module: Module) -> Fusion:
        """The fusion of ``module``, created on first use."""
        return self.fusions.setdefault(module, Fusion())

    def fuse_norms(self, norms: Iterable[Norm]) -> None:
        """Fuse the gains of norms into the modules that read them."""
        for norm in norms:
            self.norms.append(norm)
            for module in norm.readers:
                self.of(module).norm = norm

    def add(
        self, scheme: str, args: TransformArgs, name: str, module: Module, rotation: Rotation
    ) -> None:
        """Rotate one module as ``args`` says; an embedding's output is its rows."""
        location = TransformLocation(args.location)
        if location is TransformLocation.WEIGHT_INPUT:
            self.of(module).inputs.append(rotation if args.inverse else rotation.transposed())
        elif location is TransformLocation.WEIGHT_OUTPUT:
            fused = rotation.transposed() if args.inverse else rotation
            own = self.of(module)
            (own.inputs if isinstance(module, Embedding) else own.outputs).append(fused)
        else:
            online = OnlineRotation(module, name, scheme, location, rotation, args.inverse)
            self.online.append(online)

    @torch.no_grad()
    def fuse(self, modules: Collection[Module] | None = None) -> None:
        """Multiply all factors into the weights; once into a weight that several modules share.

        Args:
            modules: limit it to these modules; a norm has to be among them together with its
                readers.
        """
        norms = [one for one in self.norms if modules is None or one.module in modules]
        gains = {norm.module: norm.gain() for norm in norms}
        done: set[int] = set()
        for module, fusion in self.fusions.items():
            is_first = id(module._parameters["weight"]) not in done
            if is_first and (modules is None or module in modules):
                write_parameters(module, self.rotated(module, fusion, gains=gains))
                done.add(id(module._parameters["weight"]))
        for norm in norms:
            write_parameters(norm.module, norm.without(gains[norm.module]))

    def rotated(
        self,
        module: Module,
        fusion: Fusion,
        *,
        gains: dict[Module, Tensor | None] | None = None,
        wide: bool = False,
    ) -> dict[str, Tensor]:
        """Weight and bias of ``module`` with all factors multiplied in.

        Args:
            module: it is not changed.
            fusion: its factors.
            gains: :meth:`gains`, if gains of norms may have been removed already; missing ones are
                added.
            wide: compute and return float32, even for narrower weights.
        """
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        gain = (
            None
            if fusion.norm is None
            else cached_gain(fusion.norm, {} if gains is None else gains)
        )
        precision = torch.float32 if wide else self.precision
        found = {
            "weight": rotated_weight(
                weight.detach(),
                gain_C=gain,
                inputs=fusion.inputs,
                outputs=fusion.outputs,
                precision=precision,
                dtype=torch.float32 if wide else None,
            )
        }
        if bias is not None and isinstance(module, Linear) and fusion.outputs:
            found["bias"] = rotated_bias(
                bias.detach().float() if wide else bias.detach(),
                fusion.outputs,
                precision=precision,
            )
        return found

    def gains(self) -> dict[Module, Tensor | None]:
        """The fused factors of all loaded norms."""
        weights = [(norm, norm.module._parameters.get("weight")) for norm in self.norms]
        return {
            norm.module: norm.gain()
            for norm, weight in weights
            if weight is None or not weight.is_meta
        }

    def rotations_of(self, module: Module) -> tuple[list[int], list[int]]:
        """Identities of the rotations of a module's inputs and outputs."""
        own = self.fusions.get(module, Fusion())
        return [id(one) for one in own.inputs], [id(one) for one in own.outputs]

    @property
    def rotated_weights(self) -> int:
        """Number of weights that are rotated."""
        return sum(bool(one.inputs or one.outputs) for one in self.fusions.values())

    def attach(self, model: Any) -> None:
        """Attach the online rotations, and add their schemes to the configuration."""
        self._attach(model, [])

    def attach_resting(self, model: Any, device: torch.device) -> None:
        """Attach the online rotations, deactivated, and add their schemes to the configuration.

        Args:
            model: the model.
            device: device of the matrices.
        """
        self._attach(model, self.standing, device)
        self.rest(rests=True)

    def rest(self, *, rests: bool) -> None:
        """Deactivate the attached rotations, or activate them again."""
        for one in self.standing:
            one.rest(rests=rests)

    def detach(self) -> None:
        """Remove the rotations attached by :meth:`attach_resting`."""
        while self.standing:
            self.standing.pop().remove()

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Apply online rotations in the forward while the body runs."""
        if self.standing:
            self.rest(rests=False)
            try:
                yield
            finally:
                self.rest(rests=True)
            return
        done: list[AttachedTransform] = []
        written = model.__dict__.get("transform_config", _NOTHING)
        try:
            self._attach(model, done)
            yield
        finally:
            for one in reversed(done):
                one.remove()
            if written is _NOTHING:
                model.__dict__.pop("transform_config", None)
            else:
                model.transform_config = written

    def _attach(
        self, model: Any, done: list[AttachedTransform], everywhere: torch.device | None = None
    ) -> None:
        weights: dict[tuple[int, str, torch.device], Any] = {}
        for one in self.online:
            own = (parameter.device for parameter in one.module.parameters())
            device = everywhere or next(own, torch.device("cpu"))
            key = (id(one.rotation), one.scheme, device)
            if key not in weights:
                weights[key] = stored_weight(one.rotation, device)
            scheme = self.schemes[one.scheme]
            args = TransformArgs(
                targets=[one.module_name], location=one.location, inverse=one.inverse
            )
            done.append(
                attach_transform(
                    model, one.module, one.module_name, one.scheme, scheme, args, weights[key]
                )
            )
        tie_transforms(done)
        if self.schemes:
            add_schemes(model, self.schemes)

    def restricted_to(self, modules: Collection[Module]) -> RotationPlan:
        """The plan restricted to some modules, without gains of norms."""
        return RotationPlan(
            self.precision,
            {
                module: replace(one, norm=None)
                for module, one in self.fusions.items()
                if module in modules
            },
            [],
            [one for one in self.online if one.module in modules],
            self.schemes,
        )


# --------------------
# Cost of rotations: passes over a weight in float32, and twice as much in float64.

_PASSES, _BUTTERFLY, _TRANSPOSED = 5, 6, 25
"""Of a rotation, of each butterfly of its power of two, and of one of the output."""
_SCALED = 10
"""Passes to look at the columns behind a norm, and to multiply them."""
_TRIAL_RUNS, _TRIAL_TOKENS, _TRIAL_VISITS = 3, 8, 3


def fusion_flops(plan: RotationPlan, modules: Iterable[Module], precision: torch.dtype) -> int:
    """Multiply-adds in float32 for fusing rotations into the weights of ``modules``."""
    wide = 2 if precision == torch.float64 else 1
    found = 0
    for module in modules:
        fusion = plan.fusions.get(module, Fusion())
        passes, products = _TRANSPOSED * len(fusion.outputs), 0
        for one in (*fusion.inputs, *fusion.outputs):
            power, base = (1, one.order) if one.signs_N is None else split_order(one.order)
            passes += _PASSES + _BUTTERFLY * (power.bit_length() - 1)
            products += base if base > 1 else 0
        passes = wide * passes + (_SCALED if fusion.norm else 0)
        found += _elements([module]) * (wide * products + ELEMENTWISE * passes)
    return found


def trial_flops(plan: RotationPlan, modules: Sequence[Module]) -> int:
    """Multiply-adds for the trial of the rotations on a few tokens in float32."""
    multiplying = [one for one in modules if not isinstance(one, Embedding)]
    runs = _TRIAL_RUNS * _TRIAL_TOKENS * _elements(multiplying)
    visits = ELEMENTWISE * _TRIAL_VISITS * _elements(modules)
    return runs + visits + fusion_flops(plan, modules, torch.float32)


def _elements(modules: Iterable[Module]) -> int:
    return sum(one.numel() for module in modules for one in own_parameters(module) if one.ndim > 1)


# --------------------
# Short target lists for a given set of modules.


def short_targets(model: Any, names: Iterable[str]) -> list[str]:
    """Patterns on the last part of a name, if they match no other module, else full names.

    Servers prefix module names, which patterns such as ``re:.*down_proj$`` tolerate.

    Args:
        model: the model.
        names: names of the modules to target.
    """
    wanted = set(names)
    by_end: dict[str, set[str]] = {}
    for name in sorted(wanted):
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    everything = [name for name, _ in named_modules(model)]
    targets = []
    for end, members in by_end.items():
        pattern = re.compile(f".*{re.escape(end)}$")
        if {name for name in everything if pattern.match(name)} == members:
            targets.append(f"re:.*{re.escape(end)}$")
        else:
            targets += sorted(members)
    return targets


# --------------------
# Rotation mappings: names of the model's parts, for models where they are not inferred.

SAY_PARTS = "Say what its parts are with the fields mappings and norm_mappings."


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("mlp_in", "mlp_out", "linears", mode="before", check_fields=False)
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


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


class NormMapping(_Mapping):
    """A norm and the Linears that read its output.

    Attributes:
        norm: target of the norms.
        linears: targets of the Linears; each belongs to the norm with the same parent.
    """

    norm: str
    linears: list[str]


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


SPINQUANT_MAPPING_REGISTRY: UserOverrides[SpinQuantMapping] = UserOverrides(
    {"LlamaForCausalLM": _llama}
)
"""The parts of models that users add by class name. Llama's can be read; unless some are added,
they are found."""
NORM_MAPPING_REGISTRY: UserOverrides[list[NormMapping]] = UserOverrides(
    {"LlamaForCausalLM": _norms_of_llama}
)
"""Likewise, which norm feeds which Linears."""


# --------------------
# Value, output and down projections, which rotations of heads and of the MLP act on.

ATTENTION_WRITERS = ("o_proj", "out_proj", "linear_out", "wo", "dense")
"""Names of the Linears at the end of attention, and of what stands in its place."""
MLP_WRITERS = ("down_proj", "w2", "fc2", "dense_4h_to_h", "linear_2", "output_linear")
"""Names of the Linears at the end of an MLP."""
_VALUES = ("v_proj",)


@dataclass(frozen=True)
class Heads:
    """Value and output projection of one attention module.

    Attributes:
        name: name of the attention module.
        values: the value projection.
        output: the output projection.
        head_dim: head dimension.
    """

    name: str
    values: tuple[str, Linear]
    output: tuple[str, Linear]
    head_dim: int


def find_heads(model: Any, mapping: SpinQuantMapping | None = None) -> list[Heads]:
    """The value and output projections of all attention modules.

    Raises:
        TargetError: there are none, or their widths do not go together.
    """
    values = [mapping.attn_v] if mapping else [rf"re:(?:.*\.)?{name}$" for name in _VALUES]
    outputs = (
        [mapping.attn_o] if mapping else [rf"re:(?:.*\.)?{name}$" for name in ATTENTION_WRITERS]
    )
    by_parent = {name.rpartition(".")[0]: (name, one) for name, one in _linears(model, outputs)}
    modules = dict(named_modules(model))
    found = []
    for name, module in _linears(model, values):
        parent = name.rpartition(".")[0]
        if parent not in by_parent:
            raise TargetError(f"Beside {name} nothing was found that reads the values.", SAY_PARTS)
        width = mapping.attn_head_dim if mapping else None
        width = width or _head_dim(model, modules[parent])
        output = by_parent[parent][1]
        if width is None or module.out_features % width or output.in_features % width:
            raise TargetError(
                f"The width of a head of {parent} is not known.",
                "Say it with attn_head_dim in mappings, or leave R2 out of rotations.",
            )
        found.append(Heads(parent, (name, module), by_parent[parent], width))
    if not found:
        raise TargetError(
            f"{type(model).__name__} has no Linear that makes values alone (v_proj).",
            "Leave R2 out of rotations, or name one that does in the field mappings.",
        )
    return found


def _head_dim(model: Any, attention: Module) -> int | None:
    own = getattr(attention, "head_dim", None)
    if isinstance(own, int):
        return own
    config = text_config(model.config)
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)


def down_projections(model: Any, mapping: SpinQuantMapping | None = None) -> dict[str, Linear]:
    """The last Linear of each MLP, by name.

    Raises:
        TargetError: there are none.
    """
    targets = mapping.mlp_out if mapping else [rf"re:.*\.{name}$" for name in MLP_WRITERS]
    found = dict(_linears(model, targets))
    if not found:
        raise TargetError(
            f"{type(model).__name__} has no down projection that is a Linear.",
            f"Leave R4 out of rotations. {SAY_PARTS}",
        )
    return found


def _linears(model: Module, targets: list[str]) -> list[tuple[str, Linear]]:
    matched = match_named_modules(model, targets)
    return [(name, module) for name, module in matched if isinstance(module, Linear)]
