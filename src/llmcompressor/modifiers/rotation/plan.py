# SPDX-License-Identifier: Apache-2.0
"""Rotation plan: the rotations of every weight and forward, and their application."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from compressed_tensors.transform import TransformArgs, TransformLocation, TransformScheme
from torch import Tensor
from torch.nn import Linear, Module

from llmcompressor.modeling.scaling import write_values
from llmcompressor.modifiers.rotation.norms import Norm, gain_of
from llmcompressor.modifiers.rotation.online import (
    Attached,
    add_schemes,
    attach,
    share,
    stored_weight,
)
from llmcompressor.numerics.rotation import Rotation, rotated_bias, rotated_weight

__all__ = ["Fusion", "Online", "Plan"]

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
class Online:
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
class Plan:
    """All changes that rotations make to a model.

    Attributes:
        precision: dtype in which rotations are multiplied into weights.
        fusions: module → factors of its weight.
        norms: norms whose gain, or part of it, is fused into the Linears after them.
        online: rotations that stay in the forward.
        schemes: their form in ``transform_config``.
        standing: rotations that :meth:`stand_by` has attached.
    """

    precision: torch.dtype
    fusions: dict[Module, Fusion] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)
    online: list[Online] = field(default_factory=list)
    schemes: dict[str, TransformScheme] = field(default_factory=dict)
    standing: list[Attached] = field(default_factory=list)

    def of(self, module: Module) -> Fusion:
        """The fusion of ``module``, created on first use."""
        return self.fusions.setdefault(module, Fusion())

    def take_over(self, norms: Iterable[Norm]) -> None:
        """Fuse the gains of norms into the modules that read them."""
        for norm in norms:
            self.norms.append(norm)
            for module in norm.readers:
                self.of(module).norm = norm

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
                write_values(module, self.rotated(module, fusion, gains=gains))
                done.add(id(module._parameters["weight"]))
        for norm in norms:
            write_values(norm.module, norm.without(gains[norm.module]))

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
        gain = None if fusion.norm is None else gain_of(fusion.norm, {} if gains is None else gains)
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

    def stand_by(self, model: Any, device: torch.device) -> None:
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
        """Remove the rotations attached by :meth:`stand_by`."""
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
        done: list[Attached] = []
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
        self, model: Any, done: list[Attached], everywhere: torch.device | None = None
    ) -> None:
        weights: dict[tuple[int, str, torch.device], Any] = {}
        for one in self.online:
            device = everywhere or _device_of(one.module)
            key = (id(one.rotation), one.scheme, device)
            if key not in weights:
                weights[key] = stored_weight(one.rotation, device)
            scheme = self.schemes[one.scheme]
            args = TransformArgs(
                targets=[one.module_name], location=one.location, inverse=one.inverse
            )
            done.append(
                attach(model, one.module, one.module_name, one.scheme, scheme, args, weights[key])
            )
        share(done)
        if self.schemes:
            add_schemes(model, self.schemes)

    def only(self, modules: Collection[Module]) -> Plan:
        """The plan restricted to some modules, without gains of norms."""
        return Plan(
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


def _device_of(module: Module) -> torch.device:
    return next((one.device for one in module.parameters()), torch.device("cpu"))
