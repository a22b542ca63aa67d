# SPDX-License-Identifier: Apache-2.0
"""Atomic output: a directory that appears under its name only when it is complete.

Files are written into a sibling (``NAME.partial-…``, hence the same file system), flushed to the
disk and renamed into place in one step. A run that fails, is interrupted or is killed leaves the
target unchanged.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from llmcompressor.checkpoint.manifest import is_rejected, source_of
from llmcompressor.errors import CheckpointError, GateError, OutputError
from llmcompressor.logger import logger
from llmcompressor.runtime import durable
from llmcompressor.runtime.limits import parse_json
from llmcompressor.runtime.temporary import is_left, owner

FILES, MOVING = "files", "moving"
"""In a run's work folder: the output, and a list of its files once they begin to move."""
_PARTIAL, _OLD, _REJECTED = ".partial", ".old", ".rejected"
_CHOOSE = "Choose another output directory."
_OF_WRITING = (
    (
        (errno.ENOSPC, errno.EDQUOT),
        ("No space left on device", "os error 28"),
        "The disk that holds {parent} is full; nothing was written to {target}.",
        "{remedy}",
    ),
    (
        (errno.EFBIG,),
        ("File too large", "os error 27"),
        "A file of {target} would be larger than the limit of this process or of the file system "
        "allows; nothing was written there.",
        "Raise the limit (ulimit -f unlimited), or choose an output directory elsewhere.",
    ),
    (
        (errno.EROFS,),
        ("Read-only file system", "os error 30"),
        "The file system that holds {parent} can only be read; nothing was written.",
        _CHOOSE,
    ),
)
"""Numbers of errors, how safetensors reports them in the text of its own, problem and remedy."""
_OF_TORCH = re.compile(
    r"inline_container\.cc.*unexpected pos \d+ vs \d+|PytorchStreamWriter failed"
    r"|^basic_ios::clear: iostream error$"
)
"""How ``torch.save`` reports any of them, and does not say which."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/")
_WEIGHT_FILE = re.compile(r"(model|pytorch_model).*\.(safetensors|bin|index\.json)")
_CONFIG = "config.json"
_WHOLE_FOLDERS = {"additional_chat_templates"}
"""Of which nothing may stay that an earlier checkpoint had: all that is in them is read."""
_counter = itertools.count()


class OnExisting(Enum):
    """Policy for a target that already holds files."""

    REFUSE = "refuse"
    REPLACE = "replace"
    MERGE = "merge"


@contextmanager
def disk_errors(
    target: Path,
    remedy: str = (
        "Free some space and repeat the call, which continues, or choose another output directory."
    ),
) -> Iterator[None]:
    """Raise clear errors for a full disk (with a remedy) or a file size limit."""
    try:
        with parents_removed_on_error(target):
            yield
    except OutputError:
        raise
    except Exception as error:
        clear = _write_error(error, target, remedy)
        if clear is None:
            raise
        raise clear from error


@contextmanager
def parents_removed_on_error(target: Path) -> Iterator[None]:
    """Remove the folders above ``target`` that are new and empty when an error is raised."""
    missing = [path for path in target.parents if not os.path.exists(path)]
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # it is in use
                path.rmdir()
        raise


def _write_error(error: BaseException, target: Path, remedy: str) -> OutputError | None:
    """Return the clear error for an error of writing; ``None`` for any other error."""
    words = {"target": target, "parent": target.parent, "remedy": remedy}
    cause: BaseException | None = error
    while cause is not None:
        for numbers, texts, problem, cure in _OF_WRITING:
            is_numbered = isinstance(cause, OSError) and cause.errno in numbers
            if is_numbered or any(text in str(cause) for text in texts):
                return OutputError(problem.format(**words), cure.format(**words))
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, RuntimeError) or not _OF_TORCH.search(str(error)):
        return None
    return OutputError(  # torch does not name the cause
        f"A file of {target} could not be written to its end: the disk is full, or a limit of "
        "this process or of the file system is reached.",
        f"{remedy} See ulimit -f, too.",
    )


@contextmanager
def creation_errors(target: Path) -> Iterator[None]:
    """Convert errors of creating folders and files for ``target`` into an ``OutputError``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"The output directory {target} cannot be created: {reason}.", _CHOOSE
        ) from error


def check_path_argument(argument: str, given: str | os.PathLike[str]) -> None:
    """Refuse (OutputError) an empty argument, which ``Path`` takes for ``.``, and invalid paths.

    An address such as ``s3://bucket/model`` would be a folder named ``s3:``.
    """
    if not os.fspath(given):
        raise OutputError(f"The argument {argument!r} is empty.", "Give the path of a folder.")
    _refuse_address(f"The argument {argument!r}", given)
    try:
        # RuntimeError: a cycle of links, or the home of an unknown user
        os.stat(Path(given).expanduser().resolve())
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            return  # a missing path can be created; other errors are reported later
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise OutputError(
            f"The argument {argument!r} is {os.fspath(given)[:300]!r}, which is no path: {reason}.",
            "Give the path of a folder.",
        ) from error


