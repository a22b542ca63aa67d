# SPDX-License-Identifier: Apache-2.0
"""Which rotations a weight takes, and doing it: once for each weight, however many there are."""

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
    """What is multiplied into one weight.

    Attributes:
        norm: the norm before it, of whose gain it takes over what the norm says.
        inputs: rotations of its input, in the order in which they act.
        outputs: rotations of its output.
    """

    norm: Norm | None = None
    inputs: list[Rotation] = field(default_factory=list)
    outputs: list[Rotation] = field(default_factory=list)


@dataclass(frozen=True)
class Online:
    """One rotation that stays in the forward of one module.

    Attributes:
        module: which.
        module_name: its name.
        scheme: the name of its scheme.
        location: where in the forward.
        rotation: the matrix; modules with the same object share what is stored.
        inverse: the transpose is applied.
    """

    module: Module
    module_name: str
    scheme: str
    location: TransformLocation
    rotation: Rotation
    inverse: bool = False


@dataclass
class Plan:
    """Everything that is done to a model, before any of it is.

    Attributes:
        precision: in which weights are multiplied.
        fusions: weight's module → what is multiplied into it.
        norms: norms whose gain, or a part of it, is taken over by the Linears behind them.
        online: what stays in the forward.
        schemes: how all of it is written in ``transform_config``.
        standing: what :meth:`stand_by` has put into the model.
    """

    precision: torch.dtype
    fusions: dict[Module, Fusion] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)
    online: list[Online] = field(default_factory=list)
    schemes: dict[str, TransformScheme] = field(default_factory=dict)
    standing: list[Attached] = field(default_factory=list)

    def of(self, module: Module) -> Fusion:
        """What is multiplied into the weight of ``module``, to be added to."""
        return self.fusions.setdefault(module, Fusion())

    def take_over(self, norms: Iterable[Norm]) -> None:
        """Have what reads norms take over their gains."""
        for norm in norms:
            self.norms.append(norm)
            for module in norm.readers:
                self.of(module).norm = norm

    @torch.no_grad()
    def fuse(self, modules: Collection[Module] | None = None) -> None:
        """Multiply everything into the weights; once into one that several modules share.

        Args:
            modules: only into those of these; a norm among them stands with all that read it.
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
        """The weight and bias of ``module`` with everything multiplied in.

        Args:
            module: it is not changed.
            fusion: what is multiplied into it.
            gains: :meth:`gains`, where norms may have lost theirs; those of others are added to it.
            wide: computed and returned in float32, where the weight is narrower too.
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
        """What is taken over of each norm that is loaded."""
        weights = [(norm, norm.module._parameters.get("weight")) for norm in self.norms]
        return {
            norm.module: norm.gain()
            for norm, weight in weights
            if weight is None or not weight.is_meta
        }

    def rotations_of(self, module: Module) -> tuple[list[int], list[int]]:
        """Which rotations of inputs and of outputs are multiplied in, each by its identity."""
        own = self.fusions.get(module, Fusion())
        return [id(one) for one in own.inputs], [id(one) for one in own.outputs]

    @property
    def rotated_weights(self) -> int:
        """How many weights a rotation is multiplied into."""
        return sum(bool(one.inputs or one.outputs) for one in self.fusions.values())

    def attach(self, model: Any) -> None:
        """Put what stays into the forward, and have it written."""
        self._attach(model, [])

    def stand_by(self, model: Any, device: torch.device) -> None:
        """Put what stays where it will be, and have it written; no forward is changed yet.

        Args:
            model: it.
            device: where matrices go.
        """
        self._attach(model, self.standing, device)
        self.rest(rests=True)

    def rest(self, *, rests: bool) -> None:
        """Whether what stands by keeps out of forwards."""
        for one in self.standing:
            one.rest(rests=rests)

    def detach(self) -> None:
        """Take out what stands by."""
        while self.standing:
            self.standing.pop().remove()

    @contextlib.contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """What stays is in the forward for the time of the body."""
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
        """What of it is done to some modules, but for gains, where each stands for itself."""
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
