# SPDX-License-Identifier: Apache-2.0
"""Factory that creates modifiers from the names in a recipe."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from llmcompressor.core.modifier import Modifier
from llmcompressor.errors import RecipeError, did_you_mean
from llmcompressor.logger import logger
from llmcompressor.runtime.registry import LazyRegistry

_BUILTIN = LazyRegistry(
    "modifier",
    {
        "AWQModifier": "llmcompressor.modifiers.transform.awq:AWQModifier",
        "AutoRoundModifier": "llmcompressor.modifiers.autoround:AutoRoundModifier",
        "ConstantPruningModifier": "llmcompressor.modifiers.pruning:ConstantPruningModifier",
        "GPTQModifier": "llmcompressor.modifiers.gptq:GPTQModifier",
        "GradualPruningModifier": "llmcompressor.modifiers.pruning:MagnitudePruningModifier",
        "HQQModifier": "llmcompressor.modifiers.hqq:HQQModifier",
        "IMatrixGatherer": "llmcompressor.modifiers.transform.imatrix:IMatrixGatherer",
        "LogarithmicEqualizationModifier": (
            "llmcompressor.modifiers.smoothquant:LogarithmicEqualizationModifier"
        ),
        "MagnitudePruningModifier": "llmcompressor.modifiers.pruning:MagnitudePruningModifier",
        "OutputDistillationModifier": (
            "llmcompressor.modifiers.distillation.output:OutputDistillationModifier"
        ),
        "QuIPModifier": "llmcompressor.modifiers.rotation:QuIPModifier",
        "QuantizationModifier": "llmcompressor.modifiers.quantization:QuantizationModifier",
        "REAPPruningModifier": "llmcompressor.modifiers.reap:REAPPruningModifier",
        "ScaleTuningModifier": "llmcompressor.modifiers.scale_tuning:ScaleTuningModifier",
        "SmoothQuantModifier": "llmcompressor.modifiers.smoothquant:SmoothQuantModifier",
        "SpinQuantModifier": "llmcompressor.modifiers.rotation:SpinQuantModifier",
        "SparseGPTModifier": "llmcompressor.modifiers.sparsity:SparseGPTModifier",
        "WandaPruningModifier": "llmcompressor.modifiers.sparsity:WandaPruningModifier",
    },
)

_PACKAGE = __name__.split(".")[0]
_registered: dict[str, type[Modifier]] = {}


def builtin_modifiers() -> dict[str, type[Modifier]]:
    """Return the package's own modifiers by the names that recipes may call them."""
    return {name: _BUILTIN.load(name) for name in _BUILTIN}


