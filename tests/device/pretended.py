# SPDX-License-Identifier: Apache-2.0
"""An accelerator that is only pretended, for processes that want to see code on a device run.

It has to be there before torch is imported, which asks for devices once; so nothing here imports
torch at the top, and a process calls :func:`pretend` first of all. It cannot be taken back.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Device", "compile_device", "pretend"]

SOURCE = Path(__file__).with_name("pretended.cpp")
_HIGHER = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def compile_device(folder: Path) -> Path:
    """The compiled device, made in ``folder`` with torch's headers and nothing else.

    Raises:
        RuntimeError: there is no compiler, or it refuses; says why.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler")
    torch = _torch()
    library = folder / "pretended.so"
    command = [compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", str(SOURCE)]
    command += [
        "-o",
        str(library),
        f"-I{torch}/include",
        f"-I{torch}/include/torch/csrc/api/include",
    ]
    command += [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"{Path(compiler).name} says: {made.stderr[:2000]}")
    return library


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


class Device:
    """What is known of the device's memory.

    Args:
        library: as :func:`compile_device` made it.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name in ("in_use", "peak", "capacity"):
            getattr(self._library, f"device_{name}").restype = ctypes.c_int64
        self._called: Any = None
        self.held = 0
        """Bytes that torch's allocator keeps for nobody, until its cache is emptied."""

    @property
    def in_use(self) -> int:
        """Bytes of all tensors there."""
        return int(self._library.device_in_use())

    @property
    def peak(self) -> int:
        """The most since :meth:`reset_peak`."""
        return int(self._library.device_peak())

    @property
    def capacity(self) -> int:
        """Bytes that it has."""
        return int(self._library.device_capacity())

    @capacity.setter
    def capacity(self, size: int) -> None:
        self._library.device_set_capacity(ctypes.c_int64(size))

    @property
    def left(self) -> int:
        """Bytes that are neither in use nor held."""
        return self.capacity - self.in_use - self.held

    def let_go(self) -> None:
        """Hold nothing for nobody."""
        self.held = 0

    def reset_peak(self) -> None:
        """Measure anew from here on."""
        self._library.device_reset_peak()

    def when_higher(self, call: Callable[[int], None]) -> None:
        """Have ``call`` told each new peak, in the thread and at the place that makes it."""
        self._called = _HIGHER(call)
        self._library.device_when_higher(self._called)


def pretend(library: Path) -> Device:
    """Give this process a device "cuda".

    Args:
        library: as :func:`compile_device` made it.
    """
    device = Device(library)

    import torch

    if not torch.cuda.is_available():  # this build of torch lacks Python's side of it
        _answer(torch.cuda, device, torch)
        _answer_for_accelerators(torch.accelerator, device, torch)
    return device


def _answer(cuda: Any, device: Device, torch: Any) -> None:
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.set_device = lambda of=None: None
    cuda.synchronize = lambda of=None: None
    cuda.empty_cache = device.let_go
    cuda.get_device_capability = lambda of=None: (9, 0)
    cuda.get_device_name = lambda of=None: "pretended"
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.mem_get_info = lambda of=None: (device.left, device.capacity)
    cuda.memory_reserved = lambda of=None: device.in_use + device.held
    cuda.memory_allocated = lambda of=None: device.in_use
    cuda.max_memory_allocated = lambda of=None: device.peak
    cuda.reset_peak_memory_stats = lambda of=None: device.reset_peak()
    # What is drawn there is drawn by the generator of the CPU, whose state is kept anyway.
    for module in (cuda, cuda.random):
        module.manual_seed = lambda seed: None
        module.manual_seed_all = lambda seed: None
        module.get_rng_state = lambda of="cuda": torch.get_rng_state()
        module.get_rng_state_all = lambda: [torch.get_rng_state()]
        module.set_rng_state = lambda state, of="cuda": None
        module.set_rng_state_all = lambda states: None


def _answer_for_accelerators(accelerator: Any, device: Device, torch: Any) -> None:
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cuda")
    accelerator.device_count = lambda: 1
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = lambda of=None: None
    accelerator.synchronize = lambda of=None: None
    accelerator.empty_cache = device.let_go
    accelerator.get_memory_info = lambda of=None: (device.left, device.capacity)
    accelerator.memory_reserved = lambda of=None: device.in_use + device.held
    accelerator.memory_allocated = lambda of=None: device.in_use
    accelerator.max_memory_allocated = lambda of=None: device.peak
    accelerator.reset_peak_memory_stats = lambda of=None: device.reset_peak()
