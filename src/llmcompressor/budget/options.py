# SPDX-License-Identifier: Apache-2.0
"""What a budget can choose from: sets of modules that share a scheme, and their bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn import Embedding, Linear, Module

from llmcompressor.checkpoint.names import NameMap
from llmcompressor.checkpoint.planned_tensors import PlannedTensors, plan_tensors
from llmcompressor.checkpoint.save import planned_config
from llmcompressor.checkpoint.source import TensorHeader
from llmcompressor.checkpoint.tensor_files import layout_files
from llmcompressor.core.contract import Edits, PlannedModule
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import RecipeError, TargetError
from llmcompressor.logger import quiet
from llmcompressor.modeling.fused import expert_sets, fused_sets, parse_expert_name
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.weights import has_tied_embeddings
from llmcompressor.quantization.attach import quantized_linear_tensors
from llmcompressor.quantization.base import QuantizationMixin
from llmcompressor.schemes.budget import Budget, Candidate, parse_budget
from llmcompressor.schemes.checks import check_schemes

CheckServable = Callable[[Mapping[str, Any], PlannedTensors], None]
"""Raises a RecipeError if no server takes a checkpoint."""


@dataclass(frozen=True)
class Writing:
    """How a run writes its output, as far as that decides its bytes.

    Attributes:
        headers: the tensors of the source.
        folder: the source's folder, if there is one.
        structure: the context with the structure of modules that is written.
        packed: weights are packed, not written dense.
        check: refuses what no server takes.
    """

    headers: Mapping[str, TensorHeader] = field(default_factory=dict)
    folder: Path | None = None
    structure: Callable[[], AbstractContextManager[Any]] = nullcontext
    packed: bool = True
    check: CheckServable = lambda config, planned: None


@dataclass(frozen=True)
class BudgetOptions:
    """The options of a modifier's budget on a model.

    Attributes:
        modifier: the modifier.
        budget: its budget.
        candidates: the schemes to choose from.
        sets: names of the modules that share one scheme, in the model's order.
        schemes: candidate → module → its scheme, which narrow matrices have one of their own of.
        sizes: stored bytes of each set with each candidate, biases left out.
        weights: number of weights of all sets.
        names_weight_observer: whether a field or a candidate names an observer of weights.
    """

    modifier: QuantizationMixin
    budget: Budget
    candidates: Sequence[Candidate]
    sets: Sequence[tuple[str, ...]]
    schemes: Mapping[Candidate, Mapping[str, QuantizationScheme]]
    sizes: Sequence[Sequence[int]]
    weights: int
    names_weight_observer: bool = False

    @property
    def corrects_errors(self) -> bool:
        """True if the run makes up for errors of earlier Linears, with one of the candidates."""
        every = (scheme for own in self.schemes.values() for scheme in own.values())
        return self.modifier.corrects_errors(every)

    def searches_scales(self, args: QuantizationArgs) -> bool:
        """True if the scales of a weight are searched for, not those of an observer."""
        return not self.names_weight_observer and self.modifier.searches_scales(args)

    def scheme_by_module(self, options: Sequence[int]) -> dict[str, QuantizationScheme]:
        """The scheme of each module, given the place of each set's candidate."""
        return {
            name: self.schemes[self.candidates[option]][name]
            for names, option in zip(self.sets, options, strict=True)
            for name in names
        }

    def targets(self, options: Sequence[int]) -> dict[Candidate, list[str]]:
        """The targets of each candidate: names, and a pattern for the experts of a layer."""
        found: dict[Candidate, list[str]] = {one: [] for one in self.candidates}
        for names, option in zip(self.sets, options, strict=True):
            found[self.candidates[option]].extend(_targets_of(names))
        return found


def budgeted(modifiers: Iterable[Modifier]) -> QuantizationMixin | None:
    """The modifier that has a budget; ``None`` if there is none.

    Raises:
        RecipeError: several have one.
    """
    found = [
        one for one in modifiers if isinstance(one, QuantizationMixin) and one.budget is not None
    ]
    if len(found) > 1:
        raise RecipeError(
            f"{len(found)} modifiers of the recipe have a budget.",
            "Give one of them a scheme: what it quantizes counts for the size of the other.",
        )
    return found[0] if found else None


def size_limit_of(modifiers: Iterable[Modifier]) -> int | None:
    """The bytes that the weight files may take by the budget of a recipe; ``None`` without one."""
    modifier = budgeted(modifiers)
    budget = None if modifier is None else parse_budget(modifier.budget)
    return int(budget.limit) if budget is not None and budget.kind == "size" else None


