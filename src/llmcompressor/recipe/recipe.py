# SPDX-License-Identifier: Apache-2.0
"""The recipe: the modifiers to apply to a model, in stages, parsed and validated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import OutputError, RecipeError
from llmcompressor.logger import logger
from llmcompressor.recipe.arguments import RecipeArgs, parse_overrides, reject_unknown_overrides
from llmcompressor.recipe.document import looks_like_path, parse_text, read_file
from llmcompressor.recipe.grammar import declared_names, parse_document
from llmcompressor.recipe.stages import (
    DEFAULT_STAGE,
    Stage,
    StageModifiers,
    check_order,
    check_required_later,
    concatenate_stages,
    rename_duplicates,
    select_stage,
    stage_name,
)
from llmcompressor.recipe.writing import modifier_fields, to_mapping, to_yaml
from llmcompressor.runtime.limits import copy_values

RecipeInput: TypeAlias = (
    "Recipe | Modifier | Mapping[str, Any] | str | os.PathLike[str] | Iterable[RecipeInput] | None"
)
"""All that a recipe can be made of."""


class Recipe:
    """Stages of modifiers, in order; immutable, and compared by content.

    Two recipes are equal when their stages have the same names and run types and their modifiers
    the same classes and field values; ``group``, which only names the key of a modifier, does not
    count.

    Args:
        stages: each with a name of its own.
        args: the values of the arguments it was built with.

    Raises:
        RecipeError: a modifier comes after one that it must precede.
    """

    __hash__ = None  # type: ignore[assignment]  # compared by content, which may be large

    def __init__(
        self, stages: Iterable[Stage] = (), *, args: Mapping[str, object] | None = None
    ) -> None:
        self._stages = tuple(stages)
        self._args = dict(args or {})
        check_order(self._stages)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order."""
        return self._stages

    @property
    def modifiers(self) -> list[Modifier]:
        """The modifiers of all stages, in order."""
        return [modifier for stage in self._stages for modifier in stage.modifiers]

    @property
    def gates(self) -> dict[str, float]:
        """The gates of all stages; of one name those of the last stage that has it."""
        return {name: limit for stage in self._stages for name, limit in stage.gates.items()}

    def without_gates(self) -> Recipe:
        """The recipe without gates, which decide nothing of what is computed."""
        stages = [replace(stage, gates={}) for stage in self._stages]
        return Recipe(stages, args=self._args) if self.gates else self

    @property
    def args(self) -> dict[str, object]:
        """The recipe's arguments, with the values that it was built with."""
        return dict(self._args)

    def stage(self, name: str) -> Stage:
        """The stage with that name, with or without ``_stage``.

        Raises:
            RecipeError: there is none; lists those there are.
        """
        return select_stage(self._stages, name)

    @classmethod
    def create_instance(
        cls,
        path_or_modifiers: RecipeInput = None,
        modifier_group_name: str | None = None,
        target_stage: str | None = None,
        recipe_args: RecipeArgs = None,
    ) -> Recipe:
        """Build a recipe from any of its forms.

        Args:
            path_or_modifiers: a recipe, modifiers, a mapping, a path, a text in YAML, JSON or
                front matter, or a list of any of these, nested or not. Nothing (``None``,
                ``{}``, ``[]``) is an empty recipe; a blank text is an error.
            modifier_group_name: the stage of modifiers that are given as objects.
            target_stage: keep only this stage.
            recipe_args: values for the recipe's ``args``: a mapping or ``"name=value"`` texts.

        Raises:
            RecipeError: names what is wrong and where, before any work is done.
        """
        overrides = parse_overrides(recipe_args)
        pieces = list(_read_inputs(path_or_modifiers))
        known: set[str] = set()
        for piece in pieces:
            if isinstance(piece, Recipe):
                known |= set(piece.args)
            elif isinstance(piece, _ParsedText):
                known |= declared_names(piece.document)
        reject_unknown_overrides(overrides, known)
        parts = [_build_recipe(piece, modifier_group_name, overrides) for piece in pieces]
        if len(parts) == 1 and target_stage is None:
            check_required_later(parts[0].stages)
            return parts[0]
        stages = concatenate_stages(part.stages for part in parts)
        args = {name: value for part in parts for name, value in part.args.items()}
        if target_stage is not None:
            check_order(stages)
            stages = (select_stage(stages, target_stage),)
        recipe = cls(stages, args=args)
        check_required_later(stages)
        return recipe

    @classmethod
    def from_modifiers(
        cls,
        modifiers: Modifier | Iterable[Any],
        modifier_group_name: str | None = None,
    ) -> Recipe:
        """Build a recipe of one stage.

        Args:
            modifiers: one or several modifiers; lists in lists are flattened.
            modifier_group_name: the stage's name; ``oneshot`` or ``train`` in it is the run
                type. Default: ``default``.

        Raises:
            RecipeError: one of them is no modifier.
        """
        flat = list(_flatten(modifiers))
        for modifier in flat:
            if not isinstance(modifier, Modifier):
                raise RecipeError(
                    f"{modifier!r:.80} is no modifier.",
                    "Recipe.from_modifiers takes modifiers; Recipe.create_instance takes paths, "
                    "texts and mappings too.",
                )
        name = stage_name(modifier_group_name or DEFAULT_STAGE)
        return cls([Stage(name, tuple(flat))] if flat else [])

    @classmethod
    def from_dict(cls, recipe: Mapping[str, Any], recipe_args: RecipeArgs = None) -> Recipe:
        """Build a recipe from a mapping, like that of its YAML."""
        return cls.create_instance(recipe, recipe_args=recipe_args)

    @classmethod
    def model_validate(cls, obj: RecipeInput) -> Recipe:
        """Call :meth:`create_instance`, under the name of pydantic's models."""
        return cls.create_instance(obj)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a mapping of plain types, which :meth:`from_dict` turns into an equal one.

        >>> Recipe.create_instance("modifiers: {HQQModifier: {scheme: W4A16}}").to_dict().keys()
        dict_keys(['default_stage'])
        """
        return to_mapping(self._stages)

    def yaml(
        self,
        file_path: str | os.PathLike[str] | None = None,
        existing_recipe_path: str | os.PathLike[str] | None = None,
    ) -> str:
        """The recipe as YAML that loads back to an equal recipe.

        Args:
            file_path: also write it there.
            existing_recipe_path: a recipe that was applied before; its stages come first.

        Raises:
            OutputError: the file cannot be written.
        """
        stages = self._stages
        if existing_recipe_path is not None:
            stages = rename_duplicates([*applied_stages(existing_recipe_path), *stages])
        text = to_yaml(stages)
        if file_path is not None:
            try:
                Path(file_path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise OutputError(f"The recipe cannot be written: {error}.") from error
        return text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        mine, theirs = _comparable_content(self), _comparable_content(other)
        return mine == theirs or repr(mine) == repr(theirs)  # NaN differs from itself

    def __bool__(self) -> bool:
        """Return True if the recipe has any modifier."""
        return any(stage.modifiers for stage in self._stages)

    def __repr__(self) -> str:
        stages = ", ".join(
            f"{stage.name}: [{', '.join(type(item).__name__ for item in stage.modifiers)}]"
            for stage in self._stages
        )
        return f"Recipe({stages})"


class _ParsedText(NamedTuple):
    """A parsed document, and its name in error messages."""

    document: Any
    source: str


def _read_inputs(given: Any) -> Iterator[Recipe | Modifier | _ParsedText]:
    """The parts of the user's input, in order, with files and texts parsed."""
    if given is None:
        return
    if isinstance(given, (Recipe, Modifier)):
        yield given
    elif isinstance(given, Mapping):
        yield _ParsedText(copy_values(given), "The recipe")
    elif isinstance(given, os.PathLike):
        yield _ParsedText(read_file(given), f"The recipe {os.fspath(given)}")
    elif isinstance(given, str):
        if looks_like_path(given) or ("\n" not in given and os.path.isfile(given)):
            yield _ParsedText(read_file(given.strip()), f"The recipe {given.strip()}")
        else:
            yield _ParsedText(parse_text(given), "The recipe")
    elif isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray)):
        for item in given:
            yield from _read_inputs(item)
    else:
        remedy = "Give a path, a text in YAML or JSON, a mapping, modifiers, or a list of these."
        if isinstance(given, type) and issubclass(given, Modifier):
            remedy = f"It is a class: give an object of it, {given.__name__}(...)."
        raise RecipeError(f"A recipe cannot be made of {given!r:.80}.", remedy)


