# SPDX-License-Identifier: Apache-2.0
"""Parsing of a recipe's text: files, front matter, JSON and YAML, into plain mappings.

YAML is read as YAML 1.1 by a safe loader with four differences, all towards the usual intent in a
recipe: ``1e-5`` is a number, ``2:4`` and ``2024-01-01`` are texts, and a duplicate key in one
mapping is an error rather than a silent loss.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from llmcompressor.errors import RecipeError
from llmcompressor.runtime.limits import check_regular, copy_values

MAX_CHARACTERS = 50_000_000
"""Longest text of a recipe."""

_INT = re.compile(
    r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][0-9_]*)$",
)
_FLOAT = re.compile(
    r"""(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_YAML = "tag:yaml.org,2002:"
_REPLACED_TAGS = {f"{_YAML}{name}" for name in ("int", "float", "timestamp", "value")}
_EXTENSIONS = (".yaml", ".yml", ".json", ".md")
_FENCES = ("---", "+++")
_SECTION = re.compile(r"(\w+_)?(modifiers|stage)")


class _DuplicateKeyError(ValueError):
    """A key occurs twice in one mapping."""

    def __init__(self, key: str, line: int | None = None) -> None:
        where = "" if line is None else f" (line {line})"
        super().__init__(f"{key!r} stands twice in one mapping{where}")


class RecipeLoader(yaml.SafeLoader):
    """The safe YAML loader for recipes; the module's docstring lists its differences."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own attribute)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping, and raise for duplicate keys; merge keys are not filled in yet."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_YAML}merge":
                continue
            if key.value in seen:
                raise _DuplicateKeyError(key.value, key.start_mark.line + 1)
            seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Fill in merge keys: a mapping's own keys win, then the first of the merged mappings.

        This is YAML's rule. PyYAML 6.0.4 takes the last or the innermost, by the length of the key.
        """
        own: list[tuple[yaml.Node, yaml.Node]] = []
        merged: dict[object, tuple[yaml.Node, yaml.Node]] = {}  # the weakest first
        pending, node.value = node.value, []  # a mapping that merges itself adds nothing
        for key, value in pending:
            if key.tag != f"{_YAML}merge":
                own.append((key, value))
                continue
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in reversed(sources):
                if not isinstance(source, yaml.MappingNode):
                    problem = "expected a mapping or list of mappings for merging"
                    raise yaml.constructor.ConstructorError(None, None, problem, value.start_mark)
                self.flatten_mapping(source)
                for inner, pair in ((pair[0], pair) for pair in source.value):
                    is_scalar = isinstance(inner, yaml.ScalarNode)
                    merged[(inner.tag, inner.value) if is_scalar else inner] = pair
        node.value = [*merged.values(), *own]


def add_number_resolvers(target: type[Any]) -> None:
    """Make a YAML loader or dumper class recognize the numbers of recipes."""
    target.add_implicit_resolver(f"{_YAML}int", _INT, list("-+0123456789"))
    target.add_implicit_resolver(f"{_YAML}float", _FLOAT, list("-+.0123456789"))


def _pickled_argument(loader: RecipeLoader, suffix: str, node: yaml.Node) -> object:
    """The only argument of a pickled Python object, as in recipes saved by other tools.

    ``!!python/object/apply:compressed_tensors...QuantizationType [int]`` reads as ``int``: the
    class is neither imported nor called. So does a device, ``torch.device [cpu]``.
    """
    items = loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else []
    if len(items) != 1 or not isinstance(items[0], (str, int, float)):
        raise yaml.constructor.ConstructorError(
            None, None, f"could not read a Python object of {suffix!r}", node.start_mark
        )
    return items[0]


def _tuple_items(loader: RecipeLoader, node: yaml.Node) -> list[Any]:
    """The items of a Python tuple, as in recipes saved by other tools."""
    items: list[Any] = loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]
    return items


add_number_resolvers(RecipeLoader)
for _module in ("compressed_tensors.quantization.", "torch.device"):
    RecipeLoader.add_multi_constructor(f"{_YAML}python/object/apply:{_module}", _pickled_argument)
RecipeLoader.add_constructor(f"{_YAML}python/tuple", _tuple_items)


def looks_like_path(text: str) -> bool:
    """Return True if a text can only be a path, not a recipe.

    >>> looks_like_path("recipes/w4a16.yaml"), looks_like_path("modifiers: {A: {path: a/b}}")
    (True, False)
    """
    text = text.strip()
    if not text or "\n" in text or text[0] in "{[" or ": " in text or text.endswith(":"):
        return False
    return text.lower().endswith(_EXTENSIONS) or "/" in text or os.sep in text


