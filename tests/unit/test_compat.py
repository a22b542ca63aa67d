# SPDX-License-Identifier: Apache-2.0
"""Every import path of an earlier release has its names, and loads nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import llmcompressor
import llmcompressor.modifiers.obcq.base as by_alias
from llmcompressor._compat import ABSENT, OLD_PATHS
from llmcompressor.modifiers.sparsity import SparseGPTModifier
from llmcompressor.runtime.registry import resolve

SOURCE = Path(llmcompressor.__file__).parent
OF_A_LATER_TRANSFORMERS = {"DeepseekV32ForCausalLM"}


def _import(old: str) -> ModuleType:
    return importlib.import_module(f"llmcompressor.{old}")


@pytest.mark.parametrize("old", OLD_PATHS)
def test_each_module_has_its_names_and_says_where_they_are(old: str) -> None:
    module, homes = _import(old), OLD_PATHS[old]
    names = {name for name in homes if "*" not in name}
    assert set(module.__all__) == names
    assert names <= set(dir(module))
    for name in names - OF_A_LATER_TRANSFORMERS:
        assert getattr(module, name) is resolve(homes[name])
    assert importlib.util.find_spec(module.__name__) is module.__spec__
    assert all(home.replace(":", ".") in str(module.__doc__) for home in homes.values())
    parent, _, child = module.__name__.rpartition(".")
    assert getattr(sys.modules[parent], child) is module


def test_no_row_hides_a_file_or_lacks_its_parent() -> None:
    for old in OLD_PATHS:
        place = SOURCE.joinpath(*old.split("."))
        assert not place.with_suffix(".py").exists()
        assert not (place / "__init__.py").exists()
        parent = old.rpartition(".")[0]
        assert not parent or parent in OLD_PATHS or (place.parent / "__init__.py").exists(), old


@pytest.mark.parametrize(("old", "name"), [(old, one) for old in ABSENT for one in ABSENT[old]])
def test_an_absent_name_tells_the_remedy(old: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"There is no {name} in this package: ") as error:
        getattr(_import(old), name)
    assert ABSENT[old][name] in str(error.value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'llmcompressor\.transformers' has no .* 'oneshto'"):
        _import("transformers").oneshto  # noqa: B018
    with pytest.raises(ImportError, match="oneshto"):
        exec("from llmcompressor.transformers import oneshto", {})
    with pytest.raises(ModuleNotFoundError, match=r"llmcompressor\.transformers\.nothing"):
        _import("transformers.nothing")


def test_each_way_to_import() -> None:
    assert by_alias.SparseGPTModifier is SparseGPTModifier
    assert llmcompressor.modifiers.obcq.base is by_alias
    everything: dict[str, object] = {}
    exec("from llmcompressor.transformers.data import *", everything)
    assert set(OLD_PATHS["transformers.data"]) <= set(everything)
    assert _import("transformers").sparsification.sparse_model.__name__ in sys.modules
    assert importlib.reload(by_alias) is by_alias


def test_a_class_is_unpickled_by_its_old_path() -> None:
    old = b"\x80\x04\x8c!llmcompressor.modifiers.obcq.base\x8c\x11SparseGPTModifier\x93."
    assert pickle.loads(old) is SparseGPTModifier


def test_names_can_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "llmcompressor.transformers.finetune.text_generation.oneshot"
    module = _import("transformers.finetune.text_generation")
    with mock.patch(path) as patched:
        assert module.oneshot is patched
    assert module.oneshot is llmcompressor.oneshot
    with monkeypatch.context() as context:
        context.setattr(path, print)
        assert module.oneshot is print
    assert module.oneshot is llmcompressor.oneshot


def test_one_name_loads_nothing_else() -> None:
    code = """if True:
        import sys
        from llmcompressor.transformers import ModelArguments
        from llmcompressor.transformers.finetune.data import data_args
        import llmcompressor.pytorch.utils.helpers
        print(*sys.modules)
    """
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    loaded = set(run.stdout.split())
    assert not loaded & {"torch", "transformers", "llmcompressor.utils", "llmcompressor.datasets"}


def test_a_folder_left_behind_hides_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytorch" / "__pycache__").mkdir(parents=True)
    monkeypatch.setattr(llmcompressor, "__path__", [str(tmp_path), *llmcompressor.__path__])
    monkeypatch.delitem(sys.modules, "llmcompressor.pytorch", raising=False)
    found = importlib.util.find_spec("llmcompressor.pytorch")
    assert found is not None
    assert found.origin == str(SOURCE / "_compat.py")
