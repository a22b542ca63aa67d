# SPDX-License-Identifier: Apache-2.0
"""MoE experts as Linears: the replacement for a module with stacked expert weights.

:class:`LinearExperts` has one child per expert, ``0``, ``1``, …, with a Linear for each of its
matrices, and computes what the original computes. During calibration each expert is also *shown*
tokens: those that are routed to it, or others too. Tokens that are shown but not routed do not
contribute to the output.

The order of calibration is defined in :mod:`llmcompressor.moe.expert_stops`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Parameter
from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightTransform,
)
from transformers.pytorch_utils import Conv1D

from llmcompressor.errors import ArgumentError
from llmcompressor.logger import logger
from llmcompressor.modeling.patches import linear_with_rotations
from llmcompressor.modeling.weights import text_config
from llmcompressor.moe.layouts import (
    DOWN,
    GATE,
    UP,
    StackedLinear,
    StackedMoE,
    StackLayout,
    detect_layout,
    expert_matrices,
    expert_matrix,
    is_stack,
)
from llmcompressor.transformers_internals import apply_gate, has_gate_function

__all__ = [
    "Expert",
    "LinearExperts",
    "Routes",
    "Shown",
    "find_stacked_moes",
    "fuse_experts",
    "moe_mismatch",
    "patch_moe_mappings",
    "unfuse_experts",
]

_M = TypeVar("_M", bound=Module)

Shown = Literal["routed", "all_tokens", "neighbours", "nothing"]
"""Which of its layer's tokens an expert's statistics are made of."""


class Expert(Module):
    """The Linears of one expert; they are called by :class:`LinearExperts`."""


class Routes(NamedTuple):
    """The routing of a batch: the rows, weights and inputs of each expert."""

    tokens_TH: Tensor
    """Every token of the layer."""
    rows: list[Tensor]
    """Expert → its rows of ``tokens_TH``."""
    weights: list[Tensor] | None
    """Expert → their weights, ``[rows]``; ``None`` where nothing is weighted."""
    inputs: list[Tensor] | None
    """Expert → what it gets, where that is not a selection of ``tokens_TH``."""
    real: list[Tensor] | None
    """Expert → which of its rows are no padding, bool; ``None`` where all are."""

    def input_of(self, expert: int) -> Tensor:
        """The input of an expert, ``[rows, hidden]``."""
        if self.inputs is not None:
            return self.inputs[expert]
        return self.tokens_TH[self.rows[expert]]

    def without_padding(self, expert: int, values: Tensor) -> Tensor:
        """The rows of an expert's values that are not padding."""
        if self.real is None or bool(self.real[expert].all()):
            return values
        return values[self.real[expert]]