class ModifierFactory:
    """Find modifier classes by name and instantiate them.

    A name is looked up among the registered classes, then among the built-in ones, then among all
    imported subclasses of ``Modifier``; a dotted path is imported.
    """

    @classmethod
    def create(
        cls,
        type_: str,
        allow_registered: bool = True,
        allow_experimental: bool = True,
        *,
        group: str | None = None,
        **fields: Any,
    ) -> Modifier:
        """Create a modifier.

        Args:
            type_: name of its class, or a dotted path to it.
            allow_registered: also look among registered classes.
            allow_experimental: without effect; no modifier is experimental.
            group: the recipe group that it belongs to.
            **fields: its arguments.

        Returns:
            The modifier, with its fields checked.

        Raises:
            RecipeError: there is no such class, or it does not accept these fields.
        """
        del allow_experimental
        found = cls._find_instantiable(type_, allow_registered)
        return found(**cls._with_group(fields, group))

    @staticmethod
    def refresh() -> None:
        """Do nothing: names are resolved on each lookup."""

    @classmethod
    def create_all(cls, name: str, *, group: str | None = None, **fields: Any) -> list[Modifier]:
        """Create the modifiers that the recipe entry ``name`` expands to; see :meth:`create`."""
        return cls._find_instantiable(name).from_fields(**cls._with_group(fields, group))

    @staticmethod
    def _with_group(fields: dict[str, Any], group: str | None) -> dict[str, Any]:
        return fields if group is None else {**fields, "group": group}

    @classmethod
    def _find_instantiable(cls, name: str, allow_registered: bool = True) -> type[Modifier]:
        found = cls.find(name, allow_registered)
        if inspect.isabstract(found):
            lacking = ", ".join(sorted(found.__abstractmethods__))
            raise RecipeError(
                f"The modifier {name!r} cannot be used: {found.__qualname__} lacks {lacking}.",
                "Implement it; on_initialize(state, **kwargs) is to return True.",
            )
        return found

    @classmethod
    def find(cls, name: str, allow_registered: bool = True) -> type[Modifier]:
        """The modifier class called ``name``.

        Args:
            name: name of a class, or a dotted path to it.
            allow_registered: also look among registered classes.

        Raises:
            RecipeError: there is none; the message suggests close matches.
        """
        if allow_registered and name in _registered:
            return _registered[name]
        if name in _BUILTIN:
            found: type[Modifier] = _BUILTIN.load(name)
            others = {each.__module__ for each in _third_party_classes() if each.__name__ == name}
            if others:
                logger.warning(
                    f"{name} means the class of llmcompressor, not the one of "
                    f"{', '.join(sorted(others))}: give that another name, or call "
                    f"ModifierFactory.register({name}) first."
                )
            return found
        imported = _find_imported(name)
        if imported is None and "." in name and all(map(str.isidentifier, name.split("."))):
            imported = _import_by_path(name)
        if imported is None:
            # the package's classes that are not built-in modifiers are bases: do not suggest them
            names = {*_registered, *_BUILTIN, *(each.__name__ for each in _third_party_classes())}
            raise RecipeError(
                f"There is no modifier named {name!r}.",
                f"{did_you_mean(name, names)} A modifier of your own is found once the module "
                "that defines it is imported, or by its dotted path.",
            )
        return imported

    @staticmethod
    def is_builtin(modifier_class: type[Modifier]) -> bool:
        """Return True if this class is the one that its name resolves to in any process."""
        name = modifier_class.__name__
        return name in _BUILTIN and _BUILTIN.load(name) is modifier_class

    @staticmethod
    def register(
        name: str | type[Modifier], modifier_class: type[Modifier] | None = None
    ) -> type[Modifier]:
        """Register a class under a name, with precedence over every other class of that name.

        Args:
            name: the name; or the class, to be registered under its own name.
            modifier_class: the class, when a name is given.

        Returns:
            The class, so that this can be used as a decorator.

        Raises:
            RecipeError: what was given is not a subclass of ``Modifier``.
        """
        found = name if modifier_class is None else modifier_class
        if not (inspect.isclass(found) and issubclass(found, Modifier)):
            raise RecipeError(
                f"{found!r} cannot be registered as a modifier: it is not a subclass of Modifier.",
                "Give a class that derives from llmcompressor.modifiers.Modifier.",
            )
        _registered[name if isinstance(name, str) else found.__name__] = found
        return found


def _subclasses(base: type[Any] = Modifier) -> Iterator[type[Modifier]]:
    """Every imported modifier class; subclasses of one class in order of definition."""
    for child in base.__subclasses__():
        yield child
        yield from _subclasses(child)


def _third_party_classes() -> Iterator[type[Modifier]]:
    """Imported modifier classes that are not defined in this package."""
    return (each for each in _subclasses() if each.__module__.split(".")[0] != _PACKAGE)


def _find_imported(name: str) -> type[Modifier] | None:
    found = list(dict.fromkeys(each for each in _subclasses() if each.__name__ == name))
    modules = sorted({each.__module__ for each in found})
    if len(modules) > 1:
        logger.warning(
            f"Several modifiers are named {name}, in {', '.join(modules)}: the one of "
            f"{found[-1].__module__} is taken. Give a dotted path to take another."
        )
    # A redefined class, as in a notebook, replaces the earlier one.
    return found[-1] if found else None


def _import_by_path(path: str) -> type[Modifier]:
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if this module itself is missing, not one that it imports.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise RecipeError(
            f"There is no modifier {path!r}: the module {error.name!r} cannot be found.",
            "Check the path, and that its package is installed or in the working directory.",
        ) from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, Modifier)):
        names = [each.__name__ for each in _subclasses() if each.__module__ == module_name]
        raise RecipeError(
            f"{path!r} is not a modifier: the module {module_name!r} "
            + ("has no such name." if found is None else "has something else of that name."),
            did_you_mean(class_name, names),
        )
    return found