def _refuse_address(what: str, given: str | os.PathLike[str]) -> None:
    scheme = _ADDRESS.match(os.fspath(given))  # of which Path has taken a slash
    if scheme is None or os.path.exists(scheme[1]):
        return
    raise OutputError(
        f"{what} is {os.fspath(given)[:300]!r}, an address, and files are written to folders of "
        "this machine only.",
        "Give the path of a local folder, and copy the output to that place afterwards; to the hub "
        "push_to_hub of the model that is returned uploads it.",
    )


def check_file(file: Path, what: str) -> None:
    """Refuse (OutputError) a file that could not be written at the end; ``what`` names it.

    The trial leaves nothing behind.
    """
    _refuse_address(what, file)
    existing = next(path for path in (file, *file.absolute().parents) if os.path.exists(path))
    try:
        if existing == file:
            file.open("ab").close()
        else:
            limit = os.pathconf(existing, "PC_NAME_MAX")
            names = file.absolute().relative_to(existing).parts
            if any(len(os.fsencode(name)) > limit for name in names):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise OutputError(
            f"{what} is {file}, which cannot be written: {existing}: {error.strerror or error}.",
            "Choose another place.",
        ) from error


def check_output_dir(
    output_dir: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    is_ours: bool = False,
) -> Path:
    """Refuse an output directory that could not be written at the end; changes nothing.

    Args:
        output_dir: the checkpoint's directory.
        source: the local directory the model was loaded from, if there is one.
        overwrite: allow to replace an existing checkpoint.
        is_ours: files that came since the run began are looked at when it ends.

    Returns:
        The absolute path of the output directory.

    Raises:
        OutputError: it is a file, is in use, overlaps the input, or cannot be created.
    """
    check_path_argument("output_dir", output_dir)
    target = Path(output_dir).expanduser().resolve()
    # Path.exists raises an error for a name that is too long
    existing = next((path for path in target.parents if os.path.isdir(path)), target)  # the root
    parts, limit = target.relative_to(existing).parts, os.pathconf(existing, "PC_NAME_MAX")
    for index, part in enumerate(parts):  # to the last one something is appended meanwhile
        left = limit - (len(f".partial-{owner()}-999") if index == len(parts) - 1 else 0)
        if (size := len(os.fsencode(part))) > left:
            raise OutputError(
                f"The name {part[:24]}… of an output directory has {size} bytes, and the file "
                f"system and the names of unfinished output leave {left}.",
                "Choose a shorter name.",
            )
    original = None if source is None else Path(source).expanduser().resolve()
    problem = _place_problem(target, original)
    if problem is not None:
        raise OutputError(problem, _CHOOSE)
    if target in _current_directories():  # its users would not see that it is replaced
        raise OutputError(
            f"The output directory {target} is the current directory, or contains it, and would "
            "be replaced as a whole.",
            f"Name a folder inside it ({target / 'compressed'}), or one elsewhere.",
        )
    if _is_in_use(target) and not is_ours:
        _check_replaceable(target, overwrite=overwrite)
    return target


def _place_problem(target: Path, source: Path | None) -> str | None:
    """Return why no output can be at ``target``, whatever it holds."""
    existing = next(path for path in (target, *target.parents) if path.exists())
    output, is_writable = f"The output directory {target}", os.access(existing, os.W_OK | os.X_OK)
    problems = {
        f"The output {target} is a file, not a directory.": existing == target
        and not target.is_dir(),
        f"{output} is the input model itself.": target == source,
        f"{output} contains the input model {source}.": source is not None
        and target in source.parents,
        f"{output} lies inside the input model {source}.": source in target.parents
        and source is not None
        and source.is_dir(),
        f"{output} cannot be created: {existing} is a file.": not existing.is_dir(),
        f"{output} cannot be written: no permission in {existing}.": not is_writable,
    }
    return next((problem for problem, holds in problems.items() if holds), None)


def _current_directories() -> tuple[Path, ...]:
    """Return the current directory and its parents; empty if it was removed."""
    try:
        current = Path.cwd()
    except FileNotFoundError:
        return ()
    return (current, *current.parents)


def _is_in_use(target: Path, *own: Path) -> bool:
    """Return True if a folder holds files that no run on it has left there."""
    if not target.is_dir():
        return False
    beside = {work_folder(target), rejected_folder(target), rounds_folder(target)}
    mine = {*beside, *own, *_stale_paths(target)}
    moved = set() if is_unmoved(target) else moved_names(target)
    return any(path not in mine and path.name not in moved for path in target.iterdir())


