# SPDX-License-Identifier: Apache-2.0
"""Text available on every machine: the source of the running Python's standard library.

The embedded model was trained on it, except for the modules that a hash of their path holds out
(see the model's page, ``data/pico-stdlib/README.md``): evaluate on those only, calibrate on the
others. The set of modules depends on the Python version; whether a module is held out does not.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from llmcompressor.errors import DatasetError

# Excluded folders: not part of the library, or of another style.
_EXCLUDED = frozenset(
    {
        *("dist-packages", "encodings", "ensurepip", "idlelib"),
        *("lib2to3", "site-packages", "test", "turtledemo"),
    }
)
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class SourceFile:
    """A source file of the library.

    Attributes:
        name: path relative to the library, with slashes.
        path: the file's path.
        held_out: it was held out from the embedded model's training.
    """

    name: str
    path: Path
    held_out: bool

    def read(self) -> str:
        """The text; bytes that are not UTF-8 are replaced."""
        return self.path.read_text(encoding="utf-8", errors="replace")


def is_held_out(name: str) -> bool:
    """Return True if the file was held out from the embedded model's training.

    >>> is_held_out("functools.py"), is_held_out("argparse.py")
    (True, False)
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_ONE_IN == 0


def source_files(library: Path | None = None) -> list[SourceFile]:
    """Every source file of the library, sorted by path.

    Args:
        library: the folder; that of the running Python by default.

    Raises:
        DatasetError: this Python came without its library's source.
    """
    root = library or Path(sysconfig.get_paths()["stdlib"])
    found = list(root.glob("*.py"))
    # excluded folders may hold far more files, and are not traversed
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.is_dir() and not folder.is_symlink() and folder.name not in _EXCLUDED:
            found.extend(folder.rglob("*.py"))
    if not found:
        raise DatasetError(
            f"{root} holds no source of the standard library.",
            "Use a Python that has it, or give a text of your own.",
        )
    names = {path: path.relative_to(root).as_posix() for path in sorted(found)}
    return [SourceFile(name, path, is_held_out(name)) for path, name in names.items()]


def calibration_texts(library: Path | None = None) -> list[str]:
    """The files that the embedded model was trained on, whole and sorted by path."""
    return [file.read() for file in source_files(library) if not file.held_out]


def held_out_texts(library: Path | None = None) -> list[str]:
    """The files that the embedded model never saw, whole and sorted by path."""
    return [file.read() for file in source_files(library) if file.held_out]


def calibration_passages(
    count: int, *, seed: int = 0, characters: int = 2048, library: Path | None = None
) -> list[str]:
    """Passages from random places of the calibration files, each starting at a line.

    Whole files truncated to their first tokens would all be licences and imports. A file is drawn
    in proportion to its length, so that each line is equally likely to begin a passage.

    Args:
        count: number of passages.
        seed: seed of the random draws.
        characters: length of each passage; 2048 are well over 256 tokens of the embedded model.
        library: as in :func:`source_files`.
    """
    draw = random.Random(seed)
    texts = [text for text in calibration_texts(library) if len(text) >= characters]
    if not texts:
        raise DatasetError(
            f"No file of the standard library has {characters} characters.", "Ask for fewer."
        )
    lengths = [len(text) for text in texts]
    passages = []
    for text in draw.choices(texts, lengths, k=count):
        place = draw.randint(0, len(text) - characters)
        start = text.rfind("\n", 0, place) + 1  # of its line
        passages.append(text[start : start + characters])
    return passages
