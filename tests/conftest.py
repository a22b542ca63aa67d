# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders share."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("PYTEST_XDIST_WORKER"):
    # Before torch is loaded: workers that share the cores must not each start a thread on all.
    _workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _workers))

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the first run of each warns of it
# a tenth of a second of each run, and a page tells times; tests/unit/reporting has it made
os.environ.setdefault("LLM_COMPRESSOR_REPORT", "0")

multiprocessing.set_forkserver_preload(["tests.support.forked_from"])


_READERS = """
import json, os, sys, traceback
import compressed_tensors, torch, transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # of all model types, and kept
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    sys.argv, code = ["-c", *order["arguments"]], 1
    with open(order["log"], "w") as log:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        try:
            exec(order["code"], {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)
"""


@pytest.fixture(scope="session")
def read_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Runs code, as ``python -W error -c`` would, where nobody has imported the project.

    Each call is a process of its own, forked from one that has imported transformers.
    """
    log = tmp_path_factory.mktemp("alone") / "log"
    command = [sys.executable, "-W", "error", "-c", _READERS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as readers:
        assert readers.stdin is not None
        assert readers.stdout is not None

        def run(code: str, *arguments: object) -> None:
            order = {"code": code, "arguments": list(map(str, arguments)), "log": str(log)}
            print(json.dumps(order), file=readers.stdin, flush=True)
            assert readers.stdout.readline() == "0\n", log.read_text()[-3000:]

        yield run
        readers.stdin.close()


@pytest.fixture(scope="session")
def pico() -> Iterator[Path]:
    """The embedded model: four layers, tied embeddings, with its tokenizer."""
    with as_file(files("llmcompressor") / "data" / "pico-stdlib") as folder:
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Whether what is written survives a crash of the machine no test can see."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: None)
        patched.setattr(os, "fdatasync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_housekeeping() -> Iterator[None]:
    """Thousands of tests in one process leave a heap of many pieces, which takes long to look over.

    Freed memory is returned in the tests that are about it and in processes of their own.
    """
    from llmcompressor.runtime import memory

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "_unused_heap_bytes", lambda library: 0.0)
        if "torch" in sys.modules:  # else nothing is trained here
            import accelerate.utils.memory as housekeeping

            patched.setattr(housekeeping, "clear_device_cache", lambda **options: None)
        yield


@contextmanager
def _asked_once(owner: Any, name: str, key: Callable[..., object]) -> Iterator[None]:
    """A function of a module that is called once for each ``key`` of its arguments."""
    function, found = getattr(owner, name), dict[object, Any]()

    def once(*arguments: Any) -> Any:
        asked = key(*arguments)
        if asked not in found:
            found[asked] = function(*arguments)
        return found[asked]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _what_stays_the_same_is_asked_once() -> Iterator[None]:
    """What the machine does in a second, and what a class makes of the same names and shapes.

    Every plan measures the one anew, and every check of files builds the other.
    """
    if "torch" not in sys.modules:  # nothing is planned or checked here
        yield
        return
    from llmcompressor.planning import make
    from llmcompressor.verification import transformers_model

    def headers_for(kind: object, settings: Any, headers: Any) -> object:
        told = json.dumps(settings.to_dict(), sort_keys=True, default=str)
        return kind, told, tuple(headers.items())

    with (
        _asked_once(make, "measure_rates", lambda device, dtype, folder=None: (device, dtype)),
        _asked_once(transformers_model, "_load", headers_for),
    ):
        yield


@pytest.fixture(autouse=True)
def _fresh_session() -> Iterator[None]:
    """What a test leaves in the default session is gone before the next."""
    from llmcompressor import reset_session  # after the number of threads is set

    reset_session()
    yield
    reset_session()


@pytest.fixture
def _products_as_before() -> Iterator[None]:
    """Whatever a test allows for products of float32, the next one finds torch's defaults.

    A setting for products of matrices that was made once, if only by the older call, is no longer
    inherited from the general one.
    """
    yield
    import torch

    backends: Any = torch.backends
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for one in (backends.cuda, backends.mkldnn):
        one.matmul.fp32_precision = "none"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged, one line each."""
    from llmcompressor.logger import logger

    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).rstrip()), format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What is logged as a warning."""
    from llmcompressor.logger import logger

    heard: list[str] = []
    sink = logger.add(lambda text: heard.append(str(text)), level="WARNING", format="{message}")
    yield heard
    logger.remove(sink)


def pytest_collection_finish() -> None:
    """Take what is imported and collected out of the search for garbage: it is there to stay.

    ``gc.collect``, which accelerate calls after every training, would go over it each time.
    """
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave helpers out: looking for doctests in them would import each a second time.

    A modifier that is defined in one would then be there twice under one name.
    """
    name = collection_path.name
    is_helper = collection_path.suffix == ".py" and not name.startswith(("test_", "conftest"))
    return True if is_helper and Path(__file__).parent in collection_path.parents else None


@pytest.fixture
def log() -> Iterator[list[tuple[str, str]]]:
    """What is logged from INFO on: level and text."""
    from llmcompressor.logger import logger  # after the threads are set

    lines: list[tuple[str, str]] = []

    def sink(message: Any) -> None:
        lines.append((message.record["level"].name, message.record["message"]))

    handle = logger.add(sink, level="INFO")
    yield lines
    logger.remove(handle)