def _build_recipe(
    piece: Recipe | Modifier | _ParsedText, group: str | None, overrides: Mapping[str, object]
) -> Recipe:
    if isinstance(piece, Modifier):
        return Recipe.from_modifiers(piece, group)
    if isinstance(piece, _ParsedText):
        document = parse_document(piece.document, overrides, piece.source)
        return Recipe(document.stages, args=document.args)
    for name, value in overrides.items():
        if name in piece.args and piece.args[name] != value:
            raise RecipeError(
                f"recipe_args sets {name!r} of a recipe that is built already.",
                "Give them together with its text or path: "
                "Recipe.create_instance(text, recipe_args=...).",
            )
    return piece


def _flatten(modifiers: Any) -> Iterator[Any]:
    if isinstance(modifiers, (list, tuple)):
        for item in modifiers:
            yield from _flatten(item)
    else:
        yield modifiers


def applied_stages(path: str | os.PathLike[str]) -> tuple[Stage, ...]:
    """The stages of a recipe that was applied before; none, with a warning, if unreadable."""
    try:
        document = read_file(path)
        _check_imported(document)
        return Recipe.create_instance(Path(path)).stages
    except RecipeError as error:
        logger.warning(f"What was applied before is not part of recipe.yaml. {error}")
        return ()


def _check_imported(document: Any) -> None:
    """Raise for modifiers of modules that are not imported: a checkpoint must not import them."""
    if isinstance(document, list):
        for item in document:
            _check_imported(item)
    if not isinstance(document, Mapping):
        return
    for key, value in document.items():
        if str(key).endswith("modifiers"):
            for each in value if isinstance(value, list) else [value]:
                for name in each if isinstance(each, Mapping) else ():
                    module = str(name).rpartition(".")[0]
                    if module and module not in sys.modules:
                        raise RecipeError(
                            f"{name} in it is of the module {module!r}, which is not "
                            "imported because a checkpoint names it.",
                            "Import it before, if you trust it.",
                        )
        else:
            _check_imported(value)


