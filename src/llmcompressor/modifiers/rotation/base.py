# SPDX-License-Identifier: Apache-2.0
"""What modifiers that rotate have in common: matrices by name, the check that nothing changed."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from compressed_tensors.transform import TransformLocation, TransformScheme
from pydantic import Field, PrivateAttr, field_validator
from torch.nn import Module

from llmcompressor.core.events import Event
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modifiers.modifier import Modifier
from llmcompressor.modifiers.rotation.online import (
    ONLINE_DTYPE,
    add_schemes,
    drop_schemes,
    forget_online,
    has_online,
    is_readable,
    plan_online,
    planned_online,
)
from llmcompressor.modifiers.rotation.plan import Plan
from llmcompressor.modifiers.rotation.probe import (
    NARROW_TOLERANCE,
    Probe,
    distance,
    is_loaded,
    logits,
)
from llmcompressor.names import named_modules
from llmcompressor.numerics.hadamard import has_hadamard, random_orthogonal, usable_block_sizes
from llmcompressor.numerics.rotation import Rotation

__all__ = ["RotationModifier", "TransformType"]

TransformType = Literal["hadamard", "random-hadamard", "random-matrix"]

_PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_UNSEEN_TOLERANCE = 1e-3
"""How far outputs of a float32 model may move where nothing could be tried out before."""
_TURNING = (TransformLocation.INPUT, TransformLocation.OUTPUT)
"""Without these, outputs are wrong; queries and keys turned alike give the same without."""


class RotationModifier(Modifier):
    """Rotates weights, and what passes between them; the model computes what it did before.

    It works in memory: the rotated model is compared with the original one, which takes all of it.
    A model that would not compute what it does is refused when it is initialized, as it was.

    Attributes:
        transform_type: ``hadamard``; ``random-hadamard``, with random signs; or ``random-matrix``,
            any orthogonal one.
        randomize: a matrix of its own for each module, where that is possible; random signs.
        learnable: learn the matrices that are multiplied into weights.
        precision: in which weights are multiplied.
        transform_block_size: rotate blocks of so many channels instead of all together.
        seed: of random matrices.
    """

    run_types: ClassVar[frozenset[str]] = frozenset({"oneshot"})
    must_precede: ClassVar[frozenset[str]] = frozenset(
        {
            "QuantizationMixin",
            "MagnitudePruningModifier",
            "ConstantPruningModifier",
            "SparseGPTModifier",
            "WandaPruningModifier",
        }
    )

    transform_type: TransformType = "hadamard"
    randomize: bool = False
    learnable: bool = False
    precision: str = "float64"
    transform_block_size: int | None = Field(default=None, gt=1)
    seed: int = 0

    _plan: Plan | None = PrivateAttr(None)
    _made: dict[str, Rotation] = PrivateAttr(default_factory=dict)
    _moved: float | None = PrivateAttr(None)
    _tried: bool = PrivateAttr(False)

    @field_validator("precision", mode="before")
    @classmethod
    def _read_precision(cls, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        if name not in _PRECISIONS:
            raise RecipeError(
                f"there is no precision {value!r}", f"Choose {', '.join(_PRECISIONS)}."
            )
        return name

    # ------------------------------------------------------------------ phases

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the parts of the model and make every matrix; nothing is changed if one is not."""
        model = state.model
        self._check_raw(model)
        self._plan = self.make_plan(model)
        self._check_online(model, self._plan)
        if is_loaded(model):
            self._try_out(model, self._plan)
        self.prepare(model)
        turned = [one.module for one in self._plan.online if one.location in _TURNING]
        state.turned.update(dict.fromkeys(turned, type(self).__name__))
        staying = {one.scheme for one in self._plan.online if one.location in _TURNING}
        if staying:
            logger.warning(
                f"{', '.join(sorted(staying)[:4])} stay in the forward, which readers of the "
                "checkpoint have to apply: vLLM does; transformers drops transform_config, and its "
                "outputs are wrong."
            )
        # Whether servers may leave these out depends on the schemes of attention, which are checked
        # against them before the work; the others would be missed there without their matrices.
        turned_alike = {one.scheme for one in self._plan.online} - staying
        add_schemes(model, {name: self._plan.schemes[name] for name in turned_alike})
        plan_online((one.module for one in self._plan.online), type(self).__name__)
        return True

    def outline(self, state: State) -> None:
        """Put what stays in the forward there."""
        assert self._plan is not None
        self._plan.attach(state.model)

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Nothing is said of rotations that were not done."""
        if self._plan is not None:
            forget_online(one.module for one in self._plan.online)
            if self._moved is None:
                drop_schemes(state.model, self._plan.schemes)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Rotate, and see that the model computes what it did."""
        model, plan = state.model, self._plan
        assert plan is not None
        before = logits(model)
        plan.attach(model)
        if self.learnable:
            self.learn(state, plan)
        plan.fuse()
        self._moved = distance(before, logits(model))
        self._check_rounding(model)
        logger.info(
            f"{type(self).__name__}: {len(plan.fusions)} weights rotated, {len(plan.online)} "
            f"rotations stay in the forward; outputs moved by {self._moved:.2g} of their size."
        )

    @abstractmethod
    def make_plan(self, model: Any) -> Plan:
        """What is rotated by what.

        Raises:
            TargetError: a part of the model is not there, or has a size without a matrix.
        """

    def prepare(self, model: Any) -> None:
        """Change what later modifiers have to see from the start."""

    def learn(self, state: State, plan: Plan) -> None:
        """Replace rotations of the plan by learned ones."""

    def report(self) -> dict[str, Any]:
        """How far the outputs moved."""
        if self._plan is None or self._moved is None:
            return {}
        return {"": {"weights": len(self._plan.fusions), "moved": self._moved}}

    # ------------------------------------------------------------------ what cannot be rotated

    def refusal(
        self, model: Any, fault: str, find: Callable[[Plan], str | None] | None = None
    ) -> TargetError:
        """The error for a model that would compute something else.

        Args:
            model: it.
            fault: how that shows, a clause.
            find: whether some of the plan alone shows a fault too; ``None`` if it cannot be known.
        """
        return TargetError(
            f"{type(self).__name__}: rotated, {type(model).__name__} computes something else "
            f"({fault}).",
            "Leave it out of the recipe.",
        )

    def without(self, model: Any, names: Sequence[str]) -> str:
        """What to do about modules that cannot have a rotation in their forward."""
        return "Leave it out of the recipe."

    def _try_out(self, model: Any, plan: Plan) -> None:
        """See that the model will compute what it does.

        Raises:
            TargetError: it would not, or does not run on token ids alone.
        """
        probe = Probe(model)
        turned = {one.module: one.module_name for one in plan.online if one.location in _TURNING}
        wrong = [name for module, name in turned.items() if module in probe.read_uncalled]
        if wrong:
            raise TargetError(
                f"{type(self).__name__}: {type(model).__name__} multiplies by the weight of "
                f"{wrong[0]} without calling it"
                + (f" (so for {len(wrong)} modules)" if len(wrong) > 1 else "")
                + ", so that a rotation in its forward would be passed by.",
                self.without(model, wrong),
            )
        fault = probe.fault(plan)
        if fault is not None:
            raise self.refusal(model, fault, probe.fault)
        self._tried = True

    def _check_rounding(self, model: Any) -> None:
        """Whether the rotated model, which was tried out in float32, is none the worse for its own.

        Raises:
            TargetError: it computes NaN or infinity; or something else, and it could not be tried
                out before, since its weights are not all in one place.
        """
        assert self._moved is not None
        dtype = next(model.parameters()).dtype
        told = f"outputs moved by {self._moved:.2g} of their size"
        if self._moved <= NARROW_TOLERANCE.get(dtype, _UNSEEN_TOLERANCE):
            return
        if not self._tried:
            raise self.refusal(model, f"its {told}")
        if not math.isfinite(self._moved):
            raise TargetError(
                f"{type(self).__name__}: rotated, {type(model).__name__} overflows in {dtype}.",
                'Load it in a wider dtype: precision="bfloat16" or "float32".',
            )
        logger.warning(
            f"{type(self).__name__}: {told}. That is the rounding of rotated weights to {dtype}, "
            f"computed in {self.precision}; without it they stay."
        )

    # ------------------------------------------------------------------ matrices

    def rotation(self, key: str, order: int, what: str, *, kind: str | None = None) -> Rotation:
        """The matrix called ``key``, one and the same for equal keys and orders.

        Args:
            key: what it is called.
            order: its size.
            what: it rotates, for errors.
            kind: how it is made; ``transform_type`` by default.

        Raises:
            TargetError: there is no Hadamard matrix of this order.
        """
        name = f"{key}/{order}"
        if name not in self._made:
            self._made[name] = self._make(name, order, what, kind or self.transform_type)
        return self._made[name]

    def _make(self, name: str, order: int, what: str, kind: str) -> Rotation:
        if kind not in get_args(TransformType):
            raise RecipeError(
                f"{type(self).__name__}: there is no type of rotation {kind!r}.",
                did_you_mean(kind, get_args(TransformType)),
            )
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        if kind == "random-matrix":
            return Rotation.of_matrix(random_orthogonal(order, generator))
        if not has_hadamard(order):
            sizes = [str(size) for size in usable_block_sizes(order)]
            raise TargetError(
                f"There is no Hadamard matrix of order {order}, the width of {what}.",
                f"Set transform_block_size to {', '.join(sizes)}"
                + ("," if sizes else " a size that divides it,")
                + ' or transform_type to "random-matrix".',
            )
        signs = kind == "random-hadamard" or self.randomize
        return Rotation.of_hadamard(order, generator if signs else None)

    def block_of(self, width: int, what: str) -> int:
        """How many of ``width`` channels are rotated together.

        Raises:
            TargetError: the block size does not divide the width.
        """
        size = self.transform_block_size
        if size is None:
            return width
        if width % size:
            near = [str(one) for one in usable_block_sizes(width)]
            raise TargetError(
                f"transform_block_size {size} does not divide {width}, the width of {what}.",
                f"Choose one that does, such as {', '.join(near)}.",
            )
        return size

    @property
    def torch_precision(self) -> torch.dtype:
        """The dtype that ``precision`` names."""
        return _PRECISIONS[self.precision]

    def written(
        self, scheme: TransformScheme, rotations: Sequence[Rotation], *, online: bool
    ) -> TransformScheme:
        """A scheme as it is written, of a type from which readers make its matrices.

        Args:
            scheme: what rotates where.
            rotations: its matrices, one per size.
            online: whether some of it stays in the forward.
        """
        kind = scheme.type
        if kind == "hadamard" and not all(map(_is_sylvesters, rotations)):
            kind = "random-hadamard"
        if kind == "random-matrix" and online:
            kind = "random-hadamard"
        precision = ONLINE_DTYPE if online else self.torch_precision
        return scheme.model_copy(update={"type": kind, "precision": precision})

    # ------------------------------------------------------------------ checks

    def _check_raw(self, model: Module) -> None:
        for name, module in named_modules(model):
            if getattr(module, "quantization_scheme", None) is not None:
                raise TargetError(
                    f"{name} is quantized already: a rotation would undo that.",
                    f"Put {type(self).__name__} first in the recipe, and begin with a model that "
                    "is not quantized.",
                )

    def _check_online(self, model: Any, plan: Plan) -> None:
        taken = [one for one in plan.online if planned_online(one.module) or has_online(one.module)]
        if taken:
            owner = planned_online(taken[0].module)
            by = f" from {owner}, and {type(self).__name__} would add another" if owner else ""
            names = [one.module_name for one in taken]
            raise TargetError(
                f"{names[0]} has a rotation in its forward already{by}.",
                self.without(model, names),
            )
        for one in plan.online:
            if not is_readable(one.rotation.order):
                sizes = [
                    n for n in usable_block_sizes(one.rotation.order, most=64) if is_readable(n)
                ]
                raise TargetError(
                    f"Readers cannot build a rotation of {one.rotation.order} channels, which "
                    f"{one.module_name} would need in its forward.",
                    f"Set transform_block_size, for instance to {', '.join(map(str, sizes[:4]))}."
                    if sizes
                    else "Leave this rotation out.",
                )


def _is_sylvesters(rotation: Rotation) -> bool:
    signs_N = rotation.signs_N
    power_of_two = rotation.order & (rotation.order - 1) == 0
    return power_of_two and signs_N is not None and bool((signs_N > 0).all())
