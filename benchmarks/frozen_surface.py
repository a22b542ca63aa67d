# SPDX-License-Identifier: Apache-2.0
"""What users import, call and read: names by path, signatures, fields, members, help texts.

As a script, in a process of its own: ``frozen_surface.py PATHS.json RESULT.json``, where the first
file holds modules and the names that are looked for in each, as :func:`documented` gathers them.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from frozen_cases import words

PACKAGE = "llmcompressor"
TREES = (f"{PACKAGE}.transformers", f"{PACKAGE}.pytorch")
COMMANDS = ("", "oneshot", "train", "run", "evaluate", "model-free-ptq", "plan", "verify", "demo")
IMPORT = "(import)"
"""In the place of a name: what an import of the module says, if it fails."""
MODIFIERS = words(
    "AWQModifier AutoRoundModifier ConstantPruningModifier GPTQModifier GradualPruningModifier "
    "HQQModifier IMatrixGatherer LogarithmicEqualizationModifier MagnitudePruningModifier "
    "OutputDistillationModifier QuIPModifier QuantizationModifier REAPPruningModifier "
    "SmoothQuantModifier SparseGPTModifier SpinQuantModifier WandaPruningModifier"
)
_FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_DOTTED = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BOUNDS = set(words("Gt Ge Lt Le MultipleOf MinLen MaxLen Strict"))
_LEAKS = {"annotations", "lazy_page", "TYPE_CHECKING"}
"""Names that a module has for itself, where it has no list of its names."""


# ------------------------------------------------------------------ which names


def documented(root: Path) -> dict[str, list[str]]:
    """Module → names that tests and pages of a checkout promise; by import, all that it lists.

    Args:
        root: of the checkout whose tests and pages are read.
    """
    found: dict[str, set[str]] = {}
    tests = root / "tests"
    exports = _literals(tests / "test_exports.py")
    for module, names in exports.get("PUBLIC", {}).items():
        found.setdefault(module, set()).update(names)
    for path in exports.get("ALIASES", {}):
        module, _, name = path.partition(":")
        found.setdefault(module, set()).add(name)
    for name in _literals(tests / "test_architecture.py").get("ALIASES", ()):
        found.setdefault(f"{PACKAGE}.{name}".rstrip("."), set())
    for tree in TREES:
        package = importlib.import_module(tree)
        found.setdefault(tree, set())
        for one in pkgutil.walk_packages(package.__path__, f"{tree}."):
            found.setdefault(one.name, set())
    for module, names in found.items():
        names.update(_listed(importlib.import_module(module)))
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for module, name in _imported(page.read_text(encoding="utf-8")):
            found.setdefault(module, set()).update([name] if name else [])
    return {module: sorted(found[module]) for module in sorted(found)}


def _literals(path: Path) -> dict[str, Any]:
    """Tables that a file of tests writes out."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def _imported(page: str) -> list[tuple[str, str | None]]:
    """What the code of a page imports from the package."""
    found: list[tuple[str, str | None]] = []
    for block in _FENCE.findall(page):
        try:
            nodes = list(ast.walk(ast.parse(block)))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                found += [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(a.name, None) for a in node.names if a.name.startswith(PACKAGE)]
    return found


def _listed(module: types.ModuleType) -> list[str]:
    """The names that a module says it has; those it happens to have where it says nothing."""
    own = getattr(module, "__all__", None)
    if own is not None:
        return list(own)
    names = [name for name in dir(module) if not name.startswith("_") and name not in _LEAKS]
    return [name for name in names if not _is_borrowed(getattr(module, name, None))]


def _is_borrowed(value: Any) -> bool:
    """Whether it is a module, or of Python's own library."""
    home = (getattr(value, "__module__", None) or "").partition(".")[0]
    return isinstance(value, types.ModuleType) or home in sys.stdlib_module_names


# ------------------------------------------------------------------ what they are


