# SPDX-License-Identifier: Apache-2.0
"""Repeated blocks of a model (its decoder layers) and their parts, found from its structure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch.nn import Embedding, Module, ModuleDict, ModuleList

from llmcompressor.errors import TargetError, did_you_mean
from llmcompressor.modeling.matching import match_named_modules
from llmcompressor.modeling.names import named_modules
from llmcompressor.modeling.paused_forward import check_not_nested
from llmcompressor.transformers_internals import whole_classes

__all__ = ["block_of", "find_blocks", "is_plain_container", "sub_blocks"]


def find_blocks(model: Module, targets: Sequence[str] | None = None) -> dict[Module, str]:
    """The repeated blocks of a model (its decoder or encoder layers), in order.

    Args:
        model: any module.
        targets: class names, module names or ``re:`` patterns; by default the classes that
            transformers keeps on one device but for a model's embeddings,
            else the outermost lists of layers.

    Raises:
        TargetError: ``targets`` are given and match nothing, or one lies inside another.
    """
    if targets:
        found = {module: name for name, module in match_named_modules(model, list(targets), [])}
        if not found:
            classes = {type(module).__name__ for module in model.modules()}
            raise TargetError(
                f"The sequential targets {list(targets)} match no module of "
                f"{type(model).__name__}.",
                did_you_mean(targets[0], classes),
            )
        check_not_nested(found)
        return found
    names = whole_classes(model)
    blocks = dict(_outermost_blocks(model, names)) if names else {}
    return blocks or dict(_listed_layers(model))


def _outermost_blocks(model: Module, class_names: Collection[str]) -> Iterator[tuple[Module, str]]:
    inside: tuple[str, ...] = ()
    for name, module in named_modules(model):
        if name.startswith(inside) and inside:
            continue
        if type(module).__name__ not in class_names or not any(True for _ in module.children()):
            continue
        is_listed = any(part.isdecimal() for part in name.split("."))
        # a head may be tied to an embedding of its own
        if is_listed or not any(isinstance(part, Embedding) for part in module.children()):
            inside = (*inside, f"{name}.")
            yield module, name


def _listed_layers(model: Module) -> Iterator[tuple[Module, str]]:
    inside: tuple[str, ...] = ()
    for name, module in named_modules(model):
        if not isinstance(module, ModuleList) or (inside and name.startswith(inside)):
            continue
        for own, entry in module.named_children():
            is_matrix = not any(True for _ in entry.children())  # a part of something
            if not (is_matrix or is_plain_container(entry)):
                inside = (*inside, f"{name}.{own}.")
                yield entry, f"{name}.{own}"


def is_plain_container(module: Module) -> bool:
    """Return True if a module is a ModuleList or ModuleDict without a forward of its own.

    Such a list is never called; its entries are.
    """
    is_list = isinstance(module, ModuleList | ModuleDict)
    return is_list and type(module).forward is Module.forward


def sub_blocks(block: Module, name: str, wanted: Collection[Module]) -> dict[Module, str]:
    """The direct parts of ``block`` that hold ``wanted`` modules (attention, MLP, …).

    Lists and dicts of modules are not parts, because they are never called: their entries are.
    """
    parts: dict[Module, str] = {}
    for child_name, child in block.named_children():
        if is_plain_container(child):
            parts |= sub_blocks(child, f"{name}.{child_name}", wanted)
        elif any(module in wanted for module in child.modules()):
            parts[child] = f"{name}.{child_name}"
    return parts


def block_of(blocks: dict[Module, str], name: str) -> str | None:
    """The name of the block that the module ``name`` lies in, or ``None``."""
    return next((b for b in blocks.values() if name == b or name.startswith(f"{b}.")), None)
