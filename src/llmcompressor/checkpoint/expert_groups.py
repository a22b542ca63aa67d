# SPDX-License-Identifier: Apache-2.0
"""The config group that transformers applies to stacked experts.

Where a checkpoint stores experts one by one and the model holds a stack, transformers has no module
to match by name. It applies one group to the experts of all layers: the first with a pattern that
contains ``experts``, else the first with a target that is no pattern, else the first one. All other
servers match names.
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
    """Return the index of the group that transformers applies to experts, or ``None``."""
    by_class = [any(not target.startswith("re:") for target in targets) for targets in groups]
    for which in ([_names_experts(targets) for targets in groups], by_class):
        if any(which):
            return which.index(True)
    return 0 if groups else None


def found_for_experts(
    groups: Sequence[Targets], of_experts: Collection[int]
) -> list[tuple[int, list[str]]]:
    """Order and extend groups so that transformers applies the right one to experts.

    The group of the experts gets one more target, which matches nothing. It is moved to the front
    where a group before it has a pattern with that word (for shared experts, say). Each module
    matches the targets of one group only, so the order has no other effect.

    Args:
        groups: the targets of each group, in order.
        of_experts: indices of the groups with experts. With two or more nothing is changed, as
            transformers can apply only one.

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
    """Return a group that matches nothing, to make transformers load experts as not quantized.

    For the group that it applies to experts, transformers looks for packed tensors only, and leaves
    dense experts random with no more than a warning; only for 8-bit floats it accepts dense weights
    too. So this group must come first, also when group names are sorted. Some releases apply the
    same group to any module whose tensors are merged while loading (one convolution of three), and
    fail to load it.

    Args:
        classes: the model classes that load the checkpoint.
        schemes: the groups.
        quantized: the names of quantized modules in all of these classes.
    """
    has_experts = any(merges_experts(one) and expert_stacks(one, quantized) for one in classes)
    if not (has_experts or any(merges_weights(one, quantized) for one in classes)):
        return {}
    if any(is_expert(name) for name in quantized):  # quantized experts need the group
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
    """Return the modules with stacked matrices of their own and no quantized module inside."""
    return [
        name
        for name, module in named_modules(model)
        if not isinstance(module, _ConvNd)
        and any(parameter.ndim == 3 for parameter in own_parameters(module))
        and not any(other.startswith(f"{name}.") for other in quantized)
    ]