def check_size_limit(limit: int | None, predicted: int) -> None:
    """Refuse an output that is larger than its budget, with what other modifiers add to it.

    Args:
        limit: bytes that the weight files may take.
        predicted: bytes that they will have, exactly.

    Raises:
        RecipeError: they are larger.
    """
    if limit is not None and predicted > limit:
        raise RecipeError(
            f"The budget allows {limit:,} bytes, and the weight files will have {predicted:,}: "
            "other modifiers of the recipe add to what the budget has counted, as rotations at run "
            "time and untied embeddings do.",
            f"Give a budget that is {predicted - limit:,} bytes smaller, or leave them out.",
        )


class OptionFinder:
    """Finds the options of a budget, and predicts the bytes of what is chosen.

    Args:
        model: the model; its weights may be on the meta device.
        modifiers: of the recipe.
        modifier: the one with a budget.
        writing: how the output is written.

    Raises:
        RecipeError: another modifier removes parts of the model.
    """

    def __init__(
        self,
        model: Module,
        modifiers: Sequence[Modifier],
        modifier: QuantizationMixin,
        writing: Writing,
    ) -> None:
        if removing := [one for one in modifiers if Edits.STRUCTURE in one.traits.edits]:
            raise RecipeError(
                f"{type(removing[0]).__name__} removes parts of the model, which a budget would "
                "count.",
                "Remove them in a run of its own, and give its output to one with the budget.",
            )
        self._model: Any = model
        self._modifier, self._writing = modifier, writing
        self._modules = dict(named_modules(model))
        self._tensors: dict[tuple[Any, ...], Any] = {}
        others = [
            one for one in modifiers if isinstance(one, QuantizationMixin) and one is not modifier
        ]
        # tied embeddings are untied when the run begins, and its own check counts them then
        counted = Linear if has_tied_embeddings(model) else Linear | Embedding
        self._others: dict[str, QuantizationScheme] = {}
        with quiet(wanted=True):  # each says the same again when the run begins
            for one in others:
                resolved = one.resolve_quantization_config()
                found = resolved.schemes_by_module(model)
                self._others |= {
                    name: scheme
                    for name, scheme in found.items()
                    if scheme.weights is not None and isinstance(self._modules[name], counted)
                }

    def __call__(self) -> BudgetOptions:
        """Find the options.

        Raises:
            RecipeError: no server takes the candidates together.
            TargetError: a candidate does not fit a module, or a target is no Linear.
        """
        modifier = self._modifier
        schemes: dict[Candidate, dict[str, QuantizationScheme]] = {}
        every = modifier.resolve_candidates()
        for place, (candidate, resolved) in enumerate(every.items()):
            with quiet(wanted=place > 0):
                schemes[candidate] = resolved.schemes_by_module(self._model)
                check_schemes(
                    self._model,
                    schemes[candidate],
                    bypass_divisibility=modifier.bypass_divisibility_checks,
                )
        names = list(next(iter(schemes.values())))
        if other := [name for name in names if not isinstance(self._modules[name], Linear)]:
            raise TargetError(
                f"{other[0]} is a {type(self._modules[other[0]]).__name__}, and a budget is "
                "shared among Linears.",
                "Leave it out of the targets, and quantize it with a modifier of its own.",
            )
        sets = _shared_sets(self._model, names)
        candidates = list(schemes)
        by_module = [self._module_bytes(schemes[one]) for one in candidates]
        sizes = [[sum(one[name] for name in own) for one in by_module] for own in sets]
        weights = sum(self._modules[name].get_parameter("weight").numel() for name in names)
        found = BudgetOptions(
            modifier,
            parse_budget(modifier.budget),
            candidates,
            sets,
            schemes,
            sizes,
            weights,
            any(one.names_weight_observer for one in every.values()),
        )
        count = len(candidates)
        for first in range(0, count, len(sets)):  # each candidate stands somewhere in a trial
            self._check_trial(found, [(first + number) % count for number in range(len(sets))])
        return found

    def _check_trial(self, options: BudgetOptions, places: Sequence[int]) -> None:
        """Refuse candidates that no server takes together."""
        schemes = options.scheme_by_module(places)
        planned = self.tensors(schemes)
        model, writing = self._model, self._writing
        with self._marked(schemes), writing.structure():
            config = planned_config(model, writing.folder, planned, compressed=writing.packed)
        try:
            with quiet(wanted=True):
                writing.check(config, planned)
        except RecipeError as error:
            names = ", ".join(one.name for one in options.candidates)
            raise RecipeError(
                f"No server takes the candidates {names} together. {error.problem}",
                f"{error.remedy} Or give other candidates, such as [W4A16, W8A16].",
            ) from error

    def tensors(self, schemes: Mapping[str, QuantizationScheme]) -> PlannedTensors:
        """Predict the tensors of the output, with these schemes by module."""
        every = {**self._others, **schemes}
        planned = [
            PlannedModule(name, self._modules[name], scheme, self._planned_tensors(name, scheme))
            for name, scheme in every.items()
        ]
        with self._marked(every), self._writing.structure():
            return plan_tensors(
                self._model, planned, self._writing.headers, save_compressed=self._writing.packed
            )

    @contextmanager
    def _marked(self, schemes: Mapping[str, QuantizationScheme]) -> Iterator[None]:
        """Mark modules as the run will, which tells experts to quantize from others."""
        pairs: list[tuple[Any, QuantizationScheme]] = [
            (self._modules[name], scheme) for name, scheme in schemes.items()
        ]
        own = [pair for pair in pairs if not hasattr(pair[0], "quantization_scheme")]
        try:
            for module, scheme in own:
                module.quantization_scheme = scheme
            yield
        finally:
            for module, _ in own:
                del module.quantization_scheme

    def file_bytes(self, schemes: Mapping[str, QuantizationScheme]) -> int:
        """Predict the bytes of the weight files, their headers included."""
        return layout_files(self.tensors(schemes).stored).file_size

    def dense_bytes(self, options: BudgetOptions) -> int:
        """Bytes of the weights of all sets, unquantized."""
        names = (name for own in options.sets for name in own)
        return sum(self._modules[name].get_parameter("weight").nbytes for name in names)

    def unquantized_bytes(self) -> int:
        """Bytes of the weight files without the budget's schemes, at most those of the source."""
        files = {one.file for one in self._writing.headers.values()}
        sizes = [one.stat().st_size for one in files if one.is_file()]
        written = self.file_bytes({})
        return min(written, sum(sizes)) if sizes else written

    def _planned_tensors(self, name: str, scheme: QuantizationScheme) -> Any:
        module = self._modules[name]
        form = tuple(
            (key, one.shape, one.dtype)
            for key, one in module._parameters.items()
            if one is not None
        )
        key = (type(module), form, id(scheme))
        if key not in self._tensors:  # a model has few forms of modules
            self._tensors[key] = (scheme, quantized_linear_tensors(module, scheme))
        return self._tensors[key][1]

    def _module_bytes(self, schemes: Mapping[str, QuantizationScheme]) -> dict[str, int]:
        stored = self.tensors(schemes).stored
        places = NameMap(self._model).stored(list(schemes))
        sizes: dict[str, int] = {}
        for one in stored:
            owner, _, own = one.name.rpartition(".")
            if own != "bias":
                sizes[owner] = sizes.get(owner, 0) + one.nbytes
        return {name: sizes[place] for name, place in places.items()}


def _shared_sets(model: Module, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of ``names`` that servers hold as one, and each other name, in the model's order."""
    set_of: dict[str, list[str]] = {name: [name] for name in names}
    for joined in (*fused_sets(model), *expert_sets(model)):
        own = [name for name in joined if name in set_of]
        members = {id(set_of[name]): set_of[name] for name in own}
        merged = [name for one in members.values() for name in one]
        set_of |= dict.fromkeys(merged, merged)
    order = {name: place for place, name in enumerate(names)}
    distinct = {id(one): one for one in set_of.values()}
    return [tuple(sorted(one, key=order.__getitem__)) for one in distinct.values()]


def _targets_of(names: Sequence[str]) -> list[str]:
    """Targets that match these modules and no others."""
    parsed = [parse_expert_name(name) for name in names]
    experts = {one.experts for one in parsed if one is not None}
    if len(names) == 1 or None in parsed or len(experts) != 1:
        return list(names)
    own = dict.fromkeys(re.escape(one.own) for one in parsed if one is not None)
    numbers = {one.number for one in parsed if one is not None}
    if len(own) * len(numbers) != len(names):
        return list(names)
    return [rf"re:^{re.escape(experts.pop())}\.\d+\.({'|'.join(own)})$"]
