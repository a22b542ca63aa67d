# SPDX-License-Identifier: Apache-2.0
"""The group of a written configuration that transformers takes for experts.

Where a checkpoint holds experts one by one and the model holds their stack, transformers has no
module whose name it could match. It takes one group for the experts of all layers: the first with a
pattern that has the word ``experts`` in it, else the first with a target that is no pattern, else
the first one. Every other server matches names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel

from llmcompressor.checkpoint.layout import merges_experts, merges_weights
from llmcompressor.modeling.fused import is_expert
from llmcompressor.names import named_modules, own_parameters

__all__ = ["dense_experts", "expert_stacks", "found_for_experts"]

_NOTHING = "re:(?!)experts"
"""A target that matches no module, and that transformers takes to name experts."""


Targets: TypeAlias = Sequence[str]


def _names_experts(targets: Targets) -> bool:
    return any(target.startswith("re:") and "experts" in target for target in targets)


def _taken(groups: Sequence[Targets]) -> int | None:
    """Which of the groups transformers takes for experts; ``None`` if there are none."""
    by_class = [any(not target.startswith("re:") for target in targets) for targets in groups]
    for which in ([_names_experts(targets) for targets in groups], by_class):
        if any(which):
            return which.index(True)
    return 0 if groups else None


def found_for_experts(
    groups: Sequence[Targets], of_experts: Collection[int]
) -> list[tuple[int, list[str]]]:
    """The order and the targets of groups with which transformers takes the right one for experts.

    The group of the experts gets a target more, which matches nothing. It comes first where one
    before it has a pattern with that word (of shared experts, say): each module matches the targets
    of one group alone, so their order has no other meaning.

    Args:
        groups: the targets of each, in order.
        of_experts: indices of those with experts among their modules. Of two or more,
            transformers cannot take both, and nothing is changed.

    Returns:
        Index and targets of each group, in order.

    >>> found_for_experts([["re:.*attn.*"], ["re:.*mlp.*"]], {1})
    [(0, ['re:.*attn.*']), (1, ['re:.*mlp.*', 're:(?!)experts'])]
    """
    found = [(index, list(targets)) for index, targets in enumerate(groups)]
    if len(of_experts) != 1 or _taken(groups) in of_experts:
        return found
    (index,) = of_experts
    own = found[index][1]
    if not _names_experts(own):
        own.append(_NOTHING)
    if any(map(_names_experts, groups[:index])):
        found.insert(0, found.pop(index))
    return found


def dense_experts(
    classes: Sequence[PreTrainedModel],
    schemes: Sequence[QuantizationScheme],
    quantized: Collection[str],
) -> dict[str, QuantizationScheme]:
    """A group that matches nothing, so that transformers finds experts which are not quantized.

    Of the group that it takes for experts it looks for packed tensors only, and leaves dense
    experts random with no more than a warning; for 8-bit floats alone it takes dense weights too.
    So such a group comes first, also where the names of groups are sorted. Some releases take the
    same group for whatever they make of other tensors than the checkpoint holds (one convolution of
    three), and fail to load that.

    Args:
        classes: those that read the checkpoint.
        schemes: the groups.
        quantized: the names of quantized modules, by all of these classes.
    """
    has_experts = any(merges_experts(one) and expert_stacks(one, quantized) for one in classes)
    if not (has_experts or any(merges_weights(one, quantized) for one in classes)):
        return {}
    if any(is_expert(name) for name in quantized):  # those have to be found, the others cannot be
        return {}
    taken = _taken([scheme.targets for scheme in schemes])
    weights = schemes[taken].weights if taken is not None else None
    if weights is not None and weights.type == "float" and weights.num_bits == 8:
        return {}
    return {
        "experts_not_quantized" if has_experts else "dense_weights": QuantizationScheme(
            targets=[_NOTHING],
            weights=QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
            input_activations=QuantizationArgs(
                num_bits=8, type="float", strategy="tensor", dynamic=True
            ),
            format=CompressionFormat.float_quantized.value,
        )
    }


def expert_stacks(model: PreTrainedModel, quantized: Collection[str]) -> list[str]:
    """Modules with stacks of matrices of their own, and no quantized module within."""
    return [
        name
        for name, module in named_modules(model)
        if not isinstance(module, _ConvNd)
        and any(parameter.ndim == 3 for parameter in own_parameters(module))
        and not any(other.startswith(f"{name}.") for other in quantized)
    ]