def surface(paths: dict[str, list[str]], described: list[str] | None = None) -> dict[str, Any]:
    """Names, signatures and the rest, of the package that this process imports.

    Args:
        paths: module → names to look for.
        described: ``module:name`` of what is described; each thing once if ``None``.
    """
    names: dict[str, Any] = {}
    for module, wanted in paths.items():
        names[module] = {name: _kind(*_load(module, name)) for name in wanted}
        try:
            importlib.import_module(module)
        except Exception as error:
            names[module][IMPORT] = f"{type(error).__name__}: {error}"
    values = {
        path: _load(*path.split(":"))[0]
        for path in (_distinct(paths) if described is None else described)
    }
    return {
        "names": names,
        "described": {path: _described(value) for path, value in values.items()},
        "observers": _observers(),
        "modifiers": _modifiers(),
        "scripts": sorted(_scripts()),
        "help": _help(),
    }


def _distinct(paths: dict[str, list[str]]) -> list[str]:
    """The first path of each function and class of the package."""
    found: dict[str, Any] = {}
    for module, names in paths.items():
        for name in names:
            value = _load(module, name)[0]
            if (
                callable(value)
                and _is_own(value)
                and not any(value is one for one in found.values())
            ):
                found[f"{module}:{name}"] = value
    return list(found)


def _load(module: str, name: str) -> tuple[Any, str | None]:
    try:
        return getattr(importlib.import_module(module), name), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _kind(value: Any, error: str | None) -> str:
    """What a name resolves to, wherever that is defined."""
    if error is not None:
        return error
    if isinstance(value, types.ModuleType):
        return "module"
    own = getattr(value, "__name__", None)
    if own is not None:
        return f"{'class' if inspect.isclass(value) else 'callable'} {own}"
    if isinstance(value, Mapping):
        return f"mapping of {', '.join(map(str, value))}"
    if isinstance(value, str | int | float | tuple | list):
        return _shown(value)
    return type(value).__name__


