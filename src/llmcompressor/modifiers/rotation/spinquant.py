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

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch.nn import Module

from llmcompressor.core.contract import Cost, DataSize, Prediction, RecipeRules
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.modeling.weights import untie_embeddings
from llmcompressor.modifiers.rotation.base import FindFault, RotationModifier, read_rotation_names
from llmcompressor.modifiers.rotation.learned import (
    LearningResult,
    check_next_tokens,
    learn_rotations,
    learning_cost,
)
from llmcompressor.modifiers.rotation.parts import (
    NAME_PARTS,
    NORM_MAPPING_REGISTRY,
    SPINQUANT_MAPPING_REGISTRY,
    NormMapping,
    ResidualStream,
    Site,
    SpinQuantMapping,
    down_sites,
    find_residual_stream,
    head_sites,
    query_and_key_sites,
    untraced_linears,
)
from llmcompressor.modifiers.rotation.plan import RotationPlan, short_targets
from llmcompressor.numerics.rotation import Rotation
from llmcompressor.runtime.progress import join_names

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
_SITES = {"R2": head_sites, "R3": query_and_key_sites, "R4": down_sites}


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
        return read_rotation_names(value, str.upper, "R1, R2, R3 and R4")

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
        self._learnable = {}
        if self.transform_config is not None:
            plan = self.plan_config(model, self.transform_config)
            plan.fuse_norms(self._find_stream(model).norms)
            return plan
        plan, parts = RotationPlan(self.torch_precision), self._parts(model)
        for name in self.rotations:  # those of an input act in this order
            if name == "R1":
                stream = self._find_stream(model)
                plan.fuse_norms(stream.norms)
                sites = [stream.site]
            else:
                sites = _SITES[name](model, parts)
            self._add_rotations(plan, model, name, sites)
        return plan

    def _add_rotations(
        self, plan: RotationPlan, model: Any, name: str, sites: Sequence[Site]
    ) -> None:
        """Rotate all sites of R1, R2, R3 or R4: with one matrix, or with one each."""
        apart = name != "R1" and (self.randomize or (name == "R2" and self.learnable))
        several = len({site.width for site in sites}) > 1
        rotations: dict[str, Rotation] = {}
        placed: dict[str, dict[str, dict[str, Module]]] = {}
        for number, site in enumerate(sites):
            size = self.transform_block_size
            if name in _OF_HEADS and size is not None and size >= site.width:
                order = site.width  # wider blocks than a head would mix heads
            else:
                order = self.block_of(site.width, site.what)
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
                    inverse=location == "weight_input",
                )
                apply.append(args)
                for module_name, module in modules.items():
                    plan.add(key, args, module_name, module, rotation)
            scheme = TransformScheme(
                type=self.transform_type,
                apply=apply,
                head_dim=rotation.order if name in _OF_HEADS else self.transform_block_size,
            )
            plan.schemes[key] = self.written(scheme, [rotation])

    def prepare(self, model: Any) -> None:
        """Untie the embeddings: the final gain and R1 apply to the head's weight only."""
        if self._stream is not None:
            untie_embeddings(model)

    def predict(self, state: State) -> Prediction:
        """Also mappings registered for the class of the model, if they are used."""
        name = type(state.model).__name__
        parts = None if self.mappings else SPINQUANT_MAPPING_REGISTRY.added(name)
        norms = None if self.norm_mappings else NORM_MAPPING_REGISTRY.added(name)
        found = {
            "mappings": None if parts is None else parts.model_dump(),
            "norm_mappings": None if norms is None else [one.model_dump() for one in norms],
        }
        return replace(super().predict(state), registered=found if any(found.values()) else None)

    def _parts(self, model: Any) -> SpinQuantMapping | None:
        """The parts of ``model``: from the recipe, or registered for its class."""
        return self.mappings or SPINQUANT_MAPPING_REGISTRY.added(type(model).__name__)

    def _find_stream(self, model: Any) -> ResidualStream:
        if self._stream is None:
            norms = self.norm_mappings or NORM_MAPPING_REGISTRY.added(type(model).__name__)
            self._stream = find_residual_stream(model, self._parts(model), norms)
        return self._stream

    # ------------------------------------------------------------------ what cannot be rotated

    def invariance_error(
        self, model: Any, fault: str, find: FindFault | None = None
    ) -> TargetError:
        """Name the rotations at fault, found by trying each alone."""
        kind = f"{type(model).__name__} computes something else"
        if self.transform_config is not None:
            return TargetError(
                f"SpinQuantModifier: with its transform_config {kind} ({fault}).",
                "Undo each rotation where what it rotates is read.",
            )
        faults: dict[str, str | None] = dict.fromkeys(self.rotations, fault)
        if find is not None and len(self.rotations) > 1:
            for name in self.rotations:
                schemes = {key for key in self.plan.schemes if key.startswith(name)}
                faults[name] = find(self.plan.restricted_to(schemes=schemes, norms=name == "R1"))
        guilty = [name for name in self.rotations if faults[name]] or list(self.rotations)
        reasons = "; ".join(f"{name}: {_REASONS[name]}" for name in guilty)
        remedy = f"Leave {' and '.join(guilty)} out of rotations."
        if "R1" in guilty:
            remedy = f"{remedy[:-1]}, or n{NAME_PARTS[1:]}"
            if unseen := untraced_linears(model, self._find_stream(model)):
                reasons += f"; these Linears of its width were not: {join_names(unseen)}"
        return TargetError(
            f"SpinQuantModifier: with {' and '.join(guilty)} {kind} "
            f"({faults[guilty[0]] or fault}). {reasons}.",
            remedy,
        )

    def advice_without(self, model: Any, names: Sequence[str]) -> str:
        """Suggest leaving out R4, the only online rotation in Linears."""
        return "Leave R4 out of rotations" + (" or schemes." if self.transform_config else ".")

    # ------------------------------------------------------------------ learning

    def check(self, batches: Sequence[Mapping[str, Any]], *, use_loss_mask: bool) -> None:
        """Refuse data without next tokens to predict, if rotations are learned."""
        if self.learnable:
            check_next_tokens(batches, use_loss_mask=use_loss_mask)

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Also the cost of the learning steps, for all learned matrices."""
        found = super().cost(modules, data)
        if not self.learnable:
            return found
        sizes = self._learnable.values()
        return found + learning_cost(self.plan, modules, sizes, self.learning_steps, data)

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The base report, with the losses before and after learning."""
        found, outcome = super().report(names), self._outcome
        if found and outcome is not None:
            found[""] |= {"loss_before": outcome.loss_before, "loss_after": outcome.loss_after}
        return found

    def learn(self, state: State, plan: RotationPlan) -> None:
        """Learn R1 and R2 by Cayley SGD, under the quantization of subsequent modifiers.

        If an earlier run has finished all blocks, only the types of the schemes are updated.
        """
        blocks, new = state.run.block_source, list[str]()
        if not blocks.rest_is_finished:
            start = {name: self._made[name] for name in self._learnable}
            self._outcome = learn_rotations(
                state.model,
                plan,
                start,
                state.data.calib,
                steps=self.learning_steps,
                rate=self.learning_rate,
                blocks=blocks,
                budget=state.run.activation_budget,
                use_loss_mask=state.run.use_loss_mask,
                device_memory=state.run.device_memory,
                ranks=state.run.ranks,
            )
            learned = self._outcome.rotations
            by_id = {id(one): learned[name] for name, one in start.items()}
            for fusion in plan.fusions.values():
                fusion.inputs = [by_id.get(id(one), one) for one in fusion.inputs]
                fusion.outputs = [by_id.get(id(one), one) for one in fusion.outputs]
            new = [name for name, one in learned.items() if one is not start[name]]
        new = blocks.decide(_LEARNED, new)
        for key, scheme in plan.schemes.items():
            if any(name.startswith(f"{key}/") for name in new):
                plan.schemes[key] = scheme.model_copy(update={"type": "random-matrix"})
        if getattr(state.model, "transform_config", None) is not None:
            state.model.transform_config.config_groups.update(plan.schemes)
