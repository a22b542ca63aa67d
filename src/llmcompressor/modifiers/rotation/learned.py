# SPDX-License-Identifier: Apache-2.0
r"""Learned rotations: descend the loss of the rounded model along the orthogonal matrices.

SpinQuant, arXiv:2405.16406, equation 2: over orthogonal R1 and R2,

.. math:: \min_{R_1, R_2}\; L\big(\text{model with rotated, rounded weights and activations}\big)

with L the cross entropy of the next token on calibration data, and the rounding that of the
schemes which later modifiers of the recipe have put on the modules. Gradients pass straight through
the rounding. The model's own parameters stay as they are: each step makes rotated and rounded
weights from them, runs one batch forward and backward, and takes a step of Cayley SGD.

A step takes the time of one batch of training and the memory of a copy of the weights in
float32, two with gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Linear, Module

from llmcompressor.errors import DatasetError, NonFiniteError
from llmcompressor.logger import logger
from llmcompressor.modifiers.rotation.plan import Fusion, Plan
from llmcompressor.numerics.cayley import cayley_step
from llmcompressor.numerics.rotation import Rotation
from llmcompressor.numerics.straight_through import fake_quantize_matrix
from llmcompressor.progress import progress
from llmcompressor.quantization.fake_activations import dynamic_fake_quantize
from llmcompressor.quantization.parameters import extreme_parameters
from llmcompressor.schemes.bridge import grid_of, needs_global_scale, partition_of

__all__ = ["learn_rotations"]

_IGNORED = -100
_COMPARED = 8
"""Batches on which the learned rotations are compared with those they began with."""


def learn_rotations(
    model: Any,
    plan: Plan,
    start: Mapping[str, Rotation],
    batches: Iterable[Mapping[str, Any]] | None,
    *,
    steps: int,
    rate: float,
    names: Mapping[Module, str],
) -> dict[str, Rotation]:
    """Learn the rotations of ``start``, all others staying what they are.

    Args:
        model: not rotated yet, but for rotations in its forward.
        plan: what is multiplied into which weight.
        start: name → the rotation of the plan to begin with.
        batches: calibration batches, gone through in order, again where there are fewer than steps.
        steps: how many.
        rate: of the first step; it falls to zero linearly.
        names: of all modules.

    Returns:
        Name → learned rotation; those of ``start`` where the loss did not fall.

    Raises:
        DatasetError: there is no batch.
        NonFiniteError: the loss is NaN or infinite.
    """
    data = [_with_labels(model, batch) for batch in batches or ()]
    if not data:
        raise DatasetError("Learned rotations need calibration data.", "Pass dataset=...")
    quantized = [m for m in names if getattr(m, "quantization_scheme", None) is not None]
    if not quantized:
        logger.warning(
            "No later modifier quantizes anything: rotations are learned for nothing to be rounded."
        )
    handles = [module.register_forward_pre_hook(_round_input) for module in quantized]
    try:
        learning = _Learning(model, plan, names, start)
        before = learning.mean_loss(data[:_COMPARED])
        with progress(steps, "Learning rotations") as advance:
            for step in range(steps):
                loss = learning.step(data[step % len(data)], rate * (1 - step / steps))
                advance(1, note=f"loss {loss:.4f}")
        after = learning.mean_loss(data[:_COMPARED])
    finally:
        for handle in handles:
            handle.remove()
    told = f"Rotations learned in {steps} steps: loss {before:.4f} before, {after:.4f} after"
    if not after < before:
        logger.warning(f"{told}. They are no better, so the first ones are kept.")
        return dict(start)
    logger.info(f"{told}.")
    return learning.rotations()


class _Learning:
    """Rotations on their way down.

    Args:
        model: its parameters stay what they are.
        plan: what is multiplied into which weight.
        names: of all modules.
        start: the rotations to begin with, by name.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        names: Mapping[Module, str],
        start: Mapping[str, Rotation],
    ) -> None:
        device = next(model.parameters()).device
        self._model, self._plan, self._names = model, plan, names
        self._matrices = {name: one.matrix().to(device) for name, one in start.items()}
        self._momenta = {name: torch.zeros_like(one) for name, one in self._matrices.items()}
        self._names_of = {id(rotation): name for name, rotation in start.items()}

    def step(self, batch: Mapping[str, Any], rate: float) -> float:
        """One step on one batch; returns the loss before it."""
        with torch.enable_grad():
            leaves = {name: one.float().requires_grad_() for name, one in self._matrices.items()}
            loss = self._loss(leaves, batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            self._matrices[name], self._momenta[name] = cayley_step(
                self._matrices[name], gradient, self._momenta[name], rate
            )
        return float(loss.detach())

    @torch.no_grad()
    def mean_loss(self, batches: Sequence[Mapping[str, Any]]) -> float:
        """Of several batches, with the matrices as they are."""
        leaves = {name: one.float() for name, one in self._matrices.items()}
        return sum(float(self._loss(leaves, batch)) for batch in batches) / len(batches)

    def rotations(self) -> dict[str, Rotation]:
        """The matrices as they are."""
        return {name: Rotation.of_matrix(one.cpu()) for name, one in self._matrices.items()}

    def _loss(self, leaves: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
        weights = _weights(self._plan, self._names, self._names_of, leaves)
        loss = _loss(self._model, weights, batch)
        if not torch.isfinite(loss):
            raise NonFiniteError("The loss of the rounded model is not finite.")
        return loss


def _with_labels(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with the next tokens to predict, padding left out."""
    device = next(model.parameters()).device
    ids, mask = batch["input_ids"].to(device), batch.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask.to(device) == 0, _IGNORED)
    inputs = {"input_ids": ids, "labels": labels, "use_cache": False}
    return inputs if mask is None else {**inputs, "attention_mask": mask.to(device)}


def _loss(model: Any, weights: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = functional_call(model, dict(weights), kwargs=inputs, tie_weights=False).logits
    flat = logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(
        flat, batch["labels"][:, 1:].flatten(), ignore_index=_IGNORED
    )


def _weights(
    plan: Plan,
    names: Mapping[Module, str],
    names_of: Mapping[int, str],
    leaves: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Parameter name → rotated and rounded value, a function of the leaves."""
    found = {}
    for module, fusion in plan.fusions.items():
        for own, value in _rotated(module, fusion, names_of, leaves).items():
            dtype = module.get_parameter(own).dtype
            rounded = _rounded(module, value) if own == "weight" else value
            found[f"{names[module]}.{own}"] = rounded.to(dtype)
    for norm in plan.norms:
        weight = norm.module._parameters.get("weight")
        if weight is not None:
            found[f"{names[norm.module]}.weight"] = torch.full_like(weight, 1.0 - norm.offset)
    return found


def _rotated(
    module: Module, fusion: Fusion, names_of: Mapping[int, str], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    def turn(x: Tensor, rotation: Rotation) -> Tensor:
        name = names_of.get(id(rotation))
        if name is None:
            return rotation(x)
        return (x.reshape(*x.shape[:-1], -1, rotation.order) @ leaves[name]).flatten(-2)

    weight = module.get_parameter("weight").detach().float()
    gain = None if fusion.norm is None else fusion.norm.gain()
    if gain is not None:
        weight = weight * gain.to(weight)
    for rotation in fusion.inputs:
        weight = turn(weight, rotation)
    for rotation in fusion.outputs:
        weight = turn(weight.T, rotation).T
    found = {"weight": weight}
    bias = module._parameters.get("bias")
    if bias is not None and isinstance(module, Linear) and fusion.outputs:
        value = bias.detach().float()
        for rotation in fusion.outputs:
            value = turn(value, rotation)
        found["bias"] = value
    return found


def _rounded(module: Module, weight: Tensor) -> Tensor:
    scheme: Any = getattr(module, "quantization_scheme", None)
    args = None if scheme is None else scheme.weights
    if args is None:
        return weight
    parameters = extreme_parameters(weight, args)
    zero = None if args.symmetric else parameters.zero_point
    return fake_quantize_matrix(
        weight,
        parameters.effective_scale,
        zero,
        grid_of(args),
        partition_of(args),
        through=parameters.through,
    )


def _round_input(module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Round what goes into a quantized module, on scales found from itself."""
    scheme: Any = module.quantization_scheme
    activations = scheme.input_activations
    if activations is None or not isinstance(module, Linear) or needs_global_scale(activations):
        return None
    return (dynamic_fake_quantize(args[0], activations), *args[1:])
