# SPDX-License-Identifier: Apache-2.0
r"""QuIP: incoherence processing, with a rotation on each side of every weight.

Tseng et al., QuIP#, arXiv:2402.04396, section 3 (incoherence processing). With orthogonal V (of
the inputs) and U (of the outputs)

.. math:: y = x W^\top = \big( (x V)\, (U^\top W V)^\top \big)\, U^\top

the quantized weight is Uᵀ W V, whose entries are similar in size; x V and the product with Uᵀ stay
in the forward, at the cost of a product each. ``v`` also spreads the outliers of activations.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from pydantic import Field, field_validator
from torch.nn import Linear, Module

from llmcompressor.core.contract import RecipeRules
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.fused import fused_partners
from llmcompressor.modeling.matching import (
    as_targets,
    check_targets,
    match_named_modules,
    matches_name,
)
from llmcompressor.modeling.names import named_modules
from llmcompressor.modifiers.rotation.base import (
    FindFault,
    RotationModifier,
    TransformType,
    read_rotation_names,
)
from llmcompressor.modifiers.rotation.plan import (
    Fusion,
    RotationPlan,
    norms_feeding,
    short_targets,
)
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.assign import reason_to_leave

_INPUT = TransformLocation.INPUT


class QuIPModifier(RotationModifier):
    """Rotate the inputs and outputs of Linears; see the module's docstring.

    Attributes:
        rotations: ``v`` for the inputs, ``u`` for the outputs, or both.
        targets: modules to rotate.
        ignore: targeted modules to leave out.
        randomize: use random matrices per module; modules that servers fuse (q, k and v; gate and
            up) share one.
        rescale: move large gains of norms into the weights after them before these are rotated
            (:mod:`llmcompressor.numerics.rotation`), for all readers of a norm; norms that an
            earlier modifier of the recipe smooths keep theirs.

    Example::

        QuIPModifier(rotations=["v"], transform_type="random-hadamard")
    """

    rules: ClassVar[RecipeRules] = replace(
        RotationModifier.rules,
        must_precede=RotationModifier.rules.must_precede | {"QuIPModifier"},
    )

    rotations: list[Literal["u", "v"]] = Field(default=["v"])
    transform_type: TransformType = "random-hadamard"
    targets: str | list[str] = "Linear"
    ignore: str | list[str] = Field(default="lm_head")
    rescale: bool = True

    @field_validator("rotations", mode="before")
    @classmethod
    def _parse_rotations(cls, value: Any) -> Any:
        return read_rotation_names(value, str.lower, "u and v")

    @field_validator("learnable")
    @classmethod
    def _check_learnable(cls, value: bool) -> bool:
        if value:
            raise RecipeError(
                "these rotations are random and not learned",
                "Leave learnable out, or use SpinQuantModifier.",
            )
        return value

    def make_plan(self, model: Any) -> RotationPlan:
        """Plan the matrices of all targeted modules."""
        targets, ignore = list(as_targets(self.targets)), list(as_targets(self.ignore))
        check_targets(model, targets, ignore)
        found = self._targeted(model, targets, ignore)
        schemes: dict[str, TransformScheme] = {}
        for rotation in self.rotations:
            if not self.randomize:
                schemes[rotation] = self._scheme(rotation, targets, ignore)
                continue
            sets: dict[str, list[str]] = {}
            for name in found:
                first = min({name, *(found.keys() & fused_partners(name, found))})
                sets.setdefault(first, []).append(name)
            for number, names in enumerate(sets.values()):
                schemes[f"{rotation}_{number}"] = self._scheme(rotation, names, [])
        plan = self.plan_config(model, TransformConfig(config_groups=schemes))
        _check_tied_weights(model, plan)
        if self.rescale and "v" in self.rotations:
            rotated = {one.module for one in plan.online if one.location is _INPUT}
            plan.fuse_norms(norms_feeding(model, rotated, self._smoothed))
        return plan

    @staticmethod
    def _targeted(model: Any, targets: list[str], ignore: list[str]) -> dict[str, None]:
        """Names of the Linears to rotate, in order; other matches are added to ``ignore``."""
        found = dict(match_named_modules(model, targets, ignore))
        left = [
            name
            for name, one in found.items()
            if reason_to_leave(name, one, model.get_submodule(name.rpartition(".")[0]))
            and not any(matches_name(name, target) for target in targets)
        ]
        if left:
            logger.info(
                f"Left as they are: {join_names(left)}: routers and the like, which engines serve "
                "without rotations. To rotate one, target it by name."
            )
        found = {name: one for name, one in found.items() if name not in left}
        others = [name for name, one in found.items() if not isinstance(one, Linear)]
        plain = [target for target in targets if not target.startswith("re:")]
        meant = {name for name, _ in match_named_modules(model, plain)} if plain else set()
        wrong = [name for name in others if name in meant or len(others) == len(found)]
        if wrong:  # else containers of Linears that a pattern matches too
            raise TargetError(
                f"{wrong[0]} is a {type(found[wrong[0]]).__name__}, and QuIP rotates Linears.",
                "Correct the targets, or put it on the ignore list.",
            )
        ignore += [*left, *others]
        return dict.fromkeys(name for name in found if name not in others)

    def prepare(self, model: Any) -> None:
        """Log how many norms are rescaled."""
        norms = self.plan.norms.values()
        if norms:
            readers = {module for norm in norms for module in norm.readers}
            logger.info(
                f"QuIPModifier: {len(norms)} norms are rescaled, and the columns of the "
                f"{len(readers)} weights that read them, before {len(self.plan.online)} rotations."
            )

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The base report, with the number of rescaled norms."""
        found = super().report(names)
        if found:
            found[""]["rescaled_norms"] = len(self.plan.norms)
        return found

    def invariance_error(
        self, model: Any, fault: str, find: FindFault | None = None
    ) -> TargetError:
        """Name one module at fault, found by bisection: modules are rotated independently."""
        if find is None:
            return super().invariance_error(model, fault)
        names = {one.module: one.module_name for one in self.plan.online}
        kind = f"{type(model).__name__} computes something else ({fault})."
        suspects = list(names)
        if self.plan.norms and find(self.plan.restricted_to(suspects)) is None:
            return TargetError(
                f"QuIPModifier: with its norms rescaled {kind}", "Set rescale: false."
            )
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            at_fault = find(self.plan.restricted_to(half)) is not None
            suspects = half if at_fault else suspects[len(half) :]
        guilty = [names[suspects[0]]]
        rest = [module for module in names if module is not suspects[0]]
        if find(self.plan.restricted_to(rest)) is not None:  # its like in other layers, too
            end = guilty[0].rpartition(".")[2]
            guilty = [name for name in names.values() if name.rpartition(".")[2] == end]
        return TargetError(
            f"QuIPModifier: with rotations of {names[suspects[0]]} "
            f"({type(suspects[0]).__name__}) {kind}",
            self.advice_without(model, guilty),
        )

    def advice_without(self, model: Any, names: Sequence[str]) -> str:
        """Suggest the ignore list, which works for every module."""
        ignored = [*as_targets(self.ignore), *short_targets(model, names)]
        return f"Put it on the ignore list: ignore={ignored}."

    def _scheme(self, rotation: str, targets: list[str], ignore: list[str]) -> TransformScheme:
        """The transform scheme of ``u`` or ``v``: applied online and in the weight."""
        places = (
            [("input", False), ("weight_input", True)]
            if rotation == "v"
            else [("weight_output", False), ("output", True)]
        )
        return TransformScheme(
            type=self.transform_type,
            head_dim=self.transform_block_size,
            apply=[
                TransformArgs(targets=targets, ignore=ignore, location=place, inverse=inverse)
                for place, inverse in places
            ],
        )


def _check_tied_weights(model: Module, plan: RotationPlan) -> None:
    """Refuse a tied weight whose modules would be rotated differently.

    Raises:
        TargetError: names both modules.
    """

    def rotations_of(module: Module) -> list[list[int]]:
        own = plan.fusions.get(module, Fusion())
        return [[id(one) for one in rotations] for rotations in (own.inputs, own.outputs)]

    owners: dict[int, tuple[str, Module]] = {}
    for name, module in named_modules(model):
        if module._parameters.get("weight") is None:
            continue
        first, owner = owners.setdefault(id(module._parameters["weight"]), (name, module))
        if rotations_of(owner) != rotations_of(module):
            both = {first: owner, name: module}
            rotated = [one for one, each in both.items() if each in plan.fusions]
            raise TargetError(
                f"QuIPModifier: {first} and {name} share their weight, and would not be rotated "
                "alike.",
                f"Put {join_names(rotated)} on the ignore list, or untie them.",
            )
