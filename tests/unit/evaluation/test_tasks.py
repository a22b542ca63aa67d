# SPDX-License-Identifier: Apache-2.0
"""Our side of lm-eval, with a stand-in for it; lm-eval itself where it is installed (slow)."""

from __future__ import annotations

import copy
import fnmatch
import json
import random
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.short_pico import write_short_pico
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llmcompressor import evaluate
from llmcompressor.errors import ArgumentError, DatasetError
from llmcompressor.evaluation.metrics import TaskScore

WHERE = "llmcompressor.evaluation.tasks"
NOWHERE = "./no-such-model"
"""Told of only where nothing was wrong before a model is loaded."""


class StandIn:
    """What we call of lm-eval; it scores a model by a logit, and remembers how it was called."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.marks: dict[str, bool] = {}
        self.broken = False

    def TaskManager(self, include_path: str | None) -> Any:  # noqa: N802
        self.folder = include_path
        names = ["gsm8k", "hellaswag", "mmlu", "mmlu_anatomy"]
        return SimpleNamespace(
            all_tasks=names,
            match_tasks=lambda asked: [one for one in names if fnmatch.fnmatch(one, asked[0])],
            load=self.load,
        )

    def load(self, names: list[str]) -> dict[str, Any]:
        if self.broken:
            raise ConnectionError("no route\nto data.")
        groups = {"mmlu": "the group"} if names == ["mmlu"] else {}
        task = SimpleNamespace(name=names[0], **self.marks)
        return {"tasks": {names[0]: task}, "groups": groups}

    def simple_evaluate(self, adapter: Any, **given: Any) -> dict[str, Any]:
        assert not adapter.pretrained.training
        self.calls.append({**given, "batch_size": adapter.batch_size})
        adapter.tokenizer.pad_token = "<lm-eval>"
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1234)
        logits = adapter.pretrained(torch.tensor([[5, 6]])).logits
        return {
            "results": {
                "gsm8k": {
                    "alias": "gsm8k",
                    "sample_len": 7,
                    "exact_match,strict-match": float(logits[0, 0, 0]),
                    "exact_match_stderr,strict-match": "N/A",
                    "perplexity,none": np.float64(3.5),
                    "perplexity_stderr,none": 0.25,
                },
                "mmlu": {"alias": " - mmlu", "acc,none": " ", "acc_stderr,none": " "},
            },
            "higher_is_better": {"gsm8k": {"exact_match": True, "perplexity": False}},
            "n-samples": {"gsm8k": {"original": 100, "effective": 7}},
            "n-shot": {"gsm8k": 5},
        }


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": made.simple_evaluate},
        "lm_eval.tasks": {"TaskManager": made.TaskManager},
        "lm_eval.evaluator": {"get_git_commit_hash": lambda: "abc"},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": SimpleNamespace},
    }
    for name, held in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture(scope="module")
def model(pico: Path, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """The first block of the embedded model."""
    folder = write_short_pico(pico, tmp_path_factory.mktemp("short") / "pico", dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def other(model: PreTrainedModel) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_input_embeddings().weight.mul_(1.1)
    return changed


# --------------------------------------------------------------------- before a model is loaded


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{WHERE}.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"pip install 'llmcompressor\[eval\]'"):
        evaluate(NOWHERE, tasks="gsm8k")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tasks": "gms8k"}, "no task 'gms8k'. Did you mean gsm8k?"),
        ({"tasks": ["gsm8k", "zzz"]}, r"no task 'zzz'. `lm_eval ls tasks`"),
        ({"tasks": "xyz_*"}, "no task 'xyz_"),
        ({"tasks": "./gone.yaml"}, "no task './gone.yaml'"),
        ({"tasks": []}, "'tasks' cannot be"),
        ({"tasks": "gsm8k,"}, "'tasks' cannot be"),
        ({"tasks": 3}, "'tasks' cannot be 3"),
        ({"tasks": "gsm8k", "include_path": "./gone"}, "no folder ./gone of tasks"),
        ({"tasks": "gsm8k", "limit": 0}, "'limit' cannot be 0"),
        ({"tasks": "gsm8k", "num_fewshot": -1}, "'num_fewshot' cannot be -1"),
        ({"tasks": "gsm8k", "num_samples": 8}, "'num_samples' is of a text.*Give 'dataset'"),
        ({"tasks": "gsm8k", "split": "test"}, "'split' is of a text"),
        ({"limit": 8}, "'limit' is of tasks.*Give 'tasks'"),
        ({"include_path": "."}, "'include_path' is of tasks"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    given: dict[str, Any], told: str, stand_in: StandIn
) -> None:
    with pytest.raises(ArgumentError, match=told):
        evaluate(NOWHERE, **given)


@pytest.mark.parametrize("mark", ["UNSAFE_CODE", "MULTIMODAL"])
def test_tasks_that_are_not_for_us(mark: str, stand_in: StandIn) -> None:
    stand_in.marks = {mark: True}
    with pytest.raises(ArgumentError, match=r"The task gsm8k .* `lm_eval`"):
        evaluate(NOWHERE, tasks="gsm8k")


def test_data_that_cannot_be_loaded(stand_in: StandIn) -> None:
    stand_in.broken = True
    with pytest.raises(DatasetError, match=r"task gsm8k: ConnectionError: no route to data\. Its"):
        evaluate(NOWHERE, tasks="gsm8k")


def test_several_processes(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="one process"):
        evaluate(NOWHERE, tasks="gsm8k")


def test_a_model_without_a_tokenizer(stand_in: StandIn, model: PreTrainedModel) -> None:
    alone = copy.deepcopy(model)
    alone.config.name_or_path = ""
    with pytest.raises(DatasetError, match=r"Tasks are texts.*Pass `tokenizer`"):
        evaluate(alone, tasks="gsm8k")
    with pytest.raises(ArgumentError, match="this one is a function"):
        evaluate(alone, tasks="gsm8k", tokenizer=lambda text: text)


# ---------------------------------------------------------------------------------- what is found


def test_scores_are_those_of_lm_eval(
    stand_in: StandIn, model: PreTrainedModel, other: PreTrainedModel, tmp_path: Path
) -> None:
    found = evaluate(
        model,
        reference=other,
        tasks="gsm8k, mmlu*",
        limit=7,
        num_fewshot=5,
        include_path=tmp_path,
        batch_size=3,
    )
    ids = torch.tensor([[5, 6]])
    own, of_other = (one(ids).logits[0, 0, 0].item() for one in (model, other))
    assert own != of_other
    same: dict[str, Any] = {"samples": 7, "num_fewshot": 5}
    assert found.tasks == (
        TaskScore(
            "gsm8k", "exact_match (strict-match)", own, None, True, **same, reference=of_other
        ),
        TaskScore(
            "gsm8k", "perplexity", 3.5, 0.25, False, **same, reference=3.5, reference_stderr=0.25
        ),
    )
    assert (found.tokens, found.loss, found.perplexity) == (0, None, None)
    assert json.loads(json.dumps(found.as_dict()))["tasks"][1]["reference_stderr"] == 0.25
    assert stand_in.folder == str(tmp_path)
    for call in stand_in.calls:
        assert (call["limit"], call["num_fewshot"], call["batch_size"]) == (7, 5, 3)
        first, group, of_pattern = call["tasks"]
        assert (first.name, group, of_pattern.name) == ("gsm8k", "the group", "mmlu_anatomy")
    assert len(stand_in.calls) == 2


def test_a_text_is_measured_only_if_it_is_named(stand_in: StandIn, model: PreTrainedModel) -> None:
    both = evaluate(model, tasks="gsm8k", dataset=["import os\n" * 20], max_seq_length=32)
    assert both.tokens > 0
    assert both.tasks == evaluate(model, tasks="gsm8k").tasks
    assert both.tasks[0].reference is None


def test_nothing_of_the_caller_is_changed(
    stand_in: StandIn, model: PreTrainedModel, pico: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pico)
    padding, of_python = tokenizer.pad_token, random.getstate()
    of_numpy, of_torch = np.random.get_state()[1].tolist(), torch.get_rng_state()
    model.train()
    evaluate(model, tokenizer=tokenizer, tasks="gsm8k")
    assert model.training
    model.eval()
    assert tokenizer.pad_token == padding
    assert random.getstate() == of_python
    assert np.random.get_state()[1].tolist() == of_numpy
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert sys.modules["lm_eval.evaluator"].get_git_commit_hash() == "abc"


# ----------------------------------------------------------------------------------- lm-eval itself

ROWS = [
    {"context": "import", "choices": ["os", "q"]},
    {"context": "x =", "choices": ["1", "def"]},
    {"context": "def f(", "choices": ["self", "while"]},
    {"context": "for i in", "choices": ["range", "#"]},
]


@pytest.mark.slow  # lm-eval looks through all of its tasks, each time
@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_local_files_have_the_scores_of_lm_eval_alone(
    pico: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    task = {
        "task": "next_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task), encoding="utf-8")
    with pytest.raises(ArgumentError, match="Did you mean next_word"):
        evaluate(pico, tasks="next_wrod", include_path=tmp_path)
    given: dict[str, Any] = {"limit": 3, "num_fewshot": 1}
    found = evaluate(pico, reference=pico, tasks="next_word", include_path=tmp_path, **given)
    assert not any(capfd.readouterr())
    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(pico), "dtype": "auto"},
        tasks=["next_word"],
        task_manager=TaskManager(include_path=str(tmp_path)),
        device="cpu",
        **given,
    )["results"]["next_word"]
    assert {one.metric for one in found.tasks} == {"acc", "acc_norm"}
    for one in found.tasks:
        assert one.value == one.reference == expected[f"{one.metric},none"]
        assert one.stderr == expected[f"{one.metric}_stderr,none"]
        assert (one.samples, one.num_fewshot, one.higher_is_better) == (3, 1, True)
