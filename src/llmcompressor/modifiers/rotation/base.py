# SPDX-License-Identifier: Apache-2.0
"""Base class of rotation modifiers: the matrices, and the check that outputs stay the same."""

from __future__ import annotations

import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from pydantic import Field, PrivateAttr, field_validator
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import (
    Cost,
    DataSize,
    DataUse,
    Granularity,
    Prediction,
    RecipeRules,
    Solving,
    Traits,
)
from llmcompressor.core.events import Event
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import RecipeError, TargetError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.modeling.blocks import find_blocks
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.names import named_modules
from llmcompressor.modifiers.rotation.online import (
    ONLINE_DTYPE,
    has_online_rotation,
    is_loadable_order,
)
from llmcompressor.modifiers.rotation.plan import (
    RotationPlan,
    fusion_flops,
    trial_flops,
    write_schemes,
)
from llmcompressor.modifiers.rotation.probe import (
    NARROW_TOLERANCE,
    InvarianceProbe,
    probe_logits,
    relative_distance,
)
from llmcompressor.moe.expert_stops import stages_bypassed
from llmcompressor.numerics.hadamard import has_hadamard, random_orthogonal, usable_block_sizes
from llmcompressor.numerics.rotation import Rotation, rotated_weight_peak_bytes

TransformType = Literal["hadamard", "random-hadamard", "random-matrix"]
FindFault = Callable[[RotationPlan], str | None]
"""Plan → the reason why outputs would change with it, as a clause; ``None`` if they would not."""

_PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_UNSEEN_TOLERANCE = 1e-3
"""How far outputs of a float32 model may move where nothing could be tried out before."""
_FLOAT = 4


