# SPDX-License-Identifier: Apache-2.0
"""Base class of rotation modifiers: the matrices, and the check that outputs stay the same."""

from __future__ import annotations

import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from compressed_tensors.transform import TransformLocation, TransformScheme
from pydantic import Field, PrivateAttr, field_validator
from torch.nn import Linear, Module

from llmcompressor.core.contract import (
    Cost,
    DataSize,
    DataUse,
    Granularity,
    Prediction,
    RecipeRules,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.names import named_modules
from llmcompressor.modifiers.rotation.online import (
    ONLINE_DTYPE,
    add_schemes,
    drop_schemes,
    has_online_rotation,
    is_loadable_order,
)
from llmcompressor.modifiers.rotation.plan import RotationPlan, fusion_flops, trial_flops
from llmcompressor.modifiers.rotation.probe import (
    NARROW_TOLERANCE,
    InvarianceProbe,
    is_loaded,
    probe_logits,
    relative_distance,
)
from llmcompressor.modifiers.rotation.rehearsal import check_on_proxy
from llmcompressor.moe.expert_stops import stages_bypassed
from llmcompressor.numerics.hadamard import has_hadamard, random_orthogonal, usable_block_sizes
from llmcompressor.numerics.rotation import Rotation, rotated_weight_peak_bytes

__all__ = ["RotationModifier", "TransformType"]

TransformType = Literal["hadamard", "random-hadamard", "random-matrix"]

_PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_UNSEEN_TOLERANCE = 1e-3
"""How far outputs of a float32 model may move where nothing could be tried out before."""
_FLOAT = 4
_TURNING = (TransformLocation.INPUT, TransformLocation.OUTPUT)
"""Without these, outputs are wrong; queries and keys turned alike give the same without."""


class RotationModifier(Modifier):
    """Rotate weights and activations without changing the function of the model.

    A model whose outputs would change is refused before anything is rotated: at initialization, or,
    block by block, when the pass begins.

    Attributes:
        transform_type: ``hadamard``; ``random-hadamard``, with random signs; or ``random-matrix``,
            any orthogonal matrix.
        randomize: use a different matrix for each module, if possible, with random signs.
        learnable: learn the matrices that are fused into weights.
        precision: dtype in which rotations are multiplied into weights.
        transform_block_size: rotate blocks of this many channels instead of the whole width.
        seed: seed of random matrices.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(
        run_types=frozenset({"oneshot"}),
        changes_weights=True,
        must_precede=frozenset(
            {
                "QuantizationMixin",
                "MagnitudePruningModifier",
                "ConstantPruningModifier",
                "SparseGPTModifier",
                "WandaPruningModifier",
            }
        ),
    )

    transform_type: TransformType = "hadamard"
    randomize: bool = False
    learnable: bool = False
    precision: str = "float64"
    transform_block_size: int | None = Field(default=None, gt=1)
    seed: int = Field(default=0, ge=0, lt=2**32)

    _plan: RotationPlan | None = PrivateAttr(None)
    _made: dict[str, Rotation] = PrivateAttr(default_factory=dict)
    _moved: float | None = PrivateAttr(None)
    _tried: bool = PrivateAttr(False)
    _is_done: bool = PrivateAttr(False)
    _rotated: set[Module] = PrivateAttr(default_factory=set)
    _smoothed: set[str] = PrivateAttr(default_factory=set)
    """Norms that earlier modifiers smooth."""

    @field_validator("precision", mode="before")
    @classmethod
    def _read_precision(cls, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        if name not in _PRECISIONS:
            raise RecipeError(
                f"there is no precision {value!r}", f"Choose {', '.join(_PRECISIONS)}."
            )
        return name

    @property
    def traits(self) -> Traits:
        """Nothing is observed in the forward, and each weight is rotated independently.

        Matrices may be learned before the first weight is rotated.
        """
        return Traits(
            data=DataUse.LEARN_FIRST if self.learnable else DataUse.NONE,
            granularity=Granularity.LINEAR,
            begins_pass=True,
            by_block=True,
            trial=self.try_on_proxy,
        )

    # ------------------------------------------------------------------ phases

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the parts of the model and make every matrix; a failure changes nothing."""
        model = state.model
        self._check_unquantized(model)
        self._smoothed = {name for name, one in named_modules(model) if one in state.facts.smoothed}
        self._plan = self.make_plan(model)
        self._check_online_rotations(state, self._plan)
        if is_loaded(model):
            self._check_invariance(model, self._plan, by_part=True)
        self.prepare(model)
        turned = (one.module for one in self._plan.online)
        state.facts.rotated_by.update(dict.fromkeys(turned, type(self).__name__))
        staying = {one.scheme for one in self._plan.online if one.location in _TURNING}
        if staying:
            logger.warning(
                f"{', '.join(sorted(staying)[:4])} {'stay' if len(staying) > 1 else 'stays'} in "
                "the forward, which readers of the checkpoint have to apply: vLLM does; "
                "transformers drops transform_config, and its outputs are wrong."
            )
        # Rotations of queries and keys alike may be dropped by servers, depending on the attention
        # schemes; that is checked before the run, which needs them in the configuration.
        turned_alike = {one.scheme for one in self._plan.online} - staying
        add_schemes(model, {name: self._plan.schemes[name] for name in turned_alike})
        if not is_loaded(model):  # the output is predicted from the model before the run
            self._check_blocks(model, self._plan)
            loaded = (one.device for one in model.parameters() if not one.is_meta)
            self._plan.attach_resting(model, next(loaded, torch.device("meta")))
        return True

    def predict(self, state: State) -> Prediction:
        """Online rotations, which the model holds; without weights they are attached already."""
        assert self._plan is not None
        plan, model = self._plan, state.model
        if not is_loaded(model):
            return Prediction()
        return Prediction(attached=lambda: plan.attached(model))

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of the trial of the rotations in float32, and of fusing them into the weights."""
        assert self._plan is not None
        flops = trial_flops(self._plan, modules)
        flops += fusion_flops(self._plan, modules, _PRECISIONS[self.precision])
        return Cost(flops=flops, peak_bytes=self._rotating_bytes(modules))

    def _rotating_bytes(self, modules: Sequence[Module]) -> int:
        """Peak bytes for rotating weights, or for the trial of a part in float32 before."""
        assert self._plan is not None
        rotating, transposing, tried = 0, 0, 0
        for one in modules:
            every = [each for each in one._parameters.values() if each is not None]
            size, fusion = sum(each.numel() for each in every), self._plan.fusions.get(one)
            if fusion is None:
                tried += sum(each.numel() for each in every if each.dtype.itemsize < _FLOAT)
                continue
            tried += size
            held = functools.partial(
                rotated_weight_peak_bytes, size, inputs=fusion.inputs, outputs=fusion.outputs
            )
            itemsize = every[0].dtype.itemsize if every else 0
            rotating = max(rotating, held(precision=self._plan.precision) + size * itemsize)
            transposing = max(transposing, held(precision=torch.float32, is_apart=False))
        return max(rotating, _FLOAT * tried + transposing)

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Remove rotations and their schemes if the weights were not rotated."""
        if self._plan is not None and not self._is_done:
            self._plan.detach()
            drop_schemes(state.model, self._plan.schemes)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Rotate the model, and check that its outputs stay the same."""
        if state.run.block_source is not None:
            self._begin_blocks(state)
        else:
            self._rotate_whole(state)
        self._is_done = True

    def _rotate_whole(self, state: State) -> None:
        model, plan = state.model, self._plan
        assert plan is not None
        before = probe_logits(model)
        plan.attach(model)
        if self.learnable:
            self.learn(state, plan)
        plan.fuse()
        self._moved = relative_distance(before, probe_logits(model))
        self._check_rounding(model)
        logger.info(
            f"{type(self).__name__}: {plan.rotated_weights} weights rotated, {len(plan.online)} "
            f"rotations stay in the forward; outputs moved by {self._moved:.2g} of their size."
        )

    # ------------------------------------------------------------------ block by block

    def _begin_blocks(self, state: State) -> None:
        """Check that outputs will stay the same, and activate online rotations."""
        plan, source = self._plan, state.run.block_source
        assert plan is not None
        assert source is not None
        if not source.finished:  # an interrupted run has checked its rotations already
            with source.visiting():
                self._check_invariance(state.model, plan, by_part=False)
        plan.rest(rests=False)
        if self.learnable:
            self.learn(state, plan)
        logger.info(
            f"{type(self).__name__}: {plan.rotated_weights} weights are rotated, "
            f"{len(plan.online)} rotations stay in the forward."
        )

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Rotate weights before other modifiers read them."""
        self.finish(state, modules)

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Rotate the weights of the loaded ``modules``, each once."""
        if state.run.block_source is None:
            return
        fresh = set(modules) - self._rotated
        assert self._plan is not None
        self._plan.fuse(fresh)
        self._rotated |= fresh

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Mark the weights of ``modules`` as rotated."""
        self._rotated.update(modules)

    def _check_blocks(self, model: Module, plan: RotationPlan) -> None:
        """Refuse norms whose gains would be fused into weights of another block.

        Raises:
            TargetError: names the norm.
        """
        places = {
            inner: name for block, name in find_blocks(model).items() for inner in block.modules()
        }
        names = {module: name for name, module in named_modules(model)}
        for norm in plan.norms:
            for reader, name in norm.readers.items():
                if places.get(norm.module) != places.get(reader):
                    raise TargetError(
                        f"The norm {names[norm.module]} feeds {name}, which lies elsewhere, and "
                        "blocks are in memory one at a time.",
                        "Load the model and pass it instead of its path.",
                    )

    @abstractmethod
    def make_plan(self, model: Any) -> RotationPlan:
        """Plan all rotations of the model.

        Raises:
            TargetError: a part of the model is missing, or there is no matrix for its size.
        """

    def prepare(self, model: Any) -> None:
        """Make structural changes that subsequent modifiers have to see from the start."""

    def learn(self, state: State, plan: RotationPlan) -> None:
        """Replace rotations of the plan by learned ones."""

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """Number of rotated weights; the change of the outputs, if all was in memory.

        It is all under the name of the model.
        """
        if self._plan is None or not self._is_done or (names is not None and "" not in names):
            return {}
        moved = {} if self._moved is None else {"moved": self._moved}
        return {"": {"weights": self._plan.rotated_weights, **moved}}

    # ------------------------------------------------------------------ what cannot be rotated

    def invariance_error(
        self, model: Any, fault: str, find: Callable[[RotationPlan], str | None] | None = None
    ) -> TargetError:
        """The error for a model whose outputs would change.

        Args:
            model: the model.
            fault: the symptom, as a clause.
            find: returns the symptom of a part of the plan, if any; ``None`` if parts cannot be
                tried.
        """
        return TargetError(
            f"{type(self).__name__}: rotated, {type(model).__name__} computes something else "
            f"({fault}).",
            "Leave it out of the recipe.",
        )

    def without(self, model: Any, names: Sequence[str]) -> str:
        """Advice on modules that cannot have a rotation in their forward."""
        return "Leave it out of the recipe."

    def _check_invariance(self, model: Any, plan: RotationPlan, *, by_part: bool) -> None:
        """Check that the rotated model will produce the same outputs.

        Args:
            model: the model.
            plan: the planned rotations.
            by_part: on failure, find out which part of the plan is at fault.

        Raises:
            TargetError: outputs would change, or the model does not run on token ids alone.
        """
        with stages_bypassed(model):
            probe = InvarianceProbe(model)
            self.check_modules_called(model, plan, probe)
            self.check_outputs(model, plan, probe, by_part=by_part)
        self._tried = True

    def check_modules_called(self, model: Any, plan: RotationPlan, probe: InvarianceProbe) -> None:
        """Refuse online rotations in modules whose forward is bypassed.

        Raises:
            TargetError: names the module.
        """
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

    def check_outputs(
        self, model: Any, plan: RotationPlan, probe: InvarianceProbe, *, by_part: bool
    ) -> None:
        """Refuse a model whose outputs would change.

        Raises:
            TargetError: reports by how much; with ``by_part`` also which rotations are at fault.
        """
        fault = probe.fault(plan)
        if fault is not None:
            raise self.invariance_error(model, fault, probe.fault if by_part else None)

    def try_on_proxy(self, model: Any, build: Callable[[int], Any]) -> str:
        """Try the rotations without weights, on a small model; see :func:`.rehearsal.rehearse`."""
        assert self._plan is not None
        return check_on_proxy(self, model, self._plan, build)

    def for_small_model(self, small: Any) -> tuple[Self, RotationPlan]:
        """A copy of this modifier and its plan, for a small model of the same class.

        Blocks of channels shrink to what its widths allow: a model that is invariant under larger
        blocks is invariant under these.

        Returns:
            The modifier, and its plan for the small model.

        Raises:
            TargetError: as :meth:`make_plan`.
        """
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        size = self.transform_block_size
        if size is not None:
            linears = [one for one in small.modules() if isinstance(one, Linear)]
            widths = [width for one in linears for width in (one.in_features, one.out_features)]
            common = math.gcd(size, *(width for width in widths if width >= size))
            fields["transform_block_size"] = common
        other = type(self)(**fields)
        other._smoothed = self._smoothed
        other._plan = other.make_plan(small)
        return other, other._plan

    def _check_rounding(self, model: Any) -> None:
        """Check the outputs of the rotated model in its own dtype.

        Raises:
            TargetError: they are NaN or infinite; or they have changed, and either rounding does
                not explain it, or it could not be tried before because weights were not all in
                memory.
        """
        assert self._moved is not None
        dtype = next(model.parameters()).dtype
        told = f"outputs moved by {self._moved:.2g} of their size"
        if self._moved <= NARROW_TOLERANCE.get(dtype, _UNSEEN_TOLERANCE):
            return
        rounds = {dtype, self.torch_precision} & NARROW_TOLERANCE.keys()
        if not self._tried or (math.isfinite(self._moved) and not rounds):
            raise self.invariance_error(model, f"its {told}")
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
        """The matrix called ``key``, cached by key and order.

        Args:
            key: name of the matrix.
            order: its size.
            what: what it rotates, for error messages.
            kind: type of the matrix; default: ``transform_type``.

        Raises:
            TargetError: no Hadamard matrix of this order is known.
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
            asked = self.transform_block_size == order
            sizes = [] if asked else [str(size) for size in usable_block_sizes(order)]
            which = "the transform_block_size for" if asked else "the width of"
            known = "There is no" if order % 4 else "No construction is known here of a"
            raise TargetError(
                f"{known} Hadamard matrix of order {order}, {which} {what}.",
                f"Set transform_block_size to {', '.join(sizes) or 'another divisor of the width'},"
                ' or transform_type to "random-matrix".',
            )
        signs = kind == "random-hadamard" or self.randomize
        return Rotation.of_hadamard(order, generator if signs else None)

    def block_of(self, width: int, what: str) -> int:
        """Block size: the number of ``width`` channels that are rotated together.

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
        """A scheme as it is written, with a type from which loaders build its matrices.

        Args:
            scheme: the scheme.
            rotations: its matrices, one per size.
            online: some of its rotations stay in the forward.
        """
        kind = scheme.type
        if kind == "hadamard" and not all(one.is_sylvester for one in rotations):
            kind = "random-hadamard"
        if kind == "random-matrix" and online:
            kind = "random-hadamard"
        precision = ONLINE_DTYPE if online else self.torch_precision
        return scheme.model_copy(update={"type": kind, "precision": precision})

    # ------------------------------------------------------------------ checks

    def _check_unquantized(self, model: Module) -> None:
        for name, module in named_modules(model):
            if getattr(module, "quantization_scheme", None) is not None:
                raise TargetError(
                    f"{name} is quantized already: a rotation would undo that.",
                    f"Put {type(self).__name__} first in the recipe, and begin with a model that "
                    "is not quantized.",
                )

    def _check_online_rotations(self, state: State, plan: RotationPlan) -> None:
        model, turned = state.model, state.facts.rotated_by
        taken = [
            one for one in plan.online if one.module in turned or has_online_rotation(one.module)
        ]
        if taken:
            owner = turned.get(taken[0].module)
            by = f" from {owner}, and {type(self).__name__} would add another" if owner else ""
            names = [one.module_name for one in taken]
            raise TargetError(
                f"{names[0]} has a rotation in its forward already{by}.",
                self.without(model, names),
            )
        for one in plan.online:
            if not is_loadable_order(one.rotation.order):
                sizes = [
                    n
                    for n in usable_block_sizes(one.rotation.order, most=64)
                    if is_loadable_order(n)
                ]
                raise TargetError(
                    f"Readers cannot build a rotation of {one.rotation.order} channels, which "
                    f"{one.module_name} would need in its forward.",
                    f"Set transform_block_size, for instance to {', '.join(map(str, sizes[:4]))}."
                    if sizes
                    else "Leave this rotation out.",
                )
