# SPDX-License-Identifier: Apache-2.0
r"""Rotation plan: the rotations of every weight and forward, and their application.

With g the gain of a norm n, b its bias, d the factor that is fused, and W a Linear that reads it

.. math:: W (g \odot n(x) + b) = (W\,\mathrm{diag}(d))\, ((g / d) \odot n(x) + b / d)

A rotation of the residual stream needs the whole gain fused (d = g). A rotation between a norm and
its readers works best on channels of similar size (d: powers of two).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformLocation,
    TransformScheme,
)
from torch import Tensor
from torch.nn import Embedding, Linear, Module

from llmcompressor.core.contract import ELEMENTWISE
from llmcompressor.equalization.mappings import find_smooth_sets
from llmcompressor.equalization.rescale import input_channels, write_parameters
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.call_graph import DataFlow, trace_flow
from llmcompressor.modeling.names import named_modules, own_parameters
from llmcompressor.modeling.patches import RESTS
from llmcompressor.modifiers.rotation.online import OnlineRotation, stored_weight, tie_weights
from llmcompressor.numerics.hadamard import split_order
from llmcompressor.numerics.rotation import (
    Rotation,
    channel_rescaling,
    column_squares,
    rotated_bias,
    rotated_weight,
)


@dataclass(frozen=True)
class Norm:
    """A norm whose gain, or a part of it, is fused into the modules that read it.

    Attributes:
        module: the norm.
        offset: constant that it adds to its weight: 0, or 1 as in Gemma.
        readers: modules that read its output, by name.
        rescaled_for: the readers whose inputs are rotated, if channels are only rescaled for them;
            empty if the whole gain is fused, which takes a norm without bias.
    """

    module: Module
    offset: float
    readers: dict[Module, str]
    rescaled_for: tuple[Module, ...] = ()

    def factor(self) -> Tensor | None:
        """What is fused into its readers, float64 ``[C]``; ``None`` for a norm without weight."""
        gain_C = self._gain()
        if gain_C is None or not self.rescaled_for:
            return gain_C
        square_C, bias_C = gain_C.square(), self.module._parameters.get("bias")
        if bias_C is not None:  # without gain and bias, channels have mean square one on average
            square_C += bias_C.detach().double().square()
        weights = [one._parameters["weight"] for one in self.rescaled_for]
        return channel_rescaling(
            square_C, column_squares(one for one in weights if one is not None)
        )

    def remainder(self, factor_C: Tensor | None) -> dict[str, Tensor]:
        """Its parameters after ``factor_C`` was fused into its readers, float64 ``[C]``."""
        gain_C, bias_C = self._gain(), self.module._parameters.get("bias")
        if factor_C is None or gain_C is None:
            return {}
        if not self.rescaled_for:
            return {"weight": factor_C.new_full(factor_C.shape, 1.0 - self.offset)}
        found = {"weight": gain_C / factor_C - self.offset}
        return found if bias_C is None else {**found, "bias": bias_C.detach().double() / factor_C}

    def _gain(self) -> Tensor | None:
        weight_C = self.module._parameters.get("weight")
        return None if weight_C is None else weight_C.detach().double() + self.offset


def norms_feeding(
    model: Any, rotated: Container[Module], smoothed: Container[str]
) -> Iterator[Norm]:
    """Norms to rescale before modules of ``rotated``, by the structure of the blocks.

    Blocks of one class are assumed to be alike, although they may call different children: a norm
    that feeds more modules in a traced forward than the structure shows is left out.

    Args:
        model: its weights may be on the meta device.
        rotated: modules whose inputs are rotated.
        smoothed: names of norms that are not rescaled.
    """
    sets = find_smooth_sets(model, norms_only=True)
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
        own = tuple(module for module in readers if module in rotated)
        known = fed.get(one.smooth, set()) <= readers.keys()
        if own and known and one.name not in smoothed:
            yield Norm(one.smooth, one.offset, readers, own)


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


@dataclass
class RotationPlan:
    """All changes that rotations make to a model.

    Attributes:
        precision: dtype in which rotations are multiplied into weights.
        fusions: module → factors of its weight.
        norms: norms whose gain, or part of it, is fused into the Linears after them.
        online: rotations that stay in the forward.
        schemes: their form in ``transform_config``.
    """

    precision: torch.dtype
    fusions: dict[Module, Fusion] = field(default_factory=dict)
    norms: dict[Module, Norm] = field(default_factory=dict)
    online: list[OnlineRotation] = field(default_factory=list)
    schemes: dict[str, TransformScheme] = field(default_factory=dict)
    _of_scheme: dict[int, str] = field(default_factory=dict)
    _factors: dict[Module, Tensor | None] = field(default_factory=dict)

    @property
    def rotated_weights(self) -> int:
        """Number of weights that are rotated."""
        return sum(bool(one.inputs or one.outputs) for one in self.fusions.values())

    # ------------------------------------------------------------------ planning

    def fuse_norms(self, norms: Iterable[Norm]) -> None:
        """Plan to fuse the gains of norms into the modules that read them."""
        for norm in norms:
            self.norms[norm.module] = norm
            for module in norm.readers:
                self.fusions.setdefault(module, Fusion()).norm = norm

    def add(
        self, scheme: str, args: TransformArgs, name: str, module: Module, rotation: Rotation
    ) -> None:
        """Plan to rotate one module as ``args`` says; an embedding's output is its rows."""
        location = TransformLocation(args.location)
        if args.is_online():
            self.online.append(
                OnlineRotation(module, name, scheme, location, rotation, args.inverse)
            )
            return
        own = self.fusions.setdefault(module, Fusion())
        of_inputs = location is TransformLocation.WEIGHT_INPUT
        fused = rotation if of_inputs == bool(args.inverse) else rotation.transposed()
        (own.inputs if of_inputs or isinstance(module, Embedding) else own.outputs).append(fused)
        self._of_scheme[id(fused)] = scheme

    def restricted_to(
        self,
        modules: Container[Module] | None = None,
        *,
        schemes: Container[str] | None = None,
        norms: bool = False,
    ) -> RotationPlan:
        """The plan restricted to some modules and schemes, with or without gains of norms."""

        def kept(scheme: str, module: Module) -> bool:
            return (modules is None or module in modules) and (schemes is None or scheme in schemes)

        fusions = {
            module: Fusion(
                one.norm if norms else None,
                [each for each in one.inputs if kept(self._of_scheme[id(each)], module)],
                [each for each in one.outputs if kept(self._of_scheme[id(each)], module)],
            )
            for module, one in self.fusions.items()
        }
        return RotationPlan(
            self.precision,
            fusions,
            self.norms if norms else {},
            [one for one in self.online if kept(one.scheme, one.module)],
            self.schemes,
        )

    # ------------------------------------------------------------------ weights

    @torch.no_grad()
    def fuse(self, modules: Collection[Module] | None = None) -> None:
        """Multiply all factors into the weights; once into a weight that several modules share.

        Args:
            modules: limit it to these modules; a norm has to be among them together with its
                readers.
        """
        self.read_factors(modules)
        done: set[int] = set()
        for module in (*self.fusions, *self.norms):
            weight = module._parameters.get("weight")
            if id(weight) not in done and (modules is None or module in modules):
                write_parameters(module, self.values(module))
                done.add(id(weight))

    def read_factors(self, modules: Container[Module] | None = None) -> None:
        """Keep the factors of loaded norms, before these or their readers change."""
        self._factors = {
            module: norm.factor()
            for module, norm in self.norms.items()
            if modules is None or module in modules
            if not any(one is not None and one.is_meta for one in module._parameters.values())
        }

    def factor_of(self, norm: Norm) -> Tensor | None:
        """The fused factor of a norm, as it was when it was first asked for."""
        if norm.module not in self._factors:
            self._factors[norm.module] = norm.factor()
        return self._factors[norm.module]

    def values(self, module: Module, *, wide: bool = False) -> dict[str, Tensor]:
        """The parameters of ``module`` with all factors multiplied in; it is not changed.

        Args:
            module: its parameters are loaded.
            wide: compute and return float32, even for narrower weights.
        """
        found: dict[str, Tensor] = {}
        norm, fusion = self.norms.get(module), self.fusions.get(module)
        if norm is not None:
            for name, value_C in norm.remainder(self.factor_of(norm)).items():
                own = module._parameters[name]
                assert own is not None
                found[name] = value_C.to(torch.float32 if wide else own.dtype)
        if fusion is None:
            return found
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        precision = torch.float32 if wide else self.precision
        found["weight"] = rotated_weight(
            weight.detach(),
            gain_C=None if fusion.norm is None else self.factor_of(fusion.norm),
            inputs=fusion.inputs,
            outputs=fusion.outputs,
            precision=precision,
            dtype=torch.float32 if wide else None,
        )
        if bias is not None and isinstance(module, Linear) and fusion.outputs:
            bias_R = bias.detach().float() if wide else bias.detach()
            found["bias"] = rotated_bias(bias_R, fusion.outputs, precision=precision)
        return found

    # ------------------------------------------------------------------ forward

    def attach(self, model: Any, device: torch.device | None = None) -> None:
        """Attach the online rotations.

        Args:
            model: the model.
            device: device of the matrices; default: that of each module.
        """
        weights: dict[tuple[int, str, torch.device], Any] = {}
        for one in self.online:
            own = (parameter.device for parameter in one.module.parameters())
            place = device or next(own, torch.device("cpu"))
            key = (id(one.rotation), one.scheme, place)
            if key not in weights:
                weights[key] = stored_weight(one.rotation, place)
            one.attach(model, self.schemes[one.scheme], weights[key])
        tie_weights(self.online)

    def rest(self, *, rests: bool) -> None:
        """Deactivate the attached rotations, or activate them again."""
        for one in self.online:
            assert one.transform is not None
            one.transform.__dict__[RESTS] = rests

    def detach(self) -> None:
        """Remove the attached rotations."""
        for one in reversed(self.online):
            if one.transform is not None:
                one.detach()

    @contextlib.contextmanager
    def active(self, model: Any) -> Iterator[None]:
        """Apply online rotations in the forward while the body runs."""
        transforms = [one.transform for one in self.online if one.transform is not None]
        is_attached = len(transforms) == len(self.online)
        resting = [one for one in transforms if one.__dict__.get(RESTS)]
        try:
            if not is_attached:
                self.attach(model)
            for one in resting:
                one.__dict__[RESTS] = False
            yield
        finally:
            for one in resting:
                one.__dict__[RESTS] = True
            if not is_attached:
                self.detach()