def _is_own(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == PACKAGE


def _described(value: Any) -> dict[str, Any]:
    """Parameters of a function; fields and members of a class."""
    if value is None:
        return {}
    if not inspect.isclass(value):
        return {"parameters": _parameters(value)}
    if issubclass(value, enum.Enum):
        return {"values": {one.name: repr(one.value) for one in value.__members__.values()}}
    found: dict[str, Any] = {}
    if hasattr(value, "model_fields"):
        found["fields"] = {name: _field(one) for name, one in value.model_fields.items()}
    elif dataclasses.is_dataclass(value):
        found["fields"] = {one.name: _data_field(one) for one in dataclasses.fields(value)}
    else:
        found["parameters"] = _parameters(value)
    members = _members(value)
    found["members"] = {key: members[key] for key in members if key not in found.get("fields", {})}
    return found


def _parameters(value: Any) -> Any:
    """Name → kind and default. Annotations are left out: they are to become better."""
    try:
        given = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "none that can be read"
    return {
        one.name: f"{one.kind.description}{_default(one.default, inspect.Parameter.empty)}"
        for one in given
    }


def _default(value: Any, nothing: Any) -> str:
    return "" if value is nothing else f" = {_shown(value)}"


def _shown(value: Any) -> str:
    """Without where something is defined, and addresses."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return value.__name__
    return _ADDRESS.sub("", _DOTTED.sub("", repr(value)))


def _field(field: Any) -> str:
    """Type, bounds and default of a field of a modifier."""
    default = "required" if field.is_required() else _shown(field.default)
    if field.default_factory is not None:
        default = _shown(field.default_factory())
    bounds = " ".join(repr(one) for one in field.metadata if type(one).__name__ in _BOUNDS)
    alias = f"alias {field.alias}" if field.alias else ""
    return f"{' '.join(filter(None, (_type(field.annotation), bounds, alias)))} = {default}"


def _data_field(field: Any) -> str:
    default = "required"
    if field.default is not dataclasses.MISSING:
        default = _shown(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        first, second = (_shown(field.default_factory()) for _ in range(2))
        default = first if first == second and not _is_of_machine(field.name) else "made"
    told = "" if field.init else " (no argument)"
    return f"{_type(field.type)} = {default}{told}"


def _is_of_machine(name: str) -> bool:
    return "dir" in name or "device" in name


def _type(annotation: Any) -> str:
    if inspect.isclass(annotation) and not getattr(annotation, "__args__", None):
        return annotation.__name__
    return _ADDRESS.sub("", _DOTTED.sub("", str(annotation)))


def _members(cls: type) -> dict[str, str]:
    """Public members that the package defines; of modifiers those that the base class lacks."""
    from llmcompressor.modifiers import Modifier  # noqa: PLC0415

    known = dir(Modifier) if issubclass(cls, Modifier) and cls is not Modifier else []
    found = {}
    for owner in reversed([one for one in cls.__mro__ if _is_own(one)]):
        for name, value in vars(owner).items():
            if not name.startswith("_") and name not in known:
                found[name] = _member(value)
    return dict(sorted(found.items()))


def _member(value: Any) -> str:
    if isinstance(value, property):
        return "property"
    inner = getattr(value, "__func__", value)
    if inspect.isfunction(inner):
        return f"({', '.join(f'{k}: {v}' for k, v in _parameters(inner).items())})"
    return type(value).__name__


# ------------------------------------------------------------------ what is registered


def _observers() -> dict[str, Any]:
    """Name → its class and options."""
    from compressed_tensors.quantization import QuantizationArgs  # noqa: PLC0415

    from llmcompressor.observers import Observer  # noqa: PLC0415

    found = {}
    for name in Observer.registered_names():
        try:
            made = Observer.load_from_registry(name, args=QuantizationArgs(num_bits=4))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            fields = type(made).Options.model_fields
            options = {key: _field(one) for key, one in fields.items()}
            found[name] = {"class": type(made).__name__, "options": options}
    return found


def _modifiers() -> dict[str, str]:
    """Names that recipes may hold → the class that they stand for."""
    from llmcompressor.modifiers import ModifierFactory  # noqa: PLC0415

    found = {}
    for name in MODIFIERS:
        try:
            found[name] = ModifierFactory.find(name).__name__
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# ------------------------------------------------------------------ the command


def _scripts() -> dict[str, str]:
    """Names of commands → what they run, by the project's file or as installed."""
    import llmcompressor  # noqa: PLC0415

    project = Path(llmcompressor.__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        content = tomllib.loads(project.read_text(encoding="utf-8"))
        return content["project"]["scripts"]
    points = importlib.metadata.entry_points(group="console_scripts")
    return {one.name: one.value for one in points if one.value.startswith(PACKAGE)}


def _help() -> dict[str, str]:
    """What ``--help`` of each command and script prints."""
    asked = {}
    for name in COMMANDS:
        arguments = [*name.split(), "--help"]
        code = f"from {PACKAGE}.cli import main; main({arguments})"
        asked[f"{PACKAGE} {name}".strip()] = code
    for name, target in _scripts().items():
        module, _, function = target.partition(":")
        code = f"import sys; sys.argv = [{name!r}, '--help']"
        asked.setdefault(name, f"{code}; from {module} import {function} as run; run()")
    with ThreadPoolExecutor(int(os.environ.get("FREEZE_JOBS", "2"))) as pool:
        return dict(zip(asked, pool.map(_printed, asked.values()), strict=True))


def _printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}exit code {done.returncode}\n"


def main() -> None:
    paths, result = map(Path, sys.argv[1:])
    wanted = json.loads(paths.read_text(encoding="utf-8"))
    paths = wanted.get("modules") or documented(Path(wanted["root"]))
    found = surface(paths, wanted.get("described"))
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
