# SPDX-License-Identifier: Apache-2.0
"""Background writer: stores blocks at their planned offsets and journals each once durable."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from safetensors.torch import save_file
from torch import Tensor

from llmcompressor.checkpoint.copied_files import side_files
from llmcompressor.checkpoint.source import read_header
from llmcompressor.checkpoint.tensor_files import (
    OutputLayout,
    TensorWriter,
    bytes_of,
    digest_of,
    read_tensors,
)
from llmcompressor.errors import CheckpointError, OutputError
from llmcompressor.runtime import durable
from llmcompressor.runtime.progress import format_bytes

_BLOCK = 4096
_FILES = 8
_PER_TENSOR = 512


def check_space(place: Path, *, output: int, scratch: int = 0) -> None:
    """Refuse (OutputError) a disk without room for bytes of the output and of scratch blocks."""
    there = next(one for one in (place, *place.parents) if one.exists())
    free = shutil.disk_usage(there).free
    if output + scratch > free:
        between = f" and {format_bytes(scratch)} for blocks between passes" if scratch else ""
        raise OutputError(
            f"The output needs {format_bytes(output)} more{between}, and the disk that holds "
            f"{place} has {format_bytes(free)} left.",
            "Free some space or choose another output directory.",
        )


def non_weight_bytes(source: Path | None, tensors: int) -> int:
    """Estimate the bytes of all files besides the weights: side files, index and report."""
    files = [] if source is None else side_files(source)
    copied = sum(one.stat().st_size + _BLOCK for one in files)
    return copied + tensors * _PER_TENSOR + _FILES * _BLOCK


def unallocated_bytes(folder: Path, size: int) -> int:
    """Return how many of ``size`` bytes the files of a folder have not allocated yet."""
    files = folder.iterdir() if folder.is_dir() else ()
    return max(0, size - sum(one.stat().st_blocks * 512 for one in files if one.is_file()))


class BlockWriter:
    """Write the tensors of blocks to their planned places in the output files, on a thread.

    Creating it allocates the disk space of the whole output, so that a full disk fails at once
    (OutputError). The disk must have room too for ``scratch`` bytes of scratch blocks and for bytes
    of other files ``beside`` the weights. One that ``joins`` writes to the files of another
    process, which has done that.
    """

    def __init__(
        self,
        folder: Path,
        layout: OutputLayout,
        *,
        scratch: int = 0,
        beside: int = 0,
        joins: bool = False,
    ) -> None:
        if not joins:
            needed = unallocated_bytes(folder, layout.file_size + beside)
            check_space(folder, output=needed, scratch=scratch)
        self._writer = TensorWriter(folder, layout, joins=joins)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="block-writer", daemon=True)
        self._thread.start()

    def write(
        self, tensors: Mapping[str, Tensor], commit: Callable[[Mapping[str, str]], None]
    ) -> None:
        """Queue tensors to be written, after waiting for the block before to be durable.

        ``commit`` is called on the writer's thread with their hashes, once they are durable.
        """
        self._raise_failure()
        on_host = self._writer.as_planned(tensors)
        self.flush()  # a longer queue would only take memory
        self._jobs.put(lambda: commit(self._writer.write(on_host, durable=True)))

    def flush(self) -> None:
        """Wait until everything is durable and committed."""
        self._jobs.join()
        self._raise_failure()

    def digests_of(self, groups: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Return the hash of the stored bytes of several groups of tensors, on all cores."""
        digests_of = self._writer.digests_of
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = {key: pool.submit(digests_of, names) for key, names in groups.items()}
            return {key: digest_of(future.result()) for key, future in found.items()}

    def close(self) -> None:
        """Stop the thread, even after a failed write, and close the files."""
        self._jobs.put(None)
        self._thread.join()
        self._writer.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # raised again where the next block is handed over
                self._failure = error
            finally:
                del job
                self._jobs.task_done()
        self._jobs.task_done()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class ScratchBlocks:
    """Dense blocks between two passes over a model, one file each, with modifiers' parameters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, stage: int, block: str, tensors: Mapping[str, Tensor]) -> str:
        """Store a block of a pass durably and return its hash."""
        apart: dict[str, Tensor] = {}  # contiguous tensors on the CPU that share no memory
        seen: set[int] = set()
        for name, tensor in tensors.items():
            value = tensor.detach().to("cpu").contiguous()
            apart[name] = value.clone() if value.data_ptr() in seen else value
            seen.add(apart[name].data_ptr())
        durable.make_folder(self._folder)
        durable.replace(self._file(stage, block), lambda new: save_file(apart, new))
        return self.read(stage, block)[1]

    def remove(self, stage: int, block: str) -> None:
        """Delete a block's file, if it exists."""
        self._file(stage, block).unlink(missing_ok=True)

    def digest(self, stage: int, block: str) -> str | None:
        """Return the hash of a block's data; ``None`` if it is missing or damaged."""
        try:
            return self.read(stage, block)[1]
        except (OSError, CheckpointError):
            return None

    def _file(self, stage: int, block: str) -> Path:
        return self._folder / f"{stage}-{block}.safetensors"

    def read(self, stage: int, block: str) -> tuple[dict[str, Tensor], str]:
        """Return the tensors of a block by their names in the model, on the CPU, and their hash."""
        digest = xxhash.xxh3_128()
        tensors = {}
        headers = read_header(self._file(stage, block))
        for name, tensor in read_tensors(dict(sorted(headers.items()))):
            digest.update(bytes_of(tensor))
            tensors[name] = tensor
        return tensors, digest.hexdigest()
