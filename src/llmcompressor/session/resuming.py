# SPDX-License-Identifier: Apache-2.0
"""Modifiers in training checkpoints: their records, and the check that a recipe matches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from llmcompressor.checkpoint.journal import RunIdentity
from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import LifecycleError, RecipeError
from llmcompressor.modeling.sharded import gather_full
from llmcompressor.recipe.recipe import Recipe
from llmcompressor.recipe.writing import modifier_fields

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """The recipe as text, its arguments, and of each modifier class, fields, phases and own state.

    Raises:
        LifecycleError: a modifier's ``state_dict`` holds what ``torch.load(weights_only=True)``
            refuses.
    """
    records = []
    for modifier in recipe.modifiers:
        name = type(modifier).__name__
        record = {
            "class": name,
            "fields": _to_plain(modifier_fields(modifier), f"The fields of {name} hold"),
            "phases": list(modifier.passed_phases),
            "state": _to_plain(modifier.state_dict(), f"{name}.state_dict() holds"),
        }
        records.append(record)
    return {
        "recipe": recipe.yaml(),
        "recipe_args": _to_plain(recipe.args, "The recipe's arguments hold"),
        "modifiers": records,
    }


def check_same_recipe(records: Sequence[Mapping[str, Any]], modifiers: Iterable[Modifier]) -> None:
    """Raise if the modifiers of a run differ from those of a checkpoint.

    Args:
        records: the checkpoint's modifiers, in recipe order, as in :func:`recipe_record`.
        modifiers: those of the run, in recipe order.

    Raises:
        RecipeError: names the modifier, the field and both values.
    """
    now = _identity((type(one).__name__, modifier_fields(one)) for one in modifiers)
    then = _identity((str(one["class"]), one["fields"]) for one in records)
    if found := now.differences(then):
        raise RecipeError(
            f"The checkpoint belongs to another recipe: {found[0]}.",
            "Resume with the recipe and the recipe arguments of the checkpoint, or start a new run "
            "from its weights.",
        )


def _identity(modifiers: Iterable[tuple[str, Mapping[str, Any]]]) -> RunIdentity:
    listed = list(modifiers)
    fields = {
        f"{name} (modifier {place} of {len(listed)})": {
            field: repr(value) for field, value in sorted(own.items())
        }
        for place, (name, own) in enumerate(listed, 1)
    }
    return RunIdentity(modifiers=", ".join(name for name, _ in listed) or "none", **fields)


def _to_plain(value: Any, owner: str, path: str = "") -> Any:
    """Gather the tensors in ``value`` and move them to the CPU; raise for types that are not plain.

    Types are compared exactly: numpy's floats are Python floats too, but are pickled as numpy's.
    """
    if isinstance(value, torch.Tensor):
        return gather_full(value).detach().cpu()  # every process of the run comes here
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {key: _to_plain(each, owner, f"{path}[{key!r}]") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(each, owner, f"{path}[{place}]") for place, each in enumerate(value)]
    raise LifecycleError(
        f"{owner} a {type(value).__name__}{f' at {path}' if path else ''}, which a checkpoint "
        "cannot hold. Use tensors, numbers, texts, and lists and dictionaries of these."
    )
