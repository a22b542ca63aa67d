# SPDX-License-Identifier: Apache-2.0
r"""QuIP: incoherence processing, with a rotation on each side of every weight.

Tseng et al., QuIP#, arXiv:2402.04396, section 3 (incoherence processing). With orthogonal V (of
the inputs) and U (of the outputs)

.. math:: y = x W^\top = \big( (x V)\, (U^\top W V)^\top \big)\, U^\top

the quantized weight is Uᵀ W V, whose entries are similar in size; x V and the product with Uᵀ stay
in the forward, at the cost of a product each. ``v`` also spreads the outliers of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
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
from llmcompressor.modifiers.rotation.base import RotationModifier, TransformType
from llmcompressor.modifiers.rotation.from_config import plan_from_config
from llmcompressor.modifiers.rotation.plan import RotationPlan, norms_feeding, short_targets
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.assign import is_router

__all__ = ["QuIPModifier"]


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
        if not isinstance(value, str | Iterable | None):
            return value  # pydantic reports the expected type
        names = [value] if isinstance(value, str) else list(value or ())
        read = [str(getattr(name, "value", name)).lower() for name in names]
        if not read or len(set(read)) < len(read):
            raise RecipeError(f"rotations are {names}", "Name each of u and v at most once.")
        return read

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
        found = list(match_named_modules(model, targets, ignore))
        routers = [
            name for name, one in found if is_router(name, one) and not _is_named(name, targets)
        ]
        if routers:
            logger.info(
                f"Left as they are: {len(routers)} router(s) ({join_names(routers)}), which "
                "engines "
                "serve without rotations. To rotate one, target it by name."
            )
            ignore += routers
            found = [(name, one) for name, one in found if name not in set(routers)]
        others = self._others(model, found, targets)
        ignore += others
        found = [(name, one) for name, one in found if name not in set(others)]
        schemes: dict[str, TransformScheme] = {}
        for rotation in self.rotations:
            if not self.randomize:
                schemes[rotation] = self._scheme(rotation, targets, ignore)
                continue
            sets: dict[str, list[str]] = {}
            present = {name for name, _ in found}
            for name, _ in found:
                first = min({name, *present.intersection(fused_partners(name, present))})
                sets.setdefault(first if rotation == "v" else name, []).append(name)
            for number, names in enumerate(sets.values()):
                schemes[f"{rotation}_{number}"] = self._scheme(rotation, names, [])
        plan = plan_from_config(self, model, TransformConfig(config_groups=schemes))
        _check_tied_weights(model, plan)
        if self.rescale and "v" in self.rotations:
            turned = {one.module for one in plan.online if one.location is TransformLocation.INPUT}
            plan.fuse_norms(norms_feeding(model, turned, self._smoothed))
        return plan

    def prepare(self, model: Any) -> None:
        """Log how many norms are rescaled."""
        assert self._plan is not None
        if self._plan.norms:
            readers = {module for norm in self._plan.norms for module in norm.readers}
            logger.info(
                f"QuIPModifier: {len(self._plan.norms)} norms are rescaled, and the columns of the "
                f"{len(readers)} weights that read them, before {len(self._plan.online)} rotations."
            )

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """The base report, with the number of rescaled norms."""
        found = super().report(names)
        if found and self._plan is not None:
            found[""]["rescaled_norms"] = len(self._plan.norms)
        return found

    @staticmethod
    def _others(
        model: Any, found: Sequence[tuple[str, Module]], targets: Sequence[str]
    ) -> list[str]:
        """Names of matched modules that are not Linears, such as their containers; left out."""
        others = [(name, one) for name, one in found if not isinstance(one, Linear)]
        plain = [target for target in targets if not target.startswith("re:")]
        meant = {name for name, _ in match_named_modules(model, plain)} if plain else set()
        wrong = [(name, one) for name, one in others if name in meant or len(others) == len(found)]
        if wrong:
            raise TargetError(
                f"{wrong[0][0]} is a {type(wrong[0][1]).__name__}, and QuIP rotates Linears.",
                "Correct the targets, or put it on the ignore list.",
            )
        return [name for name, _ in others]

    def invariance_error(
        self, model: Any, fault: str, find: Callable[[RotationPlan], str | None] | None = None
    ) -> TargetError:
        """Name one module at fault, found by bisection: modules are rotated independently."""
        assert self._plan is not None
        names = {one.module: one.module_name for one in self._plan.online}
        if find is None:
            return super().invariance_error(model, fault, find)
        suspects = list(names)
        if self._plan.norms and find(self._plan.restricted_to(suspects)) is None:
            return TargetError(
                f"QuIPModifier: with its norms rescaled {type(model).__name__} computes something "
                f"else ({fault}).",
                "Set rescale: false.",
            )
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            at_fault = find(self._plan.restricted_to(half)) is not None
            suspects = half if at_fault else suspects[len(half) :]
        name = names[suspects[0]]
        return TargetError(
            f"QuIPModifier: with rotations of {name} ({type(suspects[0]).__name__}) "
            f"{type(model).__name__} computes something else ({fault}).",
            self.without(model, [name]),
        )

    def without(self, model: Any, names: Sequence[str]) -> str:
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
    owners: dict[int, list[tuple[str, Module]]] = {}
    for name, module in named_modules(model):
        if module._parameters.get("weight") is not None:
            owners.setdefault(id(module._parameters["weight"]), []).append((name, module))
    for (name, module), *others in owners.values():
        for other, sharing in others:
            if plan.rotations_of(module) != plan.rotations_of(sharing):
                both = {name: module, other: sharing}
                turned = [one for one, each in both.items() if each in plan.fusions]
                raise TargetError(
                    f"QuIPModifier: {name} and {other} share their weight, and would not be "
                    "rotated alike.",
                    f"Put {join_names(turned)} on the ignore list, or untie them.",
                )


def _is_named(name: str, targets: Sequence[str]) -> bool:
    """Return True if a target matches a module by its name, not by its class."""
    return any(matches_name(name, target) for target in targets)
