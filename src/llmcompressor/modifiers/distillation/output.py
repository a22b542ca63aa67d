# SPDX-License-Identifier: Apache-2.0
r"""Output distillation: train a student to match the outputs of a teacher.

Hinton et al., arXiv:1503.02531; for hidden states Kurtic et al., arXiv:2310.06927. With pairs of
modules l = 1 … L of the two models, a distance d averaged over the real tokens, and the task loss,

.. math:: \text{loss} = a \cdot \text{loss}_\text{task} + \frac{b}{L} \sum_l d(s_l, t_l) .
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from llmcompressor.core.contract import RecipeRules
from llmcompressor.core.events import Event, EventType, has_reached
from llmcompressor.core.modifier import Modifier
from llmcompressor.core.state import State
from llmcompressor.errors import InputError, RecipeError, TargetError
from llmcompressor.modeling.patches import reset_compiled
from llmcompressor.modifiers.distillation.capture import (
    OutputCapture,
    OutputDistance,
    Pair,
    Projections,
    Target,
    check_projection,
    check_widths,
    expect_gradient,
    expect_whole_parameters,
    has_other_hooks,
    micro_batch_weight,
    pair_modules,
    run_teacher,
    task_loss,
    teacher_of,
    token_rows,
)
from llmcompressor.numerics.straight_through import with_zero_gradients
from llmcompressor.observers.tokens import token_mask

__all__ = ["OutputDistillationModifier"]

_TEMPERED = ("kl_divergence", "cross_entropy")


class OutputDistillationModifier(Modifier):
    """Add the distance between outputs of student and teacher to the loss.

    It is active from ``start`` (default: the beginning) to ``end``. The teacher is
    ``state.teacher_model``.

    Attributes:
        targets: modules whose outputs are compared: class names, module names or ``re:`` patterns
            matched in both models, or pairs (student, teacher) of them. The n-th match in one model
            is paired with the n-th in the other. Default: the logits are compared.
        projection: ``"linear"`` for a learned map from the student's features to the teacher's.
        projection_args: ``seed`` of its initial values.
        transforms: transforms that are applied to both outputs before the comparison, in order.
        transforms_args: arguments of each transform.
        comparison: the distance function. ``kl_divergence`` and ``cross_entropy`` take logits, or
            the result of a final transform ``softmax`` or ``log_softmax``.
        comparison_args: arguments of the comparison.
        temperature: short for ``comparison_args: {temperature: …}``.
        orig_scale: a, the weight of the task loss.
        distill_scale: b, the weight of the mean over pairs. For ``square_head`` 1.0 stands for the
            number of pairs: their sum is taken.
        offload_layer_output: keep the teacher's outputs in main memory until each is compared.
    """

    rules: ClassVar[RecipeRules] = RecipeRules(
        run_types=frozenset({"train"}), needs_time=True, uses_teacher=True
    )

    targets: str | list[Target] | None = None
    projection: str | None = None
    projection_args: dict[str, Any] | None = None
    transforms: str | list[str] | None = "identity"
    transforms_args: dict[str, Any] | list[dict[str, Any] | None] | None = None
    comparison: str = "kl_divergence"
    comparison_args: dict[str, Any] | None = None
    temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    orig_scale: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    distill_scale: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    offload_layer_output: bool = False

    _measure: OutputDistance = PrivateAttr()
    _pairs: list[Pair] = PrivateAttr(default_factory=list)
    _student: OutputCapture | None = PrivateAttr(None)
    _teacher: OutputCapture | None = PrivateAttr(None)
    _projections: Projections | None = PrivateAttr(None)
    _catching: set[RemovableHandle] = PrivateAttr(default_factory=set)
    _cut: bool | None = PrivateAttr(None)
    _figures: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    @field_validator("update")
    @classmethod
    def _refuse_update(cls, value: float | None) -> float | None:
        if value is not None:
            raise RecipeError("distillation acts on every batch", "Leave update out.")
        return value

    @field_validator("targets")
    @classmethod
    def _expect_targets(cls, value: str | list[Target] | None) -> str | list[Target] | None:
        if value is not None and not value:
            raise RecipeError("there are none", "Leave targets out to compare the logits.")
        return value

    @model_validator(mode="after")
    def _create_distance(self) -> Self:
        arguments = dict(self.comparison_args or {})
        if self.temperature is not None:
            if self.comparison not in _TEMPERED:
                raise RecipeError(
                    f"{self.comparison} has no temperature",
                    f"Leave it out, or compare by {' or '.join(_TEMPERED)}.",
                )
            if "temperature" in arguments:
                raise RecipeError("there are two temperatures", "Leave out comparison_args'.")
            arguments["temperature"] = self.temperature
        check_projection(self.projection, self.projection_args)
        self._measure = OutputDistance.read(
            self.transforms, self.transforms_args, self.comparison, arguments
        )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Names of the compared modules: the student's and the teacher's."""
        return [(pair.student_name, pair.teacher_name) for pair in self._pairs]

    # ---- the run

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Pair the modules, and refuse pairs that cannot be compared.

        Raises:
            ArgumentError: there is no teacher, or it is the student itself.
            TargetError: the modules do not pair, or are known not to fit.
        """
        teacher = teacher_of(state)
        targets = [self.targets] if isinstance(self.targets, str) else self.targets
        self._pairs = pair_modules(state.model, teacher, targets)
        if self.projection == "linear":
            expect_whole_parameters(state)
            seed = (self.projection_args or {}).get("seed", 0)
            self._projections = Projections(state.model, teacher, self._pairs, seed)
            self.register_hook(self._projections.body, self._projections.join_graph, "forward")
        else:
            check_widths(state.model, teacher, self._pairs)
        teacher.eval()
        return True

    def should_start(self, event: Event) -> bool:
        """Start as the base class does; the default start is the beginning."""
        return has_reached(event.current_index, self.start or 0) and not self.should_end(event)

    def on_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Register hooks on the modules of both models."""
        self._attach()

    def on_update(self, state: State, event: Event, **kwargs: Any) -> None:
        """Capture the outputs of a batch, and replace its loss."""
        if self._student is None or self._teacher is None:
            return  # it ended at this event
        if event.type_ is EventType.BATCH_START:
            self._student.open()
            self._teacher.open()
        elif event.type_ is EventType.LOSS_CALCULATED:
            state.loss = self._combined_loss(state, self._student, self._teacher, kwargs)
        elif event.type_ is EventType.BATCH_END:
            self._free_outputs()

    def on_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Remove the hooks."""
        self._detach()

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Remove the hooks, and the learned projections from the student."""
        self._detach()
        self.remove_hooks()
        if self._projections is not None:
            self._projections.remove()
            self._projections = None
        return True

    def state_dict(self) -> dict[str, Any]:
        """The learned projections."""
        return {} if self._projections is None else {"projections": self._projections.state_dict()}

    def load_state_dict(self, state: State, saved: Mapping[str, Any]) -> None:
        """Restore the projections, and the hooks if distillation was active."""
        if self._projections is not None:
            self._projections.load_state_dict(saved.get("projections", {}))
        self._detach()
        if self.started and not self.ended:
            self._attach()

    def figures(self, state: State) -> dict[str, float]:
        """Task loss, distillation loss, and the loss of each pair, of the latest batch."""
        return {tag: value.item() for tag, value in self._figures.items()}

    # ---- hooks

    def _attach(self) -> None:
        reset_compiled()
        self._student = OutputCapture(
            {pair.student: pair.student_name for pair in self._pairs}, "student"
        )
        self._teacher = OutputCapture(
            {pair.teacher: pair.teacher_name for pair in self._pairs},
            "teacher",
            self.offload_layer_output,
        )
        for outputs in (self._student, self._teacher):
            for module in outputs.modules:
                self._catching.add(self.register_hook(module, outputs.keep, "forward"))

    def _detach(self) -> None:
        self.remove_hooks(self._catching)
        self._catching.clear()
        self._student = self._teacher = None
        self._cut = None

    def _free_outputs(self) -> None:
        for outputs in (self._student, self._teacher):
            if outputs is not None:
                outputs.close()

    # ---- the loss

    def _combined_loss(
        self, state: State, student: OutputCapture, teacher: OutputCapture, given: Mapping[str, Any]
    ) -> Tensor:
        """``orig_scale · loss + distill_scale · mean over pairs``."""
        batch = state.batch_data
        if batch is None:
            raise InputError(
                "Distillation has no batch to show the teacher.",
                "Send callbacks.batch_start(batch_data=...) before the forward.",
            )
        student.is_open = False  # ignore outputs that are recomputed in the backward pass
        self._run_teacher(state.teacher_model, batch, teacher)
        mask_BT = token_mask(batch) if isinstance(batch, Mapping) else None
        losses = [self._pair_loss(pair, student, teacher, mask_BT) for pair in self._pairs]
        self._free_outputs()
        distance = torch.stack([loss.to(losses[0].device) for loss in losses]).mean()
        task = task_loss(state.loss, batch)
        self._note(task, distance, losses)
        weight = micro_batch_weight(batch, given)
        if isinstance(weight, Tensor):
            weight = weight.to(task.device)
        summed = self.comparison == "square_head" and self.distill_scale == 1.0
        scale = float(len(self._pairs)) if summed else self.distill_scale
        added = scale * weight * distance.to(task.device)
        # Zero times NaN is NaN, so a loss with weight 0 is left out. Its graph stays: data
        # parallel training expects a gradient for every parameter.
        return (
            self.orig_scale * task + added if self.orig_scale else with_zero_gradients(added, task)
        )

    def _run_teacher(self, teacher: Module, batch: Any, outputs: OutputCapture) -> None:
        """Run the teacher on this batch, once for all modifiers that need its outputs."""
        if outputs.complete:
            return  # captured in the forward for another modifier
        cut = bool(self._cut) and not has_other_hooks(teacher.modules(), outputs)
        run_teacher(teacher, batch, outputs, may_stop=cut)
        if self._cut is None:
            # Only a complete forward shows that no module is called twice. Offloading hooks free
            # their weights at the end of the forward, so it may not stop early.
            self._cut = outputs.calls == len(outputs.modules) and not hasattr(teacher, "_hf_hook")
        outputs.is_open = False

    def _pair_loss(
        self, pair: Pair, student: OutputCapture, teacher: OutputCapture, mask_BT: Tensor | None
    ) -> Tensor:
        """The mean distance over tokens for one pair."""
        ours = student.of(pair.student)
        expect_gradient(pair, ours)
        theirs = teacher.of(pair.teacher).to(ours.device)
        ours_RD, rows_N = token_rows(ours, mask_BT)
        theirs_RD, _ = token_rows(theirs, None)
        if self._projections is not None:
            ours_RD = self._projections.apply(pair, ours_RD)
        if ours_RD.shape != theirs_RD.shape:
            raise TargetError(
                f"{pair.label} of the student gives {list(ours.shape)}, {pair.teacher_name} of "
                f"the teacher {list(theirs.shape)}: they cannot be compared.",
                "Pair modules whose outputs are laid out alike; for different numbers of "
                "features set projection: linear.",
            )
        return self._measure.loss(ours_RD, theirs_RD, rows_N)

    def _note(self, task: Tensor, distance: Tensor, losses: list[Tensor]) -> None:
        self._figures = {"task_loss": task.detach(), "distill_loss": distance.detach()}
        if len(losses) > 1:
            for pair, loss in zip(self._pairs, losses, strict=True):
                self._figures[f"distill_loss/{pair.label}"] = loss.detach()
