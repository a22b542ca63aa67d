# SPDX-License-Identifier: Apache-2.0
"""Size and structure of the package in figures, each with a ceiling that refactoring only lowers.

::

    python -m tests.house                       # the table
    python -m tests.house --list "short helpers used once"  # the places that a figure counts
    python -m tests.house --cases               # also the tests that always run (a minute)
    python -m tests.house --lower               # sets ceilings to figures that are lower now

``tests/test_architecture.py`` fails where a figure is above its ceiling, and where it is well
below: then the ceiling is lowered in the same commit.
"""

from __future__ import annotations

import argparse
import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = [
    "CEILINGS",
    "FIGURES",
    "ROOT",
    "body_lines",
    "complaint",
    "files",
    "imports",
    "own_module",
    "read",
]

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "llmcompressor"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

# Figure: (ceiling, goal). --lower rewrites the ceilings. Where a commit adds a capability, it may
# raise the ceilings of lines by that, and its message says so: refactoring may not.
CEILINGS: dict[str, tuple[float, float]] = {
    "lines of src": (102_120, 64_000),
    "files of src": (370, 300),
    "members to override": (28, 25),
    "fields of State": (14, 14),
    "folders in a cycle": (0, 0),
    "files in checkpoint": (26, 20),
    "files in modeling": (20, 20),
    "files in verification": (23, 22),
    "files in entrypoints": (20, 14),
    "files for an old path": (0, 0),
    "helpers used once": (786, 400),
    "short helpers used once": (60, 60),
    "modules under 60 lines": (2, 0),
    "files per 1,000 lines": (4.7, 4.7),
    "% of functions with a body of at most 3 lines": (36.5, 30.0),
    "% of docstrings that open with a question": (3.0, 3.0),
    "lines of tests": (75_700, 52_000),
    "bytes of docs/architecture.md": (8_000, 10_000),
    "rows of its longest table": (20, 20),
}
SLACK = 0.02
"""The share of its ceiling by which a figure may be lower before the ceiling has to follow."""

LIFECYCLE = {
    *("initialize", "resume", "update_event", "finalize", "should_start", "should_end"),
    *("phase", "passed_phases", "initialized", "started", "ended", "finalized", "be_given_data"),
}
"""Members of ``Modifier`` that the session calls or reads, and no technique overrides."""
DOCUMENTED = {f"modifiers.transform.{name}" for name in ("awq", "quip", "smoothquant", "spinquant")}
"""Packages without code of their own that the documentation of llm-compressor 0.14 imports."""
FACES = {"__main__", "typing", "version"}
"""Modules that are small because scripts import them by these names."""
OPENINGS = {"What", "Whether", "Which", "Where", "How", "One"}
_RULE = re.compile(r"[A-Z]\d+( and [A-Z]\d+)?\W*")


@dataclass(frozen=True)
class Function:
    """A function or method.

    Attributes:
        name: without its class.
        line: of its ``def``.
        lines: from its ``def`` to its end, without the docstring.
        body: lines below the signature, without the docstring.
    """

    name: str
    line: int
    lines: int
    body: int