def write_schemes(
    model: Any, schemes: Mapping[str, TransformScheme], *, without: Container[str] = ()
) -> None:
    """Add transforms to those in the model's configuration, and remove those ``without``."""
    config = getattr(model, "transform_config", None)
    groups = {} if config is None else config.config_groups
    kept = {name: one for name, one in groups.items() if name not in without} | dict(schemes)
    if kept or config is not None:
        model.transform_config = TransformConfig(config_groups=kept) if kept else None


# --------------------
# Cost of rotations: passes over a weight in float32, and twice as much in float64.

_PASSES, _BUTTERFLY, _TRANSPOSED = 5, 6, 25
"""Of a rotation, of each butterfly of its power of two, and of one of the output."""
_SCALED = 10
"""Passes to look at the columns behind a norm, and to multiply them."""
_TRIAL_RUNS, _TRIAL_TOKENS, _TRIAL_VISITS = 2, 8, 3


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


def short_targets(model: Any, names: Iterable[str]) -> list[str]:
    """Patterns on the last part of a name, if they match no other module, else full names.

    Servers prefix module names, which patterns such as ``re:.*down_proj$`` tolerate.

    Args:
        model: the model.
        names: names of the modules to target.
    """
    by_end: dict[str, set[str]] = {}
    for name in sorted(set(names)):
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    everything = [name for name, _ in named_modules(model)]
    targets = []
    for end, members in by_end.items():
        pattern = f".*{re.escape(end)}$"
        is_exact = {name for name in everything if re.match(pattern, name)} == members
        targets += [f"re:{pattern}"] if is_exact else sorted(members)
    return targets
