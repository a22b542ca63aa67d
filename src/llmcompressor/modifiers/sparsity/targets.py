# SPDX-License-Identifier: Apache-2.0
"""Target matching of one-shot pruning: from targets to modules and their sparsities.

A target selects *layers*: a Linear by its class or name, or a module that contains Linears, such as
a decoder layer. The Linears and convolutions of these layers are pruned. A target that matches no
module is matched against the names of weights (``re:.*q_proj.weight``), and ``__ALL_PRUNABLE__``
stands for every prunable module. The routers of MoE layers are left out unless a target names them.

A layer that several targets match belongs to the first of them. A list of sparsities has one entry
per target, each of which has to apply to some layer, or one per layer in model order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Conv1d, Conv2d, Embedding, Linear, Module
from torch.nn.functional import pad, unfold

from llmcompressor.core.block_source import BlockSource
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modeling.matching import (
    as_targets,
    check_targets,
    match_named_modules,
    matches,
    matches_class,
    matches_name,
    warn_of_parent_ignores,
)
from llmcompressor.modeling.names import TargetIndex, named_modules
from llmcompressor.numerics.masks import NofM
from llmcompressor.numerics.wanda import outlier_count, owl_sparsities, wanda_score
from llmcompressor.observers.tokens import real_tokens
from llmcompressor.runtime.progress import join_names
from llmcompressor.schemes.assign import output_head, reason_to_leave

# --------------------
# Matrix views of prunable modules, and the inputs that these matrices are multiplied with.
#
# =====================  ==========================  ==========================================
# module                 matrix [R, C]               a token
# =====================  ==========================  ==========================================
# ``Linear``             weight                      a row of the input
# transformers' Conv1D   weight, transposed          a row of the input
# ``Conv1d``, ``Conv2d`` weight, kernel flattened    the patch below the kernel, zeros included
# =====================  ==========================  ==========================================

_CLASSES = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Conv1D")


def is_prunable(module: Module) -> bool:
    """Return True if a module has a weight that can be pruned."""
    found = any(matches_class(module, name) for name in _CLASSES)
    return found and isinstance(getattr(module, "weight", None), Tensor)


def unprunable_reason(module: Module) -> str | None:
    """The reason why a module cannot be pruned; ``None`` if it can."""
    weight = _weight(module)
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its dtype is {str(weight.dtype).removeprefix('torch.')}"
    if isinstance(module, Linear) or _is_transposed(module):
        return None
    if not isinstance(module, Conv1d | Conv2d):
        return f"a {type(module).__name__} has no matrix form here"
    return "its channels are convolved in groups" if module.groups > 1 else None


def has_row_tokens(module: Module) -> bool:
    """Return True if its tokens are the rows of its input, so that they can be shared."""
    return not isinstance(module, Conv1d | Conv2d)


def matrix_shape(module: Module) -> tuple[int, int]:
    """Rows R and columns C of the matrix."""
    shape = _weight(module).shape
    return (shape[1], shape[0]) if _is_transposed(module) else (shape[0], shape[1:].numel())


def matrix_of(module: Module) -> Tensor:
    """The matrix ``[R, C]`` in the weight's dtype, a view if possible."""
    weight = _weight(module).detach()
    return weight.T if _is_transposed(module) else weight.flatten(1)


def write_matrix(module: Module, matrix_RC: Tensor) -> None:
    """Copy a matrix into the weight."""
    weight = _weight(module).data
    weight.copy_(matrix_RC.T if _is_transposed(module) else matrix_RC.view(weight.shape))


def matrix_inputs(module: Module, tensor: Tensor, token_mask: Tensor | None) -> Tensor:
    """The inputs that the matrix is multiplied with, ``[tokens, C]``, without padding."""
    if not isinstance(module, Conv1d | Conv2d):
        return real_tokens(tensor, token_mask)
    around: list[int] = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    if tensor.ndim == len(module.kernel_size) + 1:
        tensor = tensor.unsqueeze(0)
    tensor = pad(tensor, around, mode=mode)
    kernel, dilation, stride = module.kernel_size, module.dilation, module.stride
    if isinstance(module, Conv1d):
        tensor = tensor.unsqueeze(-2)
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    patches: Tensor = unfold(tensor, kernel, dilation=dilation, stride=stride)
    return patches.transpose(1, 2).flatten(0, 1).contiguous()