def read_file(path: str | os.PathLike[str]) -> Any:
    """Parse the recipe in a file: by its extension, else as JSON, then YAML.

    Args:
        path: ``.yaml``, ``.yml``, ``.json``, ``.md`` with front matter, or anything else.

    Raises:
        RecipeError: there is no such file, or it cannot be read.
    """
    file = Path(path).expanduser()
    check_regular(file, RecipeError)
    if not file.is_file():
        raise _no_such_file(file)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"The recipe {file} cannot be read: it is no text in UTF-8 ({error}).",
            "Save it as UTF-8.",
        ) from error
    except OSError as error:
        raise RecipeError(
            f"The recipe {file} cannot be read: {error}.", "Check who may read it."
        ) from error
    return parse_text(text, source=f"The recipe {file}", extension=file.suffix.lower())


def parse_text(text: str, *, source: str = "The recipe", extension: str = "") -> Any:
    """Parse the recipe in a text.

    Args:
        text: YAML, JSON, or either of them as front matter.
        source: its name in error messages.
        extension: ``.yaml``, ``.json``, ``.md`` decide the format, else each is tried.

    Raises:
        RecipeError: the text is blank (an unset variable of a shell, say), cannot be
            parsed, has a key twice or nests without end.
    """
    if not text.strip():
        raise RecipeError(f"{source} is empty.", "Write `modifiers: {}` if it is meant to be.")
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{source} has more than {MAX_CHARACTERS} characters.", "Shorten it.")
    try:
        if extension not in (".yaml", ".yml", ".json"):
            text = _front_matter(text, source, required=extension == ".md")
        return copy_values(_load(text, extension))
    except _DuplicateKeyError as error:
        raise RecipeError(
            f"{source} cannot be read: {error}, and only one of the two would count.",
            "For two modifiers of one class write a list: `modifiers: [{A: {…}}, {A: {…}}]`.",
        ) from None
    except json.JSONDecodeError as error:
        problem = f"{error.msg} (line {error.lineno}, column {error.colno})"
        raise RecipeError(f"{source} is not valid JSON: {problem}.", "Correct it there.") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        if (mark := getattr(error, "problem_mark", None)) is not None:
            problem += f" (line {mark.line + 1}, column {mark.column + 1})"
        tab = "Indent with spaces: YAML takes no tabs." if "'\\t'" in problem else ""
        remedy = tab or "Correct it there; what belongs below a name is indented by spaces."
        raise RecipeError(f"{source} is not valid YAML: {problem}.", remedy) from None
    except RecursionError:
        raise RecipeError(f"{source} is nested too deeply.", "Flatten it.") from None


def _load(text: str, extension: str) -> Any:
    if extension == ".json":
        return json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    if extension not in (".yaml", ".yml") and text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text, object_pairs_hook=_reject_duplicate_keys)
        except json.JSONDecodeError:
            pass  # YAML has mappings in braces too, with fewer quotes
    return yaml.load(text, RecipeLoader)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKeyError(next(name for name in names if names.count(name) > 1))
    return mapping


def _front_matter(text: str, source: str, *, required: bool) -> str:
    """The text between two lines of ``---`` or ``+++`` at the beginning, else the whole text."""
    lines = text.strip().splitlines()
    fence = lines[0].strip()
    if fence in _FENCES:
        for end, line in enumerate(lines[1:], start=1):
            if line.rstrip() == fence:
                if not required and _is_recipe("\n".join(lines[end + 1 :])):
                    raise RecipeError(
                        f"{source} holds two documents, and only the first would count.",
                        "Make one mapping of both, or give a list of two recipes.",
                    )
                return "\n".join(lines[1:end])
    if required:
        raise RecipeError(
            f"{source} has no front matter.",
            "In Markdown a recipe stands at the beginning, between two lines of `---`.",
        )
    return text


def _is_recipe(text: str) -> bool:
    """Return True if the text after front matter is a second recipe, not prose."""
    try:
        found = yaml.load(text, RecipeLoader)
    except (yaml.YAMLError, ValueError):
        return False
    return isinstance(found, Mapping) and any(
        isinstance(value, Mapping | list) and _SECTION.fullmatch(str(key))
        for key, value in found.items()
    )


def _no_such_file(file: Path) -> RecipeError:
    folder = file if file.is_dir() else file.parent
    if not folder.is_dir():
        return RecipeError(
            f"There is no such file: {file}.", f"There is no folder {folder} either."
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    near = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5)
    near = near or [name for name in names if name.endswith(_EXTENSIONS)][:8]
    hint = f"In {folder} there is: {', '.join(near)}." if near else "Check the path."
    if file.is_dir():
        return RecipeError(f"The recipe {file} is a folder, not a file.", hint)
    return RecipeError(f"There is no such file: {file}.", hint)