@dataclass
class File:
    """All that is counted of a file; its syntax tree is not kept.

    Attributes:
        lines: how many.
        functions: nested ones as well.
        uses: how often each name is read, called or looked up as an attribute.
        docstrings: line and text of each.
        imports: line, level, module and name of each, also inside functions and for type
            checkers only.
        definitions: top-level classes and functions.
        has_values: something at the top is computed or stored besides ``__all__`` and the tables
            of a page whose names are imported when they are used.
    """

    lines: int
    functions: list[Function] = field(default_factory=list)
    uses: Counter[str] = field(default_factory=Counter)
    docstrings: list[tuple[int, str]] = field(default_factory=list)
    imports: list[tuple[int, int, str, str | None]] = field(default_factory=list)
    definitions: set[str] = field(default_factory=set)
    has_values: bool = False


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Lines of a function and of its body, the docstring left out of both."""
    end = function.end_lineno or function.lineno
    body = function.body
    documented = ast.get_docstring(function, clean=False) is not None
    shorter = (body[0].end_lineno or 0) - body[0].lineno + 1 if documented else 0
    code = body[1:] if documented else body
    below = end - code[0].lineno + 1 if code else 0
    return end - function.lineno + 1 - shorter, below


@cache
def read(path: Path) -> File:
    """What is counted of a file."""
    text = path.read_text(encoding="utf-8")
    found = File(lines=text.count("\n"))
    tree = ast.parse(text, str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.uses[node.id] += 1
        elif isinstance(node, ast.Attribute):
            found.uses[node.attr] += 1
        else:
            _look_at(node, found)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.definitions.add(node.name)
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            found.has_values |= not _belongs_to_a_page(node)
    return found


def _look_at(node: ast.AST, found: File) -> None:
    """Count a node other than a name."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        found.functions.append(Function(node.name, node.lineno, *body_lines(node)))
    elif isinstance(node, ast.Import):
        found.imports += [(node.lineno, 0, alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        found.imports += [
            (node.lineno, node.level, node.module or "", alias.name) for alias in node.names
        ]
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text is not None:
            found.docstrings.append((getattr(node, "lineno", 1), text.strip()))


def _belongs_to_a_page(node: ast.stmt) -> bool:
    """``__all__``, tables of ``lazy_page``, what it returns, and imports for type checkers."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
    targets = ast.unparse(node).partition("=")[0]
    return bool(re.match(r"__all__|_HOMES|_ABSENT|\(?__getattr__", targets))


def name_of(path: Path) -> str:
    """The module's name within the package; ``""`` for its front page."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files() -> dict[str, Path]:
    """The package's modules by name."""
    return {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def contents() -> dict[str, File]:
    """What is counted of each module."""
    searched = gc.isenabled()
    gc.disable()  # trees are freed without it
    try:
        return {name: read(path) for name, path in files().items()}
    finally:
        if searched:
            gc.enable()


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, also inside functions and for type checkers only.

    ``from package import name`` counts as ``package.name`` where that is a module.
    """
    package = ["llmcompressor", *name.split(".")] if name else ["llmcompressor"]
    if path.name != "__init__.py":
        package = package[:-1]
    for line, level, module, imported in read(path).imports:
        base = ".".join(package[: len(package) - level + 1]) if level else ""
        yield line, ".".join(part for part in (base, module, imported) if part)


def own_module(full: str) -> str | None:
    """The module of this package that an imported name is or is in; ``None`` for others'."""
    parts = full.split(".")
    if parts[0] != "llmcompressor":
        return None
    for length in range(len(parts), 1, -1):
        if (name := ".".join(parts[1:length])) in files():
            return name
    return ""


def in_cycles(edges: dict[str, set[str]]) -> set[str]:
    """The nodes from which a way leads back to them, through others.

    >>> sorted(in_cycles({"a": {"b"}, "b": {"a", "c"}, "c": {"c"}}))
    ['a', 'b']
    """

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            new = edges.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    ways = {node: reached(node) for node in edges}
    return {node for node in edges if any(node in ways.get(one, ()) for one in ways[node] - {node})}


def folders_imported() -> dict[str, set[str]]:
    """Folder → the others that its modules import. A module at the top counts as itself.

    The package's front page points anywhere and is no folder.
    """
    edges: dict[str, set[str]] = {}
    for name, path in files().items():
        if name:
            targets = {own_module(full) for _, full in imports(name, path)}
            own = edges.setdefault(name.partition(".")[0], set())
            own |= {target.partition(".")[0] for target in targets if target}
    return edges


def _files_of(folder: str) -> list[str]:
    return [name for name in files() if name.partition(".")[0] == folder]


def _members() -> list[str]:
    """Public members of ``Modifier`` that a technique may override.

    These are its methods, its properties and what it declares as class data. Fields of a recipe's
    line (``start``, ``index``) are no such members, nor is what pydantic has, what
    :class:`HooksMixin` gives to techniques, and :data:`LIFECYCLE`.
    """
    members = []
    for node in _class_body("Modifier"):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members.append(node.name)
        elif isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation):
            members.append(ast.unparse(node.target))
    unseen = LIFECYCLE | {"model_validate"}
    return sorted({name for name in members if name[0] != "_"} - unseen)


def _class_body(name: str) -> Iterator[ast.stmt]:
    """What stands in a class and in those of the package that it derives from."""
    for module, file in contents().items():
        if name in file.definitions and name != "HooksMixin":
            tree = ast.parse(files()[module].read_text(encoding="utf-8"))
            [node] = [
                one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name
            ]
            yield from node.body
            for base in node.bases:
                yield from _class_body(ast.unparse(base))


def _state() -> list[str]:
    fields = [node for node in _class_body("State") if isinstance(node, ast.AnnAssign)]
    return [ast.unparse(node.target) for node in fields]


def _pages() -> list[str]:
    """Modules that only point to names elsewhere, and packages that hold no others."""
    pure = {
        name: not (file.definitions or file.has_values)
        for name, file in contents().items()
        if name not in DOCUMENTED and files()[name].stem != "__main__"
    }
    return [
        name
        for name in pure
        if all(is_pure for one, is_pure in pure.items() if f"{one}.".startswith(f"{name}."))
    ]


@cache
def _helpers() -> list[tuple[str, Function]]:
    """Private functions and methods whose name occurs once in the package besides its ``def``.

    Names that several modules define occur more often, and escape.
    """
    uses: Counter[str] = Counter()
    for file in contents().values():
        uses.update(file.uses)
    return [
        (f"{files()[name].relative_to(ROOT)}:{function.line}: {function.name}", function)
        for name, file in contents().items()
        for function in file.functions
        if re.match(r"_[^_]", function.name) and uses[function.name] == 1
    ]


def _used_once() -> list[str]:
    return [place for place, _ in _helpers()]


def _short_used_once() -> list[str]:
    return [place for place, function in _helpers() if function.body <= 3]


def _openings() -> list[str]:
    """Docstrings that open with a question's word, or are a rule's number."""
    return [
        f"{files()[name].relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for name, file in contents().items()
        for line, text in file.docstrings
        if text
        and (
            re.split(r"[^\w-]", text, maxsplit=1)[0] in OPENINGS
            or _RULE.fullmatch(text) is not None
        )
    ]


def _small() -> list[str]:
    """Modules under 60 lines that are no face of a package."""
    return [
        f"{name}: {file.lines}"
        for name, file in contents().items()
        if file.lines < 60 and files()[name].name != "__init__.py" and name not in FACES
    ]


def _functions() -> list[Function]:
    return [function for file in contents().values() for function in file.functions]


def _lines() -> int:
    return sum(file.lines for file in contents().values())


def _test_lines() -> int:
    return sum(path.read_bytes().count(b"\n") for path in (ROOT / "tests").rglob("*.py"))


def _longest_table() -> int:
    """Rows of the longest table of the page on the architecture."""
    tables = re.findall(r"(?:^\|.*\n)+", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    return max((table.count("\n") - 2 for table in tables), default=0)


def _count_of(places: Callable[[], list[str]]) -> Callable[[], float]:
    return lambda: len(places())


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1)


LISTS: dict[str, Callable[[], list[str]]] = {
    "files of src": lambda: list(files()),
    "members to override": _members,
    "fields of State": _state,
    "folders in a cycle": lambda: sorted(in_cycles(folders_imported())),
    "files in checkpoint": lambda: _files_of("checkpoint"),
    "files in modeling": lambda: _files_of("modeling"),
    "files in verification": lambda: _files_of("verification"),
    "files in entrypoints": lambda: _files_of("entrypoints"),
    "files for an old path": _pages,
    "helpers used once": _used_once,
    "short helpers used once": _short_used_once,
    "modules under 60 lines": _small,
}
"""Figures that count places."""
FIGURES: dict[str, Callable[[], float]] = {
    "lines of src": _lines,
    **{name: _count_of(places) for name, places in LISTS.items()},
    "files per 1,000 lines": lambda: round(1000 * len(files()) / _lines(), 2),
    "% of functions with a body of at most 3 lines": lambda: _percent(
        sum(function.body <= 3 for function in _functions()), len(_functions())
    ),
    "% of docstrings that open with a question": lambda: _percent(
        len(_openings()), sum(len(file.docstrings) for file in contents().values())
    ),
    "lines of tests": _test_lines,
    "bytes of docs/architecture.md": lambda: ARCHITECTURE.stat().st_size,
    "rows of its longest table": _longest_table,
}
LISTS["% of docstrings that open with a question"] = _openings


def cases() -> int:
    """Tests that always run, as pytest collects them: that takes a minute."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return sum(int(number) for number in re.findall(r"\.py: (\d+)$", run.stdout, re.MULTILINE))


def complaint(name: str) -> str | None:
    """The reason why a figure and its ceiling do not agree, and the remedy."""
    figure, (ceiling, goal) = FIGURES[name](), CEILINGS[name]
    if figure > ceiling:
        shown = f' python -m tests.house --list "{name}" shows the places.' if name in LISTS else ""
        return (
            f"{name}: {figure:,}, above the ceiling of {ceiling:,}. Merge, shorten or rename what "
            f"was added.{shown}"
        )
    if max(figure, goal) < ceiling * (1 - SLACK):
        return (
            f"{name}: {figure:,}, well below the ceiling of {ceiling:,}. Lower it, so that it "
            "stays so: python -m tests.house --lower."
        )
    return None


def lowered(source: str) -> str:
    """The text of this file with those ceilings lowered that are well above today's figures."""
    for name, (ceiling, goal) in CEILINGS.items():
        row = f'    "{name}": ({{:_}}, {goal:_}),'
        new = max(FIGURES[name](), goal) if row.format(ceiling) in source else ceiling
        if new < ceiling * (1 - SLACK):
            source = source.replace(row.format(ceiling), row.format(new))
    return source


def main() -> None:
    """Print the table, or what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--list", choices=LISTS, metavar="FIGURE", help="print its places")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings")
    parser.add_argument("--cases", action="store_true", help="count the tests, too")
    given = parser.parse_args()
    if given.list:
        print(*LISTS[given.list](), sep="\n")
        return
    if given.lower:
        path = Path(__file__)
        path.write_text(lowered(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{'':48}{'now':>10}{'ceiling':>10}{'goal':>10}")
    for name, (ceiling, goal) in CEILINGS.items():
        print(f"{name:48}{FIGURES[name]():>10,}{ceiling:>10,}{goal:>10,}")
    if given.cases:
        print(f"{'cases that always run':48}{cases():>10,}{'':>10}{8000:>10,}")


if __name__ == "__main__":
    main()