def _weight(module: Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _is_transposed(module: Module) -> bool:
    return matches_class(module, "Conv1D")


# --------------------
# Target matching of one-shot pruning: from targets to modules and their sparsities.

ALL_PRUNABLE = frozenset({"__ALL_PRUNABLE__", "__ALL_QUANTIZABLE__", "__ALL__"})
"""Words for every module that can be pruned; of what else the last two mean nothing can be."""


@dataclass(frozen=True)
class PruningLayers:
    """Layers that targets match in a model.

    Attributes:
        names: module to prune → its name, in model order.
        layer: module to prune → name of its layer.
        sparsity: name of each layer → its sparsity.
    """

    names: dict[Module, str]
    layer: dict[Module, str]
    sparsity: dict[str, float]


def find_pruning_layers(
    model: Module,
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
    sparsity: float | Sequence[float],
    group: NofM | None,
) -> PruningLayers:
    """Find the layers, the modules to prune in each, and their sparsities.

    Raises:
        TargetError: a target matches nothing, a module cannot be pruned, or sparsities do not fit
            the layers.
    """
    wanted = as_targets(targets)
    if not wanted:
        raise TargetError("targets is empty, so there is nothing to prune.", "Name some: Linear.")
    everything = dict(named_modules(model))
    left_out = _IgnoreMatcher(as_targets(ignore))
    places = _match_layers(model, everything, wanted, left_out)
    rank = {target: place for place, target in reversed(list(enumerate(wanted)))}
    names: dict[Module, str] = {}
    layer: dict[Module, str] = {}
    for name in sorted(places, key=lambda place: rank[places[place]]):
        for inner, module in _prunable_in(everything, name):
            if module not in names and not left_out.means(inner, module):
                names[module], layer[module] = inner, name
    _leave_out_heads_and_routers(model, wanted, names, layer)
    _warn_of_head(model, wanted, names)
    if not names:
        raise TargetError(
            f"Nothing in {type(model).__name__} is left to prune by "
            f"{', '.join(map(repr, wanted))}: what matches holds no Linear and no convolution, "
            "or is ignored.",
            "Correct targets or ignore.",
        )
    meant = (inner for name in places for inner, _ in _prunable_in(everything, name))
    warn_of_parent_ignores(model, left_out.entries, meant)
    _check_prunable(names, group)
    used = set(layer.values())
    held = [name for name in places if name in used]
    order = {module: place for place, module in enumerate(everything.values())}
    names = dict(sorted(names.items(), key=lambda item: order[item[0]]))
    return PruningLayers(names, layer, _layer_sparsities(sparsity, held, places, wanted))


def matches_linear(
    name: str,
    modules: Mapping[str, Module],
    targets: str | Sequence[str],
    ignore: str | Sequence[str],
) -> bool:
    """Return True if targets would match a Linear called ``name``, its weight's name or its layer.

    Args:
        name: name of the Linear.
        modules: the Linear and the modules that contain it, by name.
        targets: layers.
        ignore: modules or weights that are left out; takes precedence.
    """
    ignored = as_targets(ignore)
    layers = {
        each: module
        for each, module in modules.items()
        if not any(matches(each, module, entry) for entry in ignored)
    }
    if any(_spells_out_weight(name, entry) for entry in ignored):
        return False
    return name in layers and any(
        target in ALL_PRUNABLE
        or matches_name(f"{name}.weight", target)
        or any(matches(each, module, target) for each, module in layers.items())
        for target in as_targets(targets)
    )


class _IgnoreMatcher:
    """Matcher of ignore entries: modules, and weights whose names are spelled out."""

    def __init__(self, entries: Sequence[str]) -> None:
        self.entries = tuple(entries)
        self._of_modules = TargetIndex(entries)
        self._of_weights = TargetIndex(entry for entry in entries if "weight" in entry)

    def means(self, name: str, module: Module) -> bool:
        """Return True if an entry matches a module or its weight."""
        near = self._of_modules.of(name, module)
        return any(matches(name, module, entry) for entry in near) or bool(
            self.weight_entries(name, module)
        )

    def weight_entries(self, name: str, module: Module) -> list[str]:
        """The entries that spell out the name of a module's weight."""
        near = self._of_weights.of(f"{name}.weight", module)
        return [entry for entry in near if _spells_out_weight(name, entry)]


def _match_layers(
    model: Module, everything: dict[str, Module], wanted: Sequence[str], left_out: _IgnoreMatcher
) -> dict[str, str]:
    """Name of each layer → the first target that matches it, in model order."""
    possible = TargetIndex(wanted)
    hits = {
        name: [one for one in possible.of(name, module) if matches(name, module, one)]
        for name, module in everything.items()
    }
    met = {target for found in hits.values() for target in found}
    everywhere = [target for target in wanted if target in ALL_PRUNABLE]
    of_modules = met | ALL_PRUNABLE
    weights = TargetIndex(target for target in wanted if target not in of_modules)
    first = {target: place for place, target in reversed(list(enumerate(wanted)))}
    found: dict[str, str] = {}
    of_weights: set[str] = set()
    for name, module in everything.items():
        if is_prunable(module):
            weight = f"{name}.weight"
            hits[name] += everywhere
            hits[name] += [one for one in weights.of(weight, module) if matches_name(weight, one)]
            of_weights.update(left_out.weight_entries(name, module))
        if hits[name]:
            found[name] = min(hits[name], key=first.__getitem__)
    met = {target for each in hits.values() for target in each}
    plain = [target for target in wanted if target not in met]
    check_targets(model, plain, [entry for entry in left_out.entries if entry not in of_weights])
    kept = dict(match_named_modules(model, [name for name in found if name], left_out.entries))
    if "" in found:
        kept[""] = model
    return {name: target for name, target in found.items() if name in kept}


def _prunable_in(everything: Mapping[str, Module], layer: str) -> Iterator[tuple[str, Module]]:
    for inner, module in named_modules(everything[layer]):
        name = f"{layer}.{inner}".strip(".")
        if is_prunable(module) and name in everything:
            yield name, module


def _spells_out_weight(name: str, entry: str) -> bool:
    """Return True if an entry spells out a weight's name; negative patterns would match any."""
    return "weight" in entry and matches_name(f"{name}.weight", entry)


def _leave_out_heads_and_routers(
    model: Module, wanted: Sequence[str], names: dict[Module, str], layer: dict[Module, str]
) -> None:
    """Leave out tied heads, and routers and the like, unless a target names them.

    A router has few weights and decides the routing; inference engines serve it dense.
    """
    tables = {id(one.weight) for one in model.modules() if isinstance(one, Embedding)}
    heads: list[str] = []
    routers: list[str] = []
    for module, name in list(names.items()):
        parent = model.get_submodule(name.rpartition(".")[0])
        kind = heads if id(module.weight) in tables else None
        if kind is None and reason_to_leave(name, module, parent):
            kind = routers
        if kind is not None and not _is_named(name, wanted):
            kind.append(name)
            del names[module], layer[module]
    for name in heads:
        logger.info(
            f"Left unpruned: {name}, whose weight is the input embedding. Name it as a target "
            "to prune both."
        )
    if routers:
        logger.info(
            f"Left unpruned: {join_names(routers)}: routers and the like, which engines serve "
            "dense. To prune one, target it by name."
        )


def _warn_of_head(model: Module, wanted: Sequence[str], names: Mapping[Module, str]) -> None:
    """Warn if the output head is pruned without being named, as earlier releases left it out."""
    head = output_head(model)
    if head is not None and head in names and not _is_named(names[head], wanted):
        logger.warning(
            f"{names[head]}, which gives the logits, is pruned too: nothing leaves it out. If that "
            f"is not meant, put {names[head]} on the ignore list."
        )


def _is_named(name: str, wanted: Sequence[str]) -> bool:
    """Return True if a target matches a module by its name or its weight's name."""
    return any(
        matches_name(name, target) or matches_name(f"{name}.weight", target) for target in wanted
    )


def _check_prunable(names: dict[Module, str], group: NofM | None) -> None:
    reasons = []
    for module, name in names.items():
        reason = unprunable_reason(module)
        if reason is None and group is not None:
            reason = group.misfit(matrix_shape(module))
        status = getattr(module, "quantization_status", None)
        has_weight = isinstance(getattr(module, "weight", None), Tensor)
        if reason is None and (status is not None or not has_weight):
            reason = "it is quantized already"
        if reason is not None:
            reasons.append(f"{name} ({reason})")
    if reasons:
        raise TargetError(
            f"These cannot be pruned: {join_names(reasons)}.",
            "Put them on the ignore list, or choose another mask_structure.",
        )


def _layer_sparsities(
    sparsity: float | Sequence[float],
    layers: Sequence[str],
    target_of: dict[str, str],
    wanted: Sequence[str],
) -> dict[str, float]:
    if isinstance(sparsity, int | float):
        return dict.fromkeys(layers, float(sparsity))
    if len(sparsity) == len(wanted):
        deciding = {target_of[layer] for layer in layers}
        idle = [target for target in wanted if target not in deciding]
        if idle:
            raise TargetError(
                f"The sparsity of {idle[0]!r} decides about nothing: what this target means is "
                "ignored, or meant by a target before it.",
                "Put narrower targets before wider ones, or leave it out with its sparsity.",
            )
        by_target = dict(zip(wanted, sparsity, strict=True))
        return {layer: by_target[target_of[layer]] for layer in layers}
    if len(sparsity) == len(layers):
        return dict(zip(layers, sparsity, strict=True))
    raise TargetError(
        f"sparsity has {len(sparsity)} values, and there are {len(wanted)} target(s), which mean "
        f"{len(layers)} layer(s).",
        "Give one number, one per target, or one per layer in the order of the model.",
    )


# --------------------
# OWL: sparsity per layer by its share of outliers, from a pass over the unpruned model.


class OutlierProfile:
    """Outlier counts of layers, and the sparsities derived from them.

    The scores of a layer are compared with the mean over all of its modules. The counts of an
    interrupted run are kept in its journal.

    Args:
        layers: the layers that are pruned.
        target: mean sparsity.
        multiple: multiple of the mean above which a score is an outlier.
        spread: maximum distance of a layer's sparsity from ``target``.
    """

    def __init__(
        self, layers: PruningLayers, target: float, multiple: float, spread: float
    ) -> None:
        self._layers = layers
        self._target, self._multiple, self._spread = target, multiple, spread
        self._squares: dict[Module, Tensor] = {}
        self._counts: dict[str, dict[str, tuple[int, int]]] = {}
        self.is_decided = False

    def note(self, module: Module, mean_square_C: Tensor) -> None:
        """Keep the input statistics of a module until its layer is surveyed."""
        self._squares[module] = mean_square_C

    def survey(self, modules: Sequence[Module], blocks: BlockSource) -> None:
        """Count the outliers of modules with input statistics and loaded weights."""
        known = [module for module in modules if module in self._squares]
        by_layer: dict[str, list[Module]] = {}
        for module in known:
            by_layer.setdefault(self._layers.layer[module], []).append(module)
        counts = {layer: self._count(members) for layer, members in by_layer.items()}
        if not counts:
            return
        key = self._key(modules)
        counts = blocks.decide(key, counts)
        self._counts[key] = {layer: (one[0], one[1]) for layer, one in counts.items()}
        for module in known:
            del self._squares[module]

    def adopt(self, modules: Sequence[Module], blocks: BlockSource) -> None:
        """Restore the counts of an earlier run."""
        if modules:
            key = self._key(modules)
            self._counts[key] = {
                layer: (one[0], one[1]) for layer, one in blocks.decide(key, {}).items()
            }

    def decide(self) -> Mapping[str, float]:
        """The sparsity of every layer; a layer without tokens gets the target."""
        self.is_decided = True
        sums: dict[str, list[int]] = {}
        for counts in self._counts.values():
            for layer, (outliers, weights) in counts.items():
                total = sums.setdefault(layer, [0, 0])
                total[0] += outliers
                total[1] += weights
        if not sums:
            return {}
        found = owl_sparsities(
            [outliers / weights for outliers, weights in sums.values()],
            [weights for _, weights in sums.values()],
            self._target,
            self._spread,
        )
        decided = dict(zip(sums, found, strict=True))
        shown = ", ".join(f"{layer} {sparsity:.3f}" for layer, sparsity in decided.items())
        logger.info(f"Sparsities by outliers: {shown}.")
        return decided

    def _key(self, modules: Sequence[Module]) -> str:
        return f"outliers.{self._layers.names[modules[0]]}"

    def _count(self, modules: Sequence[Module]) -> tuple[int, int]:
        scores = [
            wanda_score(matrix_of(module), self._squares[module]).flatten() for module in modules
        ]
        weights = sum(one.numel() for one in scores)
        mean = float(sum(float(one.sum()) for one in scores)) / weights
        return sum(outlier_count(one, self._multiple, mean) for one in scores), weights