def _check_replaceable(target: Path, *, overwrite: bool) -> None:
    if not overwrite:
        stale = ", ".join(map(str, _stale_paths(target)))
        raise OutputError(
            f"The output directory {target} already holds files."
            + (f" Beside it a run that was killed has left {stale}." if stale else ""),
            "Choose another one, or pass overwrite=True (--overwrite) to replace it.",
        )
    looks_like_checkpoint = (target / _CONFIG).is_file() or any(target.glob("*.safetensors"))
    holds_people = (target / ".git").exists() or target in _current_directories()
    if holds_people or target == Path.home() or not looks_like_checkpoint:
        raise OutputError(
            f"The output directory {target} holds files but no checkpoint, so it is not replaced.",
            "Choose another one, or remove it yourself.",
        )


@contextmanager
def staged_output(
    output_dir: str | os.PathLike[str],
    *,
    on_existing: OnExisting = OnExisting.REFUSE,
    gate: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Write a directory elsewhere and move it into place when the block ends without an error.

    A target that holds files by then is left, with a name alongside it; replaced; or the new files
    are moved into it. Yields the directory to write into. ``gate`` is called with it at the end.

    Raises:
        OutputError: the target holds files and they may not be touched, or the disk is full.
        GateError: raised by ``gate``; the files are in :func:`rejected_folder`.
    """
    target = Path(output_dir).expanduser().resolve()
    place = _staging_place(target)
    staging = place / _spare_name(target, _PARTIAL).name
    with disk_errors(target, "Free some space or choose another output directory."):
        with creation_errors(target):
            durable.make_folder(place)
            remove_stale(target)
            staging.mkdir()
        try:
            yield staging
            if gate is not None:
                gate(staging)
            run = work_folder(target)  # there if a run has reserved the target
            marker = run / MOVING if run.is_dir() else None
            publish_folder(staging, target, on_existing, marker=marker)
            if gate is not None:
                remove_superseded(target)
        except GateError:
            publish_folder(staging, rejected_folder(target), OnExisting.REPLACE)
            raise
        except _TakenError as error:
            numbered = (f".finished-{number}" for number in itertools.count(1))
            spares = (
                place / f"{target.name}{end}" for end in itertools.chain([".finished"], numbered)
            )
            spare = next(path for path in spares if not path.exists())
            durable.rename(staging, spare)
            raise OutputError(
                f"{error.problem} What was made stands in {spare}.",
                "Give it another name yourself, or move the other files away.",
            ) from error
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def work_folder(target: Path) -> Path:
    """Return the work folder of a resumable run on ``target``: ``NAME.partial`` alongside it."""
    return _staging_place(target) / f"{target.name}{_PARTIAL}"


def rejected_folder(target: Path) -> Path:
    """Return the place of a checkpoint that does not keep its gates: ``NAME.rejected``."""
    return _staging_place(target) / f"{target.name}{_REJECTED}"


def rounds_folder(target: Path) -> Path:
    """Return the place of what a search by measuring has made so far: ``NAME.rounds``."""
    return _staging_place(target) / f"{target.name}.rounds"


def remove_superseded(target: Path) -> None:
    """Remove what an earlier run has left in :func:`rejected_folder` of an output that passes.

    It is removed if it was made of the same model. Else it stays, and a warning tells.
    """
    folder = rejected_folder(target)
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        is_superseded = is_rejected(folder) and source_of(folder) == source_of(target)
    except CheckpointError:
        is_superseded = False
    if not is_superseded:
        logger.warning(
            f"{folder} stays: it was not made of the same model as {target}, which has passed."
        )
        return
    logger.info(f"Removing {folder}, which did not keep its gates: {target} has passed.")
    spare = folder.with_name(_spare_name(target, _OLD).name)
    durable.rename(folder, spare)
    shutil.rmtree(spare, ignore_errors=True)


def moved_names(target: Path) -> set[str]:
    """Return the names of files that a run has begun to move to ``target``, and not ended."""
    try:
        found = parse_json((work_folder(target) / MOVING).read_bytes())
    except (OSError, ValueError):
        return set()
    return set(map(str, found)) if isinstance(found, list) else set()


def is_unmoved(target: Path) -> bool:
    """Return True if a run's files, whole, are to get the name ``target`` in one step."""
    folder = work_folder(target)
    return target not in folder.parents and (folder / FILES).exists()


def is_published(target: Path) -> bool:
    """Return True if a run was killed when its whole output had its name."""
    names = moved_names(target)
    is_left = (work_folder(target) / FILES).exists()
    return bool(names) and not is_left and all((target / name).exists() for name in names)


def publish_folder(
    folder: Path, target: Path, on_existing: OnExisting, *, marker: Path | None = None
) -> None:
    """Move a finished folder to its final name on the same file system; OutputError if it is taken.

    Where files are moved one by one, a ``config.json`` disappears first and is moved last, so that
    a loader never sees the old configuration with new weights. Other files of before go when all
    new ones but that are there. So there are weights at any moment, by which ``overwrite`` knows
    what a killed run has left.

    Args:
        folder: the finished folder.
        target: the final name.
        on_existing: policy for files of that name.
        marker: a file that lists all files before the first one moves. A run that finds it can
            publish the rest.
    """
    durable.sync_tree(folder)
    is_merged, is_replaced = on_existing is OnExisting.MERGE, on_existing is OnExisting.REPLACE
    is_inside = target in folder.parents or (is_merged and target.exists())
    if not (is_merged or is_replaced):
        in_use = _is_in_use(target, folder) if is_inside else _holds_files(target)
        if in_use:
            raise _TakenError(target)
    names = {path.name for path in folder.iterdir()}
    if marker is not None:
        names |= moved_names(target)
        durable.replace(marker, json.dumps(sorted(names)).encode())
    if is_inside:
        _move_into(folder, target, names, purge=is_replaced)
    else:
        _rename_over(folder, target)
    remove_stale(target)


def _holds_files(target: Path) -> bool:
    return target.is_dir() and any(target.iterdir())


def _rename_over(folder: Path, target: Path) -> None:
    """Rename ``folder`` to ``target``; an old target is removed only after that."""
    aside = _spare_name(target, _OLD)
    has_old = _holds_files(target)
    try:
        if has_old:
            durable.rename(target, aside)
        durable.rename(folder, target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    if has_old:
        shutil.rmtree(aside, ignore_errors=True)


def _move_into(folder: Path, target: Path, names: Collection[str], *, purge: bool) -> None:
    own = {folder, work_folder(target)}
    if (folder / _CONFIG).exists():
        durable.remove(target / _CONFIG)
    for name in _WHOLE_FOLDERS:
        if (folder / name).exists() and (target / name).exists():
            durable.remove(target / name)
    ranks = {path.name: 0 for path in folder.glob("*.safetensors")}
    moving = sorted(folder.iterdir(), key=lambda path: ranks.get(path.name, 1))
    for path in moving:
        if path.name != _CONFIG:
            _move(path, target / path.name)
    durable.sync(target)
    for path in list(target.iterdir()):
        is_stale = purge or path.name == _CONFIG or _WEIGHT_FILE.fullmatch(path.name)
        if is_stale and path not in own and path.name not in names:
            durable.remove(path)
    if (folder / _CONFIG).exists():
        durable.rename(folder / _CONFIG, target / _CONFIG)
    folder.rmdir()


def _move(path: Path, place: Path) -> None:
    """Move a file or merge a folder into its place, keeping other files there."""
    if not (path.is_dir() and place.is_dir()):
        path.replace(place)
        return
    for inner in sorted(path.iterdir()):
        _move(inner, place / inner.name)
    path.rmdir()
    durable.sync(place)


def remove_stale(target: Path) -> None:
    """Delete what a killed run of this machine left of an output at ``target``."""
    for path in _stale_paths(target):
        logger.info(f"Removing {path}, left by a run that was killed.")
        shutil.rmtree(path, ignore_errors=True)


def _stale_paths(target: Path) -> list[Path]:
    """Return what a killed run of this machine left and is no longer needed."""
    folder = _staging_place(target)
    kinds = [_PARTIAL, f"{_REJECTED}{_OLD}"]
    if target.exists():  # one that was moved aside is the only copy until there is a new one
        kinds.append(_OLD)
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if any(is_left(path.name, f"{target.name}{kind}") for kind in kinds)
    ]


def _staging_place(target: Path) -> Path:
    """Return the folder of unfinished output: the target's own if it cannot be renamed over."""
    is_there = os.path.isdir(target)  # Path.is_dir fails on a name that is too long
    is_fixed = is_there and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))
    return target if is_fixed else target.parent


def remove_work_folder(target: Path) -> None:
    """Remove the work folder of ``target``: at once for a later run, whatever is left of it."""
    folder = work_folder(target)
    if not folder.exists():
        return
    spare = _spare_name(target, _PARTIAL)
    durable.rename(folder, folder.with_name(spare.name))
    shutil.rmtree(folder.with_name(spare.name), ignore_errors=True)


def _spare_name(target: Path, kind: str) -> Path:
    """Return a name beside ``target`` under which :func:`remove_stale` finds what a kill leaves."""
    return target.with_name(f"{target.name}{kind}-{owner()}-{next(_counter)}")


class _TakenError(OutputError):
    def __init__(self, target: Path) -> None:
        super().__init__(
            f"The output directory {target} holds files that were not there when the run began.",
            "Move them elsewhere and repeat the call: where it keeps its progress, nothing is done "
            "again. Or pass overwrite=True (--overwrite) to replace them.",
        )
