# SPDX-License-Identifier: Apache-2.0
"""Importing loads little and changes nothing; each case is a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
from tests.support.rings import RINGS

EVERYTHING = [
    "llmcompressor.args",
    "llmcompressor.checkpoint.save",
    "llmcompressor.session.functions",
    "llmcompressor.datasets",
    "llmcompressor.entrypoints.evaluate",
    "llmcompressor.entrypoints.oneshot",
    "llmcompressor.entrypoints.stages",
    "llmcompressor.entrypoints.train",
    "llmcompressor.entrypoints.verify",
    "llmcompressor.modeling",
    "llmcompressor.modifiers.distillation.output",
    "llmcompressor.modifiers.gptq",
    "llmcompressor.modifiers.pruning.gradual",
    "llmcompressor.modifiers.quantization.rounding",
    "llmcompressor.modifiers.sparsity",
    "llmcompressor.observers",
    "llmcompressor.pipelines",
    "llmcompressor.recipe",
    "llmcompressor.schemes",
    "llmcompressor.training",
    "llmcompressor.transformers.sparsification",
    "llmcompressor.utils",
    "llmcompressor.verification.check",
]
# What others' libraries set when they are imported is theirs: they are imported first.
SETTINGS = (
    RINGS
    + """
import gc, importlib, json, os, sys, warnings, weakref
import torch, torch._dynamo, transformers, compressed_tensors, accelerate, datasets
from torch._inductor import config as inductor

def settings():
    return {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "dynamo": repr(torch._dynamo.config.get_config_copy()),
        "inductor": repr(inductor.get_config_copy()),
        "random": torch.random.get_rng_state().sum().item(),
        "verbosity": transformers.utils.logging.get_verbosity(),
        "filters": repr(warnings.filters),
        "cuda": torch.cuda.is_initialized(),
        "excepthook": repr(sys.excepthook),
        "from_pretrained": repr(vars(transformers.PreTrainedModel)["from_pretrained"].__func__),
        "save_pretrained": repr(transformers.PreTrainedModel.save_pretrained),
    }

ring_before, before = Ring(), settings()
exempted_before = gc.get_freeze_count()  # some Pythons begin with objects of their own
from llmcompressor import oneshot
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after, ring_after = settings(), Ring()
changed = [key for key in before if before[key] != after[key]]
exempted, searches = gc.get_freeze_count() - exempted_before, gc.isenabled()
rings = weakref.ref(ring_before), weakref.ref(ring_after)
del ring_before, ring_after
print(json.dumps([changed, exempted, searches, *map(is_found, rings)]))
"""
)


def run(code: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_front_page_loads_nothing_heavy() -> None:
    code = """
import os, sys
environment, paths = dict(os.environ), list(sys.path)
import llmcompressor
assert dict(os.environ) == environment and sys.path == paths
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    loaded = set(run(code).split())
    assert not loaded & {"torch", "transformers", "pydantic", "loguru", "numpy", "rich", "typer"}


@pytest.mark.parametrize(
    "module",
    [
        "llmcompressor.args",
        "llmcompressor.cli.app",
        "llmcompressor.core",
        "llmcompressor.core.events",
        "llmcompressor.entrypoints",
        "llmcompressor.errors",
        "llmcompressor.logger",
        "llmcompressor.modifiers",
        "llmcompressor.modifiers.pruning",
        "llmcompressor.modifiers.quantization",
        "llmcompressor.runtime.registry",
        "llmcompressor.transformers",
    ],
)
def test_light_pages_load_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run(code).split() == ["False", "False"]


@functools.cache
def _after_everything() -> list[object]:
    """Settings that changed; then what became of the search for cycles, and what it finds."""
    found: list[object] = json.loads(run(SETTINGS, json.dumps(EVERYTHING)))
    return found


def test_importing_everything_changes_no_setting() -> None:
    assert _after_everything()[0] == []


def test_after_torch_nothing_is_exempted_from_the_cycle_search() -> None:
    """``tests/unit/runtime/test_registry.py`` has the other case."""
    assert _after_everything()[1:] == [0, True, True, True]


@pytest.mark.parametrize(
    "command", [[], ["oneshot"], ["train"], ["run"], ["plan"], ["verify"], ["model-free-ptq"]]
)
def test_help_loads_nothing_that_takes_long(command: list[str]) -> None:
    """``benchmarks/startup.py`` says how long it takes."""
    code = """if True:
        import json, sys
        from llmcompressor.cli import main
        try:
            main([*json.loads(sys.argv[1]), "--help"])
        except SystemExit:
            print(json.dumps(sorted(sys.modules)))
    """
    loaded = json.loads(run(code, json.dumps(command)).splitlines()[-1])
    assert "llmcompressor.cli.app" in loaded
    heavy = {"rich", "torch", "transformers", "numpy", "compressed_tensors", "loguru", "yaml"}
    assert heavy.isdisjoint(loaded)
