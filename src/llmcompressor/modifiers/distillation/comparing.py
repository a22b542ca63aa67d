# SPDX-License-Identifier: Apache-2.0
"""Distance between two outputs, built from the names in a recipe: transforms and a comparison."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from llmcompressor.errors import RecipeError, did_you_mean
from llmcompressor.numerics import distillation as functions
from llmcompressor.numerics.token_mean import mean_of_rows, mean_over_tokens

__all__ = ["COMPARISONS", "TRANSFORMS", "Measure"]

TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "identity": functions.identity,
    "log_softmax": functions.log_softmax,
    "normalize": functions.normalize,
    "softmax": functions.softmax,
}
COMPARISONS: dict[str, Callable[..., Tensor]] = {
    "cosine_similarity": functions.cosine_similarity,
    "cross_entropy": functions.cross_entropy,
    "inner_product": functions.inner_product,
    "kl_divergence": functions.kl_divergence,
    "l1_distance": functions.l1_distance,
    "l2_distance": functions.l2_distance,
    "square_head": functions.square_head,
}
_OF_DISTRIBUTIONS = {"cross_entropy", "kl_divergence"}
_NUMBERS = {"p", "temperature"}
# Arguments that callers of the functions may pass, but recipes may not.
_INNER = {"mean_square"}


@dataclass(frozen=True)
class Measure:
    """Distance between the outputs of student and teacher.

    Attributes:
        transforms: names with their arguments, applied to both in this order.
        comparison: name of the comparison.
        arguments: arguments of the comparison.
    """

    transforms: tuple[tuple[str, Mapping[str, Any]], ...]
    comparison: str
    arguments: Mapping[str, Any]

    @classmethod
    def read(
        cls,
        transforms: str | Sequence[str] | None,
        transforms_args: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None,
        comparison: str,
        comparison_args: Mapping[str, Any] | None,
    ) -> Measure:
        """Create a measure from the names and arguments of a recipe.

        Raises:
            RecipeError: there is no such function, or it does not take such an argument.
        """
        names = [transforms] if isinstance(transforms, str) else list(transforms or [])
        given = [transforms_args] if isinstance(transforms_args, Mapping) else transforms_args
        arguments: list[Mapping[str, Any] | None] = list(given or [None] * len(names))
        if len(arguments) != len(names):
            raise RecipeError(
                f"transforms_args has {len(arguments)} entries for {len(names)} transforms",
                "Give one mapping for each transform, {} where it takes nothing.",
            )
        steps = [
            (name, _checked("transform", name, args, TRANSFORMS))
            for name, args in zip(names, arguments, strict=True)
        ]
        checked = _checked("comparison", comparison, comparison_args, COMPARISONS)
        if comparison in _OF_DISTRIBUTIONS and steps and steps[-1][0] == "softmax":
            # The comparisons accept log-probabilities, which stay finite at a probability of 0.
            steps[-1] = ("log_softmax", steps[-1][1])
        return cls(tuple(steps), comparison, checked)

    def loss(self, student_RD: Tensor, teacher_RD: Tensor, rows_N: Tensor | None) -> Tensor:
        """The mean distance over tokens, a float32 scalar.

        Args:
            student_RD: with gradient, any floating dtype.
            teacher_RD: of the same shape and device.
            rows_N: the rows that are real tokens, all if not given.
        """
        arguments = dict(self.arguments)
        if self.comparison == "square_head" and not arguments.get("per_token"):
            arguments["mean_square"] = mean_of_rows(self._teachers_square, teacher_RD, rows_N)
        compare = partial(self._compare, partial(COMPARISONS[self.comparison], **arguments))
        return mean_over_tokens(compare, student_RD, teacher_RD, rows_N)

    def _compare(
        self, comparison: Callable[..., Tensor], student_ND: Tensor, teacher_ND: Tensor
    ) -> Tensor:
        return comparison(self._transformed(student_ND), self._transformed(teacher_ND))

    def _teachers_square(self, teacher_ND: Tensor) -> Tensor:
        return functions.squared_norm(self._transformed(teacher_ND))

    def _transformed(self, output_ND: Tensor) -> Tensor:
        for name, arguments in self.transforms:
            output_ND = TRANSFORMS[name](output_ND, **arguments)
        return output_ND


def _checked(
    kind: str,
    name: str,
    given: Mapping[str, Any] | None,
    table: Mapping[str, Callable[..., Tensor]],
) -> Mapping[str, Any]:
    """Check that the function exists and accepts the arguments; return them."""
    if name not in table:
        raise RecipeError(f"there is no {kind} named {name!r}", did_you_mean(name, table))
    arguments = dict(given or {})
    keywords = [
        parameter.name
        for parameter in inspect.signature(table[name]).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in _INNER
    ]
    for key, value in arguments.items():
        if key not in keywords:
            takes = f"It takes {', '.join(keywords)}." if keywords else "It takes none."
            raise RecipeError(f"the {kind} {name} has no argument {key!r}", takes)
        if key in _NUMBERS and not _is_positive(value):
            raise RecipeError(f"{key} of the {kind} {name} is {value!r}", "Give a number above 0.")
    return arguments


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < float("inf")
