# SPDX-License-Identifier: Apache-2.0
r"""SpinQuant: rotations of the residual stream, of heads, and of the down projection's input.

Liu et al., arXiv:2405.16406; without learning it is QuaRot, arXiv:2404.00456. With orthogonal R1
(width of the model), R2 and R3 (a head), R4 (the MLP), x a row of the residual stream::

    R1   x R1 instead of x           multiplied into embeddings, o and down (outputs),
                                     q, k, v, gate, up and the head (inputs)
    R2   v R2 instead of v           multiplied into v (output) and o (input), head by head
    R3   q R3, k R3 after RoPE       at run time: the cache holds k R3
    R4   h R4 before down            at run time; its inverse is multiplied into down

An RMS norm commutes with a rotation, except for its gain, which is fused into the Linears after it
first. Outliers, which are concentrated in a few channels, are spread over all.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch.nn import Module

from llmcompressor.core.contract import (
    Cost,
    DataSize,
    Prediction,
    RecipeRules,
)
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.weights import text_config, untie_embeddings
from llmcompressor.modifiers.rotation.base import RotationModifier
from llmcompressor.modifiers.rotation.from_config import plan_from_config
from llmcompressor.modifiers.rotation.learned import (
    LearningResult,
    check_next_tokens,
    learn_rotations,
    learning_cost,
)
from llmcompressor.modifiers.rotation.online import check_attention_hookable
from llmcompressor.modifiers.rotation.plan import (
    NORM_MAPPING_REGISTRY,
    SAY_PARTS,
    SPINQUANT_MAPPING_REGISTRY,
    NormMapping,
    RotationPlan,
    SpinQuantMapping,
    down_projections,
    find_heads,
    short_targets,
)
from llmcompressor.modifiers.rotation.stream import (
    ResidualStream,
    find_residual_stream,
    untraced_linears,
)
from llmcompressor.numerics.rotation import Rotation
from llmcompressor.quantization.attach import cached_attention_modules, check_kv_shape_attributes
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.attention import CACHED_ATTENTION

__all__ = ["SpinQuantModifier"]

Name = Literal["R1", "R2", "R3", "R4"]

_LEARNED = "learned"
"""What is kept of a run: the names of the matrices that are not those it began with."""
_REASONS = {
    "R1": "something that was not seen reads or writes the residual stream",
    "R2": "something stands between the values and what reads them (a gate, a norm)",
    "R3": "the queries and keys that are rotated are not those that are multiplied",
    "R4": "something stands before the down projection, or reads its weight",
}
"""Why outputs move where a rotation of this name is done."""


_OF_HEADS = ("R2", "R3")


@dataclass(frozen=True)
class _Site:
    """Modules that one matrix rotates together.

    Attributes:
        what: what it rotates, for error messages.
        width: number of channels.
        modules: location of the transform → the modules there, by name.
    """

    what: str
    width: int
    modules: Mapping[str, Mapping[str, Module]]


class SpinQuantModifier(RotationModifier):
    """Rotate a language model to make it easier to quantize; see the module's docstring.

    Attributes:
        rotations: a selection of R1, R2, R3 and R4.
        mappings: the parts of the model; inferred if not given.
        norm_mappings: norms and the Linears they feed; traced in a forward if not given.
        transform_config: rotations in the form of ``config.json``, instead of ``rotations``.
        learning_steps: with ``learnable``: optimizer steps, one calibration batch each.
        learning_rate: learning rate of the first step; it decays linearly to zero.

    Example::

        SpinQuantModifier(rotations=["R1", "R2"], transform_type="hadamard")
    """

    rules: ClassVar[RecipeRules] = replace(
        RotationModifier.rules,
        must_precede=RotationModifier.rules.must_precede | {"QuIPModifier", "SpinQuantModifier"},
    )

    rotations: list[Name] = Field(default=["R1", "R2"])
    mappings: SpinQuantMapping | None = None
    norm_mappings: list[NormMapping] | None = None
    transform_config: TransformConfig | None = None
    learning_steps: int = Field(default=100, gt=0)
    learning_rate: float = Field(default=0.15, gt=0, allow_inf_nan=False)

    _stream: ResidualStream | None = PrivateAttr(None)
    _learnable: dict[str, int] = PrivateAttr(default_factory=dict)
    _outcome: LearningResult | None = PrivateAttr(None)

    @field_validator("rotations", mode="before")
    @classmethod
    def _parse_rotations(cls, value: Any) -> Any:
        if not isinstance(value, str | Iterable | None):
            return value  # pydantic reports the expected type
        names = [value] if isinstance(value, str) else list(value or ())
        read = [str(getattr(name, "value", name)).upper() for name in names]
        if not read or len(set(read)) < len(read):
            raise RecipeError(
                f"rotations are {names}", "Name each of R1, R2, R3 and R4 at most once."
            )
        return read

    @field_validator("transform_config")
    @classmethod
    def _check_config(cls, value: TransformConfig | None) -> TransformConfig | None:
        if value is not None and not any(one.apply for one in value.config_groups.values()):
            raise RecipeError(
                "it has no scheme that is applied to anything, so nothing is rotated",
                "Give config_groups a scheme with apply, or leave transform_config out.",
            )
        return value

    @model_validator(mode="after")
    def _check_learnable(self) -> Self:
        given = self.transform_config is not None
        if self.learnable and (given or not {"R1", "R2"} & set(self.rotations)):
            raise RecipeError(
                "learnable learns R1 and R2, and there is neither",
                "Name one of them in rotations, or leave learnable out.",
            )
        return self

    def means(self, name: str, module: Module, holders: Mapping[str, Module]) -> bool:
        """Return True with R1, which rotates every Linear on the residual stream, experts too."""
        return self.transform_config is not None or "R1" in self.rotations

    # ------------------------------------------------------------------ plan

    def make_plan(self, model: Any) -> RotationPlan:
        """Plan the matrices of all rotations, and the fusion of norm gains before them."""
        if self.transform_config is not None:
            plan = plan_from_config(self, model, self.transform_config)
            stream = self._find_stream(model)
            plan.fuse_norms(stream.norms.values())
            return plan
        self._learnable = {}
        return self._plan_rotations(model, self.rotations)

    def _plan_rotations(self, model: Any, names: Sequence[str]) -> RotationPlan:
        plan = RotationPlan(self.torch_precision)
        for name in names:  # rotations of an input act in this order
            if name == "R1":
                plan.fuse_norms(self._find_stream(model).norms.values())
            find = {
                "R1": self._residual_stream,
                "R2": self._heads,
                "R3": self._queries_and_keys,
                "R4": self._down_projections,
            }[name]
            self._add_rotations(plan, model, name, find(model))
        return plan

    def _add_rotations(
        self, plan: RotationPlan, model: Any, name: str, sites: Sequence[_Site]
    ) -> None:
        """Rotate all sites of R1, R2, R3 or R4: with one matrix, or with one each."""
        apart = name != "R1" and (self.randomize or (name == "R2" and self.learnable))
        several = len({site.width for site in sites}) > 1
        rotations: dict[str, Rotation] = {}
        placed: dict[str, dict[str, dict[str, Module]]] = {}
        for number, site in enumerate(sites):
            order = self._block_size(name, site)
            key = f"{name}_{number}" if apart else f"{name}_{order}" if several else name
            rotations[key] = self.rotation(key, order, site.what)
            if name in ("R1", "R2"):
                self._learnable[f"{key}/{order}"] = order
            for location, modules in site.modules.items():
                placed.setdefault(key, {}).setdefault(location, {}).update(modules)
        for key, rotation in rotations.items():
            apply = []
            for location, modules in placed[key].items():
                args = TransformArgs(
                    targets=short_targets(model, modules),
                    location=location,
                    inverse=location == TransformLocation.WEIGHT_INPUT,
                )
                apply.append(args)
                for module_name, module in modules.items():
                    plan.add(key, args, module_name, module, rotation)
            scheme = TransformScheme(
                type=self.transform_type,
                apply=apply,
                head_dim=rotation.order if name in _OF_HEADS else self.transform_block_size,
            )
            online = any(args.is_online() for args in apply)
            plan.schemes[key] = self.written(scheme, [rotation], online=online)

    def _block_size(self, name: str, site: _Site) -> int:
        """Number of channels rotated together; wider blocks than a head would mix heads."""
        size = self.transform_block_size
        if name in _OF_HEADS and size is not None and size >= site.width:
            return site.width
        return self.block_of(site.width, site.what)

    def prepare(self, model: Any) -> None:
        """Untie the embeddings: the final gain and R1 apply to the head's weight only."""
        if self._stream is not None:
            untie_embeddings(model)

    def invariance_error(
        self, model: Any, fault: str, find: Callable[[RotationPlan], str | None] | None = None
    ) -> TargetError:
        """Name the rotations at fault, found by trying each alone."""
        if self.transform_config is not None:
            return TargetError(
                f"SpinQuantModifier: with its transform_config {type(model).__name__} computes "
                f"something else ({fault}).",
                "Undo each rotation where what it rotates is read.",
            )
        faults: dict[str, str | None] = dict.fromkeys(self.rotations, fault)
        if find is None and len(self.rotations) > 1:
            return self._ambiguous_invariance_error(model, fault)
        if find is not None and len(self.rotations) > 1:
            faults = {name: find(self._plan_rotations(model, [name])) for name in self.rotations}
        guilty = [name for name in self.rotations if faults[name]] or list(self.rotations)
        reasons = "; ".join(f"{name}: {_REASONS[name]}" for name in guilty)
        if "R1" in guilty and (unseen := untraced_linears(model, self._find_stream(model))):
            reasons += f"; these Linears of its width were not: {join_names(unseen)}"
        remedy = f"Leave {' and '.join(guilty)} out of rotations"
        remedy += f", or s{SAY_PARTS[1:]}" if "R1" in guilty else "."
        return TargetError(
            f"SpinQuantModifier: with {' and '.join(guilty)} {type(model).__name__} computes "
            f"something else ({faults[guilty[0]] or fault}). {reasons}.",
            remedy,
        )

    def _ambiguous_invariance_error(self, model: Any, fault: str) -> TargetError:
        """The error if the rotation at fault is unknown: online ones cannot be tried alone."""
        together = " and ".join(self.rotations)
        reasons = "; ".join(f"{name}, if {_REASONS[name]}" for name in self.rotations)
        return TargetError(
            f"SpinQuantModifier: with {together} {type(model).__name__} computes something else "
            f"({fault}). One of them is at fault: {reasons}.",
            "Try each of them alone, and leave out those that are refused.",
        )

    def without(self, model: Any, names: Sequence[str]) -> str:
        """Suggest leaving out R4, the only online rotation in Linears."""
        return "Leave R4 out of rotations" + (" or schemes." if self.transform_config else ".")

    def _parts(self, model: Any) -> SpinQuantMapping | None:
        """The parts of ``model``: from the recipe, or registered for its class."""
        return self.mappings or SPINQUANT_MAPPING_REGISTRY.added(type(model).__name__)

    def _norm_mappings_for(self, model: Any) -> list[NormMapping] | None:
        """The norm mappings of ``model``: from the recipe, or registered for its class."""
        return self.norm_mappings or NORM_MAPPING_REGISTRY.added(type(model).__name__)

    def predict(self, state: State) -> Prediction:
        """Also mappings registered for the class of the model, if they are used."""
        parts, norms = self._parts(state.model), self._norm_mappings_for(state.model)
        found = {
            "mappings": None if self.mappings or parts is None else parts.model_dump(),
            "norm_mappings": None
            if self.norm_mappings or norms is None
            else [one.model_dump() for one in norms],
        }
        registered = found if any(found.values()) else None
        return replace(super().predict(state), registered=registered)

    def _find_stream(self, model: Any) -> ResidualStream:
        if self._stream is None:
            self._stream = find_residual_stream(
                model,
                self._parts(model),
                self._norm_mappings_for(model),
            )
        return self._stream

    def _residual_stream(self, model: Any) -> list[_Site]:
        stream = self._find_stream(model)
        writers = {name: one for one, name in (stream.embeddings | stream.writers).items()}
        readers = {name: one for one, name in stream.readers.items()}
        modules = {"weight_output": writers, "weight_input": readers}
        return [_Site("the residual stream (R1)", stream.width, modules)]

    def _heads(self, model: Any) -> list[_Site]:
        return [
            _Site(
                f"a head of {one.name} (R2)",
                one.head_dim,
                {"weight_output": dict([one.values]), "weight_input": dict([one.output])},
            )
            for one in find_heads(model, self._parts(model))
        ]

    def _queries_and_keys(self, model: Any) -> list[_Site]:
        attention = self._attention(model)
        self._check_attention(model)
        config = text_config(model.config)
        parts = self._parts(model)
        width = parts.attn_head_dim if parts else None
        sites = []
        for module, name in attention.items():
            own = width or getattr(module, "head_dim", None)
            own = own or config.hidden_size // config.num_attention_heads
            modules = {"q_attn": {name: module}, "k_cache": {name: module}}
            sites.append(_Site(f"a head of {name} (R3)", own, modules))
        return sites

    def _down_projections(self, model: Any) -> list[_Site]:
        return [
            _Site(
                f"the input of {name} (R4)",
                module.in_features,
                {"input": {name: module}, "weight_input": {name: module}},
            )
            for name, module in down_projections(model, self._parts(model)).items()
        ]

    @staticmethod
    def _check_attention(model: Any) -> None:
        check_attention_hookable(model)
        try:
            check_kv_shape_attributes(model)
        except (TargetError, AttributeError, RuntimeError) as error:  # layers differ
            config = type(model.config.get_text_config(decoder=True)).__name__
            raise TargetError(
                "R3: readers take the shape of queries and keys from num_attention_heads, "
                f"num_key_value_heads and head_dim, which {config} does not tell for all layers.",
                "Leave R3 out of rotations.",
            ) from error

    def _attention(self, model: Any) -> dict[Module, str]:
        attention = cached_attention_modules(model)
        parts = self._parts(model)
        if parts is not None:
            wanted = {one for _, one in match_named_modules(model, [parts.attn])}
            attention = {one: name for one, name in attention.items() if one in wanted}
        if not attention:
            raise TargetError(
                "R3 rotates cached keys, and this model has no attention module of the form that "
                f"readers know: {CACHED_ATTENTION}.",
                "Leave R3 out of rotations.",
            )
        return attention

    # ------------------------------------------------------------------ learning

    def check(self, batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool) -> None:
        """Refuse data without next tokens to predict, if rotations are learned."""
        if self.learnable:
            check_next_tokens(batches, use_loss_mask=use_loss_mask)

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Also the cost of the learning steps, for all learned matrices."""
        found, plan = super().cost(modules, data), self._plan
        if not self.learnable or plan is None:
            return found
        sizes = self._learnable.values()
        return found + learning_cost(plan, modules, sizes, self.learning_steps, data)

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The base report, with the losses before and after learning."""
        found = super().report(names)
        if found and self._outcome is not None:
            losses = (self._outcome.loss_before, self._outcome.loss_after)
            found[""] |= dict(zip(("loss_before", "loss_after"), losses, strict=True))
        return found

    def learn(self, state: State, plan: RotationPlan) -> None:
        """Learn R1 and R2 by Cayley SGD, under the quantization of subsequent modifiers.

        If an earlier run has finished all blocks, only the types of the schemes are updated.
        """
        keeper = state.run.block_source
        if keeper is not None and keeper.rest_is_finished:
            self._mark_learned_schemes(state.model, plan, keeper.decide(_LEARNED, []))
            return
        start = {name: self._made[name] for name in self._learnable}
        self._outcome = outcome = learn_rotations(
            state.model,
            plan,
            start,
            state.data.calib,
            steps=self.learning_steps,
            rate=self.learning_rate,
            keeper=keeper,
            budget=state.run.activation_budget,
            use_loss_mask=state.run.use_loss_mask,
            device_memory=state.run.device_memory,
        )
        learned = outcome.rotations
        for fusion in plan.fusions.values():
            for rotations in (fusion.inputs, fusion.outputs):
                for place, rotation in enumerate(rotations):
                    for name, one in start.items():
                        if rotation is one:
                            rotations[place] = learned[name]
        new = [name for name, one in learned.items() if one is not start[name]]
        if keeper is not None:
            new = keeper.decide(_LEARNED, new)
        self._mark_learned_schemes(state.model, plan, new)

    def _mark_learned_schemes(self, model: Any, plan: RotationPlan, new: Sequence[str]) -> None:
        """Set the type of schemes with learned matrices to ``random-matrix``."""
        for key in list(plan.schemes):
            if any(name.startswith(f"{key}/") for name in new):
                plan.schemes[key] = plan.schemes[key].model_copy(update={"type": "random-matrix"})
        if getattr(model, "transform_config", None) is not None:
            model.transform_config.config_groups.update(plan.schemes)