class LinearExperts(Module):
    """An MoE whose experts have Linears of their own.

    Args:
        original: the module that it replaces; its activation and gating are kept.
        form: the layout of the original's stacks.
        names: :data:`GATE`, :data:`UP`, :data:`DOWN` → what the Linears are called.

    Attributes:
        tokens: how many real tokens were routed to each expert in the last calibration.
        starved: experts that got too few tokens → the policy applied to them.
        shown: the tokens that each expert is shown during calibration.
        stages: the first and the last stage of each wave, while the model is calibrated.
        real_T: which tokens of the present batch are no padding; ``None``: all.
        calls_all: experts without tokens are called too, so that their calls are recorded.
        calibrating: whether stages are called, and tokens shown.
    """

    def __init__(self, original: Module, form: StackLayout, names: Mapping[str, str]) -> None:
        super().__init__()
        self.form = form
        self.names = dict(names)
        self.num_experts = form.experts
        self.training = original.training
        for number, expert in enumerate(_build_experts(original, form, names)):
            self._modules[str(number)] = expert
        for name, module in original._modules.items():
            self.add_module(name, module)
        gating = copy.copy(original)
        gating._parameters = {}
        self._gating = (gating,)  # in a tuple it is no child
        self.stages: list[tuple[Module, Module]] = []
        self.tokens = [0] * form.experts
        self.starved: dict[int, str] = {}
        self.shown: list[Shown] = ["routed"] * form.experts
        self.real_T: Tensor | None = None
        self.calls_all = False
        self.calibrating = False

    # ------------------------------------------------------------------ parts

    def linear(self, expert: int, role: str) -> Linear:
        """The Linear of an expert with the given role."""
        found = self._modules[str(expert)]
        assert found is not None
        linear = found._modules[self.names[role]]
        assert isinstance(linear, Linear)
        return linear

    @property
    def original_without_weights(self) -> Module:
        """The original module without its stacked weights."""
        return self._gating[0]

    @property
    def input_roles(self) -> tuple[str, ...]:
        """Roles of the Linears that take tokens."""
        return (GATE, UP) if self.form.gated else (UP,)

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all experts but ``kept``.

        The weights move into the first Linears, which stay: references to these modules, by name or
        object, remain valid.

        Args:
            kept: their indices, in ascending order.
        """
        for place, number in enumerate(kept):
            for part in self.form.parts:
                target, source = self.linear(place, part.role), self.linear(number, part.role)
                for kind in ("weight", "bias") if self.form.biased else ("weight",):
                    target._parameters[kind] = source._parameters[kind]
        for number in range(len(kept), self.num_experts):
            del self._modules[str(number)]
        self.num_experts = len(kept)
        self.form = replace(self.form, experts=len(kept))
        self.tokens, self.starved = [0] * len(kept), {}
        self.shown = ["routed"] * len(kept)
        self._gating = (copy.copy(self.original_without_weights),)

    def end(self) -> None:
        """Remove the stages; the token counts stay."""
        for place in range(len(self.stages)):
            del self._modules[f"enter_{place}"], self._modules[f"leave_{place}"]
        self.stages = []
        self.calibrating = self.calls_all = False
        self.real_T = None
        self.shown = ["routed"] * self.num_experts

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the original's output; see :mod:`llmcompressor.moe.layouts`."""
        if not self.calibrating:
            return self.mixed(hidden_states, top_k_index, top_k_weights)
        routes = self._routes(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        for enter, leave in self.stages:
            enter(routes.tokens_TH, routes)
            result = leave(routes.tokens_TH, routes, result)
        return result

    def mixed(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Tensor:
        """The output of :meth:`forward`, computed without showing further tokens."""
        routes = self._routes(hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            if len(routes.rows[expert]):
                self.add(result, routes, {expert: self._run(expert, routes)})
        return result

    def counts(self, *arguments: Any, **named: Any) -> list[int]:
        """Number of real tokens routed to each expert, given the arguments of :meth:`forward`."""
        routes = self._routes(*arguments, **named)
        if routes.real is None:
            return [len(rows) for rows in routes.rows]
        return [int(count) for count in torch.stack([one.sum() for one in routes.real]).tolist()]

    def _routes(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
    ) -> Routes:
        weights = inputs = None
        if top_k_index is not None and top_k_weights is not None:
            tokens_TH = hidden_states
            places = top_k_index.flatten()
            order = places.argsort(stable=True)
            # an index beyond the experts belongs to another process
            sizes = places.bincount(minlength=self.num_experts).tolist()[: self.num_experts]
            chosen = order[: sum(sizes)]
            rows = list(torch.split(chosen // top_k_index.shape[-1], sizes))
            weights = list(torch.split(top_k_weights.flatten()[chosen], sizes))
        else:
            each_ETH = hidden_states.view(self.num_experts, -1, self.form.hidden)
            tokens_TH = each_ETH.sum(0)
            rows = [one_TH.any(-1).nonzero().flatten() for one_TH in each_ETH]
            inputs = [one_TH[row] for one_TH, row in zip(each_ETH, rows, strict=True)]
        real_T, real = self.real_T, None
        if real_T is not None and len(real_T) == len(tokens_TH):
            real_T = real_T.to(rows[0].device)
            real = [real_T[row] for row in rows]
        return Routes(tokens_TH, rows, weights, inputs, real)

    def _run(self, expert: int, routes: Routes) -> Tensor:
        """The output of an expert for its tokens."""
        given = routes.input_of(expert)
        between = self._activate(*(self.linear(expert, role)(given) for role in self.input_roles))
        result: Tensor = self.linear(expert, DOWN)(between)
        return result

    def add(self, result: Tensor, routes: Routes, made: Mapping[int, Tensor]) -> Tensor:
        """Add the weighted outputs of experts to ``result``, in place."""
        for expert, product_TH in made.items():
            rows, output = routes.rows[expert], self.apply_expert_norm(product_TH)
            if routes.weights is not None:
                weighted = output * routes.weights[expert].unsqueeze(-1)
                result.index_add_(0, rows, weighted.to(result.dtype))
            else:
                place = expert * (len(result) // self.num_experts)
                result[place + rows] = output.to(result.dtype)
        return result

    def apply_expert_norm(self, output: Tensor) -> Tensor:
        """Apply the norm that some MoEs have after an expert, before outputs are weighted."""
        original: Any = self.original_without_weights
        if not getattr(original, "has_post_expert_norm", False):
            return output
        normed: Tensor = original.post_expert_norm(output)
        return normed

    def _activate(self, *values: Tensor) -> Tensor:
        """Apply the original's activation and gating."""
        original: Any = self.original_without_weights
        if not self.form.gated:
            activated: Tensor = original.act_fn(values[0])
            return activated
        gate, up = values
        if not has_gate_function(original):
            product: Tensor = original.act_fn(gate) * up
            return product
        joined = (
            torch.stack(values, -1).flatten(-2) if self.form.interleaved else torch.cat(values, -1)
        )
        return apply_gate(original, joined)

    # ------------------------------------------------------------------ calibration

    def between(self, expert: int, given: Tensor) -> Tensor:
        """The activations between an expert's matrices, computed without calling hooks."""
        return self._activate(
            *(linear_with_rotations(self.linear(expert, role), given) for role in self.input_roles)
        )


def unfuse_experts(mixture: StackedMoE, names: Mapping[str, str]) -> LinearExperts:
    """Unfuse an MoE: a Linear for each matrix, whose weight is a view where possible.

    Args:
        mixture: one that can be unfused.
        names: :data:`GATE`, :data:`UP`, :data:`DOWN` → what the Linears are to be called.
    """
    assert mixture.form is not None
    made = LinearExperts(mixture.module, mixture.form, names)
    for own in mixture.module.children():
        own.train(made.training)
    return made


def fuse_experts(mixture: LinearExperts, *, hollow: bool = False) -> Module:
    """Fuse the Linears of ``mixture`` into a module like the original, with stacked weights.

    Args:
        mixture: its Linears stay as they are.
        hollow: leave the stacks on the meta device, without data.
    """
    form = mixture.form
    whole = copy.copy(mixture.original_without_weights)
    stacks: dict[str, Parameter | None] = {}
    for part in form.parts:
        for kind in ("weight", "bias") if form.biased else ("weight",):
            key = part.stack if kind == "weight" else f"{part.stack}_bias"
            for expert in range(form.experts):
                own = getattr(mixture.linear(expert, part.role), kind).detach()
                if key not in stacks:
                    device = "meta" if hollow else own.device
                    empty = own.new_empty(form.shape_of(key), device=device)
                    stacks[key] = Parameter(empty, requires_grad=empty.is_floating_point())
                stack = stacks[key]
                assert stack is not None
                if hollow:
                    continue
                expert_matrix(stack.data, form, expert, part).copy_(own)
    whole._parameters = stacks
    return whole


def _build_experts(
    original: Module, form: StackLayout, names: Mapping[str, str]
) -> Iterator[Expert]:
    """The experts of an MoE; all but the weights is built once, as there may be hundreds."""
    blank = Expert()
    blank.training = original.training
    linears = [_blank_linear(original, form, part) for part in form.parts]
    values = [_expert_tensors(original, form, part) for part in form.parts]
    for number in range(form.experts):
        expert = _shallow_copy(blank)
        for part, linear, own in zip(form.parts, linears, values, strict=True):
            made = _shallow_copy(linear)
            for kind, (matrices, needs_grad) in own.items():
                value = matrices[number].contiguous()
                made._parameters[kind] = Parameter(value, requires_grad=needs_grad)
            expert._modules[names[part.role]] = made
        yield expert


def _expert_tensors(
    original: Module, form: StackLayout, part: StackedLinear
) -> dict[str, tuple[Sequence[Tensor], bool]]:
    """``weight`` and ``bias`` of a Linear for each expert, and whether they need gradients."""
    found: dict[str, tuple[Sequence[Tensor], bool]] = {}
    for kind, key in (("weight", part.stack), ("bias", f"{part.stack}_bias")):
        stack = original._parameters.get(key)
        if stack is not None:
            found[kind] = expert_matrices(stack.detach(), form, part), stack.requires_grad
    return found


def _blank_linear(original: Module, form: StackLayout, part: StackedLinear) -> Linear:
    """A Linear of the right size without weights."""
    linear = Linear.__new__(Linear)  # nothing is to be initialized
    Module.__init__(linear)
    linear.training = original.training
    stack = original._parameters[part.stack]
    assert stack is not None
    linear.out_features, linear.in_features = expert_matrices(stack, form, part)[0].shape
    linear.register_parameter("weight", None)
    linear.register_parameter("bias", None)
    return linear


def _shallow_copy(module: _M) -> _M:
    """A shallow copy of a module without weights, ten times faster than a new one."""
    kind = type(module)
    made = kind.__new__(kind)
    made.__dict__.update(
        (key, value.copy() if isinstance(value, dict | set) else value)
        for key, value in module.__dict__.items()
    )
    return made


# --------------------
# Detection of MoEs with stacked experts, verified on a small copy of each.
#
# Layouts are defined in :mod:`llmcompressor.moe.layouts`. A small copy of an MoE is run to
# verify that it computes ``down(act(gate(x)) * up(x))``.

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOLERANCE = 1e-4
_TOKENS = 5


def find_stacked_moes(model: Module) -> list[StackedMoE]:
    """The MoEs of a model with stacked experts, in order.

    Those that cannot be unfused are included where they are recognizable as experts: their stacks
    have as many matrices as the configuration has experts, or lie below ``experts``. Below
    ``experts``, matrices that belong to no Linear are included, too.
    """
    counts = _expert_counts(model)
    tried: dict[tuple[type[Module], StackLayout], str] = {}
    found = []
    for name, module in model.named_modules():
        stacks = {key: one for key, one in module._parameters.items() if is_stack(one)}
        if not stacks:
            if matrices := _matrices_of_experts(name, module, counts):
                found.append(StackedMoE(name, module, None, _not_linears_message(module, matrices)))
            continue
        form = detect_layout(module)
        if isinstance(form, StackLayout):
            key = (type(module), form)
            if key not in tried:
                tried[key] = moe_mismatch(module, form)
            problem = tried[key]
            found.append(StackedMoE(name, module, None if problem else form, problem))
        elif _is_experts_module(name, module, stacks, counts):
            found.append(StackedMoE(name, module, None, form))
    return found


def _expert_counts(model: Module) -> set[int]:
    config = getattr(model, "config", None)
    if config is None:
        return set()
    configs = [config, text_config(config)]
    values = [getattr(one, key, None) for one in configs for key in _COUNTS]
    return {value for value in values if isinstance(value, int) and value > 1}


def _is_experts_module(name: str, module: Module, stacks: dict[str, Any], counts: set[int]) -> bool:
    if hasattr(module, "kernel_size"):  # a convolution
        return False
    below = any("experts" in part for part in name.split("."))
    return below or any(stack.shape[0] in counts for stack in stacks.values())


def _matrices_of_experts(name: str, module: Module, counts: set[int]) -> list[str]:
    """Names of matrices below ``experts`` that cannot become Linears.

    The matrices of all experts may be concatenated in one. A matrix with one row for each expert is
    a router's.
    """
    if not any("experts" in part for part in name.split(".")):
        return []
    if isinstance(module, Linear | Embedding | Conv1D):
        return []
    return [
        key
        for key, one in module._parameters.items()
        if one is not None and one.ndim == 2 and one.shape[0] not in counts and min(one.shape) > 1
    ]


def _not_linears_message(module: Module, names: Sequence[str]) -> str:
    return (
        f"{' and '.join(names)} of {type(module).__name__} are neither Linears nor stacks of one "
        "matrix per expert"
    )


@dataclass
class _SmallMoE:
    """A small copy of an MoE.

    Attributes:
        module: with stacks of few and small matrices.
        form: its layout.
        arguments: of its forward.
    """

    module: Module
    form: StackLayout
    arguments: list[Tensor] = field(default_factory=list)


def moe_mismatch(module: Module, form: StackLayout) -> str:
    """Why an MoE does not compute what :class:`LinearExperts` does; empty if it does.

    A small copy of it is run. One that cannot be run small is trusted if it declares its layout, as
    transformers' MoEs do.
    """
    try:
        trial = _small_copy(module, form)
        own = getattr(type(module).forward, "__wrapped__", type(module).forward)
        with torch.no_grad():
            wanted = own(trial.module, *(one.clone() for one in trial.arguments))
            names = {part.role: part.role for part in form.parts}
            made = LinearExperts(trial.module, trial.form, names)
            found = made(*(one.clone() for one in trial.arguments))
    except Exception as error:  # a model's own forward may raise anything
        if hasattr(module, "is_transposed"):
            logger.warning(
                f"{type(module).__name__} could not be tried out on small matrices "
                f"({type(error).__name__}: {str(error)[:200]}); its experts are computed as the "
                "layout that it declares says. Compare the model's outputs before and after."
            )
            return ""
        return f"its forward cannot be tried out ({type(error).__name__}: {error})"
    if isinstance(wanted, Tensor) and wanted.shape == found.shape:
        scale = float(wanted.abs().max())
        if float((wanted - found).abs().max()) <= _TOLERANCE * scale:
            return ""
    return "its forward computes something else than down(act(gate(x)) * up(x))"


def _small_copy(module: Module, form: StackLayout) -> _SmallMoE:
    """A copy with few and small matrices; sizes that are equal stay equal."""
    hidden = 8
    between = 8 if form.intermediate == form.hidden else 6
    if form.hidden == 2 * form.intermediate:
        between = 4
    sizes = {form.hidden: hidden, form.intermediate: between, 2 * form.intermediate: 2 * between}
    experts = sizes.get(form.experts, 3)
    small = copy.copy(module)
    for key, value in vars(module).items():
        if type(value) is int and value in {*sizes, form.experts}:
            object.__setattr__(small, key, experts if value == form.experts else sizes[value])
    shape = replace(form, experts=experts, hidden=hidden, intermediate=between)
    random = torch.Generator().manual_seed(0)
    small._parameters = {
        name: Parameter(_random_normal(random, *shape.shape_of(name))) for name in shape.stacks
    }
    small._modules = {
        name: None if child is None else _small_child_copy(child, sizes, random)
        for name, child in module._modules.items()
    }
    if form.routed:
        index = torch.stack([torch.randperm(experts, generator=random)[:2] for _ in range(_TOKENS)])
        weights = torch.rand(_TOKENS, 2, generator=random)
        return _SmallMoE(small, shape, [_random_normal(random, _TOKENS, hidden), index, weights])
    return _SmallMoE(small, shape, [_random_normal(random, experts * _TOKENS, hidden)])


def _small_child_copy(child: Module, sizes: Mapping[int, int], random: torch.Generator) -> Module:
    """A copy of another child of an MoE, such as a norm, for vectors of the small sizes."""
    own = list(child.named_parameters())
    if not own or any(one.ndim != 1 or len(one) not in sizes for _, one in own):
        return child
    small = copy.deepcopy(child)
    for name, one in own:
        path, _, key = name.rpartition(".")
        value = _random_normal(random, sizes[len(one)])
        small.get_submodule(path)._parameters[key] = Parameter(value, requires_grad=False)
    return small


def _random_normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random)


# --------------------
# Checkpoints that store experts one by one where transformers expects them stacked.

_EACH = "experts.*."


def patch_moe_mappings(
    model_type: str,
    mappings: Sequence[Any],
    remove_targets: Iterable[str] | None = None,
) -> None:
    r"""Let transformers load experts that are stored one by one into the stacks of a model type.

    The layout depends on the checkpoint, and transformers may know only one: with another layout
    it leaves the experts random. After this call it stacks them, in this process::

        patch_moe_mappings(
            "qwen3_vl_moe", [WeightRenaming(r"experts\.(\d+)\.w1\.", r"experts.\1.gate_proj.")]
        )

    Args:
        model_type: the ``model_type`` of ``config.json``, or of a part of it.
        mappings: transformers' ``WeightRenaming`` and ``WeightConverter``. After the renamings
            experts are named as in the type's own table; where it stacks none,
            ``experts.0.gate_proj``, ``up_proj`` and ``down_proj``.
        remove_targets: entries of the type's own table to leave out, by what they make.

    Raises:
        ArgumentError: transformers does not know the type, or an entry is no mapping of its.
    """
    if model_type not in CONFIG_MAPPING:
        raise ArgumentError(
            f"The installed transformers knows no model type {model_type!r}.",
            "Give the model_type of the checkpoint's config.json.",
        )
    wrong = [one for one in mappings if not isinstance(one, WeightTransform)]
    if wrong:
        raise ArgumentError(
            f"Among the mappings is a {type(wrong[0]).__name__}.",
            "Give WeightRenaming or WeightConverter of transformers.core_model_loading.",
        )
    removed = set(remove_targets or ())
    kept = [one for one in _conversion_table(model_type) if removed.isdisjoint(one.target_patterns)]
    part = (CONFIG_MAPPING[model_type].sub_configs or {}).get("text_config")
    text_table = _conversion_table(getattr(part, "model_type", None))  # of the language model
    stacks = any(
        isinstance(entry, WeightConverter) and any(_EACH in one for one in entry.source_patterns)
        for entry in [*kept, *mappings, *text_table]
    )
    stacking = [] if stacks else _stacking_converters()
    register_checkpoint_conversion_mapping(
        model_type, [*kept, *mappings, *stacking], overwrite=True
    )


def _conversion_table(model_type: str | None) -> list[Any]:
    read: Any = get_checkpoint_conversion_mapping  # it has no types
    return list(read(model_type) or []) if model_type else []


def _stacking_converters() -> list[Any]:
    """Converters that stack gate with up projections, and down projections."""
    return [
        WeightConverter(
            source_patterns=[f".{_EACH}gate_proj.weight", f".{_EACH}up_proj.weight"],
            target_patterns=".experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=[f".{_EACH}down_proj.weight"],
            target_patterns=".experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