def read_rotation_names(value: Any, case: Callable[[str], str], known: str) -> Any:
    """The names of a recipe's ``rotations`` as a list, in upper or lower case.

    Raises:
        RecipeError: there is none, or one twice.
    """
    if not isinstance(value, str | Iterable | None):
        return value  # pydantic reports the expected type
    names = [value] if isinstance(value, str) else list(value or ())
    read = [case(str(getattr(name, "value", name))) for name in names]
    if not read or len(set(read)) < len(read):
        raise RecipeError(f"rotations are {names}", f"Name each of {known} at most once.")
    return read


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

    # ------------------------------------------------------------------ overridden by a technique

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

    def invariance_error(
        self, model: Any, fault: str, find: FindFault | None = None
    ) -> TargetError:
        """The error for a model whose outputs would change.

        Args:
            model: the model.
            fault: the symptom, as a clause.
            find: finds the symptom of a part of the plan; ``None`` if parts cannot be tried.
        """
        return TargetError(
            f"{self._name}: rotated, {type(model).__name__} computes something else ({fault}).",
            "Leave it out of the recipe.",
        )

    def advice_without(self, model: Any, names: Sequence[str]) -> str:
        """Advice on modules that cannot have a rotation in their forward."""
        return "Leave it out of the recipe."

    # ------------------------------------------------------------------ declarations

    @property
    def traits(self) -> Traits:
        """Nothing is observed in the forward, and each weight is rotated independently.

        Matrices may be learned before the first weight is rotated, by all ranks.
        """
        return Traits(
            data=DataUse.LEARN_FIRST if self.learnable else DataUse.NONE,
            granularity=Granularity.LINEAR,
            begins_pass=True,
            by_block=True,
            over_ranks=Solving.ALL if self.learnable else Solving.ALONE,
            beyond_statistics="rotates inputs, so that statistics of others would not fit them",
        )

    @property
    def torch_precision(self) -> torch.dtype:
        """The dtype that ``precision`` names."""
        return _PRECISIONS[self.precision]

    @property
    def plan(self) -> RotationPlan:
        """The planned rotations; it is initialized."""
        assert self._plan is not None
        return self._plan

    def predict(self, state: State) -> Prediction:
        """Online rotations, which the model holds already."""
        plan, model = self.plan, state.model
        return Prediction(attached=lambda: plan.active(model))

    def cost(self, modules: Sequence[Module], data: DataSize) -> Cost:
        """Cost of the trial of the rotations in float32, and of fusing them into the weights."""
        flops = trial_flops(self.plan, modules)
        flops += fusion_flops(self.plan, modules, self.torch_precision)
        fusing = trying = tried = 0
        for one in modules:
            every = [each for each in one._parameters.values() if each is not None]
            size, fusion = sum(each.numel() for each in every), self.plan.fusions.get(one)
            if fusion is None:
                tried += sum(each.numel() for each in every if each.itemsize < _FLOAT)
                continue
            tried += size
            held = functools.partial(
                rotated_weight_peak_bytes, size, inputs=fusion.inputs, outputs=fusion.outputs
            )
            own = sum(each.nbytes for each in every)
            fusing = max(fusing, held(precision=self.plan.precision) + own)
            trying = max(trying, held(precision=torch.float32, is_apart=False))
        return Cost(flops=flops, peak_bytes=max(fusing, _FLOAT * tried + trying))

    def report(self, names: Container[str] | None = None) -> dict[str, Any]:
        """Number of rotated weights, under the name of the model."""
        if self._plan is None or not self._is_done or (names is not None and "" not in names):
            return {}
        return {"": {"weights": self._plan.rotated_weights}}

    # ------------------------------------------------------------------ phases

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the parts of the model and make every matrix; a failure changes nothing."""
        model, kind = state.model, self._name
        for name, module in named_modules(model):
            if getattr(module, "quantization_scheme", None) is not None:
                raise TargetError(
                    f"{name} is quantized already: a rotation would undo that.",
                    f"Put {kind} first in the recipe, and begin with a model that is not "
                    "quantized.",
                )
        self._smoothed = {name for name, one in named_modules(model) if one in state.facts.smoothed}
        self._plan = plan = self.make_plan(model)
        self._check_online_rotations(model, state.facts.rotated_by)
        if _is_loaded(model):
            self._check_invariance(model)
        self.prepare(model)
        state.facts.rotated_by.update(dict.fromkeys((one.module for one in plan.online), kind))
        state.facts.outputs_changed_by.add(kind)
        online = {one.scheme for one in plan.online}
        staying = {one.scheme for one in plan.online if one.in_linear}
        if staying:
            logger.warning(
                f"{', '.join(sorted(staying)[:4])} {'stay' if len(staying) > 1 else 'stays'} in "
                "the forward, which readers of the checkpoint have to apply: vLLM does; "
                "transformers drops transform_config, and its outputs are wrong."
            )
        device = None
        if not _is_loaded(model):
            self._check_blocks(model)
            loaded = (one.device for one in model.parameters() if not one.is_meta)
            device = next(loaded, torch.device("meta"))
        plan.attach(model, device)  # the output is predicted from the model before the run
        plan.rest(rests=True)
        alike = {key: one for key, one in plan.schemes.items() if key in online - staying}
        write_schemes(model, alike | plan.schemes)
        return True

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Remove rotations and their schemes if the weights were not rotated."""
        if self._plan is not None and not self._is_done:
            self._plan.detach()
            write_schemes(state.model, {}, without=self._plan.schemes)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Rotate the model, or prepare to do so block by block; check that its outputs stay."""
        plan, model, source = self.plan, state.model, state.run.block_source
        told = ""
        if not source.holds_all:
            if not source.finished:  # an interrupted run has checked its rotations already
                with source.visiting():
                    self._check_invariance(model)
            plan.rest(rests=False)
            if self.learnable:
                self.learn(state, plan)
        else:
            with stages_bypassed(model):
                before = probe_logits(model)
                plan.rest(rests=False)
                if self.learnable:
                    self.learn(state, plan)
                plan.fuse()
                moved = relative_distance(before, probe_logits(model))
            self._check_rounding(model, moved)
            told = f"; outputs moved by {moved:.2g} of their size"
        self._is_done = True
        logger.info(
            f"{self._name}: {plan.rotated_weights} weights are rotated, {len(plan.online)} "
            f"rotations stay in the forward{told}."
        )

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: Iterable[Module], **kwargs: Any
    ) -> None:
        """Rotate weights before other modifiers read them."""
        self.finish(state, modules)

    def finish(self, state: State, modules: Iterable[Module], *, written: bool = False) -> None:
        """Rotate the weights of the loaded ``modules``, each once."""
        if state.run.block_source.holds_all:
            return  # they are rotated together
        fresh = set(modules) - self._rotated
        self.plan.fuse(fresh)
        self._rotated |= fresh

    def adopt(self, state: State, modules: Iterable[Module]) -> None:
        """Mark the weights of ``modules`` as rotated."""
        self._rotated.update(modules)

    # ------------------------------------------------------------------ what cannot be rotated

    def _check_invariance(self, model: Any) -> None:
        """Check that the rotated model will produce the same outputs.

        Raises:
            TargetError: outputs would change, or the model does not run on token ids alone.
        """
        with stages_bypassed(model):
            probe = InvarianceProbe(model)
            fault = probe.fault(self.plan)
            if fault is not None:
                raise self.invariance_error(model, fault, probe.fault)
        self._tried = True

    def _check_rounding(self, model: Any, moved: float) -> None:
        """Check by how much the outputs of the rotated model have moved, in its own dtype.

        Raises:
            TargetError: they are NaN or infinite; or they have changed, and either rounding does
                not explain it, or it could not be tried before because weights were not all in
                memory.
        """
        dtype = next(model.parameters()).dtype
        told = f"outputs moved by {moved:.2g} of their size"
        if moved <= NARROW_TOLERANCE.get(dtype, _UNSEEN_TOLERANCE):
            return
        rounds = {dtype, self.torch_precision} & NARROW_TOLERANCE.keys()
        if not self._tried or (math.isfinite(moved) and not rounds):
            raise self.invariance_error(model, f"its {told}")
        if not math.isfinite(moved):
            raise TargetError(
                f"{self._name}: rotated, {type(model).__name__} overflows in {dtype}.",
                'Load it in a wider dtype: precision="bfloat16" or "float32".',
            )
        logger.warning(
            f"{self._name}: {told}. That is the rounding of rotated weights to {dtype}, "
            f"computed in {self.precision}; without it they stay."
        )

    def _check_blocks(self, model: Module) -> None:
        """Refuse norms whose gains would be fused into weights of another block.

        Raises:
            TargetError: names the norm.
        """
        places = {
            inner: name for block, name in find_blocks(model).items() for inner in block.modules()
        }
        names = {module: name for name, module in named_modules(model)}
        for norm in self.plan.norms.values():
            for reader, name in norm.readers.items():
                if places.get(norm.module) != places.get(reader):
                    raise TargetError(
                        f"The norm {names[norm.module]} feeds {name}, which lies elsewhere, and "
                        "blocks are in memory one at a time.",
                        "Load the model and pass it instead of its path.",
                    )

    def _check_online_rotations(self, model: Any, owners: Mapping[Module, str]) -> None:
        """Refuse a second rotation in a forward, and matrices that readers cannot build.

        Raises:
            TargetError: names the module.
        """
        online = self.plan.online
        taken = [one for one in online if one.module in owners or has_online_rotation(one.module)]
        if taken:
            owner = owners.get(taken[0].module)
            by = f" from {owner}, and {self._name} would add another" if owner else ""
            raise TargetError(
                f"{taken[0].module_name} has a rotation in its forward already{by}.",
                self.advice_without(model, [one.module_name for one in taken]),
            )
        for one in online:
            order = one.rotation.order
            if not is_loadable_order(order):
                sizes = filter(is_loadable_order, usable_block_sizes(order, most=64))
                shown = ", ".join(map(str, list(sizes)[:4]))
                raise TargetError(
                    f"Readers cannot build a rotation of {order} channels, which "
                    f"{one.module_name} would need in its forward.",
                    f"Set transform_block_size, for instance to {shown}."
                    if shown
                    else "Leave this rotation out.",
                )

    # ------------------------------------------------------------------ matrices and schemes

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
                f"{self._name}: there is no type of rotation {kind!r}.",
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

    def written(self, scheme: TransformScheme, rotations: Iterable[Rotation]) -> TransformScheme:
        """A scheme as it is written, with a type from which loaders build its matrices."""
        online = any(args.is_online() for args in scheme.apply)
        kind = scheme.type
        if kind == "hadamard" and not all(one.is_sylvester for one in rotations):
            kind = "random-hadamard"
        if kind == "random-matrix" and online:
            kind = "random-hadamard"
        precision = ONLINE_DTYPE if online else self.torch_precision
        return scheme.model_copy(update={"type": kind, "precision": precision})

    def plan_config(self, model: Any, config: TransformConfig) -> RotationPlan:
        """Plan the rotations of a ``transform_config``, which loaders interpret as follows.

        Q is the matrix of a scheme, transposed with ``inverse``::

            input           x Q              at run time
            output          y Q              at run time
            weight_input    W Qᵀ             so an inverse one undoes an ``input`` that is none
            weight_output   Qᵀ W, b Q        an embedding's rows: e Q
            q_attn, k_cache q Q, k Q         at run time, after RoPE

        Raises:
            RecipeError: a scheme has an unknown type, or needs several matrices.
            TargetError: targets match nothing, or modules of the wrong kind or width.
        """
        plan = RotationPlan(self.torch_precision)
        for name, scheme in config.config_groups.items():
            if scheme.randomize:
                raise RecipeError(
                    f"transform_config: {name} has randomize, whose permutations not every reader "
                    "applies.",
                    "Give each module a scheme of its own instead, without randomize.",
                )
            rotations: dict[int, Rotation] = {}
            for args in scheme.apply:
                found = list(match_named_modules(model, args.targets, args.ignore))
                if not found:
                    raise TargetError(
                        f"The rotation {name} matches no module: {args.targets}.",
                        "Correct its targets.",
                    )
                for module_name, module in found:
                    order = _order_for(scheme, args, module_name, module)
                    rotations[order] = self.rotation(name, order, module_name, kind=scheme.type)
                    plan.add(name, args, module_name, module, rotations[order])
            plan.schemes[name] = self.written(scheme, rotations.values())
        return plan

    def block_of(self, width: int, what: str) -> int:
        """Block size: the number of ``width`` channels that are rotated together.

        Raises:
            TargetError: the block size does not divide the width.
        """
        size = self.transform_block_size or width
        if width % size:
            near = ", ".join(map(str, usable_block_sizes(width)))
            raise TargetError(
                f"transform_block_size {size} does not divide {width}, the width of {what}.",
                f"Choose one that does, such as {near}.",
            )
        return size


def _order_for(scheme: TransformScheme, args: TransformArgs, name: str, module: Module) -> int:
    """Size of the matrix that a scheme has for a module."""
    location = TransformLocation(args.location)
    if location in (TransformLocation.Q_ATTN, TransformLocation.K_CACHE):
        width: Any = scheme.head_dim or getattr(module, "head_dim", None)
        if not isinstance(width, int):
            raise TargetError(f"The width of a head of {name} is not known.", "Give head_dim.")
    elif isinstance(module, Linear):
        of_inputs = location in (TransformLocation.INPUT, TransformLocation.WEIGHT_INPUT)
        width = module.in_features if of_inputs else module.out_features
    elif isinstance(module, Embedding) and location is TransformLocation.WEIGHT_OUTPUT:
        width = module.embedding_dim
    else:
        raise TargetError(
            f"{name} is a {type(module).__name__}: a rotation at {location.value} needs a Linear.",
            "Correct the targets, or put it on the ignore list.",
        )
    order = scheme.head_dim or width
    if width % order:
        raise TargetError(
            f"Blocks of {order} channels do not divide {width}, the width of {name}.",
            "Choose another block size, or put it on the ignore list.",
        )
    return int(order)


def _is_loaded(model: Module) -> bool:
    return not any(parameter.is_meta for parameter in model.parameters())
