# SPDX-License-Identifier: Apache-2.0
"""Architecture by format, as docs/serving.md says: written, and read by transformers alone."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.house import ROOT
from tests.support import tiny_models as tiny
from torch import Tensor
from torch.nn import Module

from llmcompressor import oneshot, reset_session
from llmcompressor.errors import TargetError
from llmcompressor.logger import logger
from llmcompressor.modifiers.quantization import QuantizationModifier

READER = """
import sys, torch, transformers

folder, (inputs, options) = sys.argv[1], torch.load(sys.argv[2])
config = transformers.AutoConfig.from_pretrained(folder)
cls = getattr(transformers, config.architectures[0])
try:
    model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
except Exception as error:
    found = (None, type(error).__name__)
else:
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    found = (logits, sorted({*info["missing_keys"], *info["unexpected_keys"]}))
assert not any(name.partition(".")[0] == "llmcompressor" for name in sys.modules)
torch.save(found, sys.argv[3])
"""

PAGE = ROOT / "docs" / "serving.md"
HEADING = "### What transformers reads of which architecture"
FORMATS: dict[str, dict[str, Any]] = {
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC", "targets": ["Linear"]},
    "W8A8": {"scheme": "W8A8", "targets": ["Linear"]},
    # The preset's groups of 128 columns are more than these models have.
    "W4A16": {
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}
        }
    },
    "NVFP4A16": {"scheme": "NVFP4A16", "targets": ["Linear"]},
}


def _table() -> dict[tuple[str, str], str]:
    """The page's table: architecture and format → what becomes of it."""
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][1:] == list(FORMATS)
    known = {name.replace("_", ""): name for name in tiny.ARCHITECTURES}
    names = [known[re.sub(r"\W", "", row[0].lower())] for row in rows[1:]]
    assert sorted(names) == sorted(tiny.ARCHITECTURES)
    return {
        (name, form): cell
        for name, row in zip(names, rows[1:], strict=True)
        for form, cell in zip(FORMATS, row[1:], strict=True)
    }


TABLE = _table()
READ = [case for case, cell in TABLE.items() if cell != "refused"]
OF_FAILURES = {"L2": "AttributeError", "T6": "RuntimeError"}


@dataclass(frozen=True)
class Outcome:
    """Both sides of one case."""

    original: Tensor
    written: Tensor
    unrounded: Tensor
    said: str
    read: Tensor | None
    trouble: str | list[str]


def _always_run() -> set[tuple[str, str]]:
    """Of each architecture one format at least, and one for everything that is said of it."""
    places = {name: place for place, name in enumerate(tiny.ARCHITECTURES)}
    forms = list(FORMATS)
    found = set()
    for name, place in places.items():
        turned = [forms[(place + turn) % len(forms)] for turn in range(len(forms))]
        told: dict[str, str] = {}
        for form in turned:
            told.setdefault(TABLE[name, form], form)
        found |= {(name, form) for form in told.values()}
    return found


def _cases() -> list[Any]:
    always = _always_run()
    return [
        pytest.param(case, marks=[] if case in always else [pytest.mark.slow], id="-".join(case))
        for case in READ
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the original models are."""
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture
def outcome(
    case: tuple[str, str], source: Path, tmp_path: Path, read_alone: Callable[..., None]
) -> Outcome:
    """Of an architecture and a format."""
    name, form = case
    written = _write(name, form, source / name, tmp_path / "out")
    options = {"experts_implementation": "eager"} if _is_mixture(name) else {}
    torch.save((_batches(name)[0], options), tmp_path / "given.pt")
    read_alone(READER, tmp_path / "out", tmp_path / "given.pt", tmp_path / "found.pt")
    return Outcome(*written, *torch.load(tmp_path / "found.pt"))


def _is_mixture(name: str) -> bool:
    return name in ("mixtral", "qwen3_moe")


def _batches(name: str) -> list[dict[str, Tensor]]:
    """Its batches; what is no token is in bfloat16."""
    return [
        {
            key: value.bfloat16() if value.is_floating_point() else value
            for key, value in one.items()
        }
        for one in tiny.ARCHITECTURES[name].batches()
    ]


def _logits(model: Module, name: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**_batches(name)[0]).logits
    return found


def _write(name: str, form: str, source: Path, folder: Path) -> tuple[Tensor, Tensor, Tensor, str]:
    """Write one case; the first three fields of its outcome, and the fourth."""
    if not source.exists():
        tiny.build(name).bfloat16().save_pretrained(source)
    recipe = QuantizationModifier(**FORMATS[form], ignore=tiny.ARCHITECTURES[name].ignore)
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), format="{message}")
    model = oneshot(source, recipe, output_dir=folder)
    logger.remove(sink)
    reset_session()
    written = _logits(model, name)
    _let_experts_round_no_inputs(model)
    said = "".join(line for line in lines if line.startswith("transformers would"))
    return _original(name, source), written, _logits(model, name), said


@functools.cache
def _original(name: str, source: Path) -> Tensor:
    return _logits(type(tiny.build(name)).from_pretrained(source), name)


def _let_experts_round_no_inputs(model: Module) -> None:
    for name, module in model.named_modules():
        if "experts." in name and hasattr(module, "quantization_scheme"):
            module.quantization_scheme = copy.copy(module.quantization_scheme)
            module.quantization_scheme.input_activations = None


@pytest.mark.parametrize("case", _cases())
def test_what_the_page_says_of_an_architecture(case: tuple[str, str], outcome: Outcome) -> None:
    """Both ways: what reads is not warned of, and what does not is."""
    cell = TABLE[case]
    assert not torch.equal(outcome.written, outcome.original)
    if cell == "equal":
        assert outcome.trouble == []
        assert torch.equal(outcome.read, outcome.written)
        assert "load or run" not in outcome.said
        assert ("with a limit (L3)" in outcome.said) == (case[0] in ("t5", "whisper"))
        assert "T6" not in outcome.said
    elif cell == "weights":
        assert outcome.trouble == []
        assert not torch.equal(outcome.read, outcome.written)
        assert torch.equal(outcome.read, outcome.unrounded), "the only difference"
        assert outcome.said.count("\n") == 1
        assert "load this, with a limit (T6)" in outcome.said
        assert "does not round what goes into its experts" in outcome.said
    else:
        rule = cell.removeprefix("not (").removesuffix(")")
        is_noise = outcome.read is not None
        assert is_noise or outcome.trouble == OF_FAILURES[rule]
        # some releases collect all tensors of experts, and lose what they cannot use without a word
        assert not is_noise or not torch.allclose(outcome.read, outcome.written, atol=0.05)
        assert outcome.said.count("\n") == 1
        assert f"transformers would not load or run this ({rule})" in outcome.said
        # of Mamba vLLM builds the mixers plain
        assert ("vLLM" in outcome.said) == (case[0] != "mamba")
        assert ("Ignore these modules" in outcome.said) == (rule == "L2")
        assert ("Ignore these modules" in outcome.said) == (rule == "L2")


@pytest.mark.parametrize("case", sorted(TABLE.keys() - set(READ)), ids="-".join)
def test_what_the_page_calls_refused_is(case: tuple[str, str], tmp_path: Path) -> None:
    name, form = case
    recipe = QuantizationModifier(**FORMATS[form], ignore=tiny.ARCHITECTURES[name].ignore)
    with pytest.raises(TargetError, match="no reader knows a quantized Conv1D"):
        oneshot(tiny.build(name), recipe, output_dir=tmp_path / "out")
    assert not list(tmp_path.iterdir())