def _comparable_content(recipe: Recipe) -> list[Any]:
    return [
        (
            stage.name,
            stage.run_type,
            [(type(m), modifier_fields(m)) for m in stage.modifiers],
            dict(stage.gates),
        )
        for stage in recipe.stages
    ]


# --------------------
# Renewed recipes: copies of used modifiers, as each modifier runs only once.


def renew_recipe(recipe: Recipe) -> Recipe:
    """The recipe with a new modifier in place of each that has been initialized.

    A modifier can be run only once. With this, one recipe serves several models, or a further
    attempt after an error.
    """
    if not any(modifier.initialized for modifier in recipe.modifiers):
        return recipe

    def renewed(modifier: Modifier) -> Modifier:
        fields = {name: getattr(modifier, name) for name in modifier.model_fields_set}
        return type(modifier)(**fields) if modifier.initialized else modifier

    stages = [
        replace(stage, modifiers=tuple(map(renewed, stage.modifiers))) for stage in recipe.stages
    ]
    return Recipe(stages, args=recipe.args)


# --------------------
# Recipes as scripts for llm-compressor 0.5 know them.


@dataclass
class RecipeContainer:
    """The recipes of a session, and what of them is applied.

    Attributes:
        compiled_recipe: all recipes as one; ``None`` before they are joined.
        recipes: the recipes, in order.
        applied_stages: names of stages that are done.
    """

    compiled_recipe: Recipe | None = None
    recipes: list[Recipe] = field(default_factory=list)
    applied_stages: list[str] = field(default_factory=list)

    def update(
        self,
        recipe: RecipeInput = None,
        recipe_stage: str | None = None,
        recipe_args: RecipeArgs = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Put a recipe in place of all; with ``None`` they stay.

        Returns:
            The other arguments.

        Raises:
            RecipeError: the recipe cannot be used.
        """
        if recipe is not None:
            self.recipes, self.applied_stages = [], []
        return self.append(recipe, recipe_stage, recipe_args, **kwargs)

    def append(
        self,
        recipe: RecipeInput = None,
        recipe_stage: str | None = None,
        recipe_args: RecipeArgs = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Add a recipe behind the others; as :meth:`update` else."""
        if recipe is not None:
            self.recipes.append(
                Recipe.create_instance(recipe, target_stage=recipe_stage, recipe_args=recipe_args)
            )
            self.compiled_recipe = None
        return kwargs

    def check_compile_recipe(self) -> bool:
        """Join the recipes if they are not joined yet; True if that was done."""
        if self.compiled_recipe is not None or not self.recipes:
            return False
        self.compiled_recipe = Recipe.create_instance(self.recipes)
        return True

    def check_any_recipe_exists(self) -> bool:
        """Return True if there is a recipe."""
        return self.compiled_recipe is not None or bool(self.recipes)

    def get_modifiers(self) -> list[StageModifiers]:
        """The modifiers of each stage that is not applied yet, in order."""
        self.check_compile_recipe()
        stages = () if self.compiled_recipe is None else self.compiled_recipe.stages
        return [
            StageModifiers(list(stage.modifiers), index, stage.name)
            for index, stage in enumerate(stages)
            if stage.name not in self.applied_stages
        ]

    def update_applied_stages(self, new_stages: Iterable[str]) -> None:
        """Note stages as applied."""
        self.applied_stages += [one for one in new_stages if one not in self.applied_stages]
