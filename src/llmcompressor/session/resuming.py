# SPDX-License-Identifier: Apache-2.0
"""Modifiers in training checkpoints: their records, and the check that a recipe matches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import LifecycleError, RecipeError
from llmcompressor.modeling.sharded import gather_full
from llmcompressor.recipe.recipe import Recipe
from llmcompressor.recipe.writing import modifier_fields

__all__ = ["check_same_recipe", "recipe_record"]

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})
# Shown for a field that one of two recipes has no value for.
_UNSET = "not set"


def _modifier_record(modifier: Modifier) -> dict[str, Any]:
    """The class, fields, phases and own state of a modifier, in plain types.

    Raises:
        LifecycleError: its ``state_dict`` holds what ``torch.load(weights_only=True)`` refuses.
    """
    name = type(modifier).__name__
    return {
        "class": name,
        "fields": _to_plain(modifier_fields(modifier), f"The fields of {name} hold"),
        "phases": list(modifier.passed_phases),
        "state": _to_plain(modifier.state_dict(), f"{name}.state_dict() holds"),
    }


def recipe_record(recipe: Recipe) -> dict[str, Any]:
    """The recipe as text, the values of its arguments, and each modifier's record.

    Raises:
        LifecycleError: as :func:`_modifier_record`.
    """
    return {
        "recipe": recipe.yaml(),
        "recipe_args": _to_plain(recipe.args, "The recipe's arguments hold"),
        "modifiers": [_modifier_record(each) for each in recipe.modifiers],
    }


def check_same_recipe(records: Sequence[Mapping[str, Any]], modifiers: Iterable[Modifier]) -> None:
    """Raise if the modifiers of a run differ from those of a checkpoint.

    Args:
        records: the checkpoint's modifiers, in recipe order, as in :func:`recipe_record`.
        modifiers: those of the run, in recipe order.

    Raises:
        RecipeError: names the modifier, the field and both values.
    """
    present = list(modifiers)
    then = [str(record["class"]) for record in records]
    now = [type(modifier).__name__ for modifier in present]
    if then != now:
        raise _recipe_mismatch_error(
            f"its modifiers were {_listed(then)}, and those of this run are {_listed(now)}"
        )
    for place, (record, modifier) in enumerate(zip(records, present, strict=True), 1):
        before, after = record["fields"], modifier_fields(modifier)
        for field in sorted({*before, *after}):
            old, new = (repr(each[field]) if field in each else _UNSET for each in (before, after))
            if old != new:
                raise _recipe_mismatch_error(
                    f"{record['class']} (modifier {place} of {len(records)}) had {field} {old}, "
                    f"and this run has {new}"
                )


def _recipe_mismatch_error(difference: str) -> RecipeError:
    return RecipeError(
        f"The checkpoint belongs to another recipe: {difference}.",
        "Resume with the recipe and the recipe arguments of the checkpoint, or start a new run "
        "from its weights.",
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


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
